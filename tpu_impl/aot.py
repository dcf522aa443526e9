# SPDX-License-Identifier: Apache-2.0
"""Compile a layer for a TPU topology on a machine without one, and read what the compiler says.

Two worker processes (libtpu reads its settings once): one compiles the whole layer for time and sizes, one compiles
the kernel alone, at the tile height the batch mostly uses, and dumps its schedule. `model_us` turns the schedule into
time with the generation's rates; it is arithmetic, not a measurement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..common.config import FusedMoEConfig
from .blocks import choose_blocks, make_spec
from .generations import Generation, generation
from .layout import padded_rank
from .llo import Loop, Schedule, read_schedule
from .spec import LANES, ROW_BLOCK, Blocks, KernelSpec, LoRASpec, scratch_bytes

KERNEL_NAME = "isomoe_expert_kernel"
TIMEOUT_S = 600.0

_GENERATION_OF = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "v7x", "v7x": "v7x"}
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# Variables that would make libtpu look for this machine's own TPU.
_DROPPED = ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True)
class AotReport:
    """What compiling one layer showed.

    Attributes:
      topology, generation: the target.
      ep: devices along the expert axis.
      recipe: the FP8 recipe compiled.
      compile_s: seconds to lower and compile the layer.
      code_bytes, temp_bytes: of the layer's executable, per device.
      vmem_bytes: on-chip scratch the kernel allocates.
      blocks: tile sizes.
      schedule: the kernel's loops at tile height `height`: name, bundles, MXU share, spills, iterations a visit.
      height: rows of the tile the schedule was compiled for.
      model_us: terms of the time model and their total; empty without a schedule.
    """

    topology: str
    generation: str
    ep: int
    recipe: str
    compile_s: float
    code_bytes: int
    temp_bytes: int
    vmem_bytes: int
    blocks: Blocks
    schedule: tuple[dict[str, Any], ...]
    height: int
    model_us: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def split_topology(topology: str) -> tuple[Generation, tuple[int, ...]]:
    """``"tpu7x:2x2x1"`` to the generation and the chip grid.

    Raises:
      ValueError: not a topology name, or a generation without limits.
    """
    name, _, grid = topology.partition(":")
    dims = grid.split("x")
    if name not in _GENERATION_OF or not all(d.isdigit() and int(d) > 0 for d in dims):
        raise ValueError(
            f"topology: got {topology!r}, want one of {', '.join(_GENERATION_OF)} and a chip grid, "
            "for example 'v6e:2x4' or 'tpu7x:2x2x1'"
        )
    return generation(_GENERATION_OF[name]), tuple(int(d) for d in dims)


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
      dispatch, transport: how activations arrive and results leave (`spec.KernelSpec`).
      schedule: also compile the kernel alone and read its schedule.

    Raises:
      ValueError: a bad argument, or a layer no tile size fits.
      RuntimeError: jax or libtpu is missing, or the compiler refused; the message is the compiler's.
    """
    request, spec = plan_request(
        topology, config, num_tokens, scheme=scheme, max_loras=max_loras, max_lora_rank=max_lora_rank, recipe=recipe,
        transport=transport, dispatch=dispatch,
    )
    (gen, grid), blocks = split_topology(topology), spec.blocks
    mean = max(1, round(num_tokens * config.experts_per_token / config.num_experts))
    panels = -(-mean // blocks.rows)
    rows = -(-mean // panels)
    height = next((r for r in blocks.rungs if r >= rows), blocks.rows)
    with tempfile.TemporaryDirectory(prefix="isomoe-aot-") as folder:
        layer = _worker({**request, "what": "layer"}, None)
        kernel = None
        if schedule:
            flat = replace(blocks, rows=height, rungs=(height,), stage=_stage_within(blocks.stage, height))
            _worker({**request, "what": "kernel", "blocks": repr(flat)}, Path(folder))
            kernel = read_schedule(Path(folder), KERNEL_NAME)
            flat_spec = replace(spec, blocks=flat)
    loops: tuple[dict[str, Any], ...] = ()
    model: dict[str, float] = {}
    if kernel is not None:
        loops = _name_loops(flat_spec, kernel, rows)
        model = model_us(gen, grid, flat_spec, config, num_tokens, loops, panels)
    return AotReport(
        topology, gen.name, spec.ep, spec.recipe, layer["compile_s"], layer["code_bytes"], layer["temp_bytes"],
        scratch_bytes(spec), blocks, loops, height, model,
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
) -> tuple[dict[str, Any], KernelSpec]:
    """What a worker is asked (without ``what``) and the kernel build that is meant; arguments as `aot_compile`'s."""
    gen, grid = split_topology(topology)
    recipe = recipe or ("bf16" if scheme == "bf16" else gen.default_recipe)
    devices = gen.cores_per_chip
    for d in grid:
        devices *= d
    ep = config.moe_parallel_config.ep_size
    ep = ep if ep > 1 else devices
    if devices % ep:
        raise ValueError(f"ep_size: got {ep}, want a divisor of the {devices} devices of {topology}")
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


def _stage_within(stage: int, height: int) -> int:
    return max(s for s in range(ROW_BLOCK, min(stage, height) + 1, ROW_BLOCK) if height % s == 0)


def _worker(request: dict[str, Any], dump: Path | None) -> dict[str, Any]:
    """Run one compilation in its own process."""
    env = {k: v for k, v in os.environ.items() if k not in _DROPPED} | ENVIRONMENT
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    if dump is not None:
        env["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
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


def _name_loops(spec: KernelSpec, kernel: Schedule, rows: int) -> tuple[dict[str, Any], ...]:
    """The loops of one visit by name, with how often each runs for a visit of `rows` rows.

    Program order is the kernel's own: gather of the next visit, staging, adapters, tiles, results.
    """
    outer = max((x for x in kernel.loops if x.depth == 1), key=lambda x: x.bundles)
    inner = kernel.children(outer)
    b = spec.blocks
    blocks, chunks = -(-rows // ROW_BLOCK), -(-rows // b.stage)
    names: list[tuple[str, int]] = [("gather", blocks), ("stage", blocks)]
    if b.xbuf == 1:
        names.reverse()
    if spec.lora:
        pairs = min(b.pairs, rows)
        names += [(f"adapter DMA {i}", pairs) for i in range(4)]
    if spec.tiles > 1:
        names.append(("tile", spec.tiles))
    if spec.lora:
        names += [(f"adapter DMA {i}", pairs) for i in range(4, 6)]
    names.append(("ship", chunks))

    def entry(name: str, loop: Loop, bundles: int, times: int) -> dict[str, Any]:
        return {
            "loop": name, "depth": loop.depth, "bundles": bundles, "mxu_share": loop.mxu_share, "spills": loop.spills,
            "times_a_visit": times,
        }

    own = outer.bundles - sum(x.bundles for x in inner)
    if len(inner) != len(names):
        # The compiler unrolled or merged something: report loops as they are, one pass each.
        names = [(f"loop {i}", 1) for i in range(len(inner))]
    found = [entry("visit" if spec.tiles > 1 else "visit and tile", outer, own, 1)]
    return (*found, *(entry(n, x, x.bundles, t) for (n, t), x in zip(names, inner, strict=True)))


def model_us(
    gen: Generation,
    grid: tuple[int, ...],
    spec: KernelSpec,
    config: FusedMoEConfig,
    num_tokens: int,
    loops: tuple[dict[str, Any], ...],
    panels: int = 1,
) -> dict[str, float]:
    """Least time of a layer on one device, uniform routing, by term (microseconds).

    ``hbm``: every visited expert's weights (and adapter pairs) once a panel, rows in and out. ``mxu``: dots at peak.
    ``bundles``: the static schedule at the generation's clock. ``kernel`` is the largest of the three. ``dispatch``:
    all-gather of rows into the device with the fewest links. ``push``: result rows over the bisection (a
    reduce-scatter: partial sums as the all-gather). Links have no wraparound. ``total`` = dispatch + max(kernel, push),
    or their sum for a reduce-scatter. Planning, the final sum and launches are not in it.
    """
    k, experts = config.experts_per_token, config.num_experts
    visited = spec.experts * (1 - (1 - k / experts) ** num_tokens)
    rows = num_tokens * k / spec.ep
    weight_item = 1 if spec.quantized else 2
    matrix = (spec.halves + 1) * spec.hidden * spec.inter
    pair_bytes = 0.0
    if spec.lora:
        pairs = visited * min(spec.lora.slots, max(1.0, rows / max(visited, 1e-9)))
        pair_bytes = pairs * 2 * spec.lora.rank * (spec.halves + 1) * (spec.hidden + spec.inter)
    row_bytes = rows * (4 * LANES * spec.row_words + (1 if spec.fp8_wire else 2) * spec.hidden)
    hbm = (panels * (visited * matrix * weight_item + pair_bytes) + row_bytes) / gen.hbm_gbps / 1e3
    peak = gen.fp8_tflops if spec.recipe == "w8a8" else gen.bf16_tflops
    mxu = 2 * rows * matrix / peak / 1e6
    bundles = sum(x["bundles"] * x["times_a_visit"] for x in loops)
    schedule = panels * visited * bundles / gen.clock_ghz / 1e3
    kernel = max(hbm, mxu, schedule)
    chips = spec.ep / gen.cores_per_chip
    dispatch = push = 0.0
    if chips > 1:
        long = [d for d in grid if d > 1]
        corner, cut = max(1, len(long)), max(1, round(chips / max(grid)))
        data = num_tokens * 2 * spec.hidden
        gather = num_tokens * (spec.hidden + 4 if spec.dispatch == "ag_fp8" else 2 * spec.hidden)
        dispatch = gather * (1 - 1 / chips) / corner / gen.link_gbps / 1e3
        push = data * (0.5 if spec.fp8_wire else 1) * k / 4 / cut / gen.link_gbps / 1e3
        if not spec.pushes:
            push = data * (1 - 1 / chips) / corner / gen.link_gbps / 1e3
    terms = {
        "hbm": hbm, "mxu": mxu, "bundles": schedule, "kernel": kernel, "dispatch": dispatch, "push": push,
        "total": dispatch + (max(kernel, push) if spec.pushes else kernel + push),
    }
    return {name: round(value, 2) for name, value in terms.items()}


