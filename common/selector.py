# SPDX-License-Identifier: Apache-2.0
"""Which experts class runs a layer on a platform.

One walk answers every question: `select_fp8_moe_backend` and `select_unquantized_moe_backend` return its
choice or raise its error, `explain_selection` returns its report, `resolve_executor` says who runs the layer.
The walk is a function of its arguments, the registry and ``ISOMOE_MOE_BACKEND``; it needs no device and
imports an experts class only where its registration names the platform.

The platform decides first. CUDA and ROCm choose among experts classes and raise where none serves. Every
other platform (TPU, CPU, out-of-tree ones whatever they say of themselves) has no in-tree CUDA-style kernel
to choose: the answer is ``(NONE, None)``, never an exception, and the registry says who executes NONE there.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict, dataclass
from typing import Any

from .backends import (
    Fp8MoeBackend,
    RegisteredBackend,
    UnquantizedMoeBackend,
    normalize_name,
    registered_backends,
)
from .checks import check_choice
from .config import FusedMoEConfig
from .platforms import Platform, PlatformKind
from .priorities import walk_order
from .quant_keys import QuantKey, kBf16, scheme_of
from .support import declared_support

logger = logging.getLogger(__name__)

ENV_BACKEND = "ISOMOE_MOE_BACKEND"
# Families whose answer is an experts class. Everywhere else the answer is NONE.
SELECTING_KINDS = (PlatformKind.CUDA, PlatformKind.ROCM)
# What to call each layer kind in messages, and the enum that answers it.
_FAMILIES: dict[str, tuple[str, type[Fp8MoeBackend] | type[UnquantizedMoeBackend]]] = {
    "fp8": ("FP8 MoE", Fp8MoeBackend),
    "unquantized": ("unquantized MoE", UnquantizedMoeBackend),
}

Backend = Fp8MoeBackend | UnquantizedMoeBackend | RegisteredBackend


@dataclass(frozen=True)
class SelectionRow:
    """One candidate: whether it serves the deployment, and why not (or what stands before it)."""

    candidate: str
    serves: bool
    reason: str


@dataclass(frozen=True)
class SelectionReport:
    """What a selection considered and answered.

    Attributes:
      family: ``"fp8"`` or ``"unquantized"``.
      platform: the target; None where none could be determined.
      config: the layer.
      weight_key, activation_key: its formats.
      requested: the backend asked for, or ``"auto"``.
      requested_by: ``"argument"``, ``"ISOMOE_MOE_BACKEND"`` or ``"default"``.
      rows: every registered candidate, in the order tried.
      backend: the selector's answer; None where it raises `error`.
      executor: the registered name that runs the layer (on a NONE platform, who executes NONE), or None.
      error: what the selector raises, as ``"Type: message"``.
      warning: what it warns of.
    """

    family: str
    platform: Platform | None
    config: FusedMoEConfig | None
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    requested: str
    requested_by: str
    rows: tuple[SelectionRow, ...]
    backend: Backend | None
    executor: str | None
    error: str | None = None
    warning: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the selector answers without an error."""
        return self.error is None

    def table(self) -> str:
        """The candidates as aligned plain text."""
        lines = [("candidate", "serves", "reason")]
        lines += [(r.candidate, "yes" if r.serves else "no", r.reason) for r in self.rows]
        first, second = (max(len(line[i]) for line in lines) for i in (0, 1))
        lines.insert(1, ("-" * first, "-" * second, "-" * len("reason")))
        return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in lines)

    def __str__(self) -> str:
        asked = (
            self.requested if self.requested_by == "default" else f"{self.requested} (by {self.requested_by})"
        )
        head = [
            f"platform:    {self.platform if self.platform is not None else 'unknown'}",
            f"weights:     {self.weight_key}",
            f"activations: {self.activation_key}",
            f"asked for:   {asked}",
        ]
        tail = []
        if self.backend is not None:
            name = self.backend.name
            tail.append(f"answer:      {name}")
            if name == "NONE":
                who = self.executor or "nothing registered here executes this layer"
                tail.append(f"executor:    {who}")
        if self.warning is not None:
            tail.append(f"warning:     {self.warning}")
        if self.error is not None:
            # The table stands above already; of the error, only its own sentence is new.
            tail.append(f"error:       {self.error.splitlines()[0].rstrip(':')}")
        return "\n".join([*head, "", self.table(), "", *tail])

    def as_dict(self) -> dict[str, Any]:
        """Plain values only; `json.dumps` takes it."""
        return {
            "family": self.family,
            "platform": None if self.platform is None else str(self.platform),
            "config": None if self.config is None else asdict(self.config),
            "weight_key": None if self.weight_key is None else str(self.weight_key),
            "activation_key": None if self.activation_key is None else str(self.activation_key),
            "requested": self.requested,
            "requested_by": self.requested_by,
            "candidates": [asdict(row) for row in self.rows],
            "backend": None if self.backend is None else self.backend.name,
            "executor": self.executor,
            "error": self.error,
            "warning": self.warning,
        }

    def as_json(self) -> str:
        """`as_dict` as indented JSON."""
        return json.dumps(self.as_dict(), indent=2)


@dataclass(frozen=True)
class _Walk:
    """A report with the objects that it only names."""

    report: SelectionReport
    experts_cls: type | None
    error: Exception | None
    executor: RegisteredBackend | None


def select_fp8_moe_backend(
    config: FusedMoEConfig,
    weight_key: QuantKey,
    activation_key: QuantKey | None,
    *,
    platform: Platform | None = None,
    moe_backend: str = "auto",
    on_missing: str = "none",
) -> tuple[Fp8MoeBackend | RegisteredBackend, type | None]:
    """Choose the experts class of an FP8 layer.

    Args:
      config: the layer.
      weight_key: the weights' format.
      activation_key: the activations' format; None where they stay unquantised.
      platform: the target; None means this machine.
      moe_backend: ``"auto"`` or a registered name. ``ISOMOE_MOE_BACKEND`` stands in for ``"auto"``.
      on_missing: on platforms whose answer is NONE: ``"none"`` never raises; ``"raise"`` applies the errors
        below there too, where no registered backend serves. For platforms that have registered theirs.

    Returns:
      The backend and its experts class; ``(Fp8MoeBackend.NONE, None)`` where the platform's registered
      backend (see `resolve_executor`) runs the layer.

    Raises (CUDA, ROCm, and ``on_missing="raise"``):
      NotImplementedError: nothing serves; the message is the table of candidates and reasons.
      ValueError: the named backend does not serve, or is unknown.
      TypeError: an argument of the wrong type.
    """
    return _answer(_walk("fp8", config, weight_key, activation_key, platform, moe_backend, on_missing))


def select_unquantized_moe_backend(
    config: FusedMoEConfig,
    *,
    platform: Platform | None = None,
    moe_backend: str = "auto",
    on_missing: str = "none",
) -> tuple[UnquantizedMoeBackend | RegisteredBackend, type | None]:
    """Choose the experts class of a bf16 layer: the same walk, checks and errors as `select_fp8_moe_backend`.

    With adapters nothing is skipped: an explicit backend is honoured and every candidate is checked.
    """
    return _answer(_walk("unquantized", config, kBf16, kBf16, platform, moe_backend, on_missing))


def explain_selection(
    config: FusedMoEConfig,
    weight_key: QuantKey = kBf16,
    activation_key: QuantKey | None = kBf16,
    *,
    platform: Platform | None = None,
    moe_backend: str = "auto",
    on_missing: str = "none",
) -> SelectionReport:
    """The selectors' walk as a report; never raises. Keys of bf16 (the default) ask for an unquantised
    layer."""
    family = "unquantized" if weight_key == kBf16 else "fp8"
    return _walk(family, config, weight_key, activation_key, platform, moe_backend, on_missing).report


def resolve_executor(
    config: FusedMoEConfig,
    weight_key: QuantKey = kBf16,
    activation_key: QuantKey | None = kBf16,
    *,
    platform: Platform | None = None,
    moe_backend: str = "auto",
) -> RegisteredBackend | None:
    """Who runs the layer on the platform: the chosen backend's registration, or whoever executes NONE there.

    None where nothing registered serves. Never raises.
    """
    family = "unquantized" if weight_key == kBf16 else "fp8"
    return _walk(family, config, weight_key, activation_key, platform, moe_backend, "none").executor


def _answer(walk: _Walk) -> tuple[Any, type | None]:
    if walk.error is not None:
        raise walk.error
    report = walk.report
    if report.warning is not None:
        _log_once(logging.WARNING, report.warning)
    _log_once(
        logging.INFO,
        f"isomoe: {_FAMILIES[report.family][0]} backend on {report.platform}: {report.backend.name}"  # type: ignore
        + (f", executed by {report.executor}" if walk.experts_cls is None and report.executor else ""),
    )
    return report.backend, walk.experts_cls


_logged: set[tuple[int, str]] = set()
_logged_lock = threading.Lock()


def _log_once(level: int, message: str) -> None:
    """Log a message once a process: a model constructs one method a layer."""
    with _logged_lock:
        if (level, message) in _logged:
            return
        _logged.add((level, message))
    logger.log(level, "%s", message)


def requested_backend(moe_backend: Any) -> tuple[str, str]:
    """The normalised name asked for (or ``"auto"``), and who asked.

    An explicit argument goes before ``ISOMOE_MOE_BACKEND``, that before ``"auto"``. Enum members and
    registrations stand for their names.
    """
    if isinstance(moe_backend, RegisteredBackend):
        moe_backend = moe_backend.name
    elif isinstance(moe_backend, (Fp8MoeBackend, UnquantizedMoeBackend)):
        moe_backend = moe_backend.value
    name = "auto" if moe_backend is None else normalize_name(moe_backend)
    if name != "auto":
        return name, "argument"
    name = normalize_name(os.environ.get(ENV_BACKEND, ""))
    return (name, ENV_BACKEND) if name not in ("", "auto") else ("auto", "default")


def _check_arguments(family: str, config: Any, weight_key: Any, activation_key: Any) -> Exception | None:
    if not isinstance(config, FusedMoEConfig):
        return TypeError(f"config: got {type(config).__name__}, want FusedMoEConfig")
    if not isinstance(weight_key, QuantKey):
        return TypeError(f"weight_key: got {weight_key!r}, want a QuantKey")
    if activation_key is not None and not isinstance(activation_key, QuantKey):
        return TypeError(f"activation_key: got {activation_key!r}, want a QuantKey or None")
    if family == "fp8" and scheme_of(weight_key) == "bf16":
        return ValueError(
            f"weight_key: got {weight_key}, want an FP8 key; bf16 weights go through "
            "select_unquantized_moe_backend"
        )
    return None


def _why_not(
    entry: RegisteredBackend,
    config: FusedMoEConfig,
    weight_key: QuantKey,
    activation_key: QuantKey | None,
    platform: Platform,
) -> tuple[str | None, type | None]:
    """Why a registration cannot serve (None where it can), and its class. A broken one is a reason, never an
    error."""
    if platform.kind not in entry.platforms:
        return f"runs on {', '.join(k.value for k in entry.platforms)}, not on {platform}", None
    if scheme_of(weight_key) not in entry.schemes:
        return f"does not read weights of {weight_key}", None
    try:
        experts_cls = entry.load()
        return declared_support(experts_cls).why_not(
            config, weight_key, activation_key, platform
        ), experts_cls
    except (Exception, SystemExit) as error:  # somebody else's class may fail in any way, imported or asked
        return f"cannot be used: {type(error).__name__}: {error}".replace("\n", " "), None


def _walk(
    family: str,
    config: Any,
    weight_key: Any,
    activation_key: Any,
    platform: Any,
    moe_backend: Any,
    on_missing: str,
) -> _Walk:
    """Check every candidate, then decide. Errors are part of the result."""
    label, enum_cls = _FAMILIES[family]
    requested, requested_by = requested_backend(moe_backend)
    target = Platform.detect() if platform is None else platform
    error = _check_arguments(family, config, weight_key, activation_key)
    if not isinstance(target, Platform):
        error, target = TypeError(f"platform: got {platform!r}, want a Platform or None"), None
    selecting = target is None or target.kind in SELECTING_KINDS
    try:
        check_choice("on_missing", on_missing, ("none", "raise"))
    except ValueError as bad:
        error, selecting = bad, True

    candidates = walk_order(list(registered_backends().values()))
    reasons: dict[str, str | None] = {}
    classes: dict[str, type | None] = {}
    for entry in candidates:
        if error is not None or target is None:
            reasons[entry.name], classes[entry.name] = "not considered: bad arguments", None
        else:
            reasons[entry.name], classes[entry.name] = _why_not(
                entry, config, weight_key, activation_key, target
            )

    by_name = {entry.name: entry for entry in candidates}
    automatic = next((e for e in candidates if e.auto_select and reasons[e.name] is None), None)
    refusal = None if requested == "auto" else _refusal(label, requested, requested_by, by_name, reasons)
    chosen = by_name[requested] if requested != "auto" and refusal is None else None
    strict = selecting or on_missing == "raise"
    warning = None
    if chosen is None and (refusal is None or not strict):
        chosen = automatic
    if refusal is not None and not strict and error is None:
        warning = f"isomoe: {refusal}; ignored on {target}"
    rows = tuple(
        SelectionRow(e.name, reasons[e.name] is None, reasons[e.name] or _standing(e, chosen))
        for e in candidates
    )

    def report(backend: Backend | None, failure: Exception | None) -> SelectionReport:
        return SelectionReport(
            family=family,
            platform=target,
            config=config if isinstance(config, FusedMoEConfig) else None,
            weight_key=weight_key if isinstance(weight_key, QuantKey) else None,
            activation_key=activation_key if isinstance(activation_key, QuantKey) else None,
            requested=requested,
            requested_by=requested_by,
            rows=rows,
            backend=backend,
            executor=chosen.name if chosen is not None else None,
            error=None if failure is None else f"{type(failure).__name__}: {failure}",
            warning=warning,
        )

    if strict and error is None:
        if refusal is not None:
            error = ValueError(refusal)
        elif chosen is None:
            head = f"No {label} backend supports the deployment configuration on {target}"
            error = NotImplementedError(f"{head}:\n{report(None, None).table()}")
    if error is not None and strict:
        return _Walk(report(None, error), None, error, None)
    if not selecting:
        return _Walk(report(enum_cls.NONE, None), None, None, chosen)
    assert chosen is not None  # strict covers every selecting platform
    backend = (
        enum_cls(chosen.name) if chosen.name in {m.value for m in enum_cls} and chosen.builtin else chosen
    )
    return _Walk(report(backend, None), classes[chosen.name], None, chosen)


def _refusal(
    label: str, name: str, by: str, known: dict[str, RegisteredBackend], reasons: dict[str, str | None]
) -> str | None:
    """Why the backend asked for cannot be had, as a sentence; None where it can."""
    source = "moe_backend" if by == "argument" else by
    if name not in known:
        names = ", ".join(["auto", *sorted(known)])
        return f"{source}={name!r} is not a registered {label} backend; want one of {names}"
    reason = reasons[name]
    if reason is None:
        return None
    asked = f"{label} backend {name!r} (asked for by {source})"
    return f"{asked} does not support the deployment configuration: it {reason}"


def _standing(entry: RegisteredBackend, chosen: RegisteredBackend | None) -> str:
    """What to say of a candidate that serves."""
    if chosen is entry:
        return "chosen"
    if not entry.auto_select:
        return "only when asked for by name"
    return f"after {chosen.name}" if chosen is not None else "not asked for"
