# SPDX-License-Identifier: Apache-2.0
"""LoRA shrink: ``v = A x`` for every (expert, adapter) bin, from the rows before any quantisation.

One program takes a bin, a tile of its rank and every `splits`-th block of its rows, so an A matrix is read once a
program; bins without rows and tiles beyond the adapter's rank end at once. Products are kept in f32: rounding them
to bf16 would cost the delta 1.7e-3 of relative L2, a third of its bound.
"""

from __future__ import annotations

import torch

from ._runtime import batch_invariant, cdiv, launch, next_power_of_2, target_of, tl, triton
from .align import Alignment
from .device_numerics import decode_e4m3, to_bf16, to_f32
from .grouped_gemm import dot


@triton.jit
def _shrink_kernel(
    x_ptr, x_scale_ptr, a_ptr, v_ptr, sorted_ptr, expert_start_ptr, offset_ptr, count_ptr, rank_ptr,
    depth, row_div, x_groups, a_experts, a_expert_stride, R,
    SLOTS: tl.constexpr, HALVES: tl.constexpr, X_KIND: tl.constexpr, NATIVE: tl.constexpr, X_GROUP: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // SLOTS
    slot = tl.program_id(0) % SLOTS
    half = tl.program_id(1) % HALVES
    first_r = (tl.program_id(1) // HALVES) * BLOCK_R
    bins = expert * (SLOTS + 1) + slot + 1
    rows = tl.load(count_ptr + bins)
    if rows == 0:
        return
    rank = tl.load(rank_ptr + slot)
    if first_r >= rank:
        return
    start = tl.load(expert_start_ptr + expert) + tl.load(offset_ptr + bins)
    r = first_r + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    matrix = (slot.to(tl.int64) * a_experts + expert.to(tl.int64) * a_expert_stride) * HALVES + half
    a_at = a_ptr + matrix * R * depth + r[None, :].to(tl.int64) * depth + k[:, None]
    for first in range(tl.program_id(2) * BLOCK_M, rows, SPLITS * BLOCK_M):
        lane = first + tl.arange(0, BLOCK_M)
        mine = lane < rows
        pair = tl.load(sorted_ptr + start + lane, mask=mine, other=0).to(tl.int64)
        x_row = pair // row_div
        x_at = x_ptr + x_row[:, None] * depth + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for at in range(0, depth, BLOCK_K):
            inside = k < depth - at
            x = tl.load(x_at + at, mask=mine[:, None] & inside[None, :], other=0)
            a = tl.load(a_at + at, mask=inside[:, None] & (r < rank)[None, :], other=0.0)
            if X_KIND == "e4m3":
                if NATIVE:
                    codes = x.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
                else:
                    codes = to_bf16(to_f32(decode_e4m3(x)))
                zero = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
                group = at // X_GROUP if X_GROUP > 0 else 0
                scale = tl.load(x_scale_ptr + x_row * x_groups + group, mask=mine, other=0.0)
                acc += dot(codes, a, zero, "bf16", BLOCK_K) * scale[:, None]
            else:
                acc = dot(x, a, acc, "bf16", BLOCK_K)
        v_at = v_ptr + (pair * HALVES + half)[:, None] * R + r[None, :]
        tl.store(v_at, acc, mask=mine[:, None] & (r < rank)[None, :])


def lora_shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    ranks: torch.Tensor,
    alignment: Alignment,
    *,
    row_div: int = 1,
    x_scale: torch.Tensor | None = None,
    x_group: int = 0,
) -> torch.Tensor:
    """Rank products of every row that has an adapter.

    Args:
      x: [M, depth] bf16, or uint8 (e4m3) with `x_scale` [M, 1] or, with `x_group`, [M, ceil(depth / x_group)].
      a: [slots, E|1, halves, R, depth] bf16; rows beyond a slot's rank are never read.
      ranks: [slots] int32.
      row_div: K where `x` holds one row a token, 1 where it holds one a pair.

    Returns:
      [T*K, halves, R] f32; entries without an adapter or beyond its rank are undefined.
    """
    slots, experts, halves, rank, depth = a.shape
    num_pairs = alignment.pair_bin.shape[0]
    v = torch.empty((num_pairs, halves, rank), dtype=torch.float32, device=x.device)
    local_experts = alignment.expert_start.shape[0]
    block_r = min(64, max(16, next_power_of_2(rank)))
    block_m = 16 if num_pairs <= 16 * local_experts and not batch_invariant() else 64
    splits = max(1, min(8, num_pairs // (8 * local_experts * 64)))
    launch(
        _shrink_kernel,
        (local_experts * slots, halves * cdiv(rank, block_r), splits),
        dict(
            x_ptr=x,
            x_scale_ptr=x if x_scale is None else x_scale,
            a_ptr=a,
            v_ptr=v,
            sorted_ptr=alignment.sorted_pair,
            expert_start_ptr=alignment.expert_start,
            offset_ptr=alignment.bin_offset,
            count_ptr=alignment.bin_count,
            rank_ptr=ranks,
            depth=depth,
            row_div=row_div,
            x_groups=cdiv(depth, x_group) if x_group else 1,
            a_experts=experts,
            a_expert_stride=0 if experts == 1 else 1,
            R=rank,
        ),
        num_stages=3,
        SLOTS=slots,
        HALVES=halves,
        X_KIND="bf16" if x_scale is None else "e4m3",
        NATIVE=target_of(x.device).native_fp8,
        X_GROUP=x_group,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_K=128,
    )
    return v
