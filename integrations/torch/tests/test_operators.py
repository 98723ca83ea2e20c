"""torch.ops.folio: the same results as folio's own functions and the formula, eager, compiled and exported."""

import folio
import oracle
import pytest
import torch
from folio._binding import OUTPUT, InPlace
from folio._generated import structs

import folio_torch
from folio_torch.operators import HANDLES, OPERATORS

PAGE, PAGES, HEADS, KV_HEADS, DIM = 16, 8, 4, 2, 32
LENGTHS = ((3, 20), (1, 33), (5, 5))
TABLE = [[3, 1, 0], [2, 4, 5], [7, 0, 0]]
SCALE = DIM**-0.5


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    rows = sum(rows for rows, _ in LENGTHS)
    return torch.randn(rows, HEADS, DIM), *(torch.randn(PAGES, PAGE, KV_HEADS, DIM) for _ in range(2))


@pytest.fixture
def prefill(device):
    handle = folio.Prefill(
        folio_torch.context_of(device),
        q_dtype=torch.float32,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        page_size=PAGE,
        max_batch_size=4,
        max_num_tokens=64,
        max_kv_len=64,
    )
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
    for name, (_, outputs) in HANDLES.items():
        args = {"mla": structs.MLA_ARGS, "mla_context": structs.MLA_CONTEXT_ARGS}.get(name, structs.ATTENTION_ARGS)
        written = {f for f, kind in args._fields if kind is OUTPUT}
        assert written - {"context_latent", "context_rope"} == set(outputs), name


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
