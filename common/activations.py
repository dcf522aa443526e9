# SPDX-License-Identifier: Apache-2.0
"""Expert activations, by vLLM's names, as one table that every platform reads its semantics from.

All take float32 (or float64) pre-activations. The gated ones combine gate and up; a non-gated expert applies the
same function to its single half. `swigluoai` is gpt-oss's: gate clamped above at 7, up clamped to [-7, 7],
gate * sigmoid(1.702 * gate) * (up + 1); it has no non-gated form.
"""

from __future__ import annotations

import math

import numpy as np

SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2")
# relu2 (Nemotron) exists only without a gate; swigluoai only with one.
GATED = ("silu", "gelu", "gelu_tanh", "swigluoai")
NON_GATED = ("silu", "gelu", "gelu_tanh", "relu2")


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a non-positive number only, so neither side overflows.
    z = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + z), z / (1 + z)).astype(x.dtype)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x.astype(np.float64)), np.float64)


def _one(name: str, x: np.ndarray) -> np.ndarray:
    dtype = x.dtype
    if name == "silu":
        return x * _sigmoid(x)
    if name == "gelu":
        return (0.5 * x * (1 + _erf(x / math.sqrt(2)))).astype(dtype)
    if name == "gelu_tanh":
        inner = dtype.type(math.sqrt(2 / math.pi)) * (x + dtype.type(0.044715) * x * x * x)
        return dtype.type(0.5) * x * (1 + np.tanh(inner))
    if name == "relu2":
        return np.square(np.maximum(x, 0))
    raise ValueError(f"activation: {name!r} has no elementwise form")


def supports(name: str, is_act_and_mul: bool) -> bool:
    """Whether the activation exists in the gated (or non-gated) form."""
    return name in (GATED if is_act_and_mul else NON_GATED)


def apply_activation(name: str, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """``act(gate) * up``, or ``act(gate)`` where `up` is None; same shape and dtype as `gate`.

    Raises:
      ValueError: the activation has no such form.
    """
    if not supports(name, up is not None):
        form = "gated" if up is not None else "non-gated"
        raise ValueError(f"activation: got {name!r}, which has no {form} form")
    with np.errstate(invalid="ignore", over="ignore"):
        if up is None:
            return _one(name, gate)
        if name == "swigluoai":
            gate = np.minimum(gate, gate.dtype.type(SWIGLUOAI_LIMIT))
            up = np.clip(up, -SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
            return gate * _sigmoid(gate * gate.dtype.type(SWIGLUOAI_ALPHA)) * (up + 1)
        return _one(name, gate) * up
