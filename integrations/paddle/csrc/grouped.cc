// Caches, projections, RoPE with the cache write, and attention over pages (grouped.h).
#include "grouped.h"

#include <algorithm>

namespace folio_paddle {
namespace {

/** x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded once. FastDeploy normalises after RoPE. */
Tensor normalised(const Tensor &x, const Tensor &weight, float eps, int64_t head_dim)
{
    require(weight.numel() == head_dim, "a norm weight has " + std::to_string(weight.numel()) + " elements; " +
                                            std::to_string(head_dim) + " are accepted");
    const Tensor wide = px::cast(x, paddle::DataType::FLOAT32);
    const Tensor mean = px::mean(px::multiply(wide, wide), {-1}, true);
    const Tensor eps_tensor = px::full({1}, eps, paddle::DataType::FLOAT32, x.place());
    const Tensor scaled = px::multiply(wide, px::rsqrt(px::add(mean, eps_tensor)));
    return px::cast(px::multiply(scaled, px::reshape(px::cast(weight, paddle::DataType::FLOAT32), {1, 1, head_dim})),
                    x.dtype());
}

/** FastDeploy's kinds of caches that have code. Its block_wise_fp8 has scales of 16 bits, which Folio does not write. */
constexpr CacheKind kinds[] = {
    {"none", FOLIO_KV_FORMAT_PLAIN, {}, 1, false, false},
    {"cache_fp8", FOLIO_KV_FORMAT_PLAIN, FOLIO_FLOAT8_E4M3, 1, true, false},
    {"cache_int8", FOLIO_KV_FORMAT_CHANNEL_SCALES, {}, 1, true, false},
    {"cache_int4_zp", FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS, {}, 2, true, true},
};

/** Factors of a cache in float32, in the shape that its kind has. One number and one for each head stand for all channels. */
Tensor factors(const char *name, const OptionalTensor &given, const Caches &caches)
{
    require(static_cast<bool>(given), std::string(caches.kind.name) + " needs " + name);
    const int64_t heads = caches.num_kv_heads, dim = caches.head_dim, count = given->numel();
    const bool channels = caches.kind.kv_format != FOLIO_KV_FORMAT_PLAIN;
    require(count == 1 || count == heads || (channels && count == heads * dim),
            std::string(name) + " has " + std::to_string(count) + " elements; 1 or num_kv_heads, which is " +
                std::to_string(heads) +
                (channels ? ", or num_kv_heads * head_dim, which is " + std::to_string(heads * dim) : "") + ", are accepted");
    const Tensor wide = px::cast(*given, paddle::DataType::FLOAT32);
    if (!channels)
        return px::reshape(wide, {count});
    const int64_t rows = count == 1 ? 1 : heads;
    return px::expand(px::reshape(wide, {rows, count / rows}), {heads, dim});
}

}  // namespace

const CacheKind &kind_of(const std::string &cache_quant_type)
{
    std::string names;
    for (const CacheKind &kind : kinds) {
        if (cache_quant_type == kind.name)
            return kind;
        names += (names.empty() ? "" : ", ") + std::string(kind.name);
    }
    refuse("cache_quant_type is \"" + cache_quant_type + "\"; accepted are " + names);
}

int64_t attended_width(int64_t row, const std::vector<int64_t> &key_cache, const std::string &cache_quant_type)
{
    return row - 2 * key_cache[1] * key_cache[3] * kind_of(cache_quant_type).elements_per_byte;
}

Caches caches_of(const Tensor &key, const Tensor &value, const std::string &cache_quant_type, const GivenFactors &given)
{
    const CacheKind &kind = kind_of(cache_quant_type);
    const auto shape = key.shape();
    require(shape.size() == 4 && value.shape() == shape,
            "key_cache and value_cache are not both [num_blocks, num_kv_heads, block_size, head_dim]");
    Caches caches{key, value, kind, shape[0], shape[1], shape[2], shape[3], shape[3] * kind.elements_per_byte, {}, {}, {}, {}};
    if (kind.has_scales) {
        caches.k_scales = factors("cache_k_dequant_scales", given.k_dequant, caches);
        caches.v_scales = factors("cache_v_dequant_scales", given.v_dequant, caches);
    } else {
        refuse_given({{"cache_k_dequant_scales", &given.k_dequant}, {"cache_v_dequant_scales", &given.v_dequant}});
    }
    if (kind.has_zero_points) {
        caches.k_zero_points = factors("cache_k_zp", given.k_zp, caches);
        caches.v_zero_points = factors("cache_v_zp", given.v_zp, caches);
    } else {
        refuse_given({{"cache_k_zp", &given.k_zp}, {"cache_v_zp", &given.v_zp}});
    }
    return caches;
}

folio::Tensor pages(const Tensor &cache, const Caches &caches)
{
    return view(cache, {caches.num_pages, caches.num_kv_heads, caches.page_size, caches.row});
}

FactorViews::FactorViews(const Caches &caches)
{
    const auto viewed = [](const Tensor &factors) -> std::optional<folio::Tensor> {
        if (!factors.initialized())
            return std::nullopt;
        return factors.shape().size() == 1 ? flat(factors) : view(factors, {factors.shape()[0], factors.shape()[1]});
    };
    k_scales = viewed(caches.k_scales);
    v_scales = viewed(caches.v_scales);
    k_zero_points = viewed(caches.k_zero_points);
    v_zero_points = viewed(caches.v_zero_points);
}

Projection::Projection(const Tensor &given, const OptionalTensor &bias, const Caches &caches)
    : qkv(given), num_tokens(given.shape()[0]), row(num_tokens ? given.numel() / num_tokens : given.shape().back())
{
    num_heads = row / caches.head_dim - 2 * caches.num_kv_heads;
    require(given.shape().size() == 2 && num_heads > 0 && row % caches.head_dim == 0,
            "qkv has rows of " + std::to_string(row) + " elements; (num_heads + 2 num_kv_heads) * head_dim are accepted");
    if (bias) {
        require(bias->numel() == row && bias->dtype() == given.dtype(), "qkv_bias is not a row of qkv's type");
        // In float32, since Paddle's CPU adds no 16-bit types.
        const Tensor wide = px::add(px::cast(qkv, paddle::DataType::FLOAT32),
                                    px::reshape(px::cast(*bias, paddle::DataType::FLOAT32), {1, row}));
        qkv = px::cast(wide, given.dtype());
    }
}

Rotation::Rotation(const OptionalTensor &rotary_embs, bool use_neox_rotary_style, bool rope_3d, int64_t head_dim)
    : table(rotary_embs), width(use_neox_rotary_style ? head_dim : head_dim / 2), half(head_dim / 2),
      interleaved(!use_neox_rotary_style)
{
    require(!rope_3d, "rope_3d is true; positions of three axes have no code, false is accepted");
    if (!rotary_embs)
        return;
    const auto shape = rotary_embs->shape();
    require(shape.size() == 5 && shape[0] == 2 && shape[1] == 1 && shape[3] == 1 && shape[4] == width,
            std::string("rotary_embs is not [2, 1, max_len, 1, ") + std::to_string(width) +
                "], which is what head_dim and use_neox_rotary_style ask for");
    max_len = shape[2];
}

Rotated rotate_and_write(const Projection &projection, const Caches &caches, const Rotation &rotation,
                         const OptionalTensor &q_norm_weight, const OptionalTensor &k_norm_weight, float rms_norm_eps,
                         const Places &where)
{
    require(static_cast<bool>(q_norm_weight) == static_cast<bool>(k_norm_weight),
            "q_norm_weight and k_norm_weight are given both or not at all");
    const int64_t T = projection.num_tokens, d = caches.head_dim, Hq = projection.num_heads, Hkv = caches.num_kv_heads;
    const Tensor &qkv = projection.qkv;
    Rotated made{px::empty({T, Hq, d}, qkv.dtype(), qkv.place()), px::empty({T, Hkv, d}, qkv.dtype(), qkv.place())};
    // The cache gets normalised keys, so with norms it is written after them.
    const Tensor nowhere = q_norm_weight ? px::full_like(where.slots, -1, where.slots.dtype()) : where.slots;
    const Tensor positions = px::where(px::greater_equal(where.positions, px::zeros_like(where.positions)), where.positions,
                                       px::zeros_like(where.positions));

    const folio::Tensor q = view(qkv, {T, Hq, d}, {projection.row, d, 1}), q_out = view(made.q, {T, Hq, d}),
                        key = view(qkv, {T, Hkv, d}, {projection.row, d, 1}, Hq * d), key_out = view(made.k, {T, Hkv, d}),
                        value = view(qkv, {T, Hkv, d}, {projection.row, d, 1}, (Hq + Hkv) * d),
                        k_cache = pages(caches.key, caches), v_cache = pages(caches.value, caches), slots = flat(nowhere),
                        place_of = flat(positions);
    auto args = FOLIO_INIT(folio_rope_append_args);
    args.q = q;
    args.q_out = q_out;
    args.key = key;
    args.key_out = key_out;
    args.value = value;
    args.k_cache = k_cache;
    args.v_cache = v_cache;
    args.slot_mapping = slots;
    args.kv_layout = FOLIO_LAYOUT_HND;
    args.kv_dtype = caches.kind.kv_dtype;
    args.kv_format = caches.kind.kv_format;
    const FactorViews factors(caches);
    factors.put(args);
    std::unique_ptr<folio::Tensor> table;
    if (rotation.table) {
        table = std::make_unique<folio::Tensor>(rotation.angles());
        args.cos_sin_cache = *table;
        args.positions = place_of;
        args.flags = rotation.interleaved ? FOLIO_ROPE_INTERLEAVED : 0;
    }
    context_of(qkv).append(args, stream_of(qkv));
    if (!q_norm_weight)
        return made;

    made.q = normalised(made.q, *q_norm_weight, rms_norm_eps, d);
    made.k = normalised(made.k, *k_norm_weight, rms_norm_eps, d);
    const folio::Tensor normal_key = view(made.k, {T, Hkv, d}), all_slots = flat(where.slots);
    auto append = FOLIO_INIT(folio_kv_append_args);
    append.key = normal_key;
    append.value = value;
    append.k_cache = k_cache;
    append.v_cache = v_cache;
    append.slot_mapping = all_slots;
    factors.put(append);
    append.kv_layout = FOLIO_LAYOUT_HND;
    append.kv_format = caches.kind.kv_format;
    append.kv_dtype = caches.kind.kv_dtype;
    context_of(qkv).append(append, stream_of(qkv));
    return made;
}

Batch::Batch(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, const Tensor &seq_lens_this_time,
             const Tensor &cu, const Tensor &tables)
    : size(seq_lens_this_time.numel()), cu_seqlens_q(cu), block_tables(tables)
{
    lengths("seq_lens_encoder", seq_lens_encoder, size);
    require(cu.numel() == size + 1, "cu_seqlens_q has " + std::to_string(cu.numel()) + " elements; " +
                                        std::to_string(size + 1) + " are accepted");
    require(tables.shape().size() == 2 && tables.shape()[0] == size,
            "block_tables is not [" + std::to_string(size) + ", max_blocks]");
    kv_len = kv_lengths(lengths("seq_lens_decoder", seq_lens_decoder, size),
                        lengths("seq_lens_this_time", seq_lens_this_time, size));
}

int64_t longest(const Tensor &lengths, int64_t bound)
{
    if (!lengths.is_cpu() || lengths.numel() == 0)
        return bound;
    const auto *first = lengths.data<int32_t>();
    return std::max(1, *std::max_element(first, first + lengths.numel()));
}

Mask::Mask(bool is_causal, int window, const OptionalTensor &pairs, int64_t num_tokens, int sinks)
    : causal(is_causal && !pairs), sliding_window(window), offsets(pairs), sink_size(sinks)
{
    require(sinks == 0 || (sinks > 0 && pairs),
            "sink_size is " + std::to_string(sinks) + "; 0 is accepted, and more with mask_offset");
    require(!pairs || (pairs->dtype() == paddle::DataType::INT32 && pairs->numel() >= 2 * num_tokens),
            "mask_offset is not int32 with the first key of each token and the one behind its last, " +
                std::to_string(2 * num_tokens) + " elements");
}

Tensor Mask::bias(int64_t num_tokens, int64_t columns) const
{
    const auto place = offsets->place();
    const Tensor all = px::reshape(*offsets, {offsets->numel()});
    const Tensor pairs = px::reshape(px::slice(all, {0}, {0}, {2 * num_tokens}, {1}, {}), {num_tokens, 2});
    const Tensor first = px::slice(pairs, {1}, {0}, {1}, {1}, {}), end = px::slice(pairs, {1}, {1}, {2}, {1}, {});
    const Tensor key = px::reshape(counting(columns, place), {1, columns});
    Tensor seen = px::logical_and(px::greater_equal(key, first), px::less_than(key, end));
    if (sliding_window > 0) {
        const auto moved = [&](const Tensor &from, int by) { return px::add(from, px::full_like(from, by, from.dtype())); };
        seen = px::logical_and(seen, px::logical_or(px::less_than(key, moved(first, sink_size)),
                                                    px::greater_equal(key, moved(end, -sliding_window))));
    }
    // In 16 bits, which is half the memory, but where Paddle's CPU has no code for them.
    const auto type = offsets->is_gpu() ? paddle::DataType::FLOAT16 : paddle::DataType::FLOAT32;
    return px::log(px::cast(seen, type)); /* of 1 it is 0, and of 0 -inf */
}

void attend(const Tensor &storage, const folio::Tensor &queries, int64_t num_tokens, int64_t num_heads, Tensor &out,
            const Caches &caches, const Batch &lengths_of, const Mask &mask, const OptionalTensor &sinks)
{
    auto desc = FOLIO_INIT(folio_prefill_desc);
    desc.flags = storage.is_gpu() ? FOLIO_PLAN_GRAPH : 0;
    desc.q_dtype = dtype_of(storage);
    desc.kv_dtype = caches.kind.kv_dtype;
    desc.kv_format = caches.kind.kv_format;
    desc.kv_layout = FOLIO_LAYOUT_HND;
    desc.num_qo_heads = static_cast<uint32_t>(num_heads);
    desc.num_kv_heads = static_cast<uint32_t>(caches.num_kv_heads);
    desc.head_dim_qk = static_cast<uint32_t>(caches.head_dim);
    desc.page_size = static_cast<uint32_t>(caches.page_size);
    desc.max_batch_size = rounded_up(lengths_of.size);
    desc.max_num_tokens = rounded_up(num_tokens);
    desc.max_kv_len = static_cast<uint32_t>(lengths_of.block_tables.shape()[1] * caches.page_size);

    const folio::Tensor cu = flat(lengths_of.cu_seqlens_q), keys = flat(lengths_of.kv_len),
                        table = view(lengths_of.block_tables, {lengths_of.size, lengths_of.block_tables.shape()[1]});
    auto batch = FOLIO_INIT(folio_batch);
    batch.qo_indptr = cu;
    batch.kv_len = keys;
    batch.block_table = table;

    const folio::Tensor o = view(out, {num_tokens, num_heads, caches.head_dim}), k = pages(caches.key, caches),
                        v = pages(caches.value, caches);
    auto args = FOLIO_INIT(folio_attention_args);
    args.q = queries;
    args.k = k;
    args.v = v;
    args.o = o;
    args.mask_mode = mask.causal ? FOLIO_MASK_CAUSAL : FOLIO_MASK_FULL;
    Tensor bias;
    std::optional<folio::Tensor> bias_view;
    if (mask.offsets) {
        const int64_t columns = longest(lengths_of.kv_len, desc.max_kv_len);
        bias = mask.bias(num_tokens, columns);
        bias_view = view(bias, {num_tokens, columns});
        args.score_bias = *bias_view;
    } else if (mask.sliding_window > 0) {
        args.flags |= FOLIO_RUN_WINDOW;
        args.window_left = mask.sliding_window - 1;
        args.window_right = -1;
        batch.flags |= FOLIO_BATCH_WINDOW;
        batch.window_left = args.window_left;
    }
    const FactorViews factors(caches);
    factors.put(args);
    std::unique_ptr<folio::Tensor> sink_view;
    Tensor sink_logits;
    if (sinks) {
        sink_logits = px::cast(*sinks, paddle::DataType::FLOAT32);
        sink_view = std::make_unique<folio::Tensor>(flat(sink_logits));
        args.sinks = *sink_view;
    }
    compute<Prefill>(storage, desc, batch, args, &lengths_of.block_tables);
}

}  // namespace folio_paddle
