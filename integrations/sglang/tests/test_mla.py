"""Every mode of the backend for MLA, fed with stand-ins for SGLang's batches, against the formula in float64."""

from types import SimpleNamespace

import folio
import oracle
import pytest
import torch
from standins import AttentionType, MlaEngine, Mode, draft_steps, step, take_over, trees

from folio_sglang.drafts import FolioMultiStepDraftBackend
from folio_sglang.mla import FolioMLAAttnBackend

ROWS = (3, 0, 6)
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


def close(got, want, atol=2e-6):
    rtol, atol = (2e-2, 2e-2) if got.dtype == torch.bfloat16 else (1e-5, atol)
    torch.testing.assert_close(got.double(), want.flatten(-2), rtol=rtol, atol=atol)


def absorbed(engine, layer, q, slots):
    """What a request's absorbed rows should give over the records in these slots."""
    return oracle.attention(q.view(-1, engine.heads, engine.dim), *engine.cached(slots), sm_scale=layer.scaling)[0]


def check(engine, layer, q, o, new, seq_lens, rows=ROWS):
    parts = [
        absorbed(engine, layer, queries, engine.req_to_token[row, :keys])
        for row, queries, keys in zip(rows, q.split(new), seq_lens)
    ]
    close(o, torch.cat(parts))


@PAGE_SIZES
@pytest.mark.parametrize("graph", [True, False])
def test_decode(page_size, graph):
    engine = MlaEngine(page_size)
    backend, layer = FolioMLAAttnBackend(engine.runner), engine.layer()
    backend.init_cuda_graph_state(4, 4)
    for row, tokens in zip(ROWS, (0, 15, 100)):
        engine.fill(row, tokens)
    for seq_lens in ((1, 16, 101), (2, 17, 102)):
        batch = step(Mode.DECODE, engine, ROWS, seq_lens, [(n - 1, 1) for n in seq_lens])
        take_over(backend, batch, graph)
        q, k, v = engine.new(3)
        o = backend.forward_decode(q, k, v, layer, batch)
        check(engine, layer, q, o, (1, 1, 1), seq_lens)


@PAGE_SIZES
@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.MIXED, Mode.DRAFT_EXTEND_V2])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
def test_extends_over_a_cached_prefix_are_absorbed(page_size, mode, parts):
    """Records and queries come whole, or as their latent and rotated parts."""
    engine = MlaEngine(page_size)
    backend, layer = FolioMLAAttnBackend(engine.runner), engine.layer()
    prefix, new = (0, 17, 40), (21, 5, 1)
    for row, tokens in zip(ROWS, prefix):
        engine.fill(row, tokens)
    seq_lens = [a + b for a, b in zip(prefix, new)]
    batch = step(mode, engine, ROWS, seq_lens, list(zip(prefix, new)))
    backend.init_forward_metadata(batch)
    q, k, v = engine.new(27)
    if parts:
        heads = q.view(27, engine.heads, engine.dim)
        latent, rope = heads.split([engine.LATENT, engine.ROPE], dim=-1)
        o = backend.forward_extend(
            latent.contiguous(), v, v, layer, batch, q_rope=rope.contiguous(), k_rope=k[..., engine.LATENT :]
        )
    else:
        o = backend.forward_extend(q, k, v, layer, batch)
    check(engine, layer, q, o, new, seq_lens)


def test_prompts_without_a_prefix_are_computed_in_heads():
    engine = MlaEngine()
    backend, layer, latent = FolioMLAAttnBackend(engine.runner), engine.heads_layer(), engine.layer()
    new = (21, 5, 1)
    batch = step(Mode.EXTEND, engine, ROWS, new, [(0, n) for n in new])
    backend.init_forward_metadata(batch)
    q, k = torch.randn(2, 27, engine.heads, engine.NOPE + engine.ROPE, dtype=engine.q_dtype)
    v = torch.randn(27, engine.heads, engine.NOPE + engine.VALUE, dtype=engine.q_dtype)[..., engine.NOPE :]
    o = backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False)
    parts = [oracle.attention(*part, sm_scale=layer.scaling)[0] for part in zip(*(x.split(new) for x in (q, k, v)))]
    close(o, torch.cat(parts))
    # Other layers of the step may be absorbed.
    q, k, v = engine.new(27)
    check(engine, latent, q, backend.forward_extend(q, k, v, latent, batch), new, new)


@PAGE_SIZES
@pytest.mark.parametrize("masked", [False, True])
def test_chains_of_drafts_are_verified(page_size, masked):
    engine = MlaEngine(page_size, drafts=4)
    backend, layer = FolioMLAAttnBackend(engine.runner), engine.layer()
    seq_lens = (1, 16, 50)
    for row, tokens in zip(ROWS, seq_lens):
        engine.fill(row, tokens)
    mask = torch.ones(1, dtype=torch.bool) if masked else None
    spec = SimpleNamespace(custom_mask=mask, topk=1, num_tokens_per_req=4)
    batch = step(Mode.TARGET_VERIFY, engine, ROWS, seq_lens, [(n, 4) for n in seq_lens], spec)
    backend.init_forward_metadata(batch)
    q, k, v = engine.new(12)
    o = backend.forward_extend(q, k, v, layer, batch)
    check(engine, layer, q, o, (4, 4, 4), [n + 4 for n in seq_lens])


@PAGE_SIZES
@pytest.mark.parametrize("drafts_alone", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_trees_of_drafts_are_verified(page_size, drafts_alone, graph):
    """Masks have columns of all keys, or, as SGLang's CPU engine makes them, of the drafts alone."""
    engine = MlaEngine(page_size, drafts=4)
    backend, layer = FolioMLAAttnBackend(engine.runner), engine.layer()
    backend.init_cuda_graph_state(4, 16)
    for row in ROWS:
        engine.fill(row, engine.longest)
    for seq_lens in ((1, 16, 50), (2, 3, 90)):
        # What the mask says of the prefix does not count.
        prefixes = [torch.rand(4, 0 if drafts_alone else n) > 0.5 for n in seq_lens]
        mask = torch.cat([torch.cat(parts, dim=1).flatten() for parts in zip(prefixes, trees())])
        spec = SimpleNamespace(custom_mask=mask, topk=2, num_tokens_per_req=4)
        batch = step(Mode.TARGET_VERIFY, engine, ROWS, seq_lens, [(n, 4) for n in seq_lens], spec)
        take_over(backend, batch, graph)
        q, k, v = engine.new(12)
        o = backend.forward_extend(q, k, v, layer, batch)
        rows = q.split(1)
        parts = []
        for index, (row, keys, tree) in enumerate(zip(ROWS, seq_lens, trees())):
            table = engine.req_to_token[row]
            for draft, seen in enumerate(tree):
                slots = torch.cat([table[:keys], table[keys : keys + 4][seen]])
                parts.append(absorbed(engine, layer, rows[4 * index + draft], slots))
        close(o, torch.cat(parts))


def test_masks_of_captures_may_be_of_any_length():
    engine = MlaEngine(drafts=4)
    backend, layer = FolioMLAAttnBackend(engine.runner), engine.layer()
    backend.init_cuda_graph_state(4, 16)
    for row in ROWS:
        engine.fill(row, 8)
    spec = SimpleNamespace(custom_mask=torch.ones(1, dtype=torch.bool), topk=2, num_tokens_per_req=4)
    batch = step(Mode.TARGET_VERIFY, engine, ROWS, (1, 2, 3), [(n, 4) for n in (1, 2, 3)], spec)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    q, k, v = engine.new(12)
    assert backend.forward_extend(q, k, v, layer, batch).isfinite().all()


@pytest.mark.parametrize("page_size, topk", [(1, 1), (1, 2), (4, 1)])
@pytest.mark.parametrize("graph", [True, False])
def test_drafts(page_size, topk, graph):
    steps = 4
    engine = MlaEngine(page_size)
    draft, layer = FolioMultiStepDraftBackend(engine.runner, topk, steps), engine.layer()
    seq_lens = (3, 16, 50)
    for number, q, o in draft_steps(draft, engine, layer, ROWS, seq_lens, graph):
        parts = []
        for index, rows in enumerate(q.split(1)):
            table, keys = engine.req_to_token[ROWS[index // topk]], seq_lens[index // topk]
            first = keys + index % topk * steps
            slots = torch.cat([table[:keys], table[first : first + number + 1]])
            parts.append(absorbed(engine, layer, rows, slots))
        close(o, torch.cat(parts))


def test_fp8_records():
    engine = MlaEngine(dtype=torch.float8_e4m3fn)
    layer = engine.layer(k_scale=torch.tensor(0.5), k_scale_float=0.5)
    backend = FolioMLAAttnBackend(engine.runner)
    batch = step(Mode.EXTEND, engine, (2,), (12,), [(0, 12)])
    backend.init_forward_metadata(batch)
    q, k, v = engine.new(12)
    o = backend.forward_extend(q, k, v, layer, batch)
    slots = engine.req_to_token[2, :12]
    records, latent = engine.cached(slots)
    torch.testing.assert_close(records * 0.5, k.float(), rtol=0.07, atol=0.01)
    queries = q.view(12, engine.heads, -1)
    close(o, oracle.attention(queries, records * 0.5, latent * 0.5, sm_scale=layer.scaling)[0], atol=1e-5)


def test_a_step_is_planned_once(monkeypatch):
    planned = []

    def spy(self, plan=folio.Mla.plan, **batch):
        planned.append(batch)
        plan(self, **batch)

    monkeypatch.setattr(folio.Mla, "plan", spy)
    engine = MlaEngine()
    backend = FolioMLAAttnBackend(engine.runner)
    engine.fill(2, 12)
    batch = step(Mode.DECODE, engine, (2,), (12,))
    backend.init_forward_metadata(batch)
    for _ in range(3):
        backend.forward_decode(engine.new(1)[0], None, None, engine.layer(), batch)
    assert len(planned) == 1


HEADS_LAYER = dict(tp_k_head_num=4, v_head_dim=24)


@pytest.mark.parametrize(
    "fields, arguments, prefix, reason",
    [
        (dict(is_cross_attention=True), {}, 0, "is_cross_attention is True in layer 0; False is accepted"),
        (dict(attn_type=AttentionType.ENCODER_ONLY), {}, 0, "attn_type is 'encoder_only' in layer 0; 'decoder'"),
        (dict(sliding_window_size=3), {}, 0, "sliding_window_size is 3 in layer 0; -1 or None is accepted"),
        (dict(logit_cap=5.0), {}, 0, "logit_cap is 5.0 in layer 0; 0 or None is accepted"),
        ({}, dict(topk_indices=torch.zeros(1)), 0, r"topk_indices is a tensor of \[1\] in layer 0; None is accepted"),
        (HEADS_LAYER, dict(save_kv_cache=False), 3, "extend_prefix_lens is 3 in layer 0; 0 is accepted"),
        (HEADS_LAYER, {}, 0, "save_kv_cache is True in layer 0; False is accepted"),
    ],
    ids=str,
)
def test_what_layers_may_not_bring(fields, arguments, prefix, reason):
    engine = MlaEngine()
    backend = FolioMLAAttnBackend(engine.runner)
    batch = step(Mode.EXTEND, engine, (2,), (12 + prefix,), [(prefix, 12)])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=reason):
        backend.forward_extend(*engine.new(12), engine.layer(**fields), batch, **arguments)
    assert engine.pool.records.isnan().all()


def test_sparse_pools_are_refused():
    engine = MlaEngine()
    engine.pool.kv_cache_dim = 656
    with pytest.raises(NotImplementedError, match="kv_cache_dim is 656; 80, .* is accepted"):
        FolioMLAAttnBackend(engine.runner)


def test_pools_for_windows_are_refused():
    engine = MlaEngine()
    engine.pool.translate_loc_from_full_to_swa = lambda slots: slots
    with pytest.raises(NotImplementedError, match="one pool is accepted with MLA"):
        FolioMLAAttnBackend(engine.runner)
