# SPDX-License-Identifier: Apache-2.0
"""The TPU benchmark script without a TPU: its dry run, its refusal, and how it reads a profile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("jax")
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "tpu_hardware.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tpu_hardware", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tpu_hardware"] = module
    spec.loader.exec_module(module)
    return module


def test_dry_run(tmp_path: Path) -> None:
    """Cells with adapters and without are checked and timed; one with a stage left out is timed only."""
    out = tmp_path / "cells.jsonl"
    command = [
        sys.executable, str(SCRIPT), "--dry-run", "--transport", "presum_fp8", "--lora", "0,2x16", "--out", str(out),
        "--ablate", ",no_dots",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(c["loras"], c["ablate"]) for c in cells] == [(0, ""), (0, "no_dots"), (2, ""), (2, "no_dots")]
    assert all(c["times"]["calls"] == 1 for c in cells)
    assert [c.get("rel_l2", 1) <= 1e-2 for c in cells] == [True, False, True, False]
    assert "published:" in done.stdout


def test_no_tpu_is_said(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(script, "has_tpu_device", lambda: False)
    assert script.main(["--model", "qwen3-coder-30b"]) == 2
    assert "No TPU on this machine" in capsys.readouterr().out


def test_times_are_those_of_the_slowest_device(script: ModuleType) -> None:
    def plane(name: str, line: str, *ns: float) -> SimpleNamespace:
        events = [SimpleNamespace(duration_ns=d) for d in ns]
        return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=events)])

    planes = [
        plane("/host:CPU", "XLA Modules", 9e9), plane("/device:TPU:0", "XLA Modules", 1000, 4000),
        plane("/device:TPU:1", "XLA Modules", 2000, 3000), plane("/device:TPU:1", "Steps", 7e9),
    ]
    assert script.device_times(planes) == [2.0, 4.0]
    with pytest.raises(RuntimeError, match="profile: got module runs"):
        script.device_times(planes[:1])
