# SPDX-License-Identifier: Apache-2.0
"""Interpreted kernels run whatever was imported first, and the environment is prepared without touching choices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isomoe.common import interpreters

PROGRAM = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import triton.language
import numpy as np
from isomoe.tests.matrix import Case, build
from isomoe.common.metrics import rel_l2
inputs = build(Case("channel", "w8a8", "mixed", tokens=4))
assert rel_l2(inputs.run("triton"), inputs.run("reference")) < 5e-3
"""


def test_triton_imported_first_is_interpreted_all_the_same() -> None:
    """transformers imports triton; kernels must still run afterwards on a machine without a GPU."""
    pytest.importorskip("triton")
    if interpreters.has_cuda_device():
        pytest.skip("a CUDA device is present: kernels run natively")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_prepare_sets_only_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "has_cuda_device", lambda: False)
    monkeypatch.setattr(interpreters, "has_tpu_device", lambda: False)
    for name in ("TRITON_INTERPRET", "JAX_PLATFORMS", "NPROC", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    done = interpreters.prepare(4)
    assert done == {"TRITON_INTERPRET": "1", "NPROC": "8"}
    assert os.environ["JAX_PLATFORMS"] == "cuda"
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=4"
    assert interpreters.prepare(4) == {}


def test_devices_are_left_to_their_own_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "has_cuda_device", lambda: True)
    monkeypatch.setattr(interpreters, "has_tpu_device", lambda: True)
    for name in ("TRITON_INTERPRET", "JAX_PLATFORMS", "NPROC", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    assert interpreters.prepare() == {}
    assert "XLA_FLAGS" not in os.environ
