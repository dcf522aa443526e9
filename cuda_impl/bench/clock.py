# SPDX-License-Identifier: Apache-2.0
"""Times of calls, side by side: CUDA graphs, a cold L2 before every call, rounds that take turns.

A graph holds several times "read twice the L2's size, then call"; a second graph holds the reads alone and is timed in
the same rounds. Their difference is the call, launched as it is inside a model's graph, with its weights in HBM. Reads
(not writes) empty the cache, so nothing is left to be written back at the call's expense.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .._runtime import tl, triton

Calls = Sequence[Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: the median of the rounds' medians, and (max - min) / median of the rounds."""

    us: float
    spread: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Timing:
        middle = statistics.median(rounds)
        return cls(middle, (max(rounds) - min(rounds)) / middle if middle else 0.0, tuple(rounds))


class Clock(Protocol):
    """Something that times calls; tests put a fake here."""

    def time(self, calls: Mapping[str, Calls], rounds: int) -> dict[str, Timing | str]:
        """Per name the time of a call, or why there is none."""


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    value = tl.load(x_ptr + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + program, tl.sum(value, axis=0))


_BLOCK = 16384


class GraphClock:
    """The clock on a CUDA device.

    Args:
      graph_us: time that one graph's calls should fill, microseconds.
      budget_ms: time of one round of one name, milliseconds.
      fixed: passes of a graph and replays of a round, instead of what those two give: ranks that time collectives
        together must make the same number of calls.
    """

    def __init__(
        self, graph_us: float = 2000.0, budget_ms: float = 20.0, fixed: tuple[int, int] | None = None
    ) -> None:
        self.graph_us, self.budget_ms, self.fixed = graph_us, budget_ms, fixed
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        programs = max(1, 2 * l2 // (4 * _BLOCK))
        self._lines = torch.zeros(programs * _BLOCK, dtype=torch.float32, device="cuda")
        self._sums = torch.empty(programs, dtype=torch.float32, device="cuda")
        self._flush_graph: torch.cuda.CUDAGraph | None = None

    _FLUSHES = 16

    def _flush(self) -> None:
        _read_kernel[(self._sums.shape[0],)](self._lines, self._sums, BLOCK=_BLOCK, num_warps=8)

    def _flush_often(self) -> None:
        for _ in range(self._FLUSHES):
            self._flush()

    def _capture(self, body: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may query events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
        return graph

    def _replay_us(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        """Median microseconds of a replay."""
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))

    def _graph_of(self, calls: Calls) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph over flushes and calls, and its number of calls."""
        for call in (*calls, *calls):  # kernels are compiled, and workspaces grown, outside the capture
            call()
        torch.cuda.synchronize()

        def body(repeats: int) -> None:
            for _ in range(repeats):
                for call in calls:
                    self._flush()
                    call()

        if self.fixed is not None:
            return self._capture(functools.partial(body, self.fixed[0])), self.fixed[0] * len(calls)
        once = self._capture(functools.partial(body, 1))
        # Several passes where they are short: the gap between two graphs is then shared by many calls.
        repeats = max(1, min(16 // len(calls), int(self.graph_us / self._replay_us(once, 3))))
        return (once, len(calls)) if repeats == 1 else (
            self._capture(functools.partial(body, repeats)), repeats * len(calls)
        )  # fmt: skip

    def time(self, calls: Mapping[str, Calls], rounds: int) -> dict[str, Timing | str]:
        """As `Clock.time`; a name whose capture fails gets its error, the others go on."""
        self._flush()
        torch.cuda.synchronize()
        if self._flush_graph is None:
            self._flush_graph = self._capture(self._flush_often)
        results: dict[str, Timing | str] = {}
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, int, int]] = {}
        for name, several in calls.items():
            try:
                graph, count = self._graph_of(several)
                once = self._replay_us(graph, 2)
            except RuntimeError as error:
                results[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
                continue
            replays = self.fixed[1] if self.fixed is not None else max(5, min(200, int(self.budget_ms * 1e3 / once)))
            graphs[name] = graph, count, replays
        found: dict[str, list[float]] = {name: [] for name in graphs}
        order = list(graphs)
        for turn in range(rounds):
            flush = self._replay_us(self._flush_graph, 20) / self._FLUSHES
            for name in order[turn % len(order) :] + order[: turn % len(order)] if order else []:
                graph, count, replays = graphs[name]
                found[name].append(self._replay_us(graph, replays) / count - flush)
        results.update({name: Timing.of(times) for name, times in found.items()})
        graphs.clear()
        torch.cuda.empty_cache()
        return results
