# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for NVIDIA GPUs: installing this package beside vLLM is all there is to do.

vLLM runs `register` (entry point group ``vllm.general_plugins``) once in every process. FP8 MoE layers (vLLM's `fp8`,
`compressed-tensors` and `modelopt` quantisations, of any model) then ask this package's selector. A layer that it
serves runs on this package's experts, adapters included; any other keeps vLLM's own choice, and one log line says why.

``ISOMOE_VLLM=1`` turns the takeover on, ``0`` off; unset it is on where whole engines were measured (compute capability
9.0). ``ISOMOE_DISABLE=1`` leaves vLLM wholly as it is. On a TPU, and on out-of-tree platforms, vLLM's FP8 constructors
get the answer NONE where its own selector would raise; nothing else changes there. Nothing of vLLM is imported until
`register` runs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading

logger = logging.getLogger(__name__)

ENV_DISABLE = "ISOMOE_DISABLE"
ENV_TAKEOVER = "ISOMOE_VLLM"
# Where an unset ISOMOE_VLLM means 1: on these devices engines were held against vLLM's.
MEASURED_ON = ((9, 0),)

_lock = threading.Lock()
_registered: str | None = None


def takeover_wanted(capability: tuple[int, int] | None) -> bool:
    """Whether CUDA layers go to this package on a device of that compute capability (None: unknown)."""
    value = os.environ.get(ENV_TAKEOVER, "").strip()
    return value != "0" if value else capability in MEASURED_ON


def register() -> None:
    """Register with vLLM where this process serves on a platform that concerns this package. Idempotent; never raises.

    Logs one line: what was registered, or why nothing was.
    """
    global _registered
    with _lock:
        if _registered is not None:
            return
        _registered = ""
        if os.environ.get(ENV_DISABLE, "0") not in ("", "0"):
            logger.info("isomoe: %s is set; vLLM is left as it is", ENV_DISABLE)
            return
        if importlib.util.find_spec("vllm") is None:
            logger.debug("isomoe: vLLM is not installed; nothing to register")
            return
        try:
            _registered = _register()
        except Exception as error:  # a plugin must not take the server down
            logger.warning("isomoe: not registered with vLLM: %s: %s", type(error).__name__, error, exc_info=True)


def _register() -> str:
    """What was registered: "takeover", "guard" or nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        found = current_platform.get_device_capability()
        if not takeover_wanted(None if found is None else (found.major, found.minor)):
            logger.info("isomoe: set %s=1 to run vLLM's FP8 MoE layers on this package's kernels", ENV_TAKEOVER)
            return ""
        role = "takeover"
    elif current_platform.is_tpu() or current_platform.is_out_of_tree():
        role = "guard"
    else:
        return ""
    from .vllm.selection import install
    from .vllm.selection import logger as vllm_logger

    names = install()
    what = "FP8 MoE layers run on this package where it serves them" if role == "takeover" else "backend NONE"
    vllm_logger.info("isomoe: %s (%s)", what, ", ".join(names))
    return role


def is_registered() -> bool:
    """Whether `register` has run in this process and took effect."""
    return bool(_registered)
