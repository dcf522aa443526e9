# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 rows as Hopper's tensor cores sum them, on the host and bit for bit.

One FP8 instruction multiplies 32 columns. It aligns the 32 exact products, and what its accumulator held, to the
largest exponent among them, keeps 13 fractional bits of each (towards zero), adds, and keeps 13 fractional bits of the
sum. Every one of 122,880 sums of 32, 64 and 128 columns that an H200 gave equals what this file gives.

A kernel takes the product out of the accumulator after `every` columns and goes on in float32; in w13 that decides the
last bits of g, and with them now and then the FP8 code of a value of h. So `Recipe.fp8_sums` names it.
"""

from __future__ import annotations

import numpy as np

from .numerics import BLOCK

INSTRUCTION = 32  # columns of one FP8 product
FRACTION = 13  # fractional bits that survive alignment, and a sum
INTERVALS = (32, 64, 128)
_LEAST = -18  # exponent of the smallest product of two e4m3 values
_SUBNORMAL = -6  # a subnormal has the exponent of the smallest normal number
_ZERO = -1000
_CHUNK = 1 << 23  # products held at once


def _exponents(v: np.ndarray) -> np.ndarray:
    """floor(log2 |v|) of float32 values, int16; far below any e4m3 value's for zeros."""
    _, e = np.frexp(np.abs(v))
    return np.where(v == 0, _ZERO, e - 1).astype(np.int16)


def _code_exponents(v: np.ndarray) -> np.ndarray:
    """The same of e4m3 values as the hardware takes them."""
    return np.maximum(_exponents(v), np.where(v == 0, _ZERO, _SUBNORMAL).astype(np.int16))


def _power(exponent: np.ndarray) -> np.ndarray:
    """2 to an int16 exponent, float32."""
    return ((exponent.astype(np.int32) + 127) << 23).view(np.float32)


def _instruction(
    a: np.ndarray, b: np.ndarray, ea: np.ndarray, eb: np.ndarray, held: np.ndarray | None
) -> np.ndarray:
    """One instruction's sum, f32 ``[R, N]``, of ``a [R, k]`` and ``b [N, k]`` and what the accumulator held."""
    top = (ea[:, None] + eb[None]).max(-1)
    if held is not None:
        top = np.maximum(top, _exponents(held))
    top = np.maximum(top, _LEAST)
    # Exact in float32: a product has 8 bits, an aligned one 16, a sum of 33 of them 21.
    scale = _power(FRACTION - top)
    terms = a[:, None] * b[None]
    terms *= scale[..., None]
    total = np.trunc(terms, out=terms).sum(-1)
    if held is not None:
        total += np.trunc(held * scale)
    total *= _power(top - FRACTION)
    keep = np.maximum(_exponents(total), 2 * _LEAST)
    return np.trunc(total * _power(FRACTION - keep)) * _power(keep - FRACTION)


def short_sums(a: np.ndarray, b: np.ndarray, every: int) -> np.ndarray:
    """``a @ b.T`` over at most 128 columns.

    Args:
      a: e4m3 ``[R, K]``, or float32 holding e4m3 values; K <= 128.
      b: the same, ``[N, K]``.
      every: columns after which the product leaves the accumulator, one of INTERVALS; what left is added in float32,
        neighbours first.

    Returns:
      f32 ``[R, N]``. A row with NaN gives NaN.

    Raises:
      ValueError: more than 128 columns, or another interval.
    """
    if every not in INTERVALS:
        raise ValueError(f"every: got {every!r}, want one of {INTERVALS}")
    if a.shape[-1] > BLOCK or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a, b: got {a.shape[-1]} and {b.shape[-1]} columns, want as many in both, at most {BLOCK}")
    a, b = a.astype(np.float32), b.astype(np.float32)
    out = np.empty((len(a), len(b)), np.float32)
    rows = max(1, _CHUNK // (max(len(b), 1) * INSTRUCTION))
    with np.errstate(invalid="ignore"):
        eb = _code_exponents(b)
        for first in range(0, len(a), rows):
            part = a[first : first + rows]
            ea = _code_exponents(part)
            left = []
            for start in range(0, a.shape[1], every):
                held = None
                for k in range(start, min(start + every, a.shape[1]), INSTRUCTION):
                    run = slice(k, k + INSTRUCTION)
                    held = _instruction(part[:, run], b[:, run], ea[:, run], eb[:, run], held)
                left.append(held)
            while len(left) > 1:
                pairs = [left[i : i + 2] for i in range(0, len(left), 2)]
                left = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]  # type: ignore[operator]
            out[first : first + rows] = left[0]
    return out
