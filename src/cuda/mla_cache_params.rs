//! Mirrors of the structs in `kernels/params/mla_cache.h`, field by field; sizes are asserted on both sides. What the
//! fields mean is written there.

use super::integers_params::Integers;
use super::params::{Cache, Divisor, Rows, dtype_code};
use crate::dtype::DType;
use crate::problem::LatentRecords;
use crate::tensor::Tensor;

/// `FolioRecords`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Records {
    pub latent: Cache,
    pub rope: Cache,
    pub scales: Cache,
    pub latent_dtype: u32,
    pub rope_dtype: u32,
}

/// `FolioMlaAppendParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MlaAppendParams {
    pub cache: Records,
    pub latent: Rows,
    pub rope: Rows,
    pub rope_out: Rows,
    pub q: Rows,
    pub q_out: Rows,
    pub cos_sin: u64,
    pub cos_sin_stride: i64,
    pub max_position: i64,
    pub positions: u64,
    pub slots: u64,
    pub num_slots: i64,
    pub page_size: Divisor,
    pub rope_pieces: Divisor,
    pub position_bytes: u32,
    pub slot_bytes: u32,
    pub rank: u32,
    pub rope_dim: u32,
    pub num_heads: u32,
    pub dtype: u32,
    pub cos_sin_dtype: u32,
    pub is_interleaved: u32,
    pub vectors: u32,
    pub k_scale: f32,
}

/// `FolioMlaGatherParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MlaGatherParams {
    pub cache: Records,
    pub dst: Rows,
    pub dst_rope: Rows,
    pub cu_seq_lens: Integers,
    pub seq_starts: Integers,
    pub page_indptr: Integers,
    pub page_ids: Integers,
    pub num_rows: i64,
    pub page_size: Divisor,
    pub batch_size: u32,
    pub num_pages: u32,
    pub rank: u32,
    pub rope_dim: u32,
    pub dst_dtype: u32,
    pub vectors: u32,
    pub k_scale: f32,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/mla_cache.h`.
const _: () = {
    assert!(size_of::<Records>() == 104);
    assert!(size_of::<MlaAppendParams>() == 336);
    assert!(size_of::<MlaGatherParams>() == 360);
};

impl Records {
    /// The parts of a cache's records.
    pub fn of(records: &LatentRecords) -> Records {
        let part = |part: &Option<Tensor>| part.as_ref().map_or(Cache::default(), part_of_records);
        let dtype = |part: &Option<Tensor>| part.map_or(DType::F32, |part| part.dtype());
        Records {
            latent: part_of_records(&records.latent),
            rope: part(&records.rope),
            scales: part(&records.scales),
            latent_dtype: dtype_code(records.latent.dtype()),
            rope_dtype: dtype_code(dtype(&records.rope)),
        }
    }
}

/// A `[page, token, element]` tensor.
fn part_of_records(part: &Tensor) -> Cache {
    Cache {
        data: part.address() as u64,
        stride_page: part.stride(0),
        stride_token: part.stride(1),
        stride_head: 0,
    }
}

/// A `[row, element]` tensor; none has address 0.
pub fn rows(tensor: Option<Tensor>) -> Rows {
    tensor.map_or(Rows::default(), |tensor| Rows {
        data: tensor.address() as u64,
        stride_token: tensor.stride(0),
        stride_head: 0,
    })
}
