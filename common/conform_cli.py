# SPDX-License-Identifier: Apache-2.0
"""`isomoe conform` and `isomoe golden`: the conformance matrix on any executor, and golden packs."""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..tests.conformance import Check, CheckResult, Subject
    from ..tests.matrix import Case

FINDINGS = 1
_STYLES = {"pass": "green", "fail": "bold red", "error": "bold red", "not served": "dim", "unavailable": "dim"}

golden_app = typer.Typer(
    no_args_is_help=True, help="Write and check golden packs: inputs, recipe, result and stages."
)


def mount(app: typer.Typer) -> None:
    """Add the commands to the package's command line."""
    app.command("conform")(conform)
    app.add_typer(golden_app, name="golden")


def _prepare() -> None:
    from .interpreters import prepare

    prepare()


def conform(
    executor: Annotated[str, typer.Argument(help="A registered name, or package.module:Class.")],
    golden: Annotated[str | None, typer.Option(help="Also hold the executor to this golden pack.")] = None,
    report: Annotated[str | None, typer.Option(help="Folder for conform.json and conform.html.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first answer: each recipe and invariant once.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Axes crossed, token counts about tile sizes.")] = False,
    production: Annotated[
        bool, typer.Option("--production", help="Real layer sizes too; native runs only.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the cases.")] = 1,
) -> None:
    """Run the conformance matrix on an executor: parity, invariants, adapters, expert parallelism.

    Exit codes: 0 nothing found, 1 findings, 2 usage.
    """
    from .cli import _one_line_errors

    with _one_line_errors():
        if quick and full:
            raise ValueError("--quick: got it together with --full, want one of them")
        if report is not None:
            Path(report).mkdir(parents=True, exist_ok=True)
        _prepare()
        from ..tests.conformance import subject_for
        from .golden import check_pack, diagnose, read_pack

        pack = read_pack(golden) if golden else []
        subject = subject_for(executor)
        if subject.info.state == "unavailable":
            raise ValueError(f"EXECUTOR: {subject.name} is unavailable here: {subject.info.reason}")
        if production and subject.info.state != "native":
            raise ValueError(
                f"--production: got it with {subject.name}, which is {subject.info.state} here, not native"
            )
        level = "quick" if quick else "full" if full else "standard"
        results = []
        for found, at in _results(executor, level, production, jobs):
            results.append(found)
            if found.verdict not in ("pass", "not served"):
                typer.echo(f"[{at}] {found}", err=True)
        # Probes once for each recipe that failed, so that findings come with the stage where they begin.
        stages: dict[tuple[str, str], str] = {}
        for key in {_kind(r) for r in results if r.verdict in ("fail", "error")}:
            stages[key] = diagnose(subject.name, scheme=key[0], recipe=key[1]).stage
        results = [_with_stage(r, stages) for r in results]
        pack_results = [r.as_dict() for r in check_pack(pack, subject.name)]
    _show(subject, results, pack_results)
    if report is not None:
        with _one_line_errors():
            folder = Path(report)
            write_report(folder, subject, level, results, pack_results)
        typer.echo(f"report: {folder / 'conform.html'}, {folder / 'conform.json'}")
    if any(not r.ok for r in results) or any(r["verdict"] not in ("pass", "not served") for r in pack_results):
        raise typer.Exit(FINDINGS)


def _cells(executor: str, level: str, production: bool) -> tuple[Subject, list[tuple[Check, Case]]]:
    _prepare()
    from ..tests.conformance import plan, subject_for

    subject = subject_for(executor)
    return subject, list(plan(subject, level, production=production))


_cells_of_process = functools.cache(_cells)


def _run_cell(executor: str, level: str, production: bool, index: int) -> CheckResult:
    from ..tests.conformance import run_check

    subject, cells = _cells_of_process(executor, level, production)
    return run_check(cells[index][0], subject, cells[index][1])


def _results(executor: str, level: str, production: bool, jobs: int) -> Iterator[tuple[CheckResult, str]]:
    """Every pair's result in order, and its place; over several processes where asked."""
    from ..tests.conformance import run_check

    subject, cells = _cells(executor, level, production)
    places = [f"{i + 1}/{len(cells)}" for i in range(len(cells))]
    if jobs == 1:
        yield from ((run_check(check, subject, case), at) for (check, case), at in zip(cells, places, strict=True))
        return
    run = functools.partial(_run_cell, executor, level, production)
    # Frameworks with threads of their own do not survive a fork.
    with ProcessPoolExecutor(min(jobs, len(cells)), multiprocessing.get_context("spawn")) as pool:
        yield from zip(pool.map(run, range(len(cells))), places, strict=True)


def _kind(result: CheckResult) -> tuple[str, str]:
    """(scheme, recipe) of a case, the first two parts of its id."""
    scheme, recipe, *_ = result.case.split("-")
    return scheme, recipe


def _with_stage(result: CheckResult, stages: dict[tuple[str, str], str]) -> CheckResult:
    from dataclasses import replace

    if result.verdict != "fail":
        return result
    # Checks of bits have no stage: both runs are the executor's own.
    return (
        replace(result, stage=stages[_kind(result)])
        if result.check in ("parity", "expert_parallel")
        else result
    )


def _tightest(result: CheckResult) -> str:
    """The figure that was out of bounds, or else the one nearest its bound."""
    bad = [f for f in result.figures if not f.ok]
    bounded = [f for f in result.figures if f.sense == "<=" and f.bound > 0]
    chosen = bad[0] if bad else max(bounded, key=lambda f: f.value / f.bound, default=None)
    if chosen is None:
        return "bitwise" if result.figures else ""
    return f"{chosen.name} {chosen.value:.2e} of {chosen.bound:g}"


def _summary(results: Sequence[CheckResult]) -> list[tuple[str, Counter[str], str, float]]:
    """Per check: verdict counts, its tightest figure, seconds."""
    out = []
    for check in dict.fromkeys(r.check for r in results):
        mine = [r for r in results if r.check == check]
        worst = next((r for r in mine if not r.ok), None) or max(
            mine,
            key=lambda r: max(
                (f.value / f.bound for f in r.figures if f.sense == "<=" and f.bound > 0), default=0
            ),
        )
        out.append((check, Counter(r.verdict for r in mine), _tightest(worst), sum(r.seconds for r in mine)))
    return out


def _show(subject: Subject, results: Sequence[CheckResult], pack: Sequence[dict[str, Any]]) -> None:
    from . import report as shared

    out = shared.console()
    numeric = ("pass", "fail", "error", "not served", "s")
    rows = [
        (check, *(str(counts[v] or "-") for v in numeric[:4]), figure, f"{seconds:.1f}")
        for check, counts, figure, seconds in _summary(results)
    ]
    title = f"Conformance of {subject.name} ({subject.info.state}: {subject.info.reason})"
    out.print(shared.table(title, ("check", *numeric[:4], "nearest its bound", "s"), rows, numeric=numeric))
    bad = [r for r in results if not r.ok]
    if bad:
        found = [
            (r.check, r.case, f"[{_STYLES[r.verdict]}]{r.verdict}[/]", r.stage or "-", r.reason) for r in bad
        ]
        out.print(shared.table("Findings", ("check", "case", "verdict", "parts at", "reason"), found))
    if pack:
        _show_pack(out, pack)


def _show_pack(out: Any, pack: Sequence[dict[str, Any]]) -> None:
    from . import report as shared

    rows = [
        (
            r["case"],
            f"[{_STYLES[r['verdict']]}]{r['verdict']}[/]",
            "-" if r["rel_l2"] is None else f"{r['rel_l2']:.2e}",
            r["stage"] or "-",
            r["reason"],
        )
        for r in pack
    ]
    columns = ("case", "verdict", "relative L2", "parts at", "reason")
    out.print(shared.table("Golden pack", columns, rows, numeric=("relative L2",)))


def report_data(
    subject: Subject, level: str, results: Sequence[CheckResult], pack: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The report as plain data."""
    from . import tolerances

    return {
        "schema_version": 1,
        "executor": {
            "name": subject.name,
            "state": subject.info.state,
            "reason": subject.info.reason,
            "recipes": list(subject.support.recipes),
            "schemes": list(subject.support.schemes),
        },
        "level": level,
        "tolerances": {
            name: {"bound": value.bound, "reason": value.reason}
            for name, value in vars(tolerances).items()
            if isinstance(value, tolerances.Tolerance)
        },
        "counts": dict(Counter(r.verdict for r in results)),
        "results": [r.as_dict() for r in results],
        "golden": list(pack),
    }


def write_report(
    folder: Path, subject: Subject, level: str, results: Sequence[CheckResult], pack: Sequence[dict[str, Any]]
) -> None:
    """conform.json, and conform.html with its pictures inside.

    Raises:
      ImportError: matplotlib is missing (the JSON is written first).
    """
    from .report import write_json

    data = report_data(subject, level, results, pack)
    write_json(folder / "conform.json", data)
    (folder / "conform.html").write_text(_html(data, results, pack, [_picture(results)]), encoding="utf-8")


def _picture(results: Sequence[CheckResult]) -> str:
    """Each check's figures as a share of their bounds, as an inline PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points: dict[str, list[float]] = {}
    for r in results:
        for f in r.figures:
            if f.sense == "<=" and f.bound > 0:
                points.setdefault(f.name, []).append(min(max(f.value / f.bound, 1e-3), 1e2))
    names = list(points)
    fig, axis = plt.subplots(figsize=(9, 1.2 + 0.34 * max(len(names), 1)), layout="constrained")
    for y, name in enumerate(names):
        colours = ["#d62728" if v > 1 else "#1f77b4" for v in points[name]]
        axis.scatter(points[name], [y] * len(points[name]), s=16, c=colours, alpha=0.6, zorder=3)
    axis.axvline(1, color="#d62728", linestyle="--", linewidth=1)
    axis.set_xscale("log")
    axis.set_xlim(1e-3, 1e2)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(
        "figure / bound (left of the dashed line passes; 0.001 or less at the left edge)", fontsize=9
    )
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    buffer = io.BytesIO()
    fig.savefig(buffer, dpi=110, format="png")
    plt.close(fig)
    return base64.b64encode(buffer.getvalue()).decode()


_CSS = """body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:76rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .6rem;border-bottom:1px solid #e4e4e4;text-align:left;
vertical-align:top}.pass{color:#1a7f37}.fail,.error{color:#c0272d;font-weight:600}.other{color:#777}img{max-width:100%}
summary{cursor:pointer;margin:.6rem 0}code{font-size:12px}"""


def _td(text: Any) -> str:
    return f"<td>{html.escape(str(text))}</td>"


def _verdict(verdict: str) -> str:
    style = verdict if verdict in ("pass", "fail", "error") else "other"
    return f'<td class="{style}">{html.escape(verdict)}</td>'


def _html(
    data: dict[str, Any],
    results: Sequence[CheckResult],
    pack: Sequence[dict[str, Any]],
    pictures: Sequence[str],
) -> str:
    who = data["executor"]
    counts = ", ".join(f"{n} {html.escape(v)}" for v, n in data["counts"].items())
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>isomoe conformance: {html.escape(who['name'])}</title><style>{_CSS}</style>",
        f"<h1>Conformance of {html.escape(who['name'])}</h1>",
        f"<p>{html.escape(who['state'])}: {html.escape(who['reason'])}. Level {data['level']}: {counts}.</p>",
        "<table><tr><th>check<th>pass<th>fail<th>error<th>not served<th>nearest its bound<th>s</tr>",
    ]
    for check, tally, figure, seconds in _summary(results):
        cells = "".join(_td(tally[v] or "") for v in ("pass", "fail", "error", "not served"))
        parts.append(f"<tr>{_td(check)}{cells}{_td(figure)}{_td(f'{seconds:.1f}')}</tr>")
    parts.append("</table>")
    bad = [r for r in results if not r.ok]
    if bad:
        parts.append("<h2>Findings</h2><table><tr><th>check<th>case<th>verdict<th>parts at<th>reason</tr>")
        for r in bad:
            row = f"{_td(r.check)}{_td(r.case)}{_verdict(r.verdict)}{_td(r.stage)}{_td(r.reason)}"
            parts.append(f"<tr>{row}</tr>")
        parts.append("</table>")
    parts += [f'<img alt="figures against bounds" src="data:image/png;base64,{p}">' for p in pictures]
    if pack:
        parts.append(
            "<h2>Golden pack</h2><table><tr><th>case<th>verdict<th>relative L2<th>parts at<th>reason</tr>"
        )
        for p in pack:
            error = "" if p["rel_l2"] is None else f"{p['rel_l2']:.2e}"
            row = f"{_td(p['case'])}{_verdict(p['verdict'])}{_td(error)}{_td(p['stage'])}{_td(p['reason'])}"
            parts.append(f"<tr>{row}</tr>")
        parts.append("</table>")
    parts.append(
        "<details><summary>Every check and case</summary><table><tr><th>check<th>case<th>verdict<th>figures</tr>"
    )
    for r in results:
        figures = "; ".join(map(str, r.figures)) or r.reason
        parts.append(f"<tr>{_td(r.check)}{_td(r.case)}{_verdict(r.verdict)}{_td(figures)}</tr>")
    parts.append("</table></details><details><summary>Bounds and their reasons</summary><table>")
    for name, bound in data["tolerances"].items():
        parts.append(f"<tr>{_td(name)}{_td(bound['bound'])}{_td(bound['reason'])}</tr>")
    parts.append("</table></details></html>")
    return "\n".join(parts) + "\n"


@golden_app.command("write")
def golden_write(
    file: Annotated[str, typer.Argument(help="Pack to write (.safetensors).")],
    cases: Annotated[
        str, typer.Option(help="probes, quick, standard, or parts of case ids, comma separated.")
    ] = "probes",
    executor: Annotated[str | None, typer.Option(help="Also store this executor's own results.")] = None,
) -> None:
    """Write inputs, expected results, recipes and stages to a pack."""
    from .cli import _one_line_errors

    with _one_line_errors():
        _prepare()
        from ..tests.conformance import inputs_of, subject_for
        from ..tests.matrix import ep_cases, parity_cases, quick_cases
        from .golden import default_calls, golden_case, with_result, write_pack

        calls = default_calls() if cases == "probes" else {}
        if cases != "probes":
            known = quick_cases() if cases == "quick" else list(dict.fromkeys([*parity_cases(), *ep_cases()]))
            wanted = [] if cases in ("quick", "standard") else cases.split(",")
            if not all(wanted):
                raise ValueError(f"--cases: got {cases!r}, want probes, quick, standard or parts of case ids")
            chosen = [c for c in known if not wanted or any(w in str(c) for w in wanted)]
            for case in chosen:
                calls[str(case)] = inputs_of(case).call()
        if not calls:
            raise ValueError(f"--cases: got {cases!r}, which no case's id contains")
        name = None if executor is None else subject_for(executor).name
        made = (golden_case(case_name, call) for case_name, call in calls.items())
        count = write_pack(file, made if name is None else (with_result(case, name) for case in made))
    typer.echo(f"{file}: {count} cases, {Path(file).stat().st_size / 1e6:.1f} MB")


@golden_app.command("check")
def golden_check(
    file: Annotated[str, typer.Argument(help="Pack to check against.")],
    executor: Annotated[str, typer.Argument(help="A registered name, or package.module:Class.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold an executor to a pack and name the stage at which it first parts. Exit code 1 where one does."""
    from .cli import _one_line_errors

    with _one_line_errors():
        pack_path = Path(file)
        from .golden import check_pack, read_pack

        cases = read_pack(pack_path)
        _prepare()
        from ..tests.conformance import subject_for

        subject = subject_for(executor)
        if subject.info.state == "unavailable":
            raise ValueError(f"EXECUTOR: {subject.name} is unavailable here: {subject.info.reason}")
        results = [r.as_dict() for r in check_pack(cases, subject.name)]
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        from .report import console

        _show_pack(console(), results)
    if all(r["verdict"] == "not served" for r in results):
        typer.echo("isomoe: error: the executor serves no case of this pack", err=True)
        raise typer.Exit(2)
    if any(r["verdict"] not in ("pass", "not served") for r in results):
        raise typer.Exit(FINDINGS)
