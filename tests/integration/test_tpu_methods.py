# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's real FP8 MoE methods, constructed, loaded and run on virtual devices."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import isomoe
from isomoe.common.executors import make_call
from isomoe.common.metrics import bitwise_equal, rel_l2
from isomoe.common.tolerances import TO_RECIPE, to_truth

BF16 = np.dtype(ml_dtypes.bfloat16)
EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 16, 4, 256, 256, 24
_prefixes = (f"model.layers.{i}.mlp.experts" for i in itertools.count(100))

POISONS = [
    {},
    {"VLLM_USE_DEEP_GEMM": "1"},
    {"VLLM_MOE_USE_DEEP_GEMM": "1"},
    {"VLLM_USE_DEEP_GEMM": "0"},
    {"VLLM_ROCM_USE_AITER": "1"},
    {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MOE": "1"},
    {"VLLM_ROCM_USE_AITER_MOE": "0"},
    {"VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    {"VLLM_USE_FLASHINFER_MOE_FP8": "1", "VLLM_FLASHINFER_MOE_BACKEND": "latency"},
    {"ISOMOE_MOE_BACKEND": "triton"},
    {"ISOMOE_MOE_BACKEND": "no-such-backend"},
]
BACKENDS = ["auto", "triton", "deep_gemm", "cutlass", "flashinfer_trtllm", "marlin", "aiter"]


@dataclass(frozen=True)
class Built:
    """A vLLM MoE layer and what is needed to run it."""

    runner: Any
    layer: Any
    config: Any

    @property
    def method(self) -> Any:
        return self.layer.quant_method


def build(
    vllm_config: Any, mesh: Any, *, hidden: int = HIDDEN, inter: int = INTER, experts: int = EXPERTS, **options: Any
) -> Built:
    """vLLM's own factory with tpu-inference's quantisation config for the mesh."""
    import torch
    from tpu_inference.layers.vllm.quantization import get_tpu_quantization_config
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import fused_moe

    factory = getattr(fused_moe, "FusedMoE", None) or fused_moe.FusedMoEFactory
    vllm_config.quant_config = get_tpu_quantization_config(vllm_config, mesh)
    vllm_config.quant_config.packed_modules_mapping = {}
    with set_current_vllm_config(vllm_config):
        runner = factory(
            num_experts=experts, top_k=TOP_K, hidden_size=hidden, intermediate_size=inter,
            params_dtype=torch.bfloat16, quant_config=vllm_config.quant_config, prefix=next(_prefixes), **options,
        )
    return Built(runner, runner.routed_experts, vllm_config)


def random_weights(
    scheme: str, *, seed: int = 0, experts: int = EXPERTS, hidden: int = HIDDEN, inter: int = INTER
) -> isomoe.MoEWeights:
    """Weights whose rows and blocks have gains of their own, so that a misplaced scale shows."""
    rng = np.random.default_rng(seed)
    gain13 = np.exp(rng.normal(size=(experts, 2 * inter, 1)))
    gain2 = np.exp(rng.normal(size=(experts, hidden, 1)))
    w13 = rng.normal(size=(experts, 2 * inter, hidden)) * gain13 / np.sqrt(hidden)
    w2 = rng.normal(size=(experts, hidden, inter)) * gain2 / np.sqrt(inter)
    return isomoe.quantize_moe_weights(w13.astype(np.float32), w2.astype(np.float32), scheme)


def load(built: Built, weights: isomoe.MoEWeights, *, static: tuple[float, float] | None = None) -> None:
    """Feed every shard through vLLM's weight_loader, as its model code does."""
    import torch

    layer, inter = built.layer, weights.intermediate_size

    def tensor(a: np.ndarray) -> torch.Tensor:
        a = np.ascontiguousarray(a)
        if a.dtype == np.dtype(ml_dtypes.float8_e4m3fn):
            return torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn)
        if a.dtype == BF16:
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    def send(name: str, value: np.ndarray, shard: str, expert: int) -> None:
        parameter = getattr(layer, name)
        layer.weight_loader(parameter, tensor(value), name, shard_id=shard, expert_id=expert)

    scale_name = "weight_scale_inv" if hasattr(layer, "w13_weight_scale_inv") else "weight_scale"
    halves = {"w1": slice(0, inter), "w3": slice(inter, 2 * inter)}
    scale_rows = 0 if weights.w13_scale is None else weights.w13_scale.shape[1] // 2
    scale_halves = {"w1": slice(0, scale_rows), "w3": slice(scale_rows, 2 * scale_rows)}
    column = (lambda s: s[:, None]) if weights.scheme == "channel" else (lambda s: s)
    for expert in range(weights.num_experts):
        for shard in ("w1", "w3"):
            send("w13_weight", weights.w13[expert, halves[shard]], shard, expert)
            if weights.w13_scale is not None:
                send(f"w13_{scale_name}", column(weights.w13_scale[expert, scale_halves[shard]]), shard, expert)
        send("w2_weight", weights.w2[expert], "w2", expert)
        if weights.w2_scale is not None:
            send(f"w2_{scale_name}", column(np.atleast_1d(weights.w2_scale[expert])), "w2", expert)
        if static is not None:
            for shard in ("w1", "w3"):
                send("w13_input_scale", np.array(static[0], np.float32), shard, expert)
            send("w2_input_scale", np.array(static[1], np.float32), "w2", expert)


def process(built: Built) -> None:
    """What vLLM's model loader does after the last shard."""
    import jax
    from vllm.config import set_current_vllm_config

    with jax.default_device(jax.devices("cpu")[0]), set_current_vllm_config(built.config):
        built.method.process_weights_after_loading(built.layer)


def batch(seed: int = 1, *, tokens: int = TOKENS, hidden: int = HIDDEN, experts: int = EXPERTS) -> tuple[Any, Any]:
    """Rows, and logits without near-ties: a permutation of well separated levels a row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, hidden)).astype(BF16)
    levels = np.linspace(-2, 2, experts)
    return x, np.stack([rng.permutation(levels) for _ in range(tokens)]).astype(BF16)


def run(built: Built, mesh: Any, x: np.ndarray, logits: np.ndarray, *, jit: bool = False) -> np.ndarray:
    """`apply_monolithic` inside the mesh and torchax environment of a model step."""
    import jax
    import jax.numpy as jnp
    import torchax
    from torchax.interop import jax_view, torch_view

    def step(rows: Any, scores: Any) -> Any:
        return jax_view(built.method.apply_monolithic(built.layer, torch_view(rows), torch_view(scores)))

    with jax.set_mesh(mesh), torchax.default_env():
        return np.asarray((jax.jit(step) if jit else step)(jnp.asarray(x), jnp.asarray(logits)))


def expected(
    weights: isomoe.MoEWeights, x: np.ndarray, logits: np.ndarray, recipe: str, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The reference of the recipe, and float64."""
    config = isomoe.FusedMoEConfig(weights.num_experts, TOP_K, weights.hidden_dim, weights.intermediate_size)
    topk_weights, topk_ids = isomoe.route(logits, config)
    pair = []
    for name in (recipe, "float64"):
        call = make_call(x, topk_weights, topk_ids, weights, config=config, recipe=name, **options)
        from isomoe.common.reference import ReferenceExecutor

        pair.append(ReferenceExecutor.run(call))
    return pair[0], pair[1]


@pytest.fixture(params=POISONS, ids=lambda p: ",".join(f"{k}={v}" for k, v in p.items()) or "clean")
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    yield request.param


@pytest.mark.parametrize("scheme", ["channel", "block", "modelopt"])
def test_constructors_give_none_under_any_environment(
    scheme: str, vllm_config: Callable[..., Any], modelopt_folder: Path, mesh: Callable[..., Any],
    poisoned: dict[str, str],
) -> None:
    """Whatever variable is set: no exception, NONE, and every field vLLM's own constructor sets."""
    from tpu_inference.layers.vllm.quantization import fp8 as tpu_fp8
    from tpu_inference.layers.vllm.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as tpu_ct,
    )
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8MoEMethod

    method = build(vllm_config(modelopt_folder if scheme == "modelopt" else scheme), mesh(8)).method
    real = {
        "channel": tpu_ct.VllmCompressedTensorsW8A8Fp8MoEMethod, "block": tpu_fp8.VllmFp8MoEMethod,
        "modelopt": ModelOptFp8MoEMethod,
    }
    assert isinstance(method, real[scheme])
    assert method.fp8_backend is Fp8MoeBackend.NONE
    assert method.experts_cls is None
    assert method.is_monolithic
    assert method.block_quant == (scheme == "block")
    assert method.weight_block_size == ([128, 128] if scheme == "block" else None)
    assert method.moe_kernel is None and not method.supports_internal_mk


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["channel", "block", "modelopt"])
def test_constructors_give_none_for_any_explicit_backend(
    scheme: str, backend: str, vllm_config: Callable[..., Any], modelopt_folder: Path, mesh: Callable[..., Any]
) -> None:
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    config = vllm_config(modelopt_folder if scheme == "modelopt" else scheme)
    config.kernel_config.moe_backend = backend
    method = build(config, mesh(8)).method
    assert method.moe.moe_backend == backend
    assert method.fp8_backend is Fp8MoeBackend.NONE and method.experts_cls is None


def test_the_plugin_leaves_vllms_modules_as_they_are() -> None:
    """Nobody else's selector, constructor or method is replaced; in a process where no other plugin ran.

    Nor does registering start jax: vLLM's API server registers as well, and the TPU belongs to the engine's process.
    """
    code = """
import vllm.model_executor.layers.quantization.fp8 as fp8
import vllm.model_executor.layers.fused_moe.oracle.fp8 as oracle
import tpu_inference.layers.vllm.quantization.fp8 as tpu_fp8
before = [dict(vars(m)) for m in (fp8, oracle, tpu_fp8)]
from isomoe.tpu_impl.tpu_inference_plugin import is_registered, register
register()
assert is_registered()
after = [dict(vars(m)) for m in (fp8, oracle, tpu_fp8)]
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print([k for b, a in zip(before, after) for k in a if a[k] is not b.get(k)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("expert_parallel", [True, False], ids=["ep", "tp"])
@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_shards_land_through_vllms_loader(
    scheme: str, expert_parallel: bool, vllm_config: Callable[..., Any], mesh: Callable[..., Any]
) -> None:
    built = build(vllm_config(scheme, expert_parallel=expert_parallel), mesh(8))
    weights = random_weights(scheme)
    load(built, weights)
    import torch

    held = built.layer.w13_weight.data.view(torch.uint8).numpy(), built.layer.w2_weight.data.view(torch.uint8).numpy()
    assert np.array_equal(held[0], weights.w13.view(np.uint8))
    assert np.array_equal(held[1], weights.w2.view(np.uint8))
    name = "weight_scale_inv" if scheme == "block" else "weight_scale"
    assert np.array_equal(getattr(built.layer, f"w13_{name}").data.numpy().squeeze(), weights.w13_scale)
    assert np.array_equal(getattr(built.layer, f"w2_{name}").data.numpy().squeeze(), weights.w2_scale)


@pytest.mark.parametrize("recipe", ["w8a16", "w8a8"])
@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_apply_equals_the_reference_on_eight_devices(
    scheme: str, recipe: str, vllm_config: Callable[..., Any], mesh: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ISOMOE_TPU_RECIPE", recipe)
    built, weights = build(vllm_config(scheme), mesh(8)), random_weights(scheme)
    load(built, weights)
    process(built)
    assert built.method.ep_layer is not None, "the kernel did not take the layer"
    x, logits = batch()
    got = run(built, mesh(8), x, logits, jit=True)
    same, truth = expected(weights, x, logits, recipe)
    assert got.dtype == BF16 and got.shape == x.shape
    assert rel_l2(got, same) <= TO_RECIPE.bound
    assert rel_l2(got, truth) <= to_truth(recipe, "bf16").bound


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_checkpoint_bits_reach_the_kernel(
    scheme: str, vllm_config: Callable[..., Any], mesh: Callable[..., Any]
) -> None:
    """No requantisation: codes and scales on the devices are the checkpoint's, moved."""
    from torchax.interop import jax_view

    built, weights = build(vllm_config(scheme), mesh(8)), random_weights(scheme)
    load(built, weights)
    process(built)
    w13, w2 = (np.asarray(jax_view(getattr(built.layer, f"{n}_weight"))) for n in ("w13", "w2"))
    tiles, width = w13.shape[1], w13.shape[3] // 2
    # [E, nf, H, 2 bf] and [E, nf, bf, H]: back to rows of output channels.
    back13 = w13.reshape(EXPERTS, tiles, HIDDEN, 2, width).transpose(0, 3, 1, 4, 2).reshape(EXPERTS, 2 * INTER, HIDDEN)
    back2 = w2.transpose(0, 3, 1, 2).reshape(EXPERTS, HIDDEN, INTER)
    assert np.array_equal(back13.view(np.uint8), weights.w13.view(np.uint8))
    assert np.array_equal(back2.view(np.uint8), weights.w2.view(np.uint8))
    name = "weight_scale_inv" if scheme == "block" else "weight_scale"
    held = [np.asarray(jax_view(getattr(built.layer, f"{n}_{name}"))) for n in ("w13", "w2")]
    # A checkpoint's scales are positive; zeros fill the last lanes of block scales.
    scales = {np.float32(v) for array in held for v in array[array != 0]}
    assert scales == {np.float32(v) for s in (weights.w13_scale, weights.w2_scale) for v in s.ravel()}


@pytest.mark.parametrize("experts", [16, 11], ids=["even", "uneven"])
@pytest.mark.parametrize("scheme", ["channel", "block", "tensor"])
def test_devices_arrange_as_the_host_does(scheme: str, experts: int, mesh: Callable[..., Any]) -> None:
    """Sizes that need padding, experts that do not divide by the devices: `layout.lay_out_weights`, bit for bit."""
    from isomoe.tpu_impl.layout import lay_out_weights
    from isomoe.tpu_impl.tpu_inference.ep_layer import EPLayer

    weights = random_weights(scheme, experts=experts, hidden=320, inter=200)
    config = isomoe.FusedMoEConfig(experts, TOP_K, 320, 200)
    layer = EPLayer.of(weights, config, mesh(8), "model", "w8a16")
    got = layer.operands(weights)
    want = lay_out_weights(weights, bf=layer.bf, experts=16)
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert bitwise_equal(np.asarray(got[name]), array), name


def test_experts_are_split_over_the_mesh(vllm_config: Callable[..., Any], mesh: Callable[..., Any]) -> None:
    from torchax.interop import jax_view

    built = build(vllm_config("channel"), mesh(8))
    load(built, random_weights("channel"))
    process(built)
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"):
        array = jax_view(getattr(built.layer, name))
        assert {s.data.shape[0] for s in array.addressable_shards} == {EXPERTS // 8}, name


@pytest.mark.parametrize("axis", ["model", "expert", "attn_dp"])
def test_longer_meshes(
    axis: str, vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tpu-inference's seven-axis meshes, whichever of its expert axes is the wide one: the 2-D mesh's bits."""
    from tpu_inference.layers.common import sharding

    weights, (x, logits) = random_weights("channel"), batch()
    flat = build(vllm_config("channel"), mesh(4))
    load(flat, weights)
    process(flat)
    want = run(flat, mesh(4), x, logits)
    monkeypatch.setattr(sharding.ShardingAxisName, "_cls", sharding.ShardingAxisNameBase)
    names = sharding.MESH_AXIS_NAMES
    long = build(vllm_config("channel"), mesh(4, names, axis))
    load(long, weights)
    process(long)
    assert long.method.ep_layer is not None and long.method.ep_layer.axis == axis
    assert bitwise_equal(run(long, mesh(4, names, axis), x, logits), want)


@pytest.mark.parametrize("shape", [{"attn_dp": 2, "model": 2}, {"model": 2, "expert": 2}, {"data": 2, "model": 2}],
                         ids=lambda s: "x".join(s))
def test_several_wide_axes(
    shape: dict[str, int], vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts over two axes at once, and tokens over ``data`` with the experts replicated."""
    import jax
    from jax.sharding import Mesh
    from tpu_inference.layers.common import sharding

    monkeypatch.setenv("ISOMOE_TPU_RECIPE", "w8a16")
    monkeypatch.setattr(sharding.ShardingAxisName, "_cls", sharding.ShardingAxisNameBase)
    names = sharding.MESH_AXIS_NAMES
    wide = Mesh(np.array(jax.devices()[:4]).reshape([shape.get(name, 1) for name in names]), names)
    built, weights = build(vllm_config("channel"), wide), random_weights("channel")
    load(built, weights)
    process(built)
    taken = built.method.ep_layer
    assert taken is not None
    assert taken.ep == (2 if "data" in shape else 4) and taken.token_axes == (("data",) if "data" in shape else ())
    x, logits = batch()
    got = run(built, wide, x, logits, jit=True)
    assert rel_l2(got, expected(weights, x, logits, "w8a16")[0]) <= TO_RECIPE.bound


def test_batch_sizes_and_ep_sizes_agree(vllm_config: Callable[..., Any], mesh: Callable[..., Any]) -> None:
    """A token's row does not depend on how many devices or other rows there are, beyond rounding."""
    weights, (x, logits) = random_weights("channel"), batch(tokens=13)
    rows = []
    for devices in (1, 2, 8):
        built = build(vllm_config("channel"), mesh(devices))
        load(built, weights)
        process(built)
        rows.append(run(built, mesh(devices), x, logits))
    for other in rows[1:]:
        assert rel_l2(other, rows[0]) <= TO_RECIPE.bound


def test_a_refused_layer_stays_on_tpu_inferences_path(
    vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the reason, and tpu-inference's own weight processing."""
    from isomoe.tpu_impl.tpu_inference import methods

    lines: list[str] = []
    monkeypatch.setattr(methods.logger, "warning_once", lambda text, *_: lines.append(text))
    built = build(vllm_config("channel"), mesh(8), apply_router_weight_on_input=True)
    load(built, random_weights("channel"))
    process(built)
    assert built.method.ep_layer is None
    assert len(lines) == 1 and "apply_router_weight_on_input" in lines[0]
    # tpu-inference's layout of its own fused kernel: [E, 2, H, I].
    assert built.layer.w13_weight.shape == (EXPERTS, 2, HIDDEN, INTER)


@pytest.mark.parametrize(("name", "value", "choices"), [
    ("ISOMOE_TPU_RECIPE", "w8a9", "w8a16, w8a8"),
    ("ISOMOE_WEIGHT_SCALE_POLICY", "subchannel256", "exact, per_channel"),
])
def test_a_setting_that_is_none_of_the_choices_is_an_error(
    name: str, value: str, choices: str, vllm_config: Callable[..., Any], mesh: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    built = build(vllm_config("block"), mesh(2))
    load(built, random_weights("block"))
    with pytest.raises(ValueError, match=f"{name}: got '{value}', want one of {choices}"):
        process(built)


def test_without_the_switch_nothing_changes(
    vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_MOE_EP_KERNEL", "0")
    built = build(vllm_config("channel"), mesh(8))
    load(built, random_weights("channel"))
    process(built)
    assert built.method.ep_layer is None
    assert built.layer.w13_weight.shape == (EXPERTS, HIDDEN, 2 * INTER)


@pytest.mark.parametrize("options", [
    {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "bias": True},
    {"renormalize": False, "routed_scaling_factor": 2.5},
], ids=["deepseek", "scaled"])
def test_routing_features(
    options: dict[str, Any], vllm_config: Callable[..., Any], mesh: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups, correction bias, sigmoid, no renormalisation and the scaling factor, as `isomoe.route` has them."""
    import torch

    monkeypatch.setenv("ISOMOE_TPU_RECIPE", "w8a16")
    x, logits = batch()
    bias = np.random.default_rng(5).normal(size=EXPERTS).astype(np.float32) if options.pop("bias", False) else None
    biased: dict[str, Any] = {}
    if bias is not None:
        biased["e_score_correction_bias"] = torch.nn.Parameter(torch.from_numpy(bias))
    built = build(vllm_config("channel"), mesh(2), **options, **biased)
    weights = random_weights("channel")
    load(built, weights)
    process(built)
    if bias is not None:  # the model wrapper puts it on the devices
        from tpu_inference.layers.vllm.process_weights.cleanup_sharding import _shard_tensor_to_tpu_replicated

        shared = _shard_tensor_to_tpu_replicated(built.layer.e_score_correction_bias, mesh(2))
        built.layer.e_score_correction_bias = torch.nn.Parameter(shared, requires_grad=False)
    got = run(built, mesh(2), x, logits)
    kept = {k: v for k, v in options.items() if k != "use_grouped_topk"}
    config = isomoe.FusedMoEConfig(EXPERTS, TOP_K, HIDDEN, INTER, **kept)
    topk_weights, topk_ids = isomoe.route(logits, config, correction_bias=bias)
    want = isomoe.run_moe("reference", x, topk_weights, topk_ids, weights, config=config, recipe="w8a16")
    assert rel_l2(got, want) <= TO_RECIPE.bound


@pytest.mark.parametrize("recipe", ["w8a16", "w8a8"])
def test_modelopt_fp8(
    recipe: str, modelopt_folder: Path, vllm_config: Callable[..., Any], mesh: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ModelOpt FP8 checkpoint, which tpu-inference refuses by name: per-tensor scales, static activations."""
    from tpu_inference.layers.vllm.quantization.fp8 import VllmFp8LinearMethod
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8MoEMethod

    monkeypatch.setenv("ISOMOE_TPU_RECIPE", recipe)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    config = vllm_config(modelopt_folder)
    assert config.model_config.quantization == "fp8"
    built = build(config, mesh(8))
    assert isinstance(built.method, ModelOptFp8MoEMethod)
    assert built.method.fp8_backend is Fp8MoeBackend.NONE and built.method.experts_cls is None
    static = (3.0 / 448, 12.0 / 448)
    plain = random_weights("tensor")
    weights = isomoe.MoEWeights(
        "tensor", plain.w13, plain.w2, plain.w13_scale, plain.w2_scale,
        w13_input_scale=np.array(static[0], np.float32), w2_input_scale=np.array(static[1], np.float32),
    )
    load(built, plain, static=static)
    process(built)
    x, logits = batch()
    got = run(built, mesh(8), x, logits)
    assert rel_l2(got, expected(weights, x, logits, recipe)[0]) <= TO_RECIPE.bound

    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

    with set_current_vllm_config(config):
        kinds = {
            name: type(RowParallelLinear(256, 256, quant_config=config.quant_config, prefix=name).quant_method)
            for name in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.gate")
        }
    assert kinds["model.layers.0.self_attn.o_proj"] is VllmFp8LinearMethod
    assert issubclass(kinds["model.layers.0.mlp.gate"], UnquantizedLinearMethod)


def test_block_scales_to_per_channel_by_policy(
    vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opt-in: the kernel then runs the weights requantised to one scale a row."""
    from isomoe.tpu_impl.tpu_inference.weights import requantize_per_channel

    monkeypatch.setenv("ISOMOE_WEIGHT_SCALE_POLICY", "per_channel")
    monkeypatch.setenv("ISOMOE_TPU_RECIPE", "w8a16")
    built, weights = build(vllm_config("block"), mesh(2)), random_weights("block")
    load(built, weights)
    process(built)
    assert built.method.ep_layer.scheme == "channel"
    x, logits = batch()
    got = run(built, mesh(2), x, logits)
    assert rel_l2(got, expected(requantize_per_channel(weights), x, logits, "w8a16")[0]) <= TO_RECIPE.bound


def test_the_model_step_is_traced_once(vllm_config: Callable[..., Any], mesh: Callable[..., Any]) -> None:
    """Batches of one size share one program."""
    import jax
    import jax.numpy as jnp
    import torchax
    from torchax.interop import jax_view, torch_view

    built = build(vllm_config("channel"), mesh(2))
    load(built, random_weights("channel"))
    process(built)
    traces = []

    @jax.jit
    def step(rows: Any, scores: Any) -> Any:
        traces.append(1)
        return jax_view(built.method.apply_monolithic(built.layer, torch_view(rows), torch_view(scores)))

    with jax.set_mesh(mesh(2)), torchax.default_env():
        for seed in range(3):
            x, logits = batch(seed)
            step(jnp.asarray(x), jnp.asarray(logits))
    assert len(traces) == 1


def test_the_poison_is_real(
    vllm_config: Callable[..., Any], mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own selector raises for the very layer that constructs here."""
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import select_fp8_moe_backend
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    method = build(vllm_config("channel"), mesh(8)).method
    with pytest.raises(ValueError, match="DEEPGEMM"):
        select_fp8_moe_backend(method.moe, kFp8StaticChannelSym, kFp8DynamicTokenSym)


def test_unquantized_experts(vllm_config: Callable[..., Any], mesh: Callable[..., Any]) -> None:
    """bfloat16 checkpoints run on the kernel as well."""
    built, weights = build(vllm_config("bf16"), mesh(8)), random_weights("bf16")
    load(built, weights)
    process(built)
    assert built.method.ep_layer is not None and built.method.ep_layer.recipe == "bf16"
    x, logits = batch()
    same, truth = expected(weights, x, logits, "bf16")
    got = run(built, mesh(8), x, logits)
    assert rel_l2(got, same) <= TO_RECIPE.bound
    assert rel_l2(got, truth) <= to_truth("bf16", "bf16").bound
