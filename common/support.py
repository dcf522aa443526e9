# SPDX-License-Identifier: Apache-2.0
"""What a set of expert kernels serves, declared once.

Every experts class carries its own `ExpertsSupport` as the class attribute `support`. The selector,
`explain`, the executors' argument checks and the tests all ask it; no constraint is written anywhere else. A
declaration is never inherited: a subclass that overrides how experts run must say again what it serves, LoRA
  above all.
"""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ACTIVATIONS
from .activations import supports as activation_exists
from .checks import check_choice, check_int
from .config import FusedMoEConfig
from .platforms import Platform, PlatformKind
from .quant_keys import QuantKey, kBf16, scheme_of
from .recipes import RECIPES
from .weights import SCHEMES

# Activation keys, by their dtype and whether dynamic, that the W8A8 kernels quantise to.
ActivationKeys = tuple[QuantKey, ...]


@dataclass(frozen=True)
class ExpertsSupport:
    """Capabilities of one experts class.

    Attributes:
      platforms: families it runs on.
      schemes: `MoEWeights` schemes it reads.
      recipes: recipe names it runs.
      activation_keys: activation keys it accepts; None accepts any (a W8A16 kernel never quantises
        activations).
      min_capability: least CUDA compute capability.
      requires_fp8_mma: FP8 weights need a device that multiplies e4m3 natively; bf16 weights do not.
      activations: names served.
      non_gated: experts without a gate are served.
      lora: adapters are applied. Proven by the conformance suite with a non-zero adapter.
      max_lora_rank: largest adapter rank.
      expert_parallel: experts may be split over ranks.
      hidden_multiple, intermediate_multiple: H and a rank's share of I must be multiples of these.

    Raises (on construction):
      TypeError, ValueError: a field that is not of this form.
    """

    platforms: tuple[PlatformKind, ...]
    schemes: tuple[str, ...]
    recipes: tuple[str, ...]
    activation_keys: ActivationKeys | None = None
    min_capability: tuple[int, int] = (0, 0)
    requires_fp8_mma: bool = False
    activations: tuple[str, ...] = ACTIVATIONS
    non_gated: bool = True
    lora: bool = False
    max_lora_rank: int = 512
    expert_parallel: bool = True
    hidden_multiple: int = 1
    intermediate_multiple: int = 1

    def __post_init__(self) -> None:
        for label, names in (("schemes", SCHEMES), ("recipes", RECIPES), ("activations", ACTIVATIONS)):
            _check_tuple(label, getattr(self, label))
            for value in getattr(self, label):
                check_choice(label, value, names)
        _check_tuple("platforms", self.platforms)
        if not all(isinstance(p, PlatformKind) for p in self.platforms):
            raise TypeError(f"platforms: got {self.platforms!r}, want PlatformKinds")
        if self.activation_keys is not None:
            _check_tuple("activation_keys", self.activation_keys)
            if not all(isinstance(k, QuantKey) for k in self.activation_keys):
                raise TypeError(f"activation_keys: got {self.activation_keys!r}, want QuantKeys or None")
        for label in ("requires_fp8_mma", "non_gated", "lora", "expert_parallel"):
            if not isinstance(getattr(self, label), bool):
                raise TypeError(f"{label}: got {getattr(self, label)!r}, want a bool")
        for label in ("max_lora_rank", "hidden_multiple", "intermediate_multiple"):
            check_int(label, getattr(self, label), minimum=1)

    def why_not(
        self,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        platform: Platform,
    ) -> str | None:
        """The first reason this class cannot serve the deployment, or None where it can."""
        return self.why_not_platform(platform, weight_key) or self.why_not_layer(
            config, weight_key, activation_key
        )

    def why_not_platform(self, platform: Platform, weight_key: QuantKey | None = None) -> str | None:
        """The device's share of `why_not`; without a weight key the weights count as FP8."""
        if platform.kind not in self.platforms:
            names = ", ".join(k.value for k in self.platforms)
            return f"runs on {names}, not on {platform}"
        if platform.kind is PlatformKind.CUDA:
            have = platform.capability or (0, 0)
            if have < self.min_capability:
                return (
                    f"needs compute capability {self.min_capability[0]}.{self.min_capability[1]}, "
                    f"{platform} has {have[0]}.{have[1]}"
                )
        if self.requires_fp8_mma and weight_key != kBf16 and not platform.has_fp8_mma:
            return f"needs FP8 matrix instructions, which {platform} lacks"
        return None

    def why_not_layer(
        self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> str | None:
        """The layer's share of `why_not`: scheme, activation, spread, adapters."""
        if not config.is_act_and_mul and not self.non_gated:
            return "does not serve experts without a gate"
        if config.activation not in self.activations:
            return f"does not serve activation {config.activation}"
        if not activation_exists(config.activation, config.is_act_and_mul):
            form = "gated" if config.is_act_and_mul else "non-gated"
            return f"has no {form} form of activation {config.activation}"
        if config.in_dtype != "bfloat16":
            return f"reads bfloat16 activations, not {config.in_dtype}"
        if weight_key is not None:
            reason = self._why_not_keys(weight_key, activation_key)
            if reason is not None:
                return reason
        parallel = config.moe_parallel_config
        if parallel.use_batched_activation_format:
            return f"does not take the batched format of all2all backend {parallel.all2all_backend}"
        if (parallel.use_ep or parallel.ep_size > 1) and not self.expert_parallel:
            return "does not split experts over ranks"
        inter = config.intermediate_size
        if parallel.ep_size == 1 and inter % parallel.tp_size == 0:
            inter //= parallel.tp_size
        for label, value, multiple in (
            ("hidden_dim", config.hidden_dim, self.hidden_multiple),
            ("intermediate_size per rank", inter, self.intermediate_multiple),
        ):
            if value % multiple:
                return f"needs {label} to be a multiple of {multiple}, got {value}"
        if config.is_lora_enabled:
            if not self.lora:
                return "does not apply LoRA"
            if config.max_lora_rank > self.max_lora_rank:
                want = config.max_lora_rank
                return f"applies LoRA up to rank {self.max_lora_rank}, the config asks for {want}"
        return None

    def _why_not_keys(self, weight_key: QuantKey, activation_key: QuantKey | None) -> str | None:
        scheme = scheme_of(weight_key)
        if scheme not in self.schemes:
            return f"does not read weights of {weight_key}"
        if scheme == "bf16":
            plain = activation_key is None or activation_key == kBf16
            return None if plain else f"does not quantise activations to {activation_key} for bf16 weights"
        if self.activation_keys is None:
            return None
        if activation_key is None or activation_key not in self.activation_keys:
            return f"does not quantise activations to {activation_key}"
        # Both scales must change together along the contraction: [128, 128] blocks go with runs of 128,
        # others not.
        grouped = activation_key.scale is not None and activation_key.scale.group_shape.is_per_group()
        if grouped != (scheme == "block"):
            return f"does not multiply weights of {weight_key} by activations of {activation_key}"
        return None


def _check_tuple(label: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise TypeError(f"{label}: got {value!r}, want a tuple")


def declared_support(experts_cls: type) -> ExpertsSupport:
    """The class's own declaration.

    Raises:
      TypeError: it has none, or only inherits one.
    """
    support = experts_cls.__dict__.get("support")
    if not isinstance(support, ExpertsSupport):
        inherited = isinstance(getattr(experts_cls, "support", None), ExpertsSupport)
        how = "only inherits one" if inherited else "has none"
        raise TypeError(
            f"{experts_cls.__module__}.{experts_cls.__qualname__}: must declare its own class attribute "
            f"`support: ExpertsSupport`; it {how}"
        )
    return support
