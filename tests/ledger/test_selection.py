# SPDX-License-Identifier: Apache-2.0
"""Reports about backend selection, quant methods, checkpoints and packaging."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest

import isomoe
from isomoe.common.backends import (
    Fp8MoeBackend,
    RegisteredBackend,
    UnquantizedMoeBackend,
    register_moe_backend,
    unregister_moe_backend,
)
from isomoe.common.checkpoints import load_moe_layer
from isomoe.common.config import FusedMoEConfig, FusedMoEParallelConfig
from isomoe.common.executors import make_call, run_moe
from isomoe.common.metrics import bitwise_equal
from isomoe.common.numerics import BF16
from isomoe.common.platforms import Platform
from isomoe.common.quant_keys import KEYS_OF_SCHEME, kBf16
from isomoe.common.quant_methods import (
    CompressedTensorsW8A8Fp8MoEMethod,
    Fp8MoEMethod,
    ModelOptFp8MoEMethod,
    UnquantizedFusedMoEMethod,
)
from isomoe.common.safe_files import TensorFileError
from isomoe.common.selector import explain_selection, select_fp8_moe_backend, select_unquantized_moe_backend
from isomoe.tests import planted
from isomoe.tests.conformance import inputs_of
from isomoe.tests.file_writers import write_checkpoint
from isomoe.tests.ledger.record import RNG, cases, check, report
from isomoe.tests.ledger.test_routing_and_ids import small_layer
from isomoe.tests.matrix import Case

CONFIG = FusedMoEConfig(128, 8, 2048, 768)
BLOCK, CHANNEL = KEYS_OF_SCHEME["block"], KEYS_OF_SCHEME["channel"]
TPU, H100, A100 = Platform.tpu("v7x"), Platform.cuda(9, 0), Platform.cuda(8, 0)
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ROOT = Path(isomoe.__file__).parent


def sources(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts]


@report(
    "vllm#32414",
    "vllm#32908",
    "vllm#31996",
    "vllm#32438",
    "tpu-inference#1512",
    "tpu-inference#1521",
    symptom="constructors call the FP8 selector, which raises on a TPU",
)
def constructors_on_a_tpu() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_DEEP_GEMM", "1")
        for backend in ("auto", "triton", "marlin"):
            for keys in (BLOCK, CHANNEL):
                assert select_fp8_moe_backend(CONFIG, *keys, platform=TPU, moe_backend=backend) == (
                    Fp8MoeBackend.NONE,
                    None,
                )
            options = {"platform": TPU, "moe_backend": backend}
            for method in (
                Fp8MoEMethod(FP8_CONFIG, CONFIG, **options),
                CompressedTensorsW8A8Fp8MoEMethod(
                    {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "channel",
                        "symmetric": True,
                        "dynamic": False,
                    },
                    {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
                    CONFIG,
                    **options,
                ),
                ModelOptFp8MoEMethod(None, CONFIG, **options),
            ):
                assert method.fp8_backend is Fp8MoeBackend.NONE and method.experts_cls is None
            assert (
                UnquantizedFusedMoEMethod(CONFIG, **options).unquantized_backend is UnquantizedMoeBackend.NONE
            )


@report("vllm#45661", "vllm#34356", symptom="`no backend supports the configuration` and not a word why")
def refusals_give_every_reason() -> None:
    with pytest.raises(NotImplementedError) as caught:
        select_fp8_moe_backend(CONFIG, *BLOCK, platform=Platform.cuda(7, 0))
    for name in ("triton", "marlin", "pallas_ep"):
        assert name in str(caught.value)
    assert "compute capability" in str(caught.value)
    rows = explain_selection(
        replace(CONFIG, num_experts=512, intermediate_size=640), *BLOCK, platform=H100
    ).rows
    assert all(row.reason for row in rows)


@report("vllm#46752", "vllm#46629", symptom="a backend that the command line offers crashes another scheme")
def offered_names_are_served_or_refused_by_name() -> None:
    for name in [b.value for b in Fp8MoeBackend] + [b.value for b in UnquantizedMoeBackend]:
        if name == "none":
            continue
        for keys in (BLOCK, CHANNEL, KEYS_OF_SCHEME["tensor"]):
            assert explain_selection(CONFIG, *keys, platform=H100, moe_backend=name).ok
    with pytest.raises(
        ValueError, match=r"moe_backend='emulation' is not a registered .*want one of auto, marlin"
    ):
        select_fp8_moe_backend(CONFIG, *BLOCK, platform=H100, moe_backend="emulation")


@report("vllm#45265", symptom="FP8 with LoRA by way of Marlin, asked for by name, is not honoured")
def marlin_by_name_with_lora() -> None:
    backend, cls = select_fp8_moe_backend(CONFIG.with_lora(4, 64), *BLOCK, platform=H100, moe_backend="marlin")
    assert backend is Fp8MoeBackend.MARLIN and cls is not None and cls.support.lora


@report(
    "vllm#17579",
    "vllm#18182",
    "vllm#17764",
    "vllm#17581",
    "vllm#15336",
    symptom="FP8 experts on an A100: fp8e4nv unsupported",
)
def fp8_on_a100() -> None:
    for keys in (BLOCK, CHANNEL, KEYS_OF_SCHEME["tensor"]):
        assert select_fp8_moe_backend(CONFIG, *keys, platform=A100)[0] is Fp8MoeBackend.MARLIN


@report(
    "vllm#33490",
    "vllm#37056",
    "vllm#44220",
    "vllm#54742",
    symptom="the default backend is wrong for an architecture",
)
def defaults_by_architecture() -> None:
    table = {
        (7, 5): "marlin",
        (8, 0): "marlin",
        (8, 6): "marlin",
        (8, 9): "triton",
        (9, 0): "triton",
        (10, 0): "triton",
        (12, 0): "triton",
    }
    for capability, name in table.items():
        for lora in (False, True):
            config = CONFIG.with_lora(4, 16) if lora else CONFIG
            backend, _ = select_fp8_moe_backend(config, *BLOCK, platform=Platform.cuda(*capability))
            assert backend.value == name, (capability, lora)
    assert select_unquantized_moe_backend(CONFIG, platform=H100)[0] is UnquantizedMoeBackend.TRITON


@report(
    "vllm#51001", "vllm#32878", symptom="with LoRA the unquantised selector returns early and skips its checks"
)
def unquantised_selection_with_lora_checks() -> None:
    config = CONFIG.with_lora(4, 16)
    assert select_unquantized_moe_backend(config, platform=H100)[0] is UnquantizedMoeBackend.TRITON
    with pytest.raises(NotImplementedError, match="reads bfloat16 activations, not float16"):
        select_unquantized_moe_backend(replace(config, in_dtype="float16"), platform=H100)
    with pytest.raises(NotImplementedError, match="gfx942"):
        select_unquantized_moe_backend(config, platform=Platform.rocm("gfx942"))


@report(
    "vllm-kunlun#317",
    "llm-scaler#530",
    symptom="an out-of-tree device that calls itself CUDA-alike gets the CUDA error",
)
def cuda_alike_is_not_cuda() -> None:
    for alike in (True, False):
        target = Platform.out_of_tree("kunlun", cuda_alike=alike)
        assert select_fp8_moe_backend(CONFIG, *BLOCK, platform=target) == (Fp8MoeBackend.NONE, None)


@report(
    "vllm#53897",
    "vllm#50556",
    "vllm#54294",
    "vllm#37753",
    "vllm#37776",
    "vllm#48105",
    symptom="out-of-tree authors cannot register a backend",
)
def registration() -> None:
    options = {"platforms": ("cuda",), "schemes": ("block",), "auto_select": False}
    path = f"{planted.__name__}:Honest"
    entry = register_moe_backend("ledger_backend", path, **options)
    try:
        assert register_moe_backend("ledger_backend", path, **options) == entry
        backend, cls = select_fp8_moe_backend(CONFIG, *BLOCK, platform=H100, moe_backend="ledger-backend")
        assert isinstance(backend, RegisteredBackend) and cls is planted.Honest
        assert select_fp8_moe_backend(CONFIG, *BLOCK, platform=H100)[0] is Fp8MoeBackend.TRITON
        with pytest.raises(ValueError, match="already registered"):
            register_moe_backend("ledger_backend", f"{planted.__name__}:Raises", **options)
    finally:
        unregister_moe_backend("ledger_backend")
    with pytest.raises(ValueError, match="reserved"):
        register_moe_backend("triton", path, **options)


@report("tpu-inference#746", symptom="expert parallelism is asked for and tensor parallelism runs, in silence")
def the_executor_is_told_the_ranks() -> None:
    seen: list[int] = []

    class Spy(planted.Honest):
        support = planted.Honest.support

        @classmethod
        def faulty(cls, call):
            seen.append(call.ep_size)
            return super().faulty(call)

    planted.LedgerSpy = Spy
    register_moe_backend(
        "ledger_spy", f"{planted.__name__}:LedgerSpy", platforms=("cpu",), schemes=("channel",)
    )
    try:
        inputs = inputs_of(Case("channel", "w8a8"))
        inputs.run("ledger_spy", ep_size=4)
    finally:
        unregister_moe_backend("ledger_spy")
        delattr(planted, "LedgerSpy")
    assert seen == [4]


@report(
    "vllm#35382", "vllm#39490", symptom="wrapping a method for LoRA fails: monolithic, or LoRA not known to it"
)
def methods_take_adapters() -> None:
    method = Fp8MoEMethod(
        FP8_CONFIG, FusedMoEConfig(4, 2, 128, 128).with_lora(2, 8), platform=TPU, moe_backend="reference"
    )
    assert method.is_monolithic is False
    assert method.moe.is_lora_enabled


@report(
    "tpu-inference#2781", symptom="a tensor-parallel cap on w2's block is applied to expert-parallel experts"
)
def experts_stay_whole_under_ep() -> None:
    parallel = FusedMoEParallelConfig(tp_size=8, ep_size=8, use_ep=True)
    config = FusedMoEConfig(16, 2, 256, 640, moe_parallel_config=parallel)
    method, layer = Fp8MoEMethod(FP8_CONFIG, config, platform=TPU), SimpleNamespace()
    method.create_weights(layer, num_experts=2, hidden_size=256, intermediate_size_per_partition=640)
    assert layer.w2_weight.shape == (2, 256, 640)
    assert layer.w13_weight_scale_inv.shape == (2, 10, 2)


def _checkpoint(root: Path, change=None, experts: int = 4) -> Path:
    hidden, inter, at = 128, 128, "model.layers.0.mlp.experts"
    tensors: dict[str, np.ndarray] = {}
    for e in range(experts):
        weights = small_layer(1, hidden, inter, "channel")
        parts = {
            "gate_proj": (weights.w13[0, :inter], weights.w13_scale[0, :inter]),
            "up_proj": (weights.w13[0, inter:], weights.w13_scale[0, inter:]),
            "down_proj": (weights.w2[0], weights.w2_scale[0]),
        }
        for name, (codes, scale) in parts.items():
            tensors[f"{at}.{e}.{name}.weight"] = codes
            tensors[f"{at}.{e}.{name}.weight_scale"] = scale[:, None]
    if change is not None:
        change(tensors, at)
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "strategy": "token",
            "symmetric": True,
            "dynamic": True,
        },
    }
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "moe_intermediate_size": inter,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "norm_topk_prob": True,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }
    return write_checkpoint(root, config, tensors, shards=2)


@report(
    "tpu-inference#1320",
    "tpu-inference#1729",
    symptom="compressed-tensors FP8 experts (channel, token) do not load",
)
def compressed_tensors_loads() -> None:
    with TemporaryDirectory() as folder:
        config, weights = load_moe_layer(_checkpoint(Path(folder) / "m"), 0)
    assert weights.scheme == "channel" and config.num_experts == 4
    x = RNG.standard_normal((3, 128)).astype(BF16)
    ids = np.array([[0, 1], [2, 3], [1, 3]], np.int32)
    y = run_moe("reference", x, np.full((3, 2), 0.5, np.float32), ids, weights, config=config)
    assert np.isfinite(y.astype(np.float32)).all() and y.astype(np.float32).any()


@report("vllm#31757", "vllm#32101", symptom="a rule that skips stray scales also skips real ones")
def every_scale_is_accounted_for() -> None:
    def extra(tensors, at):
        tensors["lm_head.weight_scale"] = np.ones((4, 1), np.float32)

    def missing(tensors, at):
        del tensors[f"{at}.2.up_proj.weight_scale"]

    def stray(tensors, at):
        tensors[f"{at}.2.up_proj.weight_scale_inv"] = np.ones((1, 1), np.float32)

    with TemporaryDirectory() as folder:
        root = Path(folder)
        _, plain = load_moe_layer(_checkpoint(root / "extra", extra), 0)
        assert np.isfinite(plain.w13_scale).all(), "a scale elsewhere harms nothing"
        with pytest.raises(TensorFileError, match=r"2\.up_proj\.weight: quantised, but no"):
            load_moe_layer(_checkpoint(root / "missing", missing), 0)
        with pytest.raises(TensorFileError, match="doubled by"):
            load_moe_layer(_checkpoint(root / "stray", stray), 0)


@report("Automodel#2682", symptom="experts stay random after a cast broke the views they were loaded through")
def unloaded_experts_are_found() -> None:
    method, layer = Fp8MoEMethod(FP8_CONFIG, FusedMoEConfig(2, 1, 128, 128), platform=TPU), SimpleNamespace()
    method.create_weights(layer, num_experts=2, hidden_size=128, intermediate_size_per_partition=128)
    weights = small_layer(2, 128, 128, "block")
    for e in range(2):
        for shard, codes, scale in (
            ("w1", weights.w13[e, :128], weights.w13_scale[e, :1]),
            ("w3", weights.w13[e, 128:], weights.w13_scale[e, 1:]),
        ):
            layer.weight_loader("w13_weight", codes, shard, e)
            layer.weight_loader("w13_weight_scale_inv", scale, shard, e)
    with pytest.raises(ValueError, match=r"weights were not loaded.*w2_weight: expert 0 w2"):
        method.process_weights_after_loading(layer)
    for e in range(2):
        layer.weight_loader("w2_weight", weights.w2[e], "w2", e)
        layer.weight_loader("w2_weight_scale_inv", weights.w2_scale[e], "w2", e)
    method.process_weights_after_loading(layer)
    assert bitwise_equal(layer.moe_weights.w13, weights.w13), "codes keep their bits: nothing is requantised"


@report(
    "tpu-inference#1842",
    "tpu-inference#2005",
    "tpu-inference#2413",
    symptom="loading one rank's experts takes the memory of all",
)
def a_share_costs_a_share() -> None:
    import tracemalloc

    with TemporaryDirectory() as folder:
        root = _checkpoint(Path(folder) / "m", experts=32)
        peaks = []
        for experts in ([5], list(range(32))):
            load_moe_layer(root, 0, experts=experts)
            tracemalloc.start()
            load_moe_layer(root, 0, experts=experts)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[0] < peaks[1] / 3


@report("marin#5347", symptom="a kernel calls pl.load and pl.store, which newer JAX removed")
def removed_pallas_calls() -> None:
    for path in sources("tpu_impl"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pl":
                assert node.attr not in ("load", "store"), path.name


@report("vllm#55934", symptom="an optional kernel package renames a module; the import at start fails")
def optional_packages_are_not_imported() -> None:
    for folder in ("common", "cuda_impl", "tpu_impl"):
        for path in sources(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else ([node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else [])
                )
                assert not any(n.split(".")[0] == "triton_kernels" for n in names), path.name


@report("jax#40888", symptom="a flag makes a library import a module that its wheels lack")
def library_flags_are_left_alone() -> None:
    for path in (*sources("tpu_impl"), *sources("common")):
        assert "ragged_dot_use_gpu_pallas_triton_lowering" not in path.read_text(), path.name


@report("vllm#46857", symptom="a failed compile leaves state behind that the next one trips over")
def failed_calls_leave_nothing_behind() -> None:
    inputs = inputs_of(Case("channel", "w8a8", "mixed"))
    before = inputs.run("reference")
    for bad in ({"x": inputs.x[:, :-1].copy()}, {"adapter_ids": np.full(16, 99, np.int32)}, {"recipe": "bf16"}):
        with pytest.raises(ValueError):
            inputs.run("reference", **bad)
    assert bitwise_equal(inputs.run("reference"), before)


@report("vllm#43334", symptom="one backend override meets a checkpoint of two schemes")
def override_is_per_layer() -> None:
    fp8 = Fp8MoEMethod(FP8_CONFIG, CONFIG, platform=H100, moe_backend="marlin")
    plain = UnquantizedFusedMoEMethod(CONFIG, platform=H100)
    assert fp8.fp8_backend is Fp8MoeBackend.MARLIN
    assert plain.unquantized_backend is UnquantizedMoeBackend.TRITON
    with pytest.raises(ValueError, match="marlin"):
        UnquantizedFusedMoEMethod(CONFIG, platform=H100, moe_backend="marlin")


@report("sglang-jax#1271", "sglang-jax#1249", symptom="block sizes are searched apart and refuse I=768")
def tpu_layers_of_any_width() -> None:
    for inter in (320, 768, 1408, 2560):
        report_ = explain_selection(
            replace(CONFIG, intermediate_size=inter), *CHANNEL, platform=Platform.tpu("v6e")
        )
        assert report_.executor == "pallas_ep", inter


@report("vllm#18120", "vllm#33259", symptom="which parts of an expert does an adapter reach? only the gate?")
def adapters_reach_all_three_projections() -> None:
    inputs = inputs_of(Case("channel", "w8a8", "one"))
    (adapter,) = inputs.adapters
    plain = inputs.run("reference", adapters=None, adapter_ids=None)
    zero13, zero2 = np.zeros_like(adapter.b13), np.zeros_like(adapter.b2)
    gate, up = zero13.copy(), zero13.copy()
    gate[:, 0], up[:, 1] = adapter.b13[:, 0], adapter.b13[:, 1]
    for only in (
        replace(adapter, b13=gate, b2=zero2),
        replace(adapter, b13=up, b2=zero2),
        replace(adapter, b13=zero13),
    ):
        assert not bitwise_equal(inputs.run("reference", adapters=[only]), plain)


@report(
    "gap: imports of a selection", symptom="selecting on a host without CUDA imports CUDA packages and fails"
)
def selection_imports_nothing() -> None:
    code = (
        "import sys, isomoe\n"
        "from isomoe.common.quant_keys import KEYS_OF_SCHEME\n"
        "from isomoe.common.platforms import Platform\n"
        "isomoe.select_fp8_moe_backend(isomoe.FusedMoEConfig(8, 2, 64, 64), *KEYS_OF_SCHEME['block'],"
        " platform=Platform.tpu('v7x'))\n"
        "print(sorted(m for m in ('torch', 'jax', 'triton', 'vllm') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


@report("gap: bf16 keys", symptom="unquantised keys given to the FP8 selector")
def bf16_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="select_unquantized_moe_backend"):
        select_fp8_moe_backend(CONFIG, kBf16, kBf16, platform=H100)
    inputs = inputs_of(Case("bf16", "bf16"))
    with pytest.raises(ValueError, match="recipe"):
        make_call(
            inputs.x,
            inputs.topk_weights,
            inputs.topk_ids,
            inputs.weights,
            config=inputs.case.config,
            recipe="w8a8",
        )


@cases(__name__)
def test_report(name: str, executor: str) -> None:
    check(name, executor)
