//! Mirrors of the structs in `kernels/params/params.h`, field by field; sizes are asserted on both sides. What
//! the fields mean is written there. Addresses are `u64`.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{LogBase, ScoreBias, Sum};
use crate::tensor::Tensor;

/// `FolioRunFlag`.
pub const LSE_BASE_2: u32 = 1;
/// `FolioRunFlag`.
pub const ALIBI_SQRT: u32 = 2;
/// `FOLIO_RUN_MASK_SKIP_PREFIX`.
pub const MASK_SKIP_PREFIX: u32 = 4;
/// `FOLIO_RUN_MASK_NEW_KEYS`.
pub const MASK_NEW_KEYS: u32 = 8;
/// `FOLIO_RUN_MM_PREFIX_IN_WINDOW`.
pub const MM_PREFIX_IN_WINDOW: u32 = 16;
/// `FOLIO_RUN_K_SCALES_OF_REQUESTS`.
pub const K_SCALES_OF_REQUESTS: u32 = 0x400;
/// `FOLIO_RUN_V_SCALES_OF_REQUESTS`.
pub const V_SCALES_OF_REQUESTS: u32 = 0x800;
/// `FOLIO_RUN_ENDS_SUM`.
pub const ENDS_SUM: u32 = 0x4000;
/// `FOLIO_QUERIES_E4M3` of `kernels/params/query_type.h`.
pub const QUERIES_E4M3: u32 = 0x100;
/// `FOLIO_QUERIES_E5M2` of `kernels/params/query_type.h`.
pub const QUERIES_E5M2: u32 = 0x200;
/// `FOLIO_QUERIES_BF16` of `kernels/params/bf16_queries.h`.
pub const QUERIES_BF16: u32 = 0x2000;

/// What a kernel for queries of the second type is told of those of the first: of bf16 where it is one for fp16.
pub fn flag_of_queries(queries: DType, of_kernel: DType) -> u32 {
    match (queries, of_kernel) {
        (DType::BF16, DType::F16) => QUERIES_BF16,
        _ => 0,
    }
}

/// `FolioMask`.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskMode {
    /// Bottom-right aligned.
    Causal = 0,
    /// Every key.
    Full = 1,
    /// A byte per (row, key).
    Bytes = 2,
    /// A bit per (row, key).
    Bits = 3,
}

/// `FolioRows`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Rows {
    pub data: u64,
    pub stride_token: i64,
    pub stride_head: i64,
}

/// `FolioCache`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Cache {
    pub data: u64,
    pub stride_page: i64,
    pub stride_token: i64,
    pub stride_head: i64,
}

/// `FolioPlanView`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct PlanView {
    pub qo_indptr: u64,
    pub kv_len: u64,
    pub page_ids: u64,
    pub items: u64,
    pub combines: u64,
    pub partials: u64,
    pub counts: u64,
    pub next_tile: u64,
    pub partial_o: u64,
    pub partial_lse: u64,
}

/// `FolioAttentionParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AttentionParams {
    pub plan: PlanView,
    pub q: Rows,
    pub o: Rows,
    pub k: Cache,
    pub v: Cache,
    pub lse: u64,
    pub lse_stride_token: i64,
    pub lse_stride_head: i64,
    pub sinks: u64,
    pub alibi_slopes: u64,
    pub k_scales: u64,
    pub v_scales: u64,
    pub mask: u64,
    pub mask_start: u64,
    pub mm_prefix_ranges: u64,
    pub logits_scale: f32,
    pub v_scale: f32,
    pub o_scale: f32,
    pub logits_soft_cap: f32,
    pub window_left: i32,
    pub window_right: i32,
    pub mask_mode: MaskMode,
    pub flags: u32,
    pub k_scales_stride: i32,
    pub v_scales_stride: i32,
    pub num_qo_heads: u32,
    pub num_kv_heads: u32,
    pub page_size: u32,
    pub num_mm_prefix_ranges: u32,
    pub num_tokens: u32,
    pub num_pages: u32,
    pub mask_bytes: i64,
    pub section_bytes: u32,
    pub k_rope_page_groups: u32,
    pub causal_requests: u64,
    pub alibi_request_stride: u32,
    pub chunk_size: u32,
    pub chunk_look_back: u32,
    pub reserved: u32,
}

/// `FolioDivisor`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Divisor {
    pub divisor: u32,
    pub multiplier: u32,
    pub shift: u32,
}

/// `FOLIO_BIAS_NEW_KEYS`.
pub const BIAS_NEW_KEYS: u32 = 1;
/// `FOLIO_BIAS_REQUEST_ROWS`.
pub const BIAS_REQUEST_ROWS: u32 = 2;

/// `FolioScoreBias`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct BiasParams {
    pub data: u64,
    pub stride_head: i64,
    pub stride_row: i64,
    pub stride_column: i64,
    pub rows: u32,
    pub columns: u32,
    pub dtype: u32,
    pub flags: u32,
    pub group_size: Divisor,
    pub reserved: u32,
}

/// `FolioGenericParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct GenericParams {
    pub attention: AttentionParams,
    pub head_dim_qk: u32,
    pub head_dim_vo: u32,
    pub row_tiles: u32,
    pub o_dtype: u32,
    pub q_copy_bytes: u32,
    pub k_copy_bytes: u32,
    pub v_copy_bytes: u32,
    pub page_size: Divisor,
    pub k_rope: Cache,
    pub rope_dim: u32,
    pub k_rope_copy_bytes: u32,
    pub bias: BiasParams,
}

/// `FolioPaddedDecodeParams`, with its base.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct DecodeParams {
    pub attention: AttentionParams,
    pub group_size: u32,
    pub o_dtype: u32,
    pub kv_evict_first: u32,
    pub boxes_log2: u32,
    pub k_page_step: u32,
    pub v_page_step: u32,
    pub pages_by_head: u32,
    pub reserved: u32,
    pub head_dim_qk: u32,
    pub head_dim_vo: u32,
    pub k_column_boxes: u32,
    pub v_column_boxes: u32,
    pub row_alignment: u32,
    pub bf16_queries: u32,
}

/// `FolioSum`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SumParams {
    pub o: u64,
    pub lse: u64,
}

impl SumParams {
    /// Addresses of a sum, or of none.
    pub fn new(sum: Option<&Sum>) -> SumParams {
        sum.map_or_else(SumParams::default, |sum| SumParams {
            o: sum.o.address() as u64,
            lse: sum.lse.address() as u64,
        })
    }

    /// What a run's flags say of it.
    pub fn flags(sum: Option<&Sum>) -> u32 {
        match sum {
            Some(sum) if sum.ends => ENDS_SUM,
            _ => 0,
        }
    }
}

/// `FolioCombineParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CombineParams {
    pub plan: PlanView,
    pub o: Rows,
    pub lse: u64,
    pub lse_stride_token: i64,
    pub lse_stride_head: i64,
    pub sinks: u64,
    pub v_scales: u64,
    pub v_scale: f32,
    pub o_scale: f32,
    pub v_scales_stride: i32,
    pub flags: u32,
    pub num_qo_heads: u32,
    pub group_size: u32,
    pub head_dim_vo: u32,
    pub o_dtype: u32,
    pub blocks_of_row: u32,
    pub num_tokens: u32,
    pub sum: SumParams,
}

/// `FolioState`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct State {
    pub v: u64,
    pub s: u64,
    pub v_stride_token: i64,
    pub v_stride_state: i64,
    pub v_stride_head: i64,
    pub s_stride_token: i64,
    pub s_stride_state: i64,
    pub s_stride_head: i64,
}

/// `FolioMergeStatesParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MergeStatesParams {
    pub first: State,
    pub second: State,
    pub v_out: Rows,
    pub s_out: u64,
    pub s_out_stride_token: i64,
    pub s_out_stride_head: i64,
    pub mask: u64,
    pub mask_stride: i64,
    pub num_tokens: i64,
    pub num_heads: Divisor,
    pub num_states: u32,
    pub head_dim: u32,
    pub flags: u32,
    pub vectors: u32,
    pub log2_lanes: u32,
}

/// `FolioAppendTensor`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AppendTensor {
    pub source: Rows,
    pub cache: Cache,
    pub scales: u64,
    pub scale: f32,
    pub scales_stride: i32,
    pub head_dim: u32,
    pub pieces: Divisor,
}

/// `FolioAppendParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AppendParams {
    pub k: AppendTensor,
    pub v: AppendTensor,
    pub slots: u64,
    pub num_tokens: i64,
    pub num_slots: i64,
    pub page_size: Divisor,
    pub slot_bytes: u32,
    pub num_kv_heads: u32,
    pub vectors: u32,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/params.h`.
const _: () = {
    assert!(size_of::<crate::problem::WorkItem>() == 48);
    assert!(size_of::<crate::problem::CombineItem>() == 16);
    assert!(size_of::<PlanView>() == 80);
    assert!(size_of::<AttentionParams>() == 376);
    assert!(size_of::<GenericParams>() == 520);
    assert!(size_of::<BiasParams>() == 64);
    assert!(size_of::<CombineParams>() == 200);
    assert!(size_of::<DecodeParams>() == 432);
    assert!(size_of::<MergeStatesParams>() == 232);
    assert!(size_of::<AppendTensor>() == 88);
    assert!(size_of::<AppendParams>() == 224);
};

/// Flags of one word, which three headers declare.
const _: () = {
    let flags = [
        LSE_BASE_2,
        ALIBI_SQRT,
        MASK_SKIP_PREFIX,
        MASK_NEW_KEYS,
        MM_PREFIX_IN_WINDOW,
        K_SCALES_OF_REQUESTS,
        V_SCALES_OF_REQUESTS,
        ENDS_SUM,
        QUERIES_E4M3,
        QUERIES_E5M2,
        QUERIES_BF16,
    ];
    let (mut taken, mut i) = (0, 0);
    while i < flags.len() {
        assert!(taken & flags[i] == 0);
        taken |= flags[i];
        i += 1;
    }
};

impl Rows {
    /// A `[token, head, dim]` tensor.
    pub fn of(tensor: &Tensor) -> Rows {
        Rows {
            data: tensor.address() as u64,
            stride_token: tensor.stride(0),
            stride_head: tensor.stride(1),
        }
    }
}

impl Cache {
    /// A `[page, token, head, dim]` tensor.
    pub fn of(tensor: &Tensor) -> Cache {
        Cache {
            data: tensor.address() as u64,
            stride_page: tensor.stride(0),
            stride_token: tensor.stride(1),
            stride_head: tensor.stride(2),
        }
    }
}

impl BiasParams {
    /// Of a bias that `api` checked, if there is one with elements: of rank 3, and counted in 32 bits.
    pub fn of(bias: Option<ScoreBias>, group_size: u32) -> BiasParams {
        let Some(bias) = bias.filter(|bias| !bias.tensor.is_empty()) else {
            return BiasParams {
                data: 0,
                stride_head: 0,
                stride_row: 0,
                stride_column: 0,
                rows: 0,
                columns: 0,
                dtype: 0,
                flags: 0,
                group_size: Divisor::new(0),
                reserved: 0,
            };
        };
        let bytes = |dim| bias.tensor.stride(dim) * bias.tensor.dtype().size() as i64;
        let when = |stated: bool, flag| if stated { flag } else { 0 };
        BiasParams {
            data: bias.tensor.address() as u64,
            stride_head: bytes(0),
            stride_row: bytes(1),
            stride_column: bytes(2),
            rows: bias.tensor.extent(1) as u32,
            columns: bias.tensor.extent(2) as u32,
            dtype: dtype_code(bias.tensor.dtype()),
            flags: when(bias.new_keys, BIAS_NEW_KEYS) | when(bias.request_rows, BIAS_REQUEST_ROWS),
            group_size: Divisor::new(group_size),
            reserved: 0,
        }
    }
}

impl Divisor {
    /// Prepares division by `divisor` of numbers below 2^31: with l = ⌈log2 d⌉ and
    /// m = ⌊2^32 (2^l − d) / d⌋ + 1, n / d = (mulhi(n, m) + n) >> l. Where there is nothing to divide,
    /// `divisor` may be 0.
    pub fn new(divisor: u32) -> Divisor {
        if divisor == 0 {
            return Divisor {
                divisor: 0,
                multiplier: 0,
                shift: 0,
            };
        }
        let shift = u32::BITS - (divisor - 1).leading_zeros();
        let excess = (1u64 << shift) - u64::from(divisor);
        Divisor {
            divisor,
            multiplier: ((excess << 32) / u64::from(divisor) + 1) as u32,
            shift,
        }
    }
}

/// `FolioDtype`.
pub fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F8E4M3 => 3,
        _ => 4,
    }
}

/// The flag of an lse's base.
pub fn lse_flag(base: LogBase) -> u32 {
    match base {
        LogBase::E => 0,
        LogBase::Two => LSE_BASE_2,
    }
}

/// Address of an optional tensor, or 0.
pub fn address(tensor: Option<Tensor>) -> u64 {
    tensor.map_or(0, |tensor| tensor.address() as u64)
}

/// A product of extents as kernels count it, below 2^31. (Each extent by itself is, as `api` checked.)
///
/// # Errors
/// [`Error::Unsupported`] with the field and its value where it is larger.
pub fn count(field: &str, what: &str, value: i64) -> Result<u32> {
    match i32::try_from(value) {
        Ok(count) if count >= 0 => Ok(count as u32),
        _ => Err(Error::Unsupported(format!(
            "{field}: {value} {what} are not supported; {} are",
            i32::MAX
        ))),
    }
}

/// The fewest indices along the first dimension, which kernels keep what they find in device memory within. At most
/// 2^31, so that an int32 below it, compared as unsigned, is not negative.
pub fn fewest<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> u32 {
    let fewest = tensors.into_iter().map(|tensor| tensor.extent(0)).min();
    fewest.map_or(0, |extent| extent.min(1 << 31) as u32)
}

/// Stride of scales from head to head: one for all has none.
pub fn scales_stride(scales: Option<Tensor>) -> i32 {
    scales.map_or(0, |scales| {
        i32::from(scales.extent(0) > 1 || are_of_requests(&scales))
    })
}

/// Whether scales are `[batch_size, num_kv_heads]`.
pub fn are_of_requests(scales: &Tensor) -> bool {
    scales.rank() == 2
}

/// The largest power of two, up to 16, that divides the address of every row of `tensor` in bytes. (Rows
/// are along the last dimension; strides of dimensions with one index do not matter.)
pub fn row_alignment(tensor: &Tensor) -> u32 {
    let size = tensor.dtype().size() as i64;
    let last = tensor.rank() - 1;
    let bits = tensor.shape()[..last]
        .iter()
        .zip(tensor.strides())
        .filter(|&(&extent, _)| extent > 1)
        .fold(tensor.address() as i64 | 16, |bits, (_, &stride)| {
            // Where there is no element a stride may be anything.
            bits | stride.wrapping_mul(size)
        });
    1 << bits.trailing_zeros()
}

/// Bytes, up to 16, that rows can be copied by: their addresses and their length are multiples of them. What is behind a row is
/// not zero, and may be NaN.
pub fn piece_bytes(rows: &Tensor) -> u32 {
    let length = rows.extent(rows.rank() - 1) * rows.dtype().size() as i64;
    row_alignment(rows).min(1 << length.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Device;
    use proptest::prelude::*;

    fn divide(n: u32, d: Divisor) -> u32 {
        let high = (u64::from(n) * u64::from(d.multiplier)) >> 32;
        ((high + u64::from(n)) >> d.shift) as u32
    }

    #[test]
    fn nothing_can_be_divided_by_nothing() {
        assert_eq!(divide(0, Divisor::new(0)), 0);
    }

    #[test]
    fn counts_are_refused_with_field_and_value() {
        assert_eq!(count("v", "rows", 7).unwrap(), 7);
        for value in [1 << 31, 1 << 32, (1 << 32) + 2, -1] {
            let message = count("v", "rows", value).unwrap_err().to_string();
            assert!(message.contains(&format!("v: {value} rows")), "{message}");
        }
    }

    #[allow(unsafe_code)]
    fn rows(extent: i64) -> Tensor {
        // SAFETY: never read.
        unsafe {
            let (data, strides) = (16 as *mut u8, [1]);
            Tensor::new(
                "rows",
                data,
                Device::Cuda(0),
                DType::U8,
                &[extent],
                Some(&strides),
            )
        }
        .unwrap()
    }

    #[test]
    fn a_negative_int32_is_never_below_the_fewest() {
        assert_eq!(fewest([&rows(7), &rows(5), &rows(6)]), 5);
        assert_eq!(fewest([&rows(0), &rows(5)]), 0);
        for extent in [1 << 31, u32::MAX.into(), 1 << 40] {
            assert_eq!(fewest([&rows(extent)]), 1 << 31);
            assert!(-1_i32 as u32 >= fewest([&rows(extent)]));
        }
    }

    proptest! {
        #[test]
        fn a_divisor_divides(n in 0u32..1 << 31, d in 1u32..1 << 31) {
            prop_assert_eq!(divide(n, Divisor::new(d)), n / d);
        }

        #[test]
        fn small_divisors_divide_at_their_multiples(q in 0u32..1 << 20, d in 1u32..2000) {
            let n = q * d;
            prop_assert_eq!(divide(n, Divisor::new(d)), q);
            if n > 0 {
                prop_assert_eq!(divide(n - 1, Divisor::new(d)), (n - 1) / d);
            }
        }
    }
}
