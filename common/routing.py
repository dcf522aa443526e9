# SPDX-License-Identifier: Apache-2.0
"""Router logits to expert ids and weights, in float32, with ties to the lower index.

Scores are softmax or sigmoid of the logits. A correction bias moves only the choice, never the weights (DeepSeek-V3).
With groups, the best `topk_group` groups stay: a group counts its best score, or the sum of its best two where a
correction bias is given. Then the K best experts, weights renormalised and scaled where the config says so.

A NaN logit never wins against a number, and K distinct ids in range come out whatever the logits are; the weights of
a row that holds a NaN are NaN, so the fault stays visible and stays in its row.
"""

from __future__ import annotations

import numpy as np

from .checks import check_array
from .config import FusedMoEConfig
from .numerics import BF16


def _scores(logits: np.ndarray, scoring_func: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        if scoring_func == "sigmoid":
            return (np.float32(1) / (np.float32(1) + np.exp(-logits))).astype(np.float32)
        z = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return (z / z.sum(axis=-1, keepdims=True, dtype=np.float32)).astype(np.float32)


def _top(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest of each row, ties to the lower index; NaN sorts last."""
    return np.argsort(np.where(np.isnan(values), np.inf, -values), axis=-1, kind="stable")[..., :k]


def route(
    router_logits: np.ndarray, config: FusedMoEConfig, *, correction_bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Choose each token's experts.

    Args:
      router_logits: ``[T, E]`` bfloat16, float16 or float32; read as float32.
      config: E, K, scoring, groups, renormalisation and scaling.
      correction_bias: ``[E]`` added to the scores for the choice only.

    Returns:
      ``topk_weights`` float32 ``[T, K]`` and ``topk_ids`` int32 ``[T, K]``, best first; ids are distinct.

    Raises:
      TypeError, ValueError: a wrong dtype or shape.
    """
    if not isinstance(config, FusedMoEConfig):
        raise TypeError(f"config: got {type(config).__name__}, want FusedMoEConfig")
    check_array("router_logits", router_logits, shape=(None, config.num_experts), dtypes=(np.float32, np.float16, BF16))
    # The choice is made on logits where NaN cannot spread over the row; the weights below keep it.
    logits = router_logits.astype(np.float32)
    poisoned = np.isnan(logits).any(axis=-1)
    choice = _scores(np.where(np.isnan(logits), -np.inf, logits), config.scoring_func)
    scores = choice
    if correction_bias is not None:
        check_array("correction_bias", correction_bias, shape=(config.num_experts,))
        choice = choice + correction_bias.astype(np.float32)
    choice = np.where(np.isnan(logits), np.nan, choice)
    if config.num_expert_group is not None and config.topk_group is not None:
        grouped = np.where(np.isnan(choice), -np.inf, choice).reshape(len(choice), config.num_expert_group, -1)
        best = np.sort(grouped, axis=-1)[..., ::-1]
        worth = best[..., :2].sum(axis=-1) if correction_bias is not None else best[..., 0]
        keep = np.zeros(worth.shape, bool)
        np.put_along_axis(keep, _top(worth, config.topk_group), True, axis=-1)
        outside = np.repeat(~keep, grouped.shape[-1], axis=-1)
        # Outside the groups nothing may win, not even against a NaN inside: sort those last of all.
        choice = np.where(np.isnan(choice), -np.finfo(np.float32).max, choice)
        choice = np.where(outside, -np.inf, choice)
    ids = _top(choice, config.experts_per_token).astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if config.renormalize:
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = weights / weights.sum(axis=-1, keepdims=True, dtype=np.float32)
    weights = (weights * np.float32(config.routed_scaling_factor)).astype(np.float32)
    weights[poisoned] = np.nan
    return weights, ids
