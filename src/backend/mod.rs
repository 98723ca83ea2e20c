//! What a backend is: the traits that `reference`, `cpu` and `cuda` implement and that `api` calls, one for each
//! subject. Arguments are already checked; a backend refuses only what it cannot do, and what it does not implement
//! is refused here.

mod attention;
mod cache;
mod cpu_set;
mod host_index;
mod index;
mod merge;
mod projection;
mod refusal;
mod registry;
mod stream;
mod tables;
mod threads;
mod tree;
mod workspace;

pub use attention::{Append, Attention, AttentionOps};
pub use cache::CacheOps;
pub use cpu_set::CpuSet;
pub use index::IndexOps;
pub use merge::MergeOps;
pub use projection::ProjectionOps;
pub use registry::{Target, cuda_device_count, open, open_cpu};
pub use stream::Stream;
pub use tables::{HostTables, Tables};
pub use threads::{HostThreads, Tasks, Threads};
pub use tree::TreeOps;
pub use workspace::{Workspace, WorkspaceInfo};

use crate::tensor::Device;

/// All operators on one device. A subject that a backend leaves out is an empty `impl` of its trait.
pub trait Backend:
    AttentionOps
    + CacheOps
    + IndexOps
    + MergeOps
    + ProjectionOps
    + TreeOps
    + Send
    + Sync
    + std::fmt::Debug
{
    /// The device that tensors must live on.
    fn device(&self) -> Device;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::error::Error;
    use crate::problem::{AttentionDesc, Kind, KvStorage};

    #[derive(Debug)]
    struct Empty;
    impl AttentionOps for Empty {}
    impl CacheOps for Empty {}
    impl IndexOps for Empty {}
    impl MergeOps for Empty {}
    impl ProjectionOps for Empty {}
    impl TreeOps for Empty {}

    #[test]
    fn what_is_not_implemented_is_refused() {
        let desc = AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: DType::F32,
            kv_format: DType::F32.into(),
            o_dtype: DType::F32,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 8,
            head_dim_vo: 8,
            kv: KvStorage::Ragged,
            max_batch_size: 1,
            max_qo_len: 1,
            max_num_tokens: 1,
            max_kv_len: 1,
            max_num_pages: 1,
            graph: false,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        };
        let Some(Error::Unsupported(message)) = Empty.attention(&desc).err() else {
            panic!("not refused");
        };
        assert!(message.starts_with("attention: "), "{message}");
    }
}
