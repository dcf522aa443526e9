# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of expert results, float32, in the fixed order k = 0 .. K-1.

`push_bf16`, `push_fp8`: result rows have arrived at their token's owner; the sum does not depend on how many devices
took part. FP8 rows carry one scale each: half the bytes on the links, 2.6e-2 of rounding a row.
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

# Few tokens: K gathers at once, for their latency. Many: one after another, or K copies of the rows would be live.
UNROLLED_TOKENS = 256


def weighted_sum(
    rows: jax.Array, at: jax.Array, use: jax.Array, weights: jax.Array, scales: jax.Array | None = None
) -> jax.Array:
    """float32 ``[T, H]``: ``sum_k weights[t, k] * rows[at[t, k]]`` over the pairs in `use`.

    `scales` ``[rows, 1]`` are the rows' own, where they are FP8 codes.

    A row that is not used may hold anything: it is selected away, not multiplied by zero.
    """

    def add(k: jax.Array | int, total: jax.Array) -> jax.Array:
        used, index = use[:, k], jnp.where(use[:, k], at[:, k], 0)
        row = rows[index].astype(jnp.float32)
        if scales is not None:
            row = row * scales[index]
        return total + jnp.where(used[:, None], weights[:, k][:, None] * row, 0.0)

    total = jnp.zeros((at.shape[0], rows.shape[1]), jnp.float32)
    if at.shape[0] > UNROLLED_TOKENS:
        return lax.fori_loop(0, at.shape[1], add, total)
    for k in range(at.shape[1]):
        total = add(k, total)
    return total


def combine(spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array) -> jax.Array:
    """bf16 ``[T_local, H]`` from the kernel's results; call where `build_plan` was called."""
    rows = results[0].reshape(-1, spec.hidden)
    if spec.pushes:
        scales = results[1][:, 0, :1] if spec.fp8_wire else None
        return weighted_sum(rows, plan.arrival, plan.owned, topk_weights, scales).astype(jnp.bfloat16)
    weights = lax.all_gather(topk_weights, spec.axis, axis=0, tiled=True) if spec.ep > 1 else topk_weights
    shape = (spec.tokens, spec.top_k)
    at = inverse_permutation(plan.order).reshape(shape)
    partial = weighted_sum(rows, at, plan.mine.reshape(shape), weights)
    if spec.ep == 1:
        return partial.astype(jnp.bfloat16)
    return lax.psum_scatter(partial.astype(jnp.bfloat16), spec.axis, scatter_dimension=0, tiled=True)
