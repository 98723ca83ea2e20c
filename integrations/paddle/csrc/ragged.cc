// Attention over ragged keys, those of one request after those of the one before: Paddle's varlen functions, and FastDeploy's
// flash_mask_attention.
#include "grouped.h"
#include "ops.h"

#include <cmath>

namespace folio_paddle {
namespace {

/** q [T, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], whatever dimensions their tensors have. */
struct Ragged {
    const Tensor &q, &k, &v, &cu_seqlens_q, &cu_seqlens_k;
    int64_t num_tokens, num_keys, num_heads, num_kv_heads, dim, value_dim;

    int64_t batch_size() const { return cu_seqlens_q.numel() - 1; }
};

/** [T, H, Dv]. Rows of no request are 0. */
Tensor attend(const Ragged &rows, float scale, const Mask &mask)
{
    require(rows.batch_size() >= 0 && rows.cu_seqlens_k.numel() == rows.cu_seqlens_q.numel(),
            "cu_seqlens_q and cu_seqlens_k are not both [batch_size + 1]");
    Tensor out = px::full({rows.num_tokens, rows.num_heads, rows.value_dim}, 0, rows.q.dtype(), rows.q.place());
    if (rows.num_tokens == 0 || rows.batch_size() == 0)
        return out;

    auto desc = FOLIO_INIT(folio_prefill_desc);
    desc.flags = rows.q.is_gpu() ? FOLIO_PLAN_GRAPH : 0;
    desc.q_dtype = dtype_of(rows.q);
    desc.num_qo_heads = static_cast<uint32_t>(rows.num_heads);
    desc.num_kv_heads = static_cast<uint32_t>(rows.num_kv_heads);
    desc.head_dim_qk = static_cast<uint32_t>(rows.dim);
    desc.head_dim_vo = static_cast<uint32_t>(rows.value_dim);
    desc.kv_storage = FOLIO_KV_RAGGED;
    desc.max_batch_size = rounded_up(rows.batch_size());
    desc.max_num_tokens = rounded_up(rows.num_tokens);
    desc.max_kv_len = rounded_up(rows.num_keys);

    const folio::Tensor cu_q = flat(rows.cu_seqlens_q), cu_k = flat(rows.cu_seqlens_k);
    auto batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = cu_q;
    batch.kv_indptr = cu_k;

    const folio::Tensor queries = view(rows.q, {rows.num_tokens, rows.num_heads, rows.dim}),
                        key = view(rows.k, {rows.num_keys, rows.num_kv_heads, rows.dim}),
                        value = view(rows.v, {rows.num_keys, rows.num_kv_heads, rows.value_dim}),
                        o = view(out, {rows.num_tokens, rows.num_heads, rows.value_dim});
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = queries;
    args.k = key;
    args.v = value;
    args.o = o;
    args.sm_scale = scale;
    args.mask_mode = mask.causal ? FOLIO_MASK_CAUSAL : FOLIO_MASK_FULL;
    Tensor bias;
    std::optional<folio::Tensor> bias_view;
    if (mask.offsets) {
        const int64_t columns = longest(differences(rows.cu_seqlens_k), rows.num_keys);
        bias = mask.bias(rows.num_tokens, columns);
        bias_view = view(bias, {rows.num_tokens, columns});
        args.score_bias = *bias_view;
    }
    compute<Prefill>(rows.q, desc, batch, args, nullptr);
    return out;
}

/** How many rows of `width` elements a tensor has. */
int64_t rows_of(const char *name, const Tensor &tensor, int64_t width)
{
    require(width > 0 && tensor.numel() % width == 0, std::string(name) + " has " + std::to_string(tensor.numel()) +
                                                          " elements; rows of " + std::to_string(width) + " are accepted");
    return tensor.numel() / width;
}

/** flash_mask_attention in both signatures. */
void mask_attention(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
                    const Tensor &cu_seqlens_k, const Tensor &seq_lens_encoder, Tensor &attn_out,
                    const OptionalTensor &offsets, int64_t num_heads, int64_t num_kv_heads, int64_t dim)
{
    const int64_t T = rows_of("q", q, num_heads * dim), num_keys = rows_of("k", k, num_kv_heads * dim);
    require(v.numel() == k.numel(), "v has another number of elements than k");
    require(attn_out.numel() == q.numel() && attn_out.dtype() == q.dtype(),
            "attn_out is not [" + std::to_string(T) + ", " + std::to_string(num_heads * dim) + "] of q's type");
    const Ragged rows{q, k, v, cu_seqlens_q, cu_seqlens_k, T, num_keys, num_heads, num_kv_heads, dim, dim};
    const Tensor prompts = positive(lengths("seq_lens_encoder", seq_lens_encoder, rows.batch_size()));
    const Tensor out = attend(rows, 1 / std::sqrt(static_cast<float>(dim)), Mask(true, 0, offsets, T));
    if (T > 0)
        copy_rows(view(out, {T, num_heads, dim}), view(attn_out, {T, num_heads, dim}), spread(prompts, cu_seqlens_q, T),
                  num_heads);
}

}  // namespace

std::vector<Tensor> flash_attention_varlen(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
                                           const Tensor &cu_seqlens_k, const float softmax_scale, const bool causal)
{
    return guarded("flash_attention_varlen", [&]() -> std::vector<Tensor> {
        const auto shape = q.shape(), keys = k.shape(), values = v.shape();
        require(shape.size() == 3 && keys.size() == 3 && values.size() == 3 && keys[0] == values[0] &&
                    keys[1] == values[1] && keys[2] == shape[2],
                "q, k and v are not [T, H, D], [Tk, Hkv, D] and [Tk, Hkv, Dv]");
        const Ragged rows{q,       k,        v,        cu_seqlens_q, cu_seqlens_k, shape[0],
                          keys[0], shape[1], keys[1],  shape[2],     values[2]};
        const OptionalTensor nothing;
        return {attend(rows, softmax_scale, Mask(causal, 0, nothing, shape[0]))};
    });
}

void flash_mask_attention(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
                          const Tensor &cu_seqlens_k, const Tensor &seq_lens_encoder, Tensor &attn_out,
                          const OptionalTensor &mask, const int head_num, const int kv_head_num, const int head_dim)
{
    guarded("flash_mask_attention", [&] {
        mask_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, seq_lens_encoder, attn_out, mask, head_num, kv_head_num, head_dim);
    });
}

void flash_mask_attention_v1(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens_q,
                             const Tensor &cu_seqlens_k, const Tensor &seq_lens_encoder, Tensor &attn_out,
                             const OptionalTensor &mask, const int head_num, const int kv_head_num, const int head_dim,
                             const int max_seq_len, const int max_enc_len_this_time, const int max_dec_len_this_time)
{
    (void)max_seq_len, (void)max_enc_len_this_time, (void)max_dec_len_this_time; /* the lengths themselves are read */
    guarded("flash_mask_attention", [&] {
        OptionalTensor offsets;
        if (mask) { /* the key behind the last one of each token; the first is 0 */
            const Tensor ends = px::reshape(*mask, {mask->numel()});
            offsets = px::stack({px::zeros_like(ends), ends}, 1);
        }
        mask_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, seq_lens_encoder, attn_out, offsets, head_num, kv_head_num,
                       head_dim);
    });
}

void bind_ragged(pybind11::module_ &module)
{
    module.def("folio_flash_attention_varlen", &flash_attention_varlen,
               "(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal): attention over ragged keys.");
    module.def("folio_flash_mask_attention", &flash_mask_attention,
               "Attention of prompts over ragged keys, into a tensor of the caller's; a first key and an end for each token.");
    module.def("folio_flash_mask_attention_v1", &flash_mask_attention_v1, "With maxima, and an end for each token.");
}

namespace {

using Types = std::vector<paddle::DataType>;

Shapes ragged_shape(const Shapes &inputs, const std::vector<Shapes> &, const std::vector<paddle::any> &)
{
    return {{inputs[0][0], inputs[0][1], inputs[2][2]}};
}
Types ragged_type(const Types &inputs, const std::vector<Types> &, const std::vector<paddle::any> &) { return {inputs[0]}; }
Shapes in_place(const Shapes &, const std::vector<Shapes> &, const std::vector<paddle::any> &) { return {}; }
Types in_place_type(const Types &, const std::vector<Types> &, const std::vector<paddle::any> &) { return {}; }

}  // namespace
}  // namespace folio_paddle

PD_BUILD_OP(static_op_folio_flash_attention_varlen)
    .Inputs({"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"})
    .Outputs({"out"})
    .Attrs({"softmax_scale: float", "causal: bool"})
    .SetKernelFn(PD_KERNEL(folio_paddle::flash_attention_varlen))
    .SetInferShapeFn(folio_paddle::ragged_shape)
    .SetInferDtypeFn(folio_paddle::ragged_type);

PD_BUILD_OP(static_op_folio_flash_mask_attention)
    .Inputs({"q_input", "k_input", "v_input", "cu_seq_q", "cu_seq_k", "seq_len_encoder", "attn_out", paddle::Optional("mask")})
    .Outputs({"out"})
    .SetInplaceMap({{"attn_out", "out"}})
    .Attrs({"head_num: int", "kv_head_num: int", "head_dim: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::flash_mask_attention))
    .SetInferShapeFn(folio_paddle::in_place)
    .SetInferDtypeFn(folio_paddle::in_place_type);

PD_BUILD_OP(static_op_folio_flash_mask_attention_v1)
    .Inputs({"q_input", "k_input", "v_input", "cu_seq_q", "cu_seq_k", "seq_len_encoder", "attn_out", paddle::Optional("mask")})
    .Outputs({"out"})
    .SetInplaceMap({{"attn_out", "out"}})
    .Attrs({"head_num: int", "kv_head_num: int", "head_dim: int", "max_seq_len: int", "max_enc_len_this_time: int",
            "max_dec_len_this_time: int"})
    .SetKernelFn(PD_KERNEL(folio_paddle::flash_mask_attention_v1))
    .SetInferShapeFn(folio_paddle::in_place)
    .SetInferDtypeFn(folio_paddle::in_place_type);
