//! The safe Rust API: contexts, attention handles and the small operators. This layer checks every
//! argument, so that what it hands to `plan` and the backends is known to be good. No C types here:
//! `ffi` translates them into the inputs of this layer.

mod append;
mod appended;
mod args;
mod attention;
mod batch;
mod beside;
mod cascade;
mod check;
mod context;
mod context_parallel;
mod copy;
mod desc;
mod extend;
mod figures;
mod gather;
mod gathered;
mod index;
mod largest;
mod merge;
mod mla;
mod mla_cache;
mod mla_context;
mod narrow;
mod new_keys;
mod peers;
mod planned;
mod projection;
mod rope_append;
mod shared_prefixes;
mod tree;

pub use crate::backend::{
    CpuSet, HostThreads, Stream, Target, Tasks, Threads, Workspace, WorkspaceInfo,
    cuda_device_count,
};
pub use append::append;
pub use attention::Attention;
pub use batch::BatchInput;
pub use cascade::Cascade;
pub use context::Context;
pub use context_parallel::{cp_correct, cp_reorder};
pub use copy::copy;
pub use figures::{
    CpLocalLengths, FlashMlaMetadata, MlaContextChunks, NumKvSplits, SplitDecodesAndPrefills,
    cp_local_lengths, flashmla_metadata, mla_context_chunks, mla_context_tokens, num_kv_splits,
    split_decodes_and_prefills,
};
pub use gather::gather;
pub use index::{batch_lengths, block_table, draft_kv_indices, kv_indices, slot_mapping};
pub use merge::{merge, merge_states, merge_varlen};
pub use mla_cache::{mla_append, mla_gather};
pub use mla_context::MlaContext;
pub use peers::{
    BalancedKvSplits, ReorderBatch, UseCascade, balanced_splits, reorder_batch, use_cascade,
};
pub use projection::{absorb_q, absorb_weights, project_o, up_project};
pub use rope_append::rope_append;
pub use shared_prefixes::{FindSharedPrefixes, SharedPrefixes, find_shared_prefixes};
pub use tree::tree_mask;
