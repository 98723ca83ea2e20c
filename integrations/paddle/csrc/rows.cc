// Lengths, places and masks of a step (rows.h).
#include "rows.h"

#include <cstdlib>
#include <cstring>
#include <limits>

namespace folio_paddle {

Tensor lengths(const char *name, const Tensor &tensor, int64_t batch_size)
{
    require(tensor.dtype() == paddle::DataType::INT32 && tensor.numel() == batch_size,
            std::string(name) + " has " + std::to_string(tensor.numel()) + " elements of " +
                phi::DataTypeToString(tensor.dtype()) + "; " + std::to_string(batch_size) + " of int32 are accepted");
    return tensor.shape().size() == 1 ? tensor : px::reshape(tensor, {batch_size});
}

Tensor differences(const Tensor &cu_seqlens_q)
{
    require(cu_seqlens_q.dtype() == paddle::DataType::INT32 && cu_seqlens_q.numel() >= 1,
            "cu_seqlens_q is not int32 [batch_size + 1]");
    const Tensor cu = px::reshape(cu_seqlens_q, {cu_seqlens_q.numel()});
    const int64_t batch_size = cu.numel() - 1;
    return px::subtract(px::slice(cu, {0}, {1}, {batch_size + 1}, {1}, {}), px::slice(cu, {0}, {0}, {batch_size}, {1}, {}));
}

Tensor positive(const Tensor &values) { return px::greater_than(values, px::zeros_like(values)); }

Tensor not_positive(const Tensor &values) { return px::less_equal(values, px::zeros_like(values)); }

Tensor keep_or(const Tensor &keep, const Tensor &values, double other)
{
    return px::where(keep, values, px::full_like(values, other, values.dtype()));
}

Tensor kv_lengths(const Tensor &seq_lens_decoder, const Tensor &this_time)
{
    Tensor kv_len = px::empty({this_time.numel()}, paddle::DataType::INT32, this_time.place());
    const folio::Tensor qo = flat(this_time), cached = flat(seq_lens_decoder), out = flat(kv_len);
    auto args = FOLIO_INIT(folio_batch_lengths_args);
    args.qo_len = qo;
    args.cached_len = cached;
    args.kv_len = out;
    context_of(this_time).batch_lengths(args, stream_of(this_time));
    return kv_len;
}

Places places(const Tensor &cu_seqlens_q, const Tensor &kv_len, const Tensor &block_tables, const Tensor *keep,
              int64_t page_size, int64_t num_tokens)
{
    const int64_t batch_size = kv_len.numel();
    require(block_tables.shape().size() == 2 && block_tables.shape()[0] == batch_size,
            "block_tables is not [" + std::to_string(batch_size) + ", max_blocks]");
    const Tensor tables = keep ? keep_or(px::expand(px::reshape(*keep, {batch_size, 1}), block_tables.shape()),
                                         block_tables, -1)
                               : block_tables;
    Places result{px::empty({num_tokens}, paddle::DataType::INT64, kv_len.place()),
                  px::empty({num_tokens}, paddle::DataType::INT64, kv_len.place())};
    const folio::Tensor table = view(tables, {batch_size, tables.shape()[1]}), cu = flat(cu_seqlens_q),
                        keys = flat(kv_len), slots = flat(result.slots), positions = flat(result.positions);
    auto args = FOLIO_INIT(folio_slot_mapping_args);
    args.block_table = table;
    args.qo_indptr = cu;
    args.kv_len = keys;
    args.slot_mapping = slots;
    args.positions = positions;
    args.page_size = static_cast<uint32_t>(page_size);
    context_of(kv_len).slot_mapping(args, stream_of(kv_len));
    return result;
}

Tensor counting(int64_t count, const paddle::Place &place)
{
    const Tensor one = px::full({1}, 1, paddle::DataType::INT32, place);
    return px::subtract(px::cumsum(px::full({count}, 1, paddle::DataType::INT32, place), 0), one);
}

Tensor spread(const Tensor &of_request, const Tensor &cu_seqlens_q, int64_t num_tokens)
{
    const int64_t batch_size = of_request.numel();
    const auto place = of_request.place();
    const Tensor token = counting(num_tokens, place);
    const Tensor ends = px::slice(px::reshape(cu_seqlens_q, {batch_size + 1}), {0}, {1}, {batch_size + 1}, {1}, {});
    const Tensor request = px::searchsorted(ends, token, true, true);
    const Tensor none = px::full({1}, 0, paddle::DataType::BOOL, place);
    return px::gather(px::concat({of_request, none}, 0), request, 0);
}

void overwrite(Tensor &target, const Tensor &values)
{
    require(target.numel() == values.numel() && target.dtype() == values.dtype(),
            "an output has another shape or type than its input");
    target.copy_(target.shape() == values.shape() ? values : px::reshape(values, target.shape()), target.place(), false);
}

Tensor decoding(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, int64_t batch_size)
{
    return px::logical_and(positive(lengths("seq_lens_decoder", seq_lens_decoder, batch_size)),
                           not_positive(lengths("seq_lens_encoder", seq_lens_encoder, batch_size)));
}

void copy_rows(const folio::Tensor &taken, const folio::Tensor &target, const Tensor &rows, int64_t num_heads)
{
    // A merge with an empty state leaves the other one as it is, and a mask leaves rows as they are.
    const int64_t num_tokens = rows.numel();
    const Tensor whole = px::full({num_tokens, num_heads}, 0, paddle::DataType::FLOAT32, rows.place());
    const Tensor empty = px::full({num_tokens, num_heads}, -std::numeric_limits<double>::infinity(),
                                  paddle::DataType::FLOAT32, rows.place());
    const folio::Tensor s_whole = view(whole, {num_tokens, num_heads}), s_empty = view(empty, {num_tokens, num_heads}),
                        mask = flat(rows);
    auto args = FOLIO_INIT(folio_merge_state_args);
    args.v_a = taken;
    args.s_a = s_whole;
    args.v_b = taken;
    args.s_b = s_empty;
    args.v_out = target;
    args.mask = mask;
    context_of(rows).merge(args, stream_of(rows));
}

void refuse_given(std::initializer_list<std::pair<const char *, const OptionalTensor *>> arguments)
{
    for (const auto &[name, argument] : arguments)
        require(!*argument, std::string(name) + " is given; Folio has no code for it, None is accepted");
}

void refuse_signals(const OptionalTensor *kv_signal_data)
{
    if (kv_signal_data)
        require(!*kv_signal_data, "kv_signal_data is given: Folio sends no signals of prefill-decode disaggregation, and "
                                  "what waits for them would hang; run without it");
    for (const char *flag : {"FLAGS_fmt_write_cache_completed_signal", "FLAGS_use_pd_disaggregation_per_chunk"}) {
        const char *value = std::getenv(flag);
        require(!value || std::strcmp(value, "0") == 0 || std::strcmp(value, "false") == 0 || *value == '\0',
                std::string(flag) + " is " + (value ? value : "") +
                    ": Folio sends no signals of prefill-decode disaggregation, and what waits for them would hang");
    }
}

}  // namespace folio_paddle
