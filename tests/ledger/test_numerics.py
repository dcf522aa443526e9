# SPDX-License-Identifier: Apache-2.0
"""Reports about FP8, scales, rounding, padding rows and layer sizes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from isomoe.common import tolerances
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import make_call, run_moe
from isomoe.common.metrics import bitwise_equal, cosine, rel_l2
from isomoe.common.numerics import BF16, E4M3, cast_fp8, quantize_fp8
from isomoe.common.platforms import Platform
from isomoe.common.reference import reference_moe, truth
from isomoe.common.weights import MoEWeights, quantize_moe_weights
from isomoe.tests.conformance import inputs_of
from isomoe.tests.ledger.record import RNG, cases, check, report
from isomoe.tests.ledger.test_routing_and_ids import holds, run_layer, served, small_layer
from isomoe.tests.matrix import WIDE, Case


@report(
    "ml_dtypes#260",
    "ml_dtypes#400",
    "pytorch#178817",
    "torchao#4359",
    "torchao#4364",
    symptom="values above 448 become NaN in one library and 448 in another",
)
def overflow_is_clipped() -> None:
    x = np.array([448, 449, 464, 480, 1e4, np.inf, -1e4], np.float32)
    codes = cast_fp8(x, np.float32(1)).astype(np.float32)
    assert np.array_equal(codes, [448, 448, 448, 448, 448, 448, -448])
    assert np.isnan(x[4:5].astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).all(), "the cast alone gives NaN"


@report("tpu-inference#1880", symptom="a row of zeros gives 0 / 0")
def zero_rows(executor: str) -> None:
    codes, scales = quantize_fp8(np.zeros((2, 256), np.float32), 128)
    assert (scales > 0).all() and not codes.astype(np.float32).any()
    subject, case = served(executor)
    inputs = inputs_of(case)
    x = inputs.x.copy()
    x[4] = 0
    got = subject.run(case, x=x).astype(np.float32)
    assert not got[4].any() and np.isfinite(got).all()


@report("gap: zero weight rows", symptom="an all-zero expert row gives 0 / 0")
def zero_weight_rows() -> None:
    w13 = RNG.standard_normal((2, 64, 32)).astype(np.float32)
    w13[:, 3] = 0
    weights = quantize_moe_weights(w13, RNG.standard_normal((2, 32, 32)).astype(np.float32), "channel")
    assert np.isfinite(weights.w13_scale).all()
    assert np.isfinite(
        run_layer(weights, 1, RNG.standard_normal((3, 32)), np.zeros((3, 1), np.int32)).astype(np.float32)
    ).all()


@report(
    "vllm#31394",
    "flashinfer#2356",
    symptom="block scales near 1e-8 underflow in low precision; accuracy collapses",
)
def tiny_block_scales() -> None:
    weights = small_layer(2, 256, 128, "block")
    tiny = replace(
        weights,
        w13_scale=(weights.w13_scale / weights.w13_scale.max() * 1e-8).astype(np.float32),
        w2_scale=weights.w2_scale * 1e3,
    )
    x = (RNG.standard_normal((6, 256)) * 1e3).astype(BF16)
    call = make_call(
        x,
        np.ones((6, 1), np.float32),
        np.zeros((6, 1), np.int32),
        tiny,
        config=FusedMoEConfig(2, 1, 256, 128),
        recipe="w8a16",
    )
    assert rel_l2(reference_moe(call), truth(call)) < 1e-2
    assert reference_moe(call).any()


@report("tpu-inference#1432", symptom="per-channel scales applied by part of the contraction")
def channel_equals_repeated_blocks() -> None:
    """One scale a channel, and the same scale in every block of 128, are one matrix."""
    w = small_layer(2, 256, 128, "tensor")
    s13 = np.repeat(np.repeat(w.w13_scale[:, :, None], 1, 2), 2, 2).astype(np.float32)
    s2 = np.repeat(w.w2_scale[:, None, None], 2, 1).astype(np.float32)
    block = MoEWeights("block", w.w13, w.w2, s13, s2)
    c13, c2 = w.channel_scales()
    channel = MoEWeights("channel", w.w13, w.w2, c13, c2)
    for e in range(2):
        for a, b in zip(block.dequantize(e), channel.dequantize(e), strict=True):
            assert bitwise_equal(a, b)
    x, ids = RNG.standard_normal((5, 256)), np.array([[0], [1], [0], [1], [1]], np.int32)
    assert (
        rel_l2(run_layer(block, 1, x, ids, recipe="w8a16"), run_layer(channel, 1, x, ids, recipe="w8a16"))
        < 3e-3
    )


@report(
    "tpu-inference#1627",
    "tpu-inference#2405",
    "tpu-inference#2793",
    "tpu-inference#2891",
    "tpu-inference#2325",
    symptom="several quantisation blocks in one tile share a scale, or blocks are requantised on the way",
)
def distinct_block_scales(executor: str) -> None:
    subject, case = served(executor)
    recipe = "w8a8" if "w8a8" in subject.support.recipes else "w8a16"
    case = Case("block", recipe, shape=replace(WIDE, num_experts=2, experts_per_token=1), tokens=4)
    inputs = inputs_of(case)
    steps = 2.0 ** (np.arange(inputs.weights.w13_scale.size) % 4)
    weights = replace(
        inputs.weights,
        w13_scale=(inputs.weights.w13_scale * steps.reshape(inputs.weights.w13_scale.shape)).astype(np.float32),
    )
    got = subject.run(case, weights=weights)
    want = inputs.run("reference", weights=weights, recipe=recipe)
    assert rel_l2(got, want) <= tolerances.TO_RECIPE.bound
    assert rel_l2(got, inputs.run("reference", recipe=recipe)) > 0.1, "the scales make no difference"


@report(
    "vllm#34892", "sglang#21317", "vllm#11764", symptom="a backend's numerics lose accuracy that another keeps"
)
def cosine_to_truth(executor: str) -> None:
    subject, case = served(executor)
    truth_ = inputs_of(case).run("reference", recipe="float64", ep_size=1)
    assert cosine(subject.result(case), truth_) > 0.999
    assert rel_l2(subject.result(case), truth_) <= tolerances.W8A8_TO_TRUTH.bound


@report("vllm#49546", symptom="a W8A16 kernel fed FP8 activations is wrong on one architecture, and faster")
def w8a16_refuses_fp8_activations() -> None:
    inputs = inputs_of(Case("channel", "w8a8"))
    with pytest.raises(ValueError, match=r"recipe: got 'w8a8', executor 'marlin' runs w8a16"):
        inputs.run("marlin")


@report(
    "vllm#17569",
    "vllm#25292",
    "vllm#54178",
    "Qwen3#1485",
    "vllm#58152",
    "vllm#52997",
    "vllm#48173",
    "vllm#39046",
    symptom="a tensor-parallel share that is no multiple of 128 cuts a scale block",
)
def block_shares() -> None:
    from isomoe.common.layer_buffers import LayerLayout

    def layout(share: int, tp: int) -> LayerLayout:
        return LayerLayout("block", "weight_scale_inv", False, False, True, 8, tuple(range(8)), 2048, share, tp)

    for inter, tp in ((640, 2), (640, 4), (768, 4), (1536, 8), (2560, 8)):
        with pytest.raises(
            ValueError, match=r"a scale block cannot be cut; use fewer tensor-parallel ranks, or expert"
        ):
            layout(inter // tp, tp)
    assert layout(256, 4).specs()["w13_weight_scale_inv"].shape == (8, 4, 16)
    # Whole experts of the same sizes are served.
    weights = small_layer(2, 128, 320, "block")
    assert weights.w13_scale.shape == (2, 6, 1)
    x = RNG.standard_normal((3, 128))
    call = make_call(
        x.astype(BF16),
        np.ones((3, 1), np.float32),
        np.zeros((3, 1), np.int32),
        weights,
        config=FusedMoEConfig(2, 1, 128, 320),
        recipe="w8a16",
    )
    assert rel_l2(reference_moe(call), truth(call)) < 1e-2


@report("vllm#44763", symptom="online block quantisation of a width of 192")
def online_blocks_of_192() -> None:
    w13 = RNG.standard_normal((1, 384, 128)).astype(np.float32)
    w2 = RNG.standard_normal((1, 128, 192)).astype(np.float32)
    weights = quantize_moe_weights(w13, w2, "block")
    got13, got2 = weights.dequantize(0)
    assert rel_l2(got13, w13[0]) < 4e-2 and rel_l2(got2, w2[0]) < 4e-2


@report(
    "Primus-Turbo#320",
    "vllm#36807",
    "vllm#45703",
    "vllm#43910",
    "vllm#41947",
    "vllm#48696",
    "vllm#47769",
    symptom="sizes that are no multiple of the kernel's tile: I of 96, 232, 464, n=130, K=2880",
)
def ragged_sizes() -> None:
    for hidden, inter, scheme in (
        (256, 464, "channel"),
        (130, 232, "channel"),
        (130, 96, "block"),
        (360, 176, "block"),
    ):
        weights = small_layer(2, hidden, inter, scheme)
        x, ids = RNG.standard_normal((48, hidden)), (np.arange(48, dtype=np.int32) % 2)[:, None]
        config = FusedMoEConfig(2, 1, hidden, inter)
        for recipe, bound in (("w8a8", tolerances.W8A8_TO_TRUTH), ("w8a16", tolerances.W8A16_TO_TRUTH)):
            call = make_call(
                x.astype(BF16), np.ones((48, 1), np.float32), ids, weights, config=config, recipe=recipe
            )
            assert rel_l2(reference_moe(call), truth(call)) <= bound.bound, (hidden, inter, scheme, recipe)


@report(
    "flashinfer#3650",
    symptom="NaN in a tile's padding rows corrupts its valid rows; global cosine still 0.9997",
)
def nan_in_padding() -> None:
    holds("padding_nan", "reference", lora="mixed")


@report(
    "sglang#32843", "tpu-inference one-hot unpermute", symptom="uninitialised rows of 1e35 enter an FP8 product"
)
def huge_padding(executor: str) -> None:
    subject, case = served(executor)
    inputs = inputs_of(case)
    ids = inputs.topk_ids.copy()
    ids[10:] = -1
    x = inputs.x.copy()
    clean = subject.run(case, topk_ids=ids)
    x[10:] = 3e38
    assert bitwise_equal(subject.run(case, topk_ids=ids, x=x), clean)


@report("vllm#15714", symptom="a result's dtype depends on the path taken")
def one_result_dtype() -> None:
    for scheme, recipe in (("channel", "w8a8"), ("channel", "w8a16"), ("block", "w8a8"), ("bf16", "bf16")):
        for tokens in (0, 4):
            inputs = inputs_of(Case(scheme, recipe, tokens=4))
            got = inputs.run(
                "reference",
                x=inputs.x[:tokens],
                topk_weights=inputs.topk_weights[:tokens],
                topk_ids=inputs.topk_ids[:tokens],
            )
            assert got.dtype == BF16


@report("flashinfer#3068", symptom="a fault that shows only for hidden sizes of 512 and more times K")
def wide_hidden() -> None:
    holds("parity", "reference", shape=WIDE, tokens=5)


@report(
    "tpu-inference#1136", "tpu-inference#1262", symptom="FP8 that a generation's matrix unit does not multiply"
)
def fp8_by_generation() -> None:
    assert {g: Platform.tpu(g).has_fp8_mma for g in ("v5e", "v5p", "v6e", "v7x")} == {
        "v5e": False,
        "v5p": False,
        "v6e": False,
        "v7x": True,
    }


@report("vllm#20408", "vllm#39662", "vllm#30830", symptom="online quantisation loses accuracy")
def online_quantisation() -> None:
    w13 = (RNG.standard_normal((4, 128, 256)) * np.exp(RNG.standard_normal((4, 128, 1)))).astype(np.float32)
    w2 = RNG.standard_normal((4, 256, 64)).astype(np.float32)
    for scheme in ("channel", "block"):
        weights = quantize_moe_weights(w13, w2, scheme)
        for e in range(4):
            got = weights.dequantize(e)[0]
            assert rel_l2(got, w13[e]) < 3e-2
    assert weights.w13.dtype == E4M3


@report("vllm#57405", symptom="gate and up rows exchanged")
def gate_and_up() -> None:
    weights = small_layer(1, 64, 32, "bf16")
    x = RNG.standard_normal((4, 64)).astype(BF16)
    x32, w13, w2 = x.astype(np.float64), weights.w13[0].astype(np.float64), weights.w2[0].astype(np.float64)
    gate, up = x32 @ w13[:32].T, x32 @ w13[32:].T
    want = (gate / (1 + np.exp(-gate)) * up) @ w2.T
    got = run_layer(weights, 1, x, np.zeros((4, 1), np.int32))
    assert rel_l2(got, want) < 1e-2
    assert rel_l2(got, (up / (1 + np.exp(-up)) * gate) @ w2.T) > 0.5


@report(
    "maxtext#3351",
    "maxtext#4086",
    "maxtext#1828",
    "maxtext#4969",
    symptom="the path of one rank differs from the dense layer",
)
def one_rank_is_dense(executor: str) -> None:
    subject, case = served(executor)
    inputs = inputs_of(case)
    truth_ = inputs.run("reference", recipe="float64", ep_size=1)
    assert rel_l2(subject.run(case, ep_size=1), truth_) <= tolerances.W8A8_TO_TRUTH.bound


@report("tpu-inference token scramble", symptom="tokens come back in another order")
def order_of_tokens() -> None:
    holds("permutation", "reference", lora="mixed")


@report("tpu-inference#1014", symptom="an environment variable of 0 or false is read as true")
def switches_are_off_for_zero() -> None:
    import logging

    inputs = inputs_of(Case("channel", "w8a8", routing="skipped"))
    for value, reports in (("0", False), ("false", False), ("", False), ("1", True)):
        seen: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = seen.append  # type: ignore[assignment]
        logger = logging.getLogger("isomoe.common.executors")
        logger.addHandler(handler)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ISOMOE_CHECK", value)
                run_moe(
                    "reference",
                    inputs.x,
                    inputs.topk_weights,
                    inputs.topk_ids,
                    inputs.weights,
                    config=inputs.case.config,
                )
        finally:
            logger.removeHandler(handler)
        assert bool(seen) == reports, value


@cases(__name__)
def test_report(name: str, executor: str) -> None:
    check(name, executor)
