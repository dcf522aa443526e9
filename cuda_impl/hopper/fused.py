# SPDX-License-Identifier: Apache-2.0
"""One FP8 MoE layer on a Hopper GPU: prepared weights in, the right chain of kernels for the batch out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .decode_gemm import decode_gemm
from .decode_rows import hidden_rows, prologue
from .plan import plan_rows
from .prefill_gemm import ROW_ALIGN, TILE_ROWS, grouped_gemm
from .rows import combine, quantize_rows, scatter_quantize
from .shrink import shrink

ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai")
RANKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class HopperWeights:
    """One layer's expert weights as the kernels read them; make it with `prepare_weights`.

    Attributes:
      scheme: "block" or "channel".
      w13: float8_e4m3fn ``[E, 2I, H]``, gate rows then up rows; w2: ``[E, H, I]``.
      w13_scale, w2_scale: f32; channel ``[E, 2I]``, ``[E, H]``; block ``[E, 2 ceil(I/128), ceil(H/128)]``,
        ``[E, ceil(H/128), ceil(I/128)]``.
      activation: one of ACTIVATIONS.
    """

    scheme: str
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    activation: str = "silu"


@dataclass(frozen=True)
class HopperAdapters:
    """Stacked bf16 LoRA matrices over `S` slots, scaling folded into B, ranks padded with zeros to one of RANKS.

    Attributes:
      a13: ``[S, E or 1, 2, r, H]``; b13: ``[S, E, 2, I, r]``; a2: ``[S, E, r, I]``; b2: ``[S, E or 1, H, r]``.
    """

    a13: torch.Tensor
    b13: torch.Tensor
    a2: torch.Tensor
    b2: torch.Tensor


def prepare_weights(
    scheme: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    activation: str = "silu",
) -> HopperWeights:
    """Check shapes once at load; "tensor" scales (``[E]`` or, for w13, ``[E, 2]``) become one a row, bits unchanged.

    Raises:
      ValueError, TypeError: what came does not fit; the message names the argument.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, want one of {ACTIVATIONS}")
    if w13.ndim != 3 or w2.ndim != 3 or w13.shape[1] % 2:
        raise ValueError(f"w13, w2: got {list(w13.shape)}, {list(w2.shape)}, want [E, 2I, H] and [E, H, I]")
    e, i2, h = w13.shape
    i = i2 // 2
    if w2.shape != (e, h, i):
        raise ValueError(f"w2: got {list(w2.shape)}, want {[e, h, i]} beside w13 {list(w13.shape)}")
    if h % 16 or i % 16:
        raise ValueError(f"w13: got H={h}, I={i}, want multiples of 16 (TMA strides)")
    for name, w in (("w13", w13), ("w2", w2)):
        if w.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name}: got {w.dtype}, want torch.float8_e4m3fn")
        if not w.is_contiguous():
            raise ValueError(f"{name}: got a non-contiguous tensor, want a contiguous one")
    w13_scale, w2_scale = w13_scale.float(), w2_scale.float()
    if scheme == "tensor":
        w13_scale = w13_scale.reshape(e, -1)
        if w13_scale.shape[1] not in (1, 2):
            raise ValueError(f"w13_scale: got {list(w13_scale.shape)}, want [{e}] or [{e}, 2]")
        w13_scale = w13_scale.repeat_interleave(i2 // w13_scale.shape[1], dim=1)
        w2_scale = w2_scale.reshape(e, 1).expand(e, h)
    elif scheme == "channel":
        w13_scale, w2_scale = w13_scale.reshape(e, -1), w2_scale.reshape(e, -1)
    blocks = lambda n: -(-n // 128)  # noqa: E731
    want = {
        "tensor": ((e, i2), (e, h)),
        "channel": ((e, i2), (e, h)),
        "block": ((e, 2 * blocks(i), blocks(h)), (e, blocks(h), blocks(i))),
    }.get(scheme)
    if want is None:
        raise ValueError(f"scheme: got {scheme!r}, want 'block', 'channel' or 'tensor'")
    for name, scale, shape in (("w13_scale", w13_scale, want[0]), ("w2_scale", w2_scale, want[1])):
        if tuple(scale.shape) != shape:
            raise ValueError(f"{name}: got {list(scale.shape)}, want {list(shape)} for scheme {scheme!r}")
    return HopperWeights(
        "block" if scheme == "block" else "channel",
        w13,
        w2,
        w13_scale.contiguous(),
        w2_scale.contiguous(),
        activation,
    )


def _prefill(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: HopperWeights,
    adapters: HopperAdapters | None,
    slots: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Sort, permute and quantise, w13, w2, combine; every launch reads its extent from the plan on the device."""
    experts, i2, h = weights.w13.shape
    i = i2 // 2
    pairs = topk_ids.numel()
    block = weights.scheme == "block"
    num_slots = adapters.a13.shape[0] if adapters is not None else 0
    plan = plan_rows(
        topk_ids,
        num_experts=experts,
        align=ROW_ALIGN,
        tile=TILE_ROWS,
        expert_map=expert_map,
        slots=slots,
        num_slots=num_slots,
    )
    xq, xs = scatter_quantize(x, topk_ids.shape[1], plan, grouped=block, slots=slots, num_slots=num_slots)
    s13 = None
    if adapters is not None:
        s13 = shrink(x, adapters.a13, plan, pairs, gather=True, experts=experts)
    bf16 = {"dtype": torch.bfloat16, "device": x.device}
    hidden = None if block and adapters is None else torch.empty((plan.rows, i), **bf16)
    hq = hs = None
    if block:
        hq = torch.empty((plan.rows, i), dtype=torch.float8_e4m3fn, device=x.device)
        hs = torch.empty((plan.rows, -(-i // 128)), dtype=torch.float32, device=x.device)
    grouped_gemm(
        xq, xs, weights.w13, weights.w13_scale, plan, block=block, activation=weights.activation, out=hidden,
        q=hq, q_scale=hs, lora_b=adapters.b13 if adapters is not None else None, shrunk=s13,
    )  # fmt: skip
    s2 = None
    if adapters is not None:
        s2 = shrink(hidden, adapters.a2, plan, pairs, gather=False, experts=experts)
    if not block:
        hq, hs = quantize_rows(hidden, plan)
    rows = torch.empty((plan.rows, h), **bf16)
    grouped_gemm(
        hq, hs, weights.w2, weights.w2_scale, plan, block=block, activation=None, out=rows,
        lora_b=adapters.b2 if adapters is not None else None, shrunk=s2,
    )  # fmt: skip
    combine(rows, topk_weights, plan.pos, out)


def _decode(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: HopperWeights,
    adapters: HopperAdapters | None,
    slots: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    *,
    a16: bool,
    tokens: int,
) -> None:
    """Four launches (five where hidden rows need a pass of their own), each started before the one ahead has ended."""
    experts, i2, h = weights.w13.shape
    i = i2 // 2
    block = weights.scheme == "block"
    mode = "fp16" if a16 else "group" if block else "token"
    plan, xq, xs, s13 = prologue(
        x, topk_ids, num_experts=experts, mode=mode, tile=tokens, expert_map=expert_map, slots=slots,
        a13=adapters.a13 if adapters is not None else None,
    )  # fmt: skip
    fused = block and not a16
    bf16 = {"dtype": torch.bfloat16, "device": x.device}
    hidden = None if fused and adapters is None else torch.empty((plan.rows, i), **bf16)
    hq = hs = s2 = None
    if fused:
        hq = torch.empty((plan.rows, i), dtype=torch.float8_e4m3fn, device=x.device)
        hs = torch.empty((plan.rows, -(-i // 128)), dtype=torch.float32, device=x.device)
    decode_gemm(
        xq, xs, weights.w13, weights.w13_scale, plan, block=block, activation=weights.activation, tokens=tokens,
        out=hidden, q=hq, q_scale=hs, lora_b=adapters.b13 if adapters is not None else None, shrunk=s13,
    )  # fmt: skip
    if hidden is not None:
        quantised = hidden_rows(
            hidden, plan, mode="none" if fused else mode, a2=adapters.a2 if adapters is not None else None
        )
        s2 = quantised[2]
        if not fused:
            hq, hs = quantised[:2]
    rows = torch.empty((plan.rows, h), **bf16)
    decode_gemm(
        hq, hs, weights.w2, weights.w2_scale, plan, block=block, activation=None, tokens=tokens, out=rows,
        lora_b=adapters.b2 if adapters is not None else None, shrunk=s2, early=True,
    )  # fmt: skip
    combine(rows, topk_weights, plan.pos, out, pdl=True)


def hopper_fused_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: HopperWeights,
    *,
    adapters: HopperAdapters | None = None,
    adapter_slots: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    recipe: str = "w8a8",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(x) if out is None else out
    tokens, topk = topk_ids.shape
    if not tokens:
        return out
    args = (x, topk_weights, topk_ids, weights, adapters, adapter_slots, expert_map, out)
    if tokens * topk <= 2048 or recipe == "w8a16":
        mean = tokens * topk / (expert_map.shape[0] if expert_map is not None else weights.w13.shape[0])
        _decode(*args, a16=recipe == "w8a16", tokens=16 if mean <= 12 or recipe == "w8a16" else 32)
    else:
        _prefill(*args)
    return out
