# SPDX-License-Identifier: Apache-2.0
"""Compile the expert kernel for every generation, model, batch and adapter load, ahead of time, in one process.

    python -m isomoe.tpu_impl.compile_matrix OUT.jsonl [--generation v7x ...] [--tokens 512 ...]

Writes one line a cell and goes on where an earlier run stopped. Needs libtpu and no TPU; minutes to an hour.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
from typing import Any

from ..common.presets import MODELS
from .aot import ENVIRONMENT, plan_request
from .spec import scratch_bytes
from .topologies import TOPOLOGIES

TOKENS = (8, 16, 64, 320, 512, 2048, 8192)
ADAPTERS = ((0, 0), (8, 16), (8, 64))


def _cell(generation: str, model: str, tokens: int, loras: int, rank: int) -> dict[str, Any]:
    from .aot_worker import answer

    request, spec = plan_request(
        TOPOLOGIES[generation][0], MODELS[model].config, tokens, scheme="channel", max_loras=loras, max_lora_rank=rank
    )
    return {**answer({**request, "what": "kernel"}), "vmem_bytes": scratch_bytes(spec), "blocks": request["blocks"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--generation", nargs="*", default=list(TOPOLOGIES), choices=TOPOLOGIES)
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {tuple(json.loads(line)["cell"]) for line in lines}
    failed = 0
    with args.out.open("a") as out:
        for tokens, adapters, gen, model in itertools.product(args.tokens, ADAPTERS, args.generation, args.model):
            cell = (gen, model, tokens, *adapters)
            if cell in done:
                continue
            result = _cell(*cell)
            failed += "error" in result
            out.write(json.dumps({"cell": cell, **result}) + "\n")
            out.flush()
            print(*cell, result.get("error", f"{result.get('compile_s')} s")[:200], flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
