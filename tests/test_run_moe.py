# SPDX-License-Identifier: Apache-2.0
"""What `run_moe` and the data classes refuse, and what they say."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

import isomoe
from isomoe.common.checks import check_choice
from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.common.executors import _recipe_of, executor_class
from isomoe.common.metrics import compare, cosine, rel_l2, worst_row
from isomoe.common.numerics import BF16, E4M3
from isomoe.common.placement import ExpertPlacement
from isomoe.common.recipes import Recipe, default_recipe
from isomoe.common.support import declared_support
from isomoe.common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights
from isomoe.tests.matrix import SMALL, Case, build

CASE = Case("channel", "w8a8", "mixed")


@pytest.fixture(scope="module")
def inputs():
    return build(CASE)


BAD_CALLS = [
    (lambda i: {"x": i.x.astype(np.float32)}, TypeError, "x: got dtype float32, want bfloat16"),
    (lambda i: {"x": i.x[:, :-1]}, ValueError, r"x: got shape \[16, 255\], want \[any, 256\]"),
    (lambda i: {"x": i.x.tolist()}, TypeError, "x: got list, want a numpy array"),
    (lambda i: {"topk_weights": i.topk_weights[:, :1]}, ValueError, r"topk_weights: got shape \[16, 1\]"),
    (lambda i: {"topk_weights": i.topk_weights.astype(np.float64)}, TypeError, "topk_weights: got dtype float64"),
    (lambda i: {"topk_ids": i.topk_ids.astype(np.int8)}, TypeError, "topk_ids: got dtype int8"),
    (lambda i: {"topk_ids": i.topk_ids[:-1]}, ValueError, r"topk_ids: got shape \[15, 2\], want \[16, 2\]"),
    (lambda i: {"weights": i.weights.w13}, TypeError, "weights: got ndarray, want MoEWeights"),
    (lambda i: {"config": {}}, TypeError, "config: got dict, want FusedMoEConfig"),
    (lambda i: {"config": replace(CASE.config, num_experts=16)}, ValueError, "weights: got w13 .* the config wants"),
    (
        lambda i: {"config": replace(CASE.config, has_bias=True)},
        ValueError,
        "no w13_bias, the config has has_bias=True",
    ),
    (lambda i: {"ep_size": 0}, ValueError, "ep_size: got 0, want at least 1"),
    (lambda i: {"ep_size": 2.0}, TypeError, "ep_size: got 2.0, want an int"),
    (lambda i: {"recipe": "w4a8"}, ValueError, r"recipe: got 'w4a8', want one of .*did you mean 'w8a8'"),
    (lambda i: {"recipe": "bf16"}, ValueError, "recipe: got 'bf16' for weights of scheme 'channel'"),
    (lambda i: {"recipe": Recipe("w8a8", "static", "static")}, ValueError, "weights carry no w13_input_scale"),
    (lambda i: {"adapters": [i.adapters[0]] * 2}, ValueError, r"adapters: got ids \[5, 5\], want distinct ids"),
    (lambda i: {"adapters": i.adapters[0]}, TypeError, "adapters: got LoRAAdapter, want a sequence of LoRAAdapter"),
    (lambda i: {"adapters": ["a"]}, TypeError, "adapters: got str at 0, want LoRAAdapter"),
    (lambda i: {"adapters": i.adapters[:1]}, ValueError, r"adapter_ids: got unknown ids \[0, 11\]"),
    (lambda i: {"adapter_ids": i.adapter_ids[:3]}, ValueError, r"adapter_ids: got shape \[3\], want \[16\]"),
    (lambda i: {"adapter_ids": i.adapter_ids.astype(np.float32)}, TypeError, "adapter_ids: got dtype float32"),
    (lambda i: {"config": replace(CASE.config, max_lora_rank=8)}, ValueError, "rank 16, want at most max_lora_rank=8"),
    (lambda i: {"config": replace(CASE.config, max_loras=2)}, ValueError, "adapters: got 3, want at most max_loras=2"),
    (lambda i: {"expert_map": np.zeros(8, np.float32)}, TypeError, "expert_map: got dtype float32"),
    (lambda i: {"expert_map": np.zeros(8, np.int32)}, ValueError, "expert_map: got local indices"),
    (lambda i: {"expert_map": np.arange(8, dtype=np.int32), "ep_size": 2}, ValueError, "want ep_size=1"),
    (lambda i: {"config": replace(CASE.config, in_dtype="float16")}, ValueError, "reads bfloat16 activations"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS, ids=[m[:40] for _, _, m in BAD_CALLS])
def test_bad_calls_name_the_argument(inputs, change, error, message) -> None:
    with pytest.raises(error, match=message):
        inputs.run("reference", **change(inputs))


def test_unknown_executor_lists_the_names(inputs) -> None:
    with pytest.raises(ValueError, match=r"backend: got 'tritn', want one of .*did you mean 'triton'"):
        inputs.run("tritn")
    with pytest.raises(TypeError, match=r"executor: got NoneType, want a name"):
        inputs.run(None)


def test_adapter_for_another_model(inputs) -> None:
    other = build(replace(CASE, shape=replace(SMALL, hidden_dim=384))).adapters
    with pytest.raises(ValueError, match="adapter 5: made for another model: hidden_dim got 384, want 256"):
        inputs.run("reference", adapters=other)


def test_without_a_recipe_an_executor_runs_one_it_declares() -> None:
    weights = build(Case("channel", "w8a8")).weights
    assert _recipe_of(declared_support(executor_class("marlin")), weights.scheme) == "w8a16"
    assert _recipe_of(declared_support(executor_class("triton")), weights.scheme) == "w8a8"
    assert _recipe_of(declared_support(executor_class("triton")), "bf16") == "bf16"


def test_isomoe_check_reports_skipped_ids(inputs, monkeypatch, caplog) -> None:
    ids = inputs.topk_ids.copy()
    ids[3, 1] = 10**6
    with caplog.at_level(logging.WARNING):
        silent = inputs.run("reference", topk_ids=ids)
        assert not caplog.records
        monkeypatch.setenv("ISOMOE_CHECK", "1")
        loud = inputs.run("reference", topk_ids=ids)
    assert "1 of 32 ids are outside [0, 8)" in caplog.text and "1000000 at token 3, k 1" in caplog.text
    assert (silent == loud).all()


def test_ids_beyond_int32_are_skipped_not_wrapped(inputs) -> None:
    """vllm#50845: a huge stale id must not alias a real expert."""
    ids = inputs.topk_ids.astype(np.int64)
    want = ids.copy()
    want[0, 0] = -1
    ids[0, 0] = 2**32 + 3
    assert (inputs.run("reference", topk_ids=ids) == inputs.run("reference", topk_ids=want)).all()


def _weights(**changes) -> dict:
    w = build(Case("channel", "w8a8")).weights
    return {f: changes.get(f, getattr(w, f)) for f in ("scheme", "w13", "w2", "w13_scale", "w2_scale")} | changes


def _poke(array: np.ndarray, value: float) -> np.ndarray:
    out = array.copy()
    out[(1,) * out.ndim] = value
    return out


W = _weights()
BAD_WEIGHTS = [
    ({"scheme": "chanel"}, ValueError, "scheme: got 'chanel', want one of .*did you mean 'channel'"),
    ({"w13": W["w13"].astype(np.float32)}, TypeError, "w13: got dtype float32, want float8_e4m3fn"),
    ({"w13": W["w13"][:, :100]}, ValueError, r"w13: got shape \[8, 100, 256\] with w2"),
    ({"w2": W["w2"][:4]}, ValueError, r"w2: got shape \[4, 256, 128\], want \[8, 256, any\]"),
    (
        {"w13": _poke(W["w13"], np.nan)},
        ValueError,
        r"w13: got 1 non-finite values in slice 1, the first at \(1, 1, 1\)",
    ),
    ({"w13_scale": None}, ValueError, r"w13_scale: got None with scheme 'channel', want float32 \[8, 256\]"),
    ({"w2_scale": W["w2_scale"][:, :-1]}, ValueError, r"w2_scale: got shape \[8, 255\] with scheme 'channel'"),
    ({"w2_scale": W["w2_scale"].astype(BF16)}, TypeError, "w2_scale: got dtype bfloat16, want float32"),
    ({"w2_scale": _poke(W["w2_scale"], np.inf)}, ValueError, "w2_scale: got 1 non-finite"),
    ({"w2_scale": _poke(W["w2_scale"], 0)}, ValueError, "w2_scale: got values <= 0"),
    ({"w13_bias": np.zeros((8, 256), np.float32)}, ValueError, "w2_bias: got one of w13_bias and w2_bias"),
    ({"w13_input_scale": np.float32(1) * np.ones(1, np.float32)}, ValueError, "w2_input_scale: got one of"),
    (
        {"w13_input_scale": np.ones(1, np.float32), "w2_input_scale": np.ones(1, np.float32)},
        ValueError,
        "w13_input_scale: got an array with scheme 'channel'",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_WEIGHTS, ids=[m[:40] for _, _, m in BAD_WEIGHTS])
def test_bad_weights(change, error, message) -> None:
    with pytest.raises(error, match=message):
        MoEWeights(**_weights(**change))


def test_static_input_scales_use_the_layers_maximum() -> None:
    inputs = build(Case("tensor", "w8a8"))
    scales = {
        "w13_input_scale": np.linspace(0.01, 0.02, 8).astype(np.float32),
        "w2_input_scale": np.full(8, 0.03, np.float32),
    }
    weights = replace(inputs.weights, **scales)
    one = replace(
        inputs.weights, w13_input_scale=np.array([0.02], np.float32), w2_input_scale=np.array([0.03], np.float32)
    )
    got = inputs.run("reference", weights=weights)
    assert (got == inputs.run("reference", weights=one)).all()
    assert default_recipe("w8a8", "tensor", static_input=True).x_group == "static"
    # A rank that holds only quiet experts still quantises by the layer's scale.
    assert weights.take(np.array([0, 1])).w13_input_scale == np.float32(0.02)


@pytest.mark.parametrize("scheme", ["block", "channel", "tensor", "bf16"])
def test_quantised_weights_are_close_and_checked(scheme: str) -> None:
    rng = np.random.default_rng(0)
    w13, w2 = rng.standard_normal((2, 512, 192), np.float32), rng.standard_normal((2, 192, 256), np.float32)
    weights = quantize_moe_weights(w13, w2, scheme)
    got13, got2 = weights.dequantize(1)
    assert rel_l2(got13, w13[1]) < 0.03 and rel_l2(got2, w2[1]) < 0.03
    if scheme in ("channel", "tensor"):
        s13, s2 = weights.channel_scales()
        assert s13.shape == (2, 512) and s2.shape == (2, 192)
        assert (weights.w13[1].astype(np.float32) * s13[1][:, None] == got13).all()
    with pytest.raises(ValueError, match="w13: got 1 non-finite"):
        quantize_moe_weights(_poke(w13, np.nan), w2, scheme)


def test_half_a_block_of_intermediate_keeps_gate_and_up_scales_apart() -> None:
    """I = 192 is one and a half blocks: up's first block must not share a scale with gate's last."""
    rng = np.random.default_rng(1)
    w13 = rng.standard_normal((1, 384, 128)).astype(np.float32)
    w13[:, 192:] *= 1000
    weights = quantize_moe_weights(w13, rng.standard_normal((1, 128, 192)).astype(np.float32), "block")
    assert weights.w13_scale.shape == (1, 4, 1)
    assert weights.w13_scale[0, 1, 0] < 0.05 < weights.w13_scale[0, 2, 0]
    assert rel_l2(weights.dequantize(0)[0][:192], w13[0, :192]) < 0.03


def _adapter(**changes) -> dict:
    a = build(CASE).adapters[0]
    return {f: changes.get(f, getattr(a, f)) for f in ("adapter_id", "a13", "b13", "a2", "b2")}


A = _adapter()
BAD_ADAPTERS = [
    ({"adapter_id": -1}, ValueError, "adapter_id: got -1, want at least 0"),
    ({"adapter_id": 2**31}, ValueError, "adapter_id: got 2147483648, want less than 2..31"),
    ({"a13": A["a13"][:, :1]}, ValueError, r"a13: got shape \[8, 1, 8, 256\], want \[any, 2, 8, any\]"),
    ({"a13": A["a13"][:3]}, ValueError, "a13: got 3 experts, want 8, or 1 where it is shared"),
    ({"b13": A["b13"].astype(E4M3)}, TypeError, "b13: got dtype float8_e4m3fn"),
    ({"a2": A["a2"][:, :4]}, ValueError, r"a2: got shape \[8, 4, 128\], want \[8, 8, 128\]"),
    ({"b2": _poke(A["b2"], np.nan)}, ValueError, "b2: got 1 non-finite"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ADAPTERS, ids=[m[:40] for _, _, m in BAD_ADAPTERS])
def test_bad_adapters(change, error, message) -> None:
    with pytest.raises(error, match=message):
        LoRAAdapter(**_adapter(**change))


BAD_CONFIGS = [
    ({"num_experts": 0}, ValueError, "num_experts: got 0"),
    ({"experts_per_token": 9}, ValueError, "experts_per_token: got 9, want at most num_experts=8"),
    ({"activation": "sliu"}, ValueError, "activation: got 'sliu', want one of .*did you mean 'silu'"),
    ({"scoring_func": "tanh"}, ValueError, "scoring_func: got 'tanh'"),
    ({"activation": np.array(["silu", "gelu"])}, ValueError, "activation: got array"),
    ({"renormalize": "no"}, TypeError, "renormalize: got 'no', want True or False"),
    ({"routed_scaling_factor": 0}, ValueError, "routed_scaling_factor: got 0"),
    ({"routed_scaling_factor": float("inf")}, ValueError, "routed_scaling_factor: got inf"),
    ({"routed_scaling_factor": 10**400}, ValueError, "routed_scaling_factor: got 1000"),
    ({"routed_scaling_factor": True}, ValueError, "routed_scaling_factor: got True"),
    ({"num_expert_group": 4}, ValueError, "topk_group: got num_expert_group=4 with topk_group=None"),
    ({"num_expert_group": 3, "topk_group": 1}, ValueError, "num_expert_group: got 3, want a divisor"),
    ({"num_expert_group": 8, "topk_group": 1}, ValueError, "experts_per_token: got 2, want at most the 1 experts"),
    ({"max_lora_rank": 513}, ValueError, "max_lora_rank: got 513, want at most 512"),
    ({"in_dtype": "float8"}, ValueError, "in_dtype: got 'float8'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CONFIGS, ids=[m[:40] for _, _, m in BAD_CONFIGS])
def test_bad_configs(change, error, message) -> None:
    with pytest.raises(error, match=message):
        FusedMoEConfig(
            **({"num_experts": 8, "experts_per_token": 2, "hidden_dim": 64, "intermediate_size": 64} | change)
        )


def test_configs_round_trip_through_repr() -> None:
    config = FusedMoEConfig(8, 2, 64, 32, moe_parallel_config=FusedMoEParallelConfig(ep_size=4, ep_rank=1, use_ep=True))
    names = {
        n: getattr(isomoe, n)
        for n in ("FusedMoEConfig", "FusedMoEParallelConfig", "GroupShape", "ScaleDesc", "QuantKey")
    }
    assert eval(repr(config), names) == config
    for key in ("kFp8StaticTensorSym", "kFp8DynamicTokenSym", "kFp8Static128BlockSym", "kFp8Dynamic128Sym"):
        value = getattr(isomoe, key)
        assert eval(repr(value), names) == value and "f8e4m3fn" in str(value)
    with pytest.raises(ValueError, match="ep_rank: got 4, want less than ep_size=4"):
        FusedMoEParallelConfig(ep_size=4, ep_rank=4)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("experts", "ranks"), [(8, 3), (7, 8), (160, 8), (5, 1)])
def test_placements_cover_every_expert_once(experts: int, ranks: int, strategy: str) -> None:
    placement = ExpertPlacement(experts, ranks, strategy)
    held = [placement.experts_of(r) for r in range(ranks)]
    assert sorted(np.concatenate(held).tolist()) == list(range(experts))
    sizes = [len(h) for h in held]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) == placement.max_local_experts
    assert sizes == sorted(sizes, reverse=True), "the first ranks take the remainder, as in vLLM"
    for rank, mine in enumerate(held):
        expert_map = placement.expert_map(rank)
        assert (expert_map >= 0).sum() == len(mine) and (expert_map[mine] == np.arange(len(mine))).all()


def test_metrics_never_pass_nan() -> None:
    good = np.ones((4, 8), np.float32)
    bad = _poke(good, np.nan)
    assert rel_l2(bad, good) == worst_row(bad, good) == float("inf") and cosine(bad, good) == -1
    assert compare(bad, good).non_finite == 1
    one_row = good.copy()
    one_row[2] *= 2
    assert rel_l2(one_row, good) == pytest.approx(0.5) and worst_row(one_row, good) == 1.0


def test_near_misses_are_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        check_choice("backend", "trition", ["triton", "marlin"])
