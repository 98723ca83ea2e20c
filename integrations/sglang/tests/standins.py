"""What the backends read of SGLang's runner, pools, layers and batches."""

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import torch


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class Mode(Enum):
    """A forward mode."""

    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, DLLM_EXTEND = range(7)

    def is_idle(self):
        return self is Mode.IDLE

    def is_decode(self):
        return self is Mode.DECODE

    def is_target_verify(self):
        return self is Mode.TARGET_VERIFY

    def is_dllm_extend(self):
        return self is Mode.DLLM_EXTEND


class Pool:
    """Keys and values of token slots, of one layer."""

    def __init__(self, slots, heads, dim, v_dim, dtype):
        self.k, self.v = (torch.full((slots, heads, d), torch.nan).to(dtype) for d in (dim, v_dim))

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        if k_scale is not None:
            k, v = k / k_scale, v / v_scale
        self.k[loc], self.v[loc] = k.to(self.k.dtype), v.to(self.v.dtype)

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


@dataclass
class KVWriteLoc:
    """Slots of new tokens in both pools, as SGLang bundles them."""

    loc: torch.Tensor
    swa_loc: torch.Tensor

    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc):
        return cls(forward_batch.out_cache_loc, swa_loc)


class WindowPool:
    """Layer 0 has all tokens; layer 1, with a window, has slots of its own, in pages of another order."""

    layers_mapping = {0: (0, False), 1: (0, True)}

    def __init__(self, pages, page_size, *shape):
        self.pools = [Pool(pages * page_size, *shape) for _ in range(2)]
        moved = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages - 1) + 1])
        self.mapping = (moved[:, None] * page_size + torch.arange(page_size)).flatten()

    def translate_loc_from_full_to_swa(self, slots):
        return self.mapping[slots]

    def set_kv_buffer(self, layer, loc, k, v, k_scale=None, v_scale=None):
        window = self.layers_mapping[layer.layer_id][1]
        self.pools[window].set_kv_buffer(layer, loc.swa_loc if window else loc, k, v, k_scale, v_scale)

    def get_key_buffer(self, layer_id):
        return self.pools[layer_id].k

    def get_value_buffer(self, layer_id):
        return self.pools[layer_id].v

    def forget(self, slots):
        """The window has passed these tokens: their slots in its pool are others' now."""
        self.mapping[slots.long()] = 0


class RecordPool:
    """Latent records of token slots, of one layer."""

    def __init__(self, slots, width, latent, dtype):
        self.records, self.latent = torch.full((slots, 1, width), torch.nan).to(dtype), latent

    def set_kv_buffer(self, layer, loc, k, v):
        self.records[loc] = k.to(self.records.dtype)

    def set_mla_kv_buffer(self, layer, loc, k_nope, k_rope):
        self.records[loc] = torch.cat([k_nope, k_rope], dim=-1).to(self.records.dtype)

    def get_key_buffer(self, layer_id):
        return self.records

    def get_value_buffer(self, layer_id):
        return self.records[..., : self.latent]


class Engine:
    """A runner with a pool, whose requests get pages in random order."""

    def __init__(self, page_size=1, heads=4, kv_heads=2, dim=32, v_dim=32, dtype=torch.float32, drafts=None, **model):
        torch.manual_seed(0)
        self.heads, self.kv_heads, self.dim, self.v_dim = heads, kv_heads, dim, v_dim
        self.rows, self.longest = 8, 128
        pages = self.rows * self.longest // page_size
        self.pool = Pool((pages + 1) * page_size, kv_heads, dim, v_dim, dtype)
        order = torch.randperm(pages) + 1  # page 0 is where padding goes
        slots = (order[:, None] * page_size + torch.arange(page_size)).view(self.rows, self.longest)
        self.req_to_token = slots.to(torch.int32)
        self.runner = SimpleNamespace(
            device=torch.get_default_device(),
            page_size=page_size,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token, size=self.rows),
            token_to_kv_pool=self.pool,
            model_config=SimpleNamespace(context_len=self.longest, **model),
            server_args=SimpleNamespace(speculative_num_draft_tokens=drafts),
        )

    def layer(self, **fields):
        defaults = dict(
            layer_id=0,
            tp_q_head_num=self.heads,
            tp_k_head_num=self.kv_heads,
            qk_head_dim=self.dim,
            v_head_dim=self.v_dim,
            scaling=self.dim**-0.5,
            logit_cap=0.0,
            logit_capping_method="tanh",
            sliding_window_size=-1,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            xai_temperature_len=-1,
            use_irope=False,
            pos_encoding_mode="NONE",
            k_scale=None,
            v_scale=None,
            k_scale_float=None,
            v_scale_float=None,
        )
        return SimpleNamespace(**defaults | fields)

    def fill(self, row, tokens):
        """Keys and values of a request's first tokens, written to the pool."""
        k, v = torch.randn(tokens, self.kv_heads, self.dim), torch.randn(tokens, self.kv_heads, self.v_dim)
        self.pool.set_kv_buffer(None, self.req_to_token[row, :tokens].long(), k, v)

    def cached(self, slots):
        """Keys and values in these slots."""
        return self.pool.k[slots.long()].float(), self.pool.v[slots.long()].float()

    def new(self, tokens):
        """Queries, keys and values of new tokens."""
        q = torch.randn(tokens, self.heads * self.dim)
        return q, torch.randn(tokens, self.kv_heads, self.dim), torch.randn(tokens, self.kv_heads, self.v_dim)


def mla_dtype():
    """Of queries and records: float32 where Folio takes it for MLA, which CUDA does not."""
    return torch.bfloat16 if torch.get_default_device().type == "cuda" else torch.float32


class MlaEngine(Engine):
    """A model of MLA: `layer` is absorbed, `heads_layer` multi-head."""

    LATENT, ROPE, NOPE, VALUE = 64, 16, 32, 24

    def __init__(self, page_size=1, dtype=None, heads=4, **options):
        width, self.q_dtype = self.LATENT + self.ROPE, mla_dtype()
        dtype = dtype or self.q_dtype
        super().__init__(page_size, heads, 1, width, self.LATENT, kv_lora_rank=64, qk_rope_head_dim=16, **options)
        self.pool = self.runner.token_to_kv_pool = RecordPool(self.pool.k.shape[0], width, self.LATENT, dtype)
        self.runner.use_mla_backend = True

    def heads_layer(self):
        width = self.NOPE + self.ROPE
        return self.layer(tp_k_head_num=self.heads, qk_head_dim=width, v_head_dim=self.VALUE, scaling=width**-0.5)

    def fill(self, row, tokens):
        k = torch.randn(tokens, 1, self.dim)
        self.pool.set_kv_buffer(None, self.req_to_token[row, :tokens].long(), k, k[..., : self.LATENT])

    def cached(self, slots):
        records = self.pool.records[slots.long()].float()
        return records, records[..., : self.LATENT]

    def new(self, tokens):
        k = torch.randn(tokens, 1, self.dim, dtype=self.q_dtype)
        return torch.randn(tokens, self.heads * self.dim, dtype=self.q_dtype), k, k[..., : self.LATENT]


def step(mode, engine, rows, seq_lens, new=None, spec_info=None, encoder_lens=None):
    """A forward batch: `new` tokens of each request, written behind what the mode counts as cached.

    Args:
        rows: rows of req_to_token.
        seq_lens: as SGLang states them in this mode.
        new: (first position, count) of each request's new tokens.
        encoder_lens: tokens of each request's encoder, which come before all others in its row.
    """
    rows, lens = torch.tensor(rows), torch.tensor(seq_lens)
    encoded = encoder_lens or [0] * len(seq_lens)
    loc = [
        engine.req_to_token[row, first + begin : first + begin + count]
        for row, first, (begin, count) in zip(rows, encoded, new or [])
    ]
    counts = [count for _, count in new or []]
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(rows),
        req_pool_indices=rows,
        seq_lens=lens,
        seq_lens_sum=int(lens.sum()),
        extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
        extend_seq_lens_cpu=counts,
        extend_prefix_lens_cpu=[begin for begin, _ in new or []],
        extend_num_tokens=sum(counts),
        out_cache_loc=torch.cat(loc).long() if loc else None,
        out_cache_loc_is_physical=False,
        spec_info=spec_info,
        encoder_lens=None if encoder_lens is None else torch.tensor(encoder_lens),
        encoder_lens_cpu=encoder_lens,
        encoder_out_cache_loc=torch.cat([engine.req_to_token[row, :n] for row, n in zip(rows, encoded)]).long()
        if loc
        else None,
        cross_attention_custom_mask=None,
    )


def take_over(backend, batch, graph):
    """Has a backend take over a step, `graph`: as before a replay."""
    if graph:
        backend.init_forward_metadata_out_graph(batch)
    else:
        backend.init_forward_metadata(batch)


def trees():
    """Which drafts each of four drafts sees: branches, a chain, and four roots."""
    branches = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    return [torch.tensor(branches).bool(), torch.ones(4, 4).tril().bool(), torch.eye(4).bool()]


def draft_steps(draft, engine, layer, rows, seq_lens, graph):
    """The steps of a draft over pools that are full of what was drafted: `(number, queries, outputs)` of each."""
    for row in rows:
        engine.fill(row, 100)
    batch = step(Mode.DECODE, engine, rows, seq_lens, spec_info=SimpleNamespace())
    tokens = len(rows) * draft.topk
    if graph:
        draft.init_cuda_graph_state(len(rows), tokens)
    take_over(draft, batch, graph)
    for number, backend in enumerate(draft.attn_backends):
        q, _, _ = engine.new(tokens)
        yield number, q, backend.forward_decode(q, None, None, layer, batch)
