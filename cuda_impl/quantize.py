# SPDX-License-Identifier: Apache-2.0
"""Row quantisers: e4m3 codes by the formula of `common.numerics`, and f16 rows with exact power-of-two scales.

The second serves W8A16: e4m3 weights become f16 in one instruction a pair, bf16 in several, so activations go to
f16 as well. A row is first divided by a power of two that brings its maximum below 2**15 (exact; entries more than
2**29 below the maximum lose bits, far under f32 accumulation error) and the epilogue multiplies it back.
"""

from __future__ import annotations

import torch

from ..common.numerics import EPS, INV_E4M3_MAX
from ._runtime import cdiv, launch, next_power_of_2, tl, triton
from .device_numerics import encode_e4m3, to_f32

_EPS = tl.constexpr(float(EPS))
_INV_MAX = tl.constexpr(float(INV_E4M3_MAX))


@triton.jit
def _absmax(x, axis: tl.constexpr):
    """Largest magnitude; NaN wins, because its bits are the largest integer."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def _scale(absmax):
    return tl.where(absmax < _EPS, _EPS, absmax) * _INV_MAX


@triton.jit
def _reciprocal(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _codes(x, inv):
    q = x * inv
    q = tl.where(q > 448.0, 448.0, q)
    q = tl.where(q < -448.0, -448.0, q)
    return encode_e4m3(q)


@triton.jit
def _quantize_row_kernel(
    x_ptr, q_ptr, scale_ptr, static_ptr, bin_ptr, columns,
    STATIC: tl.constexpr, HAS_BINS: tl.constexpr, COLUMNS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if HAS_BINS:
        if tl.load(bin_ptr + row) < 0:
            return
    column = tl.arange(0, COLUMNS_PAD)
    mask = column < columns
    at = row.to(tl.int64) * columns + column
    x = to_f32(tl.load(x_ptr + at, mask=mask, other=0.0))
    if STATIC:
        scale = tl.load(static_ptr + tl.arange(0, 1))
    else:
        scale = _scale(_absmax(tl.reshape(x, [1, COLUMNS_PAD]), 1))
    inv = _reciprocal(scale)
    tl.store(q_ptr + at, tl.reshape(_codes(tl.reshape(x, [1, COLUMNS_PAD]), inv[:, None]), [COLUMNS_PAD]), mask=mask)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def _quantize_group_kernel(
    x_ptr, q_ptr, scale_ptr, bin_ptr, columns, groups,
    HAS_BINS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if HAS_BINS:
        if tl.load(bin_ptr + row) < 0:
            return
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    lane = tl.arange(0, GROUP_PAD)
    column = group[:, None] * GROUP + lane[None, :]
    mask = (column < columns) & (lane < GROUP)[None, :]
    at = row.to(tl.int64) * columns + column
    x = to_f32(tl.load(x_ptr + at, mask=mask, other=0.0))
    scale = _scale(_absmax(x, 1))
    tl.store(q_ptr + at, _codes(x, _reciprocal(scale)[:, None]), mask=mask)
    tl.store(scale_ptr + row.to(tl.int64) * groups + group, scale, mask=group < groups)


@triton.jit
def _f16_row_kernel(
    x_ptr, q_ptr, scale_ptr, bin_ptr, columns, HAS_BINS: tl.constexpr, COLUMNS_PAD: tl.constexpr
):
    row = tl.program_id(0)
    if HAS_BINS:
        if tl.load(bin_ptr + row) < 0:
            return
    column = tl.arange(0, COLUMNS_PAD)
    mask = column < columns
    at = row.to(tl.int64) * columns + column
    x = tl.reshape(to_f32(tl.load(x_ptr + at, mask=mask, other=0.0)), [1, COLUMNS_PAD])
    # Exponent field of the maximum, kept where 2**(field - 141) and its inverse are normal numbers.
    field = _absmax(x, 1).to(tl.int32, bitcast=True) >> 23
    field = tl.where(field < 15, 15, field)
    field = tl.where(field > 254, 254, field)
    scale = ((field - 14) << 23).to(tl.float32, bitcast=True)
    inverse = ((268 - field) << 23).to(tl.float32, bitcast=True)
    tl.store(q_ptr + at, tl.reshape((x * inverse[:, None]).to(tl.float16), [COLUMNS_PAD]), mask=mask)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


def _warps(columns_pad: int) -> int:
    return min(8, max(1, columns_pad // 512))


def quantize_rows(
    x: torch.Tensor,
    group: str | int,
    *,
    static_scale: torch.Tensor | None = None,
    pair_bin: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to e4m3.

    Args:
      x: [M, D] bf16 or f32.
      group: ``"token"``, ``"static"`` or a number of columns.
      static_scale: [1] f32, with ``"static"``.
      pair_bin: [M] int32; rows below 0 are left out (their codes and scales stay undefined).

    Returns:
      codes [M, D] uint8 (e4m3fn bits) and f32 scales [M, 1] or [M, ceil(D / group)].
    """
    rows, columns = x.shape
    if rows == 0:
        groups = cdiv(columns, group) if isinstance(group, int) else 1
        return x.new_empty((0, columns), dtype=torch.uint8), x.new_empty((0, groups), dtype=torch.float32)
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    bins = codes if pair_bin is None else pair_bin
    if isinstance(group, int):
        groups = cdiv(columns, group)
        scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
        group_pad = next_power_of_2(group)
        block_g = min(next_power_of_2(groups), max(1, 4096 // group_pad))
        launch(
            _quantize_group_kernel,
            (rows, cdiv(groups, block_g)),
            dict(x_ptr=x, q_ptr=codes, scale_ptr=scales, bin_ptr=bins, columns=columns, groups=groups),
            num_warps=_warps(block_g * group_pad),
            HAS_BINS=pair_bin is not None,
            GROUP=group,
            GROUP_PAD=group_pad,
            BLOCK_G=block_g,
        )
        return codes, scales
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    columns_pad = next_power_of_2(columns)
    launch(
        _quantize_row_kernel,
        (rows,),
        dict(
            x_ptr=x,
            q_ptr=codes,
            scale_ptr=scales,
            static_ptr=scales if static_scale is None else static_scale,
            bin_ptr=bins,
            columns=columns,
        ),
        num_warps=_warps(columns_pad),
        STATIC=group == "static",
        HAS_BINS=pair_bin is not None,
        COLUMNS_PAD=columns_pad,
    )
    return codes, scales


def scale_rows_f16(x: torch.Tensor, *, pair_bin: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [M, D] bf16 as f16 [M, D] times power-of-two scales [M, 1] f32; arguments as in `quantize_rows`."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=torch.float16, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    columns_pad = next_power_of_2(columns)
    launch(
        _f16_row_kernel,
        (rows,),
        dict(x_ptr=x, q_ptr=out, scale_ptr=scales, bin_ptr=out if pair_bin is None else pair_bin, columns=columns),
        num_warps=_warps(columns_pad),
        HAS_BINS=pair_bin is not None,
        COLUMNS_PAD=columns_pad,
    )
    return out, scales
