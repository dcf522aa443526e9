# SPDX-License-Identifier: Apache-2.0
"""Golden packs, and the stage at which two runs of a recipe first part.

A pack is one safetensors file: for each case the inputs, the declared recipe, what the reference makes of it and, kept
for the stages of `reference.stages`, what it holds between the steps. A TPU host and a CUDA host are each held to the
same pack and never need each other; an executor's own result may be added, to compare two platforms directly.

`diagnose` names the first stage that is wrong. An executor with a classmethod ``stages(call) -> dict`` (names of
`reference.STAGES`) is compared stage by stage. Any other shows only its result, so it is given inputs on which every
stage but one is exact: activations on the FP8 grid, scales that are powers of two, selection matrices for weights,
gates so large that silu returns them, B zero. The first probe that fails names the stage.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import tolerances
from .checks import check_array
from .config import FusedMoEConfig, FusedMoEParallelConfig
from .executors import MoECall, executor_class, make_call, run_moe
from .metrics import compare, rel_l2
from .numerics import BF16, BLOCK, E4M3, cdiv
from .recipes import Recipe
from .reference import STAGES, reference_moe, stages
from .safe_files import PICKLE_SUFFIXES, TensorFile, TensorFileError, shown
from .support import declared_support
from .weights import LoRAAdapter, MoEWeights

FORMAT = 1
_META = "golden"
_DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint8): "U8",
    BF16: "BF16",
    E4M3: "F8_E4M3",
}
# How each stage of `reference.STAGES` is called in a report.
STAGE_LABELS = {
    "x_scale": "scale",
    "x_code": "code",
    "gmm1": "gmm1",
    "delta13": "delta",
    "activation": "activation",
    "h_scale": "scale",
    "h_code": "code",
    "gmm2": "gmm2",
    "delta2": "delta",
    "combine": "combine",
}
# Codes may differ where a scale's last bit does; a stage's float32 values only by the order of sums.
_STAGE_BOUND = 1e-3
# Rounding does not scale a result; truncating a float32 sum to bfloat16 makes it 1.4e-3 smaller.
_GAIN_BOUND = 5e-4


@dataclass(frozen=True)
class GoldenCase:
    """One case of a pack.

    Attributes:
      name: its id.
      call: the checked inputs and the recipe that `want` follows.
      want: float32 ``[T, H]``, the reference before its last rounding.
      stages: what `reference.stages` gave, possibly for fewer experts' shares; by name.
      got: results that executors stored, by executor.
    """

    name: str
    call: MoECall
    want: np.ndarray
    stages: dict[str, np.ndarray]
    got: dict[str, np.ndarray]


@dataclass(frozen=True)
class GoldenResult:
    """`check_pack`'s verdict on one case; `stage` is where the executor first parts, empty where it does not."""

    case: str
    verdict: str  # "pass", "fail", "error", "not served"
    rel_l2: float | None = None
    worst_row: float | None = None
    bound: float | None = None
    stage: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in ("pass", "not served")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file; the library's numpy writer knows no FP8."""
    header, offset = {}, 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": _DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for value in tensors.values():
            f.write(np.ascontiguousarray(value).tobytes())


def golden_case(name: str, call: MoECall) -> GoldenCase:
    """A case's expected result and stages, by the reference."""
    with np.errstate(invalid="ignore", over="ignore"):
        return GoldenCase(name, call, reference_moe(call), stages(call), {})


def write_pack(path: str | Path, cases: Iterable[GoldenCase]) -> int:
    """Write a pack; returns how many cases it holds.

    Raises:
      ValueError: no case, or two of one name, or a file name that `read_pack` refuses.
      OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise ValueError(f"path: got {path.name}, which names a pickle file and would not be read; want .safetensors")
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(path.parent))
    tensors: dict[str, np.ndarray] = {}
    meta: dict[str, Any] = {"format": FORMAT, "cases": []}
    for i, case in enumerate(cases):
        if case.name in [c["name"] for c in meta["cases"]]:
            raise ValueError(f"cases: got {case.name!r} twice, want distinct names")
        call, key = case.call, f"case{i}"
        weights = {k: v for k, v in vars(call.weights).items() if isinstance(v, np.ndarray)}
        arrays = {"x": call.x, "topk_weights": call.topk_weights, "topk_ids": call.topk_ids, "want": case.want}
        arrays |= {f"weights.{k}": v for k, v in weights.items()}
        arrays |= {f"stages.{k}": v for k, v in case.stages.items()}
        arrays |= {f"got.{k}": v for k, v in case.got.items()}
        for j, adapter in enumerate(call.adapters):
            arrays |= {f"adapter{j}.{k}": getattr(adapter, k) for k in ("a13", "b13", "a2", "b2")}
        if call.adapter_ids is not None:
            arrays["adapter_ids"] = call.adapter_ids
        tensors |= {f"{key}.{k}": v for k, v in arrays.items()}
        meta["cases"].append(
            {
                "name": case.name,
                "config": asdict(call.config),
                "scheme": call.weights.scheme,
                "recipe": asdict(call.recipe),
                "ep_size": call.ep_size,
                "adapters": [a.adapter_id for a in call.adapters],
            }
        )
    if not meta["cases"]:
        raise ValueError("cases: got none, want at least one")
    tensors[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    _write(path, tensors)
    return len(meta["cases"])


def read_pack(path: str | Path) -> list[GoldenCase]:
    """Read a pack.

    Raises:
      TensorFileError: a ValueError; no pack of this format, or one that does not fit together.
      OSError: no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(2, "no such golden pack", str(path))
    file = TensorFile(path.parent, path.name)
    try:
        tensors: dict[str, np.ndarray] = {}
        names = {v: k for k, v in _DTYPES.items()}
        for name, info in file.infos.items():
            if info.dtype not in names:
                raise TensorFileError(
                    f"{path.name}: tensor {name[:160]}: got dtype {info.dtype}, not one of a golden pack"
                )
            tensors[name] = np.empty(info.shape, names[info.dtype])
            file.read_into(info, tensors[name])
    finally:
        file.close()
    if _META not in tensors:
        raise TensorFileError(f"{path.name}: got no tensor {_META!r}, want a golden pack")
    try:
        meta = json.loads(tensors[_META].tobytes())
        form = meta["format"]
        cases = [_read_case(tensors, f"case{i}.", entry) for i, entry in enumerate(meta["cases"]) if form == FORMAT]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise TensorFileError(f"{path.name}: not a golden pack: {type(error).__name__}: {error}") from None
    if form != FORMAT:
        raise TensorFileError(f"{path.name}: got format {shown(form)}, want {FORMAT}")
    return cases


def _read_case(tensors: dict[str, np.ndarray], key: str, entry: dict[str, Any]) -> GoldenCase:
    def group(prefix: str) -> dict[str, np.ndarray]:
        full = key + prefix
        return {k.removeprefix(full): v for k, v in tensors.items() if k.startswith(full)}

    parallel = FusedMoEParallelConfig(**entry["config"].pop("moe_parallel_config"))
    config = FusedMoEConfig(**entry["config"], moe_parallel_config=parallel)
    adapters = [LoRAAdapter(i, **group(f"adapter{j}.")) for j, i in enumerate(entry["adapters"])]
    call = make_call(
        tensors[key + "x"],
        tensors[key + "topk_weights"],
        tensors[key + "topk_ids"],
        MoEWeights(entry["scheme"], **group("weights.")),
        config=config,
        adapters=adapters or None,
        adapter_ids=tensors.get(key + "adapter_ids"),
        ep_size=entry["ep_size"],
        recipe=Recipe(**entry["recipe"]),
    )
    results = {"want": tensors[key + "want"], **{f"got.{k}": v for k, v in group("got.").items()}}
    for label, value in results.items():
        check_array(label, value, shape=call.x.shape)
    return GoldenCase(str(entry["name"]), call, results["want"], group("stages."), group("got."))


def _run(executor: str, call: MoECall) -> np.ndarray:
    return run_moe(
        executor,
        call.x,
        call.topk_weights,
        call.topk_ids,
        call.weights,
        config=call.config,
        adapters=call.adapters or None,
        adapter_ids=call.adapter_ids,
        ep_size=call.ep_size,
        recipe=call.recipe,
    )


def _declared(executor: str, call: MoECall) -> Recipe:
    cls: Any = executor_class(executor)
    return cls.recipe(call) if hasattr(cls, "recipe") else call.recipe


def with_result(case: GoldenCase, executor: str) -> GoldenCase:
    """The case with this executor's own result stored in it."""
    return replace(case, got={**case.got, executor: _run(executor, case.call)})


def check_pack(cases: Iterable[GoldenCase], executor: str) -> Iterator[GoldenResult]:
    """Hold an executor to every case that it declares; a case that fails is diagnosed.

    Where the executor declares other groups than the pack's recipe (a tile width for h), the expected result is
    evaluated anew for what it declares. Results that other executors stored are compared with twice the bound.
    """
    support = declared_support(executor_class(executor))
    for case in cases:
        call = case.call
        if call.recipe.name not in support.recipes or call.weights.scheme not in support.schemes:
            yield GoldenResult(
                case.name, "not served", reason=f"{call.recipe.name} on {call.weights.scheme} weights"
            )
            continue
        try:
            declared = _declared(executor, call)
            got = _run(executor, call)
        except Exception as error:  # whatever an executor does is a finding
            yield GoldenResult(case.name, "error", reason=f"{type(error).__name__}: {error}".replace("\n", " "))
            continue
        yield _judge(case, executor, declared, got)


def _judge(case: GoldenCase, executor: str, declared: Recipe, got: np.ndarray) -> GoldenResult:
    call, want = case.call, case.want
    if declared.with_wire("f32") != call.recipe.with_wire("f32"):
        want = reference_moe(replace(call, recipe=declared.with_wire("f32")))
    found, bound = compare(got, want), tolerances.to_recipe(declared.wire).bound
    wrong = found.non_finite > 0 or found.rel_l2 > bound
    wrong |= declared.wire != "fp8" and found.worst_row > tolerances.WORST_ROW.bound
    reason = f"relative L2 {found.rel_l2:.2e} against the pack, want at most {bound:g}" if wrong else ""
    for other, result in case.got.items():
        apart = rel_l2(got, result)
        if apart > 2 * bound and not wrong:
            wrong, reason = True, f"relative L2 {apart:.2e} against {other}, want at most {2 * bound:g}"
    stage = ""
    if wrong:
        stage = first_parting(executor, call, case.stages) or diagnose(executor, call).stage
    return GoldenResult(
        case.name, "fail" if wrong else "pass", found.rel_l2, found.worst_row, bound, stage, reason
    )


def first_parting(executor: str, call: MoECall, want: dict[str, np.ndarray]) -> str:
    """The first stage at which an executor that exposes its stages parts from `want`; empty where none does."""
    expose = getattr(executor_class(executor), "stages", None)
    if expose is None:
        return ""
    got = expose(call)
    for name in STAGES:
        if name not in got or name not in want:
            continue
        value = np.asarray(got[name])
        if (
            value.shape != want[name].shape
            or rel_l2(value.astype(np.float32), want[name].astype(np.float32)) > _STAGE_BOUND
        ):
            return STAGE_LABELS[name]
    return ""


# -- probes ---------------------------------------------------------------------------------------------------------

# One layer for all probes: H = I, so that selection matrices fit, and more than one run of 128.
_E, _H, _T, _R = 4, 256, 16, 4
_GATE = 64.0  # silu returns it unchanged in float32, and it is a power of two


@dataclass(frozen=True)
class ProbeResult:
    """One probe: what it isolates, whether it held, and its figures."""

    stage: str
    probe: str
    ok: bool
    rel_l2: float
    gain: float
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """`diagnose`'s answer. `stage` is empty where every probe held."""

    stage: str
    probes: tuple[ProbeResult, ...]


def _grid(rng: np.random.Generator, tokens: int = _T) -> np.ndarray:
    """Rows of FP8 codes whose largest is 448 in every run of 128: quantising them gives scale 1 and loses nothing."""
    x = rng.choice([-2, -1.5, -1, -0.5, 0.5, 1, 1.5, 2], (tokens, _H)) * rng.choice([4, 16, 64], (tokens, _H))
    x[:, ::BLOCK] = 256.0  # drives the gate
    x[:, 1::BLOCK] = 448.0
    return x.astype(np.float32)


def _weights(scheme: str, w13: np.ndarray, w2: np.ndarray) -> MoEWeights:
    """Weights that hold exactly these values (all on the FP8 grid) under scales of one half and a quarter."""
    if scheme == "bf16":
        return MoEWeights(scheme, w13.astype(BF16), w2.astype(BF16))
    shapes = {
        "channel": ((_E, 2 * _H), (_E, _H)),
        "tensor": ((_E, 2), (_E,)),
        "block": ((_E, 2 * cdiv(_H, BLOCK), cdiv(_H, BLOCK)), (_E, cdiv(_H, BLOCK), cdiv(_H, BLOCK))),
    }[scheme]
    s13, s2 = np.full(shapes[0], 0.5, np.float32), np.full(shapes[1], 0.25, np.float32)
    return MoEWeights(scheme, (w13 / 0.5).astype(E4M3), (w2 / 0.25).astype(E4M3), s13, s2)


def _select(expert: int, factor: float = 1.0) -> np.ndarray:
    """``[H, H]``: column 1 of each run drives row 1 of each run, every other row its own column, turned by expert."""
    columns = np.arange(_H)
    moved = (columns % BLOCK > 1) & (columns % BLOCK < BLOCK)
    columns[moved] = np.roll(columns[moved], expert)
    out = np.zeros((_H, _H), np.float32)
    out[np.arange(_H), columns] = factor
    return out


def _plain_w13() -> np.ndarray:
    """Every gate row gives 0.25 times column 0 (64 for 256), every up row one column."""
    gate = np.zeros((_E, _H, _H), np.float32)
    gate[:, :, 0] = _GATE / 256
    return np.concatenate([gate, np.stack([_select(e) for e in range(_E)])], axis=1)


def _identity() -> np.ndarray:
    return np.broadcast_to(np.eye(_H, dtype=np.float32), (_E, _H, _H)).copy()


@dataclass
class _Setup:
    """What a probe may change; everything else is exact."""

    x: np.ndarray
    w13: np.ndarray
    w2: np.ndarray
    k: int = 1
    topk_weights: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    adapter: LoRAAdapter | None = None
    activation: str = "silu"


def _plain(rng: np.random.Generator) -> _Setup:
    return _Setup(_grid(rng), _plain_w13(), _identity())


def _codes_of_loudness(rng: np.random.Generator) -> _Setup:
    """Loudness that differs by row and by run of 128, so that a scale of another row, run or tensor shows."""
    s = _plain(rng)
    s.x = s.x * rng.choice([1, 1.25, 1.125, 0.3125, 0.28125], (_T, 1))
    s.x[:, BLOCK:] *= rng.choice([1, 1.25, 1.125, 2], (_T, 1))
    return s


def _between_codes(rng: np.random.Generator) -> _Setup:
    """Values between two codes, scale 1: what is tested is the rounding."""
    s = _plain(rng)
    keep = np.zeros(_H, bool)
    keep[::BLOCK] = keep[1::BLOCK] = True
    noise = (rng.standard_normal(s.x.shape) * 60).clip(-440, 440)
    s.x = np.where(keep, s.x, noise)
    return s


def _h_between_codes(rng: np.random.Generator) -> _Setup:
    """Exact pre-activations whose product with the gate lies between two codes."""
    s = _plain(rng)
    factors = rng.choice([1, 1.125, 1.25, 1.375, 1.625, 1.875], _H).astype(np.float32)
    factors[1::BLOCK] = 1
    s.w13[:, _H:] *= factors[:, None]
    s.x[:, 2:BLOCK] *= 0.5
    s.x[:, BLOCK + 2 :] *= 0.5
    return s


def _dense(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.choice([-1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1], (_E, rows, _H)).astype(np.float32)


def _dense_w13(rng: np.random.Generator) -> _Setup:
    """Long sums in the first product; the gate stays exact."""
    s = _plain(rng)
    s.w13[:, _H:] = _dense(rng, _H)
    return s


def _dense_w2(rng: np.random.Generator) -> _Setup:
    """Long sums in the second product, over exact h."""
    s = _plain(rng)
    s.w2 = _dense(rng, _H)
    return s


def _soft_gate(rng: np.random.Generator, activation: str) -> _Setup:
    """Gates where the activation bends, up constant."""
    s = _plain(rng)
    up = s.w13[:, :_H].copy()
    s.w13 = np.concatenate([np.stack([_select(e, 2.0**-6) for e in range(_E)]), up], axis=1)
    s.activation = activation
    return s


def _mixed_experts(rng: np.random.Generator) -> _Setup:
    """Three experts a token with weights of many bits, one of them skipped now and then."""
    s = _plain(rng)
    s.k = 3
    s.topk_weights = rng.dirichlet(np.ones(3), _T).astype(np.float32)
    s.topk_ids = np.stack([rng.permutation(_E)[:3] for _ in range(_T)]).astype(np.int32)
    s.topk_ids[::5, 1] = -1
    return s


def _adapter(rng: np.random.Generator, which: str) -> LoRAAdapter:
    def normal(*dims: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(dims) * scale).astype(BF16)

    a13, a2 = normal(_E, 2, _R, _H, scale=_H**-0.5), normal(_E, _R, _H, scale=_H**-0.5)
    b13, b2 = normal(_E, 2, _H, _R, scale=0.5), normal(_E, _H, _R, scale=0.5)
    b13[:, 0] = 0  # the gate stays what it is
    if which == "w13":
        b2[:] = 0
    else:
        b13[:] = 0
    return LoRAAdapter(3, a13, b13, a2, b2)


def _adapted(rng: np.random.Generator, which: str) -> _Setup:
    """An adapter on one projection, over rows that FP8 cannot hold and whose scale is not 1."""
    s = _between_codes(rng)
    s.x = s.x * np.float32(0.0371)
    s.w13[:, :_H] *= 32
    s.w13[:, _H:] *= 2.0**-4 if which == "w13" else 1
    s.adapter = _adapter(rng, which)
    return s


# In this order a probe relies only on what earlier ones have shown: rounding under scale 1 before scales.
_PROBES: tuple[tuple[str, str, Callable[..., _Setup]], ...] = (
    ("gmm1", "selection", _plain),
    ("code", "x between two codes", _between_codes),
    ("code", "h between two codes", _h_between_codes),
    ("scale", "loudness by row and run", _codes_of_loudness),
    ("gmm2", "dense w2", _dense_w2),
    ("gmm1", "dense w13", _dense_w13),
    ("activation", "gates about zero", _soft_gate),
    ("combine", "three experts a token", _mixed_experts),
    ("delta", "adapter on w13", functools.partial(_adapted, which="w13")),
    ("delta", "adapter on w2", functools.partial(_adapted, which="w2")),
)


def probe_call(probe: str, scheme: str, recipe: str | Recipe, activation: str = "silu") -> MoECall:
    """The call of a probe, by its name in the table above.

    Raises:
      ValueError: unknown probe.
    """
    makers = {name: maker for _, name, maker in _PROBES}
    if probe not in makers:
        raise ValueError(f"probe: got {probe!r}, want one of {', '.join(makers)}")
    rng = np.random.default_rng(sum(map(ord, probe)))
    maker = makers[probe]
    s = maker(rng, activation) if maker is _soft_gate else maker(rng)
    ids = s.topk_ids if s.topk_ids is not None else (np.arange(_T, dtype=np.int32) % _E)[:, None]
    weights = s.topk_weights if s.topk_weights is not None else np.ones((_T, 1), np.float32)
    config = FusedMoEConfig(_E, s.k, _H, _H, activation=s.activation)
    adapter_ids = None
    if s.adapter is not None:
        config = config.with_lora(2, 16)
        adapter_ids = np.where(np.arange(_T) % 4 == 3, -1, s.adapter.adapter_id).astype(np.int32)
    return make_call(
        s.x.astype(BF16),
        weights,
        ids,
        _weights(scheme, s.w13, s.w2),
        config=config,
        adapters=None if s.adapter is None else [s.adapter],
        adapter_ids=adapter_ids,
        recipe=recipe,
    )


def _gain(got: np.ndarray, want: np.ndarray) -> float:
    g, w = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    return float(g @ w / (w @ w)) - 1


def _probe(executor: str, stage: str, probe: str, scheme: str, recipe: str, activation: str) -> ProbeResult:
    call = probe_call(probe, scheme, recipe, activation)
    try:
        declared = _declared(executor, call)
        got = _run(executor, call).astype(np.float32)
    except Exception as error:  # a probe that cannot run is a finding too
        return ProbeResult(stage, probe, False, float("inf"), float("inf"), f"{type(error).__name__}: {error}")
    exact = replace(call, recipe=declared.with_wire("f32"))
    want = reference_moe(exact)
    if stage == "delta":
        # Judged without the base output, beside which a wrong delta would be small.
        rows = call.adapter_ids >= 0  # type: ignore[operator]
        plain = replace(call, adapters=(), adapter_ids=None)
        got = got[rows] - _run(executor, plain).astype(np.float32)[rows]
        want = want[rows] - reference_moe(replace(plain, recipe=exact.recipe))[rows]
    apart = rel_l2(got, want)
    bias = _gain(got, want) if np.isfinite(got).all() else float("inf")
    fp8_wire = declared.wire == "fp8"
    # Rows of the loudness probe hold few distinct values, whose roundings do not cancel.
    judge_gain = not fp8_wire and stage not in ("delta", "scale")
    bound = (
        tolerances.to_recipe(declared.wire).bound
        if stage != "delta" or fp8_wire
        else 2 * tolerances.DELTA.bound
    )
    ok = apart <= bound and (abs(bias) <= _GAIN_BOUND or not judge_gain)
    if not ok and probe == "selection" and _gate_and_up_swapped(call, exact.recipe, got):
        return ProbeResult("activation", probe, False, apart, bias, "gate and up are exchanged")
    return ProbeResult(
        stage, probe, ok, apart, bias, "" if ok else f"relative L2 {apart:.2e}, gain {bias:+.2e}"
    )


def _gate_and_up_swapped(call: MoECall, recipe: Recipe, got: np.ndarray) -> bool:
    w = call.weights

    def swap(a: np.ndarray) -> np.ndarray:
        return np.roll(a, a.shape[1] // 2, axis=1) if a.ndim > 1 else a

    scale = None if w.w13_scale is None else swap(w.w13_scale)
    swapped = replace(w, w13=swap(w.w13), w13_scale=scale)
    want = reference_moe(replace(call, weights=swapped, recipe=recipe))
    return rel_l2(got, want) <= tolerances.TO_RECIPE.bound


def diagnose(
    executor: str,
    like: MoECall | None = None,
    *,
    scheme: str = "channel",
    recipe: str = "w8a8",
    activation: str = "silu",
) -> Diagnosis:
    """Run the probes on an executor and name the first stage that is wrong.

    Args:
      executor: a registered name.
      like: take scheme, recipe and activation from this call.
    """
    if like is not None:
        scheme, recipe, activation = like.weights.scheme, like.recipe.name, like.config.activation
    support = declared_support(executor_class(executor))
    results = []
    for stage, probe, _ in _PROBES:
        quantises = recipe == "w8a8"
        if (stage in ("scale", "code") and not quantises) or (stage == "delta" and not support.lora):
            continue
        results.append(_probe(executor, stage, probe, scheme, recipe, activation))
    failed = next((r for r in results if not r.ok), None)
    return Diagnosis(failed.stage if failed else "", tuple(results))


def default_calls() -> dict[str, MoECall]:
    """The probes as calls, by ``scheme-recipe-probe``: what a pack holds where no other cases are asked for."""
    pairs = (("channel", "w8a8"), ("block", "w8a8"), ("tensor", "w8a8"), ("channel", "w8a16"), ("bf16", "bf16"))
    return {
        f"{scheme}-{recipe}-{probe.replace(' ', '_')}": probe_call(probe, scheme, recipe)
        for scheme, recipe in pairs
        for _, probe, _ in _PROBES
    }
