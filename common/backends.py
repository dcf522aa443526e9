# SPDX-License-Identifier: Apache-2.0
"""Backend names and the registry of experts classes.

Built-in kernels and third-party ones are registered the same way, lazily, by ``"package.module:Class"``. The
enum names what a selector can answer in-tree; a registered backend is answered by its `RegisteredBackend`.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import logging
import threading
from dataclasses import dataclass
from typing import Any

from .checks import check_choice, check_int
from .platforms import PlatformKind
from .weights import SCHEMES

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "isomoe.moe_backends"


def normalize_name(name: object) -> str:
    """A backend's name as the registry stores it: lower case, ``-`` as ``_``."""
    return str(name).strip().lower().replace("-", "_")


class _Backend(enum.Enum):
    """Members whose repr evaluates back."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Fp8MoeBackend(_Backend):
    """In-tree answers of `select_fp8_moe_backend`. NONE: somebody else executes (the registry says who)."""

    NONE = "none"
    TRITON = "triton"
    MARLIN = "marlin"


class UnquantizedMoeBackend(_Backend):
    """In-tree answers of `select_unquantized_moe_backend`."""

    NONE = "none"
    TRITON = "triton"


@dataclass(frozen=True)
class RegisteredBackend:
    """One registration.

    Attributes:
      name: lower case, what `moe_backend=` and `run_moe` take.
      experts: ``"package.module:Class"``, imported on first use.
      platforms: families it may serve.
      schemes: weight schemes it may serve.
      auto_select: tried by the automatic walk (explicit choice works either way).
      priority: higher is tried earlier among registered backends.
      builtin: registered by this package.
    """

    name: str
    experts: str
    platforms: tuple[PlatformKind, ...]
    schemes: tuple[str, ...]
    auto_select: bool = False
    priority: int = 0
    builtin: bool = False

    def load(self) -> type:
        """Import the experts class.

        Raises:
          ImportError: the module or the class is missing; the message names the registration.
        """
        module, _, qualname = self.experts.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in qualname.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, SystemExit) as error:  # some packages exit on wrong hardware
            raise ImportError(f"backend {self.name!r}: cannot load {self.experts!r}: {error}") from error
        if not isinstance(found, type):
            raise ImportError(f"backend {self.name!r}: {self.experts!r} is not a class")
        return found


_FP8 = ("block", "channel", "tensor")
# The package may be imported under another name (a checkout used in place); resolve beside this module.
_ROOT = __name__.rsplit(".common.", 1)[0]

_BUILTINS = (
    RegisteredBackend(
        "reference", f"{_ROOT}.common.reference:ReferenceExecutor", tuple(PlatformKind), SCHEMES, builtin=True
    ),
    RegisteredBackend(
        "pallas_ep",
        f"{_ROOT}.tpu_impl.executor:PallasEPExecutor",
        (PlatformKind.TPU,),
        SCHEMES,
        auto_select=True,
        builtin=True,
    ),
    RegisteredBackend(
        "triton",
        f"{_ROOT}.cuda_impl.executors:TritonExecutor",
        (PlatformKind.CUDA,),
        SCHEMES,
        auto_select=True,
        builtin=True,
    ),
    RegisteredBackend(
        "marlin",
        f"{_ROOT}.cuda_impl.executors:MarlinExecutor",
        (PlatformKind.CUDA,),
        _FP8,
        auto_select=True,
        builtin=True,
    ),
)

# Names that mean something to a selector already, here or in vLLM; a plugin must not take them.
RESERVED_NAMES = frozenset(
    {
        "auto",
        "none",
        "triton",
        "marlin",
        "pallas_ep",
        "reference",
        "deep_gemm",
        "cutlass",
        "flashinfer_trtllm",
        "flashinfer_cutlass",
        "humming",
        "aiter",
        "hpc",
    }
)

_lock = threading.Lock()
_registry: dict[str, RegisteredBackend] = {b.name: b for b in _BUILTINS}
_entry_points_loaded = False


def register_moe_backend(
    name: str,
    experts: str,
    *,
    platforms: tuple[PlatformKind | str, ...],
    schemes: tuple[str, ...],
    auto_select: bool = False,
    priority: int = 0,
) -> RegisteredBackend:
    """Register an experts class under a name.

    Idempotent for an identical registration. The class is imported only when it is considered, and is then
    checked like a built-in one.

    Args:
      name: letters, digits, ``_`` and ``-``; stored lower case with ``_``.
      experts: ``"package.module:Class"``.
      platforms: `PlatformKind`s or their values (``"tpu"``, ``"cuda"`` ...).
      schemes: among ``"block"``, ``"channel"``, ``"tensor"``, ``"bf16"``.
      auto_select: let the automatic walk choose it, after the built-in backends.
      priority: order among registered backends; higher first.

    Raises:
      ValueError: a reserved or taken name, an unknown platform or scheme, or a malformed path.
    """
    key = normalize_name(name)
    if not key or not key.replace("_", "").isalnum() or not key.isascii():
        raise ValueError(f"name: got {name!r}, want ASCII letters, digits, '_' and '-'")
    if key in RESERVED_NAMES:
        raise ValueError(
            f"name: got {name!r}, which is reserved; reserved names are {', '.join(sorted(RESERVED_NAMES))}"
        )
    module, colon, qualname = str(experts).partition(":")
    if not module or not colon or not qualname:
        raise ValueError(f"experts: got {experts!r}, want 'package.module:Class'")
    if isinstance(platforms, str) or not platforms:
        raise ValueError(f"platforms: got {platforms!r}, want a non-empty tuple of platform kinds")
    kinds = []
    for platform in platforms:
        if not isinstance(platform, PlatformKind):
            check_choice("platforms", platform, [k.value for k in PlatformKind])
        kinds.append(PlatformKind(platform))
    if isinstance(schemes, str) or not schemes:
        raise ValueError(f"schemes: got {schemes!r}, want a non-empty tuple of scheme names")
    for scheme in schemes:
        check_choice("schemes", scheme, SCHEMES)
    check_int("priority", priority, minimum=-(2**31))
    entry = RegisteredBackend(key, experts, tuple(kinds), tuple(schemes), bool(auto_select), int(priority))
    with _lock:
        known = _registry.get(key)
        if known is not None and known != entry:
            raise ValueError(
                f"name: {key!r} is already registered as {known}; unregister_moe_backend it first"
            )
        _registry[key] = entry
    return entry


def unregister_moe_backend(name: str) -> None:
    """Forget a registration (tests and reloading plugins).

    Raises:
      ValueError: unknown or built-in.
    """
    key = normalize_name(name)
    with _lock:
        known = _registry.get(key)
        if known is None or known.builtin:
            raise ValueError(f"name: got {name!r}, want a backend registered from outside")
        del _registry[key]


def _load_entry_points() -> None:
    """Run each entry point of the group once; a broken plugin is logged and does not stop the others."""
    global _entry_points_loaded
    with _lock:
        if _entry_points_loaded:
            return
        _entry_points_loaded = True
    try:
        points = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    except Exception as error:  # a distribution with broken metadata
        logger.warning("isomoe: entry points of %s cannot be read: %s", ENTRY_POINT_GROUP, error)
        return
    for point in points:
        try:
            point.load()()  # a function without arguments that calls register_moe_backend
        except (Exception, SystemExit) as error:  # somebody else's plugin may fail in any way
            logger.warning("isomoe: backend plugin %r (%s) failed: %s", point.name, point.value, error)


def registered_backends() -> dict[str, RegisteredBackend]:
    """All registrations by name: built-in ones first, then plugins by falling priority, then name."""
    _load_entry_points()
    with _lock:
        entries = list(_registry.values())
    entries.sort(key=lambda b: (not b.builtin, 0 if b.builtin else -b.priority, "" if b.builtin else b.name))
    return {b.name: b for b in entries}


def get_backend(name: str) -> RegisteredBackend:
    """One registration.

    Raises:
      ValueError: unknown; the message lists the names.
    """
    known = registered_backends()
    key = normalize_name(name)
    check_choice("backend", key, known)
    return known[key]
