//! Rows of the Hopper decode kernels.

use super::Family;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[];
