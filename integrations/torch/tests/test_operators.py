"""torch.ops.folio: the same results as folio's own functions and the formula, eager, compiled and exported."""

import inspect

import folio
import oracle
import pytest
import torch
from folio._binding import OUTPUT, InPlace
from folio._generated import handles, operators, structs

import folio_torch
from folio_torch.operators import OPERATORS, RUNS

PAGE, PAGES, HEADS, KV_HEADS, DIM = 16, 8, 4, 2, 32
LENGTHS = ((3, 20), (1, 33), (5, 5))
TABLE = [[3, 1, 0], [2, 4, 5], [7, 0, 0]]
SCALE = DIM**-0.5
SHAPE = {
    "q_dtype": torch.float32,
    "num_qo_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim_qk": DIM,
    "page_size": PAGE,
    "max_batch_size": 4,
    "max_kv_len": 64,
}


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    rows = sum(rows for rows, _ in LENGTHS)
    return torch.randn(rows, HEADS, DIM), *(torch.randn(PAGES, PAGE, KV_HEADS, DIM) for _ in range(2))


@pytest.fixture
def prefill(device):
    handle = folio.Prefill(folio_torch.context_of(device), **SHAPE, max_num_tokens=64)
    rows, keys = zip(*LENGTHS)
    indptr = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    kv_len, table = (torch.tensor(numbers, dtype=torch.int32) for numbers in (keys, TABLE))
    handle.plan(qo_indptr=indptr, kv_len=kv_len, block_table=table)
    return handle


def expected(q, k, v, **options):
    outputs, begin = [], 0
    for (rows, keys), table in zip(LENGTHS, torch.tensor(TABLE)):
        request = q[begin : begin + rows]
        outputs.append(
            oracle.attention(request, *(oracle.paged(c, table, keys) for c in (k, v)), sm_scale=SCALE, **options)
        )
        begin += rows
    return tuple(torch.cat(parts) for parts in zip(*outputs))


def close(got, want):
    torch.testing.assert_close(got.to(torch.float64), want, rtol=2e-6, atol=2e-6)


def test_what_operators_write_is_what_the_header_calls_outputs():
    for name, outputs in OPERATORS.items():
        fields = dict(getattr(structs, name.upper() + "_ARGS")._fields)
        assert {f for f, kind in fields.items() if kind is OUTPUT or isinstance(kind, InPlace)} == set(outputs), name
    for name, (kind, _, outputs) in RUNS.items():
        args = {folio.Mla: structs.MLA_ARGS, folio.MlaContext: structs.MLA_CONTEXT_ARGS}.get(
            kind, structs.ATTENTION_ARGS
        )
        written = {field for field, role in args._fields if role is OUTPUT}
        # The steps of MlaContext have one struct, of which each writes a part.
        chunk = {"context_latent", "context_rope"}
        assert (written & chunk if name.endswith("gather") else written - chunk) == set(outputs), name


def has_a_stream(function) -> bool:
    return inspect.isfunction(function) and "stream" in inspect.signature(function).parameters


def test_every_operator_of_folio_with_a_stream_is_one_of_torch():
    assert {name for name in operators.__all__ if has_a_stream(getattr(folio, name))} == set(OPERATORS)
    methods = {
        (getattr(folio, kind), name)
        for kind in handles.__all__
        for name, function in vars(getattr(folio, kind)).items()
        if has_a_stream(function) and name != "plan" and not name.startswith("prepare_")
    }
    assert methods == {(kind, method) for kind, method, _ in RUNS.values()} | {(folio.Decode, "append_run")}
    for name in (*OPERATORS, *RUNS, "decode_append_run"):
        assert hasattr(torch.ops.folio, name)


def test_prefill(tensors, prefill):
    q, k, v = tensors
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    torch.ops.folio.prefill(
        folio_torch.number_of(prefill), q=q, k=k, v=v, o=o, lse=lse, flags=["window"], window_left=9, window_right=-1
    )
    want = expected(q, k, v, window=(9, -1))
    close(o, want[0])
    close(lse, want[1])


def test_compiled(tensors, prefill):
    q, k, v = tensors
    number = folio_torch.number_of(prefill)

    def layer(q, k, v, cap):
        o = torch.empty_like(q)
        torch.ops.folio.prefill(number, q=q * 2, k=k, v=v, o=o, logits_soft_cap=cap)
        return o + 1

    want = expected(q * 2, k, v, cap=5.0)[0] + 1
    close(torch.compile(layer, fullgraph=True)(q, k, v, 5.0), want)


def test_the_schema_of_append_and_decode_has_every_tensor_once():
    def arguments(name):
        return {argument.name: argument for argument in getattr(torch.ops.folio, name).default._schema.arguments}

    append, run, both = (arguments(name) for name in ("rope_append", "decode", "decode_append_run"))
    assert both.keys() == {f"append_{name}" for name in append} | run.keys() - {"q", "k", "v"}
    written = {name for name, argument in both.items() if argument.is_write}
    assert written == {f"append_{name}" for name in OPERATORS["rope_append"]} | {"o", "lse"}


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("in_place", [False, True])
def test_append_and_decode_by_one_operator(device, how, in_place):
    """What the two operators do, whose own tests have the formulas."""
    handle = folio.Decode(folio_torch.context_of(device), **SHAPE)
    keys = torch.tensor([keys for _, keys in LENGTHS], dtype=torch.int32)
    table = torch.tensor(TABLE, dtype=torch.int32)
    handle.plan(kv_len=keys, block_table=table)
    number, positions = folio_torch.number_of(handle), (keys - 1).long()
    slots = table.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE
    angles = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    torch.manual_seed(2)
    q, key, value = torch.randn(len(LENGTHS), HEADS + 2 * KV_HEADS, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    q = q.contiguous()
    caches = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM)
    rope = {"positions": positions, "cos_sin_cache": cos_sin}

    # Views of one tensor are taken here: PyTorch 2.11 compiles wrongly what writes two arguments that are such views.
    def two(q, key, value, caches, slots):
        k, v = caches
        q_out = q if in_place else torch.empty_like(q)
        o = torch.empty_like(q)
        torch.ops.folio.rope_append(
            q=q, q_out=q_out, key=key, value=value, k_cache=k, v_cache=v, slot_mapping=slots, **rope
        )
        torch.ops.folio.decode(number, q=q_out, k=k, v=v, o=o, sm_scale=SCALE)
        return q_out, caches, o

    def one(q, key, value, caches, slots):
        k, v = caches
        q_out = None if in_place else torch.empty_like(q)
        o = torch.empty_like(q)
        torch.ops.folio.decode_append_run(
            number,
            append_q=q,
            append_q_out=q_out,
            append_key=key,
            append_value=value,
            append_k_cache=k,
            append_v_cache=v,
            append_slot_mapping=slots,
            **{f"append_{name}": tensor for name, tensor in rope.items()},
            o=o,
            sm_scale=SCALE,
        )
        return q if in_place else q_out, caches, o

    want = two(q.clone(), key, value, caches.clone(), slots)
    step = one if how == "eager" else torch.compile(one, fullgraph=True)
    written = q.clone(), caches.clone()
    got = step(written[0], key, value, written[1], slots)
    for is_now, wanted in zip((*got, written[1]), (*want, want[1])):
        torch.testing.assert_close(is_now, wanted)


@pytest.mark.parametrize("caches", ["apart", "in one tensor"])
def test_a_compiled_append_writes_the_cache(tensors, caches):
    k, v = tensors[1:] if caches == "apart" else torch.stack(tensors[1:])
    key, value = torch.randn(2, 3, KV_HEADS, DIM)
    slots = torch.tensor([5, -1, PAGE + 2])

    @torch.compile(fullgraph=True)
    def step(key, value, k, v, slots):
        torch.ops.folio.kv_append(key=key * 3, value=value, k_cache=k, v_cache=v, slot_mapping=slots)
        return k.sum()

    want_k, want_v = k.clone(), v.clone()
    want_k.view(-1, KV_HEADS, DIM)[[5, PAGE + 2]] = key[[0, 2]] * 3
    want_v.view(-1, KV_HEADS, DIM)[[5, PAGE + 2]] = value[[0, 2]]
    step(key, value, k, v, slots)
    assert torch.equal(k, want_k) and torch.equal(v, want_v)


def test_exported(tensors, prefill):
    q, k, v = tensors

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            o = torch.empty_like(q)
            torch.ops.folio.prefill(number, q=q, k=k, v=v, o=o)
            return o

    number = folio_torch.number_of(prefill)
    program = torch.export.export(Layer(), (q, k, v))
    assert any("folio" in str(node.target) for node in program.graph.nodes)
    close(program.module()(q, k, v), expected(q, k, v)[0])


def test_merge_in_place():
    o, s = torch.randn(2, 7, HEADS, DIM), torch.randn(2, 7, HEADS)
    weights = torch.softmax(s.double(), dim=0)[..., None]
    want = (weights * o.double()).sum(0)
    torch.ops.folio.merge_state(v_a=o[0], s_a=s[0], v_b=o[1], s_b=s[1], v_out=o[0], s_out=s[0])
    close(o[0], want)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def filled(*shape, dtype=torch.int32):
    """An output that nobody has written."""
    return torch.full(shape, -9, dtype=dtype)


def test_lengths_and_lists_of_a_step_in_a_compiled_function():
    @torch.compile(fullgraph=True)
    def step(table, qo_len, cached_len):
        qo_indptr, kv_len, kv_indptr, last = filled(3), filled(2), filled(3), filled(2)
        indices, slots, positions, back = filled(5), filled(5), filled(5), filled(2, 3)
        torch.ops.folio.batch_lengths(qo_len=qo_len, cached_len=cached_len, qo_indptr=qo_indptr, kv_len=kv_len)
        torch.ops.folio.kv_indices(
            block_table=table, kv_len=kv_len, kv_indptr=kv_indptr, kv_indices=indices, last_page_len=last, page_size=4
        )
        torch.ops.folio.slot_mapping(
            block_table=table,
            qo_indptr=qo_indptr,
            kv_len=kv_len,
            slot_mapping=slots,
            positions=positions,
            page_size=4,
        )
        torch.ops.folio.block_table(kv_indptr=kv_indptr, kv_indices=indices, block_table=back, fill=-1)
        return qo_indptr, kv_len, kv_indptr, last, indices, slots, positions, back

    got = step(torch.tensor([[4, 7, 0], [2, 0, 0]], dtype=torch.int32), int32(3, 1), int32(5, 0))
    assert [tensor.tolist() for tensor in got] == [
        [0, 3, 4],
        [8, 1],
        [0, 2, 3],
        [4, 1],
        [4, 7, 2, -9, -9],
        [29, 30, 31, 8, -1],
        [5, 6, 7, 0, -1],
        [[4, 7, -1], [2, -1, -1]],
    ]


def test_slots_of_drafts():
    indptr, indices = filled(2, 3), filled(2, 10)
    torch.ops.folio.draft_kv_indices(
        req_to_token=torch.arange(100, 110, dtype=torch.int32)[None],
        kv_len=int32(3),
        kv_indptr=indptr,
        kv_indices=indices,
        topk=2,
        num_steps=2,
        slot_layout="branch_major",
    )
    assert indptr.tolist() == [[0, 4, 8], [0, 5, 10]]
    assert indices.tolist() == [
        [100, 101, 102, 103, 100, 101, 102, 105, -9, -9],
        [100, 101, 102, 103, 104, 100, 101, 102, 105, 106],
    ]


def test_tree_masks():
    tree, positions = filled(1, 4, 4, dtype=torch.int8).view(torch.uint8), filled(1, 4)
    torch.ops.folio.tree_mask(
        parents=int32(-1, 0, 0, 1)[None], prefix_lens=int32(2), tree_mask=tree, positions=positions
    )
    assert tree.tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]
    assert positions.tolist() == [[2, 3, 3, 4]]


def test_context_parallelism():
    """Two ranks that hold the keys of two requests, of five and two tokens, in turn."""
    gathered = torch.arange(2 * 4 * 8, dtype=torch.float32).view(2, 4, 8)
    dst = torch.zeros(7, 8)
    torch.ops.folio.cp_reorder(
        gathered=gathered,
        dst=dst,
        context_lens=int32(5, 2),
        cu_seq_lens=int32(0, 5, 7),
        cu_padded_lens=int32(0, 3, 4),
        local_start=0,
    )
    assert torch.equal(dst, torch.cat([gathered[0, :3], gathered[1, :2], gathered[0, 3:], gathered[1, 3:]]))

    lse_all, o = torch.randn(2, 7, HEADS), torch.randn(7, HEADS, DIM)
    lse_all[1, 0] = -torch.inf
    scaled, lse = torch.empty_like(o), torch.empty(7, HEADS)
    torch.ops.folio.cp_correct(lse_all=lse_all, o=o, o_out=scaled, lse_out=lse, rank=1)
    total = torch.logsumexp(lse_all.double(), 0)
    close(lse, total)
    close(scaled, o.double() * (lse_all[1].double() - total).exp()[..., None])


LATENT, NOPE, ROPE, VALUE, CHUNK = 64, 32, 16, 24, 24


@pytest.mark.parametrize("compiled", [False, True])
def test_the_steps_of_mlas_context(device, compiled):
    """Eager and compiled steps give what a run gives."""
    rows, keys = zip(*LENGTHS)
    tokens = sum(rows)
    # CUDA has no float32 for MLA.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def randn(*shape):
        return torch.randn(*shape).to(dtype)

    def zeros(*shape):
        return torch.zeros(*shape, dtype=dtype)

    made = randn(tokens, HEADS, 2 * NOPE + ROPE + VALUE)
    q, k_nope, v = made.split([NOPE + ROPE, NOPE, VALUE], dim=-1)
    k_rope, kv = randn(tokens, ROPE), randn(PAGES, PAGE, LATENT + ROPE)
    w_uk, w_uv = randn(HEADS, NOPE, LATENT) / 8, randn(HEADS, LATENT, VALUE) / 8

    def planned(**flags):
        handle = folio.MlaContext(
            folio_torch.context_of(device),
            dtype=dtype,
            num_heads=HEADS,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            kv_lora_rank=LATENT,
            page_size=PAGE,
            max_batch_size=4,
            max_num_tokens=64,
            max_kv_len=64,
            max_chunk_tokens=CHUNK,
            **flags,
        )
        host = dict(dtype=torch.int32, device="cpu")
        handle.plan(
            qo_indptr=torch.tensor([0, rows[0], sum(rows[:2]), tokens], **host),
            kv_len=torch.tensor(keys, **host),
            block_table=torch.tensor(TABLE, dtype=torch.int32),
        )
        return handle

    whole, in_steps = planned(), planned(flags="steps")
    want, want_lse = zeros(tokens, HEADS, VALUE), torch.empty(tokens, HEADS)
    arguments = dict(q=q, k_nope=k_nope, k_rope=k_rope, v=v, kv=kv)
    torch.ops.folio.mla_context(folio_torch.number_of(whole), **arguments, w_uk=w_uk, w_uv=w_uv, o=want, lse=want_lse)
    number, chunks = folio_torch.number_of(in_steps), in_steps.num_chunks()
    assert chunks > 1

    def steps(arguments, w_uk, w_uv):
        latent, rope = zeros(CHUNK, LATENT), zeros(CHUNK, ROPE)
        context_k, context_v = zeros(CHUNK, HEADS, NOPE), zeros(CHUNK, HEADS, VALUE)
        o, lse = zeros(tokens, HEADS, VALUE), torch.zeros(tokens, HEADS)
        arguments = arguments | dict(o=o, lse=lse, context_latent=latent, context_rope=rope)
        arguments |= dict(context_k_nope=context_k, context_v=context_v)
        torch.ops.folio.mla_context_new_tokens(number, **arguments)
        for chunk in range(chunks):
            torch.ops.folio.mla_context_gather(number, chunk=chunk, **arguments)
            context_k.copy_(torch.einsum("tl,hpl->thp", latent, w_uk))
            context_v.copy_(torch.einsum("tl,hlv->thv", latent, w_uv))
            torch.ops.folio.mla_context_attend(number, chunk=chunk, **arguments)
        return o, lse

    got = (torch.compile(steps, fullgraph=True) if compiled else steps)(arguments, w_uk, w_uv)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(got, (want, want_lse)):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_meta_tensors_are_taken(prefill):
    q = torch.empty(9, HEADS, DIM, device="meta")
    k = torch.empty(PAGES, PAGE, KV_HEADS, DIM, device="meta")
    torch.ops.folio.prefill(folio_torch.number_of(prefill), q=q, k=k, v=k, o=torch.empty_like(q))


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck(tensors, prefill, utility):
    q, k, v = tensors
    arguments = dict(q=q, k=k, v=v, o=torch.zeros_like(q))
    torch.library.opcheck(
        torch.ops.folio.prefill.default, (folio_torch.number_of(prefill),), arguments, test_utils=[utility]
    )


def test_unknown_handles_are_refused(tensors, prefill):
    q, k, v = tensors
    with pytest.raises(ValueError, match="handle is 0, which is no handle"):
        torch.ops.folio.prefill(0, q=q, k=k, v=v, o=torch.empty_like(q))
    with pytest.raises(ValueError, match="a Prefill; the number_of a living Decode is accepted"):
        torch.ops.folio.decode(folio_torch.number_of(prefill), q=q, k=k, v=v, o=torch.empty_like(q))


def test_failures_name_the_field_and_touch_nothing(tensors, prefill):
    q, k, v = tensors
    o = torch.full_like(q, 7.0)
    with pytest.raises(folio.Error, match="q"):
        torch.ops.folio.prefill(folio_torch.number_of(prefill), q=q[:, :2], k=k, v=v, o=o)
    assert (o == 7).all()
