# SPDX-License-Identifier: Apache-2.0
"""Entry points of `isomoe bench --cuda` and `isomoe tune`: options in, tables and files out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...common import report as common_report
from ...common.checks import check_choice, check_int
from ...common.environment import DISTRIBUTIONS, version_of
from . import report, tune
from .clock import Clock, GraphClock
from .data import ROUTINGS, SCHEMES, Layer, LoraSetting, find_layer
from .figures import figures, sweep_sizes
from .peers import OWN, all_peers
from .roofline import Rates, measure_rates
from .run import TOKENS, Plan, Runner

DEFAULT_MODELS = ("30B", "35B", "480B-EP8")
TIMED_ROUTINGS = tuple(r for r in ROUTINGS if r != "skipped")  # "skipped" has ids that other libraries reject


@dataclass(frozen=True)
class Options:
    """What the command line asks for; empty sequences take the defaults.

    Attributes:
      models, tokens, schemes, loras, ranks, routings: what to cross; `loras` counts adapters (0: none), `ranks` goes
        with every count above 0.
      shared_outer: adapters that share A of w13 and B of w2 over experts.
      sweep: this package's backends alone, at 1 to 8192 tokens in steps of 1.5x.
      backends: names to run instead of all.
      out: folder for bench.json and bench.png.
      rounds, limit_s: turns of every backend; seconds after which no new cell starts.
    """

    models: Sequence[str] = ()
    tokens: Sequence[int] = ()
    schemes: Sequence[str] = ()
    loras: Sequence[int] = ()
    ranks: Sequence[int] = ()
    routings: Sequence[str] = ()
    shared_outer: bool = False
    sweep: bool = False
    backends: Sequence[str] = ()
    out: Path = Path("bench-out")
    rounds: int = 5
    limit_s: float = float("inf")


def need_device() -> None:
    """Raise unless kernels run natively here.

    Raises:
      ValueError: no CUDA device.
    """
    from .. import _runtime

    if _runtime.INTERPRETED or not torch.cuda.is_available():
        raise ValueError("device: got none of CUDA, want one: interpreted kernels have no times")


def plan_of(options: Options, device: str = "cuda", layers: Sequence[Layer] | None = None) -> Plan:
    """The plan that options describe.

    Args:
      layers: instead of `options.models`.

    Raises:
      ValueError: an unknown model, scheme or routing, or a size that is not positive.
    """
    for label, values, names in (
        ("--scheme", options.schemes, SCHEMES), ("--routing", options.routings, TIMED_ROUTINGS),
    ):  # fmt: skip
        for value in values:
            check_choice(label, value, names)
    for label, numbers, least in (
        ("--tokens", options.tokens, 1), ("--loras", options.loras, 0), ("--rank", options.ranks, 1),
        ("--rounds", (options.rounds,), 1),
    ):  # fmt: skip
        for number in numbers:
            check_int(label, number, minimum=least)
    ranks = options.ranks or (16,)
    settings = [
        setting for count in options.loras or (0,)
        for setting in ([LoraSetting(count, r, options.shared_outer) for r in ranks] if count else [LoraSetting()])
    ]  # fmt: skip
    tokens = options.tokens or (sweep_sizes() if options.sweep else TOKENS)
    return Plan(
        layers or [find_layer(name) for name in options.models or DEFAULT_MODELS],
        options.schemes or ("block", "channel"), settings, options.routings or ("uniform",), sorted(set(tokens)),
        options.rounds, options.limit_s, device,
    )  # fmt: skip


def header(device: str, rates: Rates) -> dict[str, Any]:
    """What every result file says about where it comes from."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {
        "device": name, "versions": {d: v for d in DISTRIBUTIONS if (v := version_of(d)) is not None},
        "rates": asdict(rates),
    }  # fmt: skip


def bench(
    options: Options, *, clock: Clock | None = None, rates: Rates | None = None, plan: Plan | None = None
) -> bool:
    """Run, show and write a benchmark; whether every goal that has a figure is met.

    Args:
      clock, rates, plan: instead of this device's and the options' (dry runs).

    Raises:
      ValueError: bad options, or no CUDA device.
    """
    if plan is None:
        plan = plan_of(options)
    known = {p.name: p for p in (OWN if options.sweep else all_peers())}
    for name in options.backends:
        check_choice("--backend", name, known)
    if clock is None or rates is None:
        need_device()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        rates = rates or measure_rates()
        clock = clock or GraphClock()
    options.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(
        plan, [known[n] for n in options.backends or known], clock, rates, functools.partial(print, file=sys.stderr)
    )
    written, head = options.out / "bench.json", header(plan.device, rates)
    try:
        runner.run()
    finally:  # what was measured before an interruption is not lost
        found = figures(runner.rows)
        report.write_json(written, {**head, "skipped_cells": runner.skipped}, runner.rows, found)
    console = common_report.console()
    console.print(report.rows_table(runner.rows))
    console.print(report.figures_table(found))
    if runner.skipped:
        console.print(f"{runner.skipped} cells did not start within {options.limit_s:g} s")
    try:
        report.plot(options.out / "bench.png", runner.rows)
    except ImportError as error:
        console.print(f"no picture: {error}")
    console.print(f"written: {written}")
    return all(f.ok is not False for f in found)


def tune_table(
    options: Options, out: Path | None, *, kernels: str | None = None, clock: Clock | None = None,
    plan: Plan | None = None,
) -> Path:  # fmt: skip
    """Measure every candidate and write this device's table; returns the file.

    Raises:
      ValueError: bad options, or no CUDA device.
    """
    from ..tuned import KERNELS, device_name, file_name

    if kernels is not None:
        check_choice("--kernels", kernels, KERNELS)
    if plan is None:
        plan = plan_of(replace(options, tokens=options.tokens or tune.TOKENS))
    if clock is None:
        need_device()
        torch.backends.cuda.matmul.allow_tf32 = False
        clock = GraphClock()
    device = device_name(torch.device(plan.device, 0) if plan.device == "cuda" else torch.device(plan.device))
    table = tune.measure(plan, clock, device, functools.partial(print, file=sys.stderr), kernels)
    path = out or Path(file_name(device))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.as_json() + "\n")
    common_report.console().print(tune.shown(table))
    return path
