//! The page ids that a host gave to a plan: where runs find them, and whether captured graphs would. What they say is checked in
//! `api`.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::device_page_ids;
use crate::problem::{Batch, Pages};

/// The page ids that a host passed to plan.
#[derive(Debug, Clone, Copy)]
pub struct GivenPageIds {
    /// The batch's field.
    pub field: &'static str,
    /// Where runs find them: where the host keeps them, or in the workspace (`None`).
    pub address: Option<u64>,
    /// They are int64 on the device, and copied there.
    pub is_wide: bool,
}

impl GivenPageIds {
    pub fn of(batch: &Batch<'_>) -> GivenPageIds {
        let (is_table, ids) = match batch {
            Batch::Host(batch) => (
                matches!(batch.pages, Pages::Table { .. }),
                device_page_ids(batch),
            ),
            Batch::Device(batch) => (
                batch.page_ids.is_some_and(|ids| ids.rank() == 2),
                batch.page_ids,
            ),
        };
        let is_wide = ids.is_some_and(|ids| ids.dtype() == DType::I64);
        GivenPageIds {
            field: if is_table {
                "block_table"
            } else {
                "kv_indices"
            },
            address: ids.filter(|_| !is_wide).map(|ids| ids.address() as u64),
            is_wide,
        }
    }

    /// Whether graphs that read ids at `bound`, `None` in the workspace, find these.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where they do not.
    pub fn check_bound(&self, bound: Option<u64>) -> Result<()> {
        if bound == self.address {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "{}: ids {} are not accepted; captured graphs read them {}",
            self.field,
            describe(self.address),
            describe(bound)
        )))
    }
}

fn describe(ids: Option<u64>) -> String {
    match ids {
        Some(address) => format!("at device address {address:#x}"),
        None => "in the workspace, copied there by plan".into(),
    }
}
