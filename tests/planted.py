# SPDX-License-Identifier: Apache-2.0
"""Executors with one bug each, made from the reference: a checker is only trusted once it has found these.

Each is a class of an executor's shape, so that it can be named on a command line (``isomoe.tests.planted:Class``).
`stage` is where the bug sits, in the names of `golden.STAGE_LABELS`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from isomoe.common import reference
from isomoe.common.executors import ExecutorInfo, MoECall
from isomoe.common.numerics import BF16, quantize_fp8
from isomoe.common.platforms import PlatformKind
from isomoe.common.recipes import Recipe
from isomoe.common.support import ExpertsSupport
from isomoe.common.weights import SCHEMES, LoRAAdapter

_patching = threading.RLock()


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` replaced for a block; one block at a time."""
    with _patching:
        kept = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, kept)


def truncate_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the next bfloat16 towards zero, as dropping the low half of the bits does."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _support() -> ExpertsSupport:
    return ExpertsSupport(
        platforms=tuple(PlatformKind), schemes=SCHEMES, recipes=("w8a8", "w8a16", "bf16"), lora=True
    )


class _Planted:
    """What the planted executors share; each declares its own support."""

    stage = ""

    @classmethod
    def info(cls) -> ExecutorInfo:
        return ExecutorInfo(cls.__name__, "native", "a planted bug", ("w8a8", "w8a16", "bf16"))

    @classmethod
    def recipe(cls, call: MoECall) -> Recipe:
        return call.recipe

    @classmethod
    def run(cls, call: MoECall) -> np.ndarray:
        with np.errstate(invalid="ignore", over="ignore"):
            return cls.faulty(call).astype(BF16)

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        return reference.reference_moe(call)


class Honest(_Planted):
    """No bug: a checker that blames this one is wrong itself."""

    support = _support()


class LoraFromCodes(_Planted):
    """Adapters are fed the FP8 codes without their scale (vllm#42007)."""

    support = _support()
    stage = "delta"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        def codes(x: np.ndarray, recipe: Recipe, group: Any, static: Any) -> np.ndarray:
            return (
                x
                if group is None
                else quantize_fp8(x, "token" if group == "static" else group)[0].astype(np.float32)
            )

        with patched(reference, "_lora_input", codes):
            return reference.reference_moe(call)


class LoraFromDequantised(_Planted):
    """Adapters are fed the quantised rows, with their scale, and the recipe does not say so."""

    support = _support()
    stage = "delta"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        recipe = call.recipe if call.recipe.name != "w8a8" else replace(call.recipe, lora_input="fp8")
        return reference.reference_moe(replace(call, recipe=recipe))


class TruncatedSums(_Planted):
    """The first product's float32 sums are cut, not rounded, to bfloat16."""

    support = _support()
    stage = "gmm1"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        original = reference._Matrix.apply

        def cut(self: Any, *args: Any) -> np.ndarray:
            out = original(self, *args)
            return truncate_bf16(out) if self.codes.shape[0] == call.config.w13_rows else out

        with patched(reference._Matrix, "apply", cut):
            return reference.reference_moe(call)


class TruncatedCombine(_Planted):
    """The final float32 sum is cut, not rounded, to bfloat16."""

    support = _support()
    stage = "combine"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        return (
            truncate_bf16(reference.reference_moe(call))
            if call.config.experts_per_token > 1
            else super().faulty(call)
        )


class ExpertSlowestB(_Planted):
    """An adapter's B is read with the expert as the slowest index where it is the fastest (unsloth-zoo#1269)."""

    support = _support()
    stage = "delta"

    @staticmethod
    def misread(adapter: LoRAAdapter) -> LoRAAdapter:
        experts, rank = adapter.num_experts, adapter.rank

        def again(
            b: np.ndarray,
        ) -> np.ndarray:  # [E, out, r] written as [out, r * E], read back as [out, E * r]
            packed = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
            return np.ascontiguousarray(packed.reshape(b.shape[1], experts, rank).transpose(1, 0, 2))

        b13 = np.stack([again(adapter.b13[:, h]) for h in range(adapter.b13.shape[1])], axis=1)
        return replace(adapter, b13=b13, b2=again(adapter.b2) if len(adapter.b2) == experts else adapter.b2)

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        return reference.reference_moe(replace(call, adapters=tuple(map(cls.misread, call.adapters))))


class TensorWideScale(_Planted):
    """One activation scale for the whole batch where the recipe has one a row or run."""

    support = _support()
    stage = "scale"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        def wide(x: np.ndarray, group: Any, static: Any) -> tuple[np.ndarray, np.ndarray, int]:
            codes, scale = quantize_fp8(x.reshape(1, -1), "token")
            return codes.reshape(x.shape), np.full((len(x), 1), scale[0, 0], np.float32), x.shape[-1]

        with patched(reference, "_quantize", wide):
            return reference.reference_moe(call)


class TruncatedCodes(_Planted):
    """FP8 codes are cut towards zero, not rounded to the nearest."""

    support = _support()
    stage = "code"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        original = reference._quantize

        def cut(x: np.ndarray, group: Any, static: Any) -> tuple[np.ndarray, np.ndarray, int]:
            codes, scales, width = original(x, group, static)
            inv = np.repeat(np.float32(1) / scales, -(-x.shape[-1] // scales.shape[-1]), axis=-1)[
                :, : x.shape[-1]
            ]
            exact = np.clip(np.abs(x * inv), 0, 448)
            bigger = np.abs(codes.astype(np.float32)) > exact
            raw = codes.view(np.uint8).copy()
            raw[bigger] -= 1
            return raw.view(codes.dtype), scales, width

        with patched(reference, "_quantize", cut):
            return reference.reference_moe(call)


class GeluForSilu(_Planted):
    """Another activation than the config's."""

    support = _support()
    stage = "activation"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        original: Callable = reference.apply_activation
        with patched(reference, "apply_activation", lambda name, gate, up: original("gelu", gate, up)):
            return reference.reference_moe(call)


class SwappedGateUp(_Planted):
    """Up rows are read as gate rows (vllm#57405)."""

    support = _support()
    stage = "activation"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        original: Callable = reference.apply_activation
        with patched(reference, "apply_activation", lambda name, gate, up: original(name, up, gate)):
            return reference.reference_moe(call)


class Bf16SecondSums(_Planted):
    """The second product's sums are cut to bfloat16."""

    support = _support()
    stage = "gmm2"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        original = reference._Matrix.apply

        def cut(self: Any, *args: Any) -> np.ndarray:
            out = original(self, *args)
            return out if self.codes.shape[0] == call.config.w13_rows else truncate_bf16(out)

        with patched(reference._Matrix, "apply", cut):
            return reference.reference_moe(call)


class NanWhereSkipped(_Planted):
    """Skipped pairs multiply uninitialised memory by a weight of zero (aiter#4032, sglang#32843)."""

    support = _support()
    stage = "combine"

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        y = reference.reference_moe(call)
        y[(call.topk_ids < 0).any(axis=1)] *= np.float32(np.nan)
        return y


class Raises(_Planted):
    """Fails in the middle of a call."""

    support = _support()

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        raise MemoryError("device memory is exhausted")


class WrongShape(_Planted):
    """Returns the rows of another batch."""

    support = _support()

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        return np.zeros((call.num_tokens + 1, call.config.hidden_dim), np.float32)


class Exposed(_Planted):
    """Exposes its stages, with a bug in the scale of h."""

    support = _support()
    stage = "scale"

    @classmethod
    def stages(cls, call: MoECall) -> dict[str, np.ndarray]:
        found = reference.stages(call)
        return {**found, "h_scale": found["h_scale"] * 2, "combine": found["combine"] * 2}

    @classmethod
    def faulty(cls, call: MoECall) -> np.ndarray:
        return cls.stages(call)["combine"]


PLANTED = (
    LoraFromCodes,
    LoraFromDequantised,
    TruncatedSums,
    TruncatedCombine,
    ExpertSlowestB,
    TensorWideScale,
    TruncatedCodes,
    GeluForSilu,
    SwappedGateUp,
    Bf16SecondSums,
)
