# SPDX-License-Identifier: Apache-2.0
"""Where a layer is meant to run, as plain data.

A `Platform` describes a target; it need not be this machine. The selector, `isomoe explain` and the tests all
take one as an argument, so a laptop can ask what a TPU v7x or an H200 would choose. Only `Platform.detect()`
looks at the machine, and it never imports a framework that is not already loaded.
"""

from __future__ import annotations

import enum
import os
import re
import sys
from dataclasses import dataclass


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
        if text == "cpu":
            return cls.cpu()
        family, _, rest = text.partition("-")
        if family == "tpu":
            return cls.tpu(rest)
        if family == "rocm":
            return cls.rocm(rest)
        if family == "cuda":
            match = re.fullmatch(r"(\d+)\.(\d+)", rest)
            if match is None:
                raise ValueError(f"platform: got {text!r}, want cuda-MAJOR.MINOR, for example cuda-9.0")
            return cls.cuda(int(match[1]), int(match[2]))
        if family == "out_of_tree" and rest:
            return cls.out_of_tree(rest)
        raise ValueError(
            f"platform: got {text!r}, want tpu-GENERATION, cuda-MAJOR.MINOR, rocm-ARCH, cpu or out_of_tree-NAME"
        )

    @classmethod
    def detect(cls) -> Platform:
        """This machine's platform.

        ``ISOMOE_PLATFORM`` (a name as `parse` takes it) wins. Otherwise frameworks that are already imported
        are asked, then torch and jax are probed in that order; a machine with neither device is the CPU.
        Never raises.
        """
        override = os.environ.get("ISOMOE_PLATFORM")
        if override:
            return cls.parse(override)
        probes = [_probe_jax, _probe_torch] if "jax" in sys.modules else [_probe_torch, _probe_jax]
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


def _probe_torch() -> Platform | None:
    import importlib.util

    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    if getattr(torch.version, "hip", None):
        return Platform.rocm(torch.cuda.get_device_properties(0).gcnArchName.split(":")[0])
    return Platform.cuda(*torch.cuda.get_device_capability(0))


# jax's device_kind strings to generations.
_TPU_KINDS = {
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


def _probe_jax() -> Platform | None:
    import importlib.util

    # Without libtpu there can be no TPU, and starting jax would cost a second and claim devices.
    if "jax" not in sys.modules and importlib.util.find_spec("libtpu") is None:
        return None
    if "jax" not in sys.modules and not os.path.exists("/dev/vfio") and not os.path.exists("/dev/accel0"):
        return None
    import jax

    if jax.default_backend() != "tpu":
        return None
    generation = _TPU_KINDS.get(jax.devices()[0].device_kind)
    return Platform.tpu(generation) if generation else None
