# SPDX-License-Identifier: Apache-2.0
"""Passes over whole rows: permute and encode the input, quantise the hidden rows, sum the experts' results."""

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
def encode_row(v, MODE: tl.constexpr):
    """One f32 row ``[GROUPS, 128]`` as MODE says: "group" and "token" fp8, "fp16" scaled by a power of two.

    Returns:
      codes ``[GROUPS, 128]`` and scales ``[GROUPS]`` (all equal except for "group").
    """
    absmax = tl.max(tl.abs(v), axis=1)
    if MODE != "group":
        absmax = tl.zeros_like(absmax) + tl.max(absmax, axis=0)
    if MODE == "fp16":
        # The largest magnitude lands in [2^14, 2^15): a power of two, so bfloat16's eight bits survive.
        exponent = tl.maximum((absmax.to(tl.int32, bitcast=True) >> 23) - 14, 1)
        inv = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        return (v * inv[:, None]).to(tl.float16), (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = fp8_scale(absmax)
        inv = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        # The conversion saturates at 448 and keeps NaN.
        return (v * inv[:, None]).to(tl.float8e4nv), scale


@triton.jit
def store_scale(scale_ptr, row, scale, GROUPS: tl.constexpr, MODE: tl.constexpr):
    """Write a row's scales: ``[rows, GROUPS]`` for "group", else ``[rows]``."""
    if MODE == "group":
        group = tl.arange(0, scale.shape[0])
        tl.store(scale_ptr + row * GROUPS + group, scale, mask=group < GROUPS)
    else:
        tl.store(scale_ptr + row, tl.max(scale, axis=0))


def row_buffers(rows: int, d: int, mode: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised codes ``[rows, d]`` and scales of the mode."""
    dtype = torch.float16 if mode == "fp16" else torch.float8_e4m3fn
    shape = (rows, triton.cdiv(d, 128)) if mode == "group" else (rows,)
    return torch.empty((rows, d), dtype=dtype, device=device), torch.empty(shape, dtype=torch.float32, device=device)


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
    MODE: tl.constexpr,
    GROUPS_P: tl.constexpr,
):
    """One program a token: read and encode the row once, write it to every place its pairs have."""
    GROUPS: tl.constexpr = (H + 127) // 128
    token = tl.program_id(0)
    cols = tl.arange(0, GROUPS_P)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = cols < H
    x = tl.load(x_ptr + token.to(tl.int64) * H + cols, mask=inside, other=0.0).to(tl.float32)
    q, scale = encode_row(x, MODE)
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
            store_scale(scale_ptr, row, scale, GROUPS, MODE)
            tl.store(row_token_ptr + row, token)
            if SLOTS > 0:
                tl.store(row_slot_ptr + row, slot)
            tl.store(pos_ptr + pair, row)
        else:
            tl.store(pos_ptr + pair, -1)


def scatter_rows(
    x: torch.Tensor, topk: int, plan: RowPlan, *, mode: str, slots: torch.Tensor | None, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode ``x [T, H]`` bf16 and write each token to its rows; completes `plan`.

    Args:
      mode: "group" (fp8, a scale a 128 columns), "token" (fp8, one a row) or "fp16" (a power of two a row).

    Returns:
      codes ``[rows, H]`` and f32 scales ``[rows, ceil(H/128)]`` ("group") or ``[rows]``; padding rows are undefined.
    """
    tokens, h = x.shape
    q, scale = row_buffers(plan.rows, h, mode, x.device)
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
        MODE=mode,
        GROUPS_P=triton.next_power_of_2(triton.cdiv(h, 128)),
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
    tl.store(y_ptr + token.to(tl.int64) * H + cols, acc.to(y_ptr.dtype.element_ty), mask=inside)


def combine(
    rows: torch.Tensor, topk_weights: torch.Tensor, pos: torch.Tensor, out: torch.Tensor, *, pdl: bool = False
) -> None:
    """``out[t] = sum_k w[t, k] * rows[pos[t, k]]`` in float32, in the order of k; ``[T, H]``."""
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


@triton.jit
def _slots_kernel(ids_ptr, slot_ids_ptr, out_ptr, tokens, SLOTS: tl.constexpr, S_P: tl.constexpr, BLOCK: tl.constexpr):
    gdc_wait()
    gdc_launch_dependents()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, S_P)
    adapter = tl.load(ids_ptr + token, mask=token < tokens, other=-1).to(tl.int32)
    held = tl.load(slot_ids_ptr + slot, mask=slot < SLOTS, other=-1).to(tl.int32)
    match = (adapter[:, None] == held[None, :]) & (adapter >= 0)[:, None]
    tl.store(out_ptr + token, tl.max(tl.where(match, slot[None, :], -1), axis=1), mask=token < tokens)


def slots_of(adapter_ids: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
    """Slot of each token's adapter, int32 ``[T]``: where ``slot_ids [S]`` holds its id, -1 for base or unknown ids."""
    out = torch.empty(adapter_ids.shape, dtype=torch.int32, device=adapter_ids.device)
    slots = slot_ids.shape[0]
    _slots_kernel[(triton.cdiv(adapter_ids.shape[0], 256),)](
        adapter_ids, slot_ids, out, adapter_ids.shape[0], SLOTS=slots, S_P=triton.next_power_of_2(slots), BLOCK=256,
        launch_pdl=True,
    )  # fmt: skip
    return out
