//! Rows of the Hopper prefill kernels.

use super::Family;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[];
