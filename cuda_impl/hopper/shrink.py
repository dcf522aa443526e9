# SPDX-License-Identifier: Apache-2.0
"""LoRA shrink at large batches: ``A[adapter, expert] @ row`` for the rows of each (expert, adapter) segment."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .plan import RowPlan


@triton.jit
def _shrink_kernel(
    x_ptr,
    row_token_ptr,
    a_ptr,
    seg_rows_ptr,
    counts_ptr,
    out_ptr,
    D: tl.constexpr,
    R: tl.constexpr,
    A_EXPERTS: tl.constexpr,
    GATHER: tl.constexpr,
    BM: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    seg = tl.program_id(0)
    if seg < tl.load(counts_ptr + 1):
        expert = tl.load(seg_rows_ptr + seg * 4)
        first = tl.load(seg_rows_ptr + seg * 4 + 1)
        rows = tl.load(seg_rows_ptr + seg * 4 + 2)
        slot = tl.load(seg_rows_ptr + seg * 4 + 3)
        if A_EXPERTS == 1:
            expert = 0
        ranks = tl.program_id(1) * BR + tl.arange(0, BR)
        cols = tl.arange(0, BK)
        a = a_ptr + (slot.to(tl.int64) * A_EXPERTS + expert) * R * D + ranks[None, :] * D + cols[:, None]
        for m in range(tl.program_id(2) * BM, rows, tl.num_programs(2) * BM):
            row = first + m + tl.arange(0, BM)
            have = m + tl.arange(0, BM) < rows
            if GATHER:
                source = tl.load(row_token_ptr + row, mask=have, other=0)
            else:
                source = row
            x = x_ptr + source.to(tl.int64)[:, None] * D + cols[None, :]
            acc = tl.zeros([BM, BR], tl.float32)
            for k in range(0, D, BK):
                inside = k + cols < D
                xv = tl.load(x + k, mask=have[:, None] & inside[None, :], other=0.0)
                av = tl.load(a + k, mask=inside[:, None] & (ranks < R)[None, :], other=0.0)
                acc = tl.dot(xv, av, acc)
            tl.store(
                out_ptr + row[:, None] * R + ranks[None, :],
                acc.to(tl.bfloat16),
                mask=have[:, None] & (ranks < R)[None, :],
            )


def tiles(mean: float, ranks: int, d: int) -> dict[str, int]:
    """Tile of a program from the mean rows of a segment, the ranks and the width; `splits` programs share a segment."""
    if mean <= 24:
        bm, bk, stages = (16, 256, 3) if d > 1024 else (16, 128, 4)
    else:
        bm, bk, stages = (64, 128, 4) if d <= 1024 or ranks > 64 else (64, 64, 5)
    return {
        "bm": bm,
        "br": min(triton.next_power_of_2(ranks), 128),
        "bk": min(bk, triton.next_power_of_2(d)),
        "warps": 4,
        "stages": stages,
        "splits": max(1, min(16, round(mean / bm * (2 if d > 1024 else 1)))),
    }


def shrink(
    x: torch.Tensor, a: torch.Tensor, plan: RowPlan, pairs: int, *, gather: bool, experts: int
) -> torch.Tensor:
    """Shrink products of every adapter row.

    Args:
      x: bf16 ``[T, D]`` (`gather`: rows found through the plan's tokens) or ``[rows, D]``.
      a: bf16 ``[S, E or 1, ..., D]``; the axes between are the ranks (gate then up for w13).
      plan: with segments.
      pairs: T * K, which sizes the row tile.
      experts: experts held here.

    Returns:
      bf16 ``[rows, ranks]``; base and padding rows are undefined.
    """
    d = a.shape[-1]
    ranks = a[0, 0].numel() // d
    assert plan.seg_rows is not None and plan.seg_slot is not None
    out = torch.empty((plan.rows, ranks), dtype=torch.bfloat16, device=x.device)
    tile = tiles(pairs / (experts * a.shape[0]), ranks, d)
    _shrink_kernel[(plan.seg_slot.shape[0], triton.cdiv(ranks, tile["br"]), tile["splits"])](
        x,
        plan.row_token,
        a,
        plan.seg_rows,
        plan.counts,
        out,
        D=d,
        R=ranks,
        A_EXPERTS=a.shape[1],
        GATHER=gather,
        BM=tile["bm"],
        BR=tile["br"],
        BK=tile["bk"],
        num_warps=tile["warps"],
        num_stages=tile["stages"],
    )
    return out
