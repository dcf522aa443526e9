# SPDX-License-Identifier: Apache-2.0
"""The real vLLM engine on an NVIDIA GPU, with and without this package's plugin: right first, then how fast.

    python benchmarks/vllm_engine.py make FOLDER              a small Qwen3-MoE checkpoint a scheme, and LoRA adapters
    python benchmarks/vllm_engine.py run FOLDER OUT.json --scheme block --experts isomoe --lora on
    python benchmarks/vllm_engine.py compare FOLDER_OF_JSONS  the verdict over whatever runs are there
    python benchmarks/vllm_engine.py all FOLDER               all of it, engines side by side

Every engine runs in its own process with the engine core inside, so batches are composed alike and greedy results may
be compared bit for bit. The checkpoints have the layer dimensions of Qwen3-30B-A3B, 4 layers, random weights, experts
quantised and the rest bf16. Adapters target the experts alone: that leaves vLLM's other layers, and their fusions, as
they are without LoRA. With two slots, a third adapter takes the place of another between requests, under the same
captured graphs.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 4, 2048, 768, 128, 8, 8192
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128
RANK, ALPHA, ADAPTERS, SLOTS = 16, 32, 3, 2
SCHEMES = ("block", "channel")
SIZES = (1, 2, 4, 8, 16, 32)
# scheme, experts, lora
RUNS = (
    ("block", "vllm", "on"),
    ("block", "isomoe", "on"),
    ("block", "isomoe", "off"),
    ("channel", "vllm", "on"),
    ("channel", "isomoe", "on"),
)
# Mean absolute difference of a token's log-probability; a wrong layer is off by several units, other kernels' roundings
# by a tenth of this.
AGREEMENT = 0.1


def expose_package() -> str:
    """A folder that, on the path, makes the checkout an installed package with its vLLM entry point."""
    folder = Path(tempfile.mkdtemp(prefix="isomoe-path-"))
    (folder / "isomoe").symlink_to(ROOT, target_is_directory=True)
    info = folder / "isomoe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isomoe\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nisomoe_cuda = isomoe.cuda_impl.vllm_plugin:register\n"
    )
    return str(folder)


# --- make ------------------------------------------------------------------------------------------------------------


def quantization_config(scheme: str) -> dict[str, Any]:
    dense = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(LAYERS) for p in "qkvo"]
    dense += [f"model.layers.{i}.mlp.gate" for i in range(LAYERS)]
    if scheme == "block":
        return {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *dense],
        }  # fmt: skip
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head", *dense],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {**eight, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight, "strategy": "token", "dynamic": True},
        }},
    }  # fmt: skip


def model_config(scheme: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN, "max_position_embeddings": 4096, "mlp_only_layers": [],
        "moe_intermediate_size": INTER, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "num_hidden_layers": LAYERS, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": 1e7, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 2,
        "quantization_config": quantization_config(scheme),
    }  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Words w0, w1, ... for the tokens; prompts come as ids, but the engine wants one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": f"w{VOCAB - 1}",
        "model_max_length": 4096,
    }))  # fmt: skip


def make(folder: Path) -> None:
    """Write ``folder/block``, ``folder/channel`` and ``folder/adapter1`` ... with random values."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device) * std

    def quantise(w: torch.Tensor, scheme: str) -> dict[str, torch.Tensor]:
        if scheme == "channel":
            scale = w.abs().amax(1, keepdim=True) / 448
            return {"weight": (w / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
        blocks = w.view(w.shape[0] // 128, 128, w.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        return {
            "weight": (blocks / scale[:, None, :, None]).view(w.shape).to(torch.float8_e4m3fn),
            "weight_scale_inv": scale,
        }

    shared: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN, std=1.0).bfloat16(),
        "lm_head.weight": draw(VOCAB, HIDDEN, std=0.06).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    experts: dict[str, dict[str, torch.Tensor]] = {scheme: {} for scheme in SCHEMES}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        widths = {"q": (HEADS, HIDDEN), "k": (KV_HEADS, HIDDEN), "v": (KV_HEADS, HIDDEN)}
        for name, (heads, width) in widths.items():
            shared[f"{at}.self_attn.{name}_proj.weight"] = draw(heads * HEAD_DIM, width, std=0.02).bfloat16()
        shared[f"{at}.self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM, std=0.02).bfloat16()
        shared[f"{at}.mlp.gate.weight"] = draw(EXPERTS, HIDDEN, std=0.06).bfloat16()
        for norm, width in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM),
                            ("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):  # fmt: skip
            shared[f"{at}.{norm}.weight"] = torch.ones(width).bfloat16()
        for expert in range(EXPERTS):
            for name, rows, columns in (("gate", INTER, HIDDEN), ("up", INTER, HIDDEN), ("down", HIDDEN, INTER)):
                w = draw(rows, columns, std=0.02)
                for scheme in SCHEMES:
                    for suffix, value in quantise(w, scheme).items():
                        experts[scheme][f"{at}.mlp.experts.{expert}.{name}_proj.{suffix}"] = value.cpu()
    shared = {name: value.cpu() for name, value in shared.items()}
    for scheme in SCHEMES:
        target = folder / scheme
        target.mkdir(parents=True, exist_ok=True)
        save_file({**shared, **experts[scheme]}, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(model_config(scheme), indent=1))
        special = {"eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 2}
        (target / "generation_config.json").write_text(json.dumps({"do_sample": False, **special}))
        write_tokenizer(target)
    for adapter in range(1, ADAPTERS + 1):
        tensors = {}
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                for name, rows, columns in (("gate", INTER, HIDDEN), ("up", INTER, HIDDEN), ("down", HIDDEN, INTER)):
                    at = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                    tensors[f"{at}.lora_A.weight"] = draw(RANK, columns, std=columns**-0.5).bfloat16().cpu()
                    tensors[f"{at}.lora_B.weight"] = draw(rows, RANK, std=0.05).bfloat16().cpu()
        target = folder / f"adapter{adapter}"
        target.mkdir(parents=True, exist_ok=True)
        save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
        (target / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
            "bias": "none", "target_modules": ["gate_proj", "up_proj", "down_proj"], "inference_mode": True,
        }))  # fmt: skip


# --- run -------------------------------------------------------------------------------------------------------------


class Engine:
    """One `vllm.LLM` and what is asked of it."""

    def __init__(self, folder: Path, scheme: str, lora: bool) -> None:
        from vllm import LLM

        options: dict[str, Any] = {}
        if lora:
            options = dict(
                enable_lora=True, max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=ADAPTERS + 1,
                lora_target_modules=["experts"],
            )  # fmt: skip
        self.folder = folder
        self.llm = LLM(
            model=str(folder / scheme), max_model_len=2048, max_num_seqs=max(SIZES),
            max_num_batched_tokens=2048, enable_prefix_caching=False, gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=1 << 30, seed=0, disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": list(SIZES)}, **options,
        )  # fmt: skip
        self.steps: list[float] = []
        step = self.llm.llm_engine.step

        def timed() -> Any:
            out = step()
            self.steps.append(time.perf_counter())
            return out

        self.llm.llm_engine.step = timed

    def experts(self) -> dict[str, str]:
        """Class names down the first MoE layer."""
        core = self.llm.llm_engine.engine_core.engine_core
        model = core.model_executor.driver_worker.worker.model_runner.get_model()
        layer = model.model.layers[0].mlp.experts
        routed = getattr(layer, "base_layer", layer).routed_experts
        kernel = routed.quant_method.moe_kernel
        return {
            "layer": type(layer).__name__, "quant_method": type(routed.quant_method).__name__,
            "experts": type(kernel.fused_experts).__name__,
        }  # fmt: skip

    def generate(self, batch: int, prompt: int, tokens: int, adapters: list[int] | None = None, *, seed: int = 0,
                 logprobs: bool = True) -> list[dict[str, Any]]:  # fmt: skip
        """Greedy results of `batch` random prompts; `adapters[i]` is request i's, 0 = base."""
        import torch
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        rows = torch.randint(0, VOCAB - 2, (batch, prompt), generator=torch.Generator().manual_seed(seed)).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=5 if logprobs else None,
            prompt_logprobs=0 if logprobs else None,
        )  # fmt: skip
        requests = None
        if adapters is not None:
            requests = [
                LoRARequest(f"adapter{a}", a, str(self.folder / f"adapter{a}")) if a else None for a in adapters
            ]
        self.steps.clear()
        out = self.llm.generate([{"prompt_token_ids": r} for r in rows], params, use_tqdm=False, lora_request=requests)
        return [
            {
                "ids": list(o.outputs[0].token_ids),
                "logprobs": [{str(k): v.logprob for k, v in d.items()} for d in o.outputs[0].logprobs or []],
                "prompt": [next(iter(d.values())).logprob for d in (o.prompt_logprobs or []) if d],
            }
            for o in out
        ]

    def step_ms(self, batch: int, adapters: list[int] | None) -> float:
        """Median time between decode steps."""
        self.generate(batch, 16, 8, adapters, logprobs=False)
        self.generate(batch, 16, 48, adapters, logprobs=False)
        gaps = sorted(b - a for a, b in zip(self.steps, self.steps[1:]))
        return round(1e3 * gaps[len(gaps) // 2], 3)

    def kernels(self, adapters: list[int] | None) -> dict[str, list[tuple[str, int, int]]]:
        """The kernels with most GPU time, (name, microseconds, launches): decode at 16, and one prefill."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        found = {}
        for name, batch, prompt, tokens in (("decode", 16, 16, 16), ("prefill", 1, 1536, 1)):
            used = adapters if adapters is None else adapters[:batch]
            self.generate(batch, prompt, tokens, used, logprobs=False)
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                self.generate(batch, prompt, tokens, used, logprobs=False)
                torch.cuda.synchronize()
            rows = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
            found[name] = [(e.key[:100], round(e.self_device_time_total), e.count) for e in rows[:16]]
        return found


def halves(batch: int) -> list[int]:
    """Every second request with adapter 1 or 2."""
    return [(0, 1, 0, 2)[i % 4] for i in range(batch)]


def run(folder: Path, out: Path, scheme: str, experts: str, lora: bool, wait: int) -> None:
    """One engine; results so far are on disk after every part."""
    os.environ["ISOMOE_VLLM"] = "1" if experts == "isomoe" else "0"
    began = time.time()
    result: dict[str, Any] = {"scheme": scheme, "experts": experts, "lora": lora, "probe": {}, "step_ms": {}}

    def save(label: str) -> None:
        result["wall_s"] = round(time.time() - began, 1)
        out.write_text(json.dumps(result))
        print(f"{out.stem}: {label} at {result['wall_s']} s", flush=True)

    engine = Engine(folder, scheme, lora)
    result["classes"] = engine.experts()
    save(f"engine up, {result['classes']}")
    probe = result["probe"]
    for batch, prompt in ((1, 40), (16, 40), (32, 24)):
        probe[f"base:{batch}"] = engine.generate(batch, prompt, 12)
    if lora:
        for batch, prompt in ((16, 40), (32, 24)):
            probe[f"half:{batch}"] = engine.generate(batch, prompt, 12, halves(batch))
        for batch, prompt in ((1, 40), (16, 40), (32, 24)):
            probe[f"idle:{batch}"] = engine.generate(batch, prompt, 12)
        one = engine.generate(16, 40, 12, [1] * 16)
        third = engine.generate(16, 40, 12, [(3, 2)[i % 2] for i in range(16)])
        probe["adapter1:before"], probe["adapter3:in its place"] = one, third
        probe["adapter1:loaded again"] = engine.generate(16, 40, 12, [1] * 16)
    save("probes")
    out.with_suffix(".ready").touch()
    deadline = time.time() + wait
    peers = int(os.environ.get("ISOMOE_TEST_PEERS", 1))
    while time.time() < deadline and len(list(out.parent.glob("*.ready"))) < peers:
        time.sleep(0.2)
    with open(out.parent / "gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for batch in (1, 16, 32):
            result["step_ms"][f"base:{batch}"] = engine.step_ms(batch, None)
            if lora:
                result["step_ms"][f"adapters:{batch}"] = engine.step_ms(batch, [1 + i % 2 for i in range(batch)])
        save(f"step ms {result['step_ms']}")
        result["kernels"] = engine.kernels([1 + i % 2 for i in range(16)] if lora else None)
    save("done")


# --- compare ---------------------------------------------------------------------------------------------------------


def same(a: list[dict], b: list[dict], rows: range) -> tuple[int, int]:
    """(rows whose ids and log-probabilities are equal bit for bit, rows)."""
    return sum(a[i] == b[i] for i in rows), len(rows)


def difference(a: list[dict], b: list[dict], rows: range) -> tuple[float, float]:
    """Mean and largest absolute difference of the prompts' log-probabilities: the same tokens on both sides."""
    gaps = [abs(x - y) for i in rows for x, y in zip(a[i]["prompt"], b[i]["prompt"])]
    return sum(gaps) / len(gaps), max(gaps)


def compare(folder: Path, wanted: Sequence[tuple[str, str, str]] = ()) -> bool:
    """Print the verdict over the runs in a folder; without any, or one of `wanted` missing or unfinished, it is bad."""
    runs = {
        (r["scheme"], r["experts"], "on" if r["lora"] else "off"): r
        for r in (json.loads(p.read_text()) for p in sorted(folder.glob("*.json")))
    }
    good = True

    def verdict(label: str, ok: bool, figures: str) -> None:
        nonlocal good
        good &= ok
        print(f"{'ok  ' if ok else 'FAIL'} {label}: {figures}")

    def bits(label: str, a: list[dict], b: list[dict], rows: range) -> None:
        equal, of = same(a, b, rows)
        verdict(label, equal == of, f"{equal} of {of} rows equal bit for bit")

    if not runs:
        verdict("runs", False, f"none in {folder}")
    for key in wanted:
        if "kernels" not in runs.get(key, {}):
            at = f"{key[0]}, {key[1]} experts, LoRA {key[2]}"
            verdict(at, False, "did not finish" if key in runs else "no result")
    for (scheme, experts, lora), result in sorted(runs.items()):
        at, probe = f"{scheme}, {experts} experts, LoRA {lora}", result["probe"]
        want = "Isomoe" if experts == "isomoe" else "Triton"
        verdict(f"{at}: class", result["classes"]["experts"].startswith(want), str(result["classes"]))
        if lora == "on" and "adapter1:loaded again" in probe:
            for batch in (1, 16, 32):
                bits(f"{at}: idle against none loaded, batch {batch}", probe[f"idle:{batch}"], probe[f"base:{batch}"],
                     range(batch))  # fmt: skip
            for batch in (16, 32):
                base, adapted = range(0, batch, 2), range(1, batch, 2)
                bits(f"{at}: base rows beside others' adapters, batch {batch}", probe[f"half:{batch}"],
                     probe[f"base:{batch}"], base)  # fmt: skip
                equal, of = same(probe[f"half:{batch}"], probe[f"base:{batch}"], adapted)
                mean, worst = difference(probe[f"half:{batch}"], probe[f"base:{batch}"], adapted)
                verdict(f"{at}: adapters act, batch {batch}", equal == 0, f"{of - equal} of {of} rows differ from "
                        f"base, log-probabilities by {mean:.3f} (mean), {worst:.3f} (max)")  # fmt: skip
            bits(f"{at}: adapter evicted and loaded again", probe["adapter1:before"], probe["adapter1:loaded again"],
                 range(16))  # fmt: skip
            equal, of = same(probe["adapter1:before"], probe["adapter3:in its place"], range(16))
            verdict(f"{at}: another adapter in its place", equal == 0, f"{of - equal} of {of} rows differ")
        print(f"     {at}: ms a step {result['step_ms']}")
        for phase, kernels in result.get("kernels", {}).items():
            print(f"     {at}: {phase} kernels " + "; ".join(f"{n[:48]} {us} us x{c}" for n, us, c in kernels[:7]))
        if result.get("kernels"):
            names = {n for kernels in result["kernels"].values() for n, _, _ in kernels}
            theirs = sorted(n for n in names if "fused_moe_kernel" in n or "fused_moe_lora" in n)
            verdict(f"{at}: vLLM's MoE kernels", bool(theirs) == (experts == "vllm"), ", ".join(theirs) or "none ran")
    for scheme in SCHEMES:
        for lora in ("on", "off"):
            pair = [r for e in ("vllm", "isomoe") if (r := runs.get((scheme, e, lora))) is not None]
            if len(pair) < 2:
                continue
            a, b = (p["probe"] for p in pair)
            for name in sorted(set(a) & set(b)):
                mean, worst = difference(a[name], b[name], range(len(a[name])))
                verdict(f"{scheme}, LoRA {lora}: isomoe against vLLM, {name}", mean < AGREEMENT,
                        f"log-probabilities differ by {mean:.4f} (mean), {worst:.3f} (max)")  # fmt: skip
        on, off = runs.get((scheme, "isomoe", "on")), runs.get((scheme, "isomoe", "off"))
        if on and off:
            for batch in (1, 16, 32):
                bits(f"{scheme}: isomoe, LoRA idle against LoRA off, batch {batch}", on["probe"][f"idle:{batch}"]
                     if f"idle:{batch}" in on["probe"] else on["probe"][f"base:{batch}"],
                     off["probe"][f"base:{batch}"], range(batch))  # fmt: skip
    return good


def run_all(folder: Path, limit: int) -> None:
    """All engines side by side, each waiting for the others before it measures."""
    began = time.time()
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo", "ISOMOE_TEST_PEERS": str(len(RUNS)),
        "PYTHONPATH": os.pathsep.join([expose_package(), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    processes = {}
    for scheme, experts, lora in RUNS:
        out = results / f"{scheme}_{experts}_{lora}.json"
        log = open(out.with_suffix(".log"), "w")
        command = [sys.executable, __file__, "run", str(folder), str(out), "--scheme", scheme, "--experts", experts,
                   "--lora", lora, "--wait", "60"]  # fmt: skip
        processes[out.stem] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    for name, process in processes.items():
        try:
            code: int | str = process.wait(timeout=max(1, limit - (time.time() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = "stopped at the limit"
        print(f"{name}: exit {code} at {time.time() - began:.0f} s", flush=True)
        if code != 0:
            lines = [x for x in (results / f"{name}.log").read_text().splitlines() if x.strip()]
            print("\n".join(x[:300] for x in lines[-25:]), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "run", "compare", "all"):
        sub = commands.add_parser(name)
        sub.add_argument("folder", type=Path)
        if name == "run":
            sub.add_argument("out", type=Path)
            sub.add_argument("--scheme", choices=SCHEMES, default="block")
            sub.add_argument("--experts", choices=("isomoe", "vllm"), default="isomoe")
            sub.add_argument("--lora", choices=("on", "off"), default="off")
            sub.add_argument("--wait", type=int, default=0, help="seconds to wait for other engines before measuring")
        if name == "all":
            sub.add_argument("--limit", type=int, default=540, help="seconds after which engines are stopped")
    args = parser.parse_args()
    if args.command == "make":
        make(args.folder)
    elif args.command == "run":
        run(args.folder, args.out, args.scheme, args.experts, args.lora == "on", args.wait)
    elif args.command == "compare":
        return 0 if compare(args.folder) else 1
    else:
        began = time.time()
        make(args.folder)
        print(f"made {args.folder} in {time.time() - began:.0f} s", flush=True)
        run_all(args.folder, args.limit)
        return 0 if compare(args.folder / "results", RUNS) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
