# SPDX-License-Identifier: Apache-2.0
"""The same model twice: as transformers and PEFT compute it, and with its experts computed by `run_moe`.

`Oracle` owes nothing to this package: transformers' Qwen3-MoE in float32 on weights dequantised here by torch, with
adapters loaded and applied by PEFT, one request at a time. `MixedModel` is a copy of that model in which every MoE
layer hands its rows to one `run_moe` call, rows of different adapters mixed; attention, norms, routers and head are
the oracle's. What differs between the two is the expert computation alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import isomoe
from isomoe.common.numerics import BF16
from isomoe.common.recipes import Recipe
from isomoe.tests.samples import one_thread, quiet

BASE = -1


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What one MoE layer saw and gave; float32, rows in batch order, T = batch * sequence.

    Attributes:
      x: input ``[T, H]``.
      topk_weights, topk_ids: routing ``[T, K]``, ids int64.
      y: output ``[T, H]``.
    """

    x: np.ndarray
    topk_weights: np.ndarray
    topk_ids: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, eq=False)
class Forward:
    """Logits ``[B, S, V]`` float32 and a trace a layer."""

    logits: np.ndarray
    layers: tuple[LayerTrace, ...]


def dequantized_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint in float32, scales multiplied in; torch only, none of this package's code."""
    weight_map = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        stored |= load_file(checkpoint / shard)
    state = {}
    for name, tensor in stored.items():
        if name.endswith(("weight_scale", "weight_scale_inv")):
            continue
        value = tensor.to(torch.float32)
        if f"{name}_scale" in stored:
            value = value * stored[f"{name}_scale"].float()
        elif f"{name}_scale_inv" in stored:
            scale = stored[f"{name}_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value * scale[: value.shape[0], : value.shape[1]]
        elif tensor.dtype == torch.float8_e4m3fn:
            raise ValueError(f"{name}: FP8 codes without a scale")
        state[name] = value
    return state


def load_base(checkpoint: Path) -> Any:
    """transformers' model of a checkpoint, dequantised, float32; transformers fuses the experts itself."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = json.loads((checkpoint / "config.json").read_text())
    values.pop("quantization_config", None)
    config = Qwen3MoeConfig.from_dict(values)
    # eager: the plain loop over experts and plain attention, the code to read beside this package's.
    with quiet(), one_thread():
        loaded: Any = Qwen3MoeForCausalLM.from_pretrained(
            None, config=config, state_dict=dequantized_state(checkpoint), dtype=torch.float32,
            output_loading_info=True, attn_implementation="eager", experts_implementation="eager",
        )
    model, report = loaded
    wrong = {kind: keys for kind, keys in report.items() if keys}
    if wrong:
        raise ValueError(f"{checkpoint}: transformers did not load every tensor: {wrong}")
    return model.eval()


def _moe_blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def _traced(model: Any, tokens: np.ndarray) -> Forward:
    """One forward pass of ``tokens [B, S]`` with what every MoE layer's experts took and gave."""
    layers: list[LayerTrace] = []

    def keep(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        x, topk_ids, topk_weights = args
        layers.append(LayerTrace(*(t.detach().numpy().copy() for t in (x, topk_weights, topk_ids, y))))

    hooks = [block.experts.register_forward_hook(keep) for block in _moe_blocks(model)]
    try:
        with torch.no_grad(), one_thread():
            logits = model(torch.from_numpy(tokens)).logits.numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return Forward(logits, tuple(layers))


def _stacked(requests: Sequence[Forward]) -> Forward:
    """Requests of one length as one batch."""
    layers = tuple(
        LayerTrace(*(np.concatenate([getattr(t, f.name) for t in traces]) for f in dataclasses.fields(LayerTrace)))
        for traces in zip(*(request.layers for request in requests), strict=True)
    )
    return Forward(np.concatenate([request.logits for request in requests]), layers)


class Oracle:
    """transformers and PEFT, float32.

    Args:
      checkpoint: the model's folder.
      adapters: PEFT folders by global adapter id.
    """

    def __init__(self, checkpoint: Path, adapters: Mapping[int, Path]) -> None:
        from peft import PeftModel

        base = load_base(checkpoint)
        self.config = base.config
        # PEFT allows one set of target parameters a model, and its adapters may differ there: one copy for each.
        self._models = {BASE: base}
        for adapter_id, folder in adapters.items():
            with quiet(), warnings.catch_warnings():
                # PEFT doubles the rank where it fuses gate and up, then looks for that pattern among modules alone.
                warnings.filterwarnings("ignore", r".*(rank|alpha)_pattern keys did not match", RuntimeWarning)
                wrapped = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
            self._models[adapter_id] = wrapped.get_base_model()

    @property
    def base(self) -> Any:
        """The model without adapters. Not a copy."""
        return self._models[BASE]

    def forward(self, tokens: np.ndarray, adapter_ids: Sequence[int]) -> Forward:
        """Run each request of ``tokens [B, S]`` on its own, with its own adapter."""
        return _stacked([_traced(self._models[a], row[None]) for a, row in zip(adapter_ids, tokens, strict=True)])

    def experts(self, layer: int, adapter_id: int, trace: LayerTrace) -> np.ndarray:
        """A layer's experts, float32 ``[T, H]``, on the rows and the routing of `trace`."""
        experts = _moe_blocks(self._models[adapter_id])[layer].experts
        with torch.no_grad(), one_thread():
            y = experts(
                torch.from_numpy(trace.x), torch.from_numpy(trace.topk_ids), torch.from_numpy(trace.topk_weights)
            )
        return y.numpy()

    def merged_deltas(self, layer: int, adapter_id: int) -> dict[str, np.ndarray]:
        """What PEFT would add to ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]`` on merging, float32."""
        wrapper: Any = _moe_blocks(self._models[adapter_id])[layer].experts
        deltas: dict[str, np.ndarray] = {}
        while hasattr(wrapper, "get_delta_weight"):
            (name,) = wrapper.active_adapters
            deltas[wrapper.parameter_name] = wrapper.get_delta_weight(name).detach().numpy()
            wrapper = wrapper.base_layer
        return deltas

    def greedy(self, prompts: np.ndarray, adapter_ids: Sequence[int], steps: int) -> np.ndarray:
        """``prompts [B, P]`` and `steps` greedy tokens after each, ``[B, P + steps]``; no cache, each step anew."""
        rows = []
        for adapter_id, prompt in zip(adapter_ids, prompts, strict=True):
            row = torch.from_numpy(prompt)[None]
            with torch.no_grad(), one_thread():
                for _ in range(steps):
                    row = torch.cat([row, self._models[adapter_id](row).logits[:, -1:].argmax(-1)], dim=1)
            rows.append(row[0].numpy())
        return np.stack(rows)


class _RunMoE(torch.nn.Module):
    """Stands in for a layer's `experts` module: transformers routes, `run_moe` computes."""

    def __init__(self, executor: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._executor, self._options = executor, options
        self.adapter_ids: np.ndarray | None = None

    def forward(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        x = hidden.to(torch.bfloat16).view(torch.int16).numpy().view(BF16)
        y = isomoe.run_moe(
            self._executor, x, topk_weights.float().numpy(), topk_ids.numpy(), adapter_ids=self.adapter_ids,
            **self._options,
        )
        return torch.from_numpy(y.astype(np.float32))


class MixedModel:
    """A copy of the oracle's base model whose experts are an executor's, all requests of a batch in one call a layer.

    Args:
      oracle: the model that is copied.
      layers: `load_moe_layer`'s result for each layer.
      adapters: `load_lora_adapter`'s results.
      executor, recipe, ep_size: as in `run_moe`.
    """

    def __init__(
        self,
        oracle: Oracle,
        layers: Sequence[tuple[isomoe.FusedMoEConfig, isomoe.MoEWeights]],
        adapters: Sequence[Mapping[int, isomoe.LoRAAdapter]],
        *,
        executor: str,
        recipe: str | Recipe | None = None,
        ep_size: int = 1,
    ) -> None:
        self._model = copy.deepcopy(oracle.base)
        self._experts = []
        for index, (block, (config, weights)) in enumerate(zip(_moe_blocks(self._model), layers, strict=True)):
            loaded = [adapter[index] for adapter in adapters]
            options = {"config": config, "weights": weights, "adapters": loaded, "recipe": recipe, "ep_size": ep_size}
            block.experts = _RunMoE(executor, options)
            self._experts.append(block.experts)

    def forward(self, tokens: np.ndarray, adapter_ids: Sequence[int]) -> Forward:
        """Run ``tokens [B, S]`` as one batch, each request with its adapter (-1 = base)."""
        rows = np.repeat(np.asarray(adapter_ids, np.int32), tokens.shape[1])
        for experts in self._experts:
            experts.adapter_ids = rows
        return _traced(self._model, tokens)
