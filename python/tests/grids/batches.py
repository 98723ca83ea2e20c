"""Batches of the grids: lengths, shuffled pages, caches with NaN where nobody may look, and tables with garbage.

A cache has at most so many different pages; longer batches have pages of their requests more than once. Last pages that
are not full are always a request's own, so that what is behind its last key is NaN.
"""

from __future__ import annotations

import numpy as np
import torch

#: What peers leave in entries of a table that nobody reads.
GARBAGE = 2147480000
#: Most numbers of one cache, by device.
MOST_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 28}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Pages:
    """Which pages the keys of a batch are in.

    Attributes:
        tables: `[batch, columns]` page ids; garbage where a request has none.
        slots: the slots that hold keys.
        count: pages of the cache, used or not.
    """

    def __init__(self, rng, kv_lens, page_size, *, most_tokens, at_least=0, prefix=0):
        self.kv_lens, self.page_size = np.asarray(kv_lens, np.int64), page_size
        full, rest = self.kv_lens // page_size, self.kv_lens % page_size
        self.counts = full + (rest > 0)
        own = int(min(full.sum(), max(most_tokens // page_size, 1)))
        lasts = int((rest > 0).sum())
        self.count = max(own + lasts + 3, at_least)
        ids = rng.permutation(self.count)[: own + lasts]
        filled = ids[:own] if own == full.sum() else ids[rng.integers(own, size=full.sum())]
        self.tables = np.full((len(self.kv_lens), int(self.counts.max(initial=0)) + 2), GARBAGE, np.int32)
        columns = np.arange(self.tables.shape[1])
        self.tables[columns < full[:, None]] = filled
        self.tables[(columns == full[:, None]) & (rest > 0)[:, None]] = ids[own:]
        if prefix:
            self.tables[1:, : prefix // page_size] = self.tables[0, : prefix // page_size]
        self.slots = self._slots(ids[:own], ids[own:], rest[rest > 0])

    def _slots(self, full, lasts, rest):
        offsets = np.arange(self.page_size)
        whole = (full[:, None] * self.page_size + offsets).ravel()
        ends = (lasts[:, None] * self.page_size + offsets)[offsets < rest[:, None]]
        return np.concatenate([whole, ends])

    @classmethod
    def in_order(cls, kv_lens):
        """Those of ragged keys: a page is a key, and keys follow each other."""
        pages = cls.__new__(cls)
        pages.kv_lens, pages.page_size = np.asarray(kv_lens, np.int64), 1
        pages.counts = pages.kv_lens
        pages.count = max(int(pages.kv_lens.sum()), 1)
        pages.tables = np.full((len(kv_lens), int(pages.kv_lens.max(initial=0)) + 2), GARBAGE, np.int32)
        pages.tables[np.arange(pages.tables.shape[1]) < pages.kv_lens[:, None]] = np.arange(pages.kv_lens.sum())
        pages.slots = np.arange(pages.kv_lens.sum())
        return pages

    def form(self, name, kv_lens=None):
        """Page table and lengths as arguments of a plan: those of the batch, or shorter ones."""
        kv_lens = self.kv_lens if kv_lens is None else np.asarray(kv_lens)
        counts = -(-kv_lens // self.page_size)
        if name == "block_table":
            return {"block_table": self.tables, "kv_len": kv_lens.astype(np.int32)}
        if name == "ragged":
            return {"kv_indptr": indptr(kv_lens)}
        used = self.tables[np.arange(self.tables.shape[1]) < counts[:, None]]
        table = {"kv_indptr": indptr(counts), "kv_indices": np.append(used, [GARBAGE] * 2).astype(np.int32)}
        if name == "slots":
            return {**table, "kv_len": kv_lens.astype(np.int32)}
        # What is not read of a request without pages is garbage too.
        last = np.where(counts > 0, (kv_lens - 1) % self.page_size + 1, GARBAGE)
        return {**table, "last_page_len": last.astype(np.int32)}

    def slots_of(self, requests, keys, device):
        """`[n, keys]` slots of the first keys of some requests; behind their lengths that of some key that exists."""
        tokens = np.arange(keys)
        columns = np.minimum(tokens // self.page_size, self.tables.shape[1] - 1)
        slots = self.tables[requests][:, columns].astype(np.int64) * self.page_size + tokens % self.page_size
        slots[tokens >= self.kv_lens[requests][:, None]] = self.slots[0] if len(self.slots) else 0
        return torch.from_numpy(slots).to(device)


def indptr(lengths):
    """Cumulative lengths from 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def numbers(generator, shape, dtype, amplitude=1.0, mean=0.0):
    """Normally distributed numbers."""
    wide = dtype if dtype.itemsize > 1 else torch.float16
    made = torch.randn(shape, generator=generator, device=generator.device, dtype=wide)
    if amplitude != 1 or mean:
        made = made.mul_(amplitude).add_(mean)
    return made.to(dtype)


def cache(generator, pages, row, dtype, amplitude=1.0, mean=0.0):
    """`[pages, page_size, *row]`: numbers in used slots, NaN in all others."""
    filled = torch.full((pages.count * pages.page_size, *row), torch.nan, device=generator.device, dtype=dtype)
    slots = torch.from_numpy(pages.slots).to(generator.device)
    rows = numbers(generator, (len(slots), *row), dtype, amplitude, mean)
    as_bytes(filled)[slots] = as_bytes(rows)
    return filled.view(pages.count, pages.page_size, *row)


def as_bytes(tensor):
    """fp8 tensors as bytes, which torch can index; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8 else tensor


def rows_of(cache, slots):
    """Rows of a cache `[pages, page_size, …]` at slots, in float64; NaN, which only unused slots hold, is 0."""
    flat = cache.flatten(0, 1)
    taken = as_bytes(flat)[slots].view(flat.dtype)
    return taken.to(torch.float32).double() if taken.dtype in FP8 else taken.double()


def sample(rng, qo_lens, kv_lens, *, heads, width, budget):
    """Which rows the formula is asked for: `(requests [n], rows [n, r])` in parts of similar lengths; rows are -1 where
    a request has fewer.

    All of them where their scores, and the numbers of their keys, are within the budget. Else the first, the last, the
    longest and the shortest request, and others at random; of requests that are too long for a quarter of the budget
    the first row, the last, and others at random.
    """
    qo_lens, kv_lens = np.asarray(qo_lens, np.int64), np.maximum(np.asarray(kv_lens, np.int64), 1)
    most = np.maximum(budget // 4 // (heads * kv_lens), 3)
    taken = np.minimum(qo_lens, most)
    cost = taken * heads * kv_lens + kv_lens * width
    chosen, spent = [], 0
    for request in by_importance(rng, qo_lens, kv_lens):
        if len(chosen) < 4 or spent + cost[request] <= budget:
            chosen.append(request)
            spent += cost[request]
    chosen.sort(key=lambda request: (kv_lens[request], taken[request]))
    return [chunk(rng, part, qo_lens, taken) for part in parts(chosen, kv_lens, taken, heads, width, budget)]


def by_importance(rng, qo_lens, kv_lens):
    """Requests with rows: first, last, longest, shortest, and the others at random."""
    present = np.flatnonzero(qo_lens)
    if not len(present):
        return []
    lengths = kv_lens[present]
    first = [present[0], present[-1], present[lengths.argmax()], present[lengths.argmin()]]
    return list(dict.fromkeys([*first, *rng.permutation(present)]))


def parts(requests, kv_lens, taken, heads, width, budget):
    """Requests, sorted by length, in parts whose padded scores and keys are within the budget, and little padded."""
    part, most = [], 0
    for request in requests:
        most = max(most, taken[request])
        size = (len(part) + 1) * kv_lens[request] * (most * heads + width)
        if part and (size > budget or kv_lens[request] > 2 * kv_lens[part[0]] + 64):
            yield part
            part, most = [], taken[request]
        part.append(request)
    if part:
        yield part


def chunk(rng, part, qo_lens, taken):
    """The requests of a part, and which of their rows."""
    rows = np.full((len(part), int(taken[part].max())), -1)
    for row, request in zip(rows, part):
        count, of = taken[request], qo_lens[request]
        picked = np.arange(of)
        if count < of:
            picked = np.sort(np.append(rng.choice(of - 2, count - 2, replace=False) + 1, [0, of - 1]))
        row[:count] = picked
    return np.array(part), rows
