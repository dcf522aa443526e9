# SPDX-License-Identifier: Apache-2.0
"""How two results are compared. All in float64; NaN never passes.

A whole-output tolerance hides two kinds of error that matter here: one bad row among thousands, and a wrong LoRA
delta beside a large base output. So the worst row and the delta are judged on their own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np


def _f64(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def rel_l2(got: np.ndarray, want: np.ndarray) -> float:
    """``|got - want| / |want|``; 0 where both are zero; NaN or infinity in `got` gives infinity."""
    g, w = _f64(got), _f64(want)
    if g.shape != w.shape:
        raise ValueError(f"got: shape {list(g.shape)}, want {list(w.shape)}")
    if not np.isfinite(g).all():
        return float("inf")
    norm, err = float(np.linalg.norm(w)), float(np.linalg.norm(g - w))
    return err / norm if norm > 0 else (0.0 if err == 0 else float("inf"))


def worst_row(got: np.ndarray, want: np.ndarray) -> float:
    """The largest relative L2 of one row ``[T, H]``; rows that should be zero count by their absolute error."""
    g, w = _f64(got), _f64(want)
    if g.shape != w.shape:
        raise ValueError(f"got: shape {list(g.shape)}, want {list(w.shape)}")
    if g.size == 0:
        return 0.0
    if not np.isfinite(g).all():
        return float("inf")
    norm = np.linalg.norm(w, axis=-1)
    err = np.linalg.norm(g - w, axis=-1)
    return float(np.max(np.where(norm > 0, err / np.where(norm > 0, norm, 1), err)))


def cosine(got: np.ndarray, want: np.ndarray) -> float:
    """Cosine of the two flattened arrays; 1 where both are zero, NaN-free."""
    g, w = _f64(got).ravel(), _f64(want).ravel()
    if not np.isfinite(g).all():
        return -1.0
    denom = float(np.linalg.norm(g) * np.linalg.norm(w))
    if denom == 0:
        return 1.0 if not g.any() and not w.any() else 0.0
    return float(g @ w / denom)


def bitwise_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Same dtype, shape and bytes (so -0 differs from 0, and NaN equals itself)."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@dataclass(frozen=True)
class Comparison:
    """`compare`'s figures."""

    rel_l2: float
    worst_row: float
    cosine: float
    non_finite: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def compare(got: np.ndarray, want: np.ndarray) -> Comparison:
    """All figures of one pair of ``[T, H]`` results."""
    return Comparison(
        rel_l2(got, want), worst_row(got, want), cosine(got, want), int((~np.isfinite(_f64(got))).sum())
    )
