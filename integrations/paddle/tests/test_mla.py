"""Multi-head latent attention: writers, absorbed attention, merge. Small widths beside DeepSeek's 512 + 64."""

import numpy as np
import paddle
import pytest

import folio_paddle_ops as ops
import oracle
from paddle_devices import narrow_on_gpu, on_gpu
from steps import CHUNK, DECODE, DRAFT, IDLE, INACTIVE, MIXED, PROMPT, Step, array, tensor

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
COMPUTE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def write(op, step, name, cache, latents, ropes, *attributes):
    encoder, decoder, _ = step.lengths()
    first, second = (encoder, decoder) if name.startswith("prefill") else (decoder, encoder)
    op(name)(latents, ropes, cache, first, second, *step.tensors(), *attributes)


def expected_cache(step, before, latents, ropes, keeps):
    after = before.copy()
    for token, request, position in step.tokens():
        if keeps(*step.rows[request]):
            page, offset = step.place(request, position)
            after[page, 0, offset] = np.concatenate([latents[token], ropes[token]])
    return after


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name, attributes, keeps", [
    ("prefill_mla_write_cache_v2", (None, "none", -1), lambda encoder, decoder, _: encoder > 0),
    ("prefill_mla_write_cache_v1", ("none", -1), lambda encoder, decoder, _: encoder > 0),
    ("decode_mla_write_cache", ("none", False), lambda encoder, decoder, _: encoder == 0 and decoder > 0),
    ("decode_mla_write_cache", ("none", True), lambda encoder, decoder, _: decoder > 0),
    ("decode_mla_write_cache_v1", ("none", 128, False), lambda encoder, decoder, _: encoder == 0 and decoder > 0),
    ("decode_mla_write_cache_v1", ("none", 128, True), lambda encoder, decoder, _: decoder > 0),
])
def test_writers_write_their_rows_and_nothing_else(op, dtype, name, attributes, keeps):
    step = Step(MIXED, column=True)
    cache = step.cache([1, "BS", 40], dtype)
    latents, ropes = step.random([step.num_tokens, 32], dtype), step.random([step.num_tokens, 8], dtype)
    expected = expected_cache(step, array(cache), array(latents), array(ropes), keeps)
    address = cache.data_ptr()
    write(op, step, name, cache, latents, ropes, *attributes)
    np.testing.assert_array_equal(array(cache), expected)
    assert cache.data_ptr() == address


def test_one_writer_for_prompts_and_decodes(op):
    """The newest prefill writer gets the lengths of the step, and the slots that the block tables give."""
    step = Step(MIXED)
    cache = step.cache([1, "BS", 40], "float32")
    latents, ropes = step.random([step.num_tokens, 32], "float32"), step.random([step.num_tokens, 8], "float32")
    expected = expected_cache(step, array(cache), array(latents), array(ropes), lambda *_: True)
    _, decoder, this_time = step.lengths()
    slots = paddle.full([step.num_tokens], -1, dtype="int64")
    op("prefill_mla_write_cache")(latents, ropes, cache, this_time, decoder, *step.tensors(), slots, None, "none")
    np.testing.assert_array_equal(array(cache), expected)


def test_writers_skip_pages_that_are_not_there():
    """Spec 6.6: a block table of -1 must not become an address before the cache."""
    step = Step([DECODE, (0, 5, 1)])
    step.table[0] = -1
    cache = step.cache([1, "BS", 16], "float32")
    expected = array(cache)
    page, offset = step.place(1, 5)
    expected[page, 0, offset] = 1
    write(lambda name: getattr(ops, "folio_" + name), step, "decode_mla_write_cache", cache,
          paddle.ones([step.num_tokens, 8]), paddle.ones([step.num_tokens, 8]), "none", False)
    np.testing.assert_array_equal(array(cache), expected)


def tiles(step, chunk=64):
    """decoder_batch_ids with its count, as get_block_shape_and_split_kv_block makes them; garbage behind."""
    ids = [b for b, (encoder, _, this_time) in enumerate(step.rows) if this_time and not encoder
           for _ in range(-(-int(step.kv_len[b]) // chunk))]
    return tensor(ids + [1] * (80 - len(ids))), tensor([len(ids)])


def attend(op, step, cache, query, scale, latent, dtype, version="", causal=True):
    encoder, decoder, this_time = step.lengths()
    batch_ids, cu, table = step.tensors()
    one, none = tensor([0]), [None] * 11
    attributes = [COMPUTE[dtype], "none", latent, 128, scale, 0.0, 0.0, 0.0, 3, causal, True]
    ids, count = tiles(step)
    if version:
        return op("multi_head_latent_attention_v1")(query, cache, cache, encoder, decoder, this_time, cu, batch_ids, table, one,
                                                    one, one, one, one, one, ids, one, one, one, one, one, one, one, *none,
                                                    *attributes)[0]
    # Scalars in CPU tensors are stale in a graph's replay: zeros here must change nothing.
    return op("multi_head_latent_attention")(query, cache, cache, decoder, this_time, cu, batch_ids, table, one, one, one,
                                             ids, one, count, one, one, one, *none, *attributes)[0]


def expected_attention(step, cache, query, heads, latent, scale, causal=True):
    """Rows of decodes; 0 for all others."""
    out = np.zeros((step.num_tokens, heads, latent))
    q = query.reshape(step.num_tokens, heads, -1)
    for b, (encoder, decoder, this_time) in enumerate(step.rows):
        if encoder or not decoder or not this_time:
            continue
        records = np.stack([cache[page, 0, offset] for page, offset in
                            (step.place(b, position) for position in range(step.kv_len[b]))])
        rows = slice(step.cu[b], step.cu[b + 1])
        for h in range(heads):
            out[rows, h] = oracle.attention(q[rows, h], records, records[:, :latent], scale, causal)
    return out.reshape(step.num_tokens, heads * latent)


def filled_cache(step, width, dtype):
    """A cache that holds the new tokens of decodes too."""
    cache = array(step.cache([1, "BS", width], dtype))
    for token, request, position in step.tokens():
        page, offset = step.place(request, position)
        cache[page, 0, offset] = step.rng.standard_normal(width)
    return tensor(cache, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, latent, rope", [(3, 32, 8), (16, 512, 64)])
def test_attention_of_decode_rows(op, dtype, heads, latent, rope):
    """R2: one call takes a mixture, and rows that it does not cover are 0. R5: rows without keys are 0, not NaN."""
    if on_gpu() and dtype == "float32":
        pytest.skip("CUDA has no float32 for MLA")
    step = Step(MIXED, column=True)
    cache = filled_cache(step, latent + rope, dtype)
    query = step.random([step.num_tokens, heads * (latent + rope)], dtype)
    out = attend(op, step, cache, query, 0.07, latent, dtype)
    expected = expected_attention(step, array(cache), array(query), heads, latent, 0.07)
    np.testing.assert_allclose(array(out), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    covered = np.repeat([bool(not e and d and t) for e, d, t in step.rows] + [False],
                        [*step.this_time, step.padded])
    assert not array(out)[~covered].any()


@pytest.mark.parametrize("causal", [True, False])
def test_older_attention(op, causal):
    step, dtype = Step(MIXED), narrow_on_gpu()
    cache = filled_cache(step, 40, dtype)
    query = step.random([step.num_tokens, 2 * 40], dtype)
    out = attend(op, step, cache, query, 0.1, 32, dtype, "v1", causal)
    np.testing.assert_allclose(array(out), expected_attention(step, array(cache), array(query), 2, 32, 0.1, causal),
                               atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [[PROMPT, CHUNK], [IDLE, INACTIVE], [DECODE] * 33, [DRAFT]])
def test_batches_of_one_kind(op, rows):
    step, dtype = Step(rows), narrow_on_gpu()
    cache = filled_cache(step, 40, dtype)
    query = step.random([step.num_tokens, 2 * 40], dtype)
    out = attend(op, step, cache, query, 0.1, 32, dtype)
    np.testing.assert_allclose(array(out), expected_attention(step, array(cache), array(query), 2, 32, 0.1),
                               atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_tokens_is_no_work(op):
    """R7, R8: an empty step gives empty results of the right width, never None."""
    step, dtype = Step([IDLE, IDLE], padded=0), narrow_on_gpu()
    cache = step.cache([1, "BS", 40], dtype)
    out = attend(op, step, cache, paddle.zeros([0, 80], dtype=dtype), 0.1, 32, dtype)
    assert list(out.shape) == [0, 64]
    empty = [paddle.zeros([0, width], dtype=dtype) for width in (32, 8)]
    write(op, step, "decode_mla_write_cache", cache, *empty, "none", False)
    assert np.isnan(array(cache)).all()


def test_absorbed_form_is_the_form_with_heads():
    """R16: writer, absorbed queries, attention and W_UV together against the multi-head form, in float64."""
    heads, latent, rope, nope, value = 4, 64, 16, 24, 32
    step, dtype = Step([DRAFT, (0, 40, 1)], padded=0), narrow_on_gpu()
    rng = np.random.default_rng(3)
    w_uk, w_uv = rng.standard_normal((heads, nope, latent)) / 8, rng.standard_normal((heads, latent, value)) / 8
    q_nope, q_pe = rng.standard_normal((step.num_tokens, heads, nope)), rng.standard_normal((step.num_tokens, heads, rope))
    latents, ropes = rng.standard_normal((step.num_tokens, latent)), rng.standard_normal((step.num_tokens, rope))
    scale = (nope + rope) ** -0.5 * 1.36889 ** 2  # that of the heads, with YaRN's factor

    cache = step.cache([1, "BS", latent + rope], dtype)
    direct = lambda name: getattr(ops, "folio_" + name)
    write(direct, step, "decode_mla_write_cache", cache, tensor(latents, dtype), tensor(ropes, dtype), "none", True)
    query = np.concatenate([np.einsum("thp,hpl->thl", q_nope, w_uk), q_pe], -1).reshape(step.num_tokens, -1)
    out = array(attend(direct, step, cache, tensor(query, dtype), scale, latent, dtype))
    out = np.einsum("thl,hlv->thv", out.reshape(step.num_tokens, heads, latent), w_uv)

    records, tolerance = array(cache), 2e-5 if dtype == "float32" else 2e-2
    for b in range(len(step.rows)):
        rows = slice(step.cu[b], step.cu[b + 1])
        past = np.stack([records[page, 0, offset] for page, offset in
                         (step.place(b, position) for position in range(step.kv_len[b]))])
        c, k_pe = past[:, :latent], past[:, latent:]
        for h in range(heads):
            k = np.concatenate([c @ w_uk[h].T, k_pe], -1)
            q = np.concatenate([q_nope[rows, h], q_pe[rows, h]], -1)
            np.testing.assert_allclose(out[rows, h], oracle.attention(q, k, c @ w_uv[h], scale), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_merge_takes_rows_of_decodes(op, dtype):
    step = Step(MIXED, column=True)
    encoder_res, decoder_res = (step.random([step.num_tokens, 2 * 24], dtype) for _ in range(2))
    expected = array(encoder_res)
    for token, request, _ in step.tokens():
        if step.encoder[request] == 0 and step.decoder[request] > 0:
            expected[token] = array(decoder_res)[token]
    address = encoder_res.data_ptr()
    op("merge_prefill_decode_output")(encoder_res, decoder_res, *step.lengths(), tensor(step.cu), 2, 24, 3)
    np.testing.assert_array_equal(array(encoder_res), expected)
    assert encoder_res.data_ptr() == address
