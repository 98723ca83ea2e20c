//! Mirror of the struct in `kernels/params/rope_append.h`, field by field; sizes are asserted on both sides. What the
//! fields mean is written there.

use super::params::{AppendParams, Divisor, Rows};
use crate::problem::MOST_PAIRS;

/// `FolioRopeAppendParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct RopeAppendParams {
    pub append: AppendParams,
    pub q: Rows,
    pub q_out: Rows,
    pub key_out: Rows,
    pub q_weight: u64,
    pub k_weight: u64,
    pub cos: u64,
    pub sin: u64,
    pub cos_sin_stride: i64,
    pub max_position: i64,
    pub positions: u64,
    pub offsets: u64,
    pub num_q_rows: i64,
    pub units_of_token: Divisor,
    pub log2_lanes: u32,
    pub num_q_heads: u32,
    pub rotary_dim: u32,
    pub position_bytes: u32,
    pub offset_bytes: u32,
    pub q_weight_dtype: u32,
    pub k_weight_dtype: u32,
    pub cos_sin_dtype: u32,
    pub is_interleaved: u32,
    pub vectors: u32,
    pub rms_norm_eps: f32,
    pub turns: [u64; MOST_PAIRS],
}

/// The numbers of `kernels/params/rope_append.h`.
const _: () = assert!(size_of::<RopeAppendParams>() == 2472 && MOST_PAIRS == 256);
