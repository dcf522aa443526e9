# SPDX-License-Identifier: Apache-2.0
"""The one table of bounds that parity is judged by, with the reason for each.

None of them grows with the size of an array.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """A bound on one metric and why it is what it is."""

    bound: float
    reason: str


TO_RECIPE = Tolerance(
    5e-3, "the same roundings in another order: bf16 output costs 1.7e-3, bf16 result rows about as much again"
)
TO_RECIPE_FP8_WIRE = Tolerance(
    3e-2, "result rows travel in FP8 with one scale a row: 2.6e-2 a row, averaged over K rows"
)
WORST_ROW = Tolerance(2e-2, "one row's share of TO_RECIPE: a short row has few terms to average over")
DELTA = Tolerance(5e-3, "bf16 adapter input costs 2.4e-3; feeding dequantised FP8 rows would cost 2.6e-2")
DELTA_COSINE = Tolerance(0.999, "a misread or misplaced adapter is nearly orthogonal to the right one")
W8A8_TO_TRUTH = Tolerance(5e-2, "FP8 rounding of x and of h, 2.6e-2 each, and the bf16 output")
W8A8_FP8_WIRE_TO_TRUTH = Tolerance(6e-2, "W8A8_TO_TRUTH and one more FP8 rounding of the result rows")
W8A16_TO_TRUTH = Tolerance(1e-2, "bf16 h and bf16 output only; 2.4e-3 measured, with room for short sums")
LORA_FP8_INPUT_DELTA = Tolerance(4e-2, "opt-in: adapters see dequantised FP8 rows, 2.6e-2 measured")


def to_recipe(wire: str) -> Tolerance:
    """The bound on relative L2 against the declared recipe evaluated with float32 result rows."""
    return TO_RECIPE_FP8_WIRE if wire == "fp8" else TO_RECIPE


def to_truth(recipe_name: str, wire: str) -> Tolerance:
    """The bound on relative L2 against float64."""
    if recipe_name == "w8a8":
        return W8A8_FP8_WIRE_TO_TRUTH if wire == "fp8" else W8A8_TO_TRUTH
    return W8A16_TO_TRUTH
