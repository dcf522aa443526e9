# SPDX-License-Identifier: Apache-2.0
"""FP8 mixture-of-experts with LoRA on CUDA: Triton kernels, their host operator and expert parallelism.

Importing this package touches neither torch nor triton; its names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "AdapterMirror": "adapter_mirror",
    "AdapterSlots": "prepare",
    "PreparedWeights": "prepare",
    "fused_moe": "moe",
    "prepare_adapters": "prepare",
    "prepare_weights": "prepare",
}

__all__ = ["AdapterMirror", "AdapterSlots", "PreparedWeights", "fused_moe", "prepare_adapters", "prepare_weights"]

if TYPE_CHECKING:
    from .adapter_mirror import AdapterMirror
    from .moe import fused_moe
    from .prepare import AdapterSlots, PreparedWeights, prepare_adapters, prepare_weights


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
