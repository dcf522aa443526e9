# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of expert results, float32, in the fixed order k = 0 .. K-1.

`push_bf16`: result rows have arrived at their token's owner; the sum does not depend on how many devices took part.
`rs_bf16`: every device sums what its own experts produced for all tokens and the partial sums, rounded to bf16, are
reduce-scattered: fewer bytes on the links where tokens visit most devices, one more rounding, and an order of
addition that depends on the device count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .plan import Plan, inverse_permutation
from .spec import KernelSpec


def weighted_sum(rows: jax.Array, at: jax.Array, use: jax.Array, weights: jax.Array) -> jax.Array:
    """float32 ``[T, H]``: ``sum_k weights[t, k] * rows[at[t, k]]`` over the pairs in `use`.

    A row that is not used may hold anything: it is selected away, not multiplied by zero.
    """
    total = jnp.zeros((at.shape[0], rows.shape[1]), jnp.float32)
    for k in range(at.shape[1]):
        row = rows[jnp.where(use[:, k], at[:, k], 0)].astype(jnp.float32)
        total = total + jnp.where(use[:, k, None], weights[:, k, None] * row, 0.0)
    return total


def combine(spec: KernelSpec, results: jax.Array, plan: Plan, topk_weights: jax.Array) -> jax.Array:
    """bf16 ``[T_local, H]`` from the kernel's result rows; call where `build_plan` was called."""
    rows = results.reshape(results.shape[0], spec.hidden)
    if spec.transport == "push_bf16":
        return weighted_sum(rows, plan.arrival, plan.owned, topk_weights).astype(jnp.bfloat16)
    weights = lax.all_gather(topk_weights, spec.axis, axis=0, tiled=True) if spec.ep > 1 else topk_weights
    shape = (spec.tokens, spec.top_k)
    at = inverse_permutation(plan.order).reshape(shape)
    partial = weighted_sum(rows, at, plan.mine.reshape(shape), weights)
    if spec.ep == 1:
        return partial.astype(jnp.bfloat16)
    return lax.psum_scatter(partial.astype(jnp.bfloat16), spec.axis, scatter_dimension=0, tiled=True)
