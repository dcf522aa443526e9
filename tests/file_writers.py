# SPDX-License-Identifier: Apache-2.0
"""Write small safetensors checkpoints and adapters for tests, good and broken ones alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_NAMES = {
    np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.float64): "F64",
    np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0", np.dtype(np.int64): "I64", np.dtype(np.uint8): "U8",
}


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """The file's bytes: header length, JSON header, tensors back to back."""
    header: dict[str, Any] = {}
    body = b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        header[name] = {
            "dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [len(body), len(body) + len(raw)]
        }
        body += raw
    return with_header(json.dumps(header).encode(), body)


def with_header(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    path.write_bytes(safetensors_bytes(tensors))


def write_checkpoint(root: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], *, shards: int = 1) -> Path:
    """config.json, and one file or `shards` files with their index."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_tensors(root / "model.safetensors", tensors)
        return root
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        write_tensors(root / file, part)
        weight_map.update(dict.fromkeys(part, file))
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


def write_adapter(root: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """adapter_config.json and adapter_model.safetensors."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    write_tensors(root / "adapter_model.safetensors", tensors)
    return root
