# SPDX-License-Identifier: Apache-2.0
"""Measured choices of kernels: one JSON table a device, written by `isomoe tune`, read at run time.

A table beside this file whose name is the device's (``NVIDIA_H200.json``) is used on that device and no other; where
there is none, or it knows nothing of a layer, the analytic rules in `hopper.regime` and `grouped_gemm` decide.
ISOMOE_TUNED_DIR names another folder to look in first. A table that is damaged, or was measured on another device, is
an error that names the file and the field: a choice is never made from it.

Adapters are no part of a key: a batch must keep its kernels, hence its base rows' bits, whether adapters are loaded or
not. Each entry belongs to one `LayerKey`; its buckets rise in `max_tokens`, and one serves the batches up to it and
above the previous one's.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import importlib.resources
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..grouped_gemm import GemmConfig, Tiles
from ..hopper.regime import REGIMES, Regime, candidates, choose
from ..prepare import PreparedWeights

FORMAT = 1
KERNELS = ("hopper", "portable")


class TableError(ValueError):
    """A table that must not be used; the message names the file and the field."""


@dataclass(frozen=True)
class LayerKey:
    """What an entry was measured for.

    Attributes:
      experts: experts held here; `global_experts` are routed over.
      topk, hidden, inter: K, H and I.
      scheme: "block", "channel" (per-tensor scales too) or "bf16".
      recipe: "w8a8", "w8a16" or "bf16".
    """

    experts: int
    global_experts: int
    topk: int
    hidden: int
    inter: int
    scheme: str
    recipe: str

    @classmethod
    def of(cls, weights: PreparedWeights, topk: int, global_experts: int, recipe: str) -> LayerKey:
        scheme = "bf16" if not weights.is_fp8 else "block" if weights.is_block else "channel"
        return cls(
            weights.num_experts, global_experts, topk, weights.hidden_dim, weights.intermediate_size, scheme, recipe
        )

    def regimes(self, tokens: int, lora: bool = False) -> tuple[Regime, ...]:
        """Every Hopper regime that can serve this layer at a batch size."""
        return candidates(tokens, self.topk, w8a16=self.recipe == "w8a16", block=self.scheme == "block", lora=lora)


Choice = Regime | Tiles  # of the Hopper kernels, of the portable ones


@dataclass(frozen=True)
class Bucket:
    """The measured choice up to `max_tokens`; `us` by candidate is what it rests on."""

    max_tokens: int
    choice: Choice
    us: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """One device's measurements."""

    device: str
    versions: Mapping[str, str]
    entries: Mapping[tuple[LayerKey, str], tuple[Bucket, ...]]

    def find(self, key: LayerKey, kernels: str, tokens: int) -> Choice | None:
        """The measured choice, or None where nothing was measured for this layer at this size or above."""
        buckets = self.entries.get((key, kernels), ())
        at = bisect.bisect_left([b.max_tokens for b in buckets], tokens)
        return buckets[at].choice if at < len(buckets) else None

    def as_json(self) -> str:
        """The file's text; `parse` reads it back."""
        entries = [
            {
                **dataclasses.asdict(key), "kernels": kernels,
                "buckets": [
                    {"max_tokens": b.max_tokens, "choice": _choice_json(b.choice), "us": dict(b.us)} for b in buckets
                ],
            }
            for (key, kernels), buckets in self.entries.items()
        ]  # fmt: skip
        return json.dumps(
            {"format": FORMAT, "device": self.device, "versions": dict(self.versions), "entries": entries}, indent=1
        )


def _choice_json(choice: Choice) -> str | dict[str, Any]:
    return str(choice) if isinstance(choice, Regime) else dataclasses.asdict(choice)


class _Reader:
    """Checked access to a parsed file; every refusal names the file and the field."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, field: str, got: object, want: str) -> TableError:
        return TableError(f"{self.path}: {field}: got {got!r}, want {want}")

    def fields(self, value: object, field: str, names: tuple[str, ...]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(field, value, "an object")
        if set(value) != set(names):
            odd = sorted(set(value) ^ set(names))
            raise self.fail(field, odd, f"exactly the fields {', '.join(names)}")
        return value

    def count(self, value: object, field: str, minimum: int = 1) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(field, value, f"a whole number from {minimum}")
        return value

    def one_of(self, value: object, field: str, names: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in names:
            raise self.fail(field, value, f"one of {', '.join(names)}")
        return value

    def times(self, value: object, field: str) -> dict[str, float]:
        if not isinstance(value, dict) or not value:
            raise self.fail(field, value, "microseconds by candidate")
        for name, us in value.items():
            if isinstance(us, bool) or not isinstance(us, (int, float)) or not 0 < us < float("inf"):
                raise self.fail(f"{field}.{name}", us, "microseconds above 0")
        return value

    def config(self, value: object, field: str) -> GemmConfig:
        names = tuple(f.name for f in dataclasses.fields(GemmConfig))
        found = self.fields(value, field, names)
        return GemmConfig(**{n: self.count(found[n], f"{field}.{n}") for n in names})

    def choice(self, value: object, field: str, kernels: str, key: LayerKey, max_tokens: int) -> Choice:
        if kernels == "hopper":
            served = tuple(str(r) for r in key.regimes(max_tokens))
            return REGIMES[self.one_of(value, field, served)]
        found = self.fields(value, field, tuple(f.name for f in dataclasses.fields(Tiles)))
        tiles = Tiles(
            self.count(found["block_m"], f"{field}.block_m"), self.config(found["w13"], f"{field}.w13"),
            self.config(found["w2"], f"{field}.w2"),
        )  # fmt: skip
        reason = tiles.why_not()
        if reason is not None:
            raise self.fail(field, value, reason)
        return tiles

    def entry(self, value: object, field: str) -> tuple[tuple[LayerKey, str], tuple[Bucket, ...]]:
        shape = tuple(f.name for f in dataclasses.fields(LayerKey))
        found = self.fields(value, field, (*shape, "kernels", "buckets"))
        dims = ("experts", "global_experts", "topk", "hidden", "inter")
        sizes = {n: self.count(found[n], f"{field}.{n}") for n in dims}
        key = LayerKey(
            **sizes, scheme=self.one_of(found["scheme"], f"{field}.scheme", ("block", "channel", "bf16")),
            recipe=self.one_of(found["recipe"], f"{field}.recipe", ("w8a8", "w8a16", "bf16")),
        )  # fmt: skip
        kernels = self.one_of(found["kernels"], f"{field}.kernels", KERNELS)
        if not isinstance(found["buckets"], list) or not found["buckets"]:
            raise self.fail(f"{field}.buckets", found["buckets"], "a list of buckets")
        buckets: list[Bucket] = []
        for i, raw in enumerate(found["buckets"]):
            at = f"{field}.buckets[{i}]"
            bucket = self.fields(raw, at, ("max_tokens", "choice", "us"))
            tokens = self.count(bucket["max_tokens"], f"{at}.max_tokens", buckets[-1].max_tokens + 1 if buckets else 1)
            choice = self.choice(bucket["choice"], f"{at}.choice", kernels, key, tokens)
            buckets.append(Bucket(tokens, choice, self.times(bucket["us"], f"{at}.us")))
        return (key, kernels), tuple(buckets)


def parse(text: str, path: str, device: str) -> Table:
    """A table from its text.

    Args:
      path: what errors call it.
      device: the device it must have been measured on.

    Raises:
      TableError: not JSON, a field that is missing, unknown or impossible, or another device's table.
    """
    read = _Reader(path)
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise TableError(f"{path}: not JSON: {error}") from error
    found = read.fields(raw, "the table", ("format", "device", "versions", "entries"))
    if found["format"] != FORMAT:
        raise read.fail("format", found["format"], str(FORMAT))
    if found["device"] != device:
        raise read.fail("device", found["device"], f"{device!r}, the device here")
    versions = found["versions"]
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise read.fail("versions", versions, "versions by name")
    if not isinstance(found["entries"], list):
        raise read.fail("entries", found["entries"], "a list")
    entries: dict[tuple[LayerKey, str], tuple[Bucket, ...]] = {}
    for i, value in enumerate(found["entries"]):
        key, buckets = read.entry(value, f"entries[{i}]")
        if key in entries:
            raise read.fail(f"entries[{i}]", "a layer that came before", "each layer once")
        entries[key] = buckets
    return Table(device, versions, entries)


def file_name(device: str) -> str:
    """The name of a device's table: ``NVIDIA H200`` has ``NVIDIA_H200.json``."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", device) + ".json"


@functools.lru_cache
def _load(device: str, folder: str | None) -> Table | None:
    name = file_name(device)
    if folder is not None:
        if not Path(folder).is_dir():
            raise TableError(f"ISOMOE_TUNED_DIR: got {folder!r}, want a folder")
        path = Path(folder) / name
        if path.is_file():
            return parse(path.read_text(), str(path), device)
    shipped = importlib.resources.files(__name__).joinpath(name)
    return parse(shipped.read_text(), str(shipped), device) if shipped.is_file() else None


def load(device: str) -> Table | None:
    """The table for a device by its name, or None.

    Raises:
      TableError: there is one, and it must not be used; or ISOMOE_TUNED_DIR names no folder.
    """
    return _load(device, os.environ.get("ISOMOE_TUNED_DIR"))


@functools.lru_cache
def device_name(device: torch.device) -> str:
    """The name that a device's table goes by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


_forced: Choice | None = None


@contextlib.contextmanager
def forced(choice: Choice) -> Iterator[None]:
    """Take this choice for every batch it can serve, whatever a table says: how candidates are measured and tested."""
    global _forced
    before, _forced = _forced, choice
    try:
        yield
    finally:
        _forced = before


def _find(device: torch.device, key: LayerKey, kernels: str, tokens: int) -> Choice | None:
    if _forced is not None:
        return _forced
    table = load(device_name(device))
    return None if table is None else table.find(key, kernels, tokens)


def regime_for(device: torch.device, key: LayerKey, tokens: int, lora: bool = False) -> Regime:
    """The Hopper regime of a batch: the measured one where there is one, else the rule's."""
    found = _find(device, key, "hopper", tokens)
    # A bucket's choice serves smaller batches too, save that a batch of one has chains of its own.
    if isinstance(found, Regime) and found in key.regimes(tokens, lora):
        return found
    return choose(
        tokens, key.topk, key.global_experts, w8a16=key.recipe == "w8a16", block=key.scheme == "block",
        lora=lora,
    )  # fmt: skip


def tiles_for(device: torch.device, key: LayerKey, tokens: int) -> Tiles | None:
    """The portable kernels' measured tiles of a batch, or None where the rules decide."""
    found = _find(device, key, "portable", tokens)
    return found if isinstance(found, Tiles) else None
