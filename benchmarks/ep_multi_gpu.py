# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over the GPUs of one machine, a process each: right first, then where the time goes.

    python benchmarks/ep_multi_gpu.py [--gpus N] [--model 480B,30B] [--tokens 1,64,1024,8192] [--out FILE]
    python benchmarks/ep_multi_gpu.py --backend gloo --device cpu --tiny      (a dry run on interpreted kernels)

Right: the ranks' results against one GPU that holds all experts, on the same tokens (relative L2 at most 4e-3), with
8 adapters that lie in other slots on every rank, uneven token counts, an idle rank, experts that do not divide, linear
and round-robin placement; base rows with and without adapters, bit for bit; the whole step in a CUDA graph, replayed
100 times over changing inputs. Then times (CUDA graphs, cold L2, the slowest rank's median): the step, and its gather,
experts and reduce alone. "hidden" is the share of gather and reduce that the step's chunks hide behind the experts;
"efficiency" is the experts alone (one GPU with its share of the experts and all tokens at hand) over the step.

NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1 are set where the environment does not set them. The last line
is a verdict in JSON; exits 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if importlib.util.find_spec("isomoe") is None:  # a checkout that is not installed
    _shim = tempfile.mkdtemp()
    (Path(_shim) / "isomoe").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
    sys.path.insert(0, _shim)

import torch
import torch.distributed as dist

from isomoe.common.placement import ExpertPlacement
from isomoe.cuda_impl import expert_parallel as ep
from isomoe.cuda_impl import fused_moe
from isomoe.cuda_impl.bench import data
from isomoe.cuda_impl.bench.clock import GraphClock, Timing
from isomoe.cuda_impl.bench.reference import rel_l2
from isomoe.cuda_impl.prepare import AdapterSlots, PreparedWeights
from isomoe.cuda_impl.quantize import quantize_rows

BOUND = 4e-3  # the order of float32 sums, and one bf16 rounding a rank
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
LORA = data.LoraSetting(8, 16)
TINY = data.Layer("tiny", 256, 128, 4, 4, 2)
REPLAYS = 100
TINY_CALLS = ("step", "gather", "gather fp8 rows", "experts", "reduce", "step in 2 chunks")


@dataclass(frozen=True)
class Args:
    """What every rank is told."""

    ranks: int
    port: int
    backend: str
    device: str
    tiny: bool
    models: tuple[str, ...]
    tokens: tuple[int, ...]
    rounds: int
    out: str


class WallClock:
    """A dry run's clock: one call by the host's clock. Its figures mean nothing."""

    def time(self, calls, rounds: int) -> dict[str, Timing | str]:
        found: dict[str, Timing | str] = {}
        for name, several in calls.items():
            start = time.perf_counter()
            several[0]()
            found[name] = Timing.of([1e6 * (time.perf_counter() - start)])
        return found


class Rank:
    """One process: its device, its findings, and shorthand for what all cases need."""

    def __init__(self, rank: int, args: Args) -> None:
        self.rank, self.args = rank, args
        self.device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
        self.checks: list[dict] = []
        self.times: list[dict] = []

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def worst(self, value: float) -> float:
        """The largest over the ranks."""
        t = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return float(t)

    def record(self, check: str, ok: bool, **figures: float) -> None:
        """A finding that holds where it holds on every rank."""
        found = {name: self.worst(value) for name, value in figures.items()}
        fine = self.worst(0.0 if ok else 1.0) == 0.0
        self.checks.append({"check": check, "ok": fine, **found})
        shown = " ".join(f"{k}={v:.3g}" for k, v in found.items())
        self.say(f"{'ok  ' if fine else 'FAIL'} {check} {shown}")


def share(weights: PreparedWeights, experts: torch.Tensor) -> PreparedWeights:
    """Some experts of a layer."""
    at = lambda t: None if t is None else t[experts].contiguous()  # noqa: E731
    return PreparedWeights(
        weights.w13[experts].contiguous(), weights.w2[experts].contiguous(), at(weights.w13_scale), at(weights.w2_scale)
    )


def turned(slots: AdapterSlots, experts: torch.Tensor, by: int) -> AdapterSlots:
    """The same adapters, of some experts, each in a slot `by` places further on."""
    order = torch.arange(slots.slot_ids.shape[0], device=experts.device).roll(by)
    stacks = (slots.a13, slots.b13, slots.a2, slots.b2)
    return AdapterSlots(
        slots.slot_ids[order].contiguous(), slots.ranks[order].contiguous(),
        *(s[order][:, experts].contiguous() for s in stacks),
    )  # fmt: skip


@dataclass
class Setup:
    """A layer on one GPU and this rank's share of it."""

    layer: data.Layer
    placement: ExpertPlacement
    weights: PreparedWeights
    adapters: AdapterSlots

    @classmethod
    def of(
        cls, me: Rank, layer: data.Layer, strategy: str, whole: PreparedWeights, slots: AdapterSlots
    ) -> Setup:
        placement = ExpertPlacement(layer.experts, me.args.ranks, strategy)
        mine = torch.from_numpy(placement.experts_of(me.rank)).to(me.device)
        return cls(layer, placement, share(whole, mine), turned(slots, mine, me.rank))

    def step(self, b: data.Batch, lora: bool, **options) -> torch.Tensor:
        """The gathered layer on this rank's tokens."""
        return ep.fused_moe_gathered(
            b.x, b.topk_weights, b.topk_ids, self.weights, self.placement, recipe="w8a8",
            adapters=self.adapters if lora else None, adapter_ids=b.adapter_ids if lora else None, **options,
        )  # fmt: skip


def rows_of(b: data.Batch, start: int, stop: int) -> data.Batch:
    """Some rows of a batch, in memory of their own."""
    names = ("x", "topk_weights", "topk_ids", "adapter_ids", "local")
    return replace(b, **{n: getattr(b, n)[start:stop].clone() for n in names})


def check_results(me: Rank, layer: data.Layer, scheme: str) -> None:
    """The gathered and replicated layers against one GPU with all experts."""
    whole, slots = data.random_weights(layer, scheme, me.device), data.random_adapters(layer, LORA, me.device)
    # Uneven, and the last rank has none.
    per = 2 if me.args.tiny else 37
    counts = [per + 3 * r for r in range(me.args.ranks)]
    counts[-1] = 0
    total, first = sum(counts), sum(counts[: me.rank])
    batch = data.random_batch(layer, total, 0, me.device, adapters=LORA.count)
    mine = rows_of(batch, first, first + counts[me.rank])
    want = {}
    for lora in (False, True):
        want[lora] = fused_moe(
            batch.x, batch.topk_weights, batch.topk_ids, whole, recipe="w8a8", adapters=slots if lora else None,
            adapter_ids=batch.adapter_ids if lora else None,
        )[first : first + counts[me.rank]]  # fmt: skip
    assert mine.adapter_ids is not None
    base = mine.adapter_ids < 0
    forms: list[dict] = [{"gather": "bf16"}, {"gather": "bf16", "wire": "bf16", "chunks": 2}, {"gather": "fp8"}]
    for strategy in ("linear", "round_robin"):
        setup = Setup.of(me, layer, strategy, whole, slots)
        for options in forms[:1] if me.args.tiny else forms:
            how = " ".join(f"{k}={v}" for k, v in options.items())
            name = f"{layer.name} E{layer.experts} {scheme} {strategy} {how}"
            plain = setup.step(mine, False, token_counts=counts, **options)
            error = rel_l2(plain, want[False]) if len(plain) else 0.0
            me.record(name, error <= BOUND and plain.shape == mine.x.shape, rel_l2=error)
            if options["gather"] == "fp8":
                continue
            got = setup.step(mine, True, token_counts=counts, **options)
            error = rel_l2(got, want[True]) if len(got) else 0.0
            changed = rel_l2(got[~base], want[False][~base]) if bool((~base).any()) else 1.0
            me.record(f"{name} LoRA", error <= BOUND and changed > BOUND, rel_l2=error)
            me.record(f"{name} base rows' bits", bool(torch.equal(got[base], plain[base])))
        if me.args.tiny:
            continue
        everywhere = ep.fused_moe_replicated(
            batch.x, batch.topk_weights, batch.topk_ids, setup.weights, setup.placement, recipe="w8a8",
            adapters=setup.adapters, adapter_ids=batch.adapter_ids,
        )[first : first + counts[me.rank]]  # fmt: skip
        error = rel_l2(everywhere, want[True]) if len(everywhere) else 0.0
        me.record(f"{layer.name} {scheme} {strategy} replicated LoRA", error <= BOUND, rel_l2=error)


def check_graph(me: Rank, layer: data.Layer) -> None:
    """The whole step, captured; every replay over other inputs gives what an eager call gives."""
    whole, slots = data.random_weights(layer, "block", me.device), data.random_adapters(layer, LORA, me.device)
    setup = Setup.of(me, layer, "linear", whole, slots)
    tokens = 2 if me.args.tiny else 64
    counts = [tokens] * me.args.ranks
    batches = [
        data.random_batch(layer, tokens, i + 10 * me.rank, me.device, adapters=LORA.count)
        for i in range(2 if me.args.tiny else 4)
    ]
    names = ("x", "topk_weights", "topk_ids", "adapter_ids")
    for chunks in (1,) if me.args.tiny else (1, 2):
        live = rows_of(batches[0], 0, tokens)
        call = functools.partial(setup.step, live, True, token_counts=counts, chunks=chunks)
        wants = [setup.step(b, True, token_counts=counts, chunks=chunks) for b in batches]
        call()
        replay: Callable[[], torch.Tensor] = call
        if me.args.device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = call()

            def replayed(graph=graph, out=out) -> torch.Tensor:
                graph.replay()
                return out

            replay = replayed
        wrong = 0
        for i in range(2 if me.args.tiny else REPLAYS):
            batch = batches[i % len(batches)]
            for n in names:
                getattr(live, n).copy_(getattr(batch, n))
            wrong += not torch.equal(replay(), wants[i % len(batches)])
        me.record(f"{layer.name} step in a graph, chunks {chunks}: replays that differ", wrong == 0, wrong=float(wrong))


def link(me: Rank, clock) -> None:
    """Bandwidth of an all-gather: bytes that each rank receives, over time."""
    size = 1 << (16 if me.args.tiny else 28)
    local = torch.zeros(size, dtype=torch.uint8, device=me.device)
    everyone = local.new_empty(size * me.args.ranks)

    def call() -> torch.Tensor:
        dist.all_gather_into_tensor(everyone, local)
        return everyone

    timing = clock.time({"link": [call]}, me.args.rounds)["link"]
    if isinstance(timing, Timing):
        us = me.worst(timing.us)
        me.times.append({"link_gbps": size * (me.args.ranks - 1) / us / 1e3, "bytes": size, "us": us})
        me.say(f"link: {me.times[-1]['link_gbps']:.1f} GB/s into each rank")


def times(me: Rank, layer: data.Layer, scheme: str, clock) -> None:
    """Step, gather, experts and reduce at every batch size."""
    whole, slots = data.random_weights(layer, scheme, me.device), data.random_adapters(layer, LORA, me.device)
    setup = Setup.of(me, layer, "linear", whole, slots)
    del whole, slots
    where = ep.expert_map(setup.placement, me.rank, me.device)
    group = 128 if scheme == "block" else "token"
    for tokens in me.args.tokens:
        counts = [tokens] * me.args.ranks
        b = data.random_batch(layer, tokens, 10 * me.rank, me.device, adapters=LORA.count)
        rows = ep.Tokens(b.x, b.topk_weights, b.topk_ids, b.adapter_ids)
        everyone = ep.gather_tokens(rows, counts).wait()
        wire = {"wire": "bf16", "token_counts": counts}

        def experts(lora: bool, everyone=everyone) -> torch.Tensor:
            return fused_moe(
                everyone.x, everyone.topk_weights, everyone.topk_ids, setup.weights, recipe="w8a8", expert_map=where,
                adapters=setup.adapters if lora else None, adapter_ids=everyone.adapter_ids if lora else None,
            )  # fmt: skip

        def gather_fp8(b=b, counts=counts) -> torch.Tensor:
            codes, scale = quantize_rows(b.x, group)
            return ep.gather_tokens(ep.Tokens(codes, b.topk_weights, b.topk_ids, None, scale), counts).wait().x

        partial = experts(False)
        calls = {
            "step": functools.partial(setup.step, b, False, gather="bf16", **wire),
            "step LoRA": functools.partial(setup.step, b, True, **wire),
            "step fp8 rows": functools.partial(setup.step, b, False, gather="fp8", **wire),
            "gather": lambda rows=rows, counts=counts: ep.gather_tokens(rows, counts).wait().x,
            "gather fp8 rows": gather_fp8,
            "experts": functools.partial(experts, False),
            "experts LoRA": functools.partial(experts, True),
            "reduce": lambda partial=partial, counts=counts: ep.reduce_rows(partial, counts, me.rank).wait(),
        }
        if tokens >= 1024 or me.args.tiny:
            calls["step in 2 chunks"] = functools.partial(setup.step, b, False, gather="bf16", chunks=2, **wire)
        if me.args.tiny:
            calls = {n: call for n, call in calls.items() if n in TINY_CALLS}
        found = clock.time({n: [call] for n, call in calls.items()}, me.args.rounds)
        # Every rank takes part in each maximum; a call that failed on one rank has no time anywhere.
        us = {n: me.worst(t.us if isinstance(t, Timing) else float("inf")) for n, t in sorted(found.items())}
        failed = sorted({str(t) for t in found.values() if not isinstance(t, Timing)})
        me.record(f"{layer.name} {scheme} T={tokens}: every call could be timed", not failed)
        if float("inf") in us.values():
            me.times.append({"model": layer.name, "scheme": scheme, "tokens_per_rank": tokens, "failed": failed})
            continue
        moved = us["gather"] + us["reduce"]
        row = {
            "model": layer.name, "scheme": scheme, "tokens_per_rank": tokens, "ranks": me.args.ranks, "us": us,
            "efficiency": us["experts"] / us["step"],
            "gather_gbps": b.x.numel() * b.x.element_size() * (me.args.ranks - 1) / us["gather"] / 1e3,
        }  # fmt: skip
        for name in ("step", "step in 2 chunks"):
            if name in us:
                hidden = (moved + us["experts"] - us[name]) / moved if moved else 0.0
                row[f"hidden {name}"] = max(0.0, min(1.0, hidden))
        me.times.append(row)
        me.say(f"{layer.name} {scheme} T={tokens} a rank: " + ", ".join(f"{n} {v:.1f}" for n, v in us.items()) + " us")


def worker(rank: int, args: Args) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    me = Rank(rank, args)
    options: dict = {"timeout": datetime.timedelta(seconds=240)}
    if args.device == "cuda":
        torch.cuda.set_device(me.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        options["device_id"] = me.device
    else:
        torch.set_num_threads(1)
    dist.init_process_group(args.backend, rank=rank, world_size=args.ranks, **options)
    layers = [replace(TINY, experts=2 * args.ranks + 1, local=2 * args.ranks + 1)] if args.tiny else [
        replace(found, local=found.experts) for found in map(data.find_layer, args.models)
    ]  # fmt: skip
    clock = GraphClock(fixed=(3, 15)) if args.device == "cuda" else WallClock()
    # A few experts that do not divide by the ranks are enough to be wrong with.
    few = 8 * args.ranks + 1
    small = layers if args.tiny else [replace(layer, experts=few, local=few) for layer in layers]
    for layer in small:
        for scheme in ("block",) if args.tiny else ("block", "channel"):
            check_results(me, layer, scheme)
    check_graph(me, small[0])
    link(me, clock)
    for layer in layers:
        times(me, layer, "block", clock)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        failed = [c["check"] for c in me.checks if not c["ok"]]
        device = torch.cuda.get_device_name(me.device) if args.device == "cuda" else "cpu, interpreted: a dry run"
        result = {
            "device": device, "ranks": args.ranks, "backend": args.backend,
            "environment": {n: os.environ.get(n) for n in QUIET}, "checks": me.checks, "times": me.times,
        }  # fmt: skip
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(json.dumps(result, indent=1))
        print(json.dumps({
            "verdict": "fail" if failed else "pass", "ranks": args.ranks, "passed": len(me.checks) - len(failed),
            "failed": failed,
        }), flush=True)  # fmt: skip
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=0, help="processes; default: every GPU, or 2")
    parser.add_argument("--model", default="480B,30B")
    parser.add_argument("--tokens", default="1,64,1024,8192", help="per rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny layer and few calls: the dry run")
    parser.add_argument("--out", default="ep_multi_gpu.json")
    given = parser.parse_args()
    if given.device == "cpu" and (given.backend != "gloo" or not given.tiny):
        parser.error("--device cpu: want --backend gloo --tiny with it")
    if given.device == "cuda" and torch.cuda.device_count() < max(2, given.gpus):
        parser.error(f"--gpus: got {torch.cuda.device_count()} CUDA devices, want at least {max(2, given.gpus)}")
    if given.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = given.gpus or (torch.cuda.device_count() if given.device == "cuda" else 2)
    tokens = tuple(int(t) for t in given.tokens.split(","))
    args = Args(
        ranks, port, given.backend, given.device, given.tiny, tuple(given.model.split(",")),
        (1,) if given.tiny else tokens, given.rounds, given.out,
    )  # fmt: skip
    torch.multiprocessing.spawn(worker, args=(args,), nprocs=ranks, join=True)
    checks = json.loads(Path(args.out).read_text())["checks"]
    return 0 if all(c["ok"] for c in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
