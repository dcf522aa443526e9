# SPDX-License-Identifier: Apache-2.0
"""Quantising and packing rows at their source, in one pass: bf16 rows in, words of four codes and scales out.

Codes are those of `numerics.quantize_rows`. XLA would write each code as a word of its own before it packs them, and
start five operations.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .numerics import cast_rows, fp8_scale
from .spec import LANES, ROW_BLOCK, round_up

NAME = "isomoe_pack_kernel"
# Columns looked at together.
CHUNK = 1024


def _body(count: int, x: Any, words: Any, scales: Any) -> None:
    """`count` rows: ``x`` bf16 ``[count, H]``, ``words`` uint32 ``[count, *row shape]``, ``scales`` ``[1, 1, 128]``."""
    _, parts, sublanes, lanes = words.shape
    hidden, width = x.shape[1], sublanes * lanes
    lane = lax.broadcasted_iota(jnp.int32, (ROW_BLOCK, LANES), 1)
    row = lax.broadcasted_iota(jnp.int32, (ROW_BLOCK, LANES), 0)

    def block(i: jax.Array, laid: jax.Array) -> jax.Array:
        rows = pl.ds(pl.multiple_of(i * ROW_BLOCK, ROW_BLOCK), ROW_BLOCK)
        most = jnp.zeros((ROW_BLOCK, 1), jnp.float32)
        for n in range(0, hidden, CHUNK):
            part = jnp.abs(x[rows, n : min(n + CHUNK, hidden)].astype(jnp.float32))
            most = jnp.maximum(most, jnp.max(part, axis=1, keepdims=True))
        scale = fp8_scale(most)
        inv = 1.0 / scale
        for p in range(parts):
            word = jnp.zeros((ROW_BLOCK, width), jnp.uint32)
            for b in range(4):
                first = b * (hidden // 4) + p * width
                codes = cast_rows(x[rows, first : first + width].astype(jnp.float32), inv)
                byte = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32) & 0xFF
                word = word | (byte.astype(jnp.uint32) << (8 * b))
            words[rows, p] = word.reshape(ROW_BLOCK, sublanes, lanes)
        # The block's scales, down a column, into as many lanes.
        return laid + jnp.sum(jnp.where(lane == row + i * ROW_BLOCK, scale, 0.0), axis=0, keepdims=True)

    scales[0] = lax.fori_loop(0, count // ROW_BLOCK, block, jnp.zeros((1, LANES), jnp.float32))


def pack_kernel(
    x: jax.Array,
    row_shape: tuple[int, ...],
    *,
    vmem_limit_bytes: int,
    interpret: Any = False,
    bounds_checks: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Quantise and pack a device's rows.

    Args:
      x: bfloat16 ``[T, H]``.
      row_shape: a packed row's (`KernelSpec.row_shape`), H / 4 words.
      vmem_limit_bytes, interpret, bounds_checks: as `expert_kernel`'s.

    Returns:
      uint32 ``[T, *row_shape]``, byte b of word j being the code of column ``j + b H / 4``; float32 scales ``[T]``
      in whole rows of lanes, what is past T undefined.
    """
    tokens, hidden = x.shape
    count = min(LANES, round_up(tokens, ROW_BLOCK))
    steps = -(-tokens // count)
    words, scales = pl.pallas_call(
        functools.partial(_body, count),
        grid=(steps,),
        in_specs=[pl.BlockSpec((count, hidden), lambda i: (i, 0))],
        out_specs=[
            pl.BlockSpec((count, *row_shape), lambda i: (i, 0, 0, 0)),
            pl.BlockSpec((1, 1, LANES), lambda i: (i, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, *row_shape), jnp.uint32),
            jax.ShapeDtypeStruct((steps, 1, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=vmem_limit_bytes, disable_bounds_checks=not bounds_checks
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * hidden, bytes_accessed=3 * tokens * hidden, transcendentals=0
        ),
        interpret=interpret,
        name=NAME,
    )(x)
    return words, scales.reshape(-1)
