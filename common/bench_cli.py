# SPDX-License-Identifier: Apache-2.0
"""`isomoe bench` and `isomoe tune`: what a layer costs, modelled for a TPU without one, measured on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

# Named, not imported: common knows no implementation.
_TPU, _CUDA = "isomoe.tpu_impl", "isomoe.cuda_impl.bench.main"

Many = list[str] | None
MODEL = Annotated[Many, typer.Option(help="Preset names; --cuda also 30B, 35B, 480B, and -EPn for one of n ranks.")]
TOKENS = Annotated[Many, typer.Option(help="Batch sizes, such as 64,512,8192 (--tpu: of all devices).")]
SCHEME = Annotated[Many, typer.Option(help="block, channel, tensor (--tpu: channel; block adds rows).")]
LORAS = Annotated[Many, typer.Option(help="Adapters; --cuda takes several numbers, such as 0,1,8. Default: 0.")]
RANK = Annotated[Many, typer.Option(help="Their ranks (--tpu: rank). Default: 16.")]
LIMIT = Annotated[float | None, typer.Option(help="Seconds after which nothing new starts.")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the package's command line."""
    app.command("bench")(bench)
    app.command("tune")(tune)


def words(values: Many) -> list[str]:
    """["30B,35B", "480B"] to ["30B", "35B", "480B"], distinct, in the given order."""
    parts = [part for value in values or () for part in value.replace(",", " ").split()]
    return list(dict.fromkeys(parts))


def numbers(label: str, values: Many) -> list[int]:
    """The same as whole numbers.

    Raises:
      ValueError: naming the option.
    """
    from .cli import parse_ints

    return [n for word in words(values) for n in parse_ints(label, word)]


def _one(label: str, values: list[Any], default: Any) -> Any:
    if len(values) > 1:
        raise ValueError(f"{label}: got {len(values)} values with --tpu, want one")
    return values[0] if values else default


def _only(platform: str, given: Mapping[str, object]) -> None:
    """Refuse options of one platform on the other."""
    for label, value in given.items():
        if value not in (None, False, []):
            raise ValueError(f"{label}: got it without {platform}, want it only there")


def bench(
    tpu: Annotated[bool, typer.Option("--tpu", help="The TPU ledger; needs jax and libtpu, no TPU.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="Times beside vLLM's and torch's kernels; needs a GPU.")] = False,
    model: MODEL = None,
    tokens: TOKENS = None,
    scheme: SCHEME = None,
    loras: LORAS = None,
    rank: RANK = None,
    generation: Annotated[Many, typer.Option(help="--tpu: v7x, v6e, v5e, v5p. Default: v7x, v6e.")] = None,
    ep: Annotated[str | None, typer.Option(help="--tpu: expert-parallel sizes. Default: 8.")] = None,
    wire: Annotated[
        str | None, typer.Option(help="--tpu: bf16, or fp8 (default) to let result rows travel in FP8.")
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(help="--tpu: interpreter with tpu-inference. Default: this one, if it has it. 'none': no."),
    ] = None,
    routing: Annotated[Many, typer.Option(help="--cuda: uniform, zipf, hot8. Default: uniform.")] = None,
    shared_outer: Annotated[
        bool, typer.Option("--shared-outer", help="--cuda: adapters share their outer matrices over experts.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="--cuda: ours alone, 1 to 8192 tokens in steps of 1.5x.")
    ] = False,
    backend: Annotated[
        Many, typer.Option(help="--cuda: only this one, such as 'vllm triton'; repeatable. Default: all.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="--cuda: turns that every backend gets. Default: 5.")] = None,
    limit: LIMIT = None,
    out: Annotated[str, typer.Option(help="Folder for bench.json, bench.png and what goes with them.")] = "bench-out",
) -> None:
    """Say what layers cost. --tpu compiles them for TPUs that are not there and models their time from the schedules;
    --cuda times them on the GPU here beside other libraries' kernels and the roofline, right first.

    The exit code is 1 where a cell was refused (--tpu), or a goal is missed or a result wrong (--cuda).
    """
    from .cli import OUT_OF_TOLERANCE, _one_line_errors

    with _one_line_errors():
        if tpu == cuda:
            raise ValueError("--tpu, --cuda: got " + ("both" if tpu else "no device family") + ", want one of them")
        own = {"--generation": generation, "--ep": ep, "--wire": wire, "--peer": peer}
        measured = {
            "--routing": routing, "--shared-outer": shared_outer, "--sweep": sweep, "--backend": backend,
            "--rounds": rounds, "--limit": limit,
        }  # fmt: skip
        if tpu:
            _only("--cuda", measured)
            fine = _bench_tpu(model, tokens, scheme, loras, rank, generation, ep or "8", wire or "fp8", peer, out)
        else:
            _only("--tpu", own)
            main = importlib.import_module(_CUDA)
            fine = main.bench(
                main.Options(
                    models=words(model), tokens=numbers("--tokens", tokens), schemes=words(scheme),
                    loras=numbers("--loras", loras), ranks=numbers("--rank", rank), routings=words(routing),
                    shared_outer=shared_outer, sweep=sweep, backends=backend or (), out=Path(out),
                    rounds=5 if rounds is None else rounds, limit_s=float("inf") if limit is None else limit,
                )
            )  # fmt: skip
    if not fine:
        raise typer.Exit(OUT_OF_TOLERANCE)


def _bench_tpu(
    model: Many, tokens: Many, scheme: Many, loras: Many, rank: Many, generation: Many, ep: str, wire: str,
    peer: str | None, out: str,
) -> bool:  # fmt: skip
    """Goes on where an earlier run into the same folder stopped; whether no cell was refused."""
    from .cli import parse_ints
    from .report import write_json

    for package in ("jax", "libtpu"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed: pip install 'isomoe[tpu]' libtpu")
    driver, shown = (importlib.import_module(f"{_TPU}.{module}") for module in ("bench", "bench_report"))
    settings = driver.Settings(
        models=tuple(words(model) or ("qwen3-coder-30b", "qwen3-coder-480b")),
        tokens=tuple(numbers("--tokens", tokens) or (64, 512, 8192)),
        generations=tuple(generation or ("v7x", "v6e")), eps=tuple(parse_ints("--ep", ep)),
        scheme=_one("--scheme", words(scheme), "channel"), loras=_one("--loras", numbers("--loras", loras), 0),
        rank=_one("--rank", numbers("--rank", rank), 0), wire=wire, out=Path(out), peer=_peer(peer),
    )  # fmt: skip
    rows = driver.run(settings, lambda text: typer.echo(text, err=True))
    shown.show(rows)
    write_json(settings.out / "bench.json", driver.document(settings, rows))
    (settings.out / "bench.md").write_text(shown.markdown(rows))
    if importlib.util.find_spec("matplotlib") is not None:
        shown.write_picture(settings.out / "bench.png", rows)
    else:
        typer.echo("isomoe: warning: matplotlib is not installed, no picture", err=True)
    return not any("error" in row for row in rows)


def _peer(asked: str | None) -> str | None:
    if asked == "none":
        return None
    if asked is None:
        return sys.executable
    if not Path(asked).is_file():
        raise ValueError(f"--peer: got {asked}, want the path of a Python interpreter, or none")
    return asked


def tune(
    model: MODEL = None,
    tokens: TOKENS = None,
    scheme: SCHEME = None,
    loras: LORAS = None,
    rank: RANK = None,
    kernels: Annotated[str | None, typer.Option(help="hopper or portable. Default: what the device runs.")] = None,
    out: Annotated[str | None, typer.Option(help="The table's file. Default: named after the device, here.")] = None,
    rounds: Annotated[int, typer.Option(help="Turns that every candidate gets.")] = 3,
    limit: LIMIT = None,
) -> None:
    """Measure on the GPU here which CUDA kernels are fastest for each layer and batch size, and write its table.

    A folder with the table, named in ISOMOE_TUNED_DIR, makes it count; without one the built-in rules decide.
    """
    from .cli import _one_line_errors

    with _one_line_errors():
        main = importlib.import_module(_CUDA)
        options = main.Options(
            models=words(model), tokens=numbers("--tokens", tokens), schemes=words(scheme),
            loras=numbers("--loras", loras), ranks=numbers("--rank", rank), rounds=rounds,
            limit_s=float("inf") if limit is None else limit,
        )  # fmt: skip
        path = main.tune_table(options, None if out is None else Path(out), kernels=kernels)
    typer.echo(f"written: {path}")
