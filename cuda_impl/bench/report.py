# SPDX-License-Identifier: Apache-2.0
"""What a benchmark shows: tables for a terminal, JSON for programs, a picture for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common import report as common_report
from ...common.report import table
from .figures import Figure, Row

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "model", "scheme", "routing", "LoRA", "tokens", "backend", "us", "spread", "x floor", "rel. L2",
    "kernels, or why not",
)  # fmt: skip


def rows_table(rows: Sequence[Row]) -> Table:
    """One line a backend and cell; times in microseconds."""

    def cells(r: Row) -> tuple[str, ...]:
        note = r.plan if r.verdict == "ok" else f"{r.verdict}: {r.reason}"
        if r.bitwise is not None:
            note += ", same bits" if r.bitwise else ", OTHER BITS"
        return (
            r.model, r.scheme, r.routing, r.lora, str(r.tokens), r.backend + (f" ({r.variant})" if r.variant else ""),
            "-" if r.us is None else f"{r.us:.1f}", "-" if r.spread is None else f"{100 * r.spread:.1f} %",
            "-" if r.us is None or not r.floor_us else f"{r.us / r.floor_us:.2f}",
            "-" if r.rel_l2 is None else f"{r.rel_l2:.1e}", note,
        )  # fmt: skip

    numeric = ("tokens", "us", "spread", "x floor")
    return table("MoE layer, CUDA graphs, cold L2", COLUMNS, map(cells, rows), numeric=numeric)


def figures_table(figures: Sequence[Figure]) -> Table:
    """One line a goal."""
    verdict = {True: "pass", False: "FAIL", None: "-"}
    lines = [
        (f.name, f.goal, "not run" if f.value is None else f"{f.value:.3g}", verdict[f.ok], f.worst) for f in figures
    ]
    return table("Goals", ("figure", "goal", "value", "verdict", "where"), lines, numeric=("value",))


def write_json(path: Path, header: Mapping[str, Any], rows: Sequence[Row], figures: Sequence[Figure]) -> None:
    """Everything a run found."""
    data = {**header, "rows": [asdict(r) for r in rows], "figures": [asdict(f) for f in figures]}
    common_report.write_json(path, data)


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Time over the floor against tokens, one panel a model, scheme, LoRA setting and routing.

    Raises:
      ImportError: matplotlib is missing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[tuple, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for r in rows:
        if r.us is not None and r.floor_us and not r.variant:
            panels[r.model, r.scheme, r.lora, r.routing][r.backend].append((r.tokens, r.us / r.floor_us))
    if not panels:
        return
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 3.2 * len(panels)), squeeze=False, constrained_layout=True)
    for axis, ((model, scheme, lora, routing), lines) in zip(axes[:, 0], sorted(panels.items())):
        for backend, points in sorted(lines.items()):
            points.sort()
            axis.plot(*zip(*points), marker="o", label=backend)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(
            xscale="log", xlabel="tokens", ylabel="time over floor", title=f"{model} {scheme}, LoRA {lora}, {routing}"
        )
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
