# SPDX-License-Identifier: Apache-2.0
"""What the JSON results of `vllm_engine.py` say: one line a demand, ``ok`` or ``FAIL``, with the figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_engine_run import BATCHES, CONCURRENCIES, PREFILL, PREFILL_REPEATS, TURNS

# Largest relative L2 distance of logits from transformers and PEFT in float32.
LIMITS = {"w8a16": 1e-2, "w8a8": 6e-2}
# Mean absolute difference of a token's log-probability between two experts classes; a wrong layer is off by several
# units, other kernels' roundings by a tenth of this.
AGREEMENT = 0.1
EXPERTS_CLASS = {
    ("isomoe", "w8a8"): "IsomoeExperts", ("isomoe", "w8a16"): "IsomoeW8A16Experts", ("vllm", "w8a8"): "TritonExperts",
}  # fmt: skip
TAKEN = "FP8 MoE layers run on isomoe's"
LEFT = "FP8 MoE layers stay on vLLM's experts: "

# Least stock time over our time, at every cell and at the cells where this package claims to be faster; and what
# adapters may cost against our own step without.
LEVEL, FASTER, FASTER_AT = 0.99, 1.1, ("256", "prefill")
LORA_FASTER, LORA_COST, LORA_COST_AT = 1.3, 1.25, ("16", "64", "256")
CELLS = (*map(str, CONCURRENCIES), "prefill")


class Verdict:
    """Prints demands and remembers whether all held."""

    def __init__(self) -> None:
        self.good = True

    def __call__(self, label: str, ok: bool, figures: str) -> None:
        self.good &= ok
        print(f"{'ok  ' if ok else 'FAIL'} {label}: {figures}")

    def bits(self, label: str, a: list[dict], b: list[dict], rows: range) -> None:
        """Demand ids and log-probabilities equal bit for bit."""
        equal = sum(a[i] == b[i] for i in rows)
        self(label, equal == len(rows), f"{equal} of {len(rows)} rows equal bit for bit")

    def differ(self, label: str, a: list[dict], b: list[dict], rows: range) -> None:
        """Demand that every row differs."""
        differing = sum(a[i] != b[i] for i in rows)
        mean, worst = difference(a, b, rows)
        figures = f"{differing} of {len(rows)} rows differ, log-probabilities by {mean:.3f} (mean), {worst:.3f} (max)"
        self(label, differing == len(rows), figures)


def difference(a: list[dict], b: list[dict], rows: range) -> tuple[float, float]:
    """Mean and largest absolute difference of the prompts' log-probabilities: the same tokens on both sides."""
    gaps = [abs(x - y) for i in rows for x, y in zip(a[i]["prompt"], b[i]["prompt"], strict=True)]
    return sum(gaps) / len(gaps), max(gaps)


def _reference(verdict: Verdict, at: str, steps: list[dict[str, Any]], limit: float) -> None:
    for adapter in sorted({s["adapter"] for s in steps}):
        mine = [s for s in steps if s["adapter"] == adapter]
        error = math.sqrt(sum(s["error2"] for s in mine) / sum(s["norm2"] for s in mine))
        who = f"adapter {adapter}" if adapter else "base"
        verdict(f"{at}: logits against transformers and PEFT, {who}", error <= limit,
                f"relative L2 {error:.2e} over {len(mine)} steps, want <= {limit:.0e}")  # fmt: skip
    wrong = [s for s in steps if not s["equal"] and s["margin"] > 2 * s["worst"]]
    equal = sum(s["equal"] for s in steps)
    figures = f"{equal} of {len(steps)} equal, {len(steps) - equal - len(wrong)} within the error of a tie"
    verdict(f"{at}: greedy tokens", not wrong, f"{figures}, {len(wrong)} wrong")


def _bit_probes(verdict: Verdict, at: str, probe: Mapping[str, Any]) -> None:
    for batch, _ in BATCHES:
        verdict.bits(f"{at}: idle against none loaded, batch {batch}", probe[f"idle:{batch}"], probe[f"base:{batch}"],
                     range(batch))  # fmt: skip
    for batch, _ in BATCHES[1:]:
        half, base = probe[f"half:{batch}"], probe[f"base:{batch}"]
        verdict.bits(f"{at}: base rows beside others' adapters, batch {batch}", half, base, range(0, batch, 2))
        verdict.differ(f"{at}: adapters act, batch {batch}", half, base, range(1, batch, 2))
    rows, before = range(16), probe["adapter1:before"]
    verdict.bits(f"{at}: adapter evicted and loaded again", before, probe["adapter1:loaded again"], rows)
    verdict.differ(f"{at}: another adapter in its place", before, probe["adapter3:in its place"], rows)
    verdict(f"{at}: adapter unloaded", probe["removed"] is True, f"vLLM says {probe['removed']}")
    verdict.bits(f"{at}: base rows after unloading", probe["idle:after unloading"], probe["idle:16"], rows)
    verdict.bits(f"{at}: adapter unloaded and loaded again", before, probe["adapter1:after unloading"], rows)


def _log_lines(log: Path, text: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if text in line] if log.exists() else []


def judge_checks(folder: Path, runs: Sequence[Any]) -> bool:
    """The verdict over the `check` results of `runs` (`vllm_engine.Check`) in a folder; a missing one is bad."""
    verdict = Verdict()
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        path = folder / f"{run.name}.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        found[run.name] = result
        verdict(f"{run.name}: finished", "done" in result, f"{result.get('wall_s', 'no result')} s")
        if "fingerprint" in result:
            here, there = result["fingerprint"]
            verdict(f"{run.name}: weights are the reference's", here == there, f"fingerprint {here[:12]}")
        log = folder / f"{run.name}.log"
        taken, left = _log_lines(log, TAKEN), _log_lines(log, LEFT)
        if "classes" in result:
            want = EXPERTS_CLASS[run.experts, run.recipe]
            verdict(f"{run.name}: class", result["classes"]["experts"] == want, f"{result['classes']}, want {want}")
        elif "done" in result:
            verdict(f"{run.name}: class", len(taken) == 1 and not left, f"the log says so {len(taken)} times")
        if run.refused and result:
            once = len(left) == 1 and not taken
            verdict(f"{run.name}: reason logged once", once, f"{len(left)} lines: {' | '.join(left)[-300:]}")
        if "reference" in result:
            _reference(verdict, run.name, result["reference"]["steps"], LIMITS[run.recipe])
        if run.lora and "probe" in result:
            _bit_probes(verdict, run.name, result["probe"])
        if "kernels" in result:
            _kernels(verdict, run, result["kernels"])
    _pairs(verdict, runs, found)
    return verdict.good


def _kernels(verdict: Verdict, run: Any, kernels: Mapping[str, Any]) -> None:
    for phase, rows in kernels.items():
        print(f"     {run.name}: {phase} kernels " + "; ".join(f"{n[:48]} {us} us x{c}" for n, us, c in rows[:7]))
    names = {n for rows in kernels.values() for n, _, _ in rows}
    theirs = sorted(n for n in names if "fused_moe_kernel" in n or "fused_moe_lora" in n)
    verdict(f"{run.name}: vLLM's MoE kernels", bool(theirs) == (run.experts == "vllm"), ", ".join(theirs) or "none ran")


def _pairs(verdict: Verdict, runs: Sequence[Any], found: Mapping[str, dict[str, Any]]) -> None:
    """This package against vLLM, and its own engines with LoRA and without."""
    probed = [run for run in runs if "probe" in found[run.name]]
    for ours in (run for run in probed if run.experts == "isomoe"):
        for other in probed:
            if other.scheme != ours.scheme:
                continue
            a, b = found[ours.name]["probe"], found[other.name]["probe"]
            if other.experts == "vllm":
                for name in sorted(k for k in set(a) & set(b) if k != "removed"):
                    mean, worst = difference(a[name], b[name], range(len(a[name])))
                    verdict(f"{ours.name} against {other.name}, {name}", mean < AGREEMENT,
                            f"log-probabilities differ by {mean:.4f} (mean), {worst:.3f} (max)")  # fmt: skip
            elif ours.lora and not other.lora:
                for batch, _ in BATCHES:
                    verdict.bits(f"{ours.name} idle against {other.name}, batch {batch}", a[f"idle:{batch}"],
                                 b[f"base:{batch}"], range(batch))  # fmt: skip


# --- speed -----------------------------------------------------------------------------------------------------------


def best(result: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each measured cell, the best of the last `TURNS` runs: a step by concurrency, and ``prefill``."""
    cells = {batch: min(values[-TURNS:]) for batch, values in result["step_ms"].items()}
    prefills = result["prefill_ms"][-TURNS * PREFILL_REPEATS :]
    return cells | ({"prefill": min(prefills)} if prefills else {})


def judge_speed(folder: Path, names: Sequence[str]) -> bool:
    """The verdict over the timed engines' results, named ``<experts>_<lora on or off>``; a missing cell is bad."""
    verdict = Verdict()
    cells: dict[str, dict[str, float]] = {}
    for name in names:
        path = folder / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {"step_ms": {}, "prefill_ms": []}
        cells[name] = best(result)
        if "classes" in result:
            want = EXPERTS_CLASS[name.split("_")[0], "w8a8"]
            verdict(f"{name}: class", result["classes"]["experts"] == want, f"{result['classes']}")
        print(f"     {name}: ms a step {result['step_ms']}, prefill of {PREFILL} {result['prefill_ms']}, "
              f"tokens a second with prefill {result.get('tokens_per_s')}")  # fmt: skip

    def ratio(label: str, over: str, under: str, cell: str, least: float = 0.0, most: float = math.inf) -> None:
        a, b = cells.get(over, {}).get(cell), cells.get(under, {}).get(cell)
        want = f">= {least}" if least else f"<= {most}"
        if a is None or b is None:
            verdict(f"{label}, {cell}", False, f"not measured: {over if a is None else under}; want {want}")
            return
        verdict(f"{label}, {cell}", least <= a / b <= most, f"{a / b:.3f} ({a} ms, {b} ms), want {want}")

    for cell in CELLS:
        ratio("no LoRA, stock time over ours", "vllm_off", "isomoe_off", cell, least=LEVEL)
    for cell in FASTER_AT:
        ratio("no LoRA, faster than stock", "vllm_off", "isomoe_off", cell, least=FASTER)
    for cell in CELLS:
        ratio("8 adapters, stock time over ours", "vllm_on", "isomoe_on", cell, least=LORA_FASTER)
    for cell in LORA_COST_AT:
        ratio("8 adapters, ours over our step without", "isomoe_on", "isomoe_off", cell, most=LORA_COST)
    return verdict.good
