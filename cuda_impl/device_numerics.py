# SPDX-License-Identifier: Apache-2.0
"""Conversions and activations inside kernels, the same on every device and under the interpreter.

e4m3 is encoded and decoded by integer arithmetic: exact on devices without the format (8.0, 8.6), equal to the
hardware's round-to-nearest-even on the others, and independent of the interpreter's own casts, which truncate.
"""

from __future__ import annotations

from ._runtime import INTERPRET, tl, triton


@triton.jit
def to_f32(x):
    """bf16, f16 or f32 to f32, exactly."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:
            y = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            y = x.to(tl.float32)
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def to_bf16(x):
    """f32 to bf16, to nearest even; NaN stays NaN."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, (bits >> 16) | 0x40, rounded)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(tl.bfloat16)
    return y


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """f32 to bf16, f16 or f32."""
    if dtype == tl.bfloat16:
        y = to_bf16(x)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def encode_e4m3(x):
    """f32 with ``|x| <= 448`` or NaN to an e4m3fn byte, to nearest even."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    mag = bits & 0x7FFFFFFF
    # Exponent bias 127 - 7 = 120, three mantissa bits kept of 23.
    normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - 960
    # Below 2**-6 the step is 2**-9, the distance of two f32 numbers next to 2**14.
    shifted = mag.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(mag < 0x3C800000, subnormal, normal)
    code = tl.where(mag > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """An e4m3fn byte to f16, exactly: the bits moved up stand for the value times 2**-8."""
    wide = code.to(tl.uint16)
    mag = wide & 0x7F
    bits = ((wide & 0x80) << 8) | (mag << 7)
    bits = tl.where(mag == 0x7F, 0x7E00, bits).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, name: tl.constexpr):
    """The elementwise activations of `common.activations`, in f32."""
    if name == "silu":
        y = x * tl.sigmoid(x)
    elif name == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif name == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(name == "relu2", "unknown activation")
        positive = tl.where(x < 0, 0.0, x)
        y = positive * positive
    return y


@triton.jit
def activate_gated(gate, up, name: tl.constexpr):
    """``act(gate) * up``; comparisons rather than min and max, which drop NaN on the device."""
    if name == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, up)
        up = tl.where(up < -7.0, -7.0, up)
        y = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        y = activate(gate, name) * up
    return y
