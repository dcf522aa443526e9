# SPDX-License-Identifier: Apache-2.0
"""vLLM on a platform that this machine lacks: one process, tensors on the CPU, kernels in Triton's interpreter.

The tests here need the platform fixed before vLLM is imported, so `test_vllm_plugin.py` runs them in a process of
their own.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

os.environ.update(
    TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="",
)  # fmt: skip

import torch
import vllm.platforms as platforms
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum


class Simulated(Platform):
    """What vLLM asks a platform while it builds and runs an MoE layer. `become` changes what it says it is."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"  # vLLM makes a torch.device of it
    device_type = "cpu"
    dispatch_key = "CPU"
    capability = DeviceCapability(9, 0)

    @classmethod
    def become(cls, kind: PlatformEnum, capability: tuple[int, int] = (9, 0)) -> None:
        cls._enum, cls.capability = kind, DeviceCapability(*capability)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return cls.capability if cls._enum == PlatformEnum.CUDA else None

    @classmethod
    def supports_fp8(cls) -> bool:
        return True

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.device_name

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


platforms._current_platform = Simulated()
# vLLM 0.33 empties the accelerator's cache when a workspace grows; there is no accelerator here.
torch.accelerator.empty_cache = lambda: None
# Modules that call CUDA operators while they are imported do so only where the platform says CUDA.
for _module in (
    "model_executor.layers.fused_moe",
    "model_executor.layers.quantization.fp8",
    "model_executor.layers.quantization.modelopt",
    "model_executor.layers.quantization.online.fp8",
    "model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "lora.layers",
):
    importlib.import_module(f"vllm.{_module}")


def fp8_config(block: bool = True, scheme: str = "dynamic") -> Any:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme=scheme, weight_block_size=[128, 128] if block else None
    )


def compressed_tensors_config() -> Any:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return CompressedTensorsConfig.from_config({
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {**eight, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight, "strategy": "token", "dynamic": True},
        }},
    })  # fmt: skip


def modelopt_config() -> Any:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    return ModelOptFp8Config.from_config(
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []}}
    )


CONFIGS = {
    "block": fp8_config,
    "tensor": lambda: fp8_config(block=False),
    "tensor_static": lambda: fp8_config(block=False, scheme="static"),
    "compressed_tensors": compressed_tensors_config,
    "modelopt": modelopt_config,
}


def lora_config(**options: Any) -> Any:
    """Adapters as `VllmConfig.lora_config` says of them."""
    from vllm.config.lora import LoRAConfig

    config = LoRAConfig(**{"max_loras": 3, "max_lora_rank": 16, "lora_dtype": torch.bfloat16, **options})
    return config


def routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> SimpleNamespace:
    """Router results of vLLM's shapes: distinct experts a token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(torch.int32)
    weights = torch.rand((tokens, top_k), generator=generator) + 0.1
    return SimpleNamespace(ids=ids, weights=weights / weights.sum(1, keepdim=True))
