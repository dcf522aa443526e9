# SPDX-License-Identifier: Apache-2.0
"""A model of Qwen3-Coder-30B-A3B's dimensions without a checkpoint, for timing: random weights, filled in place.

vLLM's own ``load_format="dummy"`` draws values so small that e4m3 rounds them to zero. Importing this module registers
``load_format="isomoe_random"``, which fills parameters with values of useful size. A tensor's seed comes from its
name, so all engines hold the same weights.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from vllm_engine_model import ALPHA, BLOCK, RANK, write_adapter, write_tokenizer

LOAD_FORMAT = "isomoe_random"
LAYERS, HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 48, 2048, 768, 128, 8, 151936
WORDS = 2000
"""Tokens of the tokenizer; prompts are drawn from them."""
ADAPTERS, DISTINCT = 8, 2
_STD, _CODE_STD, _SHARP_STD = 0.02, 64.0, 0.06
_CHUNK = 1 << 25


def write_model(folder: Path, layers: int = LAYERS) -> None:
    """Configuration and tokenizer, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(layers))]
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": 5472, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "moe_intermediate_size": INTER, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": layers, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "rope_theta": 1e7, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": VOCAB,
        "bos_token_id": None, "eos_token_id": WORDS - 1, "pad_token_id": WORDS - 2,
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": plain,
        },
    }, indent=1))  # fmt: skip
    write_tokenizer(folder, WORDS)


def write_adapters(folder: Path, layers: int = LAYERS) -> None:
    """``folder/adapter1`` ... ``adapter8``: `DISTINCT` files of random weights for every expert, links for the rest."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = (("gate_proj", INTER, HIDDEN), ("up_proj", INTER, HIDDEN), ("down_proj", HIDDEN, INTER))
    for adapter in range(1, ADAPTERS + 1):
        target = folder / f"adapter{adapter}"
        if adapter > DISTINCT:
            target.unlink(missing_ok=True)
            target.symlink_to(f"adapter{(adapter - 1) % DISTINCT + 1}")
            continue
        generator = torch.Generator(device=device).manual_seed(adapter)

        def draw(*shape: int, std: float, generator: torch.Generator = generator) -> torch.Tensor:
            values = torch.randn(EXPERTS, *shape, generator=generator, device=device, dtype=torch.float32)
            return values.mul_(std).bfloat16().cpu()

        tensors: dict[str, Any] = {}
        for layer in range(layers):
            for name, rows, columns in shapes:
                a = draw(RANK, columns, std=columns**-0.5)
                b = draw(rows, RANK, std=_STD * ALPHA / RANK)
                for expert in range(EXPERTS):
                    at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                    tensors[f"{at}.lora_A.weight"] = a[expert].clone()
                    tensors[f"{at}.lora_B.weight"] = b[expert].clone()
        write_adapter(target, tensors)


@torch.no_grad()
def fill(name: str, parameter: torch.Tensor) -> None:
    """Random values in place: weights of deviation 0.02 once scaled, router and head 0.06, embeddings 1, norms 1."""
    seed = zlib.crc32(name.encode())
    generator = torch.Generator(device=parameter.device).manual_seed(seed)
    flat = parameter.data.view(-1)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, device=parameter.device, dtype=torch.float32)

    if "norm" in name:
        flat.fill_(1)
    elif "scale" in name:
        spread = torch.rand(flat.shape, generator=generator, device=parameter.device, dtype=torch.float32) + 0.5
        flat.copy_(spread * (_STD / _CODE_STD))
    elif parameter.is_floating_point():
        std = _STD
        if parameter.dtype == torch.float8_e4m3fn:
            std = _CODE_STD
        elif "embed_tokens" in name:
            std = 1.0
        elif "lm_head" in name or ".gate." in name:
            std = _SHARP_STD
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            part.copy_(draw(part.numel()).mul_(std).clamp_(-448, 448))


def register_loader() -> None:
    """Make ``load_format="isomoe_random"`` known to vLLM in this process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing to fetch."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                fill(name, parameter)
