# SPDX-License-Identifier: Apache-2.0
"""The plugin entry point, and JAX routing against `isomoe.route`."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest

import isomoe

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The plugin module as in a process where it has not run."""
    module = importlib.import_module("isomoe.tpu_impl.tpu_inference_plugin")
    monkeypatch.setattr(module, "_registered", None)
    return module


def test_disabled_by_the_environment(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ISOMOE_DISABLE", "1")
    with caplog.at_level(logging.INFO):
        plugin.register()
        plugin.register()
    assert not plugin.is_registered()
    assert [r.message for r in caplog.records if "isomoe" in r.message] == [
        "isomoe: ISOMOE_DISABLE is set; tpu-inference is left as it is"
    ]


def test_a_failure_is_one_warning(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tpu-inference that this package does not know must not take the server down."""
    from isomoe.tpu_impl.tpu_inference import configs

    def fail() -> None:
        raise AttributeError("renamed upstream")

    monkeypatch.setattr(configs, "register_configs", fail)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert not plugin.is_registered()
    assert [r.message for r in caplog.records] == [
        "isomoe: not registered with tpu-inference: AttributeError: renamed upstream"
    ]


def test_without_expert_lora_the_rest_registers(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from isomoe.tpu_impl.tpu_inference import lora

    def fail() -> None:
        raise ImportError("moved upstream")

    monkeypatch.setattr(lora, "register_lora", fail)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert plugin.is_registered()
    assert [r.message for r in caplog.records] == [
        "isomoe: no expert LoRA under tpu-inference: ImportError: moved upstream"
    ]


def test_registering_again_changes_nothing(registered: None) -> None:
    """Also when tpu-inference's own plugin runs after this one."""
    import vllm.lora.utils as lora_utils
    from tpu_inference.layers.vllm import register_layers
    from vllm.model_executor.layers.quantization import get_quantization_config

    from isomoe.tpu_impl.tpu_inference import configs
    from isomoe.tpu_impl.tpu_inference.lora import register_lora
    from isomoe.tpu_impl.tpu_inference_plugin import register

    register()
    register_lora()
    register_layers()
    assert get_quantization_config("fp8") is configs.EPFp8Config
    assert get_quantization_config("compressed-tensors") is configs.EPCompressedTensorsConfig
    mine = [c for c in lora_utils._all_lora_classes if c.__module__.startswith("isomoe")]
    assert len(mine) == 1


def test_importing_the_plugin_imports_no_framework() -> None:
    code = (
        "import isomoe.tpu_impl.tpu_inference_plugin, sys;"
        "print([m for m in ('torch', 'jax', 'vllm', 'tpu_inference') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_function_runs_with_a_name_rebound() -> None:
    from isomoe.tpu_impl.tpu_inference.rebind import with_names

    assert with_names(_uses_helper, _helper=lambda: 2)() == [2]
    assert _uses_helper() == [1]
    with pytest.raises(LookupError, match="does not use _absent"):
        with_names(_uses_helper, _absent=1)


def _helper() -> int:
    return 1


def _uses_helper() -> list[int]:
    return [_helper() for _ in range(1)]


@pytest.mark.parametrize("options", [
    {}, {"scoring_func": "sigmoid"}, {"renormalize": False, "routed_scaling_factor": 2.5},
    {"num_expert_group": 8, "topk_group": 3}, {"scoring_func": "sigmoid", "num_expert_group": 8, "topk_group": 3},
], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
def test_routing_on_device(options: dict, biased: bool, dtype: np.dtype) -> None:
    """Ties, NaN and infinities included: the host's ids, and its weights to float32 rounding."""
    from isomoe.tpu_impl.tpu_inference.routing import route_on_device

    rng = np.random.default_rng(4)
    config = isomoe.FusedMoEConfig(64, 6, 256, 256, **options)
    logits = rng.normal(size=(200, 64)).astype(dtype)
    logits[:40] = np.round(logits[:40].astype(np.float32)).astype(dtype)  # many exact ties
    logits[40, 3] = np.nan
    logits[41] = np.nan
    logits[42, 10] = -np.inf
    bias = rng.normal(size=64).astype(np.float32) if biased else None
    weights, ids = (np.asarray(a) for a in route_on_device(logits, config, correction_bias=bias))
    want_weights, want_ids = isomoe.route(logits, config, correction_bias=bias)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    assert all(len(set(row)) == 6 for row in ids) and ids.min() >= 0 and ids.max() < 64
    clean = ~np.isnan(logits.astype(np.float32)).any(axis=1)
    # float32 exp differs in its last bit between libraries, so a few picks may swap where scores are that close.
    same = (ids == want_ids).all(axis=1)
    assert same[clean].mean() >= 0.99
    np.testing.assert_allclose(weights[same & clean], want_weights[same & clean], rtol=1e-5)
    assert np.isnan(weights[~clean]).all()
