# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel FP8 MoE for TPU in JAX and Pallas. Nothing here imports jax until it is used."""

from __future__ import annotations

from typing import Any

_LAZY = {
    "AdapterMirror": "adapter_mirror",
    "fused_moe_ep": "ep_moe",
    "EPBuild": "ep_moe",
    "PallasEPExecutor": "executor",
    "aot_compile": "aot",
    "AotReport": "aot",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
