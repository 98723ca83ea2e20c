"""A step of FastDeploy: lengths, page tables and caches of requests of every kind, with padded tokens behind them."""

from dataclasses import dataclass, field

import numpy as np
import paddle

# (seq_lens_encoder, seq_lens_decoder, seq_lens_this_time)
DECODE, DRAFT, PROMPT, CHUNK = (0, 37, 1), (0, 20, 3), (9, 0, 9), (6, 19, 6)
INACTIVE, IDLE = (0, 11, 0), (0, 0, 0)
MIXED = [DECODE, PROMPT, INACTIVE, CHUNK, DRAFT, IDLE, (0, 64, 1), (0, 1, 1)]


def tensor(values, dtype="int32"):
    return paddle.to_tensor(np.asarray(values), dtype=dtype)


def on_host(values, dtype="int32"):
    """What FastDeploy keeps in memory of the host, whatever device a step is on."""
    return paddle.to_tensor(np.asarray(values), dtype=dtype, place=paddle.CPUPlace())


def array(t):
    """A Paddle tensor in float64."""
    return t.cast("float32").numpy().astype(np.float64) if t.dtype == paddle.bfloat16 else t.numpy().astype(np.float64)


@dataclass
class Step:
    rows: list
    page_size: int = 16
    padded: int = 4
    max_blocks: int = 8
    column: bool = False  # lengths as [B, 1]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self):
        self.encoder, self.decoder, self.this_time = (np.array(part, dtype=np.int32) for part in zip(*self.rows))
        self.cu = np.concatenate([[0], np.cumsum(self.this_time)]).astype(np.int32)
        self.num_tokens = int(self.cu[-1]) + self.padded
        self.kv_len = np.where(self.this_time > 0, self.decoder + self.this_time, 0)
        self.num_pages = len(self.rows) * self.max_blocks + 1
        pages = self.rng.permutation(self.num_pages)
        self.table = np.full((len(self.rows), self.max_blocks), -1, dtype=np.int32)
        for b, (_, decoder, this_time) in enumerate(self.rows):
            count = -(-(decoder + this_time) // self.page_size)
            self.table[b, :count], pages = pages[:count], pages[count:]
        self.batch_ids = np.full(self.num_tokens, -1, dtype=np.int32)
        for b in range(len(self.rows)):
            self.batch_ids[self.cu[b]:self.cu[b + 1]] = b

    def tokens(self):
        """(token, request, position) of every new token."""
        for b in range(len(self.rows)):
            for i in range(self.this_time[b]):
                yield int(self.cu[b]) + i, b, int(self.decoder[b]) + i

    def place(self, request, position):
        """(page, offset) of a token."""
        return int(self.table[request, position // self.page_size]), position % self.page_size

    def lengths(self):
        """seq_lens_encoder, seq_lens_decoder, seq_lens_this_time."""
        shape = (-1, 1) if self.column else (-1,)
        return [tensor(part.reshape(shape)) for part in (self.encoder, self.decoder, self.this_time)]

    def tensors(self):
        """batch_id_per_token, cu_seqlens_q, block_tables."""
        return tensor(self.batch_ids), tensor(self.cu), tensor(self.table)

    def offsets(self):
        """[T, 2]: keys from here up to there, for each token. Some see the keys behind them, some none; padded ones are garbage."""
        pairs = np.full((self.num_tokens, 2), 2147480000, dtype=np.int32)
        for token, request, position in self.tokens():
            keys = int(self.kv_len[request])
            pairs[token] = self.rng.integers(0, keys), self.rng.integers(0, keys + 1)
            if token % 3 == 0:
                pairs[token] = 0, min(keys, position + 1 + token % 5)
        return pairs

    def random(self, shape, dtype):
        return tensor(self.rng.standard_normal(shape), dtype)

    def cache(self, shape, dtype):
        """[num_pages, ...]: NaN but for the tokens that the requests have in it. shape: a page, its tokens where 'BS' is."""
        sizes = [self.page_size if size == "BS" else size for size in shape]
        pages = np.full([self.num_pages, *sizes], np.nan, dtype=np.float32)
        axis = shape.index("BS")
        for b in range(len(self.rows)):
            for position in range(self.decoder[b]):
                page, offset = self.place(b, position)
                row = np.moveaxis(pages[page], axis, 0)[offset]
                row[...] = self.rng.standard_normal(row.shape)
        return tensor(pages, dtype)
