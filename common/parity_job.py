# SPDX-License-Identifier: Apache-2.0
"""`isomoe parity`: checkpoints and adapters from disk, selection, every run, one table, JSON and a picture."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import parity, report
from .checks import check_choice, check_int
from .config import FusedMoEConfig
from .executors import ExecutorInfo, executors
from .presets import REPORT_PLATFORMS
from .quant_keys import KEYS_OF_SCHEME
from .recipes import RECIPES
from .selector import explain_selection

if TYPE_CHECKING:
    from .checkpoints import RouterWeights

logger = logging.getLogger(__name__)

# The sample model's folders below --out; the job reads them back with the loaders any checkpoint goes through.
_SAMPLES = "samples"
# Each worker process holds the cases and both frameworks.
_DEFAULT_JOBS = 2
_MAX_SHARED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Settings:
    """The command's options, checked by `run`."""

    checkpoint: Path | None
    adapters: dict[str, Path]
    executors: tuple[str, ...]
    ep_sizes: tuple[int, ...]
    recipes: tuple[str, ...] | None
    tokens: int
    layers: tuple[int, ...] | None
    out: Path
    seed: int
    jobs: int = 0
    timeout: int = 300

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        values["adapters"] = {name: str(path) for name, path in self.adapters.items()}
        values["out"] = str(self.out)
        return values


def run(settings: Settings) -> bool:
    """Run the job; True where something failed.

    Raises:
      ValueError, TypeError, OSError, ImportError: a bad option, checkpoint or adapter.
    """
    out, log = report.console(), report.console(stderr=True)
    check_int("--tokens", settings.tokens, minimum=1)
    check_int("--jobs", settings.jobs, minimum=0)
    check_int("--seed", settings.seed, minimum=0)
    check_int("--timeout", settings.timeout, minimum=1)
    for name in settings.recipes or ():
        check_choice("--recipe", name, [r for r in RECIPES if r != "float64"])
    infos = _chosen_executors(settings.executors)
    settings.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    sources, adapter_folders = _sources(settings, log)
    cases = [case for name, folder in sources.items() for case in _load_cases(name, folder, adapter_folders, settings)]
    for case in {case.name: case for case in cases}.values():
        out.print(_selection_table(case))
    cells = [
        (index, run)
        for index, case in enumerate(cases)
        for run in parity.plan_runs(case, infos, recipes=settings.recipes, ep_sizes=settings.ep_sizes)
    ]
    if not cells:
        raise ValueError(f"--recipe: got {', '.join(settings.recipes or ())}, which no layer here has")
    result = _run_cells(cases, cells, settings, log)
    _demand(settings.executors, result)
    out.print(report.parity_table(result.rows))
    _print_summary(out, cases, result)
    found = {"gains": {c.name: c.gains for c in cases}, "kernels": {i.name: i.detail for i in infos if i.detail}}
    data = report.parity_json(result, settings.as_dict() | found)
    report.write_json(settings.out / "parity.json", data)
    title = "isomoe parity: errors of each run, and the bounds they are held to"
    report.write_picture(settings.out / "parity.png", result.rows, title)
    failed = result.failed
    seconds = time.perf_counter() - start
    out.print(f"\nwrote {settings.out / 'parity.json'} and {settings.out / 'parity.png'}", soft_wrap=True)
    passed = sum(row.verdict == "pass" for row in result.rows)
    style = "bold red" if failed else "bold green"
    out.print(f"{passed} runs passed, {len(failed)} failed, in {seconds:.0f} s", style=style)
    return bool(failed)


def _chosen_executors(names: tuple[str, ...]) -> list[ExecutorInfo]:
    known = executors()
    for name in names:
        check_choice("--executor", name, known)
    return [info for name, info in known.items() if not names or name in names or name == "reference"]


def _sources(settings: Settings, log: Any) -> tuple[dict[str, Path], dict[str, Path]]:
    """Checkpoint folders by the name the report uses, and adapter folders."""
    if settings.checkpoint is not None:
        return {settings.checkpoint.name: settings.checkpoint}, settings.adapters
    if settings.adapters:
        raise ValueError("--adapter: got adapters without --checkpoint, want both or neither")
    log.print("writing the sample checkpoints and adapters ...")
    # By name: common/ must not depend on the tests, and the job needs them only here.
    samples = importlib.import_module(f"{__package__.rsplit('.', 1)[0]}.tests.samples")
    made = samples.write_samples(settings.out / _SAMPLES)
    return (
        {"sample FP8_DYNAMIC": made.channel, "sample FP8 block": made.block},
        {"per-expert": made.lora_per_expert, "fused": made.lora_fused},
    )


def _load_cases(
    name: str, folder: Path, adapter_folders: dict[str, Path], settings: Settings
) -> Iterator[parity.ParityCase]:
    from .adapter_files import load_lora_adapter
    from .checkpoints import inspect_checkpoint, load_moe_layer

    available = inspect_checkpoint(folder).moe_layers
    chosen = settings.layers if settings.layers is not None else available[:1]
    for layer in chosen:
        if layer not in available:
            raise ValueError(f"--layers: got {layer}, want MoE layers of {name}: {report.ranges(available)}")
    for layer in chosen:
        config, weights = load_moe_layer(folder, layer)
        adapters = {
            adapter_name: load_lora_adapter(path, config, adapter_id=i, layers=[layer])[layer]
            for i, (adapter_name, path) in enumerate(adapter_folders.items())
        }
        router = _router(folder, layer, config)
        label = name if len(chosen) == 1 else f"{name}, layer {layer}"
        yield parity.build_case(
            label, layer, config, weights, adapters, num_tokens=settings.tokens, seed=settings.seed, router=router
        )


def _router(folder: Path, layer: int, config: FusedMoEConfig) -> RouterWeights | None:
    """The layer's own router, or None (random logits) where it is not readable or reads another width."""
    from .checkpoints import load_router
    from .safe_files import TensorFileError

    try:
        router = load_router(folder, layer)
    except TensorFileError as error:
        logger.warning("isomoe: layer %d: routing by random logits: %s", layer, error)
        return None
    return router if router.weight.shape[1] == config.hidden_dim else None


def _selection_table(case: parity.ParityCase) -> Any:
    """What each platform's selector answers for a case."""
    config, scheme = case.config, case.weights.scheme
    key = "tensor_static" if scheme == "tensor" and case.weights.has_static_input else scheme
    rows = []
    for platform in REPORT_PLATFORMS:
        found = explain_selection(config, *KEYS_OF_SCHEME[key], platform=platform)
        answer = found.backend.name if found.backend is not None else (found.error or "").split(":", 1)[0]
        if found.executor is not None:
            why = ""
        else:
            why = "; ".join(dict.fromkeys(f"{r.candidate} {r.reason}" for r in found.rows if not r.serves))
        rows.append((str(platform), answer, found.executor or "-", why))
    title = (
        f"Selection for {case.name}: E={config.num_experts} K={config.experts_per_token} H={config.hidden_dim} "
        f"I={config.intermediate_size}, {scheme}, {len(case.adapters)} adapter slots"
    )
    return report.table(title, ("platform", "selector answers", "executed by", "why nobody"), rows)


def _jobs(cases: list[parity.ParityCase], cells: list[tuple[int, parity.Run]], asked: int) -> int:
    """Worker processes; 0 runs in this one, as a real device or large weights must not be held twice."""
    if any(run.info.state == "native" and run.info.name != "reference" for _, run in cells):
        return 0
    if sum(case.weights.nbytes for case in cases) > _MAX_SHARED_BYTES:
        return 0
    return asked or min(_DEFAULT_JOBS, os.cpu_count() or 1, len(cells))


def _run_cells(
    cases: list[parity.ParityCase], cells: list[tuple[int, parity.Run]], settings: Settings, log: Any
) -> parity.ParityResult:
    """Run all cells with a live line on a terminal, or one line a run elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    jobs = _jobs(cases, cells, settings.jobs)
    stream = (
        parity.run_cells_apart(cases, cells, jobs=jobs, timeout=settings.timeout)
        if jobs
        else parity.run_cells(cases, cells)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: dict[int, parity.Outcome] = {}
    with Progress(*columns, console=log, disable=not log.is_terminal, transient=True) as bar:
        task = bar.add_task("parity", total=len(cells))
        for i, outcome in stream:
            outcomes[i] = outcome
            row = outcome[0]
            label = f"{row.case}: {row.executor} {row.recipe} EP {row.ep}"
            bar.update(task, advance=1, description=label)
            if not log.is_terminal:
                took = "" if row.seconds is None else f"{row.seconds:.1f} s, "
                log.print(f"[{len(outcomes)}/{len(cells)}] {label}: {took}{row.verdict}", markup=False)
    return parity.gather(cases, cells, outcomes)


def _demand(names: tuple[str, ...], result: parity.ParityResult) -> None:
    """An executor asked for by name must run: its refusals become errors."""
    from dataclasses import replace

    for i, row in enumerate(result.rows):
        if row.executor in names and row.verdict in ("unavailable", "not served"):
            result.rows[i] = replace(row, verdict="error", reason=f"{row.verdict}: {row.reason}")


def _print_summary(out: Any, cases: list[parity.ParityCase], result: parity.ParityResult) -> None:
    for found in result.agreements:
        out.print(
            f"{found.case}, {found.recipe}: {found.first} and {found.second} differ by {found.rel_l2:.2e} "
            f"(worst row {found.worst_row:.2e})", soft_wrap=True,
        )
    for case in cases:
        lifted = {name: gain for name, gain in case.gains.items() if gain != 1}
        if lifted:
            text = ", ".join(f"{name} x{gain}" for name, gain in lifted.items())
            out.print(
                f"{case.name}: adapters amplified so that their delta stands clear of the output's rounding: {text}",
                soft_wrap=True,
            )
