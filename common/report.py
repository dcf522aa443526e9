# SPDX-License-Identifier: Apache-2.0
"""What the commands show: tables for a terminal, JSON for programs, a picture for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tolerances
from .parity import ParityResult, ParityRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Narrower than this, a twelve-column table breaks inside its numbers.
MIN_WIDTH = 132
VERDICT_STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "not served": "dim", "unavailable": "dim"}


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables whole where output is not a terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, soft_wrap=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(stderr=stderr, highlight=False, width=MIN_WIDTH)
    return made


def format_bytes(count: int) -> str:
    """Bytes in binary units, three significant digits."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError


def ranges(values: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for value in sorted(values):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def _figure(value: float | None) -> str:
    return "-" if value is None else ("0" if value == 0 else f"{value:.2e}")


def _yes(value: bool | None) -> str:
    return "-" if value is None else ("yes" if value else "NO")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Iterable[str] = ()) -> Table:
    """A plain rich table; `numeric` columns are right-aligned."""
    from rich import box
    from rich.table import Table

    right = set(numeric)
    made = Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False,
        show_header=any(columns),
    )
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def parity_table(rows: Sequence[ParityRow]) -> Table:
    """The one table of a parity job, a section a case."""
    numeric = ("EP", "to recipe", "worst row", "to float64", "delta", "cosine", "s")
    columns = ("executor", "recipe", "scheme", "EP", "to recipe", "worst row", "to float64", "delta", "cosine",
               "base bits", "s", "verdict")
    made = table("Parity (relative L2; interpreted runs say nothing about speed)", columns, (), numeric=numeric)
    section: tuple[str, int] | None = None
    for row in rows:
        if (row.case, row.layer) != section:
            made.add_section()
            section = (row.case, row.layer)
        style = VERDICT_STYLES[row.verdict]
        verdict = row.verdict if not row.reason else f"{row.verdict}: {row.reason}"
        cosine = "-" if row.delta_cosine is None else f"{row.delta_cosine:.6f}"
        seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
        made.add_row(
            row.executor, row.recipe, row.scheme, str(row.ep), _figure(row.rel_l2), _figure(row.worst_row),
            _figure(row.truth_rel_l2), _figure(row.delta_rel_l2), cosine, _yes(row.bitwise), seconds,
            f"[{style}]{verdict}[/{style}]",
        )
    return made


def parity_json(result: ParityResult, settings: dict[str, Any]) -> dict[str, Any]:
    """The job as data: settings, bounds, every row, and how executors agree with each other."""
    bounds = {
        name: {"bound": value.bound, "reason": value.reason}
        for name, value in vars(tolerances).items()
        if isinstance(value, tolerances.Tolerance)
    }
    return {
        "schema_version": 1,
        "settings": settings,
        "tolerances": bounds,
        "rows": [row.as_dict() for row in result.rows],
        "agreements": [vars(a) for a in result.agreements],
        "failed": len(result.failed),
    }


def write_json(path: Path, data: Any) -> None:
    """Write data as indented JSON; infinities become strings, since JSON has none."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return str(value)
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return value

    path.write_text(json.dumps(plain(data), indent=2, allow_nan=False) + "\n")


# (field of ParityRow, legend, marker, colour, bound drawn as a line in that colour)
_SERIES = (
    ("rel_l2", "to the declared recipe", "o", "#1f77b4", tolerances.TO_RECIPE.bound),
    ("worst_row", "worst row to the recipe", "^", "#9467bd", tolerances.WORST_ROW.bound),
    ("delta_rel_l2", "LoRA delta to the recipe", "D", "#ff7f0e", None),
    ("truth_rel_l2", "to float64", "s", "#7f7f7f", None),
)
_EXACT = 1e-5  # errors of zero are drawn here, at the left edge
_WORST = 1.0


def write_picture(path: Path, rows: Sequence[ParityRow], title: str) -> None:
    """A PNG: one panel a case, one line a run, the errors on a log axis with their bounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys((row.case, row.layer) for row in rows))
    groups = [[row for row in rows if (row.case, row.layer) == case] for case in cases]
    tallest = max(len(group) for group in groups)
    fig, axes = plt.subplots(
        1, len(groups), figsize=(1.5 + 6.2 * len(groups), 2.2 + 0.3 * tallest), squeeze=False, layout="constrained"
    )
    for axis, (case, _layer), group in zip(axes[0], cases, groups, strict=True):
        _panel(axis, case, group, tallest)
    handles, labels = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    fig.suptitle(title, fontsize=12)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _panel(axis: Any, case: str, rows: Sequence[ParityRow], height: int) -> None:
    marks = {"pass": ("pass", "#2ca02c"), "fail": ("FAIL", "#d62728"), "error": ("ERROR", "#d62728")}
    for field, legend, marker, colour, bound in _SERIES:
        points = [(getattr(row, field), y) for y, row in enumerate(rows) if getattr(row, field) is not None]
        xs = [min(max(value, _EXACT), _WORST) for value, _ in points]
        ys = [y for _, y in points]
        axis.scatter(xs, ys, marker=marker, s=30, color=colour, label=legend, zorder=3, clip_on=False)
        if bound is not None:
            axis.axvline(bound, color=colour, linestyle="--", linewidth=1, label=f"bound {bound:.0e}: {legend}")
    for y, row in enumerate(rows):
        text, colour = marks.get(row.verdict, (row.verdict, "#7f7f7f"))
        axis.text(1.02, y, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8, color=colour)
        if y % 2:
            axis.axhspan(y - 0.5, y + 0.5, color="#f4f4f4", zorder=0)
    axis.set_xscale("log")
    axis.set_xlim(_EXACT, _WORST)
    axis.set_ylim(height - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axis.set_xlabel("relative L2 error (left edge: 1e-5 or less)", fontsize=9)
    axis.set_title(case, fontsize=10)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _label(row: ParityRow) -> str:
    return row.executor if row.recipe == "-" else f"{row.executor}  {row.recipe}  EP{row.ep}"
