# SPDX-License-Identifier: Apache-2.0
"""Load one MoE layer of a Hugging Face checkpoint, or say what a checkpoint holds, without reading the rest.

Two layouts are read. Per expert, quantised or not:

    {prefix}layers.{L}.{block}.experts.{e}.{gate_proj|up_proj|down_proj}.weight        (also w1, w3, w2)
        + .weight_scale_inv | .weight_scale, + .input_scale for static activations

and fused, unquantised (transformers v5, gpt-oss, Qwen3-VL):

    {prefix}layers.{L}.{block}.experts.gate_up_proj  [E, 2I, H] or [E, H, 2I]   (+ gate_up_proj_bias [E, 2I])
    {prefix}layers.{L}.{block}.experts.down_proj     [E, H, I]  or [E, I, H]    (+ down_proj_bias [E, H])

What the names and `config.json` promise is held against every tensor: a quantised weight must find exactly one scale
of the right shape and type, nothing may be left over, nothing may be non-finite, and every error names file and
tensor. Weights keep their bits. Buffers start as NaN, so that a hole could not pass for a weight.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .checkpoint_config import (
    BF16_MODULE,
    Family,
    ModuleQuant,
    QuantConfig,
    decoder_layers,
    family_of,
    moe_config,
    read_quant_config,
    text_config,
)
from .checks import check_choice
from .config import FusedMoEConfig
from .numerics import BF16, E4M3, E8M0, all_finite, cdiv, decode_e8m0
from .quant_keys import QuantKey
from .safe_files import (
    Budget,
    TensorFileError,
    TensorInfo,
    TensorStore,
    clean,
    existing_folder,
    numpy_dtype,
    read_json,
    some,
)
from .weights import MoEWeights

# Where the language model's layers live; multi-token-prediction heads (mtp.*) and towers are other models.
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.",
            "model.text_model.", "thinker.model.")
BLOCKS = ("mlp", "block_sparse_moe", "mixer", "feed_forward", "ffn", "moe")
_LAYER = re.compile(r"(?P<prefix>.*?)layers\.(?P<layer>\d{1,6})\.(?P<block>\w+)\.(?P<rest>.+)", re.S)
_EXPERT = re.compile(r"(?P<expert>\d{1,6})\.(?P<leaf>\w+)\.(?P<kind>\w+)")

ROLES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_SCALES = ("weight_scale_inv", "weight_scale")
_KINDS = ("weight", *_SCALES, "input_scale", "bias")
_FUSED = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")
_SCALE_DTYPES = ("F32", "BF16", "F16")
_BF16_DTYPES = ("BF16",)


@dataclass(frozen=True)
class RouterWeights:
    """One layer's router.

    Attributes:
      weight: ``[E, H]``, bfloat16 or float32 as stored.
      bias: float32 ``[E]`` added to the logits (gpt-oss), or None.
      correction_bias: float32 ``[E]`` added to the scores for the choice only (DeepSeek-V3), or None.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    correction_bias: np.ndarray | None = None


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint holds, from its names, headers and config.json alone.

    Attributes:
      model_type, quant_method: as config.json gives them.
      config: the MoE layer.
      scheme: of the experts of the first MoE layer.
      layout: ``"per_expert"`` or ``"fused"``.
      weight_key, activation_key: what the selector takes.
      num_hidden_layers: all decoder layers.
      moe_layers: those with routed experts; prediction layers that come after the last one included.
      has_shared_experts: layers also carry shared experts, which are not loaded here.
      bytes_per_expert, bytes_per_layer: stored bytes of routed experts in the first MoE layer, scales included.
    """

    model_type: str
    quant_method: str | None
    config: FusedMoEConfig
    scheme: str
    layout: str
    weight_key: QuantKey
    activation_key: QuantKey
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    has_shared_experts: bool
    bytes_per_expert: int
    bytes_per_layer: int


@dataclass(frozen=True)
class _Layer:
    """The routed experts of one layer: names only."""

    prefix: str  # up to and with "experts."
    block: str  # up to and with the block's name, without a dot
    tensors: tuple[str, ...]

    @property
    def fused(self) -> bool:
        return not any(_EXPERT.fullmatch(t.removeprefix(self.prefix)) for t in self.tensors)


class _Checkpoint:
    """A folder opened for reading; close it."""

    def __init__(self, directory: str | Path) -> None:
        self.root = existing_folder("checkpoint_dir", directory)
        self.raw = text_config(read_json(self.root, "config.json"))
        self.family: Family = family_of(self.raw)
        self.quant: QuantConfig = read_quant_config(self.root, self.raw)
        self.store = TensorStore(self.root)
        self.layers: dict[int, _Layer] = {}
        self.has_shared_experts = False
        try:
            self._find_layers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.store.close()

    def _find_layers(self) -> None:
        found: dict[int, dict[str, list[str]]] = {}
        for name in self.store.names():
            match = _LAYER.fullmatch(name)
            if match is None or match["prefix"] not in PREFIXES or match["block"] not in BLOCKS:
                continue
            rest = match["rest"]
            if rest.startswith(("shared_expert.", "shared_experts.")):
                self.has_shared_experts = True
            elif rest.startswith("experts."):
                block = name[: -len(rest) - 1]
                found.setdefault(int(match["layer"]), {}).setdefault(block, []).append(name)
        for layer, blocks in sorted(found.items()):
            if len(blocks) > 1:
                raise TensorFileError(f"layer {layer}: got experts under {some(sorted(blocks))}, want one place")
            block, names = next(iter(blocks.items()))
            self.layers[layer] = _Layer(f"{block}.experts.", block, tuple(sorted(names)))

    def layer(self, index: int) -> _Layer:
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            raise TypeError(f"layer_index: got {index!r}, want an int")
        if not self.layers:
            raise TensorFileError(f"{clean(self.root)}: got no tensor of a routed expert, want an MoE checkpoint")
        if int(index) not in self.layers:
            raise TensorFileError(
                f"layer_index: got {index}, which has no routed experts; layers that do: {_ranges(self.layers)}"
            )
        return self.layers[int(index)]

    def config_of(self, layer: _Layer) -> FusedMoEConfig:
        leaves = {t.removeprefix(layer.prefix) for t in layer.tensors}
        if layer.fused:
            gated = any(leaf.startswith("gate_up_proj") for leaf in leaves)
            has_bias = any(leaf.endswith("_bias") for leaf in leaves)
        else:
            matches = [m for m in map(_EXPERT.fullmatch, leaves) if m]
            gated = any(ROLES.get(m["leaf"]) == "gate" for m in matches)
            has_bias = any(m["kind"] == "bias" for m in matches)
        return moe_config(self.raw, gated=gated, has_bias=has_bias)


def _ranges(layers: Sequence[int] | dict[int, _Layer]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for i in sorted(layers):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _experts_argument(experts: Sequence[int] | None, num_experts: int) -> list[int]:
    if experts is None:
        return list(range(num_experts))
    if not isinstance(experts, (Sequence, np.ndarray)) or isinstance(experts, str):
        raise TypeError(f"experts: got {type(experts).__name__}, want a sequence of expert ids")
    for expert in experts:
        if isinstance(expert, bool) or not isinstance(expert, (int, np.integer)):
            raise TypeError(f"experts: got {expert!r}, want ints")
    chosen = [int(e) for e in experts]
    if not chosen or len(set(chosen)) != len(chosen) or min(chosen) < 0 or max(chosen) >= num_experts:
        raise ValueError(f"experts: got {some(chosen, 8) or 'none'}, want distinct ids in [0, {num_experts})")
    return chosen


def _nan_buffer(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype == E4M3:
        return np.full(shape, 0x7F, np.uint8).view(E4M3)
    return np.full(shape, np.nan, dtype)


def _check_finite(where: str, value: np.ndarray) -> None:
    if not all_finite(value):
        bad = int((~np.isfinite(value.astype(np.float32))).sum())
        raise TensorFileError(f"{where}: got {bad} non-finite values, want all finite")


class _PerExpert:
    """Reads a layer stored one matrix an expert and projection."""

    def __init__(self, ckpt: _Checkpoint, layer: _Layer, config: FusedMoEConfig) -> None:
        self.store, self.prefix, self.config = ckpt.store, layer.prefix, config
        self.roles = ("gate", "up", "down") if config.is_act_and_mul else ("up", "down")
        self.parts: dict[tuple[int, str], dict[str, str]] = {}
        for name in layer.tensors:
            self._sort_in(name)
        for expert in range(config.num_experts):
            for role in self.roles:
                if "weight" not in self.parts.get((expert, role), {}):
                    leaf = next((k for k, v in ROLES.items() if v == role and self._uses(k, layer)), role)
                    raise TensorFileError(f"{ckpt.root.name}: tensor {self.prefix}{expert}.{leaf}.weight: missing")
        self.quant = self._one_quant(ckpt.quant)
        first = self.parts[0, self.roles[0]]
        scales = [first[k] for k in _SCALES if k in first] if self.quant.scheme == "block" else []
        if any(self.store.info(name).dtype == "F8_E8M0" for name in scales):
            self.quant = replace(self.quant, ue8m0=True)

    def _uses(self, leaf: str, layer: _Layer) -> bool:
        return any(f".{leaf}." in t.removeprefix(layer.prefix) for t in layer.tensors)

    def _sort_in(self, name: str) -> None:
        match = _EXPERT.fullmatch(name.removeprefix(self.prefix))
        where = self.store.where(name)
        role = ROLES.get(match["leaf"]) if match else None
        if match is None or role is None or match["kind"] not in _KINDS:
            raise TensorFileError(f"{where}: not a tensor of an expert that is read here")
        expert = int(match["expert"])
        if expert >= self.config.num_experts or role not in self.roles:
            raise TensorFileError(f"{where}: extra: the config has {self.config.num_experts} experts with {self.roles}")
        kinds = self.parts.setdefault((expert, role), {})
        if match["kind"] in kinds:
            raise TensorFileError(f"{where}: doubled by {clean(kinds[match['kind']])}")
        kinds[match["kind"]] = name

    def _module(self, expert: int, role: str) -> str:
        return self.parts[expert, role]["weight"].removesuffix(".weight")

    def _one_quant(self, quant: QuantConfig) -> ModuleQuant:
        """The layer's storage; all its matrices must agree."""
        first = quant.of(self._module(0, self.roles[0]))
        for expert, role in self.parts:
            if quant.of(self._module(expert, role)) != first:
                raise TensorFileError(
                    f"{self.store.where(self.parts[expert, role]['weight'])}: config.json gives it another "
                    f"quantisation than {clean(self._module(0, self.roles[0]))}; want one for all experts of a layer"
                )
        return first

    def shape(self, role: str) -> tuple[int, int]:
        inter, hidden = self.config.intermediate_size, self.config.hidden_dim
        return (hidden, inter) if role == "down" else (inter, hidden)

    def scale_shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        """The shapes in which a matrix's scale may be stored; the first is the one it has in memory."""
        rows, cols = self.shape(role)
        return {
            "block": ((cdiv(rows, 128), cdiv(cols, 128)),),
            "channel": ((rows,), (rows, 1)),
            "tensor": ((), (1,), (1, 1)),
        }[self.quant.scheme]

    def scale_name(self, expert: int, role: str) -> str | None:
        """The one scale of a weight; None for bf16. Doubled, missing and stray scales are errors."""
        kinds = self.parts[expert, role]
        found = [kinds[k] for k in _SCALES if k in kinds]
        if self.quant == BF16_MODULE:
            found += [kinds["input_scale"]] if "input_scale" in kinds else []
            if found:
                raise TensorFileError(f"{self.store.where(found[0])}: a scale of a weight that is not quantised")
            return None
        if not found:
            raise TensorFileError(f"{self.store.where(kinds['weight'])}: quantised, but no {' or '.join(_SCALES)}")
        if len(found) > 1:
            where = self.store.where(found[1])
            raise TensorFileError(f"{where}: doubled by {clean(found[0])}; want one scale a weight")
        if ("input_scale" in kinds) != (self.quant.activation == "static"):
            state = "missing" if self.quant.activation == "static" else "extra"
            raise TensorFileError(
                f"{self.store.where(kinds['weight'])}: its input_scale is {state} with activations that are "
                f"{self.quant.activation or 'not quantised'}"
            )
        return found[0]

    def _checked(self, name: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> TensorInfo:
        info = self.store.info(name)
        where = self.store.where(name)
        if info.dtype not in dtypes:
            raise TensorFileError(
                f"{where}: got dtype {info.dtype}, want {' or '.join(dtypes)} for weights of scheme "
                f"{self.quant.scheme!r}"
            )
        if info.shape not in shapes:
            want = " or ".join(str(list(s)) for s in shapes)
            raise TensorFileError(f"{where}: got shape {list(info.shape)}, want {want}")
        return info

    def check(self, experts: Sequence[int]) -> int:
        """Hold every tensor of `experts` against the config, and the names of all; returns their stored bytes."""
        wanted = set(experts)
        total = 0
        for (expert, role), kinds in self.parts.items():
            if "weight" not in kinds:
                where = self.store.where(next(iter(kinds.values())))
                raise TensorFileError(f"{where}: of a weight that does not exist")
            if expert in wanted:
                dtypes = _BF16_DTYPES if self.quant == BF16_MODULE else ("F8_E4M3",)
                total += self._checked(kinds["weight"], dtypes, (self.shape(role),)).nbytes
            scale = self.scale_name(expert, role)
            if ("bias" in kinds) != self.config.has_bias:
                raise TensorFileError(f"{self.store.where(kinds['weight'])}: lacks the bias that other experts have")
            if expert not in wanted:
                continue
            if scale is not None:
                # A power-of-two scale may come as a byte of exponent; only blocks use it.
                allowed = (*_SCALE_DTYPES, "F8_E8M0") if self.quant.scheme == "block" else _SCALE_DTYPES
                total += self._checked(scale, allowed, self.scale_shapes(role)).numel * 4
            if "bias" in kinds:
                total += self._checked(kinds["bias"], _SCALE_DTYPES, (self.shape(role)[:1],)).numel * 4
        return total

    def _scale(self, name: str) -> np.ndarray:
        """A scale as positive finite float32."""
        raw = self.store.read(name)
        where = self.store.where(name)
        value = decode_e8m0(raw).astype(np.float32) if raw.dtype == E8M0 else raw.astype(np.float32)
        _check_finite(where, value)
        if not (value > 0).all():
            raise TensorFileError(f"{where}: got values <= 0, want positive scales")
        if self.quant.ue8m0 and (value.view(np.uint32) & 0x7FFFFF).any():
            raise TensorFileError(f"{where}: got scales that are no powers of two, want them with scale_fmt 'ue8m0'")
        return value

    def _input_scale(self, roles: tuple[str, ...]) -> np.ndarray | None:
        """The layer's static activation scale: the largest of all experts, whichever of them are loaded."""
        if self.quant.activation != "static":
            return None
        largest = np.float32(0)
        for expert in range(self.config.num_experts):
            for role in roles:
                name = self.parts[expert, role]["input_scale"]
                self._checked(name, _SCALE_DTYPES, ((), (1,)))
                largest = max(largest, np.float32(self._scale(name).max()))
        return np.asarray(largest, np.float32)

    def load(self, experts: Sequence[int]) -> MoEWeights:
        """The weights of `experts`, in that order; call `check` first."""
        config, scheme = self.config, self.quant.scheme
        inter, hidden = config.intermediate_size, config.hidden_dim
        w13_roles = self.roles[:-1]
        count, halves = len(experts), len(w13_roles)
        dtype = BF16 if scheme == "bf16" else E4M3
        w13 = _nan_buffer((count, halves * inter, hidden), dtype)
        w2 = _nan_buffer((count, hidden, inter), dtype)
        scales: dict[str, np.ndarray] = {}
        if scheme != "bf16":
            tail13, tail2 = self.scale_shapes(w13_roles[0])[0], self.scale_shapes("down")[0]
            scales["w13_scale"] = _nan_buffer((count, halves, *tail13), np.dtype(np.float32))
            scales["w2_scale"] = _nan_buffer((count, *tail2), np.dtype(np.float32))
        biases = (
            {"w13_bias": _nan_buffer((count, halves * inter), np.dtype(np.float32)),
             "w2_bias": _nan_buffer((count, hidden), np.dtype(np.float32))} if config.has_bias else {}
        )
        for i, expert in enumerate(experts):
            for h, role in enumerate(self.roles):
                kinds = self.parts[expert, role]
                rows = slice(h * inter, (h + 1) * inter)
                out = w2[i] if role == "down" else w13[i, rows]
                self.store.read_into(kinds["weight"], out)
                _check_finite(self.store.where(kinds["weight"]), out)
                name = self.scale_name(expert, role)
                if name is not None:
                    target = scales["w2_scale"][i : i + 1] if role == "down" else scales["w13_scale"][i, h : h + 1]
                    target[...] = self._scale(name).reshape(target.shape)
                if "bias" in kinds:
                    bias = self.store.read(kinds["bias"])
                    _check_finite(self.store.where(kinds["bias"]), bias)
                    (biases["w2_bias"][i] if role == "down" else biases["w13_bias"][i, rows])[...] = bias
        if scheme in ("block", "channel"):
            shape = scales["w13_scale"].shape
            scales["w13_scale"] = scales["w13_scale"].reshape(count, halves * shape[2], *shape[3:])
        return MoEWeights(
            scheme, w13, w2, **scales, **biases,
            w13_input_scale=self._input_scale(w13_roles), w2_input_scale=self._input_scale(("down",)),
        )


class _Fused:
    """Reads a layer stored as two 3-D tensors, unquantised."""

    def __init__(
        self, ckpt: _Checkpoint, layer: _Layer, config: FusedMoEConfig, fused_layout: str, gate_up: str
    ) -> None:
        self.store, self.prefix, self.config = ckpt.store, layer.prefix, config
        self.quant = BF16_MODULE
        self.names = {t.removeprefix(layer.prefix): t for t in layer.tensors}
        self.first = "gate_up_proj" if config.is_act_and_mul else "up_proj"
        wanted = [self.first, "down_proj"]
        if config.has_bias:
            wanted += [f"{self.first}_bias", "down_proj_bias"]
        for leaf, name in self.names.items():
            if leaf in wanted:
                continue
            if leaf.rpartition("_")[2] in ("blocks", "scales", "inv", "scale") or leaf not in _FUSED:
                raise TensorFileError(
                    f"{self.store.where(name)}: not read here: fused experts are read in bf16 only, want one quantised "
                    "matrix an expert and projection"
                )
            raise TensorFileError(f"{self.store.where(name)}: extra")
        for leaf in wanted:
            if leaf not in self.names:
                raise TensorFileError(f"{ckpt.root.name}: tensor {layer.prefix}{leaf}: missing")
        modules = (layer.prefix[:-1], f"{layer.prefix}0.{self.first}")
        if all(ckpt.quant.of(module) != BF16_MODULE for module in modules):
            raise TensorFileError(
                f"{self.store.where(self.names[self.first])}: fused, but config.json says quant_method "
                f"{ckpt.quant.method!r}; fused experts are read in bf16 only"
            )
        self.interleaved = ckpt.family.interleaved if gate_up == "auto" else gate_up == "interleaved"
        self.transposed = self._orientation(ckpt.family, fused_layout)

    def _orientation(self, family: Family, fused_layout: str) -> bool:
        """Whether both tensors are stored ``[E, in, out]``; their shapes decide, or the family where they cannot."""
        config = self.config
        experts, rows, hidden, inter = config.num_experts, config.w13_rows, config.hidden_dim, config.intermediate_size
        fits = []
        for transposed in (False, True):
            want = {self.first: (experts, rows, hidden), "down_proj": (experts, hidden, inter)}
            if transposed:
                want = {k: (e, b, a) for k, (e, a, b) in want.items()}
            wrong = [k for k in want if self.store.info(self.names[k]).shape != want[k]]
            if not wrong:
                fits.append(transposed)
            elif not transposed:
                first_wrong, first_want = wrong[0], want[wrong[0]]
        asked = {"auto": None, "out_in": False, "in_out": True}[fused_layout]
        if not fits:
            e, a, b = first_want
            got = list(self.store.info(self.names[first_wrong]).shape)
            raise TensorFileError(
                f"{self.store.where(self.names[first_wrong])}: got shape {got}, want {[e, a, b]} or {[e, b, a]}"
            )
        if asked is not None:
            if asked not in fits:
                raise TensorFileError(f"fused_layout: got {fused_layout!r}, which the shapes of {self.prefix} rule out")
            return asked
        if len(fits) == 1:
            return fits[0]
        if family.transposed is None:
            raise TensorFileError(
                f"{self.store.where(self.names[self.first])}: shape [{experts}, {rows}, {hidden}] reads both ways; "
                "pass fused_layout='out_in' or 'in_out'"
            )
        return family.transposed

    def check(self, experts: Sequence[int]) -> int:
        """Hold dtypes and bias shapes against the config; returns the bytes that `load` will allocate."""
        config = self.config
        shapes = {f"{self.first}_bias": (config.num_experts, config.w13_rows),
                  "down_proj_bias": (config.num_experts, config.hidden_dim)}
        total = 0
        for leaf, name in self.names.items():
            info = self.store.info(name)
            allowed = _SCALE_DTYPES if leaf in shapes else _BF16_DTYPES
            if info.dtype not in allowed:
                raise TensorFileError(f"{self.store.where(name)}: got dtype {info.dtype}, want {' or '.join(allowed)}")
            if leaf in shapes and info.shape != shapes[leaf]:
                raise TensorFileError(
                    f"{self.store.where(name)}: got shape {list(info.shape)}, want {list(shapes[leaf])}"
                )
            total += info.numel // config.num_experts * len(experts) * (4 if leaf in shapes else 2)
        return total

    def _rows(self, value: np.ndarray) -> np.ndarray:
        """Gate rows, then up rows."""
        if not (self.interleaved and self.config.is_act_and_mul):
            return value
        return np.concatenate([value[0::2], value[1::2]])

    def _read(self, leaf: str, expert: int) -> np.ndarray:
        name = self.names[leaf]
        info = self.store.info(name)
        slab = np.empty(info.shape[1:], numpy_dtype(info, self.store.where(name)))
        self.store.read_into(name, slab, expert)
        _check_finite(f"{self.store.where(name)} (expert {expert})", slab)
        return slab

    def load(self, experts: Sequence[int]) -> MoEWeights:
        """The weights of `experts`, in that order; call `check` first."""
        config = self.config
        w13 = _nan_buffer((len(experts), config.w13_rows, config.hidden_dim), BF16)
        w2 = _nan_buffer((len(experts), config.hidden_dim, config.intermediate_size), BF16)
        biases: dict[str, list[np.ndarray]] = {"w13_bias": [], "w2_bias": []}
        for i, expert in enumerate(experts):
            first, down = self._read(self.first, expert), self._read("down_proj", expert)
            w13[i] = self._rows(first.T if self.transposed else first)
            w2[i] = down.T if self.transposed else down
            if config.has_bias:
                biases["w13_bias"].append(self._rows(self._read(f"{self.first}_bias", expert)).astype(np.float32))
                biases["w2_bias"].append(self._read("down_proj_bias", expert).astype(np.float32))
        stacked = {k: np.stack(v) for k, v in biases.items() if v}
        return MoEWeights("bf16", w13, w2, **stacked)


def _reader(ckpt: _Checkpoint, layer: _Layer, fused_layout: str = "auto", gate_up: str = "auto") -> _PerExpert | _Fused:
    config = ckpt.config_of(layer)
    if layer.fused:
        return _Fused(ckpt, layer, config, fused_layout, gate_up)
    return _PerExpert(ckpt, layer, config)


def load_moe_layer(
    checkpoint_dir: str | Path,
    layer_index: int,
    *,
    experts: Sequence[int] | None = None,
    budget_bytes: int | None = None,
    fused_layout: str = "auto",
    gate_up: str = "auto",
) -> tuple[FusedMoEConfig, MoEWeights]:
    """One layer's routed experts, as stored.

    Args:
      checkpoint_dir: a folder with config.json and safetensors files (shards with their index, or one file).
      layer_index: the decoder layer.
      experts: global ids to load, in the wanted order (a rank's share); None for all.
      budget_bytes: refuse before allocating more than this for weights, scales and biases.
      fused_layout: fused experts are ``"out_in"`` (``[E, out, in]``) or ``"in_out"``; ``"auto"`` goes by shape, and
        by model type where the shape reads both ways.
      gate_up: rows of fused gate_up_proj are ``"concat"`` or ``"interleaved"``; ``"auto"`` goes by model type.

    Returns:
      The layer's config (always with the global number of experts) and its weights (`experts` of them).

    Raises:
      TensorFileError: a ValueError that names the file and tensor at fault.
      TypeError, ValueError: a bad argument.
    """
    check_choice("fused_layout", fused_layout, ("auto", "out_in", "in_out"))
    check_choice("gate_up", gate_up, ("auto", "concat", "interleaved"))
    budget = Budget(budget_bytes)
    with _Checkpoint(checkpoint_dir) as ckpt:
        layer = ckpt.layer(layer_index)
        reader = _reader(ckpt, layer, fused_layout, gate_up)
        chosen = _experts_argument(experts, reader.config.num_experts)
        nbytes = reader.check(chosen)
        stray = ckpt.store.unlisted(layer.prefix)
        if stray:
            raise TensorFileError(f"tensor {clean(stray[0])}: in a shard for which the index does not list it")
        budget.take(nbytes, f"layer {layer_index} with {len(chosen)} experts")
        weights = reader.load(chosen)
        return reader.config, weights


def inspect_checkpoint(checkpoint_dir: str | Path) -> CheckpointInfo:
    """What the checkpoint holds, reading config.json, the index and headers only.

    Raises:
      TensorFileError: naming what cannot be understood.
    """
    with _Checkpoint(checkpoint_dir) as ckpt:
        first = ckpt.layer(min(ckpt.layers, default=0))
        reader = _reader(ckpt, first)
        experts = range(reader.config.num_experts)
        total = reader.check(experts)
        weight_key, activation_key = reader.quant.keys()
        return CheckpointInfo(
            model_type=str(ckpt.raw.get("model_type", "")),
            quant_method=ckpt.quant.method,
            config=reader.config,
            scheme=reader.quant.scheme,
            layout="fused" if first.fused else "per_expert",
            weight_key=weight_key,
            activation_key=activation_key,
            num_hidden_layers=decoder_layers(ckpt.raw) or max(ckpt.layers) + 1,
            moe_layers=tuple(ckpt.layers),
            has_shared_experts=ckpt.has_shared_experts,
            bytes_per_expert=total // reader.config.num_experts,
            bytes_per_layer=total,
        )


def load_router(checkpoint_dir: str | Path, layer_index: int) -> RouterWeights:
    """One layer's router weight and its biases.

    Raises:
      TensorFileError: missing, doubled, quantised, wrongly shaped or non-finite; the message names the tensor.
    """
    with _Checkpoint(checkpoint_dir) as ckpt:
        layer = ckpt.layer(layer_index)
        config = ckpt.config_of(layer)
        width = ckpt.raw.get("hidden_size")
        width = width if type(width) is int else config.hidden_dim

        def find(*leaves: str) -> str | None:
            found = [f"{layer.block}.{leaf}" for leaf in leaves if f"{layer.block}.{leaf}" in ckpt.store]
            if len(found) > 1:
                raise TensorFileError(f"{ckpt.store.where(found[1])}: doubled by {clean(found[0])}")
            return found[0] if found else None

        def read(name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> np.ndarray:
            info, where = ckpt.store.info(name), ckpt.store.where(name)
            if info.dtype not in dtypes:
                raise TensorFileError(f"{where}: got dtype {info.dtype}, want {' or '.join(dtypes)}")
            if info.shape != shape:
                raise TensorFileError(f"{where}: got shape {list(info.shape)}, want {list(shape)}")
            value = ckpt.store.read(name)
            _check_finite(where, value)
            return value

        def vector(*leaves: str) -> np.ndarray | None:
            name = find(*leaves)
            return None if name is None else read(name, (config.num_experts,), _SCALE_DTYPES).astype(np.float32)

        weight = find("gate.weight", "router.weight")
        if weight is None:
            raise TensorFileError(f"{ckpt.root.name}: tensor {layer.block}.gate.weight: missing")
        return RouterWeights(
            read(weight, (config.num_experts, width), ("BF16", "F32")),
            bias=vector("router.bias", "gate.bias"),
            correction_bias=vector("gate.e_score_correction_bias", "e_score_correction_bias"),
        )
