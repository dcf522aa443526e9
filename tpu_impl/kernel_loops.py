# SPDX-License-Identifier: Apache-2.0
"""The expert kernel's schedule by what its bundles are for.

Loops of a dump have no names. They come in the order the kernel's stages do: the list of visits, then inside the
loop over them gather of the next visit, staging, adapters, tiles, results. Tile heights are the conditional bodies of
the tile loop (`llo`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .llo import Loop, Schedule
from .spec import KernelSpec
from .time_model import VisitCost

ADAPTER_LOOPS = (2, 1)
"""Adapter DMA loops before and after the tiles."""


@dataclass(frozen=True)
class KernelLoops:
    """A kernel's cost by stage, and what its tiles spill.

    Attributes:
      cost: bundles.
      spills: register spills stored in one f tile, by height.
      mxu_share: of the matrix unit's slots in the tile loop, all heights together.
    """

    cost: VisitCost
    spills: tuple[int, ...]
    mxu_share: float


def _bodies(start: int, end: int, landings: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """The last `count` conditional bodies between two bundles: each ends where its jump lands.

    A jump to the very end carries another label there.
    """
    inside = [at for at in landings if start < at <= end]
    if len(inside) == count - 1:
        inside.append(end)
    if len(inside) < count:
        raise RuntimeError(
            f"schedule: got {len(inside)} conditional bodies in bundles {start} to {end}, want {count} tile heights"
        )
    ends = inside[-count:]
    before = inside[-count - 1] if len(inside) > count else start
    return list(zip([before, *ends[:-1]], ends, strict=True))


def read_loops(spec: KernelSpec, schedule: Schedule) -> KernelLoops:
    """Sort a schedule into stages.

    Raises:
      RuntimeError: the dump's loops are not the kernel's; the compiler unrolled or merged one.
    """
    outer = [x for x in schedule.loops if x.depth == 1]
    visit = max(outer, key=lambda x: x.bundles)
    children = schedule.children(visit)
    before, after = ADAPTER_LOOPS if spec.lora else (0, 0)
    want = 3 + before + after + (spec.tiles > 1)
    if len(children) != want:
        sizes = ", ".join(str(x.bundles) for x in children)
        raise RuntimeError(f"schedule: got {len(children)} loops in a visit ({sizes} bundles), want {want}")
    first, second, ship = children[0], children[1], children[-1]
    gather, stage = (first, second) if spec.blocks.xbuf == 2 else (second, first)
    adapters = [*children[2 : 2 + before], *(children[-1 - after : -1] if after else [])]
    heights = len(spec.blocks.rungs)

    if spec.tiles > 1:
        tile = children[2 + before]
        bodies = _bodies(tile.start, tile.end, tile.landings, heights)
        once = tile.bundles - sum(b - a for a, b in bodies)
    else:
        previous = children[1 + before]
        following = children[2 + before]
        bodies, once = _bodies(previous.end, following.start, visit.landings, heights), 0
    shrink: list[tuple[int, int]] = []
    if spec.lora:
        # Between the copies of this visit's B2 and of the next one's A13.
        shrink = _bodies(children[2].end, children[3].start, visit.landings, heights)
    run = _inner(schedule, ship)
    own = visit.bundles - sum(x.bundles for x in children) - sum(b - a for a, b in shrink)
    if spec.tiles == 1:
        own -= sum(b - a for a, b in bodies)
    own += outer[0].bundles  # lists a visit
    cost = VisitCost(
        own, gather.bundles, stage.bundles, ship.bundles, run.bundles if run else 0, sum(x.bundles for x in adapters),
        tuple(b - a + once for a, b in bodies), tuple(b - a for a, b in shrink),
    )
    issued = tile.mxu_share if spec.tiles > 1 else visit.mxu_share
    return KernelLoops(cost, tuple(schedule.spills_between(a, b) for a, b in bodies), issued)


def _inner(schedule: Schedule, loop: Loop) -> Loop | None:
    inside = schedule.children(loop)
    return max(inside, key=lambda x: x.bundles) if inside else None
