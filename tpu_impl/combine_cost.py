# SPDX-License-Identifier: Apache-2.0
"""The two ways `combine_kernel` brings rows on the chip, what each takes, and which one a build takes.

* A DMA for each pair: scalar instructions bound it, but only rows that are wanted come.
* All rows, by one DMA or by one for each panel of columns: vector loads then find a row by its number. Nothing is
  summed before the first panel is there, and the next one comes in while it is summed.

Both give the same bits. Bundles are those of libtpu's schedules at K 8, of rows of 1024 to 6144 columns, with what a
token's sum costs after its last pair.
"""

from __future__ import annotations

from .generations import Generation
from .spec import LANES, KernelSpec, round_up

MOST_PANELS = 3
"""More would cost their scalar instructions more often than they are worth."""
TILE = {1: 8, 2: 16}
"""Sublanes of a row's on-chip tile, by bytes of an element; panels are cut at multiples of it."""
RESERVE = 4 << 20
"""On-chip bytes for what is not rows: sums, results under way, the compiler's own."""
SKIPPED = 8
"""Bundles more for each pair's DMA where some may be skipped."""


def summed_rows(spec: KernelSpec) -> int:
    """Rows that `combine_kernel` adds on one device, or skips.

    A push leaves K rows a local token, presum one a device, and a reduce-scatter sums K rows of every token here.
    """
    return {"push": spec.local_rows, "pres": spec.tokens}.get(spec.transport[:4], spec.capacity)


def panels_that_fit(count: int, hidden: int, item: int, vmem_limit_bytes: int) -> list[int]:
    """Panels of columns in which `count` rows of `item` bytes an element may be held, two at a time.

    FP8 rows have 512 bytes of scale each.
    """
    sublanes, scales = hidden // LANES, (count + 1) * 4 * LANES * (item == 1)

    def fits(panels: int) -> bool:
        if sublanes % panels or (panels > 1 and sublanes // panels % TILE[item]):
            return False
        row = round_up(sublanes // panels, TILE[item]) * LANES * item
        return min(panels, 2) * (count + 1) * row + scales + RESERVE <= vmem_limit_bytes

    return [n for n in range(1, MOST_PANELS + 1) if fits(n)]


def _element(spec: KernelSpec) -> int:
    """Bytes of an element of the rows that are summed."""
    return 1 if spec.transport.endswith("fp8") else 2


def _us(gen: Generation, clock: float, spec: KernelSpec, panels: int) -> float:
    rows, item = summed_rows(spec), _element(spec)
    skips, kib = item == 2 and not spec.pushes, spec.hidden / 1024
    scales_us = rows * 4 * LANES * (item == 1) / gen.hbm_gbps / 1e3
    if not panels:
        column = (1.0 if gen.native_e4m3 else 2.6) if item == 1 else 0.85
        bundles = rows * (5.6 + column * kib + (SKIPPED if skips else 0))
        arrived = spec.capacity // spec.ep if skips else rows
        return max(bundles / clock / 1e3, arrived * spec.hidden * item / gen.hbm_gbps / 1e3 + scales_us)
    # Table and address of a pair, or its columns' arithmetic.
    least = 3.45 if item == 1 else 2.95
    column = (1.03 if gen.native_e4m3 else 2.55) if item == 1 else 0.8
    bundles = panels * rows * max(least, 0.65 + column * kib / panels)
    panel_us = rows * spec.hidden * item / panels / gen.hbm_gbps / 1e3
    return scales_us + panel_us + max(bundles / clock / 1e3, (panels - 1) * panel_us)


def combine_panels(gen: Generation, spec: KernelSpec) -> int:
    """Panels that `combine_kernel` takes for a build: 0 for a DMA a pair, else what is fastest at the first clock."""
    fitting = panels_that_fit(summed_rows(spec), spec.hidden, _element(spec), gen.vmem_limit_bytes)
    return min((0, *fitting), key=lambda n: _us(gen, gen.clock_ghz, spec, n))


def combine_us(gen: Generation, clock: float, spec: KernelSpec) -> float:
    """The kernel that adds a token's rows: bytes, or its loops; while the first panel comes in nothing else runs."""
    return _us(gen, clock, spec, combine_panels(gen, spec))
