# SPDX-License-Identifier: Apache-2.0
"""Read a LoRA adapter's routed-expert part from any of the file forms in use, into one canonical form.

Forms (keys after ``...layers.{L}.{block}.experts.``; the prefix before it may be any that a checkpoint has):

``per_expert``  ``{e}.{gate_proj|up_proj|down_proj|w1|w3|w2}.lora_A [r, in]``, ``lora_B [out, r]``. One side may lack
                the expert's number: it is then shared by all experts.
``fused``       PEFT's wrapper of 3-D parameters: ``base_layer.lora_{A,B}`` and ``lora_{A,B}``, two nested pairs with
                A ``[E * r, in]`` (expert slowest) and B ``[out, r * E]`` (expert fastest). Which pair is gate_up, and
                which way round in and out are (PEFT before 0.19 took them by position), follow from the dimensions.
``stacked``     ``{gate_proj|up_proj|gate_up_proj|down_proj|w1|w3|w2}.lora_A [E|1, c * r, in]``,
                ``lora_B [E|1, out, r]``; 1 means shared by all experts; c = 2 where gate and up have their own A.

Nothing in a file says how B is packed (one popular trainer had it expert slowest) or whether fused gate and up rows
alternate, and a misread fits every shape. So these are arguments: `b_packing`, `gate_up`, `swap_in_out`.

Scaling is folded into B: the file's B in float32, times the float32 scaling, rounded once to the adapter's dtype
(bfloat16 where the whole file is bfloat16, float32 otherwise). Ranks that differ within a layer are padded with zeros
to the largest, which changes no result. A fused gate_up whose B is block-diagonal (what PEFT makes of separate gate
and up adapters) is split back into two of half the rank, exactly. So one adapter gives the same arrays from every form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .adapter_config import AdapterSettings, as_scaling, read_adapter_config
from .checkpoints import BLOCKS, PREFIXES, ROLES
from .checks import check_choice, check_int
from .config import MAX_LORA_RANK, FusedMoEConfig
from .numerics import BF16, all_finite
from .safe_files import Budget, TensorFileError, TensorStore, clean, existing_folder, some
from .weights import LoRAAdapter

FORMS = ("per_expert", "fused", "stacked")
_LAYER = re.compile(r"(?:base_model\.model\.)?(?P<module>(?P<prefix>.*?)layers\.(?P<layer>\d{1,6})\.(?P<block>\w+)"
                    r"\.experts)\.(?P<tail>.+)", re.S)
_TAIL = re.compile(r"(?:(?P<expert>\d{1,6})\.)?(?:(?P<leaf>\w+)\.)?lora_(?P<side>[AB])(?:\.weight)?")
_LEAVES = {**ROLES, "gate_up_proj": "gate_up", "base_layer": "inner"}
_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class AdapterReport:
    """What was read, what was not, and what had to be assumed.

    Attributes:
      form: one of `FORMS`.
      base_model, peft_version: as the adapter's config gives them.
      layers: layers with adapted experts.
      rank: the largest over the layers.
      dtype: of the arrays.
      nbytes: of all layers' arrays.
      shared_outer: A of gate and up, and B of down, are one for all experts.
      ignored: keys that are not routed experts (attention, dense and shared-expert layers, saved modules).
      missing: (layer, projection, number of experts without one), zeros under `allow_partial`.
      notes: assumptions that the file could not confirm.
    """

    form: str
    base_model: str
    peft_version: str
    layers: tuple[int, ...]
    rank: int
    dtype: str
    nbytes: int
    shared_outer: bool
    ignored: tuple[str, ...]
    missing: tuple[tuple[int, str, int], ...]
    notes: tuple[str, ...]


class LoadedAdapter(dict[int, LoRAAdapter]):
    """Layer index to `LoRAAdapter`, with the report of how it was read."""

    def __init__(self, layers: dict[int, LoRAAdapter], report: AdapterReport) -> None:
        super().__init__(layers)
        self.report = report


@dataclass(frozen=True)
class _Options:
    form: str
    gate_up: str
    b_packing: str
    swap_in_out: bool | None
    scaling: float | None
    allow_partial: bool


@dataclass(frozen=True)
class _Leaf:
    """One projection of one layer, known from headers: where its A and B are and what they will become.

    Attributes:
      role: "gate", "up", "down" or "gate_up".
      a, b: (expert or None for all, tensor name), each a matrix, or one 3-D or packed tensor.
      packing: "matrices", "stack", "packed", or "swapped" (packed with in and out exchanged).
      count_a, count_b: experts in the arrays (E, or 1 for shared).
      rank_a, rank_b: their ranks; 2 * rank_b = rank_a for a gate_up with two A.
      scales: float32, one an expert (or one for all).
    """

    role: str
    a: tuple[tuple[int | None, str], ...]
    b: tuple[tuple[int | None, str], ...]
    packing: str
    count_a: int
    count_b: int
    rank_a: int
    rank_b: int
    scales: np.ndarray


class _Reader:
    """An open adapter file: names sorted in at once, headers read as planned, tensors as built."""

    def __init__(
        self, store: TensorStore, settings: AdapterSettings, config: FusedMoEConfig, options: _Options
    ) -> None:
        self.store, self.settings, self.config, self.options = store, settings, config, options
        self.ignored: list[str] = []
        self.missing: list[tuple[int, str, int]] = []
        self.notes: dict[str, None] = {}
        self.keys: dict[int, dict[tuple[int | None, str, str], str]] = {}
        self.modules: dict[int, str] = {}
        for name in store.names():
            self._sort_in(name)

    # -- names ------------------------------------------------------------------------------------------------------

    def _sort_in(self, name: str) -> None:
        parts = name.split(".")
        if "experts" not in parts or "mtp" in parts:
            self.ignored.append(name)
            return
        where = self.store.where(name)
        if "lora_magnitude_vector" in parts:
            raise TensorFileError(f"{where}: refused: DoRA renormalises the merged weight")
        match = _LAYER.fullmatch(name)
        tail = _TAIL.fullmatch(match["tail"]) if match else None
        leaf = "outer" if tail is None or tail["leaf"] is None else _LEAVES.get(tail["leaf"])
        known = match is not None and match["prefix"] in PREFIXES and match["block"] in BLOCKS
        if match is None or tail is None or leaf is None or not known:
            raise TensorFileError(f"{where}: an expert's tensor of no form that is read here ({', '.join(FORMS)})")
        expert = None if tail["expert"] is None else int(tail["expert"])
        if expert is not None and (leaf in ("inner", "outer") or expert >= self.config.num_experts):
            raise TensorFileError(
                f"{where}: made for another model: got expert {expert}, the base has {self.config.num_experts}"
            )
        layer = int(match["layer"])
        if self.modules.setdefault(layer, match["module"]) != match["module"]:
            raise TensorFileError(f"{where}: layer {layer} also appears under {clean(self.modules[layer])}")
        key = (expert, leaf, tail["side"])
        if key in self.keys.setdefault(layer, {}):
            raise TensorFileError(f"{where}: doubled by {clean(self.keys[layer][key])}")
        self.keys[layer][key] = name

    def form_of(self, layer: int) -> str:
        keys = self.keys[layer]
        wrapped = [k for k in keys if k[1] in ("inner", "outer")]
        if wrapped:
            if len(wrapped) != len(keys):
                other = next(n for k, n in keys.items() if k not in wrapped)
                raise TensorFileError(f"{self.store.where(other)}: mixed with wrapped parameters in one layer")
            return "fused"
        return "per_expert" if any(expert is not None for expert, _, _ in keys) else "stacked"

    # -- headers ----------------------------------------------------------------------------------------------------

    def _shape(self, name: str, ndims: tuple[int, ...]) -> tuple[int, ...]:
        info = self.store.info(name)
        where = self.store.where(name)
        if info.dtype not in _DTYPES:
            raise TensorFileError(f"{where}: got dtype {info.dtype}, want {' or '.join(_DTYPES)}")
        if len(info.shape) not in ndims or 0 in info.shape:
            want = " or ".join(f"{n}-D" for n in ndims)
            raise TensorFileError(f"{where}: got shape {list(info.shape)}, want a {want} tensor that is not empty")
        return info.shape

    def _dims(self, role: str) -> tuple[int, int]:
        """(in, out) of a projection."""
        hidden, inter = self.config.hidden_dim, self.config.intermediate_size
        return (inter, hidden) if role == "down" else (hidden, 2 * inter if role == "gate_up" else inter)

    def _check_side(self, name: str, side: str, shape: tuple[int, ...], role: str) -> int:
        """Hold one matrix ``[.., r, in]`` or ``[.., out, r]`` against the base; returns its rank."""
        width_in, width_out = self._dims(role)
        got, want = (shape[-1], width_in) if side == "A" else (shape[-2], width_out)
        if got != want:
            label = "in" if side == "A" else "out"
            raise TensorFileError(
                f"{self.store.where(name)}: made for another model: got shape {list(shape)}, the base's {role} "
                f"projection has {label} = {want} (hidden_dim {self.config.hidden_dim}, intermediate_size "
                f"{self.config.intermediate_size})"
            )
        return shape[-2] if side == "A" else shape[-1]

    def _scaling(self, module: str, rank: int, name: str) -> np.float32:
        if self.options.scaling is not None:
            return np.float32(self.options.scaling)
        return self.settings.scaling(module, rank, self.store.where(name))

    def leaves(self, layer: int) -> list[_Leaf]:
        """The layer's projections, checked by name and shape."""
        form = self.form_of(layer)
        if self.options.form not in ("auto", form):
            raise TensorFileError(
                f"form: got {self.options.form!r}, but the keys of layer {layer} are of form {form!r}, for example "
                f"{clean(next(iter(self.keys[layer].values())))}"
            )
        leaves = self._fused(layer) if form == "fused" else self._plain(layer)
        roles = [leaf.role for leaf in leaves]
        if "gate_up" in roles and ("gate" in roles or "up" in roles):
            raise TensorFileError(f"layer {layer}: got gate_up_proj beside gate_proj or up_proj, want one of the two")
        for role in roles:
            if role in ("gate", "gate_up") and not self.config.is_act_and_mul:
                raise TensorFileError(
                    f"layer {layer}: made for another model: got a {role}_proj, the base's experts have no gate"
                )
        wanted = ("gate", "up", "down") if self.config.is_act_and_mul else ("up", "down")
        for role in wanted:
            if role not in roles and not (role != "down" and "gate_up" in roles):
                self._missing(layer, role, self.config.num_experts)
        return leaves

    def _missing(self, layer: int, role: str, count: int) -> None:
        if not self.options.allow_partial:
            raise TensorFileError(
                f"layer {layer}: {count} of {self.config.num_experts} experts have no {role} projection; pass "
                "allow_partial=True to give them a delta of zero"
            )
        self.missing.append((layer, role, count))

    def _plain(self, layer: int) -> list[_Leaf]:
        keys = self.keys[layer]
        sides: dict[str, dict[str, list[tuple[int | None, str]]]] = {}
        for (expert, role, side), name in sorted(keys.items(), key=lambda kv: (kv[0][1], kv[0][2], kv[0][0] or 0)):
            sides.setdefault(role, {}).setdefault(side, []).append((expert, name))
        out = []
        for role, pair in sides.items():
            for side, other in (("A", "B"), ("B", "A")):
                if side not in pair:
                    raise TensorFileError(f"{self.store.where(pair[other][0][1])}: lacks its lora_{side}")
            out.append(self._leaf(layer, role, pair["A"], pair["B"]))
        return out

    def _side(
        self, side: str, role: str, items: list[tuple[int | None, str]]
    ) -> tuple[dict[int | None, tuple[int, str]], int, bool]:
        """One side's (rank, name) by expert (None: all), the experts in its array, and whether it is one 3-D tensor."""
        experts = self.config.num_experts
        ranks: dict[int | None, tuple[int, str]] = {}
        count, stacked = experts, False
        for expert, name in items:
            if expert is None and len(items) > 1:
                raise TensorFileError(f"{self.store.where(name)}: shared by all experts, yet some have their own")
            shape = self._shape(name, (2,) if expert is not None else (2, 3))
            stacked = len(shape) == 3
            if expert is None:
                count = shape[0] if stacked else 1
            if count not in (1, experts):
                raise TensorFileError(
                    f"{self.store.where(name)}: made for another model: got {count} experts, want {experts}, or 1 "
                    "where it is shared"
                )
            ranks[expert] = (self._check_side(name, side, shape, role), name)
        return ranks, count, stacked

    def _leaf(
        self, layer: int, role: str, a: list[tuple[int | None, str]], b: list[tuple[int | None, str]]
    ) -> _Leaf:
        ranks_a, count_a, stacked_a = self._side("A", role, a)
        ranks_b, count_b, stacked_b = self._side("B", role, b)
        numbered = sorted({e for e in (*ranks_a, *ranks_b) if e is not None})
        scales = []
        owners: list[int | None] = [*numbered] or [None]
        for expert in owners:
            found_a = ranks_a.get(expert, ranks_a.get(None))
            found_b = ranks_b.get(expert, ranks_b.get(None))
            if found_a is None or found_b is None:
                have, lacking = (found_b, "A") if found_a is None else (found_a, "B")
                raise TensorFileError(f"{self.store.where(have[1])}: lacks its lora_{lacking}")  # type: ignore[index]
            (rank_a, name_a), (rank_b, name_b) = found_a, found_b
            if rank_a not in ((rank_b, 2 * rank_b) if role == "gate_up" else (rank_b,)):
                raise TensorFileError(f"{self.store.where(name_b)}: got rank {rank_b}, its lora_A has {rank_a}")
            owner = name_b if expert in ranks_b else name_a
            module = owner.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")[0]
            scales.append(self._scaling(module, rank_b, owner))
        per_expert = np.full(self.config.num_experts if numbered else 1, scales[0], np.float32)
        if numbered:
            per_expert[numbered] = scales
            if len(numbered) < self.config.num_experts:
                self._missing(layer, role, self.config.num_experts - len(numbered))
        return _Leaf(
            role, tuple(a), tuple(b), "stack" if stacked_a or stacked_b else "matrices", count_a, count_b,
            max(r for r, _ in ranks_a.values()), max(r for r, _ in ranks_b.values()), per_expert,
        )

    def _fused(self, layer: int) -> list[_Leaf]:
        keys, experts = self.keys[layer], self.config.num_experts
        pairs: list[tuple[str, str, int, int, int]] = []
        for nest in ("inner", "outer"):
            if (None, nest, "A") not in keys and (None, nest, "B") not in keys:
                continue
            for side, other in (("A", "B"), ("B", "A")):
                if (None, nest, side) not in keys:
                    raise TensorFileError(f"{self.store.where(keys[None, nest, other])}: lacks its lora_{side}")
            name_a, name_b = keys[None, nest, "A"], keys[None, nest, "B"]
            (rows, d_in), (d_out, cols) = self._shape(name_a, (2,)), self._shape(name_b, (2,))
            if rows % experts or rows != cols:
                raise TensorFileError(
                    f"{self.store.where(name_a)}: made for another model: got shape {[rows, d_in]} with lora_B "
                    f"{[d_out, cols]}, want {experts} experts * rank rows, and as many columns"
                )
            pairs.append((name_a, name_b, d_in, d_out, rows // experts))
        swapped, roles = self._orientation(layer, pairs)
        out = []
        for (name_a, name_b, _, _, rank), role in zip(pairs, roles, strict=True):
            module = f"{self.modules[layer]}.{role}_proj"
            scale = np.asarray([self._scaling(module, rank, name_a)], np.float32)
            out.append(
                _Leaf(role, ((None, name_a),), ((None, name_b),), "swapped" if swapped else "packed",
                      experts, experts, rank, rank, scale)
            )
        if self.options.b_packing == "auto" and any(leaf.rank_b > 1 for leaf in out) and experts > 1:
            self.notes["b_packing='expert_fastest' taken, as PEFT writes it; the file cannot confirm it"] = None
        return out

    def _orientation(self, layer: int, pairs: list[tuple[str, str, int, int, int]]) -> tuple[bool, list[str]]:
        """Which of the two readings of in and out fits all pairs, and each pair's role under it."""
        first = "gate_up" if self.config.is_act_and_mul else "up"
        fits: dict[bool, list[str]] = {}
        for swapped in (False, True):
            roles = []
            for _, _, d_in, d_out, _ in pairs:
                dims = (d_out, d_in) if swapped else (d_in, d_out)
                found = [r for r in (first, "down") if self._dims(r) == dims]
                roles.append(found[0] if len(found) == 1 else "")
            if all(roles) and len(set(roles)) == len(roles):
                fits[swapped] = roles
        asked = self.options.swap_in_out
        shown = ", ".join(f"[{p[2]} -> {p[3]}]" for p in pairs)
        where = self.store.where(pairs[0][0])
        if not fits:
            raise TensorFileError(
                f"{where}: made for another model: got in -> out {shown}; the base's {first} has {self._dims(first)}, "
                f"its down {self._dims('down')}, either way round"
            )
        if asked is None and len(fits) == 2:
            raise TensorFileError(
                f"{where}: in -> out {shown} reads both ways with hidden_dim {self.config.hidden_dim} and "
                f"intermediate_size {self.config.intermediate_size}; pass swap_in_out=True for an adapter that PEFT "
                "before 0.19 wrote for [E, out, in] weights, else False"
            )
        chosen = next(iter(fits)) if asked is None else asked
        if chosen not in fits:
            raise TensorFileError(f"swap_in_out: got {asked}, which the dimensions {shown} of layer {layer} rule out")
        return chosen, fits[chosen]

    # -- sizes ------------------------------------------------------------------------------------------------------

    def dtype(self, layers: Iterable[int]) -> np.dtype:
        """bfloat16 where every tensor is; float32 otherwise (float16 does not fit bfloat16 exactly)."""
        names = (n for layer in layers for n in self.keys[layer].values())
        return BF16 if all(self.store.info(n).dtype == "BF16" for n in names) else np.dtype(np.float32)

    def plan_bytes(self, leaves: list[_Leaf], dtype: np.dtype) -> int:
        """What the layer's arrays will take at most."""
        config = self.config
        rank = max((leaf.rank_b for leaf in leaves), default=1)
        w13 = [leaf for leaf in leaves if leaf.role != "down"]
        shared_a = 1 if w13 and all(leaf.count_a == 1 for leaf in w13) else config.num_experts
        shared_b = 1 if all(leaf.count_b == 1 for leaf in leaves if leaf.role == "down") else config.num_experts
        halves = config.w13_rows // config.intermediate_size
        cells = shared_a * halves * rank * config.hidden_dim + config.num_experts * config.w13_rows * rank
        cells += config.num_experts * rank * config.intermediate_size + shared_b * config.hidden_dim * rank
        return cells * dtype.itemsize

    # -- arrays -----------------------------------------------------------------------------------------------------

    def _tensor(self, name: str) -> np.ndarray:
        value = self.store.read(name)
        if not all_finite(value):
            raise TensorFileError(f"{self.store.where(name)}: got non-finite values, want all finite")
        return value

    def _gather(self, items: tuple[tuple[int | None, str], ...], count: int, rank: int, axis: int) -> np.ndarray:
        """Matrices to ``[count, ...]`` float32, zeros for experts and ranks that are not there."""
        out: np.ndarray | None = None
        for expert, name in items:
            value = self._tensor(name)
            value = value if value.ndim == 3 else value[None]
            if out is None:
                shape = [count, *value.shape[1:]]
                shape[axis] = rank
                out = np.zeros(shape, np.float32)
            where = slice(0, count) if expert is None else slice(expert, expert + 1)
            cut = [where, slice(None), slice(None)]
            cut[axis] = slice(0, value.shape[axis])
            out[tuple(cut)] = value
        assert out is not None
        return out

    def _arrays(self, leaf: _Leaf) -> tuple[np.ndarray, np.ndarray]:
        """A ``[E|1, rank_a, in]`` and B ``[E|1, out, rank_b]``, float32, scaling not yet in."""
        if leaf.packing in ("matrices", "stack"):
            return (
                self._gather(leaf.a, leaf.count_a, leaf.rank_a, 1), self._gather(leaf.b, leaf.count_b, leaf.rank_b, 2)
            )
        experts, rank = self.config.num_experts, leaf.rank_b
        slow = self._tensor(leaf.a[0][1]).astype(np.float32).reshape(experts, rank, -1)
        packed = self._tensor(leaf.b[0][1]).astype(np.float32)
        if self.options.b_packing == "expert_slowest":
            fast = packed.reshape(-1, experts, rank).transpose(1, 0, 2)
        else:
            fast = packed.reshape(-1, rank, experts).transpose(2, 0, 1)
        if leaf.packing == "swapped":
            # PEFT then computes (B A) for the transposed weight: its A is our B, and the reverse.
            return fast.transpose(0, 2, 1), slow.transpose(0, 2, 1)
        return slow, fast

    def _split(self, leaf: _Leaf, a: np.ndarray, b: np.ndarray) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """A fused gate_up as its gate and its up."""
        interleaved = self.options.gate_up == "interleaved"
        if self.options.gate_up == "auto":
            interleaved = self.config.activation == "swigluoai"
            self.notes[
                f"gate_up={'interleaved' if interleaved else 'concat'!r} taken for activation "
                f"{self.config.activation!r}; the file cannot confirm it"
            ] = None
        inter, rank = self.config.intermediate_size, leaf.rank_b
        gate, up = (b[:, 0::2], b[:, 1::2]) if interleaved else (b[:, :inter], b[:, inter:])
        if leaf.rank_a == 2 * rank:
            return [("gate", a[:, :rank], gate), ("up", a[:, rank:], up)]
        half = rank // 2
        if rank % 2 == 0 and (gate.any() or up.any()) and not gate[..., half:].any() and not up[..., :half].any():
            return [("gate", a[:, :half], gate[..., :half]), ("up", a[:, half:], up[..., half:])]
        return [("gate", a, gate), ("up", a, up)]

    def build(self, layer: int, leaves: list[_Leaf], adapter_id: int, dtype: np.dtype, max_rank: int) -> LoRAAdapter:
        """The layer's canonical arrays."""
        config = self.config
        parts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for leaf in leaves:
            a, b = self._arrays(leaf)
            if b.shape[0] == 1 and leaf.scales.shape[0] > 1:
                # Shared B with a scaling an expert: only a common one can stay shared.
                b = b if (leaf.scales == leaf.scales[0]).all() else np.repeat(b, leaf.scales.shape[0], axis=0)
                scales = leaf.scales[: b.shape[0]]
            else:
                scales = leaf.scales
            with np.errstate(over="ignore"):
                b = (b * scales[:, None, None]).astype(dtype)
            if not all_finite(b):
                raise TensorFileError(f"{self.store.where(leaf.b[0][1])}: overflows {dtype} once scaled")
            split = self._split(leaf, a, b) if leaf.role == "gate_up" else [(leaf.role, a, b)]
            parts.update({role: (pa, pb) for role, pa, pb in split})
        rank = max(pb.shape[2] for _, pb in parts.values())
        if rank > max_rank:
            raise TensorFileError(f"layer {layer}: got rank {rank}, want at most {max_rank}")
        roles = ("gate", "up") if config.is_act_and_mul else ("up",)
        hidden, inter, experts = config.hidden_dim, config.intermediate_size, config.num_experts
        shared_a = all(parts[r][0].shape[0] == 1 for r in roles if r in parts) and any(r in parts for r in roles)
        shared_b = "down" in parts and parts["down"][1].shape[0] == 1
        a13 = np.zeros((1 if shared_a else experts, len(roles), rank, hidden), dtype)
        b13 = np.zeros((experts, len(roles), inter, rank), dtype)
        a2 = np.zeros((experts, rank, inter), dtype)
        b2 = np.zeros((1 if shared_b else experts, hidden, rank), dtype)
        for h, role in enumerate(roles):
            if role in parts:
                a, b = parts[role]
                a13[:, h, : a.shape[1]] = a
                b13[:, h, :, : b.shape[2]] = b
        if "down" in parts:
            a, b = parts["down"]
            a2[:, : a.shape[1]] = a
            b2[:, :, : b.shape[2]] = b
        return LoRAAdapter(adapter_id, a13, b13, a2, b2)


def _options(
    form: str, gate_up: str, b_packing: str, swap: bool | None, scaling: float | None, partial: bool
) -> _Options:
    check_choice("form", form, ("auto", "vllm_legacy", *FORMS))
    check_choice("gate_up", gate_up, ("auto", "concat", "interleaved"))
    check_choice("b_packing", b_packing, ("auto", "expert_fastest", "expert_slowest"))
    if swap is not None and not isinstance(swap, bool):
        raise TypeError(f"swap_in_out: got {swap!r}, want True, False or None")
    if scaling is not None:
        if isinstance(scaling, bool) or not isinstance(scaling, (int, float, np.integer, np.floating)):
            raise TypeError(f"scaling: got {scaling!r}, want a number")
        if not np.isfinite(scaling):
            raise ValueError(f"scaling: got {scaling!r}, want a finite number")
        scaling = float(as_scaling("scaling", scaling))
    if not isinstance(partial, bool):
        raise TypeError(f"allow_partial: got {partial!r}, want True or False")
    options = _Options(form, gate_up, b_packing, swap, scaling, partial)
    if form == "vllm_legacy":
        options = replace(options, form="fused", gate_up="interleaved", b_packing="expert_slowest")
    return options


def _layers_argument(layers: Iterable[int]) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers: got {layers!r}, want layer indices")
    listed = list(layers)
    for layer in listed:
        check_int("layers", layer, minimum=0)
    if not listed:
        raise ValueError("layers: got none, want at least one, or None for all that the file adapts")
    return sorted({int(i) for i in listed})


def load_lora_adapter(
    adapter_dir: str | Path,
    base_config: FusedMoEConfig,
    *,
    adapter_id: int = 0,
    form: str = "auto",
    gate_up: str = "auto",
    b_packing: str = "auto",
    swap_in_out: bool | None = None,
    scaling: float | None = None,
    layers: Iterable[int] | None = None,
    num_layers: int | None = None,
    allow_partial: bool = False,
    max_rank: int | None = None,
    budget_bytes: int | None = None,
) -> LoadedAdapter:
    """The routed-expert deltas of an adapter, one `LoRAAdapter` a layer.

    Args:
      adapter_dir: a folder with adapter_config.json and adapter_model.safetensors.
      base_config: a layer of the base model.
      adapter_id: the global id that the result carries.
      form: ``"auto"`` goes by the keys; a name of `FORMS` insists. ``"vllm_legacy"`` reads the fused form as vLLM's
        fallback for models without a declared 3-D layout does: B expert slowest, gate and up rows alternating.
      gate_up: rows of a fused gate_up are ``"concat"`` (gate, then up) or ``"interleaved"``; ``"auto"`` is
        interleaved for the activation ``swigluoai`` (gpt-oss) and concat otherwise.
      b_packing: the fused form's B is ``"expert_fastest"`` (PEFT; also ``"auto"``) or ``"expert_slowest"``.
      swap_in_out: whether in and out are exchanged in the fused form; None goes by the dimensions.
      scaling: replaces alpha / r of every module.
      layers: read only these; None for all that the file adapts.
      num_layers: the base model's decoder layers; a layer beyond them is an error.
      allow_partial: experts or projections without tensors get a delta of zero instead of an error.
      max_rank: refuse a larger rank (default: ``base_config.max_lora_rank`` where that is set).
      budget_bytes: refuse before allocating more than this for the arrays.

    Returns:
      A dict from layer index to `LoRAAdapter`; its ``report`` says what was ignored and assumed.

    Raises:
      TensorFileError: a ValueError that names the file and tensor (or config key) at fault and, where the file is
        ambiguous, the argument to pass.
      TypeError, ValueError: a bad argument.
    """
    if not isinstance(base_config, FusedMoEConfig):
        raise TypeError(f"base_config: got {type(base_config).__name__}, want FusedMoEConfig")
    check_int("adapter_id", adapter_id, minimum=0)
    options = _options(form, gate_up, b_packing, swap_in_out, scaling, allow_partial)
    wanted = None if layers is None else _layers_argument(layers)
    for label, value in (("num_layers", num_layers), ("max_rank", max_rank)):
        if value is not None:
            check_int(label, value, minimum=1)
    limit = max_rank if max_rank is not None else (base_config.max_lora_rank or MAX_LORA_RANK)
    budget = Budget(budget_bytes)
    root = existing_folder("adapter_dir", adapter_dir, "a folder with adapter_model.safetensors")
    with TensorStore(root, "adapter_model") as store:
        settings = read_adapter_config(root)
        reader = _Reader(store, settings, base_config, options)
        if not reader.keys:
            raise TensorFileError(
                f"{clean(root.name)}: the adapter touches no routed expert: its {len(reader.ignored)} tensors are "
                f"{some(reader.ignored)}"
            )
        if num_layers is not None and max(reader.keys) >= num_layers:
            name = next(iter(reader.keys[max(reader.keys)].values()))
            raise TensorFileError(f"{store.where(name)}: made for another model: the base has {num_layers} layers")
        chosen = sorted(reader.keys) if wanted is None else wanted
        absent = [i for i in chosen if i not in reader.keys]
        if absent:
            raise ValueError(f"layers: got {some(absent, 8)}, which the adapter does not touch")
        plans = {layer: reader.leaves(layer) for layer in chosen}
        dtype = reader.dtype(chosen)
        for layer, leaves in plans.items():
            for leaf in leaves:
                # A block-diagonal gate_up will halve its rank; whether it does is only known once it is read.
                least = leaf.rank_b // 2 if leaf.role == "gate_up" and leaf.rank_b % 2 == 0 else leaf.rank_b
                if least > limit:
                    raise TensorFileError(
                        f"{store.where(leaf.b[0][1])}: got rank {leaf.rank_b}, want at most {limit}"
                    )
            budget.take(reader.plan_bytes(leaves, dtype), f"layer {layer} of the adapter")
        built = {layer: reader.build(layer, leaves, adapter_id, dtype, limit) for layer, leaves in plans.items()}
        forms = sorted({reader.form_of(layer) for layer in chosen})
        report = AdapterReport(
            form=" and ".join(forms),
            base_model=settings.base_model,
            peft_version=settings.peft_version,
            layers=tuple(chosen),
            rank=max(a.rank for a in built.values()),
            dtype=dtype.name,
            nbytes=sum(a.nbytes for a in built.values()),
            shared_outer=base_config.num_experts > 1 and all(
                a.a13.shape[0] == a.b2.shape[0] == 1 for a in built.values()
            ),
            ignored=tuple(sorted(reader.ignored)),
            missing=tuple(reader.missing),
            notes=tuple(reader.notes),
        )
        return LoadedAdapter(built, report)
