//! Keys that several requests of a batch share.

use std::ops::Range;

/// Neighbouring requests whose first keys are the same ones, in the same pages: a common system prompt, a document that
/// many ask about, the parent of beams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPrefix {
    /// The requests.
    pub requests: Range<u32>,
    /// Their first keys, so many, are shared.
    pub kv_len: u32,
}
