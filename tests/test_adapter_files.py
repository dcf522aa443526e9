# SPDX-License-Identifier: Apache-2.0
"""One adapter in every file form gives the same bits, agrees with PEFT's own deltas, or is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isomoe.common.adapter_files import load_lora_adapter
from isomoe.common.adapters import AdapterError, AdapterPool
from isomoe.common.config import FusedMoEConfig
from isomoe.common.safe_files import TensorFileError
from isomoe.tests.file_writers import write_adapter

BF16 = np.dtype(ml_dtypes.bfloat16)
E, H, I, R = 4, 32, 24, 4
BASE = FusedMoEConfig(E, 2, H, I)
SETTINGS: dict[str, Any] = {"r": R, "lora_alpha": 10, "bias": "none"}
EXPERTS = "base_model.model.model.layers.{}.mlp.experts"
Tensors = dict[str, np.ndarray]


def rand(*shape: int, dtype: Any = BF16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


class Source:
    """An adapter's unscaled matrices: a_x [E, r, in], b_x [E, out, r]."""

    def __init__(self, dtype: Any = BF16, *, shared_gate_up: bool = False, shared_outer: bool = False) -> None:
        lead = 1 if shared_outer else E
        self.dtype = dtype
        self.a_gate = rand(lead, R, H, dtype=dtype, seed=1)
        self.a_up = self.a_gate if shared_gate_up else rand(lead, R, H, dtype=dtype, seed=2)
        self.b_gate, self.b_up = rand(E, I, R, dtype=dtype, seed=3), rand(E, I, R, dtype=dtype, seed=4)
        self.a_down, self.b_down = rand(E, R, I, dtype=dtype, seed=5), rand(lead, H, R, dtype=dtype, seed=6)

    def canonical(self, scaling: float) -> dict[str, np.ndarray]:
        def scaled(b: np.ndarray) -> np.ndarray:
            return (b.astype(np.float32) * np.float32(scaling)).astype(self.dtype)

        return {
            "a13": np.stack([self.a_gate, self.a_up], axis=1),
            "b13": np.stack([scaled(self.b_gate), scaled(self.b_up)], axis=1),
            "a2": self.a_down,
            "b2": scaled(self.b_down),
        }

    def pairs(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.a_gate, self.b_gate), (self.a_up, self.b_up), (self.a_down, self.b_down)]

    def per_expert(
        self, layer: int = 0, names=("gate_proj", "up_proj", "down_proj"), root: str = EXPERTS, weight: str = ".weight"
    ) -> Tensors:
        out = {}
        for name, (a, b) in zip(names, self.pairs(), strict=True):
            for side, value in (("A", a), ("B", b)):
                for e in range(E):
                    at = f"{root.format(layer)}.{e}.{name}" if len(value) == E else f"{root.format(layer)}.{name}"
                    out[f"{at}.lora_{side}{weight}"] = value[e % len(value)]
        return out

    def stacked(
        self, names=("gate_proj", "up_proj", "down_proj"), root: str = EXPERTS, weight: str = ".weight"
    ) -> Tensors:
        out = {}
        for name, (a, b) in zip(names, self.pairs(), strict=True):
            out[f"{root.format(0)}.{name}.lora_A{weight}"] = a
            out[f"{root.format(0)}.{name}.lora_B{weight}"] = b
        return out

    def gate_up(self, interleaved: bool = False) -> np.ndarray:
        """B of fused gate_up [E, 2I, r]."""
        if interleaved:
            return np.stack([self.b_gate, self.b_up], axis=2).reshape(E, 2 * I, R)
        return np.concatenate([self.b_gate, self.b_up], axis=1)

    def stacked_gate_up(self, copies: int) -> Tensors:
        """A [E, c * r, H] with c = 1 (shared by gate and up) or 2."""
        a = self.a_gate if copies == 1 else np.concatenate([self.a_gate, self.a_up], axis=1)
        at = EXPERTS.format(0)
        return {
            f"{at}.gate_up_proj.lora_A.weight": a,
            f"{at}.gate_up_proj.lora_B.weight": self.gate_up(),
            f"{at}.down_proj.lora_A.weight": self.a_down,
            f"{at}.down_proj.lora_B.weight": self.b_down,
        }

    def fused(
        self, *, swapped: bool = False, slowest: bool = False, interleaved: bool = False, outer_first=False
    ) -> Tensors:
        """PEFT's wrapped 3-D parameters, gate and up sharing their A."""
        pairs = [(self.a_gate, self.gate_up(interleaved)), (self.a_down, self.b_down)]
        return _wrapped(pairs, swapped=swapped, slowest=slowest, outer_first=outer_first)

    def block_diagonal(self) -> Tensors:
        """What PEFT makes of separate gate and up adapters: rank 2r, B block-diagonal."""
        a = np.concatenate([self.a_gate, self.a_up], axis=1)
        zero = np.zeros_like(self.b_gate)
        b = np.concatenate(
            [np.concatenate([self.b_gate, zero], axis=2), np.concatenate([zero, self.b_up], axis=2)], axis=1
        )
        return _wrapped([(a, b), (self.a_down, self.b_down)])


def _wrapped(pairs, *, swapped=False, slowest=False, outer_first=False) -> Tensors:
    out = {}
    nests = ["", ".base_layer"] if outer_first else [".base_layer", ""]
    for nest, (a, b) in zip(nests, pairs, strict=True):
        if swapped:
            a, b = b.transpose(0, 2, 1), a.transpose(0, 2, 1)
        rank = a.shape[1]
        packed = b.transpose(1, 0, 2) if slowest else b.transpose(1, 2, 0)
        out[f"{EXPERTS.format(0)}{nest}.lora_A.weight"] = np.ascontiguousarray(a).reshape(E * rank, -1)
        out[f"{EXPERTS.format(0)}{nest}.lora_B.weight"] = np.ascontiguousarray(packed).reshape(-1, E * rank)
    return out


DOUBLED = {
    "rank_pattern": {r".*\.gate_up_proj": 2 * R},
    "alpha_pattern": {r".*\.gate_up_proj": 20},
}
SEPARATE: dict[str, Any] = {  # forms that can hold an A for gate and another for up
    "per_expert": (lambda s: s.per_expert(), {}, {}),
    "per_expert_mixtral": (
        lambda s: s.per_expert(
            names=("w1", "w3", "w2"), root="base_model.model.model.layers.{}.block_sparse_moe.experts"
        ),
        {},
        {},
    ),
    "per_expert_bare": (lambda s: s.per_expert(root="layers.{}.mlp.experts"), {}, {}),
    "per_expert_vl": (
        lambda s: s.per_expert(root="base_model.model.model.language_model.layers.{}.mlp.experts"),
        {},
        {},
    ),
    "per_expert_backbone": (lambda s: s.per_expert(root="base_model.model.backbone.layers.{}.mixer.experts"), {}, {}),
    "peft_block_diagonal": (lambda s: s.block_diagonal(), DOUBLED, {}),
    "stacked": (lambda s: s.stacked(), {}, {}),
    "stacked_w_no_suffix": (lambda s: s.stacked(("w1", "w3", "w2"), weight=""), {}, {}),
    "stacked_gate_up_two_a": (lambda s: s.stacked_gate_up(2), {}, {}),
}
SHARED: dict[str, Any] = {  # forms where gate and up have one A
    "per_expert": (lambda s: s.per_expert(), {}, {}),
    "peft": (lambda s: s.fused(), {}, {}),
    "peft_0_18": (lambda s: s.fused(swapped=True), {}, {}),
    "peft_other_nesting": (lambda s: s.fused(outer_first=True), {}, {}),
    "expert_slowest": (lambda s: s.fused(slowest=True), {}, {"b_packing": "expert_slowest"}),
    "expert_slowest_0_18": (lambda s: s.fused(slowest=True, swapped=True), {}, {"b_packing": "expert_slowest"}),
    "interleaved": (lambda s: s.fused(interleaved=True), {}, {"gate_up": "interleaved"}),
    "interleaved_0_18": (lambda s: s.fused(interleaved=True, swapped=True), {}, {"gate_up": "interleaved"}),
    "vllm_legacy": (lambda s: s.fused(interleaved=True, slowest=True), {}, {"form": "vllm_legacy"}),
    "stacked_gate_up": (lambda s: s.stacked_gate_up(1), {}, {}),
}
OUTER: dict[str, Any] = {  # A of gate and up, and B of down, shared by all experts
    "tinker": (lambda s: s.stacked(("w1", "w3", "w2"), weight=""), {}, {}),
    "stacked_peft_names": (lambda s: s.stacked(), {}, {}),
    "expertless_names": (lambda s: s.per_expert(), {}, {}),
}


def same(got: Any, want: dict[str, np.ndarray]) -> None:
    for key, value in want.items():
        have = getattr(got, key)
        assert have.dtype == value.dtype, key
        assert have.shape == value.shape, key
        np.testing.assert_array_equal(have.view(np.uint8), np.ascontiguousarray(value).view(np.uint8), err_msg=key)


def all_forms() -> list[Any]:
    out = []
    for kind, forms in (("separate", SEPARATE), ("shared", SHARED), ("outer", OUTER)):
        for name in forms:
            for dtype in (BF16, np.dtype(np.float32)):
                out.append(pytest.param(kind, forms[name], dtype, id=f"{kind}-{name}-{dtype.name}"))
    return out


@pytest.mark.parametrize(("kind", "form", "dtype"), all_forms())
def test_every_form_gives_the_same_bits(tmp_path, kind, form, dtype):
    make, settings, overrides = form
    source = Source(dtype, shared_gate_up=kind == "shared", shared_outer=kind == "outer")
    write_adapter(tmp_path, {**SETTINGS, **settings}, make(source))
    loaded = load_lora_adapter(tmp_path, BASE, adapter_id=7, **overrides)
    assert list(loaded) == [0]
    assert loaded[0].adapter_id == 7
    same(loaded[0], source.canonical(10 / R))
    assert loaded.report.rank == R
    assert loaded.report.shared_outer == (kind == "outer")
    assert loaded.report.nbytes == loaded[0].nbytes


def test_float16_is_kept_in_float32(tmp_path):
    source = Source(np.float16)
    write_adapter(tmp_path, SETTINGS, source.per_expert())
    loaded = load_lora_adapter(tmp_path, BASE)
    assert loaded.report.dtype == "float32"
    np.testing.assert_array_equal(loaded[0].a2, source.a_down.astype(np.float32))
    np.testing.assert_array_equal(loaded[0].b2, source.b_down.astype(np.float32) * np.float32(2.5))


def test_a_misread_packing_fits_every_shape_but_not_the_bits(tmp_path):
    source = Source(shared_gate_up=True)
    write_adapter(tmp_path, SETTINGS, source.fused(slowest=True))
    loaded = load_lora_adapter(tmp_path, BASE)
    want = source.canonical(10 / R)
    assert loaded[0].b2.shape == want["b2"].shape
    assert not np.array_equal(loaded[0].b2, want["b2"])
    assert any("expert_fastest" in note for note in loaded.report.notes)


def test_gpt_oss_gate_and_up_alternate_by_default(tmp_path):
    source = Source(shared_gate_up=True)
    write_adapter(tmp_path, SETTINGS, source.fused(interleaved=True))
    same(load_lora_adapter(tmp_path, FusedMoEConfig(E, 2, H, I, activation="swigluoai"))[0], source.canonical(10 / R))


def test_non_gated_experts(tmp_path):
    source = Source()
    keys = {
        k: v
        for k, v in source.per_expert(root="base_model.model.backbone.layers.{}.mixer.experts").items()
        if "gate_proj" not in k
    }
    write_adapter(tmp_path, SETTINGS, keys)
    base = FusedMoEConfig(E, 2, H, I, activation="relu2", is_act_and_mul=False)
    want = source.canonical(10 / R)
    same(load_lora_adapter(tmp_path, base)[0], {**want, "a13": want["a13"][:, 1:], "b13": want["b13"][:, 1:]})
    write_adapter(tmp_path, SETTINGS, source.per_expert())
    with pytest.raises(
        TensorFileError, match=r"made for another model: got a gate_proj, the base's experts have no gate"
    ):
        load_lora_adapter(tmp_path, base)


def test_non_gated_wrapped_parameters_need_the_orientation(tmp_path):
    """up [H -> I] and down [I -> H] swap into each other, so the dimensions cannot tell which is which."""
    source = Source()
    base = FusedMoEConfig(E, 2, H, I, activation="relu2", is_act_and_mul=False)
    want = source.canonical(10 / R)
    want = {**want, "a13": want["a13"][:, 1:], "b13": want["b13"][:, 1:]}
    for swapped in (False, True):
        pairs = [(source.a_up, source.b_up), (source.a_down, source.b_down)]
        write_adapter(tmp_path, SETTINGS, _wrapped(pairs, swapped=swapped))
        with pytest.raises(TensorFileError, match=r"reads both ways .* pass swap_in_out="):
            load_lora_adapter(tmp_path, base)
        same(load_lora_adapter(tmp_path, base, swap_in_out=swapped)[0], want)


def test_equal_dimensions_are_decided_by_the_other_projection_or_refused(tmp_path):
    """With hidden_dim == intermediate_size down alone reads both ways; gate_up beside it settles the matter."""
    size = 16
    base = FusedMoEConfig(E, 2, size, size)
    a_gu, b_gu = rand(E, R, size, seed=1), rand(E, 2 * size, R, seed=2)
    a_dn, b_dn = rand(E, R, size, seed=3), rand(E, size, R, seed=4)
    for swapped in (False, True):
        both = _wrapped([(a_gu, b_gu), (a_dn, b_dn)], swapped=swapped)
        write_adapter(tmp_path, SETTINGS, both)
        loaded = load_lora_adapter(tmp_path, base)[0]
        np.testing.assert_array_equal(loaded.a2, a_dn)
        np.testing.assert_array_equal(loaded.a13[:, 0], a_gu)
        with pytest.raises(TensorFileError, match=rf"swap_in_out: got {not swapped}, which the dimensions"):
            load_lora_adapter(tmp_path, base, swap_in_out=not swapped)
        down = {k: v for k, v in both.items() if "base_layer" not in k}
        write_adapter(tmp_path, SETTINGS, down)
        with pytest.raises(
            TensorFileError, match=r"lora_A.weight: in -> out \[16 -> 16\] reads both ways .*swap_in_out"
        ):
            load_lora_adapter(tmp_path, base, allow_partial=True)
        got = load_lora_adapter(tmp_path, base, allow_partial=True, swap_in_out=swapped)[0]
        np.testing.assert_array_equal(got.a2, a_dn)
        assert not got.b13.any()


def test_hidden_twice_the_intermediate_size(tmp_path):
    base = FusedMoEConfig(E, 2, 2 * I, I)
    a_gu, b_gu = rand(E, R, 2 * I, seed=1), rand(E, 2 * I, R, seed=2)
    a_dn, b_dn = rand(E, R, I, seed=3), rand(E, 2 * I, R, seed=4)
    for swapped in (False, True):
        write_adapter(tmp_path, SETTINGS, _wrapped([(a_gu, b_gu), (a_dn, b_dn)], swapped=swapped))
        loaded = load_lora_adapter(tmp_path, base)[0]
        np.testing.assert_array_equal(loaded.a13[:, 1], a_gu)
        np.testing.assert_array_equal(loaded.a2, a_dn)


# -- scaling and ranks --------------------------------------------------------------------------------------------


def test_rslora_and_override(tmp_path):
    source = Source()
    write_adapter(tmp_path, {**SETTINGS, "use_rslora": True}, source.per_expert())
    same(load_lora_adapter(tmp_path, BASE)[0], source.canonical(10 / 2))
    same(load_lora_adapter(tmp_path, BASE, scaling=0.75)[0], source.canonical(0.75))


def test_patterns_by_expert_and_padding(tmp_path):
    """Experts of different rank and alpha: each scaled by its own alpha / r, ranks padded with zeros to the largest."""
    source = Source()
    tensors = source.per_expert()
    at = EXPERTS.format(0)
    tensors[f"{at}.1.up_proj.lora_A.weight"] = source.a_up[1, :2]
    tensors[f"{at}.1.up_proj.lora_B.weight"] = source.b_up[1, :, :2]
    patterns = {
        "rank_pattern": {"mlp.experts.1.up_proj": 2},
        "alpha_pattern": {r".*experts\.1\.up_proj": 3, "experts.2.down_proj": 5, r".*\.2\..*": 100},
    }
    write_adapter(tmp_path, {**SETTINGS, **patterns}, tensors)
    got = load_lora_adapter(tmp_path, BASE)[0]
    want = source.canonical(10 / R)
    want["a13"][1, 1, 2:] = 0
    b_up = np.zeros((I, R), BF16)
    b_up[:, :2] = (source.b_up[1, :, :2].astype(np.float32) * np.float32(3 / 2)).astype(BF16)
    want["b13"][1, 1] = b_up
    want["b13"][2, 0] = (source.b_gate[2].astype(np.float32) * np.float32(100 / R)).astype(BF16)
    want["b13"][2, 1] = (source.b_up[2].astype(np.float32) * np.float32(100 / R)).astype(BF16)
    want["b2"][2] = (source.b_down[2].astype(np.float32) * np.float32(5 / R)).astype(BF16)
    same(got, want)


def test_rank_that_the_config_does_not_confirm(tmp_path):
    write_adapter(tmp_path, {**SETTINGS, "r": 8}, Source().per_expert())
    with pytest.raises(TensorFileError, match=r"lora_B.weight: got rank 4, adapter_config.json says 8 .*pass scaling="):
        load_lora_adapter(tmp_path, BASE)
    load_lora_adapter(tmp_path, BASE, scaling=1.0)


def test_rank_over_the_limit(tmp_path):
    write_adapter(tmp_path, SETTINGS, Source().per_expert())
    with pytest.raises(TensorFileError, match=r"got rank 4, want at most 2"):
        load_lora_adapter(tmp_path, BASE, max_rank=2)
    with pytest.raises(TensorFileError, match=r"got rank 4, want at most 3"):
        load_lora_adapter(tmp_path, BASE.with_lora(1, 3))
    write_adapter(tmp_path, {**SETTINGS, **DOUBLED}, Source().block_diagonal())
    assert load_lora_adapter(tmp_path, BASE, max_rank=R)[0].rank == R
    write_adapter(tmp_path, SETTINGS, Source(shared_gate_up=True).fused())
    with pytest.raises(TensorFileError, match=r"layer 0: got rank 4, want at most 3|got rank 4, want at most 3"):
        load_lora_adapter(tmp_path, BASE, max_rank=3)


def test_a_half_empty_gate_is_no_block_diagonal(tmp_path):
    """Only where gate and up use different halves of the rank may a fused adapter be split in two."""
    source = Source(shared_gate_up=True)
    source.b_gate[..., R // 2 :] = 0
    write_adapter(tmp_path, SETTINGS, source.fused())
    same(load_lora_adapter(tmp_path, BASE)[0], source.canonical(10 / R))


def test_rank_of_a_fused_gate_up_over_the_limit(tmp_path):
    """Whether a fused gate_up halves its rank is only known once it is read; the limit holds all the same."""
    source = Source(shared_gate_up=True)
    down = (source.a_down[:, :2], source.b_down[:, :, :2])
    patterns = {"rank_pattern": {"experts.down_proj": 2}}
    write_adapter(tmp_path, {**SETTINGS, **patterns}, _wrapped([(source.a_gate, source.gate_up()), down]))
    assert load_lora_adapter(tmp_path, BASE, max_rank=4)[0].rank == 4
    with pytest.raises(TensorFileError, match=r"layer 0: got rank 4, want at most 3"):
        load_lora_adapter(tmp_path, BASE, max_rank=3)


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora: got True: refused, DoRA renormalises"),
        ({"bias": "lora_only"}, "bias: got 'lora_only': refused"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: got True: refused, its matrices are stored transposed"),
        (
            {"modules_to_save": ["model.layers.0.mlp.experts"]},
            "modules_to_save: got model.layers.0.mlp.experts: refused",
        ),
        ({"peft_type": "LOHA"}, "peft_type: got 'LOHA': refused, is not LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: got pissa_niter_4: refused, it changes the base"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": 0}, "r: got 0, want a positive integer"),
        ({"r": True}, "r: got True, want a positive integer"),
        ({"lora_alpha": "16"}, "lora_alpha: got '16', want a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha: got 1000+[.]+, want a finite number"),
        ({"lora_alpha": 1e300}, "got a scaling of 2.5e[+]299, want one that float32 holds"),
        ({"lora_alpha": 1e-300}, "got a scaling of 2.5e-301, want one that float32 holds"),
        ({"r": 10**400}, "r: got 1000+[.]+, want a positive integer"),
        ({"alpha_pattern": {"up_proj": 10**400}}, "alpha_pattern: got .*, want names to numbers"),
        ({"alpha_pattern": {"x{99999999999}": 1}}, "pattern .*: the repetition number is too large"),
        ({"rank_pattern": {"(a+)+$": 3}}, "want at most .* quantifiers and no repeated group"),
        ({"rank_pattern": {"[": 3}}, r"pattern .*unterminated"),
        ({"rank_pattern": [1]}, "rank_pattern: got .*, want names to numbers"),
    ],
)
def test_settings_that_change_the_math(tmp_path, settings, message):
    write_adapter(tmp_path, {**SETTINGS, **settings}, Source().per_expert())
    with pytest.raises(TensorFileError, match=message):
        load_lora_adapter(tmp_path, BASE)


def test_harmless_settings_are_accepted(tmp_path):
    harmless = {
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "modules_to_save": ["lm_head"],
        "use_dora": False,
        "target_modules": "all-linear",
        "megatron_config": None,
        "some_future_key": 3,
    }
    write_adapter(tmp_path, {**SETTINGS, **harmless}, Source().per_expert())
    same(load_lora_adapter(tmp_path, BASE)[0], Source().canonical(10 / R))


def test_pickle_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(TensorFileError, match=r"adapter_model.bin: a pickle file can run any code"):
        load_lora_adapter(tmp_path, BASE)


def test_adapter_without_routed_experts(tmp_path):
    """target_modules that hit only shared experts and attention: common, and silent elsewhere."""
    layer = "base_model.model.model.layers.0"
    write_adapter(
        tmp_path,
        SETTINGS,
        {
            f"{layer}.mlp.shared_expert.up_proj.lora_A.weight": rand(R, H),
            f"{layer}.mlp.shared_expert.up_proj.lora_B.weight": rand(I, R),
        },
    )
    with pytest.raises(TensorFileError, match=r"touches no routed expert: its 2 tensors are .*shared_expert.up_proj"):
        load_lora_adapter(tmp_path, BASE)


def test_other_modules_are_reported(tmp_path):
    layer = "base_model.model.model.layers.0"
    other = [
        f"{layer}.self_attn.q_proj.lora_A.weight",
        f"{layer}.mlp.gate.lora_A.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.mtp.layers.0.mlp.experts.0.up_proj.lora_A.weight",
    ]
    write_adapter(tmp_path, SETTINGS, {**Source().per_expert(), **{k: rand(R, H) for k in other}})
    report = load_lora_adapter(tmp_path, BASE).report
    assert report.ignored == tuple(sorted(other))
    assert report.form == "per_expert"


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.model.layers.0.mlp.experts.0.mystery_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.0.up_proj.weight",
        "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.lora_A.weight",
        "base_model.model.model.layers.0.attention.experts.0.up_proj.lora_A.weight",
        "base_model.model.vision.layers.0.mlp.experts.0.up_proj.lora_A.weight",
    ],
)
def test_unknown_expert_keys(tmp_path, key):
    write_adapter(tmp_path, SETTINGS, {**Source().per_expert(), key: rand(R, H)})
    with pytest.raises(TensorFileError, match=r"of no form that is read here") as caught:
        load_lora_adapter(tmp_path, BASE)
    assert key in str(caught.value)


def test_dora_vector_without_the_setting(tmp_path):
    key = f"{EXPERTS.format(0)}.0.up_proj.lora_magnitude_vector"
    write_adapter(tmp_path, SETTINGS, {**Source().per_expert(), key: rand(I)})
    with pytest.raises(TensorFileError, match=r"lora_magnitude_vector: refused: DoRA"):
        load_lora_adapter(tmp_path, BASE)


def broken(change) -> Tensors:
    tensors = Source().per_expert()
    change(tensors)
    return tensors


AT = EXPERTS.format(0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken(lambda t: t.pop(f"{AT}.2.up_proj.lora_B.weight")), r"2\.up_proj\.lora_A\.weight: lacks its lora_B"),
        (
            broken(lambda t: t.update({f"{AT}.2.up_proj.lora_A.weight": rand(R, H + 1)})),
            r"2\.up_proj\.lora_A\.weight: made for another model: got shape \[4, 33\], .*in = 32",
        ),
        (
            broken(lambda t: t.update({f"{AT}.2.down_proj.lora_B.weight": rand(H - 1, R)})),
            r"2\.down_proj\.lora_B\.weight: made for another model: got shape \[31, 4\], .*out = 32",
        ),
        (
            broken(lambda t: t.update({f"{AT}.2.up_proj.lora_A.weight": rand(R + 1, H)})),
            r"2\.up_proj\.lora_B\.weight: got rank 4, its lora_A has 5",
        ),
        (
            broken(lambda t: t.update({f"{AT}.4.up_proj.lora_A.weight": rand(R, H)})),
            r"4\.up_proj\.lora_A\.weight: made for another model: got expert 4, the base has 4",
        ),
        (
            broken(lambda t: t.update({f"{AT}.2.up_proj.lora_A.weight": np.full((R, H), np.nan, BF16)})),
            r"2\.up_proj\.lora_A\.weight: got non-finite values",
        ),
        (
            broken(lambda t: t.update({f"{AT}.2.up_proj.lora_A.weight": np.zeros((R, H), np.int64)})),
            r"2\.up_proj\.lora_A\.weight: got dtype I64, want BF16 or F16 or F32",
        ),
        (
            broken(lambda t: t.update({f"{AT}.2.up_proj.lora_A.weight": rand(R, 2, H)})),
            r"2\.up_proj\.lora_A\.weight: got shape \[4, 2, 32\], want a 2-D tensor",
        ),
        (
            broken(lambda t: t.update({f"{AT}.2.w3.lora_A.weight": rand(R, H)})),
            r"up_proj\.lora_A\.weight: doubled|w3.*: doubled",
        ),
        (
            broken(lambda t: t.update({f"{AT}.up_proj.lora_A.weight": rand(R, H)})),
            r"experts\.up_proj\.lora_A\.weight: shared by all experts, yet some have their own",
        ),
        (broken(lambda t: t.update({f"{AT}.lora_A.weight": rand(E * R, H)})), "mixed with wrapped parameters"),
        (
            {
                f"{AT}.gate_up_proj.lora_A.weight": rand(E, 3 * R, H),
                f"{AT}.gate_up_proj.lora_B.weight": rand(E, 2 * I, R),
                f"{AT}.down_proj.lora_A.weight": rand(E, R, I),
                f"{AT}.down_proj.lora_B.weight": rand(E, H, R),
            },
            "got rank 4, its lora_A has 12",
        ),
        (
            {f"{AT}.up_proj.lora_A.weight": rand(3, R, H), f"{AT}.up_proj.lora_B.weight": rand(E, I, R)},
            "made for another model: got 3 experts, want 4, or 1",
        ),
        (
            {f"{AT}.lora_A.weight": rand(E * R + 1, H), f"{AT}.lora_B.weight": rand(I, E * R + 1)},
            "made for another model",
        ),
        (
            {f"{AT}.lora_A.weight": rand(E * R, 77), f"{AT}.lora_B.weight": rand(H, E * R)},
            r"made for another model: got in -> out \[77 -> 32\]",
        ),
        ({f"{AT}.lora_A.weight": rand(E * R, H)}, "lacks its lora_B"),
    ],
)
def test_bad_tensors(tmp_path, tensors, message):
    write_adapter(tmp_path, SETTINGS, tensors)
    with pytest.raises(TensorFileError, match=message):
        load_lora_adapter(tmp_path, BASE)


def test_overflow_of_the_scaling(tmp_path):
    tensors = broken(lambda t: t.update({f"{AT}.0.up_proj.lora_B.weight": np.full((I, R), 3e38, BF16)}))
    write_adapter(tmp_path, SETTINGS, tensors)
    with pytest.raises(TensorFileError, match=r"overflows bfloat16 once scaled"):
        load_lora_adapter(tmp_path, BASE)


def test_partly_adapted_experts(tmp_path):
    source = Source()
    tensors = {k: v for k, v in source.per_expert().items() if ".2." not in k and not ("down" in k and ".3." in k)}
    write_adapter(tmp_path, SETTINGS, tensors)
    with pytest.raises(
        TensorFileError, match=r"layer 0: . of 4 experts have no .* projection; pass allow_partial=True"
    ):
        load_lora_adapter(tmp_path, BASE)
    loaded = load_lora_adapter(tmp_path, BASE, allow_partial=True)
    want = source.canonical(10 / R)
    for key in want:
        want[key][2] = 0
    want["a2"][3] = 0
    want["b2"][3] = 0
    same(loaded[0], want)
    assert sorted(loaded.report.missing) == [(0, "down", 2), (0, "gate", 1), (0, "up", 1)]


def test_layers(tmp_path):
    source = Source()
    tensors = {**source.per_expert(layer=3), **source.per_expert(layer=11)}
    write_adapter(tmp_path, SETTINGS, tensors)
    assert list(load_lora_adapter(tmp_path, BASE)) == [3, 11]
    assert list(load_lora_adapter(tmp_path, BASE, layers=[11])) == [11]
    with pytest.raises(ValueError, match=r"layers: got 4, which the adapter does not touch"):
        load_lora_adapter(tmp_path, BASE, layers=[4])
    with pytest.raises(TensorFileError, match=r"made for another model: the base has 11 layers"):
        load_lora_adapter(tmp_path, BASE, num_layers=11)


def test_budget(tmp_path):
    write_adapter(tmp_path, SETTINGS, Source().per_expert())
    nbytes = load_lora_adapter(tmp_path, BASE).report.nbytes
    load_lora_adapter(tmp_path, BASE, budget_bytes=nbytes)
    with pytest.raises(
        TensorFileError, match=rf"budget_bytes: got {nbytes - 1}.*layer 0 of the adapter needs {nbytes}"
    ):
        load_lora_adapter(tmp_path, BASE, budget_bytes=nbytes - 1)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"form": "peft"}, ValueError, "form: got 'peft', want one of"),
        ({"form": "fused"}, TensorFileError, "form: got 'fused', but the keys of layer 0 are of form 'per_expert'"),
        ({"gate_up": "zip"}, ValueError, "gate_up"),
        ({"b_packing": "fast"}, ValueError, "b_packing"),
        ({"swap_in_out": 1}, TypeError, "swap_in_out"),
        ({"scaling": float("nan")}, ValueError, "scaling"),
        ({"scaling": "2"}, TypeError, "scaling: got '2', want a number"),
        ({"scaling": 1e300}, ValueError, "scaling: got a scaling of 1e[+]300, want one that float32 holds"),
        ({"adapter_id": -1}, ValueError, "adapter_id"),
        ({"adapter_id": 2**31}, ValueError, "adapter_id: got 2147483648, want less than 2..31"),
        ({"layers": "0"}, TypeError, "layers: got '0', want layer indices"),
        ({"layers": [0.5]}, TypeError, "layers: got 0.5, want an int"),
        ({"layers": []}, ValueError, "layers: got none, want at least one"),
        ({"num_layers": "1"}, TypeError, "num_layers: got '1', want an int"),
        ({"max_rank": 2.5}, TypeError, "max_rank: got 2.5, want an int"),
        ({"budget_bytes": "1"}, TypeError, "budget_bytes: got '1', want an int"),
        ({"allow_partial": "no"}, TypeError, "allow_partial: got 'no', want True or False"),
    ],
)
def test_bad_arguments(tmp_path, kwargs, error, message):
    write_adapter(tmp_path, SETTINGS, Source().per_expert())
    with pytest.raises(error, match=message):
        load_lora_adapter(tmp_path, BASE, **kwargs)


def test_missing_config_and_folder(tmp_path):
    write_adapter(tmp_path, SETTINGS, Source().per_expert())
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(TensorFileError, match=r"adapter_config.json: cannot be opened"):
        load_lora_adapter(tmp_path, BASE)
    with pytest.raises(TensorFileError, match=r"adapter_dir: got .*nowhere, want a folder"):
        load_lora_adapter(tmp_path / "nowhere", BASE)
    with pytest.raises(TypeError, match=r"adapter_dir: got NoneType, want a path"):
        load_lora_adapter(None, BASE)  # type: ignore[arg-type]


def test_pool_loads_files_with_one_error_type(tmp_path):
    source = Source()
    write_adapter(tmp_path / "a", SETTINGS, source.per_expert())
    write_adapter(tmp_path / "b", SETTINGS, broken(lambda t: t.pop(f"{AT}.0.up_proj.lora_B.weight")))
    pool = AdapterPool(BASE.with_lora(2, R))
    assert pool.load_file(tmp_path / "a", 5) == 5
    same(pool.adapters()[0], source.canonical(10 / R))
    with pytest.raises(AdapterError, match=r"adapter 6 .bad.: .*lacks its lora_B"):
        pool.load_file(tmp_path / "b", 6, name="bad")
    with pytest.raises(AdapterError, match=r"adapter 7: .*nowhere"):
        pool.load_file(tmp_path / "nowhere", 7)
    assert pool.adapter_ids == (5,)


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 9)
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(data=st.data())
def test_fuzzed_adapters_raise_one_error(tmp_path, data):
    """Tensors dropped, renamed, reshaped and exchanged between forms: it loads whole, or raises the one error."""
    kind, (make, more, overrides) = data.draw(
        st.sampled_from([(k, f) for k, forms in (("s", SEPARATE), ("h", SHARED), ("o", OUTER)) for f in forms.values()])
    )
    source = Source(shared_gate_up=kind == "h", shared_outer=kind == "o")
    tensors, config = make(source), {**SETTINGS, **more}
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        action = data.draw(st.sampled_from(["drop", "rename", "side", "shape", "mix", "config"]))
        if action == "drop" and len(tensors) > 1:
            del tensors[name]
        elif action == "rename":
            parts = name.split(".")
            parts[data.draw(st.integers(0, len(parts) - 1))] = data.draw(
                st.sampled_from(["experts", "0", "3", "w2", "lora_B"])
            )
            tensors[".".join(parts)] = tensors.pop(name)
        elif action == "side":
            tensors[name.replace("lora_A", "lora_B")] = tensors[name]
        elif action == "shape":
            tensors[name] = rand(*data.draw(st.lists(st.sampled_from([0, 1, R, E, H, I, 2 * I, E * R]), max_size=4)))
        elif action == "mix":
            other = data.draw(st.sampled_from([Source().stacked(), Source().fused(), Source().per_expert()]))
            tensors |= {k: other[k] for k in sorted(other)[: data.draw(st.integers(1, 3))]}
        else:
            keys = [
                "r",
                "lora_alpha",
                "rank_pattern",
                "alpha_pattern",
                "use_rslora",
                "modules_to_save",
                "bias",
                "use_dora",
            ]
            config[data.draw(st.sampled_from(keys))] = data.draw(VALUES)
    write_adapter(tmp_path, config, tensors)
    try:
        loaded = load_lora_adapter(tmp_path, BASE, allow_partial=data.draw(st.booleans()), **overrides)
    except TensorFileError:
        return
    for layer in loaded.values():
        layer.check_matches(BASE)


# -- PEFT itself as the oracle ------------------------------------------------------------------------------------


def delta13(adapter) -> np.ndarray:
    """Merged gate and up deltas [E, 2I, H] in float64."""
    return np.einsum(
        "ehir,ehrk->ehik",
        adapter.b13.astype(np.float64),
        np.broadcast_to(adapter.a13, (E, *adapter.a13.shape[1:])).astype(np.float64),
    ).reshape(E, 2 * I, H)


def delta2(adapter) -> np.ndarray:
    return np.einsum("eor,eri->eoi", adapter.b2.astype(np.float64), adapter.a2.astype(np.float64))


def close(got: np.ndarray, want: Any) -> None:
    want = want.detach().double().numpy()
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want) > 0


def toy_model(experts_factory):
    """A module tree with the names of a decoder: model.layers.0.mlp.experts."""
    import torch

    def holder(**children):
        module = torch.nn.Module()
        for name, child in children.items():
            module.add_module(name, child)
        return module

    mlp = holder(experts=experts_factory())
    root = holder(model=holder(layers=torch.nn.ModuleList([holder(mlp=mlp)])))
    root.forward = lambda x: x
    return root


def with_random_b(model):
    import torch

    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("rslora", [False, True])
def test_per_expert_linear_modules_against_peft(tmp_path, rslora):
    import peft
    import torch

    def experts():
        def one():
            module = torch.nn.Module()
            for name, (d_in, d_out) in {"gate_proj": (H, I), "up_proj": (H, I), "down_proj": (I, H)}.items():
                module.add_module(name, torch.nn.Linear(d_in, d_out, bias=False))
            return module

        return torch.nn.ModuleList([one() for _ in range(E)])

    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=rslora,
        target_modules=["gate_proj", "up_proj", "down_proj"],
        rank_pattern={r"experts\.1\.up_proj": 2, "mlp.experts.0.down_proj": 3},
        alpha_pattern={r".*experts\.[23]\.gate_proj": 7, "experts.1.up_proj": 5},
    )
    model = with_random_b(peft.get_peft_model(toy_model(experts), config))
    model.save_pretrained(tmp_path)
    loaded = load_lora_adapter(tmp_path, BASE)[0]
    modules = model.base_model.model.model.layers[0].mlp.experts
    for e, module in enumerate(modules):
        gate_up = torch.cat([getattr(module, n).get_delta_weight("default") for n in ("gate_proj", "up_proj")])
        close(delta13(loaded)[e], gate_up)
        close(delta2(loaded)[e], module.down_proj.get_delta_weight("default"))


@pytest.mark.parametrize(("transposed_shapes", "is_transposed"), [(False, False), (False, True), (True, True)])
def test_wrapped_parameters_against_peft(tmp_path, transposed_shapes, is_transposed):
    """[E, out, in] as PEFT reads it now, by position as it did before 0.19, and [E, in, out] weights."""
    import peft
    import torch

    def experts():
        module = torch.nn.Module()
        for name, (rows, cols) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
            shape = (E, cols, rows) if transposed_shapes else (E, rows, cols)
            module.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        module.is_transposed = is_transposed
        return module

    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={r".*experts\.down_proj": 2},
        alpha_pattern={"experts.gate_up_proj": 3},
    )
    model = with_random_b(peft.get_peft_model(toy_model(experts), config))
    model.save_pretrained(tmp_path)
    loaded = load_lora_adapter(tmp_path, BASE)[0]
    outer = model.base_model.model.model.layers[0].mlp.experts
    deltas = {w.parameter_name: w.get_delta_weight("default") for w in (outer, outer.base_layer)}
    if transposed_shapes:
        deltas = {k: v.transpose(1, 2) for k, v in deltas.items()}
    close(delta13(loaded), deltas["gate_up_proj"])
    close(delta2(loaded), deltas["down_proj"])
    model.merge_adapter()
    merged = outer.get_base_layer()
    while hasattr(merged, "base_layer"):
        merged = merged.base_layer
    weight = merged.gate_up_proj.transpose(1, 2) if transposed_shapes else merged.gate_up_proj
    close(delta13(loaded), weight)


def test_per_expert_adapter_converted_by_peft_gives_the_same_bits(tmp_path):
    """PEFT turns a per-expert adapter into a fused one of twice the rank when it loads it on a fused model."""
    import peft
    import transformers

    source = Source(np.float32)
    write_adapter(
        tmp_path / "old",
        {**SETTINGS, "target_modules": ["gate_proj", "up_proj", "down_proj"], "task_type": "CAUSAL_LM"},
        source.per_expert(),
    )
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=16,
            hidden_size=H,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            moe_intermediate_size=I,
            num_experts=E,
            num_experts_per_tok=2,
        )
    )
    peft.PeftModel.from_pretrained(model, str(tmp_path / "old")).save_pretrained(str(tmp_path / "new"))
    old, new = (load_lora_adapter(tmp_path / n, BASE) for n in ("old", "new"))
    assert (old.report.form, new.report.form) == ("per_expert", "fused")
    same(new[0], {k: getattr(old[0], k) for k in ("a13", "b13", "a2", "b2")})
