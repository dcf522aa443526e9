# SPDX-License-Identifier: Apache-2.0
"""Every executor against the contract, on the shared matrix: `conformance`'s checks as pytest cases."""

from __future__ import annotations

import functools
import os

import pytest

from isomoe.tests.conformance import CHECKS, Check, Subject, plan, run_check, subject_for
from isomoe.tests.matrix import Case

# ISOMOE_TEST_EXECUTORS names other (or fewer) executors for a run; package.module:Class works too.
EXECUTORS = tuple(os.environ.get("ISOMOE_TEST_EXECUTORS", "reference,pallas_ep,triton,marlin").split(","))


@functools.cache
def _subject(executor: str) -> Subject:
    return subject_for(executor)


def _cells() -> list:
    """What each executor declares; what it does not declare is not a test."""
    return [
        pytest.param(executor, check, case, id=f"{check.name}-{executor}-{case}")
        for executor in EXECUTORS
        for check, case in plan(_subject(executor))
        if not _subject(executor).why_not(case)
    ]


@pytest.mark.parametrize(("executor", "check", "case"), _cells())
def test_matrix(executor: str, check: Check, case: Case) -> None:
    result = run_check(check, _subject(executor), case)
    if result.verdict == "unavailable":
        pytest.skip(f"{executor} is unavailable: {result.reason}")
    assert result.verdict == "pass", str(result)


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_every_check_says_what_it_does_and_judges(check: Check) -> None:
    subject = _subject("reference")
    case = next(c for c in check.cases() if not subject.why_not(c))
    result = run_check(check, subject, case)
    assert check.doc
    assert result.figures, "a check without a figure asserts nothing"
