// FastDeploy's ops of multi-head latent attention: cache writers, the absorbed attention of decode rows, and the merge of
// prefill and decode outputs.
#include "ops.h"
#include "rows.h"

#include <functional>
#include <numeric>

namespace folio_paddle {
namespace {

/** [nb, 1, BS, L + R] or [nb, BS, L + R]. */
struct LatentCache {
    int64_t num_pages, page_size, width;
};

LatentCache latent_cache(const Tensor &cache, const std::string &cache_quant_type_str)
{
    require(cache_quant_type_str == "none",
            "cache_quant_type_str is \"" + cache_quant_type_str + "\"; \"none\" is accepted");
    const auto shape = cache.shape();
    require((shape.size() == 4 && shape[1] == 1) || shape.size() == 3,
            "the cache has " + std::to_string(shape.size()) + " dimensions; [num_blocks, 1, block_size, 576] is accepted");
    return {shape[0], shape[shape.size() - 2], shape[shape.size() - 1]};
}

void write_latents(const Tensor &kv_nope, const Tensor &kv_pe, const Tensor &kv_cache, const Tensor &slots,
                   const LatentCache &cache)
{
    const int64_t num_tokens = kv_nope.shape()[0];
    require(num_tokens > 0 && kv_pe.shape()[0] == num_tokens && slots.numel() == num_tokens,
            "kv_nope, kv_pe and batch_id_per_token have different numbers of tokens");
    const folio::Tensor latent = view(kv_nope, {num_tokens, kv_nope.numel() / num_tokens}),
                        rope = view(kv_pe, {num_tokens, kv_pe.numel() / num_tokens}),
                        records = view(kv_cache, {cache.num_pages, cache.page_size, cache.width}), places = flat(slots);
    auto args = FOLIO_INIT(folio_mla_append_args);
    args.latent = latent;
    args.rope = rope;
    args.kv = records;
    args.slot_mapping = places;
    context_of(kv_nope).append(args, stream_of(kv_nope));
}

/** Writes the new tokens of the requests that `keep` names. */
void write_rows(const Tensor &kv_nope, const Tensor &kv_pe, Tensor &kv_cache, const Tensor &seq_lens_decoder,
                const Tensor &keep, const Tensor &cu_seqlens_q, const Tensor &block_tables,
                const std::string &cache_quant_type_str)
{
    const LatentCache cache = latent_cache(kv_cache, cache_quant_type_str);
    const Tensor kv_len = kv_lengths(seq_lens_decoder, differences(cu_seqlens_q));
    const Places where = places(cu_seqlens_q, kv_len, block_tables, &keep, cache.page_size, kv_nope.shape()[0]);
    write_latents(kv_nope, kv_pe, kv_cache, where.slots, cache);
}

/** What both signatures of the attention op have in common. */
struct LatentAttention {
    const Tensor &query, &key_cache, &seq_lens_decoder, &seq_lens_this_time, &cu_seqlens_q, &block_tables;
    const std::string &compute_dtype, &cache_quant_type_str;
    int nope_size;
    float softmax_scale, out_linear_in_scale;
    bool causal;
};

/** Decode rows: `decodes` [B] says which requests they are. All other rows of the result are 0. */
Tensor attend_latents(const LatentAttention &op, const Tensor &decodes)
{
    const LatentCache cache = latent_cache(op.key_cache, op.cache_quant_type_str);
    const int64_t num_tokens = op.query.shape()[0], batch_size = op.seq_lens_this_time.numel(), latent = op.nope_size;
    const int64_t rope = cache.width - latent;
    require(latent > 0 && rope >= 0, "nope_size is " + std::to_string(latent) + "; up to the cache's " +
                                         std::to_string(cache.width) + " is accepted");
    const auto extents = op.query.shape();
    const int64_t row = std::accumulate(extents.begin() + 1, extents.end(), int64_t{1}, std::multiplies<int64_t>());
    require(row % cache.width == 0, "query has rows of " + std::to_string(row) + " elements; multiples of " +
                                        std::to_string(cache.width) + " are accepted");
    const int64_t heads = row / cache.width;
    const char *type = op.query.dtype() == paddle::DataType::BFLOAT16  ? "bf16"
                       : op.query.dtype() == paddle::DataType::FLOAT16 ? "fp16"
                                                                       : "fp32";
    require(op.compute_dtype == type, "compute_dtype is \"" + op.compute_dtype + "\"; the query's, \"" + type +
                                          "\", is accepted");
    require(op.out_linear_in_scale <= 0, "out_linear_in_scale is " + std::to_string(op.out_linear_in_scale) +
                                             "; outputs are not quantised, 0 or less is accepted");

    Tensor out = px::full({num_tokens, heads * latent}, 0, op.query.dtype(), op.query.place());
    if (num_tokens == 0 || batch_size == 0)
        return out;

    const Tensor this_time = lengths("seq_lens_this_time", op.seq_lens_this_time, batch_size);
    const Tensor kv_len =
        keep_or(decodes, kv_lengths(lengths("seq_lens_decoder", op.seq_lens_decoder, batch_size), this_time), 0);
    require(op.block_tables.shape().size() == 2 && op.block_tables.shape()[0] == batch_size,
            "block_tables is not [" + std::to_string(batch_size) + ", max_blocks]");

    auto desc = FOLIO_INIT(folio_mla_desc);
    desc.q_dtype = dtype_of(op.query);
    desc.flags = op.query.is_gpu() ? FOLIO_PLAN_GRAPH : 0;
    desc.num_heads = static_cast<uint32_t>(heads);
    desc.kv_lora_rank = static_cast<uint32_t>(latent);
    desc.qk_rope_head_dim = static_cast<uint32_t>(rope);
    desc.page_size = static_cast<uint32_t>(cache.page_size);
    desc.max_batch_size = rounded_up(batch_size);
    desc.max_num_tokens = desc.max_qo_len = rounded_up(num_tokens);
    desc.max_kv_len = static_cast<uint32_t>(op.block_tables.shape()[1] * cache.page_size);

    const folio::Tensor cu = flat(op.cu_seqlens_q), keys = flat(kv_len),
                        table = view(op.block_tables, {batch_size, op.block_tables.shape()[1]});
    auto batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = cu;
    batch.kv_len = keys;
    batch.block_table = table;

    const folio::Tensor q_latent = view(op.query, {num_tokens, heads, latent}, {row, cache.width, 1}),
                        q_rope = view(op.query, {num_tokens, heads, rope}, {row, cache.width, 1}, latent),
                        records = view(op.key_cache, {cache.num_pages, cache.page_size, cache.width}),
                        o = view(out, {num_tokens, heads, latent});
    auto args = FOLIO_INIT(folio_mla_args);
    args.q_latent = q_latent;
    args.q_rope = rope == 0 ? nullptr : static_cast<const folio_tensor *>(q_rope);
    args.kv = records;
    args.o = o;
    args.sm_scale = op.softmax_scale;
    args.mask_mode = op.causal ? FOLIO_MASK_CAUSAL : FOLIO_MASK_FULL;
    compute<Mla>(op.query, desc, batch, args, &op.block_tables);
    return out;
}

/** The requests in the first `count` elements of a list of decoder tiles. */
Tensor listed(const Tensor &decoder_batch_ids, const Tensor &count, int64_t batch_size)
{
    const auto place = decoder_batch_ids.place();
    const int64_t n = decoder_batch_ids.numel();
    const Tensor ids = px::reshape(decoder_batch_ids, {n});
    const Tensor number = px::cumsum(px::full({n}, 1, paddle::DataType::INT32, place), 0);
    const Tensor in_use = px::less_equal(number, px::reshape(count, {1}));
    const Tensor target = keep_or(in_use, ids, static_cast<double>(batch_size)); /* the rest to a place beyond */
    const Tensor marks = px::scatter(px::full({batch_size + 1}, 0, paddle::DataType::INT32, place), target,
                                     px::full({n}, 1, paddle::DataType::INT32, place), true);
    return positive(px::slice(marks, {0}, {0}, {batch_size}, {1}, {}));
}

/** A count that Folio reads on the device of the list, whether the host keeps it there or in pinned memory. */
Tensor beside(const Tensor &count, const Tensor &list)
{
    require(count.place() == list.place(),
            "decoder_num_blocks is not on the device of decoder_batch_ids, and a copy would not be part of a graph");
    return count;
}

}  // namespace

std::vector<Tensor> prefill_mla_write_cache_v2(const Tensor &kv_nope, const Tensor &kv_pe, Tensor &kv_cache,
                                               const Tensor &seq_lens, const Tensor &seq_lens_decoder,
                                               const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
                                               const Tensor &block_tables, const OptionalTensor &kv_signal_data,
                                               const std::string &cache_quant_type_str, const int max_seq_len)
{
    (void)batch_id_per_token, (void)max_seq_len; /* cu_seqlens_q and block_tables say as much */
    return guarded("prefill_mla_write_cache", [&]() -> std::vector<Tensor> {
        refuse_signals(&kv_signal_data);
        if (kv_nope.shape()[0] == 0)
            return {kv_cache};
        const int64_t batch_size = seq_lens.numel();
        write_rows(kv_nope, kv_pe, kv_cache, lengths("seq_lens_decoder", seq_lens_decoder, batch_size),
                   positive(lengths("seq_lens", seq_lens, batch_size)), cu_seqlens_q, block_tables, cache_quant_type_str);
        return {kv_cache};
    });
}

std::vector<Tensor> prefill_mla_write_cache_v1(const Tensor &kv_nope, const Tensor &kv_pe, Tensor &kv_cache,
                                               const Tensor &seq_lens, const Tensor &seq_lens_decoder,
                                               const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
                                               const Tensor &block_tables, const std::string &cache_quant_type_str,
                                               const int max_seq_len)
{
    return prefill_mla_write_cache_v2(kv_nope, kv_pe, kv_cache, seq_lens, seq_lens_decoder, batch_id_per_token,
                                      cu_seqlens_q, block_tables, paddle::none, cache_quant_type_str, max_seq_len);
}

/** seq_lens are those of this step here, so decodes are written too. */
std::vector<Tensor> prefill_mla_write_cache(const Tensor &kv_nope, const Tensor &kv_pe, Tensor &kv_cache,
                                            const Tensor &seq_lens, const Tensor &seq_lens_decoder,
                                            const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
                                            const Tensor &block_tables, const Tensor &slot_mapping,
                                            const OptionalTensor &kv_signal_data, const std::string &cache_quant_type_str)
{
    (void)slot_mapping; /* the places that block_tables gives; FastDeploy's kernel stops where they differ */
    return prefill_mla_write_cache_v2(kv_nope, kv_pe, kv_cache, seq_lens, seq_lens_decoder, batch_id_per_token,
                                      cu_seqlens_q, block_tables, kv_signal_data, cache_quant_type_str, 0);
}

std::vector<Tensor> decode_mla_write_cache(const Tensor &kv_nope, const Tensor &kv_pe, Tensor &kv_cache,
                                           const Tensor &seq_lens, const Tensor &seq_lens_encoder,
                                           const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
                                           const Tensor &block_tables, const std::string &cache_quant_type_str,
                                           const bool speculate_decoder)
{
    (void)batch_id_per_token;
    return guarded("decode_mla_write_cache", [&]() -> std::vector<Tensor> {
        refuse_signals(nullptr);
        if (kv_nope.shape()[0] == 0)
            return {kv_cache};
        const int64_t batch_size = seq_lens.numel();
        const Tensor decoder = lengths("seq_lens", seq_lens, batch_size);
        Tensor keep = positive(decoder);
        if (!speculate_decoder)
            keep = px::logical_and(keep, not_positive(lengths("seq_lens_encoder", seq_lens_encoder, batch_size)));
        write_rows(kv_nope, kv_pe, kv_cache, decoder, keep, cu_seqlens_q, block_tables, cache_quant_type_str);
        return {kv_cache};
    });
}

std::vector<Tensor> decode_mla_write_cache_v1(const Tensor &kv_nope, const Tensor &kv_pe, Tensor &kv_cache,
                                              const Tensor &seq_lens, const Tensor &seq_lens_encoder,
                                              const Tensor &batch_id_per_token, const Tensor &cu_seqlens_q,
                                              const Tensor &block_tables, const std::string &cache_quant_type_str,
                                              const int max_seq_len, const bool speculate_decoder)
{
    (void)max_seq_len;
    return decode_mla_write_cache(kv_nope, kv_pe, kv_cache, seq_lens, seq_lens_encoder, batch_id_per_token, cu_seqlens_q,
                                  block_tables, cache_quant_type_str, speculate_decoder);
}

std::vector<Tensor> multi_head_latent_attention(
    const Tensor &query, const Tensor &key_cache, const Tensor &value_cache, const Tensor &seq_lens_decoder,
    const Tensor &seq_lens_this_time, const Tensor &cu_seqlens_q, const Tensor &batch_id_per_token,
    const Tensor &block_tables, const Tensor &kv_batch_ids, const Tensor &kv_tile_ids_per_batch,
    const Tensor &kv_num_blocks, const Tensor &decoder_batch_ids, const Tensor &decoder_tile_ids_per_batch,
    const Tensor &decoder_num_blocks, const Tensor &decoder_chunk_size_device, const Tensor &max_dec_len_this_time,
    const Tensor &max_len_kv, const OptionalTensor &attn_mask, const OptionalTensor &query_bias,
    const OptionalTensor &query_out_scales, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &out_linear_shifts, const OptionalTensor &out_linear_smooths, const std::string &compute_dtype,
    const std::string &cache_quant_type_str, const int nope_size, const int max_input_length, const float softmax_scale,
    const float quant_max_bound, const float quant_min_bound, const float out_linear_in_scale,
    const int speculate_max_draft_token_num, const bool causal, const bool speculate_decoder)
{
    // Folio cuts the work itself, and reads lengths on the device: tiles, maxima and bounds of a quantisation that is
    // off say nothing further.
    (void)batch_id_per_token, (void)kv_batch_ids, (void)kv_tile_ids_per_batch, (void)kv_num_blocks,
        (void)decoder_tile_ids_per_batch, (void)decoder_chunk_size_device, (void)max_dec_len_this_time, (void)max_len_kv,
        (void)max_input_length, (void)quant_max_bound, (void)quant_min_bound, (void)speculate_max_draft_token_num,
        (void)speculate_decoder;
    return guarded("multi_head_latent_attention", [&]() -> std::vector<Tensor> {
        refuse_given({{"attn_mask", &attn_mask}, {"query_bias", &query_bias}, {"query_out_scales", &query_out_scales},
                      {"cache_k_quant_scales", &cache_k_quant_scales}, {"cache_v_quant_scales", &cache_v_quant_scales},
                      {"cache_k_dequant_scales", &cache_k_dequant_scales},
                      {"cache_v_dequant_scales", &cache_v_dequant_scales}, {"cache_k_zp", &cache_k_zp},
                      {"cache_v_zp", &cache_v_zp}, {"out_linear_shifts", &out_linear_shifts},
                      {"out_linear_smooths", &out_linear_smooths}});
        require(value_cache.data() == key_cache.data(), "value_cache is not key_cache, whose records hold the values");
        const LatentAttention op{query, key_cache, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q, block_tables,
                                 compute_dtype, cache_quant_type_str, nope_size, softmax_scale, out_linear_in_scale,
                                 causal};
        return {attend_latents(op, listed(decoder_batch_ids, beside(decoder_num_blocks, decoder_batch_ids),
                                          seq_lens_this_time.numel()))};
    });
}

std::vector<Tensor> multi_head_latent_attention_v1(
    const Tensor &query, const Tensor &key_cache, const Tensor &value_cache, const Tensor &seq_lens_encoder,
    const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time, const Tensor &cu_seqlens_q,
    const Tensor &batch_id_per_token, const Tensor &block_tables, const Tensor &encoder_batch_ids,
    const Tensor &encoder_tile_ids_per_batch, const Tensor &encoder_num_blocks, const Tensor &kv_batch_ids,
    const Tensor &kv_tile_ids_per_batch, const Tensor &kv_num_blocks, const Tensor &decoder_batch_ids,
    const Tensor &decoder_tile_ids_per_batch, const Tensor &decoder_num_blocks, const Tensor &decoder_num_blocks_cpu,
    const Tensor &decoder_chunk_size_cpu, const Tensor &max_enc_len_this_time, const Tensor &max_dec_len_this_time,
    const Tensor &max_len_kv, const OptionalTensor &attn_mask, const OptionalTensor &query_bias,
    const OptionalTensor &query_out_scales, const OptionalTensor &cache_k_quant_scales,
    const OptionalTensor &cache_v_quant_scales, const OptionalTensor &cache_k_dequant_scales,
    const OptionalTensor &cache_v_dequant_scales, const OptionalTensor &cache_k_zp, const OptionalTensor &cache_v_zp,
    const OptionalTensor &out_linear_shifts, const OptionalTensor &out_linear_smooths, const std::string &compute_dtype,
    const std::string &cache_quant_type_str, const int nope_size, const int max_input_length, const float softmax_scale,
    const float quant_max_bound, const float quant_min_bound, const float out_linear_in_scale,
    const int speculate_max_draft_token_num, const bool causal, const bool speculate_decoder)
{
    (void)batch_id_per_token, (void)encoder_batch_ids, (void)encoder_tile_ids_per_batch, (void)encoder_num_blocks,
        (void)kv_batch_ids, (void)kv_tile_ids_per_batch, (void)kv_num_blocks, (void)decoder_batch_ids,
        (void)decoder_tile_ids_per_batch, (void)decoder_num_blocks, (void)decoder_num_blocks_cpu,
        (void)decoder_chunk_size_cpu, (void)max_enc_len_this_time, (void)max_dec_len_this_time, (void)max_len_kv,
        (void)max_input_length, (void)quant_max_bound, (void)quant_min_bound, (void)speculate_max_draft_token_num,
        (void)speculate_decoder;
    return guarded("multi_head_latent_attention", [&]() -> std::vector<Tensor> {
        refuse_given({{"attn_mask", &attn_mask}, {"query_bias", &query_bias}, {"query_out_scales", &query_out_scales},
                      {"cache_k_quant_scales", &cache_k_quant_scales}, {"cache_v_quant_scales", &cache_v_quant_scales},
                      {"cache_k_dequant_scales", &cache_k_dequant_scales},
                      {"cache_v_dequant_scales", &cache_v_dequant_scales}, {"cache_k_zp", &cache_k_zp},
                      {"cache_v_zp", &cache_v_zp}, {"out_linear_shifts", &out_linear_shifts},
                      {"out_linear_smooths", &out_linear_smooths}});
        require(value_cache.data() == key_cache.data(), "value_cache is not key_cache, whose records hold the values");
        const int64_t batch_size = seq_lens_this_time.numel();
        const LatentAttention op{query, key_cache, seq_lens_decoder, seq_lens_this_time, cu_seqlens_q, block_tables,
                                 compute_dtype, cache_quant_type_str, nope_size, softmax_scale, out_linear_in_scale,
                                 causal};
        return {attend_latents(op, decoding(seq_lens_encoder, seq_lens_decoder, batch_size))};
    });
}

void merge_prefill_decode_output(Tensor &encoder_res, const Tensor &decoder_res, const Tensor &seq_lens_encoder,
                                 const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time, const Tensor &cu_seq_q,
                                 const int head_num, const int head_dim, const int max_token)
{
    (void)max_token; /* cu_seq_q says how many tokens a request has */
    guarded("merge_prefill_decode_output", [&] {
        const int64_t num_tokens = encoder_res.shape()[0], batch_size = seq_lens_this_time.numel();
        require(encoder_res.shape() == decoder_res.shape() && encoder_res.dtype() == decoder_res.dtype(),
                "encoder_res and decoder_res differ in shape or type");
        require(encoder_res.numel() == num_tokens * head_num * head_dim,
                "rows of encoder_res do not have head_num * head_dim elements");
        if (num_tokens == 0)
            return;
        const Tensor rows = spread(decoding(seq_lens_encoder, seq_lens_decoder, batch_size), cu_seq_q, num_tokens);
        copy_rows(view(decoder_res, {num_tokens, head_num, head_dim}), view(encoder_res, {num_tokens, head_num, head_dim}),
                  rows, head_num);
    });
}

}  // namespace folio_paddle

namespace folio_paddle {

void bind_mla(pybind11::module_ &module)
{
    module.def("folio_prefill_mla_write_cache", &prefill_mla_write_cache, "Writes the latents of prompts to the cache.");
    module.def("folio_prefill_mla_write_cache_v2", &prefill_mla_write_cache_v2, "With max_seq_len, without slot_mapping.");
    module.def("folio_prefill_mla_write_cache_v1", &prefill_mla_write_cache_v1, "Without kv_signal_data too.");
    module.def("folio_decode_mla_write_cache", &decode_mla_write_cache, "Writes the latents of decodes to the cache.");
    module.def("folio_decode_mla_write_cache_v1", &decode_mla_write_cache_v1, "With max_seq_len.");
    module.def("folio_multi_head_latent_attention", &multi_head_latent_attention,
               "Absorbed MLA of decode rows; rows of prompts are 0.");
    module.def("folio_multi_head_latent_attention_v1", &multi_head_latent_attention_v1, "With seq_lens_encoder.");
    module.def("folio_merge_prefill_decode_output", &merge_prefill_decode_output,
               "Overwrites rows of decodes in the output of prompts.");
}

namespace {

using Attributes = std::vector<paddle::any>;
using Types = std::vector<paddle::DataType>;

Shapes no_shapes(const Shapes &, const std::vector<Shapes> &, const Attributes &) { return {}; }
Types no_types(const Types &, const std::vector<Types> &, const Attributes &) { return {}; }

/** The cache, which is written in place, is the third input. */
Shapes cache_shape(const Shapes &inputs, const std::vector<Shapes> &, const Attributes &) { return {inputs[2]}; }
Types cache_type(const Types &inputs, const std::vector<Types> &, const Attributes &) { return {inputs[2]}; }

/** [T, H L], from rows of H (L + R) and the attribute nope_size. */
Shapes latent_shape(const Shapes &inputs, const std::vector<Shapes> &, const Attributes &attributes)
{
    const int64_t heads = inputs[0].back() / inputs[1].back();
    return {{inputs[0][0], heads * paddle::any_cast<int>(attributes[2])}};
}
Types query_type(const Types &inputs, const std::vector<Types> &, const Attributes &) { return {inputs[0]}; }

}  // namespace
}  // namespace folio_paddle

PD_BUILD_OP(static_op_folio_prefill_mla_write_cache)
    .Inputs({"kv_nope", "kv_pe", "kv_cache", "seq_lens", "seq_lens_decoder", "batch_id_per_token", "cu_seqlens_q",
             "block_tables", "slot_mapping", paddle::Optional("kv_signal_data")})
    .Outputs({"kv_cache_out"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .Attrs({"cache_quant_type_str: std::string"})
    .SetKernelFn(PD_KERNEL(folio_paddle::prefill_mla_write_cache))
    .SetInferShapeFn(folio_paddle::cache_shape)
    .SetInferDtypeFn(folio_paddle::cache_type);

PD_BUILD_OP(static_op_folio_prefill_mla_write_cache_v2)
    .Inputs({"kv_nope", "kv_pe", "kv_cache", "seq_lens", "seq_lens_decoder", "batch_id_per_token", "cu_seqlens_q",
             "block_tables", paddle::Optional("kv_signal_data")})
    .Outputs({"kv_cache_out"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .Attrs({"cache_quant_type_str: std::string", "max_seq_len: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::prefill_mla_write_cache_v2))
    .SetInferShapeFn(folio_paddle::cache_shape)
    .SetInferDtypeFn(folio_paddle::cache_type);

PD_BUILD_OP(static_op_folio_prefill_mla_write_cache_v1)
    .Inputs({"kv_nope", "kv_pe", "kv_cache", "seq_lens", "seq_lens_decoder", "batch_id_per_token", "cu_seqlens_q",
             "block_tables"})
    .Outputs({"kv_cache_out"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .Attrs({"cache_quant_type_str: std::string", "max_seq_len: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::prefill_mla_write_cache_v1))
    .SetInferShapeFn(folio_paddle::cache_shape)
    .SetInferDtypeFn(folio_paddle::cache_type);

PD_BUILD_OP(static_op_folio_decode_mla_write_cache)
    .Inputs({"kv_nope", "kv_pe", "kv_cache", "seq_lens", "seq_lens_encoder", "batch_id_per_token", "cu_seqlens_q",
             "block_tables"})
    .Outputs({"kv_cache_out"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .Attrs({"cache_quant_type_str: std::string", "speculate_decoder: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::decode_mla_write_cache))
    .SetInferShapeFn(folio_paddle::cache_shape)
    .SetInferDtypeFn(folio_paddle::cache_type);

PD_BUILD_OP(static_op_folio_decode_mla_write_cache_v1)
    .Inputs({"kv_nope", "kv_pe", "kv_cache", "seq_lens", "seq_lens_encoder", "batch_id_per_token", "cu_seqlens_q",
             "block_tables"})
    .Outputs({"kv_cache_out"})
    .SetInplaceMap({{"kv_cache", "kv_cache_out"}})
    .Attrs({"cache_quant_type_str: std::string", "max_seq_len: int", "speculate_decoder: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::decode_mla_write_cache_v1))
    .SetInferShapeFn(folio_paddle::cache_shape)
    .SetInferDtypeFn(folio_paddle::cache_type);

// What both signatures of the attention op have in common.
#define FOLIO_LATENT_OPTIONAL_INPUTS                                                                                     \
    paddle::Optional("attn_mask"), paddle::Optional("query_bias"), paddle::Optional("query_out_scales"),                 \
        paddle::Optional("cache_k_quant_scales"), paddle::Optional("cache_v_quant_scales"),                              \
        paddle::Optional("cache_k_dequant_scales"), paddle::Optional("cache_v_dequant_scales"),                          \
        paddle::Optional("cache_k_zp"), paddle::Optional("cache_v_zp"), paddle::Optional("out_linear_shifts"),           \
        paddle::Optional("out_linear_smooths")
#define FOLIO_LATENT_ATTRIBUTES                                                                                          \
    "compute_dtype: std::string", "cache_quant_type_str: std::string", "nope_size: int", "max_input_length: int",        \
        "softmax_scale: float", "quant_max_bound: float", "quant_min_bound: float", "out_linear_in_scale: float",        \
        "speculate_max_draft_token_num: int", "causal: bool", "speculate_decoder: bool"

PD_BUILD_OP(static_op_folio_multi_head_latent_attention)
    .Inputs({"query", "key_cache", "value_cache", "seq_lens_decoder", "seq_lens_this_time", "cu_seqlens_q",
             "batch_id_per_token", "block_tables", "kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks",
             "decoder_batch_ids", "decoder_tile_ids_per_batch", "decoder_num_blocks", "decoder_chunk_size_device",
             "max_dec_len_this_time", "max_len_kv", FOLIO_LATENT_OPTIONAL_INPUTS})
    .Outputs({"out"})
    .Attrs({FOLIO_LATENT_ATTRIBUTES})
    .SetKernelFn(PD_KERNEL(folio_paddle::multi_head_latent_attention))
    .SetInferShapeFn(folio_paddle::latent_shape)
    .SetInferDtypeFn(folio_paddle::query_type);

PD_BUILD_OP(static_op_folio_multi_head_latent_attention_v1)
    .Inputs({"query", "key_cache", "value_cache", "seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time",
             "cu_seqlens_q", "batch_id_per_token", "block_tables", "encoder_batch_ids", "encoder_tile_ids_per_batch",
             "encoder_num_blocks", "kv_batch_ids", "kv_tile_ids_per_batch", "kv_num_blocks", "decoder_batch_ids",
             "decoder_tile_ids_per_batch", "decoder_num_blocks", "decoder_num_blocks_cpu", "decoder_chunk_size_cpu",
             "max_enc_len_this_time", "max_dec_len_this_time", "max_len_kv", FOLIO_LATENT_OPTIONAL_INPUTS})
    .Outputs({"out"})
    .Attrs({FOLIO_LATENT_ATTRIBUTES})
    .SetKernelFn(PD_KERNEL(folio_paddle::multi_head_latent_attention_v1))
    .SetInferShapeFn(folio_paddle::latent_shape)
    .SetInferDtypeFn(folio_paddle::query_type);

PD_BUILD_OP(static_op_folio_merge_prefill_decode_output)
    .Inputs({"encoder_res", "decoder_res", "seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time", "cu_seq_q"})
    .Outputs({"encoder_res_out"})
    .SetInplaceMap({{"encoder_res", "encoder_res_out"}})
    .Attrs({"head_num: int", "head_dim: int", "max_token: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::merge_prefill_decode_output))
    .SetInferShapeFn(folio_paddle::no_shapes)
    .SetInferDtypeFn(folio_paddle::no_types);
