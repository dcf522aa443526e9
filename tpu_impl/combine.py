# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of expert results, float32, in the fixed order k = 0 .. K-1: what follows the expert kernel.

`combine_kernel` does every such sum; here is which rows it adds.

`push_bf16`, `push_fp8`: result rows have arrived at their token's owner; the sum does not depend on how many devices
took part. FP8 rows carry one scale each: half the bytes on the links, 2.6e-2 of rounding a row.
`rs_bf16`: every device sums what its own experts produced for all tokens and the partial sums, rounded to bf16, are
reduce-scattered: fewer bytes on the links where tokens visit most devices, one more rounding, and an order of
addition that depends on the device count.
`presum_fp8`: the same partial sums, of the tokens that have one, as FP8 rows straight to the owner, who adds them in
the order of ranks (`presum`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import combine_kernel, presum
from .combine_cost import combine_panels
from .generations import Generation
from .plan import Plan, exclusive_sum, inverse_permutation
from .spec import KernelSpec, scales_shape


def max_tokens(spec: KernelSpec, smem_bytes: int) -> int:
    """Most tokens of all devices whose tables and scales fit on the chip; a multiple of ``spec.ep``, or 0."""
    if spec.transport == "presum_fp8":
        own = combine_kernel.max_tokens(spec.ep, smem_bytes, scaled=True)
        return min(own * spec.ep, presum.max_tokens(spec, smem_bytes))
    own = combine_kernel.max_tokens(spec.top_k, smem_bytes, scaled=spec.fp8_wire)
    return own * spec.ep if spec.pushes else own // spec.ep * spec.ep


def _weighted_sum(
    rows: jax.Array,
    at: jax.Array,
    use: jax.Array,
    weights: jax.Array,
    launch: dict[str, Any],
    panels: int,
    scales: jax.Array | None = None,
) -> jax.Array:
    """bf16 ``[T, H]``: the weighted sum of the pairs in `use`; codes have `scales` along lanes."""
    alone = {name: value for name, value in launch.items() if name != "collective_id"}
    return combine_kernel.combine_kernel(rows, jnp.where(use, at, -1), weights, scales, panels=panels, **alone)


def _pushed(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any],
    panels: int,
) -> jax.Array:
    assert plan.arrival is not None
    return _weighted_sum(results[0], plan.arrival, plan.owned, topk_weights, launch, panels, *results[1:])


def _reduce_scattered(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any],
    panels: int,
) -> jax.Array:
    assert plan.kept is not None
    shape = (spec.tokens, spec.top_k)
    at = inverse_permutation(plan.kept.order, (spec.capacity - 1).bit_length()).reshape(shape)
    partial = _weighted_sum(results[0], at, plan.kept.mine.reshape(shape), plan.kept.weights, launch, panels)
    return lax.psum_scatter(partial, spec.axis, scatter_dimension=0, tiled=True) if spec.ep > 1 else partial


def _presummed(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any],
    panels: int,
) -> jax.Array:
    devices = lax.iota(jnp.int32, spec.ep)
    comes = jnp.any(plan.device[:, :, None] == devices, axis=1)
    at = exclusive_sum(comes.astype(jnp.int32)) + devices * (spec.tokens // spec.ep)
    arriving = jnp.sum(comes & (devices != plan.rank[0]), dtype=jnp.int32)
    codes, scales = presum.presum_kernel(spec, presum.tables(spec, plan, arriving), results[0], **launch)
    shape = scales_shape(spec.tokens)
    laid = jnp.pad(scales[:, 0, 0], (0, math.prod(shape) - spec.tokens)).reshape(shape)
    return _weighted_sum(codes, at, comes, jnp.ones(at.shape, jnp.float32), launch, panels, laid)


_COMBINES = {
    "push_bf16": _pushed, "push_fp8": _pushed, "rs_bf16": _reduce_scattered, "presum_fp8": _presummed,
}


def combine(
    spec: KernelSpec, results: list[jax.Array], plan: Plan, topk_weights: jax.Array, launch: dict[str, Any],
    gen: Generation,
) -> jax.Array:
    """bf16 ``[T_local, H]`` from the kernel's results; call where `build_plan` was called.

    `launch` holds the keyword arguments that `expert_kernel` was launched with, for transports with a kernel of their
    own; `gen` is what decides how rows are brought in (`combine_cost`).
    """
    return _COMBINES[spec.transport](spec, results, plan, topk_weights, launch, combine_panels(gen, spec))
