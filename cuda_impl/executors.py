# SPDX-License-Identifier: Apache-2.0
"""`run_moe("triton", ...)` and `run_moe("marlin", ...)`. Importing this module touches neither torch nor triton."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np

from ..common.executors import ExecutorInfo, MoECall
from ..common.numerics import BF16
from ..common.placement import ExpertPlacement
from ..common.platforms import PlatformKind
from ..common.quant_keys import kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8StaticTensorSym
from ..common.recipes import Recipe
from ..common.support import ExpertsSupport


def _state() -> tuple[str, str]:
    """Whether kernels run natively, interpreted or not at all, and why."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return "unavailable", f"{name} is not installed"
    try:
        import torch

        from . import _runtime
    except Exception as error:  # a broken installation may fail in any way
        return "unavailable", f"{type(error).__name__}: {error}"
    if _runtime.INTERPRETED:
        return "interpreted", "Triton's interpreter on the CPU (no CUDA device, or TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return "unavailable", "no CUDA device, and TRITON_INTERPRET=0 forbids the interpreter"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (7, 5):
        return "unavailable", f"the device has compute capability {major}.{minor}, the kernels need 7.5"
    return "native", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def _info(name: str, recipes: tuple[str, ...], detail: str) -> ExecutorInfo:
    state, reason = _state()
    if state == "unavailable":
        return ExecutorInfo(name, state, reason)
    if state == "native" and "capability 9.0" in reason:
        detail += "; on Hopper its Gluon kernels where they serve the call (ISOMOE_HOPPER=0 keeps them out)"
    return ExecutorInfo(name, state, reason, recipes, detail)


def _with_marlin_op(info: ExecutorInfo) -> ExecutorInfo:
    """What ISOMOE_MARLIN makes of `marlin` where its own kernels can run: the same, vLLM's op, or why neither."""
    if info.state == "unavailable":
        return info
    from . import vllm_marlin

    try:
        if not vllm_marlin.chosen():
            return info
        reason = vllm_marlin.why_not_here()
    except ValueError as error:
        return ExecutorInfo(info.name, "unavailable", str(error))
    if reason is not None:
        return ExecutorInfo(info.name, "unavailable", f"ISOMOE_MARLIN=vllm: {reason}")
    detail = f"vLLM {vllm_marlin.vllm_version()}'s Marlin MoE op (ISOMOE_MARLIN=vllm), the rest by Triton kernels"
    return replace(info, detail=detail)


def _declared(call: MoECall) -> Recipe:
    """The recipe a call really runs.

    Hopper's kernels store result rows and rank products in bf16, and are preferred where they serve a plain recipe;
    their FP8 sums are short ones.

    Raises:
      ValueError: the call asks for other FP8 sums than those of the kernels it takes.
    """
    plain = replace(call.recipe, fp8_sums=0)
    if _state()[0] != "native" or _by_marlin_op(plain):
        declared = plain
    else:
        stored = plain.with_bf16_storage() if (plain.wire, plain.lora_products) == ("f32", "f32") else plain
        declared = _on_device(call, stored) or _on_device(call, plain) or plain
    if call.recipe.fp8_sums not in (0, declared.fp8_sums):
        raise ValueError(
            f"recipe: got fp8_sums={call.recipe.fp8_sums}, the kernels that this batch takes have {declared.fp8_sums}"
        )
    return declared


def _by_marlin_op(recipe: Recipe) -> bool:
    from .vllm_marlin import chosen

    return recipe.name == "w8a16" and chosen()


def _on_device(call: MoECall, recipe: Recipe) -> Recipe | None:
    """The recipe as Hopper's kernels run it, or None where they do not serve it."""
    import torch

    from ._runtime import target_of
    from .moe import with_device_sums
    from .route import CallShape, pad_rank, why_not_hopper
    from .tuned import LayerKey

    weights, device = call.weights, torch.device("cuda")
    rank = max([call.config.max_lora_rank, *(a.rank for a in call.adapters)]) if call.adapters else 0
    shape = CallShape(
        recipe, call.config.activation, weights.scheme == "block", weights.is_act_and_mul, weights.w13_bias is not None,
        weights.hidden_dim, weights.intermediate_size, pad_rank(rank) if rank else 0,
    )  # fmt: skip
    if why_not_hopper(shape, target_of(device)) is not None:
        return None
    key = LayerKey(
        weights.num_experts, call.config.num_experts, call.topk_ids.shape[1], weights.hidden_dim,
        weights.intermediate_size, "block" if weights.scheme == "block" else "channel", recipe.name,
    )  # fmt: skip
    return with_device_sums(shape, key, len(call.x), device)


def _partial(call: MoECall, recipe: Recipe, f32_out: bool) -> np.ndarray:
    """One rank's result, bf16 or f32 [T, H]."""
    import torch

    from ._runtime import INTERPRETED
    from .moe import fused_moe
    from .prepare import prepare_adapters, prepare_weights, to_torch

    device = torch.device("cpu" if INTERPRETED else "cuda")
    adapters = None
    if call.adapters:
        adapters = prepare_adapters(
            call.adapters, call.config, device=device, num_experts=call.weights.num_experts
        )
    y = fused_moe(
        to_torch(call.x, device),
        to_torch(call.topk_weights, device),
        to_torch(call.topk_ids, device),
        prepare_weights(call.weights, device),
        activation=call.config.activation,
        recipe=recipe,
        adapters=adapters,
        adapter_ids=None if adapters is None or call.adapter_ids is None else to_torch(call.adapter_ids, device),
        expert_map=None if call.expert_map is None else to_torch(call.expert_map, device),
        out_dtype=torch.float32 if f32_out else torch.bfloat16,
    ).cpu()
    return y.numpy() if f32_out else y.view(torch.int16).numpy().view(BF16)


def _run(call: MoECall) -> np.ndarray:
    """All ranks, one after the other on one device; partial sums are added in rank order in f32.

    A rank's partial sum has the recipe's wire precision.
    """
    recipe = _declared(call)
    if call.ep_size == 1:
        return _partial(call, recipe, f32_out=False)
    placement = ExpertPlacement(call.config.num_experts, call.ep_size)
    total = np.zeros(call.x.shape, np.float32)
    for rank in range(call.ep_size):
        local = placement.experts_of(rank)
        if not len(local):
            continue
        total += _partial(
            replace(
                call,
                weights=call.weights.take(local),
                adapters=tuple(a.take(local) for a in call.adapters),
                expert_map=placement.expert_map(rank),
                ep_size=1,
            ),
            recipe,
            f32_out=recipe.wire == "f32",
        ).astype(np.float32)
    return total.astype(BF16)


class TritonExecutor:
    """W8A8 where the device multiplies e4m3, and bf16, by this package's Triton kernels."""

    name = "triton"
    support = ExpertsSupport(
        platforms=(PlatformKind.CUDA,),
        schemes=("block", "channel", "tensor", "bf16"),
        recipes=("w8a8", "bf16"),
        activation_keys=(kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8StaticTensorSym),
        min_capability=(8, 0),
        requires_fp8_mma=True,
        lora=True,
    )

    @classmethod
    def info(cls) -> ExecutorInfo:
        return _info(cls.name, cls.support.recipes, "this package's Triton kernels")

    @classmethod
    def recipe(cls, call: MoECall) -> Recipe:
        return _declared(call)

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        """bfloat16 [T, H]."""
        return _run(call)


class MarlinExecutor:
    """W8A16: FP8 weights become f16 in registers, activations are never quantised; serves devices without e4m3."""

    name = "marlin"
    support = ExpertsSupport(
        platforms=(PlatformKind.CUDA,),
        schemes=("block", "channel", "tensor"),
        recipes=("w8a16",),
        min_capability=(7, 5),
        lora=True,
    )

    @classmethod
    def info(cls) -> ExecutorInfo:
        return _with_marlin_op(_info(cls.name, cls.support.recipes, "this package's W8A16 Triton kernel"))

    @classmethod
    def recipe(cls, call: MoECall) -> Recipe:
        return _declared(call)

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        """bfloat16 [T, H]."""
        return _run(call)
