//! What a backend answers that does not have an operator.

use crate::error::{Error, Result};

/// The answer of a backend that does not have an operator.
pub(super) fn refused<T>(operator: &str) -> Result<T> {
    Err(Error::Unsupported(format!(
        "{operator}: the backend of this context does not have this operator; another device or build may"
    )))
}
