//! What an append and the run that attends to its tokens have in common: the tensors of the one must be those of the other.

use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, Checked, RopeAppendArgs};
use crate::tensor::Tensor;

/// Checks that a run reads what an append writes.
pub(super) fn check(append: &Checked<RopeAppendArgs>, args: &Checked<AttentionArgs>) -> Result<()> {
    let Some(q_out) = append.q_out else {
        return Err(Error::InvalidArgument(
            "append.q: NULL is not accepted; the queries of the run are".into(),
        ));
    };
    same("q", &args.q, "q_out", &q_out)?;
    same("k", &args.k, "k_cache", &append.append.k_cache)?;
    same("v", &args.v, "v_cache", &append.append.v_cache)
}

fn same(field: &str, read: &Tensor, of_append: &str, written: &Tensor) -> Result<()> {
    let mut dims = 0..read.rank();
    // A stride of one element, or of none, leads nowhere.
    let is_same = |dim: usize| {
        read.extent(dim).min(written.extent(dim)) <= 1 || read.stride(dim) == written.stride(dim)
    };
    if read.address() == written.address() && read.dtype() == written.dtype() && dims.all(is_same) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{field}: {} at {:#x} with strides {:?} is not accepted; append.{of_append} is, {} at {:#x} with strides {:?}",
        read.dtype().name(),
        read.address(),
        read.strides(),
        written.dtype().name(),
        written.address(),
        written.strides(),
    )))
}
