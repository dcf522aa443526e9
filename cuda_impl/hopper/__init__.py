# SPDX-License-Identifier: Apache-2.0
"""FP8 MoE with many LoRA adapters on Hopper GPUs (sm_90): one entry point over three chains of kernels.

`hopper_fused_moe` chooses by batch: two matrix-vector launches for one token, a weight-streaming chain for few rows
an expert, a TMA/wgmma chain for many. Importing this package loads nothing; its names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "HopperAdapters": "fused",
    "HopperWeights": "fused",
    "Regime": "regime",
    "choose": "regime",
    "hopper_fused_moe": "fused",
    "prepare_adapters": "fused",
    "prepare_weights": "fused",
    "slots_of": "rows",
}

__all__ = [
    "HopperAdapters",
    "HopperWeights",
    "Regime",
    "choose",
    "hopper_fused_moe",
    "prepare_adapters",
    "prepare_weights",
    "slots_of",
]

if TYPE_CHECKING:
    from .fused import HopperAdapters, HopperWeights, hopper_fused_moe, prepare_adapters, prepare_weights
    from .regime import Regime, choose
    from .rows import slots_of


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
