# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel under compute-sanitizer: out-of-bounds accesses and shared-memory races.

    python benchmarks/cuda_sanitize.py [--tool memcheck] [--tool racecheck] [--only TEXT] [--limit SECONDS]

One small call of each chain (each Hopper regime with and without adapters, the portable kernels) runs in a process
under each tool; the allocator hands every tensor its own memory, so that a read beyond one is seen. Exits 1 on any
report, or where a tool ends without its summary; 2 where there is no sanitizer. The last line is a verdict in JSON.

By hand: PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
             python benchmarks/cuda_sanitize.py --worker
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("isomoe") is None:  # a checkout that is not installed
    _shim = tempfile.mkdtemp()
    (Path(_shim) / "isomoe").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
    sys.path.insert(0, _shim)

TOOLS = ("memcheck", "racecheck")
# Tokens enough for a second tile or unit, and few enough for an instrumented run.
FEW = {"one_token": 1, "decode16": 24, "decode32": 40, "decode64": 70, "prefill": 70}


def cases(target) -> list:
    """One case a kernel chain: schemes, recipes and adapters of `regimes`, on few tokens of a small layer."""
    from dataclasses import replace

    from isomoe.cuda_impl.bench import regimes
    from isomoe.cuda_impl.bench.data import Layer

    layer = Layer("small", 272, 144, 6, 6, 4)
    found = []
    for case in regimes.hopper_cases() if target.capability == (9, 0) else []:
        if case.layer is regimes.ODD and case.setting in (regimes.NONE, regimes.MIXED):
            found.append(replace(case, layer=layer, tokens=FEW[str(case.regime)]))
    found += [replace(case, tokens=min(case.tokens, 70)) for case in regimes.portable_cases(layer)]
    # The sort that more pairs than one program scans need, once for each family.
    extra = [replace(c, tokens=700) for c in found if c.scheme == "block" and c.recipe == "w8a8" and c.setting.count]
    found += [c for c in extra if c.regime is None or str(c.regime) == "decode16"][:2]
    return list(dict.fromkeys(found))


def work(only: str) -> int:
    """What runs under the tool: each case's call once, checked to be finite."""
    import torch

    from isomoe.cuda_impl import _runtime
    from isomoe.cuda_impl.bench import regimes

    if _runtime.INTERPRETED or not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    layers, bad = regimes.Layers("cuda"), 0
    for case in cases(_runtime.target_of(torch.device("cuda", 0))):
        if only not in str(case):
            continue
        weights, adapters = layers.weights(case.layer, case.scheme), layers.adapters(case.layer, case.setting)
        out = regimes.caller(case, layers.batch(case), weights, adapters)()
        torch.cuda.synchronize()
        finite = bool(out.isfinite().all())
        bad += not finite
        print(f"{'ran ' if finite else 'NOT FINITE'} {case}", flush=True)
    return 1 if bad else 0


def find_sanitizer() -> str | None:
    """compute-sanitizer's path: on PATH, under CUDA_HOME, or in the usual place."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    here = [str(Path(f) / "bin" / "compute-sanitizer") for f in folders if f]
    return shutil.which("compute-sanitizer") or next((p for p in here if Path(p).is_file()), None)


def reports_in(output: str) -> int | None:
    """Errors and hazards that a tool's output counts; None where it holds no summary, or the program crashed."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)", output)
    if not found or "crashed" in output:
        return None
    return sum(map(int, found))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: both")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds a tool may take")
    parser.add_argument("--worker", action="store_true", help="run the cases in this process")
    args = parser.parse_args(arguments)
    if args.worker:
        return work(args.only)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not on PATH, in CUDA_HOME or in /usr/local/cuda", file=sys.stderr)
        return 2
    verdict: dict[str, str] = {}
    for tool in args.tool or TOOLS:
        command = [
            sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--worker",
            "--only", args.only,
        ]  # fmt: skip
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.limit, check=False)
        except subprocess.TimeoutExpired:
            verdict[tool] = f"not over after {args.limit:g} s"
            continue
        output = done.stdout + done.stderr
        print(output[-6000:])
        reports = reports_in(output)
        if reports is None:
            verdict[tool] = f"no summary, exit code {done.returncode}"
        elif reports:
            verdict[tool] = f"{reports} reports"
        else:
            verdict[tool] = "clean" if done.returncode == 0 else f"exit code {done.returncode}"
    fine = all(v == "clean" for v in verdict.values())
    print(json.dumps({"verdict": "pass" if fine else "fail", **verdict}))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
