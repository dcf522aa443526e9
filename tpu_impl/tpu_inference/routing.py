# SPDX-License-Identifier: Apache-2.0
"""`common.routing.route` in JAX: router logits to expert ids and weights, float32, ties to the lower index.

Scores are computed in float32 whatever the logits' dtype, so that near-ties of bfloat16 logits are decided as on every
other platform; top-k on bfloat16 scores picks other experts for some tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ...common.config import FusedMoEConfig


def _scores(logits: jax.Array, scoring_func: str) -> jax.Array:
    return jax.nn.sigmoid(logits) if scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def route_on_device(
    router_logits: jax.Array, config: FusedMoEConfig, *, correction_bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Choose each token's experts.

    Args:
      router_logits: ``[T, E]``, any float dtype.
      config: E, K, scoring, groups, renormalisation and scaling.
      correction_bias: ``[E]`` added to the scores for the choice only.

    Returns:
      ``topk_weights`` float32 ``[T, K]`` and ``topk_ids`` int32 ``[T, K]``, best first; ids are distinct, and the
      weights of a row that holds a NaN logit are NaN.
    """
    logits = router_logits.astype(jnp.float32)
    missing = jnp.isnan(logits)
    scores = _scores(jnp.where(missing, -jnp.inf, logits), config.scoring_func)
    # A row of nothing but NaN has no scores; the choice must still be K distinct experts.
    choice = jnp.where(jnp.isnan(scores) | missing, -jnp.inf, scores)
    if correction_bias is not None:
        choice = choice + correction_bias.astype(jnp.float32)
    if config.num_expert_group is not None and config.topk_group is not None:
        choice = _within_groups(choice, config.num_expert_group, config.topk_group, correction_bias is not None)
    _, ids = lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.renormalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights * jnp.float32(config.routed_scaling_factor)
    return jnp.where(missing.any(axis=-1, keepdims=True), jnp.nan, weights), ids.astype(jnp.int32)


def _within_groups(choice: jax.Array, groups: int, topk_group: int, biased: bool) -> jax.Array:
    """Experts outside the best `topk_group` groups made unpickable."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, groups, experts // groups)
    best, _ = lax.top_k(grouped, min(2, experts // groups))
    worth = best.sum(axis=-1) if biased else best[..., 0]
    _, kept = lax.top_k(worth, topk_group)
    keep = jnp.zeros((tokens, groups), bool).at[jnp.arange(tokens)[:, None], kept].set(True)
    inside = jnp.repeat(keep, experts // groups, axis=1)
    # Finite, so that experts without a score inside the groups still precede those outside.
    lowest = jnp.finfo(jnp.float32).min
    return jnp.where(inside, jnp.maximum(choice, lowest), -jnp.inf)
