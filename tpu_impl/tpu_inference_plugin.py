# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin for tpu-inference: installing this package beside it is all there is to do.

vLLM runs `register` (entry point group ``vllm.general_plugins``) once in every process. It re-registers the names of
tpu-inference's quantisation configs with subclasses of them, through vLLM's own `register_quantization_config`,
so that their MoE methods

- construct through vLLM's constructors and this package's selector, which never raises on a TPU;
- run this package's expert-parallel kernel where ``USE_MOE_EP_KERNEL=1`` asks for one, with expert LoRA.

``ISOMOE_DISABLE=1`` leaves tpu-inference as it is. Nothing is imported until `register` runs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading

logger = logging.getLogger(__name__)

ENV_DISABLE = "ISOMOE_DISABLE"

_lock = threading.Lock()
_registered: bool | None = None


def register() -> None:
    """Register with vLLM where this process serves through tpu-inference. Idempotent; never raises.

    Logs one line: what was registered, or why nothing was.
    """
    global _registered
    with _lock:
        if _registered is not None:
            return
        _registered = False
        if os.environ.get(ENV_DISABLE, "0") not in ("", "0"):
            logger.info("isomoe: %s is set; tpu-inference is left as it is", ENV_DISABLE)
            return
        if importlib.util.find_spec("tpu_inference") is None or importlib.util.find_spec("vllm") is None:
            logger.debug("isomoe: tpu-inference is not installed; nothing to register")
            return
        try:
            from vllm.platforms import current_platform

            if not current_platform.is_tpu():
                logger.debug("isomoe: vLLM does not run on a TPU here; nothing to register")
                return
            from tpu_inference.logger import init_logger

            from .tpu_inference.configs import register_configs

            names = [*register_configs(), *_register_lora()]
        except Exception as error:  # a plugin must not take the server down
            logger.warning(
                "isomoe: not registered with tpu-inference: %s: %s", type(error).__name__, error, exc_info=True
            )
            return
        _registered = True
        init_logger(__name__).info("isomoe: registered with tpu-inference for %s", ", ".join(names))


def _register_lora() -> tuple[str, ...]:
    """Expert LoRA reaches into more of vLLM than the rest; without it the rest still serves."""
    try:
        from .tpu_inference.lora import register_lora

        register_lora()
    except Exception as error:  # as in `register`
        logger.warning("isomoe: no expert LoRA under tpu-inference: %s: %s", type(error).__name__, error, exc_info=True)
        return ()
    return ("expert LoRA",)


def is_registered() -> bool:
    """Whether `register` has run in this process and took effect."""
    return bool(_registered)
