# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels compile for sm_90 at production shapes, use warpgroup tensor instructions and do not spill.

No GPU is needed. Each group runs in a process of its own, because Triton's driver is replaced there and because the
other tests may have Triton's interpreter switched on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

WORKER = textwrap.dedent(
    """
    import dataclasses, json, sys
    import torch
    from isomoe.cuda_impl.hopper import hopper_fused_moe, prepare_adapters, prepare_weights
    from isomoe.cuda_impl.hopper.aot import ahead_of_time, inspect

    F8, BF, F32, I32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32
    blocks = lambda n: -(-n // 128)
    empty = lambda *s, d=F8: torch.empty(s, dtype=d)
    E, GLOBAL, I, H, K = {"q30b": (128, 128, 768, 2048, 8), "q480b": (20, 160, 2560, 6144, 8)}[sys.argv[1]]
    reports = []
    with ahead_of_time() as compiled:
        for scheme, recipe, rank, tokens in json.loads(sys.argv[2]):
            if scheme == "block":
                s13, s2 = empty(E, 2 * blocks(I), blocks(H), d=F32), empty(E, blocks(H), blocks(I), d=F32)
            else:
                s13, s2 = torch.ones(E, 2 * I), torch.ones(E, H)
            weights = prepare_weights(scheme, empty(E, 2 * I, H), empty(E, H, I), s13, s2)
            adapters = slots = None
            if rank:
                adapters = prepare_adapters(
                    empty(8, E, 2, rank, H, d=BF), empty(8, E, 2, I, rank, d=BF), empty(8, E, rank, I, d=BF),
                    empty(8, E, H, rank, d=BF),
                )
                slots = empty(tokens, d=I32)
            hopper_fused_moe(
                empty(tokens, H, d=BF), empty(tokens, K, d=F32), empty(tokens, K, d=I32), weights, recipe=recipe,
                adapters=adapters, adapter_slots=slots, expert_map=empty(GLOBAL, d=I32) if GLOBAL != E else None,
            )
    for key, kernel in compiled.items():
        reports.append(dataclasses.asdict(inspect(kernel, *key.split("|", 1))))
    print("REPORT" + json.dumps(reports))
    """
)

GROUPS = {
    "prefill": ("q30b", [("block", "w8a8", 0, 4096), ("block", "w8a8", 16, 4096), ("channel", "w8a8", 0, 4096)]),
    "prefill_channel_lora": ("q30b", [("channel", "w8a8", 16, 4096), ("channel", "w8a8", 128, 4096)]),
    "decode": ("q30b", [("block", "w8a8", 0, 64), ("block", "w8a8", 16, 64), ("channel", "w8a8", 0, 256)]),
    "decode_w8a16": ("q30b", [("block", "w8a16", 0, 64), ("block", "w8a16", 16, 256), ("channel", "w8a16", 0, 1024)]),
    "one_token": ("q30b", [("block", "w8a8", 0, 1), ("channel", "w8a8", 16, 1), ("block", "w8a16", 0, 1)]),
    "expert_parallel": ("q480b", [("block", "w8a8", 0, 1), ("block", "w8a8", 0, 64)]),
}
GEMMS = ("grouped_gemm_kernel", "decode_gemm_kernel")
# Shared memory a program may have on sm_90, and registers a thread of a kernel of 12 warps.
SHARED_LIMIT, GEMM_REGISTERS = 227 * 1024, 168
# A few instructions outside the main loop (one adapter epilogue) are tolerated; accumulators that spill give hundreds.
SPILLS = 40


@pytest.mark.parametrize("group", GROUPS)
def test_compiles_for_sm_90(group: str) -> None:
    shape, cases = GROUPS[group]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, shape, json.dumps(cases)], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(text for text in done.stdout.splitlines() if text.startswith("REPORT"))
    reports = json.loads(line.removeprefix("REPORT"))
    names = {r["name"] for r in reports}
    if group == "one_token":
        assert {"_w13_kernel", "_w2_kernel", "_shrink_kernel"} <= names
    elif group.startswith("prefill"):
        assert "grouped_gemm_kernel" in names and "decode_gemm_kernel" not in names
    else:
        assert "decode_gemm_kernel" in names
    for r in reports:
        where = f"{r['name']} {r['key']}"
        assert r["shared_bytes"] <= SHARED_LIMIT, where
        assert r["spill_instructions"] <= SPILLS, f"{where}: {r['spill_instructions']} spill instructions"
        if r["name"] in GEMMS:
            assert r["registers"] == GEMM_REGISTERS, where
            assert r["tensor_instructions"] > 0, where
            assert not r["serialised"], where
