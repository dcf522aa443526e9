# SPDX-License-Identifier: Apache-2.0
"""Run one MoE layer on a named executor, from host arrays to host arrays.

This is the entry that parity tests and tools use; serving integrations call the device-side operations directly.
An executor is an experts class of the registry (`backends`) with this shape:

    class MyExecutor:
        name = "my_backend"
        support = ExpertsSupport(...)                       # its own, see `support`
        @classmethod
        def info(cls) -> ExecutorInfo: ...                  # never raises, imports frameworks only here or in run
        @classmethod
        def run(cls, call: MoECall) -> np.ndarray: ...      # bfloat16 [T, H]
        @classmethod
        def recipe(cls, call: MoECall) -> Recipe: ...       # optional: what `run` will really use for this call

`run_moe` has checked everything that a `MoECall` carries before an executor sees it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from .backends import get_backend, registered_backends
from .checks import check_array, check_choice, check_int
from .config import FusedMoEConfig
from .numerics import BF16
from .recipes import Recipe, default_recipe
from .support import ExpertsSupport, declared_support
from .weights import LoRAAdapter, MoEWeights

logger = logging.getLogger(__name__)

STATES = ("native", "interpreted", "unavailable")


@dataclass(frozen=True)
class ExecutorInfo:
    """Whether and how an executor runs on this machine.

    Attributes:
      name: the executor.
      state: ``"native"`` (on its device), ``"interpreted"`` (on the CPU, slow, same program) or ``"unavailable"``.
      reason: why it is in that state, one line.
      recipes: recipe names it runs; empty where unavailable.
      detail: which kernels ran or will run (for example whether `marlin` uses vLLM's op), one line.
    """

    name: str
    state: str
    reason: str
    recipes: tuple[str, ...] = ()
    detail: str = ""

    def __post_init__(self) -> None:
        check_choice("state", self.state, STATES)


@dataclass(frozen=True, eq=False)
class MoECall:
    """One checked call. Arrays are C-contiguous.

    Attributes:
      x: bfloat16 ``[T, H]``.
      topk_weights: float32 ``[T, K]``.
      topk_ids: int32 ``[T, K]``, global expert ids; outside ``[0, E)`` means skipped.
      weights: all E experts, or those that `expert_map` names, in its order.
      config: the layer; ``config.num_experts`` is the global E.
      adapters: loaded adapters, indexed like `weights`; ids distinct.
      adapter_ids: int32 ``[T]`` global ids, -1 = base; None where no adapter is loaded.
      ep_size: ranks over which the executor splits the experts.
      recipe: the declared precision.
      expert_map: int32 ``[E]`` local index or -1 (skipped); None for all experts. Excludes ep_size > 1.
    """

    x: np.ndarray
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    weights: MoEWeights
    config: FusedMoEConfig
    adapters: tuple[LoRAAdapter, ...]
    adapter_ids: np.ndarray | None
    ep_size: int
    recipe: Recipe
    expert_map: np.ndarray | None

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def uses_adapters(self) -> bool:
        """Whether any token of this batch carries an adapter."""
        return self.adapter_ids is not None and bool((self.adapter_ids >= 0).any())


def executor_class(name: str) -> type:
    """The experts class registered under `name`, checked for the executor shape.

    Raises:
      ValueError: unknown name.
      ImportError: its module cannot be loaded.
      TypeError: it does not have an executor's shape.
    """
    cls = get_backend(name).load()
    declared_support(cls)
    for method in ("info", "run"):
        if not callable(getattr(cls, method, None)):
            raise TypeError(f"{cls.__module__}.{cls.__qualname__}: must have a classmethod `{method}`")
    return cls


def executors() -> dict[str, ExecutorInfo]:
    """Every registered executor's state on this machine. Never raises for a broken one."""
    found = {}
    for name in registered_backends():
        try:
            found[name] = executor_class(name).info()  # type: ignore[attr-defined]
        except Exception as error:  # a plugin may fail in any way; report it as its state
            found[name] = ExecutorInfo(name, "unavailable", f"{type(error).__name__}: {error}")
    return found


def _check_experts(
    weights: MoEWeights, config: FusedMoEConfig, expert_map: np.ndarray | None, ep_size: int
) -> tuple[np.ndarray | None, int]:
    """Validate weights against config and map; returns the contiguous map and the number of local experts."""
    if expert_map is None:
        weights.check_matches(config)
        return None, config.num_experts
    check_array("expert_map", expert_map, shape=(config.num_experts,), dtypes=(np.int32, np.int64))
    if ep_size != 1:
        raise ValueError(f"expert_map: got one with ep_size={ep_size}, want ep_size=1 (a map is one rank's view)")
    local = expert_map[expert_map >= 0]
    if len(np.unique(local)) != len(local) or (len(local) and int(local.max()) != len(local) - 1):
        raise ValueError(
            f"expert_map: got local indices {sorted(local.tolist())}, want each of 0 to n-1 once and -1 elsewhere"
        )
    weights.check_matches(config, num_experts=max(len(local), 1))
    return np.ascontiguousarray(expert_map, np.int32), len(local)


def _check_adapters(
    adapters: Iterable[LoRAAdapter] | None,
    adapter_ids: np.ndarray | None,
    config: FusedMoEConfig,
    num_tokens: int,
    expert_map: np.ndarray | None,
    num_local: int,
) -> tuple[tuple[LoRAAdapter, ...], np.ndarray | None]:
    if adapters is not None and not isinstance(adapters, Iterable):
        raise TypeError(f"adapters: got {type(adapters).__name__}, want a sequence of LoRAAdapter")
    loaded = tuple(adapters) if adapters is not None else ()
    for i, adapter in enumerate(loaded):
        if not isinstance(adapter, LoRAAdapter):
            raise TypeError(f"adapters: got {type(adapter).__name__} at {i}, want LoRAAdapter")
    ids = [a.adapter_id for a in loaded]
    if len(set(ids)) != len(ids):
        raise ValueError(f"adapters: got ids {ids}, want distinct ids")
    if config.max_loras and len(loaded) > config.max_loras:
        raise ValueError(f"adapters: got {len(loaded)}, want at most max_loras={config.max_loras}")
    cut = []
    for adapter in loaded:
        if expert_map is not None and adapter.num_experts == config.num_experts:
            adapter.check_matches(config)
            held = np.flatnonzero(expert_map >= 0)
            adapter = adapter.take(held[np.argsort(expert_map[held])])
        else:
            adapter.check_matches(config, num_experts=num_local)
        cut.append(adapter)
    if adapter_ids is None:
        return tuple(cut), (np.full(num_tokens, -1, np.int32) if cut else None)
    check_array("adapter_ids", adapter_ids, shape=(num_tokens,), dtypes=(np.int32, np.int64))
    unknown = sorted(set(adapter_ids[adapter_ids >= 0].tolist()) - set(ids))
    if unknown:
        raise ValueError(f"adapter_ids: got unknown ids {unknown}, want -1 or one of the loaded ids {ids}")
    if not cut:
        return (), None
    return tuple(cut), np.where(adapter_ids < 0, -1, adapter_ids).astype(np.int32)


def _report_skipped(topk_ids: np.ndarray, num_experts: int) -> None:
    bad = (topk_ids < 0) | (topk_ids >= num_experts)
    if bad.any():
        t, k = (int(v) for v in np.argwhere(bad)[0])
        logger.warning(
            "isomoe: topk_ids: %d of %d ids are outside [0, %d) and are skipped; the first is %d at token %d, k %d",
            int(bad.sum()),
            bad.size,
            num_experts,
            int(topk_ids[t, k]),
            t,
            k,
        )


def _recipe_of(support: ExpertsSupport, scheme: str) -> str | None:
    """The recipe an executor runs when none is named: the scheme's default, else the first it declares for FP8."""
    default = default_recipe(None, scheme).name
    return default if default in support.recipes or scheme == "bf16" else support.recipes[0]


def make_call(
    x: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    weights: MoEWeights,
    *,
    config: FusedMoEConfig,
    adapters: Iterable[LoRAAdapter] | None = None,
    adapter_ids: np.ndarray | None = None,
    ep_size: int = 1,
    recipe: str | Recipe | None = None,
    expert_map: np.ndarray | None = None,
) -> MoECall:
    """Check `run_moe`'s arguments and bind them; see there.

    Raises:
      TypeError, ValueError: naming the argument, what came and what is wanted.
    """
    if not isinstance(config, FusedMoEConfig):
        raise TypeError(f"config: got {type(config).__name__}, want FusedMoEConfig")
    if not isinstance(weights, MoEWeights):
        raise TypeError(f"weights: got {type(weights).__name__}, want MoEWeights")
    check_array("x", x, shape=(None, config.hidden_dim), dtypes=(BF16,))
    num_tokens, k = x.shape[0], config.experts_per_token
    check_array("topk_weights", topk_weights, shape=(num_tokens, k), dtypes=(np.float32,))
    check_array("topk_ids", topk_ids, shape=(num_tokens, k), dtypes=(np.int32, np.int64))
    check_int("ep_size", ep_size, minimum=1)
    expert_map, num_local = _check_experts(weights, config, expert_map, ep_size)
    loaded, ids = _check_adapters(adapters, adapter_ids, config, num_tokens, expert_map, num_local)
    if not isinstance(recipe, Recipe):
        recipe = default_recipe(recipe, weights.scheme, static_input=weights.has_static_input)
    if recipe.name not in ("float64", "bf16") and weights.scheme == "bf16":
        raise ValueError(f"recipe: got {recipe.name!r} for weights of scheme 'bf16', want 'bf16'")
    if "static" in (recipe.x_group, recipe.h_group) and not weights.has_static_input:
        raise ValueError("recipe: got a static group, but weights carry no w13_input_scale")
    if os.environ.get("ISOMOE_CHECK") == "1":
        _report_skipped(topk_ids, config.num_experts)
    # An id that int32 cannot hold is out of range all the same.
    ids32 = np.where((topk_ids < 0) | (topk_ids >= config.num_experts), -1, topk_ids).astype(np.int32)
    return MoECall(
        np.ascontiguousarray(x),
        np.ascontiguousarray(topk_weights),
        np.ascontiguousarray(ids32),
        weights,
        config,
        loaded,
        ids,
        int(ep_size),
        recipe,
        expert_map,
    )


def run_moe(
    executor: str,
    x: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    weights: MoEWeights,
    *,
    config: FusedMoEConfig,
    adapters: Iterable[LoRAAdapter] | None = None,
    adapter_ids: np.ndarray | None = None,
    ep_size: int = 1,
    recipe: str | Recipe | None = None,
    expert_map: np.ndarray | None = None,
) -> np.ndarray:
    """One MoE layer after routing: ``y[t] = sum_k topk_weights[t, k] * expert(topk_ids[t, k], x[t])``.

    Runs on the executor's device where there is one, else interpreted on the CPU.

    Args:
      executor: ``"reference"``, ``"pallas_ep"``, ``"triton"``, ``"marlin"`` or a registered name.
      x: bfloat16 ``[T, H]`` (`ml_dtypes.bfloat16`).
      topk_weights: float32 ``[T, K]``.
      topk_ids: int32 or int64 ``[T, K]``; ids outside ``[0, E)`` are skipped (``ISOMOE_CHECK=1`` reports them).
      weights: the layer's experts; with `expert_map`, only this rank's, in the map's order.
      config: the layer.
      adapters: `LoRAAdapter`s with distinct ids. With `expert_map` they may hold all E experts (they are cut) or
        already only the local ones.
      adapter_ids: int32 ``[T]``, a loaded adapter's id or -1 for the base model.
      ep_size: split the experts over this many ranks (devices, or simulated ranks).
      recipe: a name, a `Recipe`, or None for the scheme's default where the executor runs it (``"w8a8"`` for FP8),
        else the executor's first (``"w8a16"`` for `marlin`).
      expert_map: int32 ``[E]``, vLLM's map from global expert to local index or -1.

    Returns:
      bfloat16 ``[T, H]`` (float64 for the recipe ``"float64"``, which only the reference runs).

    Raises:
      TypeError, ValueError: a bad argument, before anything is launched.
      RuntimeError: the executor is unavailable here, or what it reported.
    """
    if not isinstance(executor, str):
        raise TypeError(f"executor: got {type(executor).__name__}, want a name")
    cls = executor_class(executor)
    support = declared_support(cls)
    if recipe is None and isinstance(weights, MoEWeights):
        recipe = _recipe_of(support, weights.scheme)
    call = make_call(
        x,
        topk_weights,
        topk_ids,
        weights,
        config=config,
        adapters=adapters,
        adapter_ids=adapter_ids,
        ep_size=ep_size,
        recipe=recipe,
        expert_map=expert_map,
    )
    if call.recipe.name not in support.recipes:
        raise ValueError(f"recipe: got {call.recipe.name!r}, executor {executor!r} runs {', '.join(support.recipes)}")
    lora_config = config if config.is_lora_enabled or not call.adapters else replace(config, is_lora_enabled=True)
    reason = support.why_not_layer(lora_config, None, None)
    if reason is None and weights.scheme not in support.schemes:
        reason = f"does not read weights of scheme {weights.scheme}"
    if reason is None and call.adapters and max(a.rank for a in call.adapters) > support.max_lora_rank:
        reason = f"applies LoRA up to rank {support.max_lora_rank}"
    if reason is not None:
        raise ValueError(f"executor {executor!r} cannot serve this call: it {reason}")
    info = cls.info()  # type: ignore[attr-defined]
    if info.state == "unavailable":
        raise RuntimeError(f"executor {executor!r} is unavailable: {info.reason}")
    if call.num_tokens == 0:
        return np.zeros((0, config.hidden_dim), np.float64 if call.recipe.name == "float64" else BF16)
    result = cls.run(call)  # type: ignore[attr-defined]
    want_dtype = np.dtype(np.float64) if call.recipe.name == "float64" else BF16
    if not isinstance(result, np.ndarray) or result.shape != x.shape or result.dtype != want_dtype:
        shape = getattr(result, "shape", None)
        raise RuntimeError(
            f"executor {executor!r} returned {type(result).__name__} {shape}, want {want_dtype} {list(x.shape)}"
        )
    return result
