# SPDX-License-Identifier: Apache-2.0
"""How long rows take on the links between chips, and which way of moving them costs least.

A model, not a measurement: chips stand on a grid whose ends are not joined, messages go straight along one dimension
after another, and what counts is the fullest link in its fullest direction. The cores of a chip share its links and
reach each other for nothing.

* An all-gather (`ag_*`) is forwarded from chip to chip, so each byte enters a chip once, over the links of the chip
  that has fewest. A reduce-scatter (`rs_bf16`) is the same backwards: sums are formed on the way.
* A push is unicast: a row to a chip several hops away loads each link between. `push_*` sends a row for each routed
  pair, `presum_*` one for each device that has any of a token's experts.

`wires` picks the cheapest of them that the declared precision allows.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

from .generations import Generation

ROW_ITEM = {
    "ag_bf16": 2, "ag_fp8": 1, "push_bf16": 2, "push_fp8": 1, "presum_bf16": 2, "presum_fp8": 1, "rs_bf16": 2,
}
"""Bytes of an element in flight, for every dispatch and transport the model knows."""
ALLGATHER_SCALE = 4
PRESUM_SCALE = 512
"""Bytes of a row's scale in flight: one float32 in a gather, 128 equal lanes in a push of presummed rows (a DMA moves
whole words of 128 lanes)."""
SCALES_LINE = 128
"""Scales that a DMA moves together: those of pushed rows follow all rows, of each device to each."""

Chip = tuple[int, ...]


@dataclass(frozen=True)
class Fabric:
    """The chips that share the experts.

    Attributes:
      grid: chips along each dimension.
      ep: devices along the expert axis; they fill chips in grid order, the first dimension fastest.
      cores: devices a chip.
      gbps: gigabytes a second over one link, one way.
    """

    grid: tuple[int, ...]
    ep: int
    cores: int
    gbps: float

    def __post_init__(self) -> None:
        if not self.grid or any(d < 1 for d in self.grid):
            raise ValueError(f"grid: got {self.grid}, want positive chip counts")
        devices = self.cores * math.prod(self.grid)
        if self.ep < 1 or devices % self.ep:
            raise ValueError(f"ep: got {self.ep}, want a divisor of the {devices} devices of the chip grid {self.grid}")

    @classmethod
    def of(cls, gen: Generation, grid: tuple[int, ...], ep: int) -> Fabric:
        return cls(grid, ep, gen.cores_per_chip, gen.link_gbps)

    @property
    def chips(self) -> list[Chip]:
        """Where the chips of one expert group stand."""
        count = -(-self.ep // self.cores)
        places = itertools.product(*(range(d) for d in reversed(self.grid)))
        return [place[::-1] for place in itertools.islice(places, count)]

    def fewest_links(self) -> int:
        """Links of the chip that has fewest neighbours in the group."""
        chips = set(self.chips)
        return min(sum(n in chips for n in _neighbours(chip)) for chip in chips)

    def hot_link(self) -> int:
        """Messages on the fullest link when every chip sends one to every other."""
        load: Counter[tuple[Chip, Chip]] = Counter()
        for source, target in itertools.permutations(self.chips, 2):
            load.update(_route(source, target))
        return max(load.values(), default=0)


def _neighbours(chip: Chip) -> list[Chip]:
    steps = itertools.product(range(len(chip)), (-1, 1))
    return [(*chip[:d], chip[d] + step, *chip[d + 1 :]) for d, step in steps]


def _route(source: Chip, target: Chip) -> list[tuple[Chip, Chip]]:
    """Links from chip to chip, one dimension after another."""
    hops, at = [], source
    for d in range(len(source)):
        while at[d] != target[d]:
            to = (*at[:d], at[d] + (1 if target[d] > at[d] else -1), *at[d + 1 :])
            hops.append((at, to))
            at = to
    return hops


def share_reached(experts: int, top_k: int, parts: int) -> float:
    """Chance that a token's `top_k` distinct experts, uniform, touch one of `parts` equal parts of `experts`."""
    held = experts // parts
    return 1 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


@dataclass(frozen=True)
class Traffic:
    """What a layer call moves.

    Attributes:
      tokens: of all devices.
      hidden: elements of a row.
      top_k, experts: experts a token visits, and in all.
      scales: whether FP8 rows carry the bytes of their scale; without, the table of a paper design.
      whole_chips: whether the cores of a chip add their partial sums before sending them (no transport here does).
    """

    tokens: int
    hidden: int
    top_k: int
    experts: int
    scales: bool = True
    whole_chips: bool = False


def dispatch_us(fabric: Fabric, traffic: Traffic, dispatch: str) -> float:
    """Microseconds of an all-gather of the tokens' rows."""
    item = ROW_ITEM[dispatch]
    row = traffic.hidden * item + (ALLGATHER_SCALE if traffic.scales and item == 1 else 0)
    return allgather_us(fabric, traffic.tokens * row)


def allgather_us(fabric: Fabric, total_bytes: float) -> float:
    """Microseconds until every chip has `total_bytes`, of which it had its share; a reduce-scatter takes the same."""
    chips = len(fabric.chips)
    if chips < 2:
        return 0.0
    return total_bytes * (1 - 1 / chips) / fabric.fewest_links() / fabric.gbps / 1e3


def transport_us(fabric: Fabric, traffic: Traffic, transport: str) -> float:
    """Microseconds of bringing result rows, or partial sums, to their tokens' owners."""
    item, chips = ROW_ITEM[transport], len(fabric.chips)
    if chips < 2:
        return 0.0
    if transport.startswith("rs"):
        return allgather_us(fabric, traffic.tokens * traffic.hidden * item)
    row = traffic.hidden * item + (PRESUM_SCALE if traffic.scales and transport == "presum_fp8" else 0)
    if transport.startswith("push"):
        rows = traffic.top_k / chips
    elif traffic.whole_chips:
        rows = share_reached(traffic.experts, traffic.top_k, chips)
    else:
        rows = fabric.cores * share_reached(traffic.experts, traffic.top_k, fabric.ep)
    # `rows` of each token go to each other chip.
    return fabric.hot_link() * traffic.tokens / chips * rows * row / fabric.gbps / 1e3


def scales_us(fabric: Fabric, traffic: Traffic, transport: str) -> float:
    """Microseconds of what follows the last pushed row: scales of codes, of each device as if all rows were its own."""
    if transport != "push_fp8" or not traffic.scales:
        return 0.0
    lines = traffic.tokens * traffic.top_k // fabric.ep // SCALES_LINE + 2
    devices = fabric.ep / len(fabric.chips)
    return fabric.hot_link() * devices**2 * lines * 4 * SCALES_LINE / fabric.gbps / 1e3


def overlaps(transport: str) -> bool:
    """Whether results travel while other experts are computed; sums over experts are sent when all are done."""
    return transport.startswith("push")


def total_us(
    fabric: Fabric, traffic: Traffic, dispatch: str, transport: str, kernel_us: float, sums_us: float = 0.0
) -> float:
    """Dispatch, then the kernel with what its transport does not hide; `sums_us` runs beside the transport."""
    combine = max(sums_us, transport_us(fabric, traffic, transport))
    rest = max(kernel_us, combine) if overlaps(transport) else kernel_us + combine
    return dispatch_us(fabric, traffic, dispatch) + rest + scales_us(fabric, traffic, transport)
