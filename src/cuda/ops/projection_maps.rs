//! How the tensors of a product lie for the Hopper kernels of projections: which dimension of the weight is contiguous, and
//! the tensor maps. The kernels are chosen in `projection`.

use crate::cuda::attention::sm90::{Map, rows_are_distinct};
use crate::cuda::driver::{Driver, L2Promotion, Swizzle, TensorMap};
use crate::cuda::params::row_alignment;
use crate::cuda::projection_params::WeightOrder;
use crate::error::Result;
use crate::problem::{Checked, ProjectArgs};
use crate::tensor::Tensor;

/// Columns of a swizzle atom, 128 bytes of 16-bit elements, and the step along the depth of the Hopper kernel.
pub const ATOM: u32 = 64;

/// Which dimension of a weight that a tensor map can describe has the unit stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The depth.
    DepthFirst,
    /// The columns.
    ColumnsFirst,
}

/// A product, and how its weight lies.
pub type Ordered<'a> = (&'a Checked<ProjectArgs>, Order);

/// The order of the weight, where rows of all tensors are aligned to 16 bytes.
pub fn order_of_aligned(args: &Checked<ProjectArgs>) -> Option<Order> {
    let order = match WeightOrder::of(&args.weight) {
        WeightOrder::DepthFirst => Order::DepthFirst,
        WeightOrder::ColumnsFirst => Order::ColumnsFirst,
        WeightOrder::Elements => return None,
    };
    let rows = [&args.x, &args.out];
    let aligned = rows.into_iter().all(|rows| row_alignment(rows) >= 16);
    aligned.then_some(order)
}

/// The same, where tensor maps can describe all tensors.
pub fn order_for_maps(args: &Checked<ProjectArgs>) -> Option<Order> {
    let mut tensors = [&args.x, &args.weight, &args.out].into_iter();
    order_of_aligned(args).filter(|_| tensors.all(map_describes))
}

fn map_describes(tensor: &Tensor) -> bool {
    const MOST_BYTES: i64 = 1 << 40;
    let bytes = |stride: &i64| stride.saturating_mul(tensor.dtype().size() as i64);
    rows_are_distinct(tensor)
        && tensor
            .strides()
            .iter()
            .all(|stride| bytes(stride) < MOST_BYTES)
}

/// Of x or the results: boxes are rows of 64 columns.
pub fn map_of_rows(driver: Driver, tensor: &Tensor, tokens: u32) -> Result<TensorMap> {
    Map::new(tensor)
        .dimension(tensor.extent(2) as u32, ATOM, 1)
        .dimension(tensor.extent(0) as u32, tokens, tensor.stride(0))
        .dimension(tensor.extent(1) as u32, 1, tensor.stride(1))
        .encode(driver, Swizzle::Span128)
}

/// Of a weight: boxes are 64 along what is contiguous, by `columns`, or by 64 of the depth. L2 gets the next box with
/// each: most calls take as long as their weights take to arrive.
pub fn map_of_weight(
    driver: Driver,
    (args, order): Ordered<'_>,
    columns: u32,
) -> Result<TensorMap> {
    let (weight, in_box) = match order {
        Order::DepthFirst => (args.weight.swap_dims(1, 2), columns),
        Order::ColumnsFirst => (args.weight, ATOM),
    };
    Map::new(&weight)
        .dimension(weight.extent(2) as u32, ATOM, 1)
        .dimension(weight.extent(1) as u32, in_box, weight.stride(1))
        .dimension(weight.extent(0) as u32, 1, weight.stride(0))
        .promoting(L2Promotion::Bytes256)
        .encode(driver, Swizzle::Span128)
}
