# SPDX-License-Identifier: Apache-2.0
"""Weights and adapters in the kernel's layout, transformed once at load, on the host.

FP8 bits are moved, never requantised. H is padded to a multiple of 256 and I to a multiple of the tile width with
zeros, which add nothing to any dot product (a padded hidden column is act(0) * 0 = 0).

    w13  [E, nf, H, 2 bf]   gate columns of the tile, then its up columns      s13  [E, nf, 1, 2 bf]
    w2   [E, nf, bf, H]                                                        s2   [E, 1, H]
    b13  [E, nf, 1, 2 bf]                                                      b2   [E, 1, H]
    block scales, G of H rounded up to whole lanes:  s13 [E, nf, 2 bf/128, G]  s2   [E, nf, bf/128, G]
    a13  [L, E|1, 2, r/2, H]  lora_b13 [L, E, nf, r/2, 2 bf]  a2 [L, E, nf, r/2, bf]  lora_b2 [L, E|1, r/2, H]

A keeps its rows on sublanes (one dot against its transpose shrinks); B is stored transposed, because a row of r
columns would be padded to 128 lanes and cost up to eight times its bytes. Both hold two bfloat16 rows in a row of
32-bit words, the even one in the low half: of such words whole tiles lie alike in both memories, so that a copy is one
piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..common.numerics import BF16
from ..common.weights import LoRAAdapter, MoEWeights
from .spec import BF16_SUBLANES, LANES, round_up


def padded_hidden(hidden: int) -> int:
    """H as the kernel sees it."""
    return round_up(hidden, 2 * LANES)


def _pad(a: np.ndarray, axis: int, size: int) -> np.ndarray:
    axis %= a.ndim
    if a.shape[axis] == size:
        return a
    width = [(0, 0)] * a.ndim
    width[axis] = (0, size - a.shape[axis])
    # Padding is done on raw bytes: numpy cannot pad every 8-bit float type.
    raw = a.view(np.uint8) if a.dtype.itemsize == 1 else a
    return np.pad(raw, width).view(a.dtype)


def _tile_rows(rows: np.ndarray, halves: int, bf: int) -> np.ndarray:
    """``[E, halves*I, ...]`` to ``[E, nf, halves*bf, ...]``: gate rows of a tile, then its up rows."""
    experts, rest = rows.shape[0], rows.shape[2:]
    split = rows.reshape(experts, halves, -1, bf, *rest)
    return np.swapaxes(split, 1, 2).reshape(experts, split.shape[2], halves * bf, *rest)


def _pad_halves(rows: np.ndarray, halves: int, inter: int) -> np.ndarray:
    split = rows.reshape(rows.shape[0], halves, -1, *rows.shape[2:])
    split = _pad(split, 2, inter)
    return split.reshape(rows.shape[0], halves * inter, *rows.shape[2:])


def lay_out_weights(weights: MoEWeights, *, bf: int, experts: int | None = None) -> dict[str, np.ndarray]:
    """Arrange one layer's experts for the kernel.

    Args:
      weights: E experts.
      bf: tile width of the build.
      experts: pad to this many experts (zeros; no token may be routed to them). None keeps E.

    Returns:
      the operands named in this module's table, without adapters.
    """
    halves = 2 if weights.is_act_and_mul else 1
    hidden, inter = padded_hidden(weights.hidden_dim), round_up(weights.intermediate_size, bf)
    w13 = _pad_halves(_pad(weights.w13, 2, hidden), halves, inter)
    w2 = _pad(_pad(weights.w2, 1, hidden), 2, inter)
    out = {
        "w13": np.swapaxes(_tile_rows(w13, halves, bf), 2, 3),
        "w2": np.swapaxes(w2, 1, 2).reshape(w2.shape[0], inter // bf, bf, hidden),
    }
    if experts is not None:
        out = {name: _pad(a, 0, experts) for name, a in out.items()}
    out = {name: np.ascontiguousarray(a) for name, a in out.items()}
    return out | lay_out_scales(weights, bf=bf, experts=experts)


def lay_out_scales(weights: MoEWeights, *, bf: int, experts: int | None = None) -> dict[str, np.ndarray]:
    """`lay_out_weights` without the weights themselves: scales and biases, a small part of the bytes."""
    halves = 2 if weights.is_act_and_mul else 1
    hidden, inter = padded_hidden(weights.hidden_dim), round_up(weights.intermediate_size, bf)
    out: dict[str, np.ndarray] = {}
    if weights.scheme == "block":
        out["s13"], out["s2"] = _block_scales(weights, halves, hidden, inter, bf)
    elif weights.scheme != "bf16":
        s13, s2 = weights.channel_scales()
        out["s13"] = _tile_rows(_pad_halves(s13, halves, inter), halves, bf)[:, :, None, :]
        out["s2"] = _pad(s2, 1, hidden)[:, None, :]
    if weights.w13_bias is not None and weights.w2_bias is not None:
        b13 = _pad_halves(weights.w13_bias.astype(np.float32), halves, inter)
        out["b13"] = _tile_rows(b13, halves, bf)[:, :, None, :]
        out["b2"] = _pad(weights.w2_bias.astype(np.float32), 1, hidden)[:, None, :]
    if experts is not None:
        out = {name: _pad(a, 0, experts) for name, a in out.items()}
    return {name: np.ascontiguousarray(a) for name, a in out.items()}


def _block_scales(
    weights: MoEWeights, halves: int, hidden: int, inter: int, bf: int
) -> tuple[np.ndarray, np.ndarray]:
    """Block scales, those of H's blocks in the lanes of a row."""
    assert weights.w13_scale is not None and weights.w2_scale is not None
    experts, lanes = weights.num_experts, round_up(hidden // LANES, LANES)
    s13 = _pad(_pad_halves(weights.w13_scale, halves, inter // LANES), 2, lanes)
    s2 = np.swapaxes(_pad(_pad(weights.w2_scale, 1, lanes), 2, inter // LANES), 1, 2)
    return _tile_rows(s13, halves, bf // LANES), s2.reshape(experts, inter // bf, bf // LANES, lanes)


def activation_scales(weights: MoEWeights) -> np.ndarray:
    """float32 ``[4]``: the static x scale, its inverse, the h scale, its inverse."""
    one = np.float32(1.0)
    if weights.w13_input_scale is None or weights.w2_input_scale is None:
        raise ValueError("weights: got no w13_input_scale and w2_input_scale, want static activation scales")
    scales = [np.float32(np.max(s)) for s in (weights.w13_input_scale, weights.w2_input_scale)]
    return np.array([scales[0], one / scales[0], scales[1], one / scales[1]], np.float32)


def padded_rank(rank: int) -> int:
    """Adapter rank as the kernel sees it: whole bf16 sublane tiles."""
    return round_up(max(rank, 1), BF16_SUBLANES)


def adapter_arrays(
    adapter: LoRAAdapter, *, bf: int, rank: int, experts: int, shared_a13: bool, shared_b2: bool
) -> dict[str, np.ndarray]:
    """One adapter in the kernel's layout, without the slot axis; ranks and experts padded with zeros.

    Args:
      adapter: the adapter; its rank is at most `rank`.
      bf: tile width of the build.
      rank: padded rank of the build.
      experts: experts to pad to.
      shared_a13, shared_b2: keep one A13 (B2) for all experts; the adapter must then share it.
    """
    halves, hidden = adapter.a13.shape[1], padded_hidden(adapter.hidden_dim)
    inter = round_up(adapter.intermediate_size, bf)
    num = adapter.num_experts
    for label, value, shared in (("a13", adapter.a13, shared_a13), ("b2", adapter.b2, shared_b2)):
        if shared and value.shape[0] != 1:
            raise ValueError(f"{label}: got {value.shape[0]} experts in a build that shares it, want 1")

    def spread(a: np.ndarray, shared: bool) -> np.ndarray:
        if shared:
            return a
        return _pad(np.broadcast_to(a, (num, *a.shape[1:])), 0, experts)

    cast = lambda a: np.asarray(a).astype(BF16)  # noqa: E731
    a13 = _pad(_pad(spread(cast(adapter.a13), shared_a13), 3, hidden), 2, rank)
    b13 = _pad_halves(cast(adapter.b13).reshape(num, halves * adapter.intermediate_size, -1), halves, inter)
    b13 = _pad(_pad(np.swapaxes(_tile_rows(b13, halves, bf), 2, 3), 2, rank), 0, experts)
    a2 = _pad(cast(adapter.a2), 2, inter).reshape(num, adapter.rank, inter // bf, bf)
    a2 = _pad(_pad(np.swapaxes(a2, 1, 2), 2, rank), 0, experts)
    b2 = _pad(_pad(np.swapaxes(spread(cast(adapter.b2), shared_b2), 1, 2), 2, hidden), 1, rank)
    parts = {"a13": a13, "lora_b13": b13, "a2": a2, "lora_b2": b2}
    return {name: _row_pairs(a) for name, a in parts.items()}


def _row_pairs(a: np.ndarray) -> np.ndarray:
    """bf16 ``[..., r, columns]`` to int32 ``[..., r/2, columns]``."""
    bits = np.ascontiguousarray(a).view(np.uint16).astype(np.uint32)
    return (bits[..., 0::2, :] | (bits[..., 1::2, :] << 16)).view(np.int32)


def lay_out_adapters(
    adapters: Sequence[LoRAAdapter], *, bf: int, rank: int, experts: int, slots: int
) -> tuple[dict[str, np.ndarray], bool, bool]:
    """Stack adapters into slots ``0 .. len - 1`` of `slots`; unused slots are zero.

    Returns:
      the four adapter operands, and whether A13 and B2 are kept once for all experts (only if every adapter
      shares them).
    """
    one_expert = adapters[0].num_experts == 1
    shared_a13 = all(a.a13.shape[0] == 1 for a in adapters) and not one_expert
    shared_b2 = all(a.b2.shape[0] == 1 for a in adapters) and not one_expert
    laid = [
        adapter_arrays(a, bf=bf, rank=rank, experts=experts, shared_a13=shared_a13, shared_b2=shared_b2)
        for a in adapters
    ]
    stacked = {name: _pad(np.stack([one[name] for one in laid]), 0, slots) for name in laid[0]}
    return stacked, shared_a13, shared_b2
