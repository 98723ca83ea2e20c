//! What the kernels of the projections take: mirrors `kernels/params/projection.h` field by field.

use super::params::{Rows, row_alignment};
use crate::problem::{Checked, CopyWeightsArgs, ProjectArgs};
use crate::tensor::Tensor;

/// `FolioWeightOrder`: how the portable kernel reads a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightOrder {
    /// Vectors along the depth.
    DepthFirst = 0,
    /// Vectors along the columns.
    ColumnsFirst = 1,
    /// Elements.
    Elements = 2,
}

impl WeightOrder {
    /// The order of a `[head, depth, column]` weight whose rows along one of the two are contiguous and aligned.
    pub fn of(weight: &Tensor) -> WeightOrder {
        if are_rows(weight) {
            WeightOrder::ColumnsFirst
        } else if are_rows(&weight.swap_dims(1, 2)) {
            WeightOrder::DepthFirst
        } else {
            WeightOrder::Elements
        }
    }
}

/// Elements of the last dimension lie side by side, and every row begins at a multiple of 16 bytes.
fn are_rows(tensor: &Tensor) -> bool {
    tensor.stride(2) == 1 && row_alignment(tensor) >= 16
}

/// `FolioProjectionParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct ProjectionParams {
    pub x: Rows,
    pub weight: u64,
    pub weight_stride_head: i64,
    pub weight_stride_depth: i64,
    pub weight_stride_column: i64,
    pub out: Rows,
    pub num_tokens: u32,
    pub num_heads: u32,
    pub depth: u32,
    pub columns: u32,
    pub x_heads: u32,
    pub x_vectors: u32,
    pub weight_order: u32,
    pub out_pairs: u32,
}

impl ProjectionParams {
    /// Of a product, whose extents `api` checked to be counts.
    pub fn of(args: &Checked<ProjectArgs>) -> ProjectionParams {
        let [num_tokens, num_heads, depth, columns] = args.extents().map(|extent| extent as u32);
        let x_heads = args.x.extent(1) as u32;
        let mut x = Rows::of(&args.x);
        if x_heads == 1 {
            x.stride_head = 0;
        }
        let weight = &args.weight;
        ProjectionParams {
            x,
            weight: weight.address() as u64,
            weight_stride_head: weight.stride(0),
            weight_stride_depth: weight.stride(1),
            weight_stride_column: weight.stride(2),
            out: Rows::of(&args.out),
            num_tokens,
            num_heads,
            depth,
            columns,
            x_heads,
            x_vectors: (row_alignment(&args.x) >= 16).into(),
            weight_order: WeightOrder::of(weight) as u32,
            out_pairs: (row_alignment(&args.out) >= 4).into(),
        }
    }
}

/// `FolioCopyWeightsParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CopyWeightsParams {
    pub source: u64,
    pub target: u64,
    pub source_strides: [i64; 3],
    pub target_strides: [i64; 3],
    pub num_heads: u32,
    pub rows: u32,
    pub columns: u32,
    pub reserved: u32,
}

impl CopyWeightsParams {
    /// Of a copy, whose extents `api` checked to be counts.
    pub fn of(args: &Checked<CopyWeightsArgs>) -> CopyWeightsParams {
        let [num_heads, rows, columns] = [0, 1, 2].map(|dim| args.target.extent(dim) as u32);
        let strides = |tensor: &Tensor| [0, 1, 2].map(|dim| tensor.stride(dim));
        CopyWeightsParams {
            source: args.source.address() as u64,
            target: args.target.address() as u64,
            source_strides: strides(&args.source),
            target_strides: strides(&args.target),
            num_heads,
            rows,
            columns,
            reserved: 0,
        }
    }
}

/// The numbers of the `static_assert`s at the end of `kernels/params/projection.h`.
const _: () = {
    assert!(size_of::<ProjectionParams>() == 112);
    assert!(std::mem::offset_of!(ProjectionParams, out) == 56);
    assert!(std::mem::offset_of!(ProjectionParams, num_tokens) == 80);
    assert!(std::mem::offset_of!(ProjectionParams, x_heads) == 96);
    assert!(size_of::<CopyWeightsParams>() == 80);
    assert!(std::mem::offset_of!(CopyWeightsParams, num_heads) == 64);
};
