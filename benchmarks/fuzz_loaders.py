# SPDX-License-Identifier: Apache-2.0
"""Feed damaged checkpoints and adapters to the loaders for some minutes: no crash, no hang, memory within bounds.

    python benchmarks/fuzz_loaders.py --minutes 10 [--seed 0] [--out fuzz-out]

Runs in a child process with an address-space limit, so that a crash or a hang is a finding and not the end. A finding
is printed with what repeats it: ``--source NAME --only SEED``. The exit code is 1 where there are findings.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isomoe.tests import fuzzing

ADDRESS_SPACE = 8 << 30
STALL_SECONDS = 30


def child(first: int, step: int, root: str, pipe: Any) -> None:
    """Run seeds first, first + step, ... and send each outcome; the seed is sent before it is run."""
    logging.disable(logging.WARNING)  # every unknown model type would be reported
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    sources = sorted(fuzzing.SOURCES)
    seed = first
    while True:
        source = sources[seed % len(sources)]
        pipe.send(("start", source, seed))
        folder = Path(root) / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        pipe.send(("done", asdict(fuzzing.attempt(source, seed, folder))))
        seed += step


def run(minutes: float, first: int) -> dict[str, Any]:
    """Fuzz until the time is up; restarts the child after a crash or a stall."""
    context = multiprocessing.get_context("spawn")
    counts: collections.Counter[str] = collections.Counter()
    findings: list[dict[str, Any]] = []
    slowest, largest, seed = 0.0, 0, first
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        ours, theirs = context.Pipe(duplex=False)
        root = tempfile.mkdtemp(prefix="fuzz-loaders-")
        process = context.Process(target=child, args=(seed, 1, root, theirs), daemon=True)
        process.start()
        theirs.close()
        current: tuple[str, int] | None = None
        try:
            while time.monotonic() < deadline:
                if not ours.poll(STALL_SECONDS):
                    findings.append(
                        {"source": current and current[0], "seed": current and current[1], "problem": "hangs"}
                    )
                    break
                kind, *rest = ours.recv()
                if kind == "start":
                    current = (rest[0], rest[1])
                    continue
                outcome = rest[0]
                counts["loaded" if outcome["loaded"] else outcome["error"].split(":")[0]] += 1
                slowest, largest = max(slowest, outcome["seconds"]), max(largest, outcome["peak"])
                if outcome["problem"]:
                    findings.append(outcome)
        except EOFError:
            process.join(5)
            findings.append(
                {
                    "source": current and current[0],
                    "seed": current and current[1],
                    "problem": f"the process died (exit code {process.exitcode})",
                }
            )
        finally:
            process.kill()
            process.join(5)
            shutil.rmtree(root, ignore_errors=True)
        seed = (current[1] if current else seed) + 1
    return {
        "cases": sum(counts.values()),
        "outcomes": dict(counts),
        "slowest_s": round(slowest, 3),
        "largest_peak_bytes": largest,
        "next_seed": seed,
        "findings": findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--source", choices=sorted(fuzzing.SOURCES), help="with --only")
    parser.add_argument("--only", type=int, help="run this one seed here and print what happens")
    parser.add_argument("--out", type=Path, help="folder for fuzz.json")
    args = parser.parse_args()
    if args.only is not None:
        if args.source is None:
            parser.error("--only needs --source")
        with tempfile.TemporaryDirectory() as folder:
            outcome = fuzzing.attempt(args.source, args.only, Path(folder))
        print(json.dumps(asdict(outcome), indent=2))
        return int(bool(outcome.problem))
    found = run(args.minutes, args.seed)
    print(json.dumps(found, indent=2))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "fuzz.json").write_text(json.dumps(found, indent=2) + "\n")
    return int(bool(found["findings"]))


if __name__ == "__main__":
    sys.exit(main())
