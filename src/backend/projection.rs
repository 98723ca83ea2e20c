//! The projections of MLA.

use super::refusal::refused;
use super::stream::Stream;
use crate::error::Result;
use crate::problem::{Checked, CopyWeightsArgs, ProjectArgs};
use crate::tensor::Tensor;

/// Matrix products per head between the queries' space and the latent one, and what prepares their weights.
pub trait ProjectionOps {
    /// Computes a product per head.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn project(&self, _args: &Checked<ProjectArgs>, _stream: Stream) -> Result<()> {
        refused("mla_project")
    }

    /// Computes two products of the same rows, which all heads share. Rows from `existing_tokens` on, a number in the
    /// device's memory, need no results.
    ///
    /// # Errors
    /// As [`ProjectionOps::project`].
    fn project_pair(
        &self,
        products: &[Checked<ProjectArgs>; 2],
        _existing_tokens: Option<&Tensor>,
        stream: Stream,
    ) -> Result<()> {
        products
            .iter()
            .try_for_each(|args| self.project(args, stream))
    }

    /// Copies weights to where and how products read them best.
    ///
    /// # Errors
    /// `Unsupported` where the backend cannot.
    fn copy_weights(&self, _args: &Checked<CopyWeightsArgs>, _stream: Stream) -> Result<()> {
        refused("mla_absorb_weights")
    }
}
