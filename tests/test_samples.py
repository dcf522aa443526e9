# SPDX-License-Identifier: Apache-2.0
"""The samples have the names, types and configs of published files, and writing them is safe to repeat."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from isomoe.common.metrics import rel_l2
from isomoe.common.numerics import quantize_weight_block, quantize_weight_channel
from isomoe.tests import samples as samples_module
from isomoe.tests.samples import DIMS, Samples, write_samples

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FP8 = ("channel", "block")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {k: v for shard in sorted(set(weight_map.values())) for k, v in load_file(folder / shard).items()}


def _linears() -> dict[str, tuple[int, int]]:
    """Modules that FP8 checkpoints quantise, with ``[out, in]``."""
    d = DIMS
    shapes = {}
    for layer in range(d.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "self_attn.q_proj"] = (d.num_heads * d.head_dim, d.hidden_dim)
        shapes[prefix + "self_attn.k_proj"] = (d.num_kv_heads * d.head_dim, d.hidden_dim)
        shapes[prefix + "self_attn.v_proj"] = (d.num_kv_heads * d.head_dim, d.hidden_dim)
        shapes[prefix + "self_attn.o_proj"] = (d.hidden_dim, d.num_heads * d.head_dim)
        for e in range(d.num_experts):
            shapes[f"{prefix}mlp.experts.{e}.gate_proj"] = (d.intermediate_size, d.hidden_dim)
            shapes[f"{prefix}mlp.experts.{e}.up_proj"] = (d.intermediate_size, d.hidden_dim)
            shapes[f"{prefix}mlp.experts.{e}.down_proj"] = (d.hidden_dim, d.intermediate_size)
    return shapes


def _kept() -> set[str]:
    """Tensors that stay in bfloat16."""
    names = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    per_layer = ("input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.q_norm", "self_attn.k_norm")
    return names | {f"model.layers.{i}.{name}.weight" for i in range(DIMS.num_layers) for name in per_layer}


@pytest.mark.parametrize("scheme", ("bf16", *FP8))
def test_index_and_shards_agree(scheme: str, samples: Samples) -> None:
    folder = samples.checkpoint(scheme)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held: dict[str, str] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            held |= {name: shard.name for name in handle.keys()}
    assert index["weight_map"] == held
    assert len(set(held.values())) >= 2
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in _tensors(folder).values())
    count = len(set(held.values()))
    assert set(held.values()) == {f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)}


def test_bf16_names_are_the_published_ones(samples: Samples) -> None:
    tensors = _tensors(samples.bf16)
    assert set(tensors) == _kept() | {f"{name}.weight" for name in _linears()}
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all(tuple(tensors[f"{name}.weight"].shape) == shape for name, shape in _linears().items())


@pytest.mark.parametrize("scheme", FP8)
def test_fp8_tensors(scheme: str, samples: Samples) -> None:
    """Codes and scales are the package's quantisation of the bf16 weights, under the published names and types."""
    suffix = {"channel": "weight_scale", "block": "weight_scale_inv"}[scheme]
    source, tensors = _tensors(samples.bf16), _tensors(samples.checkpoint(scheme))
    linears = _linears()
    assert set(tensors) == _kept() | {f"{n}.{leaf}" for n in linears for leaf in ("weight", suffix)}
    assert all(torch.equal(tensors[name], source[name]) for name in _kept())
    for name, (rows, cols) in linears.items():
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.{suffix}"]
        assert codes.dtype == torch.float8_e4m3fn and codes.shape == (rows, cols)
        weight = source[f"{name}.weight"].float().numpy()
        if scheme == "channel":
            want_codes, want_scale = quantize_weight_channel(weight)
            assert scale.dtype == torch.float32 and np.array_equal(scale.numpy(), want_scale[:, None])
            full = scale
        else:
            want_codes, want_scale = quantize_weight_block(weight)
            assert scale.dtype == torch.bfloat16 and scale.shape == (-(-rows // 128), -(-cols // 128))
            assert torch.equal(scale, torch.from_numpy(want_scale).to(torch.bfloat16))
            full = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        assert codes.view(torch.uint8).numpy().tobytes() == want_codes.tobytes()
        assert rel_l2((codes.float() * full).numpy(), weight) < 0.03


def test_channel_config(samples: Samples) -> None:
    config = json.loads((samples.channel / "config.json").read_text())
    quant = config["quantization_config"]
    group = quant["config_groups"]["group_0"]
    assert quant["quant_method"] == "compressed-tensors" and quant["format"] == "float-quantized"
    assert quant["quantization_status"] == "compressed" and quant["ignore"] == ["lm_head", "re:.*mlp.gate$"]
    assert group["targets"] == ["Linear"] and group["output_activations"] is None
    for side, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
        args = group[side]
        assert (args["num_bits"], args["type"], args["symmetric"]) == (8, "float", True)
        assert (args["strategy"], args["dynamic"]) == (strategy, dynamic)
    _check_model_config(config)


def test_block_config(samples: Samples) -> None:
    config = json.loads((samples.block / "config.json").read_text())
    quant = config["quantization_config"]
    kept = quant.pop("modules_to_not_convert")
    assert quant == {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    }
    assert "lm_head" in kept and "model.layers.1.mlp.gate" in kept
    assert not set(kept) & set(_linears())
    _check_model_config(config)


def _check_model_config(config: dict[str, object]) -> None:
    """The keys under which published Qwen3-MoE configs give the dimensions."""
    want = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": DIMS.hidden_dim,
        "moe_intermediate_size": DIMS.intermediate_size, "num_experts": DIMS.num_experts,
        "num_experts_per_tok": DIMS.experts_per_token, "num_hidden_layers": DIMS.num_layers, "norm_topk_prob": True,
        "vocab_size": DIMS.vocab_size,
    }
    assert {key: config.get(key) for key in want} == want


def _adapter(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


def test_per_expert_adapter(samples: Samples) -> None:
    config, tensors = _adapter(samples.lora_per_expert)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (8, 12, False)
    assert set(config["target_modules"]) == set(PROJECTIONS) and not config["target_parameters"]
    shapes = {name: shape for name, shape in _linears().items() if ".experts." in name}
    want = {f"base_model.model.{n}.lora_{side}.weight" for n in shapes for side in "AB"}
    assert set(tensors) == want
    for name, (rows, cols) in shapes.items():
        assert tensors[f"base_model.model.{name}.lora_A.weight"].shape == (8, cols)
        assert tensors[f"base_model.model.{name}.lora_B.weight"].shape == (rows, 8)
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert all(t.count_nonzero() > 0.99 * t.numel() for t in tensors.values())


def test_fused_adapter(samples: Samples) -> None:
    config, tensors = _adapter(samples.lora_fused)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (16, 6, True)
    assert set(config["target_parameters"]) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    stacked = 16 * DIMS.num_experts
    want = {}
    for layer in range(DIMS.num_layers):
        prefix = f"base_model.model.model.layers.{layer}.mlp.experts."
        want[prefix + "base_layer.lora_A.weight"] = (stacked, DIMS.hidden_dim)
        want[prefix + "base_layer.lora_B.weight"] = (2 * DIMS.intermediate_size, stacked)
        want[prefix + "lora_A.weight"] = (stacked, DIMS.intermediate_size)
        want[prefix + "lora_B.weight"] = (DIMS.hidden_dim, stacked)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == want
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all(t.count_nonzero() > 0.99 * t.numel() for t in tensors.values())


# --- writing --------------------------------------------------------------------------------------------------------


def _digests(samples: Samples) -> dict[str, str]:
    files = [f for folder in samples.folders for f in sorted(folder.glob("*.safetensors"))]
    return {str(f.relative_to(samples.root)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_writing_is_deterministic_and_repairs(tmp_path: Path, samples: Samples) -> None:
    """A second folder gets the same bytes; a damaged one is written again; a neighbour's file stays."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "fp8-block").mkdir()
    (tmp_path / "fp8-block" / "half-written.safetensors").write_bytes(b"")
    made = write_samples(tmp_path)
    assert made.root == tmp_path.resolve() and made.dims == DIMS
    assert _digests(made) == _digests(samples)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == [".samples.lock"]


def test_complete_samples_are_left_alone(
    samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "_build", _must_not_build)
    assert write_samples(samples.root) == samples
    with pytest.raises(AssertionError, match="built"):
        write_samples(tmp_path)


def _must_not_build(_samples: Samples) -> None:
    raise AssertionError("built")


@pytest.mark.parametrize("damage", ["missing", "truncated", "manifest", "origin", "force"])
def test_incomplete_samples_are_written_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(target: Samples) -> None:
        built.append(target)
        for folder in target.folders:
            folder.mkdir(parents=True)
            (folder / "file").write_bytes(b"content")

    monkeypatch.setattr(samples_module, "_build", build)
    made = write_samples(tmp_path)
    write_samples(tmp_path)
    assert len(built) == 1
    if damage == "missing":
        (made.block / "file").unlink()
    elif damage == "truncated":
        (made.block / "file").write_bytes(b"")
    elif damage == "manifest":
        (tmp_path / "samples.json").write_text("{")
    elif damage == "origin":
        monkeypatch.setattr(samples_module, "_origin", lambda: {"torch": "another version"})
    write_samples(tmp_path, force=damage == "force")
    assert len(built) == 2
    assert (made.block / "file").read_bytes() == b"content"
    write_samples(tmp_path)
    assert len(built) == 2
