# SPDX-License-Identifier: Apache-2.0
"""Where a layer is meant to run, as plain data.

A `Platform` describes a target; it need not be this machine. The selector, `isomoe explain` and the tests all
take one as an argument, so a laptop can ask what a TPU v7x or an H200 would choose. Only `Platform.detect()`
looks at the machine, and it never imports a framework.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


class PlatformKind(enum.Enum):
    """Families of devices the selector tells apart."""

    TPU = "tpu"
    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"
    OUT_OF_TREE = "out_of_tree"

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


TPU_GENERATIONS = ("v4", "v5e", "v5p", "v6e", "v7x")

# ROCm architectures with e4m3 matrix instructions; gfx94x uses the fnuz flavour.
_ROCM_FP8 = ("gfx940", "gfx941", "gfx942", "gfx950", "gfx1200", "gfx1201")


@dataclass(frozen=True)
class Platform:
    """A deployment target.

    Attributes:
      kind: the family; decides first in every selection.
      name: what reports print, for example ``"tpu-v7x"`` or ``"cuda-9.0"``.
      capability: CUDA compute capability as ``(major, minor)``; None elsewhere.
      arch: TPU generation (``"v7x"``) or ROCm architecture (``"gfx950"``); empty elsewhere.
      cuda_alike: an out-of-tree platform that calls itself CUDA-alike. It changes no selection.
    """

    kind: PlatformKind
    name: str
    capability: tuple[int, int] | None = None
    arch: str = ""
    cuda_alike: bool = False

    def __repr__(self) -> str:
        match self.kind:
            case PlatformKind.TPU:
                return f"Platform.tpu({self.arch!r})"
            case PlatformKind.CUDA:
                return f"Platform.cuda({self.capability[0]}, {self.capability[1]})"  # type: ignore[index]
            case PlatformKind.ROCM:
                return f"Platform.rocm({self.arch!r})"
            case PlatformKind.CPU:
                return "Platform.cpu()"
        return f"Platform.out_of_tree({self.name!r}, cuda_alike={self.cuda_alike})"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def tpu(cls, generation: str) -> Platform:
        """A TPU generation: one of ``v4, v5e, v5p, v6e, v7x``."""
        if generation not in TPU_GENERATIONS:
            raise ValueError(f"generation: got {generation!r}, want one of {', '.join(TPU_GENERATIONS)}")
        return cls(PlatformKind.TPU, f"tpu-{generation}", arch=generation)

    @classmethod
    def cuda(cls, major: int, minor: int) -> Platform:
        """An NVIDIA GPU by compute capability, for example ``Platform.cuda(9, 0)``."""
        for label, value in (("major", major), ("minor", minor)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{label}: got {value!r}, want a non-negative int")
        return cls(PlatformKind.CUDA, f"cuda-{major}.{minor}", capability=(major, minor))

    @classmethod
    def rocm(cls, arch: str) -> Platform:
        """An AMD GPU by architecture, for example ``Platform.rocm("gfx950")``."""
        if not isinstance(arch, str) or not re.fullmatch(r"gfx[0-9a-f]+", arch):
            raise ValueError(f"arch: got {arch!r}, want a gfx name such as 'gfx950'")
        return cls(PlatformKind.ROCM, f"rocm-{arch}", arch=arch)

    @classmethod
    def cpu(cls) -> Platform:
        """The host processor."""
        return cls(PlatformKind.CPU, "cpu")

    @classmethod
    def out_of_tree(cls, name: str, cuda_alike: bool = False) -> Platform:
        """A platform that a plugin brings; `cuda_alike` is what it says of itself."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"name: got {name!r}, want a non-empty string")
        return cls(PlatformKind.OUT_OF_TREE, name, cuda_alike=bool(cuda_alike))

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Read a name as the command line takes it: tpu-v7x, cuda-9.0, rocm-gfx950, cpu; else out of tree."""
        if not isinstance(text, str):
            raise TypeError(f"platform: got {text!r}, want a name such as 'tpu-v7x'")
        if text == "cpu":
            return cls.cpu()
        family, _, rest = text.partition("-")
        if family == "tpu" and rest:
            return cls.tpu(rest)
        if family == "rocm" and rest:
            return cls.rocm(rest)
        if family == "cuda":
            match = re.fullmatch(r"(\d+)\.(\d+)", rest)
            if match is None:
                raise ValueError(f"platform: got {text!r}, want cuda-MAJOR.MINOR, for example cuda-9.0")
            return cls.cuda(int(match[1]), int(match[2]))
        if family == "out_of_tree" and rest:
            return cls.out_of_tree(rest)
        raise ValueError(
            f"platform: got {text!r}, want tpu-GENERATION, cuda-MAJOR.MINOR, rocm-ARCH, cpu or "
            "out_of_tree-NAME"
        )

    @classmethod
    def detect(cls) -> Platform:
        """This machine's platform, from what the drivers expose; never raises and imports no framework.

        ``ISOMOE_PLATFORM`` (a name as `parse` takes it) wins; a malformed one is reported and ignored. Then
        come TPU chips and AMD GPUs by sysfs, NVIDIA GPUs by NVML (which, unlike the CUDA driver, leaves a
        process free to fork), and last the devices of a torch or jax that runs already. A machine with none
        of them is the CPU.
        """
        override = os.environ.get("ISOMOE_PLATFORM")
        found = _parse_override(override) if override else None
        if found is not None:
            return found
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        probes: tuple[Callable[[], Platform | None], ...] = (
            _probe_tpu,
            lambda: _probe_nvml(visible),
            _probe_kfd,
            _probe_loaded_torch,
            _probe_loaded_jax,
        )
        for probe in probes:
            try:
                found = probe()
            except Exception:  # a broken driver or half-installed framework means "not this device"
                found = None
            if found is not None:
                return found
        return cls.cpu()

    @property
    def is_tpu(self) -> bool:
        return self.kind is PlatformKind.TPU

    @property
    def is_cuda(self) -> bool:
        return self.kind is PlatformKind.CUDA

    @property
    def is_rocm(self) -> bool:
        return self.kind is PlatformKind.ROCM

    @property
    def has_fp8_mma(self) -> bool:
        """Whether the matrix unit multiplies e4m3 by e4m3.

        CUDA from 8.9 on; TPU only v7x (earlier generations hold e4m3 in memory but convert before the dot).
        """
        if self.kind is PlatformKind.CUDA:
            return self.capability is not None and self.capability >= (8, 9)
        if self.kind is PlatformKind.TPU:
            return self.arch == "v7x"
        return self.kind is PlatformKind.ROCM and self.arch in _ROCM_FP8


@functools.cache
def _parse_override(text: str) -> Platform | None:
    try:
        return Platform.parse(text)
    except ValueError as error:
        logger.warning("isomoe: ISOMOE_PLATFORM is ignored: %s", error)
        return None


_GOOGLE_VENDOR = "0x1ae0"
# PCI device ids of TPU chips.
_TPU_DEVICE_IDS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}


@functools.cache
def _probe_tpu(pci: str = "/sys/bus/pci/devices") -> Platform | None:
    """A TPU by its PCI ids."""
    for device in sorted(Path(pci).glob("*")):
        if (device / "vendor").read_text().strip() == _GOOGLE_VENDOR:
            generation = _TPU_DEVICE_IDS.get((device / "device").read_text().strip())
            if generation is not None:
                return Platform.tpu(generation)
    return None


@functools.cache
def _probe_nvml(visible: str | None) -> Platform | None:
    """The first visible NVIDIA GPU; `visible` is CUDA_VISIBLE_DEVICES, of which only a leading index
    counts."""
    first = (visible or "0").split(",")[0].strip()
    if visible is not None and (not visible.strip() or first.startswith("-")):
        return None
    nvml = ctypes.CDLL("libnvidia-ml.so.1")  # OSError where there is no driver
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        index = int(first) if first.isdigit() else 0
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
            return None
        if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
            return None
        return Platform.cuda(major.value, minor.value)
    finally:
        nvml.nvmlShutdown()


@functools.cache
def _probe_kfd(nodes: str = "/sys/class/kfd/kfd/topology/nodes") -> Platform | None:
    """The first AMD GPU: ``gfx_target_version`` 90402 is gfx942 (decimal major, hexadecimal minor and
    stepping)."""
    for properties in sorted(Path(nodes).glob("*/properties")):
        match = re.search(r"^gfx_target_version (\d+)$", properties.read_text(), re.MULTILINE)
        if match is not None and int(match[1]):
            major, rest = divmod(int(match[1]), 10000)
            return Platform.rocm(f"gfx{major}{rest // 100:x}{rest % 100:x}")
    return None


def _probe_loaded_torch() -> Platform | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    if getattr(torch.version, "hip", None):
        return Platform.rocm(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
    return Platform.cuda(*torch.cuda.get_device_capability(0))


# jax's device_kind strings to generations.
TPU_DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "TPU v7x": "v7x",
}


def _probe_loaded_jax() -> Platform | None:
    jax, bridge = sys.modules.get("jax"), sys.modules.get("jax._src.xla_bridge")
    # Asking an idle jax for its devices would start it and claim them.
    if (
        jax is None
        or bridge is None
        or not bridge.backends_are_initialized()
        or jax.default_backend() != "tpu"
    ):
        return None
    generation = TPU_DEVICE_KINDS.get(jax.devices()[0].device_kind)
    return Platform.tpu(generation) if generation else None
