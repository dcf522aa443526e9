# SPDX-License-Identifier: Apache-2.0
"""Passes over whole rows: permute and quantise the input, quantise the hidden rows, sum the experts' results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .plan import RowPlan

EPS = tl.constexpr(1e-10)
INV_FP8_MAX = tl.constexpr(1.0 / 448.0)


@triton.jit
def fp8_scale(absmax):
    """The package's scale of a group from its absolute maximum."""
    return tl.maximum(absmax, EPS) * INV_FP8_MAX


@triton.jit
def _scatter_kernel(
    x_ptr,
    slots_ptr,
    pair_bin_ptr,
    pair_rank_ptr,
    bin_start_ptr,
    pos_ptr,
    row_token_ptr,
    row_slot_ptr,
    q_ptr,
    scale_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    """One program a token: read and quantise the row once, write it to every place its pairs have."""
    GROUPS: tl.constexpr = (H + 127) // 128
    token = tl.program_id(0)
    group = tl.arange(0, GROUPS_P)
    cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = cols < H
    x = tl.load(x_ptr + token.to(tl.int64) * H + cols, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(x), axis=1)
    if not GROUPED:
        absmax = tl.zeros_like(absmax) + tl.max(absmax, axis=0)
    scale = fp8_scale(absmax)
    inv = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # The conversion saturates at 448 and keeps NaN.
    q = (x * inv[:, None]).to(tl.float8e4nv)
    slot = -1
    if SLOTS > 0:
        slot = tl.load(slots_ptr + token).to(tl.int32)
        slot = tl.where((slot >= 0) & (slot < SLOTS), slot, -1)
    for k in tl.static_range(K):
        pair = token * K + k
        bin = tl.load(pair_bin_ptr + pair)
        if bin >= 0:
            row = tl.load(bin_start_ptr + bin) + tl.load(pair_rank_ptr + pair)
            tl.store(q_ptr + row.to(tl.int64) * H + cols, q, mask=inside)
            if GROUPED:
                tl.store(scale_ptr + row * GROUPS + group, scale, mask=group < GROUPS)
            else:
                tl.store(scale_ptr + row, tl.max(scale, axis=0))
            tl.store(row_token_ptr + row, token)
            if SLOTS > 0:
                tl.store(row_slot_ptr + row, slot)
            tl.store(pos_ptr + pair, row)
        else:
            tl.store(pos_ptr + pair, -1)


def scatter_quantize(
    x: torch.Tensor, topk: int, plan: RowPlan, *, grouped: bool, slots: torch.Tensor | None, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x [T, H]`` bf16 and write each token to its rows; completes `plan`.

    Returns:
      fp8 ``[rows, H]`` and f32 scales ``[rows]`` or, `grouped`, ``[rows, ceil(H/128)]``; padding rows are undefined.
    """
    tokens, h = x.shape
    groups = triton.cdiv(h, 128)
    q = torch.empty((plan.rows, h), dtype=torch.float8_e4m3fn, device=x.device)
    shape = (plan.rows, groups) if grouped else (plan.rows,)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    _scatter_kernel[(tokens,)](
        x,
        slots if num_slots else x,
        plan.pair_bin,
        plan.pair_rank,
        plan.bin_start,
        plan.pos,
        plan.row_token,
        plan.row_slot if num_slots else plan.row_token,
        q,
        scale,
        H=h,
        K=topk,
        SLOTS=num_slots,
        GROUPED=grouped,
        GROUPS_P=triton.next_power_of_2(groups),
        num_warps=4 if h <= 4096 else 8,
    )
    return q, scale


@triton.jit
def _quantize_kernel(h_ptr, counts_ptr, q_ptr, scale_ptr, N: tl.constexpr, N_P: tl.constexpr, ROWS: tl.constexpr):
    total = tl.load(counts_ptr + 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < total:
        cols = tl.arange(0, N_P)
        inside = (row < total)[:, None] & (cols < N)[None, :]
        at = row.to(tl.int64)[:, None] * N + cols[None, :]
        h = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = fp8_scale(tl.max(tl.abs(h), axis=1))
        inv = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        tl.store(q_ptr + at, (h * inv[:, None]).to(tl.float8e4nv), mask=inside)
        tl.store(scale_ptr + row, scale, mask=row < total)


def quantize_rows(h: torch.Tensor, plan: RowPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise bf16 ``h [rows, N]``, one scale a row, as far as the plan's rows go; fp8 and f32 ``[rows]``."""
    rows, n = h.shape
    q = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=h.device)
    scale = torch.empty(rows, dtype=torch.float32, device=h.device)
    per_program = 4
    _quantize_kernel[(triton.cdiv(rows, per_program),)](
        h,
        plan.counts,
        q,
        scale,
        N=n,
        N_P=triton.next_power_of_2(n),
        ROWS=per_program,
        num_warps=4 if n <= 1024 else 8,
    )
    return q, scale


@triton.jit
def _combine_kernel(
    rows_ptr,
    pos_ptr,
    weight_ptr,
    y_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(pos_ptr + token * K + k)
        weight = tl.load(weight_ptr + token * K + k).to(tl.float32)
        value = tl.load(rows_ptr + row.to(tl.int64) * H + cols, mask=inside & (row >= 0), other=0.0)
        # A skipped pair contributes nothing, whatever its weight is.
        acc += tl.where(row >= 0, weight, 0.0) * value.to(tl.float32)
    tl.store(y_ptr + token.to(tl.int64) * H + cols, acc.to(tl.bfloat16), mask=inside)


def combine(
    rows: torch.Tensor, topk_weights: torch.Tensor, pos: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
) -> None:
    """``out[t] = sum_k w[t, k] * rows[pos[t, k]]`` in float32, in the order of k; bf16 ``[T, H]``."""
    tokens, h = out.shape
    block = min(triton.next_power_of_2(h), 2048)
    _combine_kernel[(tokens, triton.cdiv(h, block))](
        rows,
        pos,
        topk_weights,
        out,
        H=h,
        K=topk_weights.shape[1],
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
