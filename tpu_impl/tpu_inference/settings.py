# SPDX-License-Identifier: Apache-2.0
"""What users may set; read once a layer, at load.

    USE_MOE_EP_KERNEL=1          tpu-inference's own switch: expert parallelism runs this package's kernel
    ISOMOE_TPU_RECIPE            w8a8 or w8a16; by default w8a8 where the generation multiplies e4m3, else w8a16
    ISOMOE_WEIGHT_SCALE_POLICY   what to do with [128, 128] block scales: exact (default) or per_channel
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...common.checks import check_choice
from ..generations import generation

ENV_RECIPE = "ISOMOE_TPU_RECIPE"
ENV_POLICY = "ISOMOE_WEIGHT_SCALE_POLICY"
RECIPES = ("w8a8", "w8a16")
POLICIES = ("exact", "per_channel")


@dataclass(frozen=True)
class Settings:
    """Attributes:
    recipe: ``"w8a8"``, ``"w8a16"``, or None for the generation's own.
    weight_scale_policy: ``"exact"`` keeps every scale and every code; ``"per_channel"`` requantises block weights
      to one scale an output row: faster, and no longer the checkpoint's numbers.
    """

    recipe: str | None = None
    weight_scale_policy: str = "exact"

    def __post_init__(self) -> None:
        if self.recipe is not None:
            check_choice(ENV_RECIPE, self.recipe, RECIPES)
        check_choice(ENV_POLICY, self.weight_scale_policy, POLICIES)

    @classmethod
    def from_env(cls) -> Settings:
        """The environment's settings.

        Raises:
          ValueError: a variable that holds something else; the message names it.
        """
        read = {name: os.environ.get(name, "").strip().lower() for name in (ENV_RECIPE, ENV_POLICY)}
        return cls(read[ENV_RECIPE] or None, read[ENV_POLICY] or "exact")

    def recipe_on(self, generation_name: str) -> str:
        """The recipe on a TPU generation."""
        return self.recipe or generation(generation_name).default_recipe
