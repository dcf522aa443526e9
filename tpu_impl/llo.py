# SPDX-License-Identifier: Apache-2.0
"""Static schedules out of libtpu's compiler dump.

libtpu, asked with ``--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true``, writes every kernel's final bundles as text:
one line a bundle, with one ``>`` for each loop it is inside of, and a table of how many issue slots each bundle uses.
A bundle issues in a cycle when nothing stalls, so bundles are the least cycles; waiting for DMAs is not in them.

Bodies of `pl.when` that are too large to be predicated bundle by bundle are jumped over, and where the jump lands
carries a label: that is how the tile heights of a kernel, of which a visit runs one, are told apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?P<label>[A-Z]{2})?\s*:(?P<depth>[\s>]*)\{")
_BUNDLES = "final_bundles.txt"
_ANALYSIS = "schedule-analysis_final_bundles.txt"
DUMP_FLAGS = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final.*"
"""What to put into ``LIBTPU_INIT_ARGS``; without the last, every pass of every operation is written."""
_USAGE = "final_hlo-static-per-bundle-utilization.txt"


@dataclass(frozen=True)
class Loop:
    """One loop of a kernel; counts cover one iteration, inner loops once.

    Attributes:
      depth: nesting, 1 outermost.
      start: its first bundle.
      bundles: bundles of its body.
      mxu_ops: matrix unit issues.
      mxu_share: of all matrix unit slots in the body.
      spills: register spills stored.
      landings: bundles where jumps over conditional bodies land, of this depth.
    """

    depth: int
    start: int
    bundles: int
    mxu_ops: int
    mxu_share: float
    spills: int
    landings: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.bundles


@dataclass(frozen=True)
class Schedule:
    """A kernel's bundles and its loops in program order."""

    kernel: str
    bundles: int
    loops: tuple[Loop, ...]
    spilled: tuple[int, ...] = ()
    """Register spills each bundle stores."""

    def spills_between(self, start: int, end: int) -> int:
        """Register spills stored by the bundles in ``[start, end)``."""
        return sum(self.spilled[start:end])

    def children(self, parent: Loop) -> list[Loop]:
        """Loops one level inside `parent`."""
        inside = (x for x in self.loops if parent.start <= x.start and x.end <= parent.end)
        return [x for x in inside if x.depth == parent.depth + 1]


def _spans(path: Path) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]], int]:
    """(depth, start, end) of every loop, (depth, bundle) of every landing and the number of bundles.

    Only labelled bundles are read: a body label (LB) opens a loop, and the next label of lesser depth, or the next
    body of the same depth, closes it. Branches and empty bundles carry no reliable depth.
    """
    spans: list[tuple[int, int, int]] = []
    landings: list[tuple[int, int]] = []
    open_at: list[int] = []
    index = -1
    with path.open() as lines:
        for line in lines:
            match = _LINE.match(line)
            if match is None:
                continue
            index += 1
            text = line[match.end() :].lstrip()
            if match["label"] is None or text.startswith("}") or "sbr.rel" in text[:40]:
                continue
            depth, opens = match["depth"].count(">"), match["label"] == "LB"
            if match["label"] == "PF":
                landings.append((depth, index))
            while len(open_at) > (depth - 1 if opens else depth):
                spans.append((len(open_at), open_at.pop(), index))
            while opens and len(open_at) < depth:
                open_at.append(index)
    while open_at:
        spans.append((len(open_at), open_at.pop(), index + 1))
    return sorted(spans, key=lambda s: (s[1], s[0])), landings, index + 1


def _usage(path: Path) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Issue slots a bundle has of each unit, and how many each bundle uses."""
    tables = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("==")]
    names = [name.strip() for name in tables[0].split(",")]
    rows = [[int(cell) for cell in line.split()] for line in tables[1:]]
    columns = list(zip(*rows[1:], strict=True)) if len(rows) > 1 else [()] * len(names)
    return dict(zip(names, rows[0], strict=True)), {n: list(c) for n, c in zip(names, columns, strict=True)}


def read_schedule(folder: Path, kernel: str) -> Schedule:
    """The schedule of the kernel whose dump name contains `kernel`.

    Raises:
      FileNotFoundError: no such kernel in the dump.
    """
    for bundles in sorted(folder.glob(f"*{kernel}*{_BUNDLES}")):
        if "schedule-analysis" in bundles.name:
            continue
        stem = re.sub(r"-\d+-" + re.escape(_BUNDLES), "", bundles.name)
        usage = [p for p in folder.glob(f"{stem}-*{_USAGE}") if "pre-delay" not in p.name]
        if usage:
            break
    else:
        raise FileNotFoundError(f"{folder}: no final bundles of a kernel named {kernel!r}")
    spans, landings, count = _spans(bundles)
    slots, used = _usage(usage[0])
    loops = []
    for depth, start, end in spans:
        issued = sum(used["MXU"][start:end])
        loops.append(
            Loop(
                depth, start, end - start, issued, round(issued / ((end - start) * slots["MXU"]), 3),
                sum(used["VSTORE:SPILL"][start:end]),
                tuple(at for d, at in landings if d == depth and start < at < end),
            )
        )
    return Schedule(kernel, count, tuple(loops), tuple(used["VSTORE:SPILL"]))


def op_bundles(folder: Path) -> dict[str, int]:
    """Bundles of every operation in a dump, by name; a loop's body counts once.

    The compiler emits one program for operations that are equal, under the first one's name.
    """
    found = {}
    for path in folder.glob(f"*-{_ANALYSIS}"):
        match = re.match(r"\d+-(?P<name>.+)-\d+-" + re.escape(_ANALYSIS), path.name)
        total = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())
        if match and total:
            found[match["name"]] = int(total[1])
    return found
