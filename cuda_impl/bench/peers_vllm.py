# SPDX-License-Identifier: Apache-2.0
"""vLLM's own FP8 MoE kernels as peers: the object that a vLLM layer calls, fed with this run's tensors.

`FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), <Experts>).apply(...)` with weights through vLLM's own conversion:
input quantisation, alignment, both GEMMs, activation, weighted sum; no router, no all-reduce. Adapters go in by
`set_lora_context`, as vLLM's LoRA layer does it. Written for vLLM 0.26; another version may move a name, which then
shows as the row's reason.
"""

from __future__ import annotations

import functools
import importlib.util
import types
from typing import Any

import torch

from .clock import Calls
from .data import FIRST_ADAPTER_ID, Batch
from .peers import LayerData, Peer, Problem

MAX_TOKENS = 8192  # size of vLLM's adapter tables
# name: (Fp8MoeBackend member, experts module, experts class, schemes, adapters)
_BACKENDS = {
    "triton": ("TRITON", "triton_moe", "TritonExperts", ("block", "channel", "tensor"), True),
    "marlin": ("MARLIN", "marlin_moe", "MarlinExperts", ("block", "channel", "tensor"), True),
    "cutlass": ("VLLM_CUTLASS", "cutlass_moe", "CutlassExpertsFp8", ("channel", "tensor"), False),
    "deepgemm": ("DEEPGEMM", "deep_gemm_moe", "DeepGemmExperts", ("block",), False),
}


@functools.cache
def _modules() -> types.SimpleNamespace:
    """vLLM's names that are needed, imported once, with its workspace made."""
    import importlib

    base = "vllm.model_executor.layers.fused_moe"
    importlib.import_module("vllm._custom_ops")
    config, oracle = importlib.import_module(f"{base}.config"), importlib.import_module(f"{base}.oracle.fp8")
    importlib.import_module("vllm.v1.worker.workspace").init_workspace_manager(torch.device("cuda", 0))
    return types.SimpleNamespace(
        kernel=importlib.import_module(f"{base}.modular_kernel").FusedMoEKernel,
        prepare=importlib.import_module(f"{base}.prepare_finalize").MoEPrepareAndFinalizeNoDPEPModular,
        activation=importlib.import_module(f"{base}.activation").MoEActivation,
        config=config, oracle=oracle,
        experts=lambda module, name: getattr(importlib.import_module(f"{base}.experts.{module}"), name),
        lora_context=importlib.import_module(f"{base}.experts.lora_context").MoELoRAContext,
        punica=importlib.import_module("vllm.lora.punica_wrapper.punica_gpu").PunicaWrapperGPU,
        lora_config=importlib.import_module("vllm.config.lora").LoRAConfig,
    )  # fmt: skip


def _kernel(data: LayerData, backend: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """vLLM's kernel object and the weights in its form."""
    m, layer, w = _modules(), data.layer, data.weights
    member, module, name, *_ = _BACKENDS[backend]
    parallel = m.config.FusedMoEParallelConfig.make_no_parallel()
    if layer.local < layer.experts:
        parallel.ep_size, parallel.ep_rank, parallel.use_ep = layer.experts // layer.local, 0, True
    config = m.config.FusedMoEConfig(
        num_experts=layer.experts, experts_per_token=layer.topk, hidden_dim=layer.hidden,
        intermediate_size=layer.inter, num_local_experts=layer.local, num_logical_experts=layer.experts,
        activation=m.activation.SILU, device="cuda:0", routing_method=m.config.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel, in_dtype=torch.bfloat16, max_num_tokens=MAX_TOKENS, is_lora_enabled=False,
    )  # fmt: skip
    assert w.w13_scale is not None and w.w2_scale is not None
    w13, w2 = w.w13.view(torch.float8_e4m3fn), w.w2.view(torch.float8_e4m3fn)
    s13, s2 = (s if w.is_block else s[:, :, None].contiguous() for s in (w.w13_scale, w.w2_scale))
    if backend == "deepgemm":  # it requantises in place
        w13, w2, s13, s2 = (t.clone() for t in (w13, w2, s13, s2))
    holder = types.SimpleNamespace(
        num_experts=layer.local, hidden_size=layer.hidden, intermediate_size_per_partition=layer.inter, w13_weight=w13,
        orig_dtype=torch.bfloat16,
    )  # fmt: skip
    block = None
    if w.is_block:
        block = holder.weight_block_size = [128, 128]
    chosen = getattr(m.oracle.Fp8MoeBackend, member)
    w13, w2, s13, s2 = m.oracle.convert_to_fp8_moe_kernel_format(chosen, holder, w13, w2, s13, s2, None, None)
    by_row = not w.is_block
    quant = m.oracle.make_fp8_moe_quant_config(
        chosen, w1_scale=s13, w2_scale=s2, a1_scale=None, a2_scale=None, block_shape=block,
        per_act_token_quant=by_row, per_out_ch_quant=by_row,
    )  # fmt: skip
    return m.kernel(m.prepare(), m.experts(module, name)(config, quant)), w13, w2


def _adapters(problem: Problem) -> Any:
    """Punica tables and stacked matrices as vLLM's LoRA layer holds them; shared matrices are spread over experts."""
    m, slots, setting, layer = _modules(), problem.adapters, problem.setting, problem.data.layer
    assert slots is not None
    r = setting.rank

    def stack(t: torch.Tensor, half: int, rank_axis: int) -> torch.Tensor:
        part = t[:, :, half].narrow(rank_axis, 0, r)
        return part.expand(-1, layer.local, -1, -1).contiguous()

    punica = m.punica(
        max_num_batched_tokens=MAX_TOKENS, max_batches=256, device=torch.device("cuda", 0),
        lora_config=m.lora_config(max_lora_rank=r, max_loras=setting.count, lora_dtype=torch.bfloat16),
    )  # fmt: skip
    return types.SimpleNamespace(
        punica=punica,
        a13=tuple(stack(slots.a13, half, 2) for half in range(2)),
        b13=tuple(stack(slots.b13, half, 3) for half in range(2)),
        a2=(stack(slots.a2, 0, 2),), b2=(stack(slots.b2, 0, 3),),
        enabled=torch.ones(setting.count + 1, dtype=torch.int32, device="cuda"),
    )  # fmt: skip


def _context(problem: Problem) -> Any:
    m, setting, layer = _modules(), problem.setting, problem.data.layer
    made = problem.data.keep(("vllm lora", setting), lambda: _adapters(problem))
    ids = problem.batches[0].adapter_ids
    assert ids is not None
    made.punica.token_mapping_meta.prepare_tensors(torch.where(ids >= 0, ids - FIRST_ADAPTER_ID, -1).long())
    return m.lora_context(
        w13_lora_a_stacked=made.a13, w13_lora_b_stacked=made.b13, w2_lora_a_stacked=made.a2, w2_lora_b_stacked=made.b2,
        adapter_enabled=made.enabled, max_loras=setting.count, top_k=layer.topk, w13_num_slices=2,
        fully_sharded=False, tp_rank=0, tp_size=1, local_num_experts=layer.local, punica_wrapper=made.punica,
        use_tuned_config=False, aux_stream=None, events=None,
    )  # fmt: skip


def _build(problem: Problem, backend: str) -> Calls:
    m, data = _modules(), problem.data
    kernel, w13, w2 = data.keep(("vllm", backend), lambda: _kernel(data, backend))
    context = None if problem.adapters is None else _context(problem)

    def call(batch: Batch) -> torch.Tensor:
        # The kernel object serves problems with and without adapters in turn.
        if hasattr(kernel.fused_experts, "set_lora_context"):
            kernel.fused_experts.set_lora_context(context)
        with torch.inference_mode():
            return kernel.apply(
                batch.x,
                w13,
                w2,
                batch.topk_weights,
                batch.topk_ids,
                activation=m.activation.SILU,
                global_num_experts=data.layer.experts,
                expert_map=batch.expert_map,
                apply_router_weight_on_input=False,
            )

    return [functools.partial(call, b) for b in problem.batches]


def _why_not(problem: Problem, backend: str) -> str | None:
    *_, schemes, lora = _BACKENDS[backend]
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    if problem.data.device.type != "cuda":
        return "no CUDA device"
    if problem.data.scheme not in schemes:
        return f"reads no {problem.data.scheme} scales"
    if problem.data.weights.is_block and problem.data.layer.inter % 128:
        return f"I={problem.data.layer.inter} is no multiple of 128"
    if problem.adapters is not None and not lora:
        return "no adapters"
    if problem.tokens > MAX_TOKENS:
        return f"{problem.tokens} tokens are over its tables' {MAX_TOKENS}"
    return None


# Measured on an H200 against unquantised activations: 0.040 to 0.051; DeepGEMM, which rounds the weight scales to
# powers of two, 0.066.
_BOUNDS = {"triton": 0.06, "cutlass": 0.06, "deepgemm": 0.08}
VLLM = tuple(
    Peer(
        f"vllm {backend}", "w8a16" if backend == "marlin" else "w8a8",
        functools.partial(_why_not, backend=backend), functools.partial(_build, backend=backend),
        bound=_BOUNDS.get(backend),
    )
    for backend in _BACKENDS
)  # fmt: skip
