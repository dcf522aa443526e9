# SPDX-License-Identifier: Apache-2.0
"""The life of an MoE layer's weights, from a checkpoint's tensors to a call, under vLLM's names.

    method = Fp8MoEMethod(quantization_config, moe_config)      # chooses the backend; never raises for a TPU
    method.create_weights(layer, num_experts=..., ...)          # NaN buffers and a weight_loader on `layer`
    layer.weight_loader("w13_weight", shard, "w1", expert_id)   # once a tensor
    method.process_weights_after_loading(layer)                 # checks that all arrived; layer.moe_weights
    y = method.apply(layer, x, topk_weights, topk_ids, adapters=..., adapter_ids=...)

Where the platform's answer is NONE (TPU, out-of-tree), every step works all the same and the registry's
backend runs the layer; nothing here imports a framework or asks for a device. Weights keep their bits:
per-tensor gate and up scales stay two scales, nothing is requantised.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .backends import Fp8MoeBackend, RegisteredBackend, UnquantizedMoeBackend
from .checkpoint_config import BF16_MODULE, ModuleQuant, read_quant_config
from .checks import check_choice, check_int
from .config import FusedMoEConfig
from .executors import executor_class, run_moe
from .layer_buffers import LayerLayout, TensorSpec, allocate, check_shard_id, missing_shards, read_shard
from .numerics import BF16, BLOCK, E4M3, e4m3fn_to_fnuz
from .placement import ExpertPlacement
from .platforms import Platform
from .priorities import backend_for_tokens
from .quant_keys import QuantKey, kBf16
from .recipes import Recipe
from .reference import guard_lora_input
from .routing import route
from .selector import (
    explain_selection,
    requested_backend,
    resolve_executor,
    select_fp8_moe_backend,
    select_unquantized_moe_backend,
)
from .support import declared_support
from .weights import LoRAAdapter, MoEWeights

# ROCm architectures whose matrix unit reads e4m3fnuz.
_FNUZ_ARCHS = ("gfx940", "gfx941", "gfx942")


@dataclass(frozen=True, eq=False)
class FusedMoEQuantConfig:
    """What a kernel needs to know of a layer's quantisation (vLLM's names).

    Attributes:
      weight_key, activation_key: formats.
      block_shape: ``(128, 128)`` for block weights, else None.
      per_act_token_quant: activations are quantised with one scale a token.
      per_out_ch_quant: weights have one scale an output row.
      w1_scale, w2_scale, a1_scale, a2_scale: a loaded layer's arrays, else None.
    """

    weight_key: QuantKey
    activation_key: QuantKey | None
    block_shape: tuple[int, int] | None = None
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    w1_scale: np.ndarray | None = None
    w2_scale: np.ndarray | None = None
    a1_scale: np.ndarray | None = None
    a2_scale: np.ndarray | None = None

    @property
    def is_quantized(self) -> bool:
        return self.weight_key != kBf16

    @property
    def use_fp8_w8a8(self) -> bool:
        return self.is_quantized and self.activation_key not in (None, kBf16)

    @property
    def use_fp8_w8a16(self) -> bool:
        return self.is_quantized and not self.use_fp8_w8a8


class FusedMoEMethodBase:
    """What all methods share.

    Attributes:
      moe: the layer's config.
      quant: how the checkpoint stores the experts.
      weight_key, activation_key: what the selector was asked for.
      platform: the target.
      experts_cls: the experts class chosen, or None where the platform's answer is NONE.
      weight_scale_name: ``"weight_scale_inv"`` or ``"weight_scale"``.
      weight_block_size: ``[128, 128]`` or None.
      block_quant: whether scales are per block.
      activation_scheme: ``"dynamic"``, ``"static"`` or None.
    """

    # vLLM's questions to a method, answered alike whether or not a backend was chosen.
    is_monolithic = False
    supports_eplb = False  # nothing here moves an adapter's experts along with the base's
    supports_internal_mk = False
    supports_pre_processed_weights = False
    skip_forward_padding = False
    has_unpadded_output = False
    topk_indices_dtype = np.dtype(np.int32)
    moe_kernel = None

    _scale_suffix_of_block = "weight_scale"

    def __init__(
        self,
        quant: ModuleQuant,
        moe: FusedMoEConfig,
        *,
        platform: Platform | None,
        moe_backend: str,
        tp_rank: int,
        placement: str,
    ) -> None:
        if not isinstance(moe, FusedMoEConfig):
            raise TypeError(f"moe: got {type(moe).__name__}, want FusedMoEConfig")
        self.moe = moe
        self.quant = quant
        self.platform = Platform.detect() if platform is None else platform
        self.moe_backend = moe_backend
        self.tp_rank = tp_rank
        self.placement = ExpertPlacement(moe.num_experts, moe.moe_parallel_config.ep_size, placement)
        self.weight_key, self.activation_key = quant.keys()
        self.activation_scheme = quant.activation
        self.block_quant = quant.scheme == "block"
        self.weight_block_size = [BLOCK, BLOCK] if self.block_quant else None
        self.weight_scale_name = self._scale_suffix_of_block if self.block_quant else "weight_scale"
        self.per_act_token_quant = quant.scheme in ("channel", "tensor") and quant.activation == "dynamic"
        self.moe_quant_config: FusedMoEQuantConfig | None = None
        self.experts_cls: type | None = None

    @property
    def method_name(self) -> str:
        return type(self).__name__

    @property
    def executor(self) -> RegisteredBackend | None:
        """The registered backend that runs this layer; asked anew, so that a late registration counts."""
        return resolve_executor(
            self.moe,
            self.weight_key,
            self.activation_key,
            platform=self.platform,
            moe_backend=self.moe_backend,
        )

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *unused: object, **also_unused: object
    ) -> tuple[int, int]:
        """Buffers are never padded: the sizes as they came."""
        return hidden_size, intermediate_size_per_partition

    def maybe_make_prepare_finalize(self, *unused: object, **also_unused: object) -> None:
        """There is no modular kernel: executors quantise, dispatch and combine themselves."""
        return None

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Formats, and the scales of a layer that has been processed."""
        weights: MoEWeights | None = getattr(layer, "moe_weights", None)
        return FusedMoEQuantConfig(
            self.weight_key,
            self.activation_key,
            block_shape=(BLOCK, BLOCK) if self.block_quant else None,
            per_act_token_quant=self.per_act_token_quant,
            per_out_ch_quant=self.quant.scheme == "channel",
            w1_scale=None if weights is None else weights.w13_scale,
            w2_scale=None if weights is None else weights.w2_scale,
            a1_scale=None if weights is None else weights.w13_input_scale,
            a2_scale=None if weights is None else weights.w2_input_scale,
        )

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any = BF16,
        **extra_weight_attrs: Any,
    ) -> None:
        """Put NaN-filled buffers and a `weight_loader` on `layer`.

        Sets ``w13_weight [E_local, 2I, H]``, ``w2_weight [E_local, H, I]``, their scales (tensor ``[E, 2]``
        and ``[E]``, channel ``[E, 2I, 1]`` and ``[E, H, 1]``, block ``[E, 2 ceil(I/128), ceil(H/128)]`` and
        ``[E, ceil(H/128), ceil(I/128)]``), ``w13_input_scale`` and ``w2_input_scale`` ``[E]`` (None unless
        static), biases where the config has them; and ``num_experts``, ``hidden_size``,
        ``intermediate_size_per_partition``, ``orig_dtype``, ``weight_block_size``, ``weight_attrs`` (by
        buffer: ``quant_method`` and the extra ones).

        Args:
          layer: any object that takes attributes.
          num_experts: this rank's experts; or all of them, where one process holds the layer and its executor
            splits the experts over devices.
          hidden_size: H.
          intermediate_size_per_partition: I / tp_size.
          params_dtype: the model's dtype: bfloat16, by numpy dtype or by name.
          extra_weight_attrs: kept beside each buffer.

        Raises:
          ValueError: sizes that are not the config's, or a split that the scheme's scales do not allow.
        """
        parallel = self.moe.moe_parallel_config
        check_int("num_experts", num_experts, minimum=1)
        local = self.placement.experts_of(parallel.ep_rank)
        if num_experts == self.moe.num_experts:
            local = np.arange(num_experts)
        elif num_experts != len(local):
            raise ValueError(
                f"num_experts: got {num_experts}, want {len(local)} (rank {parallel.ep_rank} of "
                f"{parallel.ep_size}) or all {self.moe.num_experts}"
            )
        tp_size = parallel.tp_size if parallel.ep_size == 1 else 1
        if self.moe.intermediate_size % tp_size:
            raise ValueError(
                f"tp_size: got {tp_size}, want a divisor of intermediate_size={self.moe.intermediate_size}"
            )
        for label, got, want in (
            ("hidden_size", hidden_size, self.moe.hidden_dim),
            (
                "intermediate_size_per_partition",
                intermediate_size_per_partition,
                self.moe.intermediate_size // tp_size,
            ),
        ):
            check_int(label, got, minimum=1)
            if got != want:
                raise ValueError(f"{label}: got {got}, the config wants {want}")
        if getattr(layer, "apply_router_weight_on_input", False):
            raise ValueError(
                "apply_router_weight_on_input: got True, which no executor here serves; want False"
            )
        check_choice("params_dtype", _dtype_name(params_dtype), (self.moe.in_dtype,))
        layout = LayerLayout(
            self.quant.scheme,
            self.weight_scale_name,
            self.quant.activation == "static",
            self.moe.has_bias,
            self.moe.is_act_and_mul,
            self.moe.num_experts,
            tuple(int(e) for e in local),
            hidden_size,
            intermediate_size_per_partition,
            tp_size,
            self.tp_rank if tp_size > 1 else 0,
        )
        layer.layout = layout
        layer.num_experts = num_experts
        layer.hidden_size = hidden_size
        layer.intermediate_size_per_partition = intermediate_size_per_partition
        layer.orig_dtype = BF16
        layer.weight_block_size = self.weight_block_size
        layer.w13_input_scale = layer.w2_input_scale = None
        layer.weight_attrs = {}
        layer.moe_weights = None
        for spec in layout.specs().values():
            setattr(layer, spec.name, allocate(spec))
            tag = {} if spec.quant_method is None else {"quant_method": spec.quant_method}
            layer.weight_attrs[spec.name] = {**extra_weight_attrs, **tag}
        # (buffer, global expert, shard) seen, and the largest static activation scale, remote experts'
        # included.
        layer._loaded = set()
        layer._input_scales = {}
        layer.weight_loader = functools.partial(self.weight_loader, layer)

    def weight_loader(self, layer: Any, param_name: str, shard: Any, shard_id: str, expert_id: int) -> bool:
        """Copy one expert's tensor into its buffer.

        Args:
          param_name: the buffer, for example ``"w13_weight"`` or ``"w2_weight_scale_inv"``.
          shard: the checkpoint's tensor, whole; tensor parallelism takes this rank's part. Channel scales may
            be ``[out]`` or ``[out, 1]``, per-tensor ones ``[]`` or ``[1]``; scales may be E8M0.
          shard_id: ``"w1"`` (gate), ``"w3"`` (up) or ``"w2"`` (down).
          expert_id: global id.

        Returns:
          Whether this rank holds the expert.

        Raises:
          TypeError, ValueError: naming buffer, expert and shard.
        """
        layout: LayerLayout = _created(layer)
        specs = layout.specs()
        check_choice("param_name", param_name, specs)
        spec: TensorSpec = specs[param_name]
        check_shard_id(layout, spec, shard_id)
        check_int("expert_id", expert_id, minimum=0)
        if expert_id >= layout.num_experts:
            raise ValueError(f"expert_id: got {expert_id}, want less than {layout.num_experts}")
        where = f"{param_name}, expert {expert_id}, shard {shard_id}"
        if (param_name, expert_id, shard_id) in layer._loaded:
            raise ValueError(f"{where}: loaded twice")
        value = read_shard(layout, spec, shard, shard_id, where)
        if spec.kind == "input_scale":
            layer._input_scales[param_name] = max(layer._input_scales.get(param_name, 0.0), float(value))
        if expert_id not in layout.local_experts:
            layer._loaded.add((param_name, expert_id, shard_id))
            return False
        place = layout.destination(spec, layout.local_experts.index(expert_id), shard_id)
        buffer = getattr(layer, param_name)
        if spec.kind == "input_scale":
            buffer[place] = np.fmax(buffer[place], value)
        elif spec.name == "w2_bias" and layout.tp_rank > 0:
            buffer[place] = 0  # ranks' results are summed: one of them adds the bias
        else:
            buffer[place] = value
        layer._loaded.add((param_name, expert_id, shard_id))
        return True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every buffer was filled and bind `layer.moe_weights`; codes and scales keep their bits.

        Static activation scales become their maximum over all experts seen, other ranks' included, so that a
        result does not depend on how experts are split. On ROCm gfx94x the layer's own buffers become
        e4m3fnuz (same bytes, doubled scales, -0 made 0); `layer.moe_weights` stays e4m3fn.

        Raises:
          ValueError: tensors that were not loaded, by name, or values that are not finite.
        """
        layout: LayerLayout = _created(layer)
        if layer.moe_weights is not None:
            return
        missing = []
        for spec in layout.specs().values():
            buffer = getattr(layer, spec.name)
            if not isinstance(buffer, np.ndarray) or buffer.shape != spec.shape or buffer.dtype != spec.dtype:
                got = (
                    f"{getattr(buffer, 'dtype', type(buffer).__name__)} {list(getattr(buffer, 'shape', ()))}"
                )
                raise ValueError(f"{spec.name}: got {got}, want {spec.dtype} {list(spec.shape)}")
            lost = list(missing_shards(layout, spec, buffer))
            if lost:
                more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
                missing.append(f"{spec.name}: {', '.join(lost[:3])}{more}")
        if missing:
            raise ValueError("weights were not loaded (or are NaN): " + "; ".join(missing))
        fields: dict[str, np.ndarray] = {}
        if layout.scheme != "bf16":
            for prefix in ("w13", "w2"):
                scale = getattr(layer, f"{prefix}_{layout.scale_name}")
                fields[f"{prefix}_scale"] = scale[..., 0] if layout.scheme == "channel" else scale
        if layout.static_input:
            for name in ("w13_input_scale", "w2_input_scale"):
                largest = max(float(getattr(layer, name).max()), layer._input_scales.get(name, 0.0))
                fields[name] = np.asarray(largest, np.float32)
                setattr(layer, name, fields[name])
        if layout.has_bias:
            fields |= {"w13_bias": layer.w13_bias, "w2_bias": layer.w2_bias}
        layer.moe_weights = MoEWeights(layout.scheme, layer.w13_weight, layer.w2_weight, **fields)
        if self.platform.is_rocm and self.platform.arch in _FNUZ_ARCHS and layout.scheme != "bf16":
            for prefix in ("w13", "w2"):
                name = f"{prefix}_{layout.scale_name}"
                codes, scales = e4m3fn_to_fnuz(getattr(layer, f"{prefix}_weight"), getattr(layer, name))
                setattr(layer, f"{prefix}_weight", codes)
                setattr(layer, name, scales)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    def apply(
        self,
        layer: Any,
        x: np.ndarray,
        topk_weights: np.ndarray,
        topk_ids: np.ndarray,
        adapters: Iterable[LoRAAdapter] | None = None,
        adapter_ids: np.ndarray | None = None,
        recipe: str | Recipe | None = None,
    ) -> np.ndarray:
        """This rank's result: bfloat16 ``[T, H]``, to be summed over ranks where experts or I are split over
        them.

        Args:
          x: bfloat16 ``[T, H]``.
          topk_weights: float32 ``[T, K]``.
          topk_ids: int32 ``[T, K]``, global expert ids.
          adapters: whole adapters; they are cut like the weights.
          adapter_ids: int32 ``[T]``, global ids, -1 = base.
          recipe: a precision, by name or whole; None for the backend's own.

        Raises:
          RuntimeError: no executor is registered or available on the platform, or the weights are not
            processed.
          TypeError, ValueError: a bad argument, before any launch.
          NotImplementedError: FP8 activations without their scale, with adapters.
        """
        layout: LayerLayout = _created(layer)
        if layer.moe_weights is None:
            raise RuntimeError("process_weights_after_loading must run before apply")
        chosen = self.executor
        if chosen is None:
            raise RuntimeError(self._no_executor())
        loaded = None if adapters is None else tuple(adapters)
        if loaded and isinstance(x, np.ndarray) and x.dtype == E4M3:
            guard_lora_input(x, None, f"{self.method_name}.apply")
        tokens = x.shape[0] if isinstance(x, np.ndarray) and x.ndim else 0
        name = chosen.name
        if requested_backend(self.moe_backend)[0] == "auto":
            name = backend_for_tokens(name, self.platform, layout.scheme, tokens)
        config = replace(self.moe, intermediate_size=layout.intermediate)
        if loaded is not None and layout.tp_size > 1:
            loaded = tuple(_cut_adapter(a, layout) for a in loaded)
        whole = len(layout.local_experts) == layout.num_experts
        return run_moe(
            name,
            x,
            topk_weights,
            topk_ids,
            layer.moe_weights,
            config=config,
            adapters=loaded,
            adapter_ids=adapter_ids,
            recipe=recipe if recipe is not None else self._recipe(name),
            ep_size=self.placement.ep_size if whole else 1,
            expert_map=None if whole else _expert_map(layout),
        )

    def apply_monolithic(
        self,
        layer: Any,
        x: np.ndarray,
        router_logits: np.ndarray,
        correction_bias: np.ndarray | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Route, then `apply`: the whole layer from its router logits, float32 ``[T, E]``."""
        weights, ids = route(router_logits, self.moe, correction_bias=correction_bias)
        return self.apply(layer, x, weights, ids, **options)

    def _recipe(self, executor: str) -> str:
        """The recipe that suits checkpoint, platform and executor."""
        if self.quant.scheme == "bf16":
            return "bf16"
        recipes = declared_support(executor_class(executor)).recipes
        # TPUs before v7x convert FP8 before the dot: quantising activations would cost accuracy and buy
        # nothing.
        plain = self.quant.activation is None or (self.platform.is_tpu and not self.platform.has_fp8_mma)
        order = ("w8a16", "w8a8") if plain else ("w8a8", "w8a16")
        return next((r for r in order if r in recipes), order[0])

    def _no_executor(self) -> str:
        report = explain_selection(
            self.moe,
            self.weight_key,
            self.activation_key,
            platform=self.platform,
            moe_backend=self.moe_backend,
        )
        return (
            f"{self.method_name}: nothing registered executes this layer on {self.platform}; register one "
            f"with register_moe_backend, or ask for moe_backend='reference'.\n{report.table()}"
        )

    def __repr__(self) -> str:
        return (
            f"{self.method_name}(scheme={self.quant.scheme!r}, activation={self.quant.activation!r}, "
            f"platform={self.platform!r}, experts_cls={self.experts_cls and self.experts_cls.__name__})"
        )


def _created(layer: Any) -> LayerLayout:
    layout = getattr(layer, "layout", None)
    if not isinstance(layout, LayerLayout):
        raise RuntimeError("create_weights must run on this layer first")
    return layout


def _dtype_name(dtype: Any) -> str:
    """``"bfloat16"`` for numpy's, torch's or a named dtype."""
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype).removeprefix("torch.")


def _expert_map(layout: LayerLayout) -> np.ndarray:
    out = np.full(layout.num_experts, -1, np.int32)
    out[list(layout.local_experts)] = np.arange(len(layout.local_experts), dtype=np.int32)
    return out


def _cut_adapter(adapter: LoRAAdapter, layout: LayerLayout) -> LoRAAdapter:
    """An adapter's share under tensor parallelism: w13's B rows and w2's A columns go with I."""
    if not isinstance(adapter, LoRAAdapter):
        raise TypeError(f"adapters: got {type(adapter).__name__}, want LoRAAdapter")
    full = layout.intermediate * layout.tp_size
    if adapter.intermediate_size != full:
        raise ValueError(
            f"adapter {adapter.adapter_id}: got intermediate_size {adapter.intermediate_size}, want {full}"
        )
    part = slice(layout.tp_rank * layout.intermediate, (layout.tp_rank + 1) * layout.intermediate)
    return replace(adapter, b13=adapter.b13[:, :, part], a2=adapter.a2[:, :, part])


def _parsed(method: str, quantization_config: Mapping[str, Any], layer_name: str | None) -> ModuleQuant:
    """The storage of `layer_name`'s experts (or of any Linear) by the checkpoint reader's rules.

    Raises:
      ValueError: another method's config, or a format that is not served; names the key.
    """
    given = quantization_config.get("quant_method", method)
    if given != method:
        raise ValueError(f"quantization_config: quant_method: got {given!r}, want {method!r}")
    config = read_quant_config(
        Path(), {"quantization_config": {**quantization_config, "quant_method": method}}
    )
    if layer_name is not None:
        return config.of(layer_name)
    schemes = {quant for _, quant in config.groups}
    if len(schemes) != 1:
        raise ValueError(
            f"layer_name: got None, want the layer's name: the checkpoint has {len(schemes)} schemes"
        )
    return schemes.pop()


def _fields(source: object, names: tuple[str, ...]) -> dict[str, Any]:
    """A config object (vLLM's, compressed-tensors') as the dict a checkpoint would hold."""
    if isinstance(source, Mapping):
        return dict(source)
    found = {name: getattr(source, name) for name in names if hasattr(source, name)}
    if not found:
        raise TypeError(
            f"quant_config: got {type(source).__name__}, want a mapping or an object with {names[0]}"
        )
    return {k: getattr(v, "value", v) for k, v in found.items()}


class _Fp8Method(FusedMoEMethodBase):
    """An FP8 method: `fp8_backend` and `experts_cls` are the selector's answer."""

    def __init__(
        self,
        quant: ModuleQuant,
        moe: FusedMoEConfig,
        *,
        platform: Platform | None = None,
        moe_backend: str = "auto",
        on_missing: str = "none",
        tp_rank: int = 0,
        placement: str = "linear",
    ) -> None:
        if quant.scheme == "bf16":
            raise ValueError(
                "quant_config: got a layer that is not quantised, want UnquantizedFusedMoEMethod for it"
            )
        super().__init__(
            quant, moe, platform=platform, moe_backend=moe_backend, tp_rank=tp_rank, placement=placement
        )
        self.fp8_backend: Fp8MoeBackend | RegisteredBackend
        self.fp8_backend, self.experts_cls = select_fp8_moe_backend(
            moe,
            self.weight_key,
            self.activation_key,
            platform=self.platform,
            moe_backend=moe_backend,
            on_missing=on_missing,
        )


class Fp8MoEMethod(_Fp8Method):
    """Checkpoints with ``quant_method: fp8``: [128, 128] blocks (``weight_scale_inv``) or one scale a matrix.

    Dynamic activations of per-tensor checkpoints are quantised per token: one scale over the whole batch
    would make a row's result depend on the other rows.

    Args:
      quant_config: the checkpoint's ``quantization_config``, an object with `activation_scheme` and
        `weight_block_size`, or a `ModuleQuant`.
      moe: the layer's config, or a layer that has it as `moe_config`.
      platform, moe_backend, on_missing: see `select_fp8_moe_backend`.
      tp_rank: this rank among ``tp_size``.
      placement: ``"linear"`` or ``"round_robin"`` deal of experts over EP ranks.
      layer_name: the experts' module, where the checkpoint stores layers differently.
    """

    _scale_suffix_of_block = "weight_scale_inv"

    def __init__(self, quant_config: Any, moe: Any, *, layer_name: str | None = None, **options: Any) -> None:
        if not isinstance(quant_config, ModuleQuant):
            names = ("activation_scheme", "weight_block_size", "scale_fmt")
            quant_config = _parsed("fp8", _fields(quant_config, names), layer_name)
        super().__init__(quant_config, getattr(moe, "moe_config", moe), **options)


class CompressedTensorsW8A8Fp8MoEMethod(_Fp8Method):
    """compressed-tensors FP8: channel weights with per-token activations (FP8_DYNAMIC), tensor static or
    dynamic, and [128, 128] blocks with runs of 128. Scales are always named ``weight_scale``.

    Dynamic per-tensor activations are quantised per token, as in `Fp8MoEMethod`.

    Args:
      weight_quant, input_quant: a config group's ``weights`` and ``input_activations``, as mappings or
        objects with `strategy`, `dynamic` and so on; `input_quant` None leaves activations unquantised.
      moe: the layer's config.
      layer_name: accepted as in vLLM; only errors mention it.
      options: as for `Fp8MoEMethod`.
    """

    def __init__(
        self,
        weight_quant: Any,
        input_quant: Any,
        moe: FusedMoEConfig,
        layer_name: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(weight_quant, ModuleQuant):
            names = (
                "strategy",
                "num_bits",
                "type",
                "symmetric",
                "dynamic",
                "group_size",
                "block_structure",
            )
            group = {
                "targets": ["Linear"],
                "weights": _fields(weight_quant, names),
                "input_activations": None if input_quant is None else _fields(input_quant, names),
            }
            try:
                weight_quant = _parsed(
                    "compressed-tensors",
                    {"format": "float-quantized", "config_groups": {"group_0": group}},
                    None,
                )
            except ValueError as error:
                raise ValueError(f"{layer_name}: {error}" if layer_name else str(error)) from None
        super().__init__(weight_quant, moe, **options)

    @classmethod
    def from_config(
        cls,
        quantization_config: Mapping[str, Any],
        moe: FusedMoEConfig,
        *,
        layer_name: str | None = None,
        **options: Any,
    ) -> CompressedTensorsW8A8Fp8MoEMethod:
        """From a checkpoint's whole ``quantization_config``; `layer_name` picks the group."""
        return cls(
            _parsed("compressed-tensors", quantization_config, layer_name), None, moe, layer_name, **options
        )


class ModelOptFp8MoEMethod(_Fp8Method):
    """ModelOpt FP8: one static scale a matrix and one for its activations, or channel weights by token.

    Args:
      quant_config: the checkpoint's ``quantization_config`` or ``hf_quant_config.json``, a `ModuleQuant`, or
        None for per-tensor static.
      moe: the layer's config.
      options: as for `Fp8MoEMethod`.
    """

    def __init__(
        self, quant_config: Any, moe: FusedMoEConfig, *, layer_name: str | None = None, **options: Any
    ) -> None:
        if quant_config is None:
            quant_config = ModuleQuant("tensor", "static")
        elif not isinstance(quant_config, ModuleQuant):
            quant_config = _parsed(
                "modelopt", _fields(quant_config, ("quant_algo", "quantization")), layer_name
            )
        super().__init__(quant_config, moe, **options)


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """bf16 experts: `unquantized_backend` and `experts_cls` are the selector's answer, adapters or not."""

    def __init__(
        self,
        moe: FusedMoEConfig,
        *,
        platform: Platform | None = None,
        moe_backend: str = "auto",
        on_missing: str = "none",
        tp_rank: int = 0,
        placement: str = "linear",
    ) -> None:
        super().__init__(
            BF16_MODULE, moe, platform=platform, moe_backend=moe_backend, tp_rank=tp_rank, placement=placement
        )
        self.unquantized_backend: UnquantizedMoeBackend | RegisteredBackend
        self.unquantized_backend, self.experts_cls = select_unquantized_moe_backend(
            moe, platform=self.platform, moe_backend=moe_backend, on_missing=on_missing
        )
