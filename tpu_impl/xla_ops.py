# SPDX-License-Identifier: Apache-2.0
"""What the layer's program does around the expert kernel, and how long the compiler's own schedule of it is.

libtpu's optimised HLO lists operations in the order they run. A compiled dump holds each one's bundles; for
operations the compiler has an estimate of its own (``estimated_cycles``), which counts loops and memory but also a
fixed allowance an operation, the same for the smallest of them: that part is taken off, so that launches are counted
once, by whoever adds them up. Equal operations share one program, so those without a dump of their own are looked up
by what they compute (opcode and shape).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][a-z0-9-]*)\(")
_HEAD = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>\S+) \(")
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_CONDITION = re.compile(r"condition=%(\S+?)[,\s]")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_SCALAR = re.compile(r"\w+\[\]")
_BODY = re.compile(r"body=%(\S+?)[,\s]")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# They move no data, or run beside others.
_FREE = frozenset((
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "while",
    "opt-barrier", "add-dependency",
))
_ASYNC = ("-start", "-done", "-update")
SORT_BUNDLES = 4
"""Of one vector register, operand and step of a bitonic sort, which libtpu unrolls for a few thousand elements (there
3.8 were counted); in larger ones a loop's body counts once, so they are computed."""
REGISTER = 1024
SMALL = 50
"""Bundles that a small operation has less than."""
GATHER_BUNDLES = 11
"""Of each KiB that a row gather brings, where libtpu unrolls it (4420 for 64 rows of 6 KiB); larger ones are loops."""


@dataclass(frozen=True)
class Op:
    """One operation of the program.

    Attributes:
      name, opcode, shape: as the compiler prints them.
      times: how often it runs in a call.
      estimate: the compiler's cycles; None where it has none.
    """

    name: str
    opcode: str
    shape: str
    times: int
    estimate: int | None


@dataclass(frozen=True)
class Glue:
    """Everything around the expert kernel.

    Attributes:
      cycles: bundles of all operations, each as often as it runs.
      launches: operations started.
      compiler_cycles: the compiler's own estimate, its allowances included; operations without one count bundles.
      collectives: all-gathers and the like.
      largest: names and cycles of the operations that cost most.
      beside_cycles, beside_launches: the share of operations that the program runs between the start of its largest
        all-gather, the rows, and the wait for it.
    """

    cycles: int
    launches: int
    compiler_cycles: int
    collectives: int
    largest: tuple[tuple[str, int], ...]
    beside_cycles: int = 0
    beside_launches: int = 0


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in hlo.splitlines():
        head = _HEAD.match(line)
        if head:
            lines = bodies.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        elif line.rstrip() == "}":
            lines = []
        else:
            lines.append(line)
    return bodies, entry


def operations(hlo: str) -> list[Op]:
    """Operations of a call in program order, those of loops as often as the largest number in the loop's condition
    says: counted loops are all there are.

    Raises:
      ValueError: the text has no entry computation.
    """
    bodies, entry = _computations(hlo)
    if not entry:
        raise ValueError("hlo: got a text without an entry computation, want a compiled program's as_text()")

    def walk(name: str, times: int) -> Iterator[Op]:
        for line in bodies[name]:
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            if match["opcode"] == "while":
                body, condition = _BODY.search(line), _CONDITION.search(line)
                if body and condition:
                    bounds = [int(n) for text in bodies[condition[1]] for n in _BOUND.findall(text)]
                    yield from walk(body[1], times * max(bounds, default=1))
            estimate = _ESTIMATE.search(line)
            yield Op(match["name"], match["opcode"], match["shape"], times, int(estimate[1]) if estimate else None)

    return list(walk(entry, 1))


def _free(op: Op) -> bool:
    if op.opcode in _FREE or op.opcode.endswith(_ASYNC):
        return True
    if _SCALAR.match(op.shape) or "S(6)" in op.shape:
        return True  # the scalar core's, within the program's own control flow
    # Marks for the compiler: they name no computation.
    return op.opcode == "custom-call" and op.name.startswith(("custom-call", "prepare_"))


def sort_bundles(shape: str) -> int:
    """Bundles of a bitonic sort of one-dimensional operands of a shape, such as ``(s32[4096]{0}, s32[4096]{0})``."""
    sizes = [int(n) for n in re.findall(r"\[(\d+)\]", shape)]
    if not sizes:
        return 0
    steps = math.ceil(math.log2(max(2, sizes[0])))
    return SORT_BUNDLES * steps * (steps + 1) // 2 * -(-sizes[0] // REGISTER) * len(sizes)


def gather_bundles(shape: str) -> int:
    """Bundles of gathering rows into an array of a shape, such as ``f8e4m3fn[64,6144]{1,0}``."""
    match = re.match(r"[a-z]+(\d+)\w*\[(\d+),(\d+)\]", shape)
    return 0 if match is None else math.ceil(GATHER_BUNDLES * int(match[1]) // 8 * int(match[2]) * int(match[3]) / 1024)


def _gathering(ops: list[Op]) -> tuple[int, int]:
    """Places of the start of the largest asynchronous all-gather and of the wait for it; (0, 0) where there is none."""
    starts = [(i, op) for i, op in enumerate(ops) if "all-gather" in op.name and op.name.endswith("-start")]
    done = {op.name.removesuffix("-done"): i for i, op in enumerate(ops) if op.name.endswith("-done")}
    spans = [(_nbytes(op.shape), i, done.get(op.name.removesuffix("-start"), i)) for i, op in starts]
    return max(spans, default=(0, 0, 0))[1:]


def _nbytes(shape: str) -> int:
    """Bytes of the largest array of a shape."""
    found = re.findall(r"[a-z]+(\d+)\w*\[([\d,]+)\]", shape)
    return max((int(bits) * math.prod(int(n) for n in dims.split(",")) // 8 for bits, dims in found), default=0)


def glue(hlo: str, bundles: Mapping[str, int], kernel: str) -> Glue:
    """Add up everything but the kernels whose names start with `kernel`.

    Args:
      hlo: the compiled program's text.
      bundles: of each operation, by name (`llo.op_bundles`).
      kernel: what names of kernels that the model has terms for start with.
    """
    everything = operations(hlo)
    start, end = _gathering(everything)
    kept = [(i, op) for i, op in enumerate(everything) if not _free(op) and not op.name.startswith(kernel)]
    ops = [op for _, op in kept]
    alike: dict[tuple[str, str], int] = {}
    for op in ops:
        if op.name in bundles:
            alike.setdefault((op.opcode, op.shape), bundles[op.name])
    # Small operations' estimates are the compiler's allowance and next to nothing else; a few marks are below it.
    small = (op for op in ops if op.estimate is not None and op.estimate > 1000 and bundles.get(op.name, SMALL) < SMALL)
    allowance = min((op.estimate for op in small if op.estimate is not None), default=0)
    cycles, compiler, beside, cost = 0, 0, 0, []
    for i, op in kept:
        scheduled = bundles.get(op.name, alike.get((op.opcode, op.shape), 0))
        if op.opcode == "sort":
            scheduled = max(scheduled, sort_bundles(op.shape))
        elif "gather" in op.name and op.opcode == "fusion":
            scheduled = max(scheduled, gather_bundles(op.shape))
        beyond = max(0, op.estimate - allowance) if op.estimate is not None else 0
        work = op.times * max(scheduled, beyond)
        cycles += work
        beside += work if start < i < end else 0
        compiler += op.times * (op.estimate if op.estimate is not None else allowance + scheduled)
        cost.append((op.name, work))
    collectives = len(re.findall(rf"\b(?:{'|'.join(COLLECTIVES)})(?:-start)?\(", hlo))
    largest = tuple(sorted(cost, key=lambda c: -c[1])[:8])
    launches = sum(op.times for i, op in kept if start < i < end)
    return Glue(cycles, sum(op.times for op in ops), compiler, collectives, largest, beside, launches)
