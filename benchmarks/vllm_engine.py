# SPDX-License-Identifier: Apache-2.0
"""The real vLLM engine on an NVIDIA GPU, with and without this package's plugin: right, and how fast.

    python benchmarks/vllm_engine.py reference FOLDER REF.npz   on any machine: what transformers and PEFT compute
    python benchmarks/vllm_engine.py checks FOLDER REF.npz OUT  on the GPU: logits, bits, refusals; a verdict
    python benchmarks/vllm_engine.py speed FOLDER OUT           on the GPU: 30B dimensions against stock vLLM; a verdict
    python benchmarks/vllm_engine.py verdict checks|speed OUT   the verdict over the results that are there

`reference` needs transformers, peft and this package installed; the GPU side needs vLLM and no network. FOLDER takes
weights and adapters, OUT a JSON file and a log an engine, written as results come. `--limit` seconds after the start,
engines still running are stopped and the verdict is given over what there is.

Checks run on a small Qwen3-MoE (`vllm_engine_model`), every engine in its own process, all side by side. In all but
one the engine core is in that process too, so batches are composed alike and greedy results may be compared bit for
bit. Adapters target the experts alone: that leaves vLLM's other layers, and their fusions, as they are without LoRA.

Speed: four engines of Qwen3-Coder-30B-A3B's dimensions (`vllm_engine_random`), stock and this package's, without and
with 8 adapters. They start side by side as far as memory goes; they measure one at a time and in turn, while no other
starts up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import vllm_engine_model as small
import vllm_engine_run as engine
from vllm_engine_verdict import judge_checks, judge_speed

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Check:
    """One engine on the small model.

    Attributes:
      experts: whose experts must serve, ``"isomoe"`` or ``"vllm"``.
      lora: with adapters.
      recipe: ``"w8a8"`` or ``"w8a16"``.
      probes: the bit-equality probes and a profile as well.
      mode: vLLM's compilation mode; None is its default.
      refused: the plugin is on and must leave the layers to vLLM, saying why once.
      environment: variables besides the plugin's switch.
    """

    name: str
    scheme: str
    experts: str
    lora: bool = True
    recipe: str = "w8a8"
    probes: bool = False
    mode: int | None = None
    refused: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def variables(self) -> dict[str, str]:
        taken = self.experts == "isomoe" or self.refused
        return {**({"ISOMOE_VLLM": "1"} if taken else {"ISOMOE_DISABLE": "1"}), **dict(self.environment)}


W8A16 = (("ISOMOE_MOE_BACKEND", "marlin"),)
CHECKS = (
    Check("block_isomoe_on", "block", "isomoe", probes=True),
    Check("block_isomoe_off", "block", "isomoe", lora=False, probes=True),
    Check("block_vllm_on", "block", "vllm", probes=True),
    Check("channel_isomoe_on", "channel", "isomoe", probes=True),
    Check("channel_vllm_on", "channel", "vllm", probes=True),
    Check("block_w8a16", "block", "isomoe", recipe="w8a16", environment=W8A16),
    Check("channel_w8a16", "channel", "isomoe", recipe="w8a16", environment=W8A16),
    Check("block_uncompiled", "block", "isomoe", mode=0),
    Check("block_own_process", "block", "isomoe", environment=(("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),)),
    Check("block_refused", "block", "vllm", refused=True, environment=(("ISOMOE_MOE_BACKEND", "no_such_backend"),)),
)

# Timed engines, as experts and LoRA. All of a group are up at once and take turns; one of the first group that is in
# the second too stays up. A 48-layer engine takes about 38 GiB with its cache, one with 8 adapters about 50.
SPEED_GROUPS = (("vllm_off", "isomoe_off", "isomoe_on"), ("vllm_on", "isomoe_on"))
SPEED = ("vllm_off", "isomoe_off", "vllm_on", "isomoe_on")


def expose_package() -> str:
    """A folder that, on the path, makes the checkout an installed package with its vLLM entry point."""
    folder = Path(tempfile.mkdtemp(prefix="isomoe-path-"))
    (folder / "isomoe").symlink_to(ROOT, target_is_directory=True)
    info = folder / "isomoe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isomoe\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nisomoe_cuda = isomoe.cuda_impl.vllm_plugin:register\n"
    )
    return str(folder)


class Children:
    """Processes of this script, each with a log in `out`; none outlives `limit` seconds from now."""

    def __init__(self, out: Path, limit: float) -> None:
        self.out, self.began, self.limit = out, time.time(), limit
        self.processes: dict[str, subprocess.Popen[str]] = {}
        plain = {k: v for k, v in os.environ.items() if not k.startswith("ISOMOE_")}
        self.environment = {
            **plain, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
            # vLLM would compile kernels for every batch size, one by one; those that are used compile when they are.
            "VLLM_DEEP_GEMM_WARMUP": "skip",
            "OMP_NUM_THREADS": str(max(1, min(4, (os.cpu_count() or 1) // 4))),
            "PYTHONPATH": os.pathsep.join([expose_package(), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.limit - (time.time() - self.began)

    def say(self, text: str) -> None:
        print(f"{time.time() - self.began:6.1f} s  {text}", flush=True)

    def start(self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        for stale in self.out.glob(f"{name}.*"):
            stale.unlink()
        with open(self.out / f"{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, __file__, *arguments], env=self.environment | dict(variables or {}), stdout=log,
                stdin=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def order(self, name: str, line: str) -> None:
        pipe = self.processes[name].stdin
        assert pipe is not None
        try:
            pipe.write(line + "\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # its end shows in `alive`

    def alive(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def until(self, done: Callable[[], bool], names: Sequence[str]) -> bool:
        """Wait for `done`; False where the time is up or one of `names` has ended without it."""
        while not done():
            if self.left <= 0 or not all(map(self.alive, names)):
                return done()
            time.sleep(0.05)
        return True

    def end(self, name: str) -> None:
        """Let a process end by itself, stop it at the limit, and show its last lines where it failed."""
        process = self.processes.pop(name)
        assert process.stdin is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            code: int | str = process.wait(timeout=max(1.0, self.left))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = "stopped at the limit"
        self.say(f"{name}: exit {code}")
        if code != 0:
            lines = [x for x in (self.out / f"{name}.log").read_text().splitlines() if x.strip()]
            print("\n".join(x[:300] for x in lines[-25:]), flush=True)


def run_checks(folder: Path, reference: Path, out: Path, limit: float, wanted: Sequence[Check]) -> None:
    children = Children(out, limit)
    children.say(f"fingerprint {small.make(folder)[:12]}")
    for check in wanted:
        arguments = ["check", str(folder), str(out / f"{check.name}.json"), "--name", check.name,
                     "--reference", str(reference)]  # fmt: skip
        children.start(check.name, arguments, check.variables())
    for check in wanted:
        children.end(check.name)


def run_speed(folder: Path, out: Path, limit: float, layers: int) -> None:
    children = Children(out, limit)
    (folder / "adapters.ready").unlink(missing_ok=True)
    for name in SPEED:
        experts, lora = name.split("_")
        variables = {"ISOMOE_VLLM": "1"} if experts == "isomoe" else {"ISOMOE_DISABLE": "1"}
        children.start(name, ["serve", str(folder), str(out / f"{name}.json"), "--lora", lora], variables)
    children.start("weights", ["weights", str(folder), "--layers", str(layers)])
    if not children.until(lambda: (folder / "model" / "generation_config.json").exists(), ["weights"]):
        children.say("no model folder")
    started: set[str] = set()
    for index, group in enumerate(SPEED_GROUPS):
        for name in group:
            if name not in started:
                children.order(name, "start")
                started.add(name)
        ready = []
        for name in group:
            if children.until((out / f"{name}.ready").exists, [name]):
                ready.append(name)
                children.say(f"{name} is ready")
        later = {name for rest in SPEED_GROUPS[index + 1 :] for name in rest}
        for turn in range(engine.TURNS):
            # What stays up counts in its last group; one run before, in case the time ends first.
            for name in ready if turn == 0 else [n for n in ready if n not in later]:
                mark = f"{index * engine.TURNS + turn}"
                children.order(name, f"measure {mark}")
                if children.until((out / f"{name}.{mark}").exists, [name]):
                    children.say(f"{name} has measured")
        for name in group:
            if name not in later:
                children.end(name)
    children.end("weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, *paths: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name)
        for path in paths:
            sub.add_argument(path, type=Path)
        return sub

    command("reference", "folder", "out")
    checks = command("checks", "folder", "reference", "out")
    checks.add_argument("--limit", type=float, default=400, help="seconds")
    checks.add_argument("--only", default="", help="names of engines, separated by commas")
    speed = command("speed", "folder", "out")
    speed.add_argument("--limit", type=float, default=560, help="seconds")
    speed.add_argument("--layers", type=int, default=48)
    verdict = commands.add_parser("verdict")
    verdict.add_argument("kind", choices=("checks", "speed"))
    verdict.add_argument("out", type=Path)
    # What the above start.
    check = command("check", "folder", "out")
    check.add_argument("--name", required=True, choices=[c.name for c in CHECKS])
    check.add_argument("--reference", type=Path, required=True)
    serve = command("serve", "folder", "out")
    serve.add_argument("--lora", choices=("on", "off"), required=True)
    weights = command("weights", "folder")
    weights.add_argument("--layers", type=int, default=48)
    args = parser.parse_args()

    if args.command == "reference":
        small.make(args.folder)
        small.reference(args.folder, args.out)
    elif args.command == "checks":
        names = [n for n in args.only.split(",") if n]
        if unknown := set(names) - {c.name for c in CHECKS}:
            parser.error(f"--only: got {sorted(unknown)}, want of {[c.name for c in CHECKS]}")
        if not args.reference.exists():
            parser.error(f"reference: got {args.reference}, which does not exist; make it with 'reference'")
        wanted = [c for c in CHECKS if not names or c.name in names]
        run_checks(args.folder, args.reference, args.out, args.limit, wanted)
        return 0 if judge_checks(args.out, wanted) else 1
    elif args.command == "speed":
        run_speed(args.folder, args.out, args.limit, args.layers)
        return 0 if judge_speed(args.out, SPEED) else 1
    elif args.command == "verdict":
        good = judge_checks(args.out, CHECKS) if args.kind == "checks" else judge_speed(args.out, SPEED)
        return 0 if good else 1
    elif args.command == "check":
        (chosen,) = (c for c in CHECKS if c.name == args.name)
        engine.check(args.folder, args.out, chosen.scheme, chosen.lora, chosen.mode, chosen.probes, args.reference)
    elif args.command == "serve":
        engine.serve_turns(args.folder, args.out, args.lora == "on")
    else:
        import vllm_engine_random as large

        large.write_model(args.folder / "model", args.layers)
        large.write_adapters(args.folder / "adapters", args.layers)
        (args.folder / "adapters.ready").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
