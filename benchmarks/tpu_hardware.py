# SPDX-License-Identifier: Apache-2.0
"""Check and time whole expert-parallel FP8 MoE layers on a TPU, beside published figures.

    python benchmarks/tpu_hardware.py --model qwen3-coder-30b --tokens 64,512,8192 --transport push_bf16,presum_fp8
    python benchmarks/tpu_hardware.py --model qwen3-coder-480b --tokens 512 --lora 8x16,8x64 --ablate ,no_ship --out r

A cell is one layer call after routing (gather, plan, kernel, sum) with experts over all devices, random FP8 weights
and random or recorded routing (`--routing FILE.npz` with `topk_ids` and `topk_weights`). Before it is timed, a sample
of its rows is held against the numpy reference of the recipe the build declares; a cell that fails is not timed.
Builds with stages left out (`--ablate`) are wrong on purpose: they are timed and not checked.

Time is that of the device by default (`--timer trace`): the duration of the layer's module in jax's profiler, the
slowest device of each call, median, least and most of `--repeats` calls queued at once. `--timer calls` takes host
time over calls in a row until the last result is there, divided by their number: it includes dispatch where that is
slower. `--compare` also times tpu-inference's `fused_ep_moe`, which routes inside, if it can be imported.

`--dry-run` runs a tiny layer on virtual CPU devices, interpreted, to test this script; its times mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from isomoe.common import tolerances
from isomoe.common.config import FusedMoEConfig
from isomoe.common.executors import make_call
from isomoe.common.interpreters import has_tpu_device, prepare
from isomoe.common.metrics import rel_l2
from isomoe.common.numerics import BF16, E4M3
from isomoe.common.presets import MODELS
from isomoe.common.recipes import Recipe, default_recipe
from isomoe.common.reference import reference_moe
from isomoe.common.routing import route
from isomoe.common.weights import LoRAAdapter, MoEWeights
from isomoe.tpu_impl.spec import TRANSPORTS

SAMPLE = 4
"""Rows of a cell that are checked: numpy multiplies whole experts for each."""
TINY = FusedMoEConfig(16, 2, 256, 128)

PUBLISHED_SOURCE = (
    "'Mixture-of-Experts Kernel Comparison on TPU v7x' by the author of tpu-inference PR 3288: whole layer, device "
    "time, EP 8, FP8, random routing, microseconds"
)
PUBLISHED: dict[str, dict[str, dict[int, float]]] = {
    "qwen3-coder-30b": {
        "GMM twice, XLA collectives": {
            64: 94.0, 128: 113.5, 256: 149.8, 512: 234.6, 1024: 229.7, 2048: 337.7, 4096: 527.4, 8192: 1019.3,
        },
        "fused GMM": {
            64: 79.5, 128: 99.5, 256: 137.2, 512: 226.6, 1024: 223.7, 2048: 338.9, 4096: 556.1, 8192: 1050.5,
        },
        "PR 3288": {
            64: 135.5, 128: 151.1, 256: 160.9, 512: 165.0, 1024: 180.2, 2048: 236.8, 4096: 338.5, 8192: 654.2,
        },
        "PR 3040": {
            64: 106.7, 128: 111.3, 256: 119.6, 512: 139.8, 1024: 212.7, 2048: 340.3, 4096: 579.9, 8192: 1173.2,
        },
        "SGLang-JAX v1": {
            64: 176.5, 128: 186.2, 256: 212.8, 512: 267.5, 1024: 383.1, 2048: 613.6, 4096: 1063.6, 8192: 2130.8,
        },
    },
}


@dataclass(frozen=True)
class Cell:
    """One layer call."""

    model: str
    tokens: int
    dispatch: str
    transport: str
    loras: int = 0
    rank: int = 0
    ablate: str = ""


@dataclass(frozen=True)
class Times:
    """Microseconds of a layer call."""

    median: float
    least: float
    most: float
    calls: int

    @classmethod
    def of(cls, found: list[float]) -> Times:
        return cls(round(statistics.median(found), 2), round(min(found), 2), round(max(found), 2), len(found))


# -- inputs -----------------------------------------------------------------------------------------------------


def _filled(rng: np.random.Generator, *shape: int, scale: float) -> np.ndarray:
    """bf16 noise: a million numbers repeated, as only their sizes matter."""
    return np.resize((rng.standard_normal(1_000_003) * scale).astype(BF16), shape)


def random_weights(config: FusedMoEConfig, rng: np.random.Generator) -> MoEWeights:
    """FP8 codes below half of the range, scaled per channel to the size of real weights."""

    def codes(*shape: int) -> np.ndarray:
        raw = np.frombuffer(rng.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
        return (raw & np.uint8(0xBF)).view(E4M3)

    e, h, i = config.num_experts, config.hidden_dim, config.intermediate_size
    return MoEWeights(
        "channel", codes(e, 2 * i, h), codes(e, h, i),
        (rng.uniform(0.5, 1.5, (e, 2 * i)) / h**0.5).astype(np.float32),
        (rng.uniform(0.5, 1.5, (e, h)) / i**0.5).astype(np.float32),
    )


def random_adapters(config: FusedMoEConfig, rng: np.random.Generator, loras: int, rank: int) -> list[LoRAAdapter]:
    e, h, i = config.num_experts, config.hidden_dim, config.intermediate_size
    return [
        LoRAAdapter(
            n, _filled(rng, e, 2, rank, h, scale=h**-0.5), _filled(rng, e, 2, i, rank, scale=0.3 * rank**-0.5),
            _filled(rng, e, rank, i, scale=i**-0.5), _filled(rng, e, h, rank, scale=0.3 * rank**-0.5),
        )
        for n in range(loras)
    ]


@dataclass(frozen=True, eq=False)
class Batch:
    """``x`` bf16 ``[T, H]``, router logits float32 ``[T, E]`` and what follows from them."""

    x: np.ndarray
    logits: np.ndarray
    weights: np.ndarray
    ids: np.ndarray


def batch(config: FusedMoEConfig, tokens: int, routing: str) -> Batch:
    """Random routing, or the first `tokens` of a recording (repeated where it is shorter).

    Raises:
      ValueError: a recording of another layer.
    """
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, config.hidden_dim)).astype(BF16)
    if routing == "random":
        logits = rng.standard_normal((tokens, config.num_experts)).astype(np.float32)
        return Batch(x, logits, *route(logits, config))
    with np.load(routing) as recorded:
        ids, weights = (np.asarray(recorded[name]) for name in ("topk_ids", "topk_weights"))
    if ids.shape[1:] != (config.experts_per_token,) or ids.max() >= config.num_experts:
        raise ValueError(
            f"routing: got topk_ids {list(ids.shape)} up to {ids.max()}, want K={config.experts_per_token} of "
            f"{config.num_experts} experts"
        )
    take = np.arange(tokens) % len(ids)
    ids, weights = ids[take].astype(np.int32), weights[take].astype(np.float32)
    logits = np.full((tokens, config.num_experts), -1e9, np.float32)
    np.put_along_axis(logits, ids, np.log(np.maximum(weights, 1e-30)), axis=1)
    return Batch(x, logits, weights, ids)


# -- the layer --------------------------------------------------------------------------------------------------


class Model:
    """One model's weights on the mesh, and its cells."""

    def __init__(self, config: FusedMoEConfig, devices: list[Any], recipe: str | None) -> None:
        from jax.sharding import Mesh

        from isomoe.tpu_impl.generations import generation
        from isomoe.tpu_impl.tpu_inference.ep_layer import EPLayer, mesh_generation

        self.config, self.mesh = config, Mesh(np.array(devices), ("ep",))
        self.generation, self.interpreted = mesh_generation(self.mesh)
        self.recipe = recipe or generation(self.generation).default_recipe
        self.rng = np.random.default_rng(0)
        self.weights = random_weights(config, self.rng)
        base = EPLayer.of(self.weights, config, self.mesh, "ep", self.recipe)
        self.bf, self.tensors = base.bf, base.operands(self.weights)
        self.adapters: dict[tuple[int, int], list[LoRAAdapter]] = {}
        self.adapter_tensors: dict[tuple[int, int], dict[str, Any]] = {}

    def build(self, cell: Cell) -> Any:
        from isomoe.tpu_impl.blocks import choose_blocks, interpreter_blocks
        from isomoe.tpu_impl.ep_moe import EPBuild
        from isomoe.tpu_impl.executor import InterpretSettings
        from isomoe.tpu_impl.layout import padded_rank
        from isomoe.tpu_impl.spec import LoRASpec

        if self.interpreted:
            rows = cell.tokens * self.config.experts_per_token
            blocks = interpreter_blocks(
                inter=self.config.intermediate_size, rows=rows, max_loras=cell.loras, bf=self.bf
            )
        else:
            blocks = choose_blocks(
                self.generation, self.config, cell.tokens, ep=self.mesh.size, scheme="channel", recipe=self.recipe,
                max_loras=cell.loras, max_lora_rank=cell.rank, transport=cell.transport, dispatch=cell.dispatch,
                bf=self.bf,
            )
        return EPBuild(
            mesh=self.mesh, axis="ep", config=self.config, scheme="channel", recipe=self.recipe, blocks=blocks,
            generation=self.generation, transport=cell.transport, dispatch=cell.dispatch,
            lora=LoRASpec(cell.loras, padded_rank(cell.rank)) if cell.loras else None,
            interpret=InterpretSettings().params() if self.interpreted else False, ablate=cell.ablate,
        )

    def operands(self, build: Any, cell: Cell) -> dict[str, Any]:
        from isomoe.tpu_impl.ep_moe import place
        from isomoe.tpu_impl.layout import lay_out_adapters

        key = (cell.loras, cell.rank)
        if not cell.loras:
            return self.tensors
        if key not in self.adapters:
            self.adapters, self.adapter_tensors = {}, {}  # one load at a time: they may take gigabytes
            self.adapters[key] = random_adapters(self.config, self.rng, *key)
            laid, _, _ = lay_out_adapters(
                self.adapters[key], bf=self.bf, rank=build.lora.rank, experts=build.ep * build.local_experts,
                slots=cell.loras,
            )
            self.adapter_tensors[key] = place(laid, build)
        return self.tensors | self.adapter_tensors[key]

    def call(self, cell: Cell, data: Batch) -> Callable[[], Any]:
        """The cell as a call without arguments, everything it reads on the devices."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from isomoe.tpu_impl import ep_moe

        build = self.build(cell)
        tensors = self.operands(build, cell)
        split = PartitionSpec("ep") if cell.tokens % build.ep == 0 else PartitionSpec()
        on = NamedSharding(self.mesh, split)
        x, weights, ids = (jax.device_put(a, on) for a in (data.x, data.weights, data.ids))
        slots = jax.device_put(self.adapter_ids(cell), on) if cell.loras else None
        if cell.ablate:
            layer = ep_moe.interpreted_layer if self.interpreted else ep_moe.layer
            return lambda: layer(x, weights, ids, slots, tensors, None, build=build)
        whole: Callable[..., Any] = functools.partial(ep_moe.fused_moe_ep, build=build)
        if not self.interpreted:
            whole = jax.jit(whole)  # one module, also where a batch is cut to fit scalar memory
        return lambda: whole(x, weights, ids, tensors, adapter_slots=slots)

    def adapter_ids(self, cell: Cell) -> np.ndarray:
        """Every adapter in turn, and a base row after each round: slots and ids are the same numbers."""
        turn = np.arange(cell.tokens, dtype=np.int32) % (cell.loras + 1)
        return np.where(turn == cell.loras, -1, turn).astype(np.int32)

    def declared(self, cell: Cell) -> Recipe:
        recipe = default_recipe(self.recipe, "channel")
        if recipe.h_group == "token" and self.bf < self.config.intermediate_size:
            recipe = replace(recipe, h_group=self.bf)
        if cell.dispatch == "ag_fp8" and self.recipe == "w8a16":
            recipe = replace(recipe, x_wire="fp8")
        unit = "row" if cell.transport.startswith("push") else "device"
        return replace(recipe, wire=cell.transport.rsplit("_", 1)[1], wire_unit=unit)

    def error(self, cell: Cell, data: Batch, got: np.ndarray) -> float:
        """Relative L2 of the first rows against the declared recipe."""
        rows = slice(0, SAMPLE)
        call = make_call(
            data.x[rows], data.weights[rows], data.ids[rows], self.weights, config=self.config,
            adapters=self.adapters.get((cell.loras, cell.rank)),
            adapter_ids=self.adapter_ids(cell)[rows] if cell.loras else None, ep_size=self.mesh.size,
            recipe=self.declared(cell),
        )
        return rel_l2(got[rows], reference_moe(call))


def tpu_inference_call(model: Model, data: Batch) -> Callable[[], Any]:
    """tpu-inference's own expert-parallel kernel on the same weights and routing (per-channel scales).

    Raises:
      ImportError: it is not installed.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tpu_inference.kernels.fused_moe.v1.kernel import fused_ep_moe

    w, config = model.weights, model.config
    e, h, i = config.num_experts, config.hidden_dim, config.intermediate_size
    mesh = Mesh(model.mesh.devices.reshape(1, -1), ("data", "model"))
    on = NamedSharding(mesh, PartitionSpec("model"))
    assert w.w13_scale is not None and w.w2_scale is not None
    arrays = {
        "tokens": data.x, "gating_output": data.logits,
        "w1": np.ascontiguousarray(w.w13.reshape(e, 2, i, h).swapaxes(2, 3)),
        "w2": np.ascontiguousarray(w.w2.swapaxes(1, 2)),
        "w1_scale": w.w13_scale.reshape(e, 2, 1, 1, i), "w2_scale": w.w2_scale.reshape(e, 1, 1, h),
    }
    placed = {name: jax.device_put(a, on) for name, a in arrays.items()}
    return jax.jit(
        lambda: fused_ep_moe(
            mesh, top_k=config.experts_per_token, renormalize_topk_logits=config.renormalize, subc_quant_w1_sz=h,
            subc_quant_w2_sz=i, **placed,
        )
    )


# -- time -------------------------------------------------------------------------------------------------------


def device_times(planes: Iterable[Any]) -> list[float]:
    """Microseconds of each module run in a profile, of the device that took longest.

    Args:
      planes: of `jax.profiler.ProfileData`.

    Raises:
      RuntimeError: no TPU in the profile, or devices that ran unlike numbers of modules.
    """
    per_device = [
        [event.duration_ns / 1e3 for event in line.events]
        for plane in planes if plane.name.startswith("/device:TPU:")
        for line in plane.lines if line.name == "XLA Modules"
    ]
    if not per_device or not per_device[0] or len({len(runs) for runs in per_device}) > 1:
        raise RuntimeError(
            f"profile: got module runs {[len(runs) for runs in per_device]} by device, want the same number on each; "
            "--timer calls needs no profile"
        )
    return [max(runs) for runs in zip(*per_device, strict=True)]


def _traced(call: Callable[[], Any], repeats: int) -> list[float]:
    import jax

    with tempfile.TemporaryDirectory(prefix="isomoe-trace-") as folder:
        with jax.profiler.trace(folder):
            # Queued: a device that the host starts late would keep the others waiting, and that would count.
            jax.block_until_ready([call() for _ in range(repeats)])
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise RuntimeError("profile: jax wrote none; --timer calls needs no profile")
        return device_times(jax.profiler.ProfileData.from_file(str(files[-1])).planes)


def _in_a_row(call: Callable[[], Any], repeats: int) -> list[float]:
    import jax

    found, calls = [], 10 if repeats > 1 else 1
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - start) / calls * 1e6)
    return found


TIMERS = {"trace": _traced, "calls": _in_a_row}


def measure(call: Callable[[], Any], timer: str, repeats: int) -> Times:
    """Times of a compiled call, after two that are not counted."""
    import jax

    for _ in range(2 if repeats > 1 else 0):
        jax.block_until_ready(call())
    return Times.of(TIMERS[timer](call, repeats))


# -- the whole --------------------------------------------------------------------------------------------------


def cells_of(args: argparse.Namespace, model: str) -> list[Cell]:
    def load(text: str) -> tuple[int, int]:
        loras, _, rank = text.partition("x")
        return int(loras), int(rank or 0)

    found = [
        Cell(model, tokens, dispatch, transport, *lora, ablate)
        for tokens, dispatch, transport, lora, ablate in itertools.product(
            args.tokens, args.dispatch, args.transport, map(load, args.lora), args.ablate
        )
    ]
    # Adapters read the original rows.
    return [c for c in found if not (c.loras and c.dispatch == "ag_fp8")]


def bound(recipe: Recipe) -> float:
    """Of a row against its own recipe, wires included: codes that flip move FP8 rows a little more."""
    return tolerances.TO_RECIPE.bound * (2 if "fp8" in (recipe.wire, recipe.x_wire) else 1)


def run_cell(model: Model, cell: Cell, data: Batch, args: argparse.Namespace) -> dict[str, Any]:
    """Check, then time; the answer has ``times`` or an ``error``."""
    import jax

    call = model.call(cell, data)
    out = np.asarray(jax.block_until_ready(call()))
    found: dict[str, Any] = {**asdict(cell), "recipe": str(model.declared(cell)), "timer": args.timer}
    if not cell.ablate:
        error, most = model.error(cell, data, out), bound(model.declared(cell))
        found["rel_l2"] = float(f"{error:.3g}")
        if not error <= most:
            return {**found, "error": f"rel_l2 {error:.3g} of {SAMPLE} rows, want at most {most}"}
    found["times"] = asdict(measure(call, args.timer, args.repeats))
    published = PUBLISHED.get(cell.model, {})
    found["published"] = {name: at[cell.tokens] for name, at in published.items() if cell.tokens in at}
    return found


def line_of(found: dict[str, Any]) -> str:
    lora = f"{found['loras']}xr{found['rank']}" if found["loras"] else "-"
    text = (
        f"{found['model']:18} T={found['tokens']:<6} {found['dispatch']} {found['transport']:10} lora {lora:6} "
        f"{found['ablate'] or 'whole':13}"
    )
    if "error" in found:
        return f"{text} NOT TIMED: {found['error']}"
    times, published = found["times"], found["published"]
    text += f" {times['median']:10.1f} us [{times['least']:.1f}, {times['most']:.1f}] x{times['calls']}"
    text += f"  rel_l2 {found['rel_l2']}" if "rel_l2" in found else "  not checked"
    if published:
        best = min(published, key=published.__getitem__)
        text += f"  published best {published[best]} ({best})"
    return text


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=_listed(str), default=list(MODELS)[:2], help="comma-separated presets")
    parser.add_argument("--tokens", type=_listed(int), default=[64, 128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--dispatch", type=_listed(str), default=["ag_bf16"])
    parser.add_argument("--transport", type=_listed(str), default=list(TRANSPORTS))
    parser.add_argument("--lora", type=_listed(str), default=["0"], help="0 or COUNTxRANK, comma-separated")
    parser.add_argument("--ablate", type=_listed(str), default=[""], help="stages left out; '' is the layer")
    parser.add_argument("--recipe", default=None, help="w8a8 or w8a16; default: the generation's")
    parser.add_argument("--routing", default="random", help="'random', or an .npz recording")
    parser.add_argument("--timer", choices=TIMERS, default="trace")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compare", action="store_true", help="time tpu-inference's fused_ep_moe too")
    parser.add_argument("--out", type=Path, default=None, help="append one JSON line a cell")
    parser.add_argument("--dry-run", action="store_true", help="a tiny layer, interpreted on the CPU")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.model if name not in MODELS]
    if unknown:
        parser.error(f"--model: got {', '.join(unknown)}, want some of {', '.join(MODELS)}")
    if args.dry_run:
        args.model, args.tokens, args.timer, args.repeats = ["tiny"], [6], "calls", 1
    return args


def results(model: Model, name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every cell of a model, and tpu-inference's layer at every batch size where it is asked for."""
    batches = {tokens: batch(model.config, tokens, args.routing) for tokens in args.tokens}
    for cell in cells_of(args, name):
        try:
            yield run_cell(model, cell, batches[cell.tokens], args)
        except ValueError as error:  # a build that this generation or layer does not have
            yield {**asdict(cell), "error": str(error)}
    for tokens, data in batches.items() if args.compare else ():
        cell = Cell(name, tokens, "-", "fused_ep_moe")
        found: dict[str, Any] = {**asdict(cell), "timer": args.timer, "published": {}}
        try:
            found["times"] = asdict(measure(tpu_inference_call(model, data), args.timer, args.repeats))
        except Exception as error:  # another project's kernel refuses shapes in its own ways; the run goes on
            found["error"] = f"{type(error).__name__}: {error}"
        yield found


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.dry_run:
        prepare()
    elif not has_tpu_device():
        print("No TPU on this machine (no /dev/accel0 or /dev/vfio/0): nothing to time. --dry-run tests the script.")
        return 2
    import jax

    devices = jax.devices("cpu")[:4] if args.dry_run else jax.devices()
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}, timer {args.timer}")
    print(f"published: {PUBLISHED_SOURCE}")
    failed = 0
    for name in args.model:
        model = Model(TINY if args.dry_run else MODELS[name].config, devices, args.recipe)
        for found in results(model, name, args):
            failed += "error" in found
            print(line_of(found), flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(found) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
