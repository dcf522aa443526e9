# SPDX-License-Identifier: Apache-2.0
"""``y[t] = sum over k = 0..K-1 of w[t, k] * o[t, k]``, in f32 and in that order; skipped pairs add nothing."""

from __future__ import annotations

import torch

from ._runtime import cdiv, launch, next_power_of_2, tl, triton
from .device_numerics import to_dtype, to_f32


@triton.jit
def _combine_kernel(o_ptr, weight_ptr, bin_ptr, y_ptr, columns, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = column < columns
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    # Unrolled, so that all K rows are in flight at once.
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        # A skipped pair's row was never written: leave it out by selection, not by a zero weight.
        kept = tl.load(bin_ptr + pair) >= 0
        o = to_f32(tl.load(o_ptr + pair * columns + column, mask=mask & kept, other=0.0))
        acc = tl.where(kept, acc + tl.load(weight_ptr + pair) * o, acc)
    tl.store(y_ptr + token * columns + column, to_dtype(acc, y_ptr.dtype.element_ty), mask=mask)


def combine(o: torch.Tensor, topk_weights: torch.Tensor, pair_bin: torch.Tensor, out: torch.Tensor) -> None:
    """Sum each token's expert rows into `out`.

    Args:
      o: [T*K, H] bf16 or f32; rows of skipped pairs are not read.
      topk_weights: [T, K] f32.
      pair_bin: [T*K] int32, below 0 where a pair is skipped.
      out: [T, H] bf16, or f32 for a rank's partial sum.
    """
    tokens, top_k = topk_weights.shape
    columns = out.shape[1]
    block_n = min(2048, next_power_of_2(columns))
    launch(
        _combine_kernel,
        (tokens, cdiv(columns, block_n)),
        dict(o_ptr=o, weight_ptr=topk_weights, bin_ptr=pair_bin, y_ptr=out, columns=columns),
        TOP_K=top_k,
        BLOCK_N=block_n,
    )
