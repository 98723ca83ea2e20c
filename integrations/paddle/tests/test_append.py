"""Grouped-query attention over caches: append_attention and its variants, and gqa_rope_write_cache."""

import numpy as np
import paddle
import pytest

import folio_paddle_ops as ops
import oracle
from formats import FORMATS, Format
from paddle_devices import narrow_on_gpu
from steps import CHUNK, DECODE, DRAFT, IDLE, INACTIVE, MIXED, PROMPT, Step, array, tensor

TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 4e-2}
COMPUTE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
EPS = 1e-5


class Layer:
    """One layer's tensors, and what FastDeploy's formula makes of them."""

    def __init__(self, step, dtype="float32", heads=6, kv_heads=2, dim=32, neox=False, bias=False, norm=False, rope=True):
        self.step, self.dtype, self.heads, self.kv_heads, self.dim, self.neox = step, dtype, heads, kv_heads, dim, neox
        self.qkv = step.random([step.num_tokens, (heads + 2 * kv_heads) * dim], dtype)
        self.k_cache, self.v_cache = (step.cache([kv_heads, "BS", dim], dtype) for _ in range(2))
        self.bias = step.random([(heads + 2 * kv_heads) * dim], dtype) if bias else None
        self.norms = [step.random([dim], "float32") for _ in range(2)] if norm else [None, None]
        angles = np.outer(np.arange(step.max_blocks * step.page_size), 100.0 ** (-2 * np.arange(dim // 2) / dim))
        table = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        self.table = table.astype(np.float64)
        width = np.concatenate([table, table], -1) if neox else table
        self.rotary_embs = tensor(width[:, None, :, None, :], "float32") if rope else None
        self.caches_before = array(self.k_cache), array(self.v_cache)

    def rotated(self, round_to=None):
        """q, k, v [T, heads, dim] of new tokens, k and q after RoPE and norm."""
        step, d = self.step, self.dim
        x = array(self.qkv) + (array(self.bias) if self.bias is not None else 0)
        if self.bias is not None:
            x = array(tensor(x, self.dtype))
        q, k, v = np.split(x.reshape(step.num_tokens, -1, d), [self.heads, self.heads + self.kv_heads], axis=1)
        if self.rotary_embs is not None:
            positions = np.zeros(step.num_tokens, dtype=int)
            for token, _, position in step.tokens():
                positions[token] = position
            q, k = (oracle.rope(part, positions, self.table, self.neox) for part in (q, k))
        if self.norms[0] is not None:
            q, k = (oracle.rms_norm(array(tensor(part, self.dtype)), array(w), EPS) for part, w in zip((q, k), self.norms))
        return [array(tensor(part, self.dtype)) for part in (q, k, v)]

    def caches_after(self):
        _, k, v = self.rotated()
        after = [cache.copy() for cache in self.caches_before]
        for token, request, position in self.step.tokens():
            page, offset = self.step.place(request, position)
            for cache, new in zip(after, (k, v)):
                cache[page, :, offset] = new[token]
        return after

    def past(self, cache, request):
        """[kv_len, kv_heads, dim] of a request."""
        places = [self.step.place(request, position) for position in range(self.step.kv_len[request])]
        return np.stack([cache[page, :, offset] for page, offset in places])

    def attended(self, causal=True, window=0, sinks=None, caches=None, offsets=None, sink_size=0):
        q, step = self.rotated()[0], self.step
        out = np.zeros((step.num_tokens, self.heads, self.dim))
        caches = caches or self.caches_after()
        for b in range(len(step.rows)):
            rows = slice(step.cu[b], step.cu[b + 1])
            if rows.start == rows.stop:
                continue
            k, v = (self.past(cache, b) for cache in caches)
            for h in range(self.heads):
                kv = h * self.kv_heads // self.heads
                out[rows, h] = oracle.attention(q[rows, h], k[:, kv], v[:, kv], self.dim ** -0.5, causal, window,
                                                None if sinks is None else sinks[h],
                                                None if offsets is None else offsets[rows], sink_size)
        return out.reshape(step.num_tokens, -1)

    def arguments(self, *, version="", extra=(), quant="none", scales=(None, None), zero_points=(None, None), sinks=None,
                  mask=None, mask_offset=None, signal=None, rope_3d=False, in_scale=-1.0, causal=True, window=0, sink_size=0):
        """
        As FastDeploy passes them; scalars in CPU tensors are zeros, as stale ones of a graph's replay may be. Older signatures
        end without sink_size (_v3), and before that without sinks and windows, but with max_len_kv (_v2).
        """
        batch_ids, cu, table = self.step.tensors()
        one = tensor([0])
        older, oldest = version in ("_v3", "_v2"), version == "_v2"
        return [self.qkv, self.k_cache, self.v_cache, *self.step.lengths(), batch_ids, cu, table, *[one] * 9, tensor([0] * 6),
                *([one] if oldest else []), *extra, self.rotary_embs, mask, self.bias, None, None, None, *scales, *zero_points, None, None, mask_offset,
                signal, *self.norms, *([] if oldest else [sinks]), EPS, COMPUTE[self.dtype], quant, self.neox, rope_3d, 128, 448.0, -448.0,
                in_scale, 64, 16, 1024, 32768, 3, causal, True, *([] if oldest else [window]), *([] if older else [sink_size])]


def close(actual, expected, dtype):
    np.testing.assert_allclose(array(actual), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"neox": True}, {"bias": True}, {"norm": True}, {"rope": False},
                                     {"neox": True, "bias": True, "norm": True}, {"heads": 4, "kv_heads": 4, "dim": 128}],
                         ids=str)
def test_append_attention(op, dtype, options):
    """R2, R6: one call takes prompts, chunks over a cached past, decodes and drafts; inactive and padded rows are 0."""
    layer = Layer(Step(MIXED, column=True), dtype, **options)
    out = op("append_attention")(*layer.arguments())[0]
    close(out, layer.attended(), dtype)
    for cache, expected in zip((layer.k_cache, layer.v_cache), layer.caches_after()):
        close(cache, expected, dtype)
    assert not array(out)[-layer.step.padded:].any()


@pytest.mark.parametrize("options", [{"window": 5}, {"causal": False}, {"window": 1}], ids=str)
def test_masks(options):
    layer = Layer(Step(MIXED))
    close(ops.folio_append_attention(*layer.arguments(**options))[0], layer.attended(**options), "float32")


@pytest.mark.parametrize("window, sink_size", [(0, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_first_key_and_an_end_for_each_token(op, dtype, window, sink_size):
    """FastDeploy's mask_offset, with which tokens of an image see each other; in place of causality, within windows."""
    layer = Layer(Step(MIXED), dtype)
    offsets = layer.step.offsets()
    given = tensor(offsets.reshape(-1))
    close(op("append_attention")(*layer.arguments(mask_offset=given, window=window, sink_size=sink_size))[0],
          layer.attended(offsets=offsets, window=window, sink_size=sink_size), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sinks(dtype):
    layer = Layer(Step(MIXED), dtype)
    sinks = layer.step.random([layer.heads], dtype)
    close(ops.folio_append_attention(*layer.arguments(sinks=sinks))[0], layer.attended(sinks=array(sinks)), dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_quantised_caches(op, format):
    """New keys and old ones are read back as they were rounded, with scales in the layouts of FastDeploy."""
    step, dtype = Step([CHUNK, DECODE]), narrow_on_gpu()
    layer = Layer(step, dtype)
    out = op("append_attention")(*layer.arguments(**format.fill(layer)))[0]
    caches = format.decoded(layer)
    close(out, layer.attended(caches=caches), dtype)
    for part, (cache, new) in enumerate(zip(caches, layer.rotated()[1:])):
        for token, request, position in step.tokens():
            page, offset = step.place(request, position)
            nearest, tolerance = format.nearest(new[token], part)
            if dtype == "float16":
                tolerance = tolerance + np.abs(nearest) * 2 ** -10  # keys are rounded once, and `new` was before
            assert (np.abs(cache[page, :, offset] - nearest) <= tolerance).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("quant", ["cache_int8", "cache_int4_zp"])
def test_quantised_caches_beside_norms_and_16_bits(dtype, quant):
    """With norms, keys are written after them. Factors come in the type of the model."""
    layer, format = Layer(Step(MIXED), dtype, norm=True), Format(quant, "channels", dtype)
    out = ops.folio_append_attention(*layer.arguments(**format.fill(layer)))[0]
    close(out, layer.attended(caches=format.decoded(layer)), dtype)


@pytest.mark.parametrize("version", ["_v3", "_v2"])
def test_older_signatures(op, version):
    layer = Layer(Step(MIXED))
    close(op("append_attention" + version)(*layer.arguments(version=version))[0], layer.attended(), "float32")
    out = paddle.zeros([layer.step.num_tokens, layer.heads * layer.dim])
    op("append_attention_with_output" + version)(*layer.arguments(version=version, extra=[out]))
    close(out, layer.attended(), "float32")


def test_output_of_the_callers(op):
    layer = Layer(Step(MIXED))
    out = paddle.full([layer.step.num_tokens, layer.heads * layer.dim], 7.0)
    address = out.data_ptr()
    op("append_attention_with_output")(*layer.arguments(extra=[out]))
    close(out, layer.attended(), "float32")
    assert out.data_ptr() == address


@pytest.mark.parametrize("change, sentence", [
    (dict(signal=tensor([1])), "kv_signal_data is given"),
    (dict(mask_offset=tensor([1])), "mask_offset is not int32 with the first key of each token and the one behind its last, 50"),
    (dict(mask=paddle.zeros([8, 4, 4], dtype="bool")), "attn_mask is given"),
    (dict(quant="block_wise_fp8"), 'is "block_wise_fp8"; accepted are none, cache_fp8, cache_int8, cache_int4_zp'),
    (dict(quant="cache_int8"), "cache_int8 needs cache_k_dequant_scales"),
    (dict(quant="cache_int8", scales=[tensor([1.0] * 3, "float32")] * 2),
     r"cache_k_dequant_scales has 3 elements; 1 or num_kv_heads, which is 2, or num_kv_heads \* head_dim, which is 64, are"),
    (dict(quant="cache_fp8", scales=[tensor([1.0] * 64, "float32")] * 2),
     "cache_k_dequant_scales has 64 elements; 1 or num_kv_heads, which is 2, are accepted"),
    (dict(zero_points=[tensor([0.0], "float32")] * 2), "cache_k_zp is given"),
    (dict(rope_3d=True), "rope_3d is true"),
    (dict(sink_size=4, window=8), "sink_size is 4; 0 is accepted, and more with mask_offset"),
    (dict(in_scale=0.5), "out_linear_in_scale is 0.5"),
])
def test_refusals_leave_everything_as_it_was(op, change, sentence):
    """R9, R10: what has no code is refused with one sentence, by both ways in, before anything is written."""
    layer = Layer(Step(MIXED))
    out = paddle.full([layer.step.num_tokens, layer.heads * layer.dim], 7.0)
    with pytest.raises((RuntimeError, OSError), match=sentence):
        op("append_attention_with_output")(*layer.arguments(extra=[out], **change))
    assert (out.numpy() == 7).all()
    np.testing.assert_array_equal(array(layer.k_cache), layer.caches_before[0])


@pytest.mark.parametrize("rows", [[DECODE] * 9, [PROMPT], [IDLE, INACTIVE], [DRAFT, CHUNK]])
def test_batches_of_one_kind(rows):
    layer = Layer(Step(rows))
    close(ops.folio_append_attention(*layer.arguments())[0], layer.attended(), "float32")


def test_no_tokens_is_no_work(op):
    """R7: an empty step gives an empty result."""
    layer = Layer(Step([IDLE], padded=0))
    assert list(op("append_attention")(*layer.arguments())[0].shape) == [0, layer.heads * layer.dim]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"neox": True, "norm": True}], ids=str)
def test_rope_and_keys_with_their_past(op, dtype, options):
    """gqa_rope_write_cache: prompts get their whole keys, other requests their new ones."""
    step = Step(MIXED)
    layer = Layer(step, dtype, **options)
    q, new_k, new_v = layer.rotated()
    lengths = [(d if e else 0) + t if t else 0 for e, d, t in step.rows]
    cu_k, (batch_ids, cu, table), one = [0, *np.cumsum(lengths)], step.tensors(), tensor([0])
    encoder, decoder, this_time = step.lengths()
    made = op("gqa_rope_write_cache")(
        layer.qkv, layer.k_cache, layer.v_cache, cu, tensor(cu_k), layer.rotary_embs, this_time, encoder, decoder,
        batch_ids, table, one, one, one, one, one, one, *layer.norms, *[None] * 7, int(cu_k[-1]), 128, EPS, layer.neox,
        "none", False)
    close(made[0], q, dtype)
    close(made[3], np.concatenate([part.reshape(step.num_tokens, -1) for part in (q, new_k, new_v)], 1), dtype)
    for cache, expected in zip((layer.k_cache, layer.v_cache), layer.caches_after()):
        close(cache, expected, dtype)
    for dense, cache in zip(made[1:3], layer.caches_after()):
        rows = [layer.past(cache, b)[step.kv_len[b] - length:] for b, length in enumerate(lengths) if length]
        close(dense, np.concatenate(rows), dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_keys_with_their_past_from_quantised_caches(op, format):
    """gqa_rope_write_cache reads back what the cache holds, the new tokens as they were rounded."""
    step, dtype = Step([CHUNK, PROMPT]), narrow_on_gpu()
    layer = Layer(step, dtype)
    filled = format.fill(layer)
    total = int(step.kv_len.sum())
    (batch_ids, cu, table), one = step.tensors(), tensor([0])
    encoder, decoder, this_time = step.lengths()
    made = op("gqa_rope_write_cache")(
        layer.qkv, layer.k_cache, layer.v_cache, cu, tensor([0, *np.cumsum(step.kv_len)]), layer.rotary_embs, this_time, encoder,
        decoder, batch_ids, table, *[one] * 6, None, None, None, None, *filled["scales"], *filled["zero_points"], None, total, 128,
        EPS, False, filled["quant"], False)
    close(made[0], layer.rotated()[0], dtype)
    for dense, cache in zip(made[1:3], format.decoded(layer)):
        close(dense, np.concatenate([layer.past(cache, b) for b in range(2)]), dtype)


def test_older_rope_and_keys(op):
    step = Step([CHUNK, PROMPT])
    layer = Layer(step)
    lengths = [d + t for _, d, t in step.rows]
    (batch_ids, cu, table), one = step.tensors(), tensor([0])
    encoder, decoder, this_time = step.lengths()
    made = op("gqa_rope_write_cache_v1")(
        layer.qkv, layer.k_cache, layer.v_cache, cu, tensor([0, *np.cumsum(lengths)]), layer.rotary_embs, this_time,
        encoder, decoder, batch_ids, table, one, one, one, one, one, one, *[None] * 7, sum(lengths), 128, "none", False)
    close(made[0], layer.rotated()[0], "float32")
    close(made[1], np.concatenate([layer.past(layer.caches_after()[0], b) for b in range(2)]), "float32")

    layer = Layer(step, norm=True)
    made = op("gqa_rope_write_cache_v2")(
        layer.qkv, layer.k_cache, layer.v_cache, cu, tensor([0, *np.cumsum(lengths)]), layer.rotary_embs, this_time,
        encoder, decoder, batch_ids, table, *[one] * 6, *layer.norms, *[None] * 7, sum(lengths), 128, EPS, "none", False)
    close(made[0], layer.rotated()[0], "float32")
