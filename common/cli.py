# SPDX-License-Identifier: Apache-2.0
"""The `isomoe` command: parity, explain, inspect, collect-env; bench and tune are in `bench_cli`.

Bad paths and arguments end with one line on stderr and exit code 2; a parity job that found something out of
tolerance ends with 1.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import bench_cli, conform_cli
from .checks import check_choice, check_int

if TYPE_CHECKING:
    from .config import FusedMoEConfig
    from .platforms import Platform
    from .quant_keys import QuantKey

app = typer.Typer(
    name="isomoe", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="FP8 mixture-of-experts layers with many LoRA adapters, on TPU and CUDA, with the same numbers.",
)

USAGE_ERROR = 2
OUT_OF_TOLERANCE = 1


def _show_version(wanted: bool) -> None:
    if wanted:
        from .environment import version_of

        typer.echo(f"isomoe {version_of('isomoe') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What every command takes."""


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn what bad input raises into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        else:
            text = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"isomoe: error: {text}", err=True)
        raise typer.Exit(USAGE_ERROR) from error


def _warn_unknown_variables() -> None:
    from .environment import unknown_variables

    for warning in unknown_variables():
        typer.echo(f"isomoe: warning: {warning}", err=True)


def parse_ints(label: str, text: str) -> list[int]:
    """ "1,2,4" to [1, 2, 4], distinct, in the given order.

    Raises:
      ValueError: naming the option.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{label}: got {text!r}, want whole numbers separated by commas, such as 1,2,4") from None
    return list(dict.fromkeys(values))


def parse_adapters(specs: list[str]) -> dict[str, Path]:
    """NAME=DIR entries (or DIR alone, named after its folder) to folders by name.

    Raises:
      ValueError: an empty or repeated name.
      FileNotFoundError: no such folder.
    """
    found: dict[str, Path] = {}
    for spec in specs:
        name, equals, folder = spec.partition("=")
        if not equals:
            name, folder = Path(spec).name, spec
        if not name or not folder:
            raise ValueError(f"--adapter: got {spec!r}, want NAME=DIR")
        if name in found:
            raise ValueError(f"--adapter: got the name {name!r} twice, want distinct names")
        found[name] = _folder("--adapter", folder)
    return found


def _folder(label: str, text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{label}: {text} {what}")
    return path


def parse_lora(text: str | None) -> tuple[int, int]:
    """RANKxN ("16x4": four adapters of rank 16) to (rank, count); None to (0, 0)."""
    if text is None:
        return 0, 0
    rank, times, count = text.lower().partition("x")
    if not times or not rank.isdigit() or not count.isdigit() or not int(rank) or not int(count):
        raise ValueError(f"--lora: got {text!r}, want RANKxN, for example 16x4 for four adapters of rank 16")
    return int(rank), int(count)


@app.command()
def parity(
    checkpoint: Annotated[str | None, typer.Option(help="Model folder; none: write and run two small samples.")] = None,
    adapter: Annotated[list[str] | None, typer.Option(help="NAME=DIR of a PEFT adapter; repeatable.")] = None,
    executor: Annotated[list[str] | None, typer.Option(help="Run only these, and fail if one cannot run.")] = None,
    ep: Annotated[str, typer.Option(help="Expert-parallel sizes.")] = "1,2,4,8",
    recipe: Annotated[list[str] | None, typer.Option(help="w8a8, w8a16, bf16; repeatable. Default: all.")] = None,
    tokens: Annotated[int, typer.Option(help="Rows in the batch.")] = 16,
    layers: Annotated[str | None, typer.Option(help="Such as 0,3. Default: the first MoE layer.")] = None,
    out: Annotated[str, typer.Option(help="Folder for parity.json and parity.png.")] = "parity-out",
    seed: Annotated[int, typer.Option(help="Seed of the batch.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes for interpreted runs. Default: 2, or the cores there are.")] = 0,
    timeout: Annotated[int, typer.Option(help="Seconds an interpreted run may take.")] = 300,
) -> None:
    """Run one batch of base and adapter rows through every executor, recipe and EP size, and compare."""
    with _one_line_errors():
        from .interpreters import VIRTUAL_DEVICES, prepare

        sizes = parse_ints("--ep", ep)
        for size in sizes:
            check_int("--ep", size, minimum=1)
        # Before anything can import a framework: both read their settings once.
        prepare(max(VIRTUAL_DEVICES, *sizes))
        _warn_unknown_variables()
        from . import parity_job

        failed = parity_job.run(
            parity_job.Settings(
                checkpoint=None if checkpoint is None else _folder("--checkpoint", checkpoint),
                adapters=parse_adapters(adapter or []), executors=tuple(executor or ()), ep_sizes=tuple(sizes),
                recipes=None if not recipe else tuple(recipe), tokens=tokens,
                layers=None if layers is None else tuple(parse_ints("--layers", layers)), out=Path(out), seed=seed,
                jobs=jobs, timeout=timeout,
            )
        )
    if failed:
        raise typer.Exit(OUT_OF_TOLERANCE)


@app.command()
def explain(
    model: Annotated[str | None, typer.Option(help="A known model, such as qwen3-coder-480b.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Model folder to read the layer from.")] = None,
    num_experts: Annotated[int | None, typer.Option(help="Routed experts. Default: as qwen3-coder-30b.")] = None,
    experts_per_token: Annotated[int | None, typer.Option(help="Experts a token visits.")] = None,
    hidden_dim: Annotated[int | None, typer.Option(help="Model width.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of one expert.")] = None,
    activation: Annotated[str | None, typer.Option(help="silu, gelu, gelu_tanh, swigluoai.")] = None,
    scheme: Annotated[str | None, typer.Option(help="block, channel, tensor, tensor_static, bf16.")] = None,
    platform: Annotated[str | None, typer.Option(help="Such as tpu-v7x, cuda-9.0. Default: this one.")] = None,
    ep: Annotated[int, typer.Option(help="Expert-parallel size.")] = 1,
    lora: Annotated[str | None, typer.Option(help="RANKxN: N adapters up to RANK.")] = None,
    moe_backend: Annotated[str, typer.Option(help="auto, or a backend's name.")] = "auto",
    tokens: Annotated[str, typer.Option(help="TPU: batch sizes, of all devices, to model.")] = "64,512,8192",
    bench: Annotated[str | None, typer.Option(help="TPU: a bench.json to take compiled times from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which backend a described deployment gets, and why every other candidate does not. Needs no device.

    For a TPU also the tile sizes, how rows move between devices, and the layer's modelled time. The exit code is 1
    where the selector would raise.
    """
    with _one_line_errors():
        from dataclasses import replace

        from .config import FusedMoEParallelConfig
        from .platforms import Platform
        from .presets import model as preset
        from .quant_keys import KEYS_OF_SCHEME
        from .selector import explain_selection

        if model is not None and checkpoint is not None:
            raise ValueError("--model: got it together with --checkpoint, want one of them")
        given = {
            "num_experts": num_experts, "experts_per_token": experts_per_token, "hidden_dim": hidden_dim,
            "intermediate_size": intermediate_size, "activation": activation,
        }
        given = {field: value for field, value in given.items() if value is not None}
        if given and (model is not None or checkpoint is not None):
            source = "--checkpoint" if model is None else "--model"
            raise ValueError(f"--{next(iter(given)).replace('_', '-')}: got it together with {source}, which says it")
        if checkpoint is not None:
            from .checkpoints import inspect_checkpoint

            described = inspect_checkpoint(_folder("--checkpoint", checkpoint))
            config, keys = described.config, (described.weight_key, described.activation_key)
        elif model is not None:
            config, keys = preset(model).config, KEYS_OF_SCHEME[preset(model).scheme]
        else:
            config = replace(preset("qwen3-coder-30b").config, **given)  # type: ignore[arg-type]
            keys = KEYS_OF_SCHEME["block"]
        rank, count = parse_lora(lora)
        if count:
            config = config.with_lora(count, rank)
        check_int("--ep", ep, minimum=1)
        config = replace(config, moe_parallel_config=FusedMoEParallelConfig(ep_size=ep, use_ep=ep > 1))
        if scheme is not None:
            check_choice("--scheme", scheme, KEYS_OF_SCHEME)
            keys = KEYS_OF_SCHEME[scheme]
        target = Platform.detect() if platform is None else Platform.parse(platform)
        report = explain_selection(config, *keys, platform=target, moe_backend=moe_backend)
        sizes = parse_ints("--tokens", tokens)
        for size in sizes:
            check_int("--tokens", size, minimum=1)
        modelled = _tpu_plans(config, target, keys[0], sizes, count, rank, bench, report.executor)
        kernels = _cuda_kernels(target, report.executor) if platform is None else None
    if as_json:
        data = report.as_dict() if modelled is None else report.as_dict() | {"tpu": modelled[0]}
        typer.echo(json.dumps(data if kernels is None else data | {"kernels": kernels}, indent=2))
    else:
        typer.echo(f"layer:       {_layer_text(config)}\n{report}")
        if kernels is not None:
            typer.echo(f"kernels:     {kernels}")
        if modelled is not None:
            typer.echo(f"\n{modelled[1]}")
    if not report.ok:
        raise typer.Exit(OUT_OF_TOLERANCE)


def _cuda_kernels(target: Platform, executor: str | None) -> str | None:
    """Which kernels an executor takes on this CUDA machine, or why it cannot run; None on other platforms."""
    from .executors import executor_class
    from .platforms import PlatformKind

    if target.kind is not PlatformKind.CUDA or executor is None:
        return None
    info = executor_class(executor).info()  # type: ignore[attr-defined]
    return info.detail or info.reason


def _tpu_plans(
    config: FusedMoEConfig, target: Platform, weight_key: QuantKey, tokens: list[int], loras: int, rank: int,
    bench: str | None, executor: str | None,
) -> tuple[list[dict[str, Any]], str] | None:
    """What the TPU implementation would build, as data and text; None where nothing executes the layer on a TPU."""
    from .platforms import PlatformKind
    from .quant_keys import scheme_of

    scheme = scheme_of(weight_key)
    if target.kind is not PlatformKind.TPU or scheme is None:
        if bench is not None:
            raise ValueError(f"--bench: got it on {target}, want it with --platform tpu-...")
        return None
    if executor is None:
        return None
    # Named, not imported: common knows no implementation.
    explained = importlib.import_module("..tpu_impl.explain", __package__)
    ledger = None if bench is None else Path(bench)
    found = explained.plans(
        config, target.arch, scheme=scheme, tokens=tokens, max_loras=loras, max_lora_rank=rank, ledger=ledger
    )
    return found, explained.text(found, target.arch)


def _layer_text(config: object) -> str:
    """The fields of a config that differ from their defaults, without the class's name."""
    from dataclasses import MISSING, fields

    parts = []
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if value != default:
            parts.append(f"{f.name}={value!r}" if f.name != "moe_parallel_config" else f"ep_size={value.ep_size}")
    return ", ".join(parts)


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Model folder.")],
    adapters: Annotated[list[str] | None, typer.Argument(help="PEFT adapter folders.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a checkpoint and its adapters: scheme, sizes, bytes by EP size, adapter slots by device, backends."""
    with _one_line_errors():
        from . import inspection

        found = inspection.inspect_model(
            _folder("CHECKPOINT", checkpoint), [_folder("ADAPTER", text) for text in adapters or []]
        )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        inspection.show(found)


@app.command("collect-env")
def collect_env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print versions, devices, executors and known mismatches, for bug reports. Holds no secrets or host names."""
    from .environment import collect, format_report

    report = collect()
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else format_report(report))


conform_cli.mount(app)
bench_cli.mount(app)


def main() -> None:
    """Entry point of the `isomoe` script and of ``python -m isomoe``."""
    app(prog_name="isomoe")


