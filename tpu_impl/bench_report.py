# SPDX-License-Identifier: Apache-2.0
"""The ledger of `bench` for people: tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common import report

Row = dict[str, Any]
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
_COLOURS = {"dispatch": "#9467bd", "kernel": "#1f77b4", "results": "#17becf", "fixed": "#ff7f0e"}


def _name(row: Row) -> str:
    cell = row["cell"]
    load = f" {cell['loras']}xr{cell['rank']}" if cell["loras"] else ""
    scheme = "" if cell["scheme"] == "channel" else f" {cell['scheme']}"
    return f"{cell['model'].removeprefix('qwen3-coder-')} {cell['generation']} EP{cell['ep']}{scheme}{load}"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Title, columns and lines of each table; cells that were refused come last, with the reason."""
    good = [row for row in rows if "error" not in row]
    out: list[Table] = [_times(good), _builds(good)]
    for make in (_adapters, _peers):
        made = make(good)
        if made[2]:
            out.append(made)
    refused: list[tuple[str, ...]] = [(_name(r), str(r["cell"]["tokens"]), r["error"]) for r in rows if "error" in r]
    if refused:
        out.append(("Refused", ("layer", "T", "reason"), refused))
    return out


def _clocked(row: Row) -> str:
    """Totals at every clock, the reference first."""
    return " / ".join(f"{m['total']:.0f}" for m in row["model"])


def _times(rows: Sequence[Row]) -> Table:
    columns = ("layer", "T", "build", "dispatch", "HBM", "compute", "kernel", "results", "fixed", "total",
               "launches 0 / most", "roofline", "ratio", "published")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        m, told = row["model"][0], row["published"]
        fixed = m["plan"] + m["launches"] + m["latency"]
        about = "~" if row["around_estimated"] else ""
        lines.append((
            _name(row), str(row["cell"]["tokens"]), f"{row['dispatch']} {row['transport']}",
            *(f"{m[k]:.0f}" for k in ("dispatch", "hbm", "compute", "kernel", "transport")), f"{about}{fixed:.0f}",
            f"{about}{_clocked(row)}", " / ".join(f"{us:.0f}" for us in row["launch_range_us"]),
            f"{row['roofline']['total']:.0f}", f"{m['total'] / row['roofline']['total']:.2f}",
            "-" if told is None else f"{told['us']:.0f}",
        ))
    title = (
        "Modelled microseconds of a layer (totals at each clock, v7x 1.2 / 1.1 / 1.3 GHz, others at the first; "
        "~: what XLA runs is estimated)"
    )
    return title, columns, lines


def _builds(rows: Sequence[Row]) -> Table:
    columns = ("layer", "T", "HBM MB", "link MB", "MXU us", "kcycles", "spills", "heights", "VMEM MB", "code MB",
               "compile s", "bf x R", "XLA kcycles", "ops")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        link = row["link_bytes"]
        lines.append((
            _name(row), str(row["cell"]["tokens"]), f"{row['hbm_bytes'] / 1e6:.0f}",
            f"{link['dispatch'] / 1e6:.1f} + {link['results'] / 1e6:.1f}", f"{row['mxu_us']:.0f}",
            f"{row['compute_cycles'] / 1e3:.0f}", str(row["spills_used"]),
            " ".join(str(h) for h in row["heights_used"]), f"{row['vmem_bytes'] / 1e6:.1f}",
            f"{row['code_bytes'] / 1e6:.1f}", f"{row['compile_s']:.0f}",
            f"{row['blocks']['bf']} x {row['blocks']['rows']}", f"{row['around']['cycles'] / 1e3:.0f}",
            str(row["around"]["launches"]),
        ))
    return "What was compiled (spills in the tile heights in use; XLA: what runs around the kernel)", columns, lines


def _adapters(rows: Sequence[Row]) -> Table:
    columns = ("layer", "T", "active pairs", "their bytes, us", "extra, us", "of bytes", "of base compute")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        ledger = row.get("lora")
        if ledger is None:
            continue
        clock = str(row["model"][0]["clock_ghz"])
        at = ledger[clock]
        lines.append((
            _name(row), str(row["cell"]["tokens"]), f"{ledger['pairs']:.0f}", f"{ledger['bytes_us']:.1f}",
            f"{at['extra_us']:.1f}", f"{at['of_bytes']:.2f}", f"{at['compute_share']:.0%}",
        ))
    return "Adapters: what they add to the expert kernel at the reference clock", columns, lines


def _peers(rows: Sequence[Row]) -> Table:
    columns = ("layer", "T", "HBM MB", "link MB", "barriers", "code MB", "compile s", "its floor, us", "ours, us")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        peer = row.get("peer")
        if peer is None:
            continue
        head = (_name(row), str(row["cell"]["tokens"]))
        ours = f"{row['model'][0]['total']:.0f}"
        if "error" in peer:
            lines.append((*head, "-", "-", "-", "-", "-", peer["error"][:80], ours))
            continue
        lines.append((
            *head, f"{peer['hbm_bytes'] / 1e6:.0f}", f"{peer['link_bytes'] / 1e6:.1f}", str(peer["barriers"]),
            f"{peer['code_bytes'] / 1e6:.1f}", f"{peer['compile_s']:.0f}", f"{peer['floor_us']:.0f}", ours,
        ))
    return "tpu-inference fused_ep_moe (v1), compiled beside: the least its design can take", columns, lines


def show(rows: Sequence[Row]) -> None:
    """Print the tables."""
    out = report.console()
    if not out.is_terminal:
        out.width = max(out.width, 170)
    for title, columns, lines in tables(rows):
        left = {"layer", "build", "heights", "reason"}
        out.print(report.table(title, columns, lines, numeric=[c for c in columns if c not in left]))


def markdown(rows: Sequence[Row]) -> str:
    """The tables as Markdown."""
    parts = []
    for title, columns, lines in tables(rows):
        body = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        body += ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
        parts.append(f"{title}.\n\n" + "\n".join(body))
    return "\n\n".join(parts) + "\n"


def write_picture(path: Path, rows: Sequence[Row]) -> None:
    """A PNG: a bar a cell, its terms stacked, against the roofline and what is published."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    good = [row for row in rows if "error" not in row]
    fig, axis = plt.subplots(figsize=(9, 1.6 + 0.32 * max(1, len(good))), layout="constrained")
    for y, row in enumerate(good):
        m = row["model"][0]
        # What runs beside the gather of rows is in its bar.
        total, fixed = m["total"], m["plan"] + m["launches"] + m["latency"] - m["beside"]
        parts = {"dispatch": m["dispatch"], "kernel": m["kernel"], "fixed": fixed}
        parts["results"] = total - sum(parts.values())
        left = 0.0
        for part in ("dispatch", "kernel", "results", "fixed"):
            label = part if y == 0 else None
            axis.barh(y, parts[part] / total, left=left, color=_COLOURS[part], height=0.6, label=label)
            left += parts[part] / total
        axis.plot(row["roofline"]["total"] / total, y, "k|", markersize=14, label="roofline" if y == 0 else None)
        axis.text(1.01, y, f"{total:.0f} us", va="center", fontsize=8)
    axis.set_yticks(range(len(good)), [f"{_name(r)} T={r['cell']['tokens']}" for r in good], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12)
    axis.set_xlabel("share of the modelled time", fontsize=9)
    axis.set_title("Modelled layer time by term, reference clock", fontsize=11)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    fig.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    fig.savefig(path, dpi=130)
    plt.close(fig)
