# SPDX-License-Identifier: Apache-2.0
"""The checks every executor is held to, one function a promise; pytest, the plugin and `isomoe conform` share them.

A check takes a `Subject` (an executor by name) and a `Case` and returns a `CheckResult` that holds its figures. It
never raises for what an executor does: an exception is the verdict "error". What an executor does not declare is
"not served", and one that cannot run on this machine is "unavailable"; neither counts as passed.

An executor is held to the recipe that it declares, evaluated by the reference with float32 result rows; to float64; and
to the invariants of the contract, bit for bit where the contract says so.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import SupportsFloat

import numpy as np

from isomoe.common import tolerances
from isomoe.common.backends import register_moe_backend
from isomoe.common.executors import ExecutorInfo, executor_class, executors
from isomoe.common.metrics import bitwise_equal, compare, cosine, rel_l2, worst_row
from isomoe.common.placement import ExpertPlacement
from isomoe.common.platforms import PlatformKind
from isomoe.common.recipes import Recipe
from isomoe.common.support import ExpertsSupport, declared_support
from isomoe.tests.matrix import (
    INVARIANT_CASES,
    Case,
    Inputs,
    build,
    ep_cases,
    full_cases,
    parity_cases,
    production_cases,
    quick_cases,
)

VERDICTS = ("pass", "fail", "error", "not served", "unavailable")
# A float32 sum cut to bfloat16 (not rounded) shrinks by about 1.4e-3; rounding is unbiased.
GAIN = tolerances.Tolerance(
    1e-3, "rounding does not scale a result; truncating float32 to bfloat16 does, by 1.4e-3"
)
# Unbiased roundings average out only over many values: on fewer the gain is noise of the bound's own size.
GAIN_VALUES = 4096
REGISTERED_NAME = "conform_subject"


@dataclass(frozen=True)
class Figure:
    """One number against its bound. `sense` is ``"<="`` or ``">="``; a bitwise check is the number of unequal rows."""

    name: str
    value: float
    bound: float
    sense: str = "<="

    @property
    def ok(self) -> bool:
        return self.value <= self.bound if self.sense == "<=" else self.value >= self.bound

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3g} (want {self.sense} {self.bound:g})"


@dataclass(frozen=True)
class CheckResult:
    """What one check found.

    Attributes:
      check, executor, case: which.
      verdict: one of `VERDICTS`.
      figures: every number that was judged, also of a check that passed.
      reason: why it did not pass, one line.
      stage: where the result first parts from the reference, once `diagnose` has said so.
      seconds: wall time; interpreted times say nothing about speed.
    """

    check: str
    executor: str
    case: str
    verdict: str
    figures: tuple[Figure, ...] = ()
    reason: str = ""
    stage: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong: passed, or was not to be expected of this executor or machine."""
        return self.verdict in ("pass", "not served", "unavailable")

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        stage = f" [parts at {self.stage}]" if self.stage else ""
        return f"{self.check} {self.executor} {self.case}: {self.verdict}{stage} {self.reason}".rstrip()


@dataclass
class Judge:
    """Collects a check's figures; the first that is out of bounds gives the reason."""

    figures: list[Figure] = field(default_factory=list)
    reason: str = ""

    def add(self, name: str, value: SupportsFloat, bound: float, sense: str = "<=", why: str = "") -> None:
        figure = Figure(name, float(value), float(bound), sense)
        self.figures.append(figure)
        if not figure.ok and not self.reason:
            self.reason = f"{figure}" + (f": {why}" if why else "")

    def same_bits(self, name: str, got: np.ndarray, want: np.ndarray, why: str = "") -> None:
        """Rows that differ in any bit must be none."""
        if got.shape != want.shape or got.dtype != want.dtype:
            differing = float("inf")
        else:
            differing = float(sum(not bitwise_equal(g, w) for g, w in zip(got, want, strict=True)))
        self.add(f"{name}: rows that differ", differing, 0, why=why)

    def close(self, name: str, got: np.ndarray, want: np.ndarray, recipe: Recipe) -> None:
        """Bounds on the whole, on the worst row and on the gain, against the declared recipe."""
        found = compare(got, want)
        self.add(f"{name}: not finite", found.non_finite, 0)
        self.add(f"{name}: relative L2", found.rel_l2, tolerances.to_recipe(recipe.wire).bound)
        if recipe.wire != "fp8":
            self.add(f"{name}: worst row", found.worst_row, tolerances.WORST_ROW.bound)
        if found.non_finite == 0 and recipe.wire != "fp8" and want.size >= GAIN_VALUES:
            self.add(
                f"{name}: gain", abs(gain(got, want)), GAIN.bound, why="a biased result: a sum was truncated"
            )


def gain(got: np.ndarray, want: np.ndarray) -> float:
    """``<got, want> / <want, want> - 1``: how much `got` is a scaled `want`; 0 where `want` is zero."""
    g, w = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    norm = float(w @ w)
    return float(g @ w) / norm - 1 if norm else 0.0


@functools.lru_cache(maxsize=16)
def inputs_of(case: Case) -> Inputs:
    """`build`, kept for the cases in use."""
    return build(case)


class Subject:
    """An executor under test: its declaration, and its results by case (kept, since several checks need them)."""

    def __init__(self, executor: str) -> None:
        self.name = executor
        self.cls = executor_class(executor)
        self._results: dict[Case, np.ndarray] = {}

    @functools.cached_property
    def info(self) -> ExecutorInfo:
        return executors()[self.name]

    @functools.cached_property
    def support(self) -> ExpertsSupport:
        return declared_support(self.cls)

    def why_not(self, case: Case) -> str:
        """Why the case is not one for this executor; empty where it is."""
        s = self.support
        if case.recipe not in s.recipes:
            return f"does not declare recipe {case.recipe}"
        if case.scheme not in s.schemes:
            return f"does not declare scheme {case.scheme}"
        if case.lora != "none" and not s.lora:
            return "does not declare LoRA"
        return s.why_not_layer(case.config, None, None) or (
            "" if case.ep == 1 or s.expert_parallel else "no EP"
        )

    def run(self, case: Case, **changes: object) -> np.ndarray:
        return inputs_of(case).run(self.name, **changes)

    def result(self, case: Case) -> np.ndarray:
        """`run` without changes, once."""
        if case not in self._results:
            if len(self._results) > 64:
                self._results.clear()
            self._results[case] = self.run(case)
        return self._results[case]

    def declared(self, case: Case, inputs: Inputs | None = None) -> Recipe:
        """The recipe that the executor says it really runs for this case."""
        call = (inputs or inputs_of(case)).call()
        return self.cls.recipe(call) if hasattr(self.cls, "recipe") else call.recipe  # type: ignore[attr-defined]


CheckFunction = Callable[[Subject, Case, Judge], None]


@dataclass(frozen=True)
class Check:
    """A named check: what it does and on which cases. `one_case` checks run on the executor's first plain case."""

    name: str
    run: CheckFunction
    cases: Callable[[], list[Case]]
    one_case: bool = False

    @property
    def doc(self) -> str:
        return (self.run.__doc__ or "").split("\n")[0]


CHECKS: dict[str, Check] = {}


def _check(
    name: str, cases: Callable[[], list[Case]], *, one_case: bool = False
) -> Callable[[CheckFunction], CheckFunction]:
    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = Check(name, function, cases, one_case)
        return function

    return register


def _invariants() -> list[Case]:
    return list(INVARIANT_CASES)


def with_f32_wire(recipe: Recipe) -> Recipe:
    """What a result is judged by: the declared roundings, with result rows that lose nothing."""
    return recipe.with_wire("f32")


def _delta(
    subject: Subject, case: Case, recipe: Recipe, got: np.ndarray, want: np.ndarray, judge: Judge
) -> None:
    """The adapters' share alone, and the bits of base rows (vllm#42007, vllm#42008)."""
    inputs = inputs_of(case)
    assert inputs.adapter_ids is not None
    rows = inputs.adapter_ids >= 0
    base = subject.run(case, adapters=None, adapter_ids=None)
    base_want = inputs.run("reference", recipe=recipe, ep_size=1, adapters=None, adapter_ids=None)
    delta = got.astype(np.float32)[rows] - base.astype(np.float32)[rows]
    delta_want = want.astype(np.float32)[rows] - base_want.astype(np.float32)[rows]
    size = np.linalg.norm(delta_want) / np.linalg.norm(base_want[rows].astype(np.float32))
    judge.add("delta: size beside the base", size, 0.1, ">=", "too small to test")
    judge.add("delta: relative L2", rel_l2(delta, delta_want), tolerances.DELTA.bound)
    judge.add("delta: cosine", cosine(delta, delta_want), tolerances.DELTA_COSINE.bound, ">=")
    judge.same_bits("base rows", got[~rows], base[~rows], "base rows changed when other rows used adapters")


@_check("parity", parity_cases)
def check_parity(subject: Subject, case: Case, judge: Judge) -> None:
    """The declared recipe and float64, as a whole and by the worst row; the adapters' delta on its own."""
    inputs, declared = inputs_of(case), subject.declared(case)
    recipe = with_f32_wire(declared)
    got, want = subject.result(case), inputs.run("reference", recipe=recipe, ep_size=1)
    judge.close("recipe", got, want, declared)
    truth = inputs.run("reference", recipe="float64", ep_size=1)
    judge.add(
        "float64: relative L2", rel_l2(got, truth), tolerances.to_truth(declared.name, declared.wire).bound
    )
    if inputs.adapter_ids is not None and case.lora not in ("zero_b", "idle"):
        _delta(subject, case, recipe, got, want, judge)


@_check("expert_parallel", ep_cases)
def check_expert_parallel(subject: Subject, case: Case, judge: Judge) -> None:
    """Experts split over ranks meet the same bounds, and agree with one rank but for the combine's rounding."""
    check_parity(subject, case, judge)
    single, wire = subject.run(case, ep_size=1), subject.declared(case).wire
    judge.add("one rank: relative L2", rel_l2(subject.result(case), single), tolerances.to_recipe(wire).bound)
    judge.add("one rank: worst row", worst_row(subject.result(case), single), tolerances.WORST_ROW.bound)


@_check("permutation", _invariants)
def check_permutation(subject: Subject, case: Case, judge: Judge) -> None:
    """Permuting the tokens permutes the rows and changes no bit."""
    inputs = inputs_of(case)
    order = np.random.default_rng(0).permutation(case.tokens)
    ids = None if inputs.adapter_ids is None else inputs.adapter_ids[order]
    permuted = subject.run(
        case,
        x=inputs.x[order],
        topk_weights=inputs.topk_weights[order],
        topk_ids=inputs.topk_ids[order],
        adapter_ids=ids,
    )
    judge.same_bits("permuted", permuted, subject.result(case)[order])


@_check("row_independence", _invariants)
def check_row_independence(subject: Subject, case: Case, judge: Judge) -> None:
    """A row keeps its bits whatever the other rows of the batch hold, NaN included, and NaN stays in its row."""
    inputs, keep = inputs_of(case), 5
    other = np.arange(case.tokens) != keep
    x = inputs.x.copy()
    x[other] = np.random.default_rng(1).standard_normal((int(other.sum()), x.shape[1])) * 3
    x[0] = np.nan
    ids = np.roll(inputs.topk_ids, 1, axis=1)
    ids[keep] = inputs.topk_ids[keep]
    adapter_ids = inputs.adapter_ids
    if adapter_ids is not None:
        adapter_ids = np.where(other, np.roll(adapter_ids, 2), adapter_ids)
    got = subject.run(case, x=x, topk_ids=ids, adapter_ids=adapter_ids)
    judge.same_bits("kept row", got[[keep]], subject.result(case)[[keep]])
    judge.add(
        "NaN row: finite values", np.isfinite(got[0].astype(np.float32)).sum(), 0, why="NaN must stay visible"
    )
    judge.add(
        "other rows: not finite", (~np.isfinite(got[1:].astype(np.float32))).sum(), 0, why="NaN left its row"
    )


def _without_effect(subject: Subject, case: Case, judge: Judge, lora: str) -> None:
    changed = replace(case, lora=lora)
    judge.same_bits(lora, subject.result(changed), subject.run(changed, adapters=None, adapter_ids=None))


@_check("idle_adapters", _invariants)
def check_idle_adapters(subject: Subject, case: Case, judge: Judge) -> None:
    """Adapters that are loaded and used by no row change no bit."""
    _without_effect(subject, case, judge, "idle")


@_check("zero_b", _invariants)
def check_zero_b(subject: Subject, case: Case, judge: Judge) -> None:
    """An adapter whose B is zero changes no bit."""
    _without_effect(subject, case, judge, "zero_b")


@_check("relabelling", _invariants)
def check_relabelling(subject: Subject, case: Case, judge: Judge) -> None:
    """Other ids for the same adapters, loaded in another order, change no bit: ids are not slots."""
    inputs = inputs_of(case)
    rename = {5: 40, 0: 2, 11: 7}
    adapters = tuple(replace(a, adapter_id=rename[a.adapter_id]) for a in reversed(inputs.adapters))
    assert inputs.adapter_ids is not None
    ids = np.array([rename.get(int(i), -1) for i in inputs.adapter_ids], np.int32)
    judge.same_bits("renamed", subject.run(case, adapters=adapters, adapter_ids=ids), subject.result(case))


@_check("padding_nan", _invariants)
def check_padding_nan(subject: Subject, case: Case, judge: Judge) -> None:
    """Rows that visit no expert may hold NaN: they give zeros and leave the others' bits alone (flashinfer#3650)."""
    inputs = inputs_of(case)
    pad = np.arange(case.tokens) % 3 == 2
    ids = np.where(pad[:, None], -1, inputs.topk_ids).astype(np.int32)
    clean = subject.run(case, topk_ids=ids)
    x, weights = inputs.x.copy(), inputs.topk_weights.copy()
    x[pad], weights[pad] = np.nan, np.nan
    got = subject.run(case, x=x, topk_ids=ids, topk_weights=weights)
    judge.same_bits("valid rows", got[~pad], clean[~pad])
    judge.add("padding rows: values that are not zero", np.count_nonzero(got[pad].astype(np.float32)), 0)


@_check("rerun", _invariants, one_case=True)
def check_rerun(subject: Subject, case: Case, judge: Judge) -> None:
    """The same call again gives the same bits."""
    judge.same_bits("again", subject.run(case), subject.result(case))


@_check("expert_map", _invariants, one_case=True)
def check_expert_map(subject: Subject, case: Case, judge: Judge) -> None:
    """Ranks that hold uneven round-robin shares give partial results that add up to the layer."""
    inputs = inputs_of(case)
    total = np.zeros(inputs.x.shape, np.float32)
    placement = ExpertPlacement(case.shape.num_experts, 3, "round_robin")
    for rank in range(3):
        part = subject.run(
            case, weights=inputs.weights.take(placement.experts_of(rank)), expert_map=placement.expert_map(rank)
        )
        total = total + part.astype(np.float32)
    judge.add("sum of ranks: relative L2", rel_l2(total, subject.result(case)), tolerances.TO_RECIPE.bound)


@_check("empty_batch", _invariants, one_case=True)
def check_empty_batch(subject: Subject, case: Case, judge: Judge) -> None:
    """No token: a result of no rows."""
    inputs = inputs_of(case)
    got = subject.run(
        case,
        x=inputs.x[:0],
        topk_weights=inputs.topk_weights[:0],
        topk_ids=inputs.topk_ids[:0],
        adapter_ids=None if inputs.adapter_ids is None else inputs.adapter_ids[:0],
    )
    judge.add("rows", len(got), 0)
    judge.add("columns", got.shape[1], case.shape.hidden_dim, ">=")


@_check("all_skipped", _invariants, one_case=True)
def check_all_skipped(subject: Subject, case: Case, judge: Judge) -> None:
    """A batch of padding alone gives zeros."""
    got = subject.run(case, topk_ids=np.full_like(inputs_of(case).topk_ids, -1))
    judge.add("values that are not zero", np.count_nonzero(got.astype(np.float32)), 0)


def run_check(check: Check | str, subject: Subject, case: Case) -> CheckResult:
    """One check on one case. Never raises for what the executor does."""
    check = CHECKS[check] if isinstance(check, str) else check
    start = time.perf_counter()

    def result(verdict: str, judge: Judge | None = None, reason: str = "") -> CheckResult:
        figures = tuple(judge.figures) if judge else ()
        seconds = time.perf_counter() - start
        return CheckResult(check.name, subject.name, str(case), verdict, figures, reason, seconds=seconds)

    why = subject.why_not(case)
    if why:
        return result("not served", reason=why)
    if subject.info.state == "unavailable":
        return result("unavailable", reason=subject.info.reason)
    judge = Judge()
    try:
        check.run(subject, case, judge)
    except Exception as error:  # an executor may fail in any way; that is a finding, not the end of the run
        return result("error", judge, f"{type(error).__name__}: {error}".replace("\n", " "))
    return result("fail" if judge.reason else "pass", judge, judge.reason)


def plan(
    subject: Subject, level: str = "standard", *, production: bool = False
) -> Iterator[tuple[Check, Case]]:
    """The (check, case) pairs of a run, in order.

    Args:
      level: ``"quick"`` (each recipe once, and every invariant once), ``"standard"`` (what this package's own tests
        run) or ``"full"`` (axes crossed that the others vary one at a time).
      production: real hidden and intermediate sizes too, at up to 16 experts.
    """
    for check in CHECKS.values():
        cases = check.cases()
        if level == "quick":
            cases = [c for c in cases if c in quick_cases()]
        elif level == "full" and check.name == "parity":
            cases = list(dict.fromkeys([*cases, *full_cases()]))
        if production and check.name == "parity":
            cases = [*cases, *production_cases()]
        if check.one_case or (level == "quick" and check.cases is _invariants):
            cases = [next((c for c in _invariants() if not subject.why_not(c)), _invariants()[0])]
        for case in cases:
            yield check, case


def subject_for(executor: str) -> Subject:
    """An executor by registered name, or by ``"package.module:Class"``, which is registered on the fly.

    Raises:
      ValueError, TypeError, ImportError: no such executor, or none of an executor's shape.
    """
    if ":" not in executor:
        return Subject(executor)
    from isomoe.common.backends import registered_backends, unregister_moe_backend

    known = next((b.name for b in registered_backends().values() if b.experts == executor), None)
    if known is None:
        if REGISTERED_NAME in registered_backends():
            unregister_moe_backend(REGISTERED_NAME)
        register_moe_backend(
            REGISTERED_NAME,
            executor,
            platforms=tuple(PlatformKind),
            schemes=("block", "channel", "tensor", "bf16"),
        )
        known = REGISTERED_NAME
    return Subject(known)
