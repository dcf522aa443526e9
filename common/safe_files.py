# SPDX-License-Identifier: Apache-2.0
"""Reading files that others wrote: safetensors and JSON, nothing that can run code, nothing outside the folder.

Headers are parsed here rather than by the safetensors library because its numpy reader has no FP8 dtypes and its
errors do not name the tensor. The rules are the format's own, checked before anything is allocated: an 8-byte
little-endian header length, a JSON header, and tensors that tile the rest of the file exactly, without gap or
overlap. Tensors are read one at a time with plain reads, not mapped, so a file that shrinks meanwhile gives an error
and not a bus fault.

Names out of files are untrusted: they are escaped and cut short before they enter a message.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from .checks import check_int
from .numerics import BF16, E4M3, E8M0

# The safetensors library's own bound; a 480B FP8 shard set has headers of a few megabytes in all.
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 100_000_000
MAX_DIMS = 8
MAX_NAME = 160

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

_NUMPY_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BF16,
    "F8_E4M3": E4M3, "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": E8M0,
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_), "C64": np.dtype(np.complex64),
}
# Formats that a file may hold beside what is read here; only their size matters.
_OTHER_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS = {**{k: 8 * v.itemsize for k, v in _NUMPY_DTYPES.items()}, **_OTHER_BITS}


# A pattern in a configuration file is a regular expression of someone else's; these bounds keep matching it cheap.
MAX_PATTERN = 512
MAX_QUANTIFIERS = 4


class TensorFileError(ValueError):
    """A checkpoint or adapter file that cannot be trusted or understood; the message names file and tensor."""


def clean(text: object) -> str:
    """A name fit for a message: printable ASCII, at most `MAX_NAME` characters."""
    name = str(text)
    if len(name) <= MAX_NAME and name.isascii() and name.isprintable():
        return name
    shown = name[: MAX_NAME + 1].encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in shown)
    return shown if len(shown) <= MAX_NAME else shown[: MAX_NAME - 3] + "..."


def some(names: Iterable[object], limit: int = 3) -> str:
    """The first few names, escaped, and how many more there are."""
    listed = list(names)
    text = ", ".join(clean(n) for n in listed[:limit])
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"


def shown(value: object) -> str:
    """A value out of a file, as Python writes it (a string keeps its quotes), fit for a message."""
    return clean(repr(value))


def existing_folder(label: str, value: object, want: str = "a folder") -> Path:
    """The folder that the argument `label` names.

    Raises:
      TypeError: no path.
      TensorFileError: nothing there, or no folder; the empty string too, which would be the current one.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{label}: got {type(value).__name__}, want a path")
    path = Path(value)
    try:
        found = os.fspath(value) != "" and path.is_dir()
    except OSError:  # such as a name that is too long
        found = False
    if not found:
        raise TensorFileError(f"{label}: got {clean(value) or repr('')}, want {want}")
    return path


def match_pattern(pattern: str, text: str) -> bool:
    """Whether the regular expression `pattern` matches `text` from its beginning, as ``re.match`` does.

    Raises:
      TensorFileError: not a regular expression, or one that could take very long.
    """
    if len(pattern) > MAX_PATTERN or sum(map(pattern.count, "*+{")) > MAX_QUANTIFIERS or re.search(r"\)[*+{]", pattern):
        raise TensorFileError(
            f"pattern {clean(pattern)}: want at most {MAX_PATTERN} characters, {MAX_QUANTIFIERS} quantifiers and "
            "no repeated group"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that may change its meaning one day
            return re.match(pattern, text) is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise TensorFileError(f"pattern {clean(pattern)}: {error}") from None


@dataclass
class Budget:
    """Bytes that may still be allocated; None is unlimited."""

    limit: int | None
    used: int = 0

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_int("budget_bytes", self.limit, minimum=0)

    def take(self, nbytes: int, what: str) -> None:
        """Count `nbytes`, or raise before anything is allocated.

        Raises:
          TensorFileError: the budget would be exceeded.
        """
        if self.limit is not None and self.used + nbytes > self.limit:
            raise TensorFileError(
                f"budget_bytes: got {self.limit}, of which {self.used} are taken; {what} needs {nbytes} more"
            )
        self.used += nbytes


def resolve_inside(root: Path, name: str) -> Path:
    """The regular file `name` inside `root`.

    A link may not leave the folder, with one exception: the hub cache keeps ``snapshots/<revision>`` folders of links
    into the ``blobs`` folder two levels up, and that folder counts as inside.

    Raises:
      TensorFileError: an absolute or climbing name, a link that leaves, or nothing readable there.
    """
    label = clean(name)
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise TensorFileError(f"{label}: got an unusable file name, want a plain relative path")
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise TensorFileError(f"{label}: got a path that leaves its folder, want one inside {clean(root)}")
    try:
        base = root.resolve(strict=True)
        path = (base / name).resolve(strict=True)
        mode = path.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a name that the file system cannot encode
        raise TensorFileError(f"{label}: cannot be opened in {clean(root)}: {type(error).__name__}") from None
    allowed = [base]
    if base.parent.name == "snapshots":
        allowed.append(base.parent.parent / "blobs")
    if not any(path.is_relative_to(a) for a in allowed):
        raise TensorFileError(f"{label}: got a link that leaves {clean(root)}, want a file inside it")
    if not stat.S_ISREG(mode):
        raise TensorFileError(f"{label}: got something that is no regular file")
    return path


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise TensorFileError(f"duplicate name {clean(key)}")
        out[key] = value
    return out


def _parse_json(raw: bytes, label: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except TensorFileError as error:
        raise TensorFileError(f"{label}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{label}: got invalid JSON ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise TensorFileError(f"{label}: got JSON of type {type(value).__name__}, want an object")
    return value


def read_json(root: Path, name: str) -> dict[str, Any]:
    """A JSON object from `name` inside `root`; duplicate keys are refused.

    Raises:
      TensorFileError: not there, too large, or not a JSON object.
    """
    path = resolve_inside(root, name)
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise TensorFileError(f"{clean(name)}: got {size} bytes, want at most {MAX_JSON_BYTES}")
    with path.open("rb") as f:
        # One byte more than there was: a read asks for its buffer at once, so the bound itself would be 100 MB.
        raw = f.read(size + 1)
    if len(raw) > size:
        raise TensorFileError(f"{clean(name)}: grew past {size} bytes while being read")
    return _parse_json(raw, clean(name))


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor. `start` counts from the beginning of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(label: str, name: str, entry: object, data_start: int) -> TensorInfo:
    where = f"{label}: tensor {clean(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise TensorFileError(f"{where}: got an unreadable header entry, want dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise TensorFileError(f"{where}: got dtype {clean(dtype)}, want one of {', '.join(sorted(_BITS))}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        raise TensorFileError(f"{where}: got shape {clean(shape)}, want at most {MAX_DIMS} non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise TensorFileError(f"{where}: got data_offsets {clean(offsets)}, want two non-negative integers")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise TensorFileError(
            f"{where}: got offsets {begin} to {end} for {dtype} {clean(shape)}, which takes {bits / 8:g} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, end - begin)


def parse_header(f: BinaryIO, size: int, label: str) -> dict[str, TensorInfo]:
    """Read and check a safetensors header.

    Args:
      f: the file, at its beginning.
      size: its length in bytes.
      label: its name for messages.

    Raises:
      TensorFileError: naming the file, and the tensor where one is at fault.
    """
    prefix = f.read(8)
    if len(prefix) < 8:
        raise TensorFileError(f"{label}: got {len(prefix)} bytes, want a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise TensorFileError(f"{label}: got a header of {length} bytes, want at most {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise TensorFileError(f"{label}: got a header of {length} bytes in a file of {size}: truncated")
    raw = f.read(length)
    if len(raw) < length or not raw.startswith(b"{"):
        raise TensorFileError(f"{label}: got no JSON header, want a safetensors file")
    header = _parse_json(raw, label)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError(f"{label}: got __metadata__ that is no map of strings")
    infos = {name: _entry(label, name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for info in sorted(infos.values(), key=lambda i: (i.start, i.nbytes)):
        end = info.start + info.nbytes
        if end > size:
            raise TensorFileError(
                f"{label}: tensor {clean(info.name)}: ends at byte {end} of a file of {size}: truncated or corrupt"
            )
        if info.start != position:
            kind = "overlaps its neighbour" if info.start < position else "leaves a gap before it"
            raise TensorFileError(f"{label}: tensor {clean(info.name)}: {kind} (byte {info.start}, want {position})")
        position = end
    if position != size:
        raise TensorFileError(f"{label}: got {size - position} bytes after the last tensor, want none")
    return infos


class TensorFile:
    """One open safetensors file; tensors are read on demand."""

    def __init__(self, root: Path, name: str) -> None:
        path = resolve_inside(root, name)
        if path.suffix in PICKLE_SUFFIXES or Path(name).suffix in PICKLE_SUFFIXES:
            raise pickle_refused(name)
        self.label = clean(name)
        self._file = path.open("rb", buffering=0)
        try:
            self.infos = parse_header(self._file, os.fstat(self._file.fileno()).st_size, self.label)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read_into(self, info: TensorInfo, out: np.ndarray, first: int = 0) -> None:
        """Fill `out` (C-contiguous, of the tensor's dtype) with the tensor, from row `first` of axis 0 on."""
        if not out.flags.c_contiguous:
            raise ValueError("out: got a strided array, want a C-contiguous one")
        row = info.nbytes // info.shape[0] if info.shape and info.shape[0] else 0
        view = memoryview(out.reshape(-1).view(np.uint8).data)
        offset, done = first * row, 0
        if offset + len(view) > info.nbytes:
            raise TensorFileError(f"{self.label}: tensor {clean(info.name)}: read past its end")
        self._file.seek(info.start + offset)
        while done < len(view):
            got = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise TensorFileError(f"{self.label}: tensor {clean(info.name)}: the file ends inside it")
            done += got


def pickle_refused(name: object) -> TensorFileError:
    """The error for a file in torch's pickle format."""
    return TensorFileError(
        f"{clean(name)}: a pickle file can run any code when it is opened and is not read; "
        "convert it to safetensors first"
    )


@dataclass
class TensorStore:
    """All tensors of a folder: one safetensors file, or shards with an index. Use as a context manager.

    Without an index every ``*.safetensors`` file of the folder counts; shards are opened when first needed where an
    index says which tensor is where.

    Attributes:
      root: the folder.
      stem: file name without suffix (``"model"``, ``"adapter_model"``).
      shard_of: tensor name to file name.
    """

    root: Path
    stem: str = "model"
    shard_of: dict[str, str] = field(default_factory=dict)
    _open: dict[str, TensorFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        if not self.root.is_dir():
            raise TensorFileError(f"{clean(self.root)}: got no folder, want one with {self.stem}.safetensors")
        index = f"{self.stem}.safetensors.index.json"
        if (self.root / index).exists():
            self._read_index(index)
            return
        files = [f"{self.stem}.safetensors"]
        if not (self.root / files[0]).exists():
            files = sorted(p.name for p in self.root.glob(f"{self.stem}*.safetensors"))
        if not files:
            pickles = sorted(p.name for p in self.root.iterdir() if p.suffix in PICKLE_SUFFIXES)
            if pickles:
                raise pickle_refused(pickles[0])
            raise TensorFileError(f"{clean(self.root)}: got no {self.stem}.safetensors and no {index}")
        try:
            for name in files:
                self._add_names(name)
        except BaseException:
            self.close()
            raise

    def _read_index(self, index: str) -> None:
        weight_map = read_json(self.root, index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise TensorFileError(f"{index}: got no weight_map, want tensor names to file names")
        for name in sorted(set(weight_map.values())):
            if Path(name).suffix in PICKLE_SUFFIXES:
                raise pickle_refused(name)
            resolve_inside(self.root, name)
        self.shard_of = dict(weight_map)

    def _add_names(self, file_name: str) -> None:
        for tensor in self.file(file_name).infos:
            if tensor in self.shard_of:
                raise TensorFileError(
                    f"{clean(file_name)}: tensor {clean(tensor)}: also in {clean(self.shard_of[tensor])}"
                )
            self.shard_of[tensor] = file_name

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    def file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.root, name)
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self.shard_of

    def names(self) -> Iterable[str]:
        return self.shard_of.keys()

    def info(self, name: str) -> TensorInfo:
        """The tensor's header entry.

        Raises:
          TensorFileError: no such tensor, or not in the shard that the index names.
        """
        if name not in self.shard_of:
            raise TensorFileError(f"{clean(self.root.name)}: tensor {clean(name)}: missing")
        shard = self.file(self.shard_of[name])
        if name not in shard.infos:
            raise TensorFileError(f"{shard.label}: tensor {clean(name)}: the index names this file, which lacks it")
        return shard.infos[name]

    def where(self, name: str) -> str:
        """``file: tensor name`` for messages."""
        return f"{clean(self.shard_of.get(name, self.root.name))}: tensor {clean(name)}"

    def unlisted(self, prefix: str) -> list[str]:
        """Tensors under `prefix` in the opened shards that the index puts elsewhere or nowhere."""
        return sorted(
            tensor
            for name, opened in self._open.items()
            for tensor in opened.infos
            if tensor.startswith(prefix) and self.shard_of.get(tensor) != name
        )

    def read_into(self, name: str, out: np.ndarray, first: int = 0) -> None:
        """Fill `out`, which must have the tensor's dtype, from row `first` of its first axis on."""
        self.file(self.shard_of[name]).read_into(self.info(name), out, first)

    def read(self, name: str) -> np.ndarray:
        """The whole tensor as a new array.

        Raises:
          TensorFileError: a dtype that numpy and ml_dtypes do not hold, or a short file.
        """
        info = self.info(name)
        out = np.empty(info.shape, numpy_dtype(info, self.where(name)))
        self.read_into(name, out)
        return out


def numpy_dtype(info: TensorInfo, where: str) -> np.dtype:
    """The tensor's numpy dtype; raises TensorFileError where there is none."""
    if info.dtype not in _NUMPY_DTYPES:
        raise TensorFileError(f"{where}: got dtype {info.dtype}, which is not read here")
    return _NUMPY_DTYPES[info.dtype]
