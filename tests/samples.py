# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3-MoE and two adapters on disk, in the forms that people publish, written by the libraries they use.

`write_samples` makes, under one folder:

    bf16/              transformers' own `save_pretrained`: shards and an index, one tensor an expert and projection
    fp8-dynamic/       compressed-tensors FP8_DYNAMIC: a scale an output row (float32), per-token activations
    fp8-block/         [128, 128] blocks with `weight_scale_inv` (bfloat16), 1x128 activations
    lora-per-expert/   PEFT on an unfused expert list (the module tree of transformers 4): rank 8, alpha 12
    lora-fused/        PEFT `target_parameters` on the fused 3-D parameters: rank 16, alpha 6, rsLoRA

Both FP8 forms hold the bf16 weights quantised by this package's own quantisers; attention is quantised too, as in
published checkpoints, while embeddings, norms, routers and the head are not.

The weights are random, but shaped so that a test on them can fail and cannot fail by chance:

- Rows, and runs of 128 columns, have gains of their own, so a scale put on the wrong row or block shows.
- The hidden and intermediate sizes differ, and so do the ranks, so a transposed tensor cannot fit.
- Every token carries a feature for each of its experts, in directions that other tensors hardly write to: the K-th
  expert then leads the next by far more than FP8 noise, and a comparison never hinges on a router's near-tie.
- The head reads out the mean final state of each token (one closed-form step of training) besides noise, so that most
  greedy steps have a clear winner; experts supply about half of that state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isomoe.common.checks import check_choice
from isomoe.common.numerics import BF16, BLOCK, quantize_weight_block, quantize_weight_channel

_MANIFEST = "samples.json"
_SHARD_BYTES = 4 << 20
_SEED = 20

# Sizes of what the layers write, in units of the embedding's root mean square.
_GAIN_ATTENTION = 0.5
_GAIN_EXPERTS = 0.5
_GAIN_PREACTIVATION = 1.5
# Features that carry the routing, before the norm: first choice, then second; and what remains of other writes there.
_ROUTE_FEATURES = (7.0, 5.0)
_ROUTE_LEAK = 0.1
_ROUTER_GAIN = 0.9
# Logits: root mean square of the random part, and how far the read-out lifts the expected token.
_HEAD_NOISE = 1.0
_HEAD_READOUT = 4.0
# Relative size of an adapter's change to a projection's output.
_LORA_GAIN = 0.4


@dataclass(frozen=True)
class SampleDims:
    """Dimensions of the sample model."""

    num_layers: int = 2
    num_experts: int = 8
    experts_per_token: int = 2
    hidden_dim: int = 256
    intermediate_size: int = 384
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 320


DIMS = SampleDims()


@dataclass(frozen=True)
class Samples:
    """Where the samples are.

    Attributes:
      root: the folder that holds them all.
      bf16, channel, block: checkpoint folders, by `MoEWeights` scheme.
      lora_per_expert, lora_fused: adapter folders.
      dims: the model's dimensions.
    """

    root: Path
    bf16: Path
    channel: Path
    block: Path
    lora_per_expert: Path
    lora_fused: Path
    dims: SampleDims = DIMS

    @classmethod
    def under(cls, root: Path) -> Samples:
        """The paths below `root`, whether or not they exist."""
        return cls(
            root, bf16=root / "bf16", channel=root / "fp8-dynamic", block=root / "fp8-block",
            lora_per_expert=root / "lora-per-expert", lora_fused=root / "lora-fused",
        )

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.bf16, self.channel, self.block, self.lora_per_expert, self.lora_fused)

    def checkpoint(self, scheme: str) -> Path:
        """The checkpoint of a scheme: ``"bf16"``, ``"channel"`` or ``"block"``."""
        folders = {"bf16": self.bf16, "channel": self.channel, "block": self.block}
        check_choice("scheme", scheme, folders)
        return folders[scheme]


def write_samples(root: str | Path, *, force: bool = False) -> Samples:
    """Write the samples below `root`, or return at once where they are there and complete.

    The same versions of this file and of the libraries give the same samples. Several processes may call this for
    one folder; the first writes, the others wait.

    Args:
      root: a folder; made if missing. Only the sample folders and ``samples.json`` inside it are touched.
      force: write again in any case.

    Raises:
      ImportError: torch, transformers or peft is missing; ``pip install isomoe[parity]`` brings them.
    """
    root = Path(root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    samples = Samples.under(root)
    with _locked(root / ".samples.lock"):
        if force or not _is_complete(samples):
            (root / _MANIFEST).unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".samples-") as scratch:
                made = Samples.under(Path(scratch))
                _build(made)
                for source, target in zip(made.folders, samples.folders, strict=True):
                    shutil.rmtree(target, ignore_errors=True)
                    source.rename(target)
            manifest = {"origin": _origin(), "dims": dataclasses.asdict(DIMS), "files": _sizes(samples)}
            (root / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    return samples


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and the libraries' notices of each other's deprecations."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: on matrices this small, threads cost far more than they bring where cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _origin() -> dict[str, str]:
    """What the samples' bytes depend on."""
    made_by = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    return made_by | {"samples.py": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}


def _sizes(samples: Samples) -> dict[str, int]:
    files = (f for folder in samples.folders for f in sorted(folder.rglob("*")) if f.is_file())
    return {str(f.relative_to(samples.root)): f.stat().st_size for f in files}


def _is_complete(samples: Samples) -> bool:
    try:
        manifest = json.loads((samples.root / _MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return manifest.get("origin") == _origin() and manifest.get("files") == _sizes(samples)


def _build(samples: Samples) -> None:
    try:
        import peft  # noqa: F401
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"the samples need {error.name}: pip install 'isomoe[parity]'") from error

    with quiet(), one_thread():
        with torch.no_grad():
            model = _base_model()
        model.save_pretrained(samples.bf16, max_shard_size=_SHARD_BYTES)
        _write_per_expert_adapter(samples.lora_per_expert, model.config)
        _write_fused_adapter(samples.lora_fused, model)
        _write_quantized(samples.bf16, samples.channel, _channel_tensors, _channel_config())
        _write_quantized(samples.bf16, samples.block, _block_tensors, _block_config())


# --- the model ------------------------------------------------------------------------------------------------------


def _normal(name: str, *shape: int) -> np.ndarray:
    """Standard normal float32, the same for the same name on every machine."""
    return np.random.default_rng([_SEED, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)


def _routing_directions() -> np.ndarray:
    """Orthonormal directions ``[L, E, H]``, one for each layer's experts."""
    q, _ = np.linalg.qr(_normal("routing", DIMS.hidden_dim, DIMS.num_layers * DIMS.num_experts))
    return np.ascontiguousarray(q.T.reshape(DIMS.num_layers, DIMS.num_experts, DIMS.hidden_dim))


def _gained(name: str, rows: int, cols: int) -> np.ndarray:
    """Random ``[rows, cols]`` whose product with unit-variance input has unit variance, on average over its rows.

    Rows have log-normal gains, runs of 128 columns a gain between 0.6 and 1.4.
    """
    row = np.exp(0.4 * _normal(name + "/rows", rows, 1) - 0.16)
    col = 1 + 0.4 * np.tanh(_normal(name + "/cols", 1, -(-cols // BLOCK)))
    return _normal(name, rows, cols) * row * np.repeat(col, BLOCK, axis=1)[:, :cols] / np.float32(np.sqrt(cols))


def _tensors() -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter of the model but the head, float32, by its name in transformers."""
    d = DIMS
    directions = _routing_directions()
    span = directions.reshape(-1, d.hidden_dim)

    # Keeps most of what a tensor writes out of the routing directions.
    spare = np.eye(d.hidden_dim, dtype=np.float32) - np.float32(1 - _ROUTE_LEAK) * (span.T @ span)
    embed = _normal("embed", d.vocab_size, d.hidden_dim)
    embed -= embed @ span.T @ span
    choices = np.argsort(_normal("choices", d.num_layers, d.vocab_size, d.num_experts), axis=-1)
    strength = 1 + 0.08 * np.tanh(_normal("strength", d.num_layers, d.vocab_size, d.experts_per_token))
    for layer in range(d.num_layers):
        for k, feature in enumerate(_ROUTE_FEATURES):
            embed += feature * strength[layer, :, k, None] * directions[layer][choices[layer, :, k]]
    yield "model.embed_tokens.weight", embed
    yield "model.norm.weight", np.exp(0.2 * _normal("norm", d.hidden_dim))
    for layer in range(d.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", np.exp(0.2 * _normal(prefix + "ln1", d.hidden_dim))
        norm = np.exp(0.2 * _normal(prefix + "ln2", d.hidden_dim))
        yield prefix + "post_attention_layernorm.weight", norm
        for name, heads in (("q", d.num_heads), ("k", d.num_kv_heads), ("v", d.num_kv_heads)):
            yield (
                f"{prefix}self_attn.{name}_proj.weight",
                _gained(f"{prefix}{name}", heads * d.head_dim, d.hidden_dim),
            )
        out = _gained(prefix + "o", d.hidden_dim, d.num_heads * d.head_dim)
        yield prefix + "self_attn.o_proj.weight", _GAIN_ATTENTION * spare @ out
        yield prefix + "mlp.gate.weight", _ROUTER_GAIN * directions[layer] / norm
        experts = [f"{prefix}expert{e}" for e in range(d.num_experts)]
        gate_up = [_gained(f"{name}/{half}", d.intermediate_size, d.hidden_dim)
                   for name in experts for half in ("gate", "up")]
        yield (
            prefix + "mlp.experts.gate_up_proj",
            _GAIN_PREACTIVATION * np.stack(gate_up).reshape(d.num_experts, 2 * d.intermediate_size, d.hidden_dim),
        )
        down = np.stack([_gained(f"{name}/down", d.hidden_dim, d.intermediate_size) for name in experts])
        yield prefix + "mlp.experts.down_proj", _GAIN_EXPERTS * spare @ down


def _base_model() -> Any:
    """transformers' Qwen3MoeForCausalLM in bfloat16 with the weights above and a read-out head."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    d = DIMS
    values: dict[str, Any] = {
        "vocab_size": d.vocab_size, "hidden_size": d.hidden_dim, "intermediate_size": 3 * d.hidden_dim,
        "num_hidden_layers": d.num_layers, "num_attention_heads": d.num_heads, "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim, "moe_intermediate_size": d.intermediate_size, "num_experts": d.num_experts,
        "num_experts_per_tok": d.experts_per_token, "norm_topk_prob": True, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }
    config = Qwen3MoeConfig(**values)
    model = Qwen3MoeForCausalLM(config).float().eval()
    parameters = dict(model.named_parameters())
    for name, value in _tensors():
        parameters[name].copy_(torch.from_numpy(value.astype(BF16).astype(np.float32)))
    # Four contexts a token, in four orders; the state's mean tells the token, whatever precedes it.
    orders = np.argsort(_normal("contexts", 4, d.vocab_size), axis=-1).reshape(16, -1)
    states = model.model(torch.from_numpy(orders)).last_hidden_state.numpy()
    mean = np.zeros((d.vocab_size, d.hidden_dim), np.float64)
    np.add.at(mean, orders.ravel(), states.reshape(-1, d.hidden_dim).astype(np.float64) / 4)
    mean -= mean.mean(axis=0)
    readout = mean / np.square(mean).sum(axis=1, keepdims=True)
    head = _HEAD_NOISE * _normal("head", d.vocab_size, d.hidden_dim) / np.sqrt(np.square(states).sum(-1).mean())
    following = np.argsort(_normal("following", d.vocab_size))
    head[following] += (_HEAD_READOUT * readout).astype(np.float32)
    parameters["lm_head.weight"].copy_(torch.from_numpy(head))
    return model.to(torch.bfloat16)


# --- quantised checkpoints ------------------------------------------------------------------------------------------


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    """Every tensor of a sharded checkpoint, by name, in the index's order."""
    from safetensors.torch import load_file

    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {name: load_file(folder / name) for name in sorted(set(weight_map.values()))}
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _write_checkpoint(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Shards of bounded size in name order, their index, and config.json, named as on the model hub."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += tensors[name].nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _is_quantized(name: str) -> bool:
    """Projections of attention and experts, as in published FP8 checkpoints."""
    return name.endswith("_proj.weight")


Quantizer = Callable[[str, np.ndarray], Iterable[tuple[str, Any]]]


def _write_quantized(source: Path, target: Path, quantize: Quantizer, quantization_config: dict[str, Any]) -> None:
    tensors: dict[str, Any] = {}
    for name, tensor in _read_checkpoint(source).items():
        tensors.update(quantize(name, tensor.float().numpy()) if _is_quantized(name) else [(name, tensor)])
    config = json.loads((source / "config.json").read_text())
    # transformers 5 stores this key under a new name; published checkpoints have the old one.
    config["num_experts"] = config.pop("num_local_experts", DIMS.num_experts)
    _write_checkpoint(target, tensors, config | {"quantization_config": quantization_config})


def _torch_codes(codes: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)


def _channel_tensors(name: str, weight: np.ndarray) -> Iterator[tuple[str, Any]]:
    import torch

    codes, scales = quantize_weight_channel(weight)
    yield name, _torch_codes(codes)
    yield name.removesuffix("weight") + "weight_scale", torch.from_numpy(scales[:, None].copy())


def _block_tensors(name: str, weight: np.ndarray) -> Iterator[tuple[str, Any]]:
    import torch

    codes, scales = quantize_weight_block(weight)
    yield name, _torch_codes(codes)
    yield name.removesuffix("weight") + "weight_scale_inv", torch.from_numpy(scales).to(torch.bfloat16)


def _channel_config() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "float",
    }
    activations = weights | {"dynamic": True, "observer": None, "strategy": "token"}
    group = {
        "input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _block_config() -> dict[str, Any]:
    unconverted = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": [
            "lm_head", *(f"model.layers.{layer}.{name}" for layer in range(DIMS.num_layers) for name in unconverted)
        ],
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


# --- adapters -------------------------------------------------------------------------------------------------------


def _fill_lora(peft_model: Any, seed: str) -> None:
    """Give every LoRA factor random values, B included, exact in bfloat16.

    A product of both changes a projection's output by about `_LORA_GAIN` of its size.
    """
    import torch

    gains = {"down_proj": _GAIN_EXPERTS, "gate_up_proj": _GAIN_PREACTIVATION}
    with torch.no_grad():
        for name, layer in peft_model.named_modules():
            if not hasattr(layer, "lora_A") or not len(layer.lora_A):
                continue
            projection = getattr(layer, "parameter_name", None) or name.rsplit(".", 1)[-1]
            gain = gains["down_proj" if projection == "down_proj" else "gate_up_proj"]
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            rank = layer.r["default"]
            scale = _LORA_GAIN * gain / (layer.scaling["default"] * np.sqrt(rank))
            values_a = _normal(f"{seed}/{name}/A", *a.shape) / np.sqrt(np.float32(a.shape[1]))
            values_b = _normal(f"{seed}/{name}/B", *b.shape) * np.float32(scale)
            for parameter, values in ((a, values_a), (b, values_b)):
                parameter.copy_(torch.from_numpy(values.astype(BF16).astype(np.float32)))


def _write_per_expert_adapter(folder: Path, config: Any) -> None:
    """An adapter as trained where experts are a list of modules (transformers 4): three tensors pairs an expert.

    transformers 5 holds experts as 3-D parameters, so PEFT is given the older module tree, made of transformers' own
    `Qwen3MoeMLP`, one an expert.
    """
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    def module(**children: nn.Module) -> nn.Module:
        parent = nn.Module()
        for name, child in children.items():
            parent.add_module(name, child)
        return parent

    layers = nn.ModuleList()
    for _ in range(DIMS.num_layers):
        experts = [Qwen3MoeMLP(config, intermediate_size=DIMS.intermediate_size) for _ in range(DIMS.num_experts)]
        layers.append(module(mlp=module(experts=nn.ModuleList(experts))))
    tree = module(model=module(layers=layers))
    lora = LoraConfig(r=8, lora_alpha=12, lora_dropout=0.0, target_modules=["gate_proj", "up_proj", "down_proj"])
    peft_model = get_peft_model(tree, lora)
    _fill_lora(peft_model, "per-expert")
    peft_model.peft_config["default"].task_type = "CAUSAL_LM"
    peft_model.save_pretrained(str(folder))


def _write_fused_adapter(folder: Path, model: Any) -> None:
    """An adapter on the fused parameters of transformers 5, in bfloat16; wraps `model`, which is of no use after."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=16, lora_alpha=6, use_rslora=True, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    peft_model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    _fill_lora(peft_model, "fused")
    peft_model.save_pretrained(str(folder))
