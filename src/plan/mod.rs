//! Planning: pure functions from lengths and limits to work, and from work to the bytes that workers read. No
//! device, no clock.

mod capacity;
mod image;
mod schedule;
mod starts;

pub use capacity::{Capacity, Counts};
pub use image::{Layout, PARTS_ALIGNMENT, Regions, write};
pub use schedule::schedule;
pub use starts::{device_page_ids, num_copied_page_ids};

use crate::error::{Error, Result};

/// Makes room for `count` elements in all, or says that there is no memory for them.
fn reserve<T>(what: &str, list: &mut Vec<T>, count: usize) -> Result<()> {
    list.try_reserve(count.saturating_sub(list.len()))
        .map_err(|_| {
            Error::OutOfMemory(format!(
                "plan: there is no memory for a list of {count} {what}; a smaller batch is accepted"
            ))
        })
}
