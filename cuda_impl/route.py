# SPDX-License-Identifier: Apache-2.0
"""Which kernels serve a call on a device: Hopper's own where every condition holds, else the portable ones.

Each condition of the Hopper kernels is stated here once, as a reason. ``ISOMOE_HOPPER=0`` keeps them out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..common.recipes import Group, Recipe
from ._runtime import Target

_ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai")
LORA_RANKS = (16, 32, 64, 128)  # slot ranks of the Hopper kernels; slots are padded up to one of them


@dataclass(frozen=True)
class CallShape:
    """What of a call decides the route; everything is known on the host."""

    recipe: Recipe
    activation: str
    is_block: bool
    is_gated: bool
    has_bias: bool
    hidden_dim: int
    intermediate_size: int
    lora_rank: int = 0
    quantised_rows: bool = False


def pad_rank(rank: int) -> int:
    """The rank a slot is allocated with."""
    return next((r for r in LORA_RANKS if r >= rank), -(-rank // 64) * 64)


def why_not_hopper(call: CallShape, target: Target) -> str | None:
    """The first reason the Hopper kernels cannot serve the call on the target, or None where they can."""
    if target.capability != (9, 0):
        return "the device is not of compute capability 9.0"
    if os.environ.get("ISOMOE_HOPPER") == "0":
        return "ISOMOE_HOPPER=0"
    group: Group = 128 if call.is_block else "token"
    recipe = call.recipe
    if recipe.name not in ("w8a8", "w8a16"):
        return f"recipe {recipe.name}"
    if recipe.name == "w8a8" and (recipe.x_group, recipe.h_group) != (group, group):
        return f"activation groups {recipe.x_group} and {recipe.h_group}, not {group}"
    if recipe.name == "w8a16" and os.environ.get("ISOMOE_BATCH_INVARIANT") == "1":
        return "no W8A16 chain that serves every batch size"
    if recipe.wire != "bf16":
        return f"result rows in {recipe.wire}, not bf16"
    if call.lora_rank and recipe.lora_products != "bf16":
        return "rank products in f32"
    if recipe.lora_input != "bf16" or call.quantised_rows:
        return "quantised rows as input"
    if not call.is_gated or call.has_bias or call.activation not in _ACTIVATIONS:
        return "experts without a gate, with a bias, or with another activation"
    if call.hidden_dim % 16 or call.intermediate_size % 16:
        return "dimensions that are no multiples of 16"
    if call.lora_rank and call.lora_rank not in LORA_RANKS:
        return f"slots of rank {call.lora_rank}"
    return None
