//! The oracle's copy of pages: byte by byte, one pair after the other.

use crate::error::{Error, Result};
use crate::problem::CopyArgs;

pub(super) fn copy(args: &CopyArgs) -> Result<()> {
    let numbers = args.page_pairs.as_integers().ok_or_else(|| {
        Error::Internal("page_pairs passed its checks and is no host integer".into())
    })?;
    for pair in 0..args.page_pairs.extent(0) as usize {
        let (src, dst) = (numbers.get(2 * pair), numbers.get(2 * pair + 1));
        if src < 0 || dst < 0 {
            continue;
        }
        for pages in [Some(args.k), args.v].into_iter().flatten() {
            for byte in 0..pages.src.extent(1) {
                pages.dst.set(&[dst, byte], pages.src.get(&[src, byte]));
            }
        }
    }
    Ok(())
}
