# SPDX-License-Identifier: Apache-2.0
"""Argument checks whose messages name the argument, what came and what is wanted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np


def check_int(label: str, value: Any, *, minimum: int) -> None:
    """Raise unless `value` is an int (not a bool) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{label}: got {value!r}, want an int")
    if value < minimum:
        raise ValueError(f"{label}: got {value}, want at least {minimum}")


def check_choice(label: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless `value` is one of `choices`; suggests a near miss."""
    names = sorted(choices)
    if isinstance(value, str) and value in names:
        return
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{label}: got {value!r}, want one of {', '.join(names)}{hint}")


def check_array(
    label: str, value: Any, *, shape: tuple[int | None, ...] | None = None, dtypes: Iterable[Any] | None = None
) -> None:
    """Raise unless `value` is a numpy array of the shape (None matches any extent) and one of the dtypes."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{label}: got {type(value).__name__}, want a numpy array")
    if dtypes is not None:
        wanted = [np.dtype(d) for d in dtypes]
        if value.dtype not in wanted:
            raise TypeError(f"{label}: got dtype {value.dtype}, want {' or '.join(d.name for d in wanted)}")
    if shape is not None and (
        value.ndim != len(shape) or any(w is not None and w != g for w, g in zip(shape, value.shape))
    ):
        want = "[" + ", ".join("any" if w is None else str(w) for w in shape) + "]"
        raise ValueError(f"{label}: got shape {list(value.shape)}, want {want}")
