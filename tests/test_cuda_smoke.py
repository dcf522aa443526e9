# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/cuda_smoke.py` and `cuda_sanitize.py` without a device: what they cover, how they judge."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

import isomoe
from isomoe.cuda_impl._runtime import Target
from isomoe.cuda_impl.bench import regimes
from isomoe.cuda_impl.hopper.regime import REGIMES

BENCHMARKS = Path(isomoe.__file__).resolve().parent / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are in a checkout only")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_cases_reach_every_hopper_regime_with_every_scheme_and_adapters() -> None:
    cases = regimes.all_cases(Target((9, 0)))
    reached = {(str(c.regime), c.scheme, c.recipe, bool(c.setting.count)) for c in cases if c.regime is not None}
    want = {
        (name, scheme, recipe, lora)
        for name in REGIMES for scheme in ("block", "channel") for recipe in ("w8a8", "w8a16") for lora in (False, True)
        if not (name == "prefill" and recipe == "w8a16")
        if name != "decode64" or (recipe == "w8a16" and scheme == "channel" and not lora)
    }  # fmt: skip
    assert reached == want
    assert {c.layer.local for c in cases} == {24, 5} and any(c.setting.shared_outer for c in cases)
    portable = {(c.scheme, c.recipe) for c in regimes.all_cases(Target((8, 9)))}
    assert portable >= {("block", "w8a8"), ("tensor", "w8a8"), ("channel", "w8a16"), ("bf16", "bf16")}


def test_each_case_gets_the_kernels_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named regime reaches the Hopper entry point, without a device."""
    from isomoe.cuda_impl import moe
    from isomoe.cuda_impl.hopper import fused

    seen: list[str] = []

    def note(x, *args, regime=None, out=None, **kwargs):
        seen.append(str(regime))
        return out.zero_()

    monkeypatch.setattr(fused, "hopper_fused_moe", note)
    monkeypatch.setattr(moe, "why_not_hopper", lambda *args: None)
    layers = regimes.Layers("cpu")
    chosen = {str(c.regime): c for c in regimes.hopper_cases() if not c.setting.count}
    for case in chosen.values():
        regimes.caller(case, layers.batch(case), layers.weights(case.layer, case.scheme), None)()
    assert seen == list(chosen) and set(seen) == set(REGIMES)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = regimes.portable_cases(regimes.TINY)[-1]
    layers = regimes.Layers("cpu")
    ok, figures = regimes.check(case, layers)
    assert ok and figures["f32_bits"] is True
    real = regimes.fused_moe
    monkeypatch.setattr(regimes, "fused_moe", lambda *a, **k: real(*a, **k) * 1.1)
    assert regimes.check(case, layers)[0] is False
    monkeypatch.setattr(regimes, "fused_moe", lambda *a, **k: 1 / 0)
    ((_, ok, figures),) = regimes.checked([case], "cpu")
    assert not ok and "ZeroDivisionError" in str(figures["error"])


def test_the_verdict_is_the_last_line(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    smoke = _script("cuda_smoke")
    monkeypatch.setattr(smoke, "check_quantiser", lambda device: smoke.record("quantiser", True))
    monkeypatch.setattr(smoke, "check_small", lambda cases: smoke.record("small", True, rel_l2=1e-3))
    monkeypatch.setattr(smoke, "check_regimes", lambda cases, device: smoke.record("regimes", True))
    assert smoke.main(["--device", "cpu", "--json", str(tmp_path / "s.json")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "pass"
    assert len(json.loads((tmp_path / "s.json").read_text())["results"]) == 3

    def broken(cases):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(smoke, "check_small", broken)
    assert smoke.main(["--device", "cpu"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["verdict"] == "fail" and last["passed"] == 2 and "no kernel image" in last["failed"][0]


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _w13_kernel+0x1234
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


def test_sanitizer_output_is_judged() -> None:
    sanitize = _script("cuda_sanitize")
    assert sanitize.reports_in(MEMCHECK) == 3
    assert sanitize.reports_in(RACECHECK) == 0
    assert sanitize.reports_in(RACECHECK.replace("0 hazards displayed (0 errors", "2 hazards displayed (2 errors")) == 2
    assert sanitize.reports_in("the target application returned an error") is None  # no summary: nothing was checked
    assert sanitize.reports_in("========= Target application crashed\n" + RACECHECK) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the sanitizer")
def test_the_sanitizer_is_asked_for_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    sanitize = _script("cuda_sanitize")
    commands: list[list[str]] = []
    outputs = iter([MEMCHECK, RACECHECK])

    def run(command, **options):
        commands.append(command)
        assert options["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        return subprocess.CompletedProcess(command, 0, next(outputs), "")

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "/cuda/bin/compute-sanitizer")
    assert sanitize.main(["--tool", "memcheck", "--tool", "racecheck"]) == 1
    assert [c[c.index("--tool") + 1] for c in commands] == ["memcheck", "racecheck"]
    assert all("--worker" in c and "--error-exitcode" in c for c in commands)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"verdict": "fail", "memcheck": "3 reports", "racecheck": "clean"}
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 2


def test_the_sanitizers_cases_run_every_kernel_once() -> None:
    sanitize = _script("cuda_sanitize")
    names = [str(c) for c in sanitize.cases(Target((9, 0)))]
    assert len(set(names)) == len(names)
    for name in REGIMES:
        assert any(n.startswith(name + " ") for n in names), name
    assert any(n.startswith("portable") for n in names)
