# SPDX-License-Identifier: Apache-2.0
"""vLLM's FP8 MoE constructors with this package's selector in place of theirs.

vLLM's selector answers NONE on a TPU only after walking every CUDA backend, and raises first where an environment
variable or `moe_backend` names one. This package's asks for the platform first. The classes here sit between a
tpu-inference method and vLLM's in the method resolution order, so the `super().__init__` of the former runs the
constructor of the latter, word for word, with the other selector.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from tpu_inference.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend as VllmFp8MoeBackend
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8MoEMethod

from ...common.backends import Fp8MoeBackend
from ...common.config import FusedMoEConfig, FusedMoEParallelConfig
from ...common.platforms import Platform
from ...common.quant_keys import GroupShape, QuantKey, create_fp8_quant_key
from ...common.selector import select_fp8_moe_backend
from .rebind import with_names

logger = init_logger(__name__)


def moe_config(config: Any, **overrides: Any) -> FusedMoEConfig:
    """This package's config of vLLM's `FusedMoEConfig`, by duck typing; `overrides` are fields vLLM's lacks.

    Raises:
      ValueError, TypeError: a layer that no kernel here describes; the message names the field.
    """
    parallel = config.moe_parallel_config
    gated = bool(config.is_act_and_mul)
    activation = str(getattr(config.activation, "value", config.activation))
    fields: dict[str, Any] = {
        "num_experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "hidden_dim": config.hidden_dim,
        "intermediate_size": config.intermediate_size,
        "activation": activation if gated else activation.removesuffix("_no_mul"),
        "has_bias": bool(config.has_bias),
        "is_act_and_mul": gated,
        "is_lora_enabled": bool(getattr(config, "is_lora_enabled", False)),
        "in_dtype": str(config.in_dtype).removeprefix("torch."),
        "moe_parallel_config": FusedMoEParallelConfig(
            tp_size=parallel.tp_size, dp_size=parallel.dp_size, ep_size=parallel.ep_size,
            ep_rank=parallel.ep_rank, use_ep=bool(parallel.use_ep), all2all_backend=parallel.all2all_backend,
        ),
    }
    return FusedMoEConfig(**{**fields, **overrides})


def quant_key(key: Any) -> QuantKey | None:
    """This package's key of vLLM's FP8 `QuantKey`; None stays None."""
    if key is None:
        return None
    shape = key.scale.group_shape
    return create_fp8_quant_key(bool(key.scale.static), GroupShape(shape.row, shape.col))


def select_on_tpu(
    config: Any, weight_key: Any, activation_key: Any, allow_vllm_cutlass: bool = False
) -> tuple[VllmFp8MoeBackend, None]:
    """What vLLM's constructors get: ``(NONE, None)``, never an exception (vLLM's signature).

    An explicit backend that cannot apply is reported once by the selector.
    """
    del allow_vllm_cutlass
    try:
        backend, _ = select_fp8_moe_backend(
            moe_config(config), quant_key(weight_key), quant_key(activation_key),  # type: ignore[arg-type]
            platform=_platform(), moe_backend=str(config.moe_backend),
        )
        if backend is not Fp8MoeBackend.NONE:
            logger.warning_once(f"isomoe: FP8 MoE backend {backend.name} does not apply under tpu-inference")
    except Exception as error:  # a layer the selector cannot describe must still construct
        logger.warning_once(f"isomoe: FP8 MoE layer is not one of this package's ({error}); backend NONE")
    return VllmFp8MoeBackend.NONE, None


def _platform() -> Platform:
    """The TPU; where tpu-inference runs on virtual CPU devices, the host (the answer is NONE on both)."""
    found = Platform.detect()
    return found if found.is_tpu else Platform.cpu()


_BLOCK_SHAPE = "resolve_fp8_moe_weight_block_shape"


def _block_shape(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's block shape for a tensor-parallel share; asked about an explicit backend, its function may raise."""
    config = copy.copy(config)
    config.moe_backend = "auto"
    return original(config, *args, **kwargs)


def construct(vllm_class: type, method: Any, *args: Any, **kwargs: Any) -> None:
    """Run `vllm_class.__init__` on `method` with `select_on_tpu` as its selector."""
    constructor = vars(vllm_class)["__init__"]
    names: dict[str, Any] = {"select_fp8_moe_backend": select_on_tpu}
    if _BLOCK_SHAPE in constructor.__code__.co_names:  # vLLM 0.32 and later
        names[_BLOCK_SHAPE] = functools.partial(_block_shape, constructor.__globals__[_BLOCK_SHAPE])
    with_names(constructor, **names)(method, *args, **kwargs)


class SafeFp8MoEMethod(Fp8MoEMethod):
    """vLLM's `Fp8MoEMethod`, constructed through this package's selector."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        construct(Fp8MoEMethod, self, *args, **kwargs)


class SafeCompressedTensorsW8A8Fp8MoEMethod(CompressedTensorsW8A8Fp8MoEMethod):
    """vLLM's `CompressedTensorsW8A8Fp8MoEMethod`, constructed through this package's selector."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        construct(CompressedTensorsW8A8Fp8MoEMethod, self, *args, **kwargs)


class SafeModelOptFp8MoEMethod(ModelOptFp8MoEMethod):
    """vLLM's `ModelOptFp8MoEMethod`, constructed through this package's selector."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        construct(ModelOptFp8MoEMethod, self, *args, **kwargs)
