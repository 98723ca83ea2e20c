"""Mappings that stand for nested structs. Generated from folio.h by `python -m generator`; do not edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from folio._tensors import TensorLike


class Batch(TypedDict, total=False):
    """One step's lengths and page table. Index tensors are contiguous, each int32 or int64; block_table's rows may be
    apart. The page table comes in one of these forms:

    | form | fields | known from |
    |---|---|---|
    | CSR | kv_indptr in pages, kv_indices, and last_page_len or kv_len, not both | FlashInfer |
    | token slots | CSR with page_size 1: kv_indptr in tokens, kv_indices | SGLang |
    | block table | block_table, kv_len | vLLM |
    | ragged | kv_indptr in tokens (prefill with `KvStorage.RAGGED`) | FlashInfer |

    A request may own more pages than its keys need; those are not read.

    Lengths (qo_indptr, kv_indptr, last_page_len, kv_len) are all on the host, or all on the context's device; page
    ids (kv_indices, block_table) on either. Lengths on a device need page ids on it. Host tensors are only read
    during plan. Device tensors must stay as they are until the last run of the plan has finished: plan's kernel
    reads the lengths, runs read the page ids.

    Numbers of int64 are copied as int32. On the host those in use that do not fit are refused. On a device one more
    launch of plan copies them to the workspace, page ids where there is room for max_num_pages of them (a block
    table's first max_kv_len / page_size columns; more are refused), so runs do not read them.

    Numbers on the host are checked. Numbers on a device cannot be: lengths beyond the desc's maxima, beyond the
    page table or beyond the rows of a tensor, and page ids beyond the cache, give wrong results, but no access
    outside the tensors and the workspace that were passed.
    """

    flags: BatchFlag | int | str | Iterable[str]
    """`BatchFlag.WINDOW`."""

    qo_len: int
    """Query rows of every request where qo_indptr is None (decode only); 0: 1."""

    qo_indptr: TensorLike | None
    """`[batch_size + 1]` query-row offsets from 0; decode accepts None."""

    kv_indptr: TensorLike | None
    """`[batch_size + 1]` offsets from 0 into kv_indices, or into ragged K and V."""

    kv_indices: TensorLike | None
    """`[num_pages or more]` page ids, 0 or more."""

    last_page_len: TensorLike | None
    """`[batch_size]` tokens in the last page, 1 to page_size; not read for requests without pages. Refused together
    with kv_len."""

    kv_len: TensorLike | None
    """`[batch_size]` keys per request, those of this step included; 0 or more. With a new_kv_dtype, those in the
    cache."""

    block_table: TensorLike | None
    """`[batch_size, max_pages_per_request]` page ids; only those that kv_len needs are read."""

    window_left: int
    """No run of the plan sees a key more than so many before its row's own position: a run with a wider window is
    refused, and one with mm_prefix_ranges that reach beyond it. Keys before the window are not planned for, which
    saves time where it is short. -1: unlimited. Needs `BatchFlag.WINDOW`. For decode and prefill over the cache;
    MLA, cascades and handles with a new_kv_dtype refuse it. Where captured runs are replayed, every plan is for the
    window of those runs or a wider one: a replay cannot be refused."""


class SharedPrefixes(TypedDict, total=False):
    """What requests of a batch share. Every prefix is the first keys of some neighbouring requests, which have them in
    the same pages. Prefixes may lie one within the other, as the nodes of a tree: the wider one, with fewer keys,
    comes first. Arrays are on the host, and only read during the call.

    This is a promise of the caller's, which changes the time and not the result: keys that a request does not have,
    or that are its new tokens, are not shared whatever is stated. Where the pages are not the same ones, the
    results are those of the first request's pages.
    """

    common_prefix_len: int
    """First keys that all requests share (vLLM's common_prefix_len); 0 together with num_prefixes."""

    request_begin: TensorLike | Sequence[int] | None
    """`[num_prefixes]` first request of each; these never fall."""

    request_end: TensorLike | Sequence[int] | None
    """`[num_prefixes]` the request behind its last one."""

    kv_len: TensorLike | Sequence[int] | None
    """`[num_prefixes]` its keys."""
