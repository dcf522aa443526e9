# SPDX-License-Identifier: Apache-2.0
"""isomoe: FP8 mixture-of-experts layers with many LoRA adapters, on TPU and on CUDA, with the same numbers.

Everything public is an attribute of this module, loaded on first use: importing the package touches neither numpy nor
torch, jax or triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the submodule that holds it.
_EXPORTS = {
    "AdapterError": "common.adapters",
    "AdapterPool": "common.adapters",
    "CompressedTensorsW8A8Fp8MoEMethod": "common.quant_methods",
    "ExecutorInfo": "common.executors",
    "ExpertPlacement": "common.placement",
    "ExpertsSupport": "common.support",
    "Fp8MoEMethod": "common.quant_methods",
    "Fp8MoeBackend": "common.backends",
    "FusedMoEConfig": "common.config",
    "FusedMoEParallelConfig": "common.config",
    "GroupShape": "common.quant_keys",
    "LoRAAdapter": "common.weights",
    "ModelOptFp8MoEMethod": "common.quant_methods",
    "MoECall": "common.executors",
    "MoEWeights": "common.weights",
    "Platform": "common.platforms",
    "PlatformKind": "common.platforms",
    "PoolListener": "common.adapters",
    "QuantKey": "common.quant_keys",
    "Recipe": "common.recipes",
    "ScaleDesc": "common.quant_keys",
    "SelectionReport": "common.selector",
    "TensorFileError": "common.safe_files",
    "UnquantizedFusedMoEMethod": "common.quant_methods",
    "UnquantizedMoeBackend": "common.backends",
    "compare": "common.metrics",
    "executors": "common.executors",
    "explain_selection": "common.selector",
    "inspect_checkpoint": "common.checkpoints",
    "kBf16": "common.quant_keys",
    "kFp8Dynamic128Sym": "common.quant_keys",
    "kFp8DynamicTensorSym": "common.quant_keys",
    "kFp8DynamicTokenSym": "common.quant_keys",
    "kFp8Static128BlockE8M0Sym": "common.quant_keys",
    "kFp8Static128BlockSym": "common.quant_keys",
    "kFp8StaticChannelSym": "common.quant_keys",
    "kFp8StaticTensorSym": "common.quant_keys",
    "kFp8StaticTokenSym": "common.quant_keys",
    "load_lora_adapter": "common.adapter_files",
    "load_moe_layer": "common.checkpoints",
    "load_router": "common.checkpoints",
    "quantize_fp8": "common.numerics",
    "quantize_moe_weights": "common.weights",
    "register_moe_backend": "common.backends",
    "route": "common.routing",
    "run_moe": "common.executors",
    "select_fp8_moe_backend": "common.selector",
    "select_unquantized_moe_backend": "common.selector",
    "unregister_moe_backend": "common.backends",
}
_SUBPACKAGES = ("common", "cuda_impl", "tpu_impl")

__all__ = sorted([*_EXPORTS, "__version__"])

if TYPE_CHECKING:
    from .common.adapter_files import load_lora_adapter
    from .common.adapters import AdapterError, AdapterPool, PoolListener
    from .common.backends import (
        Fp8MoeBackend,
        UnquantizedMoeBackend,
        register_moe_backend,
        unregister_moe_backend,
    )
    from .common.checkpoints import inspect_checkpoint, load_moe_layer, load_router
    from .common.config import FusedMoEConfig, FusedMoEParallelConfig
    from .common.executors import ExecutorInfo, MoECall, executors, run_moe
    from .common.metrics import compare
    from .common.numerics import quantize_fp8
    from .common.placement import ExpertPlacement
    from .common.platforms import Platform, PlatformKind
    from .common.quant_keys import (
        GroupShape,
        QuantKey,
        ScaleDesc,
        kBf16,
        kFp8Dynamic128Sym,
        kFp8DynamicTensorSym,
        kFp8DynamicTokenSym,
        kFp8Static128BlockE8M0Sym,
        kFp8Static128BlockSym,
        kFp8StaticChannelSym,
        kFp8StaticTensorSym,
        kFp8StaticTokenSym,
    )
    from .common.quant_methods import (
        CompressedTensorsW8A8Fp8MoEMethod,
        Fp8MoEMethod,
        ModelOptFp8MoEMethod,
        UnquantizedFusedMoEMethod,
    )
    from .common.recipes import Recipe
    from .common.routing import route
    from .common.safe_files import TensorFileError
    from .common.selector import (
        SelectionReport,
        explain_selection,
        select_fp8_moe_backend,
        select_unquantized_moe_backend,
    )
    from .common.support import ExpertsSupport
    from .common.weights import LoRAAdapter, MoEWeights, quantize_moe_weights


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    elif name in _SUBPACKAGES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_SUBPACKAGES})
