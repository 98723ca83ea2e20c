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

/// Keys of a prefix that a plan shares, where only the device knows the lengths: how many of them its requests have is
/// measured there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedSegment {
    /// The requests.
    pub requests: Range<u32>,
    /// One past its last key, where all of its requests have so many: a multiple of `kv_unit`, above that of the parent.
    pub kv_end: u32,
    /// The segment around it, among those before it, whose keys come first.
    pub parent: Option<usize>,
}
