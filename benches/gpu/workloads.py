"""The rows of the table: shapes, and the tensors that make them real.

A workload is what decode and prefill have in common: query rows per request against keys in shuffled pages.
"""

import dataclasses
import functools
import math

import torch


@dataclasses.dataclass
class Row:
    """One line of the table. `kind` is decode, verify, prefill or mixed.

    Attributes:
        q, kv: new tokens and keys of each request; the most of them where `requests` says those of each.
        chunk: new tokens of the first request, where they are others.
        requests: new tokens and keys of each request, where q, kv and chunk do not say them.
        window: keys that a row sees, its own among them; 0: all.
        soft_cap: 0: none.
        sinks: whether each head has one.
        model: which model this is a layer of.
    """

    kind: str
    batch: int
    q: int
    kv: int
    chunk: int = 0
    hq: int = 32
    hk: int = 8
    d: int = 128
    dv: int = 0
    page: int = 16
    causal: bool = True
    kv_dtype: torch.dtype = torch.bfloat16
    ragged: bool = False
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    requests: tuple = ()
    model: str = ""

    @property
    def handle(self):
        """The kind of handle that computes it."""
        return "decode" if self.kind in ("decode", "verify") else "prefill"

    @property
    def qo_lens(self):
        return [q for q, _ in self.requests] or [self.chunk or self.q] + [self.q] * (self.batch - 1)

    @property
    def kv_lens(self):
        return [kv for _, kv in self.requests] or [self.kv] * self.batch

    @property
    def name(self):
        heads = f"hq={self.hq} hk={self.hk} d={self.d}" + (f" dv={self.dv}" if self.dv else "")
        fp8 = " fp8" if self.kv_dtype != torch.bfloat16 else ""
        lengths = f"{self.chunk}+{self.batch - 1}×{self.q}" if self.chunk else span(self.qo_lens)
        q = "" if self.kind == "decode" else f" qlen={lengths}" + ("" if self.causal else " full")
        extras = (f" window={self.window}" if self.window else "") + (f" cap={self.soft_cap:g}" if self.soft_cap else "")
        extras += (" sinks" if self.sinks else "") + (" ragged" if self.ragged else "")
        page = f" page={self.page}" if self.page != 16 and not self.ragged else ""
        model = f"{self.model}: " if self.model else ""
        return f"{model}bs={self.batch}{q} kv={span(self.kv_lens)} {heads}{fp8}{extras}{page}"


def span(lengths):
    """A length that all have, or the least and the greatest and their sum."""
    least, most = min(lengths), max(lengths)
    return f"{least}" if least == most else f"{least}–{most}(Σ{sum(lengths)})"


def of_requests(kind, requests, **more):
    """A row of requests of (new tokens, keys)."""
    q, kv = map(max, zip(*requests))
    return Row(kind, len(requests), q, kv, requests=tuple(requests), **more)


def decode(batch, kv, **more):
    return Row("decode", batch, 1, kv, **more)


def prefill(batch, q, kv, **more):
    return Row("prefill", batch, q, kv, **more)


E4M3 = torch.float8_e4m3fn
MLA = dict(hq=16, hk=16, d=192, dv=128)
RAGGED_MLA = dict(MLA, ragged=True)
ROWS = [
    decode(1, 1024), decode(1, 8192), decode(1, 131072), decode(8, 1024), decode(8, 8192), decode(32, 4096),
    decode(64, 1024), decode(64, 8192), decode(256, 1024), decode(256, 4096), decode(64, 4096, hq=64),
    decode(64, 4096, hk=32), decode(64, 4096, hq=64, d=64), decode(64, 4096, hq=16, d=256),
    decode(1, 8192, kv_dtype=E4M3), decode(64, 8192, kv_dtype=E4M3), decode(256, 4096, kv_dtype=E4M3),
    prefill(16, 1024, 1024), prefill(4, 4096, 4096), prefill(1, 16384, 16384), prefill(4, 4096, 4096, hq=64, d=64),
    prefill(4, 4096, 4096, hq=16, d=256), prefill(4, 4096, 4096, hk=32, d=80), prefill(4, 4096, 4096, d=96),
    prefill(4, 4096, 4096, d=112), prefill(4, 4096, 4096, hq=16, d=160), prefill(4, 4096, 4096, hq=16, d=192),
    prefill(4, 4096, 4096, hq=16, d=224), prefill(8, 512, 8192), prefill(1, 2048, 32768), prefill(32, 128, 4096),
    prefill(1, 57, 2057), prefill(1, 100, 4100), prefill(16, 1024, 1024, causal=False),
    prefill(4, 4096, 4096, causal=False),
    prefill(1, 16384, 16384, causal=False), prefill(4, 4096, 4096, **MLA), prefill(1, 16384, 16384, **MLA),
    prefill(4, 4096, 4096, **RAGGED_MLA), prefill(1, 16384, 16384, **RAGGED_MLA),
    prefill(2, 4096, 4096), prefill(2, 4096, 4096, page=1), prefill(4, 4096, 4096, page=1),
    prefill(4, 4096, 4096, kv_dtype=E4M3), prefill(1, 16384, 16384, kv_dtype=E4M3),
    prefill(4, 4096, 4096, kv_dtype=E4M3, page=1),
]


class Workload:
    """Tensors of a row; q, k and v are normal. Pages are drawn from a pool with gaps and shuffled; ragged K and V lie
    one request behind the other and have no pages."""

    def __init__(self, row, seed=0):
        device = "cuda"
        generator = torch.Generator(device=device).manual_seed(seed)
        dv = row.dv or row.d
        self.row, self.causal, self.page_size = row, row.causal, row.page
        self.num_qo_heads, self.num_kv_heads, self.head_dim_qk, self.head_dim_vo = row.hq, row.hk, row.d, dv
        self.window, self.soft_cap = row.window, row.soft_cap
        self.kv_dtype, self.sm_scale = row.kv_dtype, 1 / math.sqrt(row.d)
        self.is_decode, self.ragged = row.kind == "decode", row.ragged
        self.qo_lens = torch.tensor(row.qo_lens, dtype=torch.int32)
        self.kv_lens = torch.tensor(row.kv_lens, dtype=torch.int32)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.q = normal(sum(row.qo_lens), row.hq, row.d)
        self.qo_indptr = torch.zeros(row.batch + 1, dtype=torch.int32)
        self.qo_indptr[1:] = self.qo_lens.cumsum(0)
        self.kv_indptr = torch.zeros(row.batch + 1, dtype=torch.int32)
        if row.ragged:
            self.kv_indptr[1:] = self.kv_lens.cumsum(0)
            tokens, self.block_table = (sum(row.kv_lens),), None
            self.kv_indices = self.last_page_len = None
        else:
            pages = -(-self.kv_lens // row.page)
            self.kv_indptr[1:] = pages.cumsum(0)
            total = int(self.kv_indptr[-1])
            tokens = (total + 7, row.page)
            ids = torch.randperm(tokens[0], generator=generator, device=device)[:total].int()
            self.kv_indices = ids.cpu()
            self.block_table = torch.nn.utils.rnn.pad_sequence(ids.split(pages.tolist()), batch_first=True)
            self.last_page_len = (self.kv_lens - 1) % row.page + 1
        self.k = normal(*tokens, row.hk, row.d).to(row.kv_dtype)
        self.v = normal(*tokens, row.hk, dv).to(row.kv_dtype)
        self.qo_indptr_device, self.kv_len_device = self.qo_indptr.cuda(), self.kv_lens.cuda()
        self.o = torch.empty(len(self.q), row.hq, dv, device=device, dtype=torch.bfloat16)
        self.sinks = torch.randn(row.hq, generator=generator, device=device) if row.sinks else None

    def tokens(self, request):
        """K and V of one request, in order: [kv, heads, dim]."""
        begin, end = (int(x) for x in self.kv_indptr[request:request + 2])
        if self.ragged:
            return self.k[begin:end], self.v[begin:end]
        pages = self.kv_indices[begin:end].long().cuda()
        kv = int(self.kv_lens[request])
        return tuple(cache[pages].flatten(0, 1)[:kv] for cache in (self.k, self.v))

    @functools.cached_property
    def dense(self):
        """q, K and V of all requests as [batch, head, token, dim]; None where requests differ, or fp8 would be copied."""
        batch = self.row.batch
        if self.row.chunk or self.row.requests or self.kv_dtype != torch.bfloat16:
            return None
        k, v = zip(*(self.tokens(b) for b in range(batch)))
        q = self.q.view(batch, -1, *self.q.shape[1:])
        return tuple(t.transpose(1, 2).contiguous() for t in (q, torch.stack(k), torch.stack(v)))

    def rows(self, request, rows):
        """Where some query rows of a request are."""
        return [int(self.qo_indptr[request]) + row for row in rows]

    def reference(self, request, rows):
        """Float64 attention of some query rows of a request: [rows, heads, dim]."""
        k, v = (t.double().repeat_interleave(self.num_qo_heads // self.num_kv_heads, 1) for t in self.tokens(request))
        s = torch.einsum("qhd,khd->hqk", self.q[self.rows(request, rows)].double(), k) * self.sm_scale
        cap = self.row.soft_cap
        if cap:
            s = cap * torch.tanh(s / cap)
        own = torch.tensor(rows, device="cuda")[:, None] + len(k) - int(self.qo_lens[request])
        key = torch.arange(len(k), device="cuda")
        if self.causal:
            s.masked_fill_(key > own, -math.inf)
        if self.row.window:
            s.masked_fill_(key <= own - self.row.window, -math.inf)
        if self.sinks is not None:
            sink = self.sinks.double()[:, None, None].expand(-1, len(rows), 1)
            return torch.einsum("hqk,khd->qhd", torch.cat([s, sink], 2).softmax(-1)[..., :-1], v)
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), v)

    @property
    def kv_bytes(self):
        """Bytes of the keys and values that some row sees, counted once."""
        window = self.row.window
        keys = sum(min(kv, q + window - 1) if window else kv for q, kv in self.lens)
        return keys * self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * self.k.element_size()

    @property
    def flops(self):
        """Exact: unmasked (row, key) pairs only."""
        pairs = sum(self._pairs(q, kv) for q, kv in self.lens)
        return 2 * self.num_qo_heads * pairs * (self.head_dim_qk + self.head_dim_vo)

    @property
    def lens(self):
        """New tokens and keys of each request."""
        return zip(self.row.qo_lens, self.row.kv_lens)

    def _pairs(self, q, kv):
        """Rows and keys of a request with q rows and kv keys that see each other."""
        window = self.row.window or kv
        if not self.causal:
            return q * kv
        return sum(min(kv - q + i + 1, window) for i in range(q))
