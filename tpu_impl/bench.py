# SPDX-License-Identifier: Apache-2.0
"""`isomoe bench --tpu`: what every layer would cost on a TPU, from compiled schedules and a model; no TPU needed.

A cell is one layer, batch, generation, device count and adapter load. Each is compiled once in a process of its own
and kept under the output folder, keyed by the sources that shape the program, so an interrupted run goes on where it
stopped and a change of the model compiles nothing. Cells with adapters or block scales compile the expert kernel
alone; what XLA runs around it is taken from the same cell without. So do cells of more than `WHOLE_TOKENS` tokens,
because libtpu takes many minutes for their sorts; what XLA runs around those is estimated, and the row says so.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..common.checks import check_choice, check_int
from ..common.config import FusedMoEConfig
from ..common.presets import MODELS
from . import published
from .aot import Compiled, compile_layer, model_times, plan_request
from .blocks import tile_width
from .generations import generation
from .kernel_loops import KernelLoops
from .links import Fabric, dispatch_us, transport_us
from .peer import PeerCell, compile_peer, peer_floor
from .spec import KernelSpec, scratch_bytes
from .time_model import (
    LAUNCH_MOST_US,
    LAUNCH_US,
    VisitCost,
    estimate_glue,
    matrix_elements,
    pair_bytes,
    present_pairs,
    roofline,
    row_distribution,
    traffic_of,
)
from .topologies import TOPOLOGIES, split_topology, topology_for
from .wires import AUTO
from .xla_ops import Glue

SCHEMES = ("channel", "block")
WIRES = ("bf16", "fp8")
WHOLE_TOKENS = 8192
# The modules whose text decides what is compiled and how its dump is read.
_SHAPING = (
    "combine", "combine_cost", "combine_kernel", "ep_moe", "expert_kernel", "kernel_loops", "layout", "llo", "numerics",
    "pack_kernel", "plan", "presum", "shipping", "spec", "table_kernel", "xla_ops",
)


@dataclass(frozen=True)
class Cell:
    """One line of the ledger."""

    model: str
    tokens: int
    generation: str
    ep: int
    scheme: str = "channel"
    loras: int = 0
    rank: int = 0

    @property
    def plain(self) -> Cell:
        """The same without adapters or block scales."""
        return replace(self, scheme="channel", loras=0, rank=0)

    def __str__(self) -> str:
        load = f" {self.loras}xr{self.rank}" if self.loras else ""
        return f"{self.model} {self.generation} EP{self.ep} T={self.tokens} {self.scheme}{load}"


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
      models: preset names.
      tokens, generations, eps: crossed with them.
      scheme: weight scheme; block weights get two rows where the exact scales cost more than matrices at peak.
      loras, rank: adapter slots; 0 for none. Adapter rows are compared with the same cell without.
      wire: ``"fp8"`` declares FP8 result rows (and FP8 input rows for w8a16), so that the link model may choose them.
      out: the output folder.
      peer: interpreter with tpu-inference, or None for no comparison.
    """

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    generations: tuple[str, ...]
    eps: tuple[int, ...]
    scheme: str
    loras: int
    rank: int
    wire: str
    out: Path
    peer: str | None = None

    def __post_init__(self) -> None:
        for label, values, choices in (
            ("--model", self.models, MODELS), ("--generation", self.generations, TOPOLOGIES),
            ("--scheme", (self.scheme,), SCHEMES), ("--wire", (self.wire,), WIRES),
        ):
            if not values:
                raise ValueError(f"{label}: got nothing, want at least one of {', '.join(choices)}")
            for value in values:
                check_choice(label, value, choices)
        for label, numbers, least in (
            ("--tokens", self.tokens, 1), ("--ep", self.eps, 1), ("--loras", (self.loras,), 0),
            ("--rank", (self.rank,), 0),
        ):
            for number in numbers:
                check_int(label, number, minimum=least)
        if (self.loras > 0) != (self.rank > 0):
            raise ValueError(f"--rank: got {self.rank} with --loras {self.loras}, want both or neither")
        for name, ep in itertools.product(self.generations, self.eps):
            topology_for(name, ep)

    def cells(self) -> list[Cell]:
        """Cells in the order they run; an adapter cell right after the same cell without."""
        loads = [(0, 0)] + ([(self.loras, self.rank)] if self.loras else [])
        schemes = ["channel", "block"] if self.scheme == "block" else ["channel"]
        order = itertools.product(self.generations, self.models, self.eps, self.tokens, schemes, loads)
        return [Cell(m, t, g, ep, s, *load) for g, m, ep, t, s, load in order]


def run(settings: Settings, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every row of the ledger; `say` is told what happens.

    A cell that cannot be compiled is a row with an ``error``.
    """
    store = Store(settings.out)
    cells: list[Cell] = settings.cells()
    by_cell: dict[Cell, dict[str, Any]] = {}
    for i, cell in enumerate(cells):
        say(f"[{i + 1}/{len(cells)}] {cell}")
        by_cell[cell] = _row(cell, settings, store, say, by_cell.get(cell.plain))
    rows = list(by_cell.values())
    for cell, row in by_cell.items():
        if cell.loras:
            row["lora"] = lora_ledger(row, by_cell[replace(cell, loras=0, rank=0)])
        if cell.scheme == "block":
            row["per_channel_total_us"] = _totals(by_cell[replace(cell, scheme="channel")])
    return rows


def _totals(row: dict[str, Any]) -> dict[str, float] | None:
    return None if "error" in row else {str(m["clock_ghz"]): m["total"] for m in row["model"]}


class Store:
    """Compiled cells on disk."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "compiled"
        self.folder.mkdir(parents=True, exist_ok=True)
        here = Path(__file__).parent
        texts = [path.read_bytes() for name in _SHAPING if (path := here / f"{name}.py").exists()]
        self.sources = hashlib.sha256(b"".join(texts) + _versions().encode())

    def get(self, key: str, make: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """What `make` gave for this key and these sources, and whether it was already there."""
        digest = self.sources.copy()
        digest.update(key.encode())
        path = self.folder / f"{digest.hexdigest()[:20]}.json"
        if path.exists():
            return json.loads(path.read_text())["made"], True
        made = make()
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"key": key, "made": made}))
        partial.rename(path)
        return made, False


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("jax", "libtpu"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            raise ImportError(f"{package} is not installed: pip install 'isomoe[tpu]' libtpu") from None
    return ", ".join(found)


def _layer(cell: Cell) -> FusedMoEConfig:
    base = MODELS[cell.model].config
    parallel = replace(base.moe_parallel_config, ep_size=cell.ep, use_ep=cell.ep > 1)
    return replace(base, moe_parallel_config=parallel)


def _row(
    cell: Cell, settings: Settings, store: Store, say: Callable[[str], None], plain: dict[str, Any] | None
) -> dict[str, Any]:
    config, topology = _layer(cell), topology_for(cell.generation, cell.ep)
    gen, grid = split_topology(topology)
    fabric = Fabric.of(gen, grid, cell.ep)
    row: dict[str, Any] = {"cell": asdict(cell), "topology": topology}
    floor = roofline(gen, fabric, config, cell.tokens)
    row["roofline"] = asdict(floor)
    told = published.best(config, cell.generation, cell.ep, cell.tokens)
    row["published"] = None if told is None else {"us": told[0], "by": told[1], "source": published.SOURCE}
    fp8 = settings.wire == "fp8"
    try:
        request, spec = plan_request(
            topology, config, cell.tokens, scheme=cell.scheme, max_loras=cell.loras, max_lora_rank=cell.rank,
            transport=AUTO, dispatch=AUTO, fp8_wire=fp8, fp8_input=fp8, ep=cell.ep,
        )
        alone = cell.tokens > WHOLE_TOKENS or (plain is not None and "error" not in plain)
        what = "kernel" if alone else "layer"
        made, known = store.get(
            json.dumps({**request, "what": what}, sort_keys=True),
            lambda: asdict(compile_layer(request, spec, schedule=True, what=what)),
        )
        say(f"  {what} already compiled" if known else f"  {what} compiled in {made['compile_s']:.0f} s")
        if cell.tokens > WHOLE_TOKENS:
            made = {**made, "around": asdict(estimate_glue(spec))}
        elif plain is not None and what == "kernel":
            made = {**made, "around": plain["around"]}
        row |= {"compiled": what, "around_estimated": cell.tokens > WHOLE_TOKENS}
        row |= ledger(cell, config, topology, spec, _compiled(made))
    except (ValueError, RuntimeError) as error:
        row["error"] = " ".join(str(error).split())[:500]
        say(f"  refused: {row['error'][:160]}")
    if settings.peer is not None and not cell.loras and cell.scheme == "channel":
        row["peer"] = _peer_row(cell, config, topology, settings.peer, fabric, store, say)
    return row


def _compiled(made: dict[str, Any]) -> Compiled:
    loops, around = made["loops"], made["around"]
    cost: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in loops["cost"].items()}
    return Compiled(
        made["compile_s"], made["code_bytes"], made["temp_bytes"],
        KernelLoops(VisitCost(**cost), tuple(loops["spills"]), loops["mxu_share"]),
        Glue(**{**around, "largest": tuple((n, c) for n, c in around["largest"])}),
    )


def ledger(cell: Cell, config: FusedMoEConfig, topology: str, spec: KernelSpec, made: Compiled) -> dict[str, Any]:
    """The figures of one compiled cell, by name."""
    gen, grid = split_topology(topology)
    fabric = Fabric.of(gen, grid, spec.ep)
    traffic = traffic_of(spec, config, cell.tokens)
    models = model_times(topology, spec, config, cell.tokens, made)
    assert made.loops is not None and made.around is not None
    reference = models[0]
    floor = roofline(gen, fabric, config, cell.tokens)
    used = _heights_used(spec, config, cell.tokens)
    spills = dict(zip(spec.blocks.rungs, made.loops.spills, strict=True))
    return {
        "recipe": spec.recipe, "dispatch": spec.dispatch, "transport": spec.transport,
        "blocks": asdict(spec.blocks), "tile_width": tile_width(gen, config, cell.scheme),
        "hbm_bytes": round(reference.hbm * gen.hbm_gbps * 1e3),
        "link_bytes": {
            "dispatch": round(dispatch_us(fabric, traffic, spec.dispatch) * fabric.gbps * 1e3),
            "results": round(transport_us(fabric, traffic, spec.transport) * fabric.gbps * 1e3),
        },
        "mxu_us": reference.mxu, "compute_cycles": round(reference.compute * reference.clock_ghz * 1e3),
        "mxu_share": made.loops.mxu_share, "spills": spills, "spills_used": max(spills[h] for h in used),
        "heights_used": used, "compile_s": made.compile_s, "code_bytes": made.code_bytes,
        "temp_bytes": made.temp_bytes, "vmem_bytes": scratch_bytes(spec), "loops": asdict(made.loops.cost),
        "around": asdict(made.around), "model": [asdict(m) for m in models],
        "ratio": {str(m.clock_ghz): m.total / floor.total for m in models},
        "launch_range_us": [
            reference.total + made.around.launches * (us - LAUNCH_US) for us in (0.0, LAUNCH_MOST_US)
        ],
        "pairs": _active_pairs(spec, config, cell.tokens),
        "pair_bytes": pair_bytes(spec), "matrix_elements": matrix_elements(spec),
    }


def _heights_used(spec: KernelSpec, config: FusedMoEConfig, num_tokens: int) -> list[int]:
    """Tile heights that at least one visit in a hundred runs."""
    share: dict[int, float] = {}
    for rows, chance in row_distribution(num_tokens, config.experts_per_token, config.num_experts):
        if rows:
            height = next(h for h in spec.blocks.rungs if h >= min(rows, spec.blocks.rows))
            share[height] = share.get(height, 0.0) + chance
    return sorted(h for h, chance in share.items() if chance >= 0.01)


def _active_pairs(spec: KernelSpec, config: FusedMoEConfig, num_tokens: int) -> float:
    """Expected (expert, adapter) pairs of a device that have rows."""
    spread = row_distribution(num_tokens, config.experts_per_token, config.num_experts)
    return spec.experts * sum(chance * present_pairs(spec, rows) for rows, chance in spread)


def lora_ledger(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any] | None:
    """What adapters add to the kernel, against the bytes of the active pairs and against the base compute."""
    if "error" in row or "error" in base:
        return None
    gen = generation(row["cell"]["generation"])
    bytes_us = row["pairs"] * row["pair_bytes"] / gen.hbm_gbps / 1e3
    out: dict[str, Any] = {"pairs": row["pairs"], "bytes_us": bytes_us}
    for with_, without in zip(row["model"], base["model"], strict=True):
        extra = with_["kernel"] - without["kernel"]
        out[str(with_["clock_ghz"])] = {
            "extra_us": extra, "of_bytes": extra / bytes_us,
            "compute_share": (with_["compute"] - without["compute"]) / without["compute"],
        }
    return out


def _peer_row(
    cell: Cell, config: FusedMoEConfig, topology: str, peer: str, fabric: Fabric, store: Store,
    say: Callable[[str], None],
) -> dict[str, Any]:
    wanted = PeerCell.of(config, topology, cell.tokens, cell.ep)
    found, known = store.get(
        json.dumps({"peer": peer, **asdict(wanted)}, sort_keys=True), lambda: compile_peer(wanted, peer)
    )
    if "error" in found:
        say(f"  tpu-inference: {found['error'][:160]}")
        return found
    say(f"  tpu-inference {'already compiled' if known else 'compiled'}")
    gen, _ = split_topology(topology)
    return {**found, **peer_floor(gen, fabric, config, cell.tokens, found)}


def document(settings: Settings, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run as data."""
    described = {k: v for k, v in asdict(settings).items() if k not in ("out", "peer")}
    return {"schema_version": 1, "versions": _versions(), "settings": described, "rows": list(rows)}
