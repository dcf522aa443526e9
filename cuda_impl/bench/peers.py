# SPDX-License-Identifier: Apache-2.0
"""Who can run a layer here: this package's backends, torch's grouped products, and vLLM's (in `peers_vllm`).

A peer is a name, the arithmetic it declares, a reason why it cannot run (or None), and a way to build its calls.
Peers see the same tensors; what they need in another form they make once and keep in `LayerData.cache`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...common import tolerances
from ...common.recipes import Recipe
from .. import _runtime, vllm_marlin
from ..moe import declared_recipe, fused_moe, resolve_recipe
from ..prepare import AdapterSlots, PreparedWeights
from ..quantize import quantize_rows
from ..route import CallShape, why_not_hopper
from .clock import Calls
from .data import Batch, Layer, LoraSetting
from .reference import dense


@dataclass(eq=False)
class LayerData:
    """A layer's weights on the device, and what peers made of them."""

    layer: Layer
    scheme: str
    weights: PreparedWeights
    device: torch.device
    cache: dict[Any, Any] = field(default_factory=dict)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


@dataclass(frozen=True, eq=False)
class Problem:
    """What one cell asks of every peer; `adapters` is None without LoRA."""

    data: LayerData
    setting: LoraSetting
    adapters: AdapterSlots | None
    batches: tuple[Batch, ...]

    @property
    def tokens(self) -> int:
        return self.batches[0].tokens


@dataclass(frozen=True)
class Peer:
    """One way to run a layer.

    Attributes:
      name: what tables call it.
      arithmetic: "w8a8", "w8a16" or "bf16".
      why_not: the reason it cannot run a problem, or None.
      build: one call a batch.
      own: held to its declared recipe; others are held to the float32 layer.
      recipe: what it declares where that is not what `fused_moe` does for its arithmetic.
      bound: relative L2 against the float32 layer; None takes the table's for its arithmetic.
      plan: which kernels a problem gets, in words.
    """

    name: str
    arithmetic: str
    why_not: Callable[[Problem], str | None]
    build: Callable[[Problem], Calls]
    own: bool = False
    recipe: Recipe | None = None
    bound: float | None = None
    plan: Callable[[Problem], str] = lambda problem: ""

    def declared(self, problem: Problem) -> tuple[Recipe, float]:
        """The recipe its result is compared with, and the bound on relative L2."""
        if self.own:
            layer, slots = problem.data.layer, problem.adapters
            recipe = declared_recipe(
                self.recipe or self.arithmetic, problem.data.weights, problem.tokens, layer.topk, layer.experts,
                lora_rank=0 if slots is None else slots.max_rank,
            )  # fmt: skip
            return recipe, tolerances.TO_RECIPE.bound
        return Recipe("w8a16"), self.bound or tolerances.to_truth(self.arithmetic, "f32").bound


def _own_calls(problem: Problem, recipe: str) -> Calls:
    return [
        functools.partial(
            fused_moe, b.x, b.topk_weights, b.topk_ids, problem.data.weights, recipe=recipe, adapters=problem.adapters,
            adapter_ids=None if problem.adapters is None else b.adapter_ids, expert_map=b.expert_map,
        )
        for b in problem.batches
    ]  # fmt: skip


def _own_plan(problem: Problem, recipe: str) -> str:
    from ..tuned import LayerKey, regime_for

    if recipe == "w8a16" and vllm_marlin.chosen():
        return _marlin_op_plan(problem)
    layer, weights, lora = problem.data.layer, problem.data.weights, problem.adapters
    shape = CallShape(
        resolve_recipe(recipe, weights), "silu", weights.is_block, True, False, layer.hidden, layer.inter,
        0 if lora is None else lora.max_rank,
    )  # fmt: skip
    target = _runtime.target_of(problem.data.device)
    reason = why_not_hopper(shape, target)
    if reason is not None:
        return f"portable ({reason})"
    key = LayerKey.of(weights, layer.topk, layer.experts, recipe)
    return f"hopper {regime_for(problem.data.device, key, problem.tokens, lora is not None)}"


def _own(name: str, recipe: str) -> Peer:
    return Peer(
        name, recipe, lambda problem: None, functools.partial(_own_calls, recipe=recipe), own=True,
        plan=functools.partial(_own_plan, recipe=recipe),
    )  # fmt: skip


def _marlin_op_calls(problem: Problem) -> Calls:
    return [
        functools.partial(
            vllm_marlin.marlin_moe, b.x, b.topk_weights, b.topk_ids, problem.data.weights, adapters=problem.adapters,
            adapter_ids=None if problem.adapters is None else b.adapter_ids, expert_map=b.expert_map,
        )
        for b in problem.batches
    ]  # fmt: skip


def _marlin_op_plan(problem: Problem) -> str:
    return f"vLLM {vllm_marlin.vllm_version()}'s Marlin MoE op"


def _marlin_op() -> tuple[Peer, ...]:
    """`marlin` by vLLM's op (what ISOMOE_MARLIN=vllm runs), where vLLM is beside a CUDA device."""
    if _runtime.INTERPRETED or importlib.util.find_spec("vllm") is None:
        return ()

    def why_not(problem: Problem) -> str | None:
        return vllm_marlin.why_not_here() or vllm_marlin.why_not_layer(problem.data.weights.hidden_dim)

    return (
        Peer(
            "isomoe marlin (vllm op)", "w8a16", why_not, _marlin_op_calls, own=True, recipe=Recipe("w8a16"),
            plan=_marlin_op_plan,
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class _Sorted:
    """Pairs sorted by expert with torch alone; pairs of no expert here come last."""

    order: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, local: torch.Tensor, experts: int) -> _Sorted:
        key = torch.where(local < 0, experts, local).reshape(-1)
        counts = (key[:, None] == torch.arange(experts, device=key.device)).sum(0)
        return cls(key.argsort(stable=True), counts.cumsum(0).to(torch.int32))

    def sum_back(self, rows: torch.Tensor, weights: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(self.order)
        back[self.order] = torch.arange(len(back), device=back.device)
        y = rows[back].view(*weights.shape, -1)
        # Rows beyond the last expert's are never written.
        y = torch.where((local >= 0)[:, :, None], y, 0.0)
        return (y.float() * weights[:, :, None]).sum(1).bfloat16()


def _local(batch: Batch, experts: int) -> torch.Tensor:
    if batch.expert_map is None:
        return torch.where((batch.topk_ids >= 0) & (batch.topk_ids < experts), batch.topk_ids, -1)
    return batch.expert_map[batch.topk_ids.long()]


def _torch_fp8(problem: Problem) -> Calls:
    w, k = problem.data.weights, problem.data.layer.topk
    w13, w2 = (t.view(torch.float8_e4m3fn).transpose(1, 2) for t in (w.w13, w.w2))
    s13, s2 = w.w13_scale, w.w2_scale
    assert s13 is not None and s2 is not None

    def call(batch: Batch) -> torch.Tensor:
        local = _local(batch, w.num_experts)
        rows = _Sorted.of(local, w.num_experts)
        codes, scale = quantize_rows(batch.x, "token")
        token = rows.order // k
        g = torch._scaled_grouped_mm(
            codes[token].view(torch.float8_e4m3fn),
            w13,
            scale.view(-1)[token],
            s13,
            offs=rows.ends,
            out_dtype=torch.bfloat16,
        )
        gate, up = g.chunk(2, 1)
        codes, scale = quantize_rows((torch.nn.functional.silu(gate) * up).contiguous(), "token")
        o = torch._scaled_grouped_mm(
            codes.view(torch.float8_e4m3fn), w2, scale.view(-1), s2, offs=rows.ends, out_dtype=torch.bfloat16
        )
        return rows.sum_back(o, batch.topk_weights, local)

    return [functools.partial(call, b) for b in problem.batches]


def _torch_bf16(problem: Problem) -> Calls:
    w, k = problem.data.weights, problem.data.layer.topk

    def widen(codes: torch.Tensor, scale: torch.Tensor | None, halves: int) -> torch.Tensor:
        parts = [dense(codes[e], None if scale is None else scale[e], halves).bfloat16() for e in range(w.num_experts)]
        return torch.stack(parts).transpose(1, 2)

    w13, w2 = problem.data.keep("torch bf16", lambda: (widen(w.w13, w.w13_scale, 2), widen(w.w2, w.w2_scale, 1)))

    def call(batch: Batch) -> torch.Tensor:
        local = _local(batch, w.num_experts)
        rows = _Sorted.of(local, w.num_experts)
        g = torch._grouped_mm(batch.x[rows.order // k], w13, offs=rows.ends, out_dtype=torch.bfloat16)
        gate, up = g.chunk(2, 1)
        h = torch.nn.functional.silu(gate) * up
        o = torch._grouped_mm(h, w2, offs=rows.ends, out_dtype=torch.bfloat16)
        return rows.sum_back(o, batch.topk_weights, local)

    return [functools.partial(call, b) for b in problem.batches]


def _why_not_torch(problem: Problem, function: str, schemes: tuple[str, ...]) -> str | None:
    if problem.adapters is not None:
        return "no adapters"
    if problem.data.scheme not in schemes:
        return f"reads no {problem.data.scheme} scales"
    if not hasattr(torch, function):
        return f"torch {torch.__version__} has no {function}"
    if problem.data.device.type != "cuda":
        return "no CUDA device"
    return None


OWN = (_own("isomoe triton", "w8a8"), _own("isomoe marlin", "w8a16"), *_marlin_op())
TORCH = (
    Peer(
        "torch scaled_grouped_mm", "w8a8",
        functools.partial(_why_not_torch, function="_scaled_grouped_mm", schemes=("channel", "tensor")), _torch_fp8,
    ),
    Peer(
        "torch grouped_mm bf16", "bf16",
        functools.partial(_why_not_torch, function="_grouped_mm", schemes=("block", "channel", "tensor")), _torch_bf16,
    ),
)  # fmt: skip


def all_peers() -> tuple[Peer, ...]:
    """Ours first, then torch's, then vLLM's; each says itself whether it can run."""
    from .peers_vllm import VLLM

    return (*OWN, *TORCH, *VLLM)
