# SPDX-License-Identifier: Apache-2.0
"""One rank of `test_cuda_expert_parallel`; a module of its own, because spawned processes import it by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from isomoe.common.placement import ExpertPlacement
from isomoe.tests.matrix import Case, Inputs, Shape, build

RANKS = 3
COUNTS = [5, 0, 6]  # uneven, and one rank without tokens
SHAPE = Shape(4, 2, 256, 128)  # four experts over three ranks
MIXED = Case("block", "w8a8", "mixed", tokens=sum(COUNTS), shape=SHAPE)
PLAIN = Case("channel", "w8a8", tokens=sum(COUNTS), shape=SHAPE)
W8A16 = Case("channel", "w8a16", "mixed", routing="skipped", tokens=sum(COUNTS), shape=SHAPE)


def _rank_inputs(inputs: Inputs, placement: ExpertPlacement, rank: int):
    """This rank's experts, and its adapters in an order (hence in slots) of its own."""
    from isomoe.cuda_impl import prepare_adapters, prepare_weights

    local = placement.experts_of(rank)
    adapters = None
    if inputs.adapters:
        turned = inputs.adapters[rank:] + inputs.adapters[:rank]
        adapters = prepare_adapters(
            [a.take(local) for a in turned], inputs.case.config, device="cpu", num_experts=len(local)
        )
    return prepare_weights(inputs.weights.take(local), "cpu"), adapters


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TRITON_INTERPRET="1")
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from isomoe.cuda_impl import expert_parallel as ep
    from isomoe.cuda_impl.prepare import to_torch

    results = {}
    for case in (MIXED, PLAIN, W8A16):
        inputs = build(case)
        x, tw, topk = (to_torch(a, "cpu") for a in (inputs.x, inputs.topk_weights, inputs.topk_ids))
        ids = None if inputs.adapter_ids is None else to_torch(inputs.adapter_ids, "cpu")
        for strategy in ("linear", "round_robin") if case is MIXED else ("linear",):
            placement = ExpertPlacement(SHAPE.num_experts, RANKS, strategy)
            weights, adapters = _rank_inputs(inputs, placement, rank)
            results[f"replicated {strategy} {case.scheme} {case.recipe}"] = ep.fused_moe_replicated(
                x, tw, topk, weights, placement, recipe=case.recipe, adapters=adapters, adapter_ids=ids
            )
            start = sum(COUNTS[:rank])
            mine = slice(start, start + COUNTS[rank])
            for wire, counts in (("f32", None), ("bf16", COUNTS)):
                results[f"gathered {strategy} {case.scheme} {case.recipe} {wire}"] = ep.fused_moe_gathered(
                    x[mine], tw[mine], topk[mine], weights, placement, recipe=case.recipe, adapters=adapters,
                    adapter_ids=None if ids is None else ids[mine], token_counts=counts, wire=wire,
                )  # fmt: skip
            if strategy == "linear" and case is not W8A16:
                results[f"chunks {case.scheme}"] = ep.fused_moe_gathered(
                    x[mine], tw[mine], topk[mine], weights, placement, recipe=case.recipe, adapters=adapters,
                    adapter_ids=None if ids is None else ids[mine], token_counts=COUNTS, gather="bf16", chunks=2,
                )  # fmt: skip
    with pytest.raises(ValueError, match="gather: got 'fp8'"):
        ep.fused_moe_gathered(
            x[mine], tw[mine], topk[mine], weights, placement, recipe="w8a16", token_counts=COUNTS, gather="fp8"
        )
    with pytest.raises(ValueError, match="ep_size=2"):
        ep.fused_moe_replicated(x, tw, topk, weights, ExpertPlacement(4, 2))
    with pytest.raises(ValueError, match="rank"):
        ep.fused_moe_replicated(x, tw, topk, weights, ExpertPlacement(40, RANKS))
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
