# SPDX-License-Identifier: Apache-2.0
"""FP8 MoE with many LoRA adapters on Hopper GPUs (sm_90): one entry point over three chains of kernels.

`hopper_fused_moe` chooses by batch: two matrix-vector launches for one token, a weight-streaming chain for few rows
an expert, a TMA/wgmma chain for many. Importing this package loads
torch, and Triton on first use of a kernel.
"""

from __future__ import annotations

from .fused import (
    HopperAdapters,
    HopperWeights,
    hopper_fused_moe,
    prepare_adapters,
    prepare_weights,
)
from .regime import Regime, choose
from .rows import slots_of

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
