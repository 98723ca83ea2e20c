"""The package on a GPU, with torch's tensors: what the calls compute, on which stream, and inside CUDA graphs.

Skipped without torch and a GPU. test_cuda.py asks a driver that computes nothing what it is called with.
"""

import numpy as np
import pytest
from batches import Batch, batch
from oracle import attend

import folio

try:
    import torch
except ImportError:
    torch = None

pytestmark = pytest.mark.skipif(torch is None or not torch.cuda.is_available(), reason="no GPU, or no torch to use it")

PAGE, HEADS, KV_HEADS = 16, 8, 2
ROWS, KEYS = (1, 20, 5, 1, 33), (40, 20, 77, 1, 300)
#: How far a bfloat16 output of about 1 may be from the formula, as in test_attention.py.
TOLERANCE = 1.6e-2


@pytest.fixture(scope="module")
def gpu():
    with folio.Context("cuda") as context:
        yield context


@pytest.fixture(autouse=True)
def stream():
    """The current stream of a test is not the default one."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        yield side
    torch.cuda.synchronize()


def late(array, dtype=None):
    """A copy on the device that the current stream makes a while from now. Until then it is NaN (-1 for integers), so
    that work which does not wait for the current stream shows."""
    source = torch.as_tensor(array).to("cuda", dtype)
    return write_late(torch.empty_like(source), source)


def write_late(target, source):
    """As `late`, to memory that is there."""
    target.copy_(torch.full(source.shape, torch.nan if source.dtype.is_floating_point else -1, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # 10 ms
    return target.copy_(source)


def host(tensor):
    return tensor.double().cpu().numpy()


class Problem:
    """A random batch, whose queries and cache are in bfloat16 on the device, and what the formula says of it."""

    def __init__(self, rng, rows=ROWS, keys=KEYS, dim=128, share=0):
        made = batch(rng, rows, keys, heads=HEADS, kv_heads=KV_HEADS, dim=dim, page_size=PAGE)
        for pages in made.pages[1:]:
            pages[: share // PAGE] = made.pages[0][: share // PAGE]
        self.q, self.k, self.v = (torch.tensor(x).to("cuda", torch.bfloat16) for x in (made.q, made.k, made.v))
        self.made = Batch(made.qo_lens, made.kv_lens, PAGE, made.pages, *map(host, (self.q, self.k, self.v)))
        self.o = torch.full_like(self.q, torch.nan)
        self.lse = torch.full(self.q.shape[:2], torch.nan, device="cuda")

    def desc(self, **more):
        return dict(
            q_dtype=torch.bfloat16,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim_qk=self.q.shape[-1],
            page_size=PAGE,
            max_batch_size=8,
            max_kv_len=512,
            **more,
        )

    def prefill(self, gpu, **more):
        return folio.Prefill(gpu, max_num_tokens=128, **self.desc(**more))

    def lengths(self):
        return dict(kv_len=self.made.kv_len, block_table=self.made.block_table)

    def tensors(self):
        return dict(q=self.q, k=self.k, v=self.v, o=self.o, lse=self.lse)

    def check(self, made=None, **formula):
        made = made or self.made
        parts = [
            attend(made.q[made.rows(b)], made.keys(made.k, b), made.keys(made.v, b), **formula)
            for b in range(len(made.kv_lens))
        ]
        o, lse = (np.concatenate(part) for part in zip(*parts))
        assert np.abs(host(self.o)[: len(o)] - o).max() <= TOLERANCE
        np.testing.assert_allclose(host(self.lse)[: len(o)], lse, rtol=0, atol=TOLERANCE)


def forms(made):
    """The forms of a page table, as keyword arguments of a plan."""
    last = np.array([(kv_len - 1) % PAGE + 1 for kv_len in made.kv_lens], np.int32)
    csr = dict(kv_indptr=made.kv_indptr, kv_indices=made.kv_indices)
    return (
        dict(kv_len=made.kv_len, block_table=made.block_table),
        {**csr, "kv_len": made.kv_len},
        {**csr, "last_page_len": last},
    )


def test_decode_on_the_current_stream(gpu, rng):
    problem = Problem(rng, [1] * 5, [1, 16, 37, 150, 300])
    handle = folio.Decode(gpu, **problem.desc())
    assert handle.kernel.startswith("decode_sm")
    problem.q = late(problem.q)
    for form in forms(problem.made):
        # The first plan allocates, whatever torch's default device is.
        with torch.device("cuda"):
            handle.plan(**form, stream=torch.cuda.current_stream())
        handle.run(**problem.tensors())
        problem.check()


def test_prefill_of_a_mixed_batch(gpu, rng):
    problem = Problem(rng)
    handle = problem.prefill(gpu)
    problem.q = late(problem.q)
    handle.plan(
        qo_indptr=torch.tensor(problem.made.qo_indptr), **{n: torch.tensor(t) for n, t in problem.lengths().items()}
    )
    handle.run(**problem.tensors())
    problem.check()


def test_scores_of_one_plan(gpu, rng):
    problem = Problem(rng, dim=64)
    handle = problem.prefill(gpu)
    handle.plan(qo_indptr=problem.made.qo_indptr, **problem.lengths(), stream=torch.cuda.current_stream())
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.05, 0.5, 0.25, 0.1, 0.05], device="cuda")
    sinks = torch.randn(HEADS, device="cuda")
    for options, formula in (
        (dict(mask_mode="full"), dict(sees=lambda p, j: True)),
        (dict(flags="window", window_left=7, window_right=-1), dict(sees=lambda p, j: p - 7 <= j <= p)),
        (dict(logits_soft_cap=1.5), dict(soft_cap=1.5)),
        (dict(alibi_slopes=slopes), dict(slopes=host(slopes))),
        (dict(sinks=sinks), dict(sinks=host(sinks))),
    ):
        problem.o.fill_(torch.nan)
        handle.run(**problem.tensors(), **options)
        problem.check(**formula)


@pytest.mark.parametrize("ids_only", [False, True])
def test_lengths_on_the_device(gpu, rng, ids_only):
    problem = Problem(rng)
    handle = problem.prefill(gpu)
    lengths = dict(qo_indptr=problem.made.qo_indptr, **problem.lengths())
    on_device = {name: late(t) for name, t in lengths.items() if not ids_only or name == "block_table"}
    handle.plan(**lengths | on_device)
    handle.run(**problem.tensors())
    problem.check()


def test_fp8_caches(gpu, rng):
    problem = Problem(rng, [1] * 4, [1, 16, 37, 150])
    handle = folio.Decode(gpu, **problem.desc(kv_dtype=torch.float8_e4m3fn))
    k, v = (x.to(torch.float8_e4m3fn) for x in (problem.k, problem.v))
    made = problem.made
    exact = Batch(made.qo_lens, made.kv_lens, PAGE, made.pages, made.q, host(k.float()) * 0.5, host(v.float()) * 2)
    problem.k, problem.v = late(k.view(torch.uint8)), folio.Tensor(late(v.view(torch.uint8)), dtype="float8_e4m3fn")
    handle.plan(**problem.lengths(), stream=torch.cuda.current_stream())
    handle.run(**problem.tensors(), k_scale=0.5, v_scale=2.0)
    problem.o /= 2
    exact.v = exact.v / 2
    problem.check(exact)


def test_cascade(gpu, rng):
    problem = Problem(rng, [1, 3, 1, 1], [280, 270, 300, 265], share=256)
    handle = folio.Cascade(gpu, max_num_tokens=8, **problem.desc())
    handle.plan(
        qo_indptr=problem.made.qo_indptr,
        **problem.lengths(),
        prefixes=dict(common_prefix_len=256),
        stream=torch.cuda.current_stream(),
    )
    problem.q = late(problem.q)
    handle.run(**problem.tensors())
    problem.check()


def test_mla(gpu, rng):
    heads, latent, rope, rows, keys = 16, 512, 64, [1, 2, 1], [40, 130, 300]
    made = batch(rng, rows, keys, heads=heads, kv_heads=1, dim=latent + rope, page_size=PAGE)
    q, kv = (torch.tensor(x).to("cuda", torch.bfloat16) for x in (made.q, made.k[:, :, 0]))
    made = Batch(rows, keys, PAGE, made.pages, host(q), host(kv)[:, :, None], None)
    handle = folio.Mla(
        gpu,
        q_dtype="bfloat16",
        num_heads=heads,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        page_size=PAGE,
        max_batch_size=4,
        max_qo_len=2,
        max_kv_len=512,
    )
    o, lse = (
        torch.full((len(q), heads, latent), torch.nan, device="cuda", dtype=q.dtype),
        torch.empty(len(q), heads, device="cuda"),
    )
    q = late(q)
    handle.plan(
        qo_indptr=made.qo_indptr, kv_len=made.kv_len, block_table=made.block_table, stream=torch.cuda.current_stream()
    )
    handle.run(q_latent=q[..., :latent], q_rope=q[..., latent:], kv=kv, o=o, lse=lse, sm_scale=0.07)
    for b in range(3):
        records = made.keys(made.k, b)
        want, want_lse = attend(made.q[made.rows(b)], records, records[..., :latent], sm_scale=0.07)
        assert np.abs(host(o)[made.rows(b)] - want).max() <= TOLERANCE
        np.testing.assert_allclose(host(lse)[made.rows(b)], want_lse, rtol=0, atol=TOLERANCE)


def test_operators_of_the_cache(gpu):
    key, value = torch.randn(2, 40, KV_HEADS, 64, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = torch.zeros(2, 8, PAGE, KV_HEADS, 64, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(8 * PAGE, device="cuda")[:40]
    want = k_cache.clone().view(-1, KV_HEADS, 64).index_copy_(0, slots, key).view(k_cache.shape)
    folio.kv_append(gpu, key=late(key), value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=late(slots))
    assert torch.equal(k_cache, want)

    table = torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
    dense = torch.zeros(2, 37, KV_HEADS, 64, device="cuda")
    folio.kv_gather(
        gpu,
        key=dense[0],
        value=dense[1],
        k_cache=late(k_cache),
        v_cache=v_cache,
        cu_seq_lens=late(torch.tensor([0, 20, 37], dtype=torch.int32)),
        block_table=late(table),
    )
    for got, cache in zip(dense, (k_cache, v_cache)):
        rows = [cache[ids.long().cuda()].flatten(0, 1)[:n] for ids, n in zip(table, (20, 17))]
        assert torch.equal(got, torch.cat(rows).float())

    listed, indptr = (torch.full((n,), -7, dtype=torch.int32, device="cuda") for n in (8, 3))
    folio.kv_indices(
        gpu,
        block_table=late(table),
        kv_len=late(torch.tensor([33, 17], dtype=torch.int32)),
        kv_indptr=indptr,
        kv_indices=listed,
        page_size=PAGE,
    )
    assert indptr.tolist() == [0, 3, 5] and listed.tolist() == [3, 1, 0, 5, 2, -7, -7, -7]


def test_pages_are_swapped_to_page_locked_memory(gpu):
    pages = torch.randn(8, PAGE, KV_HEADS, 64, device="cuda", dtype=torch.bfloat16)
    swapped = torch.zeros(4, PAGE, KV_HEADS, 64, dtype=torch.bfloat16, pin_memory=True)
    want = pages[[5, 2]].cpu()
    folio.kv_copy(
        gpu, k_src=late(pages), k_dst=folio.Tensor(swapped, device="cuda_host"), page_pairs=np.array([[5, 0], [2, 3]])
    )
    torch.cuda.current_stream().synchronize()
    assert torch.equal(swapped[[0, 3]], want) and not swapped[1:3].any()


def test_merges(gpu):
    v, s = torch.randn(9, 3, HEADS, 128, device="cuda"), torch.randn(9, 3, HEADS, device="cuda") * 3
    want = (torch.softmax(s.double(), 1)[..., None] * v.double()).sum(1)
    o, lse = torch.empty(9, HEADS, 128, device="cuda"), torch.empty(9, HEADS, device="cuda")
    folio.merge_states(gpu, v=late(v), s=late(s), v_out=o, s_out=lse)
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), torch.logsumexp(s.double(), 1), rtol=1e-5, atol=1e-5)
    o.fill_(torch.nan)
    folio.merge_state(gpu, v_a=late(v[:, 0]), s_a=s[:, 0], v_b=v[:, 1], s_b=s[:, 1], v_out=o)
    want = (torch.softmax(s[:, :2].double(), 1)[..., None] * v[:, :2].double()).sum(1)
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)


def captured(function):
    """A graph of a function, which ran once before for what loads lazily."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    return graph


def test_a_captured_run_computes_the_plan_in_force(gpu, rng):
    problem = Problem(rng, [1] * 4, [40, 20, 77, 300])
    handle = folio.Decode(gpu, **problem.desc(flags="graph"))
    lengths = problem.lengths()
    handle.plan(**lengths, stream=torch.cuda.current_stream())
    graph = captured(lambda: handle.run(**problem.tensors()))
    for keys in ([40, 20, 77, 300], [33, 1, 70, 299]):
        problem.made.kv_lens = keys
        handle.plan(
            kv_len=np.array(keys, np.int32), block_table=lengths["block_table"], stream=torch.cuda.current_stream()
        )
        problem.o.fill_(torch.nan)
        graph.replay()
        problem.check()


def test_a_captured_plan_reads_lengths_on_the_device(gpu, rng):
    problem = Problem(rng)
    handle = problem.prefill(gpu, flags="graph")
    lengths = {
        name: torch.tensor(t).cuda() for name, t in dict(qo_indptr=problem.made.qo_indptr, **problem.lengths()).items()
    }

    def step():
        handle.plan(**lengths)
        handle.run(**problem.tensors())

    graph = captured(step)
    for keys in (list(KEYS), [33, 20, 70, 1, 299]):
        problem.made.kv_lens = keys
        lengths["kv_len"].copy_(late(np.array(keys, np.int32)))
        problem.o.fill_(torch.nan)
        graph.replay()
        problem.check()


def test_what_cannot_be_captured_is_refused(gpu, rng):
    problem = Problem(rng, [1] * 4, [40, 20, 77, 300])
    handle = folio.Decode(gpu, **problem.desc(flags="graph"))
    # The first plan allocates, which torch may not do in a capture of its own kind; so a plan comes before.
    handle.plan(**problem.lengths(), stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        problem.o.fill_(7)
        with pytest.raises(folio.CaptureError):
            handle.plan(**problem.lengths(), stream=torch.cuda.current_stream())
    graph.replay()
    assert (problem.o == 7).all()


def test_prepared_calls_serve_all_plans_on_their_stream(gpu, rng):
    problem = Problem(rng, [1] * 4, [40, 20, 77, 300])
    handle = folio.Decode(gpu, **problem.desc())
    run = handle.prepare_run(**problem.tensors())
    table, own = problem.made.block_table, torch.cuda.current_stream()
    for keys in ([40, 20, 77, 300], [33, 1, 70, 299]):
        problem.made.kv_lens = keys
        write_late(problem.q, problem.q.clone())
        with torch.cuda.stream(torch.cuda.Stream()):
            handle.plan(kv_len=np.array(keys, np.int32), block_table=table, stream=own)
            run()
        problem.check()


def test_a_plan_outlives_its_handle(gpu, rng):
    """The copy of a plan has not begun when its handle ends; the memory that it is in is not given to others before."""
    problem = Problem(rng, [1] * 4, [40, 20, 77, 300])
    handle = folio.Decode(gpu, **problem.desc())
    handle.plan(**problem.lengths(), stream=torch.cuda.current_stream())
    handle.run(**problem.tensors())
    torch.cuda.synchronize()
    problem.o.fill_(torch.nan)
    torch.cuda._sleep(40_000_000)
    handle.plan(**problem.lengths(), stream=torch.cuda.current_stream())
    handle.run(**problem.tensors())
    size = handle.workspace_info.host_bytes
    handle.close()
    others = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    problem.check()
    del others


def foreign(tensor, *attributes):
    """An array of a class of its own, which has these attributes of a tensor."""
    array = type("Array", (), {})()
    for attribute in attributes:
        setattr(array, attribute, getattr(tensor, attribute))
    return array


@pytest.mark.parametrize("attributes", [("__dlpack__", "__dlpack_device__"), ("__cuda_array_interface__",)])
def test_arrays_of_other_libraries(gpu, attributes):
    """Their library tells no current stream, so it is given."""
    v, s = torch.randn(9, 3, HEADS, 128, device="cuda"), torch.randn(9, 3, HEADS, device="cuda")
    o = torch.empty(9, HEADS, 128, device="cuda")
    given = {name: foreign(tensor, *attributes) for name, tensor in dict(v=v, s=s, v_out=o).items()}
    for array in given.values():
        array.device = 0
    with pytest.raises(folio.InvalidArgumentError, match="stream is None"):
        folio.merge_states(gpu, **given)
    folio.merge_states(gpu, **given, stream=torch.cuda.current_stream())
    torch.testing.assert_close(o, (torch.softmax(s, 1)[..., None] * v).sum(1), rtol=1e-5, atol=1e-5)


def test_failures_name_the_field_and_touch_nothing(gpu, rng):
    problem = Problem(rng, [1] * 4, [40, 20, 77, 300])
    handle = folio.Decode(gpu, **problem.desc())
    with pytest.raises(folio.NotPlannedError):
        handle.run(**problem.tensors())
    handle.plan(**problem.lengths(), stream=torch.cuda.current_stream())
    problem.o.fill_(7)
    for kind, field, wrong in (
        (folio.ShapeError, "q", problem.q[:, :4]),
        (folio.DtypeError, "k", problem.k.half()),
        (folio.DeviceMismatchError, "v", problem.v.cpu()),
    ):
        with pytest.raises(kind, match=rf"\b{field}\b"):
            handle.run(**problem.tensors() | {field: wrong})
    assert (problem.o == 7).all()
    with pytest.raises(folio.NoDeviceError):
        folio.Context("cuda", device_id=torch.cuda.device_count())
