"""Runs cases on one backend and writes what they gave as JSON: `engine.py BACKEND MODELS OUTPUT CASE...`.

A process of its own, since vLLM reads its environment once. Cases are those of cases.py.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Small models: what torch.compile saves in the sampler is less than compiling takes.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")

import cases  # noqa: E402
import models  # noqa: E402


def run(case: cases.Case, backend: str, folder: Path) -> list:
    """What a case gives for each of its prompts: [tokens, logprobs], all logprobs, or an embedding."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(models.save(case.model, folder)),
        enforce_eager=True,
        attention_backend=backend,
        disable_log_stats=True,
        **case.options,
    )
    if case.embeds:
        outputs = llm.embed(case.prompts(), use_tqdm=False)
        return [output.outputs.embedding for output in outputs]
    if case.distribution:
        sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
        outputs = llm.generate(case.prompts(), sampling, use_tqdm=False)
        return [[logprob.logprob for _, logprob in sorted(output.outputs[0].logprobs[0].items())] for output in outputs]
    sampling = SamplingParams(temperature=0, max_tokens=case.max_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    results = []
    for _ in range(case.rounds):
        for output in llm.generate(case.prompts(), sampling, use_tqdm=False):
            answer = output.outputs[0]
            logprobs = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)]
            results.append([list(answer.token_ids), logprobs])
    return results


def main() -> None:
    backend, folder, output, *names = sys.argv[1:]
    results = {}
    for name in names:
        try:
            results[name] = run(cases.CASES[name], backend, Path(folder))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        from vllm.distributed import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
