// FastDeploy's newest decode path: decoder_write_cache_with_rope, and decode_unified_attention, which was called
// decode_append_attention before. config_for_attention, the third of its ops, is in step.cc.
//
// They see to the requests that decode, with one or more new tokens each. FastDeploy's FLASH_ATTN runs them on steps with
// prompts too, and puts the prompts' rows into the output first: those rows stay as they are. Lengths are read on the
// device, so neither FastDeploy's work items nor its buffers for partial results are looked at.
#include "grouped.h"
#include "ops.h"

namespace folio_paddle {
namespace {

/** What both signatures of the attention op have in common. */
struct Decode {
    const Tensor &qkv, &key_cache, &value_cache, &seq_lens_encoder, &seq_lens_decoder, &seq_lens_this_time, &cu_seqlens_q,
        &block_tables;
    const OptionalTensor &attn_mask, &k_dequant, &v_dequant, &k_zp, &v_zp, &mask_offset, &sinks;
    const std::string &cache_quant_type;
    bool causal;
    int sliding_window;
};

/** [T, Hq d]: rows of decodes; all others are 0. */
Tensor decode(const Decode &op)
{
    refuse_given({{"attn_mask", &op.attn_mask}});
    const Caches caches = caches_of(op.key_cache, op.value_cache, op.cache_quant_type,
                                    {op.k_dequant, op.v_dequant, op.k_zp, op.v_zp});
    const Projection projection(op.qkv, paddle::none, caches);
    const int64_t T = projection.num_tokens, Hq = projection.num_heads, d = caches.head_dim;
    const Mask mask(op.causal, op.sliding_window, op.mask_offset, T);
    Tensor out = px::full({T, Hq, d}, 0, op.qkv.dtype(), op.qkv.place());
    if (T > 0) {
        Batch batch(op.seq_lens_encoder, op.seq_lens_decoder, op.seq_lens_this_time, op.cu_seqlens_q, op.block_tables);
        batch.kv_len = keep_or(decoding(op.seq_lens_encoder, op.seq_lens_decoder, batch.size), batch.kv_len, 0);
        attend(op.qkv, view(op.qkv, {T, Hq, d}, {projection.row, d, 1}), T, Hq, out, caches, batch, mask, op.sinks);
    }
    return px::reshape(out, {T, Hq * d});
}

}  // namespace

std::vector<Tensor> decoder_write_cache_with_rope(
    Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &seq_lens_encoder,
    const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time, const Tensor &batch_id_per_token,
    const Tensor &cu_seqlens_q, const Tensor &block_tables, const Tensor &set_max_lengths,
    const OptionalTensor &rotary_embs, const OptionalTensor &qkv_bias, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &kv_signal_data, const OptionalTensor &q_norm_weight, const OptionalTensor &k_norm_weight,
    const float rms_norm_eps, const std::string &cache_quant_type, const bool use_neox_rotary_style, const bool rope_3d,
    const int max_input_length, const float quant_max_bound, const float quant_min_bound, const bool speculate_decoder)
{
    // Lengths say how many tokens a request has and where they are; the quantising scales are one over the others.
    (void)batch_id_per_token, (void)set_max_lengths, (void)cache_k_quant_scales, (void)cache_v_quant_scales,
        (void)max_input_length, (void)quant_max_bound, (void)quant_min_bound, (void)speculate_decoder;
    return guarded("decoder_write_cache_with_rope", [&]() -> std::vector<Tensor> {
        refuse_signals(&kv_signal_data);
        const Caches caches = caches_of(key_cache, value_cache, cache_quant_type,
                                        {cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp});
        const Projection projection(qkv, qkv_bias, caches);
        const Rotation rotation(rotary_embs, use_neox_rotary_style, rope_3d, caches.head_dim);
        const int64_t T = projection.num_tokens, Hq = projection.num_heads, d = caches.head_dim;
        if (T == 0)
            return {qkv};
        const Batch batch(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q, block_tables);
        const Tensor decodes = decoding(seq_lens_encoder, seq_lens_decoder, batch.size);
        const Places where = places(cu_seqlens_q, batch.kv_len, block_tables, &decodes, caches.page_size, T);
        const Rotated rotated =
            rotate_and_write(projection, caches, rotation, q_norm_weight, k_norm_weight, rms_norm_eps, where);
        // Attention reads queries from qkv, keys and values from the cache.
        copy_rows(view(rotated.q, {T, Hq, d}), view(qkv, {T, Hq, d}, {projection.row, d, 1}),
                  spread(decodes, cu_seqlens_q, T), Hq);
        return {qkv};
    });
}

std::vector<Tensor> decode_unified_attention(
    const Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &tmp_workspace,
    const Tensor &tmp_m, const Tensor &tmp_d, const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
    const Tensor &seq_lens_this_time, const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
    const Tensor &block_tables, const Tensor &block_indices, const Tensor &num_blocks, const Tensor &chunk_size,
    const Tensor &set_max_lengths, const OptionalTensor &attn_mask, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &mask_offset, const OptionalTensor &sinks, Tensor &fmha_out, const std::string &cache_quant_type,
    const int max_input_length, const float quant_max_bound, const float quant_min_bound, const int max_tokens_per_batch,
    const bool causal, const int sliding_window)
{
    (void)tmp_workspace, (void)tmp_m, (void)tmp_d, (void)batch_id_per_token, (void)block_indices, (void)num_blocks,
        (void)chunk_size, (void)set_max_lengths, (void)cache_k_quant_scales, (void)cache_v_quant_scales,
        (void)max_input_length, (void)quant_max_bound, (void)quant_min_bound, (void)max_tokens_per_batch;
    return guarded("decode_unified_attention", [&]() -> std::vector<Tensor> {
        const Decode op{qkv, key_cache, value_cache, seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q,
                        block_tables, attn_mask, cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp,
                        mask_offset, sinks, cache_quant_type, causal, sliding_window};
        const Tensor result = decode(op);
        require(fmha_out.numel() == result.numel() && fmha_out.dtype() == result.dtype(),
                "fmha_out is not [" + std::to_string(result.shape()[0]) + ", " + std::to_string(result.shape()[1]) +
                    "] of qkv's type");
        if (result.numel() == 0)
            return {fmha_out};
        const int64_t T = result.shape()[0], d = key_cache.shape()[3] * kind_of(cache_quant_type).elements_per_byte,
                      Hq = result.shape()[1] / d;
        const Tensor prompts = positive(lengths("seq_lens_encoder", seq_lens_encoder, seq_lens_this_time.numel()));
        copy_rows(view(result, {T, Hq, d}), view(fmha_out, {T, Hq, d}),
                  px::logical_not(spread(prompts, cu_seqlens_q, T)), Hq);
        return {fmha_out};
    });
}

std::vector<Tensor> decode_append_attention(
    const Tensor &qkv, const Tensor &key_cache, const Tensor &value_cache, const Tensor &tmp_workspace,
    const Tensor &tmp_m, const Tensor &tmp_d, const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder,
    const Tensor &seq_lens_this_time, const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
    const Tensor &block_tables, const Tensor &block_indices, const Tensor &num_blocks, const Tensor &chunk_size,
    const Tensor &set_max_lengths, const OptionalTensor &attn_mask, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &mask_offset, const OptionalTensor &sinks, const std::string &cache_quant_type,
    const int max_input_length, const float quant_max_bound, const float quant_min_bound, const int max_tokens_per_batch,
    const bool causal, const int sliding_window)
{
    (void)tmp_workspace, (void)tmp_m, (void)tmp_d, (void)batch_id_per_token, (void)block_indices, (void)num_blocks,
        (void)chunk_size, (void)set_max_lengths, (void)cache_k_quant_scales, (void)cache_v_quant_scales,
        (void)max_input_length, (void)quant_max_bound, (void)quant_min_bound, (void)max_tokens_per_batch;
    return guarded("decode_append_attention", [&]() -> std::vector<Tensor> {
        const Decode op{qkv, key_cache, value_cache, seq_lens_encoder, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q,
                        block_tables, attn_mask, cache_k_dequant_scales, cache_v_dequant_scales, cache_k_zp, cache_v_zp,
                        mask_offset, sinks, cache_quant_type, causal, sliding_window};
        return {decode(op)};
    });
}

void bind_decode(pybind11::module_ &module)
{
    module.def("folio_decoder_write_cache_with_rope", &decoder_write_cache_with_rope,
               "Bias, RoPE, norms and cache write of decodes; their queries in place.");
    module.def("folio_decode_unified_attention", &decode_unified_attention,
               "Attention of decodes into a tensor of the caller's, whose rows of prompts stay.");
    module.def("folio_decode_append_attention", &decode_append_attention, "Attention of decodes; other rows are 0.");
}

namespace {

using Attributes = std::vector<paddle::any>;
using Types = std::vector<paddle::DataType>;

Shapes qkv_shape(const Shapes &inputs, const std::vector<Shapes> &, const Attributes &) { return {inputs[0]}; }

Shapes decode_shape(const Shapes &inputs, const std::vector<Shapes> &, const Attributes &attributes)
{
    return {{inputs[0][0], attended_width(inputs[0][1], inputs[1], paddle::any_cast<std::string>(attributes[0]))}};
}
Types qkv_type(const Types &inputs, const std::vector<Types> &, const Attributes &) { return {inputs[0]}; }

}  // namespace
}  // namespace folio_paddle

PD_BUILD_OP(static_op_folio_decoder_write_cache_with_rope)
    .Inputs({"qkv", "key_cache", "value_cache", "seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time",
             "batch_id_per_token", "cu_seqlens_q", "block_tables", "set_max_lengths", paddle::Optional("rotary_embs"),
             paddle::Optional("qkv_bias"), paddle::Optional("cache_k_quant_scales"),
             paddle::Optional("cache_v_quant_scales"), paddle::Optional("cache_k_dequant_scales"),
             paddle::Optional("cache_v_dequant_scales"), paddle::Optional("cache_k_zp"), paddle::Optional("cache_v_zp"),
             paddle::Optional("kv_signal_data"), paddle::Optional("q_norm_weight"), paddle::Optional("k_norm_weight")})
    .Outputs({"qkv_out"})
    .SetInplaceMap({{"qkv", "qkv_out"}})
    .Attrs({"rms_norm_eps: float", "cache_quant_type: std::string", "use_neox_rotary_style: bool", "rope_3d: bool",
            "max_input_length: int", "quant_max_bound: float", "quant_min_bound: float", "speculate_decoder: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::decoder_write_cache_with_rope))
    .SetInferShapeFn(folio_paddle::qkv_shape)
    .SetInferDtypeFn(folio_paddle::qkv_type);

PD_BUILD_OP(static_op_folio_decode_unified_attention)
    .Inputs({"qkv", "key_cache", "value_cache", "tmp_workspace", "tmp_m", "tmp_d", "seq_lens_encoder", "seq_lens_decoder",
             "seq_lens_this_time", "batch_id_per_token", "cu_seqlens_q", "block_tables", "block_indices", "num_blocks",
             "chunk_size", "set_max_lengths", paddle::Optional("attn_mask"), paddle::Optional("cache_k_quant_scales"),
             paddle::Optional("cache_v_quant_scales"), paddle::Optional("cache_k_dequant_scales"),
             paddle::Optional("cache_v_dequant_scales"), paddle::Optional("cache_k_zp"), paddle::Optional("cache_v_zp"),
             paddle::Optional("mask_offset"), paddle::Optional("sinks"), "fmha_out"})
    .Outputs({"fmha_out_out"})
    .SetInplaceMap({{"fmha_out", "fmha_out_out"}})
    .Attrs({"cache_quant_type: std::string", "max_input_length: int", "quant_max_bound: float", "quant_min_bound: float",
            "max_tokens_per_batch: int", "causal: bool", "sliding_window: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::decode_unified_attention))
    .SetInferShapeFn(folio_paddle::decode_shape)
    .SetInferDtypeFn(folio_paddle::qkv_type);

PD_BUILD_OP(static_op_folio_decode_append_attention)
    .Inputs({"qkv", "key_cache", "value_cache", "tmp_workspace", "tmp_m", "tmp_d", "seq_lens_encoder", "seq_lens_decoder",
             "seq_lens_this_time", "batch_id_per_token", "cu_seqlens_q", "block_tables", "block_indices", "num_blocks",
             "chunk_size", "set_max_lengths", paddle::Optional("attn_mask"), paddle::Optional("cache_k_quant_scales"),
             paddle::Optional("cache_v_quant_scales"), paddle::Optional("cache_k_dequant_scales"),
             paddle::Optional("cache_v_dequant_scales"), paddle::Optional("cache_k_zp"), paddle::Optional("cache_v_zp"),
             paddle::Optional("mask_offset"), paddle::Optional("sinks")})
    .Outputs({"fmha_out"})
    .Attrs({"cache_quant_type: std::string", "max_input_length: int", "quant_max_bound: float", "quant_min_bound: float",
            "max_tokens_per_batch: int", "causal: bool", "sliding_window: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::decode_append_attention))
    .SetInferShapeFn(folio_paddle::decode_shape)
    .SetInferDtypeFn(folio_paddle::qkv_type);
