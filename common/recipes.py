# SPDX-License-Identifier: Apache-2.0
"""What precision a run uses, declared: two runs of one recipe are held to each other, not to float64.

`w8a8` multiplies FP8 by FP8: activations are quantised dynamically (or by a static scale the checkpoint brings),
`w8a16` keeps activations in bfloat16 and only the weights in FP8, `bf16` has no FP8 at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .checks import check_choice
from .fp8_sums import INTERVALS

RECIPES = ("w8a8", "w8a16", "bf16", "float64")
WIRES = ("f32", "bf16", "fp8")
WIRE_UNITS = ("row", "device")
Group = str | int | None


@dataclass(frozen=True)
class Recipe:
    """Every rounding a run declares.

    Attributes:
      name: ``"w8a8"``, ``"w8a16"``, ``"bf16"``, or ``"float64"`` (the truth: no rounding of activations at all).
      x_group: how the layer's input is quantised: None (left in bf16), ``"token"`` (one scale a row), ``128``
        (one a run of 128 columns) or ``"static"`` (the checkpoint's scale).
      h_group: the same for the hidden activations; a kernel that tiles the intermediate dimension may use one
        scale a row and tile, which it declares as the tile's width.
      wire: the precision in which an expert's result row (or a rank's partial sum) is stored before the final
        float32 sum. ``"f32"`` stores no rounding; ``"fp8"`` has one scale a row.
      wire_unit: what `wire` rounds. ``"row"``: an expert's result row. ``"device"``: the router-weighted float32 sum,
        k ascending, of a token's rows on one device (experts are split evenly, ``ceil(E / EP)`` a device); devices
        are then added in the order of ranks, and each expert's row has been stored in bf16 before (unless `wire` is
        f32). A device without an expert of the token adds nothing.
      fp8_sums: 0 where w13's FP8 products are summed in float32. Hopper's FP8 accumulator keeps 14 bits; there it is
        the number of columns (32, 64 or 128) after which a product leaves it for float32 (`fp8_sums.short_sums`). A
        few 1e-5 of g that flip some FP8 codes of h, so it is a recipe of its own, declared by who ran a batch. w2's
        sums, which no rounding follows, are not named.
      x_wire: ``"fp8"`` sends the layer's input between devices as FP8 rows with one scale each, rounded back to bf16
        where they arrive; a rounding only w8a16 needs to declare (w8a8 multiplies those same codes).
      lora_input: ``"bf16"`` feeds adapters the original rows. ``"fp8"`` feeds them the quantised rows times their
        scale (relative L2 of the delta about 0.026 instead of 0.002): opt-in only.
      lora_products: the precision of ``A x`` before B multiplies it. ``"f32"`` rounds nothing. ``"bf16"`` is what one
        matrix instruction takes: the delta itself moves by 2e-3, but in w8a8 that flips some FP8 codes of h, so it is
        a recipe of its own.
    """

    name: str
    x_group: Group = None
    h_group: Group = None
    wire: str = "f32"
    lora_input: str = "bf16"
    lora_products: str = "f32"
    wire_unit: str = "row"
    x_wire: str = "bf16"
    fp8_sums: int = 0

    def __post_init__(self) -> None:
        check_choice("recipe", self.name, RECIPES)
        check_choice("wire", self.wire, WIRES)
        check_choice("lora_input", self.lora_input, ("bf16", "fp8"))
        check_choice("lora_products", self.lora_products, ("f32", "bf16"))
        check_choice("wire_unit", self.wire_unit, WIRE_UNITS)
        check_choice("x_wire", self.x_wire, ("bf16", "fp8"))
        for label in ("x_group", "h_group"):
            group = getattr(self, label)
            ok = group in (None, "token", "static") or (isinstance(group, int) and group > 0)
            if not ok:
                raise ValueError(f"{label}: got {group!r}, want None, 'token', 'static' or a positive width")
            if (group is not None) != (self.name == "w8a8"):
                raise ValueError(f"{label}: got {group!r} with recipe {self.name!r}; w8a8 needs a group, others none")
        if self.fp8_sums not in (0, *INTERVALS) or (self.fp8_sums and self.name != "w8a8"):
            raise ValueError(f"fp8_sums: got {self.fp8_sums!r} with recipe {self.name!r}, want 0 or one of {INTERVALS} "
                             "with w8a8")
        if self.lora_input == "fp8" and self.name != "w8a8":
            raise ValueError(f"lora_input: got 'fp8' with recipe {self.name!r}, want it only with w8a8")
        if self.x_wire == "fp8" and self.name != "w8a16":
            raise ValueError(f"x_wire: got 'fp8' with recipe {self.name!r}, want it only with w8a16")

    def with_bf16_storage(self) -> Recipe:
        """The same recipe with result rows and rank products stored in bf16: what the fastest kernels do."""
        return replace(self, wire="bf16", lora_products="bf16")

    def with_wire(self, wire: str) -> Recipe:
        """The same recipe with another result precision."""
        return replace(self, wire=wire)


def default_recipe(name: str | None, scheme: str, *, static_input: bool = False) -> Recipe:
    """The plain recipe of a name for a weight scheme.

    Args:
      name: a recipe name; None means ``"bf16"`` for bf16 weights and ``"w8a8"`` otherwise.
      scheme: ``MoEWeights.scheme``.
      static_input: the checkpoint brings static activation scales.

    Raises:
      ValueError: an FP8 recipe on bf16 weights, or the reverse.
    """
    if name is None:
        name = "bf16" if scheme == "bf16" else "w8a8"
    check_choice("recipe", name, RECIPES)
    if name == "float64":
        return Recipe("float64")
    if (name == "bf16") != (scheme == "bf16"):
        raise ValueError(f"recipe: got {name!r} for weights of scheme {scheme!r}, want "
                         + ("'bf16'" if scheme == "bf16" else "'w8a8' or 'w8a16'"))
    if name != "w8a8":
        return Recipe(name)
    group: Group = 128 if scheme == "block" else ("static" if static_input else "token")
    return Recipe(name, x_group=group, h_group=group)
