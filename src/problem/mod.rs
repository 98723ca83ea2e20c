//! What is to be computed: the vocabulary that every layer below `ffi` shares.
//!
//! These types are checked values. The `api` layer makes them, `plan` and the backends trust them. The
//! names are the field's: `qo_indptr`, `kv_len`, `page_size`, `sm_scale`, `logits_soft_cap`, `lse`.

mod attention;
mod batch;
mod cache;
mod work;

pub use attention::{
    AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage, LogBase, Mask, Window,
};
pub use batch::{Batch, DeviceBatch, HostBatch, PageIds, Pages};
pub use cache::{AppendArgs, MergeArgs, MergeStatesArgs};
pub use work::{MergeItem, NO_PARTIAL, WorkItem, WorkList};
