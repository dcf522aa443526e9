# SPDX-License-Identifier: Apache-2.0
"""Triton as this package uses it: compiled on a GPU, interpreted on a machine without one.

Triton decides between the two when its decorators run, by the environment variable ``TRITON_INTERPRET``. Every
kernel module imports `triton` and `tl` from here, so the variable is settled first: where torch sees no CUDA
device and the variable is not set, this module sets it to 1 for the process. Setting it to 0 beforehand asks for
compilation only (what `aot` does). If something else imported Triton earlier without the variable, Triton's own
library functions are made interpretable here.

`launch` is the one door to the device. Under `recording` it notes what would have been launched instead, which is
how `aot` learns every kernel variant of the real host path without a device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)



def _interpret_library() -> None:
    """Make Triton's own library functions interpretable after they were decorated for compilation.

    Whatever imported Triton first (transformers does) fixed them then. Without a device nothing compiled can be in
    use, so they are swapped for interpreted twins, wherever a module of Triton's language names them.
    """
    from triton.runtime.interpreter import InterpretedFunction

    twins: dict[int, InterpretedFunction] = {}
    modules = [m for n, m in sys.modules.items() if n == "triton.language" or n.startswith("triton.language.")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                setattr(module, name, twins.setdefault(id(value), InterpretedFunction(value.fn)))


if INTERPRETED and isinstance(tl.sum, triton.JITFunction):
    _interpret_library()

# The interpreter multiplies bf16 bit patterns as integers and truncates where the hardware rounds; helpers in
# `device_numerics` branch on this.
INTERPRET = tl.constexpr(INTERPRETED)

# Shared memory a program may use, bytes, by compute capability (CUDA programming guide, technical specifications).
SHARED_MEMORY = {
    (7, 5): 64 * 1024,
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
    (12, 0): 99 * 1024,
    (12, 1): 99 * 1024,
}


@dataclass(frozen=True)
class Target:
    """What kernels are built for.

    Attributes:
      capability: compute capability, or None under the interpreter.
    """

    capability: tuple[int, int] | None

    @property
    def native_fp8(self) -> bool:
        """Whether the device converts and multiplies e4m3 itself (8.9 and later)."""
        return self.capability is not None and self.capability >= (8, 9)

    @property
    def wide_fp8_accumulator(self) -> bool:
        """Whether the compiler keeps FP8 products in f32: 9.0 (promoted on request) and 10.x (f32 in the unit)."""
        return self.capability is not None and (9, 0) <= self.capability < (12, 0)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory a program may use."""
        if self.capability is None:
            return 1 << 30
        return SHARED_MEMORY.get(self.capability, 99 * 1024)


@dataclass(frozen=True)
class Launch:
    """One recorded launch: enough to compile the same variant elsewhere."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int


class _Recorder:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.launches: list[Launch] = []


_recorder: _Recorder | None = None


@contextlib.contextmanager
def recording(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Note launches for a device of `capability` instead of making them; tensors may live on ``meta``."""
    global _recorder
    previous, _recorder = _recorder, _Recorder(Target(capability))
    try:
        yield _recorder.launches
    finally:
        _recorder = previous


def is_recording() -> bool:
    """Whether `recording` is active."""
    return _recorder is not None


def target_of(device: torch.device) -> Target:
    """The target that kernels over tensors on `device` are built for."""
    if _recorder is not None:
        return _recorder.target
    if INTERPRETED:
        return Target(None)
    return Target(torch.cuda.get_device_capability(device))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    **constexprs: Any,
) -> None:
    """Run `kernel` over `grid` on its tensors' device; `arguments` are its runtime parameters by name."""
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, grid, dict(arguments), constexprs, num_warps, num_stages))
        return
    device = next(a.device for a in arguments.values() if isinstance(a, torch.Tensor))
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        kernel[grid](**arguments, **constexprs, num_warps=num_warps, num_stages=num_stages)


def batch_invariant() -> bool:
    """Whether ISOMOE_BATCH_INVARIANT=1 asks for one tile at every batch size."""
    return os.environ.get("ISOMOE_BATCH_INVARIANT") == "1"


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
