//! Mirrors of the structs in `kernels/params/mla.h` and `mla_hopper.h`, field by field; sizes are asserted on both
//! sides. What the fields mean is written there.

use super::params::{AttentionParams, Cache, Divisor, Rows};

/// `FolioMlaParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MlaParams {
    pub attention: AttentionParams,
    pub q_rope: Rows,
    pub k_rope: Cache,
    pub kv_lora_rank: u32,
    pub qk_rope_head_dim: u32,
    pub o_dtype: u32,
    pub row_tiles: u32,
    pub q_copy_bytes: u32,
    pub q_rope_copy_bytes: u32,
    pub k_copy_bytes: u32,
    pub k_rope_copy_bytes: u32,
    pub page_size: Divisor,
    pub num_heads: Divisor,
}

/// `FolioMlaHopperParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MlaHopperParams {
    pub mla: MlaParams,
    pub box_log2: u32,
    pub whole_records: u32,
}

/// The numbers of the `static_assert`s at the end of the two headers.
const _: () = {
    assert!(size_of::<MlaParams>() == 488);
    assert!(size_of::<MlaHopperParams>() == 496);
};
