# SPDX-License-Identifier: Apache-2.0
"""A whole model through tpu-inference's wrapper on virtual devices.

Everything is tpu-inference's own (loading, sharding, the jitted step, linear layers, rotary embedding, logits) but
the attention kernel, which runs on no CPU: causal attention in plain JAX takes its place, for a batch of equally long
prompts without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def _attend(attention: Any, length: int) -> Any:
    """`attention.forward` for prompts of `length` tokens, one after another."""
    import jax
    import jax.numpy as jnp
    from torchax.interop import jax_view, torch_view

    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    mask = jnp.tril(jnp.ones((length, length), bool))

    def forward(query: Any, key: Any, value: Any, *unused: Any, **also_unused: Any) -> Any:
        shape = (-1, length)
        q = jax_view(query).reshape(*shape, heads, size).astype(jnp.float32)
        k, v = (
            jnp.repeat(jax_view(t).reshape(*shape, kv_heads, size).astype(jnp.float32), heads // kv_heads, axis=2)
            for t in (key, value)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(size)
        chosen = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", chosen, v)
        return torch_view(out.reshape(-1, heads * size).astype(jax_view(query).dtype))

    return forward


def device_mesh(devices: int, names: tuple[str, ...] = ("data", "model"), axis: str = "model") -> Any:
    """A mesh of `devices` devices, all along `axis`."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    shape = [devices if name == axis else 1 for name in names]
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), names)


class Served:
    """A checkpoint loaded by tpu-inference's model wrapper on a mesh, and its jitted step."""

    def __init__(self, vllm_config: Any, mesh: Any, length: int) -> None:
        import jax
        import vllm.ir
        from tpu_inference.distributed import jax_parallel_state
        from tpu_inference.models.vllm.vllm_model_wrapper import VllmModelWrapper

        vllm.ir.set_default_torch_wrap(False)  # as tpu-inference's worker does
        jax_parallel_state.init_pp_distributed_environment("", 0, 1, jax.devices()[0], need_pp=False)
        self.mesh, self.length = mesh, length
        self.adapter_ids: dict[Path, int] = {}
        self.wrapper = VllmModelWrapper(vllm_config, jax.random.PRNGKey(0), mesh)
        self.params, self.lora_manager = self.wrapper.load_weights()
        self.wrapper.jit_step_func()
        self.compute_logits = self.wrapper.jit_compute_logits_func()
        for layer in self.layers:
            attention = layer.self_attn.attn
            attention.forward = _attend(attention, length)

    @property
    def layers(self) -> Any:
        return self.wrapper.model.vllm_model.model.layers

    def experts(self, layer: int) -> Any:
        """The vLLM layer that holds a block's experts."""
        block = self.layers[layer].mlp.experts
        return getattr(block, "base_layer", block).routed_experts

    def activate(self, adapters: Sequence[Path | None]) -> Any:
        """Make each prompt use an adapter folder (None: the base model), as tpu-inference's runner does; returns the
        step's LoRA metadata."""
        from tpu_inference.runner.lora_utils import LoraUtils
        from vllm.lora.request import LoRARequest
        from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

        requests = {
            path: LoRARequest(str(path), self.adapter_ids.setdefault(path, 1 + len(self.adapter_ids)), str(path))
            for path in adapters if path is not None
        }
        by_prompt = tuple(0 if path is None else requests[path].lora_int_id for path in adapters)
        by_token = tuple(i for i in by_prompt for _ in range(self.length))

        class Runner(LoRAModelRunnerMixin):
            model = self.wrapper
            lora_config = self.wrapper.vllm_config.lora_config
            lora_manager = self.lora_manager
            state = self.params
            state_leaves = self.params
            refresh_state_leaves = staticmethod(lambda: None)  # tpu-inference 0.32 asks for it; `state` is read here
            input_batch = SimpleNamespace(make_lora_inputs=lambda _: (by_prompt, by_token, set(requests.values())))

        runner = Runner()
        utils = LoraUtils(runner)
        scheduled = np.full(len(adapters), self.length)
        utils.set_active_loras(scheduled, scheduled.sum(), scheduled.sum())
        self.params = runner.state
        return utils.extract_lora_metadata()

    def forward(self, tokens: np.ndarray, lora_metadata: Any = None) -> np.ndarray:
        """Logits ``[B, S, V]`` float32 of prompts ``[B, S]``, every step of it jitted."""
        import jax
        import jax.numpy as jnp

        assert tokens.shape[1] == self.length
        ids = jnp.asarray(tokens.reshape(-1), jnp.int32)
        positions = jnp.tile(jnp.arange(self.length, dtype=jnp.int32), tokens.shape[0])
        with jax.set_mesh(self.mesh):
            _, hidden, _, _ = self.wrapper.step_fn_no_options(
                self.params, [], ids, None, None, positions, (), lora_metadata, None, True, True
            )
            logits = self.compute_logits(self.params, hidden, lora_metadata)
        return np.asarray(logits, np.float32).reshape(*tokens.shape, -1)


def with_plain_attention(checkpoint: Path, target: Path) -> Path:
    """A copy of a block-FP8 checkpoint whose attention is bfloat16.

    tpu-inference replicates KV heads up to the tensor-parallel size and cannot do so with a [128, 128] scale that two
    heads of 64 columns share.
    """
    from safetensors.torch import load_file, save_file

    from isomoe.tests.oracle import dequantized_state

    target.mkdir(parents=True)
    plain = {
        name: tensor.bfloat16() for name, tensor in dequantized_state(checkpoint).items() if ".self_attn." in name
    }
    for shard in checkpoint.glob("*.safetensors"):
        tensors = {n: plain.get(n, t) for n, t in load_file(shard).items() if not (
            ".self_attn." in n and n.endswith("_scale_inv")
        )}
        save_file(tensors, target / shard.name, metadata={"format": "pt"})
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        n: f for n, f in index["weight_map"].items() if not (".self_attn." in n and n.endswith("_scale_inv"))
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] += [
        f"model.layers.{layer}.self_attn.{name}_proj"
        for layer in range(config["num_hidden_layers"]) for name in "qkvo"
    ]
    (target / "config.json").write_text(json.dumps(config))
    return target
