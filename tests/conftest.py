# SPDX-License-Identifier: Apache-2.0
"""Settings that must be in place before jax or triton are imported by any test, and what several test files share."""

from __future__ import annotations

import os

import pytest

from isomoe.common.interpreters import prepare
from isomoe.tests.samples import Samples, write_samples

prepare()


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """The sample checkpoints and adapters, written once a session, also where it is spread over processes."""
    base = tmp_path_factory.getbasetemp()
    return write_samples((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "samples")
