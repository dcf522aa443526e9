# SPDX-License-Identifier: Apache-2.0
"""Reports about router logits, expert ids, empty and padded batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import executor_class, make_call
from isomoe.common.metrics import bitwise_equal, rel_l2, worst_row
from isomoe.common.numerics import BF16
from isomoe.common.placement import ExpertPlacement
from isomoe.common.reference import reference_moe
from isomoe.common.routing import route
from isomoe.common.weights import MoEWeights, quantize_moe_weights
from isomoe.tests.conformance import CHECKS, Judge, Subject, inputs_of, subject_for
from isomoe.tests.ledger.record import RNG, cases, check, report
from isomoe.tests.matrix import Case, Shape


def served(executor: str, **changes: object) -> tuple[Subject, Case]:
    """The executor, and a small case of a recipe that it declares."""
    subject = subject_for(executor)
    for scheme, recipe in (("channel", "w8a8"), ("channel", "w8a16")):
        case = Case(scheme, recipe, **changes)  # type: ignore[arg-type]
        if not subject.why_not(case):
            return subject, case
    raise AssertionError(f"{executor} serves no case")


def holds(name: str, executor: str, **changes: object) -> None:
    """A conformance check on a small case; test_matrix runs the same checks on every other executor."""
    subject, case = served(executor, **changes)
    judge = Judge()
    CHECKS[name].run(subject, case, judge)
    assert judge.figures
    assert not judge.reason, judge.reason


def small_layer(experts: int, hidden: int, inter: int, scheme: str = "channel") -> MoEWeights:
    w13 = (RNG.standard_normal((experts, 2 * inter, hidden)) / np.sqrt(hidden)).astype(np.float32)
    w2 = (RNG.standard_normal((experts, hidden, inter)) / np.sqrt(inter)).astype(np.float32)
    return quantize_moe_weights(w13, w2, scheme)


def run_layer(weights: MoEWeights, k: int, x: np.ndarray, ids: np.ndarray, **options: object) -> np.ndarray:
    """The reference on any layer, equal router weights."""
    config = FusedMoEConfig(weights.w13.shape[0], k, weights.hidden_dim, weights.intermediate_size)
    topk = np.full(ids.shape, 1 / k, np.float32)
    call = make_call(x.astype(BF16), topk, ids, weights, config=config, **options)  # type: ignore[arg-type]
    return executor_class("reference").run(call)  # type: ignore[attr-defined]


@report("sglang#30079", symptom="an all-NaN gate row gives expert id N + 1 and an illegal access")
def nan_logits() -> None:
    logits = RNG.standard_normal((8, 128)).astype(np.float32)
    logits[0] = np.nan
    logits[3, 5] = np.nan
    _, ids = route(logits, FusedMoEConfig(128, 8, 64, 64))
    assert ((ids >= 0) & (ids < 128)).all()
    assert all(len(set(row)) == 8 for row in ids)


@report("aiter#4530", symptom="inf or NaN in padding tokens faults the routing sort")
def poisoned_padding() -> None:
    for poison in (np.inf, -np.inf, np.nan):
        logits = RNG.standard_normal((8, 16)).astype(np.float32)
        clean, ids = route(logits, FusedMoEConfig(16, 2, 64, 64))
        logits[-1] = poison
        weights, got = route(logits, FusedMoEConfig(16, 2, 64, 64))
        assert ((got >= 0) & (got < 16)).all() and len(set(got[-1])) == 2
        assert bitwise_equal(weights[:-1], clean[:-1]) and bitwise_equal(got[:-1], ids[:-1])


@report(
    "vllm#50845", symptom="a stale, large positive id passes an expert_map check that looks at the sign only"
)
def stale_id(executor: str) -> None:
    subject, case = served(executor)
    inputs = inputs_of(case)
    far, gone = inputs.topk_ids.astype(np.int64), inputs.topk_ids.copy()
    far[0, 0], gone[0, 0] = 10**6, -1
    assert bitwise_equal(subject.run(case, topk_ids=far), subject.run(case, topk_ids=gone))


@report("aiter#4636", symptom="negative ids under expert parallelism read out of bounds")
def negative_ids_under_ep(executor: str) -> None:
    subject, case = served(executor, ep=2)
    inputs = inputs_of(case)
    ids = inputs.topk_ids.copy()
    ids[3] = -1
    got = subject.run(case, topk_ids=ids)
    assert not got[3].astype(np.float32).any()
    assert rel_l2(got, inputs.run("reference", topk_ids=ids, ep_size=1)) < 2e-2


@report("vllm-gguf-plugin#133", symptom="a profiling run of padding alone reads before the expert tensor")
def all_padding() -> None:
    holds("all_skipped", "reference")


@report("sonar#1782", symptom="ids equal to the local number of experts scatter out of bounds")
def id_equal_to_local_count(executor: str) -> None:
    subject, case = served(executor)
    inputs = inputs_of(case)
    placement = ExpertPlacement(8, 2)
    share = {
        "weights": inputs.weights.take(placement.experts_of(0)),
        "expert_map": placement.expert_map(0),
        "ep_size": 1,
    }
    ids = np.full_like(inputs.topk_ids, 4)  # local experts are 0 to 3; expert 4 is another rank's
    assert not subject.run(case, topk_ids=ids, **share).astype(np.float32).any()


@report(
    "sglang#22455",
    "tpu-inference#1806",
    "tpu-inference#1864",
    symptom="no token at all, or none for most experts: sizes that are no power of two, memory not cleared",
)
def empty_and_lopsided() -> None:
    weights = small_layer(3, 96, 40)
    assert run_layer(weights, 1, np.zeros((0, 96)), np.zeros((0, 1), np.int32)).shape == (0, 96)
    x, ids = RNG.standard_normal((17, 96)), np.ones((17, 1), np.int32)  # groups of 0, 17 and 0 tokens
    got = run_layer(weights, 1, x, ids)
    alone = run_layer(weights.take(np.array([1])), 1, x, np.zeros((17, 1), np.int32))
    assert np.isfinite(got.astype(np.float32)).all()
    assert bitwise_equal(got, alone)


@report("aiter#3995", symptom="routing gives global ids while the weights are a rank's own")
def global_ids_local_weights() -> None:
    holds("expert_map", "reference", lora="mixed")


@report("vllm#5939", "vllm#34086", symptom="more than 65,536 tokens: grid limits and 16-bit indices")
def many_tokens() -> None:
    weights = small_layer(2, 16, 8)
    x = RNG.standard_normal((65_537, 16))
    ids = (np.arange(65_537, dtype=np.int32) % 2)[:, None]
    got = run_layer(weights, 1, x, ids)
    last = run_layer(weights, 1, x[-2:], ids[-2:])
    assert bitwise_equal(got[-2:], last)


@report(
    "pytorch#174314",
    "pytorch#154557",
    "cosmos-rl#32",
    symptom="experts with fewer than 128 or no tokens give NaN",
)
def small_groups() -> None:
    weights = small_layer(4, 64, 32)
    ids = np.array([[1]] * 5 + [[3]], np.int32)  # groups of 0, 5, 0 and 1
    got = run_layer(weights, 1, RNG.standard_normal((6, 64)), ids).astype(np.float32)
    assert np.isfinite(got).all() and got.any(axis=1).all()


@report("aiter#4032", symptom="one token at E=256 in tiles of 16 rows turns NaN in a live server")
def one_token_many_experts() -> None:
    weights = small_layer(256, 128, 16, "block")
    x = RNG.standard_normal((1, 128))
    ids = np.array([[0, 255]], np.int32)
    got = run_layer(weights, 2, x, ids)
    pair = run_layer(weights.take(np.array([0, 255])), 2, x, np.array([[0, 1]], np.int32))
    assert np.isfinite(got.astype(np.float32)).all()
    assert bitwise_equal(got, pair)


@report(
    "flashinfer#3547",
    "flashinfer#3957",
    symptom="a local expert offset above zero gives zeros, or writes past the end",
)
def expert_offsets() -> None:
    subject, case = served("reference")
    inputs, whole = inputs_of(case), np.zeros(inputs_of(case).x.shape, np.float32)
    for ep in (2, 4, 8):
        total = np.zeros_like(whole)
        for rank in range(ep):
            placement = ExpertPlacement(8, ep)
            part = subject.run(
                case,
                weights=inputs.weights.take(placement.experts_of(rank)),
                expert_map=placement.expert_map(rank),
            ).astype(np.float32)
            visits = np.isin(inputs.topk_ids, placement.experts_of(rank)).any(axis=1)
            assert part[visits].any(axis=1).all(), "a rank with an offset returned zeros"
            assert not part[~visits].any()
            total += part
        assert rel_l2(total, subject.result(case)) < 5e-3


@report("tpu-inference#1252", symptom="top-k takes padded gating columns, so ids pass the number of experts")
def padded_gating_columns() -> None:
    logits = np.full((32, 40), -5, np.float32)
    _, ids = route(logits, FusedMoEConfig(40, 8, 256, 128))
    assert (ids < 40).all()
    assert (ids == np.arange(8)).all(), "ties go to the lower index"


@report("tpu-inference#1472", symptom="sigmoid routing in bfloat16 loses the order of scores")
def sigmoid_in_f32() -> None:
    logits = RNG.uniform(-30, 30, (64, 32)).astype(BF16)
    weights, ids = route(logits, FusedMoEConfig(32, 4, 64, 64, scoring_func="sigmoid", renormalize=False))
    exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert np.allclose(weights, np.take_along_axis(exact, ids, 1), rtol=1e-5)
    assert weights.dtype == np.float32


@report("vllm#16474", "vllm#6264", symptom="the router's float32 logits meet bfloat16 activations")
def f32_logits_and_bf16_rows() -> None:
    logits = RNG.standard_normal((8, 16)).astype(np.float32)
    config = FusedMoEConfig(16, 2, 64, 32)
    weights, ids = route(logits, config)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    rounded, _ = route(logits.astype(BF16), config)
    assert not bitwise_equal(weights, rounded), "float32 logits must not be rounded to bfloat16"
    layer = small_layer(16, 64, 32)
    call = make_call(RNG.standard_normal((8, 64)).astype(BF16), weights, ids, layer, config=config)
    assert np.isfinite(reference_moe(call)).all()


@report("tpu-inference#2233", symptom="int64 group sizes crash under x64")
def int64_ids(executor: str) -> None:
    subject, case = served(executor, lora="mixed")
    inputs = inputs_of(case)
    wide = subject.run(
        case,
        topk_ids=inputs.topk_ids.astype(np.int64),
        adapter_ids=inputs.adapter_ids.astype(np.int64),  # type: ignore[union-attr]
    )
    assert bitwise_equal(wide, subject.result(case))


@report("tpu-inference#1941", symptom="rows of groups that are not local keep what was in memory")
def remote_rows_are_zero(executor: str) -> None:
    subject, case = served(executor)
    inputs, placement = inputs_of(case), ExpertPlacement(8, 2)
    ids = np.where(inputs.topk_ids < 4, inputs.topk_ids + 4, inputs.topk_ids).astype(np.int32)
    ids[:, 1] = np.where(ids[:, 0] == ids[:, 1], 4 + (ids[:, 1] - 3) % 4, ids[:, 1])
    got = subject.run(
        case,
        topk_ids=ids,
        weights=inputs.weights.take(placement.experts_of(0)),
        expert_map=placement.expert_map(0),
    )
    assert not got.astype(np.float32).any()


@report(
    "tpu-inference#3135",
    "tpu-inference#3219",
    symptom="one token a group over 64 groups takes the wrong scales",
)
def groups_of_one() -> None:
    weights = small_layer(64, 32, 16)
    x = RNG.standard_normal((64, 32))
    ids = np.arange(64, dtype=np.int32)[:, None]
    got = run_layer(weights, 1, x, ids)
    for e in (0, 31, 63):
        assert bitwise_equal(
            got[e], run_layer(weights.take(np.array([e])), 1, x[[e]], np.zeros((1, 1), np.int32))[0]
        )


@report("sglang-jax#1507", symptom="decode batches that do not divide by the ranks")
def odd_batch_over_ranks(executor: str) -> None:
    subject, case = served(executor, ep=4, tokens=13)
    got = subject.result(case)
    assert got.shape[0] == 13
    assert worst_row(got, inputs_of(case).run("reference", ep_size=1)) < 3e-2


@report("vllm#25760", symptom="E=512 over four ranks fails")
def many_experts_over_ranks() -> None:
    weights = small_layer(512, 32, 8)
    x, ids = RNG.standard_normal((9, 32)), RNG.integers(0, 512, (9, 1)).astype(np.int32)
    total = np.zeros((9, 32), np.float32)
    for rank in range(4):
        placement = ExpertPlacement(512, 4)
        config = FusedMoEConfig(512, 1, 32, 8)
        call = make_call(
            x.astype(BF16),
            np.ones((9, 1), np.float32),
            ids,
            weights.take(placement.experts_of(rank)),
            config=config,
            expert_map=placement.expert_map(rank),
        )
        total += reference_moe(call)
    assert rel_l2(total, run_layer(weights, 1, x, ids)) < 5e-3


@report(
    "vllm#33543",
    "vllm#51290",
    "vllm#45683",
    symptom="results differ from run to run, or with the order of the combine",
)
def fixed_order() -> None:
    case = Case("channel", "w8a8", "mixed", shape=Shape(8, 4, 256, 128))
    inputs = inputs_of(case)
    assert bitwise_equal(inputs.run("reference"), inputs.run("reference"))
    call = make_call(
        inputs.x, inputs.topk_weights, inputs.topk_ids, inputs.weights, config=replace(case, lora="none").config
    )
    terms = np.zeros((4, *inputs.x.shape), np.float32)
    for k in range(4):
        only = np.full_like(inputs.topk_ids, -1)
        only[:, k] = inputs.topk_ids[:, k]
        terms[k] = reference_moe(replace(call, topk_ids=only))
    ordered = np.zeros_like(terms[0])
    for term in terms:
        ordered = ordered + term
    assert bitwise_equal(reference_moe(call), ordered), "the sum runs k = 0 .. K-1 in float32"


@cases(__name__)
def test_report(name: str, executor: str) -> None:
    check(name, executor)
