# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over real processes (gloo on the CPU, kernels interpreted)."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

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
