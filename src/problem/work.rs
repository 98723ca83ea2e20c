//! What a plan consists of: work items, and the merges that put split rows together again. The same
//! 32-byte records are read by CPU workers and by kernels (`kernels/params/params.h` mirrors them).

/// `WorkItem::partial` of an item that covers all keys of its rows and writes the output itself.
pub const NO_PARTIAL: u32 = u32::MAX;

/// Some query rows of one request against a range of its keys, for every head.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkItem {
    /// The request.
    pub request: u32,
    /// First query row, counted within the request.
    pub q_start: u32,
    /// Number of query rows.
    pub q_len: u32,
    /// First key.
    pub kv_start: u32,
    /// One past the last key.
    pub kv_end: u32,
    /// First row of the partial results, or [`NO_PARTIAL`].
    pub partial: u32,
    /// Rows times keys that a causal mask leaves, saturated: the order of the list.
    pub cost: u32,
    /// Zero.
    pub reserved: u32,
}

/// Rows whose keys were split: row `r` of chunk `c` lies at partial row `partial + c · q_len + r`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeItem {
    /// The request.
    pub request: u32,
    /// First query row, counted within the request.
    pub q_start: u32,
    /// Number of query rows.
    pub q_len: u32,
    /// First partial row.
    pub partial: u32,
    /// Number of chunks, at least two.
    pub num_chunks: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// A whole plan. The vectors keep their capacity from step to step.
#[derive(Debug, Clone, Default)]
pub struct WorkList {
    /// Work, the largest first.
    pub items: Vec<WorkItem>,
    /// Merges of split rows.
    pub merges: Vec<MergeItem>,
    /// Scratch of the scheduler: the order of the items, and the items before they were ordered.
    pub order: Vec<u128>,
    /// See `order`.
    pub unordered: Vec<WorkItem>,
}
