//! Operators on paged caches.

use super::refusal::refused;
use super::stream::Stream;
use crate::error::Result;
use crate::problem::{AppendArgs, Checked};

/// Operators that write and read paged caches.
pub trait CacheOps {
    /// Writes new tokens to a paged cache.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn append(&self, _args: &Checked<AppendArgs>, _stream: Stream) -> Result<()> {
        refused("kv_append")
    }
}
