"""Throughput of vLLM's engine on Folio and on vLLM's own backend: two engines in one process, timed in turn.

    python integrations/vllm/benchmark.py [--rounds 5] [--dtype DTYPE] [--kv-cache-dtype fp8] [--peer BACKEND]
        [--loads REQUESTSxPROMPT+DECODED ...]

On the platform that vLLM finds. On the CPU the model is a small Llama of random weights and a small vocabulary, so that
attention is a good part of the time. On CUDA it has the shape of Llama-3-8B, and decodes run in full CUDA graphs.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch  # noqa: E402
import transformers  # noqa: E402


@dataclass(frozen=True)
class Load:
    """So many requests at a time, of prompts of `prompt` tokens, of which `decoded` tokens are decoded."""

    requests: int
    prompt: int
    decoded: int

    @staticmethod
    def parse(text: str) -> "Load":
        requests, rest = text.split("x")
        return Load(int(requests), *map(int, rest.split("+")))

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.decoded}"

    @property
    def tokens(self) -> int:
        """Of all requests, at their end."""
        return self.requests * (self.prompt + self.decoded + 1)


@dataclass(frozen=True)
class Setting:
    """What is measured on a platform; `options` are the engine's."""

    model: transformers.LlamaConfig
    dtype: str
    loads: tuple[str, ...]
    options: dict[str, Any]


CPU = Setting(
    transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
    ),
    dtype="float32",
    loads=("8x1024+48",),
    options=dict(enforce_eager=True, max_num_batched_tokens=2048),
)

CUDA = Setting(
    transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    ),
    dtype="bfloat16",
    loads=("64x1024+128", "8x8192+256"),
    options=dict(load_format="dummy", max_num_batched_tokens=8192),
)


def save(setting: Setting, folder: str) -> None:
    """The model, without weights where the engine makes them up."""
    torch.manual_seed(0)
    if setting is CUDA:
        setting.model.architectures = ["LlamaForCausalLM"]
        setting.model.save_pretrained(folder)
    else:
        transformers.LlamaForCausalLM(setting.model).save_pretrained(folder)


def engine(folder: str, backend: str, setting: Setting, loads: list[Load], arguments: argparse.Namespace):
    from vllm import LLM

    options = dict(setting.options)
    if setting is CUDA:
        # Nothing is compiled, and the two engines share the memory.
        options["compilation_config"] = dict(
            mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=sorted({load.requests for load in loads})
        )
        options["kv_cache_memory_bytes"] = cache_bytes(setting.model, loads, arguments.kv_cache_dtype)
        options["gpu_memory_utilization"] = 0.4
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        attention_backend=backend,
        max_model_len=max(load.prompt + load.decoded + 1 for load in loads),
        max_num_seqs=max(load.requests for load in loads),
        enable_prefix_caching=False,
        **options,
    )


def cache_bytes(model: transformers.LlamaConfig, loads: list[Load], kv_cache_dtype: str) -> int:
    """A cache for the largest load, and a tenth more for pages that are not full."""
    element = 2 if kv_cache_dtype == "auto" else 1
    token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * element
    return max(load.tokens for load in loads) * token * 11 // 10


def seconds(llm, load: Load, tokens: int, number: int) -> float:
    """Time to decode so many tokens of each prompt."""
    from vllm import SamplingParams

    prompts = [
        dict(prompt_token_ids=[3 + (7 * i * j + number) % 500 for j in range(load.prompt)])
        for i in range(load.requests)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


def measure(engines: dict[str, Any], load: Load, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second, by phase and engine."""
    rates = {phase: {name: [] for name in engines} for phase in ("prompt", "decoded")}
    for number in range(rounds + 1):
        for name, llm in engines.items():
            first = seconds(llm, load, 1, number)
            rest = seconds(llm, load, 1 + load.decoded, number) - first
            if number:  # the first round warms up
                rates["prompt"][name].append(load.requests * load.prompt / first)
                rates["decoded"][name].append(load.requests * load.decoded / rest)
    return rates


def main() -> None:
    from vllm.platforms import current_platform

    setting = CUDA if current_platform.is_cuda() else CPU
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default=setting.dtype)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--peer", default="auto", help="vLLM's own backend")
    parser.add_argument("--loads", type=Load.parse, nargs="+", default=[Load.parse(load) for load in setting.loads])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(setting, folder)
        backends = {"Folio": "FOLIO", "vLLM": arguments.peer}
        engines = {
            name: engine(folder, backend, setting, arguments.loads, arguments) for name, backend in backends.items()
        }
        for load in arguments.loads:
            print(f"{load} tokens, {arguments.dtype}, kv_cache_dtype {arguments.kv_cache_dtype}:", flush=True)
            for phase, rates in measure(engines, load, arguments.rounds).items():
                for name, values in rates.items():
                    median = statistics.median(values)
                    print(
                        f"  {phase} tokens/s, {name}: median {median:.0f} of {sorted(map(round, values))}", flush=True
                    )


if __name__ == "__main__":
    main()
