//! Append and decode by one call; the structs are those of its two parts.

use super::args::folio_attention_args;
use super::attention;
use super::decode::folio_decode;
use super::error::folio_error;
use super::rope_append::folio_rope_append_args;
use super::status::folio_status;
use std::ffi::c_void;

/// Appends the new tokens of a step and computes attention with them: what folio_rope_append(append) followed by
/// folio_decode_run(args) does, with the same results up to rounding, as one enqueue. In a decode step of a model this is all
/// between the projection of q, k and v and that of the output. (No counterpart in FlashInfer or vLLM, whose fusions end at
/// the cache.)
///
/// The tensors of the two are the same: args.q is append.q_out, or append.q where that is NULL, and args.k and args.v are the
/// caches of append. The planned lengths count the new tokens: row i of the batch is token i of append, and its key the one
/// that causal masking lets it see last. Its slot is where the planned page table has that key; a negative slot leaves the
/// cache as it is, and the run attends to what it holds. Whether tokens are computed and appended that no request of the batch
/// has, or for which its kv_len has no key, is not defined. On CUDA nothing checks slots in device memory: another key's slot
/// is a race.
///
/// On Hopper one kernel does both, and a second where keys of a request are split, for: caches of float16, bfloat16 or fp8 in
/// pages of a multiple of 8 tokens; head_dim 64, 128 or 256 (fp8: 64 or 128), up to 16 packed rows for each KV head (fp8 and
/// head_dim 256: 8), q of 16 bits; q_out another tensor than q, no key_out; rotary_dim a multiple of 16; rows aligned to 16
/// bytes; no custom mask. Otherwise, and on other devices, the two kernels are enqueued one after the other.
///
/// @param handle the handle
/// @param append new tokens, with their queries
/// @param args tensors and parameters of the attention
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK; what folio_rope_append and folio_decode_run return, and INVALID_ARGUMENT where their tensors are not
///         the same
///
/// # Safety
/// As folio_decode_run, for the tensors of both structs. Concurrent calls are fine as there, with different slots.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_decode_append_run(
    handle: *const folio_decode,
    append: *const folio_rope_append_args,
    args: *const folio_attention_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { attention::append_run(handle, append, args, stream, err) }
}
