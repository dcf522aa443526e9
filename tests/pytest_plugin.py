# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: `pytest --isomoe-executor NAME` adds the conformance cases of an executor to any test session.

NAME is a registered executor or ``package.module:Class``; the option may be repeated. Without it the plugin does
nothing and imports nothing. ``--isomoe-level quick|standard|full`` chooses how many cases.
"""

from __future__ import annotations

from typing import Any

import pytest

LEVELS = ("quick", "standard", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isomoe")
    group.addoption(
        "--isomoe-executor",
        action="append",
        default=[],
        metavar="NAME",
        help="add isomoe's conformance cases for this executor (repeatable)",
    )
    group.addoption("--isomoe-level", default="quick", choices=LEVELS, help="how many of them (default: quick)")


class ConformanceFailed(Exception):
    """A check that did not pass; its text is the whole report."""


class ConformanceItem(pytest.Item):
    """One check on one case."""

    def __init__(self, *, check: Any, subject: Any, case: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check, self.subject, self.case = check, subject, case

    def runtest(self) -> None:
        from isomoe.tests.conformance import run_check

        result = run_check(self.check, self.subject, self.case)
        if result.verdict == "unavailable":
            pytest.skip(f"{self.subject.name} is unavailable: {result.reason}")
        if result.verdict != "pass":
            figures = "\n".join(f"  {'' if f.ok else 'OUT '}{f}" for f in result.figures)
            raise ConformanceFailed(f"{result}\n{figures}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ConformanceFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"isomoe {self.name}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    wanted = config.getoption("--isomoe-executor")
    if not wanted:
        return
    from isomoe.common.interpreters import prepare

    prepare()
    from isomoe.tests.conformance import plan, subject_for

    for executor in wanted:
        try:
            subject = subject_for(executor)
        except (ValueError, TypeError, ImportError) as error:
            raise pytest.UsageError(f"--isomoe-executor: {error}") from None
        for check, case in plan(subject, config.getoption("--isomoe-level")):
            if not subject.why_not(case):
                name = f"{check.name}[{subject.name}-{case}]"
                items.append(
                    ConformanceItem.from_parent(session, name=name, check=check, subject=subject, case=case)
                )
