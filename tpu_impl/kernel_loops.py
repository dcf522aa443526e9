# SPDX-License-Identifier: Apache-2.0
"""The expert kernel's schedule by what its bundles are for.

Loops of a dump have no names. They come in the order the kernel's stages do: the list of visits, then inside the
loop over them gather of the next visit, staging, adapters, tiles, results. Tile heights are the conditional bodies of
the tile loop (`llo`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from .llo import Schedule
from .spec import ROW_BLOCK, KernelSpec
from .time_model import VisitCost


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
    # Adapter DMA loops before and after the tiles: a stage's each, the first of several before.
    before, after = (len(spec.adapter_stages) - 1, 1) if spec.lora else (0, 0)
    staging = int(not spec.one_block)
    want = 2 + staging + before + after + (spec.tiles > 1)
    # A copy that the compiler makes in pieces, where an operand of a whole layer lies otherwise, and the straight-line
    # code up to the next loop: less than starts the copies of a block of rows.
    while len(children) > want and children[0].bundles < 2 * ROW_BLOCK:
        del children[0]
    if len(children) != want:
        sizes = ", ".join(str(x.bundles) for x in children)
        raise RuntimeError(f"schedule: got {len(children)} loops in a visit ({sizes} bundles), want {want}")
    ship = children[-1]
    rows = children[: 1 + staging]  # gather and staging, in the order they start
    gather, stage = (rows[0], rows[-1]) if spec.blocks.xbuf == 2 else (rows[-1], rows[0])
    adapters = [*children[len(rows) : len(rows) + before], *(children[-1 - after : -1] if after else [])]
    heights = len(spec.blocks.rungs)

    if spec.tiles > 1:
        tile = children[len(rows) + before]
        bodies = _bodies(tile.start, tile.end, tile.landings, heights)
        once = tile.bundles - sum(b - a for a, b in bodies)
    else:
        previous, following = children[len(rows) + before - 1], children[len(rows) + before]
        bodies, once = _bodies(previous.end, following.start, visit.landings, heights), 0
    shrink: list[tuple[int, int]] = []
    if spec.lora and not spec.one_block:
        # Before the copies of the next visit's A13.
        shrink = _bodies(children[before].end, children[before + 1].start, visit.landings, heights)
    # The largest conditional bodies before the runs: waits for earlier sends have some of their own.
    pieces = spec.blocks.stage // spec.finish_rows
    ends = [ship.start, *ship.landings]
    finish = sum(sorted(b - a for a, b in itertools.pairwise(ends))[-pieces:]) // pieces
    run = max((x.bundles for x in schedule.children(ship)), default=0)
    own = visit.bundles - sum(x.bundles for x in children) - sum(b - a for a, b in shrink)
    if spec.tiles == 1:
        own -= sum(b - a for a, b in bodies)
    own += outer[0].bundles  # lists a visit
    cost = VisitCost(
        own, gather.bundles, stage.bundles * staging, ship.bundles - pieces * finish, finish, run,
        sum(x.bundles for x in adapters), tuple(b - a + once for a, b in bodies), tuple(b - a for a, b in shrink),
    )
    issued = tile.mxu_share if spec.tiles > 1 else visit.mxu_share
    return KernelLoops(cost, tuple(schedule.spills_between(a, b) for a, b in bodies), issued)

