# SPDX-License-Identifier: Apache-2.0
"""Write docs/ledger.md from the tests: ``python -m isomoe.tests.ledger.document``."""

from __future__ import annotations

import importlib
from pathlib import Path

import isomoe
from isomoe.tests.ledger.elsewhere import ELSEWHERE
from isomoe.tests.ledger.record import REPORTS, Report

MODULES = ("test_routing_and_ids", "test_numerics", "test_adapters", "test_selection")
_TITLES = {
    "test_routing_and_ids": "Routing, ids, empty and padded batches",
    "test_numerics": "FP8, scales, rounding, sizes",
    "test_adapters": "Adapters",
    "test_selection": "Selection, methods, loading, packaging",
}
PATH = Path(isomoe.__file__).parent / "docs" / "ledger.md"
_HEAD = """# Ledger of what broke elsewhere

Faults of FP8 MoE layers, LoRA on experts and their selection that were reported in public, and what stands for each
here: a test named after it (`pytest tests/ledger -k 42008` runs `vllm#42008`), or the reason why there is none. All
tests run on the reference; those that take an executor also run on the interpreted kernels (`-m slow`), and
those that are a check of the matrix run there on every executor. For a sample,
`tests/ledger/test_mutations.py` puts the fault back and sees that the report's test then fails. One test may stand for
several reports of one fault. Rows that begin with *gap* are not reports: no public test looked there.

This file is written by `python -m isomoe.tests.ledger.document`.
"""


def load() -> None:
    """Import every module of tests, which fills `REPORTS`."""
    for module in MODULES:
        importlib.import_module(f"isomoe.tests.ledger.{module}")


def text() -> str:
    """The document."""
    load()
    tested = sum(not name.startswith("gap:") for name in REPORTS)
    tests = len({id(entry) for name, entry in REPORTS.items() if not name.startswith("gap:")})
    count = f"{tested} reports are tested by {tests} tests; {len(ELSEWHERE)} are not, for the reason beside them.\n"
    parts = [_HEAD, count]
    for module in MODULES:
        entries: list[Report] = list({id(e): e for e in REPORTS.values() if e.module == module}.values())
        parts.append(
            f"## {_TITLES[module]}\n\nIn `tests/ledger/{module}.py`.\n\n"
            "| report | what happened | test |\n|---|---|---|"
        )
        for entry in entries:
            names = ", ".join(entry.names)
            symptom = entry.symptom.replace("|", "/")
            parts.append(f"| {names} | {symptom} | `{entry.test.__name__}` |")
        parts.append("")
    parts.append("## Not tested here\n\n| report | why |\n|---|---|")
    by_reason: dict[str, list[str]] = {}
    for name, reason in ELSEWHERE.items():
        by_reason.setdefault(reason, []).append(name)
    parts += [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
    print(PATH)
