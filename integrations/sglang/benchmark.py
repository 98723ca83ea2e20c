"""Throughput of SGLang's engine on Folio and on a backend of SGLang's own: two engines on one GPU, timed in turn.

    python integrations/sglang/benchmark.py [--rounds 5] [--layers 32] [--kv-cache-dtype fp8_e4m3] [--page-size 1]
        [--peer BACKEND] [--loads REQUESTSxPROMPT+DECODED ...]

The model has the shape of Llama-3-8B, or fewer layers of it, and made-up weights in bfloat16. Decodes run in CUDA
graphs, prompts do not; nothing is cached from one load to the next. Each engine has a process of its own.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


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


def save(layers: int, folder: str) -> None:
    """The model, without weights: the engines make them up."""
    import transformers

    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    ).save_pretrained(folder)


def engine(folder: str, backend: str, arguments: argparse.Namespace):
    import sglang

    loads = arguments.loads
    return sglang.Engine(
        model_path=folder,
        attention_backend=backend,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype=arguments.kv_cache_dtype,
        page_size=arguments.page_size,
        skip_tokenizer_init=True,
        log_level="error",
        context_length=max(load.prompt + load.decoded + 8 for load in loads),
        max_running_requests=max(load.requests for load in loads),
        # A tenth more than needed, for pages that are not full. The two engines share the memory.
        max_total_tokens=max(load.tokens for load in loads) * 11 // 10,
        mem_fraction_static=0.4,
        chunked_prefill_size=8192,
        disable_radix_cache=True,
        cuda_graph_bs_decode=sorted({load.requests for load in loads}),
        disable_prefill_cuda_graph=True,
    )


def seconds(llm, load: Load, tokens: int, number: int) -> float:
    """Time to decode so many tokens of each prompt."""
    prompts = [[3 + (7 * i * j + number) % 500 for j in range(load.prompt)] for i in range(load.requests)]
    start = time.perf_counter()
    answers = llm.generate(
        input_ids=prompts, sampling_params=dict(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    )
    passed = time.perf_counter() - start
    assert all(len(answer["output_ids"]) == tokens for answer in answers)
    return passed


def serve(folder: str, backend: str, arguments: argparse.Namespace, pipe) -> None:
    """An engine in this process: answers (load, tokens, number) with the seconds that they took, until None comes."""
    llm = engine(folder, backend, arguments)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        pipe.send(seconds(llm, *asked))
    llm.shutdown()


class Served:
    """An engine in a process of its own."""

    def __init__(self, *what):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(*what, other))
        self._process.start()
        other.close()
        self._pipe.recv()

    def seconds(self, *asked) -> float:
        self._pipe.send(asked)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def measure(engines: dict[str, Served], load: Load, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second, by phase and engine."""
    rates = {phase: {name: [] for name in engines} for phase in ("prompt", "decoded")}
    for number in range(rounds + 1):
        for name, llm in engines.items():
            first = llm.seconds(load, 1, number)
            rest = llm.seconds(load, 1 + load.decoded, number) - first
            if number:  # the first round warms up
                rates["prompt"][name].append(load.requests * load.prompt / first)
                rates["decoded"][name].append(load.requests * load.decoded / rest)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--peer", default="triton", help="SGLang's own backend")
    parser.add_argument(
        "--loads", type=Load.parse, nargs="+", default=[Load.parse("64x1024+128"), Load.parse("8x8192+256")]
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(arguments.layers, folder)
        backends = {"Folio": "folio", "SGLang": arguments.peer}
        # One after the other: each measures what memory is free.
        engines = {name: Served(folder, backend, arguments) for name, backend in backends.items()}
        for load in arguments.loads:
            print(
                f"{load} tokens, {arguments.layers} layers, kv_cache_dtype {arguments.kv_cache_dtype},"
                f" page_size {arguments.page_size}, SGLang on {arguments.peer}:",
                flush=True,
            )
            for phase, rates in measure(engines, load, arguments.rounds).items():
                for name, values in rates.items():
                    print(
                        f"  {phase} tokens/s, {name}: median {statistics.median(values):.0f}"
                        f" of {sorted(map(round, values))}",
                        flush=True,
                    )
        for served in engines.values():
            served.stop()


if __name__ == "__main__":
    main()
