"""Every struct's fields, and what puts a value into each. Generated from folio.h by `python -m generator`; do not edit."""

from folio._binding import (
    ARRAY_INPUT,
    ARRAY_OUTPUT,
    DTYPE,
    INPUT,
    NUMBER,
    OUTPUT,
    RESULT,
    Flags,
    InPlace,
    Nested,
    OneOf,
    Room,
    Same,
    Struct,
)
from folio._generated.constants import (
    BalancedKvSplitsFlag,
    BatchFlag,
    CpFlag,
    KvFormat,
    KvLayout,
    KvStorage,
    MaskMode,
    MergeFlag,
    MlaCacheFormat,
    MlaContextFlag,
    MlaRopeFlag,
    PlanFlag,
    RopeFlag,
    RunFlag,
    SlotLayout,
    SplitFlag,
    UseCascadeFlag,
)

BATCH = Struct(
    "folio_batch",
    {
        "flags": Flags(BatchFlag),
        "qo_len": NUMBER,
        "qo_indptr": INPUT,
        "kv_indptr": INPUT,
        "kv_indices": INPUT,
        "last_page_len": INPUT,
        "kv_len": INPUT,
        "block_table": INPUT,
        "window_left": NUMBER,
    },
)

ATTENTION_ARGS = Struct(
    "folio_attention_args",
    {
        "flags": Flags(RunFlag),
        "q": INPUT,
        "k": INPUT,
        "v": INPUT,
        "o": OUTPUT,
        "lse": OUTPUT,
        "k_scales": INPUT,
        "v_scales": INPUT,
        "custom_mask": INPUT,
        "mm_prefix_ranges": INPUT,
        "alibi_slopes": INPUT,
        "sinks": INPUT,
        "sm_scale": NUMBER,
        "q_scale": NUMBER,
        "k_scale": NUMBER,
        "v_scale": NUMBER,
        "o_scale": NUMBER,
        "logits_soft_cap": NUMBER,
        "mask_mode": OneOf(MaskMode),
        "window_left": NUMBER,
        "window_right": NUMBER,
        "k_rope": INPUT,
        "custom_mask_indptr": INPUT,
        "causal_requests": INPUT,
        "attention_chunk_size": NUMBER,
        "attention_chunk_look_back": NUMBER,
        "k_zero_points": INPUT,
        "v_zero_points": INPUT,
        "k_new": INPUT,
        "v_new": INPUT,
        "q_scales": INPUT,
        "o_scales": INPUT,
        "item_starts": INPUT,
        "item_positions": INPUT,
        "score_bias": INPUT,
    },
)

DECODE_DESC = Struct(
    "folio_decode_desc",
    {
        "flags": Flags(PlanFlag),
        "q_dtype": DTYPE,
        "kv_dtype": DTYPE,
        "o_dtype": DTYPE,
        "kv_layout": OneOf(KvLayout),
        "num_qo_heads": NUMBER,
        "num_kv_heads": NUMBER,
        "head_dim_qk": NUMBER,
        "head_dim_vo": NUMBER,
        "page_size": NUMBER,
        "max_batch_size": NUMBER,
        "max_qo_len": NUMBER,
        "max_kv_len": NUMBER,
        "max_num_pages": NUMBER,
        "kv_format": OneOf(KvFormat),
    },
)

PREFILL_DESC = Struct(
    "folio_prefill_desc",
    {
        "flags": Flags(PlanFlag),
        "q_dtype": DTYPE,
        "kv_dtype": DTYPE,
        "o_dtype": DTYPE,
        "kv_layout": OneOf(KvLayout),
        "num_qo_heads": NUMBER,
        "num_kv_heads": NUMBER,
        "head_dim_qk": NUMBER,
        "head_dim_vo": NUMBER,
        "kv_storage": OneOf(KvStorage),
        "page_size": NUMBER,
        "max_batch_size": NUMBER,
        "max_num_tokens": NUMBER,
        "max_qo_len": NUMBER,
        "max_kv_len": NUMBER,
        "max_num_pages": NUMBER,
        "kv_format": OneOf(KvFormat),
        "new_kv_dtype": DTYPE,
    },
)

CASCADE_DESC = Struct(
    "folio_cascade_desc",
    {
        "flags": Flags(PlanFlag),
        "q_dtype": DTYPE,
        "kv_dtype": DTYPE,
        "o_dtype": DTYPE,
        "kv_layout": OneOf(KvLayout),
        "num_qo_heads": NUMBER,
        "num_kv_heads": NUMBER,
        "head_dim_qk": NUMBER,
        "head_dim_vo": NUMBER,
        "page_size": NUMBER,
        "max_batch_size": NUMBER,
        "max_num_tokens": NUMBER,
        "max_qo_len": NUMBER,
        "max_kv_len": NUMBER,
        "max_shared_levels": NUMBER,
        "max_num_pages": NUMBER,
        "kv_format": OneOf(KvFormat),
    },
)

SHARED_PREFIXES = Struct(
    "folio_shared_prefixes",
    {
        "common_prefix_len": NUMBER,
        "num_prefixes": Same("request_begin", "request_end", "kv_len"),
        "request_begin": ARRAY_INPUT,
        "request_end": ARRAY_INPUT,
        "kv_len": ARRAY_INPUT,
    },
)

FIND_SHARED_PREFIXES_ARGS = Struct(
    "folio_find_shared_prefixes_args",
    {
        "page_size": NUMBER,
        "capacity": Room(None, {"request_begin": (0, 1), "request_end": (0, 1), "kv_len": (0, 1)}),
        "batch": Nested(BATCH),
        "request_begin": ARRAY_OUTPUT,
        "request_end": ARRAY_OUTPUT,
        "kv_len": ARRAY_OUTPUT,
        "num_prefixes": RESULT,
    },
)

MLA_DESC = Struct(
    "folio_mla_desc",
    {
        "flags": Flags(PlanFlag),
        "q_dtype": DTYPE,
        "kv_dtype": DTYPE,
        "o_dtype": DTYPE,
        "cache_format": OneOf(MlaCacheFormat),
        "num_heads": NUMBER,
        "kv_lora_rank": NUMBER,
        "qk_rope_head_dim": NUMBER,
        "page_size": NUMBER,
        "max_batch_size": NUMBER,
        "max_qo_len": NUMBER,
        "max_num_tokens": NUMBER,
        "max_kv_len": NUMBER,
        "max_num_pages": NUMBER,
    },
)

MLA_ARGS = Struct(
    "folio_mla_args",
    {
        "flags": Flags(RunFlag),
        "q_latent": INPUT,
        "q_rope": INPUT,
        "kv": INPUT,
        "kv_rope": INPUT,
        "o": OUTPUT,
        "lse": OUTPUT,
        "sm_scale": NUMBER,
        "q_scale": NUMBER,
        "k_scale": NUMBER,
        "mask_mode": OneOf(MaskMode),
    },
)

KV_APPEND_ARGS = Struct(
    "folio_kv_append_args",
    {
        "key": INPUT,
        "value": INPUT,
        "k_cache": OUTPUT,
        "v_cache": OUTPUT,
        "slot_mapping": INPUT,
        "k_scales": INPUT,
        "v_scales": INPUT,
        "k_scale": NUMBER,
        "v_scale": NUMBER,
        "kv_layout": OneOf(KvLayout),
        "kv_dtype": DTYPE,
        "kv_format": OneOf(KvFormat),
        "k_zero_points": INPUT,
        "v_zero_points": INPUT,
    },
)

KV_COPY_ARGS = Struct(
    "folio_kv_copy_args",
    {
        "k_src": INPUT,
        "k_dst": OUTPUT,
        "v_src": INPUT,
        "v_dst": OUTPUT,
        "page_pairs": INPUT,
    },
)

KV_GATHER_ARGS = Struct(
    "folio_kv_gather_args",
    {
        "key": OUTPUT,
        "value": OUTPUT,
        "k_cache": INPUT,
        "v_cache": INPUT,
        "cu_seq_lens": INPUT,
        "seq_starts": INPUT,
        "block_table": INPUT,
        "kv_indptr": INPUT,
        "kv_indices": INPUT,
        "k_scales": INPUT,
        "v_scales": INPUT,
        "k_scale": NUMBER,
        "v_scale": NUMBER,
        "kv_layout": OneOf(KvLayout),
        "kv_dtype": DTYPE,
        "kv_format": OneOf(KvFormat),
        "k_zero_points": INPUT,
        "v_zero_points": INPUT,
    },
)

ROPE_APPEND_ARGS = Struct(
    "folio_rope_append_args",
    {
        "flags": Flags(RopeFlag),
        "q": InPlace(unless="q_out"),
        "q_out": OUTPUT,
        "key": INPUT,
        "key_out": OUTPUT,
        "value": INPUT,
        "k_cache": OUTPUT,
        "v_cache": OUTPUT,
        "slot_mapping": INPUT,
        "k_scales": INPUT,
        "v_scales": INPUT,
        "q_norm_weight": INPUT,
        "k_norm_weight": INPUT,
        "positions": INPUT,
        "position_offsets": INPUT,
        "cos_sin_cache": INPUT,
        "k_scale": NUMBER,
        "v_scale": NUMBER,
        "kv_layout": OneOf(KvLayout),
        "kv_dtype": DTYPE,
        "rms_norm_eps": NUMBER,
        "rotary_dim": NUMBER,
        "rope_theta": NUMBER,
        "rope_scale": NUMBER,
        "low_freq_factor": NUMBER,
        "high_freq_factor": NUMBER,
        "old_context_len": NUMBER,
        "kv_format": OneOf(KvFormat),
        "k_zero_points": INPUT,
        "v_zero_points": INPUT,
    },
)

MERGE_STATE_ARGS = Struct(
    "folio_merge_state_args",
    {
        "flags": Flags(MergeFlag),
        "v_a": INPUT,
        "s_a": INPUT,
        "v_b": INPUT,
        "s_b": INPUT,
        "v_out": OUTPUT,
        "s_out": OUTPUT,
        "mask": INPUT,
        "o_scale": NUMBER,
        "num_tokens_without_a": NUMBER,
    },
)

MERGE_STATES_ARGS = Struct(
    "folio_merge_states_args",
    {
        "flags": Flags(MergeFlag),
        "v": INPUT,
        "s": INPUT,
        "v_out": OUTPUT,
        "s_out": OUTPUT,
        "o_scale": NUMBER,
    },
)

MERGE_VARLEN_ARGS = Struct(
    "folio_merge_varlen_args",
    {
        "flags": Flags(MergeFlag),
        "v": INPUT,
        "s": INPUT,
        "indptr": INPUT,
        "v_out": OUTPUT,
        "s_out": OUTPUT,
        "o_scale": NUMBER,
    },
)

MLA_ABSORB_WEIGHTS_ARGS = Struct(
    "folio_mla_absorb_weights_args",
    {
        "kv_b_proj": INPUT,
        "w_uk": OUTPUT,
        "w_uv": OUTPUT,
    },
)

MLA_ABSORB_Q_ARGS = Struct(
    "folio_mla_absorb_q_args",
    {
        "q_nope": INPUT,
        "w_uk": INPUT,
        "q_latent": OUTPUT,
    },
)

MLA_PROJECT_O_ARGS = Struct(
    "folio_mla_project_o_args",
    {
        "o_latent": INPUT,
        "w_uv": INPUT,
        "out": OUTPUT,
    },
)

MLA_UP_PROJECT_ARGS = Struct(
    "folio_mla_up_project_args",
    {
        "kv_c": INPUT,
        "w_uk": INPUT,
        "w_uv": INPUT,
        "k_nope": OUTPUT,
        "v": OUTPUT,
    },
)

MLA_APPEND_ARGS = Struct(
    "folio_mla_append_args",
    {
        "flags": Flags(MlaRopeFlag),
        "latent": INPUT,
        "rope": INPUT,
        "kv": OUTPUT,
        "kv_rope": OUTPUT,
        "slot_mapping": INPUT,
        "cos_sin_cache": INPUT,
        "positions": INPUT,
        "rope_out": OUTPUT,
        "q_rope": InPlace(unless="q_rope_out"),
        "q_rope_out": OUTPUT,
        "k_scale": NUMBER,
        "cache_format": OneOf(MlaCacheFormat),
        "kv_dtype": DTYPE,
    },
)

MLA_GATHER_ARGS = Struct(
    "folio_mla_gather_args",
    {
        "kv": INPUT,
        "kv_rope": INPUT,
        "dst": OUTPUT,
        "dst_rope": OUTPUT,
        "cu_seq_lens": INPUT,
        "seq_starts": INPUT,
        "block_table": INPUT,
        "kv_indptr": INPUT,
        "kv_indices": INPUT,
        "k_scale": NUMBER,
        "cache_format": OneOf(MlaCacheFormat),
        "kv_dtype": DTYPE,
    },
)

MLA_CONTEXT_DESC = Struct(
    "folio_mla_context_desc",
    {
        "flags": Flags(PlanFlag, MlaContextFlag),
        "dtype": DTYPE,
        "kv_dtype": DTYPE,
        "cache_format": OneOf(MlaCacheFormat),
        "num_heads": NUMBER,
        "kv_lora_rank": NUMBER,
        "qk_nope_head_dim": NUMBER,
        "qk_rope_head_dim": NUMBER,
        "v_head_dim": NUMBER,
        "page_size": NUMBER,
        "max_batch_size": NUMBER,
        "max_num_tokens": NUMBER,
        "max_qo_len": NUMBER,
        "max_kv_len": NUMBER,
        "max_chunk_tokens": NUMBER,
        "max_num_pages": NUMBER,
    },
)

MLA_CONTEXT_ARGS = Struct(
    "folio_mla_context_args",
    {
        "flags": Flags(RunFlag),
        "q": INPUT,
        "k_nope": INPUT,
        "k_rope": INPUT,
        "v": INPUT,
        "kv": INPUT,
        "kv_rope": INPUT,
        "w_uk": INPUT,
        "w_uv": INPUT,
        "context_latent": OUTPUT,
        "context_rope": OUTPUT,
        "context_k_nope": INPUT,
        "context_v": INPUT,
        "o": OUTPUT,
        "lse": OUTPUT,
        "sm_scale": NUMBER,
        "k_scale": NUMBER,
    },
)

CP_REORDER_ARGS = Struct(
    "folio_cp_reorder_args",
    {
        "gathered": INPUT,
        "dst": OUTPUT,
        "context_lens": INPUT,
        "cu_seq_lens": INPUT,
        "cu_padded_lens": INPUT,
        "local_start": NUMBER,
        "interleave": NUMBER,
    },
)

CP_CORRECT_ARGS = Struct(
    "folio_cp_correct_args",
    {
        "flags": Flags(CpFlag),
        "lse_all": INPUT,
        "o": INPUT,
        "o_out": OUTPUT,
        "lse_out": OUTPUT,
        "rank": NUMBER,
    },
)

TREE_MASK_ARGS = Struct(
    "folio_tree_mask_args",
    {
        "parents": INPUT,
        "prefix_lens": INPUT,
        "qo_indptr": INPUT,
        "mask_bytes": OUTPUT,
        "mask_bits": OUTPUT,
        "tree_mask": OUTPUT,
        "tree_bits": OUTPUT,
        "positions": OUTPUT,
        "next_token": OUTPUT,
        "next_sibling": OUTPUT,
    },
)

BATCH_LENGTHS_ARGS = Struct(
    "folio_batch_lengths_args",
    {
        "qo_len": INPUT,
        "cached_len": INPUT,
        "encoder_len": INPUT,
        "qo_indptr": OUTPUT,
        "kv_len": OUTPUT,
        "kv_indptr": OUTPUT,
        "row_kind": OUTPUT,
    },
)

KV_INDICES_ARGS = Struct(
    "folio_kv_indices_args",
    {
        "block_table": INPUT,
        "row_ids": INPUT,
        "kv_len": INPUT,
        "kv_start": INPUT,
        "kv_indptr": OUTPUT,
        "kv_indices": OUTPUT,
        "last_page_len": OUTPUT,
        "page_size": NUMBER,
        "indices_page_size": NUMBER,
        "window": NUMBER,
    },
)

BLOCK_TABLE_ARGS = Struct(
    "folio_block_table_args",
    {
        "kv_indptr": INPUT,
        "kv_indices": INPUT,
        "block_table": OUTPUT,
        "fill": NUMBER,
    },
)

SLOT_MAPPING_ARGS = Struct(
    "folio_slot_mapping_args",
    {
        "block_table": INPUT,
        "row_ids": INPUT,
        "qo_indptr": INPUT,
        "qo_len": INPUT,
        "kv_len": INPUT,
        "slot_mapping": OUTPUT,
        "positions": OUTPUT,
        "page_size": NUMBER,
    },
)

DRAFT_KV_INDICES_ARGS = Struct(
    "folio_draft_kv_indices_args",
    {
        "req_to_token": INPUT,
        "row_ids": INPUT,
        "kv_len": INPUT,
        "kv_indptr": OUTPUT,
        "kv_indices": OUTPUT,
        "topk": NUMBER,
        "num_steps": NUMBER,
        "page_size": NUMBER,
        "slot_layout": OneOf(SlotLayout),
    },
)

CP_LOCAL_LENGTHS_ARGS = Struct(
    "folio_cp_local_lengths_args",
    {
        "world_size": NUMBER,
        "interleave": NUMBER,
        "rank": NUMBER,
        "num_lengths": Same("lengths"),
        "lengths": ARRAY_INPUT,
        "out": ARRAY_OUTPUT,
        "capacity": Room(None, {"out": (0, 1)}),
    },
)

MLA_CONTEXT_CHUNKS_ARGS = Struct(
    "folio_mla_context_chunks_args",
    {
        "num_requests": Same("context_lens"),
        "page_size": NUMBER,
        "world_size": NUMBER,
        "interleave": NUMBER,
        "workspace_tokens": NUMBER,
        "context_lens": ARRAY_INPUT,
        "seq_starts": ARRAY_OUTPUT,
        "cu_seq_lens": ARRAY_OUTPUT,
        "cu_padded_lens": ARRAY_OUTPUT,
        "max_lens": ARRAY_OUTPUT,
        "max_num_chunks": Room("num_requests", {"seq_starts": (1, 0), "cu_seq_lens": (1, 1), "cu_padded_lens": (1, 1), "max_lens": (0, 1)}),
        "num_chunks": RESULT,
        "chunk_tokens": RESULT,
    },
)

FLASHMLA_METADATA_ARGS = Struct(
    "folio_flashmla_metadata_args",
    {
        "batch_size": Same("seq_lens"),
        "num_sms": NUMBER,
        "q_len": NUMBER,
        "num_heads": NUMBER,
        "num_kv_heads": NUMBER,
        "seq_lens": ARRAY_INPUT,
        "tile_scheduler_metadata": ARRAY_OUTPUT,
        "metadata_capacity": Room(None, {"tile_scheduler_metadata": (0, 1)}),
        "num_splits": ARRAY_OUTPUT,
        "num_splits_capacity": Room(None, {"num_splits": (0, 1)}),
        "num_sm_parts": RESULT,
    },
)

NUM_KV_SPLITS_ARGS = Struct(
    "folio_num_kv_splits_args",
    {
        "num_requests": Same("kv_lens"),
        "max_splits": NUMBER,
        "kv_lens": ARRAY_INPUT,
        "out": ARRAY_OUTPUT,
        "capacity": Room(None, {"out": (0, 1), "keys_per_split": (0, 1)}),
        "keys_per_split": ARRAY_OUTPUT,
    },
)

SPLIT_DECODES_AND_PREFILLS_ARGS = Struct(
    "folio_split_decodes_and_prefills_args",
    {
        "flags": Flags(SplitFlag),
        "num_requests": Same("query_lens"),
        "decode_threshold": NUMBER,
        "query_lens": ARRAY_INPUT,
        "out": ARRAY_OUTPUT,
        "capacity": Room(None, {"out": (0, 1)}),
    },
)

BALANCED_KV_SPLITS_ARGS = Struct(
    "folio_balanced_kv_splits_args",
    {
        "flags": Flags(BalancedKvSplitsFlag),
        "num_requests": Same("seq_lens"),
        "num_group": NUMBER,
        "num_heads": NUMBER,
        "num_kv_heads": NUMBER,
        "num_sms": NUMBER,
        "max_splits": NUMBER,
        "seq_lens": ARRAY_INPUT,
        "out": ARRAY_OUTPUT,
        "capacity": Room(None, {"out": (0, 1)}),
    },
)

USE_CASCADE_ARGS = Struct(
    "folio_use_cascade_args",
    {
        "flags": Flags(UseCascadeFlag),
        "num_requests": Same("query_lens"),
        "common_prefix_len": NUMBER,
        "num_heads": NUMBER,
        "num_kv_heads": NUMBER,
        "num_sms": NUMBER,
        "query_lens": ARRAY_INPUT,
        "out": RESULT,
    },
)

REORDER_BATCH_ARGS = Struct(
    "folio_reorder_batch_args",
    {
        "num_requests": Same("query_lens", "context_lens"),
        "decode_threshold": NUMBER,
        "query_lens": ARRAY_INPUT,
        "context_lens": ARRAY_INPUT,
        "order": ARRAY_OUTPUT,
        "order_capacity": Room(None, {"order": (0, 1)}),
        "swaps": ARRAY_OUTPUT,
        "swaps_capacity": Room(None, {"swaps": (0, 1)}),
        "num_swaps": RESULT,
    },
)
