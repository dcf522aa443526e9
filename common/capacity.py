# SPDX-License-Identifier: Apache-2.0
"""Bytes that a model's experts and adapter slots take on one device, and how many slots fit."""

from __future__ import annotations

from .checks import check_int
from .config import FusedMoEConfig
from .numerics import BLOCK, cdiv
from .placement import ExpertPlacement

LORA_BYTES = 2  # adapters are stored in bfloat16


def expert_bytes(config: FusedMoEConfig, scheme: str) -> int:
    """Bytes of one expert: codes, float32 scales and float32 biases, as `MoEWeights` holds them."""
    rows, hidden, inter = config.w13_rows, config.hidden_dim, config.intermediate_size
    halves = rows // inter
    codes = rows * hidden + hidden * inter
    scales = {
        "bf16": 0,
        "tensor": halves + 1,
        "tensor_static": halves + 1,
        "channel": rows + hidden,
        "block": halves * cdiv(inter, BLOCK) * cdiv(hidden, BLOCK) + cdiv(hidden, BLOCK) * cdiv(inter, BLOCK),
    }[scheme]
    biases = rows + hidden if config.has_bias else 0
    return codes * (2 if scheme == "bf16" else 1) + 4 * (scales + biases)


def weight_bytes_per_device(config: FusedMoEConfig, scheme: str, layers: int, ep_size: int) -> int:
    """Bytes of the experts on the rank that holds the most, over all MoE layers."""
    check_int("layers", layers, minimum=0)
    return layers * ExpertPlacement(config.num_experts, ep_size).max_local_experts * expert_bytes(config, scheme)


def slot_bytes_per_device(
    config: FusedMoEConfig, rank: int, layers: int, ep_size: int, *, shared_outer: bool = False
) -> int:
    """Bytes of one adapter slot of `rank` on the rank that holds the most experts, over all MoE layers.

    With `shared_outer`, A of w13 and B of w2 are stored once instead of once an expert.
    """
    check_int("rank", rank, minimum=1)
    local = ExpertPlacement(config.num_experts, ep_size).max_local_experts
    halves = config.w13_rows // config.intermediate_size
    inner = local * rank * config.intermediate_size * (halves + 1)
    outer = (1 if shared_outer else local) * rank * config.hidden_dim * (halves + 1)
    return layers * (inner + outer) * LORA_BYTES


def slots_that_fit(budget: int, weight_bytes: int, slot_bytes: int) -> int | None:
    """Whole slots in what the weights leave of `budget` bytes; None where the weights alone do not fit."""
    left = budget - weight_bytes
    return None if left < 0 else left // slot_bytes
