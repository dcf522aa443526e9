# SPDX-License-Identifier: Apache-2.0
"""A loaded vLLM layer's torch tensors as `MoEWeights`, bits unchanged."""

from __future__ import annotations

import numpy as np
import torch

from ...common.numerics import BF16, E4M3, quantize_weight_channel
from ...common.weights import MoEWeights


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host copy-free view where the memory allows one; FP8 and bfloat16 keep their bits."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(E4M3)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def _scale(tensor: torch.Tensor) -> np.ndarray:
    """A scale in float32; E8M0 and bfloat16 scales convert exactly."""
    return np.ascontiguousarray(tensor.detach().to(torch.float32).numpy())


def moe_weights(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    block: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    w13_input_scale: torch.Tensor | None = None,
    w2_input_scale: torch.Tensor | None = None,
) -> MoEWeights:
    """Bind vLLM's parameters of one layer.

    Args:
      w13: float8_e4m3fn ``[E, 2I, H]``; bfloat16 where there are no scales.
      w2: ``[E, H, I]``, same dtype.
      w13_scale: ``[E, 2I, 1]`` (channel), ``[E, 2]`` or ``[E]`` (tensor), or block scales; None for bfloat16.
      w2_scale: ``[E, H, 1]``, ``[E]``, or block scales; None for bfloat16.
      block: scales are of [128, 128] blocks.
      w13_bias, w2_bias: ``[E, 2I]`` and ``[E, H]``.
      w13_input_scale, w2_input_scale: static activation scales ``[E]``.

    Raises:
      TypeError, ValueError: another dtype or shape, or a scale that is not positive and finite.
    """
    dtype = torch.bfloat16 if w13_scale is None or w2_scale is None else torch.float8_e4m3fn
    for label, tensor in (("w13_weight", w13), ("w2_weight", w2)):
        if tensor.dtype != dtype:
            raise TypeError(f"{label}: got {tensor.dtype}, want {dtype}")
    biases = [None if b is None else _scale(b) for b in (w13_bias, w2_bias)]
    if w13_scale is None or w2_scale is None:
        return MoEWeights("bf16", to_numpy(w13), to_numpy(w2), w13_bias=biases[0], w2_bias=biases[1])
    s13, s2 = _scale(w13_scale), _scale(w2_scale)
    if block:
        scheme = "block"
    elif s13.ndim == 3 and s13.shape[2] == 1:
        scheme, s13, s2 = "channel", s13[..., 0], s2[..., 0]
    else:
        scheme, s13, s2 = "tensor", s13.reshape(w13.shape[0], -1), s2.reshape(-1)
    static = [None, None] if w13_input_scale is None or w2_input_scale is None else [
        _scale(w13_input_scale), _scale(w2_input_scale)
    ]
    return MoEWeights(scheme, to_numpy(w13), to_numpy(w2), s13, s2, biases[0], biases[1], static[0], static[1])


def requantize_per_channel(weights: MoEWeights) -> MoEWeights:
    """Block weights with one scale an output row instead, expert by expert; what the ``per_channel`` policy does."""
    w13, w2 = np.empty_like(weights.w13), np.empty_like(weights.w2)
    s13, s2 = np.empty(w13.shape[:2], np.float32), np.empty(w2.shape[:2], np.float32)
    for expert in range(weights.num_experts):
        dense13, dense2 = weights.dequantize(expert)
        w13[expert], s13[expert] = quantize_weight_channel(dense13)
        w2[expert], s2[expert] = quantize_weight_channel(dense2)
    return MoEWeights("channel", w13, w2, s13, s2, weights.w13_bias, weights.w2_bias)
