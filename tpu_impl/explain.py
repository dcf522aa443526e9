# SPDX-License-Identifier: Apache-2.0
"""What `isomoe explain` says of a TPU deployment: tile sizes, how rows move, and the modelled time.

Nothing is compiled. The time is read from a `bench.json` that has the cell, else it is an estimate (and says so).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..common.config import FusedMoEConfig
from ..common.presets import MODELS
from .aot import plan_request
from .blocks import choose_blocks, make_spec, max_tokens
from .generations import GENERATIONS
from .layout import padded_rank
from .links import Fabric
from .spec import LoRASpec
from .time_model import estimate_time, roofline
from .topologies import split_topology, topology_for
from .wires import AUTO

DEFAULT_TOKENS = (64, 512, 8192)


def plans(
    config: FusedMoEConfig,
    generation: str,
    *,
    scheme: str,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    max_loras: int = 0,
    max_lora_rank: int = 0,
    fp8_wire: bool = False,
    ledger: Path | None = None,
) -> list[dict[str, Any]]:
    """One entry a batch size: blocks, dispatch, transport, time and where it is from; or why nothing fits.

    Args:
      config: the layer, its `moe_parallel_config` included.
      generation: a key of `GENERATIONS`.
      scheme: weight scheme.
      tokens: batch sizes, of all devices.
      max_loras, max_lora_rank: adapter slots.
      fp8_wire: whether FP8 result rows are declared.
      ledger: a `bench.json` to look the time up in.

    Raises:
      ValueError, OSError: a ledger that is none.
    """
    rows = _rows(ledger)
    ep = config.moe_parallel_config.ep_size
    found: list[dict[str, Any]] = []
    loras = (max_loras, max_lora_rank)
    for count in tokens:
        entry: dict[str, Any] = {"tokens": count}
        found.append(entry)
        try:
            topology = topology_for(generation, ep)
            most = _most_tokens(config, generation, scheme, ep, loras)
            if count > most:
                raise ValueError(
                    f"tokens: got {count}, want at most {most}: routing tables of one call fill the scalar memory of "
                    f"{generation} (larger batches run in parts)"
                )
            _, spec = plan_request(
                topology, config, count, scheme=scheme, max_loras=max_loras, max_lora_rank=max_lora_rank,
                dispatch=AUTO, transport=AUTO, fp8_wire=fp8_wire, fp8_input=fp8_wire, ep=ep,
            )
        except ValueError as error:
            entry["error"] = str(error)
            continue
        gen, grid = split_topology(topology)
        fabric = Fabric.of(gen, grid, spec.ep)
        entry |= {
            "recipe": spec.recipe, "dispatch": spec.dispatch, "transport": spec.transport,
            "blocks": asdict(spec.blocks), "roofline_us": roofline(
                gen, fabric, config, count, quantized=scheme != "bf16"
            ).total,
        }
        row = _lookup(rows, config, generation, ep, count, scheme, max_loras, max_lora_rank)
        if row is not None and (row["dispatch"], row["transport"]) == (spec.dispatch, spec.transport):
            entry |= {"us": row["model"][0]["total"], "from": "compiled schedule"}
        else:
            entry |= {"us": estimate_time(gen, fabric, spec, config, count).total, "from": "estimate"}
    return found


def _most_tokens(
    config: FusedMoEConfig, generation: str, scheme: str, ep: int, loras: tuple[int, int]
) -> int:
    """Tokens of one call of the kernel: its tables fill scalar memory, and larger batches run in parts."""
    gen = GENERATIONS[generation]
    recipe = "bf16" if scheme == "bf16" else gen.default_recipe
    blocks = choose_blocks(
        generation, config, ep, ep=ep, scheme=scheme, recipe=recipe, max_loras=loras[0], max_lora_rank=loras[1]
    )
    lora = LoRASpec(loras[0], padded_rank(loras[1])) if loras[0] else None
    spec = make_spec(config, ep, blocks, ep=ep, scheme=scheme, recipe=recipe, lora=lora)
    return max_tokens(spec, gen.smem_bytes)


def _rows(ledger: Path | None) -> list[dict[str, Any]]:
    if ledger is None:
        return []
    try:
        rows = json.loads(ledger.read_text())["rows"]
        return [row for row in rows if "error" not in row]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"--bench: got {ledger}, want a bench.json of isomoe bench --tpu ({error})") from None


def _lookup(
    rows: list[dict[str, Any]], config: FusedMoEConfig, generation: str, ep: int, tokens: int, scheme: str, loras: int,
    rank: int,
) -> dict[str, Any] | None:
    shape = (config.num_experts, config.experts_per_token, config.hidden_dim, config.intermediate_size)
    for row in rows:
        cell = row["cell"]
        known = MODELS[cell["model"]].config if cell["model"] in MODELS else None
        if known is None:
            continue
        same = (known.num_experts, known.experts_per_token, known.hidden_dim, known.intermediate_size) == shape
        wanted = (generation, ep, tokens, scheme, loras, rank)
        got = tuple(cell[k] for k in ("generation", "ep", "tokens", "scheme", "loras", "rank"))
        if same and got == wanted:
            return row
    return None


def text(found: Sequence[dict[str, Any]], generation: str) -> str:
    """The entries as lines."""
    clock = GENERATIONS[generation].clock_ghz
    lines = [f"modelled layer, {generation} at {clock} GHz (not measured; see docs/tpu-performance.md):"]
    for entry in found:
        if "error" in entry:
            lines.append(f"  T={entry['tokens']}: {entry['error']}")
            continue
        b = entry["blocks"]
        rungs = "/".join(str(r) for r in b["rungs"])
        lines.append(
            f"  T={entry['tokens']}: {entry['us']:.0f} us ({entry['from']}; roofline {entry['roofline_us']:.0f}), "
            f"{entry['recipe']}, {entry['dispatch']}, {entry['transport']}; bf {b['bf']}, rows {b['rows']} "
            f"(heights {rungs}), nbuf {b['nbuf']}, xbuf {b['xbuf']}, stage {b['stage']}"
            + (f", pairs {b['pairs']}" if b["pairs"] else "")
        )
    return "\n".join(lines)
