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
    """Panels of columns in which `count` rows of `item` bytes an element may be held, two at a time."""
    sublanes = hidden // LANES

    def fits(panels: int) -> bool:
        if sublanes % panels or (panels > 1 and sublanes // panels % TILE[item]):
            return False
        row = round_up(sublanes // panels, TILE[item]) * LANES * item
        return min(panels, 2) * (count + 1) * row + RESERVE <= vmem_limit_bytes

    return [n for n in range(1, MOST_PANELS + 1) if fits(n)]


def _element(spec: KernelSpec) -> int:
    """Bytes of an element of the rows that are summed."""
    return 1 if spec.transport.endswith("fp8") else 2


# Bundles of a pair by (bytes of an element, whether e4m3 is native): its own, and for each 1024 columns.
_FETCHED = {(1, True): (6.9, 0.85), (1, False): (5.3, 2.85), (2, True): (5.6, 0.85), (2, False): (5.6, 0.85)}
_HELD = {(1, True): (0.9, 1.02), (1, False): (0.9, 2.55), (2, True): (0.65, 0.8), (2, False): (0.65, 0.8)}
_HELD_LEAST = {1: 3.6, 2: 2.95}
"""At least, for tables and addresses: scalar instructions, which run beside the columns' arithmetic."""


def _us(gen: Generation, clock: float, spec: KernelSpec, panels: int) -> float:
    rows, item = summed_rows(spec), _element(spec)
    kib, rows_us = spec.hidden / 1024, rows * spec.hidden * item / gen.hbm_gbps / 1e3
    own, column = (_HELD if panels else _FETCHED)[item, gen.native_e4m3]
    if not panels:
        skips = item == 2 and not spec.pushes
        bundles = rows * (own + column * kib + (SKIPPED if skips else 0))
        arrived = spec.capacity // spec.ep / rows if skips else 1
        return max(bundles / clock / 1e3, arrived * rows_us)
    bundles = panels * rows * max(_HELD_LEAST[item], own + column * kib / panels)
    return rows_us / panels + max(bundles / clock / 1e3, rows_us * (panels - 1) / panels)


def combine_panels(gen: Generation, spec: KernelSpec) -> int:
    """Panels that `combine_kernel` takes for a build: 0 for a DMA a pair, else what is fastest at the first clock."""
    fitting = panels_that_fit(summed_rows(spec), spec.hidden, _element(spec), gen.vmem_limit_bytes)
    return min((0, *fitting), key=lambda n: _us(gen, gen.clock_ghz, spec, n))


def combine_us(gen: Generation, clock: float, spec: KernelSpec) -> float:
    """The kernel that adds a token's rows: bytes, or its loops; while the first panel comes in nothing else runs."""
    return _us(gen, clock, spec, combine_panels(gen, spec))
