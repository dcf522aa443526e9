# SPDX-License-Identifier: Apache-2.0
"""Compile the Hopper kernels for sm_90 on a machine without a GPU, and read what the assembler made of them.

`ahead_of_time()` lets ordinary host code run on CPU tensors with every Triton or Gluon launch compiled for the target
instead of started, so the launch code itself (argument lists, descriptors, meta-parameters) is exercised too.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel.

    Attributes:
      name: the kernel function's name.
      key: the launch's compile-time arguments, as text.
      registers: registers a thread at launch (before warpgroups trade them).
      shared_bytes: shared memory a program.
      spill_instructions: local-memory loads and stores in the machine code.
      tensor_instructions: wgmma instructions in the machine code.
      stack_bytes: local memory a thread.
      serialised: the assembler says that it makes tensor instructions wait for each other.
    """

    name: str
    key: str
    registers: int
    shared_bytes: int
    spill_instructions: int
    tensor_instructions: int
    stack_bytes: int
    serialised: bool


class _TargetDriver:
    """What Triton asks of a driver while it compiles, answered for an H200."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        return None

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return (9, 0)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def inspect(compiled: Any, name: str, key: str) -> KernelReport:
    """Disassemble a compiled kernel with the tools Triton ships."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", path], check=True, capture_output=True, text=True
        ).stdout
        source = os.path.join(folder, "kernel.ptx")
        Path(source).write_text(compiled.asm["ptx"])
        arch = "sm_90a" if ".target sm_90a" in compiled.asm["ptx"] else "sm_90"
        said = subprocess.run(
            [tools / "ptxas", f"-arch={arch}", "-v", "-o", os.devnull, source],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
        sass = subprocess.run(
            [tools / "cuobjdump", "--dump-sass", path], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"{name}: no resource usage in {usage!r}")
    return KernelReport(
        name=name,
        key=key,
        registers=int(found.group(1)),
        shared_bytes=int(compiled.metadata.shared),
        spill_instructions=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        tensor_instructions=len(re.findall(r"\b(?:QGMMA|HGMMA)\b", sass)),
        stack_bytes=int(found.group(2)),
        serialised="serialized" in said,
    )


@contextlib.contextmanager
def ahead_of_time() -> Iterator[dict[str, Any]]:
    """Compile launches for sm_90 instead of running them; yields compiled kernels by ``name|key``.

    Not for threads, and not inside a process that also launches: it replaces Triton's active driver.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compiled: dict[str, Any] = {}
    run = JITFunction.run
    before = driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        constants = {k: v for k, v in kwargs.items() if isinstance(v, (int, str, bool))}
        compiled[f"{self.fn.__name__}|{constants}"] = kernel
        return kernel

    driver.set_active(_TargetDriver())
    JITFunction.run = compile_only  # type: ignore[method-assign]
    try:
        yield compiled
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
        driver._active = before
