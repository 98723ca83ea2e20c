"""Random batches over a paged cache, for the tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Batch:
    """Requests of some lengths, whose pages are in random order.

    Attributes:
        qo_lens, kv_lens: rows and keys of each request.
        pages: page ids of each request.
        q, k, v: queries of all rows, and the caches in NHD.
    """

    qo_lens: list[int]
    kv_lens: list[int]
    page_size: int
    pages: list[np.ndarray]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def qo_indptr(self) -> np.ndarray:
        return indptr(self.qo_lens)

    @property
    def kv_len(self) -> np.ndarray:
        return np.array(self.kv_lens, np.int32)

    @property
    def block_table(self) -> np.ndarray:
        table = np.full((len(self.pages), max(map(len, self.pages), default=0)), -1, np.int32)
        for row, pages in zip(table, self.pages):
            row[: len(pages)] = pages
        return table

    @property
    def kv_indptr(self) -> np.ndarray:
        return indptr([len(pages) for pages in self.pages])

    @property
    def kv_indices(self) -> np.ndarray:
        return np.concatenate(self.pages).astype(np.int32)

    def rows(self, request: int) -> slice:
        """Where a request's queries are."""
        start = sum(self.qo_lens[:request])
        return slice(start, start + self.qo_lens[request])

    def keys(self, cache: np.ndarray, request: int) -> np.ndarray:
        """A request's tokens out of a cache in NHD: `[kv_len, …]`."""
        return cache[self.pages[request]].reshape(-1, *cache.shape[2:])[: self.kv_lens[request]]


def indptr(lengths) -> np.ndarray:
    """Cumulative lengths from 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def pages_of(rng: np.random.Generator, kv_lens, page_size: int) -> list[np.ndarray]:
    """Page ids for requests of these lengths, all different, in random order."""
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    ids = rng.permutation(sum(counts) + 2)
    return [ids[start : start + count] for start, count in zip(np.cumsum([0, *counts[:-1]]), counts)]


def batch(
    rng: np.random.Generator,
    qo_lens,
    kv_lens,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dim_vo: int = 0,
    page_size: int = 16,
    dtype=np.float32,
) -> Batch:
    """A batch of normally distributed numbers; what no request owns is NaN."""
    pages = pages_of(rng, kv_lens, page_size)
    num_pages = sum(map(len, pages)) + 2

    def cache(width: int) -> np.ndarray:
        filled = np.full((num_pages, page_size, kv_heads, width), np.nan, np.float32)
        for ids, kv_len in zip(pages, kv_lens):
            for token in range(kv_len):
                filled[ids[token // page_size], token % page_size] = rng.standard_normal((kv_heads, width))
        return filled.astype(dtype)

    q = rng.standard_normal((sum(qo_lens), heads, dim)).astype(dtype)
    return Batch(list(qo_lens), list(kv_lens), page_size, pages, q, cache(dim), cache(dim_vo or dim))
