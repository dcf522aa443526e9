# SPDX-License-Identifier: Apache-2.0
"""The parity job: one batch of base rows and adapter rows through every executor, recipe and expert-parallel size.

Each run is held to three things: the recipe that its executor declares, evaluated by the reference with float32 result
rows; float64; and, bit for bit, to itself without adapters, in the rows that no adapter may touch. The LoRA delta is
judged on its own, since beside the base output a wrong one is easily missed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tolerances
from .config import FusedMoEConfig
from .executors import ExecutorInfo, executor_class, make_call, run_moe
from .metrics import bitwise_equal, cosine, rel_l2, worst_row
from .numerics import BF16
from .recipes import Recipe, default_recipe
from .routing import route
from .support import declared_support
from .weights import LoRAAdapter, MoEWeights
from .workers import TaskFailed, run_tasks

if TYPE_CHECKING:
    from .checkpoints import RouterWeights

# The delta is a difference of two outputs, each with its own (allowed) bfloat16 roundings: relative to a small delta
# they alone would pass its bound. So adapters are amplified until their delta is at least this many times the base.
MIN_DELTA = 2.0
BASE_ROW = -1

VERDICTS = ("pass", "fail", "error", "not served", "unavailable")


@dataclass(frozen=True, eq=False)
class ParityCase:
    """One layer, its adapters and one routed batch.

    Attributes:
      name: what the report calls it.
      layer: the layer's index in the checkpoint.
      config, weights: the layer, with adapter slots where adapters are given.
      adapters: the loaded adapters in bfloat16, then a copy of the first with B = 0; empty for a base-only run.
      gains: the power of two by which each adapter's B was multiplied, by name.
      x, topk_weights, topk_ids, adapter_ids: the batch, as `run_moe` takes it.
    """

    name: str
    layer: int
    config: FusedMoEConfig
    weights: MoEWeights
    adapters: tuple[LoRAAdapter, ...]
    gains: dict[str, int]
    x: np.ndarray
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    adapter_ids: np.ndarray

    @property
    def zero_id(self) -> int | None:
        """Id of the adapter whose B is zero."""
        return self.adapters[-1].adapter_id if self.adapters else None

    @property
    def delta_rows(self) -> np.ndarray:
        """bool ``[T]``: rows of an adapter that should change the output."""
        rows = self.adapter_ids >= 0
        return rows & (self.adapter_ids != self.zero_id) if self.adapters else np.zeros_like(rows)


@dataclass(frozen=True)
class ParityRow:
    """One run's figures; None where a figure does not apply.

    Attributes:
      case, layer, scheme, num_tokens: what ran.
      executor, state: who ran it, and whether natively or interpreted.
      recipe: the requested name; `declared` is the repr of what the executor says it really used.
      ep: expert-parallel size.
      rel_l2, worst_row: against the declared recipe.
      truth_rel_l2: against float64.
      delta_rel_l2, delta_cosine: the LoRA delta against the recipe's.
      base_bitwise: base rows of the mixed batch equal those of the run without adapters.
      unused_bitwise: a batch with adapters loaded but unused equals the run without adapters; at EP 1 only.
      zero_b_bitwise: rows of the B = 0 adapter equal the run without adapters.
      seconds: wall time of the mixed batch, first call included.
      verdict: one of `VERDICTS`; `reason` says why where it is not "pass".
    """

    case: str
    layer: int
    executor: str
    state: str
    recipe: str
    scheme: str
    ep: int
    num_tokens: int
    declared: str = ""
    rel_l2: float | None = None
    worst_row: float | None = None
    truth_rel_l2: float | None = None
    delta_rel_l2: float | None = None
    delta_cosine: float | None = None
    base_bitwise: bool | None = None
    unused_bitwise: bool | None = None
    zero_b_bitwise: bool | None = None
    seconds: float | None = None
    verdict: str = "pass"
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def bitwise(self) -> bool | None:
        """All three bitwise checks together."""
        checks = [c for c in (self.base_bitwise, self.unused_bitwise, self.zero_b_bitwise) if c is not None]
        return all(checks) if checks else None


@dataclass(frozen=True)
class Agreement:
    """Two executors' outputs of one case under one recipe name."""

    case: str
    layer: int
    recipe: str
    first: str
    second: str
    rel_l2: float
    worst_row: float


@dataclass
class ParityResult:
    """Everything one job found; `failed` decides the exit code."""

    rows: list[ParityRow] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)

    @property
    def failed(self) -> list[ParityRow]:
        return [row for row in self.rows if row.verdict in ("fail", "error")]


def layer_input(rng: np.random.Generator, num_tokens: int, hidden_dim: int) -> np.ndarray:
    """bfloat16 ``[T, H]`` rows of RMS 1, as the norm before an MoE layer produces them; some channels are louder."""
    x = rng.standard_normal((num_tokens, hidden_dim)) * np.exp(0.5 * rng.standard_normal(hidden_dim))
    return (x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True))).astype(BF16)


def as_served(adapter: LoRAAdapter, gain: int = 1) -> LoRAAdapter:
    """The adapter in bfloat16, as pools and kernels hold it, with B times a power of two (exact in bfloat16).

    A float32 file is rounded here once, so that the reference and every executor are given the same bits.
    """
    scale = np.float32(gain)
    return replace(
        adapter, a13=adapter.a13.astype(BF16), a2=adapter.a2.astype(BF16),
        b13=(adapter.b13.astype(np.float32) * scale).astype(BF16),
        b2=(adapter.b2.astype(np.float32) * scale).astype(BF16),
    )


def _gain(case: ParityCase, adapter: LoRAAdapter) -> int:
    """The power of two that lifts an adapter's delta to `MIN_DELTA` of the base output; 1 where it is there."""
    rows = np.flatnonzero(case.adapter_ids == adapter.adapter_id)
    if not len(rows):
        return 1
    arrays = (case.x[rows], case.topk_weights[rows], case.topk_ids[rows], case.weights)
    base = run_moe("reference", *arrays, config=case.config, recipe="float64")
    full = run_moe(
        "reference", *arrays, config=case.config, adapters=[adapter], recipe="float64",
        adapter_ids=np.full(len(rows), adapter.adapter_id, np.int32),
    )
    share = float(np.linalg.norm(full - base) / max(float(np.linalg.norm(base)), 1e-300))
    if share == 0 or share >= MIN_DELTA:
        return 1
    return 2 ** math.ceil(math.log2(MIN_DELTA / share))


def build_case(
    name: str,
    layer: int,
    config: FusedMoEConfig,
    weights: MoEWeights,
    adapters: dict[str, LoRAAdapter],
    *,
    num_tokens: int,
    seed: int,
    router: RouterWeights | None = None,
) -> ParityCase:
    """Make the batch: rows cycle through the base model, each adapter and the first adapter with B = 0.

    Args:
      router: the layer's own router; None draws random logits.
    """
    rng = np.random.default_rng([seed, layer])
    x = layer_input(rng, num_tokens, config.hidden_dim)
    if router is None:
        logits = rng.standard_normal((num_tokens, config.num_experts)).astype(np.float32)
    else:
        logits = (x.astype(np.float64) @ router.weight.astype(np.float64).T).astype(np.float32)
        logits += 0 if router.bias is None else router.bias
    bias = None if router is None else router.correction_bias
    topk_weights, topk_ids = route(logits, config, correction_bias=bias)
    served = {name: as_served(adapter) for name, adapter in adapters.items()}
    loaded = tuple(served.values())
    if loaded:
        first = loaded[0]
        zero = replace(
            first, adapter_id=max(a.adapter_id for a in loaded) + 1, b13=np.zeros_like(first.b13),
            b2=np.zeros_like(first.b2),
        )
        loaded = (*loaded, zero)
        config = config.with_lora(len(loaded), max(a.rank for a in loaded))
    cycle = np.array([BASE_ROW, *(a.adapter_id for a in loaded)], np.int32)
    adapter_ids = cycle[np.arange(num_tokens) % len(cycle)]
    case = ParityCase(name, layer, config, weights, loaded, {}, x, topk_weights, topk_ids, adapter_ids)
    gains = {name: _gain(case, adapter) for name, adapter in served.items()}
    scaled = tuple(as_served(served[name], gain) for name, gain in gains.items())
    return replace(case, adapters=scaled + loaded[len(served) :], gains=gains)


@dataclass(frozen=True)
class Run:
    """One cell of the job: who runs which recipe over how many ranks; `refusal` is why it will not."""

    info: ExecutorInfo
    recipe: str
    ep: int
    refusal: str | None = None


def plan_runs(
    case: ParityCase,
    infos: Iterable[ExecutorInfo],
    *,
    recipes: Iterable[str] | None = None,
    ep_sizes: Iterable[int] = (1,),
) -> list[Run]:
    """Every run of a case. An executor that cannot run here, or declares it does not serve the layer, gets one entry
    with the reason."""
    sizes = list(ep_sizes)
    natural = ["bf16"] if case.weights.scheme == "bf16" else ["w8a8", "w8a16"]
    wanted = [r for r in natural if recipes is None or r in set(recipes)]
    runs: list[Run] = []
    for info in infos:
        if info.state == "unavailable":
            runs.append(Run(info, "-", sizes[0], info.reason))
            continue
        support = declared_support(executor_class(info.name))
        refusal = support.why_not_layer(case.config, None, None)
        if refusal is None and case.weights.scheme not in support.schemes:
            refusal = f"does not read weights of scheme {case.weights.scheme}"
        served = [r for r in wanted if r in info.recipes]
        if refusal is not None or not served:
            runs.append(Run(info, "-", sizes[0], refusal or f"runs {', '.join(info.recipes)} only"))
            continue
        for recipe in served:
            for ep in sizes if info.name != "reference" else sizes[:1]:
                if ep > 1 and not support.expert_parallel:
                    runs.append(Run(info, recipe, ep, "does not split experts over ranks"))
                else:
                    runs.append(Run(info, recipe, ep))
    return runs


def blank_row(case: ParityCase, run: Run) -> ParityRow:
    """A cell's row before it has run."""
    return ParityRow(
        case.name, case.layer, run.info.name, run.info.state, run.recipe, case.weights.scheme, run.ep, len(case.x)
    )


class CaseRunner:
    """Runs one case's cells; the reference's answers are computed once a declared recipe."""

    def __init__(self, case: ParityCase) -> None:
        self.case = case
        self._reference: dict[tuple[Recipe, bool], np.ndarray] = {}

    def _run(
        self, executor: str, recipe: str | Recipe, ep: int, adapters: bool, ids: np.ndarray | None = None
    ) -> np.ndarray:
        case = self.case
        lora: dict[str, Any] = {}
        if adapters and case.adapters:
            lora = {"adapters": case.adapters, "adapter_ids": case.adapter_ids if ids is None else ids}
        return run_moe(
            executor, case.x, case.topk_weights, case.topk_ids, case.weights, config=case.config, ep_size=ep,
            recipe=recipe, **lora,
        )

    def _want(self, recipe: Recipe, adapters: bool) -> np.ndarray:
        key = (recipe, adapters)
        if key not in self._reference:
            self._reference[key] = self._run("reference", recipe, 1, adapters)
        return self._reference[key]

    def _declared(self, executor: str, recipe: str, ep: int) -> Recipe:
        """What the executor says it really uses for this call."""
        case, cls = self.case, executor_class(executor)
        plain = default_recipe(recipe, case.weights.scheme, static_input=case.weights.has_static_input)
        if not hasattr(cls, "recipe"):
            return plain
        call = make_call(
            case.x, case.topk_weights, case.topk_ids, case.weights, config=case.config, ep_size=ep, recipe=plain,
            adapters=case.adapters or None, adapter_ids=case.adapter_ids if case.adapters else None,
        )
        return cls.recipe(call)

    def row(self, run: Run) -> Outcome:
        """Run one cell and judge it; also its output. An executor's exception becomes the row's reason."""
        case, row = self.case, blank_row(self.case, run)
        if run.refusal is not None:
            verdict = "unavailable" if run.info.state == "unavailable" else "not served"
            return replace(row, verdict=verdict, reason=run.refusal), None
        start = time.perf_counter()
        try:
            declared = self._declared(run.info.name, run.recipe, run.ep)
            got = self._run(run.info.name, run.recipe, run.ep, True)
            seconds = time.perf_counter() - start
            base = self._run(run.info.name, run.recipe, run.ep, False) if case.adapters else got
            unused = None
            if case.adapters and run.ep == 1:
                nobody = np.full(len(case.x), BASE_ROW, np.int32)
                unused = self._run(run.info.name, run.recipe, run.ep, True, nobody)
        except Exception as error:  # whatever an executor raises is this cell's result; the others still run
            text = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {text[0] if text else ''}"
            return replace(row, seconds=time.perf_counter() - start, verdict="error", reason=reason), None
        row = replace(row, declared=repr(declared), seconds=seconds)
        return judge(row, declared, self._figures(declared, got, base, unused)), got

    def _figures(
        self, declared: Recipe, got: np.ndarray, base: np.ndarray, unused: np.ndarray | None
    ) -> dict[str, Any]:
        """Figures by `ParityRow` field."""
        case = self.case
        plain = declared.with_wire("f32")
        want, truth = self._want(plain, True), self._want(Recipe("float64"), True)
        figures: dict[str, Any] = {
            "rel_l2": rel_l2(got, want), "worst_row": worst_row(got, want), "truth_rel_l2": rel_l2(got, truth),
        }
        if case.adapters:
            rows = case.delta_rows
            want_base = self._want(plain, False)
            delta = got[rows].astype(np.float64) - base[rows].astype(np.float64)
            want_delta = want[rows].astype(np.float64) - want_base[rows].astype(np.float64)
            if rows.any() and want_delta.any():
                figures |= {"delta_rel_l2": rel_l2(delta, want_delta), "delta_cosine": cosine(delta, want_delta)}
            untouched, zero = case.adapter_ids == BASE_ROW, case.adapter_ids == case.zero_id
            figures["base_bitwise"] = bitwise_equal(got[untouched], base[untouched])
            figures["unused_bitwise"] = None if unused is None else bitwise_equal(unused, base)
            figures["zero_b_bitwise"] = bitwise_equal(got[zero], base[zero]) if zero.any() else None
        return figures


def judge(row: ParityRow, declared: Recipe, figures: dict[str, Any]) -> ParityRow:
    """Hold a row's figures to the tolerance table; the reason names every bound that was missed."""
    bounds = [
        ("rel_l2", tolerances.to_recipe(declared.wire)),
        ("truth_rel_l2", tolerances.to_truth(declared.name, declared.wire)),
        ("delta_rel_l2", tolerances.LORA_FP8_INPUT_DELTA if declared.lora_input == "fp8" else tolerances.DELTA),
    ]
    if declared.wire != "fp8":
        bounds.append(("worst_row", tolerances.WORST_ROW))
    missed = [
        f"{name} {figures[name]:.2e} > {bound.bound:.0e}"
        for name, bound in bounds
        if figures.get(name) is not None and not figures[name] <= bound.bound
    ]
    cos = figures.get("delta_cosine")
    if cos is not None and not cos >= tolerances.DELTA_COSINE.bound:
        missed.append(f"delta_cosine {cos:.4f} < {tolerances.DELTA_COSINE.bound}")
    missed += [
        f"{name.removesuffix('_bitwise').replace('_', '-')} rows changed bits"
        for name in ("base_bitwise", "unused_bitwise", "zero_b_bitwise")
        if figures.get(name) is False
    ]
    return replace(row, **figures, verdict="fail" if missed else "pass", reason="; ".join(missed))


def agreements(case: ParityCase, outputs: dict[tuple[str, str, int], np.ndarray]) -> list[Agreement]:
    """Each pair of executors under one recipe name, at the smallest expert-parallel size both ran."""
    found = []
    names = sorted({name for name, _, _ in outputs} - {"reference"})
    for recipe in sorted({recipe for _, recipe, _ in outputs}):
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                common = {ep for n, r, ep in outputs if (n, r) == (first, recipe)} & {
                    ep for n, r, ep in outputs if (n, r) == (second, recipe)
                }
                if not common:
                    continue
                a, b = outputs[first, recipe, min(common)], outputs[second, recipe, min(common)]
                found.append(
                    Agreement(case.name, case.layer, recipe, first, second, rel_l2(a, b), worst_row(a, b))
                )
    return found


Outcome = tuple[ParityRow, np.ndarray | None]


def run_cells(cases: Sequence[ParityCase], cells: Sequence[tuple[int, Run]]) -> Iterator[tuple[int, Outcome]]:
    """Run cells ``(index into cases, run)`` in this process, one after the other."""
    handler = cell_handler(cases)
    for i, cell in enumerate(cells):
        yield i, handler(cell)


def run_cells_apart(
    cases: Sequence[ParityCase], cells: Sequence[tuple[int, Run]], *, jobs: int, timeout: float
) -> Iterator[tuple[int, Outcome]]:
    """`run_cells` in `jobs` processes of their own, in any order; a cell without a result in time is an error."""
    for i, result in run_tasks(cells, cell_handler, (cases,), count=jobs, timeout=timeout):
        if isinstance(result, TaskFailed):
            index, run = cells[i]
            row = replace(blank_row(cases[index], run), seconds=timeout, verdict="error", reason=str(result))
            yield i, (row, None)
        else:
            yield i, result


def cell_handler(cases: Sequence[ParityCase]) -> Callable[[tuple[int, Run]], Outcome]:
    """What answers a cell; keeps one runner a case, and with it the reference's answers."""
    runners: dict[int, CaseRunner] = {}

    def handle(cell: tuple[int, Run]) -> Outcome:
        index, run = cell
        runner = runners.setdefault(index, CaseRunner(cases[index]))
        return runner.row(run)

    return handle


def gather(cases: Sequence[ParityCase], cells: Sequence[tuple[int, Run]], outcomes: dict[int, Outcome]) -> ParityResult:
    """All outcomes in the order of the cells, with the executors' agreements."""
    result = ParityResult([outcomes[i][0] for i in range(len(cells))])
    for index, case in enumerate(cases):
        outputs = {
            (run.info.name, run.recipe, run.ep): output
            for i, (of, run) in enumerate(cells)
            if of == index and (output := outcomes[i][1]) is not None
        }
        result.agreements += agreements(case, outputs)
    return result
