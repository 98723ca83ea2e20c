"""vLLM's op signatures against the formula in float64, and what they refuse."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import folio
import oracle
import pytest
import torch

from folio_torch import vllm_ops

ONE = torch.ones(1)
BLOCKS, BLOCK, HEADS, KV_HEADS, DIM = 8, 16, 4, 2, 32
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def quantised(x, scale, dtype):
    """What an fp8 cache holds of x, by PyTorch's own rounding."""
    limit = torch.finfo(dtype).max
    return (x / scale).clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_reshape_and_cache_flash(kv_cache_dtype, heads_first):
    qkv = torch.randn(7, HEADS + 2 * KV_HEADS, DIM)
    key, value = qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
    dtype = FP8.get(kv_cache_dtype)
    shape = (BLOCKS, KV_HEADS, BLOCK, DIM) if heads_first else (BLOCKS, BLOCK, KV_HEADS, DIM)
    caches = [torch.zeros(shape, dtype=torch.uint8 if dtype else torch.float32) for _ in range(2)]
    if heads_first:
        caches = [cache.transpose(1, 2) for cache in caches]
    slots = torch.tensor([3, -1, 40, 127, 0])
    k_scale, v_scale = torch.tensor(0.5), torch.tensor([0.25, 2.0])
    before = [cache.clone() for cache in caches]
    vllm_ops.reshape_and_cache_flash(key, value, *caches, slots, kv_cache_dtype, k_scale, v_scale)
    for cache, was, new, scale in zip(caches, before, (key, value), (k_scale, v_scale[:, None])):
        want = was.clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                row = quantised(new[token], scale, dtype).view(torch.uint8) if dtype else new[token]
                want[slot // BLOCK, slot % BLOCK] = row
        assert torch.equal(cache, want)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_reshape_and_cache_of_the_first_layout(kv_cache_dtype):
    key, value = torch.randn(2, 4, KV_HEADS, DIM)
    dtype = FP8.get(kv_cache_dtype, torch.float32)
    x = 16 // dtype.itemsize
    k_cache = torch.zeros(BLOCKS, KV_HEADS, DIM // x, BLOCK, x, dtype=dtype)
    v_cache = torch.zeros(BLOCKS, KV_HEADS, DIM, BLOCK, dtype=dtype)
    slots = torch.tensor([0, 17, -1, 127])
    k_scale, v_scale = torch.tensor(0.5), torch.tensor([0.25, 2.0])
    try:
        vllm_ops.reshape_and_cache(key, value, k_cache, v_cache, slots, kv_cache_dtype, k_scale, v_scale)
    except folio.UnsupportedError as why:
        pytest.skip(str(why))
    want_k, want_v = torch.zeros(2, BLOCKS, KV_HEADS, BLOCK, DIM, dtype=dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = slot // BLOCK, slice(None), slot % BLOCK
            want_k[at] = quantised(key[token], k_scale, dtype) if dtype.itemsize == 1 else key[token]
            want_v[at] = quantised(value[token], v_scale[:, None], dtype) if dtype.itemsize == 1 else value[token]
    assert torch.equal(k_cache.permute(0, 1, 3, 2, 4).reshape(want_k.shape).float(), want_k.float())
    assert torch.equal(v_cache.transpose(2, 3).float(), want_v.float())


def test_reshape_and_cache_with_the_heads_first():
    key = torch.randn(2, KV_HEADS, DIM)
    cache = torch.zeros(2, BLOCKS, KV_HEADS, BLOCK, DIM)
    vllm_ops.reshape_and_cache(key, -key, *cache, torch.tensor([17, 3]), "auto", ONE, ONE)
    assert torch.equal(cache[0, 1, :, 1], key[0]) and torch.equal(cache[1, 0, :, 3], -key[1])
    with pytest.raises(NotImplementedError, match="key_cache is"):
        vllm_ops.reshape_and_cache(key, key, cache[0], cache[1, 1:], torch.tensor([0, 1]), "auto", ONE, ONE)


def test_copy_blocks():
    k, v = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM)
    want_k, want_v = k.clone(), v.clone()
    for cache in (want_k, want_v):
        cache[5], cache[6] = cache[1].clone(), cache[2].clone()
    vllm_ops.copy_blocks([k], [v], torch.tensor([[1, 5], [2, 6]]))
    assert torch.equal(k, want_k) and torch.equal(v, want_v)


def host_cache(*shape):
    """Memory that a device's copies can reach: page-locked where there is one."""
    pinned = torch.get_default_device().type == "cuda"
    return torch.randn(*shape, device="cpu").pin_memory() if pinned else torch.randn(*shape)


@pytest.mark.parametrize("direction", ["out", "in", "within"])
def test_swap_blocks(direction):
    """Pages whose heads come first in memory are blocks as others are."""
    device, host = (
        torch.randn(BLOCKS, BLOCK, KV_HEADS, DIM).transpose(1, 2),
        host_cache(5, BLOCK, KV_HEADS, DIM).transpose(1, 2),
    )
    src, dst = {"out": (device, host), "in": (host, device), "within": (device, device)}[direction]
    pairs = torch.tensor([[1, 3], [2, 4], [0, -1]], device="cpu")
    want = dst.clone()
    want[3], want[4] = src[1].clone(), src[2].clone()
    vllm_ops.swap_blocks(src, dst, src[0].nbytes, pairs)
    if src.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(dst, want)
    halves = torch.randn(4, BLOCK)
    want = halves.clone()
    want[3, BLOCK // 2 :] = halves[0, : BLOCK // 2]
    vllm_ops.swap_blocks(halves, halves, halves[0].nbytes // 2, torch.tensor([[0, 7]], device="cpu"))
    assert torch.equal(halves, want)


def test_swap_blocks_refuses():
    cache, pairs = torch.zeros(BLOCKS, BLOCK, DIM), torch.tensor([[0, 1]], device="cpu")
    with pytest.raises(NotImplementedError, match=r"dst has the strides .*; memory without gaps is accepted"):
        vllm_ops.swap_blocks(cache, cache[:, 1:], cache[0].nbytes, pairs)
    with pytest.raises(ValueError, match="block_size_in_bytes is 96; a divisor of the 16384 of src is accepted"):
        vllm_ops.swap_blocks(cache, cache, 96, pairs)
    if cache.is_cuda:
        with pytest.raises(NotImplementedError, match="src is on cpu in pageable memory; page-locked memory"):
            vllm_ops.swap_blocks(cache.cpu(), cache, cache[0].nbytes, pairs)


LATENT, ROPE = 64, 16


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_concat_and_cache_mla_and_gather(kv_cache_dtype):
    kv_c, k_pe = torch.randn(40, LATENT), torch.randn(40, ROPE)
    dtype, scale = FP8.get(kv_cache_dtype), torch.tensor(0.1)
    cache = torch.zeros(BLOCKS, BLOCK, LATENT + ROPE, dtype=torch.uint8 if dtype else torch.float32)
    slots = torch.randperm(BLOCKS * BLOCK)[:40]
    slots[7] = -1
    vllm_ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, kv_cache_dtype, scale)
    rows = torch.cat([kv_c, k_pe], dim=-1)
    want = torch.zeros_like(cache)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = quantised(rows[token], scale, dtype).view(torch.uint8) if dtype else rows[token]
            want[slot // BLOCK, slot % BLOCK] = row
    assert torch.equal(cache, want)

    table = torch.tensor([[3, 1, 0], [5, 2, 7]], dtype=torch.int32)
    cu_seq_lens, starts = torch.tensor([0, 20, 33], dtype=torch.int32), torch.tensor([16, 3], dtype=torch.int32)
    dst = torch.full((40, LATENT + ROPE), 7.0)
    vllm_ops.gather_and_maybe_dequant_cache(cache, dst, table, cu_seq_lens, None, 33, kv_cache_dtype, scale, starts)
    dense = cache.view(dtype).float() * scale if dtype else cache
    for request, (begin, end) in enumerate(((16, 36), (3, 16))):
        first = cu_seq_lens[request]
        assert torch.equal(dst[first : cu_seq_lens[request + 1]], oracle.paged(dense, table[request], end)[begin:])
    assert (dst[33:] == 7).all()
    if dtype is None:
        other = torch.full((33, LATENT + ROPE), 7.0)
        vllm_ops.cp_gather_cache(cache, other, table, cu_seq_lens, 2, starts)
        assert torch.equal(other, dst[:33])


@pytest.mark.parametrize("is_neox", [False, True])
def test_concat_and_cache_mla_rope_fused(is_neox):
    kv_c, k_pe, q_pe = torch.randn(5, LATENT), torch.randn(5, ROPE), torch.randn(5, HEADS, ROPE)
    angles = torch.rand(32, ROPE // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions, slots = torch.tensor([3, 9, 31, 0, 7]), torch.tensor([1, 2, 3, 20, 21])

    def rotated(x):
        cos, sin = table[positions].double().view(5, *(1,) * (x.ndim - 2), 2, ROPE // 2).unbind(-2)
        x = x.double()
        a, b = x.chunk(2, dim=-1) if is_neox else (x[..., ::2], x[..., 1::2])
        parts = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat(parts, dim=-1) if is_neox else torch.stack(parts, dim=-1).flatten(-2)

    want_q, want_k = rotated(q_pe), rotated(k_pe)
    cache = torch.zeros(BLOCKS, BLOCK, LATENT + ROPE)
    vllm_ops.concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, table, is_neox, slots, cache, "auto", ONE)
    for got, want in ((q_pe, want_q), (k_pe, want_k)):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    stored = cache.view(-1, LATENT + ROPE)[slots]
    assert torch.equal(stored[:, :LATENT], kv_c) and torch.equal(stored[:, LATENT:], k_pe)


@pytest.mark.parametrize("with_context", [None, 0, 9])
def test_merge_attn_states(with_context):
    prefix, suffix = torch.randn(2, 13, HEADS, DIM)
    prefix_lse, suffix_lse = torch.randn(2, HEADS, 13) * 3
    prefix_lse[1, 4] = torch.inf  # how FlashAttention-2 says that there were no keys
    prefix_lse[3, 2] = -torch.inf
    if with_context != 0:
        suffix_lse[2, 5] = torch.inf
    if with_context is not None:
        prefix[with_context:], prefix_lse[:, with_context:] = torch.nan, torch.nan
    lses = torch.stack([prefix_lse, suffix_lse]).double().transpose(1, 2)
    lses = torch.where(torch.isfinite(lses), lses, -torch.inf)
    weights = torch.softmax(lses, dim=0)[..., None]
    parts = torch.where(weights > 0, torch.stack([prefix, suffix]).double(), 0.0)
    output, output_lse = torch.empty(13, HEADS, DIM), torch.empty(HEADS, 13)
    vllm_ops.merge_attn_states(output, prefix, prefix_lse, suffix, suffix_lse, output_lse, with_context)
    torch.testing.assert_close(output.double(), (weights * parts).sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output_lse.double(), torch.logsumexp(lses, 0).transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_merge_attn_states_to_fp8():
    prefix, suffix = torch.randn(2, 5, HEADS, DIM)
    lses = torch.zeros(2, HEADS, 5)
    output = torch.empty(5, HEADS, DIM, dtype=torch.float8_e4m3fn)
    vllm_ops.merge_attn_states(output, prefix, lses[0], suffix, lses[1], output_scale=torch.tensor(0.05))
    want = (prefix + suffix).double() / 2
    torch.testing.assert_close(output.double() * 0.05, want, rtol=0.07, atol=1e-3)


LENGTHS = ((3, 20), (1, 33), (5, 5))
TABLE = [[3, 1, 0], [2, 4, 5], [7, 0, 0]]
#: Options that are tensors.
TENSORS = ("alibi_slopes", "s_aux", "dynamic_causal")


def varlen(**options):
    """A call over a paged cache, and what it should give."""
    rows, keys = zip(*LENGTHS)
    q = torch.randn(sum(rows), HEADS, DIM)
    k, v = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM)
    causal, table = options.get("causal", False), torch.tensor(TABLE, dtype=torch.int32)
    options = {name: torch.tensor(x) if name in TENSORS else x for name, x in options.items()}
    cu_seqlens_q = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    call = dict(q=q, k=k, v=v, max_seqlen_q=max(rows), cu_seqlens_q=cu_seqlens_q, max_seqlen_k=max(keys))
    call |= dict(seqused_k=torch.tensor(keys, dtype=torch.int32), block_table=table, return_softmax_lse=True)
    parts = []
    for request, (begin, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist())):
        dense = [oracle.paged(cache, table[request], keys[request]) for cache in (k, v)]
        parts.append(
            oracle.attention(
                q[begin:end],
                *dense,
                sm_scale=options.get("softmax_scale") or DIM**-0.5,
                causal=options["dynamic_causal"][request] if "dynamic_causal" in options else causal,
                window=options.get("window_size"),
                cap=options.get("softcap", 0.0),
                slopes=options.get("alibi_slopes"),
                sinks=options.get("s_aux"),
            )
        )
    o, lse = (torch.cat(part) for part in zip(*parts))
    return call | options, o, lse.transpose(0, 1)


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True),
        dict(causal=False),
        dict(causal=True, softmax_scale=0.3, softcap=5.0),
        dict(causal=True, window_size=[7, 0]),
        dict(causal=False, window_size=[4, 2]),
        dict(causal=True, alibi_slopes=[0.5, 0.25, 0.1, 0.05]),
        dict(causal=True, s_aux=[0.5, -1.0, 2.0, 0.0]),
        dict(dynamic_causal=[True, False, False]),
    ],
    ids=str,
)
def test_flash_attn_varlen_func(options):
    call, want, want_lse = varlen(**options)
    o, lse = vllm_ops.flash_attn_varlen_func(**call)
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-6)


def test_flash_attn_varlen_func_over_packed_keys():
    lengths = torch.tensor([4, 1, 9])
    cu_seqlens = torch.tensor([0, 4, 5, 14], dtype=torch.int32)
    q, (k, v) = torch.randn(14, HEADS, DIM), torch.randn(2, 14, KV_HEADS, DIM)
    out = torch.empty_like(q)
    o = vllm_ops.flash_attn_varlen_func(q, k, v, 9, cu_seqlens, 9, cu_seqlens_k=cu_seqlens, out=out, causal=True)
    assert o is out
    rows = [tensor.split(lengths.tolist()) for tensor in (q, k, v)]
    want = torch.cat([oracle.attention(*parts, sm_scale=DIM**-0.5)[0] for parts in zip(*rows)])
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [[-1, -1], [-1, 0], [0, 0], [7, -1]], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["paged", "packed"])
def test_flash_attn_varlen_func_plans_for_its_window(monkeypatch, window, packed):
    """Calls with other windows come between, of the same handle."""
    planned = []
    plan = folio.Prefill.plan

    def spy(self, **batch):
        planned.append(batch.get("window_left", -1))
        plan(self, **batch)

    monkeypatch.setattr(folio.Prefill, "plan", spy)
    for size in (window, [3, 0], window):
        call, want, _ = varlen(causal=True, window_size=size)
        if packed:
            keys = torch.tensor([keys for _, keys in LENGTHS])
            cu_seqlens_k = torch.cat([keys.new_zeros(1), keys.cumsum(0)]).to(torch.int32)
            k, v = (
                torch.cat([oracle.paged(call[x], ids, n) for ids, n in zip(call["block_table"], keys.tolist())])
                for x in "kv"
            )
            call |= dict(k=k, v=v, cu_seqlens_k=cu_seqlens_k, seqused_k=None, block_table=None)
        o, _ = vllm_ops.flash_attn_varlen_func(**call)
        torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=2e-6)
    assert planned == [window[0], 3, window[0]]


def test_flash_attn_varlen_func_reads_fp8_caches():
    call, _, _ = varlen(causal=True)
    k, v = (quantised(call[name], 0.5, torch.float8_e4m3fn) for name in "kv")
    exact = vllm_ops.flash_attn_varlen_func(
        **call | dict(k=k.float() * 0.5, v=v.float() * 0.5, return_softmax_lse=False)
    )
    expanded = torch.tensor([0.5]).expand(3, KV_HEADS)
    for scale in (expanded, expanded.contiguous()):
        o = vllm_ops.flash_attn_varlen_func(
            **call | dict(k=k, v=v, k_descale=scale, v_descale=scale, return_softmax_lse=False)
        )
        torch.testing.assert_close(o, exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_flash_attn_varlen_func_takes_fp8_queries(dtype, kv_dtype):
    """Its default output is bfloat16, and others may be brought."""
    call, _, _ = varlen(causal=True)
    q, k, v = (quantised(call[x], 0.5, t) for x, t in zip("qkv", (dtype, kv_dtype, kv_dtype)))
    factors = {name: torch.rand(3, KV_HEADS) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    parts, begin = [], 0
    for request, (rows, keys) in enumerate(LENGTHS):
        q_scale, k_scale, v_scale = (factor[request][:, None] for factor in factors.values())
        dense = [
            oracle.paged(c.float(), call["block_table"][request], keys) * s for c, s in ((k, k_scale), (v, v_scale))
        ]
        queries = q[begin : begin + rows].float() * q_scale.repeat_interleave(HEADS // KV_HEADS, 0)
        parts.append(oracle.attention(queries, *dense, sm_scale=DIM**-0.5)[0])
        begin += rows
    want = torch.cat(parts)
    call |= dict(q=q, k=k, v=v, return_softmax_lse=False, **factors)
    o = vllm_ops.flash_attn_varlen_func(**call)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.double(), want, rtol=0.02, atol=0.02)
    out = torch.empty(q.shape, dtype=torch.float32)
    assert vllm_ops.flash_attn_varlen_func(**call, out=out) is out
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)


def test_flash_attn_varlen_func_ignores_scales_of_queries_that_are_not_fp8():
    call, want, _ = varlen(causal=True)
    o, _ = vllm_ops.flash_attn_varlen_func(**call, q_descale=torch.full((3, KV_HEADS), 7.0))
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("own", [True, False], ids=["own output", "given output"])
def test_flash_attn_varlen_func_writes_fp8(own):
    call, want, _ = varlen(causal=True)
    call |= dict(return_softmax_lse=False, output_scale=torch.tensor(0.03))
    if not own:
        call["out"] = torch.zeros(want.shape, dtype=torch.uint8)
    o = vllm_ops.flash_attn_varlen_func(**call)
    torch.testing.assert_close(o.view(torch.float8_e4m3fn).double() * 0.03, want, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        dict(dropout_p=0.1),
        dict(q_v=torch.zeros(1)),
        dict(cp_world_size=2),
        dict(return_attn_probs=True),
        dict(mask_mod=lambda *_: True),
        dict(causal=False, alibi_slopes=torch.ones(HEADS)),
    ],
    ids=lambda options: next(iter(options)),
)
def test_flash_attn_varlen_func_refuses(options):
    call, _, _ = varlen()
    with pytest.raises(NotImplementedError, match="accepted by Folio"):
        vllm_ops.flash_attn_varlen_func(**call | options)


def test_unknown_cache_types_are_refused():
    key, cache = torch.randn(1, KV_HEADS, DIM), torch.zeros(2, BLOCKS, BLOCK, KV_HEADS, DIM)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is 'int8'"):
        vllm_ops.reshape_and_cache_flash(key, key, *cache, torch.tensor([0]), "int8", ONE, ONE)


def functions(path):
    """The parameters of a module's functions, with the source of their defaults. The module is read, not imported."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names, defaults = [argument.arg for argument in node.args.args], [*map(ast.unparse, node.args.defaults)]
            found[node.name] = [*zip(names, [None] * (len(names) - len(defaults)) + defaults)]
    return found


@pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM to compare with")
def test_signatures_are_those_of_the_installed_vllm():
    """Names, order and defaults; `copy_blocks` is of versions before 0.32, and `fa_version` has a name for its default."""
    vllm = Path(find_spec("vllm").origin).parent
    theirs = functions(vllm / "_custom_ops.py") | functions(vllm / "vllm_flash_attn/flash_attn_interface.py")
    ours = functions(Path(inspect.getsourcefile(vllm_ops)))
    public = [name for name in ours if not name.startswith("_") and name != "copy_blocks"]
    assert "reshape_and_cache_flash" in public and "flash_attn_varlen_func" in public
    for name in public:
        own = [("fa_version", "DEFAULT_FA_VERSION") if one[0] == "fa_version" else one for one in ours[name]]
        assert own == theirs[name], name
