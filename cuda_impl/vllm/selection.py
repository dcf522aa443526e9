# SPDX-License-Identifier: Apache-2.0
"""This package's selector behind vLLM's FP8 MoE constructors.

vLLM's quant methods look up `select_fp8_moe_backend` as a global of their modules and offer no registry. `install`
binds that name, in the modules of the three methods served here, to a function that asks the platform first:

- TPU: ``(NONE, None)``, whatever variable or backend is set (one log line names a backend that cannot apply);
- an out-of-tree platform: vLLM's answer, and NONE where that is an exception;
- CUDA: this package's experts where its selector serves the layer, else vLLM's own answer with one log line;
- any other: vLLM's own answer.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend as VllmFp8MoeBackend

from ...common.backends import Fp8MoeBackend
from ...common.config import FusedMoEConfig, FusedMoEParallelConfig
from ...common.platforms import Platform
from ...common.quant_keys import (
    GroupShape,
    QuantKey,
    create_fp8_quant_key,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from ...common.selector import explain_selection, select_fp8_moe_backend

# Under vLLM's own root, so that its log settings apply.
logger = init_logger("vllm.isomoe")

_QUANTIZATION = "vllm.model_executor.layers.quantization"
# Modules whose methods are served, and what users call them.
METHOD_MODULES = {
    "fp8": f"{_QUANTIZATION}.fp8",
    "compressed-tensors": (
        f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8"
    ),
    "modelopt": f"{_QUANTIZATION}.modelopt",
}
# vLLM's activations whose w13 rows and formula are those of this package. Its "swigluoai" interleaves gate and up.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")
_ALL_GATHER = ("allgather_reducescatter", "naive")

Selector = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Deployment:
    """What vLLM's `VllmConfig` says of a layer beyond its `FusedMoEConfig`.

    Attributes:
      max_loras, max_lora_rank: adapter slots and their rank; 0 without adapters.
      lora_dtype: the adapters' dtype as torch prints it; empty where unknown.
      fully_sharded_loras: A and B are split over tensor-parallel ranks.
      fused_3d_loras: the model's adapters come with gate and up fused, sharing one A.
      round_robin: experts are dealt to ranks one by one.
    """

    max_loras: int = 0
    max_lora_rank: int = 0
    lora_dtype: str = ""
    fully_sharded_loras: bool = False
    fused_3d_loras: bool = False
    round_robin: bool = False

    @classmethod
    def current(cls) -> Deployment:
        """Of vLLM's current configuration; all defaults where none is set."""
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if config is None:
            return cls()
        strategy = getattr(config.parallel_config, "expert_placement_strategy", "linear")
        lora = config.lora_config
        if lora is None:
            return cls(round_robin=strategy == "round_robin")
        return cls(
            max_loras=lora.max_loras,
            max_lora_rank=lora.max_lora_rank,
            lora_dtype=str(lora.lora_dtype).removeprefix("torch."),
            fully_sharded_loras=bool(lora.fully_sharded_loras),
            fused_3d_loras=_is_3d(config) and not getattr(lora, "enable_mixed_moe_lora_format", False),
            round_robin=strategy == "round_robin",
        )


def _is_3d(vllm_config: Any) -> bool:
    from vllm.model_executor.model_loader.utils import get_model_cls

    try:
        return bool(getattr(get_model_cls(vllm_config.model_config), "is_3d_moe_weight", False))
    except Exception:  # a layer built without a model of vLLM's registry (tests)
        return False


def moe_config(config: Any, deployment: Deployment = Deployment()) -> FusedMoEConfig:
    """This package's config of vLLM's `FusedMoEConfig`, by duck typing.

    Raises:
      ValueError, TypeError: a layer that no kernel here describes; the message names the field.
    """
    parallel = config.moe_parallel_config
    gated = bool(config.is_act_and_mul)
    activation = str(getattr(config.activation, "value", config.activation))
    lora = bool(getattr(config, "is_lora_enabled", False))
    return FusedMoEConfig(
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
        hidden_dim=config.hidden_dim,
        intermediate_size=config.intermediate_size,
        activation=activation if gated else activation.removesuffix("_no_mul"),
        has_bias=bool(config.has_bias),
        is_act_and_mul=gated,
        is_lora_enabled=lora,
        max_loras=deployment.max_loras if lora else 0,
        max_lora_rank=deployment.max_lora_rank if lora else 0,
        in_dtype=str(config.in_dtype).removeprefix("torch."),
        moe_parallel_config=FusedMoEParallelConfig(
            tp_size=parallel.tp_size, dp_size=parallel.dp_size, ep_size=parallel.ep_size, ep_rank=parallel.ep_rank,
            use_ep=bool(parallel.use_ep), all2all_backend=parallel.all2all_backend,
        ),
    )  # fmt: skip


def quant_key(key: Any) -> QuantKey | None:
    """This package's key of vLLM's FP8 `QuantKey`; None stays None.

    Activations quantised by one scale a batch become one scale a token: finer, and a row's result stays its own.
    """
    if key is None:
        return None
    shape = key.scale.group_shape
    found = create_fp8_quant_key(bool(key.scale.static), GroupShape(shape.row, shape.col))
    return kFp8DynamicTokenSym if found == kFp8DynamicTensorSym else found


def lora_refusal(config: Any, deployment: Deployment) -> str | None:
    """Why adapters of this deployment would come out wrong in vLLM itself, or None.

    Slots are numbered by each data-parallel rank for itself, and vLLM gathers slot numbers with the tokens; it cuts
    adapters to ranks as if every rank held equally many consecutive experts; and load balancing moves base experts,
    not their adapters.
    """
    parallel = config.moe_parallel_config
    if not getattr(config, "is_lora_enabled", False):
        return None
    if parallel.dp_size > 1:
        return f"data_parallel_size={parallel.dp_size}: ranks number their adapter slots differently"
    if not parallel.use_ep:
        return None
    if getattr(parallel, "enable_eplb", False):
        return "enable_eplb: experts would move away from their adapters"
    if config.num_experts % parallel.ep_size:
        return f"num_experts={config.num_experts} over ep_size={parallel.ep_size}: adapters are cut at other experts"
    if deployment.round_robin:
        return "expert_placement_strategy='round_robin': adapters are cut to consecutive experts"
    return None


def why_not(config: Any, deployment: Deployment, weight_key: Any = None) -> str | None:
    """What stands against this package's experts before its selector is asked, or None."""
    parallel = config.moe_parallel_config
    lora = bool(getattr(config, "is_lora_enabled", False))
    activation = str(getattr(config.activation, "value", config.activation)).removesuffix("_no_mul")
    if config.moe_backend != "auto":
        return f"moe_backend={config.moe_backend!r} was asked for"
    if activation not in ACTIVATIONS:
        return f"activation {activation}: want one of {', '.join(ACTIVATIONS)}"
    if getattr(config, "swiglu_limit", None) is not None:
        return f"swiglu_limit={config.swiglu_limit}: activations are not clamped here"
    if parallel.use_all2all_kernels and parallel.all2all_backend not in _ALL_GATHER:
        return f"all2all_backend {parallel.all2all_backend!r}: want one of {', '.join(_ALL_GATHER)}"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0") and not (
        os.environ.get("ISOMOE_BATCH_INVARIANT") == "1"
    ):
        return "VLLM_BATCH_INVARIANT is set; set ISOMOE_BATCH_INVARIANT=1 as well"
    if getattr(parallel, "enable_eplb", False) and (config.has_bias or quant_key(weight_key) == kFp8StaticTensorSym):
        # vLLM moves weights and scales in place; per-tensor scales and biases are kept here in another form.
        return "enable_eplb: want block or per-channel scales, and no bias"
    if not lora:
        return None
    if parallel.use_all2all_kernels:
        return "tokens of several ranks are gathered (sequence or context parallelism), their adapters are not"
    if deployment.fully_sharded_loras and parallel.tp_size > 1:
        return "fully_sharded_loras: adapters are read whole here"
    if deployment.fused_3d_loras:
        return "adapters with fused gate and up share one A; set enable_mixed_moe_lora_format for separate ones"
    if deployment.lora_dtype not in ("", "bfloat16"):
        return f"lora_dtype {deployment.lora_dtype}: want bfloat16"
    return None


def cuda_platform() -> Platform:
    """The GPU that vLLM serves on."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return Platform.detect() if capability is None else Platform.cuda(capability.major, capability.minor)


def _reasons(config: Any, deployment: Deployment, weight_key: Any, activation_key: Any) -> str:
    """Why each backend with experts for vLLM does not serve, on one line."""
    report = explain_selection(
        moe_config(config, deployment), quant_key(weight_key), quant_key(activation_key),  # type: ignore[arg-type]
        platform=cuda_platform(),
    )  # fmt: skip
    rows = [row for row in report.rows if row.candidate in (Fp8MoeBackend.TRITON.value, Fp8MoeBackend.MARLIN.value)]
    return "; ".join(f"{row.candidate}: {row.reason}" for row in rows)


def _select_cuda(original: Selector, config: Any, weight_key: Any, activation_key: Any, *args: Any, **kwargs: Any):
    deployment = Deployment.current()
    refusal = lora_refusal(config, deployment)
    if refusal is not None:
        raise ValueError(
            f"isomoe: LoRA on MoE layers with {refusal}, so rows would get another adapter's or no update, in vLLM's "
            "experts too. Change the setting, or set ISOMOE_VLLM=0 to run vLLM's experts all the same."
        )
    reason = why_not(config, deployment, weight_key)
    backend = None
    if reason is None:
        try:
            backend, _ = select_fp8_moe_backend(
                moe_config(config, deployment), quant_key(weight_key), quant_key(activation_key),  # type: ignore[arg-type]
                platform=cuda_platform(),
            )  # fmt: skip
        except NotImplementedError:
            reason = _reasons(config, deployment, weight_key, activation_key)
        except (ValueError, TypeError) as error:
            reason = str(error)
    if reason is None:
        from .experts import EXPERTS_OF_BACKEND

        experts = EXPERTS_OF_BACKEND.get(backend) if isinstance(backend, Fp8MoeBackend) else None
        if experts is not None:
            logger.info_once("isomoe: FP8 MoE layers run on isomoe's %s experts", getattr(backend, "name", backend))
            # To vLLM the weights' layout is that of its Triton experts: as loaded.
            return VllmFp8MoeBackend.TRITON, experts
        reason = f"selected backend {getattr(backend, 'name', backend)} has no experts for vLLM"
    logger.warning_once("isomoe: FP8 MoE layers stay on vLLM's experts: %s", reason)
    return original(config, weight_key, activation_key, *args, **kwargs)


def _select(original: Selector, config: Any, weight_key: Any, activation_key: Any, *args: Any, **kwargs: Any):
    """`original` with the platform asked first; vLLM's signature."""
    from vllm.platforms import current_platform

    if current_platform.is_tpu():
        if config.moe_backend != "auto":
            logger.warning_once("isomoe: moe_backend=%r does not apply on a TPU; backend NONE", config.moe_backend)
        return VllmFp8MoeBackend.NONE, None
    if current_platform.is_cuda():
        return _select_cuda(original, config, weight_key, activation_key, *args, **kwargs)
    try:
        return original(config, weight_key, activation_key, *args, **kwargs)
    except Exception as error:
        if not current_platform.is_out_of_tree():
            raise
        logger.warning_once("isomoe: FP8 MoE backend NONE on this platform: %s", error)
        return VllmFp8MoeBackend.NONE, None


def _block_shape(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's block shape for a tensor-parallel share, without the backend that only the selector may refuse.

    From 0.32 on, vLLM maps an explicit ``moe_backend`` to FP8 experts here, before it selects, and raises where it has
    none.
    """
    from vllm.platforms import current_platform

    if current_platform.is_tpu() or current_platform.is_out_of_tree():
        config = copy.copy(config)
        config.moe_backend = "auto"
    return original(config, *args, **kwargs)


# vLLM's global -> what goes before it. Every method looks up the first; later vLLM versions have the others.
_SELECTOR = "select_fp8_moe_backend"
_GUARDS: dict[str, Callable[..., Any]] = {_SELECTOR: _select, "resolve_fp8_moe_weight_block_shape": _block_shape}


def install() -> tuple[str, ...]:
    """Put the `_GUARDS` before vLLM's functions in `METHOD_MODULES`; idempotent.

    Returns:
      The quantisations reached. One whose module this vLLM lacks, or which no longer calls the selector by that
      name, is left alone and named in a warning.
    """
    reached = []
    for name, path in METHOD_MODULES.items():
        try:
            module = importlib.import_module(path)
            getattr(module, _SELECTOR)
        except (ImportError, AttributeError) as error:
            logger.warning("isomoe: %s MoE layers stay as they are: %s", name, error)
            continue
        for label, guard in _GUARDS.items():
            original = getattr(module, label, None)
            if original is not None and not _is_ours(original):
                setattr(module, label, functools.wraps(original)(functools.partial(guard, original)))
        reached.append(name)
    return tuple(reached)


def uninstall() -> None:
    """Undo `install`."""
    for path in METHOD_MODULES.values():
        module = importlib.import_module(path)
        for label in _GUARDS:
            current = getattr(module, label, None)
            if _is_ours(current):
                setattr(module, label, current.args[0])


def _is_ours(function: Any) -> TypeGuard[functools.partial[Any]]:
    return isinstance(function, functools.partial) and function.func in _GUARDS.values()
