//! Growing the lists of a plan. A list that cannot grow is an error, and no abort.

use crate::error::{Error, Result};

/// Makes room for `count` elements in all, or says that there is no memory for them.
pub(super) fn reserve<T>(what: &str, list: &mut Vec<T>, count: usize) -> Result<()> {
    list.try_reserve(count.saturating_sub(list.len()))
        .map_err(|_| {
            Error::OutOfMemory(format!(
                "batch: there is no memory for a list of {count} {what}; a smaller batch is accepted"
            ))
        })
}
