# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's `config.json` says of its MoE layers: dimensions, routing, and how each module is quantised.

Two readers: `moe_config` (model families' keys to `FusedMoEConfig`) and `QuantConfig` (`quantization_config`,
`hf_quant_config.json`). No tensors are touched here.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import FusedMoEConfig
from .numerics import BLOCK
from .quant_keys import KEYS_OF_SCHEME, QuantKey, kBf16, kFp8Dynamic128Sym, kFp8Static128BlockE8M0Sym
from .safe_files import TensorFileError, clean, match_pattern, read_json, shown

logger = logging.getLogger(__name__)

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "relu2": "relu2", "swigluoai": "swigluoai",
}


@dataclass(frozen=True)
class Family:
    """What a model type's code fixes without a key in config.json.

    Attributes:
      scoring_func: over the router logits.
      renormalize: the value where `norm_topk_prob` is absent.
      activation: overrides `hidden_act`.
      interleaved: fused gate and up rows alternate.
      transposed: fused 3-D experts are stored ``[E, in, out]`` in released checkpoints; None where unknown.
    """

    scoring_func: str = "softmax"
    renormalize: bool = True
    activation: str | None = None
    interleaved: bool = False
    transposed: bool | None = None


_SIGMOID = Family("sigmoid", transposed=False)
FAMILIES: dict[str, Family] = {
    "qwen2_moe": Family(renormalize=False, transposed=False),
    "qwen3_moe": Family(renormalize=False, transposed=False),
    "qwen3_next": Family(transposed=False),
    "qwen3_5_moe": Family(transposed=False),
    "qwen3_vl_moe": Family(transposed=True),
    "qwen3_omni_moe": Family(renormalize=False),
    "mixtral": Family(transposed=False),
    "deepseek_v2": Family(renormalize=False, transposed=False),
    "deepseek_v3": _SIGMOID,
    "deepseek_v32": _SIGMOID,
    "kimi_k2": _SIGMOID,
    "glm4_moe": _SIGMOID,
    "nemotron_h": _SIGMOID,
    "minimax_m2": _SIGMOID,
    "gpt_oss": Family(activation="swigluoai", interleaved=True, transposed=True),
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part: `text_config` laid over the outer keys where there is one."""
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise TensorFileError(f"config.json: text_config: got {type(inner).__name__}, want an object")
    return {**{k: v for k, v in config.items() if k != "text_config"}, **inner}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of ``model_type`` (``_text`` and the like stripped); the plain softmax one where it is unknown."""
    name = str(config.get("model_type", ""))
    for candidate in (name, name.removesuffix("_text"), name.removesuffix("_thinker_text")):
        if candidate in FAMILIES:
            return FAMILIES[candidate]
    logger.warning("isomoe: config.json: model_type %s is not known; routing is read from its keys alone", clean(name))
    return Family()


def _number(config: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < 2**31:
            raise TensorFileError(f"config.json: {key}: got {shown(value)}, want a positive integer")
        return value
    raise TensorFileError(f"config.json: {' or '.join(keys)}: missing")


def decoder_layers(config: Mapping[str, Any]) -> int | None:
    """``num_hidden_layers``, or None where config.json does not say.

    Raises:
      TensorFileError: not a positive integer.
    """
    return None if config.get("num_hidden_layers") is None else _number(config, "num_hidden_layers")


def moe_config(config: Mapping[str, Any], *, gated: bool, has_bias: bool) -> FusedMoEConfig:
    """The layer that `config` (see `text_config`) describes.

    Args:
      config: the flat keys of config.json.
      gated, has_bias: what the tensor names show.

    Raises:
      TensorFileError: a missing key, or a value that nothing here computes.
    """
    family = family_of(config)
    act_key = "mlp_hidden_act" if "mlp_hidden_act" in config else "hidden_act"
    activation = family.activation or _ACTIVATIONS.get(str(config.get(act_key, "silu")))
    if activation is None:
        raise TensorFileError(
            f"config.json: {act_key}: got {shown(config[act_key])}, want one of {', '.join(sorted(_ACTIVATIONS))}"
        )
    if activation == "swigluoai" and config.get("swiglu_limit", 7.0) != 7.0:
        raise TensorFileError(f"config.json: swiglu_limit: got {shown(config['swiglu_limit'])}, want 7.0")
    groups, topk_group = config.get("n_group"), config.get("topk_group")
    if groups in (None, 1) or config.get("topk_method") == "greedy":
        groups = topk_group = None
    factor = config.get("routed_scaling_factor")
    renormalize = config.get("norm_topk_prob")
    if renormalize is not None and not isinstance(renormalize, bool):
        raise TensorFileError(f"config.json: norm_topk_prob: got {shown(renormalize)}, want true or false")
    try:
        return FusedMoEConfig(
            num_experts=_number(config, "num_experts", "n_routed_experts", "num_local_experts"),
            experts_per_token=_number(config, "num_experts_per_tok", "moe_topk"),
            hidden_dim=_number(config, "moe_latent_size", "hidden_size"),
            intermediate_size=_number(config, "moe_intermediate_size", "intermediate_size"),
            activation=activation,
            scoring_func=config.get("scoring_func") or family.scoring_func,
            renormalize=family.renormalize if renormalize is None else renormalize,
            routed_scaling_factor=1.0 if factor is None else factor,
            num_expert_group=groups,
            topk_group=topk_group,
            has_bias=has_bias,
            is_act_and_mul=gated,
        )
    except TensorFileError:
        raise
    except (TypeError, ValueError) as error:
        raise TensorFileError(f"config.json: {error}") from None


@dataclass(frozen=True)
class ModuleQuant:
    """How one module's weights are stored.

    Attributes:
      scheme: ``"block"``, ``"channel"``, ``"tensor"`` or ``"bf16"``.
      activation: ``"dynamic"``, ``"static"`` or None (weights only).
      ue8m0: scales are powers of two.
    """

    scheme: str
    activation: str | None = None
    ue8m0: bool = False

    def keys(self) -> tuple[QuantKey, QuantKey]:
        """The (weight, activation) keys that the selector takes."""
        if self.ue8m0:
            return kFp8Static128BlockE8M0Sym, kFp8Dynamic128Sym
        weight, activation = KEYS_OF_SCHEME["tensor_static" if self.activation == "static" else self.scheme]
        return weight, (activation if self.activation else kBf16)


BF16_MODULE = ModuleQuant("bf16")


def _has_run(parts: list[str], entry: str) -> bool:
    """Whether the entry's dotted parts appear in a row in `parts`: whole names only, so `gate` is not `gate_proj`."""
    wanted = entry.split(".")
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def _listed(module: str, patterns: tuple[str, ...]) -> bool:
    parts = module.split(".")
    for entry in patterns:
        if entry.startswith("re:"):
            if match_pattern(entry[3:], module):
                return True
        elif "*" in entry or "?" in entry:
            if fnmatch.fnmatchcase(module, entry):
                return True
        elif entry and _has_run(parts, entry):
            return True
    return False


@dataclass(frozen=True)
class QuantConfig:
    """The quantisation of a whole checkpoint.

    Attributes:
      method: `quant_method`; None for an unquantised checkpoint.
      groups: (targets, scheme) pairs; the first whose targets name the module applies.
      ignored: modules left alone: names, dotted parts of names, wildcards or ``re:`` expressions.
    """

    method: str | None
    groups: tuple[tuple[tuple[str, ...], ModuleQuant], ...] = ()
    ignored: tuple[str, ...] = ()

    def of(self, module: str) -> ModuleQuant:
        """The storage of a module, by its dotted name without ``.weight``."""
        if _listed(module, self.ignored):
            return BF16_MODULE
        for targets, quant in self.groups:
            if "Linear" in targets or _listed(module, targets):
                return quant
        return BF16_MODULE


def _strings(value: object, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise TensorFileError(f"quantization_config: {key}: got {shown(value)}, want a list of names")
    return tuple(value)


def _want(key: str, got: object, *wanted: object) -> None:
    if got not in wanted:
        listed = ", ".join(repr(w) for w in wanted)
        raise TensorFileError(f"quantization_config: {key}: got {shown(got)}, want one of {listed}")


def _fp8(quant: Mapping[str, Any]) -> QuantConfig:
    _want("fmt", quant.get("fmt"), None, "e4m3", "float8_e4m3fn")
    _want("scale_fmt", quant.get("scale_fmt"), None, "ue8m0", "float")
    activation = quant.get("activation_scheme", "dynamic")
    _want("activation_scheme", activation, "dynamic", "static")
    block = quant.get("weight_block_size")
    _want("weight_block_size", block, None, [BLOCK, BLOCK])
    if block is not None and activation != "dynamic":
        raise TensorFileError("quantization_config: activation_scheme: got 'static' with block weights, want 'dynamic'")
    module = ModuleQuant("block" if block else "tensor", activation, ue8m0=quant.get("scale_fmt") == "ue8m0")
    if module.ue8m0 and not block:
        raise TensorFileError("quantization_config: scale_fmt: got 'ue8m0' without weight_block_size")
    ignored = [e for key in ("modules_to_not_convert", "ignored_layers") for e in _strings(quant.get(key), key)]
    return QuantConfig("fp8", ((("Linear",), module),), tuple(ignored))


def _compressed_group(name: str, group: object) -> tuple[tuple[str, ...], ModuleQuant]:
    where = f"config_groups.{clean(name)}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise TensorFileError(f"quantization_config: {where}: got no weights entry")
    weights, inputs = group["weights"], group.get("input_activations")
    if group.get("output_activations") is not None:
        raise TensorFileError(f"quantization_config: {where}.output_activations: got an entry, want null")
    fixed = {"num_bits": (8,), "type": ("float",), "symmetric": (True, None)}
    for key, wanted in {**fixed, "dynamic": (False, None)}.items():
        _want(f"{where}.weights.{key}", weights.get(key), *wanted)
    strategy = weights.get("strategy")
    _want(f"{where}.weights.strategy", strategy, "channel", "tensor", "block")
    if strategy == "block":
        _want(f"{where}.weights.block_structure", weights.get("block_structure"), [BLOCK, BLOCK], "128x128")
    activation = None
    if inputs is not None:
        if not isinstance(inputs, dict):
            raise TensorFileError(f"quantization_config: {where}.input_activations: got no object")
        for key, wanted in fixed.items():
            _want(f"{where}.input_activations.{key}", inputs.get(key), *wanted)
        _want(f"{where}.input_activations.dynamic", inputs.get("dynamic"), True, False, None)
        activation = "dynamic" if inputs.get("dynamic") else "static"
        allowed = {"block": ("group",), "channel": ("token",), "tensor": ("token", "tensor")}[strategy]
        _want(f"{where}.input_activations.strategy", inputs.get("strategy"), *allowed)
        if strategy == "block":
            _want(f"{where}.input_activations.group_size", inputs.get("group_size"), BLOCK)
        if activation == "static" and strategy != "tensor":
            raise TensorFileError(f"quantization_config: {where}: got static activations with {strategy} weights")
    return _strings(group.get("targets"), f"{where}.targets"), ModuleQuant(strategy, activation)


def _compressed(quant: Mapping[str, Any]) -> QuantConfig:
    _want("format", quant.get("format"), "float-quantized", "naive-quantized")
    groups = quant.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise TensorFileError("quantization_config: config_groups: got none")
    parsed = tuple(_compressed_group(name, group) for name, group in groups.items())
    return QuantConfig("compressed-tensors", parsed, _strings(quant.get("ignore"), "ignore"))


def _modelopt(quant: Mapping[str, Any]) -> QuantConfig:
    nested = quant.get("quantization")
    quant = nested if isinstance(nested, dict) else quant
    algo = quant.get("quant_algo")
    _want("quant_algo", algo, "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    module = ModuleQuant("tensor", "static") if algo == "FP8" else ModuleQuant("channel", "dynamic")
    ignored = [e for key in ("exclude_modules", "ignore") for e in _strings(quant.get(key), key)]
    return QuantConfig("modelopt", ((("Linear",), module),), tuple(ignored))


_METHODS = {"fp8": _fp8, "compressed-tensors": _compressed, "modelopt": _modelopt}


def read_quant_config(root: Path, config: Mapping[str, Any]) -> QuantConfig:
    """The checkpoint's quantisation, from config.json or else from ModelOpt's `hf_quant_config.json`.

    Raises:
      TensorFileError: a method, format or granularity that is not read here, by its key.
    """
    quant = config.get("quantization_config")
    quant = config.get("compression_config") if quant is None else quant
    if quant is None and (root / "hf_quant_config.json").exists():
        quant = {"quant_method": "modelopt", **read_json(root, "hf_quant_config.json")}
    if quant is None:
        return QuantConfig(None)
    if not isinstance(quant, dict):
        raise TensorFileError(f"config.json: quantization_config: got {type(quant).__name__}, want an object")
    method = quant.get("quant_method")
    if method is None and isinstance(quant.get("producer"), dict):
        method = quant["producer"].get("name")
    _want("quant_method", method, *_METHODS)
    return _METHODS[str(method)](quant)
