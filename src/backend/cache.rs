//! Operators on paged caches.

use super::refusal::refused;
use super::stream::Stream;
use crate::error::Result;
use crate::problem::{
    AppendArgs, Checked, CopyArgs, CpReorderArgs, GatherArgs, LatentRecords, MlaAppendArgs,
    MlaGatherArgs, RopeAppendArgs,
};

/// Operators that write and read paged caches.
pub trait CacheOps {
    /// Writes new tokens to a paged cache.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn append(&self, _args: &Checked<AppendArgs>, _stream: Stream) -> Result<()> {
        refused("kv_append")
    }

    /// Copies pages.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn copy(&self, _args: &Checked<CopyArgs>, _stream: Stream) -> Result<()> {
        refused("kv_copy")
    }

    /// Copies keys and values from a paged cache to dense rows.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn gather(&self, _args: &Checked<GatherArgs>, _stream: Stream) -> Result<()> {
        refused("kv_gather")
    }

    /// Normalises and rotates queries and keys of new tokens, and writes keys and values to a paged cache.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn rope_append(&self, _args: &Checked<RopeAppendArgs>, _stream: Stream) -> Result<()> {
        refused("rope_append")
    }

    /// Writes new tokens to a cache of latent records.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn mla_append(
        &self,
        _args: &Checked<MlaAppendArgs<LatentRecords>>,
        _stream: Stream,
    ) -> Result<()> {
        refused("mla_append")
    }

    /// Copies latent records from a cache to dense rows.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn mla_gather(
        &self,
        _args: &Checked<MlaGatherArgs<LatentRecords>>,
        _stream: Stream,
    ) -> Result<()> {
        refused("mla_gather")
    }

    /// Puts records that were gathered rank by rank request by request.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn cp_reorder(&self, _args: &Checked<CpReorderArgs>, _stream: Stream) -> Result<()> {
        refused("cp_reorder")
    }
}
