"""What is run on both backends: a model, options of the engine, prompts."""

from dataclasses import dataclass, field
from typing import Any

from models import VOCABULARY

#: Prompts of these many tokens, computed and decoded together.
MIXED = (1, 5, 17, 40, 130, 300)


def tokens(seed: int, length: int) -> list[int]:
    """Token ids that look random and are the same in every run; 0 to 2 mean something to models."""
    state, ids = seed + 1, []
    for _ in range(length):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        ids.append(3 + (state >> 33) % (VOCABULARY - 3))
    return ids


@dataclass(frozen=True)
class Case:
    """A run of an engine.

    Attributes:
        shared: first tokens that all prompts have in common.
        rounds: how often the prompts are given; later rounds find what is cached.
        tolerance: of logprobs, or of an embedding's elements; tokens are to be equal.
        distribution: the result is the logprob of every token of the vocabulary, in the place of the first token.
        exact: for types of few bits, the case in float32 that shows what is right. The distribution is to be as
            near to that one's as with vLLM's own backend.
        embeds: the result is an embedding.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = MIXED
    shared: int = 0
    max_tokens: int = 24
    rounds: int = 1
    tolerance: float = 2e-4
    distribution: bool = False
    exact: str | None = None
    embeds: bool = False

    def prompts(self) -> list[dict]:
        head = tokens(99, self.shared)
        return [dict(prompt_token_ids=head + tokens(i, n)) for i, n in enumerate(self.lengths)]


_FP32: dict[str, Any] = dict(dtype="float32", max_model_len=512, max_num_seqs=8)
_CHUNKED = _FP32 | dict(enable_chunked_prefill=True, max_num_batched_tokens=64)
_ALL: dict[str, Any] = dict(max_logprobs=-1)
_EXACT = "llama-float32-distribution"

CASES = {
    **{f"{model}-mixed": Case(model, _FP32) for model in ("llama", "gemma2", "mistral", "bloom")},
    **{f"{model}-chunked": Case(model, _CHUNKED) for model in ("llama", "gemma2", "mistral")},
    **{
        # 320 shared tokens are enough that decodes share the work.
        f"{model}-prefix": Case(
            model,
            _FP32 | dict(enable_prefix_caching=True, block_size=32),
            lengths=(1, 5, 17, 40, 40, 90),
            shared=320,
            rounds=2,
        )
        for model in ("llama", "gemma2", "mistral")
    },
    "llama-small-pages": Case("llama", _FP32 | dict(block_size=32)),
    "llama-float32-distribution": Case("llama", _FP32 | _ALL, distribution=True),
    "llama-bfloat16": Case("llama", _FP32 | _ALL | dict(dtype="bfloat16"), distribution=True, exact=_EXACT),
    "llama-float16": Case("llama", _FP32 | _ALL | dict(dtype="float16"), distribution=True, exact=_EXACT),
    "llama-fp8": Case("llama", _FP32 | _ALL | dict(kv_cache_dtype="fp8"), distribution=True, exact=_EXACT),
    "llama-fp8-e5m2": Case("llama", _FP32 | _ALL | dict(kv_cache_dtype="fp8_e5m2"), distribution=True, exact=_EXACT),
    "bert-embed": Case(
        "bert", dict(dtype="float32", max_model_len=512, max_num_seqs=8, runner="pooling"), embeds=True, tolerance=1e-4
    ),
    "deepseek-mixed": Case("deepseek", _FP32),
    # The last one: it loads modules that vLLM stumbles over when the next engine of the process starts.
    "llama-speculative": Case(
        "llama",
        _FP32 | dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2)),
        lengths=(5, 17, 40),
    ),
}
