# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a real GPU, in about two minutes: right first, then how fast.

    python benchmarks/cuda_smoke.py [--quick] [--json FILE]

1. Quantiser codes on all 65,536 bf16 inputs, bit for bit with the numpy formula.
2. Small layers of every scheme, recipe and adapter form against the numpy reference, with the base rows' bits.
3. Real dimensions against a torch reference in f32 of the same recipe, with and without adapters, by the portable
   kernels and, on Hopper, by its own.
4. One captured CUDA graph, replayed after an adapter was replaced; run-to-run bits; torch.compile.
5. Times of whole layers, from CUDA graphs. Weights stay in L2 for the small batches: compare, do not quote.

Exits 1 where any check fails.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

if importlib.util.find_spec("isomoe") is None:  # a checkout that is not installed
    _shim = tempfile.mkdtemp()
    (Path(_shim) / "isomoe").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
    sys.path.insert(0, _shim)

import torch

from isomoe.common.config import FusedMoEConfig
from isomoe.common.metrics import bitwise_equal, rel_l2, worst_row
from isomoe.common.numerics import BF16, quantize_fp8
from isomoe.common.recipes import Recipe, default_recipe
from isomoe.common.tolerances import DELTA, TO_RECIPE, WORST_ROW
from isomoe.cuda_impl import fused_moe
from isomoe.cuda_impl.prepare import AdapterSlots, PreparedWeights, empty_slots
from isomoe.cuda_impl.quantize import quantize_rows
from isomoe.tests.conformance import Subject
from isomoe.tests.matrix import UNEVEN, WIDE, Case, build

SHAPES = {"q30b": (128, 8, 2048, 768), "q35b": (256, 8, 2048, 512), "q480b": (20, 8, 6144, 2560)}
results: list[dict] = []


def record(check: str, ok: bool, **figures: object) -> None:
    results.append({"check": check, "ok": bool(ok), **figures})
    shown = " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    print(f"{'ok  ' if ok else 'FAIL'} {check} {shown}", flush=True)


def check_quantiser() -> None:
    values = np.arange(65536, dtype=np.uint16).view(BF16)
    rows = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).cuda()
    for shape, group in (((65536, 1), "token"), ((512, 128), 128), ((256, 256), "token")):
        codes, scales = quantize_rows(rows.view(shape), group)
        with np.errstate(all="ignore"):
            want, want_scales = quantize_fp8(values.reshape(shape), group)
        want_bits = want.view(np.uint8)
        got = codes.cpu().numpy()
        nan = (want_bits & 0x7F) == 0x7F
        same = np.array_equal(got[~nan], want_bits[~nan]) and bool(((got[nan] & 0x7F) == 0x7F).all())
        same = same and np.array_equal(scales.cpu().numpy(), want_scales, equal_nan=True)
        record(f"quantiser {shape} {group}", same)


def small_cases(quick: bool) -> list[tuple[str, Case]]:
    cases = [
        ("triton", Case(scheme, recipe, lora))
        for scheme, recipe in (("block", "w8a8"), ("channel", "w8a8"), ("tensor", "w8a8"), ("bf16", "bf16"))
        for lora in ("none", "mixed")
    ]
    cases += [("marlin", Case(scheme, "w8a16", "mixed")) for scheme in ("block", "channel")]
    if not quick:
        plain = Case("block", "w8a8", "mixed")
        for changes in (
            {"routing": "skipped"}, {"bias": True, "activation": "swigluoai"}, {"activation": "gelu"},
            {"shape": WIDE, "tokens": 5}, {"shape": UNEVEN, "ep": 4}, {"lora": "shared_outer"}, {"lora": "zero_b"},
        ):  # fmt: skip
            cases.append(("triton", Case(**{**plain.__dict__, **changes})))
    return cases


def check_small(quick: bool) -> None:
    for executor, case in small_cases(quick):
        inputs = build(case)
        # The recipe that this device's kernels declare, with result rows that lose nothing.
        declared = Subject(executor).declared(case).with_wire("f32")
        got, want = inputs.run(executor), inputs.run("reference", ep_size=1, recipe=declared)
        error, row = rel_l2(got, want), worst_row(got, want)
        ok = error <= TO_RECIPE.bound and row <= WORST_ROW.bound
        figures: dict[str, object] = {"rel_l2": error, "worst_row": row}
        if inputs.adapter_ids is not None:
            used = inputs.adapter_ids >= 0
            base = inputs.run(executor, adapters=None, adapter_ids=None)
            untouched = ~used if case.lora != "zero_b" else np.ones_like(used)
            figures["base_bits"] = bitwise_equal(got[untouched], base[untouched])
            ok = ok and bool(figures["base_bits"])
            if case.lora != "zero_b":
                base_want = inputs.run("reference", ep_size=1, recipe=declared, adapters=None, adapter_ids=None)
                f32 = [a[used].astype(np.float32) for a in (got, base, want, base_want)]
                figures["delta"] = rel_l2(f32[0] - f32[1], f32[2] - f32[3])
                ok = ok and figures["delta"] <= DELTA.bound  # type: ignore[operator]
        record(f"{executor} {case}", ok, **figures)


def _codes(w: torch.Tensor, absmax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = absmax.clamp(min=1e-10) / 448
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def random_layer(shape: tuple[int, int, int, int], scheme: str, seed: int = 0) -> PreparedWeights:
    """Random experts quantised on the device, expert by expert."""
    experts, _, hidden, inter = shape
    torch.manual_seed(seed)
    parts: dict[str, list[torch.Tensor]] = {k: [] for k in ("w13", "w2", "s13", "s2")}
    for _ in range(experts):
        for name, rows, cols in (("13", 2 * inter, hidden), ("2", hidden, inter)):
            w = torch.randn(rows, cols, device="cuda") / cols**0.5
            if scheme == "bf16":
                parts["w" + name].append(w.bfloat16())
                continue
            if scheme == "block":
                tiles = w.view(rows // 128, 128, cols // 128, 128)
                codes, scale = _codes(tiles, tiles.abs().amax((1, 3), keepdim=True))
                parts["s" + name].append(scale.view(rows // 128, cols // 128))
            else:
                codes, scale = _codes(w, w.abs().amax(1, keepdim=True))
                parts["s" + name].append(scale.view(rows))
            parts["w" + name].append(codes.view(rows, cols).view(torch.uint8))
    stack = {k: torch.stack(v) if v else None for k, v in parts.items()}
    return PreparedWeights(stack["w13"], stack["w2"], stack["s13"], stack["s2"])  # type: ignore[arg-type]


def random_adapters(shape: tuple[int, int, int, int], slots: int, rank: int) -> AdapterSlots:
    """Full slots with ids 100, 101, ...; every second one has half the rank, with zeros beyond it."""
    experts, top_k, hidden, inter = shape
    pool = empty_slots(
        FusedMoEConfig(experts, top_k, hidden, inter), max_loras=slots, max_lora_rank=rank, device="cuda"
    )
    for name, fan in (("a13", hidden), ("b13", rank * 10), ("a2", inter), ("b2", rank * 10)):
        getattr(pool, name).normal_().div_(fan**0.5)
    for slot in range(slots):
        r = rank if slot % 2 == 0 else rank // 2
        pool.ranks[slot], pool.slot_ids[slot] = r, 100 + slot
        for t in (pool.a13[slot], pool.a2[slot]):
            t[:, :, r:] = 0
        for t in (pool.b13[slot], pool.b2[slot]):
            t[..., r:] = 0
    return pool


def torch_reference(
    x: torch.Tensor, tw: torch.Tensor, ids: torch.Tensor, w: PreparedWeights, recipe: Recipe,
    adapters: AdapterSlots | None, adapter_ids: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The recipe in f32 torch matmuls (no TF32), with dequantised operands, expert by expert."""

    def rows(v: torch.Tensor) -> torch.Tensor:
        v = v.float()
        if recipe.name != "w8a8":
            return v
        group = 128 if w.is_block else v.shape[1]
        g = v.view(v.shape[0], -1, group)
        scale = g.abs().amax(-1, keepdim=True).clamp(min=1e-10) * float(np.float32(1 / 448))
        return ((g * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view(v.shape)

    def matrix(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return codes.float()
        codes = codes.view(torch.float8_e4m3fn).float()
        if scale.dim() == 2:
            return codes * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes * scale[:, None]

    def products(rows_in: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        v = rows_in.float() @ a.float().T
        return v.bfloat16().float() if recipe.lora_products == "bf16" else v

    inter = w.intermediate_size
    y = torch.zeros(x.shape, device="cuda")
    for e in range(w.num_experts):
        t, k = torch.where(ids == e)
        if not len(t):
            continue
        xe = x[t]
        g = rows(xe) @ matrix(w.w13[e], None if w.w13_scale is None else w.w13_scale[e]).T
        users: list[tuple[int, int, torch.Tensor]] = []
        if adapters is not None and adapter_ids is not None:
            for slot in range(adapters.slot_ids.shape[0]):
                mine = torch.where(adapter_ids[t] == adapters.slot_ids[slot])[0]
                if len(mine):
                    users.append((slot, int(adapters.ranks[slot]), mine))
        for slot, r, mine in users:
            for half in range(2):
                v = products(xe[mine], adapters.a13[slot, e, half, :r])  # type: ignore[union-attr]
                b = adapters.b13[slot, e, half, :, :r].float()  # type: ignore[union-attr]
                g[mine, half * inter : (half + 1) * inter] += v @ b.T
        h = (torch.nn.functional.silu(g[:, :inter]) * g[:, inter:]).bfloat16()
        o = rows(h) @ matrix(w.w2[e], None if w.w2_scale is None else w.w2_scale[e]).T
        for slot, r, mine in users:
            v = products(h[mine], adapters.a2[slot, e, 0, :r])  # type: ignore[union-attr]
            o[mine] += v @ adapters.b2[slot, e, 0, :, :r].float().T  # type: ignore[union-attr]
        y.index_put_((t,), tw[t, k][:, None] * o, accumulate=True)
    return y


def batch(shape: tuple[int, int, int, int], tokens: int, slots: int) -> tuple[torch.Tensor, ...]:
    experts, top_k, hidden, _ = shape
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.rand(tokens, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
    tw = torch.rand(tokens, top_k, device="cuda")
    adapter_ids = torch.randint(99, 100 + max(slots, 1), (tokens,), device="cuda", dtype=torch.int32)
    return x, tw / tw.sum(1, keepdim=True), ids, torch.where(adapter_ids == 99, -1, adapter_ids)


def graph_us(call, repeats: int = 20) -> float:
    """Median time of one call inside a CUDA graph, microseconds."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(np.median(times))


def check_production(quick: bool) -> None:
    runs = [("q30b", "block", "w8a8"), ("q30b", "channel", "w8a8"), ("q30b", "block", "w8a16")]
    runs += [("q480b", "block", "w8a8")]
    if not quick:
        runs += [("q35b", "channel", "w8a8"), ("q30b", "bf16", "bf16"), ("q480b", "channel", "w8a16")]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for name, scheme, recipe_name in runs:
        shape, slots = SHAPES[name], 8
        weights, adapters = random_layer(shape, scheme), random_adapters(shape, slots, 32)
        plain = default_recipe(recipe_name, scheme)
        for tokens in (1, 64, 1024) if quick else (1, 64, 256, 1024, 8192):
            arrays = batch(shape, tokens, slots)
            x, tw, ids, adapter_ids = arrays
            for kernels in ("portable", "hopper") if hopper and recipe_name != "bf16" else ("portable",):
                os.environ["ISOMOE_HOPPER"] = "1" if kernels == "hopper" else "0"
                recipe = plain.with_bf16_storage() if kernels == "hopper" else plain.with_wire("bf16")
                wants = []
                if tokens <= 1024:
                    wants = [
                        torch_reference(x, tw, ids, weights, recipe, None, None),
                        torch_reference(x, tw, ids, weights, recipe, adapters, adapter_ids),
                    ]
                try:
                    ok, figures = production_case(arrays, weights, adapters, recipe, wants, kernels == "portable")
                except Exception as error:  # one kernel's failure must not hide the others
                    ok, figures = False, {"error": f"{type(error).__name__}: {error}"[:500]}
                record(f"{kernels} {name} {scheme} {recipe_name} T={tokens}", ok, **figures)
        del weights, adapters
        torch.cuda.empty_cache()


def production_case(
    arrays: tuple[torch.Tensor, ...], weights: PreparedWeights, adapters: AdapterSlots, recipe: Recipe,
    wants: list[torch.Tensor], f32_delta: bool,
) -> tuple[bool, dict[str, object]]:  # fmt: skip
    """One batch with and without adapters: errors, bits and times."""
    x, tw, ids, adapter_ids = arrays
    used = adapter_ids >= 0
    figures: dict[str, object] = {}
    outputs = []
    for i, (label, lora) in enumerate((("base", None), ("lora", adapters))):
        call = functools.partial(
            fused_moe, x, tw, ids, weights, recipe=recipe, adapters=lora,
            adapter_ids=None if lora is None else adapter_ids,
        )
        outputs.append(call())
        figures[f"us_{label}"] = round(graph_us(call), 1)
        figures[f"same_bits_{label}"] = bool(torch.equal(outputs[i], call()))
        if wants:
            figures[f"rel_l2_{label}"] = float((outputs[i].float() - wants[i]).norm() / wants[i].norm())
    figures["base_bits"] = bool(torch.equal(outputs[0][~used], outputs[1][~used]))
    if wants and bool(used.any()) and f32_delta:
        # Before the rows' and the output's rounding to bf16, which are relative to the whole output, not to the delta.
        exact = functools.partial(
            fused_moe, x, tw, ids, weights, recipe=recipe.with_wire("f32"), out_dtype=torch.float32
        )
        base, lora_out = exact(), exact(adapters=adapters, adapter_ids=adapter_ids)
        want = (wants[1] - wants[0])[used]
        figures["delta"] = float(((lora_out - base)[used] - want).norm() / want.norm())
    ok = all(v <= TO_RECIPE.bound for k, v in figures.items() if k.startswith("rel_l2"))  # type: ignore[operator]
    ok = ok and all(bool(v) for k, v in figures.items() if "bits" in k)
    return ok and float(figures.get("delta", 0.0)) <= DELTA.bound, figures  # type: ignore[arg-type]


def check_graph() -> None:
    shape = (16, 4, 512, 256)
    weights, adapters = random_layer(shape, "block"), random_adapters(shape, 2, 16)
    x, tw, ids, adapter_ids = batch(shape, 40, 2)
    call = lambda: fused_moe(x, tw, ids, weights, adapters=adapters, adapter_ids=adapter_ids)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    record("graph equals eager", torch.equal(out, call()))
    adapters.b13[0] *= 2
    adapters.slot_ids[1] = -1
    graph.replay()
    record("graph sees a replaced adapter", torch.equal(out, call()))
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    record("torch.compile", torch.equal(compiled(), call()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    start = time.time()
    for step in (check_quantiser, lambda: check_small(args.quick), check_graph, lambda: check_production(args.quick)):
        try:
            step()
        except Exception as error:  # one broken step must not hide the others
            record(f"step raised {type(error).__name__}: {error}"[:800], False)
        print(f"-- {time.time() - start:.0f} s", flush=True)
    failed = [r["check"] for r in results if not r["ok"]]
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "results": results}, indent=1))
    print(f"{len(results) - len(failed)} of {len(results)} checks passed on {torch.cuda.get_device_name()}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
