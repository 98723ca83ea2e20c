"""The backend's parts without an engine: what small models do not reach, against the formula in float64."""

from types import SimpleNamespace

import folio
import oracle
import pytest
import torch
from calls import calls_of
from folio_torch import context_of
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, FullAttentionSpec, MLAAttentionSpec

import folio_vllm
from folio_vllm.attention import FolioBackend, FolioImpl, FolioMetadata, FolioMetadataBuilder, _mask
from folio_vllm.mla import FolioMLABackend, FolioMLAImpl, FolioMLAMetadataBuilder
from folio_vllm.plans import Batch, Bounds, Planner, Problem
from folio_vllm.selection import backend_for

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 12
ROWS, KEYS = (3, 1, 5), (20, 33, 5)
TABLE = torch.tensor([[3, 1, 0], [2, 4, 5], [7, 0, 0]], dtype=torch.int32)
SCALE = DIM**-0.5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    folio_vllm.register()
    with set_current_vllm_config(VllmConfig()):
        yield


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


SMALL = Bounds(8, 64, 128)


def planner(bounds=SMALL, kv_dtype=torch.float32, **options):
    problem = Problem(torch.float32, kv_dtype, HEADS, KV_HEADS, DIM, DIM, PAGE)
    return Planner(context_of("cpu"), problem, bounds, **options)


def batch(rows=ROWS, keys=KEYS, table=TABLE):
    return Batch(
        size=Bounds(len(rows), sum(rows), max(keys)),
        max_qo_len=max(rows),
        qo_indptr=int32(0, *rows).cumsum(0).to(torch.int32),
        kv_len=int32(*keys),
        block_table=table,
    )


def step(causal=True, ranges=None, plan=None, **parts):
    b = batch(**parts)
    return FolioMetadata(plan or planner(), b, b.size.num_tokens, _mask(causal), ranges, torch.zeros(0))


def cache(dtype=torch.float32):
    """As vLLM lays out pages: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`."""
    return torch.randn(PAGES, KV_HEADS, PAGE, 2 * DIM).to(dtype)


def layer(k_scale=1.0, v_scale=1.0, **fields):
    return SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale), **fields)


def impl(**options):
    made = FolioImpl(HEADS, DIM, SCALE, KV_HEADS, **options)
    made.process_weights_after_loading(torch.float32)
    return made


UNSCALED = layer()


def run(impl, metadata, kv_cache, layer=UNSCALED):
    q = torch.randn(metadata.num_actual_tokens + 2, HEADS, DIM)  # two rows of padding
    o = torch.full_like(q, 7.0)
    impl.forward(layer, q, None, None, kv_cache, metadata, o)
    assert (o[-2:] == 7).all()
    return q[:-2], o[:-2]


def expected(q, kv_cache, rows=ROWS, keys=KEYS, table=TABLE, causal=True, masks=None, **options):
    pages = kv_cache.float().transpose(1, 2)
    parts, begin = [], 0
    for request, (n, length) in enumerate(zip(rows, keys)):
        k, v = oracle.paged(pages, table[request], length).split(DIM, dim=-1)
        parts.append(
            oracle.attention(
                q[begin : begin + n],
                k,
                v,
                sm_scale=SCALE,
                causal=causal[request] if isinstance(causal, list) else causal,
                mask=masks[request] if masks else None,
                **options,
            )[0]
        )
        begin += n
    return torch.cat(parts)


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)


def test_sinks():
    sinks, kv = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16), cache()
    q, o = run(impl(sinks=sinks), step(), kv)
    close(o, expected(q, kv, sinks=sinks))


def test_alibi():
    slopes, kv = [0.5, 0.25, 0.1, 0.05], cache()
    q, o = run(impl(alibi_slopes=slopes), step(), kv)
    close(o, expected(q, kv, slopes=torch.tensor(slopes)))


def test_windows_have_two_sides_where_rows_see_the_future():
    kv = cache()
    windowed = impl(sliding_window=4)
    q, o = run(windowed, step(), kv)
    close(o, expected(q, kv, window=(3, -1)))
    q, o = run(windowed, step(causal=False), kv)
    close(o, expected(q, kv, causal=False, window=(3, 3)))


def test_cross_attention_sees_all_keys_whatever_the_rows():
    rows, keys, kv = (9, 1, 1), (4, 33, 16), cache()
    q, o = run(impl(attn_type=AttentionType.ENCODER_DECODER), step(causal=False, rows=rows, keys=keys), kv)
    close(o, expected(q, kv, rows, keys, causal=False))


def test_causality_by_request():
    kv = cache()
    q, o = run(impl(), step(causal=torch.tensor([True, False, False])), kv)
    close(o, expected(q, kv, causal=[True, False, False]))


@pytest.mark.parametrize("clamped", [False, True])
def test_multimodal_prefixes(clamped):
    """Rows 0 to 4 of the third request; 1 to 4 see each other, within the window where the layer says so."""
    ranges, kv = torch.zeros(3, 1, 2, dtype=torch.int32), cache()
    ranges[2, 0] = int32(1, 4)
    q, o = run(impl(sliding_window=2), step(ranges=ranges), kv, layer(mm_prefix_clamp_sliding_window=clamped))
    masks = []
    for rows, keys in zip(ROWS, KEYS):
        p, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None, :]
        seen = (j <= p) & (p - j < 2)
        if rows == 5:
            together = (p >= 1) & (p <= 4) & (j >= 1) & (j <= 4)
            seen |= together & (p - j < 2) if clamped else together
        masks.append(seen)
    close(o, expected(q, kv, masks=masks))


def test_encoders_attend_over_new_keys():
    encoder, metadata = impl(attn_type=AttentionType.ENCODER_ONLY), step(causal=False, rows=KEYS, table=None)
    q, (k, v) = torch.randn(58, HEADS, DIM), torch.randn(2, 58, KV_HEADS, DIM)
    o = torch.empty_like(q)
    encoder.do_kv_cache_update(layer(), k, v, torch.zeros(0), torch.zeros(0))
    encoder.forward(layer(), q, k, v, torch.zeros(0), metadata, o)
    parts = [
        oracle.attention(*part, sm_scale=SCALE, causal=False)[0] for part in zip(*(x.split(KEYS) for x in (q, k, v)))
    ]
    close(o, torch.cat(parts))


@pytest.mark.parametrize("name, dtype", [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_caches_with_a_scale_per_head(name, dtype):
    """Written and read with the same scales: within the type's rounding, and exact where it is read."""
    quantised = impl(kv_cache_dtype=name)
    pages = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8)
    scales = layer([0.5, 0.25], [0.125, 2.0])
    slots = torch.randperm(PAGES * PAGE)
    key, value = torch.randn(2, PAGES * PAGE, KV_HEADS, DIM)
    quantised.do_kv_cache_update(scales, key, value, pages, slots)
    factors = torch.cat([scales._k_scale[:, None].expand(-1, DIM), scales._v_scale[:, None].expand(-1, DIM)], dim=-1)
    dense = pages.view(dtype).float() * factors[:, None, :]
    stored = dense.transpose(1, 2).reshape(-1, KV_HEADS, 2 * DIM)[slots]
    torch.testing.assert_close(stored, torch.cat([key, value], dim=-1), rtol=0.07 if name == "fp8" else 0.13, atol=0.01)
    q, o = run(quantised, step(plan=planner(kv_dtype=folio.Tensor(torch.zeros(1, dtype=dtype)).dtype)), pages, scales)
    close(o, expected(q, dense))


def test_prefixes_that_requests_share_are_read_once():
    shared = torch.arange(1, 65).expand(4, 64)
    table = torch.cat([shared, torch.arange(65, 69)[:, None]], dim=1).to(torch.int32)
    kv = torch.randn(70, KV_HEADS, PAGE, 2 * DIM)
    sharing = planner(Bounds(8, 64, 2048), share_prefixes=True)
    parts = dict(rows=(1, 1, 1, 1), keys=(1030, 1025, 1040, 1033), table=table)
    metadata = step(plan=sharing, **parts)
    assert type(metadata.handle()) is folio.Cascade
    q, o = run(impl(), metadata, kv)
    close(o, expected(q, kv, **parts))
    assert type(step(plan=sharing).handle()) is folio.Prefill
    assert type(step(plan=planner(Bounds(8, 64, 2048)), **parts).handle()) is folio.Decode


def test_steps_beyond_the_bounds_get_larger_handles():
    small, kv = planner(Bounds(1, 1, 16)), cache()
    q, o = run(impl(), step(plan=small), kv)
    close(o, expected(q, kv))


def test_a_step_is_planned_again_after_another():
    group, kv = planner(), cache()
    first, second = step(plan=group), step(plan=group, rows=(1, 1, 1))
    for metadata, rows in ((first, ROWS), (second, (1, 1, 1)), (first, ROWS)):
        q, o = run(impl(), metadata, kv)
        close(o, expected(q, kv, rows))


def builder(*impls, spec=FullAttentionSpec, **layer_fields):
    """A group of layers; the configuration has what a builder reads of it."""
    layers = {}
    for number, made in enumerate(impls):
        layers[f"layer{number}"] = attention = Attention.__new__(Attention)
        attention.__dict__.update(impl=made, **layer_fields)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=128),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context=layers, cudagraph_mode=CUDAGraphMode.NONE),
    )
    made = spec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    return FolioMetadataBuilder(made, list(layers), config, torch.device("cpu"))


def common(rows=ROWS, keys=KEYS, table=TABLE, **fields):
    """A step as vLLM's runner states it."""
    starts = int32(0, *rows).cumsum(0).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=int32(*keys),
        num_reqs=len(rows),
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(keys),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
        seq_lens_cpu_upper_bound=int32(*keys),
        **fields,
    )


def spy_on_plans(monkeypatch):
    """The arguments of every plan from here on."""
    plans = []
    for kind in (folio.Decode, folio.Prefill, folio.Cascade):

        def spy(self, plan=kind.plan, **batch):
            plans.append(batch)
            plan(self, **batch)

        monkeypatch.setattr(kind, "plan", spy)
    return plans


@pytest.mark.parametrize(
    "windows, planned", [((5, 5), 4), ((5, 20), 19), ((1,), 0), ((5, None), None), ((None,), None)], ids=str
)
@pytest.mark.parametrize("rows", [ROWS, (1, 1, 1)], ids=["prefill", "decode"])
def test_steps_are_planned_for_the_widest_window_of_their_layers(monkeypatch, windows, planned, rows):
    plans, kv = spy_on_plans(monkeypatch), cache()
    impls = [impl(sliding_window=window) for window in windows]
    metadata = builder(*impls).build(0, common(rows))
    for window, made in zip(windows, impls):
        q, o = run(made, metadata, kv)
        close(o, expected(q, kv, rows, window=window and (window - 1, -1)))
    assert [plan.get("window_left") for plan in plans] == [planned]


@pytest.mark.parametrize("causal", [True, False])
def test_encoders_are_planned_for_their_window(monkeypatch, causal):
    plans = spy_on_plans(monkeypatch)
    encoder = impl(sliding_window=3, attn_type=AttentionType.ENCODER_ONLY)
    metadata = builder(encoder, spec=EncoderOnlyAttentionSpec).build(0, common(KEYS, causal=causal))
    q, (k, v) = torch.randn(58, HEADS, DIM), torch.randn(2, 58, KV_HEADS, DIM)
    o = torch.empty_like(q)
    encoder.forward(layer(), q, k, v, torch.zeros(0), metadata, o)
    options = dict(sm_scale=SCALE, causal=causal, window=(2, -1 if causal else 2))
    close(o, torch.cat([oracle.attention(*part, **options)[0] for part in zip(*(x.split(KEYS) for x in (q, k, v)))]))
    assert [plan["window_left"] for plan in plans] == [2]


@pytest.mark.parametrize("clamped", [False, True])
def test_multimodal_prefixes_beyond_the_window_are_planned_for(monkeypatch, clamped):
    plans, windowed = spy_on_plans(monkeypatch), impl(sliding_window=2)
    group, kv = builder(windowed, mm_prefix_clamp_sliding_window=clamped), cache()
    for ranges in ({2: [(1, 4)]}, None):
        metadata = group.build(0, common(mm_req_doc_ranges=ranges))
        assert (metadata.mm_prefix_ranges is None) == (ranges is None)
        run(windowed, metadata, kv, layer(mm_prefix_clamp_sliding_window=clamped))
    assert [plan.get("window_left") for plan in plans] == [1 if clamped else None, 1]


def test_a_step_is_one_plan_and_no_loop_over_requests(monkeypatch):
    """As many functions run for two requests as for 64, and layers plan nothing."""
    plans, group = spy_on_plans(monkeypatch), builder(impl(), impl())
    table, kv = torch.arange(64 * 8, dtype=torch.int32).view(64, 8), torch.randn(64 * 8, KV_HEADS, PAGE, 2 * DIM)

    def parts(requests):
        return dict(rows=(3,) + (1,) * (requests - 1), keys=(9,) * requests, table=table[:requests])

    group.build(0, common(**parts(64)))  # which makes the handle
    calls = [calls_of(group.build, 0, common(**parts(n))) for n in (2, 64)]
    assert calls[0] == calls[1]
    plans.clear()
    metadata = group.build(0, common(**parts(64)))
    for made in (impl(), impl()):
        q, o = run(made, metadata, kv)
        close(o, expected(q, kv, **parts(64)))
    assert len(plans) == 1


@pytest.mark.parametrize("rows", [ROWS, (1, 1, 1)], ids=["prefill", "decode"])
def test_bits_of_a_request_do_not_depend_on_the_batch(monkeypatch, rows):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    layer, kv = impl(), cache()
    group = builder(layer)
    q = torch.randn(sum(rows), HEADS, DIM)

    def attend(*requests):
        picked = torch.cat([q.split(rows)[request] for request in requests])
        parts = [[numbers[request] for request in requests] for numbers in (rows, KEYS)]
        o = torch.empty_like(picked)
        layer.forward(UNSCALED, picked, None, None, kv, group.build(0, common(*parts, TABLE[list(requests)])), o)
        return o

    assert group._planner._problem.batch_invariant
    assert torch.equal(attend(0, 1, 2), torch.cat([attend(request) for request in range(3)]))


#: Of a record those widths that vLLM's common code knows.
LATENT, ROPE, NOPE, VALUE = 512, 64, 32, 24


class Projection:
    """As kv_b_proj: latent rows to keys without rotation, and values."""

    quant_method = None

    def __init__(self):
        self.weight = torch.randn(HEADS * (NOPE + VALUE), LATENT) / LATENT**0.5

    def __call__(self, latent):
        return latent @ self.weight.T, None

    def heads(self, latent):
        """Keys and values in float64."""
        rows = latent.double() @ self.weight.double().T
        return rows.view(-1, HEADS, NOPE + VALUE).split([NOPE, VALUE], dim=-1)


class Unused:
    """vLLM's own prefill backend, which Folio's context handle replaces."""

    def clone(self):
        return self

    def prepare_metadata(self, metadata):
        pass


def mla_builder(cache_dtype="auto", drafts=None, name="layer"):
    layer = SimpleNamespace(
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        prefill_backend=Unused(),
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.float32,
            max_model_len=128,
            get_num_attention_heads=lambda parallel: HEADS,
            get_head_size=lambda: LATENT + ROPE,
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1, decode_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={name: layer}, cudagraph_mode=CUDAGraphMode.NONE),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=PAGE),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
        speculative_config=drafts
        and SimpleNamespace(method="ngram", num_speculative_tokens=drafts, parallel_drafting=False),
    )
    spec = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=torch.float32)
    return FolioMLAMetadataBuilder(spec, [name], config, torch.device("cpu"))


def mla_impl(projection, cache_dtype="auto", **options):
    made = FolioMLAImpl(
        HEADS,
        LATENT + ROPE,
        (NOPE + ROPE) ** -0.5,
        1,
        options.pop("alibi_slopes", None),
        options.pop("sliding_window", None),
        cache_dtype,
        None,
        options.pop("attn_type", AttentionType.DECODER),
        None,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=VALUE,
        kv_b_proj=projection,
    )
    made.process_weights_after_loading(torch.float32)
    return made


MLA_TABLE = torch.tensor([[3, 1, 0], [2, 4, 5], [7, 8, 10], [9, 6, 11]], dtype=torch.int32)


def filled_records(layer, cache_dtype, scale):
    """A cache that the layer has written, and the numbers in it."""
    records = torch.zeros(PAGES, PAGE, LATENT + ROPE, dtype=torch.uint8 if cache_dtype == "fp8" else torch.float32)
    slots = torch.randperm(PAGES * PAGE)
    latent, rope = torch.randn(PAGES * PAGE, LATENT), torch.randn(PAGES * PAGE, ROPE)
    layer.do_kv_cache_update(latent, rope.unsqueeze(1), records, slots, cache_dtype, scale)
    stored = records.view(torch.float8_e4m3fn).float() * scale if cache_dtype == "fp8" else records
    written = stored.view(-1, LATENT + ROPE)[slots]
    torch.testing.assert_close(written, torch.cat([latent, rope], dim=-1), rtol=0.07, atol=0.01)
    return records, stored


def check_absorbed(layer, metadata, records, scale, rows, known):
    """Rows of requests over the records that are known of each."""
    q = torch.randn(sum(rows), HEADS, LATENT + ROPE)
    o, _ = layer.forward_mqa(tuple(q.split([LATENT, ROPE], dim=-1)), records, metadata, SimpleNamespace(_k_scale=scale))
    want = [
        oracle.attention(queries, keys[:, None], keys[:, None, :LATENT], sm_scale=layer.scale)[0]
        for queries, keys in zip(q.split(rows), known)
    ]
    torch.testing.assert_close(o.double(), torch.cat(want), rtol=1e-5, atol=1e-5)


def check_prompts(layer, metadata, records, scale, rows, known):
    """New rows of requests over their context in the cache and over themselves, whose records are not read there."""
    q, new = torch.randn(sum(rows), HEADS, NOPE + ROPE), torch.randn(sum(rows), LATENT + ROPE)
    output = torch.zeros(sum(rows), HEADS * VALUE)
    layer.forward_mha(q, new[:, :LATENT], new[:, None, LATENT:], records, metadata, scale, output)
    want = []
    for queries, added, keys in zip(q.split(rows), new.split(rows), known):
        keys = torch.cat([keys[: len(keys) - len(added)], added])
        nope, v = layer.kv_b_proj.heads(keys[:, :LATENT])
        k = torch.cat([nope, keys[:, None, LATENT:].double().expand(-1, HEADS, -1)], dim=-1)
        want.append(oracle.attention(queries, k, v, sm_scale=layer.scale)[0])
    torch.testing.assert_close(output.double(), torch.cat(want).flatten(1), rtol=1e-5, atol=1e-5)


def check_parts(layer, metadata, records, stored, scale, rows, keys):
    """The decodes of a step, and its prompts."""
    known, decodes = [oracle.paged(stored, *each) for each in zip(MLA_TABLE, keys)], metadata.num_decodes
    if decodes:
        check_absorbed(layer, metadata, records, scale, rows[:decodes], known[:decodes])
    if metadata.num_prefills:
        check_prompts(layer, metadata, records, scale, rows[decodes:], known[decodes:])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    "drafts, rows, decodes",
    [(None, (1, 1, 5, 9), 2), (3, (4, 1, 5, 9), 2), (3, (4, 2, 1, 3), 4), (None, (7, 9, 5, 30), 0)],
)
def test_mla(cache_dtype, drafts, rows, decodes):
    """Decodes and drafts absorbed; behind them prompts over a context, and the last one without."""
    layer, scale = mla_impl(Projection(), cache_dtype), torch.tensor(0.25 if cache_dtype == "fp8" else 1.0)
    records, stored = filled_records(layer, cache_dtype, scale)
    keys = (20, 33, 46, rows[3])
    metadata = mla_builder(cache_dtype, drafts).build(0, common(rows, keys, MLA_TABLE))
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, 4 - decodes)
    check_parts(layer, metadata, records, stored, scale, rows, keys)


@pytest.mark.parametrize("behind", [0, 1])
def test_mla_of_a_draft_model(behind):
    """Its first step has a token more than are verified, which vLLM leaves out of the lengths on the host."""
    layer, scale = mla_impl(Projection()), torch.tensor(1.0)
    records, stored = filled_records(layer, "auto", scale)
    rows, keys = (5, 2, 6, 9), (20, 33, 46, 9)
    step = common(rows, keys, MLA_TABLE)
    step.seq_lens_cpu_upper_bound -= behind
    metadata = mla_builder(drafts=3, name="draft_model.layer").build(0, step)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 2)
    check_parts(layer, metadata, records, stored, scale, rows, keys)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(sliding_window=4), "sliding_window is 4 in a layer of MLA; none is accepted"),
        (dict(alibi_slopes=[0.5]), r"alibi_slopes is \[0.5\] in a layer of MLA; none is accepted"),
        (dict(attn_type=AttentionType.ENCODER), "attn_type is .* in a layer of MLA; decoder is accepted"),
    ],
    ids=str,
)
def test_what_layers_of_mla_may_not_have(options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        mla_impl(Projection(), **options)


def test_alibi_sqrt():
    """The bias of past keys is -slope · sqrt(distance)."""
    slopes, kv = torch.tensor([0.5, 0.25, 0.1, 0.05]), cache()
    q, o = run(impl(alibi_slopes=slopes.tolist(), use_alibi_sqrt=True), step(), kv)
    parts, begin = [], 0
    for rows, keys, ids in zip(ROWS, KEYS, TABLE):
        k, v = oracle.paged(kv.transpose(1, 2), ids, keys).double().repeat_interleave(2, dim=1).split(DIM, dim=-1)
        scores = torch.einsum("ihd,jhd->hij", q[begin : begin + rows].double(), k) * SCALE
        distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None, :]
        scores -= slopes.double()[:, None, None] * distance.clamp(min=0).sqrt()
        weights = torch.softmax(scores.masked_fill(distance < 0, -torch.inf), dim=-1)
        parts.append(torch.einsum("hij,jhd->ihd", weights, v))
        begin += rows
    close(o, torch.cat(parts))


def test_output_scales_are_refused():
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl().forward(layer(), *[torch.zeros(0)] * 4, None, torch.zeros(0), output_scale=torch.ones(1))
    assert not impl().fused_output_quant_supported(None)


def config(**fields):
    defaults = dict(head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=16)
    return AttentionSelectorConfig(**defaults | fields)


def test_selection():
    platform = type(current_platform)
    assert AttentionBackendEnum["FOLIO"] is AttentionBackendEnum.CUSTOM
    choose = platform.get_attn_backend_cls
    assert choose(AttentionBackendEnum.CUSTOM, config()).endswith(".FolioBackend")
    assert choose(AttentionBackendEnum.CUSTOM, config(head_size=576, use_mla=True)).endswith(".FolioMLABackend")
    assert choose(None, config()) == AttentionBackendEnum.CPU_ATTN.get_path()
    assert FolioBackend.get_name() == FolioMLABackend.get_name() == "FOLIO"


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(head_size=60), "head_size"),
        (dict(kv_cache_dtype="int8_per_token_head"), "kv_cache_dtype"),
        (dict(kv_cache_dtype="float16"), "kv_cache_dtype float16 with queries of torch.float32"),
        (dict(block_size=12), "block_size"),
        (dict(use_sparse=True), "sparse"),
        (dict(use_rswa=True), "R-SWA"),
        (dict(use_dcp=True), "DCP"),
        (dict(use_kv_connector=True), "KV connector"),
        (dict(use_mla=True, head_size=576, kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype"),
        (dict(use_mla=True, head_size=576, has_sink=True), "sinks"),
    ],
    ids=str,
)
def test_what_is_refused(fields, reason):
    with pytest.raises(ValueError, match=f"attention_backend is FOLIO, which cannot serve.*{reason}"):
        backend_for(type(current_platform), config(**fields))


def test_mla_in_float32_is_refused_on_gpus(monkeypatch):
    assert FolioMLABackend.supports_dtype(torch.float32)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert not FolioMLABackend.supports_dtype(torch.float32)
    assert FolioMLABackend.supports_dtype(torch.bfloat16)
