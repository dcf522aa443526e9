# SPDX-License-Identifier: Apache-2.0
"""Quantisation configs that vLLM resolves for a TPU, registered under the names tpu-inference uses.

tpu-inference maps names to its own config classes, sets the mesh on those, and resolves the name once more through
vLLM's registry, where the last registration wins. Subclasses registered after it are therefore found, with the mesh.
"""

from __future__ import annotations

from typing import Any

import torch
from tpu_inference.layers.common.quant_methods import COMPRESSED_TENSORS, FP8, UNQUANTIZED

# Their import registers tpu-inference's configs; ours must come after.
from tpu_inference.layers.vllm.quantization import compressed_tensors as _after_compressed_tensors  # noqa: F401
from tpu_inference.layers.vllm.quantization.compressed_tensors import compressed_tensors as tpu_compressed_tensors
from tpu_inference.layers.vllm.quantization.compressed_tensors.compressed_tensors_moe import (
    VllmCompressedTensorsMoEMethod,
)
from tpu_inference.layers.vllm.quantization.fp8 import VllmFp8Config, VllmFp8LinearMethod
from tpu_inference.layers.vllm.quantization.unquantized import (
    VllmUnquantizedConfig,
    VllmUnquantizedFusedMoEMethod,
    VllmUnquantizedLinearMethod,
)
from tpu_inference.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptQuantConfigBase

from .methods import (
    EPCompressedTensorsW8A8Fp8MoEMethod,
    EPFp8MoEMethod,
    EPModelOptFp8MoEMethod,
    EPUnquantizedFusedMoEMethod,
)
from .rebind import with_names

logger = init_logger(__name__)

MODELOPT = "isomoe_modelopt_fp8"


class EPFp8Config(VllmFp8Config):
    """tpu-inference's FP8 config with this package's MoE method; reads ModelOpt FP8 checkpoints too."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> VllmFp8Config:
        return EPModelOptFp8Config.of(config) if is_modelopt_fp8(config) else super().from_config(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        choose = with_names(VllmFp8Config.get_quant_method, VllmFp8MoEMethod=EPFp8MoEMethod)
        return choose(self, layer, prefix)


class EPUnquantizedConfig(VllmUnquantizedConfig):
    """tpu-inference's config of models without quantisation, with this package's MoE method."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        choose = with_names(
            VllmUnquantizedConfig.get_quant_method, VllmUnquantizedFusedMoEMethod=EPUnquantizedFusedMoEMethod
        )
        return choose(self, layer, prefix)


class EPCompressedTensorsConfig(tpu_compressed_tensors.VllmCompressedTensorsConfig):
    """tpu-inference's compressed-tensors config with this package's W8A8 FP8 MoE method."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        choose = with_names(
            tpu_compressed_tensors.VllmCompressedTensorsConfig.get_quant_method,
            VllmCompressedTensorsMoEMethod=_MoEMethods,
        )
        return choose(self, layer, prefix)


class _MoEMethods(VllmCompressedTensorsMoEMethod):
    """tpu-inference's choice of a compressed-tensors MoE method, with ours for W8A8 FP8."""

    @staticmethod
    def get_moe_method(quant_config: Any, layer: torch.nn.Module, layer_name: str) -> Any:
        choose = with_names(
            VllmCompressedTensorsMoEMethod.get_moe_method,
            VllmCompressedTensorsW8A8Fp8MoEMethod=EPCompressedTensorsW8A8Fp8MoEMethod,
        )
        return choose(quant_config, layer, layer_name)


def is_modelopt_fp8(config: dict[str, Any] | None) -> bool:
    """Whether a checkpoint's quantisation config is ModelOpt's per-tensor FP8."""
    return ModelOptQuantConfigBase._extract_modelopt_quant_algo(config) == "FP8"


class EPModelOptFp8Config(VllmFp8Config):
    """ModelOpt FP8 on a TPU: static per-tensor FP8, which tpu-inference's linear method reads, with ModelOpt's rules
    for what is excluded."""

    modelopt: ModelOptFp8Config

    @classmethod
    def of(cls, config: dict[str, Any]) -> EPModelOptFp8Config:
        """The config of a checkpoint's ``quantization_config``."""
        found = cls(is_checkpoint_fp8_serialized=True, activation_scheme="static")
        found.modelopt = ModelOptFp8Config.from_config(config)
        return found

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.modelopt.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        self.modelopt.packed_modules_mapping = self.packed_modules_mapping
        excluded = self.modelopt.is_layer_excluded(prefix)
        if isinstance(layer, LinearBase):
            linear = self.get_linear_config(layer)
            return VllmUnquantizedLinearMethod(linear) if excluded else VllmFp8LinearMethod(self, linear)
        if isinstance(layer, RoutedExperts):
            if excluded:
                return VllmUnquantizedFusedMoEMethod(layer.moe_config, self.mesh)
            layer.moe_config = self.get_moe_config(layer)
            return EPModelOptFp8MoEMethod(self.modelopt, layer, self.mesh)
        return super().get_quant_method(layer, prefix)


class ModelOptDetector(QuantizationConfig):
    """Claims ModelOpt FP8 checkpoints for the name ``fp8``, the closest that tpu-inference accepts.

    vLLM asks every registered config whether it overrides a checkpoint's own method; this one does nothing else.
    """

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return FP8 if is_modelopt_fp8(hf_quant_cfg) else None

    @classmethod
    def get_name(cls) -> str:
        return MODELOPT

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        return EPModelOptFp8Config.of(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        return None


def register_configs() -> tuple[str, ...]:
    """Register all of them; returns the names."""
    configs = {
        FP8: EPFp8Config, COMPRESSED_TENSORS: EPCompressedTensorsConfig, UNQUANTIZED: EPUnquantizedConfig,
        MODELOPT: ModelOptDetector,
    }
    for name, config in configs.items():
        register_quantization_config(name)(config)
    return tuple(configs)
