# SPDX-License-Identifier: Apache-2.0
"""What the TPU interpreter's race detector saw, of every kernel a test runs: jax itself keeps the last one's."""

from __future__ import annotations

from typing import Any

import pytest

_DETECTORS: list[Any] = []


@pytest.fixture(autouse=True)
def keep_detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it into a test module: each of its tests starts without detectors and keeps those it makes."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    real = interpret_pallas_call.RaceDetectionState

    def kept(**options: Any) -> Any:
        _DETECTORS.append(real(**options))
        return _DETECTORS[-1]

    _DETECTORS.clear()
    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", kept)


def races_found() -> bool:
    """Whether any kernel of the running test raced."""
    assert _DETECTORS, "the race detector did not run"
    return any(detector.races_found for detector in _DETECTORS)
