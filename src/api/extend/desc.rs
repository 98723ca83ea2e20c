//! The problems of the passes: over the cache, and over the new keys as ragged tensors.

use crate::dtype::DType;
use crate::problem::{AttentionDesc, KvStorage};

/// Checked descs.
pub(super) struct Problems {
    pub cached: AttentionDesc,
    pub new: AttentionDesc,
    /// The merged output is of another type than the states of the passes.
    pub converts: bool,
}

impl Problems {
    /// Of a checked desc with `new_kv`.
    pub fn of(desc: &AttentionDesc) -> Problems {
        let o_dtype = match (desc.o_dtype, desc.q_dtype) {
            (o, _) if !o.is_fp8() => o,
            (_, q) if !q.is_fp8() => q,
            _ => DType::BF16,
        };
        let cached = AttentionDesc {
            new_kv: None,
            o_dtype,
            ..*desc
        };
        let new = AttentionDesc {
            kv_format: desc.new_kv.unwrap_or(desc.q_dtype).into(),
            kv: KvStorage::Ragged,
            // A request has as many new keys as query rows.
            max_kv_len: desc.max_qo_len,
            max_num_pages: desc.max_num_tokens.into(),
            ..cached
        };
        Problems {
            cached,
            new,
            converts: o_dtype != desc.o_dtype,
        }
    }
}
