# SPDX-License-Identifier: Apache-2.0
"""`isomoe bench`: what a layer costs on a device, without one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

# Named, not imported: common knows no implementation.
_TPU = "isomoe.tpu_impl"


def mount(app: typer.Typer) -> None:
    """Add the command to the package's command line."""
    app.command("bench")(bench)


def _tpu(module: str) -> Any:
    return importlib.import_module(f"{_TPU}.{module}")


def bench(
    tpu: Annotated[bool, typer.Option("--tpu", help="The TPU ledger; needs jax and libtpu, no TPU.")] = False,
    model: Annotated[list[str] | None, typer.Option(help="Preset name; repeatable. Default: the two Qwen3.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of all devices.")] = "64,512,8192",
    generation: Annotated[list[str] | None, typer.Option(help="v7x, v6e, v5e, v5p. Default: v7x, v6e.")] = None,
    ep: Annotated[str, typer.Option(help="Expert-parallel sizes.")] = "8",
    scheme: Annotated[str, typer.Option(help="channel; block adds rows with [128, 128] scales.")] = "channel",
    loras: Annotated[int, typer.Option(help="Adapter slots; adds rows with adapters.")] = 0,
    rank: Annotated[int, typer.Option(help="Their rank.")] = 0,
    wire: Annotated[str, typer.Option(help="bf16, or fp8 to let result rows travel in FP8.")] = "fp8",
    peer: Annotated[
        str | None, typer.Option(help="Interpreter with tpu-inference. Default: this one, if it has it. 'none': no.")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder for bench.json, .md, .png and compiled cells.")] = "bench-out",
) -> None:
    """Compile layers for TPUs that are not there and model their time from the compiled schedules.

    Goes on where an earlier run into the same folder stopped. The exit code is 1 where a cell was refused.
    """
    from .cli import OUT_OF_TOLERANCE, _one_line_errors, parse_ints
    from .report import write_json

    with _one_line_errors():
        if not tpu:
            raise ValueError("--tpu: got no device family, want --tpu")
        for package in ("jax", "libtpu"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"{package} is not installed: pip install 'isomoe[tpu]' libtpu")
        driver, shown = _tpu("bench"), _tpu("bench_report")
        settings = driver.Settings(
            models=tuple(model or ("qwen3-coder-30b", "qwen3-coder-480b")),
            tokens=tuple(parse_ints("--tokens", tokens)),
            generations=tuple(generation or ("v7x", "v6e")), eps=tuple(parse_ints("--ep", ep)), scheme=scheme,
            loras=loras, rank=rank, wire=wire, out=Path(out), peer=_peer(peer),
        )
        rows = driver.run(settings, lambda text: typer.echo(text, err=True))
        shown.show(rows)
        write_json(settings.out / "bench.json", driver.document(settings, rows))
        (settings.out / "bench.md").write_text(shown.markdown(rows))
        if importlib.util.find_spec("matplotlib") is not None:
            shown.write_picture(settings.out / "bench.png", rows)
        else:
            typer.echo("isomoe: warning: matplotlib is not installed, no picture", err=True)
    if any("error" in row for row in rows):
        raise typer.Exit(OUT_OF_TOLERANCE)


def _peer(asked: str | None) -> str | None:
    if asked == "none":
        return None
    if asked is None:
        return sys.executable
    if not Path(asked).is_file():
        raise ValueError(f"--peer: got {asked}, want the path of a Python interpreter, or none")
    return asked
