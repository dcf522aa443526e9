# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of expert results, float32, in the fixed order k = 0 .. K-1: what follows the expert kernel.

`push_bf16`, `push_fp8`: result rows have arrived at their token's owner; the sum does not depend on how many devices
took part. FP8 rows carry one scale each: half the bytes on the links, 2.6e-2 of rounding a row.
`rs_bf16`: every device sums what its own experts produced for all tokens and the partial sums, rounded to bf16, are
reduce-scattered: fewer bytes on the links where tokens visit most devices, one more rounding, and an order of
addition that depends on the device count.
`presum_fp8`: the same partial sums, of the tokens that have one, as FP8 rows straight to the owner, who adds them in
the order of ranks (`presum`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import presum
from .plan import Plan, exclusive_sum, inverse_permutation
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


def _pushed(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any]
) -> jax.Array:
    rows = results[0].reshape(-1, spec.hidden)
    scales = results[1][:, 0, :1] if spec.fp8_wire else None
    assert plan.arrival is not None
    return weighted_sum(rows, plan.arrival, plan.owned, topk_weights, scales).astype(jnp.bfloat16)


def _reduce_scattered(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any]
) -> jax.Array:
    rows, shape = results[0].reshape(-1, spec.hidden), (spec.tokens, spec.top_k)
    at = inverse_permutation(plan.order).reshape(shape)
    assert plan.weights is not None
    partial = weighted_sum(rows, at, plan.mine.reshape(shape), plan.weights[0]).astype(jnp.bfloat16)
    return lax.psum_scatter(partial, spec.axis, scatter_dimension=0, tiled=True) if spec.ep > 1 else partial


def _presummed(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any]
) -> jax.Array:
    devices = lax.iota(jnp.int32, spec.ep)
    comes = jnp.any(plan.device[:, :, None] == devices, axis=1)
    at = exclusive_sum(comes.astype(jnp.int32)) + devices * (spec.tokens // spec.ep)
    arriving = jnp.sum(comes & (devices != plan.rank), dtype=jnp.int32)
    codes, scales = presum.presum_kernel(spec, presum.tables(spec, plan, arriving), results[0], **launch)
    ones = jnp.ones(at.shape, jnp.float32)
    return weighted_sum(codes.reshape(-1, spec.hidden), at, comes, ones, scales[:, 0, :1]).astype(jnp.bfloat16)


_COMBINES = {
    "push_bf16": _pushed, "push_fp8": _pushed, "rs_bf16": _reduce_scattered, "presum_fp8": _presummed,
}


def combine(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any]
) -> jax.Array:
    """bf16 ``[T_local, H]`` from the kernel's results; call where `build_plan` was called.

    `launch` holds the keyword arguments that `expert_kernel` was launched with, for transports with a kernel of their
    own.
    """
    return _COMBINES[spec.transport](spec, results, plan, topk_weights, launch)
