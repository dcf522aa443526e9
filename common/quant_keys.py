# SPDX-License-Identifier: Apache-2.0
"""Names for quantisation formats, in vLLM's vocabulary.

A `QuantKey` says what a tensor's elements are, how its scale is shaped and whether that scale is known at load
(static) or computed per batch (dynamic). Selection compares a weight key with an activation key; it never looks
at tensors. Everything is frozen, hashable, and its repr evaluates back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class GroupShape:
    """Rows and columns that share one scale; -1 stands for the whole extent."""

    row: int
    col: int

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        return self.row == -1 and self.col == -1

    def is_per_token(self) -> bool:
        return self.row == 1 and self.col == -1

    def is_per_channel(self) -> bool:
        return self.row == -1 and self.col == 1

    def is_per_group(self) -> bool:
        return self.row == 1 and self.col > 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    """A scale's dtype ("f32", "bf16" or "e8m0"), whether it is static, and what it covers."""

    dtype: str
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """An element format and its scale.

    Attributes:
      dtype: element type, for example ``"f8e4m3fn"``, ``"f8e4m3fnuz"`` or ``"bf16"``.
      scale: how it is scaled; None for an unquantised tensor.
      symmetric: no zero point.
    """

    dtype: str
    scale: ScaleDesc | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        if self.scale is None:
            return f"QuantKey({self.dtype})"
        when = "static" if self.scale.static else "dynamic"
        shape = self.scale.group_shape
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"QuantKey({self.dtype},scale({self.scale.dtype},{when},GroupShape({shape.row},{shape.col})),{kind})"


def create_fp8_quant_key(static: bool, group_shape: GroupShape, *, scale_dtype: str = "f32") -> QuantKey:
    """The symmetric e4m3fn key with the given scale."""
    return QuantKey("f8e4m3fn", ScaleDesc(scale_dtype, static, group_shape))


kFp8StaticTensorSym = create_fp8_quant_key(True, GroupShape(-1, -1))
kFp8DynamicTensorSym = create_fp8_quant_key(False, GroupShape(-1, -1))
kFp8StaticChannelSym = create_fp8_quant_key(True, GroupShape(-1, 1))
kFp8StaticTokenSym = create_fp8_quant_key(True, GroupShape(1, -1))
kFp8DynamicTokenSym = create_fp8_quant_key(False, GroupShape(1, -1))
kFp8Static128BlockSym = create_fp8_quant_key(True, GroupShape(128, 128))
kFp8Static128BlockE8M0Sym = create_fp8_quant_key(True, GroupShape(128, 128), scale_dtype="e8m0")
kFp8Dynamic128Sym = create_fp8_quant_key(False, GroupShape(1, 128))
kBf16 = QuantKey("bf16")

# Every weight key this package serves, and the scheme of MoEWeights it becomes.
SCHEME_OF_WEIGHT_KEY: dict[QuantKey, str] = {
    kFp8StaticTensorSym: "tensor",
    kFp8StaticChannelSym: "channel",
    kFp8Static128BlockSym: "block",
    kFp8Static128BlockE8M0Sym: "block",
    kBf16: "bf16",
}

# The (weight, activation) pairs a checkpoint scheme implies, by scheme name.
KEYS_OF_SCHEME: dict[str, tuple[QuantKey, QuantKey]] = {
    "block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "channel": (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "tensor": (kFp8StaticTensorSym, kFp8DynamicTokenSym),
    "tensor_static": (kFp8StaticTensorSym, kFp8StaticTensorSym),
    "bf16": (kBf16, kBf16),
}


def scheme_of(weight_key: QuantKey) -> str | None:
    """The `MoEWeights.scheme` that holds weights of this key, or None where no kernel here reads it."""
    return SCHEME_OF_WEIGHT_KEY.get(weight_key)
