# SPDX-License-Identifier: Apache-2.0
"""Which chain of kernels serves a batch: a rule by rows an expert gets, overridden by measurements where it is wrong.

The rule follows what bounds the layer. One token: weights once, nothing to sort, two launches. Few rows an expert:
weights once, on the tensor core's M side, tiles of 16 or 32 rows. Many rows: arithmetic, rows on the M side, tiles of
128.
"""

from __future__ import annotations

from dataclasses import dataclass

CHAINS = ("one_token", "decode", "prefill")


@dataclass(frozen=True)
class Regime:
    """A chain, and the rows of a decode unit (64 only for W8A16)."""

    chain: str
    rows: int = 0

    @property
    def fp8_sums(self) -> int:
        """`Recipe.fp8_sums` of W8A8 batches: as short as costs the chain nothing."""
        return {"one_token": 0, "decode": 32 if self.rows == 16 else 64, "prefill": 128}[self.chain]

    def __str__(self) -> str:
        return f"{self.chain}{self.rows or ''}"

    def __post_init__(self) -> None:
        if self.chain not in CHAINS:
            raise ValueError(f"chain: got {self.chain!r}, want one of {CHAINS}")
        if (self.chain == "decode") != (self.rows in (16, 32, 64)):
            raise ValueError(f"rows: got {self.rows} for chain {self.chain!r}, want 16, 32 or 64 for 'decode', else 0")


ONE_TOKEN = Regime("one_token")
DECODE16 = Regime("decode", 16)
DECODE32 = Regime("decode", 32)
DECODE64 = Regime("decode", 64)
PREFILL = Regime("prefill")

# By the names that tables of measurements use.
REGIMES = {"one_token": ONE_TOKEN, "decode16": DECODE16, "decode32": DECODE32, "decode64": DECODE64, "prefill": PREFILL}

# The chain that gives the same bits at every batch size (rows are computed alone in it, as in the others).
INVARIANT = PREFILL

# Mean rows an expert up to which a decode unit of 16 rows, then one of 32, is the faster.
ROWS_16 = 12
ROWS_32 = 32


def choose(tokens: int, topk: int, experts: int, *, w8a16: bool, block: bool, lora: bool) -> Regime:
    """The regime of a batch.

    Args:
      tokens: T; topk: K.
      experts: experts routed over (all ranks').
      w8a16: weights widened, activations kept; served by the first two chains only.
      block: block scales; lora: with adapters. Either fills the registers that a 64-row W8A16 unit needs.
    """
    if tokens == 1 and topk <= 8:
        return ONE_TOKEN
    mean = tokens * topk / experts
    if w8a16:
        return DECODE16 if mean <= ROWS_16 else DECODE32 if mean <= ROWS_32 or block or lora else DECODE64
    if mean <= ROWS_16:
        return DECODE16
    return DECODE32 if mean <= ROWS_32 else PREFILL


def candidates(tokens: int, topk: int, *, w8a16: bool, block: bool, lora: bool) -> tuple[Regime, ...]:
    """Every regime that can serve a batch; `choose` names one of them, and a measurement may name another."""
    found = [DECODE16, DECODE32]
    if tokens == 1 and topk <= 8:
        found.insert(0, ONE_TOKEN)
    if not w8a16:
        found.append(PREFILL)
    elif not (block or lora):
        found.append(DECODE64)
    return tuple(found)
