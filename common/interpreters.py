# SPDX-License-Identifier: Apache-2.0
"""Environment variables that interpreted kernels need, set before jax or triton start.

Both frameworks read their settings once: jax when its backend starts, triton when its module is imported. So a command
line or a test session calls `prepare` first. A variable that the user has set is left alone.
"""

from __future__ import annotations

import os

# The largest expert-parallel size that tests and the parity job simulate.
VIRTUAL_DEVICES = 8


def has_cuda_device() -> bool:
    """Whether an NVIDIA device node exists (nothing is imported or started)."""
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg")


def has_tpu_device() -> bool:
    """Whether a TPU device node exists (nothing is imported or started)."""
    return os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")


def prepare(virtual_devices: int = VIRTUAL_DEVICES) -> dict[str, str]:
    """Set what is missing and return it: ``{name: value}`` of the variables this call set."""
    wanted: dict[str, str] = {}
    if not has_cuda_device():
        wanted["TRITON_INTERPRET"] = "1"
    if not has_tpu_device():
        wanted["JAX_PLATFORMS"] = "cpu"
        # Some jax versions deadlock in the TPU interpreter where virtual devices outnumber the cores they see.
        wanted["NPROC"] = str(2 * virtual_devices)
        flags = os.environ.get("XLA_FLAGS", "")
        if "xla_force_host_platform_device_count" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={virtual_devices}".strip()
    done = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ.update(done)
    return done
