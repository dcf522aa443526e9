# SPDX-License-Identifier: Apache-2.0
"""Quantising and packing rows at their source, in one pass: bf16 rows in, words of four codes and scales out.

Codes are those of `numerics.quantize_rows`. XLA would write each code as a word of its own before it packs them, and
start five operations.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .numerics import cast_rows, e4m3_bits, fp8_scale
from .spec import LANES, ROW_BLOCK, SUBLANES, round_up

NAME = "isomoe_pack_kernel"
# Words of a row that are put together: few enough for registers.
CHUNK = 256


def _body(count: int, native: bool, x: Any, words: Any, scales: Any) -> None:
    """`count` rows, bf16 ``[count, H]``; ``words`` uint32 ``[count H / 512, 128]``, ``scales`` ``[1, 1, 128]``."""
    hidden = x.shape[1]
    quarter, per_row = hidden // 4, hidden // 4 // LANES
    lane = lax.broadcasted_iota(jnp.int32, (ROW_BLOCK, LANES), 1)
    row = lax.broadcasted_iota(jnp.int32, (ROW_BLOCK, LANES), 0)

    def block(i: jax.Array, laid: jax.Array) -> jax.Array:
        rows = pl.ds(pl.multiple_of(i * ROW_BLOCK, ROW_BLOCK), ROW_BLOCK)
        # In bf16, two at a time where the chip can.
        most = functools.reduce(jnp.maximum, (jnp.abs(x[rows, n : n + LANES]) for n in range(0, hidden, LANES)))
        scale = fp8_scale(jnp.max(most.astype(jnp.float32), axis=1, keepdims=True))
        inv = 1.0 / scale

        def codes(first: int, width: int) -> jax.Array:
            part = x[rows, first : first + width].astype(jnp.float32)
            if native:
                return lax.bitcast_convert_type(cast_rows(part, inv), jnp.int8).astype(jnp.int32) & 0xFF
            return e4m3_bits(part * inv)  # by its own scale a row rounds to no more than the largest code

        for p in range(0, quarter, CHUNK):
            width = min(CHUNK, quarter - p)
            parts = (codes(b * quarter + p, width) << (8 * b) for b in range(4))
            word = lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, parts), jnp.uint32)
            # A row's words lie one below the other: a store of eight rows' leaves a row's distance between them.
            for r, c in itertools.product(range(0, ROW_BLOCK, SUBLANES), range(0, width, LANES)):
                at = (i * ROW_BLOCK + r) * per_row + (p + c) // LANES
                words[pl.ds(at, SUBLANES, stride=per_row), :] = word[r : r + SUBLANES, c : c + LANES]
        # The block's scales, down a column, into as many lanes.
        return laid + jnp.sum(jnp.where(lane == row + i * ROW_BLOCK, scale, 0.0), axis=0, keepdims=True)

    scales[0] = lax.fori_loop(0, count // ROW_BLOCK, block, jnp.zeros((1, LANES), jnp.float32))


def pack_kernel(
    x: jax.Array,
    row_shape: tuple[int, ...],
    *,
    native_e4m3: bool,
    vmem_limit_bytes: int,
    interpret: Any = False,
    bounds_checks: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Quantise and pack a device's rows.

    Args:
      x: bfloat16 ``[T, H]``.
      row_shape: a packed row's (`KernelSpec.row_shape`), H / 4 words.
      native_e4m3: whether the chip casts to e4m3 itself; the codes are the same.
      vmem_limit_bytes, interpret, bounds_checks: as `expert_kernel`'s.

    Returns:
      uint32 ``[T, *row_shape]``, byte b of word j being the code of column ``j + b H / 4``; float32 scales ``[T]``
      in whole rows of lanes, what is past T undefined.
    """
    tokens, hidden = x.shape
    count = min(LANES, round_up(tokens, ROW_BLOCK))
    steps, per_row = -(-tokens // count), hidden // 4 // LANES
    words, scales = pl.pallas_call(
        functools.partial(_body, count, native_e4m3),
        grid=(steps,),
        in_specs=[pl.BlockSpec((count, hidden), lambda i: (i, 0))],
        out_specs=[
            pl.BlockSpec((count * per_row, LANES), lambda i: (i, 0)),
            pl.BlockSpec((1, 1, LANES), lambda i: (i, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tokens * per_row, LANES), jnp.uint32),
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
    return words.reshape(tokens, *row_shape), scales.reshape(-1)
