# SPDX-License-Identifier: Apache-2.0
"""`isomoe bench --cuda`: cells of models, schemes, adapters, routings and batch sizes through every peer.

In each cell a call is first held against its recipe, with the allocator's memory poisoned; what passes is timed, all
backends of the cell in turns. A peer that cannot run, fails or is wrong is a row with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...common.recipes import Recipe
from . import roofline
from .clock import Calls, Clock, Timing
from .data import Layer, LoraSetting, poison, random_adapters, random_batch, random_weights
from .figures import BASE, IDLE_VARIANT, Row
from .peers import LayerData, Peer, Problem
from .reference import layer_f32, rel_l2

TOKENS = (1, 8, 64, 256, 1024, 4096, 8192)
TIMED = 4  # times its bound: a wrong result up to there is timed all the same
SETS = ((8, 4), (256, 2))  # batches of up to so many tokens: input sets; larger ones have one


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
      layers, schemes, loras, routings, tokens: crossed; a LoRA setting of 0 adapters is the plain layer.
      rounds: turns that every backend of a cell gets.
      limit_s: no new cell starts after so many seconds.
    """

    layers: Sequence[Layer]
    schemes: Sequence[str] = ("block", "channel")
    loras: Sequence[LoraSetting] = (LoraSetting(),)
    routings: Sequence[str] = ("uniform",)
    tokens: Sequence[int] = TOKENS
    rounds: int = 5
    limit_s: float = float("inf")
    device: str = "cuda"


@dataclass
class _Candidate:
    """A row on its way to a time; without calls it gets none."""

    row: Row
    calls: Calls
    arithmetic: str = "w8a8"


@dataclass
class Runner:
    """Runs a plan; `rows` grows as it goes."""

    plan: Plan
    peers: Sequence[Peer]
    clock: Clock
    rates: roofline.Rates
    log: Callable[[str], None] = lambda text: None
    rows: list[Row] = field(default_factory=list)
    skipped: int = 0
    _wants: dict[Recipe, torch.Tensor] = field(default_factory=dict)  # of the cell at hand, by recipe

    def run(self) -> list[Row]:
        """Every cell; cells beyond the time limit are counted in `skipped`."""
        started = time.monotonic()
        for layer, scheme in itertools.product(self.plan.layers, self.plan.schemes):
            data: LayerData | None = None
            for setting in self.plan.loras:
                adapters = None
                for routing, tokens in itertools.product(self.plan.routings, self.plan.tokens):
                    if time.monotonic() - started > self.plan.limit_s:
                        self.skipped += 1
                        continue
                    device = torch.device(self.plan.device)
                    if data is None:
                        data = LayerData(layer, scheme, random_weights(layer, scheme, device), device)
                    if setting.count and adapters is None:
                        adapters = random_adapters(layer, setting, device)
                    self.log(f"{layer.name} {scheme} {setting} {routing} T={tokens}")
                    self.rows += self._cell(data, setting, adapters, routing, tokens)
                if data is not None:
                    data.cache.pop(("vllm lora", setting), None)
                del adapters
            del data
            if self.plan.device == "cuda":
                torch.cuda.empty_cache()
        return self.rows

    def _cell(self, data: LayerData, setting: LoraSetting, adapters: Any, routing: str, tokens: int) -> list[Row]:
        sets = next((n for most, n in SETS if tokens <= most), 1)
        batches = tuple(
            random_batch(data.layer, tokens, i, data.device, routing=routing, adapters=setting.count)
            for i in range(sets)
        )
        problem = Problem(data, setting, adapters, batches)
        cell = Row(data.layer.name, data.scheme, routing, str(setting), tokens, "")
        done: list[Row] = []
        ready: list[_Candidate] = []
        self._wants.clear()
        for peer in self.peers:
            row = dataclasses.replace(cell, backend=peer.name)
            reason = peer.why_not(problem)
            if reason is not None:
                done.append(dataclasses.replace(row, verdict="absent", reason=reason))
                continue
            try:
                candidates = list(self._checked(peer, problem, row))
            except Exception as error:  # one backend's failure must not end the run; a dead device ends the next one
                text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                done.append(dataclasses.replace(row, verdict="error", reason=text))
                continue
            done += [c.row for c in candidates if not c.calls]
            ready += [c for c in candidates if c.calls]
        times = self.clock.time({f"{c.row.backend}|{c.row.variant}": c.calls for c in ready}, self.plan.rounds)
        works = [roofline.work_of(data.layer, data.scheme, b, setting) for b in batches]
        for c in ready:
            found = times[f"{c.row.backend}|{c.row.variant}"]
            if not isinstance(found, Timing):
                done.append(dataclasses.replace(c.row, verdict="error", reason=found))
                continue
            plain = [dataclasses.replace(w, lora_bytes=0.0, lora_flops=0.0) if c.row.variant else w for w in works]
            floors = [roofline.floor_us(w, self.rates, c.arithmetic) for w in plain]
            own = [roofline.lora_floor_us(w, self.rates) for w in plain]
            done.append(
                dataclasses.replace(
                    c.row, us=found.us, spread=found.spread, floor_us=sum(floors) / sets, lora_floor_us=sum(own) / sets
                )
            )
        return done

    def _checked(self, peer: Peer, problem: Problem, row: Row) -> Iterator[_Candidate]:
        """The peer's calls after a comparison with its recipe; ours with adapters also without and idle."""
        calls = peer.build(problem)
        calls[0]()  # builds what a first call builds, so that the poison reaches what the second one allocates
        if self.plan.device == "cuda":
            poison(problem.data.device)
        recipe, bound = peer.declared(problem)
        got = calls[0]()
        if recipe not in self._wants:
            self._wants[recipe] = layer_f32(problem.batches[0], problem.data.weights, recipe, problem.adapters)
        error = rel_l2(got, self._wants[recipe])
        row = dataclasses.replace(row, rel_l2=error, bound=bound, plan=peer.plan(problem))
        if not error <= bound:  # a NaN is wrong too
            shown = error if math.isfinite(error) else None
            reason = f"rel. L2 {error:.3g} over {bound:g}"
            row = dataclasses.replace(row, rel_l2=shown, verdict="wrong", reason=reason)
            # A rounding too many is a finding, and its time still tells something; another result is no candidate.
            if not error <= TIMED * bound:
                yield _Candidate(row, [])
                return
        yield _Candidate(row, calls, peer.arithmetic)
        if not (peer.own and problem.adapters is not None):
            return
        base = dataclasses.replace(problem, adapters=None, setting=LoraSetting())
        idle = dataclasses.replace(problem, batches=tuple(b.idle() for b in problem.batches))
        base_calls, idle_calls = peer.build(base), peer.build(idle)
        same = bool(torch.equal(base_calls[0](), idle_calls[0]()))
        clean = dataclasses.replace(row, rel_l2=None, bound=None, verdict="ok", reason="")
        yield _Candidate(dataclasses.replace(clean, variant=BASE, plan=peer.plan(base)), base_calls, peer.arithmetic)
        yield _Candidate(dataclasses.replace(clean, variant=IDLE_VARIANT, bitwise=same), idle_calls, peer.arithmetic)
