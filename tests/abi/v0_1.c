/*
 * The ABI of Folio 0.1, frozen: sizes, offsets and numbers that programs compiled against its header rely
 * on. Lines may be added here with a release; none may change within a major version (while that is 0,
 * within a minor one). Compiled by tests/abi.rs, as C and as C++; never run.
 */
#include <folio/folio.h>

#ifdef __cplusplus
#define SAME(a, b) static_assert((a) == (b), #a)
#else
#define SAME(a, b) _Static_assert((a) == (b), #a)
#endif
#define SIZE(type, bytes) SAME(sizeof(type), bytes)
#define AT(type, field, bytes) SAME(offsetof(type, field), bytes)

SAME(FOLIO_ABI_MAJOR, 0);
SAME(FOLIO_ABI_MINOR, 1);
SAME(FOLIO_ABI_VERSION, 1);
SAME(FOLIO_DEVICE_CPU, 1);
SAME(FOLIO_DEVICE_CUDA, 2);
SAME(FOLIO_DEVICE_CUDA_HOST, 3);
SAME(FOLIO_LAYOUT_NHD, 0);
SAME(FOLIO_LAYOUT_HND, 1);
SAME(FOLIO_KV_PAGED, 0);
SAME(FOLIO_KV_RAGGED, 1);
SAME(FOLIO_CONTEXT_REFERENCE, 1);
SAME(FOLIO_LOG_ERROR, 1);
SAME(FOLIO_LOG_WARNING, 2);
SAME(FOLIO_LOG_INFO, 3);
SAME(FOLIO_PLAN_GRAPH, 1);
SAME(FOLIO_PLAN_BATCH_INVARIANT, 2);
SAME(FOLIO_RUN_WINDOW, 1);
SAME(FOLIO_RUN_LSE_BASE_2, 2);
SAME(FOLIO_RUN_ALIBI_SQRT, 4);
SAME(FOLIO_MASK_CAUSAL, 0);
SAME(FOLIO_MASK_FULL, 1);
SAME(FOLIO_MASK_CUSTOM_BYTES, 2);
SAME(FOLIO_MASK_CUSTOM_BITS, 3);
SAME(FOLIO_MERGE_LSE_BASE_2, 1);
SAME(FOLIO_MLA_CACHE_PLAIN, 0);
SAME(FOLIO_MLA_CACHE_FP8_DS_MLA, 1);
SAME(FOLIO_MLA_ROPE_INTERLEAVED, 1);
SAME(FOLIO_CP_LSE_BASE_2, 1);
SAME(FOLIO_SPLIT_UNIFORM, 1);
SAME(FOLIO_OK, 0);
SAME(FOLIO_ERR_INVALID_ARGUMENT, 1);
SAME(FOLIO_ERR_INVALID_STRUCT_SIZE, 2);
SAME(FOLIO_ERR_UNKNOWN_FIELD, 3);
SAME(FOLIO_ERR_SHAPE, 4);
SAME(FOLIO_ERR_DTYPE, 5);
SAME(FOLIO_ERR_DEVICE_MISMATCH, 6);
SAME(FOLIO_ERR_WORKSPACE_TOO_SMALL, 7);
SAME(FOLIO_ERR_NOT_PLANNED, 8);
SAME(FOLIO_ERR_CAPTURE, 9);
SAME(FOLIO_ERR_UNSUPPORTED, 50);
SAME(FOLIO_ERR_NO_DEVICE, 51);
SAME(FOLIO_ERR_NO_DRIVER, 52);
SAME(FOLIO_ERR_DRIVER_TOO_OLD, 53);
SAME(FOLIO_ERR_COMPILE, 54);
SAME(FOLIO_ERR_OUT_OF_MEMORY, 100);
SAME(FOLIO_ERR_DRIVER, 101);
SAME(FOLIO_ERR_INTERNAL, 200);

SAME(sizeof(void *), 8);
SIZE(folio_status, 4);

SIZE(folio_context_desc, 40);
AT(folio_context_desc, struct_size, 0);
AT(folio_context_desc, flags, 4);
AT(folio_context_desc, device_type, 8);
AT(folio_context_desc, device_id, 12);
AT(folio_context_desc, num_threads, 16);
AT(folio_context_desc, log_level, 20);
AT(folio_context_desc, log, 24);
AT(folio_context_desc, log_user, 32);

SIZE(folio_error, 512);
AT(folio_error, struct_size, 0);
AT(folio_error, status, 4);
AT(folio_error, message, 8);

SIZE(folio_dtype, 4);
AT(folio_dtype, code, 0);
AT(folio_dtype, bits, 1);
AT(folio_dtype, lanes, 2);

SIZE(folio_decode_desc, 64);
AT(folio_decode_desc, struct_size, 0);
AT(folio_decode_desc, flags, 4);
AT(folio_decode_desc, q_dtype, 8);
AT(folio_decode_desc, kv_dtype, 12);
AT(folio_decode_desc, o_dtype, 16);
AT(folio_decode_desc, kv_layout, 20);
AT(folio_decode_desc, num_qo_heads, 24);
AT(folio_decode_desc, num_kv_heads, 28);
AT(folio_decode_desc, head_dim_qk, 32);
AT(folio_decode_desc, head_dim_vo, 36);
AT(folio_decode_desc, page_size, 40);
AT(folio_decode_desc, max_batch_size, 44);
AT(folio_decode_desc, max_qo_len, 48);
AT(folio_decode_desc, max_kv_len, 52);
AT(folio_decode_desc, max_num_pages, 56);

SIZE(folio_workspace_info, 32);
AT(folio_workspace_info, struct_size, 0);
AT(folio_workspace_info, reserved, 4);
AT(folio_workspace_info, device_bytes, 8);
AT(folio_workspace_info, host_bytes, 16);
AT(folio_workspace_info, alignment, 24);

SIZE(folio_tensor, 48);
AT(folio_tensor, data, 0);
AT(folio_tensor, device_type, 8);
AT(folio_tensor, device_id, 12);
AT(folio_tensor, ndim, 16);
AT(folio_tensor, dtype, 20);
AT(folio_tensor, shape, 24);
AT(folio_tensor, strides, 32);
AT(folio_tensor, byte_offset, 40);

SIZE(folio_batch, 64);
AT(folio_batch, struct_size, 0);
AT(folio_batch, flags, 4);
AT(folio_batch, qo_len, 8);
AT(folio_batch, reserved, 12);
AT(folio_batch, qo_indptr, 16);
AT(folio_batch, kv_indptr, 24);
AT(folio_batch, kv_indices, 32);
AT(folio_batch, last_page_len, 40);
AT(folio_batch, kv_len, 48);
AT(folio_batch, block_table, 56);

SIZE(folio_workspace, 40);
AT(folio_workspace, struct_size, 0);
AT(folio_workspace, flags, 4);
AT(folio_workspace, device, 8);
AT(folio_workspace, device_bytes, 16);
AT(folio_workspace, host, 24);
AT(folio_workspace, host_bytes, 32);

SIZE(folio_attention_args, 136);
AT(folio_attention_args, struct_size, 0);
AT(folio_attention_args, flags, 4);
AT(folio_attention_args, q, 8);
AT(folio_attention_args, k, 16);
AT(folio_attention_args, v, 24);
AT(folio_attention_args, o, 32);
AT(folio_attention_args, lse, 40);
AT(folio_attention_args, k_scales, 48);
AT(folio_attention_args, v_scales, 56);
AT(folio_attention_args, custom_mask, 64);
AT(folio_attention_args, mm_prefix_ranges, 72);
AT(folio_attention_args, alibi_slopes, 80);
AT(folio_attention_args, sinks, 88);
AT(folio_attention_args, sm_scale, 96);
AT(folio_attention_args, q_scale, 100);
AT(folio_attention_args, k_scale, 104);
AT(folio_attention_args, v_scale, 108);
AT(folio_attention_args, o_scale, 112);
AT(folio_attention_args, logits_soft_cap, 116);
AT(folio_attention_args, mask_mode, 120);
AT(folio_attention_args, window_left, 124);
AT(folio_attention_args, window_right, 128);
AT(folio_attention_args, reserved, 132);

SIZE(folio_prefill_desc, 72);
AT(folio_prefill_desc, struct_size, 0);
AT(folio_prefill_desc, flags, 4);
AT(folio_prefill_desc, q_dtype, 8);
AT(folio_prefill_desc, kv_dtype, 12);
AT(folio_prefill_desc, o_dtype, 16);
AT(folio_prefill_desc, kv_layout, 20);
AT(folio_prefill_desc, num_qo_heads, 24);
AT(folio_prefill_desc, num_kv_heads, 28);
AT(folio_prefill_desc, head_dim_qk, 32);
AT(folio_prefill_desc, head_dim_vo, 36);
AT(folio_prefill_desc, kv_storage, 40);
AT(folio_prefill_desc, page_size, 44);
AT(folio_prefill_desc, max_batch_size, 48);
AT(folio_prefill_desc, max_num_tokens, 52);
AT(folio_prefill_desc, max_qo_len, 56);
AT(folio_prefill_desc, max_kv_len, 60);
AT(folio_prefill_desc, max_num_pages, 64);

SIZE(folio_kv_append_args, 80);
AT(folio_kv_append_args, struct_size, 0);
AT(folio_kv_append_args, flags, 4);
AT(folio_kv_append_args, key, 8);
AT(folio_kv_append_args, value, 16);
AT(folio_kv_append_args, k_cache, 24);
AT(folio_kv_append_args, v_cache, 32);
AT(folio_kv_append_args, slot_mapping, 40);
AT(folio_kv_append_args, k_scales, 48);
AT(folio_kv_append_args, v_scales, 56);
AT(folio_kv_append_args, k_scale, 64);
AT(folio_kv_append_args, v_scale, 68);
AT(folio_kv_append_args, kv_layout, 72);
AT(folio_kv_append_args, kv_dtype, 76);

SIZE(folio_merge_state_args, 64);
AT(folio_merge_state_args, struct_size, 0);
AT(folio_merge_state_args, flags, 4);
AT(folio_merge_state_args, v_a, 8);
AT(folio_merge_state_args, s_a, 16);
AT(folio_merge_state_args, v_b, 24);
AT(folio_merge_state_args, s_b, 32);
AT(folio_merge_state_args, v_out, 40);
AT(folio_merge_state_args, s_out, 48);
AT(folio_merge_state_args, mask, 56);

SIZE(folio_merge_states_args, 40);
AT(folio_merge_states_args, struct_size, 0);
AT(folio_merge_states_args, flags, 4);
AT(folio_merge_states_args, v, 8);
AT(folio_merge_states_args, s, 16);
AT(folio_merge_states_args, v_out, 24);
AT(folio_merge_states_args, s_out, 32);

SIZE(folio_mla_append_args, 104);
AT(folio_mla_append_args, struct_size, 0);
AT(folio_mla_append_args, flags, 4);
AT(folio_mla_append_args, latent, 8);
AT(folio_mla_append_args, rope, 16);
AT(folio_mla_append_args, kv, 24);
AT(folio_mla_append_args, kv_rope, 32);
AT(folio_mla_append_args, slot_mapping, 40);
AT(folio_mla_append_args, cos_sin_cache, 48);
AT(folio_mla_append_args, positions, 56);
AT(folio_mla_append_args, rope_out, 64);
AT(folio_mla_append_args, q_rope, 72);
AT(folio_mla_append_args, q_rope_out, 80);
AT(folio_mla_append_args, k_scale, 88);
AT(folio_mla_append_args, cache_format, 92);
AT(folio_mla_append_args, kv_dtype, 96);
AT(folio_mla_append_args, reserved, 100);

SIZE(folio_mla_gather_args, 96);
AT(folio_mla_gather_args, struct_size, 0);
AT(folio_mla_gather_args, flags, 4);
AT(folio_mla_gather_args, kv, 8);
AT(folio_mla_gather_args, kv_rope, 16);
AT(folio_mla_gather_args, dst, 24);
AT(folio_mla_gather_args, dst_rope, 32);
AT(folio_mla_gather_args, cu_seq_lens, 40);
AT(folio_mla_gather_args, seq_starts, 48);
AT(folio_mla_gather_args, block_table, 56);
AT(folio_mla_gather_args, kv_indptr, 64);
AT(folio_mla_gather_args, kv_indices, 72);
AT(folio_mla_gather_args, k_scale, 80);
AT(folio_mla_gather_args, cache_format, 84);
AT(folio_mla_gather_args, kv_dtype, 88);
AT(folio_mla_gather_args, reserved, 92);

SIZE(folio_cp_reorder_args, 56);
AT(folio_cp_reorder_args, struct_size, 0);
AT(folio_cp_reorder_args, flags, 4);
AT(folio_cp_reorder_args, gathered, 8);
AT(folio_cp_reorder_args, dst, 16);
AT(folio_cp_reorder_args, context_lens, 24);
AT(folio_cp_reorder_args, cu_seq_lens, 32);
AT(folio_cp_reorder_args, cu_padded_lens, 40);
AT(folio_cp_reorder_args, local_start, 48);
AT(folio_cp_reorder_args, interleave, 52);

SIZE(folio_cp_correct_args, 48);
AT(folio_cp_correct_args, struct_size, 0);
AT(folio_cp_correct_args, flags, 4);
AT(folio_cp_correct_args, lse_all, 8);
AT(folio_cp_correct_args, o, 16);
AT(folio_cp_correct_args, o_out, 24);
AT(folio_cp_correct_args, lse_out, 32);
AT(folio_cp_correct_args, rank, 40);
AT(folio_cp_correct_args, reserved, 44);

SIZE(folio_cp_local_lengths_args, 48);
AT(folio_cp_local_lengths_args, struct_size, 0);
AT(folio_cp_local_lengths_args, flags, 4);
AT(folio_cp_local_lengths_args, world_size, 8);
AT(folio_cp_local_lengths_args, interleave, 12);
AT(folio_cp_local_lengths_args, rank, 16);
AT(folio_cp_local_lengths_args, num_lengths, 20);
AT(folio_cp_local_lengths_args, lengths, 24);
AT(folio_cp_local_lengths_args, out, 32);
AT(folio_cp_local_lengths_args, capacity, 40);

SIZE(folio_mla_context_chunks_args, 96);
AT(folio_mla_context_chunks_args, struct_size, 0);
AT(folio_mla_context_chunks_args, flags, 4);
AT(folio_mla_context_chunks_args, num_requests, 8);
AT(folio_mla_context_chunks_args, page_size, 12);
AT(folio_mla_context_chunks_args, world_size, 16);
AT(folio_mla_context_chunks_args, interleave, 20);
AT(folio_mla_context_chunks_args, workspace_tokens, 24);
AT(folio_mla_context_chunks_args, context_lens, 32);
AT(folio_mla_context_chunks_args, seq_starts, 40);
AT(folio_mla_context_chunks_args, cu_seq_lens, 48);
AT(folio_mla_context_chunks_args, cu_padded_lens, 56);
AT(folio_mla_context_chunks_args, max_lens, 64);
AT(folio_mla_context_chunks_args, max_num_chunks, 72);
AT(folio_mla_context_chunks_args, reserved, 76);
AT(folio_mla_context_chunks_args, num_chunks, 80);
AT(folio_mla_context_chunks_args, chunk_tokens, 88);

SIZE(folio_flashmla_metadata_args, 80);
AT(folio_flashmla_metadata_args, struct_size, 0);
AT(folio_flashmla_metadata_args, flags, 4);
AT(folio_flashmla_metadata_args, batch_size, 8);
AT(folio_flashmla_metadata_args, num_sms, 12);
AT(folio_flashmla_metadata_args, q_len, 16);
AT(folio_flashmla_metadata_args, num_heads, 20);
AT(folio_flashmla_metadata_args, num_kv_heads, 24);
AT(folio_flashmla_metadata_args, reserved, 28);
AT(folio_flashmla_metadata_args, seq_lens, 32);
AT(folio_flashmla_metadata_args, tile_scheduler_metadata, 40);
AT(folio_flashmla_metadata_args, metadata_capacity, 48);
AT(folio_flashmla_metadata_args, num_splits, 56);
AT(folio_flashmla_metadata_args, num_splits_capacity, 64);
AT(folio_flashmla_metadata_args, num_sm_parts, 72);

SIZE(folio_num_kv_splits_args, 48);
AT(folio_num_kv_splits_args, struct_size, 0);
AT(folio_num_kv_splits_args, flags, 4);
AT(folio_num_kv_splits_args, num_requests, 8);
AT(folio_num_kv_splits_args, max_splits, 12);
AT(folio_num_kv_splits_args, kv_lens, 16);
AT(folio_num_kv_splits_args, out, 24);
AT(folio_num_kv_splits_args, capacity, 32);
AT(folio_num_kv_splits_args, keys_per_split, 40);

SIZE(folio_split_decodes_and_prefills_args, 40);
AT(folio_split_decodes_and_prefills_args, struct_size, 0);
AT(folio_split_decodes_and_prefills_args, flags, 4);
AT(folio_split_decodes_and_prefills_args, num_requests, 8);
AT(folio_split_decodes_and_prefills_args, decode_threshold, 12);
AT(folio_split_decodes_and_prefills_args, query_lens, 16);
AT(folio_split_decodes_and_prefills_args, out, 24);
AT(folio_split_decodes_and_prefills_args, capacity, 32);

SIZE(folio_api, 248);
AT(folio_api, struct_size, 0);
AT(folio_api, abi_version, 4);
AT(folio_api, version, 8);
AT(folio_api, status_name, 16);
AT(folio_api, device_count, 24);
AT(folio_api, context_create, 32);
AT(folio_api, context_destroy, 40);
AT(folio_api, decode_create, 48);
AT(folio_api, decode_workspace, 56);
AT(folio_api, decode_plan, 64);
AT(folio_api, decode_run, 72);
AT(folio_api, decode_kernel, 80);
AT(folio_api, decode_destroy, 88);
AT(folio_api, prefill_create, 96);
AT(folio_api, prefill_workspace, 104);
AT(folio_api, prefill_plan, 112);
AT(folio_api, prefill_run, 120);
AT(folio_api, prefill_kernel, 128);
AT(folio_api, prefill_destroy, 136);
AT(folio_api, kv_append, 144);
AT(folio_api, merge_state, 152);
AT(folio_api, merge_states, 160);
AT(folio_api, mla_append, 168);
AT(folio_api, mla_gather, 176);
AT(folio_api, mla_context_tokens, 184);
AT(folio_api, cp_local_lengths, 192);
AT(folio_api, mla_context_chunks, 200);
AT(folio_api, flashmla_metadata, 208);
AT(folio_api, num_kv_splits, 216);
AT(folio_api, split_decodes_and_prefills, 224);
AT(folio_api, cp_reorder, 232);
AT(folio_api, cp_correct, 240);
