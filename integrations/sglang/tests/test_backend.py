"""Every mode of the backend, fed with stand-ins for SGLang's batches, against the formula in float64."""

import functools
from types import SimpleNamespace

import folio
import oracle
import pytest
import torch
from calls import calls_of
from standins import AttentionType, Engine, Mode, WindowPool, draft_steps, step, take_over, trees

from folio_sglang.backend import FolioAttnBackend
from folio_sglang.drafts import FolioMultiStepDraftBackend

ROWS = (3, 0, 6)


def close(got, want):
    torch.testing.assert_close(got.double(), want.flatten(-2), rtol=1e-5, atol=2e-6)


def request(engine, layer, q, slots, **options):
    """What a request's rows should give over the keys in these slots."""
    k, v = engine.cached(slots)
    return oracle.attention(q.view(-1, engine.heads, engine.dim), k, v, sm_scale=layer.scaling, **options)[0]


def extend(engine, layer, prefix, new, options, mode=Mode.EXTEND, backend=None, **call):
    backend = backend or FolioAttnBackend(engine.runner)
    for row, tokens in zip(ROWS, prefix):
        engine.fill(row, tokens)
    total = [a + b for a, b in zip(prefix, new)]
    batch = step(mode, engine, ROWS, total, list(zip(prefix, new)))
    backend.init_forward_metadata(batch)
    q, k, v = engine.new(sum(new))
    o = backend.forward_extend(q, k, v, layer, batch, **call)
    parts = [
        request(engine, layer, rows, engine.req_to_token[row, :keys], **options)
        for row, rows, keys in zip(ROWS, q.split(new), total)
    ]
    close(o, torch.cat(parts))


PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])


@PAGE_SIZES
@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.MIXED, Mode.DRAFT_EXTEND_V2])
def test_extend(page_size, mode):
    engine = Engine(page_size)
    extend(engine, engine.layer(), (0, 17, 40), (21, 5, 1), {}, mode)


@pytest.mark.parametrize(
    "fields, options",
    [
        (dict(sliding_window_size=7), dict(window=(7, -1))),
        (dict(sliding_window_size=0), dict(window=(0, -1))),
        (dict(logit_cap=5.0), dict(cap=5.0)),
        (dict(scaling=0.3), {}),
        (dict(attn_type=AttentionType.ENCODER_ONLY), dict(causal=False)),
    ],
    ids=str,
)
def test_what_layers_bring(fields, options):
    engine = Engine()
    extend(engine, engine.layer(**fields), (0, 17, 40), (21, 5, 1), options)


def test_sinks():
    engine = Engine()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    extend(engine, engine.layer(), (0, 17, 40), (21, 5, 1), dict(sinks=sinks), sinks=sinks.bfloat16())


def test_values_of_another_width():
    engine = Engine(page_size=4, v_dim=16)
    extend(engine, engine.layer(), (0, 17, 40), (21, 5, 1), {})


def test_layers_of_a_window_share_a_plan_for_it(monkeypatch):
    """Whatever the order of layers is; keys before the window are not planned for."""
    planned = []

    def spy(self, plan=folio.Prefill.plan, **batch):
        planned.append(batch.get("window_left"))
        plan(self, **batch)

    monkeypatch.setattr(folio.Prefill, "plan", spy)
    engine = Engine(page_size=4)
    backend = FolioAttnBackend(engine.runner)
    batch = step(Mode.EXTEND, engine, ROWS, (9, 4, 36), [(0, 9), (0, 4), (30, 6)])
    engine.fill(ROWS[2], 30)
    backend.init_forward_metadata(batch)
    for window in (7, -1, 7, 0, -1, 0):
        layer = engine.layer(sliding_window_size=window)
        q, k, v = engine.new(19)
        o = backend.forward_extend(q, k, v, layer, batch)
        parts = [
            request(engine, layer, rows, engine.req_to_token[row, :keys], window=(window, -1))
            for row, keys, rows in zip(ROWS, (9, 4, 36), q.split((9, 4, 6)))
        ]
        close(o, torch.cat(parts))
    assert planned == [7, None, 0]


@PAGE_SIZES
@pytest.mark.parametrize("graph", [True, False])
def test_layers_with_a_window_in_a_pool_of_their_own(page_size, graph):
    """Extends, then decodes after the window has passed the first tokens, whose slots are others' by then."""
    engine = Engine(page_size)
    pages = engine.pool.k.shape[0] // page_size
    pool = engine.runner.token_to_kv_pool = WindowPool(pages, page_size, 2, 32, 32, torch.float32)
    backend, layers = FolioAttnBackend(engine.runner), (engine.layer(), engine.layer(layer_id=1, sliding_window_size=9))
    backend.init_cuda_graph_state(4, 4)

    def forward(batch, new):
        for layer in layers:
            q, k, v = engine.new(sum(new))
            o = backend.forward_extend(q, k, v, layer, batch)
            keys, values = kept[layer.layer_id]
            parts, options = [], dict(sm_scale=layer.scaling, window=(layer.sliding_window_size, -1))
            for request, parted in enumerate(zip(*(x.split(new) for x in (q, k, v)))):
                keys[request], values[request] = (
                    torch.cat([old, added]) for old, added in zip((keys[request], values[request]), parted[1:])
                )
                queries = parted[0].view(-1, engine.heads, engine.dim)
                parts.append(oracle.attention(queries, keys[request], values[request], **options)[0])
            close(o, torch.cat(parts))

    kept = {layer.layer_id: [[torch.zeros(0, 2, 32)] * 3 for _ in range(2)] for layer in layers}
    new = (21, 5, 40)
    batch = step(Mode.EXTEND, engine, ROWS, new, [(0, count) for count in new])
    backend.init_forward_metadata(batch)
    forward(batch, new)
    for row, count in zip(ROWS, new):
        passed = max(count - 9, 0) // page_size * page_size
        pool.forget(engine.req_to_token[row, :passed])
    for number in (1, 2):
        seq_lens = [count + number for count in new]
        batch = step(Mode.DECODE, engine, ROWS, seq_lens, [(keys - 1, 1) for keys in seq_lens])
        take_over(backend, batch, graph)
        forward(batch, (1, 1, 1))


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("mode, new", [(Mode.DECODE, (1, 1, 1)), (Mode.EXTEND, (5, 1, 9))])
def test_cross_attention(graph, mode, new):
    """Layers over an encoder's keys and over a request's own, in turn; the second request has no encoder."""
    if graph and mode is Mode.EXTEND:
        pytest.skip("extends are not in graphs")
    engine = Engine(page_size=16, is_encoder_decoder=True)
    backend = FolioAttnBackend(engine.runner)
    own, cross = engine.layer(), engine.layer(is_cross_attention=True)
    encoder_lens, seq_lens = (21, 0, 5), (8, 16, 40)
    for row, first, keys in zip(ROWS, encoder_lens, seq_lens):
        engine.fill(row, first + keys)
    news = [(total - count, count) for total, count in zip(seq_lens, new)]
    batch = step(mode, engine, ROWS, seq_lens, news, encoder_lens=encoder_lens)
    if graph:
        # SGLang's view of a replay has neither of them.
        del batch.cross_attention_custom_mask, batch.encoder_lens_cpu
        backend.init_cuda_graph_state(4, 4)
    take_over(backend, batch, graph)
    forward = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
    for layer in (cross, own, cross, own):
        tokens = sum(encoder_lens) if layer is cross else sum(new)
        q, k, v = engine.new(sum(new))[0], *engine.new(tokens)[1:]
        o = forward(q, k, v, layer, batch)
        parts = []
        for row, first, keys, rows in zip(ROWS, encoder_lens, seq_lens, q.split(new)):
            table = engine.req_to_token[row]
            slots = table[:first] if layer is cross else table[first : first + keys]
            parts.append(request(engine, layer, rows, slots, causal=layer is own))
        close(o, torch.cat(parts))
    # Later steps find the encoder's keys in the pool.
    o = forward(q, None, None, cross, batch)
    parts = [
        request(engine, cross, rows, engine.req_to_token[row, :first], causal=False)
        for row, first, rows in zip(ROWS, encoder_lens, q.split(new))
    ]
    close(o, torch.cat(parts))


def test_masks_of_cross_attention_are_refused():
    engine = Engine(is_encoder_decoder=True)
    batch = step(Mode.DECODE, engine, (2,), (12,), [(11, 1)], encoder_lens=(3,))
    batch.cross_attention_custom_mask = torch.ones(3)
    with pytest.raises(NotImplementedError, match="cross_attention_custom_mask is a tensor; None is accepted"):
        FolioAttnBackend(engine.runner).init_forward_metadata(batch)


def test_layers_of_two_shapes_share_a_step():
    engine, other = Engine(), Engine(heads=8, kv_heads=8, dim=16, v_dim=16)
    backend = FolioAttnBackend(engine.runner)
    batch = step(Mode.EXTEND, engine, ROWS, (9, 4, 6), [(0, 9), (0, 4), (0, 6)])
    backend.init_forward_metadata(batch)
    for model in (engine, other, engine):
        backend.token_to_kv_pool = model.pool
        q, k, v = model.new(19)
        layer = model.layer()
        o = backend.forward_extend(q, k, v, layer, batch)
        parts = [
            request(model, layer, rows, engine.req_to_token[row, : rows.shape[0]])
            for row, rows in zip(ROWS, q.split((9, 4, 6)))
        ]
        close(o, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pools(dtype):
    engine = Engine(dtype=dtype)
    layer = engine.layer(k_scale=torch.tensor(0.5), v_scale=torch.tensor(0.25), k_scale_float=0.5, v_scale_float=0.25)
    backend = FolioAttnBackend(engine.runner)
    batch = step(Mode.EXTEND, engine, (2,), (12,), [(0, 12)])
    backend.init_forward_metadata(batch)
    q, k, v = engine.new(12)
    o = backend.forward_extend(q, k, v, layer, batch)
    k, v = engine.cached(engine.req_to_token[2, :12])
    want = oracle.attention(q.view(12, engine.heads, -1), k * 0.5, v * 0.25, sm_scale=layer.scaling)[0]
    close(o, want)


def decode(engine, backend, layer, seq_lens, batch, init):
    """A decode step, whose new token is the last of `seq_lens`."""
    init(batch)
    q, k, v = engine.new(len(seq_lens))
    o = backend.forward_decode(q, k, v, layer, batch)
    parts = [
        request(engine, layer, rows, engine.req_to_token[row, :keys])
        for row, rows, keys in zip(batch.req_pool_indices, q.split(1), seq_lens)
    ]
    close(o, torch.cat(parts))


@PAGE_SIZES
def test_decode(page_size):
    engine = Engine(page_size)
    backend, layer = FolioAttnBackend(engine.runner), engine.layer()
    for row, tokens in zip(ROWS, (0, 15, 100)):
        engine.fill(row, tokens)
    for seq_lens in ((1, 16, 101), (2, 17, 102)):
        batch = step(Mode.DECODE, engine, ROWS, seq_lens, [(n - 1, 1) for n in seq_lens])
        decode(engine, backend, layer, seq_lens, batch, backend.init_forward_metadata)


@PAGE_SIZES
def test_steps_of_graphs_keep_their_addresses(page_size):
    engine = Engine(page_size)
    backend, layer = FolioAttnBackend(engine.runner), engine.layer()
    backend.init_cuda_graph_state(4, 4)
    for row, tokens in zip(ROWS, (0, 15, 100)):
        engine.fill(row, tokens)
    addresses = set()
    for capture, seq_lens in ((True, (1, 1, 1)), (False, (2, 16, 101)), (False, (3, 17, 102))):
        batch = step(Mode.DECODE, engine, ROWS, seq_lens, [(n - 1, 1) for n in seq_lens])

        init = functools.partial(backend.init_forward_metadata_out_graph, in_capture=capture)
        decode(engine, backend, layer, seq_lens, batch, init)
        addresses.add(tuple(t.data_ptr() for t in backend.forward_metadata.planned().values()))
    assert len(addresses) == 1
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


@PAGE_SIZES
@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_verify(page_size, tree, graph):
    engine = Engine(page_size, drafts=4)
    backend, layer = FolioAttnBackend(engine.runner), engine.layer()
    seq_lens = (1, 16, 50)
    for row, tokens in zip(ROWS, seq_lens):
        engine.fill(row, tokens)
    # What the mask says of the prefix does not count.
    drafts = trees()[0]
    masks = [torch.cat([torch.rand(4, n) > 0.5, drafts], dim=1) for n in seq_lens]
    spec = SimpleNamespace(custom_mask=torch.cat([m.flatten() for m in masks]) if tree else None, num_tokens_per_req=4)
    batch = step(Mode.TARGET_VERIFY, engine, ROWS, seq_lens, [(n, 4) for n in seq_lens], spec)
    if graph:
        backend.init_cuda_graph_state(3, 12)
    take_over(backend, batch, graph)
    q, k, v = engine.new(12)
    o = backend.forward_extend(q, k, v, layer, batch)
    parts = []
    for row, rows, keys in zip(ROWS, q.split(4), seq_lens):
        mask = torch.cat([torch.ones(4, keys, dtype=torch.bool), drafts], dim=1) if tree else None
        parts.append(request(engine, layer, rows, engine.req_to_token[row, : keys + 4], mask=mask))
    close(o, torch.cat(parts))


def test_verify_with_masks_of_drafts_alone():
    """As SGLang's CPU engine makes them."""
    engine = Engine(drafts=4)
    backend, layer, seq_lens = FolioAttnBackend(engine.runner), engine.layer(), (1, 16, 50)
    for row, tokens in zip(ROWS, seq_lens):
        engine.fill(row, tokens)
    spec = SimpleNamespace(custom_mask=torch.cat([tree.flatten() for tree in trees()]), num_tokens_per_req=4)
    batch = step(Mode.TARGET_VERIFY, engine, ROWS, seq_lens, [(n, 4) for n in seq_lens], spec)
    backend.init_forward_metadata(batch)
    q, k, v = engine.new(12)
    o = backend.forward_extend(q, k, v, layer, batch)
    parts = []
    for row, rows, keys, tree in zip(ROWS, q.split(4), seq_lens, trees()):
        mask = torch.cat([torch.ones(4, keys, dtype=torch.bool), tree], dim=1)
        parts.append(request(engine, layer, rows, engine.req_to_token[row, : keys + 4], mask=mask))
    close(o, torch.cat(parts))


@pytest.mark.parametrize("page_size, topk", [(1, 1), (1, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("graph", [True, False])
def test_drafts(page_size, topk, graph):
    steps = 4
    engine = Engine(page_size)
    draft, layer = FolioMultiStepDraftBackend(engine.runner, topk, steps), engine.layer()
    seq_lens = (3, 16, 50)
    assert len(draft.attn_backends) == steps - 1
    for number, q, o in draft_steps(draft, engine, layer, ROWS, seq_lens, graph):
        parts = []
        for index, rows in enumerate(q.split(1)):
            row, keys, branch = ROWS[index // topk], seq_lens[index // topk], index % topk
            first = keys + branch * steps
            if page_size > 1 and topk > 1:
                rest = keys % page_size
                first = keys - rest + branch * -(-(rest + steps) // page_size) * page_size + rest
            table = engine.req_to_token[row]
            parts.append(request(engine, layer, rows, torch.cat([table[:keys], table[first : first + number + 1]])))
        close(o, torch.cat(parts))


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_a_step_is_one_plan_and_no_loop_over_requests(monkeypatch, mode):
    """As many functions run for one request as for eight, and later layers plan nothing."""
    planned = []
    for kind in (folio.Decode, folio.Prefill):

        def spy(self, plan=kind.plan, **batch):
            planned.append(batch)
            plan(self, **batch)

        monkeypatch.setattr(kind, "plan", spy)
    engine = Engine(page_size=4)
    backend, layer = FolioAttnBackend(engine.runner), engine.layer()
    for row in range(8):
        engine.fill(row, 12)

    def run(requests):
        batch = step(
            mode, engine, range(requests), (12,) * requests, [(11 if mode is Mode.DECODE else 7, 1)] * requests
        )
        q = engine.new(requests)[0]

        def forward():
            backend.init_forward_metadata(batch)
            for _ in range(3):
                backend.forward_extend(q, None, None, layer, batch)

        return calls_of(forward)

    run(8)  # which makes the handle
    planned.clear()
    assert run(1) == run(8)
    assert len(planned) == 2


def test_idle_steps_have_no_plan():
    engine = Engine()
    backend = FolioAttnBackend(engine.runner)
    backend.init_forward_metadata(step(Mode.IDLE, engine, (), ()))
    assert backend.forward_metadata is None


@pytest.mark.parametrize(
    "fields, arguments, reason",
    [
        (dict(is_cross_attention=True), {}, "is_cross_attention; encoder_lens are accepted with it"),
        (
            dict(attn_type=AttentionType.DECODER_BIDIRECTIONAL),
            {},
            "attn_type is 'decoder_bidirectional' in layer 0; 'dec",
        ),
        (dict(xai_temperature_len=100), {}, "xai_temperature_len is 100 in layer 0; -1 or 0 is accepted"),
        (dict(use_irope=True), {}, "use_irope is True in layer 0; False is accepted"),
        (
            dict(logit_cap=5.0, logit_capping_method="sigmoid"),
            {},
            "logit_capping_method is 'sigmoid' in layer 0; 'tanh'",
        ),
        ({}, dict(k_rope=torch.zeros(1)), r"k_rope is a tensor of \[1\] in layer 0; None is accepted"),
        ({}, dict(save_kv_cache=False), "save_kv_cache is False with new keys; True is accepted"),
    ],
    ids=str,
)
def test_what_layers_may_not_bring(fields, arguments, reason):
    engine = Engine()
    backend = FolioAttnBackend(engine.runner)
    batch = step(Mode.EXTEND, engine, (2,), (12,), [(0, 12)])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=reason):
        backend.forward_extend(*engine.new(12), engine.layer(**fields), batch, **arguments)
    assert engine.pool.k.isnan().all()


@pytest.mark.parametrize("field", ["swa_req_ring_size", "request_window", "swa_uses_full_indices"])
def test_what_pools_may_not_have(field):
    engine = Engine()
    setattr(engine.pool, field, 128)
    with pytest.raises(NotImplementedError, match=f"{field}; pools of pages are accepted"):
        FolioAttnBackend(engine.runner)


def test_pools_for_windows_are_refused_for_drafts():
    engine = Engine()
    engine.pool.translate_loc_from_full_to_swa = lambda slots: slots
    with pytest.raises(NotImplementedError, match="the draft has a pool for layers with a window"):
        FolioMultiStepDraftBackend(engine.runner, 1, 3)
