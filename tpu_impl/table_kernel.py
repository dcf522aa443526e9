# SPDX-License-Identifier: Apache-2.0
"""What a device tells the others of its pairs, in one pass: its part of the expert kernel's table.

Sorted pairs in; their tokens, where each segment begins among them, and what goes along with tokens out, laid out as
`spec.TableLayout` says. XLA would take an operation for each, and for the counts several times as long.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .spec import LANES, SUBLANES, KernelSpec, round_up

NAME = "isomoe_table_kernel"
# Rows of pairs looked at in straight-line code.
UNROLLED = SUBLANES


def _lines(length: int) -> int:
    return -(-length // LANES)


def _body(spec: KernelSpec, names: list[str], rank: Any, pairs: Any, *refs: Any) -> None:
    """Refs: int32 or float32 ``[lines, 128]`` for each of `names`, and the result."""
    *given, out = refs
    local_tokens, segments = spec.tokens // spec.ep, spec.ep * spec.segments
    listed = _lines(spec.local_rows)
    out[0:listed] = (pairs[0:listed] & ((1 << spec.token_bits) - 1)) + rank[0] * local_tokens
    for name, ref in zip(names, given, strict=True):
        start = getattr(spec.table, name) // LANES
        out[start : start + ref.shape[0]] = lax.bitcast_convert_type(ref[...], jnp.int32)

    for first in range(0, segments + 1, LANES):
        height = min(LANES, round_up(segments + 1 - first, SUBLANES))
        line = (spec.table.begins + first) // LANES
        out[line : line + 1] = _counts(pairs, spec.pair_bits, first, height)


def _counts(pairs: Any, bits: int, first: int, height: int) -> jax.Array:
    """int32 ``[1, 128]``: how many pairs are in segments below each of `height`, from `first` on.

    Counted down sublanes, each lane its own pairs, and then laid along lanes.
    """
    bound = lax.broadcasted_iota(jnp.int32, (height, LANES), 0)

    def counted(line: jax.Array | int, below: jax.Array) -> jax.Array:
        segment = lax.shift_right_logical(pairs[pl.ds(line, 1)], bits)
        return below + (segment - first < bound).astype(jnp.int32)

    def some(i: jax.Array, below: jax.Array) -> jax.Array:
        for line in range(UNROLLED):
            below = counted(i * UNROLLED + line, below)
        return below

    whole = pairs.shape[0] // UNROLLED
    below = lax.fori_loop(0, whole, some, jnp.zeros((height, LANES), jnp.int32))
    for line in range(whole * UNROLLED, pairs.shape[0]):
        below = counted(line, below)
    total = jnp.sum(below.astype(jnp.float32), axis=1, keepdims=True)
    lane = lax.broadcasted_iota(jnp.int32, (height, LANES), 1)
    return jnp.sum(jnp.where(lane == bound, total, 0.0), axis=0, keepdims=True).astype(jnp.int32)


def table_kernel(
    spec: KernelSpec,
    rank: jax.Array,
    pairs: jax.Array,
    given: dict[str, jax.Array],
    *,
    vmem_limit_bytes: int,
    interpret: Any = False,
    bounds_checks: bool = False,
) -> jax.Array:
    """One device's part of the table.

    Args:
      spec: the build.
      rank: int32 ``[1]``.
      pairs: int32 ``[spec.local_rows]``, sorted (`plan.numbered`).
      given: fields of the table by name: float32 or int32 vectors, of which as much as has room is copied.
      vmem_limit_bytes, interpret, bounds_checks: as `expert_kernel`'s.

    Returns:
      int32 ``[spec.table.stride]``; words between fields are undefined.
    """

    def lines(a: jax.Array, value: int = 0) -> jax.Array:
        whole = round_up(a.shape[0], LANES)
        return jnp.pad(a, (0, whole - a.shape[0]), constant_values=value).reshape(-1, LANES)

    # Beyond all segments, so that they are not counted.
    arrays = [lines(pairs, jnp.iinfo(jnp.int32).max), *(lines(a) for a in given.values())]
    out = pl.pallas_call(
        functools.partial(_body, spec, list(given)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(arrays),
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        out_shape=jax.ShapeDtypeStruct((spec.table.stride // LANES, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=not bounds_checks
        ),
        interpret=interpret,
        name=NAME,
    )(rank, *arrays)
    return out.reshape(-1)
