"""Throughput of vLLM's CPU engine on Folio and on vLLM's own backend: two engines in one process, timed in turn.

    python integrations/vllm/benchmark.py [ROUNDS] [DTYPE]

The model is a Llama of random weights with a small vocabulary, so that attention is a good part of the time.
"""

import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import torch  # noqa: E402
import transformers  # noqa: E402

REQUESTS, PROMPT, DECODED = 8, 1024, 48
BACKENDS = {"Folio": "FOLIO", "vLLM": "auto"}


def engine(folder: str, backend: str, dtype: str):
    from vllm import LLM

    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        attention_backend=backend,
        enforce_eager=True,
        max_model_len=PROMPT + DECODED,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )


def seconds(llm, tokens: int, number: int) -> float:
    """Time to decode so many tokens of each prompt."""
    from vllm import SamplingParams

    prompts = [dict(prompt_token_ids=[3 + (7 * i * j + number) % 500 for j in range(PROMPT)]) for i in range(REQUESTS)]
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    rounds, dtype = int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2] if len(sys.argv) > 2 else "float32"
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=512,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=4096,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        engines = {name: engine(folder, backend, dtype) for name, backend in BACKENDS.items()}
        prefill, decode = ({name: [] for name in engines} for _ in range(2))
        for number in range(rounds + 1):
            for name, llm in engines.items():
                first = seconds(llm, 1, number)
                rest = seconds(llm, 1 + DECODED, number) - first
                if number:  # the first round warms up
                    prefill[name].append(REQUESTS * PROMPT / first)
                    decode[name].append(REQUESTS * DECODED / rest)
    for what, rates in (("prompt", prefill), ("decoded", decode)):
        for name, values in rates.items():
            median = statistics.median(values)
            print(f"{dtype} {what} tokens/s, {name}: median {median:.0f} of {sorted(map(round, values))}", flush=True)


if __name__ == "__main__":
    main()
