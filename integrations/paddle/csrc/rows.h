// What follows from FastDeploy's lengths of a step: which requests are of which kind, how many keys they have, and where
// their new tokens go.
//
// All of it is computed on the tensors' device by Paddle's functions and Folio's operators. Nothing is copied to the
// host and no scalar of a CPU tensor is looked at, so that a capture holds for every later replay.
#pragma once

#include "session.h"

namespace folio_paddle {

/** [B] int32 tensors that must have the same length; [B, 1] is the same. */
Tensor lengths(const char *name, const Tensor &tensor, int64_t batch_size);

/** cu[b + 1] - cu[b]. */
Tensor differences(const Tensor &cu_seqlens_q);

/** Whether each element is above 0. */
Tensor positive(const Tensor &values);
/** Whether each element is 0 or less. */
Tensor not_positive(const Tensor &values);

/** decoder + this_time for requests with new tokens, 0 for others. */
Tensor kv_lengths(const Tensor &seq_lens_decoder, const Tensor &this_time);

/** `values` where `keep` holds, else `other`. */
Tensor keep_or(const Tensor &keep, const Tensor &values, double other);

/** A new token's place: its slot, int64, -1 where it is not to be written; and its position, -1 beyond the batch. */
struct Places {
    Tensor slots, positions;
};

/**
 * Places of num_tokens tokens, of which cu_seqlens_q says the requests. Tokens of requests that `keep` excludes have slot
 * -1. Without `keep` all requests are in.
 */
Places places(const Tensor &cu_seqlens_q, const Tensor &kv_len, const Tensor &block_tables, const Tensor *keep,
              int64_t page_size, int64_t num_tokens);

/** 0, 1, 2, ... as int32. */
Tensor counting(int64_t count, const paddle::Place &place);

/** What `of_request` [B] says of the request of each of num_tokens tokens; false beyond the batch. [T] */
Tensor spread(const Tensor &of_request, const Tensor &cu_seqlens_q, int64_t num_tokens);

/** Writes `values` into the memory of `target`, on its device and in the order of its stream. */
void overwrite(Tensor &target, const Tensor &values);

/** The requests that decode: no new prompt, and keys in the cache. [B] bool */
Tensor decoding(const Tensor &seq_lens_encoder, const Tensor &seq_lens_decoder, int64_t batch_size);

/** Copies the rows of `taken` that `rows` [T] names to `target`; both are [T, H, d] on the device of `rows`. */
void copy_rows(const folio::Tensor &taken, const folio::Tensor &target, const Tensor &rows, int64_t num_heads);

/** Refuses optional arguments that Folio has no use for, by name. */
void refuse_given(std::initializer_list<std::pair<const char *, const OptionalTensor *>> arguments);

/**
 * Refuses the signals of prefill-decode disaggregation: what waits for them would wait for ever. They come as a tensor
 * with each call, or by a flag of the environment.
 */
void refuse_signals(const OptionalTensor *kv_signal_data);

}  // namespace folio_paddle
