# SPDX-License-Identifier: Apache-2.0
"""What a set of expert kernels serves, declared once.

Every experts class carries its own `ExpertsSupport` as the class attribute `support`. The selector, `explain`, the
executors' argument checks and the tests all ask it; no constraint is written anywhere else. A declaration is never
inherited: a subclass that overrides how experts run must say again what it serves, LoRA above all.
"""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ACTIVATIONS, supports as activation_exists
from .config import FusedMoEConfig
from .platforms import Platform, PlatformKind
from .quant_keys import QuantKey, scheme_of

# Activation keys, by their dtype and whether dynamic, that the W8A8 kernels quantise to.
ActivationKeys = tuple[QuantKey, ...]


@dataclass(frozen=True)
class ExpertsSupport:
    """Capabilities of one experts class.

    Attributes:
      platforms: families it runs on.
      schemes: `MoEWeights` schemes it reads.
      recipes: recipe names it runs.
      activation_keys: activation keys it accepts; None accepts any (a W8A16 kernel never quantises activations).
      min_capability: least CUDA compute capability.
      requires_fp8_mma: the device must multiply e4m3 natively.
      activations: names served.
      non_gated: experts without a gate are served.
      lora: adapters are applied. Proven by the conformance suite with a non-zero adapter.
      max_lora_rank: largest adapter rank.
      expert_parallel: experts may be split over ranks.
      hidden_multiple, intermediate_multiple: H and I must be multiples of these.
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

    def why_not(
        self,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        platform: Platform,
    ) -> str | None:
        """The first reason this class cannot serve the deployment, or None where it can."""
        return self.why_not_platform(platform) or self.why_not_layer(config, weight_key, activation_key)

    def why_not_platform(self, platform: Platform) -> str | None:
        """The device's share of `why_not`."""
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
        if self.requires_fp8_mma and not platform.has_fp8_mma:
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
            return f"activation {config.activation} has no {form} form"
        if config.in_dtype != "bfloat16":
            return f"reads bfloat16 activations, not {config.in_dtype}"
        if weight_key is not None:
            scheme = scheme_of(weight_key)
            if scheme not in self.schemes:
                return f"does not read weights of {weight_key}"
            if self.activation_keys is not None and activation_key not in self.activation_keys:
                return f"does not quantise activations to {activation_key}"
        parallel = config.moe_parallel_config
        if parallel.use_batched_activation_format:
            return f"does not take the batched format of all2all backend {parallel.all2all_backend}"
        if (parallel.use_ep or parallel.ep_size > 1) and not self.expert_parallel:
            return "does not split experts over ranks"
        for label, value, multiple in (
            ("hidden_dim", config.hidden_dim, self.hidden_multiple),
            ("intermediate_size", config.intermediate_size, self.intermediate_multiple),
        ):
            if value % multiple:
                return f"needs {label} to be a multiple of {multiple}, got {value}"
        if config.is_lora_enabled:
            if not self.lora:
                return "does not apply LoRA"
            if config.max_lora_rank > self.max_lora_rank:
                return f"applies LoRA up to rank {self.max_lora_rank}, the config asks for {config.max_lora_rank}"
        return None


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
