# SPDX-License-Identifier: Apache-2.0
"""Canonical weights and adapters of one layer, on the host, as every backend receives them.

Backends transform these once at load into their own layout; nothing here depends on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .checks import check_array, check_choice, check_int
from .config import MAX_LORA_RANK, FusedMoEConfig
from .numerics import (
    BF16,
    BLOCK,
    E4M3,
    cdiv,
    expand_blocks,
    quantize_weight_block,
    quantize_weight_channel,
    quantize_weight_tensor,
)

SCHEMES = ("block", "channel", "tensor", "bf16")


def _check_finite(label: str, value: np.ndarray) -> None:
    """Raise at the first non-finite value; one leading slice at a time, so that no mask of the whole is made."""
    for i, part in enumerate(value if value.ndim > 1 else value[None]):
        if value.dtype == E4M3:
            bad = (part.view(np.uint8) & 0x7F) == 0x7F
        else:
            bad = ~np.isfinite(part.astype(np.float32, copy=False))
        if bad.any():
            where = tuple(int(j) for j in np.unravel_index(int(np.argmax(bad)), bad.shape))
            where = (i, *where) if value.ndim > 1 else where
            raise ValueError(
                f"{label}: got {int(bad.sum())} non-finite values in slice {i}, the first at {where}; want all finite"
            )


def block_scale_shape(rows: int, cols: int, halves: int) -> tuple[int, int]:
    """Shape of a matrix's [128, 128] scales; gate and up halves keep separate block rows."""
    return halves * cdiv(rows // halves, BLOCK), cdiv(cols, BLOCK)


@dataclass(frozen=True, eq=False)
class MoEWeights:
    """One layer's experts.

    Attributes:
      scheme: ``"block"``, ``"channel"``, ``"tensor"`` or ``"bf16"``.
      w13: ``[E, 2I, H]`` gate rows then up rows (``[E, I, H]`` for non-gated experts), float8_e4m3fn or bfloat16.
      w2: ``[E, H, I]``, same dtype.
      w13_scale: float32; tensor ``[E]`` or ``[E, 2]`` (gate, up), channel ``[E, 2I]``,
        block ``[E, 2 * ceil(I/128), ceil(H/128)]``; None for bf16.
      w2_scale: float32; tensor ``[E]``, channel ``[E, H]``, block ``[E, ceil(H/128), ceil(I/128)]``.
      w13_bias, w2_bias: float32 ``[E, 2I]`` and ``[E, H]``, both or neither.
      w13_input_scale, w2_input_scale: static activation scales of the layer (0-d or ``[1]`` or ``[E]``, of which
        the largest counts, as in vLLM); both or neither; tensor scheme only.

    Scales must be positive and finite and every weight finite. A `MoEWeights` that exists has been checked.
    """

    scheme: str
    w13: np.ndarray
    w2: np.ndarray
    w13_scale: np.ndarray | None = None
    w2_scale: np.ndarray | None = None
    w13_bias: np.ndarray | None = None
    w2_bias: np.ndarray | None = None
    w13_input_scale: np.ndarray | None = None
    w2_input_scale: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, SCHEMES)
        dtype = BF16 if self.scheme == "bf16" else E4M3
        check_array("w13", self.w13, shape=(None, None, None), dtypes=(dtype,))
        num_experts, rows, hidden = self.w13.shape
        check_array("w2", self.w2, shape=(num_experts, hidden, None), dtypes=(dtype,))
        inter = self.w2.shape[2]
        if rows not in (inter, 2 * inter):
            raise ValueError(
                f"w13: got shape {list(self.w13.shape)} with w2 {list(self.w2.shape)}, want "
                f"[{num_experts}, {2 * inter}, {hidden}] (gated) or [{num_experts}, {inter}, {hidden}]"
            )
        if min(num_experts, hidden, inter) < 1:
            raise ValueError(f"w13: got shape {list(self.w13.shape)}, want no empty dimension")
        _check_finite("w13", self.w13)
        _check_finite("w2", self.w2)
        self._check_scales(num_experts, rows, hidden, inter)
        if (self.w13_bias is None) != (self.w2_bias is None):
            raise ValueError("w2_bias: got one of w13_bias and w2_bias, want both or neither")
        if self.w13_bias is not None and self.w2_bias is not None:
            check_array("w13_bias", self.w13_bias, shape=(num_experts, rows), dtypes=(np.float32, BF16))
            check_array("w2_bias", self.w2_bias, shape=(num_experts, hidden), dtypes=(np.float32, BF16))
            _check_finite("w13_bias", self.w13_bias)
            _check_finite("w2_bias", self.w2_bias)
        self._check_input_scales(num_experts)

    def _check_scales(self, num_experts: int, rows: int, hidden: int, inter: int) -> None:
        halves = rows // inter
        want: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
            "tensor": ([(num_experts,), (num_experts, halves)], [(num_experts,)]),
            "channel": ([(num_experts, rows)], [(num_experts, hidden)]),
            "block": (
                [(num_experts, *block_scale_shape(rows, hidden, halves))],
                [(num_experts, *block_scale_shape(hidden, inter, 1))],
            ),
            "bf16": ([], []),
        }
        for label, scale, shapes in (
            ("w13_scale", self.w13_scale, want[self.scheme][0]),
            ("w2_scale", self.w2_scale, want[self.scheme][1]),
        ):
            if not shapes:
                if scale is not None:
                    raise ValueError(f"{label}: got an array with scheme 'bf16', want None")
                continue
            text = " or ".join(str(list(s)) for s in shapes)
            if scale is None:
                raise ValueError(f"{label}: got None with scheme {self.scheme!r}, want float32 {text}")
            check_array(label, scale, dtypes=(np.float32,))
            if scale.shape not in shapes:
                raise ValueError(f"{label}: got shape {list(scale.shape)} with scheme {self.scheme!r}, want {text}")
            _check_finite(label, scale)
            if not (scale > 0).all():
                raise ValueError(f"{label}: got values <= 0, want positive scales")

    def _check_input_scales(self, num_experts: int) -> None:
        if (self.w13_input_scale is None) != (self.w2_input_scale is None):
            raise ValueError("w2_input_scale: got one of w13_input_scale and w2_input_scale, want both or neither")
        for label in ("w13_input_scale", "w2_input_scale"):
            scale = getattr(self, label)
            if scale is None:
                continue
            if self.scheme != "tensor":
                raise ValueError(f"{label}: got an array with scheme {self.scheme!r}, want it only with 'tensor'")
            check_array(label, scale, dtypes=(np.float32,))
            if scale.shape not in ((), (1,), (num_experts,)):
                raise ValueError(f"{label}: got shape {list(scale.shape)}, want [], [1] or [{num_experts}]")
            _check_finite(label, scale)
            if not (scale > 0).all():
                raise ValueError(f"{label}: got values <= 0, want positive scales")

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_dim(self) -> int:
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2]

    @property
    def is_act_and_mul(self) -> bool:
        return self.w13.shape[1] == 2 * self.intermediate_size

    @property
    def has_static_input(self) -> bool:
        return self.w13_input_scale is not None

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and biases."""
        parts = (self.w13, self.w2, self.w13_scale, self.w2_scale, self.w13_bias, self.w2_bias)
        return sum(p.nbytes for p in parts if p is not None)

    def take(self, experts: np.ndarray) -> MoEWeights:
        """The experts at these indices, in this order (a rank's share)."""

        def cut(a: np.ndarray | None) -> np.ndarray | None:
            return None if a is None else a[experts]

        def whole(a: np.ndarray | None) -> np.ndarray | None:
            # A static activation scale belongs to the layer: its maximum, before experts are cut away.
            return None if a is None else np.asarray(a.max(), np.float32)

        return MoEWeights(
            self.scheme,
            self.w13[experts],
            self.w2[experts],
            cut(self.w13_scale),
            cut(self.w2_scale),
            cut(self.w13_bias),
            cut(self.w2_bias),
            whole(self.w13_input_scale),
            whole(self.w2_input_scale),
        )

    def channel_scales(self) -> tuple[np.ndarray, np.ndarray]:
        """Tensor scales broadcast to one a row, so that a kernel needs only the channel form; bits unchanged.

        Returns:
          float32 ``[E, rows of w13]`` and ``[E, H]``.

        Raises:
          ValueError: block or bf16 weights have no such form.
        """
        if self.scheme == "channel":
            return self.w13_scale, self.w2_scale  # type: ignore[return-value]
        if self.scheme != "tensor":
            raise ValueError(f"scheme: got {self.scheme!r}, want 'channel' or 'tensor'")
        s13 = np.asarray(self.w13_scale)
        s13 = s13[:, None] if s13.ndim == 1 else s13
        rows = self.w13.shape[1]
        s13 = np.repeat(s13, rows // s13.shape[1], axis=1)
        s2 = np.repeat(np.asarray(self.w2_scale)[:, None], self.hidden_dim, axis=1)
        return np.ascontiguousarray(s13), np.ascontiguousarray(s2)

    def dequantize(self, expert: int, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
        """One expert's w13 ``[2I, H]`` and w2 ``[H, I]`` as floats: code times scale, computed in `dtype`."""
        w13, w2 = self.w13[expert].astype(dtype), self.w2[expert].astype(dtype)
        if self.scheme == "bf16":
            return w13, w2
        s13, s2 = np.asarray(self.w13_scale)[expert], np.asarray(self.w2_scale)[expert]
        rows, inter = w13.shape[0], self.intermediate_size
        if self.scheme == "block":
            halves = rows // inter
            per_half = s13.reshape(halves, -1, s13.shape[-1])
            full = np.concatenate([expand_blocks(s, inter, self.hidden_dim) for s in per_half])
            return w13 * full.astype(dtype), w2 * expand_blocks(s2, *w2.shape).astype(dtype)
        if self.scheme == "tensor":
            s13 = np.repeat(np.atleast_1d(s13), rows // np.atleast_1d(s13).shape[0])
            s2 = np.full(self.hidden_dim, s2)
        return w13 * s13[:, None].astype(dtype), w2 * s2[:, None].astype(dtype)

    def check_matches(self, config: FusedMoEConfig, *, num_experts: int | None = None) -> None:
        """Raise unless the weights are the ones `config` describes (`num_experts` where only a share is held)."""
        experts = config.num_experts if num_experts is None else num_experts
        want = (experts, config.w13_rows, config.hidden_dim)
        if self.w13.shape != want or self.intermediate_size != config.intermediate_size:
            raise ValueError(
                f"weights: got w13 {list(self.w13.shape)}, w2 {list(self.w2.shape)}; the config wants w13 "
                f"{list(want)}, w2 {[experts, config.hidden_dim, config.intermediate_size]}"
            )
        if (self.w13_bias is not None) != config.has_bias:
            raise ValueError(
                f"weights: got {'a' if self.w13_bias is not None else 'no'} w13_bias, the config has "
                f"has_bias={config.has_bias}"
            )


def quantize_moe_weights(w13: np.ndarray, w2: np.ndarray, scheme: str) -> MoEWeights:
    """Quantise float experts.

    Args:
      w13: ``[E, 2I, H]`` (or ``[E, I, H]``) floats, gate rows then up rows.
      w2: ``[E, H, I]`` floats.
      scheme: ``"block"``, ``"channel"``, ``"tensor"`` (one scale for gate, one for up) or ``"bf16"``.

    Raises:
      TypeError, ValueError: wrong dtype, shape or scheme, or non-finite values.
    """
    check_choice("scheme", scheme, SCHEMES)
    floats = (np.float16, np.float32, np.float64, BF16)
    check_array("w13", w13, shape=(None, None, None), dtypes=floats)
    check_array("w2", w2, shape=(w13.shape[0], w13.shape[2], None), dtypes=floats)
    if w13.shape[1] not in (w2.shape[2], 2 * w2.shape[2]):
        raise ValueError(f"w13: got shape {list(w13.shape)} with w2 {list(w2.shape)}, want 2I or I rows")
    _check_finite("w13", w13)
    _check_finite("w2", w2)
    if scheme == "bf16":
        return MoEWeights(scheme, w13.astype(BF16), w2.astype(BF16))
    if scheme == "channel":
        (q13, s13), (q2, s2) = quantize_weight_channel(w13), quantize_weight_channel(w2)
        return MoEWeights(scheme, q13, q2, s13, s2)
    halves = w13.shape[1] // w2.shape[2]
    split = w13.reshape(w13.shape[0], halves, w2.shape[2], w13.shape[2])
    quantize = quantize_weight_block if scheme == "block" else quantize_weight_tensor
    (q13, s13), (q2, s2) = quantize(split), quantize(w2)
    if scheme == "block":
        s13 = s13.reshape(w13.shape[0], -1, s13.shape[-1])
    return MoEWeights(scheme, q13.reshape(w13.shape), q2, s13, s2)


@dataclass(frozen=True, eq=False)
class LoRAAdapter:
    """One adapter's expert deltas for one layer; bfloat16 (or float32) on the host.

    Attributes:
      adapter_id: global id, >= 0, the same on every rank; never a slot number.
      a13: ``[E|1, 2, r, H]`` (gate, up; second axis 1 for non-gated experts); ``1`` = shared over experts.
      b13: ``[E, 2, I, r]``, scaling (alpha/r or rsLoRA) folded in.
      a2: ``[E, r, I]``.
      b2: ``[E|1, H, r]``, scaling folded in.
    """

    adapter_id: int
    a13: np.ndarray
    b13: np.ndarray
    a2: np.ndarray
    b2: np.ndarray

    def __post_init__(self) -> None:
        check_int("adapter_id", self.adapter_id, minimum=0)
        if self.adapter_id >= 2**31:
            raise ValueError(f"adapter_id: got {self.adapter_id}, want less than 2**31 (batches carry ids as int32)")
        dtypes = (BF16, np.float32)
        check_array("b13", self.b13, shape=(None, None, None, None), dtypes=dtypes)
        num_experts, halves, inter, rank = self.b13.shape
        if halves not in (1, 2):
            raise ValueError(f"b13: got shape {list(self.b13.shape)}, want [E, 2, I, r] (or [E, 1, I, r] non-gated)")
        if not 1 <= rank <= MAX_LORA_RANK:
            raise ValueError(f"b13: got rank {rank}, want 1 to {MAX_LORA_RANK}")
        check_array("a13", self.a13, shape=(None, halves, rank, None), dtypes=dtypes)
        hidden = self.a13.shape[3]
        check_array("a2", self.a2, shape=(num_experts, rank, inter), dtypes=dtypes)
        check_array("b2", self.b2, shape=(None, hidden, rank), dtypes=dtypes)
        for label, value in (("a13", self.a13), ("b2", self.b2)):
            if value.shape[0] not in (1, num_experts):
                raise ValueError(f"{label}: got {value.shape[0]} experts, want {num_experts}, or 1 where it is shared")
        for label in ("a13", "b13", "a2", "b2"):
            _check_finite(label, getattr(self, label))

    @property
    def rank(self) -> int:
        return self.b13.shape[3]

    @property
    def num_experts(self) -> int:
        return self.b13.shape[0]

    @property
    def hidden_dim(self) -> int:
        return self.a13.shape[3]

    @property
    def intermediate_size(self) -> int:
        return self.b13.shape[2]

    @property
    def nbytes(self) -> int:
        return self.a13.nbytes + self.b13.nbytes + self.a2.nbytes + self.b2.nbytes

    def take(self, experts: np.ndarray) -> LoRAAdapter:
        """The adapter cut to these experts, in this order; shared tensors stay shared."""

        def cut(a: np.ndarray) -> np.ndarray:
            return a if a.shape[0] == 1 and self.num_experts != 1 else a[experts]

        return replace(self, a13=cut(self.a13), b13=self.b13[experts], a2=self.a2[experts], b2=cut(self.b2))

    def check_matches(self, config: FusedMoEConfig, *, num_experts: int | None = None) -> None:
        """Raise unless the adapter fits the layer: experts, H, I, gating, and the pool's rank where one is set."""
        experts = config.num_experts if num_experts is None else num_experts
        halves = 2 if config.is_act_and_mul else 1
        got = (self.num_experts, self.b13.shape[1], self.hidden_dim, self.intermediate_size)
        want = (experts, halves, config.hidden_dim, config.intermediate_size)
        if got != want:
            names = ("experts", "halves", "hidden_dim", "intermediate_size")
            diff = "; ".join(f"{n} got {g}, want {w}" for n, g, w in zip(names, got, want) if g != w)
            raise ValueError(f"adapter {self.adapter_id}: made for another model: {diff}")
        if config.max_lora_rank and self.rank > config.max_lora_rank:
            raise ValueError(
                f"adapter {self.adapter_id}: got rank {self.rank}, want at most max_lora_rank={config.max_lora_rank}"
            )
