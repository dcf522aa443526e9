# SPDX-License-Identifier: Apache-2.0
"""Compile a layer for a TPU topology on a machine without one, and read what the compiler says.

A worker process (libtpu reads its settings once) compiles the whole layer and dumps its schedules: of the expert
kernel, at every tile height, and of what XLA runs around it. `time_model` turns them into time; that is arithmetic,
not a measurement.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.config import FusedMoEConfig
from .blocks import choose_blocks, make_spec
from .kernel_loops import KernelLoops, read_loops
from .layout import padded_rank
from .links import Fabric
from .llo import DUMP_FLAGS, op_bundles, read_schedule
from .spec import Blocks, KernelSpec, LoRASpec, scratch_bytes
from .time_model import ModelTime, model_time
from .topologies import split_topology
from .wires import AUTO, resolve_wires
from .xla_ops import Glue, glue

KERNEL_NAME = "isomoe_expert_kernel"
# The model has terms of their own for the expert kernel and those that sum.
KERNELS = "isomoe_"
HLO_FILE = "layer.hlo"
TIMEOUT_S = 1200.0

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# Variables that would make libtpu look for this machine's own TPU.
_DROPPED = ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one layer.

    Attributes:
      compile_s: seconds to lower and compile the layer (with a schedule: also to write it out).
      code_bytes, temp_bytes: of the layer's executable, per device.
      loops: the kernel's schedule by stage; None without a schedule.
      around: what XLA runs around the kernel; None without a schedule.
    """

    compile_s: float
    code_bytes: int
    temp_bytes: int
    loops: KernelLoops | None
    around: Glue | None


@dataclass(frozen=True)
class AotReport:
    """What compiling one layer showed.

    Attributes:
      topology, generation: the target.
      ep: devices along the expert axis.
      recipe: the FP8 recipe compiled.
      dispatch, transport: how activations arrive and results leave.
      compile_s, code_bytes, temp_bytes, loops, around: as `Compiled`'s.
      vmem_bytes: on-chip scratch the kernel allocates.
      blocks: tile sizes.
      model: the time model at each of the generation's clocks, the reference first; empty without a schedule.
    """

    topology: str
    generation: str
    ep: int
    recipe: str
    dispatch: str
    transport: str
    compile_s: float
    code_bytes: int
    temp_bytes: int
    vmem_bytes: int
    blocks: Blocks
    loops: KernelLoops | None
    around: Glue | None
    model: tuple[ModelTime, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def aot_compile(
    topology: str,
    config: FusedMoEConfig,
    num_tokens: int,
    *,
    scheme: str,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    recipe: str | None = None,
    transport: str = "push_bf16",
    dispatch: str = "ag_bf16",
    fp8_wire: bool = False,
    fp8_input: bool = False,
    schedule: bool = True,
) -> AotReport:
    """Compile one MoE layer for `topology` and report sizes, schedule and the time model.

    Args:
      topology: libtpu's name of the target, for example ``"tpu7x:2x2x1"`` (8 devices).
      config: the layer; ``config.moe_parallel_config.ep_size`` above 1 sets the expert axis, else all devices.
      num_tokens: tokens of all devices.
      scheme: weight scheme.
      max_loras, max_lora_rank: adapter slots; 0 compiles the program without adapters.
      recipe: None takes the generation's default (w8a8 where e4m3 is native, else w8a16).
      dispatch, transport: how activations arrive and results leave (`spec.KernelSpec`); ``"auto"`` takes what
        `wires.resolve_wires` finds cheapest.
      fp8_wire, fp8_input: whether ``"auto"`` may choose FP8 result rows, and FP8 rows for w8a16: roundings that a
        recipe must declare.
      schedule: also read the schedule, for the time model.

    Raises:
      ValueError: a bad argument, or a layer no tile size fits.
      RuntimeError: jax or libtpu is missing, or the compiler refused; the message is the compiler's.
    """
    request, spec = plan_request(
        topology, config, num_tokens, scheme=scheme, max_loras=max_loras, max_lora_rank=max_lora_rank, recipe=recipe,
        transport=transport, dispatch=dispatch, fp8_wire=fp8_wire,
        fp8_input=fp8_input,
    )
    made = compile_layer(request, spec, schedule=schedule)
    return AotReport(
        topology, request["generation"], spec.ep, spec.recipe, spec.dispatch, spec.transport, made.compile_s,
        made.code_bytes, made.temp_bytes, scratch_bytes(spec), spec.blocks, made.loops, made.around,
        model_times(topology, spec, config, num_tokens, made),
    )


def compile_layer(request: dict[str, Any], spec: KernelSpec, *, schedule: bool, what: str = "layer") -> Compiled:
    """Compile what `plan_request` planned, in a process of its own.

    Args:
      request, spec: the plan.
      schedule: whether to read the schedule.
      what: ``"layer"``, or ``"kernel"`` for the expert kernel alone: seconds where a layer of many tokens, whose sorts
        libtpu unrolls, takes minutes; nothing runs around it.

    Raises:
      RuntimeError: as `aot_compile`.
    """
    with tempfile.TemporaryDirectory(prefix="isomoe-aot-") as name:
        folder = Path(name)
        done = _worker({**request, "what": what}, folder if schedule else None)
        loops = around = None
        if schedule:
            loops = read_loops(spec, read_schedule(folder, KERNEL_NAME))
            if what == "layer":
                around = glue((folder / HLO_FILE).read_text(), op_bundles(folder), KERNELS)
    return Compiled(done["compile_s"], done["code_bytes"], done["temp_bytes"], loops, around)


def model_times(
    topology: str, spec: KernelSpec, config: FusedMoEConfig, num_tokens: int, made: Compiled
) -> tuple[ModelTime, ...]:
    """The time model at each of the generation's clocks; empty without a schedule."""
    if made.loops is None or made.around is None:
        return ()
    gen, grid = split_topology(topology)
    fabric = Fabric.of(gen, grid, spec.ep)
    return tuple(
        model_time(gen, fabric, spec, config, num_tokens, made.loops.cost, made.around, clock)
        for clock in gen.clocks_ghz
    )


def plan_request(
    topology: str,
    config: FusedMoEConfig,
    num_tokens: int,
    *,
    scheme: str,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    recipe: str | None = None,
    transport: str = "push_bf16",
    dispatch: str = "ag_bf16",
    fp8_wire: bool = False,
    fp8_input: bool = False,
    ep: int | None = None,
) -> tuple[dict[str, Any], KernelSpec]:
    """What a worker is asked (without ``what``) and the kernel build that is meant; arguments as `aot_compile`'s.

    `ep`: devices along the expert axis, where not `config`'s.
    """
    gen, grid = split_topology(topology)
    recipe = recipe or ("bf16" if scheme == "bf16" else gen.default_recipe)
    devices = gen.cores_per_chip * math.prod(grid)
    if ep is None:
        ep = config.moe_parallel_config.ep_size
        ep = ep if ep > 1 else devices
    if devices % ep:
        raise ValueError(f"ep_size: got {ep}, want a divisor of the {devices} devices of {topology}")
    if AUTO in (dispatch, transport):
        dispatch, transport = resolve_wires(
            gen, Fabric.of(gen, grid, ep), config, num_tokens, scheme=scheme, recipe=recipe, max_loras=max_loras,
            max_lora_rank=max_lora_rank, dispatch=dispatch, transport=transport, fp8_wire=fp8_wire, fp8_input=fp8_input,
        )
    blocks = choose_blocks(
        gen.name, config, num_tokens, ep=ep, scheme=scheme, recipe=recipe, max_loras=max_loras,
        max_lora_rank=max_lora_rank, transport=transport, dispatch=dispatch,
    )
    lora = LoRASpec(max_loras, padded_rank(max_lora_rank)) if max_loras else None
    spec = make_spec(
        config, num_tokens, blocks, ep=ep, scheme=scheme, recipe=recipe, lora=lora, transport=transport,
        dispatch=dispatch,
    )
    return {
        "topology": topology, "generation": gen.name, "devices": devices, "ep": ep, "tokens": num_tokens,
        "config": repr(config), "scheme": scheme, "recipe": recipe, "transport": transport, "dispatch": dispatch,
        "blocks": repr(blocks),
        "lora": repr(lora),
    }, spec


def _worker(request: dict[str, Any], dump: Path | None) -> dict[str, Any]:
    """Run one compilation in its own process."""
    env = {k: v for k, v in os.environ.items() if k not in _DROPPED} | ENVIRONMENT
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    if dump is not None:
        env["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=dump)
        request = {**request, "hlo": str(dump / HLO_FILE)}
    command = [sys.executable, "-m", f"{__package__}.aot_worker"]
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, env=env, timeout=TIMEOUT_S, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            if "error" in answer:
                raise RuntimeError(f"{request['topology']}, T={request['tokens']}: {answer['error']}")
            return answer
    tail = done.stderr[-2000:]
    raise RuntimeError(f"{request['topology']}: the compiling process ended with {done.returncode}: {tail}")
