# SPDX-License-Identifier: Apache-2.0
"""Damage to checkpoints and adapters, by seed, and the promise that reading them keeps.

A loader given any files either returns or raises one of `ALLOWED`, within a time, and never allocates more than the
budget it was given, a multiple of the bytes that are there, and a constant.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isomoe.common.adapter_files import load_lora_adapter
from isomoe.common.checkpoints import inspect_checkpoint, load_moe_layer
from isomoe.common.config import FusedMoEConfig
from isomoe.common.numerics import BF16
from isomoe.common.weights import quantize_moe_weights
from isomoe.tests.file_writers import safetensors_bytes

ALLOWED = (ValueError, TypeError, OSError)
BUDGET = 4 << 20
SLACK = 8 << 20  # interpreter, parsed JSON, and messages
SECONDS = 5.0
E, H, I, R = 4, 128, 128, 4
BASE = FusedMoEConfig(E, 2, H, I)

Files = dict[str, bytes]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def checkpoint_files(scheme: str = "block") -> Files:
    """A good checkpoint: two shards with an index."""
    rng, at = np.random.default_rng(1), "model.layers.0.mlp.experts"
    weights = quantize_moe_weights(
        rng.standard_normal((E, 2 * I, H)).astype(np.float32),
        rng.standard_normal((E, H, I)).astype(np.float32),
        scheme,
    )
    suffix, tensors = ("weight_scale_inv" if scheme == "block" else "weight_scale"), {}
    cut = 1 if scheme == "block" else I
    for e in range(E):
        for name, codes, scale in (
            ("gate_proj", weights.w13[e, :I], weights.w13_scale[e, :cut]),
            ("up_proj", weights.w13[e, I:], weights.w13_scale[e, cut:]),
            ("down_proj", weights.w2[e], weights.w2_scale[e]),
        ):
            tensors[f"{at}.{e}.{name}.weight"] = codes
            tensors[f"{at}.{e}.{name}.{suffix}"] = scale if scheme == "block" else scale[:, None]
    names = list(tensors)
    files: Files = {}
    index: dict[str, str] = {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        part = {n: tensors[n] for n in names[i::2]}
        files[file] = safetensors_bytes(part)
        index |= dict.fromkeys(part, file)
    quant: dict[str, Any] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    if scheme == "channel":
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
        }
        quant = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["re:.*gate$", "lm_head"],
        }
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": H,
        "moe_intermediate_size": I,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "quantization_config": quant,
    }
    return {**files, "config.json": _json(config), "model.safetensors.index.json": _json({"weight_map": index})}


def adapter_files(fused: bool = False) -> Files:
    """A good adapter, one matrix an expert or PEFT's wrapped parameters."""
    rng, at, tensors = np.random.default_rng(2), "base_model.model.model.layers.0.mlp.experts", {}

    def rand(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(BF16)

    if fused:
        tensors = {
            f"{at}.base_layer.lora_A.weight": rand(E * R, H),
            f"{at}.base_layer.lora_B.weight": rand(2 * I, R * E),
            f"{at}.lora_A.weight": rand(E * R, I),
            f"{at}.lora_B.weight": rand(H, R * E),
        }
    else:
        for e in range(E):
            for name, n_in, n_out in (("gate_proj", H, I), ("up_proj", H, I), ("down_proj", I, H)):
                tensors[f"{at}.{e}.{name}.lora_A.weight"], tensors[f"{at}.{e}.{name}.lora_B.weight"] = (
                    rand(R, n_in),
                    rand(n_out, R),
                )
    config = {
        "peft_type": "LORA",
        "r": R,
        "lora_alpha": 8,
        "rank_pattern": {},
        "alpha_pattern": {"re.*gate": 4},
        "target_modules": ["gate_proj"],
        "base_model_name_or_path": "m",
    }
    return {"adapter_config.json": _json(config), "adapter_model.safetensors": safetensors_bytes(tensors)}


def load_checkpoint(root: Path) -> None:
    inspect_checkpoint(root)
    load_moe_layer(root, 0, budget_bytes=BUDGET)


def load_adapter(root: Path) -> None:
    load_lora_adapter(root, BASE, budget_bytes=BUDGET, max_rank=64)


SOURCES: dict[str, tuple[Callable[[], Files], Callable[[Path], None]]] = {
    "block checkpoint": (lambda: checkpoint_files("block"), load_checkpoint),
    "channel checkpoint": (lambda: checkpoint_files("channel"), load_checkpoint),
    "adapter": (lambda: adapter_files(False), load_adapter),
    "fused adapter": (lambda: adapter_files(True), load_adapter),
}


# -- damage ---------------------------------------------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**64,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "\0",
    "../../etc/passwd",
    "(a+)+$",
    "re:(.*)*x",
    [],
    [[]],
    {},
    {"": {}},
    [128, 128],
    "F8_E4M3",
    "BF16",
    "F32",
    [2**40, 2**40],
    [0],
    [-1, 4],
)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _leaves(inner, (*path, key))
    return found


def _change_json(rng: random.Random, raw: bytes) -> bytes:
    """One value replaced, removed, doubled or nested deep."""
    value = json.loads(raw)
    paths = _leaves(value)
    if not paths:
        return raw
    path = rng.choice(paths)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    how = rng.randrange(5)
    if how == 0 and isinstance(parent, dict):
        del parent[path[-1]]
    elif how == 1 and isinstance(parent, dict):
        parent[str(path[-1]) + rng.choice([".", "x", ".weight", "\u202e", ".0"])] = parent.pop(path[-1])
    elif how == 2:
        return b'{"a":' * 3000 + b"1" + b"}" * 3000
    elif how == 3:
        text = json.dumps(value)
        return (text[:-1] + "," + text[1:]).encode()
    else:
        parent[path[-1]] = rng.choice(_ODD)
    return json.dumps(value).encode()


def _change_header(rng: random.Random, raw: bytes) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = _change_json(rng, raw[8 : 8 + length])
    claimed = (
        len(header) if rng.random() < 0.8 else rng.choice([0, 1, len(header) - 1, 2**20, 2**31, 2**40, 2**63])
    )
    return claimed.to_bytes(8, "little") + header + raw[8 + length :]


def damage(rng: random.Random, files: Files) -> Files:
    """The files with one to three faults."""
    files = dict(files)
    for _ in range(rng.randint(1, 3)):
        if not files:
            break
        name = rng.choice(sorted(files))
        raw = files[name]
        how = rng.randrange(8)
        if how == 0:
            del files[name]
        elif how == 1:
            files[name] = raw[: rng.randrange(len(raw) + 1)]
        elif how == 2:
            files[name] = raw + bytes(rng.randrange(1, 64))
        elif how == 3 and raw:
            changed = bytearray(raw)
            for _ in range(rng.randint(1, 8)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            files[name] = bytes(changed)
        elif how == 4:
            other = rng.choice(sorted(files))
            files[name], files[other] = files[other], raw
        else:
            try:
                files[name] = _change_json(rng, raw) if name.endswith(".json") else _change_header(rng, raw)
            except (ValueError, RecursionError):
                files[name] = raw[::-1]  # damaged already
    return files


@dataclass(frozen=True)
class Outcome:
    """What became of one damaged folder. `problem` is empty where the promise was kept."""

    source: str
    seed: int
    loaded: bool
    error: str
    seconds: float
    peak: int
    problem: str


def attempt(source: str, seed: int, root: Path) -> Outcome:
    """Damage `source` by `seed` in the empty folder `root`, and read it."""
    make, load = SOURCES[source]
    rng = random.Random(f"{source} {seed}")
    files = damage(rng, make())
    for name, raw in files.items():
        (root / name).write_bytes(raw)
    limit = BUDGET + SLACK + 8 * sum(map(len, files.values()))
    loaded, error, problem = False, "", ""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        load(root)
        loaded = True
    except ALLOWED as caught:
        error = f"{type(caught).__name__}: {caught}"
        if len(error) > 4000 or not error.isprintable():
            problem = "the message is long or unprintable"
    except Exception as caught:
        error = problem = f"{type(caught).__name__}: {caught}"
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if peak > limit:
        problem = problem or f"allocated {peak} bytes, limit {limit}"
    if seconds > SECONDS:
        problem = problem or f"took {seconds:.1f} s"
    return Outcome(source, seed, loaded, error, seconds, peak, problem)
