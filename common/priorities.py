# SPDX-License-Identifier: Apache-2.0
"""In which order backends are tried, and from how many tokens on another one pays. Data only; the selector
walks it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .backends import RegisteredBackend
from .platforms import Platform

# W8A8 first: where the device multiplies e4m3 it is the faster path at every batch size measured, with LoRA
# too, since adapters see the unquantised rows. W8A16 serves what is left: devices of 7.5 to 8.8, and formats
# W8A8 refuses.
BUILTIN_ORDER = ("triton", "marlin", "pallas_ep", "reference")


@dataclass(frozen=True)
class TokenThreshold:
    """Use `backend` instead of `instead_of` for batches of at most `max_tokens` tokens.

    Attributes:
      backend, instead_of: registered names.
      capability: the CUDA compute capability it was measured on; holds for no other.
      scheme: the weight scheme it was measured with.
      max_tokens: largest batch, in tokens of one rank.
      measured: device, layer, both times with units, and how.
    """

    backend: str
    instead_of: str
    capability: tuple[int, int]
    scheme: str
    max_tokens: int
    measured: str


# Empty on purpose. On an H200 W8A16 costs 3 to 5 % over W8A8 at 64 tokens with kernels of one structure, and
# ties at best below that; a row needs a batch size at which switching was measured to win, with the figures
# in `measured`.
TOKEN_THRESHOLDS: tuple[TokenThreshold, ...] = ()


def backend_for_tokens(
    chosen: str,
    platform: Platform,
    scheme: str,
    num_tokens: int,
    table: tuple[TokenThreshold, ...] | None = None,
) -> str:
    """The backend for a batch of `num_tokens`: `chosen`, unless a measured threshold names another.

    Under ``ISOMOE_BATCH_INVARIANT=1`` one backend runs every batch.
    """
    if os.environ.get("ISOMOE_BATCH_INVARIANT") == "1":
        return chosen
    for row in TOKEN_THRESHOLDS if table is None else table:
        if (row.instead_of, row.capability, row.scheme) == (chosen, platform.capability, scheme):
            if num_tokens <= row.max_tokens:
                return row.backend
    return chosen


def walk_order(backends: list[RegisteredBackend]) -> list[RegisteredBackend]:
    """Built-in backends by `BUILTIN_ORDER`, then registered ones by falling priority and name."""

    def key(entry: RegisteredBackend) -> tuple[bool, int, str]:
        if not entry.builtin:
            return True, -entry.priority, entry.name
        known = entry.name in BUILTIN_ORDER
        return False, BUILTIN_ORDER.index(entry.name) if known else len(BUILTIN_ORDER), entry.name

    return sorted(backends, key=key)
