"""What is run on both backends: a model, options of the engine, prompts."""

from dataclasses import dataclass, field, replace
from typing import Any

import hearing
import small_models


@dataclass(frozen=True)
class Case:
    """A run of an engine. Tokens and logprobs are to be those of SGLang's own backend and of transformers.

    Attributes:
        shared: first tokens that all prompts have in common.
        rounds: how often the prompts are given; later rounds find what is cached.
        tolerance: of logprobs; tokens are to be equal.
        few_bits: types of few bits: logprobs are to be as near to those of transformers in float32 as with SGLang's own
            backend, each over the tokens that it chose itself.
        own: whether SGLang's own backend computes the same formula. With windows it does not: its decodes see one key
            fewer than its extends.
        against: the backend of SGLang's own.
        draft: the model that drafts.
        hears: each request comes with a sound for the encoder. SGLang makes the prompts.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = small_models.MIXED
    shared: int = 0
    max_tokens: int = 24
    rounds: int = 1
    tolerance: float = 2e-4
    few_bits: bool = False
    own: bool = True
    against: str = "triton"
    draft: str | None = None
    hears: bool = False

    def prompts(self) -> list[list[int]]:
        if self.hears:
            return [hearing.PROMPT] * len(self.lengths)
        return small_models.prompts(self.lengths, self.shared)

    @property
    def speculates(self) -> bool:
        return "speculative_algorithm" in self.options


_EAGER: dict[str, Any] = dict(context_length=512, max_running_requests=8, disable_cuda_graph=True)
_FP32 = _EAGER | dict(dtype="float32")
#: Decodes are captured, in batches that are padded to the sizes of graphs.
_GRAPHS: dict[str, Any] = dict(
    disable_cuda_graph=False, cuda_graph_bs_decode=[1, 2, 4, 8], disable_prefill_cuda_graph=True
)
#: Prompts too, in pieces between which attention is computed.
_PROMPT_GRAPHS = _GRAPHS | dict(disable_prefill_cuda_graph=False, cuda_graph_bs_prefill=[64, 512])
_CHUNKED: dict[str, Any] = dict(chunked_prefill_size=64)
_CHAIN: dict[str, Any] = dict(
    speculative_algorithm="STANDALONE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)
_EAGLE: dict[str, Any] = dict(speculative_algorithm="EAGLE")
_EAGLE3: dict[str, Any] = dict(speculative_algorithm="EAGLE3")
_TREE = _CHAIN | dict(speculative_eagle_topk=2, speculative_num_draft_tokens=6)
_NGRAM: dict[str, Any] = dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
#: What SGLang takes with larger pages.
_NGRAM_CHAIN = _NGRAM | dict(speculative_ngram_min_bfs_breadth=1, speculative_ngram_max_bfs_breadth=1)


def _cases(model: str, **fields) -> dict[str, Case]:
    """The cases of a model that no model is too special for."""
    base = Case(model, **fields)
    shared = replace(base, lengths=(1, 5, 17, 40, 40, 90), shared=320, rounds=2)

    def other(case: Case, *options: dict[str, Any]) -> Case:
        for more in options:
            case = replace(case, options=case.options | more)
        return case

    pages = dict(page_size=16)
    return {
        f"{model}-mixed": base,
        f"{model}-pages": other(base, pages),
        f"{model}-chunked": other(base, _CHUNKED),
        f"{model}-chunked-pages": other(base, _CHUNKED, pages),
        f"{model}-prefix": shared,
        f"{model}-prefix-pages": other(shared, pages),
        f"{model}-graphs": other(replace(base, max_tokens=48), _GRAPHS),
        f"{model}-graphs-pages": other(replace(base, max_tokens=48), _GRAPHS, pages),
    }


def _few_bits(model: str, **options) -> Case:
    return Case(model, _EAGER | options, few_bits=True)


def _speculates(model: str, *options: dict[str, Any], draft: str | None = None) -> Case:
    case = Case(model, _FP32, lengths=(5, 17, 40), draft=draft)
    for more in options:
        case = replace(case, options=case.options | more)
    return case


CASES = (
    _cases("llama", options=_FP32)
    | _cases("gemma2", options=_FP32, own=False)
    | _cases("cohere2", options=_FP32, own=False)
    # MLA takes 16-bit types only.
    | _cases("deepseek", options=_EAGER | dict(dtype="bfloat16"), few_bits=True)
    | {
        "llama-prompt-graphs": Case("llama", _FP32 | _PROMPT_GRAPHS),
        "llama-float16": _few_bits("llama", dtype="float16"),
        "llama-bfloat16": _few_bits("llama", dtype="bfloat16"),
        "llama-bfloat16-graphs": _few_bits("llama", dtype="bfloat16", **_GRAPHS),
        "llama-fp8": _few_bits("llama", dtype="bfloat16", kv_cache_dtype="fp8_e4m3"),
        "llama-fp8-graphs-pages": _few_bits(
            "llama", dtype="bfloat16", kv_cache_dtype="fp8_e4m3", page_size=16, **_GRAPHS
        ),
        "llama-fp8-e5m2": _few_bits("llama", dtype="bfloat16", kv_cache_dtype="fp8_e5m2"),
        "deepseek-float16": _few_bits("deepseek", dtype="float16"),
        "deepseek-fp8": _few_bits("deepseek", dtype="bfloat16", kv_cache_dtype="fp8_e4m3"),
        "llama-ngram": _speculates("llama", _NGRAM),
        "llama-ngram-graphs": _speculates("llama", _NGRAM, _GRAPHS),
        "llama-ngram-pages": _speculates("llama", _NGRAM_CHAIN, dict(page_size=16)),
        "llama-chain": _speculates("llama", _CHAIN, draft="llama-draft"),
        "llama-chain-graphs": _speculates("llama", _CHAIN, _GRAPHS, draft="llama-draft"),
        "llama-chain-graphs-pages": _speculates("llama", _CHAIN, _GRAPHS, dict(page_size=16), draft="llama-draft"),
        "llama-tree": _speculates("llama", _TREE, draft="llama-draft"),
        "llama-tree-graphs": _speculates("llama", _TREE, _GRAPHS, draft="llama-draft"),
        "llama-eagle-chain": _speculates("llama", _CHAIN, _EAGLE, draft="llama-eagle"),
        "llama-eagle-chain-graphs": _speculates("llama", _CHAIN, _EAGLE, _GRAPHS, draft="llama-eagle"),
        "llama-eagle-chain-graphs-pages": _speculates(
            "llama", _CHAIN, _EAGLE, _GRAPHS, dict(page_size=16), draft="llama-eagle"
        ),
        "llama-eagle-tree": _speculates("llama", _TREE, _EAGLE, draft="llama-eagle"),
        "llama-eagle-tree-graphs": _speculates("llama", _TREE, _EAGLE, _GRAPHS, draft="llama-eagle"),
        "llama-eagle3-chain-graphs": _speculates("llama-tied", _CHAIN, _EAGLE3, _GRAPHS, draft="llama-tied-eagle3"),
        "llama-eagle3-tree-graphs": _speculates("llama-tied", _TREE, _EAGLE3, _GRAPHS, draft="llama-tied-eagle3"),
        "whisper": Case("whisper", _FP32, hears=True, against="torch_native"),
        "whisper-graphs": Case("whisper", _FP32 | _GRAPHS, max_tokens=48, hears=True, against="torch_native"),
        "deepseek-chain-graphs": replace(
            _speculates("deepseek", dict(dtype="bfloat16"), _CHAIN, _GRAPHS, draft="deepseek-draft"), few_bits=True
        ),
        "deepseek-tree-graphs": replace(
            _speculates("deepseek", dict(dtype="bfloat16"), _TREE, _GRAPHS, draft="deepseek-draft"), few_bits=True
        ),
    }
)
