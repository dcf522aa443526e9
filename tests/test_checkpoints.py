# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every family and scheme load bit for bit; broken ones are refused by name; headers are fuzzed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isomoe.common.checkpoints import inspect_checkpoint, load_moe_layer, load_router
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import run_moe
from isomoe.common.quant_keys import (
    kBf16,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from isomoe.common.routing import route
from isomoe.common.safe_files import TensorFile, TensorFileError, TensorStore, clean, match_pattern
from isomoe.common.weights import MoEWeights, quantize_moe_weights
from isomoe.tests.file_writers import safetensors_bytes, with_header, write_checkpoint

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
E, K, H, I = 3, 2, 160, 136  # neither width a multiple of 128: gate and up keep separate block rows
ARRAYS = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias", "w13_input_scale", "w2_input_scale")
EXPERTS = "model.layers.{}.mlp.experts"
Tensors = dict[str, np.ndarray]

QWEN = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": K,
    "hidden_size": H,
    "intermediate_size": 999,
    "moe_intermediate_size": I,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
}
FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "model.layers.1.input_layernorm"],
}


def compressed(strategy: str, activation: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' configuration for 8-bit floats."""
    inputs = {"num_bits": 8, "type": "float", "strategy": activation, "symmetric": True, "dynamic": True, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": inputs,
                "output_activations": None,
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": strategy,
                    "symmetric": True,
                    "dynamic": False,
                    "group_size": None,
                    "block_structure": [128, 128] if strategy == "block" else None,
                },
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
    }


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_weights(scheme: str, gated: bool = True) -> MoEWeights:
    return quantize_moe_weights(floats(1, E, (2 if gated else 1) * I, H), floats(2, E, H, I), scheme)


def per_expert(
    w: MoEWeights,
    *,
    root: str = EXPERTS.format(1),
    names=("gate_proj", "up_proj", "down_proj"),
    suffix="weight_scale_inv",
    scale_dtype: Any = np.float32,
    static: bool = False,
) -> Tensors:
    """A layer's tensors as checkpoints store them, one matrix an expert and projection."""
    out: Tensors = {}
    halves = w.w13.shape[1] // w.intermediate_size
    used = names if halves == 2 else names[1:]
    for e in range(E):
        for h, name in enumerate(used):
            at = f"{root}.{e}.{name}"
            down = h == halves
            out[f"{at}.weight"] = w.w2[e] if down else w.w13[e].reshape(halves, -1, H)[h]
            if w.scheme == "bf16":
                continue
            scale = (
                w.w2_scale[e]
                if down
                else w.w13_scale[e].reshape(halves, *((-1, w.w13_scale.shape[2]) if w.scheme == "block" else (-1,)))[h]
            )
            scale = scale.reshape({"block": scale.shape, "channel": (-1, 1), "tensor": ()}[w.scheme])
            out[f"{at}.{suffix}"] = scale.astype(scale_dtype)
            if static:
                out[f"{at}.input_scale"] = np.asarray([0.01 * (e + 1) + 0.001 * h], np.float32)
    return out


def same(got: MoEWeights, want: MoEWeights, but: tuple[str, ...] = ()) -> None:
    assert got.scheme == want.scheme
    for key in ARRAYS:
        if key in but:
            continue
        a, b = getattr(got, key), getattr(want, key)
        assert (a is None) == (b is None), key
        if b is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), key
            np.testing.assert_array_equal(a.view(np.uint8), np.ascontiguousarray(b).view(np.uint8), err_msg=key)


# -- schemes ------------------------------------------------------------------------------------------------------

SCHEMES: dict[str, Any] = {
    "fp8_block": ("block", FP8_BLOCK, {}, (kFp8Static128BlockSym, kFp8Dynamic128Sym)),
    "fp8_block_plain_suffix": (
        "block",
        FP8_BLOCK,
        {"suffix": "weight_scale"},
        (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    ),
    "compressed_block": (
        "block",
        compressed("block", "group", group_size=128),
        {"suffix": "weight_scale"},
        (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    ),
    "compressed_channel": (
        "channel",
        compressed("channel", "token"),
        {"suffix": "weight_scale"},
        (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    ),
    "compressed_tensor": (
        "tensor",
        compressed("tensor", "token"),
        {"suffix": "weight_scale"},
        (kFp8StaticTensorSym, kFp8DynamicTokenSym),
    ),
    "compressed_tensor_static": (
        "tensor",
        compressed("tensor", "tensor", dynamic=False),
        {"suffix": "weight_scale", "static": True},
        (kFp8StaticTensorSym, kFp8StaticTensorSym),
    ),
    "fp8_tensor": (
        "tensor",
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"suffix": "weight_scale"},
        (kFp8StaticTensorSym, kFp8DynamicTokenSym),
    ),
    "fp8_tensor_static": (
        "tensor",
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"suffix": "weight_scale", "static": True},
        (kFp8StaticTensorSym, kFp8StaticTensorSym),
    ),
    "modelopt": (
        "tensor",
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.mlp.gate"]},
        {"suffix": "weight_scale", "static": True},
        (kFp8StaticTensorSym, kFp8StaticTensorSym),
    ),
    "unquantised": ("bf16", None, {}, (kBf16, kBf16)),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_bit_for_bit(tmp_path, name, shards):
    scheme, quant, how, keys = SCHEMES[name]
    want = make_weights(scheme)
    config = {**QWEN, **({"quantization_config": quant} if quant else {})}
    tensors = per_expert(want, **how)
    write_checkpoint(tmp_path, config, tensors, shards=shards)
    got_config, got = load_moe_layer(tmp_path, 1)
    assert got_config == FusedMoEConfig(E, K, H, I)
    static = how.get("static", False)
    same(got, want, ("w13_input_scale", "w2_input_scale"))
    assert got.has_static_input == static
    if static:
        assert got.w13_input_scale == np.float32(0.031)  # the largest of gate and up over the layer
        assert got.w2_input_scale == np.float32(0.032)
    info = inspect_checkpoint(tmp_path)
    assert (info.weight_key, info.activation_key) == keys
    assert (info.scheme, info.layout, info.moe_layers, info.num_hidden_layers) == (scheme, "per_expert", (1,), 4)
    assert info.config == got_config
    assert info.bytes_per_layer == want.nbytes
    assert info.bytes_per_expert == want.nbytes // E


def test_modelopt_side_file(tmp_path):
    want = make_weights("tensor")
    write_checkpoint(tmp_path, QWEN, per_expert(want, suffix="weight_scale", static=True))
    side = {
        "producer": {"name": "modelopt", "version": "0.30"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*mlp.gate"],
        },
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    same(load_moe_layer(tmp_path, 1)[1], want, ("w13_input_scale", "w2_input_scale"))
    assert inspect_checkpoint(tmp_path).quant_method == "modelopt"


def test_bf16_scales_are_widened_exactly(tmp_path):
    want = make_weights("block")
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": FP8_BLOCK}, per_expert(want, scale_dtype=BF16))
    got = load_moe_layer(tmp_path, 1)[1]
    np.testing.assert_array_equal(got.w13_scale, want.w13_scale.astype(BF16).astype(np.float32))
    assert got.w2_scale.dtype == np.float32


@pytest.mark.parametrize("stored", [np.dtype(np.float32), E8M0])
def test_power_of_two_scales(tmp_path, stored):
    w = make_weights("block")
    pow2 = [np.exp2(np.ceil(np.log2(s))).astype(np.float32) for s in (w.w13_scale, w.w2_scale)]
    want = MoEWeights("block", w.w13, w.w2, *pow2)
    quant = {**FP8_BLOCK, "scale_fmt": "ue8m0"}
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": quant}, per_expert(want, scale_dtype=stored))
    same(load_moe_layer(tmp_path, 1)[1], want)
    assert inspect_checkpoint(tmp_path).weight_key == kFp8Static128BlockE8M0Sym


def test_exponent_scales_without_scale_fmt(tmp_path):
    w = make_weights("block")
    pow2 = [np.exp2(np.ceil(np.log2(s))).astype(np.float32) for s in (w.w13_scale, w.w2_scale)]
    want = MoEWeights("block", w.w13, w.w2, *pow2)
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": FP8_BLOCK}, per_expert(want, scale_dtype=E8M0))
    same(load_moe_layer(tmp_path, 1)[1], want)
    assert inspect_checkpoint(tmp_path).weight_key == kFp8Static128BlockE8M0Sym


def test_scales_that_are_no_powers_of_two(tmp_path):
    quant = {**FP8_BLOCK, "scale_fmt": "ue8m0"}
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": quant}, per_expert(make_weights("block")))
    with pytest.raises(
        TensorFileError, match=r"experts\.0\.gate_proj\.weight_scale_inv: got scales that are no powers"
    ):
        load_moe_layer(tmp_path, 1)


def test_some_experts_in_the_order_asked(tmp_path):
    want = make_weights("tensor")
    config = {**QWEN, "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    write_checkpoint(tmp_path, config, per_expert(want, suffix="weight_scale", static=True), shards=2)
    got_config, got = load_moe_layer(tmp_path, 1, experts=[2, 0])
    same(got, want.take(np.array([2, 0])), ("w13_input_scale", "w2_input_scale"))
    assert got_config.num_experts == E
    assert load_moe_layer(tmp_path, 1, experts=[0])[1].w2_input_scale == np.float32(
        0.032
    )  # the layer's, not expert 0's
    for bad in ([], [0, 0], [3], [-1]):
        with pytest.raises(ValueError, match=r"experts: got .*want distinct ids"):
            load_moe_layer(tmp_path, 1, experts=bad)
    for odd in ("01", 5, [1.5], [None], [True]):
        with pytest.raises(TypeError, match=r"experts: got .*, want (ints|a sequence of expert ids)"):
            load_moe_layer(tmp_path, 1, experts=odd)  # type: ignore[arg-type]
    for argument, value in (("fused_layout", "x"), ("gate_up", 5), ("budget_bytes", "1"), ("budget_bytes", -1)):
        with pytest.raises((TypeError, ValueError), match=rf"{argument}: got {value!r}, want "):
            load_moe_layer(tmp_path, 1, **{argument: value})  # also where the layout has no use for it


def test_budget_counts_before_allocating(tmp_path):
    want = make_weights("block")
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": FP8_BLOCK}, per_expert(want))
    load_moe_layer(tmp_path, 1, budget_bytes=want.nbytes)
    with pytest.raises(TensorFileError, match=rf"budget_bytes: got {want.nbytes - 1}.*layer 1 .*needs {want.nbytes}"):
        load_moe_layer(tmp_path, 1, budget_bytes=want.nbytes - 1)
    load_moe_layer(tmp_path, 1, experts=[1], budget_bytes=want.nbytes // E)


# -- families -----------------------------------------------------------------------------------------------------

DIMS = {"hidden_size": H, "moe_intermediate_size": I, "num_experts_per_tok": K, "num_hidden_layers": 4}
SIGMOID = {"n_routed_experts": E, "n_shared_experts": 1, "scoring_func": "sigmoid", "norm_topk_prob": True}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": (QWEN, {}, {}),
    "qwen3_moe_default_norm": ({k: v for k, v in QWEN.items() if k != "norm_topk_prob"}, {}, {"renormalize": False}),
    "qwen3_5_moe": (
        {
            "model_type": "qwen3_5_moe",
            "text_config": {
                **DIMS,
                "model_type": "qwen3_5_moe_text",
                "num_experts": E,
                "hidden_act": "silu",
                "shared_expert_intermediate_size": 64,
            },
        },
        {"root": "model.language_model.layers.1.mlp.experts"},
        {"renormalize": True},
    ),
    "deepseek_v3": (
        {
            **DIMS,
            **SIGMOID,
            "model_type": "deepseek_v3",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
        },
        {},
        {"scoring_func": "sigmoid", "num_expert_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "kimi_k2": (
        {**DIMS, **SIGMOID, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
        {},
        {"scoring_func": "sigmoid", "routed_scaling_factor": 2.827},
    ),
    "glm4_moe": (
        {
            **DIMS,
            "model_type": "glm4_moe",
            "n_routed_experts": E,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        {},
        {"scoring_func": "sigmoid"},
    ),
    "mixtral": (
        {
            "model_type": "mixtral",
            "hidden_size": H,
            "intermediate_size": I,
            "num_local_experts": E,
            "num_experts_per_tok": K,
            "hidden_act": "silu",
            "num_hidden_layers": 4,
        },
        {"root": "model.layers.1.block_sparse_moe.experts", "names": ("w1", "w3", "w2")},
        {},
    ),
}


@pytest.mark.parametrize("scheme", ["bf16", "block"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(tmp_path, name, scheme):
    config, how, fields = FAMILIES[name]
    want = make_weights(scheme)
    quant = {"quantization_config": FP8_BLOCK} if scheme == "block" else {}
    write_checkpoint(tmp_path, {**config, **quant}, per_expert(want, **how))
    got_config, got = load_moe_layer(tmp_path, 1)
    assert got_config == FusedMoEConfig(E, K, H, I, **fields)
    same(got, want)


def test_nemotron_has_no_gate(tmp_path):
    want = make_weights("tensor", gated=False)
    config = {
        **DIMS,
        "model_type": "nemotron_h",
        "n_routed_experts": E,
        "mlp_hidden_act": "relu2",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"},
    }
    write_checkpoint(
        tmp_path, config, per_expert(want, root="backbone.layers.1.mixer.experts", suffix="weight_scale", static=True)
    )
    got_config, got = load_moe_layer(tmp_path, 1)
    assert got_config == FusedMoEConfig(
        E, K, H, I, activation="relu2", scoring_func="sigmoid", routed_scaling_factor=2.5, is_act_and_mul=False
    )
    same(got, want, ("w13_input_scale", "w2_input_scale"))


def test_layers_prefixes_and_shared_experts(tmp_path):
    w = make_weights("bf16")
    tensors = {
        **per_expert(w, root=EXPERTS.format(1)),
        **per_expert(w, root=EXPERTS.format(3)),
        **per_expert(w, root="mtp.layers.0.mlp.experts"),
        "model.layers.0.mlp.gate_proj.weight": floats(0, 4, 4),
        "model.layers.1.mlp.shared_experts.up_proj.weight": floats(0, 4, 4),
    }
    write_checkpoint(tmp_path, QWEN, tensors)
    info = inspect_checkpoint(tmp_path)
    assert info.moe_layers == (1, 3)
    assert info.has_shared_experts
    with pytest.raises(TensorFileError, match=r"layer_index: got 0, which has no routed experts; layers that do: 1, 3"):
        load_moe_layer(tmp_path, 0)
    with pytest.raises(TypeError, match=r"layer_index: got '1'"):
        load_moe_layer(tmp_path, "1")


def test_ignored_experts_stay_bf16(tmp_path):
    """A layer named in modules_to_not_convert is bf16 in an FP8 checkpoint."""
    quant = {**FP8_BLOCK, "modules_to_not_convert": ["model.layers.1"]}
    bf16, fp8 = make_weights("bf16"), make_weights("block")
    tensors = {
        **per_expert(bf16),
        **per_expert(fp8, root=EXPERTS.format(2)),
        **per_expert(fp8, root=EXPERTS.format(11)),
    }
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": quant}, tensors)
    same(load_moe_layer(tmp_path, 1)[1], bf16)
    same(load_moe_layer(tmp_path, 2)[1], fp8)
    same(load_moe_layer(tmp_path, 11)[1], fp8)


@pytest.mark.parametrize(
    ("ignored", "whole_layer"),
    [
        (["model.layers.1.mlp.experts.2.up_proj"], False),
        (["re:.*experts.2.up_proj"], False),
        (["re:.*layers\\.1\\..*"], True),
    ],
)
def test_ignored_matrix_inside_a_layer(tmp_path, ignored, whole_layer):
    quant = {**compressed("block", "group", group_size=128), "ignore": ignored}
    w = make_weights("bf16" if whole_layer else "block")
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": quant}, per_expert(w))
    if whole_layer:
        same(load_moe_layer(tmp_path, 1)[1], w)
        return
    with pytest.raises(
        TensorFileError, match=r"experts\.2\.up_proj\.weight: config.json gives it another quantisation"
    ):
        load_moe_layer(tmp_path, 1)


# -- fused --------------------------------------------------------------------------------------------------------


def fused(w: MoEWeights, *, transposed: bool, interleaved: bool = False, biases: bool = False) -> Tensors:
    at = EXPERTS.format(1)

    def rows(value: np.ndarray) -> np.ndarray:
        if not interleaved:
            return value
        inter = value.shape[1] // 2
        return np.stack([value[:, :inter], value[:, inter:]], axis=2).reshape(value.shape)

    w13, w2 = rows(w.w13), w.w2
    out = {
        f"{at}.gate_up_proj": w13.transpose(0, 2, 1) if transposed else w13,
        f"{at}.down_proj": w2.transpose(0, 2, 1) if transposed else w2,
    }
    if biases:
        out |= {
            f"{at}.gate_up_proj_bias": rows(w.w13_bias[:, :, None])[:, :, 0].astype(BF16),
            f"{at}.down_proj_bias": w.w2_bias.astype(BF16),
        }
    return {k: np.ascontiguousarray(v) for k, v in out.items()}


@pytest.mark.parametrize(("model_type", "transposed"), [("qwen3_moe", False), ("qwen3_vl_moe", True)])
def test_fused_bf16(tmp_path, model_type, transposed):
    want = make_weights("bf16")
    write_checkpoint(tmp_path, {**QWEN, "model_type": model_type}, fused(want, transposed=transposed))
    same(load_moe_layer(tmp_path, 1)[1], want)
    same(load_moe_layer(tmp_path, 1, experts=[2, 1])[1], want.take(np.array([2, 1])))
    with pytest.raises(TensorFileError, match=r"fused_layout: got .*, which the shapes .* rule out"):
        load_moe_layer(tmp_path, 1, fused_layout="out_in" if transposed else "in_out")
    info = inspect_checkpoint(tmp_path)
    assert (info.layout, info.bytes_per_layer) == ("fused", want.nbytes)


def test_gpt_oss_interleaved_with_biases(tmp_path):
    """hidden_dim == intermediate_size: down_proj reads both ways, gate_up_proj and the model type decide."""
    size = 64
    base = quantize_moe_weights(floats(1, E, 2 * size, size), floats(2, E, size, size), "bf16")
    bias13, bias2 = (floats(s, E, n).astype(BF16).astype(np.float32) for s, n in ((3, 2 * size), (4, size)))
    want = MoEWeights("bf16", base.w13, base.w2, w13_bias=bias13, w2_bias=bias2)
    config = {
        "model_type": "gpt_oss",
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": size,
        "intermediate_size": size,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "num_hidden_layers": 2,
    }
    tensors = fused(want, transposed=True, interleaved=True, biases=True)
    write_checkpoint(tmp_path, config, tensors)
    got_config, got = load_moe_layer(tmp_path, 1)
    assert got_config == FusedMoEConfig(E, K, size, size, activation="swigluoai", has_bias=True)
    same(got, want)
    concat = load_moe_layer(tmp_path, 1, gate_up="concat")[1]
    assert not np.array_equal(concat.w13.view(np.uint16), want.w13.view(np.uint16))
    del tensors[f"{EXPERTS.format(1)}.down_proj_bias"]
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(TensorFileError, match=r"down_proj_bias: missing"):
        load_moe_layer(tmp_path, 1)


def test_fused_shape_that_reads_both_ways(tmp_path):
    """Square gate_up (2I == H) with an unknown model type: only the caller can tell."""
    inter, hidden = 32, 64
    w = quantize_moe_weights(floats(1, E, 2 * inter, hidden), floats(2, E, hidden, inter), "bf16")
    config = {**QWEN, "model_type": "unheard_of", "hidden_size": hidden, "moe_intermediate_size": inter}
    write_checkpoint(tmp_path, config, fused(w, transposed=True))
    same(load_moe_layer(tmp_path, 1)[1], w)  # down_proj settles it
    square = quantize_moe_weights(floats(1, E, 2 * inter, hidden), floats(2, E, hidden, inter), "bf16")
    tensors = fused(square, transposed=False)
    tensors[f"{EXPERTS.format(1)}.down_proj"] = tensors[f"{EXPERTS.format(1)}.down_proj"][:, :, :-1].copy()
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(
        TensorFileError, match=r"down_proj: got shape \[3, 64, 31\], want \[3, 64, 32\] or \[3, 32, 64\]"
    ):
        load_moe_layer(tmp_path, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gate_up_proj_blocks": floats(0, 2)},
            "gate_up_proj_blocks: not read here: fused experts are read in bf16 only",
        ),
        ({"gate_up_proj_scale_inv": floats(0, 2)}, "gate_up_proj_scale_inv: not read here"),
        ({"down_proj": None}, "down_proj: missing"),
        ({"down_proj": np.zeros((E, H, I), np.float32)}, "down_proj: got dtype F32, want BF16"),
        ({"down_proj": np.full((E, H, I), np.inf, BF16)}, r"down_proj \(expert 0\): got 21760 non-finite values"),
    ],
)
def test_bad_fused(tmp_path, change, message):
    tensors = fused(make_weights("bf16"), transposed=False)
    for leaf, value in change.items():
        tensors.pop(f"{EXPERTS.format(1)}.{leaf}", None)
        if value is not None:
            tensors[f"{EXPERTS.format(1)}.{leaf}"] = value
    write_checkpoint(tmp_path, QWEN, tensors)
    with pytest.raises(TensorFileError, match=message):
        load_moe_layer(tmp_path, 1)


def test_fused_in_a_quantised_checkpoint(tmp_path):
    write_checkpoint(
        tmp_path, {**QWEN, "quantization_config": FP8_BLOCK}, fused(make_weights("bf16"), transposed=False)
    )
    with pytest.raises(TensorFileError, match=r"fused, but config.json says quant_method 'fp8'"):
        load_moe_layer(tmp_path, 1)


# -- transformers' own models as the oracle ------------------------------------------------------------------------


def tiny_models() -> dict[str, tuple[str, dict[str, Any]]]:
    """Model type to (auto class, config)."""
    dims = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 32}  # fmt: skip
    moe = {**dims, "moe_intermediate_size": 48}
    routed = {**moe, "n_routed_experts": 8, "intermediate_size": 96, "first_k_dense_replace": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    text = "AutoModelForCausalLM"
    return {
        "qwen3_moe": (text, {**moe, "num_experts": 8, "norm_topk_prob": True}),
        "qwen3_5_moe_text": (text, {**moe, "num_experts": 8, "shared_expert_intermediate_size": 32,
                                    "layer_types": ["full_attention"] * 2}),
        "mixtral": (text, {**dims, "intermediate_size": 48, "num_local_experts": 8}),
        "deepseek_v3": (text, {**routed, **latent, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
        "glm4_moe": (text, routed),
        "nemotron_h": (text, {**moe, "n_routed_experts": 8, "layers_block_type": ["full_attention", "moe"],
                              "moe_shared_expert_intermediate_size": 32, "routed_scaling_factor": 1.5}),
        "gpt_oss": (text, {**dims, "intermediate_size": 48, "num_local_experts": 8}),
        "qwen3_vl_moe": ("AutoModelForImageTextToText", {
            "text_config": {**moe, "num_experts": 8, "intermediate_size": 96}, "vision_config": vision}),
    }  # fmt: skip


@pytest.mark.parametrize("model_type", tiny_models())
def test_layer_agrees_with_transformers(tmp_path, model_type):
    """Weights, router and config of a model that transformers wrote, against the output of its own MoE block."""
    import torch
    import transformers

    auto, config = tiny_models()[model_type]
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(model_type, **config))
    model = model.to(torch.bfloat16).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in ("experts", "gate", "router")):
            torch.nn.init.normal_(tensor, std=0.3)
    model.save_pretrained(tmp_path)
    layer = max(inspect_checkpoint(tmp_path).moe_layers)
    moe_config, weights = load_moe_layer(tmp_path, layer)
    router = load_router(tmp_path, layer)
    experts = [m for n, m in model.named_modules() if n.rpartition(".")[2] == "experts"][-1]
    block = next(m for m in model.modules() if any(child is experts for child in m.children()))
    seen: dict[str, Any] = {}
    experts.register_forward_hook(lambda module, args, out: seen.update(x=args[0], y=out))
    with torch.no_grad():
        block(torch.randn(1, 6, 64, dtype=torch.bfloat16))
    x = seen["x"].float().numpy().reshape(6, 64)
    logits = x @ router.weight.astype(np.float32).T + (0 if router.bias is None else router.bias)
    chosen = route(logits, moe_config, correction_bias=router.correction_bias)
    got = run_moe("reference", x.astype(BF16), *chosen, weights, config=moe_config, recipe="float64")
    want = seen["y"].double().numpy().reshape(6, 64)
    # The model works in bfloat16; a wrong name, order, transposition or routing rule is off by order one.
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


# -- refusals by tensor -------------------------------------------------------------------------------------------

UP = f"{EXPERTS.format(1)}.1.up_proj"


def tampered(value: np.ndarray, index: Any, new: Any) -> np.ndarray:
    out = value.copy()
    out[index] = new
    return out


BLOCK = per_expert(make_weights("block"))
BAD_TENSORS: dict[str, Any] = {
    "missing_scale": ({f"{UP}.weight_scale_inv": None}, r"1\.up_proj\.weight: quantised, but no weight_scale_inv"),
    "doubled_scale": (
        {f"{UP}.weight_scale": floats(1, 2, 2)},
        r"1\.up_proj\.weight_scale: doubled by .*weight_scale_inv",
    ),
    "missing_weight": ({f"{UP}.weight": None}, r"tensor model.layers.1.mlp.experts.1.up_proj.weight: missing"),
    "scale_without_weight": (
        {f"{EXPERTS.format(1)}.3.up_proj.weight_scale_inv": floats(1, 2, 2)},
        r"3\.up_proj.*: extra",
    ),
    "input_scale_when_dynamic": ({f"{UP}.input_scale": floats(1, 1)}, "its input_scale is extra with activations"),
    "scale_shape": (
        {f"{UP}.weight_scale_inv": floats(1, 2, 1)},
        r"weight_scale_inv: got shape \[2, 1\], want \[2, 2\]",
    ),
    "weight_shape": (
        {f"{UP}.weight": np.zeros((I, H - 1), E4M3)},
        r"up_proj.weight: got shape \[136, 159\], want \[136, 160\]",
    ),
    "weight_transposed": ({f"{UP}.weight": np.zeros((H, I), E4M3)}, r"got shape \[160, 136\], want \[136, 160\]"),
    "bf16_weight": (
        {f"{UP}.weight": np.zeros((I, H), BF16)},
        "up_proj.weight: got dtype BF16, want F8_E4M3 for weights of",
    ),
    "int_scale": (
        {f"{UP}.weight_scale_inv": np.ones((2, 2), np.int64)},
        "weight_scale_inv: got dtype I64, want F32 or",
    ),
    "nan_weight": (
        {f"{UP}.weight": tampered(BLOCK[f"{UP}.weight"].view(np.uint8), (3, 4), 0xFF).view(E4M3)},
        "up_proj.weight: got 1 non-finite values",
    ),
    "nan_scale": (
        {f"{UP}.weight_scale_inv": np.full((2, 2), np.nan, np.float32)},
        "weight_scale_inv: got 4 non-finite",
    ),
    "inf_scale": (
        {f"{UP}.weight_scale_inv": tampered(floats(1, 2, 2), 0, np.inf)},
        "weight_scale_inv: got 2 non-finite",
    ),
    "zero_scale": ({f"{UP}.weight_scale_inv": np.zeros((2, 2), np.float32)}, "weight_scale_inv: got values <= 0"),
    "negative_scale": ({f"{UP}.weight_scale_inv": -np.ones((2, 2), np.float32)}, "weight_scale_inv: got values <= 0"),
    "unknown_leaf": (
        {f"{EXPERTS.format(1)}.1.side_proj.weight": floats(1, 2)},
        r"1\.side_proj\.weight: not a tensor of",
    ),
    "unknown_kind": ({f"{UP}.weight_zero_point": floats(1, 2)}, "weight_zero_point: not a tensor of"),
    "too_many_experts": (
        {f"{EXPERTS.format(1)}.3.up_proj.weight": BLOCK[f"{UP}.weight"]},
        r"3\.up_proj\.weight: extra",
    ),
    "two_names": ({f"{EXPERTS.format(1)}.1.w3.weight": BLOCK[f"{UP}.weight"]}, "doubled by"),
    "two_places": (
        {"layers.1.mlp.experts.0.up_proj.weight": floats(1, 2)},
        "layer 1: got experts under .*want one place",
    ),
}


def edited(base: Tensors, change: dict[str, np.ndarray | None]) -> Tensors:
    out = dict(base)
    for name, value in change.items():
        if value is None:
            del out[name]
        else:
            out[name] = value
    return out


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_bad_tensors_are_named(tmp_path, name):
    change, message = BAD_TENSORS[name]
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": FP8_BLOCK}, edited(BLOCK, change))
    with pytest.raises(TensorFileError, match=message):
        load_moe_layer(tmp_path, 1)


def test_fp8_where_the_config_says_bf16_and_scales_of_bf16(tmp_path):
    write_checkpoint(tmp_path, QWEN, BLOCK)
    with pytest.raises(TensorFileError, match=r"weight: got dtype F8_E4M3, want BF16 for weights of scheme 'bf16'"):
        load_moe_layer(tmp_path, 1)
    write_checkpoint(tmp_path, QWEN, {**per_expert(make_weights("bf16")), f"{UP}.weight_scale_inv": floats(0, 2, 2)})
    with pytest.raises(TensorFileError, match=r"weight_scale_inv: a scale of a weight that is not quantised"):
        load_moe_layer(tmp_path, 1)


def test_static_checkpoint_without_input_scale(tmp_path):
    tensors = per_expert(make_weights("tensor"), suffix="weight_scale", static=True)
    del tensors[f"{UP}.input_scale"]
    write_checkpoint(
        tmp_path, {**QWEN, "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, tensors
    )
    with pytest.raises(TensorFileError, match=r"1\.up_proj\.weight: its input_scale is missing"):
        load_moe_layer(tmp_path, 1)


# -- refusals by configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method: got 'gptq', want one of 'fp8', 'compressed-tensors', 'modelopt'"),
        ({"quant_method": "mxfp4"}, "quant_method: got 'mxfp4'"),
        ({**FP8_BLOCK, "weight_block_size": [64, 64]}, r"weight_block_size: got \[64, 64\]"),
        ({**FP8_BLOCK, "fmt": "e5m2"}, "fmt: got 'e5m2'"),
        ({**FP8_BLOCK, "activation_scheme": "static"}, "activation_scheme: got 'static' with block weights"),
        ({**FP8_BLOCK, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert: got 'lm_head', want a list"),
        (compressed("group", "token"), "strategy: got 'group', want one of 'channel', 'tensor', 'block'"),
        (compressed("channel", "tensor", dynamic=False), "activations.strategy: got 'tensor', want one of 'token'"),
        ({**compressed("channel", "token"), "format": "pack-quantized"}, "format: got 'pack-quantized'"),
        ({**compressed("channel", "token"), "ignore": ["re:(a*)*b"]}, "pattern .*no repeated group"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: got 'NVFP4'"),
        ([], "config.json: quantization_config: got list, want an object"),
    ],
)
def test_quantisation_that_is_not_read(tmp_path, quant, message):
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": quant}, BLOCK)
    with pytest.raises(TensorFileError, match=message):
        load_moe_layer(tmp_path, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "config.json: moe_latent_size or hidden_size: missing"),
        ({"num_experts": "3"}, "config.json: num_experts: got '3', want a positive integer"),
        ({"num_experts_per_tok": 9}, "config.json: experts_per_token: got 9, want at most num_experts=3"),
        ({"norm_topk_prob": "yes"}, "config.json: norm_topk_prob: got 'yes', want true or false"),
        ({"routed_scaling_factor": float("inf")}, "config.json: routed_scaling_factor: got inf, want a positive"),
        ({"routed_scaling_factor": 0}, "config.json: routed_scaling_factor: got 0, want a positive"),
        ({"hidden_act": "mish"}, "config.json: hidden_act: got 'mish', want one of"),
        ({"scoring_func": "sqrtsoftplus"}, "config.json: scoring_func: got 'sqrtsoftplus', want one of"),
        ({"n_group": 2, "topk_group": 1}, "config.json: num_expert_group: got 2, want a divisor"),
        ({"text_config": 3}, "text_config: got int, want an object"),
        ({"hidden_size": 144}, r"weight: got shape \[160, 136\], want \[144, 136\]"),
        ({"num_experts": 4}, "tensor model.layers.1.mlp.experts.3.gate_proj.weight: missing"),
    ],
)
def test_config_that_does_not_fit(tmp_path, change, message):
    write_checkpoint(tmp_path, {**QWEN, "quantization_config": FP8_BLOCK, **change}, BLOCK)
    with pytest.raises(TensorFileError, match=message):
        load_moe_layer(tmp_path, 1)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**64)
    | st.floats()
    | st.sampled_from(["fp8", "re:(", "e4m3", "", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "g", "text_config"]), inner)
    ),
    max_leaves=6,
)
CONFIGS = [
    {**QWEN, "quantization_config": FP8_BLOCK},
    {**QWEN, "quantization_config": compressed("block", "group", group_size=128)},
    {**QWEN, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    {
        **QWEN,
        "model_type": "gpt_oss",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(data=st.data())
def test_fuzzed_configs_raise_one_error(tmp_path, data):
    """Any JSON in place of any value of config.json: it loads, or raises the one error."""
    config = json.loads(json.dumps(data.draw(st.sampled_from(CONFIGS))))
    target = config
    while True:
        key = data.draw(st.sampled_from(sorted(target)))
        if not isinstance(target[key], dict) or data.draw(st.booleans()):
            break
        target = target[key]
    target[key] = data.draw(JSON)
    if not (tmp_path / "model.safetensors").exists():
        write_checkpoint(tmp_path, QWEN, BLOCK)
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        _, weights = load_moe_layer(tmp_path, 1)
    except TensorFileError:
        return
    assert weights.scheme == "block"


def test_folder_without_a_moe_layer(tmp_path):
    write_checkpoint(tmp_path, QWEN, {"model.layers.0.mlp.up_proj.weight": floats(0, 2, 2)})
    for call in (inspect_checkpoint, lambda d: load_moe_layer(d, 0)):
        with pytest.raises(TensorFileError, match=r"got no tensor of a routed expert"):
            call(tmp_path)
    with pytest.raises(TensorFileError, match=r"checkpoint_dir: got .*nowhere, want a folder"):
        load_moe_layer(tmp_path / "nowhere", 0)


# -- router -------------------------------------------------------------------------------------------------------


def test_router(tmp_path):
    w = make_weights("bf16")
    gate, bias = floats(5, E, H).astype(BF16), floats(6, E)
    tensors = {
        **per_expert(w),
        "model.layers.1.mlp.gate.weight": gate,
        "model.layers.1.mlp.gate.e_score_correction_bias": bias,
    }
    write_checkpoint(tmp_path, QWEN, tensors)
    router = load_router(tmp_path, 1)
    np.testing.assert_array_equal(router.weight.view(np.uint16), gate.view(np.uint16))
    np.testing.assert_array_equal(router.correction_bias, bias)
    assert router.bias is None
    write_checkpoint(tmp_path, QWEN, {**tensors, "model.layers.1.mlp.gate.weight": floats(0, E, H - 1)})
    with pytest.raises(TensorFileError, match=r"gate.weight: got shape \[3, 159\], want \[3, 160\]"):
        load_router(tmp_path, 1)
    write_checkpoint(tmp_path, QWEN, {**tensors, "model.layers.1.mlp.gate.weight": np.zeros((E, H), E4M3)})
    with pytest.raises(TensorFileError, match=r"gate.weight: got dtype F8_E4M3, want BF16 or F32"):
        load_router(tmp_path, 1)
    write_checkpoint(
        tmp_path, QWEN, {**tensors, "model.layers.1.mlp.gate.e_score_correction_bias": np.full(E, np.inf, np.float32)}
    )
    with pytest.raises(TensorFileError, match=r"e_score_correction_bias: got 3 non-finite"):
        load_router(tmp_path, 1)
    write_checkpoint(tmp_path, QWEN, per_expert(w))
    with pytest.raises(TensorFileError, match=r"model.layers.1.mlp.gate.weight: missing"):
        load_router(tmp_path, 1)


# -- files --------------------------------------------------------------------------------------------------------

CONFIG = {**QWEN, "quantization_config": FP8_BLOCK}


def test_truncated_shard(tmp_path):
    write_checkpoint(tmp_path, CONFIG, BLOCK, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(
        TensorFileError, match=r"model-00002-of-00002.safetensors: tensor model.layers.1.\S+: ends at byte"
    ):
        load_moe_layer(tmp_path, 1)
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(TensorFileError, match=r"got a header of \d+ bytes in a file of 100: truncated"):
        load_moe_layer(tmp_path, 1)
    shard.unlink()
    with pytest.raises(TensorFileError, match=r"model-00002-of-00002.safetensors: cannot be opened"):
        load_moe_layer(tmp_path, 1)


def test_tensor_in_two_files_without_an_index(tmp_path):
    write_checkpoint(tmp_path, CONFIG, BLOCK, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert load_moe_layer(tmp_path, 1)[1].num_experts == E
    name = next(iter(BLOCK))
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(safetensors_bytes({name: BLOCK[name]}))
    with pytest.raises(TensorFileError, match=rf"model-00003\S+: tensor {name}: also in model-00001"):
        load_moe_layer(tmp_path, 1)


def test_index_that_lies(tmp_path):
    write_checkpoint(tmp_path, CONFIG, BLOCK, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    name, file = next(iter(good["weight_map"].items()))
    other = next(f for f in good["weight_map"].values() if f != file)
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], name: other}}))
    with pytest.raises(TensorFileError, match=rf"{other}: tensor {name}: the index names this file, which lacks it"):
        load_moe_layer(tmp_path, 1)
    unlisted = write_checkpoint(tmp_path / "u", CONFIG, {**BLOCK, f"{UP}.bias": floats(0, I)}, shards=2)
    index = unlisted / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    del good["weight_map"][f"{UP}.bias"]
    index.write_text(json.dumps(good))
    with pytest.raises(TensorFileError, match=r"up_proj.bias: in a shard for which the index does not list it"):
        load_moe_layer(unlisted, 1)
    index.write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(TensorFileError, match=r"got no weight_map"):
        load_moe_layer(unlisted, 1)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x.safetensors", "", "a\0b", "..\\x", "\ud800"]
)
def test_shard_names_that_leave_the_folder(tmp_path, name):
    root = write_checkpoint(tmp_path / "m", CONFIG, BLOCK)
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(BLOCK))
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(BLOCK, name)}))
    with pytest.raises(TensorFileError, match=r"a path that leaves its folder|an unusable file name|cannot be opened"):
        load_moe_layer(root, 1)


def test_links(tmp_path):
    """A link out of the folder is refused; the hub cache's links into its own blobs folder are not."""
    root = write_checkpoint(tmp_path / "m", CONFIG, BLOCK)
    outside = tmp_path / "outside.safetensors"
    (root / "model.safetensors").rename(outside)
    (root / "model.safetensors").symlink_to(outside)
    with pytest.raises(TensorFileError, match=r"model.safetensors: got a link that leaves"):
        load_moe_layer(root, 1)
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = write_checkpoint(cache / "snapshots" / "abc", CONFIG, BLOCK)
    (snapshot / "model.safetensors").rename(cache / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert load_moe_layer(snapshot, 1)[1].num_experts == E


def test_special_files_are_not_opened(tmp_path):
    root = write_checkpoint(tmp_path, CONFIG, BLOCK)
    (root / "model.safetensors").unlink()
    os.mkfifo(root / "model.safetensors")
    with pytest.raises(TensorFileError, match=r"no regular file"):
        load_moe_layer(root, 1)


def test_pickles_are_refused(tmp_path):
    root = write_checkpoint(tmp_path, CONFIG, BLOCK)
    (root / "model.safetensors").unlink()
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(TensorFileError, match=r"pytorch_model.bin: a pickle file can run any code"):
        load_moe_layer(root, 1)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with pytest.raises(TensorFileError, match=r"pytorch_model.bin: a pickle file can run any code"):
        load_moe_layer(root, 1)


def test_json_bombs(tmp_path):
    root = write_checkpoint(tmp_path, CONFIG, BLOCK)
    for text, message in [
        ("[" * 100_000, r"config.json: got invalid JSON \((RecursionError|JSONDecodeError)\)"),
        ('{"a": ' + "9" * 5000 + "}", "config.json: got invalid JSON"),
        ('{"a": 1, "a": 2}', "config.json: duplicate name a"),
        ("[]", "config.json: got JSON of type list, want an object"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin1"), "config.json: got invalid JSON"),
    ]:
        (root / "config.json").write_text(text)
        with pytest.raises(TensorFileError, match=message):
            load_moe_layer(root, 1)


def header(entries: dict[str, Any], body: bytes = b"\0" * 8) -> bytes:
    return with_header(json.dumps(entries).encode(), body)


def entry(begin: int, end: int, shape=(1,), dtype="F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "got 0 bytes, want a safetensors file"),
        (b"\xff" * 16, "got a header of 18446744073709551615 bytes, want at most 100000000"),
        ((50).to_bytes(8, "little") + b"{}", "got a header of 50 bytes in a file of 10: truncated"),
        (with_header(b"[]", b""), "got no JSON header"),
        (with_header(b"{", b""), "got invalid JSON"),
        (with_header(b'{"a": {}, "a": {}}', b""), "duplicate name a"),
        (header({"a": entry(0, 4), "b": entry(2, 6)}, b"\0" * 6), "tensor b: overlaps its neighbour"),
        (header({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12), "tensor b: leaves a gap before it"),
        (header({"a": entry(4, 8)}), "tensor a: leaves a gap before it"),
        (header({"a": entry(0, 4)}), "got 4 bytes after the last tensor, want none"),
        (header({"a": entry(0, 16, (4,))}), "tensor a: ends at byte .*: truncated or corrupt"),
        (header({"a": entry(0, 8, (3,))}), r"tensor a: got offsets 0 to 8 for F32 \[3\], which takes 12 bytes"),
        (header({"a": entry(8, 0, (2,))}), "tensor a: got offsets 8 to 0"),
        (header({"a": entry(0, 8, (-2,))}), r"tensor a: got shape \[-2\]"),
        (header({"a": entry(0, 8, (2.0,))}), r"tensor a: got shape \[2.0\]"),
        (header({"a": entry(0, 8, (True,), "F64")}), r"tensor a: got shape \[True\]"),
        (header({"a": entry(0, 8, (2**62, 2**62))}), "tensor a: got offsets"),
        (header({"a": entry(0, 8, (1,) * 9)}), "want at most 8"),
        (header({"a": entry(0, 8, (2,), "Q7")}), "tensor a: got dtype Q7, want one of"),
        (header({"a": {"dtype": "F32", "shape": [2]}}), "tensor a: got an unreadable header entry"),
        (header({"a": 3}), "tensor a: got an unreadable header entry"),
        (header({"__metadata__": {"x": 1}}, b""), "got __metadata__ that is no map of strings"),
        (header({"e\x1b[31mvil\n": entry(0, 8, (3,))}), r"tensor e\\x1b\[31mvil\\x0a: got offsets"),
    ],
)
def test_bad_headers(tmp_path, raw, message):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(TensorFileError, match=message) as caught:
        TensorFile(tmp_path, "model.safetensors")
    assert str(caught.value).startswith("model.safetensors: ")


def test_names_in_messages_are_short_and_printable():
    assert clean("a" * 1000) == "a" * 157 + "..."
    assert clean("\x00\u202eé") == "\\x00\\u202e\\xe9"
    with pytest.raises(TensorFileError, match=r"no repeated group"):
        match_pattern("(a+)+$", "a" * 64)
    with pytest.raises(TensorFileError, match="repetition number is too large"):
        match_pattern("a{99999999999}", "a")


def test_file_that_shrinks_while_it_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({"a": np.zeros(4096, np.float32)}))
    with TensorStore(tmp_path) as store:
        store.info("a")
        os.truncate(tmp_path / "model.safetensors", 200)
        with pytest.raises(TensorFileError, match=r"model.safetensors: tensor a: the file ends inside it"):
            store.read("a")


SAMPLE = safetensors_bytes(
    {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bb": np.zeros((0, 4), np.float16),
        "c": np.arange(5, dtype=np.uint8),
    }
)
NUMBERS = st.one_of(st.integers(-2, 40), st.integers(2**31 - 2, 2**64 + 2), st.floats(), st.booleans(), st.none())
ENTRIES = st.dictionaries(
    st.text(max_size=6),
    st.one_of(
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "F4", "F6_E2M3", "BOOL", "I64", "X"]),
                "shape": st.lists(st.one_of(st.integers(0, 4), NUMBERS), max_size=4),
                "data_offsets": st.lists(st.one_of(st.integers(0, 24), NUMBERS), min_size=1, max_size=3),
            }
        ),
        NUMBERS,
    ),
    max_size=4,
)


@st.composite
def mutated(draw) -> bytes:
    raw = bytearray(SAMPLE)
    for _ in range(draw(st.integers(1, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(
    raw=st.one_of(
        st.binary(max_size=64),
        mutated(),
        st.builds(lambda e, b: with_header(json.dumps(e).encode(), b), ENTRIES, st.binary(max_size=24)),
    )
)
def test_fuzzed_headers_raise_one_error_or_agree_with_the_library(tmp_path, raw):
    path: Path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    try:
        with TensorStore(tmp_path) as store:
            mine = {n: store.read(n) for n in store.names() if store.info(n).dtype not in ("F4", "F6_E2M3")}
    except TensorFileError as error:
        assert str(error).startswith("model.safetensors: ")
        return
    # What is accepted here, the library accepts too, and reads the same bytes.
    library = dict(safetensors.deserialize(raw))
    for name, value in mine.items():
        assert list(value.shape) == library[name]["shape"]
        assert value.tobytes() == bytes(library[name]["data"])


def test_the_librarys_own_files_read_the_same(tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = {
        "x": floats(0, 3, 5),
        "h": floats(1, 2).astype(np.float16),
        "i": np.arange(4),
        "z": np.zeros((0, 3), np.float32),
        "s": np.asarray(2.5, np.float32),
        "b": np.array([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    library = load_file(tmp_path / "model.safetensors")
    with TensorStore(tmp_path) as store:
        assert set(store.names()) == set(library)
        for name, value in library.items():
            np.testing.assert_array_equal(store.read(name), value)
            assert store.read(name).dtype == value.dtype
