# SPDX-License-Identifier: Apache-2.0
"""What one build of the expert kernel is: shapes, recipe, adapters and blocks, all static, and what they occupy.

`scratch` is the one list of on-chip buffers. The kernel allocates from it and the block chooser adds it up, so the
memory model cannot drift from the allocation.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

ROW_BLOCK = 32
"""Rows staged at a time; the sublane tile of 8-bit data."""
RUN_BLOCK = 8
"""Owners to whom rows are started together."""
INDEX_RING = 4
"""Visits whose rows' places are held: the one at work, the one whose rows come in, the one after it; a power of 2."""
LANES = 128
SUBLANES = 8
BF16_SUBLANES = 16

KERNEL_RECIPES = ("w8a8", "w8a16", "bf16")
DISPATCHES = ("ag_bf16", "ag_fp8")

_ITEMSIZE = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "uint32": 4, "int32": 4}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Transport:
    """What the expert kernel does with its results; `combine` does the rest.

    Attributes:
      pushed: the kernel sends each row to its token's owner; else rows stay here in sorted order.
      row: dtype of the kernel's result rows.
    """

    pushed: bool
    row: str


TRANSPORTS: dict[str, Transport] = {
    "push_bf16": Transport(True, "bfloat16"),
    "push_fp8": Transport(True, "float8_e4m3fn"),
    "rs_bf16": Transport(False, "bfloat16"),
    "presum_fp8": Transport(False, "bfloat16"),
}

STAGES = frozenset(("gather", "weights", "adapters", "dots", "ship"))
"""What a visit does, as far as it can be left out: rows in, weight tiles in, adapter pairs in, the multiplications
(with activation and quantisers), results out."""

ABLATIONS: dict[str, frozenset[str]] = {
    "": frozenset(),
    "metadata_only": STAGES,
    "gather_only": STAGES - {"gather"},
    "no_weight_hbm": frozenset(("weights", "adapters")),
    "no_ship": frozenset(("ship",)),
    "no_dots": frozenset(("dots",)),
}
"""Builds with stages left out, for timing what each one costs. Their results are wrong on purpose."""


@dataclass(frozen=True)
class Blocks:
    """Tile sizes of one build.

    Attributes:
      bf: columns of the intermediate dimension a step covers; with w8a8 also the width one hidden scale covers.
      rows: rows of a panel (R): an expert with more is visited again, and its weights are streamed again.
      rungs: static tile heights, ascending, the last equal to `rows`.
      nbuf: weight tiles in flight or in use.
      xbuf: row panels buffered (1 or 2).
      stage: result rows converted and sent at a time.
      pairs: (expert, adapter) pairs held at once; 0 without adapters.
    """

    bf: int
    rows: int
    rungs: tuple[int, ...]
    nbuf: int
    xbuf: int
    stage: int
    pairs: int = 0

    def __post_init__(self) -> None:
        if self.bf < 1 or self.bf % LANES:
            raise ValueError(f"bf: got {self.bf}, want a positive multiple of {LANES}")
        if self.rows < ROW_BLOCK or self.rows % ROW_BLOCK:
            raise ValueError(f"rows: got {self.rows}, want a positive multiple of {ROW_BLOCK}")
        if not self.rungs or list(self.rungs) != sorted(set(self.rungs)) or self.rungs[-1] != self.rows:
            raise ValueError(f"rungs: got {self.rungs}, want ascending heights ending in rows={self.rows}")
        if any(r < SUBLANES or r % SUBLANES for r in self.rungs):
            raise ValueError(f"rungs: got {self.rungs}, want multiples of {SUBLANES}")
        if self.nbuf < 2:
            raise ValueError(f"nbuf: got {self.nbuf}, want at least 2")
        if self.xbuf not in (1, 2):
            raise ValueError(f"xbuf: got {self.xbuf}, want 1 or 2")
        if self.stage < ROW_BLOCK or self.stage % ROW_BLOCK or self.rows % self.stage:
            raise ValueError(f"stage: got {self.stage}, want a multiple of {ROW_BLOCK} dividing rows={self.rows}")
        if self.pairs < 0:
            raise ValueError(f"pairs: got {self.pairs}, want at least 0")


@dataclass(frozen=True)
class LoRASpec:
    """Adapter slots a build serves: `slots` of rank at most `rank` (a multiple of 16; smaller ranks zero-padded)."""

    slots: int
    rank: int
    shared_a13: bool = False
    shared_b2: bool = False

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots: got {self.slots}, want at least 1")
        if self.rank < 1 or self.rank % BF16_SUBLANES:
            raise ValueError(f"rank: got {self.rank}, want a positive multiple of {BF16_SUBLANES}")

    @property
    def words(self) -> int:
        """Rows of 32-bit words that `rank` rows of bfloat16 take."""
        return self.rank // 2


@dataclass(frozen=True)
class Buffer:
    """One on-chip buffer: what the kernel calls it, where it lives, and its shape."""

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes with the last two dimensions padded to the native tile (an upper bound)."""
        return self._padded() if self.space == "vmem" else 0

    @property
    def scalar_bytes(self) -> int:
        """The same of scalar memory."""
        return self._padded() if self.space == "smem" else 0

    def _padded(self) -> int:
        item = _ITEMSIZE[self.dtype]
        dims = list(self.shape)
        dims[-1] = round_up(dims[-1], LANES)
        if len(dims) > 1:
            dims[-2] = round_up(dims[-2], 8 * (4 // item))
        total = item
        for d in dims:
            total *= d
        return total


@dataclass(frozen=True)
class KernelSpec:
    """One build of the expert kernel.

    Attributes:
      hidden: model width H, a multiple of 256 (padded).
      inter: intermediate size, a multiple of ``blocks.bf`` (padded).
      experts: experts held here.
      tokens: rows of the gathered activations (T, all devices).
      top_k: experts a token visits.
      ep: devices along the expert axis; `axis` is its mesh name.
      recipe: ``"w8a8"``, ``"w8a16"`` or ``"bf16"``.
      block_scales: [128, 128] weight scales (one a row of w13 and w2 otherwise).
      static_scales: activations use scales known at load.
      dispatch: how activations arrive: ``"ag_bf16"`` gathers the rows themselves, ``"ag_fp8"`` codes and a scale
        quantised at the source. w8a8 with per-token scales multiplies those codes as they are; w8a16 rounds them
        back to bf16, a rounding its recipe declares (``Recipe.x_wire``). Not with adapters: those need the rows.
      transport: how results leave (`TRANSPORTS`): ``"push_bf16"`` writes each row to its token's owner,
        ``"push_fp8"`` the same as e4m3 codes and a scale a row; ``"rs_bf16"`` leaves rows here for a reduce-scatter,
        ``"presum_fp8"`` for the weighted sum of a token's rows, of which one FP8 row travels.
      ablate: a key of `ABLATIONS`; ``""`` computes the layer.
    """

    hidden: int
    inter: int
    experts: int
    tokens: int
    top_k: int
    ep: int
    axis: str | tuple[str, ...]
    activation: str
    gated: bool
    recipe: str
    block_scales: bool
    static_scales: bool
    has_bias: bool
    transport: str
    blocks: Blocks
    lora: LoRASpec | None = None
    dispatch: str = "ag_bf16"
    ablate: str = ""

    def __post_init__(self) -> None:
        if self.hidden % 256:
            raise ValueError(f"hidden: got {self.hidden}, want a multiple of 256 (pad it)")
        if self.inter % self.blocks.bf:
            raise ValueError(f"inter: got {self.inter}, want a multiple of bf={self.blocks.bf} (pad it)")
        if self.recipe not in KERNEL_RECIPES:
            raise ValueError(f"recipe: got {self.recipe!r}, want one of {', '.join(KERNEL_RECIPES)}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport: got {self.transport!r}, want one of {', '.join(TRANSPORTS)}")
        if self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch: got {self.dispatch!r}, want one of {', '.join(DISPATCHES)}")
        if self.dispatch == "ag_fp8":
            plain = self.recipe == "w8a8" and not (self.block_scales or self.static_scales)
            if not (plain or self.recipe == "w8a16") or self.lora is not None or self.hidden % 512:
                raise ValueError(
                    f"dispatch: got 'ag_fp8' with recipe={self.recipe!r}, block_scales={self.block_scales}, "
                    f"static_scales={self.static_scales}, lora={self.lora}, hidden={self.hidden}; want w8a8 with "
                    "per-token scales or w8a16, no adapters and hidden a multiple of 512"
                )
        if self.ablate not in ABLATIONS:
            names = ", ".join(repr(name) for name in ABLATIONS)
            raise ValueError(f"ablate: got {self.ablate!r}, want one of {names}")
        if self.tokens % self.ep:
            raise ValueError(f"tokens: got {self.tokens}, want a multiple of ep={self.ep} (pad them)")
        if (self.lora is None) != (self.blocks.pairs == 0):
            raise ValueError(f"pairs: got {self.blocks.pairs} with lora={self.lora}")

    @property
    def quantized(self) -> bool:
        """Whether weights are FP8 with scales."""
        return self.recipe != "bf16"

    @property
    def pushes(self) -> bool:
        """Whether the kernel itself sends results to their owners."""
        return TRANSPORTS[self.transport].pushed

    def does(self, stage: str) -> bool:
        """Whether the build includes a stage of `STAGES`."""
        return stage not in ABLATIONS[self.ablate]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Words of a gathered row. FP8 rows are cut into whole native tiles, or each would be padded to one."""
        if self.dispatch != "ag_fp8":
            return self.hidden // 256, LANES
        words = self.hidden // 512
        sublanes = math.gcd(words, 8)
        return words // sublanes, sublanes, LANES

    @property
    def row_nbytes(self) -> int:
        """Bytes of a gathered row."""
        return 4 * math.prod(self.row_shape)

    @property
    def fp8_wire(self) -> bool:
        """Whether the kernel's result rows are FP8 codes, with a scale each."""
        return TRANSPORTS[self.transport].row == "float8_e4m3fn"

    @property
    def halves(self) -> int:
        return 2 if self.gated else 1

    @property
    def tiles(self) -> int:
        """f tiles an expert has."""
        return self.inter // self.blocks.bf

    @property
    def one_block(self) -> bool:
        """Whether a visit's rows are unpacked, multiplied and finished in one straight-line block for each height: an
        expert has one tile, and few rows (in tall tiles what is done side by side would spill)."""
        return self.tiles == 1 and self.blocks.rows <= 2 * ROW_BLOCK and self.blocks.xbuf == 2

    @property
    def finishes_in_tile(self) -> bool:
        """Whether results get their scale, bias and adapters where they leave the only tile."""
        return self.tiles == 1

    @property
    def adapter_stages(self) -> tuple[tuple[str, ...], ...]:
        """Operands of a pair in the order they are used; copies of one stage start, and are waited for, together.

        A stage starts as soon as the visit before has used the last: one block uses all at once, one tile all but A13.
        """
        tile = ("lora_b13", "a2")
        if self.one_block:
            return (("a13", *tile, "lora_b2"),)
        return (("a13",), (*tile, "lora_b2")) if self.finishes_in_tile else (("a13",), tile, ("lora_b2",))

    @property
    def deep_terms(self) -> bool:
        """Whether both terms of a shrunk input are expanded in one pass, side by side, below B loaded twice: in tall
        tiles, where rows take the time and not B, and a stack that would leave half of the matrix unit's depth idle."""
        return self.finishes_in_tile and not self.one_block and self.lanes <= LANES

    @property
    def finish_rows(self) -> int:
        """Result rows rounded at a time: few, as a visit's last are seldom many; more where adapters are added to them,
        as B2 is loaded for each."""
        wide = self.lora is not None and not self.finishes_in_tile and self.blocks.stage % (2 * ROW_BLOCK) == 0
        return 2 * ROW_BLOCK if wide else ROW_BLOCK

    @property
    def capacity(self) -> int:
        """Rows this device may have to compute: every pair may be routed here."""
        return self.tokens * self.top_k

    @property
    def local_rows(self) -> int:
        """Pairs of the tokens this device owns: the arrival buffer of a push."""
        return self.capacity // self.ep

    @property
    def token_bits(self) -> int:
        """Bits that number the tokens this device owns."""
        return (self.tokens // self.ep - 1).bit_length()

    @property
    def pair_bits(self) -> int:
        """Bits that number their pairs: k, then the token."""
        return self.token_bits + (self.top_k - 1).bit_length()

    @property
    def lanes(self) -> int:
        """Lanes of the stacked adapters: pairs x rank, in whole vector registers."""
        return self.stacked * self.lora.rank if self.lora else 0

    @property
    def stacked(self) -> int:
        """Pairs the stack has room for."""
        return round_up(self.blocks.pairs, LANES // math.gcd(self.lora.rank, LANES)) if self.lora else 0

    @property
    def groups(self) -> int:
        """Visits an expert is cut into because only `pairs` adapters fit at once."""
        return -(-self.lora.slots // self.blocks.pairs) if self.lora else 1

    @property
    def max_visits(self) -> int:
        return min(self.capacity, self.experts * self.groups) + self.capacity // self.blocks.rows

    @property
    def segments(self) -> int:
        """(expert, group of adapters) pairs of the experts held here, the order rows are computed in."""
        return self.experts * self.groups

    @property
    def visit_width(self) -> int:
        """Words of a visit: segment, first row in it, row count, first chunk, first sorted row; with adapters how many
        pairs, how many runs of neighbouring slots these are, and the places where presence changes."""
        return self.pairs_word + (3 + self.blocks.pairs if self.lora else 0)

    @property
    def pairs_word(self) -> int:
        """Where a visit's words about adapters begin."""
        return 5

    @property
    def run_words(self) -> int:
        """Words of a segment: for each owner its first row there, then how many there are; for each owner how much
        farther that row lies in its list."""
        return 2 * self.ep + 1

    @property
    def index_shape(self) -> tuple[int, int]:
        """A line for each `ROW_BLOCK` rows of a panel: where the table has the row, then how much farther than its
        token's number the token's entries are."""
        return self.blocks.rows // ROW_BLOCK, LANES

    @property
    def present_words(self) -> int:
        """Words that say which adapters of a group a segment has rows of, a bit each."""
        return -(-self.blocks.pairs // 32)

    @property
    def scale_lanes(self) -> int:
        """Lanes of a row of block scales: one a 128-block of H."""
        return round_up(self.hidden // LANES, LANES)

    @property
    def spread_scales(self) -> bool:
        """Whether a row's block scales lie in all lanes of their blocks: spreading them for each tile costs more time
        than the room of a short panel is worth."""
        return self.block_scales and self.blocks.rows <= 2 * ROW_BLOCK

    @property
    def scale13_shape(self) -> tuple[int, int]:
        """Scales of a w13 tile: a column's each, or a row of blocks of H for 128 columns each."""
        columns = self.halves * self.blocks.bf
        return (columns // LANES, self.scale_lanes) if self.block_scales else (1, columns)

    @property
    def scale2_shape(self) -> tuple[int, int]:
        """Scales of w2: an expert's columns' each, or of a tile a row of blocks of H for 128 of its rows each."""
        return (self.blocks.bf // LANES, self.scale_lanes) if self.block_scales else (1, self.hidden)

    @property
    def table(self) -> TableLayout:
        return TableLayout.of(self)


@dataclass(frozen=True)
class TableLayout:
    """The int32 table the kernel reads from scalar memory: of each device `stride` words, what it says of its own.

    First the tokens of its pairs, numbered on all devices, sorted by (segment, pair), segments of all devices: rows of
    results arrive there in the same order. `begins`: the first of them in each segment, then how many are routed at
    all. `scales`: of each of its tokens' rows, bits of a float32, where rows are quantised at their source. Where there
    are adapters, `slots`: of each of its tokens, -1 for none; `present`: for each segment, its adapters that pairs use
    as bits.
    """

    begins: int
    scales: int
    slots: int
    present: int
    stride: int
    size: int

    @classmethod
    def of(cls, spec: KernelSpec) -> TableLayout:
        tokens, segments = spec.tokens // spec.ep, spec.ep * spec.segments
        lengths = (
            spec.local_rows, segments + 1, tokens * (spec.dispatch == "ag_fp8"), tokens * (spec.lora is not None),
            segments * spec.present_words,
        )
        begins, scales, slots, present, end = itertools.accumulate(round_up(n, LANES) for n in lengths)
        stride = round_up(end, SUBLANES * LANES)
        return cls(begins, scales, slots, present, stride, spec.ep * stride)


def scales_shape(rows: int) -> tuple[int, int, int]:
    """Scales of `rows` rows along lanes, and a line to spare after that of the place past the last."""
    return rows // LANES + 2, 1, LANES


def scratch(spec: KernelSpec) -> list[Buffer]:
    """Every on-chip buffer of a build, in the kernel's argument order."""
    b = spec.blocks
    h, bf, rows = spec.hidden, b.bf, b.rows
    wdtype = "float8_e4m3fn" if spec.quantized else "bfloat16"
    xdtype = "float8_e4m3fn" if spec.recipe == "w8a8" else "bfloat16"
    out = [
        Buffer("xg", "vmem", (b.xbuf, rows // ROW_BLOCK, ROW_BLOCK, *spec.row_shape), "uint32"),
        Buffer("xs", "vmem", (rows, h), xdtype),
        Buffer("y", "vmem", (rows, h), "float32"),
        Buffer("w13v", "vmem", (b.nbuf, h, spec.halves * bf), wdtype),
        Buffer("w2v", "vmem", (b.nbuf, bf, h), wdtype),
        Buffer("st", "vmem", (2, b.stage, h // LANES, LANES), TRANSPORTS[spec.transport].row),
        Buffer("visits", "smem", (spec.max_visits * spec.visit_width,), "int32"),
        Buffer("runs", "smem", (spec.segments * spec.run_words,), "int32"),
        Buffer("index", "smem", (INDEX_RING, *spec.index_shape), "int32"),
        Buffer("places", "vmem", spec.index_shape, "int32"),
        Buffer("lens", "smem", (4,), "int32"),
        Buffer("index_sem", "dma", (1,)),
        Buffer("gather_sem", "dma", (b.xbuf,)),
        Buffer("weight_sem", "dma", (b.nbuf,)),
        Buffer("out_sem", "dma", (2,)),
    ]
    if spec.fp8_wire:
        out += [
            Buffer("st_scale", "vmem", (-(-b.stage // LANES), 1, LANES), "float32"),
            Buffer("laid_scale", "vmem", (spec.ep, *scales_shape(spec.local_rows)), "float32"),
            Buffer("got_scale", "vmem", (spec.ep, *scales_shape(spec.local_rows)), "float32"),
        ]
    if spec.quantized:
        space = "smem" if spec.block_scales else "vmem"
        out.append(Buffer("s13v", space, (b.nbuf, *spec.scale13_shape), "float32"))
        out.append(Buffer("s2v", space, (b.nbuf if spec.block_scales else 2, *spec.scale2_shape), "float32"))
    if spec.dispatch == "ag_fp8" or (spec.recipe == "w8a8" and not spec.static_scales):
        width = LANES if not spec.block_scales else h if spec.spread_scales else spec.scale_lanes
        out.append(Buffer("sx", "vmem", (rows, width), "float32"))
    if spec.has_bias:
        out += [
            Buffer("b13v", "vmem", (b.nbuf, 1, spec.halves * bf), "float32"),
            Buffer("b2v", "vmem", (2, 1, h), "float32"),
        ]
    if spec.has_bias or (spec.quantized and not spec.block_scales):
        out.append(Buffer("visit_sem", "dma", (2,)))
    if spec.ep > 1 and spec.pushes:
        out += [Buffer("send_sem", "dma", (2,)), Buffer("recv_sem", "dma", (1,))]
    if spec.lora:
        a = spec.lanes
        if spec.recipe == "w8a8":
            out.append(Buffer("xb", "vmem", (rows, h), "bfloat16"))
        out += [
            Buffer("la13", "vmem", (spec.stacked, spec.halves, spec.lora.words, h), "int32"),
            Buffer("lb13", "vmem", (spec.stacked, spec.tiles, spec.lora.words, spec.halves * bf), "int32"),
            Buffer("la2", "vmem", (spec.stacked, spec.tiles, spec.lora.words, bf), "int32"),
            Buffer("lb2", "vmem", (spec.stacked, spec.lora.words, h), "int32"),
            Buffer("row_slot", "vmem", (rows, LANES), "int32"),
            Buffer("vs", "vmem", (2, rows, spec.halves * a), "bfloat16"),
            Buffer("lora_sem", "dma", (3,)),
        ]
        if not spec.finishes_in_tile:
            out.append(Buffer("us", "vmem", (rows, a), "float32"))
    return out


def operands(spec: KernelSpec) -> list[str]:
    """Names of the kernel's device-memory operands, in order (after the scalar tables)."""
    names = ["x", "w13", "w2"]
    if spec.quantized:
        names += ["s13", "s2"]
    if spec.has_bias:
        names += ["b13", "b2"]
    if spec.lora:
        names += ["a13", "lora_b13", "a2", "lora_b2"]
    return names


def results(spec: KernelSpec) -> list[str]:
    """Names of the kernel's results, in order."""
    return ["o", "o_scale"] if spec.fp8_wire else ["o"]


def scratch_bytes(spec: KernelSpec) -> int:
    """VMEM bytes of a build."""
    return sum(buffer.nbytes for buffer in scratch(spec))


def vmem_bytes(spec: KernelSpec) -> int:
    """VMEM a build needs: its buffers, and what tall tiles spill of their float32 pre-activations.

    The spilled share is libtpu's: next to nothing without adapters, up to 1.35 tiles with them.
    """
    tile = 4 * spec.blocks.rows * spec.halves * spec.blocks.bf
    return scratch_bytes(spec) + (tile * 3 // 2 if spec.lora else tile // 4)


def dma_semaphores(spec: KernelSpec) -> int:
    """DMA semaphores of a build."""
    return sum(buffer.shape[0] for buffer in scratch(spec) if buffer.space == "dma")
