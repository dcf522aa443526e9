# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over real processes (gloo on the CPU, kernels interpreted)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

import isomoe
from isomoe.common import tolerances
from isomoe.common.metrics import rel_l2, worst_row
from isomoe.tests.cuda_ep_worker import COUNTS, MIXED, PLAIN, RANKS, W8A16, worker
from isomoe.tests.matrix import Case, build


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, args=(port, folder), nprocs=RANKS, join=True)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("case", "strategy"),
    [(MIXED, "linear"), (MIXED, "round_robin"), (PLAIN, "linear"), (W8A16, "linear")],
    ids=["block-w8a8-lora", "block-w8a8-lora-round-robin", "channel-w8a8", "channel-w8a16-lora-skipped"],
)
def test_ranks_agree_with_the_reference(outputs: list[dict], case: Case, strategy: str) -> None:
    """Both ways, both wires; adapters sit in other slots on every rank, so slot numbers must not travel."""
    want = build(case).run("reference")
    name = f"{strategy} {case.scheme} {case.recipe}"
    replicated = [o[f"replicated {name}"] for o in outputs]
    assert all(torch.equal(r, replicated[0]) for r in replicated)
    found = {"replicated": replicated[0]}
    for wire in ("f32", "bf16"):
        parts = [o[f"gathered {name} {wire}"] for o in outputs]
        assert [len(p) for p in parts] == COUNTS
        found[wire] = torch.cat(parts)
    for how, got in found.items():
        host = got.float().numpy().astype(np.float64)
        assert rel_l2(host, want) <= tolerances.TO_RECIPE.bound, how
        assert worst_row(host, want) <= tolerances.WORST_ROW.bound, how


@pytest.mark.timeout(280)
@pytest.mark.parametrize("case", [MIXED, PLAIN], ids=["block-w8a8-lora", "channel-w8a8"])
def test_chunks_and_the_form_rows_travel_in_change_nothing(outputs: list[dict], case: Case) -> None:
    """Rows are computed alone, and codes made before the gather are those made after it."""
    for output in outputs:
        whole = output[f"gathered linear {case.scheme} {case.recipe} f32"]
        assert torch.equal(output[f"chunks {case.scheme}"], whole)


BENCHMARK = Path(isomoe.__file__).resolve().parent / "benchmarks" / "ep_multi_gpu.py"


@pytest.mark.timeout(280)
@pytest.mark.skipif(not BENCHMARK.exists(), reason="benchmarks are in a checkout only")
def test_the_multi_gpu_benchmark_runs_dry(tmp_path: Path) -> None:
    """Two gloo ranks, interpreted; the environment's own NCCL setting is left alone, what is not set is set."""
    out = tmp_path / "ep.json"
    env = {k: v for k, v in os.environ.items() if k != "TORCH_SYMM_MEM_DISABLE_MULTICAST"}
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--backend", "gloo", "--device", "cpu", "--tiny", "--out", out],
        env=env | {"NCCL_NVLS_ENABLE": "2", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=270,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["verdict"] == "pass" and verdict["ranks"] == 2 and verdict["passed"] >= 8
    found = json.loads(out.read_text())
    assert found["environment"] == {"NCCL_NVLS_ENABLE": "2", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert all(c["ok"] for c in found["checks"])
    (row,) = [t for t in found["times"] if "efficiency" in t]
    assert {"step", "gather", "gather fp8 rows", "experts", "reduce", "step in 2 chunks"} == set(row["us"])
    assert 0 <= row["hidden step in 2 chunks"] <= 1


@pytest.mark.skipif(not BENCHMARK.exists(), reason="benchmarks are in a checkout only")
def test_the_multi_gpu_benchmark_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--device", "cpu"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2 and "--backend gloo --tiny" in done.stderr
