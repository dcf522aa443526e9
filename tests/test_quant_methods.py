# SPDX-License-Identifier: Apache-2.0
"""Quant methods: construction everywhere, buffers, loading under TP and EP, checks after loading, and
results."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from isomoe.common import backends, executors, tolerances
from isomoe.common.backends import Fp8MoeBackend, UnquantizedMoeBackend, register_moe_backend
from isomoe.common.checkpoint_config import ModuleQuant
from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.common.metrics import rel_l2
from isomoe.common.numerics import BF16, E4M3, E4M3FNUZ, E8M0, decode_e8m0, ue8m0_ceil
from isomoe.common.placement import ExpertPlacement
from isomoe.common.platforms import TPU_GENERATIONS, Platform
from isomoe.common.quant_keys import (
    kBf16,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from isomoe.common.quant_methods import (
    CompressedTensorsW8A8Fp8MoEMethod,
    Fp8MoEMethod,
    ModelOptFp8MoEMethod,
    UnquantizedFusedMoEMethod,
)
from isomoe.common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights
from isomoe.tpu_impl.generations import GENERATIONS

E, K, H, I, T = 6, 2, 256, 256, 9
CONFIG = FusedMoEConfig(E, K, H, I)
TPU, CPU, HOPPER = Platform.tpu("v7x"), Platform.cpu(), Platform.cuda(9, 0)

FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
FP8_BLOCK_UE8M0 = {**FP8_BLOCK, "scale_fmt": "ue8m0"}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def _args(strategy, dynamic, **more):
    base = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
    return {**base, "group_size": None, "block_structure": None, **more}


CT_CHANNEL = (_args("channel", False), _args("token", True))
CT_TENSOR = (_args("tensor", False), _args("tensor", True))
CT_STATIC = (_args("tensor", False), _args("tensor", False))
CT_BLOCK = (_args("block", False, block_structure=[128, 128]), _args("group", True, group_size=128))


def ct_config(group):
    weights, inputs = group
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


# name: (how to build it, scheme, static activations, scale name)
METHODS = {
    "fp8-block": (lambda c, **o: Fp8MoEMethod(FP8_BLOCK, c, **o), "block", False, "weight_scale_inv"),
    "fp8-ue8m0": (lambda c, **o: Fp8MoEMethod(FP8_BLOCK_UE8M0, c, **o), "block", False, "weight_scale_inv"),
    "fp8-tensor": (lambda c, **o: Fp8MoEMethod(FP8_TENSOR, c, **o), "tensor", False, "weight_scale"),
    "fp8-static": (lambda c, **o: Fp8MoEMethod(FP8_STATIC, c, **o), "tensor", True, "weight_scale"),
    "ct-channel": (
        lambda c, **o: CompressedTensorsW8A8Fp8MoEMethod(*CT_CHANNEL, c, **o),
        "channel",
        False,
        "weight_scale",
    ),
    "ct-tensor": (
        lambda c, **o: CompressedTensorsW8A8Fp8MoEMethod(*CT_TENSOR, c, **o),
        "tensor",
        False,
        "weight_scale",
    ),
    "ct-static": (
        lambda c, **o: CompressedTensorsW8A8Fp8MoEMethod(*CT_STATIC, c, **o),
        "tensor",
        True,
        "weight_scale",
    ),
    "ct-block": (
        lambda c, **o: CompressedTensorsW8A8Fp8MoEMethod(*CT_BLOCK, c, **o),
        "block",
        False,
        "weight_scale",
    ),
    "modelopt": (lambda c, **o: ModelOptFp8MoEMethod(MODELOPT, c, **o), "tensor", True, "weight_scale"),
    "unquantized": (lambda c, **o: UnquantizedFusedMoEMethod(c, **o), "bf16", False, "weight_scale"),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("ISOMOE_MOE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_registry", {b.name: b for b in backends._BUILTINS})


def make_weights(scheme, static=False, config=CONFIG, seed=0):
    rng = np.random.default_rng(seed)
    w13 = (
        rng.standard_normal((config.num_experts, config.w13_rows, config.hidden_dim)).astype(np.float32) * 0.1
    )
    w2 = rng.standard_normal((config.num_experts, config.hidden_dim, config.intermediate_size)) * 0.1
    weights = quantize_moe_weights(w13, w2.astype(np.float32), scheme)
    changes: dict[str, np.ndarray] = {}
    if static:
        changes |= {
            k: np.asarray(v, np.float32) for k, v in (("w13_input_scale", 0.02), ("w2_input_scale", 0.03))
        }
    if config.has_bias:
        changes["w13_bias"] = rng.standard_normal((config.num_experts, config.w13_rows)).astype(np.float32)
        changes["w2_bias"] = rng.standard_normal((config.num_experts, config.hidden_dim)).astype(np.float32)
    return replace(weights, **changes)


def shards(weights: MoEWeights, scale_name: str, config=CONFIG):
    """A checkpoint's tensors of one layer: (buffer, whole tensor, shard id, global expert)."""
    inter = config.intermediate_size
    for e in range(config.num_experts):
        for half, shard_id in enumerate(("w1", "w3")[: 2 if config.is_act_and_mul else 1]):
            rows = slice(half * inter, (half + 1) * inter)
            yield "w13_weight", weights.w13[e, rows], shard_id, e
            if weights.w13_bias is not None:
                yield "w13_bias", weights.w13_bias[e, rows], shard_id, e
            if weights.scheme == "bf16":
                continue
            scale = weights.w13_scale[e]
            if weights.scheme == "channel":
                scale = scale[rows, None]
            elif weights.scheme == "block":
                scale = scale[half * -(-inter // 128) : (half + 1) * -(-inter // 128)]
            else:
                scale = scale[half]
            yield f"w13_{scale_name}", np.asarray(scale), shard_id, e
            if weights.has_static_input:
                # Smaller for all but one expert: the layer's scale is the largest.
                share = np.float32(1.0 if e == config.num_experts - 1 else 0.5)
                yield "w13_input_scale", np.asarray(weights.w13_input_scale * share), shard_id, e
        yield "w2_weight", weights.w2[e], "w2", e
        if weights.w2_bias is not None:
            yield "w2_bias", weights.w2_bias[e], "w2", e
        if weights.scheme != "bf16":
            scale = weights.w2_scale[e]
            yield (
                f"w2_{scale_name}",
                np.asarray(scale[:, None] if weights.scheme == "channel" else scale),
                "w2",
                e,
            )
            if weights.has_static_input:
                share = np.float32(1.0 if e == config.num_experts - 1 else 0.5)
                yield "w2_input_scale", np.asarray(weights.w2_input_scale * share), "w2", e


def create(method, config=CONFIG, num_experts=None, intermediate=None, **extra):
    layer = types.SimpleNamespace()
    method.create_weights(
        layer,
        config.num_experts if num_experts is None else num_experts,
        config.hidden_dim,
        config.intermediate_size if intermediate is None else intermediate,
        "bfloat16",
        **extra,
    )
    return layer


def load(method, weights, config=CONFIG, **sizes):
    layer = create(method, config, **sizes)
    for name, value, shard_id, expert in shards(weights, method.weight_scale_name, config):
        layer.weight_loader(name, value, shard_id, expert)
    method.process_weights_after_loading(layer)
    return layer


def batch(config=CONFIG, tokens=T, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, config.hidden_dim)).astype(BF16)
    ids = np.stack([rng.permutation(config.num_experts)[: config.experts_per_token] for _ in range(tokens)])
    weights = rng.random((tokens, config.experts_per_token)).astype(np.float32)
    return x, weights, ids.astype(np.int32)


def make_adapter(adapter_id=7, config=CONFIG, rank=8, seed=2):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) * 0.1).astype(BF16)

    e, h, i, halves = config.num_experts, config.hidden_dim, config.intermediate_size, 2
    return LoRAAdapter(
        adapter_id, draw(e, halves, rank, h), draw(e, halves, i, rank), draw(e, rank, i), draw(e, h, rank)
    )


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# Construction


@pytest.mark.parametrize("generation", TPU_GENERATIONS)
@pytest.mark.parametrize("name", METHODS)
def test_construction_on_a_tpu_answers_none(name, generation, monkeypatch):
    build = METHODS[name][0]
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    for request in ("auto", "triton", "marlin", "deep_gemm", "no such thing"):
        monkeypatch.setenv("ISOMOE_MOE_BACKEND", request)
        for config in (CONFIG, CONFIG.with_lora(4, 16)):
            method = build(config, platform=Platform.tpu(generation), moe_backend=request)
            backend = getattr(method, "unquantized_backend", None) or method.fp8_backend
            assert backend in (Fp8MoeBackend.NONE, UnquantizedMoeBackend.NONE)
            assert method.experts_cls is None
            # v4 has no limits to build for, so nothing executes there: constructing is as safe as elsewhere.
            assert getattr(method.executor, "name", None) == ("pallas_ep" if generation in GENERATIONS else None)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("platform", [TPU, Platform.out_of_tree("x", cuda_alike=True), CPU, HOPPER], ids=str)
def test_questions_are_answered_with_and_without_a_backend(name, platform):
    build, scheme, static, scale_name = METHODS[name]
    method = build(CONFIG, platform=platform)
    assert method.is_monolithic is False and method.supports_internal_mk is False
    assert method.supports_eplb is False and method.topk_indices_dtype == np.int32
    assert method.moe_kernel is None and method.maybe_make_prepare_finalize() is None
    assert method.maybe_roundup_sizes(H, I, "bfloat16", None) == (H, I)
    assert method.weight_scale_name == scale_name
    assert method.block_quant == (scheme == "block")
    assert method.weight_block_size == ([128, 128] if scheme == "block" else None)
    quant = method.get_fused_moe_quant_config(types.SimpleNamespace())
    assert quant.use_fp8_w8a8 == (scheme != "bf16") and not quant.use_fp8_w8a16 and quant.w1_scale is None
    assert quant.block_shape == ((128, 128) if scheme == "block" else None)
    assert method.activation_scheme == ("static" if static else None if scheme == "bf16" else "dynamic")
    assert repr(method).startswith(type(method).__name__)


def test_construction_on_cuda_holds_the_choice():
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG.with_lora(4, 16), platform=HOPPER)
    assert method.fp8_backend is Fp8MoeBackend.TRITON and method.experts_cls.__name__ == "TritonExecutor"
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=HOPPER, moe_backend="marlin")
    assert method.fp8_backend is Fp8MoeBackend.MARLIN
    method = UnquantizedFusedMoEMethod(CONFIG.with_lora(4, 16), platform=Platform.cuda(8, 0))
    assert method.unquantized_backend is UnquantizedMoeBackend.TRITON
    with pytest.raises(NotImplementedError, match=r"triton +no +needs compute capability"):
        ModelOptFp8MoEMethod(None, CONFIG, platform=Platform.cuda(7, 0))
    with pytest.raises(ValueError, match=r"'marlin'.*does not read weights"):
        UnquantizedFusedMoEMethod(CONFIG, platform=HOPPER, moe_backend="marlin")
    with pytest.raises(NotImplementedError, match="on cpu"):
        Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=CPU, on_missing="raise")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fp8-block", (kFp8Static128BlockSym, kFp8Dynamic128Sym)),
        ("fp8-ue8m0", (kFp8Static128BlockE8M0Sym, kFp8Dynamic128Sym)),
        ("fp8-tensor", (kFp8StaticTensorSym, kFp8DynamicTokenSym)),
        ("fp8-static", (kFp8StaticTensorSym, kFp8StaticTensorSym)),
        ("ct-channel", (kFp8StaticChannelSym, kFp8DynamicTokenSym)),
        ("ct-tensor", (kFp8StaticTensorSym, kFp8DynamicTokenSym)),
        ("ct-static", (kFp8StaticTensorSym, kFp8StaticTensorSym)),
        ("ct-block", (kFp8Static128BlockSym, kFp8Dynamic128Sym)),
        ("modelopt", (kFp8StaticTensorSym, kFp8StaticTensorSym)),
        ("unquantized", (kBf16, kBf16)),
    ],
)
def test_checkpoint_formats_become_keys(name, keys):
    method = METHODS[name][0](CONFIG, platform=TPU)
    assert (method.weight_key, method.activation_key) == keys


def test_config_forms():
    """Mappings, vLLM-like objects, whole quantization_configs and parsed storage say the same."""
    fp8 = types.SimpleNamespace(activation_scheme="dynamic", weight_block_size=[128, 128])
    layer = types.SimpleNamespace(moe_config=CONFIG)
    assert Fp8MoEMethod(fp8, layer, platform=TPU).quant == ModuleQuant("block", "dynamic")
    assert Fp8MoEMethod(ModuleQuant("tensor", "static"), CONFIG, platform=TPU).activation_scheme == "static"
    args = [
        types.SimpleNamespace(**{**a, "strategy": types.SimpleNamespace(value=a["strategy"])})
        for a in CT_CHANNEL
    ]
    assert CompressedTensorsW8A8Fp8MoEMethod(*args, CONFIG, platform=TPU).quant.scheme == "channel"
    for group, scheme in ((CT_CHANNEL, "channel"), (CT_BLOCK, "block"), (CT_STATIC, "tensor")):
        method = CompressedTensorsW8A8Fp8MoEMethod.from_config(ct_config(group), CONFIG, platform=TPU)
        assert method.quant.scheme == scheme
    weight_only = CompressedTensorsW8A8Fp8MoEMethod(CT_CHANNEL[0], None, CONFIG, platform=HOPPER)
    assert weight_only.fp8_backend is Fp8MoeBackend.MARLIN and weight_only.activation_scheme is None
    hf_quant = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert ModelOptFp8MoEMethod(hf_quant, CONFIG, platform=TPU).quant == ModuleQuant("tensor", "static")
    assert ModelOptFp8MoEMethod(None, CONFIG, platform=TPU).quant == ModuleQuant("tensor", "static")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Fp8MoEMethod({**FP8_BLOCK, "weight_block_size": [64, 128]}, CONFIG, platform=TPU),
            "weight_block_size",
        ),
        (
            lambda: Fp8MoEMethod({**FP8_TENSOR, "activation_scheme": "fast"}, CONFIG, platform=TPU),
            "activation_scheme",
        ),
        (lambda: Fp8MoEMethod(MODELOPT, CONFIG, platform=TPU), "quant_method: got 'modelopt', want 'fp8'"),
        (lambda: Fp8MoEMethod(object(), CONFIG, platform=TPU), "quant_config: got object"),
        (lambda: Fp8MoEMethod(FP8_BLOCK, {"hidden": 1}, platform=TPU), "moe: got dict, want FusedMoEConfig"),
        (lambda: Fp8MoEMethod(ModuleQuant("bf16"), CONFIG, platform=TPU), "want UnquantizedFusedMoEMethod"),
        (
            lambda: CompressedTensorsW8A8Fp8MoEMethod(
                _args("block", False, block_structure=[64, 64]), CT_BLOCK[1], CONFIG, "layers.3", platform=TPU
            ),
            "layers.3: .*block_structure",
        ),
        (
            lambda: CompressedTensorsW8A8Fp8MoEMethod(CT_CHANNEL[0], CT_STATIC[1], CONFIG, platform=TPU),
            "input_activations.strategy",
        ),
        (
            lambda: CompressedTensorsW8A8Fp8MoEMethod(
                {**CT_CHANNEL[0], "num_bits": 4}, None, CONFIG, platform=TPU
            ),
            "num_bits",
        ),
        (lambda: ModelOptFp8MoEMethod({"quant_algo": "NVFP4"}, CONFIG, platform=TPU), "quant_algo"),
        (lambda: UnquantizedFusedMoEMethod(CONFIG, platform=TPU, placement="random"), "strategy"),
    ],
)
def test_formats_that_are_not_served_are_named(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_construction_needs_no_framework():
    """Every method on a TPU, in a process where torch, triton, vllm and jax do not import."""
    code = """
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torch", "triton", "vllm", "jax", "jaxlib"}:
                    raise ImportError(f"{name} is blocked")

        sys.meta_path.insert(0, Blocker())
        from isomoe import (
            CompressedTensorsW8A8Fp8MoEMethod, Fp8MoEMethod, FusedMoEConfig, ModelOptFp8MoEMethod, Platform,
            UnquantizedFusedMoEMethod,
        )
        config = FusedMoEConfig(160, 8, 6144, 2560).with_lora(8, 64)
        tpu = Platform.tpu("v7x")
        for request in ("auto", "triton", "marlin", "cutlass", "nonsense"):
            methods = [
                Fp8MoEMethod({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, config,
                             platform=tpu, moe_backend=request),
                CompressedTensorsW8A8Fp8MoEMethod(
                    {"strategy": "channel", "num_bits": 8, "type": "float"},
                    {"strategy": "token", "dynamic": True, "num_bits": 8, "type": "float"}, config,
                    platform=tpu, moe_backend=request),
                ModelOptFp8MoEMethod(None, config, platform=tpu, moe_backend=request),
            ]
            assert all(m.fp8_backend.name == "NONE" and m.experts_cls is None for m in methods)
            method = UnquantizedFusedMoEMethod(config, platform=tpu, moe_backend=request)
            assert method.unquantized_backend.name == "NONE" and method.experts_cls is None
        print("done")
    """
    poison = {
        "VLLM_USE_DEEP_GEMM": "1",
        "VLLM_MOE_USE_DEEP_GEMM": "1",
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_TEST_FORCE_FP8_MARLIN": "1",
        "ISOMOE_MOE_BACKEND": "marlin",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **poison},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"


# Buffers


@pytest.mark.parametrize("name", METHODS)
def test_buffers_have_vllms_names_and_shapes(name):
    build, scheme, static, scale_name = METHODS[name]
    layer = create(build(CONFIG, platform=TPU), weight_loader=None, global_num_experts=E)
    assert layer.w13_weight.shape == (E, 2 * I, H) and layer.w2_weight.shape == (E, H, I)
    assert layer.w13_weight.dtype == layer.w2_weight.dtype == (BF16 if scheme == "bf16" else E4M3)
    wanted = {
        "block": ((E, 2 * I // 128, H // 128), (E, H // 128, I // 128)),
        "channel": ((E, 2 * I, 1), (E, H, 1)),
        "tensor": ((E, 2), (E,)),
    }
    if scheme != "bf16":
        scales = getattr(layer, f"w13_{scale_name}"), getattr(layer, f"w2_{scale_name}")
        assert tuple(s.shape for s in scales) == wanted[scheme]
        assert all(s.dtype == np.float32 for s in scales)
        assert layer.weight_attrs[f"w13_{scale_name}"] == {
            "weight_loader": None,
            "global_num_experts": E,
            "quant_method": scheme,
        }
    for label in ("w13_input_scale", "w2_input_scale"):
        value = getattr(layer, label)
        assert value.shape == (E,) if static else value is None
    buffers = [getattr(layer, b) for b in layer.weight_attrs]
    assert all(np.isnan(b.astype(np.float32)).all() for b in buffers)
    assert (layer.num_experts, layer.hidden_size, layer.intermediate_size_per_partition) == (E, H, I)
    assert layer.orig_dtype == BF16
    assert layer.weight_block_size == ([128, 128] if scheme == "block" else None)


def test_block_scales_of_ragged_sizes():
    config = FusedMoEConfig(2, 1, 200, 160)
    layer = create(Fp8MoEMethod(FP8_BLOCK, config, platform=TPU), config)
    assert layer.w13_weight_scale_inv.shape == (2, 4, 2) and layer.w2_weight_scale_inv.shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_experts": E - 1}, f"num_experts: got {E - 1}, want {E}"),
        ({"hidden_size": H + 1}, f"hidden_size: got {H + 1}, the config wants {H}"),
        (
            {"intermediate_size_per_partition": 128},
            "intermediate_size_per_partition: got 128, the config wants 256",
        ),
        ({"params_dtype": np.float32}, "params_dtype: got 'float32', want one of bfloat16"),
        ({"num_experts": 0}, "num_experts: got 0"),
    ],
)
def test_wrong_sizes_are_refused(sizes, message):
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=TPU)
    right = {
        "num_experts": E,
        "hidden_size": H,
        "intermediate_size_per_partition": I,
        "params_dtype": "torch.bfloat16",
    }
    method.create_weights(types.SimpleNamespace(), **right)
    with pytest.raises(ValueError, match=message):
        method.create_weights(types.SimpleNamespace(), **(right | sizes))


def test_router_weight_on_input_is_refused():
    layer = types.SimpleNamespace(apply_router_weight_on_input=True)
    with pytest.raises(ValueError, match="apply_router_weight_on_input: got True"):
        UnquantizedFusedMoEMethod(CONFIG, platform=TPU).create_weights(layer, E, H, I)


# Loading


@pytest.mark.parametrize("name", METHODS)
def test_loading_keeps_bits_and_apply_equals_run_moe(name):
    build, scheme, static, _ = METHODS[name]
    weights = make_weights(scheme, static)
    method = build(CONFIG, platform=CPU, moe_backend="reference")
    layer = load(method, weights)
    loaded = layer.moe_weights
    assert same_bits(loaded.w13, weights.w13) and same_bits(loaded.w2, weights.w2)
    if scheme != "bf16":
        assert same_bits(loaded.w13_scale, weights.w13_scale) and same_bits(loaded.w2_scale, weights.w2_scale)
    if static:
        assert float(layer.w13_input_scale) == np.float32(0.02) and float(
            loaded.w2_input_scale
        ) == np.float32(0.03)
    x, topk_weights, topk_ids = batch()
    got = method.apply(layer, x, topk_weights, topk_ids)
    want = executors.run_moe("reference", x, topk_weights, topk_ids, weights, config=CONFIG)
    assert same_bits(got, want)
    method.process_weights_after_loading(layer)
    assert layer.moe_weights is loaded
    quant = method.moe_quant_config
    assert quant.w1_scale is loaded.w13_scale and quant.a2_scale is loaded.w2_input_scale


def test_adapters_reach_the_executor():
    method = METHODS["ct-channel"][0](CONFIG.with_lora(4, 16), platform=CPU, moe_backend="reference")
    weights = make_weights("channel")
    layer = load(method, weights)
    x, topk_weights, topk_ids = batch()
    ids = np.array([7, -1, 7, -1, -1, 7, -1, 7, -1], np.int32)
    adapter = make_adapter()
    got = method.apply(layer, x, topk_weights, topk_ids, adapters=[adapter], adapter_ids=ids)
    base = method.apply(layer, x, topk_weights, topk_ids)
    want = executors.run_moe(
        "reference", x, topk_weights, topk_ids, weights, config=CONFIG, adapters=[adapter], adapter_ids=ids
    )
    assert same_bits(got, want)
    assert same_bits(got[ids < 0], base[ids < 0])
    assert (rel_l2(got[ids >= 0], base[ids >= 0])) > 0.05
    codes = x.astype(E4M3)
    with pytest.raises(
        NotImplementedError, match=r"CompressedTensorsW8A8Fp8MoEMethod.apply.*without their scale"
    ):
        method.apply(layer, codes, topk_weights, topk_ids, adapters=[adapter], adapter_ids=ids)
    with pytest.raises(TypeError, match="x: got dtype float8_e4m3fn, want bfloat16"):
        method.apply(layer, codes, topk_weights, topk_ids)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("name", ["fp8-block", "ct-channel", "fp8-static", "unquantized"])
def test_expert_parallel_ranks_add_up(name, strategy):
    """Six experts on four ranks: uneven. Every rank is offered every tensor and keeps its own."""
    build, scheme, static, _ = METHODS[name]
    weights, ranks = make_weights(scheme, static), 4
    x, topk_weights, topk_ids = batch()
    adapter, ids = make_adapter(), np.where(np.arange(T) % 2, 7, -1).astype(np.int32)
    placement = ExpertPlacement(E, ranks, strategy)
    total = np.zeros((T, H), np.float32)
    for rank in range(ranks):
        parallel = FusedMoEParallelConfig(ep_size=ranks, ep_rank=rank, use_ep=True)
        config = replace(CONFIG.with_lora(2, 16), moe_parallel_config=parallel)
        method = build(config, platform=CPU, moe_backend="reference", placement=strategy)
        local = placement.experts_of(rank)
        layer = create(method, config, num_experts=len(local))
        for buffer, value, shard_id, expert in shards(weights, method.weight_scale_name):
            assert layer.weight_loader(buffer, value, shard_id, expert) == (expert in local)
        method.process_weights_after_loading(layer)
        assert same_bits(layer.moe_weights.w13, weights.w13[local])
        if static:
            assert float(layer.w13_input_scale) == np.float32(
                0.02
            )  # held by the last expert, on another rank
        total += method.apply(layer, x, topk_weights, topk_ids, [adapter], ids).astype(np.float32)
    want = executors.run_moe(
        "reference", x, topk_weights, topk_ids, weights, config=CONFIG, adapters=[adapter], adapter_ids=ids
    )
    assert rel_l2(total, want) < 4e-3  # each rank rounds its part to bfloat16


def test_one_process_may_hold_all_experts():
    """As on TPU: all experts on the host, the executor splits them over devices."""
    parallel = FusedMoEParallelConfig(ep_size=4, ep_rank=0, use_ep=True)
    config = replace(CONFIG, moe_parallel_config=parallel)
    method = Fp8MoEMethod(FP8_BLOCK, config, platform=CPU, moe_backend="reference")
    weights = make_weights("block")
    layer = load(method, weights, config)
    seen = []
    monkey = executors.executor_class("reference").run
    x, topk_weights, topk_ids = batch()

    def spy(call):
        seen.append((call.ep_size, call.expert_map))
        return monkey(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors.executor_class("reference"), "run", spy)
        got = method.apply(layer, x, topk_weights, topk_ids)
    assert seen == [(4, None)]
    assert same_bits(got, executors.run_moe("reference", x, topk_weights, topk_ids, weights, config=CONFIG))


@pytest.mark.parametrize("name", ["fp8-block", "ct-channel", "fp8-tensor", "fp8-static", "unquantized"])
def test_tensor_parallel_ranks_add_up(name):
    """W8A16 and bf16: with activations left alone, ranks' shares of I add up to the whole; adapters are cut
    too."""
    build, scheme, static, _ = METHODS[name]
    config = FusedMoEConfig(E, K, H, I, has_bias=True, moe_parallel_config=FusedMoEParallelConfig(tp_size=2))
    whole = replace(config, moe_parallel_config=FusedMoEParallelConfig())
    weights = make_weights(scheme, static, whole)
    recipe = "bf16" if scheme == "bf16" else "w8a16"
    x, topk_weights, topk_ids = batch()
    adapter, ids = make_adapter(), np.where(np.arange(T) % 2, 7, -1).astype(np.int32)
    total = np.zeros((T, H), np.float32)
    for rank in range(2):
        method = build(config, platform=CPU, moe_backend="reference", tp_rank=rank)
        layer = load(method, weights, config, intermediate=I // 2)
        rows = np.r_[rank * 128 : (rank + 1) * 128, I + rank * 128 : I + (rank + 1) * 128]
        assert same_bits(layer.moe_weights.w13, weights.w13[:, rows])
        assert same_bits(
            layer.moe_weights.w2, np.ascontiguousarray(weights.w2[:, :, rank * 128 : (rank + 1) * 128])
        )
        total += method.apply(layer, x, topk_weights, topk_ids, [adapter], ids, recipe).astype(np.float32)
    want = executors.run_moe(
        "reference",
        x,
        topk_weights,
        topk_ids,
        weights,
        config=whole,
        adapters=[adapter],
        adapter_ids=ids,
        recipe=recipe,
    )
    assert rel_l2(total, want) < 4e-3


def test_block_scales_cannot_be_cut_anywhere():
    config = FusedMoEConfig(E, K, H, 768, moe_parallel_config=FusedMoEParallelConfig(tp_size=4))
    method = Fp8MoEMethod(FP8_BLOCK, config, platform=TPU)
    with pytest.raises(
        ValueError, match=r"got 192 \(tp_size=4\) with block \[128, 128\].*expert parallelism"
    ):
        create(method, config, intermediate=192)
    create(METHODS["ct-channel"][0](config, platform=TPU), config, intermediate=192)
    odd = replace(config, moe_parallel_config=FusedMoEParallelConfig(tp_size=5))
    with pytest.raises(ValueError, match="tp_size: got 5, want a divisor of intermediate_size=768"):
        create(Fp8MoEMethod(FP8_BLOCK, odd, platform=TPU), odd, intermediate=153)
    with pytest.raises(ValueError, match="tp_rank: got 4, want less than tp_size=4"):
        create(METHODS["ct-channel"][0](config, platform=TPU, tp_rank=4), config, intermediate=192)


def test_experts_without_a_gate():
    config = FusedMoEConfig(E, K, H, I, activation="relu2", is_act_and_mul=False)
    for name in ("ct-channel", "fp8-tensor", "fp8-block"):
        build, scheme, *_ = METHODS[name]
        method = build(config, platform=CPU, moe_backend="reference")
        weights = make_weights(scheme, config=config)
        layer = load(method, weights, config)
        x, topk_weights, topk_ids = batch()
        want = executors.run_moe("reference", x, topk_weights, topk_ids, weights, config=config)
        assert same_bits(method.apply(layer, x, topk_weights, topk_ids), want)
        with pytest.raises(ValueError, match=r"'w3' for w13_weight .*without a gate.*, want w1"):
            create(method, config).weight_loader("w13_weight", weights.w13[0], "w3", 0)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16, E8M0])
def test_scale_dtypes_are_widened(dtype):
    method = Fp8MoEMethod(FP8_BLOCK_UE8M0, CONFIG, platform=TPU)
    layer = create(method)
    powers = ue8m0_ceil(make_weights("block").w2_scale[0])
    layer.weight_loader("w2_weight_scale_inv", powers.astype(dtype), "w2", 0)
    stored = layer.w2_weight_scale_inv[0]
    assert stored.dtype == np.float32
    want = decode_e8m0(powers.astype(dtype)) if dtype == E8M0 else powers.astype(dtype).astype(np.float32)
    assert np.array_equal(stored, want)


def test_flat_and_column_scales_are_the_same():
    method = METHODS["ct-channel"][0](CONFIG, platform=TPU)
    a, b = create(method), create(method)
    scale = make_weights("channel").w2_scale[0]
    a.weight_loader("w2_weight_scale", scale, "w2", 0)
    b.weight_loader("w2_weight_scale", scale[:, None], "w2", 0)
    assert np.array_equal(a.w2_weight_scale[0], b.w2_weight_scale[0])


def _loader_errors():
    w = make_weights("channel")
    nan = w.w13_scale[0, :I].copy()
    nan[3] = np.nan
    bad_code = w.w2[0].copy()
    bad_code.view(np.uint8)[0, 0] = 0x7F
    return [
        (("w13_wieght", w.w13[0, :I], "w1", 0), "param_name: got 'w13_wieght'.*did you mean 'w13_weight'"),
        (("w13_weight", w.w13[0, :I], "w2", 0), "shard_id: got 'w2' for w13_weight, want w1 or w3"),
        (("w2_weight", w.w2[0], "w1", 0), "shard_id: got 'w1' for w2_weight, want w2"),
        (("w2_weight", w.w2[0], "down", 0), "shard_id: got 'down', want one of w1, w2, w3"),
        (("w2_weight", w.w2[0], "w2", E), f"expert_id: got {E}, want less than {E}"),
        (("w2_weight", w.w2[0], "w2", -1), "expert_id: got -1"),
        (("w2_weight", w.w2[0], "w2", "0"), "expert_id: got '0', want an int"),
        (
            ("w13_weight", w.w13[0], "w1", 0),
            r"w13_weight, expert 0, shard w1: got shape \[512, 256\], want \[256, 256\]",
        ),
        (("w13_weight", w.w13[0, :I].astype(np.float32), "w1", 0), "got dtype float32, want float8_e4m3fn"),
        (("w13_weight", w.w13[0, :I].view(np.uint8), "w1", 0), "got dtype uint8, want float8_e4m3fn"),
        (("w13_weight", w.w13[0, :I].tolist(), "w1", 0), "got list, want a numpy array"),
        (("w13_weight_scale", nan, "w1", 2), "w13_weight_scale, expert 2, shard w1: got 1 non-finite values"),
        (("w13_weight_scale", -w.w13_scale[0, :I], "w1", 2), "got values <= 0, want positive scales"),
        (("w13_weight_scale", w.w13_scale[0], "w1", 2), r"got shape \[512\], want \[256, 1\]"),
        (("w2_weight", bad_code, "w2", 1), "w2_weight, expert 1, shard w2: got 1 non-finite values"),
    ]


@pytest.mark.parametrize(("arguments", "message"), _loader_errors())
def test_the_loader_names_what_is_wrong(arguments, message):
    layer = create(METHODS["ct-channel"][0](CONFIG, platform=TPU))
    before = {b: getattr(layer, b).tobytes() for b in layer.weight_attrs}
    with pytest.raises((TypeError, ValueError), match=message):
        layer.weight_loader(*arguments)
    assert {b: getattr(layer, b).tobytes() for b in layer.weight_attrs} == before


def test_tensors_that_come_twice_are_refused():
    layer = create(METHODS["ct-channel"][0](CONFIG, platform=TPU))
    weights = make_weights("channel")
    layer.weight_loader("w13_weight", weights.w13[1, :I], "w1", 1)
    layer.weight_loader("w13_weight", weights.w13[1, I:], "w3", 1)
    with pytest.raises(ValueError, match="w13_weight, expert 1, shard w3: loaded twice"):
        layer.weight_loader("w13_weight", weights.w13[1, I:], "w3", 1)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "fp8-ue8m0"])
def test_every_missing_tensor_is_named(name):
    build, scheme, static, _ = METHODS[name]
    method = build(CONFIG, platform=TPU)
    tensors = list(shards(make_weights(scheme, static), method.weight_scale_name))
    for lost in {(b, s) for b, _, s, _ in tensors if "input_scale" not in b}:
        layer = create(method)
        for buffer, value, shard_id, expert in tensors:
            if (buffer, shard_id, expert) != (*lost, 4):
                layer.weight_loader(buffer, value, shard_id, expert)
        with pytest.raises(ValueError, match=f"not loaded .*: {lost[0]}: expert 4 {lost[1]}$"):
            method.process_weights_after_loading(layer)
    layer = create(method)
    with pytest.raises(
        ValueError, match="w13_weight: expert 0 w1, expert 0 w3, expert 1 w1 and 9 more; w2_weight"
    ):
        method.process_weights_after_loading(layer)


def test_missing_input_scales_are_named():
    method = ModelOptFp8MoEMethod(None, CONFIG, platform=TPU)
    layer = create(method)
    for buffer, value, shard_id, expert in shards(make_weights("tensor", True), "weight_scale"):
        if buffer != "w2_input_scale" or expert != 2:
            layer.weight_loader(buffer, value, shard_id, expert)
    with pytest.raises(ValueError, match=r"not loaded .*: w2_input_scale: expert 2 w2$"):
        method.process_weights_after_loading(layer)


def test_buffers_filled_by_hand_are_accepted_and_replaced_ones_checked():
    method = METHODS["ct-channel"][0](CONFIG, platform=CPU, moe_backend="reference")
    weights, layer = make_weights("channel"), create(METHODS["ct-channel"][0](CONFIG, platform=CPU))
    layer.w13_weight[...], layer.w2_weight[...] = weights.w13, weights.w2
    layer.w13_weight_scale[...] = weights.w13_scale[..., None]
    layer.w2_weight_scale = weights.w2_scale
    with pytest.raises(
        ValueError, match=r"w2_weight_scale: got float32 \[6, 256\], want float32 \[6, 256, 1\]"
    ):
        method.process_weights_after_loading(layer)
    layer.w2_weight_scale = weights.w2_scale[..., None]
    method.process_weights_after_loading(layer)
    assert same_bits(np.ascontiguousarray(layer.moe_weights.w13_scale), weights.w13_scale)


@pytest.mark.parametrize(
    ("arch", "fnuz"), [("gfx942", True), ("gfx940", True), ("gfx950", False), ("gfx1201", False)]
)
def test_fnuz_only_on_gfx94x(arch, fnuz, monkeypatch):
    """The layer's buffers change flavour, no value does; the canonical weights stay as they are."""
    method = METHODS["ct-channel"][0](CONFIG, platform=Platform.rocm(arch), moe_backend="reference")
    weights = make_weights("channel")
    layer = load(method, weights)
    assert layer.w13_weight.dtype == (E4M3FNUZ if fnuz else E4M3)
    value = layer.w13_weight.astype(np.float32) * layer.w13_weight_scale
    assert np.array_equal(value, weights.w13.astype(np.float32) * weights.w13_scale[..., None])
    assert same_bits(layer.moe_weights.w13, weights.w13)
    assert np.array_equal(layer.moe_weights.w13_scale, weights.w13_scale)


# Running


def test_steps_out_of_order_are_refused():
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=TPU)
    layer = types.SimpleNamespace()
    x, topk_weights, topk_ids = batch()
    for step in (
        lambda: method.apply(layer, x, topk_weights, topk_ids),
        lambda: method.process_weights_after_loading(layer),
        lambda: method.weight_loader(layer, "w2_weight", x, "w2", 0),
    ):
        with pytest.raises(RuntimeError, match="create_weights must run on this layer first"):
            step()
    layer = create(method)
    with pytest.raises(RuntimeError, match="process_weights_after_loading must run before apply"):
        method.apply(layer, x, topk_weights, topk_ids)


@pytest.mark.parametrize("platform", [CPU, Platform.out_of_tree("kunlun", cuda_alike=True)], ids=str)
def test_no_executor_is_one_clear_error(platform):
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=platform)
    layer = load(method, make_weights("block"))
    x, topk_weights, topk_ids = batch()
    with pytest.raises(RuntimeError) as caught:
        method.apply(layer, x, topk_weights, topk_ids)
    message = str(caught.value)
    assert f"Fp8MoEMethod: nothing registered executes this layer on {platform}" in message
    assert "pallas_ep" in message and "register_moe_backend" in message


def test_an_executor_registered_late_is_found(monkeypatch):
    kunlun = Platform.out_of_tree("kunlun")
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=kunlun)
    weights = make_weights("block")
    layer = load(method, weights)
    reference = executors.executor_class("reference")
    module = types.ModuleType("kunlun_experts")
    experts = type("Experts", (reference,), {"support": replace(reference.support, lora=False)})
    monkeypatch.setattr(module, "Experts", experts, raising=False)
    monkeypatch.setitem(sys.modules, "kunlun_experts", module)
    register_moe_backend(
        "kunlun", "kunlun_experts:Experts", platforms=("out_of_tree",), schemes=("block",), auto_select=True
    )
    x, topk_weights, topk_ids = batch()
    want = executors.run_moe("reference", x, topk_weights, topk_ids, weights, config=CONFIG)
    assert same_bits(method.apply(layer, x, topk_weights, topk_ids), want)
    with pytest.raises(ValueError, match="executor 'kunlun' cannot serve this call: it does not apply LoRA"):
        method.apply(layer, x, topk_weights, topk_ids, [make_adapter()], np.full(T, 7, np.int32))


def test_an_unavailable_executor_says_why(monkeypatch):
    method = Fp8MoEMethod(FP8_BLOCK, CONFIG, platform=TPU)
    layer = load(method, make_weights("block"))
    cls = executors.executor_class("pallas_ep")
    monkeypatch.setattr(
        cls, "info", classmethod(lambda c: executors.ExecutorInfo("pallas_ep", "unavailable", "no jax here"))
    )
    with pytest.raises(RuntimeError, match="executor 'pallas_ep' is unavailable: no jax here"):
        method.apply(layer, *batch())


def test_the_default_recipe_suits_device_and_checkpoint(monkeypatch):
    """W8A16 on TPUs that convert FP8 before the dot, for weight-only checkpoints, and where nothing else
    runs."""
    cases = [
        (Platform.tpu("v7x"), "pallas_ep", CT_CHANNEL, "auto", "w8a8"),
        (Platform.tpu("v6e"), "pallas_ep", CT_CHANNEL, "auto", "w8a16"),
        (Platform.tpu("v7x"), "pallas_ep", (CT_CHANNEL[0], None), "auto", "w8a16"),
        (HOPPER, "triton", CT_CHANNEL, "auto", "w8a8"),
        (HOPPER, "marlin", CT_CHANNEL, "marlin", "w8a16"),
        (Platform.cuda(8, 6), "marlin", CT_CHANNEL, "auto", "w8a16"),
    ]
    weights, arrays = make_weights("channel"), batch()
    for platform, executor, group, request, want in cases:
        method = CompressedTensorsW8A8Fp8MoEMethod(*group, CONFIG, platform=platform, moe_backend=request)
        layer = load(method, weights)
        calls: list[tuple[str, str]] = []

        def run(cls, call, calls=calls):
            calls.append((cls.name, call.recipe.name))
            return call.x

        cls = executors.executor_class(executor)
        monkeypatch.setattr(cls, "run", classmethod(run))
        ready = classmethod(
            lambda c: executors.ExecutorInfo(c.name, "interpreted", "test", c.support.recipes)
        )
        monkeypatch.setattr(cls, "info", ready)
        method.apply(layer, *arrays)
        assert calls == [(executor, want)]


@pytest.mark.parametrize(("platform", "ep_size"), [(TPU, 2), (HOPPER, 1), (Platform.cuda(8, 6), 1)], ids=str)
def test_the_platforms_own_kernels_run_the_layer(platform, ep_size):
    """End to end with adapters, interpreted where there is no device: TPU by the registry, CUDA by choice."""
    parallel = FusedMoEParallelConfig(ep_size=ep_size, use_ep=ep_size > 1)
    config = replace(CONFIG.with_lora(2, 16), moe_parallel_config=parallel)
    method = METHODS["ct-channel"][0](config, platform=platform)
    name = method.executor.name
    info = executors.executor_class(name).info()
    if info.state == "unavailable":
        pytest.skip(f"{name} is unavailable: {info.reason}")
    weights = make_weights("channel")
    layer = load(method, weights, config)
    x, topk_weights, topk_ids = batch()
    options = {
        "adapters": [make_adapter()],
        "adapter_ids": np.where(np.arange(T) % 2, 7, -1).astype(np.int32),
    }
    got = method.apply(layer, x, topk_weights, topk_ids, **options)
    recipe = "w8a16" if name == "marlin" else "w8a8"
    want = executors.run_moe(
        "reference", x, topk_weights, topk_ids, weights, config=CONFIG, recipe=recipe, **options
    )
    assert rel_l2(got, want) <= tolerances.to_recipe("bf16").bound


def test_monolithic_apply_routes_first():
    method = UnquantizedFusedMoEMethod(CONFIG, platform=CPU, moe_backend="reference")
    weights = make_weights("bf16")
    layer = load(method, weights)
    x, *_ = batch()
    logits = np.random.default_rng(5).standard_normal((T, E)).astype(np.float32)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :K]
    kept = np.exp(np.take_along_axis(logits, chosen, 1).astype(np.float64))
    want = executors.run_moe(
        "reference",
        x,
        (kept / kept.sum(1, keepdims=True)).astype(np.float32),
        chosen.astype(np.int32),
        weights,
        config=CONFIG,
    )
    assert rel_l2(method.apply_monolithic(layer, x, logits), want) < 4e-3


def test_a_subclass_may_override_what_a_plugin_overrides():
    """As a TPU plugin does: inherit the constructor, bring one's own processing and forward."""

    class Mine(CompressedTensorsW8A8Fp8MoEMethod):
        @property
        def is_monolithic(self):
            return True

        def process_weights_after_loading(self, layer):
            layer.mine = layer.w13_weight.view(np.uint8)

    method = Mine(*CT_CHANNEL, CONFIG, platform=TPU, moe_backend="triton")
    assert method.is_monolithic and method.fp8_backend is Fp8MoeBackend.NONE and method.experts_cls is None
    layer = create(method)
    method.process_weights_after_loading(layer)
    assert layer.mine.shape == (E, 2 * I, H)
    assert ml_dtypes.finfo(layer.w13_weight.dtype).max == 448
