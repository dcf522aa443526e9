# SPDX-License-Identifier: Apache-2.0
"""An adapter's `adapter_config.json`: which settings change the math, and each module's scaling.

PEFT's rules: scaling is ``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA; `rank_pattern` and `alpha_pattern` map a
module's name, or a regular expression that matches the end of one, to its own r and alpha, the first match winning.
A setting that would make the result something other than ``W + scaling * B @ A`` is refused by name.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .safe_files import TensorFileError, clean, match_pattern, read_json, shown

MAX_PATTERNS = 256
_LITERAL = re.compile(r"[\w.\-]+")

# Setting: (values that leave the math alone, why any other is refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "peft_type": ((None, "LORA"), "is not LoRA"),
    "use_dora": ((None, False), "DoRA renormalises the merged weight, which a low-rank delta cannot express"),
    "bias": ((None, "none"), "trained biases are no low-rank delta"),
    "lora_bias": ((None, False), "a bias on lora_B is no low-rank delta"),
    "fan_in_fan_out": ((None, False), "its matrices are stored transposed"),
    "layer_replication": ((None,), "the adapter is for a model with repeated layers"),
    "use_qalora": ((None, False), "QALoRA pools the input first"),
    "alora_invocation_tokens": ((None,), "activated LoRA applies to part of a sequence only"),
    "arrow_config": ((None,), "Arrow mixes adapters by its own routing"),
    "kasa_config": ((None,), "KaSA puts a diagonal between A and B"),
    "velora_config": ((None,), "VeLoRA is not W + B @ A"),
}
# These initialisations move part of the base weight into the adapter; the adapter fits the residual model only.
_RESIDUAL_INITS = ("pissa", "olora", "corda", "lora_ga", "loftq")


class _Patterns:
    """`rank_pattern` or `alpha_pattern`: first match wins, plain names by lookup and the rest as expressions."""

    def __init__(self, key: str, value: object) -> None:
        if value is None:
            value = {}
        if not isinstance(value, dict) or not all(_is_number(v) for v in value.values()):
            raise TensorFileError(f"adapter_config.json: {key}: got {shown(value)}, want names to numbers")
        self.literal: dict[str, tuple[int, float]] = {}
        self.expressions: list[tuple[int, str, float]] = []
        for order, (name, number) in enumerate(value.items()):
            if _LITERAL.fullmatch(name):
                self.literal[name] = (order, number)
            else:
                self.expressions.append((order, name, number))
        if len(self.expressions) > MAX_PATTERNS:
            raise TensorFileError(
                f"adapter_config.json: {key}: got {len(self.expressions)} expressions, want at most {MAX_PATTERNS}"
            )

    def get(self, module: str, default: float) -> float:
        parts = module.split(".")
        tails = (".".join(parts[i:]) for i in range(len(parts)))
        found = [self.literal[t] for t in tails if t in self.literal]
        for order, expression, number in self.expressions:
            if match_pattern(rf"(.*\.)?({expression})$", module):
                found.append((order, number))
                break
        return min(found)[1] if found else default


def _is_number(value: object) -> bool:
    # Compared, not converted: an integer of JSON may be too long for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def as_scaling(label: str, value: float) -> np.float32:
    """A factor on B as float32.

    Raises:
      TensorFileError: float32 has only infinity or zero for it.
    """
    with np.errstate(over="ignore", under="ignore"):
        scaling = np.float32(value)
    if not np.isfinite(scaling) or (scaling == 0) != (value == 0):
        raise TensorFileError(f"{label}: got a scaling of {value:g}, want one that float32 holds")
    return scaling


@dataclass(frozen=True)
class AdapterSettings:
    """A checked adapter_config.json.

    Attributes:
      base_model: `base_model_name_or_path`, for messages.
      peft_version: the writer, where it says so.
      modules_to_save: whole modules that the adapter replaces; none of them holds routed experts.
    """

    base_model: str
    peft_version: str
    modules_to_save: tuple[str, ...]
    _r: int
    _alpha: float
    _rslora: bool
    _ranks: _Patterns
    _alphas: _Patterns

    def scaling(self, module: str, rank: int, where: str) -> np.float32:
        """The factor on ``B @ A`` of a module.

        Args:
          module: its name in the base model; a fused parameter's own name comes last.
          rank: of the stored matrices, which the config must confirm.
          where: the tensor, for messages.

        Raises:
          TensorFileError: the config says another rank, so that alpha / r has no meaning here; or no float32 holds it.
        """
        r = self._ranks.get(module, self._r)
        if r != rank:
            raise TensorFileError(
                f"{where}: got rank {rank}, adapter_config.json says {r:g} (r or rank_pattern); pass scaling= if the "
                "file is right"
            )
        alpha = self._alphas.get(module, self._alpha)
        return as_scaling(where, alpha / math.sqrt(rank) if self._rslora else alpha / rank)


def read_adapter_config(root: Path) -> AdapterSettings:
    """Read and check ``adapter_config.json``.

    Raises:
      TensorFileError: unreadable, or a setting that changes the math, with the reason.
    """
    config: Mapping[str, Any] = read_json(root, "adapter_config.json")
    for key, (allowed, reason) in _REFUSED.items():
        value = config.get(key)
        if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
            raise TensorFileError(f"adapter_config.json: {key}: got {shown(value)}: refused, {reason}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_RESIDUAL_INITS):
        raise TensorFileError(
            f"adapter_config.json: init_lora_weights: got {clean(init)}: refused, it changes the base weights too; "
            "save the adapter converted to plain LoRA"
        )
    saved = config.get("modules_to_save") or ()
    if not isinstance(saved, (list, tuple)) or not all(isinstance(m, str) for m in saved):
        raise TensorFileError(f"adapter_config.json: modules_to_save: got {shown(saved)}, want a list of names")
    for module in saved:
        if "experts" in module.split("."):
            raise TensorFileError(
                f"adapter_config.json: modules_to_save: got {clean(module)}: refused, whole experts are no LoRA delta"
            )
    r, alpha = config.get("r"), config.get("lora_alpha", config.get("alpha"))
    if type(r) is not int or not 0 < r < 2**31:
        raise TensorFileError(f"adapter_config.json: r: got {shown(r)}, want a positive integer")
    if not _is_number(alpha):
        raise TensorFileError(f"adapter_config.json: lora_alpha: got {shown(alpha)}, want a finite number")
    rslora = config.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise TensorFileError(f"adapter_config.json: use_rslora: got {shown(rslora)}, want a bool")
    return AdapterSettings(
        base_model=clean(config.get("base_model_name_or_path") or ""),
        peft_version=clean(config.get("peft_version") or ""),
        modules_to_save=tuple(saved),
        _r=r,
        _alpha=float(alpha),  # type: ignore[arg-type]
        _rslora=rslora,
        _ranks=_Patterns("rank_pattern", config.get("rank_pattern")),
        _alphas=_Patterns("alpha_pattern", config.get("alpha_pattern")),
    )
