# SPDX-License-Identifier: Apache-2.0
"""Device functions that more than one Gluon kernel calls, and the quantiser's two constants.

The quantiser is the package's: ``s = max(absmax, EPS) * f32(1/448)``, ``q = e4m3(clip(x / s))`` with a correctly
rounded reciprocal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EPS = gl.constexpr(1e-10)
INV_FP8_MAX = gl.constexpr(1.0 / 448.0)


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and the parity to wait for there."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def reciprocal(v):
    """1 / v of a positive float32 to about two units in the last place, in two instructions (a division is ten)."""
    root = gl.rsqrt(v)
    return root * root


@gluon.jit
def _over(value, divisor, FAST: gl.constexpr):
    if FAST:
        return value * reciprocal(divisor)
    else:
        return gl.fdiv(value, divisor)


@gluon.jit
def glu(gate, up, ACTIVATION: gl.constexpr, FAST: gl.constexpr):
    """``act(gate) * up`` in float32; ACTIVATION is one of "silu", "gelu_tanh", "swigluoai".

    FAST divides in fewer instructions; where registers are short the longer division spills less.
    """
    if ACTIVATION == "silu":
        return _over(gate, 1.0 + gl.exp(-gate), FAST) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 0.5 * (1 + tanh(z)) is the logistic function of 2 z.
        return _over(gate, 1.0 + gl.exp(-2.0 * inner), FAST) * up
    else:
        gl.static_assert(ACTIVATION == "swigluoai")
        gate = gl.minimum(gate, 7.0)
        up = gl.minimum(gl.maximum(up, -7.0), 7.0)
        return _over(gate, 1.0 + gl.exp(-1.702 * gate), FAST) * (up + 1.0)
