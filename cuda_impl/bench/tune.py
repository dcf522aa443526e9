# SPDX-License-Identifier: Apache-2.0
"""Measure every candidate of every layer and batch size, and make the table that `tuned` reads.

The candidates are `hopper.regime.candidates` and `grouped_gemm.candidate_tiles`. Each is first held against the recipe.
The rule's own choice stays unless another is faster by more than MARGIN, so that noise changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...common import tolerances
from ...common.environment import version_of
from ...common.report import table as plain_table
from .. import _runtime
from ..grouped_gemm import candidate_tiles, rule_tiles
from ..hopper.regime import Regime, choose
from ..moe import fused_moe, resolve_recipe
from ..tuned import Bucket, Choice, LayerKey, Table, forced
from .clock import Clock, Timing
from .data import Batch, LoraSetting, random_adapters, random_batch, random_weights
from .reference import layer_f32, rel_l2

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from ..prepare import AdapterSlots, PreparedWeights
    from .run import Plan

TOKENS = tuple(2**n for n in range(14))
RECIPES = ("w8a8", "w8a16")
MARGIN = 0.01


def candidates_of(key: LayerKey, kernels: str, tokens: int, target: _runtime.Target) -> list[Choice]:
    """Everything worth measuring, the rule's choice first."""
    if kernels == "hopper":
        rule: Choice = choose(
            tokens, key.topk, key.global_experts, w8a16=key.recipe == "w8a16", block=key.scheme == "block", lora=False
        )
        return [rule, *(r for r in key.regimes(tokens) if r != rule)]
    a_bytes, w_bytes = (1 if key.recipe == "w8a8" else 2), (2 if key.recipe == "bf16" else 1)
    two_level = key.scheme == "block"
    pairs = tokens * key.topk
    sizes = (two_level, a_bytes, w_bytes, target)
    rule = rule_tiles(pairs, key.experts, key.inter, key.hidden, *sizes)
    return [rule, *(t for t in candidate_tiles(pairs, key.experts, *sizes) if t != rule)]


@contextlib.contextmanager
def hopper_off(portable: bool) -> Iterator[None]:
    before = os.environ.get("ISOMOE_HOPPER")
    if portable:
        os.environ["ISOMOE_HOPPER"] = "0"
    try:
        yield
    finally:
        if portable:
            os.environ.pop("ISOMOE_HOPPER")
            if before is not None:
                os.environ["ISOMOE_HOPPER"] = before


def label(choice: Choice) -> str:
    """A candidate's name in a table."""
    if isinstance(choice, Regime):
        return str(choice)
    parts = [f"{c.block_n}x{c.block_k}w{c.num_warps}s{c.num_stages}" for c in (choice.w13, choice.w2)]
    return f"m{choice.block_m} {' '.join(parts)}"


def _call(
    choice: Choice, batch: Batch, weights: PreparedWeights, recipe: str, adapters: AdapterSlots | None
) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with forced(choice), hopper_off(not isinstance(choice, Regime)):
            return fused_moe(
                batch.x, batch.topk_weights, batch.topk_ids, weights, recipe=recipe, adapters=adapters,
                adapter_ids=None if adapters is None else batch.adapter_ids, expert_map=batch.expert_map,
            )  # fmt: skip

    return run


def pick(rule: str, times: dict[str, float]) -> str:
    """The fastest candidate, or the rule's unless it is beaten by more than MARGIN."""
    best = min(times, key=times.__getitem__)
    return best if rule not in times or times[best] < times[rule] * (1 - MARGIN) else rule


def measure(plan: Plan, clock: Clock, device: str, log: Callable[[str], None], kernels: str | None = None) -> Table:
    """A table of a plan's layers, schemes and batch sizes, for both recipes.

    Adapters of the plan's settings are timed too and weigh as much as the plain layer (geometric mean): one choice
    serves both.

    Args:
      device: the name the table goes by.
      kernels: "hopper" or "portable"; None takes what the device runs.
    """
    where = torch.device(plan.device)
    target = _runtime.target_of(where)
    if kernels is None:
        kernels = "hopper" if target.capability == (9, 0) else "portable"
    settings = [LoraSetting(), *(s for s in plan.loras if s.count)]
    entries: dict[tuple[LayerKey, str], tuple[Bucket, ...]] = {}
    started = time.monotonic()
    for layer, scheme in itertools.product(plan.layers, plan.schemes):
        if time.monotonic() - started > plan.limit_s:
            log(f"{layer.name} {scheme}: not started, {plan.limit_s:g} s are over")
            continue
        weights = random_weights(layer, scheme, where)
        adapters = [random_adapters(layer, s, where) if s.count else None for s in settings]
        for recipe in RECIPES:
            key = LayerKey.of(weights, layer.topk, layer.experts, recipe)
            buckets = []
            for tokens in sorted(plan.tokens):
                if time.monotonic() - started > plan.limit_s:
                    break
                batches = [random_batch(layer, tokens, 0, where, adapters=s.count) for s in settings]
                options = candidates_of(key, kernels, tokens, target)
                times = _times(options, batches, weights, recipe, adapters, clock, plan.rounds, log)
                if not times:
                    log(f"{layer.name} {scheme} {recipe} T={tokens}: no candidate was right and could be timed")
                    continue
                name = pick(label(options[0]), times)
                choice = next(o for o in options if label(o) == name)
                log(f"{layer.name} {scheme} {recipe} T={tokens}: {name} ({times[name]:.1f} us of {len(times)} timed)")
                buckets.append(Bucket(tokens, choice, {n: round(us, 2) for n, us in times.items()}))
            if buckets:
                entries[key, kernels] = tuple(buckets)
    versions = {name: v for name in ("isomoe", "torch", "triton") if (v := version_of(name)) is not None}
    return Table(device, versions, entries)


def _times(
    options: list[Choice],
    batches: list[Batch],
    weights: PreparedWeights,
    recipe: str,
    adapters: list[AdapterSlots | None],
    clock: Clock,
    rounds: int,
    log: Callable[[str], None],
) -> dict[str, float]:
    """Microseconds of the candidates that are right with and without adapters; geometric mean over the two."""
    declared = resolve_recipe(recipe, weights)

    @functools.cache
    def wants(fp8_sums: int) -> list[torch.Tensor]:
        sums = replace(declared, fp8_sums=fp8_sums)
        return [layer_f32(b, weights, sums, a) for b, a in zip(batches, adapters)]

    calls: dict[str, list[Callable[[], torch.Tensor]]] = {}
    for option in options:
        mine = [_call(option, b, weights, recipe, a) for b, a in zip(batches, adapters)]
        try:
            sums = option.fp8_sums if isinstance(option, Regime) and declared.name == "w8a8" else 0
            errors = [rel_l2(call(), want) for call, want in zip(mine, wants(sums))]
        except Exception as error:  # a tile that does not compile here is no candidate
            log(f"  {label(option)}: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
            continue
        if not all(e <= tolerances.TO_RECIPE.bound for e in errors):
            log(f"  {label(option)}: wrong, rel. L2 {max(errors):.3g}")
            continue
        for i, call in enumerate(mine):
            calls[f"{label(option)}|{i}"] = [call]
    found = clock.time(calls, rounds)
    times = {}
    for option in options:
        several = [found.get(f"{label(option)}|{i}") for i in range(len(batches))]
        measured = [t.us for t in several if isinstance(t, Timing) and t.us > 0]
        if len(measured) == len(batches):
            times[label(option)] = math.exp(sum(map(math.log, measured)) / len(measured))
    return times


def shown(table: Table) -> RichTable:
    """The table for a terminal."""
    lines = [
        (
            f"E{key.experts}/{key.global_experts} K{key.topk} H{key.hidden} I{key.inter}", key.scheme, key.recipe,
            kernels, str(b.max_tokens), label(b.choice), f"{b.us[label(b.choice)]:.1f}", str(len(b.us)),
        )
        for (key, kernels), buckets in table.entries.items() for b in buckets
    ]  # fmt: skip
    columns = ("layer", "scheme", "recipe", "kernels", "up to tokens", "choice", "us", "tried")
    return plain_table(f"Measured on {table.device}", columns, lines, numeric=("up to tokens", "us", "tried"))
