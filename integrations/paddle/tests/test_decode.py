"""FastDeploy's newest decode path: work items, RoPE with the cache write, and attention of decodes beside prompts."""

import numpy as np
import paddle
import pytest

import folio_paddle_ops as ops
from formats import FORMATS
from paddle_devices import narrow_on_gpu, on_gpu
from steps import CHUNK, DECODE, DRAFT, IDLE, INACTIVE, MIXED, PROMPT, Step, array, on_host, tensor
from test_append import EPS, TOLERANCE, Layer, close
from test_step import maxima


def decodes(step):
    """Which requests decode."""
    return [e == 0 and d > 0 and t > 0 for e, d, t in step.rows]


def tokens_of(step, which):
    return [token for token, request, _ in step.tokens() if which[request]]


def write_arguments(layer, *, quant="none", scales=(None, None), zero_points=(None, None), signal=None, rope_3d=False):
    batch_ids, cu, table = layer.step.tensors()
    return [layer.qkv, layer.k_cache, layer.v_cache, *layer.step.lengths(), batch_ids, cu, table, tensor([0] * 9),
            layer.rotary_embs, layer.bias, None, None, *scales, *zero_points, signal, *layer.norms, EPS, quant, layer.neox, rope_3d,
            128, 448.0, -448.0, True]


def attention_arguments(layer, out=(), *, quant="none", scales=(None, None), zero_points=(None, None), sinks=None, mask=None,
                        mask_offset=None, causal=True, window=0):
    """Work items are zeros, as stale ones of a graph's replay may be, and workspaces are too small: none is looked at."""
    batch_ids, cu, table = layer.step.tensors()
    workspaces = [paddle.zeros([1]) for _ in range(3)]
    return [layer.qkv, layer.k_cache, layer.v_cache, *workspaces, *layer.step.lengths(), batch_ids, cu, table,
            tensor([[0] * 4]), tensor([0]), tensor([0]), tensor([0] * 9), mask, None, None, *scales, *zero_points, mask_offset,
            sinks, *out, quant, 128, 448.0, -448.0, 3, causal, window]


def expected_caches(layer):
    """New keys and values of decodes; whatever else was there before."""
    after = [cache.copy() for cache in layer.caches_before]
    for token, request, position in layer.step.tokens():
        if decodes(layer.step)[request]:
            page, offset = layer.step.place(request, position)
            for cache, new in zip(after, layer.rotated()[1:]):
                cache[page, :, offset] = new[token]
    return after


def expected_attention(layer, **options):
    """Rows of decodes; 0 for all others."""
    out = layer.attended(**options)
    rows = np.zeros(len(out), dtype=bool)
    rows[tokens_of(layer.step, decodes(layer.step))] = True
    return np.where(rows[:, None], out, 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"neox": True}, {"bias": True}, {"rope": False},
                                     {"neox": True, "bias": True, "norm": True}, {"heads": 4, "kv_heads": 4, "dim": 128}],
                         ids=str)
def test_decodes_are_rotated_written_and_attended(op, dtype, options):
    """R2: in a step with prompts only decodes are touched. Prompts' rows of the caller's output stay; R5: others are 0."""
    step = Step(MIXED, column=True)
    layer = Layer(step, dtype, **options)
    attended, caches, queries = layer.attended(), expected_caches(layer), layer.rotated()[0]
    before, address = array(layer.qkv), layer.qkv.data_ptr()
    rotated = op("decoder_write_cache_with_rope")(*write_arguments(layer))
    assert len(rotated) == 1 and rotated[0].data_ptr() == layer.qkv.data_ptr() == address
    mine = tokens_of(step, decodes(step))
    width = layer.heads * layer.dim
    expected = before.copy()
    expected[mine, :width] = queries.reshape(step.num_tokens, width)[mine]
    others = np.setdiff1d(np.arange(step.num_tokens), mine)
    np.testing.assert_array_equal(array(layer.qkv)[others], before[others])
    close(layer.qkv, expected, dtype)
    for cache, wanted in zip((layer.k_cache, layer.v_cache), caches):
        close(cache, wanted, dtype)
        np.testing.assert_array_equal(np.isnan(array(cache)), np.isnan(wanted))

    out = paddle.full([step.num_tokens, width], 7.0).cast(dtype)
    address = out.data_ptr()
    returned = op("decode_unified_attention")(*attention_arguments(layer, [out]))
    assert returned[0].data_ptr() == out.data_ptr() == address
    prompts = tokens_of(step, [e > 0 for e in step.encoder])
    wanted = np.zeros_like(attended)
    wanted[mine], wanted[prompts] = attended[mine], 7
    close(out, wanted, dtype)
    assert (array(out)[prompts] == 7).all() and not array(out)[np.setdiff1d(others, prompts)].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prompts_and_decodes_as_flash_attn_runs_them(dtype):
    """
    R2: FastDeploy's FLASH_ATTN on the newest decode path. Prompts and chunks are attended over ragged keys, into the output that
    decodes are then written to; together they are append_attention.
    """
    step = Step(MIXED, padded=0)
    layer, one = Layer(step, dtype), tensor([0])
    batch_ids, cu, table = step.tensors()
    encoder, decoder, this_time = lengths = step.lengths()
    attended = layer.attended()
    cu_k, _, _, _, total = ops.folio_pre_cache_len_concat(*lengths, 64, step.page_size)
    q, k, v, _ = ops.folio_gqa_rope_write_cache(
        layer.qkv, layer.k_cache, layer.v_cache, cu, cu_k, layer.rotary_embs, this_time, encoder, decoder, batch_ids, table,
        *[one] * 6, *[None] * 9, total.item(), 128, EPS, False, "none", False)
    out = ops.folio_flash_attention_varlen(q, k, v, cu, cu_k, layer.dim ** -0.5, True)[0].reshape([step.num_tokens, -1])
    ops.folio_decoder_write_cache_with_rope(*write_arguments(layer))
    ops.folio_decode_unified_attention(*attention_arguments(layer, [out]))
    close(out, attended, dtype)


@pytest.mark.parametrize("options", [{"window": 5}, {"causal": False}, {}], ids=str)
def test_older_name_gives_zeros_for_other_rows(op, options):
    layer = Layer(Step(MIXED))
    wanted = expected_attention(layer, **options)
    ops.folio_decoder_write_cache_with_rope(*write_arguments(layer))
    out = op("decode_append_attention")(*attention_arguments(layer, **options))[0]
    close(out, wanted, "float32")
    assert not array(out)[~wanted.any(axis=1)].any()


@pytest.mark.parametrize("window", [0, 5])
def test_a_first_key_and_an_end_for_each_token(op, window):
    layer = Layer(Step(MIXED))
    offsets = layer.step.offsets()
    wanted = expected_attention(layer, offsets=offsets, window=window)
    ops.folio_decoder_write_cache_with_rope(*write_arguments(layer))
    arguments = attention_arguments(layer, mask_offset=tensor(offsets), window=window)
    close(op("decode_append_attention")(*arguments)[0], wanted, "float32")


@pytest.mark.parametrize("rows", [[DECODE] * 33, [DRAFT, DECODE], [PROMPT, CHUNK], [IDLE, INACTIVE], [(0, 0, 2), DECODE]])
def test_batches_of_one_kind(rows):
    """A request without keys in the cache does not decode, though it has new tokens and no prompt: its rows are 0."""
    layer = Layer(Step(rows))
    wanted, caches = expected_attention(layer), expected_caches(layer)
    ops.folio_decoder_write_cache_with_rope(*write_arguments(layer))
    close(ops.folio_decode_append_attention(*attention_arguments(layer))[0], wanted, "float32")
    for cache, after in zip((layer.k_cache, layer.v_cache), caches):
        close(cache, after, "float32")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sinks(dtype):
    layer = Layer(Step(MIXED), dtype)
    sinks = layer.step.random([layer.heads], dtype)
    wanted = expected_attention(layer, sinks=array(sinks))
    ops.folio_decoder_write_cache_with_rope(*write_arguments(layer))
    close(ops.folio_decode_append_attention(*attention_arguments(layer, sinks=sinks))[0], wanted, dtype)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_quantised_caches(op, format):
    """The path in two ops is append_attention in one, bit for bit: the same rounding of keys and of queries."""
    layers = [Layer(Step([DRAFT, DECODE]), narrow_on_gpu()) for _ in range(2)]
    options = [format.fill(layer) for layer in layers][1]
    whole = ops.folio_append_attention(*layers[0].arguments(**options))[0]
    op("decoder_write_cache_with_rope")(*write_arguments(layers[1], **options))
    parts = op("decode_append_attention")(*attention_arguments(layers[1], **options))[0]
    np.testing.assert_array_equal(array(parts), array(whole))
    out = paddle.full(parts.shape, 7.0).cast(parts.dtype)
    op("decode_unified_attention")(*attention_arguments(layers[1], [out], **options))
    np.testing.assert_array_equal(array(out), array(whole))
    assert array(whole).any()
    for one, other in zip((layers[0].k_cache, layers[0].v_cache), (layers[1].k_cache, layers[1].v_cache)):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("change, sentence", [
    (dict(signal=tensor([1])), "decoder_write_cache_with_rope: kv_signal_data is given"),
    (dict(quant="block_wise_fp8"), 'is "block_wise_fp8"; accepted are none, cache_fp8, cache_int8, cache_int4_zp'),
    (dict(quant="cache_int4_zp", scales=[tensor([1.0], "float32")] * 2), "cache_int4_zp needs cache_k_zp"),
    (dict(rope_3d=True), "rope_3d is true"),
    (dict(zero_points=[tensor([0], "float32"), None]), "cache_k_zp is given"),
    (dict(quant="cache_fp8"), "cache_fp8 needs cache_k_dequant_scales"),
])
def test_writes_that_are_refused_write_nothing(op, change, sentence):
    layer = Layer(Step(MIXED))
    before = array(layer.qkv)
    with pytest.raises((RuntimeError, OSError), match=sentence):
        op("decoder_write_cache_with_rope")(*write_arguments(layer, **change))
    np.testing.assert_array_equal(array(layer.qkv), before)
    np.testing.assert_array_equal(array(layer.k_cache), layer.caches_before[0])


@pytest.mark.parametrize("change, sentence", [
    (dict(mask=paddle.zeros([1, 4, 4], dtype="bool")), "attn_mask is given; Folio has no code for it, None is accepted"),
    (dict(mask_offset=tensor([1])), "mask_offset is not int32 with the first key of each token"),
    (dict(quant="block_wise_fp8"), 'cache_quant_type is "block_wise_fp8"'),
    (dict(scales=[tensor([1.0], "float32")] * 2), "cache_k_dequant_scales is given"),
])
def test_attention_that_is_refused_leaves_the_output(op, change, sentence):
    layer = Layer(Step(MIXED))
    out = paddle.full([layer.step.num_tokens, layer.heads * layer.dim], 7.0)
    with pytest.raises((RuntimeError, OSError), match=sentence):
        op("decode_unified_attention")(*attention_arguments(layer, [out], **change))
    assert (out.numpy() == 7).all()


def test_an_output_of_another_shape_is_refused(op):
    layer = Layer(Step(MIXED))
    with pytest.raises((RuntimeError, OSError), match=rf"fmha_out is not \[{layer.step.num_tokens}, 192\] of qkv's type"):
        op("decode_unified_attention")(*attention_arguments(layer, [paddle.zeros([3, 192])]))


def test_no_tokens_is_no_work(op):
    """R7: an empty step is a successful no-op of all three."""
    layer = Layer(Step([IDLE], padded=0))
    assert list(op("decoder_write_cache_with_rope")(*write_arguments(layer))[0].shape) == list(layer.qkv.shape)
    assert list(op("decode_append_attention")(*attention_arguments(layer))[0].shape) == [0, 192]
    op("decode_unified_attention")(*attention_arguments(layer, [paddle.zeros([0, 192])]))
    indices, count, chunk, most = tensor([[-7] * 4]), tensor([-7]), tensor([-7]), on_host([-7] * 9)
    none = tensor([])
    op("config_for_attention")(none, none, none, indices, count, chunk, most, "none", 3, 2, 1)
    assert count.item() == 0 and most.numpy().tolist() == [0] * 6 + [-7] * 3


def items(rows, chunk, group, kv_heads):
    """(request, key head, chunk, tile of 16 queries) of every request without a prompt."""
    return [[b, head, piece, tile] for b, (e, d, t) in enumerate(rows) if t and not e for head in range(kv_heads)
            for piece in range(-(-(d + t) // chunk)) for tile in range(-(-t * group // 16))]


@pytest.mark.parametrize("rows, kv_heads, chunk", [
    (MIXED, 2, 512),                                  # too little work for any chunk
    ([(0, 16383, 1)] * 400, 1, 16384),                # enough without a cut
    ([(0, 16383, 1)] * 100 + [(5, 0, 5)], 1, 5376),   # four chunks each, the longest that are four
    ([(0, 1023, 4)] * 99, 1, 1024),                   # two tiles of queries, two chunks: 396 items
])
def test_work_items(op, rows, kv_heads, chunk):
    """The longest chunks that leave three items to each of 132 multiprocessors, in FastDeploy's order."""
    if on_gpu() and paddle.device.cuda.get_device_properties().multi_processor_count != 132:
        pytest.skip("a GPU of another number of multiprocessors")
    wanted = items(rows, chunk, 8, kv_heads)
    lengths = [tensor([row[i] for row in rows]) for i in range(3)]
    indices, count, size, most = paddle.full([len(wanted) + 1, 4], -7, "int32"), tensor([-7]), tensor([-7]), on_host([-7] * 9)
    op("config_for_attention")(*lengths, indices, count, size, most, "none", 8, kv_heads, 4)
    assert size.item() == chunk and count.item() == len(wanted)
    assert indices.numpy()[:-1].tolist() == wanted and indices.numpy()[-1].tolist() == [-7] * 4
    assert most.numpy().tolist() == maxima(rows) + [-7] * 3


@pytest.mark.parametrize("change, sentence", [
    (dict(quant="block_wise_fp8"), 'cache_quant_type is "block_wise_fp8"'),
    (dict(group=0), "group_size is 0 and kv_num_heads is 2"),
    (dict(room=1), "block_indices has room for 4 int32; 32 are needed"),
    (dict(indices=tensor([0] * 64)), r"block_indices is not \[n, 4\]"),
])
def test_configurations_that_are_refused(op, change, sentence):
    """Nothing is written before everything fits."""
    step = Step(MIXED)
    indices = change.get("indices", paddle.full([change.get("room", 64), 4], -7, "int32"))
    count, size, most = tensor([-7]), tensor([-7]), on_host([-7] * 9)
    with pytest.raises((RuntimeError, OSError), match=sentence):
        op("config_for_attention")(*step.lengths(), indices, count, size, most, change.get("quant", "none"),
                                   change.get("group", 3), 2, 3)
    assert [count.item(), size.item(), *most.numpy().tolist()] == [-7] * 11
