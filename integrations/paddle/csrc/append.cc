// FastDeploy's ops of grouped-query attention over caches: append_attention and gqa_rope_write_cache.
#include "grouped.h"
#include "ops.h"

namespace folio_paddle {
namespace {

/** What all signatures of append_attention have in common; the rest of their arguments say nothing further. */
struct Append {
    const Tensor &qkv, &key_cache, &value_cache, &seq_lens_encoder, &seq_lens_decoder, &seq_lens_this_time, &cu_seqlens_q,
        &block_tables;
    const OptionalTensor &rotary_embs, &attn_mask, &qkv_bias, &qkv_out_scales, &k_dequant, &v_dequant, &k_zp, &v_zp,
        &out_linear_shifts, &out_linear_smooths, &mask_offset, &kv_signal_data, &q_norm_weight, &k_norm_weight, &sinks;
    float rms_norm_eps;
    const std::string &compute_dtype, &cache_quant_type;
    bool use_neox_rotary_style, rope_3d;
    float out_linear_in_scale;
    bool causal;
    int sliding_window, sink_size;
};

/** The whole op. `out` is written where it is given, which may not be touched before everything was checked. */
Tensor append(const Append &op, Tensor *out)
{
    refuse_signals(&op.kv_signal_data);
    refuse_given({{"attn_mask", &op.attn_mask}, {"qkv_out_scales", &op.qkv_out_scales},
                  {"out_linear_shifts", &op.out_linear_shifts}, {"out_linear_smooths", &op.out_linear_smooths}});
    require(op.out_linear_in_scale <= 0, "out_linear_in_scale is " + std::to_string(op.out_linear_in_scale) +
                                             "; outputs are not quantised, 0 or less is accepted");
    const Caches caches = caches_of(op.key_cache, op.value_cache, op.cache_quant_type,
                                    {op.k_dequant, op.v_dequant, op.k_zp, op.v_zp});
    const Projection projection(op.qkv, op.qkv_bias, caches);
    const Rotation rotation(op.rotary_embs, op.use_neox_rotary_style, op.rope_3d, caches.head_dim);
    const char *type = op.qkv.dtype() == paddle::DataType::BFLOAT16  ? "bf16"
                       : op.qkv.dtype() == paddle::DataType::FLOAT16 ? "fp16"
                                                                     : "fp32";
    require(op.compute_dtype == type,
            "compute_dtype is \"" + op.compute_dtype + "\"; that of qkv, \"" + type + "\", is accepted");
    const int64_t T = projection.num_tokens, width = projection.num_heads * caches.head_dim;
    const Mask mask(op.causal, op.sliding_window, op.mask_offset, T, op.sink_size);

    Tensor result = px::full({T, projection.num_heads, caches.head_dim}, 0, op.qkv.dtype(), op.qkv.place());
    if (out)
        require(out->numel() == result.numel() && out->dtype() == result.dtype(),
                "fmha_out is not [" + std::to_string(T) + ", " + std::to_string(width) + "] of qkv's type");
    if (T > 0) {
        const Batch batch(op.seq_lens_encoder, op.seq_lens_decoder, op.seq_lens_this_time, op.cu_seqlens_q,
                          op.block_tables);
        const Places where = places(op.cu_seqlens_q, batch.kv_len, op.block_tables, nullptr, caches.page_size, T);
        const Rotated rotated = rotate_and_write(projection, caches, rotation, op.q_norm_weight, op.k_norm_weight,
                                                 op.rms_norm_eps, where);
        attend(rotated.q, view(rotated.q, {T, projection.num_heads, caches.head_dim}), T, projection.num_heads, result,
               caches, batch, mask, op.sinks);
    }
    result = px::reshape(result, {T, width});
    if (out && T > 0)
        overwrite(*out, result);
    return result;
}

}  // namespace

// The lists of append_attention's arguments. FastDeploy's two variants and the older signatures differ in what stands
// after set_max_lengths, in sinks behind the optional ones, and in sliding_window and sink_size at the end.
#define FOLIO_APPEND_TENSORS                                                                                             \
    const Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &seq_lens_encoder,               \
        const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time, const Tensor &batch_id_per_token,              \
        const Tensor &cu_seqlens_q, const Tensor &block_tables, const Tensor &encoder_batch_ids,                         \
        const Tensor &encoder_tile_ids_per_batch, const Tensor &encoder_num_blocks, const Tensor &kv_batch_ids,          \
        const Tensor &kv_tile_ids_per_batch, const Tensor &kv_num_blocks, const Tensor &decoder_batch_ids,               \
        const Tensor &decoder_tile_ids_per_batch, const Tensor &decoder_num_blocks, const Tensor &set_max_lengths
#define FOLIO_APPEND_OPTIONS                                                                                             \
    const OptionalTensor &rotary_embs, const OptionalTensor &attn_mask, const OptionalTensor &qkv_bias,                  \
        const OptionalTensor &qkv_out_scales, const OptionalTensor &cache_k_quant_scales,                                \
        const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,                        \
        const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp, \
        const OptionalTensor &out_linear_shifts, const OptionalTensor &out_linear_smooths,                               \
        const OptionalTensor &mask_offset, const OptionalTensor &kv_signal_data, const OptionalTensor &q_norm_weight,    \
        const OptionalTensor &k_norm_weight
#define FOLIO_APPEND_NUMBERS                                                                                             \
    const float rms_norm_eps, const std::string &compute_dtype, const std::string &cache_quant_type,                     \
        const bool use_neox_rotary_style, const bool rope_3d, const int max_input_length, const float quant_max_bound,   \
        const float quant_min_bound, const float out_linear_in_scale, const int encoder_block_shape_q,                   \
        const int decoder_block_shape_q, const int max_partition_size, const int encoder_max_partition_size,             \
        const int speculate_max_draft_token_num, const bool causal, const bool speculate_decoder
// Tile lists, maxima and partition sizes are of FastDeploy's kernels; the quantising scales are one over the others.
#define FOLIO_APPEND_OP                                                                                                  \
    (void)batch_id_per_token, (void)encoder_batch_ids, (void)encoder_tile_ids_per_batch, (void)encoder_num_blocks,       \
        (void)kv_batch_ids, (void)kv_tile_ids_per_batch, (void)kv_num_blocks, (void)decoder_batch_ids,                   \
        (void)decoder_tile_ids_per_batch, (void)decoder_num_blocks, (void)set_max_lengths, (void)cache_k_quant_scales,   \
        (void)cache_v_quant_scales, (void)max_input_length, (void)quant_max_bound, (void)quant_min_bound,                \
        (void)encoder_block_shape_q, (void)decoder_block_shape_q, (void)max_partition_size,                              \
        (void)encoder_max_partition_size, (void)speculate_max_draft_token_num, (void)speculate_decoder;                  \
    const Append op{qkv, key_cache, value_cache, seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q,   \
                    block_tables, rotary_embs, attn_mask, qkv_bias, qkv_out_scales, cache_k_dequant_scales,              \
                    cache_v_dequant_scales, cache_k_zp, cache_v_zp, out_linear_shifts, out_linear_smooths, mask_offset,  \
                    kv_signal_data, q_norm_weight, k_norm_weight, sinks, rms_norm_eps, compute_dtype, cache_quant_type,  \
                    use_neox_rotary_style, rope_3d, out_linear_in_scale, causal, sliding_window, sink_size}

std::vector<Tensor> append_attention(FOLIO_APPEND_TENSORS, FOLIO_APPEND_OPTIONS, const OptionalTensor &sinks,
                                     FOLIO_APPEND_NUMBERS, const int sliding_window, const int sink_size)
{
    FOLIO_APPEND_OP;
    return guarded("append_attention", [&]() -> std::vector<Tensor> { return {append(op, nullptr)}; });
}

std::vector<Tensor> append_attention_v3(FOLIO_APPEND_TENSORS, FOLIO_APPEND_OPTIONS, const OptionalTensor &sinks,
                                        FOLIO_APPEND_NUMBERS, const int sliding_window)
{
    const int sink_size = 0;
    FOLIO_APPEND_OP;
    return guarded("append_attention", [&]() -> std::vector<Tensor> { return {append(op, nullptr)}; });
}

std::vector<Tensor> append_attention_v2(FOLIO_APPEND_TENSORS, const Tensor &max_len_kv, FOLIO_APPEND_OPTIONS,
                                        FOLIO_APPEND_NUMBERS)
{
    (void)max_len_kv;
    const OptionalTensor sinks;
    const int sliding_window = 0, sink_size = 0;
    FOLIO_APPEND_OP;
    return guarded("append_attention", [&]() -> std::vector<Tensor> { return {append(op, nullptr)}; });
}

void append_attention_with_output(FOLIO_APPEND_TENSORS, Tensor &fmha_out, FOLIO_APPEND_OPTIONS,
                                  const OptionalTensor &sinks, FOLIO_APPEND_NUMBERS, const int sliding_window,
                                  const int sink_size)
{
    FOLIO_APPEND_OP;
    guarded("append_attention_with_output", [&] { append(op, &fmha_out); });
}

void append_attention_with_output_v3(FOLIO_APPEND_TENSORS, Tensor &fmha_out, FOLIO_APPEND_OPTIONS,
                                     const OptionalTensor &sinks, FOLIO_APPEND_NUMBERS, const int sliding_window)
{
    const int sink_size = 0;
    FOLIO_APPEND_OP;
    guarded("append_attention_with_output", [&] { append(op, &fmha_out); });
}

void append_attention_with_output_v2(FOLIO_APPEND_TENSORS, const Tensor &max_len_kv, Tensor &fmha_out,
                                     FOLIO_APPEND_OPTIONS, FOLIO_APPEND_NUMBERS)
{
    (void)max_len_kv;
    const OptionalTensor sinks;
    const int sliding_window = 0, sink_size = 0;
    FOLIO_APPEND_OP;
    guarded("append_attention_with_output", [&] { append(op, &fmha_out); });
}

std::vector<Tensor> gqa_rope_write_cache(
    const Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &cu_seqlens_q,
    const Tensor &cu_seqlens_k, const Tensor &rotary_embs, const Tensor &seq_lens_this_time,
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &batch_id_per_token,
    const Tensor &block_tables, const Tensor &kv_batch_ids, const Tensor &kv_tile_ids, const Tensor &kv_num_blocks,
    const Tensor &cache_batch_ids, const Tensor &cache_tile_ids, const Tensor &cache_num_blocks,
    const OptionalTensor &q_norm_weight, const OptionalTensor &k_norm_weight, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &kv_signal_data, const int kv_token_num, const int max_seq_len, const float rms_norm_eps,
    const bool use_neox_rotary_style, const std::string &cache_quant_type, const bool rope_3d)
{
    (void)batch_id_per_token, (void)kv_batch_ids, (void)kv_tile_ids, (void)kv_num_blocks, (void)cache_batch_ids,
        (void)cache_tile_ids, (void)cache_num_blocks, (void)cache_k_quant_scales, (void)cache_v_quant_scales,
        (void)max_seq_len;
    return guarded("gqa_rope_write_cache", [&]() -> std::vector<Tensor> {
        refuse_signals(&kv_signal_data);
        require(kv_token_num >= 0, "kv_token_num is " + std::to_string(kv_token_num) + "; 0 or more is accepted");
        const Caches caches = caches_of(key_cache, value_cache, cache_quant_type,
                                        {cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp});
        const Projection projection(qkv, paddle::none, caches);
        const Rotation rotation(rotary_embs, use_neox_rotary_style, rope_3d, caches.head_dim);
        const int64_t T = projection.num_tokens, d = caches.head_dim, Hq = projection.num_heads, Hkv = caches.num_kv_heads;
        Tensor k = px::full({kv_token_num, Hkv, d}, 0, qkv.dtype(), qkv.place()), v = px::full_like(k, 0, k.dtype());
        if (T == 0)
            return {px::empty({0, Hq, d}, qkv.dtype(), qkv.place()), k, v, qkv};
        const Batch batch(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q, block_tables);
        require(cu_seqlens_k.numel() == batch.size + 1, "cu_seqlens_k is not [batch_size + 1]");
        const Places where = places(cu_seqlens_q, batch.kv_len, block_tables, nullptr, caches.page_size, T);
        const Rotated rotated =
            rotate_and_write(projection, caches, rotation, q_norm_weight, k_norm_weight, rms_norm_eps, where);

        // Prompts get their cached keys too, other requests their new ones.
        const Tensor prompts = positive(lengths("seq_lens_encoder", seq_lens_encoder, batch.size));
        const Tensor decoder = lengths("seq_lens_decoder", seq_lens_decoder, batch.size);
        const Tensor starts = px::where(prompts, px::zeros_like(decoder), decoder);
        const folio::Tensor key = view(k, {kv_token_num, Hkv, d}), value = view(v, {kv_token_num, Hkv, d}),
                            k_cache = pages(key_cache, caches), v_cache = pages(value_cache, caches),
                            cu = flat(cu_seqlens_k), first = flat(starts),
                            table = view(block_tables, {batch.size, block_tables.shape()[1]});
        auto args = FOLIO_INIT(folio_kv_gather_args);
        args.key = key;
        args.value = value;
        args.k_cache = k_cache;
        args.v_cache = v_cache;
        args.cu_seq_lens = cu;
        args.seq_starts = first;
        args.block_table = table;
        args.kv_layout = FOLIO_LAYOUT_HND;
        args.kv_dtype = caches.kind.kv_dtype;
        args.kv_format = caches.kind.kv_format;
        const FactorViews factors(caches);
        factors.put(args);
        context_of(qkv).gather(args, stream_of(qkv));
        const Tensor values = px::slice(projection.qkv, {1}, {(Hq + Hkv) * d}, {projection.row}, {1}, {});
        const Tensor qkv_out =
            px::concat({px::reshape(rotated.q, {T, Hq * d}), px::reshape(rotated.k, {T, Hkv * d}), values}, 1);
        return {rotated.q, k, v, qkv_out};
    });
}

std::vector<Tensor> gqa_rope_write_cache_v2(
    const Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &cu_seqlens_q,
    const Tensor &cu_seqlens_k, const Tensor &rotary_embs, const Tensor &seq_lens_this_time,
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &batch_id_per_token,
    const Tensor &block_tables, const Tensor &kv_batch_ids, const Tensor &kv_tile_ids, const Tensor &kv_num_blocks,
    const Tensor &cache_batch_ids, const Tensor &cache_tile_ids, const Tensor &cache_num_blocks,
    const OptionalTensor &q_norm_weight, const OptionalTensor &k_norm_weight, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &kv_signal_data, const int kv_token_num, const int max_seq_len, const float rms_norm_eps,
    const std::string &cache_quant_type, const bool rope_3d)
{
    return gqa_rope_write_cache(qkv, key_cache, value_cache, cu_seqlens_q, cu_seqlens_k, rotary_embs, seq_lens_this_time,
                                seq_lens_encoder, seq_lens_decoder, batch_id_per_token, block_tables, kv_batch_ids,
                                kv_tile_ids, kv_num_blocks, cache_batch_ids, cache_tile_ids, cache_num_blocks,
                                q_norm_weight, k_norm_weight, cache_k_quant_scales, cache_v_quant_scales,
                                cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp, kv_signal_data,
                                kv_token_num, max_seq_len, rms_norm_eps, false, cache_quant_type, rope_3d);
}

std::vector<Tensor> gqa_rope_write_cache_v1(
    const Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &cu_seqlens_q,
    const Tensor &cu_seqlens_k, const Tensor &rotary_embs, const Tensor &seq_lens_this_time,
    const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &batch_id_per_token,
    const Tensor &block_tables, const Tensor &kv_batch_ids, const Tensor &kv_tile_ids, const Tensor &kv_num_blocks,
    const Tensor &cache_batch_ids, const Tensor &cache_tile_ids, const Tensor &cache_num_blocks,
    const OptionalTensor &cache_k_quant_scales, const OptionalTensor &cache_v_quant_scales,
    const OptionalTensor &cache_k_dequant_scales, const OptionalTensor &cache_v_dequant_scales,
    const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp, const OptionalTensor &kv_signal_data,
    const int kv_token_num, const int max_seq_len, const std::string &cache_quant_type, const bool rope_3d)
{
    return gqa_rope_write_cache_v2(
        qkv, key_cache, value_cache, cu_seqlens_q, cu_seqlens_k, rotary_embs, seq_lens_this_time, seq_lens_encoder,
        seq_lens_decoder, batch_id_per_token, block_tables, kv_batch_ids, kv_tile_ids, kv_num_blocks, cache_batch_ids,
        cache_tile_ids, cache_num_blocks, paddle::none, paddle::none, cache_k_quant_scales, cache_v_quant_scales,
        cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp, kv_signal_data, kv_token_num, max_seq_len,
        1e-6F, cache_quant_type, rope_3d);
}

}  // namespace folio_paddle

namespace folio_paddle {

void bind_append(pybind11::module_ &module)
{
    module.def("folio_append_attention", &append_attention, "Bias, RoPE, norms, cache write and attention.");
    module.def("folio_append_attention_v3", &append_attention_v3, "Without sink_size.");
    module.def("folio_append_attention_v2", &append_attention_v2,
               "With max_len_kv; without sinks and sliding_window.");
    module.def("folio_append_attention_with_output", &append_attention_with_output, "Into a tensor of the caller's.");
    module.def("folio_append_attention_with_output_v3", &append_attention_with_output_v3, "Without sink_size.");
    module.def("folio_append_attention_with_output_v2", &append_attention_with_output_v2,
               "With max_len_kv; without sinks and sliding_window.");
    module.def("folio_gqa_rope_write_cache", &gqa_rope_write_cache, "RoPE, cache write, and keys with their past.");
    module.def("folio_gqa_rope_write_cache_v2", &gqa_rope_write_cache_v2, "Without the style of RoPE.");
    module.def("folio_gqa_rope_write_cache_v1", &gqa_rope_write_cache_v1, "Without norms.");
}

namespace {

using Attributes = std::vector<paddle::any>;
using Types = std::vector<paddle::DataType>;

Shapes append_shape(const Shapes &inputs, const std::vector<Shapes> &, const Attributes &attributes)
{
    return {{inputs[0][0], attended_width(inputs[0][1], inputs[1], paddle::any_cast<std::string>(attributes[2]))}};
}
template <size_t QuantType> /* which attribute cache_quant_type is */
Shapes rotated_shapes(const Shapes &inputs, const std::vector<Shapes> &, const Attributes &attributes)
{
    const int64_t heads = inputs[1][1], keys = paddle::any_cast<int>(attributes[0]);
    const int64_t dim = inputs[1][3] * kind_of(paddle::any_cast<std::string>(attributes[QuantType])).elements_per_byte;
    return {{inputs[0][0], inputs[0][1] / dim - 2 * heads, dim}, {keys, heads, dim}, {keys, heads, dim}, inputs[0]};
}
Types first_type(const Types &inputs, const std::vector<Types> &, const Attributes &) { return {inputs[0]}; }
Types first_type_4(const Types &inputs, const std::vector<Types> &, const Attributes &) { return Types(4, inputs[0]); }
Shapes no_shapes(const Shapes &, const std::vector<Shapes> &, const Attributes &) { return {}; }
Types no_types(const Types &, const std::vector<Types> &, const Attributes &) { return {}; }

}  // namespace
}  // namespace folio_paddle

#define FOLIO_APPEND_INPUTS                                                                                              \
    "qkv", "key_cache", "value_cache", "seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time",                     \
        "batch_id_per_token", "cu_seqlens_q", "block_tables", "encoder_batch_ids", "encoder_tile_ids_per_batch",         \
        "encoder_num_blocks", "kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks", "decoder_batch_ids",             \
        "decoder_tile_ids_per_batch", "decoder_num_blocks", "set_max_lengths"
#define FOLIO_APPEND_OPTIONAL_INPUTS                                                                                     \
    paddle::Optional("rotary_embs"), paddle::Optional("attn_mask"), paddle::Optional("qkv_bias"),                        \
        paddle::Optional("qkv_out_scales"), paddle::Optional("cache_k_quant_scales"),                                    \
        paddle::Optional("cache_v_quant_scales"), paddle::Optional("cache_k_dequant_scales"),                            \
        paddle::Optional("cache_v_dequant_scales"), paddle::Optional("cache_k_zp"), paddle::Optional("cache_v_zp"),      \
        paddle::Optional("out_linear_shifts"), paddle::Optional("out_linear_smooths"), paddle::Optional("mask_offset"),  \
        paddle::Optional("kv_signal_data"), paddle::Optional("q_norm_weight"), paddle::Optional("k_norm_weight")
#define FOLIO_APPEND_ATTRIBUTES                                                                                          \
    "rms_norm_eps: float", "compute_dtype: std::string", "cache_quant_type: std::string", "use_neox_rotary_style: bool", \
        "rope_3d: bool", "max_input_length: int", "quant_max_bound: float", "quant_min_bound: float",                    \
        "out_linear_in_scale: float", "encoder_block_shape_q: int", "decoder_block_shape_q: int",                        \
        "max_partition_size: int", "encoder_max_partition_size: int", "speculate_max_draft_token_num: int",              \
        "causal: bool", "speculate_decoder: bool"

PD_BUILD_OP(static_op_folio_append_attention)
    .Inputs({FOLIO_APPEND_INPUTS, FOLIO_APPEND_OPTIONAL_INPUTS, paddle::Optional("sinks")})
    .Outputs({"fmha_out"})
    .Attrs({FOLIO_APPEND_ATTRIBUTES, "sliding_window: int", "sink_size: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::append_attention))
    .SetInferShapeFn(folio_paddle::append_shape)
    .SetInferDtypeFn(folio_paddle::first_type);

PD_BUILD_OP(static_op_folio_append_attention_v3)
    .Inputs({FOLIO_APPEND_INPUTS, FOLIO_APPEND_OPTIONAL_INPUTS, paddle::Optional("sinks")})
    .Outputs({"fmha_out"})
    .Attrs({FOLIO_APPEND_ATTRIBUTES, "sliding_window: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::append_attention_v3))
    .SetInferShapeFn(folio_paddle::append_shape)
    .SetInferDtypeFn(folio_paddle::first_type);

PD_BUILD_OP(static_op_folio_append_attention_v2)
    .Inputs({FOLIO_APPEND_INPUTS, "max_len_kv", FOLIO_APPEND_OPTIONAL_INPUTS})
    .Outputs({"fmha_out"})
    .Attrs({FOLIO_APPEND_ATTRIBUTES})
    .SetKernelFn(PD_KERNEL(folio_paddle::append_attention_v2))
    .SetInferShapeFn(folio_paddle::append_shape)
    .SetInferDtypeFn(folio_paddle::first_type);

PD_BUILD_OP(static_op_folio_append_attention_with_output)
    .Inputs({FOLIO_APPEND_INPUTS, "fmha_out", FOLIO_APPEND_OPTIONAL_INPUTS, paddle::Optional("sinks")})
    .Outputs({"fmha_out_"})
    .SetInplaceMap({{"fmha_out", "fmha_out_"}})
    .Attrs({FOLIO_APPEND_ATTRIBUTES, "sliding_window: int", "sink_size: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::append_attention_with_output))
    .SetInferShapeFn(folio_paddle::no_shapes)
    .SetInferDtypeFn(folio_paddle::no_types);

PD_BUILD_OP(static_op_folio_append_attention_with_output_v3)
    .Inputs({FOLIO_APPEND_INPUTS, "fmha_out", FOLIO_APPEND_OPTIONAL_INPUTS, paddle::Optional("sinks")})
    .Outputs({"fmha_out_"})
    .SetInplaceMap({{"fmha_out", "fmha_out_"}})
    .Attrs({FOLIO_APPEND_ATTRIBUTES, "sliding_window: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::append_attention_with_output_v3))
    .SetInferShapeFn(folio_paddle::no_shapes)
    .SetInferDtypeFn(folio_paddle::no_types);

PD_BUILD_OP(static_op_folio_append_attention_with_output_v2)
    .Inputs({FOLIO_APPEND_INPUTS, "max_len_kv", "fmha_out", FOLIO_APPEND_OPTIONAL_INPUTS})
    .Outputs({"fmha_out_"})
    .SetInplaceMap({{"fmha_out", "fmha_out_"}})
    .Attrs({FOLIO_APPEND_ATTRIBUTES})
    .SetKernelFn(PD_KERNEL(folio_paddle::append_attention_with_output_v2))
    .SetInferShapeFn(folio_paddle::no_shapes)
    .SetInferDtypeFn(folio_paddle::no_types);

#define FOLIO_ROPE_INPUTS                                                                                                \
    "qkv", "key_cache", "value_cache", "cu_seqlens_q", "cu_seqlens_k", "rotary_embs", "seq_lens_this_time",              \
        "seq_lens_encoder", "seq_lens_decoder", "batch_id_per_token", "block_tables", "kv_batch_ids", "kv_tile_ids",     \
        "kv_num_blocks", "cache_batch_ids", "cache_tile_ids", "cache_num_blocks"
#define FOLIO_ROPE_CACHE_INPUTS                                                                                          \
    paddle::Optional("cache_k_quant_scales"), paddle::Optional("cache_v_quant_scales"),                                  \
        paddle::Optional("cache_k_dequant_scales"), paddle::Optional("cache_v_dequant_scales"),                          \
        paddle::Optional("cache_k_zp"), paddle::Optional("cache_v_zp"), paddle::Optional("kv_signal_data")

PD_BUILD_OP(static_op_folio_gqa_rope_write_cache)
    .Inputs({FOLIO_ROPE_INPUTS, paddle::Optional("q_norm_weight"), paddle::Optional("k_norm_weight"),
             FOLIO_ROPE_CACHE_INPUTS})
    .Outputs({"q", "k", "v", "qkv_out"})
    .Attrs({"kv_token_num: int", "max_seq_len: int", "rms_norm_eps: float", "use_neox_rotary_style: bool",
            "cache_quant_type: std::string", "rope_3d: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::gqa_rope_write_cache))
    .SetInferShapeFn(folio_paddle::rotated_shapes<4>)
    .SetInferDtypeFn(folio_paddle::first_type_4);

PD_BUILD_OP(static_op_folio_gqa_rope_write_cache_v2)
    .Inputs({FOLIO_ROPE_INPUTS, paddle::Optional("q_norm_weight"), paddle::Optional("k_norm_weight"),
             FOLIO_ROPE_CACHE_INPUTS})
    .Outputs({"q", "k", "v", "qkv_out"})
    .Attrs({"kv_token_num: int", "max_seq_len: int", "rms_norm_eps: float", "cache_quant_type: std::string",
            "rope_3d: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::gqa_rope_write_cache_v2))
    .SetInferShapeFn(folio_paddle::rotated_shapes<3>)
    .SetInferDtypeFn(folio_paddle::first_type_4);

PD_BUILD_OP(static_op_folio_gqa_rope_write_cache_v1)
    .Inputs({FOLIO_ROPE_INPUTS, FOLIO_ROPE_CACHE_INPUTS})
    .Outputs({"q", "k", "v", "qkv_out"})
    .Attrs({"kv_token_num: int", "max_seq_len: int", "cache_quant_type: std::string", "rope_3d: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::gqa_rope_write_cache_v1))
    .SetInferShapeFn(folio_paddle::rotated_shapes<2>)
    .SetInferDtypeFn(folio_paddle::first_type_4);
