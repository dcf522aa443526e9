# SPDX-License-Identifier: Apache-2.0
"""What the expert-parallel kernel serves on a TPU: beside the layer's form, what a generation's memories hold."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.config import FusedMoEConfig
from ..common.platforms import Platform, PlatformKind
from ..common.quant_keys import QuantKey, scheme_of
from ..common.support import ExpertsSupport
from .blocks import choose_blocks
from .generations import GENERATIONS
from .topologies import largest_slice, topology_for


@dataclass(frozen=True)
class TPUSupport(ExpertsSupport):
    """`ExpertsSupport` for a TPU deployment; interpreted runs, which have no such limits, ask only for the layer."""

    def why_not(
        self,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        platform: Platform,
    ) -> str | None:
        """The first reason the deployment cannot be served, its build's memory included."""
        reason = super().why_not(config, weight_key, activation_key, platform)
        if reason is not None or platform.kind is not PlatformKind.TPU:
            return reason
        if platform.arch not in GENERATIONS:
            return f"has no limits for {platform}, only for {', '.join(GENERATIONS)}"
        scheme = "channel" if weight_key is None else scheme_of(weight_key)
        assert scheme is not None  # else the layer was refused
        recipe = "bf16" if scheme == "bf16" else GENERATIONS[platform.arch].default_recipe
        ep = config.moe_parallel_config.ep_size
        loras, rank = (config.max_loras, config.max_lora_rank) if config.is_lora_enabled else (0, 0)
        try:
            if ep <= largest_slice(platform.arch):
                topology_for(platform.arch, ep)
            choose_blocks(
                platform.arch, config, ep, ep=ep, scheme=scheme, recipe=recipe, max_loras=loras, max_lora_rank=rank
            )
        except ValueError as error:
            return str(error)
        return None
