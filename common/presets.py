# SPDX-License-Identifier: Apache-2.0
"""Known models and devices, as data for `isomoe explain` and `isomoe inspect`."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_choice
from .config import FusedMoEConfig
from .platforms import Platform

GIB = 2**30


@dataclass(frozen=True)
class ModelPreset:
    """A released model's MoE layers (dimensions from its public config.json).

    Attributes:
      config: one layer.
      num_moe_layers: layers with routed experts.
      scheme: the scheme of its official FP8 checkpoint (a key of `quant_keys.KEYS_OF_SCHEME`).
    """

    config: FusedMoEConfig
    num_moe_layers: int
    scheme: str = "block"


MODELS: dict[str, ModelPreset] = {
    "qwen3-coder-30b": ModelPreset(FusedMoEConfig(128, 8, 2048, 768), 48),
    "qwen3-coder-480b": ModelPreset(FusedMoEConfig(160, 8, 6144, 2560), 62),
    "qwen3-235b": ModelPreset(FusedMoEConfig(128, 8, 4096, 1536), 94),
    "qwen3.6-35b": ModelPreset(FusedMoEConfig(256, 8, 2048, 512), 40),
    "deepseek-v3": ModelPreset(
        FusedMoEConfig(
            256, 8, 7168, 2048, scoring_func="sigmoid", routed_scaling_factor=2.5, num_expert_group=8, topk_group=4
        ),
        58,
    ),
}


@dataclass(frozen=True)
class DevicePreset:
    """One device as a framework sees it; `memory` in bytes as the vendor states it."""

    label: str
    platform: Platform
    memory: int


# A v7x chip has 192 GiB and shows up as two devices, one a core.
DEVICES: tuple[DevicePreset, ...] = (
    DevicePreset("TPU v7x core", Platform.tpu("v7x"), 96 * GIB),
    DevicePreset("TPU v6e", Platform.tpu("v6e"), 32 * 10**9),
    DevicePreset("TPU v5p", Platform.tpu("v5p"), 95 * 10**9),
    DevicePreset("H200", Platform.cuda(9, 0), 141 * 10**9),
    DevicePreset("H100", Platform.cuda(9, 0), 80 * 10**9),
    DevicePreset("A100", Platform.cuda(8, 0), 80 * 10**9),
    DevicePreset("L40S", Platform.cuda(8, 9), 48 * 10**9),
)

# The deployments that reports compare side by side.
REPORT_PLATFORMS: tuple[Platform, ...] = (
    Platform.tpu("v7x"), Platform.cuda(9, 0), Platform.cuda(8, 0), Platform.rocm("gfx950"), Platform.cpu(),
)


def model(name: str) -> ModelPreset:
    """A preset by name.

    Raises:
      ValueError: unknown; the message lists the names.
    """
    check_choice("model", name, MODELS)
    return MODELS[name]
