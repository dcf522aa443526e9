# SPDX-License-Identifier: Apache-2.0
"""One `vllm.LLM` in this process and what `vllm_engine.py` asks of it; results are on disk after every part."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm_engine_model as small

BATCHES = ((1, 40), (16, 40), (32, 24))
"""Batch sizes and prompt lengths of the bit-equality probes."""
SLOTS, TOKENS = 2, 12
PROBE_GRAPHS = (1, 2, 4, 8, 16, 32)

CONCURRENCIES = (1, 16, 64, 256)
TIMED_GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
TIMED_PROMPT, TIMED_TOKENS, PREFILL, PREFILL_REPEATS = 32, 128, 8192, 2
TURNS = 2
"""Runs of which the best counts."""


class Results:
    """What a run found so far, in a JSON file."""

    def __init__(self, out: Path, **start: Any) -> None:
        self.out, self.began, self.values = out, time.time(), dict(start)

    def save(self, label: str) -> None:
        self.values["wall_s"] = round(time.time() - self.began, 1)
        scratch = self.out.with_suffix(".part")
        scratch.write_text(json.dumps(self.values))
        scratch.replace(self.out)
        print(f"{self.out.stem}: {label} at {self.values['wall_s']} s", flush=True)


class Engine:
    """One `vllm.LLM` with adapters of `adapters` under their numbers as ids.

    Args:
      model: the checkpoint's folder.
      adapters: the folder of ``adapter1``, ...; None without LoRA.
      options: `vllm.LLM`'s arguments.
    """

    def __init__(self, model: Path, adapters: Path | None, vocab: int, **options: Any) -> None:
        from vllm import LLM

        self.adapters, self.vocab = adapters, vocab
        self.llm = LLM(
            model=str(model), enable_prefix_caching=False, gpu_memory_utilization=0.1, seed=0, disable_log_stats=True,
            **options,
        )  # fmt: skip
        self.steps: list[float] = []
        step = self.llm.llm_engine.step

        def timed() -> Any:
            out = step()
            self.steps.append(time.perf_counter())
            return out

        self.llm.llm_engine.step = timed  # type: ignore[method-assign]

    def classes(self) -> dict[str, str]:
        """Class names down the first MoE layer; the engine core must be in this process."""
        core: Any = self.llm.llm_engine.engine_core
        model = core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        layer = model.model.layers[0].mlp.experts
        routed = getattr(layer, "base_layer", layer).routed_experts
        return {
            "layer": type(layer).__name__, "quant_method": type(routed.quant_method).__name__,
            "experts": type(routed.quant_method.moe_kernel.fused_experts).__name__,
        }  # fmt: skip

    def request(self, adapter: int) -> Any:
        """vLLM's `LoRARequest` of an adapter; None for 0."""
        from vllm.lora.request import LoRARequest

        assert self.adapters is not None or not adapter
        return LoRARequest(f"adapter{adapter}", adapter, f"{self.adapters}/adapter{adapter}") if adapter else None

    def ask(self, rows: Sequence[Sequence[int]], tokens: int, adapters: Sequence[int] | None = None,
            **sampling: Any) -> list[Any]:  # fmt: skip
        """vLLM's outputs of greedy `tokens` after each prompt; `adapters[i]` is request i's, 0 = base."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        requests = None if adapters is None else [self.request(a) for a in adapters]
        self.steps.clear()
        prompts: Any = [{"prompt_token_ids": list(row)} for row in rows]
        return self.llm.generate(prompts, params, use_tqdm=False, lora_request=requests)

    def generate(self, batch: int, prompt: int, adapters: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Ids and log-probabilities of `TOKENS` tokens after each of `batch` prompts."""
        rows = small.prompts(batch, prompt, self.vocab, seed=batch).tolist()
        return [
            {
                "ids": list(o.outputs[0].token_ids),
                "logprobs": [{str(k): v.logprob for k, v in d.items()} for d in o.outputs[0].logprobs],
                "prompt": [next(iter(d.values())).logprob for d in o.prompt_logprobs if d],
            }
            for o in self.ask(rows, TOKENS, adapters, logprobs=5, prompt_logprobs=0)
        ]

    def kernels(self, adapters: Sequence[int] | None) -> dict[str, list[tuple[str, int, int]]]:
        """The kernels with most GPU time, (name, microseconds, launches): decode at 16, and one prefill."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        found = {}
        for name, batch, prompt, tokens in (("decode", 16, 16, 16), ("prefill", 1, 1536, 1)):
            used = None if adapters is None else list(adapters)[:batch]
            rows = small.prompts(batch, prompt, self.vocab, seed=5).tolist()
            self.ask(rows, tokens, used)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                self.ask(rows, tokens, used)
                torch.cuda.synchronize()
            events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
            found[name] = [(e.key[:100], round(e.self_device_time_total), e.count) for e in events[:16]]
        return found


# --- right -----------------------------------------------------------------------------------------------------------


def against_reference(engine: Engine, scheme: str, reference: Any) -> dict[str, Any]:
    """The reference's requests, mixed in one batch (base ones alone without LoRA), held against its logits.

    Steps count as long as the engine has chosen the reference's tokens so far: then both saw the same input.
    """
    import numpy as np

    wanted = [i for i, a in enumerate(small.REQUESTS) if engine.adapters is not None or not a]
    owners = [small.REQUESTS[i] for i in wanted]
    rows = small.reference_prompts()[wanted].tolist()
    outputs = engine.ask(rows, small.STEPS, owners if engine.adapters is not None else None, logprobs=-1)
    steps: list[dict[str, Any]] = []
    for i, output in zip(wanted, outputs, strict=True):
        for step, (token, given) in enumerate(
            zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ):
            got = small.centred(np.array([given[t].logprob for t in range(small.VOCAB)]))
            want = reference[f"{scheme}_logits"][i, step]
            first, second = np.sort(want)[-2:][::-1]
            best = int(reference[f"{scheme}_tokens"][i, step])
            steps.append({
                "request": i, "adapter": small.REQUESTS[i], "step": step, "equal": token == best,
                "margin": float(first - second), "worst": float(np.abs(got - want).max()),
                "error2": float(np.square(got - want).sum()), "norm2": float(np.square(want).sum()),
            })  # fmt: skip
            if token != best:
                break
    return {"steps": steps}


def halves(batch: int) -> list[int]:
    """Every second request with adapter 1 or 2."""
    return [(0, 1, 0, 2)[i % 4] for i in range(batch)]


def bit_probes(engine: Engine) -> dict[str, Any]:
    """Batches to be compared bit for bit: before adapters, beside them, after them, and slots that change hands."""
    probe = {f"base:{batch}": engine.generate(batch, prompt) for batch, prompt in BATCHES}
    if engine.adapters is None:
        return probe
    for batch, prompt in BATCHES[1:]:
        probe[f"half:{batch}"] = engine.generate(batch, prompt, halves(batch))
    for batch, prompt in BATCHES:
        probe[f"idle:{batch}"] = engine.generate(batch, prompt)
    probe["adapter1:before"] = engine.generate(16, 40, [1] * 16)
    probe["adapter3:in its place"] = engine.generate(16, 40, [(3, 2)[i % 2] for i in range(16)])
    probe["adapter1:loaded again"] = engine.generate(16, 40, [1] * 16)
    removed = engine.llm.llm_engine.remove_lora(1)
    probe["idle:after unloading"] = engine.generate(16, 40)
    probe["adapter1:after unloading"] = engine.generate(16, 40, [1] * 16)
    return {**probe, "removed": removed}


def check(folder: Path, out: Path, scheme: str, lora: bool, mode: int | None, probes: bool, reference: Path) -> None:
    """One engine on a checkpoint of `vllm_engine_model.make`: reference, and with `probes` bits and a profile."""
    import numpy as np

    found = Results(out, scheme=scheme, lora=lora)
    wanted = np.load(reference)
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": list(PROBE_GRAPHS)}
    options: dict[str, Any] = {"compilation_config": graphs if mode is None else {**graphs, "mode": mode}}
    if lora:
        options |= dict(
            enable_lora=True, max_loras=SLOTS, max_lora_rank=small.RANK, max_cpu_loras=small.ADAPTERS + 1,
            lora_target_modules=["experts"],
        )  # fmt: skip
    engine = Engine(
        folder / scheme, folder if lora else None, small.VOCAB, max_model_len=2048, max_num_seqs=max(PROBE_GRAPHS),
        max_num_batched_tokens=2048, max_logprobs=-1, kv_cache_memory_bytes=1 << 30, **options,
    )  # fmt: skip
    found.values["fingerprint"] = [(folder / "fingerprint").read_text(), str(wanted["fingerprint"])]
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        found.values["classes"] = engine.classes()
    found.save(f"engine up, {found.values.get('classes')}")
    if probes:
        found.values["probe"] = bit_probes(engine)
        found.save("bit probes")
    found.values["reference"] = against_reference(engine, scheme, wanted)
    found.save("reference")
    if probes:
        found.values["kernels"] = engine.kernels([1 + i % 2 for i in range(16)] if lora else None)
    found.values["done"] = True
    found.save("done")


# --- fast ------------------------------------------------------------------------------------------------------------


def timed_engine(folder: Path, lora: bool) -> Engine:
    """The 30B engine with 8 adapters loaded, every timed batch run once."""
    import vllm_engine_random as large

    large.register_loader()
    options: dict[str, Any] = {}
    if lora:
        options = dict(
            enable_lora=True, max_loras=large.ADAPTERS, max_lora_rank=small.RANK, max_cpu_loras=large.ADAPTERS,
            lora_target_modules=["experts"],
        )  # fmt: skip
    adapters = folder / "adapters" if lora else None
    engine = Engine(
        folder / "model", adapters, large.WORDS, load_format=large.LOAD_FORMAT, max_model_len=PREFILL + 64,
        max_num_seqs=max(CONCURRENCIES), max_num_batched_tokens=PREFILL, kv_cache_memory_bytes=5 << 30,
        compilation_config={"cudagraph_capture_sizes": list(TIMED_GRAPHS)}, **options,
    )  # fmt: skip
    if adapters is not None:
        while not (folder / "adapters.ready").exists():
            time.sleep(0.1)
        for adapter in range(1, large.ADAPTERS + 1):
            engine.llm.llm_engine.add_lora(engine.request(adapter))
    return engine


def owners(engine: Engine, batch: int) -> list[int] | None:
    """Request i with adapter i mod 8, all 8 of them from 8 requests on; None without LoRA."""
    import vllm_engine_random as large

    return None if engine.adapters is None else [1 + i % large.ADAPTERS for i in range(batch)]


def measure(engine: Engine, found: Results, seed: int) -> None:
    """One run of every cell: decode ms a step (median) and tokens a second with prefill, and ms of a long prefill."""
    for batch in CONCURRENCIES:
        rows = small.prompts(batch, TIMED_PROMPT, engine.vocab, seed=seed).tolist()
        began = time.perf_counter()
        engine.ask(rows, TIMED_TOKENS, owners(engine, batch))
        wall = time.perf_counter() - began
        gaps = sorted(b - a for a, b in zip(engine.steps, engine.steps[1:]))
        found.values["step_ms"].setdefault(str(batch), []).append(round(1e3 * gaps[len(gaps) // 2], 3))
        found.values["tokens_per_s"].setdefault(str(batch), []).append(round(batch * TIMED_TOKENS / wall))
        found.save(f"concurrency {batch}: {found.values['step_ms'][str(batch)]} ms a step")
    for repeat in range(PREFILL_REPEATS):
        row = small.prompts(1, PREFILL, engine.vocab, seed=1000 + PREFILL_REPEATS * seed + repeat).tolist()
        began = time.perf_counter()
        engine.ask(row, 1, owners(engine, 1))
        found.values["prefill_ms"].append(round(1e3 * (time.perf_counter() - began), 2))
    found.save(f"prefill of {PREFILL}: {found.values['prefill_ms']} ms")


def serve_turns(folder: Path, out: Path, lora: bool) -> None:
    """One timed engine under its parent's orders, lines on stdin: ``start``, then ``measure N`` until end of file.

    ``OUT.ready`` and ``OUT.N`` appear beside the results when an order has been carried out.
    """
    import vllm  # noqa: F401  (slow: before the order to start)

    found = Results(out, lora=lora, step_ms={}, tokens_per_s={}, prefill_ms=[])

    def order() -> list[str]:
        return sys.stdin.readline().split()

    if order() != ["start"]:
        return
    engine = timed_engine(folder, lora)
    found.values["classes"] = engine.classes()
    found.save(f"engine up, {found.values['classes']}")
    for batch in CONCURRENCIES:
        engine.ask(small.prompts(batch, TIMED_PROMPT, engine.vocab, seed=99).tolist(), 4, owners(engine, batch))
    engine.ask(small.prompts(1, PREFILL, engine.vocab, seed=98).tolist(), 1, owners(engine, 1))
    found.save("warm")
    out.with_suffix(".ready").touch()
    while (line := order())[:1] == ["measure"]:
        measure(engine, found, seed=int(line[1]))
        out.with_suffix(f".{line[1]}").touch()
