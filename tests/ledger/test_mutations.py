# SPDX-License-Identifier: Apache-2.0
"""The ledger tests its tests: each fault is put back, and the report's test must then fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isomoe.common import (
    adapter_files,
    adapters,
    checkpoints,
    executors,
    numerics,
    quant_methods,
    reference,
    routing,
    safe_files,
    selector,
)
from isomoe.common.numerics import E4M3, quantize_fp8
from isomoe.common.platforms import PlatformKind
from isomoe.tests.ledger import document
from isomoe.tests.ledger.elsewhere import ELSEWHERE
from isomoe.tests.ledger.record import REPORTS

document.load()


def _codes_without_scale(patch: pytest.MonkeyPatch) -> None:
    def codes(x: np.ndarray, recipe: Any, group: Any, static: Any) -> np.ndarray:
        return quantize_fp8(x, "token")[0].astype(np.float32)

    original = reference.ReferenceExecutor.run.__func__  # type: ignore[attr-defined]
    calls = [0]

    def run(cls: type, call: Any) -> np.ndarray:
        # Only the first run of each test's pair is the subject's; the one that is compared with stays right.
        calls[0] += 1
        with pytest.MonkeyPatch.context() as inner:
            if calls[0] % 4 == 1:
                inner.setattr(reference, "_lora_input", codes)
            return original(cls, call)

    patch.setattr(reference.ReferenceExecutor, "run", classmethod(run))


def _base_rows_changed(patch: pytest.MonkeyPatch) -> None:
    original = reference._add_delta

    def every_row(out: np.ndarray, x: np.ndarray, rows: dict[int, np.ndarray], delta: Any) -> None:
        original(out, x, rows, delta)
        out += np.float32(1e-2)

    patch.setattr(reference, "_add_delta", every_row)


def _sign_only(patch: pytest.MonkeyPatch) -> None:
    """Ids are only checked against being negative; a large one wraps around."""
    original = executors.make_call

    def wrapped(x: Any, w: Any, ids: Any, weights: Any, **options: Any) -> Any:
        call = original(x, w, ids, weights, **options)
        return replace(call, topk_ids=np.where(ids < 0, -1, ids % call.config.num_experts).astype(np.int32))

    patch.setattr(executors, "make_call", wrapped)


def _nan_wins_routing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        routing,
        "_top",
        lambda v, k: np.where(
            np.isnan(v).any(-1, keepdims=True), v.shape[-1], np.argsort(-v, axis=-1, kind="stable")[..., :k]
        ),
    )


def _cast_without_clip(patch: pytest.MonkeyPatch) -> None:
    # pytest may have imported the module under another name: the test's own globals are the ones it reads.
    names = REPORTS["ml_dtypes#260"].test.__globals__
    patch.setitem(names, "cast_fp8", lambda x, inv: (x * inv).astype(E4M3))


def _no_epsilon(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(numerics, "fp8_scale", lambda a: a.astype(np.float32) * numerics.INV_E4M3_MAX)


def _swapped_gate_and_up(patch: pytest.MonkeyPatch) -> None:
    original = reference.apply_activation
    patch.setattr(reference, "apply_activation", lambda name, gate, up: original(name, up, gate))


def _old_buffers_after_replace(patch: pytest.MonkeyPatch) -> None:
    """`replace` writes over the slot that running batches read."""

    def in_place(self: Any, adapter_id: int, layers: Any, who: str, old: int | None) -> None:
        slot = old if old is not None else next(i for i, s in enumerate(self._slots) if s.free)
        self._slots[slot].layers = {i: self._converted(a) for i, a in layers.items()}
        self._slots[slot].adapter_id = adapter_id
        self._slot_of[adapter_id] = slot
        self._published()

    patch.setattr(adapters.AdapterPool, "_install", in_place)


def _selector_raises_on_tpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selector, "SELECTING_KINDS", tuple(PlatformKind))


def _unknown_keys_ignored(patch: pytest.MonkeyPatch) -> None:
    original = adapter_files._Reader._sort_in

    def lenient(self: Any, name: str) -> None:
        try:
            original(self, name)
        except safe_files.TensorFileError:
            self.ignored.append(name)

    patch.setattr(adapter_files._Reader, "_sort_in", lenient)


def _scales_skipped_by_name(patch: pytest.MonkeyPatch) -> None:
    original = checkpoints._PerExpert.scale_name

    def lenient(self: Any, expert: int, role: str) -> str | None:
        try:
            return original(self, expert, role)
        except safe_files.TensorFileError:
            return next((n for k, n in self.parts[expert, role].items() if "scale" in k), None)

    patch.setattr(checkpoints._PerExpert, "scale_name", lenient)


def _holes_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quant_methods, "missing_shards", lambda *_: iter(()))
    patch.setattr(quant_methods, "MoEWeights", lambda *a, **k: None)


def _skipped_pairs_kept(patch: pytest.MonkeyPatch) -> None:
    """NaN of skipped pairs is multiplied by a weight of zero instead of left out."""
    original = reference.reference_moe

    def leaky(call: Any, found: Any = None) -> np.ndarray:
        y = original(call, found)
        bad = ~np.isfinite(call.x.astype(np.float32)).all(axis=1) | (
            np.abs(call.x.astype(np.float32)).max(axis=1) > 1e38
        )
        return y + np.float32(np.nan) if bad.any() else y

    patch.setattr(reference, "reference_moe", leaky)


# What a test that finds the fault ends with.
FOUND = (AssertionError, pytest.fail.Exception, NotImplementedError, IndexError, ValueError)

MUTATIONS = {
    "vllm#42007": _codes_without_scale,
    "vllm#42008": _base_rows_changed,
    "vllm#50845": _sign_only,
    "sglang#30079": _nan_wins_routing,
    "ml_dtypes#260": _cast_without_clip,
    "tpu-inference#1880": _no_epsilon,
    "vllm#57405": _swapped_gate_and_up,
    "SkyRL#2129": _old_buffers_after_replace,
    "vllm#32414": _selector_raises_on_tpu,
    "sglang#27381": _unknown_keys_ignored,
    "vllm#31757": _scales_skipped_by_name,
    "Automodel#2682": _holes_pass,
    "flashinfer#3650": _skipped_pairs_kept,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fault_put_back_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    REPORTS[name].run()
    with np.errstate(all="ignore"):
        MUTATIONS[name](monkeypatch)
        with pytest.raises(FOUND):
            REPORTS[name].run()


def test_every_report_is_in_one_place() -> None:
    assert not set(REPORTS) & set(ELSEWHERE)
    assert sum(not name.startswith("gap:") for name in REPORTS) >= 80


def test_the_document_is_up_to_date() -> None:
    if not document.PATH.exists():
        pytest.skip("an installed package carries no docs")
    assert document.PATH.read_text(encoding="utf-8") == document.text(), (
        "run python -m isomoe.tests.ledger.document"
    )
