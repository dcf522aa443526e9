# SPDX-License-Identifier: Apache-2.0
"""A layer's weight buffers: which there are, what a checkpoint shard must look like, and where it goes.

Names and shapes are vLLM's. Buffers start as NaN, so that whatever was never loaded is found before it is
used. Everything is numpy on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .checks import check_choice, check_int
from .numerics import BF16, BLOCK, E4M3, E8M0, cdiv, decode_e8m0

SHARD_IDS = ("w1", "w3", "w2")
_FLOATS = (np.dtype(np.float32), BF16, np.dtype(np.float16))
_FP8_NAN = 0x7F


@dataclass(frozen=True)
class TensorSpec:
    """One buffer.

    Attributes:
      name: the layer's attribute, for example ``"w13_weight_scale_inv"``.
      shape: of the buffer, local experts first.
      dtype: of the buffer.
      kind: ``"weight"``, ``"scale"``, ``"input_scale"`` or ``"bias"``.
      accepts: dtypes a shard may have; it is converted to `dtype`.
      quant_method: granularity of a scale (``"tensor"``, ``"channel"``, ``"block"``), for loaders; None
        elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    accepts: tuple[np.dtype, ...]
    quant_method: str | None = None

    @property
    def is_w13(self) -> bool:
        return self.name.startswith("w13_")


@dataclass(frozen=True)
class LayerLayout:
    """What one rank holds of a layer.

    Attributes:
      scheme: ``"block"``, ``"channel"``, ``"tensor"`` or ``"bf16"``.
      scale_name: ``"weight_scale"`` or ``"weight_scale_inv"``.
      static_input: the checkpoint brings activation scales.
      has_bias, gated: as in the config.
      num_experts: global E.
      local_experts: global ids held here, in buffer order.
      hidden: H.
      intermediate: this rank's share of I.
      tp_size, tp_rank: which share it is.
    """

    scheme: str
    scale_name: str
    static_input: bool
    has_bias: bool
    gated: bool
    num_experts: int
    local_experts: tuple[int, ...]
    hidden: int
    intermediate: int
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        check_int("tp_size", self.tp_size, minimum=1)
        check_int("tp_rank", self.tp_rank, minimum=0)
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank: got {self.tp_rank}, want less than tp_size={self.tp_size}")
        if self.tp_size > 1 and self.scheme == "block" and self.intermediate % BLOCK:
            raise ValueError(
                f"intermediate_size_per_partition: got {self.intermediate} (tp_size={self.tp_size}) with "
                f"block [{BLOCK}, {BLOCK}] weights, want a multiple of {BLOCK}: a scale block cannot be cut; "
                "use fewer tensor-parallel ranks, or expert parallelism, which keeps experts whole"
            )

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

    def specs(self) -> dict[str, TensorSpec]:
        """The buffers by name."""
        experts, rows = len(self.local_experts), self.halves * self.intermediate
        f32 = np.dtype(np.float32)
        weight = BF16 if self.scheme == "bf16" else E4M3
        accepts = _FLOATS if self.scheme == "bf16" else (E4M3,)
        found = [
            TensorSpec("w13_weight", (experts, rows, self.hidden), weight, "weight", accepts),
            TensorSpec("w2_weight", (experts, self.hidden, self.intermediate), weight, "weight", accepts),
        ]
        scale_shapes = {
            "tensor": ((experts, self.halves), (experts,)),
            "channel": ((experts, rows, 1), (experts, self.hidden, 1)),
            "block": (
                (experts, self.halves * cdiv(self.intermediate, BLOCK), cdiv(self.hidden, BLOCK)),
                (experts, cdiv(self.hidden, BLOCK), cdiv(self.intermediate, BLOCK)),
            ),
        }
        if self.scheme != "bf16":
            for prefix, shape in zip(("w13", "w2"), scale_shapes[self.scheme], strict=True):
                name = f"{prefix}_{self.scale_name}"
                found.append(TensorSpec(name, shape, f32, "scale", (*_FLOATS, E8M0), self.scheme))
        if self.static_input:
            for name in ("w13_input_scale", "w2_input_scale"):
                found.append(TensorSpec(name, (experts,), f32, "input_scale", _FLOATS, "tensor"))
        if self.has_bias:
            found.append(TensorSpec("w13_bias", (experts, rows), f32, "bias", _FLOATS))
            found.append(TensorSpec("w2_bias", (experts, self.hidden), f32, "bias", _FLOATS))
        return {spec.name: spec for spec in found}

    def shard_shape(self, spec: TensorSpec, shard_id: str) -> tuple[tuple[int, ...], int | None]:
        """Shape of a whole (unsplit) shard, and the axis that tensor parallelism cuts, or None."""
        full = self.intermediate * self.tp_size
        out, into = (self.hidden, full) if shard_id == "w2" else (full, self.hidden)
        cut_in, cut_out = (1, None) if shard_id == "w2" else (0, 0)
        if spec.kind == "weight":
            return (out, into), cut_in
        if spec.kind == "bias":
            return (out,), cut_out
        if spec.quant_method == "channel":
            return (out, 1), cut_out
        if spec.quant_method == "block":
            return (cdiv(out, BLOCK), cdiv(into, BLOCK)), cut_in
        return (), None

    def destination(self, spec: TensorSpec, local: int, shard_id: str) -> tuple[int | slice, ...]:
        """Index of a shard's place in its buffer."""
        half = 1 if shard_id == "w3" else 0
        if spec.kind == "input_scale" or not spec.is_w13:
            return (local,)
        if spec.quant_method == "tensor":
            return local, half
        rows = spec.shape[1] // self.halves
        return local, slice(half * rows, (half + 1) * rows)

    def shard_ids(self, spec: TensorSpec) -> tuple[str, ...]:
        """The shards a buffer is filled from."""
        if not spec.is_w13:
            return ("w2",)
        return ("w1", "w3") if self.gated else ("w1",)


def allocate(spec: TensorSpec) -> np.ndarray:
    """A buffer full of NaN."""
    if spec.dtype == E4M3:
        return np.full(spec.shape, _FP8_NAN, np.uint8).view(E4M3)
    return np.full(spec.shape, np.nan, spec.dtype)


def is_nan(value: np.ndarray) -> np.ndarray:
    """NaN mask of any float array, FP8 included."""
    if value.dtype == E4M3:
        return (value.view(np.uint8) & 0x7F) == _FP8_NAN
    return np.isnan(value.astype(np.float32, copy=False))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in shape if d != 1)


def read_shard(layout: LayerLayout, spec: TensorSpec, value: object, shard_id: str, where: str) -> np.ndarray:
    """This rank's part of a shard, checked and converted.

    Args:
      value: the checkpoint's tensor, whole; scales may be E8M0.
      where: what messages call it.

    Raises:
      TypeError: not a numpy array, or a dtype that is not converted silently.
      ValueError: the wrong shape, or values that are not finite (scales: not positive).
    """
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{where}: got {type(value).__name__}, want a numpy array")
    value = np.asarray(value)
    if value.dtype not in spec.accepts:
        names = " or ".join(d.name for d in spec.accepts)
        raise TypeError(f"{where}: got dtype {value.dtype}, want {names}")
    shape, axis = layout.shard_shape(spec, shard_id)
    if spec.kind in ("scale", "input_scale") and _without_ones(value.shape) == _without_ones(shape):
        value = value.reshape(shape)  # [out] and [out, 1], [] and [1] say the same
    if value.shape != shape:
        cut = f" (the whole tensor: tp_size={layout.tp_size} cuts it here)" if layout.tp_size > 1 else ""
        raise ValueError(f"{where}: got shape {list(value.shape)}, want {list(shape)}{cut}")
    if axis is not None and layout.tp_size > 1:
        width = shape[axis] // layout.tp_size
        value = np.take(value, np.arange(layout.tp_rank * width, (layout.tp_rank + 1) * width), axis=axis)
    if value.dtype == E8M0:
        value = decode_e8m0(value)
    value = value.astype(spec.dtype, copy=False)
    bad = is_nan(value) if value.dtype == E4M3 else ~np.isfinite(value.astype(np.float32, copy=False))
    if bad.any():
        raise ValueError(f"{where}: got {int(bad.sum())} non-finite values, want all finite")
    if spec.kind in ("scale", "input_scale") and not (value > 0).all():
        raise ValueError(f"{where}: got values <= 0, want positive scales")
    return value


def missing_shards(layout: LayerLayout, spec: TensorSpec, buffer: np.ndarray) -> Iterator[str]:
    """Each shard of the buffer that still holds NaN, as ``"expert 3 w1"`` (global expert id)."""
    for local, expert in enumerate(layout.local_experts):
        if not is_nan(buffer[local]).any():
            continue
        # One input scale stands for gate and up.
        for shard_id in layout.shard_ids(spec)[: 1 if spec.kind == "input_scale" else None]:
            if is_nan(buffer[layout.destination(spec, local, shard_id)]).any():
                yield f"expert {expert} {shard_id}"


def check_shard_id(layout: LayerLayout, spec: TensorSpec, shard_id: str) -> None:
    """Raise unless the shard belongs in the buffer."""
    check_choice("shard_id", shard_id, SHARD_IDS)
    if shard_id not in layout.shard_ids(spec):
        gate = "" if layout.gated else " (experts without a gate)"
        raise ValueError(
            f"shard_id: got {shard_id!r} for {spec.name}{gate}, want {' or '.join(layout.shard_ids(spec))}"
        )
