# SPDX-License-Identifier: Apache-2.0
"""Run somebody else's function with some of its module's names bound to other objects, without touching the module.

vLLM's quant methods look up their selector, and tpu-inference's quant configs their method classes, as globals of
their own modules, and offer no way to pass others in. Assigning to those globals would change every caller in the
process. A copy of the function over a copy of its globals changes one call.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any


def _names_used(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_used(constant)


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of `function` whose global `names` are these objects; all else is the function's own.

    Globals are copied when this is called, so call it at each use.

    Raises:
      TypeError: `function` is not a plain Python function.
      LookupError: it does not use one of the names, so binding it would do nothing.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"function: got {type(function).__name__}, want a Python function")
    unused = sorted(set(names) - set(_names_used(function.__code__)))
    if unused:
        where = f"{function.__module__}.{function.__qualname__}"
        raise LookupError(f"{where} does not use {', '.join(unused)}; this version of it is not known here")
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__ = function.__qualname__
    return copy
