# SPDX-License-Identifier: Apache-2.0
"""`isomoe inspect`: what a checkpoint and its adapters are, what they weigh on a device, and who would run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import report
from .adapter_files import AdapterReport, load_lora_adapter
from .capacity import slot_bytes_per_device, slots_that_fit, weight_bytes_per_device
from .checkpoints import CheckpointInfo, inspect_checkpoint
from .presets import DEVICES, REPORT_PLATFORMS
from .selector import SelectionReport, explain_selection

EP_SIZES = (1, 2, 4, 8, 16, 32, 64)
RANKS = (8, 16, 32, 64)
# The share of a device's memory that weights and adapters may take here; the KV cache competes for the same bytes.
MEMORY_SHARE = 0.9


@dataclass(frozen=True)
class ModelInspection:
    """Everything `inspect` reports.

    Attributes:
      path: the checkpoint's folder name.
      checkpoint: what it holds.
      stored_bytes: size of all its safetensors files.
      weight_bytes: routed experts a device holds, by EP size.
      slot_bytes: one adapter slot on a device, by EP size and rank.
      slots: adapter slots that fit beside the experts and all other tensors, by device, EP size and rank; None where
        the weights alone do not fit.
      selections: the selector's report by platform.
      adapters: what each adapter folder holds, by its name.
    """

    path: str
    checkpoint: CheckpointInfo
    stored_bytes: int
    weight_bytes: dict[int, int]
    slot_bytes: dict[int, dict[int, int]]
    slots: dict[str, dict[int, dict[int, int | None]]]
    selections: tuple[SelectionReport, ...]
    adapters: dict[str, AdapterReport]

    @property
    def other_bytes(self) -> int:
        """Tensors outside the routed experts; counted whole on every device."""
        info = self.checkpoint
        return max(0, self.stored_bytes - info.bytes_per_layer * len(info.moe_layers))

    def as_dict(self) -> dict[str, Any]:
        """Plain values only."""
        info = self.checkpoint
        return {
            "path": self.path,
            "model_type": info.model_type,
            "quant_method": info.quant_method,
            "scheme": info.scheme,
            "layout": info.layout,
            "weight_key": str(info.weight_key),
            "activation_key": str(info.activation_key),
            "config": asdict(info.config),
            "num_hidden_layers": info.num_hidden_layers,
            "moe_layers": list(info.moe_layers),
            "has_shared_experts": info.has_shared_experts,
            "stored_bytes": self.stored_bytes,
            "other_bytes": self.other_bytes,
            "weight_bytes_per_device_by_ep": self.weight_bytes,
            "slot_bytes_per_device_by_ep_and_rank": self.slot_bytes,
            "slots_by_device_ep_rank": self.slots,
            "selection": [
                {k: v for k, v in found.as_dict().items() if k in ("platform", "backend", "executor", "error")}
                for found in self.selections
            ],
            "adapters": {name: asdict(adapter) for name, adapter in self.adapters.items()},
        }


def inspect_model(checkpoint: Path, adapters: Sequence[Path]) -> ModelInspection:
    """Read the checkpoint's headers and configuration, and each adapter in full (which checks it).

    Raises:
      ValueError: a file that cannot be understood, naming the tensor or key.
      OSError: a file that cannot be read.
    """
    info = inspect_checkpoint(checkpoint)
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    layers, config = len(info.moe_layers), info.config
    sizes = [ep for ep in EP_SIZES if ep <= config.num_experts]
    weights = {ep: weight_bytes_per_device(config, info.scheme, layers, ep) for ep in sizes}
    slot = {ep: {rank: slot_bytes_per_device(config, rank, layers, ep) for rank in RANKS} for ep in sizes}
    other = max(0, stored - info.bytes_per_layer * layers)
    slots = {
        device.label: {
            ep: {
                rank: slots_that_fit(int(device.memory * MEMORY_SHARE), weights[ep] + other, slot[ep][rank])
                for rank in RANKS
            }
            for ep in sizes
        }
        for device in DEVICES
    }
    selections = tuple(
        explain_selection(config, info.weight_key, info.activation_key, platform=platform)
        for platform in REPORT_PLATFORMS
    )
    described = {
        str(path): load_lora_adapter(path, config, num_layers=info.num_hidden_layers).report for path in adapters
    }
    return ModelInspection(checkpoint.name, info, stored, weights, slot, slots, selections, described)


def show(found: ModelInspection) -> None:
    """Print the report."""
    out, info, config = report.console(), found.checkpoint, found.checkpoint.config
    facts = [
        ("model", f"{found.path} ({info.model_type})"),
        ("quantisation", f"{info.quant_method or 'none'}: {info.scheme}"),
        ("weights", str(info.weight_key)),
        ("activations", str(info.activation_key)),
        ("experts", f"E={config.num_experts} K={config.experts_per_token} H={config.hidden_dim} "
                    f"I={config.intermediate_size}, {config.activation}, {config.scoring_func}"),
        ("MoE layers", f"{len(info.moe_layers)} of {info.num_hidden_layers}: {report.ranges(info.moe_layers)}"),
        ("shared experts", "yes (not run by this package)" if info.has_shared_experts else "no"),
        ("stored", f"{report.format_bytes(found.stored_bytes)}, of which {report.format_bytes(found.other_bytes)} "
                   "outside the routed experts"),
    ]
    out.print(report.table("Checkpoint", ("", ""), facts))
    by_ep = [
        (str(ep), report.format_bytes(weights), *(report.format_bytes(found.slot_bytes[ep][r]) for r in RANKS))
        for ep, weights in found.weight_bytes.items()
    ]
    columns = ("EP", "experts", *(f"slot r{r}" for r in RANKS))
    out.print(report.table("Bytes on one device (all MoE layers)", columns, by_ep, numeric=columns))
    eps = list(found.weight_bytes)
    rows = [
        (device.label, report.format_bytes(device.memory), *(
            "/".join(_slots(n) for n in found.slots[device.label][ep].values()) for ep in eps
        ))
        for device in DEVICES
    ]
    title = (
        f"Adapter slots that fit, rank {'/'.join(map(str, RANKS))}, by EP size: {MEMORY_SHARE:.0%} of memory less "
        "experts and all other tensors, before any KV cache"
    )
    out.print(report.table(title, ("device", "memory", *map(str, eps)), rows, numeric=tuple(map(str, eps))))
    answers = [
        (str(s.platform), s.backend.name if s.backend is not None else (s.error or "").split(":", 1)[0],
         s.executor or "-")
        for s in found.selections
    ]
    out.print(report.table("Selection", ("platform", "selector answers", "executed by"), answers))
    if found.adapters:
        out.print(_adapter_table(found.adapters))


def _slots(count: int | None) -> str:
    """A count for a narrow column; more than 999 slots are no decision's limit."""
    return "-" if count is None else (str(count) if count <= 999 else "999+")


def _adapter_table(adapters: Mapping[str, AdapterReport]) -> Any:
    rows = []
    for name, found in adapters.items():
        remarks = [*found.notes, *(f"missing {m}" for m in found.missing)]
        if found.ignored:
            remarks.append(f"{len(found.ignored)} tensors outside the routed experts ignored")
        layers = f"{len(found.layers)}: {report.ranges(found.layers)}"
        rows.append((
            Path(name).name, found.form, str(found.rank), layers, found.dtype, report.format_bytes(found.nbytes),
            "yes" if found.shared_outer else "no", "; ".join(remarks) or "-",
        ))
    columns = ("adapter", "form", "rank", "layers", "dtype", "bytes", "shared outer", "remarks")
    return report.table("Adapters", columns, rows, numeric=("rank", "bytes"))
