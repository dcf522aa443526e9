# SPDX-License-Identifier: Apache-2.0
"""How a report becomes a test: `report` names a function after public reports, `cases` makes it pytest parameters.

A function may stand for several reports of one fault; it runs once a session and each report gets its outcome. One
that takes `executor` also runs on the interpreted executors, marked slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

# Every report starts it anew, so that no test depends on which others ran.
RNG = np.random.default_rng(7)
_START = RNG.bit_generator.state
INTERPRETED = ("triton", "marlin", "pallas_ep")


@dataclass
class Report:
    """One fault: who reported it, what it was, and the test that would have found it."""

    names: tuple[str, ...]
    symptom: str
    test: Callable[..., None]
    module: str
    outcomes: dict[str, BaseException | None] = field(default_factory=dict)

    @property
    def takes_executor(self) -> bool:
        return "executor" in inspect.signature(self.test).parameters

    def run(self, executor: str = "reference") -> None:
        """The test, afresh."""
        RNG.bit_generator.state = _START
        if self.takes_executor:
            self.test(executor)
        else:
            self.test()

    def run_once(self, executor: str) -> None:
        """The test, or its outcome where it has run."""
        if executor not in self.outcomes:
            try:
                self.run(executor)
                self.outcomes[executor] = None
            except BaseException as error:
                self.outcomes[executor] = error
        outcome = self.outcomes[executor]
        if outcome is not None:
            raise outcome


REPORTS: dict[str, Report] = {}


def report(*names: str, symptom: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a test under the reports it stands for, ``repository#number`` each."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        entry = Report(names, symptom, test, test.__module__.rsplit(".", 1)[-1])
        for name in names:
            if name in REPORTS and REPORTS[name].test.__code__.co_filename != test.__code__.co_filename:
                raise ValueError(f"{name}: got two tests")
            REPORTS[name] = entry
        return test

    return register


def cases(module: str) -> pytest.MarkDecorator:
    """The reports of one module (its ``__name__``) as parameters ``(name, executor)``."""
    short = module.rsplit(".", 1)[-1]
    mine = {name: entry for name, entry in REPORTS.items() if entry.module == short}
    params = [pytest.param(name, "reference", id=name) for name in mine]
    first = {entry.names[0]: entry for entry in mine.values() if entry.takes_executor}
    params += [
        pytest.param(name, executor, id=f"{name}-{executor}", marks=pytest.mark.slow)
        for name in first
        for executor in INTERPRETED
    ]
    return pytest.mark.parametrize(("name", "executor"), params)


def check(name: str, executor: str) -> None:
    """One report on one executor."""
    REPORTS[name].run_once(executor)
