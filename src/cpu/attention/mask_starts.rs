//! Where the custom masks of requests start, as a caller states it: each mask must lie within its tensor. Lengths are the
//! plan's, so that a run is where this can be checked.

use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, Checked, Mask, MaskColumns};
use crate::tensor::Tensor;

/// Checks the starts of `requests`: index, query rows and keys of each.
pub(super) fn check_mask_starts(
    args: &Checked<AttentionArgs>,
    requests: impl Iterator<Item = (usize, i64, i64)>,
) -> Result<()> {
    let starts = args.custom_mask_indptr.as_ref();
    let (Some(starts), Mask::Bytes(mask) | Mask::Bits(mask)) =
        (starts.and_then(Tensor::as_i64), &args.mask)
    else {
        return Ok(());
    };
    for (b, qo_len, kv_len) in requests {
        let columns = match args.mask_columns {
            MaskColumns::Keys | MaskColumns::KeysAfterPrefix => kv_len,
            MaskColumns::NewKeys => qo_len,
        };
        let bytes = match args.mask {
            Mask::Bits(_) => (qo_len * columns + 7) / 8,
            _ => qo_len * columns,
        };
        let most = mask.extent(0) - bytes;
        if !(0..=most).contains(&starts[b]) {
            return Err(outside(b, starts[b], bytes, mask.extent(0)));
        }
    }
    Ok(())
}

fn outside(b: usize, start: i64, bytes: i64, extent: i64) -> Error {
    Error::InvalidArgument(format!(
        "custom_mask_indptr: {start} of request {b} is not accepted; its mask of {bytes} bytes must lie within the {extent} of custom_mask"
    ))
}
