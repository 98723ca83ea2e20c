"""What is run on both backends: a model, options of the engine, prompts."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import small_models

#: What stands in a backend's place where types of few bits are judged.
EXACT = "transformers"


@dataclass(frozen=True)
class Case:
    """A run of an engine.

    Attributes:
        shared: first tokens that all prompts have in common.
        rounds: how often the prompts are given; later rounds find what is cached.
        tolerance: of logprobs, or of an embedding's elements; tokens are to be equal.
        distribution: the result is the logprob of every token of the vocabulary, in the place of the first token.
        few_bits: types of few bits: the distribution is to be as near to that of transformers in float32 as with vLLM's
            own backend. Without `distribution` it is that of every step, over the tokens that a backend decoded itself.
        draft: the model that drafts.
        embeds: the result is an embedding.
        hears: a prompt is what the decoder begins with, and comes with two seconds of noise for the encoder.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = small_models.MIXED
    shared: int = 0
    max_tokens: int = 24
    rounds: int = 1
    tolerance: float = 2e-4
    distribution: bool = False
    few_bits: bool = False
    draft: str | None = None
    embeds: bool = False
    hears: bool = False

    def prompts(self) -> list[dict]:
        prompts = [dict(prompt_token_ids=ids) for ids in small_models.prompts(self.lengths, self.shared)]
        return [_heard(i, prompt) for i, prompt in enumerate(prompts)] if self.hears else prompts


def _heard(seed: int, prompt: dict) -> dict:
    """A prompt of an encoder-decoder model."""
    rate = 16000
    noise = numpy.random.default_rng(seed).standard_normal(2 * rate, dtype=numpy.float32)
    return dict(encoder_prompt=dict(prompt="", multi_modal_data=dict(audio=(noise, rate))), decoder_prompt=prompt)


_FP32: dict[str, Any] = dict(dtype="float32", max_model_len=512, max_num_seqs=8)
_CHUNKED = _FP32 | dict(enable_chunked_prefill=True, max_num_batched_tokens=64)
_PREFIX = _FP32 | dict(enable_prefix_caching=True, block_size=32)
_SPECULATIVE = _FP32 | dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2))
_ALL: dict[str, Any] = dict(max_logprobs=-1)
_MLA_DRAFTS = _SPECULATIVE | _ALL | dict(dtype="bfloat16")
_DRAFTED: dict[str, Any] = dict(speculative_config=dict(method="draft_model", num_speculative_tokens=3))
_EAGLE: dict[str, Any] = dict(speculative_config=dict(method="eagle", num_speculative_tokens=3))


def _few_bits(model: str, **options) -> Case:
    return Case(model, _FP32 | _ALL | options, distribution=True, few_bits=True)


def _decodes(model: str, **options) -> Case:
    """Few bits, too. In the second round one token of each prompt is left to compute: what is compared is decoded."""
    cached = dict(enable_prefix_caching=True, block_size=16) | options
    return replace(_few_bits(model, **cached), lengths=(17, 33, 65, 129, 257), rounds=2)


def _drafts(model: str, *options: dict[str, Any], **fields) -> Case:
    """Tokens that are drafted and verified."""
    case = Case(model, lengths=(5, 17, 40), **fields)
    for more in options:
        case = replace(case, options=case.options | more)
    return case


_COMMON = {
    **{f"{model}-mixed": Case(model, _FP32) for model in ("llama", "gemma2", "mistral", "bloom", "granite")},
    **{f"{model}-chunked": Case(model, _CHUNKED) for model in ("llama", "gemma2", "mistral", "granite")},
    **{
        # 320 shared tokens are enough that decodes share the work.
        f"{model}-prefix": Case(
            model,
            _PREFIX,
            lengths=(1, 5, 17, 40, 40, 90),
            shared=320,
            rounds=2,
        )
        for model in ("llama", "gemma2", "mistral", "granite")
    },
    "whisper-mixed": Case("whisper", _FP32, hears=True),
    "llama-small-pages": Case("llama", _FP32 | dict(block_size=32)),
    "llama-float32-distribution": Case("llama", _FP32 | _ALL, distribution=True),
    "llama-bfloat16": _few_bits("llama", dtype="bfloat16"),
    "llama-float16": _few_bits("llama", dtype="float16"),
    "llama-fp8": _few_bits("llama", kv_cache_dtype="fp8"),
    "llama-fp8-e5m2": _few_bits("llama", kv_cache_dtype="fp8_e5m2"),
    "bert-embed": Case(
        "bert", dict(dtype="float32", max_model_len=512, max_num_seqs=8, runner="pooling"), embeds=True, tolerance=1e-4
    ),
}

# The last one: it loads modules that vLLM stumbles over when the next engine of the process starts.
_LAST = {"llama-speculative": _drafts("llama", _SPECULATIVE)}

#: PyTorch's operators: with vLLM's compiled ones for the CPU this model gives other tokens than in transformers, on
#: either backend.
_ROTATED: dict[str, Any] = dict(compilation_config=dict(mode=0, custom_ops=["none"]))

CPU_CASES = (
    _COMMON
    | {
        "deepseek-mixed": Case("deepseek", _FP32 | _ROTATED),
        # vLLM's backend for CPUs with AMX has no pages of 16 tokens.
        "deepseek-bfloat16-decodes": _decodes("deepseek", dtype="bfloat16", block_size=32, **_ROTATED),
    }
    | _LAST
)

#: Decodes are captured, in batches that are padded to the sizes of graphs.
_GRAPHS: dict[str, Any] = dict(enforce_eager=False, compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY"))

GPU_CASES = (
    _COMMON
    | {
        f"{model}-graphs": Case(model, _FP32 | _GRAPHS, max_tokens=48)
        for model in ("llama", "gemma2", "mistral", "bloom", "granite")
    }
    | {
        "whisper-graphs": Case("whisper", _FP32 | _GRAPHS, max_tokens=48, hears=True),
        "granite-bfloat16-graphs": _decodes("granite", dtype="bfloat16", **_GRAPHS),
    }
    | {
        f"{model}-{name}{graphs}": _decodes(model, **types, **options)
        for model in ("llama", "deepseek")
        for name, types in {
            "bfloat16": dict(dtype="bfloat16"),
            "bfloat16-fp8": dict(dtype="bfloat16", kv_cache_dtype="fp8"),
        }.items()
        for graphs, options in {"-decodes": {}, "-graphs": _GRAPHS}.items()
    }
    # MLA takes 16-bit types only there.
    | {
        "deepseek-float16": _few_bits("deepseek", dtype="float16"),
        "deepseek-chunked": _few_bits(
            "deepseek", dtype="bfloat16", enable_chunked_prefill=True, max_num_batched_tokens=64
        ),
    }
    | {"llama-speculative-graphs": _drafts("llama", _SPECULATIVE, _GRAPHS)}
    | {
        f"deepseek-{name}": _drafts("deepseek", _MLA_DRAFTS, options, draft=draft, few_bits=True)
        for name, options, draft in (
            ("speculative", {}, None),
            ("speculative-graphs", _GRAPHS, None),
            ("drafted", _DRAFTED, "deepseek-draft"),
            # vLLM captures what verifies, and leaves the model that drafts out.
            ("drafted-graphs", _DRAFTED | _GRAPHS, "deepseek-draft"),
            ("eagle", _EAGLE, "deepseek-eagle"),
            # The head is captured, too.
            ("eagle-graphs", _EAGLE | _GRAPHS, "deepseek-eagle"),
        )
    }
    | _LAST
)

#: What is run in environments of its own.
SPECIAL = {
    # As vLLM is without options: compiled, with graphs of all parts but attention, and of whole decodes.
    "llama-compiled": Case("llama", _FP32 | dict(enforce_eager=False)),
} | {
    # With batch invariance both give the same bits: all prompts together, and one after the other.
    f"llama-{name}": Case(
        "llama",
        dict(dtype="bfloat16", max_model_len=1000, max_num_seqs=requests),
        lengths=(900, 700, 500, 300, 100, 40, 17, 5),
    )
    for name, requests in {"together": 8, "alone": 1}.items()
}


def here() -> dict[str, Case]:
    """The cases for the platform that vLLM finds."""
    from vllm.platforms import current_platform

    return GPU_CASES if current_platform.is_cuda() else CPU_CASES
