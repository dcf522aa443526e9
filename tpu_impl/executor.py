# SPDX-License-Identifier: Apache-2.0
"""`run_moe("pallas_ep", ...)`: the TPU operation on host arrays, native where there is a TPU, else interpreted.

Importing this module does not import jax, and asking for `info` does not start it where no TPU device file exists.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..common.executors import ExecutorInfo, MoECall
from ..common.interpreters import VIRTUAL_DEVICES, has_tpu_device
from ..common.numerics import BF16
from ..common.platforms import Platform, PlatformKind
from ..common.recipes import Recipe
from ..common.weights import SCHEMES
from .blocks import choose_blocks, interpreter_blocks
from .spec import Blocks, LoRASpec
from .support import TPUSupport
from .wires import codes_at_source

_FORCE_DEVICES = "xla_force_host_platform_device_count"


@dataclass(frozen=True)
class InterpretSettings:
    """How an interpreted run behaves (fields of `pltpu.InterpretParams`).

    The defaults are the fast ones. Tests turn the race detector on and run both DMA modes: copies done when issued
    (``"eager"``) show a buffer overwritten too early, copies done when waited for (``"on_wait"``) a missing wait.
    """

    detect_races: bool = False
    uninitialized_memory: str = "nan"
    dma_execution_mode: str = "eager"

    def params(self) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(
            detect_races=self.detect_races,
            uninitialized_memory=self.uninitialized_memory,  # type: ignore[arg-type]
            dma_execution_mode=self.dma_execution_mode,  # type: ignore[arg-type]
        )


def _jax_started() -> bool:
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def _have_tpu() -> bool:
    if not _jax_started() and not has_tpu_device():
        return False
    import jax

    return jax.default_backend() == "tpu"


def _interpreter_devices(count: int) -> list[Any]:
    """CPU devices to interpret on. Before jax has started, asks it for eight virtual ones.

    Raises:
      RuntimeError: jax runs already with fewer devices, or with too few threads for its interpreter.
    """
    started = _jax_started()
    if not started:
        # jax 0.10's interpreter blocks one thread a device; its pool has as many as NPROC says, else CPU cores.
        os.environ.setdefault("NPROC", str(2 * max(count, VIRTUAL_DEVICES)))
    import jax

    if not started and _FORCE_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(count, VIRTUAL_DEVICES))
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(
            f"ep_size: got {count} with {len(devices)} CPU devices to interpret on; set "
            f"XLA_FLAGS=--{_FORCE_DEVICES}={count} before jax starts"
        )
    threads = int(os.environ.get("NPROC") or os.environ.get("PJRT_NPROC") or os.cpu_count() or 1)
    if count > threads and tuple(int(p) for p in jax.__version__.split(".")[:2]) < (0, 11):
        raise RuntimeError(
            f"ep_size: got {count} with {threads} threads, on which the TPU interpreter of jax {jax.__version__} would "
            f"hang; set NPROC={2 * count} before jax starts"
        )
    return devices[:count]


def _check_recipe(call: MoECall) -> None:
    """Raise unless the declared groups are ones the kernel has."""
    recipe, scheme = call.recipe, call.weights.scheme
    if recipe.lora_input != "bf16":
        raise ValueError(f"recipe: got lora_input={recipe.lora_input!r}, pallas_ep feeds adapters bf16 rows only")
    if recipe.lora_products != "f32":
        raise ValueError(f"recipe: got lora_products={recipe.lora_products!r}, pallas_ep keeps rank products in f32")
    if recipe.fp8_sums:
        raise ValueError(f"recipe: got fp8_sums={recipe.fp8_sums}, pallas_ep sums FP8 products in f32")
    if recipe.name != "w8a8":
        return
    x, h = recipe.x_group, recipe.h_group
    if scheme == "block":
        ok = (x, h) == (128, 128)
    else:
        ok = (x, h) == ("static", "static") or (x == "token" and (h == "token" or isinstance(h, int)))
    if not ok:
        want = "128 and 128" if scheme == "block" else "'token' and 'token' (or a tile width), or 'static' twice"
        raise ValueError(f"recipe: got x_group={x!r}, h_group={h!r} for {scheme} weights, pallas_ep has {want}")


class PallasEPExecutor:
    """The Pallas expert kernel over an expert-parallel mesh of `call.ep_size` devices."""

    name = "pallas_ep"
    support = TPUSupport(
        platforms=(PlatformKind.TPU,), schemes=SCHEMES, recipes=("w8a8", "w8a16", "bf16"), lora=True
    )

    @classmethod
    def info(cls) -> ExecutorInfo:
        if importlib.util.find_spec("jax") is None:
            return ExecutorInfo(cls.name, "unavailable", "jax is not installed (pip install 'isomoe[tpu]')")
        try:
            native = _have_tpu()
        except Exception as error:  # a broken driver: say so rather than raise
            return ExecutorInfo(cls.name, "unavailable", f"jax cannot start: {error}")
        if native:
            return ExecutorInfo(cls.name, "native", "jax sees a TPU", cls.support.recipes, "Pallas expert kernel")
        return ExecutorInfo(
            cls.name, "interpreted", "no TPU here; runs in Pallas's TPU interpreter on CPU devices",
            cls.support.recipes, "Pallas expert kernel, interpreted",
        )

    @classmethod
    def blocks(cls, call: MoECall) -> Blocks:
        """Tile sizes `run` uses for this call."""
        h_group = call.recipe.h_group
        fixed = h_group if isinstance(h_group, int) and call.weights.scheme != "block" else None
        loras, rank = _adapters(call)
        if _have_tpu():
            arch = Platform.detect().arch
            return choose_blocks(
                arch, call.config, call.num_tokens, ep=call.ep_size, scheme=call.weights.scheme,
                recipe=call.recipe.name, max_loras=loras, max_lora_rank=rank, transport=_transport(call),
                dispatch=_dispatch(call, arch), bf=fixed,
            )
        return interpreter_blocks(
            inter=call.config.intermediate_size, rows=call.num_tokens * call.config.experts_per_token,
            max_loras=loras, bf=fixed,
        )

    @classmethod
    def recipe(cls, call: MoECall) -> Recipe:
        """What `run` really uses.

        What travels of the results is bf16 unless the recipe asks for FP8, and where I takes several f tiles a hidden
        scale covers a row of one tile.
        """
        _check_recipe(call)
        actual = call.recipe if call.recipe.wire == "fp8" else call.recipe.with_wire("bf16")
        bf = cls.blocks(call).bf
        if actual.h_group == "token" and bf < call.config.intermediate_size:
            actual = replace(actual, h_group=bf)
        return actual

    @classmethod
    def run(cls, call: MoECall, *, settings: InterpretSettings | None = None) -> np.ndarray:
        """bfloat16 ``[T, H]``.

        Args:
          call: the checked call.
          settings: how to interpret; None takes the fast settings. Ignored on a TPU.

        Raises:
          ValueError: a recipe the kernel does not have, or a layer no tile size fits.
          RuntimeError: too few devices; the message says what to set.
        """
        _check_recipe(call)
        native = _have_tpu()
        if native:
            import jax

            devices = jax.devices()
            if len(devices) < call.ep_size:
                raise RuntimeError(f"ep_size: got {call.ep_size}, this machine has {len(devices)} TPU devices")
            devices = devices[: call.ep_size]
        else:
            devices = _interpreter_devices(call.ep_size)
        return _run(call, cls.blocks(call), devices, None if native else (settings or InterpretSettings()))


_MOST_PROGRAMS = 24
_programs: set[Any] = set()


def _forget_old_programs(program: Any) -> None:
    """Interpreted programs take tens of megabytes each: keep a few, then start over."""
    from .ep_moe import interpreted_layer

    if program not in _programs and len(_programs) >= _MOST_PROGRAMS:
        interpreted_layer.clear_cache()  # type: ignore[attr-defined]  # jax's stub lacks it
        _programs.clear()
    _programs.add(program)


def _run(call: MoECall, blocks: Blocks, devices: list[Any], settings: InterpretSettings | None) -> np.ndarray:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from .ep_moe import EPBuild, fused_moe_ep, place
    from .layout import activation_scales, lay_out_adapters, lay_out_weights, padded_rank

    weights = call.weights
    static = call.recipe.x_group == "static"
    build = EPBuild(
        mesh=Mesh(np.array(devices), ("ep",)),
        axis="ep",
        config=call.config,
        num_experts=weights.num_experts,
        scheme=weights.scheme,
        recipe=call.recipe.name,
        blocks=blocks,
        generation="v7x" if settings else Platform.detect().arch,
        transport=_transport(call),
        dispatch=_dispatch(call, None if settings else Platform.detect().arch),
        static_scales=static,
        interpret=settings.params() if settings else False,
    )
    experts = call.ep_size * build.local_experts
    operands = lay_out_weights(weights, bf=blocks.bf, experts=experts)
    whole = NamedSharding(build.mesh, PartitionSpec())
    ids, slots = _local_ids(call), None
    if call.uses_adapters:
        assert call.adapter_ids is not None
        rank = padded_rank(max(a.rank for a in call.adapters))
        num_slots = len(call.adapters)
        laid, shared_a13, shared_b2 = lay_out_adapters(
            call.adapters, bf=blocks.bf, rank=rank, experts=experts, slots=num_slots
        )
        operands |= laid
        build = replace(build, lora=LoRASpec(num_slots, rank, shared_a13, shared_b2))
        slots = jax.device_put(_slots(call), whole)
    scale = jax.device_put(activation_scales(weights), whole) if static else None
    if settings:
        _forget_old_programs((build, call.num_tokens))
    try:
        out = fused_moe_ep(
            jax.device_put(call.x, whole), jax.device_put(call.topk_weights, whole), jax.device_put(ids, whole),
            place(operands, build), build=build, adapter_slots=slots, act_scale=scale,
        )
        return np.asarray(out).astype(BF16, copy=False)
    except Exception:
        if settings:
            from jax.experimental.pallas import tpu as pltpu

            pltpu.reset_tpu_interpret_mode_state()
        raise


# Result rows are never float32: bf16 is the widest a row travels in.
_TRANSPORT_OF = {
    ("f32", "row"): "push_bf16", ("bf16", "row"): "push_bf16", ("fp8", "row"): "push_fp8",
    ("f32", "device"): "rs_bf16", ("bf16", "device"): "rs_bf16", ("fp8", "device"): "presum_fp8",
}


def _transport(call: MoECall) -> str:
    return _TRANSPORT_OF[call.recipe.wire, call.recipe.wire_unit]


def _dispatch(call: MoECall, generation: str | None) -> str:
    """How rows travel: as declared, or on a TPU (`generation`) the cheaper way with the same bits."""
    if call.recipe.x_wire == "fp8":
        return "ag_fp8"
    if generation is None:
        return "ag_bf16"
    loras, rank = _adapters(call)
    return codes_at_source(
        generation, call.config, call.num_tokens, ep=call.ep_size, scheme=call.weights.scheme,
        recipe=call.recipe.name, transport=_transport(call), static_scales=call.recipe.x_group == "static",
        max_loras=loras, max_lora_rank=rank,
    )


def _adapters(call: MoECall) -> tuple[int, int]:
    """Adapters of the call and their largest rank; (0, 0) where no row uses one."""
    if not call.uses_adapters:
        return 0, 0
    return len(call.adapters), max((a.rank for a in call.adapters), default=0)


def _local_ids(call: MoECall) -> np.ndarray:
    """Ids into `call.weights`: int32 ``[T, K]``, -1 where skipped."""
    if call.expert_map is None:
        return call.topk_ids
    known = (call.topk_ids >= 0) & (call.topk_ids < len(call.expert_map))
    return np.where(known, call.expert_map[np.where(known, call.topk_ids, 0)], -1).astype(np.int32)


def _slots(call: MoECall) -> np.ndarray:
    """Adapter slot a token uses: int32 ``[T]``, -1 = base."""
    assert call.adapter_ids is not None
    slot_of = {a.adapter_id: i for i, a in enumerate(call.adapters)}
    return np.array([slot_of.get(int(a), -1) for a in call.adapter_ids], np.int32)
