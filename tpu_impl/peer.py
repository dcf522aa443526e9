# SPDX-License-Identifier: Apache-2.0
"""tpu-inference's `fused_ep_moe` (v1) compiled beside our layer, and the least time its design can take.

It runs in the interpreter that has it, which need not have isomoe: the worker is a script of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.config import FusedMoEConfig
from .generations import Generation
from .links import Fabric, Traffic, transport_us
from .time_model import HOP_US, hops

TIMEOUT_S = 900
WORKER = Path(__file__).with_name("peer_worker.py")


@dataclass(frozen=True)
class PeerCell:
    """What the worker compiles."""

    topology: str
    tokens: int
    ep: int
    experts: int
    top_k: int
    hidden: int
    inter: int

    @classmethod
    def of(cls, config: FusedMoEConfig, topology: str, tokens: int, ep: int) -> PeerCell:
        return cls(
            topology, tokens, ep, config.num_experts, config.experts_per_token, config.hidden_dim,
            config.intermediate_size,
        )


def compile_peer(cell: PeerCell, python: str) -> dict[str, Any]:
    """Sizes and schedule of the peer's layer, or why there are none, under ``error``.

    Args:
      cell: the layer.
      python: path of an interpreter that imports tpu_inference, jax and libtpu.
    """
    from .aot import _DROPPED, ENVIRONMENT
    from .llo import DUMP_FLAGS, op_bundles

    env = {k: v for k, v in os.environ.items() if k not in (*_DROPPED, "PYTHONPATH")} | ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="isomoe-peer-") as folder:
        env["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=folder)
        try:
            done = subprocess.run(
                [python, str(WORKER)], input=json.dumps(asdict(cell)), capture_output=True, text=True, env=env,
                timeout=TIMEOUT_S, check=False,
            )
        except OSError as error:
            return {"error": f"{python}: {error.strerror}"}
        except subprocess.TimeoutExpired:
            return {"error": f"not compiled within {TIMEOUT_S} s"}
        answer = next((json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"')), None)
        if answer is None:
            tail = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
            return {"error": tail[0][:300]}
        if "error" not in answer:
            answer["bundles"] = max(op_bundles(Path(folder)).values(), default=0)
        return answer


def peer_floor(
    gen: Generation, fabric: Fabric, config: FusedMoEConfig, num_tokens: int, found: dict[str, Any]
) -> dict[str, Any]:
    """The least time of that design, from its own block sizes.

    It reads the weights of every local expert, empty ones too, once for each `bt` of local tokens; sends each routed
    row as bf16 and back; multiplies in bf16; and all devices meet once an expert and block, and n + 2 times a block.
    """
    halves = 2 if config.is_act_and_mul else 1
    matrix = (halves + 1) * config.hidden_dim * config.intermediate_size
    blocks, local = -(-num_tokens // fabric.ep // found["bt"]), config.num_experts // fabric.ep
    rows = num_tokens * config.experts_per_token / fabric.ep
    hbm = blocks * local * matrix / gen.hbm_gbps / 1e3
    mxu = 2 * rows * matrix / gen.bf16_tflops / 1e6
    traffic = Traffic(num_tokens, config.hidden_dim, config.experts_per_token, config.num_experts)
    links = 2 * transport_us(fabric, traffic, "push_bf16")
    barriers = blocks * (local + fabric.ep + 2)
    meet = barriers * hops(fabric) * HOP_US
    return {
        "hbm_bytes": blocks * local * matrix, "link_bytes": round(links * fabric.gbps * 1e3), "mxu_us": mxu,
        "hbm_us": hbm, "links_us": links, "barriers": barriers, "barriers_us": meet,
        "floor_us": max(hbm, mxu, links) + meet,
    }
