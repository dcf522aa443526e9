# SPDX-License-Identifier: Apache-2.0
"""Tables of measured choices: what is written is read back, what is damaged or foreign is refused, and what they name
is what runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from isomoe.cuda_impl import moe, tuned
from isomoe.cuda_impl._runtime import Target
from isomoe.cuda_impl.bench import data, main, run, tune
from isomoe.cuda_impl.bench.reference import layer_f32, rel_l2
from isomoe.cuda_impl.grouped_gemm import GemmConfig, Tiles, candidate_tiles, rule_tiles
from isomoe.cuda_impl.hopper.regime import DECODE16, DECODE32, DECODE64, ONE_TOKEN, PREFILL, REGIMES, choose
from isomoe.cuda_impl.tuned import Bucket, LayerKey, Table, TableError, forced, parse

H200 = "NVIDIA H200"
KEY = LayerKey(128, 128, 8, 2048, 768, "block", "w8a8")
TINY = data.Layer("tiny", 256, 128, 8, 8, 2)
SMALL_TILES = Tiles(32, GemmConfig(32, 128, 4, 2), GemmConfig(64, 128, 8, 3))
TABLE = Table(
    H200, {"triton": "3.6.0"},
    {
        (KEY, "hopper"): (
            Bucket(1, ONE_TOKEN, {"one_token": 15.7, "decode16": 20.0}), Bucket(64, DECODE32, {"decode32": 150.0}),
            Bucket(512, PREFILL, {"prefill": 180.0}),
        ),
        (KEY, "portable"): (Bucket(64, SMALL_TILES, {"x": 5.0}),),
    },
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("ISOMOE_TUNED_DIR", raising=False)
    tuned._load.cache_clear()
    yield
    tuned._load.cache_clear()


def test_what_is_written_is_read_back() -> None:
    again = parse(TABLE.as_json(), "t.json", H200)
    assert again == TABLE
    assert tuned.file_name(H200) == "NVIDIA_H200.json"


def test_a_bucket_serves_what_lies_under_it() -> None:
    found = [TABLE.find(KEY, "hopper", t) for t in (1, 2, 64, 65, 512, 513)]
    assert found == [ONE_TOKEN, DECODE32, DECODE32, PREFILL, PREFILL, None]
    other = LayerKey(128, 128, 8, 2048, 768, "channel", "w8a8")
    assert TABLE.find(other, "hopper", 1) is None


def _at(*path: object) -> Callable[[dict, object], None]:
    def put(raw: dict, value: object) -> None:
        where = raw
        for step in path[:-1]:
            where = where[step]
        where[path[-1]] = value

    return put


ENTRY, HOPPER = ("entries", 0), ("entries", 0, "buckets", 0)
PORTABLE = ("entries", 1, "buckets", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), 2, "format: got 2, want 1"),
        (("device",), "NVIDIA H100", "device: got 'NVIDIA H100', want 'NVIDIA H200', the device here"),
        (("versions",), ["3.6"], "versions: got"),
        (("entries",), {}, "entries: got"),
        (("extra",), 1, r"the table: got \['extra'\], want exactly the fields"),
        ((*ENTRY, "hidden"), 0, r"entries\[0\].hidden: got 0"),
        ((*ENTRY, "topk"), True, r"entries\[0\].topk: got True"),
        ((*ENTRY, "scheme"), "rows", r"entries\[0\].scheme: got 'rows', want one of block"),
        ((*ENTRY, "recipe"), "int4", r"entries\[0\].recipe"),
        ((*ENTRY, "kernels"), "cutlass", r"entries\[0\].kernels"),
        ((*ENTRY, "buckets"), [], r"entries\[0\].buckets: got \[\]"),
        ((*ENTRY, "lora"), 1, r"entries\[0\]: got \['lora'\]"),
        ((*HOPPER, "max_tokens"), -1, r"buckets\[0\].max_tokens: got -1"),
        (("entries", 0, "buckets", 1, "max_tokens"), 1, r"buckets\[1\].max_tokens: got 1, want a whole number from 2"),
        ((*HOPPER, "choice"), "decode64", r"buckets\[0\].choice: got 'decode64', want one of one_token, decode16"),
        (("entries", 0, "buckets", 1, "choice"), "one_token", r"buckets\[1\].choice: got 'one_token'"),
        ((*HOPPER, "choice"), {}, r"buckets\[0\].choice"),
        ((*HOPPER, "us"), {}, r"buckets\[0\].us: got \{\}"),
        ((*HOPPER, "us"), {"one_token": -3.0}, r"buckets\[0\].us.one_token: got -3.0"),
        ((*PORTABLE, "choice"), "prefill", r"entries\[1\].buckets\[0\].choice: got 'prefill', want an object"),
        ((*PORTABLE, "choice", "block_m"), 24, r"choice: got .*powers of two"),
        ((*PORTABLE, "choice", "w13", "block_n"), 256, "choice: got .*block_n up to 128"),
        ((*PORTABLE, "choice", "w13", "num_warps"), 3, "choice: got .*4 or 8 warps"),
        ((*PORTABLE, "choice", "w2", "num_stages"), "3", r"choice.w2.num_stages: got '3'"),
    ],
)
def test_damaged_tables_are_refused_by_file_and_field(path: tuple, value: object, message: str) -> None:
    raw = json.loads(TABLE.as_json())
    _at(*path)(raw, value)
    with pytest.raises(TableError, match=r"^dir/t\.json: .*" + message):
        parse(json.dumps(raw), "dir/t.json", H200)


def test_missing_fields_repeats_and_no_json_are_refused() -> None:
    raw = json.loads(TABLE.as_json())
    for field in raw:
        less = {k: v for k, v in raw.items() if k != field}
        with pytest.raises(TableError, match=rf"t.json: the table: got .*{field}"):
            parse(json.dumps(less), "t.json", H200)
    twice = copy.deepcopy(raw)
    twice["entries"].append(twice["entries"][0])
    with pytest.raises(TableError, match=r"t.json: entries\[2\]: got 'a layer that came before'"):
        parse(json.dumps(twice), "t.json", H200)
    for text in ("", TABLE.as_json()[:-40], "\x00"):
        with pytest.raises(TableError, match=r"t.json: not JSON"):
            parse(text, "t.json", H200)
    with pytest.raises(TableError, match=r"t.json: the table: got 3"):
        parse("3", "t.json", H200)


def test_the_folder_named_by_the_variable_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "device_name", lambda device: H200)
    cuda = torch.device("cuda", 0)
    rule = choose(64, 8, 128, w8a16=False, block=True, lora=False)
    assert tuned.load("NVIDIA H100 that nobody measured") is None
    monkeypatch.setenv("ISOMOE_TUNED_DIR", str(tmp_path))
    assert tuned.regime_for(cuda, LayerKey(1, 1, 1, 16, 16, "block", "w8a8"), 64) == PREFILL  # the rule's
    tuned._load.cache_clear()
    (tmp_path / "NVIDIA_H200.json").write_text(TABLE.as_json())
    assert tuned.regime_for(cuda, KEY, 64) == DECODE32 != rule
    assert tuned.regime_for(cuda, KEY, 64, lora=True) == DECODE32  # adapters change no kernel
    assert tuned.regime_for(cuda, KEY, 4096) == PREFILL  # beyond the table: the rule's
    assert tuned.tiles_for(cuda, KEY, 64) == SMALL_TILES and tuned.tiles_for(cuda, KEY, 65) is None
    tuned._load.cache_clear()
    (tmp_path / "NVIDIA_H200.json").write_text(TABLE.as_json().replace(H200, "NVIDIA H20"))
    with pytest.raises(TableError, match=r"NVIDIA_H200.json: device: got 'NVIDIA H20'"):
        tuned.regime_for(cuda, KEY, 64)
    monkeypatch.setenv("ISOMOE_TUNED_DIR", str(tmp_path / "none"))
    with pytest.raises(TableError, match=r"ISOMOE_TUNED_DIR: got .*none', want a folder"):
        tuned.regime_for(cuda, KEY, 64)


def test_every_shipped_table_is_whole() -> None:
    for path in Path(tuned.__file__).parent.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert tuned.file_name(device) == path.name
        assert parse(path.read_text(), str(path), device).entries


def test_what_a_rule_chooses_is_a_candidate() -> None:
    for scheme in ("block", "channel"):
        for recipe in ("w8a8", "w8a16"):
            key = LayerKey(128, 128, 8, 2048, 768, scheme, recipe)
            for tokens in (1, 8, 64, 256, 1024, 8192):
                for lora in (False, True):
                    rule = choose(tokens, 8, 128, w8a16=recipe == "w8a16", block=scheme == "block", lora=lora)
                    assert rule in key.regimes(tokens, lora)
    assert DECODE64 in LayerKey(128, 128, 8, 2048, 768, "channel", "w8a16").regimes(4096)
    assert all(str(regime) == name for name, regime in REGIMES.items())


@pytest.mark.parametrize(
    ("capability", "sizes"),
    [  # devices before 8.9 multiply no e4m3 rows
        *(((major, minor), (block, 2, 1)) for major, minor in ((7, 5), (8, 0), (9, 0)) for block in (True, False)),
        *(((major, minor), (block, 1, 1)) for major, minor in ((8, 9), (9, 0), (12, 0)) for block in (True, False)),
        ((8, 0), (False, 2, 2)), ((9, 0), (False, 2, 2)),
    ],
)  # fmt: skip
def test_candidate_tiles_are_ones_the_kernels_take(capability: tuple[int, int], sizes: tuple) -> None:
    target = Target(capability)
    for pairs in (8, 512, 65536):
        rule = rule_tiles(pairs, 128, 768, 2048, *sizes, target)
        found = candidate_tiles(pairs, 128, *sizes, target)
        assert found and len(set(found)) == len(found)
        assert all(t.why_not() is None for t in (rule, *found))


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_the_tiles_of_a_table_are_the_ones_that_run(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple] = []
    real = moe.grouped_gemm

    def watched(*args, config=None, **kwargs):
        seen.append((args[3].block_m, config))
        return real(*args, config=config, **kwargs)

    monkeypatch.setattr(moe, "grouped_gemm", watched)
    weights = data.random_weights(TINY, "block", "cpu")
    adapters = data.random_adapters(TINY, data.LoraSetting(2, 8), "cpu")
    batch = data.random_batch(TINY, 5, 0, "cpu", adapters=2)

    def call() -> torch.Tensor:
        return moe.fused_moe(
            batch.x, batch.topk_weights, batch.topk_ids, weights, recipe=recipe, adapters=adapters,
            adapter_ids=batch.adapter_ids,
        )  # fmt: skip

    with forced(SMALL_TILES):
        got = call()
        monkeypatch.setenv("ISOMOE_BATCH_INVARIANT", "1")
        call()
    assert seen[:2] == [(32, SMALL_TILES.w13), (32, SMALL_TILES.w2)]
    assert [config for _, config in seen[2:]] == [None, None]  # one kernel for every batch then
    want = layer_f32(batch, weights, moe.resolve_recipe(recipe, weights), adapters)
    assert rel_l2(got, want) < 5e-3


def test_the_rule_keeps_its_choice_against_noise() -> None:
    assert tune.pick("a", {"a": 100.0, "b": 99.5}) == "a"
    assert tune.pick("a", {"a": 100.0, "b": 98.0}) == "b"
    assert tune.pick("a", {"b": 99.0}) == "b"  # the rule's choice could not run


def test_tuning_writes_a_table_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels, made-up times: the second candidate is always the fastest, one is wrong, one fails."""
    options = [SMALL_TILES, Tiles(16, GemmConfig(64, 128, 4, 2), GemmConfig(64, 128, 4, 2))]
    wrong = Tiles(64, GemmConfig(64, 128, 4, 2), GemmConfig(64, 128, 4, 2))
    monkeypatch.setattr(tune, "candidates_of", lambda *args: [*options, wrong])
    real = tune._call

    def sabotaged(choice, *args):
        return (lambda: torch.zeros(2, 256)) if choice == wrong else real(choice, *args)

    monkeypatch.setattr(tune, "_call", sabotaged)

    class Clock:
        def time(self, calls, rounds):
            fast = tune.label(options[1])
            return {n: tune.Timing.of([5.0 if n.startswith(fast) else 9.0]) for n in calls}

    plan = run.Plan([TINY], ["channel"], [data.LoraSetting(), data.LoraSetting(1, 8)], tokens=[2], device="cpu")
    path = main.tune_table(main.Options(), tmp_path / "cpu.json", clock=Clock(), plan=plan)
    table = parse(path.read_text(), str(path), "cpu")
    assert {key.recipe for key, _ in table.entries} == {"w8a8", "w8a16"}
    for buckets in table.entries.values():
        (bucket,) = buckets
        assert bucket.choice == options[1] and set(bucket.us) == {tune.label(o) for o in options}
    monkeypatch.setenv("ISOMOE_TUNED_DIR", str(tmp_path))
    tuned._load.cache_clear()
    key = LayerKey(8, 8, 2, 256, 128, "channel", "w8a8")
    assert tuned.tiles_for(torch.device("cpu"), key, 2) == options[1]
    assert DECODE16 in key.regimes(2)
