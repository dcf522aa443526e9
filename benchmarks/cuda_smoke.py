# SPDX-License-Identifier: Apache-2.0
"""Are the CUDA kernels right on this device? A few minutes; the last line is a verdict in JSON.

    python benchmarks/cuda_smoke.py [--quick] [--json FILE]

1. Quantiser codes on all 65,536 bf16 inputs, bit for bit with the numpy formula.
2. Small layers of every scheme, recipe and adapter form against the numpy reference, with the base rows' bits.
3. Every chain of kernels by name (each Hopper regime, and the portable kernels) against its declared recipe: result,
   repeated bits, base rows, idle adapters, float32 output, poisoned memory.
4. One captured CUDA graph, replayed after an adapter was replaced; torch.compile.
5. Real dimensions with and without adapters, right and then timed (CUDA graph, cold L2).

`--quick` runs fewer cases of 2 and 5, all of the others. `--device cpu` is a dry run on interpreted kernels: steps 1 to
3 on tiny layers, which says nothing about a device. Exits 1 where any check fails. `isomoe bench` compares times.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np

if importlib.util.find_spec("isomoe") is None:  # a checkout that is not installed
    _shim = tempfile.mkdtemp()
    (Path(_shim) / "isomoe").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
    sys.path.insert(0, _shim)

import torch

from isomoe.common.metrics import bitwise_equal, rel_l2, worst_row
from isomoe.common.numerics import BF16, quantize_fp8
from isomoe.common.tolerances import DELTA, TO_RECIPE, WORST_ROW
from isomoe.cuda_impl import _runtime, fused_moe
from isomoe.cuda_impl.bench import data, reference, regimes
from isomoe.cuda_impl.bench.clock import GraphClock, Timing
from isomoe.cuda_impl.bench.tune import hopper_off
from isomoe.cuda_impl.moe import declared_recipe
from isomoe.cuda_impl.quantize import quantize_rows
from isomoe.tests.conformance import Subject
from isomoe.tests.matrix import UNEVEN, WIDE, Case, build

LORA = data.LoraSetting(8, 32)
results: list[dict] = []


def record(check: str, ok: bool, **figures: object) -> None:
    results.append({"check": check, "ok": bool(ok), **figures})
    shown = " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
    print(f"{'ok  ' if ok else 'FAIL'} {check} {shown}", flush=True)


def check_quantiser(device: str) -> None:
    values = np.arange(65536, dtype=np.uint16).view(BF16)
    rows = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16).to(device)
    shapes = [((65536, 1), "token"), ((512, 128), 128), ((256, 256), "token")]
    for shape, group in shapes if device == "cuda" else shapes[1:]:  # one program a row: too many to interpret
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


def check_small(cases: list[tuple[str, Case]]) -> None:
    for executor, case in cases:
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


def check_regimes(cases: list[regimes.RegimeCase], device: str) -> None:
    for name, ok, figures in regimes.checked(cases, device):
        record(name, ok, **figures)


def check_production(quick: bool) -> None:
    runs = [("30B", "block", "w8a8"), ("30B", "channel", "w8a8"), ("30B", "block", "w8a16")]
    runs += [("480B-EP8", "block", "w8a8")]
    if not quick:
        runs += [("35B", "channel", "w8a8"), ("30B", "bf16", "bf16"), ("480B-EP8", "channel", "w8a16")]
    clock = GraphClock()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for name, scheme, recipe in runs:
        layer = data.find_layer(name)
        weights, adapters = data.random_weights(layer, scheme, "cuda"), data.random_adapters(layer, LORA, "cuda")
        for tokens in (1, 64, 1024) if quick else (1, 64, 256, 1024, 8192):
            batch = data.random_batch(layer, tokens, 0, "cuda", adapters=LORA.count)
            for kernels in ("portable", "hopper") if hopper and recipe != "bf16" else ("portable",):
                try:
                    with hopper_off(kernels == "portable"):
                        ok, figures = production_case(batch, weights, adapters, recipe, clock)
                except Exception as error:  # one kernel's failure must not hide the others
                    ok, figures = False, {"error": f"{type(error).__name__}: {error}"[:500]}
                record(f"{kernels} {name} {scheme} {recipe} T={tokens}", ok, **figures)
        del weights, adapters
        torch.cuda.empty_cache()


def production_case(batch: data.Batch, weights, adapters, recipe: str, clock: GraphClock) -> tuple[bool, dict]:
    """One batch with and without adapters: errors, bits and times."""
    assert batch.adapter_ids is not None
    used = batch.adapter_ids >= 0
    rank = {"base": 0, "lora": adapters.max_rank}
    declared = {
        label: declared_recipe(recipe, weights, batch.tokens, batch.topk_ids.shape[1], len(batch.expert_map)
                               if batch.expert_map is not None else weights.num_experts, lora_rank=r)
        for label, r in rank.items()
    }  # fmt: skip
    figures: dict[str, object] = {}
    outputs, calls = [], {}
    for label, lora in (("base", None), ("lora", adapters)):
        call = functools.partial(
            fused_moe, batch.x, batch.topk_weights, batch.topk_ids, weights, recipe=recipe, adapters=lora,
            adapter_ids=None if lora is None else batch.adapter_ids, expert_map=batch.expert_map,
        )
        calls[label] = [call]
        outputs.append(call())
        figures[f"same_bits_{label}"] = bool(torch.equal(outputs[-1], call()))
        if batch.tokens <= 1024:
            want = reference.layer_f32(batch, weights, declared[label], lora)
            figures[f"rel_l2_{label}"] = reference.rel_l2(outputs[-1], want)
    figures["base_bits"] = bool(torch.equal(outputs[0][~used], outputs[1][~used]))
    ok = all(v <= TO_RECIPE.bound for k, v in figures.items() if k.startswith("rel_l2"))  # type: ignore[operator]
    ok = ok and all(bool(v) for k, v in figures.items() if "bits" in k)
    for label, timing in clock.time(calls, 1).items():
        figures[f"us_{label}"] = round(timing.us, 1) if isinstance(timing, Timing) else timing
        ok = ok and isinstance(timing, Timing)
    return ok, figures


def check_graph() -> None:
    layer, lora = data.Layer("graph", 512, 256, 16, 16, 4), data.LoraSetting(2, 16)
    weights, adapters = data.random_weights(layer, "block", "cuda"), data.random_adapters(layer, lora, "cuda")
    b = data.random_batch(layer, 40, 0, "cuda", adapters=2)

    def call() -> torch.Tensor:
        return fused_moe(b.x, b.topk_weights, b.topk_ids, weights, adapters=adapters, adapter_ids=b.adapter_ids)

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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    args = parser.parse_args(arguments)
    results.clear()
    steps: list[Callable[[], None]]
    if args.device == "cuda":
        if _runtime.INTERPRETED or not torch.cuda.is_available():
            parser.error("no CUDA device here; --device cpu is a dry run")
        torch.backends.cuda.matmul.allow_tf32 = False
        name, target = torch.cuda.get_device_name(), _runtime.target_of(torch.device("cuda", 0))
        steps = [
            functools.partial(check_quantiser, "cuda"),
            lambda: check_regimes(regimes.all_cases(target), "cuda"),
            lambda: check_small(small_cases(args.quick)), check_graph, lambda: check_production(args.quick),
        ]  # fmt: skip
    else:
        name = "cpu, interpreted: a dry run"
        tiny = [case for case in regimes.portable_cases(regimes.TINY) if case.tokens <= 40][:1]
        steps = [
            functools.partial(check_quantiser, "cpu"), lambda: check_small(small_cases(True)[:1]),
            lambda: check_regimes(tiny, "cpu"),
        ]  # fmt: skip
    start = time.time()
    for step in steps:
        try:
            step()
        except Exception as error:  # one broken step must not hide the others
            record(f"step raised {type(error).__name__}: {error}"[:800], False)
        print(f"-- {time.time() - start:.0f} s", flush=True)
    failed = [r["check"] for r in results if not r["ok"]]
    verdict = {
        "verdict": "fail" if failed else "pass", "device": name, "passed": len(results) - len(failed),
        "failed": failed, "seconds": round(time.time() - start), "isomoe_hopper": os.environ.get("ISOMOE_HOPPER", "1"),
    }  # fmt: skip
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**verdict, "results": results}, indent=1))
    print(json.dumps(verdict))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
