# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which expert.

vLLM's two placements: `linear` gives every rank a contiguous run, the first ``E % ep_size`` ranks one more;
`round_robin` deals experts out one by one. An adapter's experts are cut by the same map as the weights, so the two
can never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .checks import check_choice, check_int

STRATEGIES = ("linear", "round_robin")


@dataclass(frozen=True)
class ExpertPlacement:
    """A deal of `num_experts` experts over `ep_size` ranks."""

    num_experts: int
    ep_size: int
    strategy: str = "linear"

    def __post_init__(self) -> None:
        check_int("num_experts", self.num_experts, minimum=1)
        check_int("ep_size", self.ep_size, minimum=1)
        check_choice("strategy", self.strategy, STRATEGIES)

    def experts_of(self, rank: int) -> np.ndarray:
        """Global expert ids held by `rank`, ascending, int64 ``[E_local]`` (may be empty)."""
        if not 0 <= rank < self.ep_size:
            raise ValueError(f"rank: got {rank}, want 0 to {self.ep_size - 1}")
        if self.strategy == "round_robin":
            return np.arange(rank, self.num_experts, self.ep_size)
        base, extra = divmod(self.num_experts, self.ep_size)
        start = rank * base + min(rank, extra)
        return np.arange(start, start + base + (rank < extra))

    def expert_map(self, rank: int) -> np.ndarray:
        """int32 ``[E]``: an expert's index among `rank`'s experts, or -1 where another rank holds it."""
        local = self.experts_of(rank)
        out = np.full(self.num_experts, -1, np.int32)
        out[local] = np.arange(len(local), dtype=np.int32)
        return out

    @property
    def max_local_experts(self) -> int:
        """The most experts any rank holds."""
        return -(-self.num_experts // self.ep_size)
