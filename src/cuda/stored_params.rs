//! Mirrors of the structs in `kernels/params/stored.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::gather_params::KvGatherParams;
use super::ops::rows::VECTOR;
use super::params::{
    Cache, DecodeParams, Divisor, GenericParams, Rows, address, dtype_code, row_alignment,
};
use super::rope_append_params::RopeAppendParams;
use super::widen_params::WidenParams;
use crate::dtype::DType;
use crate::problem::{CacheForm, RowTensors};
use crate::tensor::Tensor;

/// `FolioStoredFormat`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct StoredFormat {
    pub form: u32,
    pub element: u32,
}

/// `FolioStoredTensor`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredTensor {
    pub cache: Cache,
    pub scales: u64,
    pub zero_points: u64,
    pub scales_page: i64,
    pub scales_token: i64,
    pub scales_head: i64,
    pub zero_points_head: i64,
    pub part_stride: i64,
    pub log2_part: u32,
    pub scale: f32,
    pub head_dim: u32,
    pub vectors: u32,
}

/// `FolioStored`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Stored {
    pub k: StoredTensor,
    pub v: StoredTensor,
    pub format: StoredFormat,
}

/// `FolioStoredAppendParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredAppendParams {
    pub cache: Stored,
    pub key: Rows,
    pub value: Rows,
    pub slots: u64,
    pub num_slots: i64,
    pub page_size: Divisor,
    pub slot_bytes: u32,
    pub num_kv_heads: u32,
    pub row_dtype: u32,
    pub row_vectors: u32,
    pub log2_lanes: u32,
}

/// `FolioStoredRopeAppendParams` of `kernels/params/stored_rope_append.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredRopeAppendParams {
    pub rope: RopeAppendParams,
    pub cache: Stored,
    pub row_dtype: u32,
    pub value_vectors: u32,
}

/// `FolioStoredGatherParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredGatherParams {
    pub gather: KvGatherParams,
    pub cache: Stored,
}

/// `FolioStoredAttentionParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredAttentionParams {
    pub generic: GenericParams,
    pub cache: Stored,
    pub copied_ahead: u32,
    pub reserved: u32,
}

/// `FolioStoredDecodeParams` of `kernels/params/stored_decode.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredDecodeParams {
    pub decode: DecodeParams,
    pub cache: Stored,
}

/// `FolioStoredWidenParams` of `kernels/params/stored_widen.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct StoredWidenParams {
    pub widen: WidenParams,
    pub cache: Stored,
    pub k_factors: u64,
    pub v_factors: u64,
    pub k_scales: u64,
    pub v_scales: u64,
    pub k_scales_stride: i32,
    pub v_scales_stride: i32,
    pub flags: u32,
    pub reserved: u32,
}

/// The numbers of the `static_assert`s at the ends of `kernels/params/stored.h`, `stored_decode.h`, `stored_rope_append.h`
/// and `stored_widen.h`.
const _: () = {
    assert!(size_of::<StoredTensor>() == 104);
    assert!(size_of::<Stored>() == 216);
    assert!(size_of::<StoredAppendParams>() == 312);
    assert!(size_of::<StoredGatherParams>() == 600);
    assert!(size_of::<StoredAttentionParams>() == 744);
    assert!(size_of::<StoredDecodeParams>() == 648);
    assert!(size_of::<StoredRopeAppendParams>() == 2696);
    assert!(size_of::<StoredWidenParams>() == 568);
};

impl StoredFormat {
    fn of(cache: &RowTensors) -> StoredFormat {
        StoredFormat {
            form: match cache.format.form() {
                CacheForm::Plain => 0,
                CacheForm::TokenHeadScales => 1,
                CacheForm::ChannelScales => 2,
                CacheForm::ChannelZeroPoints => 3,
                CacheForm::Nvfp4 => 4,
                CacheForm::PackedKeys => 5,
            },
            element: match cache.format.element {
                DType::I8 => 5,
                DType::I4x2 => 6,
                DType::F4E2M1x2 => 7,
                dtype => dtype_code(dtype),
            },
        }
    }
}

impl Stored {
    /// Keys and values, and the scale of each tensor.
    pub fn of(caches: &[RowTensors; 2], scales: [f32; 2]) -> Stored {
        let [k, v] = [0, 1].map(|side| StoredTensor::of(&caches[side], scales[side]));
        let format = StoredFormat::of(&caches[0]);
        Stored { k, v, format }
    }

    /// The same without scales of whole heads, which a kernel applies elsewhere.
    pub fn without_head_scales(caches: &[RowTensors; 2]) -> Stored {
        let caches = caches.map(|cache| RowTensors {
            scales: cache.scales.filter(|_| cache.format.has_scales_beside()),
            ..cache
        });
        Stored::of(&caches, [1.0; 2])
    }
}

impl StoredTensor {
    fn of(cache: &RowTensors, scale: f32) -> StoredTensor {
        let [scales_page, scales_token, scales_head] = scale_strides(cache);
        let parts = Parts::of(cache);
        StoredTensor {
            cache: Cache::of(&cache.rows),
            scales: address(cache.scales),
            zero_points: address(cache.zero_points),
            scales_page,
            scales_token,
            scales_head,
            zero_points_head: cache.zero_points.map_or(0, |points| points.stride(0)),
            part_stride: parts.stride,
            log2_part: parts.log2,
            scale,
            head_dim: cache.dim() as u32,
            vectors: parts.holds_vectors(cache).into(),
        }
    }
}

/// From page to page, from token to token and from head to head.
fn scale_strides(cache: &RowTensors) -> [i64; 3] {
    let Some(scales) = &cache.scales else {
        return [0; 3];
    };
    match scales.rank() {
        1 => [0, 0, head_stride(scales)],
        2 => [0, 0, scales.stride(0)],
        _ => [0, 1, 2].map(|dim| scales.stride(dim)),
    }
}

/// One scale for all heads, or one each.
fn head_stride(scales: &Tensor) -> i64 {
    match scales.extent(0) {
        1 => 0,
        _ => scales.stride(0),
    }
}

/// The parts of a row whose elements lie together.
struct Parts {
    stride: i64,
    log2: u32,
}

impl Parts {
    fn of(cache: &RowTensors) -> Parts {
        let rows = &cache.rows;
        match (cache.format.form(), rows.rank()) {
            (CacheForm::PackedKeys, 5) => Parts {
                stride: rows.stride(3),
                log2: rows.extent(4).max(1).ilog2(),
            },
            (CacheForm::PackedKeys, _) => Parts {
                stride: rows.stride(3),
                log2: 0,
            },
            _ => Parts {
                stride: 0,
                log2: 31,
            },
        }
    }

    /// Eight neighbours, from a multiple of eight on, are in one part and aligned to their bytes or to 16.
    fn holds_vectors(&self, cache: &RowTensors) -> bool {
        let lanes = u32::from(cache.format.element.lanes());
        let bytes = VECTOR * cache.format.element.size() as u32 / lanes;
        1 << self.log2 >= VECTOR
            && cache.dim() % i64::from(VECTOR) == 0
            && row_alignment(&cache.rows) >= bytes.min(16)
    }
}
