# SPDX-License-Identifier: Apache-2.0
"""One FP8 MoE layer on a Hopper GPU: prepared weights in, the right chain of kernels for the batch out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .decode_gemm import decode_gemm
from .decode_rows import hidden_rows, prologue
from .gemv import one_token
from .plan import plan_rows
from .prefill_gemm import ROW_ALIGN, TILE_ROWS, grouped_gemm
from .regime import Regime, choose
from .rows import combine, quantize_rows, scatter_rows
from .shrink import shrink

ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai")
RANKS = (16, 32, 64, 128)
RECIPES = ("w8a8", "w8a16")
# Up to here every program of the first decode launch finds its own row; the scan is quadratic, so a sort wins later.
# One program of that launch holds the histogram over (expert, slot) bins in registers.
SCAN_PAIRS = 2048
SCAN_BINS = 4096
# The scan's shrink reads an adapter's A once a pair, the sorted one once a segment (H200, q30b block, 8 adapters, us:
# r16 228.7 against 233.9 at 1024 pairs, 282.5 against 258.1 at 2048; r64 373.6 against 346.4 and 537.1 against 414.5).
SCAN_RANK_PAIRS = 32768


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


def prepare_adapters(a13: torch.Tensor, b13: torch.Tensor, a2: torch.Tensor, b2: torch.Tensor) -> HopperAdapters:
    """Check stacked matrices (shapes as in `HopperAdapters`; a unit axis for the single half of w2 is dropped).

    Raises:
      ValueError, TypeError: what came does not fit; the message names the argument.
    """
    a2 = a2.squeeze(2) if a2.ndim == 5 else a2
    b2 = b2.squeeze(2) if b2.ndim == 5 else b2
    if b13.ndim != 5 or b13.shape[2] != 2:
        raise ValueError(f"b13: got {list(b13.shape)}, want [S, E, 2, I, r]")
    s, e, _, i, r = b13.shape
    if r not in RANKS:
        raise ValueError(f"b13: got rank {r}, want one of {RANKS} (pad with zeros)")
    h = a13.shape[-1]
    for name, t, shapes in (
        ("a13", a13, ((s, e, 2, r, h), (s, 1, 2, r, h))),
        ("b13", b13, ((s, e, 2, i, r),)),
        ("a2", a2, ((s, e, r, i),)),
        ("b2", b2, ((s, e, h, r), (s, 1, h, r))),
    ):
        if t.dtype != torch.bfloat16:
            raise TypeError(f"{name}: got {t.dtype}, want torch.bfloat16")
        if tuple(t.shape) not in shapes:
            raise ValueError(f"{name}: got {list(t.shape)}, want {' or '.join(str(list(w)) for w in shapes)}")
        if not t.is_contiguous():
            raise ValueError(f"{name}: got a non-contiguous tensor, want a contiguous one")
    return HopperAdapters(a13, b13, a2, b2)


@dataclass(frozen=True)
class _Call:
    """A checked call: what every chain needs."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    weights: HopperWeights
    adapters: HopperAdapters | None
    slots: torch.Tensor | None
    expert_map: torch.Tensor | None
    out: torch.Tensor
    a16: bool

    @property
    def block(self) -> bool:
        return self.weights.scheme == "block"

    @property
    def experts(self) -> int:
        return self.weights.w13.shape[0]

    @property
    def experts_everywhere(self) -> int:
        return self.expert_map.shape[0] if self.expert_map is not None else self.experts

    @property
    def pairs_here(self) -> float:
        """(token, expert) pairs that likely have their expert here."""
        return self.topk_ids.numel() * self.experts / self.experts_everywhere

    @property
    def hidden(self) -> int:
        return self.weights.w2.shape[2]

    @property
    def num_slots(self) -> int:
        return self.adapters.a13.shape[0] if self.adapters is not None else 0

    @property
    def mode(self) -> str:
        return "fp16" if self.a16 else "group" if self.block else "token"

    def lora(self, name: str) -> torch.Tensor | None:
        return getattr(self.adapters, name) if self.adapters is not None else None

    def bf16(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.x.device)

    def quantised_hidden(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.empty((rows, self.hidden), dtype=torch.float8_e4m3fn, device=self.x.device)
        return q, torch.empty((rows, -(-self.hidden // 128)), dtype=torch.float32, device=self.x.device)


def _sorted_rows(call: _Call, align: int, tile: int):
    """Sort, permute and encode the rows, and shrink the adapter rows, with the launches that suit large batches."""
    plan = plan_rows(
        call.topk_ids, num_experts=call.experts, align=align, tile=tile, expert_map=call.expert_map, slots=call.slots,
        num_slots=call.num_slots,
    )  # fmt: skip
    xq, xs = scatter_rows(
        call.x, call.topk_ids.shape[1], plan, mode=call.mode, slots=call.slots, num_slots=call.num_slots
    )
    s13 = None
    if call.adapters is not None:
        s13 = shrink(call.x, call.adapters.a13, plan, call.topk_ids.numel(), gather=True, experts=call.experts)
    return plan, xq, xs, s13


def _prefill(call: _Call) -> None:
    """Sort, permute and quantise, w13, w2, combine; every launch reads its extent from the plan on the device."""
    weights, pairs = call.weights, call.topk_ids.numel()
    plan, xq, xs, s13 = _sorted_rows(call, ROW_ALIGN, TILE_ROWS)
    # Block scales: w13 quantises its own result, and the bf16 rows are needed only where adapters read them.
    hidden = None if call.block and call.adapters is None else call.bf16(plan.rows, call.hidden)
    coded = call.quantised_hidden(plan.rows) if call.block else None
    grouped_gemm(
        xq, xs, weights.w13, weights.w13_scale, plan, block=call.block, activation=weights.activation, out=hidden,
        q=coded[0] if coded else None, q_scale=coded[1] if coded else None, lora_b=call.lora("b13"), shrunk=s13,
    )  # fmt: skip
    s2 = None
    if call.adapters is not None and hidden is not None:
        s2 = shrink(hidden, call.adapters.a2, plan, pairs, gather=False, experts=call.experts)
    if coded is None:
        assert hidden is not None
        coded = quantize_rows(hidden, plan)
    rows = call.bf16(plan.rows, call.x.shape[1])
    grouped_gemm(
        *coded, weights.w2, weights.w2_scale, plan, block=call.block, activation=None, out=rows,
        lora_b=call.lora("b2"), shrunk=s2,
    )  # fmt: skip
    combine(rows, call.topk_weights, plan.pos, call.out)


def _decode(call: _Call, regime: Regime) -> None:
    """Four launches (five where hidden rows need a pass of their own), each started before the one ahead has ended."""
    weights, pairs, unit = call.weights, call.topk_ids.numel(), regime.rows
    rank = call.adapters.a2.shape[2] if call.adapters is not None else 0
    scan = (
        pairs <= SCAN_PAIRS
        and call.pairs_here * rank < SCAN_RANK_PAIRS
        and call.experts * (call.num_slots + 1) <= SCAN_BINS
    )
    if scan:
        plan, xq, xs, s13 = prologue(
            call.x, call.topk_ids, weights.w13, mode=call.mode, tile=unit, expert_map=call.expert_map,
            slots=call.slots, a13=call.lora("a13"),
        )  # fmt: skip
    else:
        plan, xq, xs, s13 = _sorted_rows(call, 1, unit)
    fused = call.block and not call.a16
    hidden = None if fused and call.adapters is None else call.bf16(plan.rows, call.hidden)
    coded = call.quantised_hidden(plan.rows) if fused else None
    decode_gemm(
        xq, xs, weights.w13, weights.w13_scale, plan, block=call.block, activation=weights.activation, tokens=unit,
        out=hidden, q=coded[0] if coded else None, q_scale=coded[1] if coded else None, lora_b=call.lora("b13"),
        shrunk=s13, sums=regime.fp8_sums,
    )  # fmt: skip
    s2 = None
    if hidden is not None:
        a2 = call.lora("a2")
        if a2 is not None and not scan:
            s2 = shrink(hidden, a2, plan, pairs, gather=False, experts=call.experts)
            a2 = None
        if coded is None or a2 is not None:
            q, scale, shrunk = hidden_rows(
                hidden, plan, expected_rows=call.pairs_here, mode="none" if coded else call.mode, a2=a2,
            )  # fmt: skip
            s2 = shrunk if a2 is not None else s2
            if q is not None and scale is not None:
                coded = q, scale
    assert coded is not None
    rows = call.bf16(plan.rows, call.x.shape[1])
    decode_gemm(
        *coded, weights.w2, weights.w2_scale, plan, block=call.block, activation=None, tokens=unit, out=rows,
        lora_b=call.lora("b2"), shrunk=s2, early=True,
    )  # fmt: skip
    combine(rows, call.topk_weights, plan.pos, call.out, pdl=True)


def _one_token(call: _Call) -> None:
    weights, adapters = call.weights, call.adapters
    one_token(
        call.x, call.topk_weights, call.topk_ids, weights.w13, weights.w13_scale, weights.w2, weights.w2_scale,
        call.out, block=call.block, activation=weights.activation, quantised=not call.a16, expert_map=call.expert_map,
        slots=call.slots,
        lora=(adapters.a13, adapters.b13, adapters.a2, adapters.b2) if adapters is not None else None,
    )  # fmt: skip


def _check(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: HopperWeights,
    adapters: HopperAdapters | None,
    slots: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    recipe: str,
    out: torch.Tensor | None,
) -> None:
    ints = (torch.int32, torch.int64)
    h = weights.w13.shape[2]

    def want(name: str, t: torch.Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if t.dtype not in dtypes:
            raise TypeError(f"{name}: got {t.dtype}, want {' or '.join(map(str, dtypes))}")
        if t.ndim != len(shape) or any(w not in (None, g) for w, g in zip(shape, t.shape, strict=True)):
            raise ValueError(f"{name}: got shape {list(t.shape)}, want {list(shape)}")
        if t.device != x.device:
            raise ValueError(f"{name}: got device {t.device}, want x's {x.device}")
        if not t.is_contiguous():
            raise ValueError(f"{name}: got a non-contiguous tensor, want a contiguous one")

    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, want one of {RECIPES}")
    want("x", x, (None, h), (torch.bfloat16,))
    want("topk_ids", topk_ids, (x.shape[0], None), ints)
    want("topk_weights", topk_weights, tuple(topk_ids.shape), (torch.float32,))
    if (adapters is None) != (slots is None):
        raise ValueError("adapter_slots: got one of adapters and adapter_slots, want both or neither")
    if slots is not None:
        want("adapter_slots", slots, (x.shape[0],), ints)
    if adapters is not None and adapters.b13.shape[1:4] != (weights.w13.shape[0], 2, weights.w13.shape[1] // 2):
        raise ValueError(f"adapters: got b13 {list(adapters.b13.shape)}, want it to fit w13 {list(weights.w13.shape)}")
    if expert_map is not None:
        want("expert_map", expert_map, (None,), ints)
    if out is not None:
        want("out", out, tuple(x.shape), (torch.bfloat16, torch.float32))


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
    regime: Regime | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One FP8 MoE layer after routing; nothing is read back to the host, so it can be captured in a CUDA graph.

    Args:
      x: bf16 ``[T, H]``.
      topk_weights: f32 ``[T, K]``; topk_ids: int32 or int64 ``[T, K]``. An id outside ``[0, E_global)``, or one that
        `expert_map` sends to -1, is skipped.
      weights: from `prepare_weights`; ``E`` local experts.
      adapters: stacked LoRA matrices, with `adapter_slots`, int ``[T]``: a slot, or -1 for base.
      expert_map: int ``[E_global]``: local index or -1.
      recipe: "w8a8" quantises activations (1x128 for block scales, else per token); "w8a16" keeps them.
      regime: force a chain (tests, batch invariance); None chooses.
      out: bf16 or f32 ``[T, H]`` to write to.

    Returns:
      ``[T, H]``, bf16 or as `out`: ``sum_k w[t, k] * expert(x_t)``, summed in float32 in the order of k.

    Raises:
      ValueError, TypeError: what came does not fit; the message names the argument.
    """
    _check(x, topk_weights, topk_ids, weights, adapters, adapter_slots, expert_map, recipe, out)
    out = torch.empty_like(x) if out is None else out
    tokens, topk = topk_ids.shape
    if not tokens:
        return out
    call = _Call(x, topk_weights, topk_ids, weights, adapters, adapter_slots, expert_map, out, recipe == "w8a16")
    if regime is None:
        regime = choose(
            tokens, topk, call.experts_everywhere, w8a16=call.a16, block=call.block, lora=adapters is not None
        )
    if regime.chain == "prefill":
        if call.a16:
            raise ValueError("regime: got 'prefill' with recipe 'w8a16', want 'decode' or 'one_token'")
        _prefill(call)
    elif regime.chain == "decode":
        _decode(call, regime)
    else:
        if tokens != 1:
            raise ValueError(f"regime: got 'one_token' with {tokens} tokens, want 1")
        _one_token(call)
    return out
