# SPDX-License-Identifier: Apache-2.0
"""The small Qwen3-MoE that `vllm_engine.py` serves, its adapters, and what transformers and PEFT say of it.

Checkpoints and adapters are made from Philox bytes by exact float32 steps, so that two machines hold the same files
(`fingerprint`): the reference is computed on one, the engine runs on another. Layers have the dimensions of
Qwen3-30B-A3B but fewer experts. Values are random, shaped so that a comparison never hinges on a router's near-tie:
each token's embedding carries one feature for each of its experts, in channels that no layer writes to much.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 2, 2048, 768, 32, 4, 1024
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
RANK, ALPHA, ADAPTERS = 16, 32, 3
SCHEMES = ("block", "channel")
BLOCK, E4M3_MAX = 128, 448.0

# The reference's requests: adapter of each (0 = base), tokens of a prompt, greedy tokens after it.
REQUESTS = (0, 1, 2, 0, 2, 1, 1, 2)
PROMPT, STEPS = 24, 6
PROJECTIONS = (("gate", INTER, HIDDEN), ("up", INTER, HIDDEN), ("down", HIDDEN, INTER))

# Standard deviation of an int8 drawn uniformly.
_INT8 = float(np.sqrt((256**2 - 1) / 12))
# Embedding features of a token's first, second, ... expert, and what is left of other writes to those channels.
_FEATURES = (18.0, 16.0, 14.0, 12.0)
_LEAK = 2.0**-5
_ROUTER = 0.25


def _bytes(name: str, count: int) -> np.ndarray:
    """int8 ``[count]``, uniform, the same for the same name on every machine."""
    words = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(-(-count // 8))
    return words.astype("<u8").view(np.int8)[:count]


def uniform(name: str, *shape: int, std: float) -> np.ndarray:
    """float32 of 256 equidistant values with the standard deviation `std`."""
    return _bytes(name, int(np.prod(shape))).reshape(shape) * np.float32(std / _INT8)


def _gains(name: str, *shape: int) -> np.ndarray:
    """float32 in ``[1/2, 3/2)``."""
    return (_bytes(name, int(np.prod(shape))).reshape(shape) & 127).astype(np.float32) / 128 + np.float32(0.5)


def _choices(layer: int) -> np.ndarray:
    """The experts of each token in a layer, best first: ``[VOCAB, TOP_K]``."""
    keys = _bytes(f"experts/{layer}", VOCAB * EXPERTS).reshape(VOCAB, EXPERTS)
    return np.argsort(keys, axis=1, kind="stable")[:, :TOP_K]


def _write_scale() -> np.ndarray:
    """``[HIDDEN, 1]``: layers write little to the routing channels, which come first."""
    scale = np.ones((HIDDEN, 1), np.float32)
    scale[: LAYERS * EXPERTS] = _LEAK
    return scale


def dense_tensors() -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor but the experts', by its name in transformers; float32, to be rounded to bfloat16."""
    embed = uniform("embed", VOCAB, HIDDEN, std=1.5)
    embed[:, : LAYERS * EXPERTS] = 0
    rows = np.arange(VOCAB)
    for layer in range(LAYERS):
        for feature, experts in zip(_FEATURES, _choices(layer).T, strict=True):
            embed[rows, layer * EXPERTS + experts] = feature
    yield "model.embed_tokens.weight", embed
    yield "lm_head.weight", uniform("head", VOCAB, HIDDEN, std=2.5 * HIDDEN**-0.5)
    yield "model.norm.weight", _gains("norm", HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            projection = f"{at}.self_attn.{name}_proj.weight"
            yield projection, uniform(projection, heads * HEAD_DIM, HIDDEN, std=HIDDEN**-0.5)
        out = f"{at}.self_attn.o_proj.weight"
        yield out, _write_scale() * uniform(out, HIDDEN, HEADS * HEAD_DIM, std=0.5 * (HEADS * HEAD_DIM) ** -0.5)
        router = np.zeros((EXPERTS, HIDDEN), np.float32)
        router[np.arange(EXPERTS), layer * EXPERTS + np.arange(EXPERTS)] = _ROUTER
        yield f"{at}.mlp.gate.weight", router + uniform(f"{at}.gate", EXPERTS, HIDDEN, std=2.0**-9)
        for norm, width in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM),
                            ("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):  # fmt: skip
            yield f"{at}.{norm}.weight", _gains(f"{at}.{norm}", width) if width == HIDDEN else np.ones(width, "f4")


def expert_weight(layer: int, expert: int, name: str, rows: int, columns: int) -> np.ndarray:
    """A projection's weight before quantisation, float32 ``[rows, columns]``; rows and column blocks have gains."""
    at = f"{layer}/{expert}/{name}"
    weight = uniform(at, rows, columns, std=(0.5 if name == "down" else 1.5) * columns**-0.5)
    weight *= _gains(f"{at}/rows", rows, 1)
    weight *= np.repeat(_gains(f"{at}/blocks", 1, columns // BLOCK), BLOCK, axis=1)
    return weight * _write_scale() if name == "down" else weight


def quantise(weight: np.ndarray, scheme: str) -> dict[str, Any]:
    """e4m3 codes and float32 scales of ``weight [rows, columns]`` as torch tensors, by the suffix of their names."""
    import torch

    w = torch.from_numpy(weight)
    if scheme == "channel":
        scale = w.abs().amax(1, keepdim=True) / E4M3_MAX
        return {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    blocks = w.view(w.shape[0] // BLOCK, BLOCK, w.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    codes = (blocks / scale[:, None, :, None]).view(w.shape).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}


def quantization_config(scheme: str) -> dict[str, Any]:
    """Experts quantised, the rest bfloat16."""
    dense = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(LAYERS) for p in "qkvo"]
    dense += [f"model.layers.{i}.mlp.gate" for i in range(LAYERS)]
    if scheme == "block":
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head", *dense],
        }  # fmt: skip
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", *dense],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {**eight, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight, "strategy": "token", "dynamic": True},
        }},
    }  # fmt: skip


def model_config(scheme: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN, "max_position_embeddings": 4096, "mlp_only_layers": [],
        "moe_intermediate_size": INTER, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": 1e7, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 2,
        "quantization_config": quantization_config(scheme),
    }  # fmt: skip


def write_tokenizer(folder: Path, words: int) -> None:
    """Words w0, w1, ... for the tokens; prompts come as ids, but the engine wants a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": f"w{words - 1}",
        "model_max_length": 1 << 18,
    }))  # fmt: skip
    special = {"eos_token_id": words - 1, "pad_token_id": words - 2}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, **special}))


def write_adapter(folder: Path, tensors: dict[str, Any]) -> None:
    """An adapter as PEFT saves it; `tensors` by their names there."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["gate_proj", "up_proj", "down_proj"], "inference_mode": True,
    }))  # fmt: skip


def adapter_tensors(adapter: int) -> dict[str, Any]:
    """bfloat16 A and B of every expert's projections, by PEFT's names for an unfused expert list."""
    import torch

    tensors = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, rows, columns in PROJECTIONS:
                at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                a = uniform(f"{adapter}/{at}/a", RANK, columns, std=columns**-0.5)
                b = uniform(f"{adapter}/{at}/b", rows, RANK, std=0.4 * RANK**-0.5 * RANK / ALPHA)
                if name == "down":
                    b *= _write_scale()
                tensors[f"{at}.lora_A.weight"] = torch.from_numpy(a).bfloat16()
                tensors[f"{at}.lora_B.weight"] = torch.from_numpy(b).bfloat16()
    return tensors


def make(folder: Path) -> str:
    """Write ``folder/block``, ``folder/channel`` and ``folder/adapter1`` ...; returns their `fingerprint`."""
    import torch
    from safetensors.torch import save_file

    shared = {name: torch.from_numpy(value).bfloat16() for name, value in dense_tensors()}
    experts: dict[str, dict[str, Any]] = {scheme: {} for scheme in SCHEMES}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, rows, columns in PROJECTIONS:
                weight = expert_weight(layer, expert, name, rows, columns)
                at = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                for scheme, tensors in experts.items():
                    tensors |= {f"{at}.{suffix}": value for suffix, value in quantise(weight, scheme).items()}
    for scheme, tensors in experts.items():
        target = folder / scheme
        target.mkdir(parents=True, exist_ok=True)
        everything = {**shared, **tensors}
        save_file(everything, target / "model.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(everything, "model.safetensors")}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
        (target / "config.json").write_text(json.dumps(model_config(scheme), indent=1))
        write_tokenizer(target, VOCAB)
    for adapter in range(1, ADAPTERS + 1):
        write_adapter(folder / f"adapter{adapter}", adapter_tensors(adapter))
    found = fingerprint(folder)
    (folder / "fingerprint").write_text(found)
    return found


def fingerprint(folder: Path) -> str:
    """Of every tensor under a `make` folder: the same on two machines where they hold the same numbers."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for path in sorted(folder.glob("*/*.safetensors")):
        digest.update(path.parent.name.encode())
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prompts(rows: int, length: int, vocab: int, seed: int) -> np.ndarray:
    """Random token ids ``[rows, length]`` below the special ones, int64."""
    words = np.random.Philox(key=seed).random_raw(rows * length)
    return (words % np.uint64(vocab - 2)).astype(np.int64).reshape(rows, length)


def reference_prompts() -> np.ndarray:
    return prompts(len(REQUESTS), PROMPT, VOCAB, seed=77)


def centred(logits: np.ndarray) -> np.ndarray:
    """Logits or log-probabilities ``[..., V]`` less their mean: the two then differ by rounding alone."""
    return logits - logits.mean(-1, keepdims=True)


def reference(folder: Path, out: Path) -> None:
    """Write what transformers and PEFT, float32, compute from a `make` folder's files.

    The file holds for each scheme ``<scheme>_tokens`` int64 ``[requests, STEPS]`` (greedy) and ``<scheme>_logits``
    float32 ``[requests, STEPS, VOCAB]`` (`centred`), and ``fingerprint``. Prints how far bfloat16 arithmetic and
    each adapter move the logits.
    """
    import torch

    from isomoe.tests.oracle import BASE, Oracle

    tokens = reference_prompts()
    owners = [a - 1 if a else BASE for a in REQUESTS]
    last = slice(PROMPT - 1, PROMPT - 1 + STEPS)
    results: dict[str, Any] = {"fingerprint": (folder / "fingerprint").read_text()}
    for scheme in SCHEMES:
        oracle = Oracle(folder / scheme, {a - 1: folder / f"adapter{a}" for a in set(REQUESTS) if a})
        rows = oracle.greedy(tokens, owners, STEPS)
        logits = centred(oracle.forward(rows, owners).logits[:, last])
        results[f"{scheme}_tokens"], results[f"{scheme}_logits"] = rows[:, PROMPT:], logits
        plain = centred(oracle.forward(rows, [BASE] * len(rows)).logits[:, last])
        for adapter in sorted({a for a in REQUESTS if a}):
            mine = [i for i, a in enumerate(REQUESTS) if a == adapter]
            moved = distance(logits[mine], plain[mine])
            print(f"{scheme}: adapter {adapter} moves the logits by {moved:.3f} (relative L2)")
            if moved < 0.1:
                raise ValueError(f"adapter {adapter}: moves the logits by {moved:.3f}, want 0.1 to prove anything")
        with torch.no_grad():
            rounded = oracle.base.to(torch.bfloat16)(torch.from_numpy(rows)).logits.float().numpy()[:, last]
        print(f"{scheme}: bfloat16 arithmetic moves base logits by {distance(centred(rounded), plain):.5f}")
    np.savez_compressed(out, **results)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """``|got - want| / |want|``, L2 over everything."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
