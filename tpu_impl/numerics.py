# SPDX-License-Identifier: Apache-2.0
"""The row quantiser and the activations in JAX: one copy, called inside the kernel and outside it.

The formula is `common.numerics`' own, so codes agree with the host's on every input.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from ..common.activations import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from ..common.numerics import E4M3_MAX, EPS, INV_E4M3_MAX


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One scale a row: float32 ``[n, D]`` to e4m3fn codes ``[n, D]`` and float32 scales ``[n, 1]``."""
    scale = fp8_scale(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return cast_rows(x, 1.0 / scale), scale


def fp8_scale(absmax: jax.Array) -> jax.Array:
    """The scale of a group from its absolute maximum."""
    return jnp.maximum(absmax, EPS) * INV_E4M3_MAX


def cast_rows(x: jax.Array, inv: jax.Array) -> jax.Array:
    """``e4m3fn(clip(x * inv))``, the clip before the cast."""
    return jnp.clip(x * inv, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def e4m3_bits(x: jax.Array) -> jax.Array:
    """int32 codes of ``e4m3fn(x)``, for a float32 `x` that rounds to at most 448: the cast's own bits.

    For chips without the cast. Adding 2^20 times a number's power of two (that of the least normal number, for
    subnormal ones) rounds it to a code's three mantissa bits, ties to even, and leaves how many of its last places the
    number has in the low bits of the sum.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
    # A maximum of floats is one instruction where that of integers is two.
    power = jnp.maximum(lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32), 2.0**-6)
    power = lax.bitcast_convert_type(power, jnp.int32)
    unit = power + (20 << 23)
    places = lax.bitcast_convert_type(size + lax.bitcast_convert_type(unit, jnp.float32), jnp.int32) - unit
    code = places + (lax.shift_right_logical(power, 20) - ((127 - 6) << 3))
    return jnp.where(size == size, code, 0x7F) | (lax.shift_right_logical(bits, 24) & 0x80)


def apply_activation(name: str, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    """``act(gate) * up`` (or ``act(gate)``) in float32; names and semantics of `common.activations`."""
    if name == "swigluoai":
        if up is None:
            raise ValueError("activation: got 'swigluoai' for non-gated experts, which has no such form")
        gate = jnp.minimum(gate, SWIGLUOAI_LIMIT)
        up = jnp.clip(up, -SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
        return gate * jax.nn.sigmoid(gate * SWIGLUOAI_ALPHA) * (up + 1.0)
    if name == "silu":
        out = gate * jax.nn.sigmoid(gate)
    elif name == "gelu":
        out = 0.5 * gate * (1.0 + lax.erf(gate * (1.0 / math.sqrt(2.0))))
    elif name == "gelu_tanh":
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)
        out = 0.5 * gate * (1.0 + jnp.tanh(inner))
    elif name == "relu2":
        positive = jnp.maximum(gate, 0.0)
        out = positive * positive
    else:
        raise ValueError(f"activation: got {name!r}, want silu, gelu, gelu_tanh, swigluoai or relu2")
    return out if up is None else out * up


def pack_rows(x: jax.Array) -> jax.Array:
    """bf16 ``[T, H]`` to uint32 ``[T, H/256, 128]``: word j holds columns j (low half) and j + H/2 (high half).

    A single row of this can be copied by DMA, which a row of 16-bit data cannot.
    """
    tokens, hidden = x.shape
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    words = bits[:, : hidden // 2] | (bits[:, hidden // 2 :] << 16)
    return words.reshape(tokens, hidden // 256, 128)


def unpack_fp8_rows(words: jax.Array) -> list[jax.Array]:
    """uint32 ``[n, H/4]`` (`pack_kernel`) to the row's four quarters, e4m3 ``[n, H/4]`` each."""
    quarters = []
    for b in range(4):
        byte = ((words >> (8 * b)) & jnp.uint32(0xFF)).astype(jnp.int32).astype(jnp.int8)
        quarters.append(lax.bitcast_convert_type(byte, jnp.float8_e4m3fn))
    return quarters


def unpack_rows(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint32 ``[n, H/2]`` to the row's two halves, float32 ``[n, H/2]`` each, exactly."""
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    high = lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return low, high


def split_bf16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 as the sum of two bf16 terms, to 18 bits: one term would flip a few per cent of later FP8 codes.

    The high term is rounded on its bits, not cast, because XLA may elide a cast to bf16 and back.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    high = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
