"""Runs cases on one backend and writes what they gave as JSON: `engine.py BACKEND MODELS OUTPUT CASE...`.

A process of its own, since vLLM reads its environment once. Cases are those of cases.py for the platform that vLLM
finds. The backend `transformers` is that library in place of vLLM, in float32 on the CPU; it gives distributions.
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
# Triton's products in float32 are to be those of float32, not of its upper 19 bits.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")

sys.path.append(str(Path(__file__).parents[2] / "testing"))

import cases  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def cache_size() -> dict[str, int | float]:
    """Options for a small cache on a GPU, which others may be using. On the CPU an environment variable says it."""
    from vllm.platforms import current_platform

    return dict(kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.02) if current_platform.is_cuda() else {}


def run(case: cases.Case, backend: str, folder: Path) -> list:
    """What a case gives for each of its prompts: [tokens, logprobs], all logprobs, or an embedding.

    With types of few bits the logprobs are those of all tokens that could stand there; those by transformers follow.
    """
    from vllm import LLM, SamplingParams

    speculates = "speculative_config" in case.options
    options = dict(enforce_eager=True, attention_backend=backend, disable_log_stats=not speculates, **cache_size())
    options |= case.options
    if case.draft:
        draft = dict(model=str(models.save(case.draft, folder)))
        options["speculative_config"] = options["speculative_config"] | draft
    llm = LLM(str(models.save(case.model, folder)), **options)
    compilation = llm.llm_engine.vllm_config.compilation_config
    if compilation.cudagraph_mode.has_full_cudagraphs() == options["enforce_eager"]:
        raise RuntimeError(f"enforce_eager is {options['enforce_eager']}, but {compilation.cudagraph_mode} is in force")
    if case.embeds:
        outputs = llm.embed(case.prompts(), use_tqdm=False)
        return [output.outputs.embedding for output in outputs]
    logprobs = -1 if case.distribution or case.few_bits else 1
    sampling = SamplingParams(
        temperature=0,
        max_tokens=1 if case.distribution else case.max_tokens,
        logprobs=logprobs,
        ignore_eos=True,
        detokenize=False,
    )
    results, drafts_before = [], drafts(llm, case) if speculates else 0
    for _ in range(case.rounds):
        for output in llm.generate(case.prompts(), sampling, use_tqdm=False):
            answer = output.outputs[0]
            if case.distribution:
                results.append(distribution(answer.logprobs[0]))
            elif case.few_bits:
                results.append([list(answer.token_ids), list(map(distribution, answer.logprobs))])
            else:
                chosen = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)]
                results.append([list(answer.token_ids), chosen])
    if speculates and drafts(llm, case) == drafts_before:
        raise RuntimeError("there were no drafts, or those of a model were all wrong")
    if case.few_bits and not case.distribution:
        return [[*result, theirs] for result, theirs in zip(results, exact_steps(case, folder, results))]
    return results


def distribution(step: dict) -> list[float]:
    """The logprobs of all tokens, by their ids."""
    return [logprob.logprob for _, logprob in sorted(step.items())]


def drafts(llm, case: cases.Case) -> int:
    """Tokens of drafts so far; where a model drafts, those that were right. N-grams of random tokens seldom are."""
    counted = "accepted" if case.draft else "draft"
    return sum(each.value for each in llm.get_metrics() if each.name == f"vllm:spec_decode_num_{counted}_tokens")


@torch.inference_mode()
def exact(case: cases.Case, folder: Path) -> list:
    """The distributions of a case by transformers."""
    model = transformed(case, folder)
    prompts = [torch.tensor([prompt["prompt_token_ids"]]) for prompt in case.prompts()]
    return [model(prompt).logits[0, -1].log_softmax(-1).tolist() for prompt in prompts] * case.rounds


@torch.inference_mode()
def exact_steps(case: cases.Case, folder: Path, results: list) -> list[list[list[float]]]:
    """The distributions that transformers gives in the places of each result's tokens."""
    model, found = transformed(case, folder), []
    for prompt, (tokens, _) in zip(case.prompts() * case.rounds, results, strict=True):
        ids = prompt["prompt_token_ids"]
        found.append(model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :].log_softmax(-1).tolist())
    return found


def transformed(case: cases.Case, folder: Path) -> transformers.PreTrainedModel:
    """The case's model in transformers."""
    path = models.save(case.model, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def main() -> None:
    backend, folder, output, *names = sys.argv[1:]
    results = {}
    for name in names:
        try:
            case = (cases.here() | cases.SPECIAL)[name]
            results[name] = exact(case, Path(folder)) if backend == cases.EXACT else run(case, backend, Path(folder))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        from vllm.distributed import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
