# SPDX-License-Identifier: Apache-2.0
"""Every executor against the contract, on the shared matrix.

An executor is held to the recipe it declares, evaluated by the reference with float32 result rows; to float64; and to
the invariants of the contract, bit for bit where the contract says so.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

import numpy as np
import pytest

from isomoe.common import tolerances
from isomoe.common.executors import executor_class, executors, make_call
from isomoe.common.metrics import bitwise_equal, compare, cosine, rel_l2, worst_row
from isomoe.common.placement import ExpertPlacement
from isomoe.common.recipes import Recipe
from isomoe.common.support import declared_support
from isomoe.tests.matrix import SMALL, Case, Inputs, build, ep_cases, parity_cases

# ISOMOE_TEST_EXECUTORS names other (or fewer) executors for a run.
EXECUTORS = tuple(os.environ.get("ISOMOE_TEST_EXECUTORS", "reference,pallas_ep,triton,marlin").split(","))


INVARIANT_CASES = [Case("channel", "w8a8", "mixed"), Case("block", "w8a8", "mixed"), Case("channel", "w8a16", "mixed")]


@functools.cache
def _states() -> dict[str, str]:
    return {name: info.reason for name, info in executors().items() if info.state == "unavailable"}


@functools.lru_cache(maxsize=8)
def _inputs(case: Case) -> Inputs:
    return build(case)


@functools.lru_cache(maxsize=64)
def _run(executor: str, case: Case) -> np.ndarray:
    return _inputs(case).run(executor)


def _serves(executor: str, case: Case) -> bool:
    """Whether the executor declares the case's scheme and recipe; what it does not declare is not a test."""
    support = declared_support(executor_class(executor))
    return case.recipe in support.recipes and case.scheme in support.schemes


def _need(executor: str) -> None:
    """Skip, with the reason, where the executor cannot run on this machine."""
    if executor in _states():
        pytest.skip(f"{executor} is unavailable: {_states()[executor]}")


def _plain(executor: str) -> Case:
    """A case that the executor declares."""
    return next(c for c in INVARIANT_CASES if _serves(executor, c))


def _declared(executor: str, case: Case) -> Recipe:
    """The recipe the executor says it really runs for this case."""
    inputs, cls = _inputs(case), executor_class(executor)
    call = make_call(
        inputs.x, inputs.topk_weights, inputs.topk_ids, inputs.weights, config=case.config,
        adapters=inputs.adapters or None, adapter_ids=inputs.adapter_ids, ep_size=case.ep, recipe=case.recipe,
    )
    return cls.recipe(call) if hasattr(cls, "recipe") else call.recipe


def _pairs(cases: list[Case]) -> list:
    return [pytest.param(e, c, id=f"{e}-{c}") for e in EXECUTORS for c in cases if _serves(e, c)]


def check_parity(executor: str, case: Case) -> None:
    """The bounds of one case: recipe, float64, worst row, and the delta on its own."""
    inputs, declared = _inputs(case), _declared(executor, case)
    reference = Recipe(declared.name, declared.x_group, declared.h_group, "f32", declared.lora_input)
    got, want = _run(executor, case), inputs.run("reference", recipe=reference, ep_size=1)
    truth = inputs.run("reference", recipe="float64", ep_size=1)
    figures = compare(got, want)
    assert figures.non_finite == 0
    assert figures.rel_l2 <= tolerances.to_recipe(declared.wire).bound, figures
    if declared.wire != "fp8":
        assert figures.worst_row <= tolerances.WORST_ROW.bound, figures
    assert rel_l2(got, truth) <= tolerances.to_truth(declared.name, declared.wire).bound
    if inputs.adapter_ids is None or case.lora == "zero_b":
        return
    rows = inputs.adapter_ids >= 0
    base = inputs.run(executor, adapters=None, adapter_ids=None)
    base_want = inputs.run("reference", recipe=reference, ep_size=1, adapters=None, adapter_ids=None)
    delta = got.astype(np.float32)[rows] - base.astype(np.float32)[rows]
    delta_want = want.astype(np.float32)[rows] - base_want.astype(np.float32)[rows]
    assert np.linalg.norm(delta_want) > 0.1 * np.linalg.norm(base_want[rows].astype(np.float32)), "delta too small to test"
    assert rel_l2(delta, delta_want) <= tolerances.DELTA.bound
    assert cosine(delta, delta_want) >= tolerances.DELTA_COSINE.bound
    assert bitwise_equal(got[~rows], base[~rows]), "base rows changed when other rows used adapters (vllm#42008)"


@pytest.mark.parametrize(("executor", "case"), _pairs(parity_cases()))
def test_parity(executor: str, case: Case) -> None:
    _need(executor)
    check_parity(executor, case)


@pytest.mark.parametrize(("executor", "case"), _pairs(ep_cases()))
def test_expert_parallel(executor: str, case: Case) -> None:
    """EP meets the same bounds, and agrees with one rank beyond the combine's rounding."""
    _need(executor)
    check_parity(executor, case)
    single = _inputs(case).run(executor, ep_size=1)
    declared = _declared(executor, case)
    assert rel_l2(_run(executor, case), single) <= tolerances.to_recipe(declared.wire).bound
    assert worst_row(_run(executor, case), single) <= tolerances.WORST_ROW.bound


@pytest.mark.parametrize(("executor", "case"), _pairs(INVARIANT_CASES))
def test_permuting_tokens_permutes_rows(executor: str, case: Case) -> None:
    _need(executor)
    inputs = _inputs(case)
    order = np.random.default_rng(0).permutation(case.tokens)
    permuted = inputs.run(
        executor, x=inputs.x[order], topk_weights=inputs.topk_weights[order], topk_ids=inputs.topk_ids[order],
        adapter_ids=inputs.adapter_ids[order],
    )
    assert bitwise_equal(permuted, _run(executor, case)[order])


@pytest.mark.parametrize(("executor", "case"), _pairs(INVARIANT_CASES))
def test_a_row_does_not_depend_on_the_others(executor: str, case: Case) -> None:
    """Other rows replaced (and poisoned with NaN) at the same batch size: this row keeps its bits."""
    _need(executor)
    inputs, keep = _inputs(case), 5
    other = np.arange(case.tokens) != keep
    x = inputs.x.copy()
    x[other] = np.random.default_rng(1).standard_normal((int(other.sum()), x.shape[1])) * 3
    x[0] = np.nan
    ids = np.roll(inputs.topk_ids, 1, axis=1)
    ids[keep] = inputs.topk_ids[keep]
    adapter_ids = np.where(other, np.roll(inputs.adapter_ids, 2), inputs.adapter_ids)
    got = inputs.run(executor, x=x, topk_ids=ids, adapter_ids=adapter_ids)
    assert bitwise_equal(got[keep], _run(executor, case)[keep])
    assert np.isnan(got[0].astype(np.float32)).all(), "NaN must stay visible in its own row"
    assert np.isfinite(got[1:].astype(np.float32)).all(), "NaN left its row"


@pytest.mark.parametrize("lora", ["idle", "zero_b"])
@pytest.mark.parametrize(("executor", "case"), _pairs(INVARIANT_CASES))
def test_adapters_without_effect_change_nothing(executor: str, case: Case, lora: str) -> None:
    _need(executor)
    inputs = _inputs(Case(case.scheme, case.recipe, lora))
    assert bitwise_equal(inputs.run(executor), inputs.run(executor, adapters=None, adapter_ids=None))


@pytest.mark.parametrize(("executor", "case"), _pairs(INVARIANT_CASES))
def test_adapter_order_and_ids_do_not_matter(executor: str, case: Case) -> None:
    """Relabelling adapters and loading them in another order changes no bit: ids are not slots."""
    _need(executor)
    inputs = _inputs(case)
    rename = {5: 40, 0: 2, 11: 7}
    adapters = tuple(replace(a, adapter_id=rename[a.adapter_id]) for a in reversed(inputs.adapters))
    ids = np.array([rename.get(int(i), -1) for i in inputs.adapter_ids], np.int32)
    assert bitwise_equal(inputs.run(executor, adapters=adapters, adapter_ids=ids), _run(executor, case))


@pytest.mark.parametrize(("executor", "case"), _pairs(INVARIANT_CASES))
def test_padding_rows_with_nan_do_not_leak(executor: str, case: Case) -> None:
    """flashinfer#3650: rows that visit nobody hold NaN; they give zeros and leave the others' bits alone."""
    _need(executor)
    inputs = _inputs(case)
    pad = np.arange(case.tokens) % 3 == 2
    ids = np.where(pad[:, None], -1, inputs.topk_ids)
    x, weights = inputs.x.copy(), inputs.topk_weights.copy()
    clean = inputs.run(executor, topk_ids=ids)
    x[pad], weights[pad] = np.nan, np.nan
    got = inputs.run(executor, x=x, topk_ids=ids, topk_weights=weights)
    assert bitwise_equal(got[~pad], clean[~pad])
    assert not got[pad].astype(np.float32).any()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_reruns_are_bitwise_equal(executor: str) -> None:
    _need(executor)
    case = _plain(executor)
    assert bitwise_equal(_inputs(case).run(executor), _run(executor, case))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_expert_map_serves_one_rank_of_the_experts(executor: str) -> None:
    """The ranks' partial results add up to the layer, for uneven round-robin shares (vllm EP hole E4)."""
    _need(executor)
    case = _plain(executor)
    inputs, total = _inputs(case), 0.0
    placement = ExpertPlacement(SMALL.num_experts, 3, "round_robin")
    for rank in range(3):
        total = total + inputs.run(
            executor, weights=inputs.weights.take(placement.experts_of(rank)), expert_map=placement.expert_map(rank),
        ).astype(np.float32)
    assert rel_l2(total, _run(executor, case)) <= tolerances.TO_RECIPE.bound


@pytest.mark.parametrize("executor", EXECUTORS)
def test_empty_batch(executor: str) -> None:
    _need(executor)
    inputs = _inputs(_plain(executor))
    ids = inputs.adapter_ids[:0]
    got = inputs.run(executor, x=inputs.x[:0], topk_weights=inputs.topk_weights[:0], topk_ids=inputs.topk_ids[:0],
                     adapter_ids=ids)
    assert got.shape == (0, SMALL.hidden_dim)
