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
        tolerance: of logprobs, or of an embedding's elements.
        shared: first tokens that all prompts have in common.
        rounds: how often the prompts are given; later rounds find what is cached.
        without: name of vLLM's own backend where its automatic choice is not the one to compare with.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = MIXED
    shared: int = 0
    max_tokens: int = 24
    rounds: int = 1
    tolerance: float = 2e-4
    embeds: bool = False

    def prompts(self) -> list[dict]:
        head = tokens(99, self.shared)
        return [dict(prompt_token_ids=head + tokens(i, n)) for i, n in enumerate(self.lengths)]


_FP32: dict[str, Any] = dict(dtype="float32", max_model_len=512, max_num_seqs=8)
_CHUNKED = _FP32 | dict(enable_chunked_prefill=True, max_num_batched_tokens=64)

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
    "llama-speculative": Case(
        "llama",
        _FP32 | dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2)),
        lengths=(5, 17, 40),
    ),
    # Types of 16 and 8 bits are compared step by step: the first tokens, before a near tie can tell the runs apart.
    "llama-bfloat16": Case("llama", _FP32 | dict(dtype="bfloat16"), max_tokens=1, tolerance=0.15),
    "llama-fp8": Case("llama", _FP32 | dict(kv_cache_dtype="fp8"), max_tokens=4, tolerance=5e-2),
    "bert-embed": Case(
        "bert", dict(dtype="float32", max_model_len=512, max_num_seqs=8, runner="pooling"), embeds=True, tolerance=1e-4
    ),
    "deepseek-mixed": Case("deepseek", _FP32),
}
