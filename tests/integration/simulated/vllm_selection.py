# SPDX-License-Identifier: Apache-2.0
"""vLLM's real FP8 MoE methods, constructed on simulated platforms with this package's selector in them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from simulation import CONFIGS, fp8_config, lora_config
from vllm.config.kernel import MoEBackend
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
)
from vllm.platforms.interface import PlatformEnum

from isomoe.cuda_impl import vllm_plugin
from isomoe.cuda_impl.vllm import selection

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


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(level, text) of what the selection logs; each text once a test, as vLLM's ``*_once``."""
    seen: list[tuple[str, str]] = []

    def log(level: str) -> Callable[..., None]:
        return lambda message, *args: seen.append((level, message % args))

    for level in ("info", "warning"):
        monkeypatch.setattr(selection.logger, f"{level}_once", log(level))
    return seen


def method_of(runner: Any) -> Any:
    return runner.routed_experts.quant_method


@pytest.mark.parametrize("scheme", CONFIGS)
@pytest.mark.parametrize("poison", POISONS, ids=lambda p: "+".join(f"{k}={v}" for k, v in p.items()) or "none")
@pytest.mark.parametrize("kind", [PlatformEnum.TPU, PlatformEnum.OOT], ids=lambda k: k.name)
def test_none_on_a_platform_without_kernels(
    build: Any, installed: None, cuda: Any, monkeypatch: pytest.MonkeyPatch, scheme: str, poison: dict, kind: Any
) -> None:
    cuda.become(kind)
    for name, value in poison.items():
        monkeypatch.setenv(name, value)
    method = method_of(build(CONFIGS[scheme]()))
    assert method.fp8_backend.name == "NONE"
    assert method.experts_cls is None


@pytest.mark.parametrize("scheme", CONFIGS)
@pytest.mark.parametrize("backend", get_args(MoEBackend))
@pytest.mark.parametrize("kind", [PlatformEnum.TPU, PlatformEnum.OOT], ids=lambda k: k.name)
def test_none_for_any_explicit_backend(
    build: Any, world: Any, installed: None, cuda: Any, lines: Any, monkeypatch: pytest.MonkeyPatch, scheme: str,
    backend: str, kind: Any,
) -> None:
    """Every name this vLLM accepts; one line names a backend that cannot apply."""
    cuda.become(kind)
    monkeypatch.setattr(world.kernel_config, "moe_backend", backend)
    method = method_of(build(CONFIGS[scheme]()))
    assert method.fp8_backend.name == "NONE" and method.experts_cls is None
    if kind == PlatformEnum.TPU:
        assert [repr(backend) in text for _, text in lines] == ([] if backend == "auto" else [True])


def test_vllms_own_selector_raises_under_such_a_variable(
    build: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the guard is for: without it the same construction fails."""
    cuda.become(PlatformEnum.TPU)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    with pytest.raises(ValueError):
        build(fp8_config())


@pytest.mark.parametrize("scheme", CONFIGS)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("capability, experts", [((9, 0), "IsomoeExperts"), ((8, 0), "IsomoeW8A16Experts")])
def test_cuda_layers_get_these_experts(
    build: Any, installed: None, cuda: Any, lines: Any, scheme: str, lora: bool, capability: tuple, experts: str
) -> None:
    cuda.become(PlatformEnum.CUDA, capability)
    method = method_of(build(CONFIGS[scheme](), lora=lora_config() if lora else None))
    assert method.experts_cls.__name__ == experts, lines
    assert method.fp8_backend.name == "TRITON"  # to vLLM: weights as loaded
    assert method.is_monolithic is False
    assert [level for level, _ in lines] == ["info"]


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "activation": (dict(activation="swigluoai"), "activation swigluoai"),
    "half": (dict(dtype=torch.float16), "float16"),
    "lora_dtype": (dict(lora=lora_config(lora_dtype=torch.float16)), "lora_dtype float16"),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_a_layer_that_is_not_served_stays_vllms_with_one_line(
    build: Any, installed: None, lines: Any, case: str
) -> None:
    options, expected = FALLBACKS[case]
    method = method_of(build(fp8_config(), **options))
    assert method.experts_cls.__module__.startswith("vllm.")
    warnings = [text for level, text in lines if level == "warning"]
    assert len(warnings) == 1 and expected in warnings[0], lines


@pytest.mark.parametrize(
    "asked, experts", [("triton", "IsomoeExperts"), ("marlin", "IsomoeW8A16Experts"), ("no-such-backend", None)]
)
def test_this_packages_own_variable(
    build: Any, installed: None, lines: Any, monkeypatch: pytest.MonkeyPatch, asked: str, experts: str | None
) -> None:
    monkeypatch.setenv("ISOMOE_MOE_BACKEND", asked)
    method = method_of(build(fp8_config()))
    if experts is not None:
        assert method.experts_cls.__name__ == experts and [level for level, _ in lines] == ["info"]
    else:
        assert method.experts_cls.__module__.startswith("vllm.")
        assert [level for level, _ in lines] == ["warning"] and "ISOMOE_MOE_BACKEND" in lines[0][1]


def test_a_backend_that_the_user_named_is_vllms(
    build: Any, world: Any, installed: None, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.kernel_config, "moe_backend", "triton")
    assert method_of(build(fp8_config())).experts_cls.__name__ == "TritonExperts"
    assert [text for _, text in lines] == [
        "isomoe: FP8 MoE layers stay on vLLM's experts: moe_backend='triton' was asked for"
    ]


def test_install_and_register_are_idempotent(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(selection.METHOD_MODULES["fp8"])
    original = module.select_fp8_moe_backend
    monkeypatch.setattr(vllm_plugin, "_registered", None)
    monkeypatch.setenv("ISOMOE_VLLM", "1")
    vllm_plugin.register()
    first = module.select_fp8_moe_backend
    assert vllm_plugin.is_registered() and first is not original
    monkeypatch.setattr(vllm_plugin, "_registered", None)
    vllm_plugin.register()
    assert module.select_fp8_moe_backend is first
    selection.uninstall()
    assert module.select_fp8_moe_backend is original


@pytest.mark.parametrize(
    "kind, environment, registered",
    [
        (PlatformEnum.CUDA, {"ISOMOE_VLLM": "1"}, True),
        (PlatformEnum.CUDA, {"ISOMOE_VLLM": "0"}, False),
        (PlatformEnum.CUDA, {}, True),
        (PlatformEnum.CUDA, {"ISOMOE_VLLM": "1", "ISOMOE_DISABLE": "1"}, False),
        (PlatformEnum.TPU, {}, True),
        (PlatformEnum.TPU, {"ISOMOE_DISABLE": "1"}, False),
        (PlatformEnum.OOT, {}, True),
        (PlatformEnum.CPU, {"ISOMOE_VLLM": "1"}, False),
        (PlatformEnum.XPU, {"ISOMOE_VLLM": "1"}, False),
        (PlatformEnum.ROCM, {"ISOMOE_VLLM": "1"}, False),
    ],
    ids=lambda v: getattr(v, "name", None) or str(v),
)
def test_where_the_plugin_acts(
    world: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, environment: dict, registered: bool
) -> None:
    for name in ("ISOMOE_VLLM", "ISOMOE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    module = importlib.import_module(selection.METHOD_MODULES["fp8"])
    original = module.select_fp8_moe_backend
    monkeypatch.setattr(vllm_plugin, "_registered", None)
    cuda.become(kind)
    try:
        vllm_plugin.register()
        assert vllm_plugin.is_registered() is registered
        assert (module.select_fp8_moe_backend is not original) is registered
    finally:
        selection.uninstall()


@pytest.mark.parametrize(("value", "registered"), [("", False), ("1", True)])
def test_unmeasured_devices_want_to_be_asked(
    world: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch, value: str, registered: bool
) -> None:
    monkeypatch.setenv("ISOMOE_VLLM", value)
    monkeypatch.setattr(vllm_plugin, "_registered", None)
    cuda.become(PlatformEnum.CUDA, (8, 0))
    try:
        vllm_plugin.register()
        assert vllm_plugin.is_registered() is registered
    finally:
        selection.uninstall()


def test_a_failure_to_register_is_one_warning(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise AttributeError("renamed upstream")

    monkeypatch.setattr(selection, "install", fail)
    monkeypatch.setattr(vllm_plugin, "_registered", None)
    monkeypatch.setenv("ISOMOE_VLLM", "1")
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert not vllm_plugin.is_registered()
    assert ["renamed upstream" in record.message for record in caplog.records] == [True]


@pytest.fixture
def real_config(build: Any, world: Any) -> Callable[..., Any]:
    """vLLM's own `FusedMoEConfig` of a layer it built, spread over ranks."""

    def make(num_experts: int = 8, *, lora: bool = True, **parallel: Any) -> Any:
        config = method_of(build(fp8_config(), experts=num_experts)).moe
        known = {field.name for field in fields(config.moe_parallel_config)}
        assert set(parallel) <= known, f"this vLLM has no {set(parallel) - known}"
        return replace(
            config, is_lora_enabled=lora, moe_parallel_config=replace(config.moe_parallel_config, **parallel)
        )

    return make


EP = {"use_ep": True, "all2all_backend": "allgather_reducescatter"}


@pytest.mark.parametrize(
    ("options", "placement", "reason"),
    [
        ({**EP, "dp_size": 2, "ep_size": 2}, "linear", "data_parallel_size=2"),
        ({**EP, "ep_size": 3}, "linear", "num_experts=8 over ep_size=3"),
        ({**EP, "ep_size": 4, "enable_eplb": True}, "linear", "enable_eplb"),
        ({**EP, "ep_size": 4}, "round_robin", "expert_placement_strategy='round_robin'"),
    ],
    ids=["dp", "uneven", "eplb", "round-robin"],
)
def test_adapters_that_vllm_would_misplace_are_refused(
    real_config: Any, world: Any, installed: None, monkeypatch: pytest.MonkeyPatch, options: dict, placement: str,
    reason: str,
) -> None:
    """At construction, with the setting's name; the same layer without adapters is served."""
    monkeypatch.setattr(world.parallel_config, "expert_placement_strategy", placement)
    keys = kFp8Static128BlockSym, kFp8Dynamic128Sym
    select = importlib.import_module(selection.METHOD_MODULES["fp8"]).select_fp8_moe_backend
    with pytest.raises(ValueError, match=rf"isomoe: LoRA on MoE layers with {reason}"):
        select(real_config(**options), *keys)
    _, experts = select(real_config(**options, lora=False), *keys)
    assert experts.__name__ == "IsomoeExperts"


@pytest.mark.parametrize("options", [{}, {**EP, "ep_size": 4}], ids=["one-rank", "tensor-parallel-ep"])
def test_adapters_that_vllm_places_well_are_served(real_config: Any, installed: None, options: dict) -> None:
    select = importlib.import_module(selection.METHOD_MODULES["fp8"]).select_fp8_moe_backend
    _, experts = select(real_config(**options), kFp8Static128BlockSym, kFp8Dynamic128Sym)
    assert experts.__name__ == "IsomoeExperts"


@pytest.mark.parametrize(
    ("keys", "options", "reason"),
    [
        ((kFp8StaticTensorSym, kFp8DynamicTokenSym), {**EP, "ep_size": 4, "enable_eplb": True, "lora": False},
         "enable_eplb"),
        ((kFp8Static128BlockSym, kFp8Dynamic128Sym), {**EP, "ep_size": 4, "sp_size": 4}, "tokens of several ranks"),
        ((kFp8Static128BlockSym, kFp8Dynamic128Sym), {**EP, "ep_size": 4, "pcp_size": 2}, "tokens of several ranks"),
    ],
    ids=["eplb-per-tensor", "sequence-parallel", "context-parallel"],
)  # fmt: skip
def test_layers_over_ranks_that_are_not_served(real_config: Any, keys: tuple, options: dict, reason: str) -> None:
    assert reason in (selection.why_not(real_config(**options), selection.Deployment(), keys[0]) or "")
