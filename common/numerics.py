# SPDX-License-Identifier: Apache-2.0
"""FP8 on the host: one quantiser, spelled out, that every platform can match bit for bit.

Two libraries that both "divide by amax/448" do not agree: XLA rewrites the division by a constant into a multiply
and ``x / s`` into ``x * (1 / s)``, torch performs real divisions, and more than half of the scales then differ in
their last bit. So the formula is fixed here, in float32, with one rounding a step:

    s   = max(absmax, EPS) * f32(1 / 448)
    inv = 1 / s                               (correctly rounded)
    q   = e4m3fn(clip(x * inv, -448, 448))

Clip before the cast, always: casts of larger values give NaN in some libraries and versions and 448 in others, and
rounding alone pushes ``x * inv`` past 448 in a quarter of the rows. A row of zeros keeps ``s = EPS / 448`` and gives
zeros. A NaN makes its own row's scale NaN, and with it that row's codes, and stays there. Infinity gives an infinite
scale, hence an inverse of zero: finite entries of such a row become zero and the infinite ones NaN.

The same four lines exist in JAX, torch and Triton; tests compare their codes on all 65,536 bfloat16 inputs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

E4M3_MAX = 448.0
INV_E4M3_MAX = np.float32(1.0 / 448.0)
# Small enough to vanish beside any real activation, large enough that 1 / s stays finite in float32.
EPS = np.float32(1e-10)
BLOCK = 128


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def all_finite(x: np.ndarray) -> bool:
    """Whether no element is NaN or infinite; works through big arrays by their first axis to keep temporaries small."""
    if x.ndim > 2:
        return all(map(all_finite, x))
    if x.size == 0:
        return True
    if x.dtype == E4M3:
        return int((x.view(np.uint8) & 0x7F).max()) != 0x7F
    if x.dtype == BF16:
        return int((x.view(np.uint16) & 0x7F80).max()) != 0x7F80
    return bool(np.isfinite(x.astype(np.float32, copy=False)).all())


def _group_absmax(x: np.ndarray, group: int) -> np.ndarray:
    """|x| maxima over runs of `group` along the last axis (the last run may be short); NaN propagates."""
    starts = np.arange(0, x.shape[-1], group)
    return np.maximum.reduceat(np.abs(x), starts, axis=-1)


def fp8_scale(absmax: np.ndarray) -> np.ndarray:
    """The scale of a group from its absolute maximum: ``max(absmax, EPS) * f32(1/448)``, float32."""
    return np.maximum(absmax.astype(np.float32), EPS) * INV_E4M3_MAX


def cast_fp8(x: np.ndarray, inv: np.ndarray | np.float32) -> np.ndarray:
    """``e4m3fn(clip(x * inv, -448, 448))`` in float32; `inv` broadcasts."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.clip(x.astype(np.float32) * inv, -E4M3_MAX, E4M3_MAX).astype(E4M3)


def quantize_fp8(x: np.ndarray, group: str | int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise rows dynamically.

    Args:
      x: ``[..., D]``, any float dtype; read as float32.
      group: ``"token"`` for one scale a row, or a number of columns (128) for one scale a run of columns; the
        last run may be shorter.

    Returns:
      codes ``[..., D]`` float8_e4m3fn, and scales float32 ``[..., 1]`` or ``[..., ceil(D / group)]``.

    Raises:
      TypeError: `x` is not a float array.
      ValueError: an unknown group.
    """
    if not isinstance(x, np.ndarray) or (x.dtype.kind != "f" and x.dtype != BF16):
        raise TypeError(f"x: got {getattr(x, 'dtype', type(x).__name__)}, want a float array")
    if x.ndim < 1 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {list(x.shape)}, want at least one column")
    if group == "token":
        width = x.shape[-1]
    elif isinstance(group, (int, np.integer)) and not isinstance(group, bool) and group > 0:
        width = int(group)
    else:
        raise ValueError(f"group: got {group!r}, want 'token' or a positive number of columns such as 128")
    x32 = x.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scales = fp8_scale(_group_absmax(x32, width))
        inv = np.float32(1.0) / scales
        return cast_fp8(x32, expand_groups(inv, width, x.shape[-1])), scales


def quantize_fp8_static(x: np.ndarray, scale: float | np.float32 | np.ndarray) -> np.ndarray:
    """Quantise with a scale known at load (one for the layer); codes shaped like `x`."""
    return cast_fp8(x, np.float32(1.0) / np.asarray(scale, np.float32))


def expand_groups(scales: np.ndarray, group: int, width: int) -> np.ndarray:
    """Repeat each scale over its run of columns: ``[..., G]`` to ``[..., width]``."""
    if scales.shape[-1] == 1:
        return scales
    return np.repeat(scales, group, axis=-1)[..., :width]


def dequantize_rows(codes: np.ndarray, scales: np.ndarray, group: str | int) -> np.ndarray:
    """``codes * scales`` in float32, the inverse of `quantize_fp8`."""
    width = codes.shape[-1] if group == "token" else int(group)
    return codes.astype(np.float32) * expand_groups(scales, width, codes.shape[-1])


def quantize_weight_channel(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One scale an output row: ``[..., N, K]`` to codes and float32 scales ``[..., N]``."""
    codes, scales = quantize_fp8(w, "token")
    return codes, scales[..., 0]


def quantize_weight_block(w: np.ndarray, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """One scale a ``block x block`` tile: ``[..., N, K]`` to codes and scales ``[..., ceil(N/b), ceil(K/b)]``."""
    w32 = w.astype(np.float32)
    absmax = np.maximum.reduceat(_group_absmax(w32, block), np.arange(0, w.shape[-2], block), axis=-2)
    scales = fp8_scale(absmax)
    inv = np.float32(1.0) / scales
    return cast_fp8(w32, expand_blocks(inv, w.shape[-2], w.shape[-1], block)), scales


def quantize_weight_tensor(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One scale a matrix: ``[..., N, K]`` to codes and scales ``[...]``."""
    w32 = w.astype(np.float32)
    scales = fp8_scale(np.abs(w32).max(axis=(-2, -1)))
    inv = np.float32(1.0) / scales
    return cast_fp8(w32, inv[..., None, None]), scales


def expand_blocks(scales: np.ndarray, rows: int, cols: int, block: int = BLOCK) -> np.ndarray:
    """Block scales to one a weight: ``[..., ceil(rows/b), ceil(cols/b)]`` to ``[..., rows, cols]``."""
    return np.repeat(np.repeat(scales, block, axis=-2)[..., :rows, :], block, axis=-1)[..., :cols]


def ue8m0_ceil(scales: np.ndarray) -> np.ndarray:
    """The smallest power of two that is at least each positive normal scale, by the exponent bits.

    ``exp2(ceil(log2(s)))`` is not exact: some libraries get most exact powers of two wrong. Rounding to the
    nearest power instead of up would clip several per cent of a block's codes.
    """
    bits = np.ascontiguousarray(scales, dtype=np.float32).view(np.uint32)
    exponent = (bits >> 23) & 0xFF
    exponent = exponent + ((bits & 0x7FFFFF) != 0)
    return (exponent.astype(np.uint32) << 23).view(np.float32)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """E8M0 bytes to float32 powers of two, ``2 ** (byte - 127)``; byte 0 is 2^-127 and byte 255 is NaN."""
    raw = codes.view(np.uint8) if codes.dtype == E8M0 else codes.astype(np.uint8)
    exponent = np.where(raw == 255, 0, raw.astype(np.int32) - 127)
    return np.where(raw == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponent))


def e4m3fn_to_fnuz(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Re-read e4m3fn bytes as e4m3fnuz: same bytes, doubled scales, and -0 (0x80, NaN in fnuz) made 0.

    Every finite fnuz code is worth half its fn code, so no value changes. NaN codes (0x7F, 0xFF) would become
    finite and are refused.

    Raises:
      ValueError: a NaN code.
    """
    raw = codes.view(np.uint8)
    if np.any((raw & 0x7F) == 0x7F):
        raise ValueError("codes: got NaN (0x7F or 0xFF), want finite e4m3fn codes")
    raw = np.where(raw == 0x80, np.uint8(0), raw)
    return raw.view(E4M3FNUZ), scales * np.float32(2)


def bf16_round(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16 (nearest even) and return float32."""
    return x.astype(BF16).astype(np.float32)
