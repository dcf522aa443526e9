# SPDX-License-Identifier: Apache-2.0
"""Whole-layer times others have published, microseconds, as data: cited, not reproduced here.

From "Mixture-of-Experts Kernel Comparison on TPU v7x" by the author of tpu-inference pull request #3288: 8 devices,
FP8, random routing, routing included. Its shape here is Qwen3-30B's layer (E 128, K 8, H 2048, I 768).
"""

from __future__ import annotations

from ..common.config import FusedMoEConfig

SOURCE = "Mixture-of-Experts Kernel Comparison on TPU v7x (author of tpu-inference#3288)"
SHAPE = (128, 8, 2048, 768)
GENERATION, EP = "v7x", 8
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MICROSECONDS: dict[str, tuple[float, ...]] = {
    "tpu-inference production (GMM x2)": (94.0, 113.5, 149.8, 234.6, 229.7, 337.7, 527.4, 1019.3),
    "tpu-inference fused GMM": (79.5, 99.5, 137.2, 226.6, 223.7, 338.9, 556.1, 1050.5),
    "tokamax fused_moe (#3288)": (135.5, 151.1, 160.9, 165.0, 180.2, 236.8, 338.5, 654.2),
    "per-row reduce-scatter (#3040)": (106.7, 111.3, 119.6, 139.8, 212.7, 340.3, 579.9, 1173.2),
    "SGLang-JAX v1": (176.5, 186.2, 212.8, 267.5, 383.1, 613.6, 1063.6, 2130.8),
}


def best(config: FusedMoEConfig, generation: str, ep: int, num_tokens: int) -> tuple[float, str] | None:
    """The least time published for a layer, and whose; None where none is."""
    shape = (config.num_experts, config.experts_per_token, config.hidden_dim, config.intermediate_size)
    if (shape, generation, ep) != (SHAPE, GENERATION, EP) or num_tokens not in TOKENS:
        return None
    at = TOKENS.index(num_tokens)
    return min((times[at], name) for name, times in MICROSECONDS.items())
