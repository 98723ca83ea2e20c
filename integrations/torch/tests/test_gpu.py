"""Operators on a GPU's streams and in CUDA graphs. What they compute there is in the other files, on both devices."""

import devices
import folio
import oracle
import pytest
import torch

import folio_torch
from folio_torch import vllm_ops

PAGE, PAGES, HEADS, KV_HEADS, DIM = 16, 8, 8, 2, 64
TABLE, OTHER_TABLE = [[3, 1, 0], [2, 4, 5], [7, 0, 0]], [[0, 2, 1], [7, 6, 3], [4, 0, 0]]
ROWS = (3, 1, 5)


@pytest.fixture(autouse=True)
def device():
    yield from devices.one_after_the_other("cuda")


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def offsets(lengths):
    return int32([0, *lengths]).cumsum(0).to(torch.int32)


def late(tensor):
    """A copy that the current stream makes in 10 ms; NaN until then."""
    copy = torch.full_like(tensor, torch.nan)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    return copy.copy_(tensor)


def captured(function):
    """A graph of a function, which ran once before."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    return graph


class Step:
    """Tensors of a step in bfloat16, and what its lengths and page ids should give."""

    def __init__(self):
        torch.manual_seed(0)
        self.q = torch.randn(sum(ROWS), HEADS, DIM, dtype=torch.bfloat16)
        self.k, self.v = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)
        self.o = torch.full_like(self.q, torch.nan)
        self.cu_seqlens = offsets(ROWS)

    def check(self, keys, table=TABLE):
        parts = []
        for rows, length, ids in zip(self.q.split(ROWS), keys, table):
            dense = (oracle.paged(cache, torch.tensor(ids), length) for cache in (self.k, self.v))
            parts.append(oracle.attention(rows, *dense, sm_scale=DIM**-0.5)[0])
        assert (self.o.double() - torch.cat(parts)).abs().max() < 1.6e-2
        self.o.fill_(torch.nan)


def handle(device, **more):
    return folio.Prefill(
        folio_torch.context_of(device),
        q_dtype=torch.bfloat16,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        page_size=PAGE,
        max_batch_size=4,
        max_num_tokens=64,
        max_kv_len=64,
        **more,
    )


def test_operators_take_the_current_stream(device):
    step, prefill = Step(), handle(device)
    prefill.plan(qo_indptr=step.cu_seqlens, kv_len=int32((20, 33, 5)), block_table=int32(TABLE))
    torch.ops.folio.prefill(folio_torch.number_of(prefill), q=late(step.q), k=step.k, v=step.v, o=step.o)
    step.check((20, 33, 5))


def test_captured_runs_compute_the_plan_in_force(device):
    step, prefill = Step(), handle(device, flags="graph")
    number, table = folio_torch.number_of(prefill), int32(TABLE)
    keys = int32((20, 33, 5))
    prefill.plan(qo_indptr=step.cu_seqlens, kv_len=keys, block_table=table)
    graph = captured(lambda: torch.ops.folio.prefill(number, q=step.q, k=step.k, v=step.v, o=step.o))
    for lengths in ((20, 33, 5), (48, 7, 16)):
        step.q.normal_()
        prefill.plan(qo_indptr=step.cu_seqlens, kv_len=int32(lengths), block_table=table)
        graph.replay()
        step.check(lengths)


def test_vllms_attention_plans_in_its_capture():
    """Graphs of two tables, replayed in turn, with eager calls between."""
    step = Step()
    keys, tables = int32((20, 33, 5)), (int32(TABLE), int32(OTHER_TABLE))

    def attend(table):
        return vllm_ops.flash_attn_varlen_func(
            step.q, step.k, step.v, 5, step.cu_seqlens, 48, seqused_k=keys, block_table=table, causal=True, out=step.o
        )

    graphs = [captured(lambda table=table: attend(table)) for table in tables]
    for lengths in ((20, 33, 5), (48, 7, 16)):
        keys.copy_(int32(lengths))
        for graph, table, ids in zip(graphs, tables, (TABLE, OTHER_TABLE)):
            graph.replay()
            step.check(lengths, ids)
            attend(table.clone())
            step.check(lengths, ids)


def test_captured_operators():
    key, value, late_key = torch.randn(3, 4, KV_HEADS, DIM)
    caches, slots = torch.zeros(2, PAGES, PAGE, KV_HEADS, DIM), torch.tensor([5, -1, 17, 90])
    one = torch.ones(1)
    graph = captured(lambda: vllm_ops.reshape_and_cache_flash(key, value, *caches, slots, "auto", one, one))
    caches.zero_()
    key.copy_(late_key)
    slots.copy_(torch.tensor([6, 0, -1, 91]))
    graph.replay()
    want = torch.zeros(PAGES * PAGE, KV_HEADS, DIM)
    want[[6, 0, 91]] = late_key[[0, 1, 3]]
    assert torch.equal(caches[0].flatten(0, 1), want)

    v, s, out = torch.randn(2, 7, HEADS, DIM), torch.randn(2, HEADS, 7), torch.empty(7, HEADS, DIM)
    graph = captured(lambda: vllm_ops.merge_attn_states(out, v[0], s[0], v[1], s[1]))
    v.normal_()
    graph.replay()
    weights = torch.softmax(s.double(), 0).transpose(1, 2)[..., None]
    torch.testing.assert_close(out.double(), (weights * v.double()).sum(0), rtol=1e-5, atol=1e-6)


def test_a_compiled_layer_can_be_captured(device):
    step, prefill = Step(), handle(device, flags="graph")
    number = folio_torch.number_of(prefill)
    prefill.plan(qo_indptr=step.cu_seqlens, kv_len=int32((20, 33, 5)), block_table=int32(TABLE))

    @torch.compile(fullgraph=True)
    def layer(q, k, v, o):
        torch.ops.folio.prefill(number, q=q * 2, k=k, v=v, o=o)

    queries = step.q
    graph = captured(lambda: layer(queries, step.k, step.v, step.o))
    queries.normal_()
    graph.replay()
    step.q = queries * 2
    step.check((20, 33, 5))
