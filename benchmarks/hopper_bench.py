# SPDX-License-Identifier: Apache-2.0
"""Check and time the Hopper FP8 MoE layer on one GPU, against a float32 reference and the roofline.

    python benchmarks/hopper_bench.py --shapes q30b --tokens 64,1024 --schemes block,channel --lora 0,16x8 --out r.jsonl

A cell is a whole layer call (sort, quantise, both GEMMs, LoRA, combine; no router) captured in a CUDA graph and
replayed: 15 ms of warm-up, two rounds of 50 ms, the median of each, their mean reported and their difference as
spread. Input sets of one graph touch more weights than the L2 holds, so weights come from HBM. Every timed cell is
first held against a float32 reference of its own recipe, with the allocator's memory poisoned (0xFF) beforehand. The
floor is the larger of bytes over 4282 GB/s (each touched expert's weights and scales, and each touched (expert,
adapter)'s matrices, once; x and y once) and FLOPs over 1553 TFLOP/s (bf16 ones over 807): the rates of a device copy
and of cuBLAS's best fp8 and bf16 products on the same card.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from dataclasses import dataclass

import torch

from isomoe.cuda_impl.hopper.fused import HopperAdapters, HopperWeights, hopper_fused_moe, prepare_weights
from isomoe.cuda_impl.hopper.regime import DECODE16, DECODE32, DECODE64, ONE_TOKEN, PREFILL

COPY_GBPS, FP8_TFLOPS, BF16_TFLOPS = 4282.0, 1553.0, 807.0
F8 = torch.float8_e4m3fn
TOPK = 8


@dataclass(frozen=True)
class Shape:
    """Hidden and intermediate size, experts routed over, experts held here."""

    h: int
    i: int
    experts: int
    local: int


SHAPES = {
    "q30b": Shape(2048, 768, 128, 128),  # Qwen3-Coder-30B-A3B
    "q35b": Shape(2048, 512, 256, 256),  # Qwen3.6-35B-A3B
    "q480b": Shape(6144, 2560, 160, 20),  # Qwen3-Coder-480B-A35B, one of eight expert-parallel ranks
    "odd": Shape(1440, 208, 24, 24),  # nothing a multiple of a tile
}


def quantize(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The package's quantiser on f32 ``[..., D]``; `group` columns a scale (0: the whole row)."""
    d = x.shape[-1]
    pad = (-d) % group if group else 0
    g = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (-1, group or d))
    scale = g.abs().amax(-1, keepdim=True).clamp(min=1e-10) * torch.tensor(1 / 448, device=x.device)
    q = (g * (1.0 / scale)).clamp(-448, 448).to(F8)
    return q.flatten(-2)[..., :d], scale.squeeze(-1)


def dequantize(q: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    d = q.shape[-1]
    return q.float() * (scale.repeat_interleave(group, -1)[..., :d] if group else scale)


def make_weights(shape: Shape, scheme: str, seed: int = 1) -> HopperWeights:
    gen = torch.Generator("cuda").manual_seed(seed)
    parts = []
    for n, k, halves in ((2 * shape.i, shape.h, 2), (shape.h, shape.i, 1)):
        q = torch.empty((shape.local, n, k), dtype=F8, device="cuda")
        scales = []
        for e in range(shape.local):
            w = torch.randn(n, k, generator=gen, device="cuda") * k**-0.5
            w *= torch.exp(0.3 * torch.randn(n, 1, generator=gen, device="cuda"))
            if scheme == "channel":
                s = w.abs().amax(1, keepdim=True) / 448
                q[e] = (w / s).to(F8)
                scales.append(s[:, 0])
            else:
                half = w.view(halves, n // halves, k)
                pad = (0, (-k) % 128, 0, (-half.shape[1]) % 128)
                t = torch.nn.functional.pad(half, pad).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
                s = t.abs().amax((2, 4)).clamp(min=1e-10) / 448
                t = (t / s[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)[:, : half.shape[1], :k]
                q[e] = t.reshape(n, k).to(F8)
                scales.append(s.flatten(0, 1))
        parts += [q, torch.stack(scales)]
    return prepare_weights(scheme, parts[0], parts[2], parts[1], parts[3])


def dense(weights: HopperWeights, which: str, e: int) -> torch.Tensor:
    """One expert's matrix in float32."""
    w, s = getattr(weights, which)[e].float(), getattr(weights, which + "_scale")[e]
    if weights.scheme == "channel":
        return w * s[:, None]
    halves = 2 if which == "w13" else 1
    n, k = w.shape
    s = s.view(halves, -1, s.shape[1]).repeat_interleave(128, 1)[:, : n // halves].repeat_interleave(128, 2)[:, :, :k]
    return w * s.reshape(n, k)


def make_adapters(shape: Shape, rank: int, count: int, shared: bool = False, seed: int = 2) -> HopperAdapters:
    gen = torch.Generator("cuda").manual_seed(seed)

    def rand(*dims: int, gain: float) -> torch.Tensor:
        t = torch.empty(dims, dtype=torch.bfloat16, device="cuda")
        return t.normal_(generator=gen).mul_(gain)

    e, outer = shape.local, 1 if shared else shape.local
    return HopperAdapters(
        a13=rand(count, outer, 2, rank, shape.h, gain=shape.h**-0.5),
        b13=rand(count, e, 2, shape.i, rank, gain=0.5 * rank**-0.5),
        a2=rand(count, e, rank, shape.i, gain=shape.i**-0.5),
        b2=rand(count, outer, shape.h, rank, gain=0.5 * rank**-0.5),
    )


@dataclass
class Batch:
    """One input set; `local` holds the local expert of each pair or -1."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    slots: torch.Tensor | None
    expert_map: torch.Tensor | None
    local: torch.Tensor


def make_batch(shape: Shape, tokens: int, index: int, slots: int, routing: str = "uniform") -> Batch:
    gen = torch.Generator().manual_seed(1000 * tokens + 3)
    order = torch.randperm(shape.experts, generator=gen)
    gen.manual_seed(1000 * tokens + 17 * index + 5)
    emap = None
    if shape.local < shape.experts:
        emap = torch.full((shape.experts,), -1, dtype=torch.int32)
        emap[: shape.local] = torch.arange(shape.local, dtype=torch.int32)
    if routing == "skewed":  # half of all pairs on one expert, some skipped
        ids = torch.rand(tokens, shape.experts, generator=gen).topk(TOPK, 1).indices
        ids[:, ::2] = 3
        ids[::5, 1] = -1
        ids[::7, 3] = shape.experts + 4
    elif tokens == 1 and emap is None:  # disjoint experts from set to set
        at = (index * TOPK) % shape.experts
        ids = order[at : at + TOPK][None]
    elif tokens == 1:  # one local pair
        ids = torch.cat(
            [torch.tensor([index % shape.local]), shape.local + torch.arange(TOPK - 1)]
        )[None]
    else:
        ids = torch.rand(tokens, shape.experts, generator=gen).topk(TOPK, 1).indices
    ids = ids.to(torch.int32)
    local = torch.where((ids >= 0) & (ids < shape.experts), ids, -1)
    if emap is not None:
        local = torch.where(local >= 0, emap[local.clamp(min=0).long()], -1)
    x = torch.randn(tokens, shape.h, generator=torch.Generator("cuda").manual_seed(index + 7), device="cuda")
    weights = torch.softmax(torch.randn(tokens, TOPK, generator=gen), 1)
    which = None
    if slots:
        lowest = -1 if routing == "skewed" else 0
        which = torch.randint(lowest, slots, (tokens,), generator=gen, dtype=torch.int32).cuda()
    return Batch(
        x=x.bfloat16(),
        weights=weights.cuda(),
        ids=ids.cuda(),
        slots=which,
        expert_map=emap.cuda() if emap is not None else None,
        local=local.cuda(),
    )


def reference(batch: Batch, weights: HopperWeights, adapters: HopperAdapters | None, recipe: str) -> torch.Tensor:
    """The layer in float32 with this recipe's roundings; one expert after the other."""
    group = 128 if weights.scheme == "block" else 0
    quantised = recipe == "w8a8"
    x32 = batch.x.float()
    xq = dequantize(*quantize(x32, group), group) if quantised else x32
    y = torch.zeros_like(x32)
    for e in range(weights.w13.shape[0]):
        token, k = (batch.local == e).nonzero(as_tuple=True)
        if not token.numel():
            continue
        g = xq[token] @ dense(weights, "w13", e).T
        mine = []
        if adapters is not None and batch.slots is not None:
            slot = batch.slots[token]
            mine = [(int(s), slot == s) for s in slot.unique().tolist() if s >= 0]
        for s, m in mine:
            a = adapters.a13[s, e if adapters.a13.shape[1] > 1 else 0].float()
            d = torch.einsum("td,crd->ctr", x32[token[m]], a)
            g[m] += torch.einsum("ctr,cir->tci", d, adapters.b13[s, e].float()).flatten(1)
        gate, up = g.chunk(2, 1)
        h = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        o = (dequantize(*quantize(h, group), group) if quantised else h) @ dense(weights, "w2", e).T
        for s, m in mine:
            b = adapters.b2[s, e if adapters.b2.shape[1] > 1 else 0].float()
            o[m] += (h[m] @ adapters.a2[s, e].float().T) @ b.T
        y.index_add_(0, token, o * batch.weights[token, k][:, None])
    return y


def floor_us(shape: Shape, batch: Batch, scheme: str, adapters: HopperAdapters | None) -> float:
    used = batch.local[batch.local >= 0]
    touched = int(used.unique().numel())
    per_expert = 3 * shape.h * shape.i
    per_expert += 4 * (3 * shape.h * shape.i // 128**2 if scheme == "block" else 2 * shape.i + shape.h)
    tokens = int((batch.local >= 0).any(1).sum())
    bytes_ = touched * per_expert + tokens * shape.h * 2 + batch.x.numel() * 2
    flops = 6.0 * shape.h * shape.i * used.numel() / FP8_TFLOPS
    if adapters is not None and batch.slots is not None:
        pair = (batch.local * 1000 + batch.slots[:, None])[(batch.local >= 0) & (batch.slots >= 0)[:, None]]
        rank = adapters.a2.shape[2]
        bytes_ += int(pair.unique().numel()) * 2 * rank * 3 * (shape.h + shape.i)
        flops += 2.0 * rank * 3 * (shape.h + shape.i) * pair.numel() / BF16_TFLOPS
    return max(bytes_ / COPY_GBPS / 1e3, flops / 1e6)


def poison() -> None:
    """Leave 0xFF bytes (NaN, out-of-range indices) in the memory that the next allocations get."""
    large = [torch.full((1 << 31,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(2)]
    small = [torch.full((1 << s,), 0xFF, dtype=torch.uint8, device="cuda") for s in range(9, 21) for _ in range(8)]
    torch.cuda.synchronize()
    del large, small


def rel_l2(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.float() - ref).norm() / ref.norm())


def time_graph(calls: list, min_us: float = 1200.0, rounds: int = 2, budget_ms: float = 50.0) -> tuple[float, float]:
    """Microseconds a call, and the relative difference of the rounds' medians."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize()
    guess = (time.perf_counter() - t0) * 1e6
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, min(16, int(min_us / max(20.0 * len(calls), 1e-3)) if guess < 4 * min_us else 1))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    count = repeats * len(calls)
    medians = []
    graph.replay()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    one_ms = max((time.perf_counter() - t0) * 1e3, 0.05)
    for _ in range(int(15 / one_ms) + 1):
        graph.replay()
    for _ in range(rounds):
        n = max(3, int(budget_ms / one_ms))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        marks[0].record()
        for m in marks[1:]:
            graph.replay()
            m.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) * 1e3 / count for a, b in itertools.pairwise(marks))
        medians.append(times[len(times) // 2])
    del graph
    mean = sum(medians) / len(medians)
    return mean, (max(medians) - min(medians)) / mean


def profile(call, reps: int = 5) -> dict[str, float]:
    """Mean duration of each kernel of one eager call, us."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(reps):
            call()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] = total.get(event.name, 0.0) + event.device_time / reps
    return total


SETS = {1: 16, 8: 4, 64: 2, 256: 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="q30b")
    parser.add_argument("--tokens", default="1,8,64,256,1024,4096,8192")
    parser.add_argument("--schemes", default="block,channel")
    parser.add_argument("--lora", default="0", help="0 or RANKxADAPTERS, comma separated")
    parser.add_argument("--recipe", default="w8a8")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--regime", help="force a chain: one_token, decode16, decode32, decode64 or prefill")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    regimes = {
        "one_token": ONE_TOKEN, "decode16": DECODE16, "decode32": DECODE32, "decode64": DECODE64, "prefill": PREFILL,
    }  # fmt: skip
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        for scheme in args.schemes.split(","):
            weights = make_weights(shape, scheme)
            for lora in args.lora.split(","):
                rank, count = (int(v) for v in lora.split("x")) if lora != "0" else (0, 0)
                adapters = make_adapters(shape, rank, count) if rank else None
                for tokens in (int(t) for t in args.tokens.split(",")):
                    sets = 1 if args.no_time else SETS.get(tokens, 1)
                    batches = [make_batch(shape, tokens, s, count, args.routing) for s in range(sets)]
                    options = {
                        "recipe": args.recipe,
                        "regime": regimes[args.regime] if args.regime else None,
                    }
                    calls = [
                        functools.partial(
                            hopper_fused_moe, b.x, b.weights, b.ids, weights, adapters=adapters,
                            adapter_slots=b.slots, expert_map=b.expert_map, **options,
                        )
                        for b in batches
                    ]  # fmt: skip
                    row = {
                        "shape": name, "scheme": scheme, "lora": lora, "tokens": tokens, "recipe": args.recipe,
                        "routing": args.routing,
                    }  # fmt: skip
                    if args.regime:
                        row["regime"] = args.regime
                    try:
                        poison()
                        got = calls[0]()
                        torch.cuda.synchronize()
                        row["rel_l2"] = rel_l2(got, reference(batches[0], weights, adapters, args.recipe))
                        row["repeatable"] = bool(torch.equal(got, calls[0]()))
                        if adapters is not None:
                            none = torch.full_like(batches[0].slots, -1)
                            plain = hopper_fused_moe(
                                batches[0].x, batches[0].weights, batches[0].ids, weights,
                                expert_map=batches[0].expert_map, **options,
                            )  # fmt: skip
                            some = batches[0].slots.clone()
                            some[::2] = -1
                            for label, slots in (("none_used", none), ("base_rows", some)):
                                mixed = hopper_fused_moe(
                                    batches[0].x, batches[0].weights, batches[0].ids, weights, adapters=adapters,
                                    adapter_slots=slots, expert_map=batches[0].expert_map, **options,
                                )  # fmt: skip
                                row[label] = bool(torch.equal(mixed[slots < 0], plain[slots < 0]))
                        if not args.no_time:
                            row["us"], row["spread"] = time_graph(calls)
                            row["floor"] = sum(floor_us(shape, b, scheme, adapters) for b in batches) / sets
                            row["x"] = row["us"] / row["floor"]
                        if args.profile:
                            row["kernels"] = {k[:28]: round(v, 1) for k, v in profile(calls[0]).items()}
                    except Exception as error:  # a failed cell is a result; the next one may still tell something
                        row["error"] = f"{type(error).__name__}: {error}"[:300]
                    shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
                    print(" ".join(shown), flush=True)
                    if args.out:
                        with open(args.out, "a") as f:
                            f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
