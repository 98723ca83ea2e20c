//! What a plan consists of: work items, and the combine items that put split rows together again. Workers on the
//! CPU and kernels read the same records (`kernels/params/params.h` mirrors them).

use super::shared::SharedSegment;

/// `WorkItem::partial` of an item that covers all keys of its rows and writes the output itself.
pub const NO_PARTIAL: u32 = u32::MAX;

/// Some query rows of one request against a range of its keys, for every head. What says where the rows and the
/// keys are is part of the item, so that nobody has to look it up: a kernel would wait for loads that depend on
/// one another.
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
    /// Where the page ids of the request start; for ragged keys and values its first row.
    pub page_start: i64,
    /// First query row, counted within the batch: the row of q and o.
    pub q_token: i32,
    /// Position of the first query row among the request's keys; negative where there are more rows than keys.
    pub position: i32,
}

/// One query row whose keys were split, for every head. Its partial results are the rows that
/// `WorkList::partials[first..first + count]` names: a CSR of rows, so that parts of any tiling meet.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CombineItem {
    /// The query row, counted within the batch.
    pub q_token: u32,
    /// First entry in the list of partial rows.
    pub first: u32,
    /// Number of partial rows, at least two.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// A whole plan, or, of a batch whose lengths are on the device, what the host has to say about it. The vectors keep their
/// capacity from step to step.
#[derive(Debug, Clone, Default)]
pub struct WorkList {
    /// Work, the largest first.
    pub items: Vec<WorkItem>,
    /// How many of the items, the last ones, are [`SmallItems`] of a cascade, or come with all heads at once where heads of other
    /// items come in sections: chunks of the last tiles of a prefill, and items that were cut into equal shares.
    pub small: u32,
    /// Workers that take an item together, as [`Workers::of_item`] of the tiling. 0 in cascades, where none do.
    pub workers_of_item: u32,
    /// Split rows, in the order of the batch.
    pub combines: Vec<CombineItem>,
    /// Partial rows of the combine items.
    pub partials: Vec<u32>,
    /// Where the parts of each request start.
    pub starts: RequestStarts,
    /// What the device shares when it cuts the batch, in the order of the first requests, the wider ones first. Of a batch
    /// with lengths on the host: empty, since its items say it.
    pub segments: Vec<SharedSegment>,
    /// Where workers take shares: item `n` is the first of share `n`, and the others of share `n` are the items from
    /// `shares[n]` to `shares[n + 1]`. Empty where the batch is not cut into shares.
    pub shares: Vec<u32>,
    /// Scratch of the scheduler: the order of the items, and the items before they were ordered.
    pub order: Vec<u128>,
    /// See `order`.
    pub unordered: Vec<WorkItem>,
    /// Scratch of estimates of how long a cut takes.
    pub free: Vec<FreeWorkers>,
}

/// Workers that are free at the same time.
#[derive(Debug, Clone, Copy)]
pub struct FreeWorkers {
    /// When.
    pub from: u64,
    /// How many.
    pub count: u64,
}

impl WorkList {
    /// Nothing to do.
    pub fn clear(&mut self) {
        self.items.clear();
        self.small = 0;
        self.workers_of_item = 0;
        self.combines.clear();
        self.partials.clear();
        self.starts.clear();
        self.segments.clear();
        self.shares.clear();
    }
}

/// Where the parts of each request start.
#[derive(Debug, Clone, Default)]
pub struct RequestStarts {
    /// `[batch_size]` first page id, or first row of ragged keys and values.
    pub page: Vec<i64>,
    /// `[batch_size + 1]` first byte of a custom mask of bytes; the last is the end.
    pub mask_bytes: Vec<i64>,
    /// `[batch_size + 1]` first byte of a custom mask of bits; the last is the end.
    pub mask_bits: Vec<i64>,
}

impl RequestStarts {
    fn clear(&mut self) {
        self.page.clear();
        self.mask_bytes.clear();
        self.mask_bits.clear();
    }
}

/// How a backend wants work cut. The scheduler (`plan::schedule`) does the cutting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Most query rows per item.
    pub q_tile: u32,
    /// Equal parts that an item of `q_tile` rows consists of, each as quick alone or quicker. 1: it is one.
    pub q_parts: u32,
    /// Chunks of keys are multiples of this many.
    pub kv_unit: u32,
    /// Bytes that the memory moves in the time of a unit of `kv_unit` keys. `u32::MAX`: it is no limit.
    pub unit_bytes: u32,
    /// Splits of keys aim at this many items, and never make more than this many beyond one per query
    /// tile. 0: keys are not split.
    pub max_splits: u32,
    /// Equal shares that a batch may be cut into where chunks of one size would leave workers idle: as many items as run
    /// at a time. 0: chunks alone.
    pub max_shares: u32,
    /// What it takes to cut the last tiles of a prefill.
    pub tail: TailCosts,
    /// A worker takes the items of a share, as [`WorkList::shares`] lists them; else the largest item that is left.
    pub takes_shares: bool,
    /// Units of `kv_unit` keys that chunks are to spare the longest request; where they spare no more, nothing is split.
    pub least_gain: u32,
    /// Query rows whose parts are put together in the time of a unit: chunks are to spare as much more. 0: it does not depend on
    /// rows.
    pub rows_of_unit: u32,
    /// Chunk of keys, a multiple of `kv_unit`, where a request's cut may not depend on the batch.
    pub invariant_chunk: u32,
    /// Units of `kv_unit` keys that a worker could read in the time that putting parts together takes at least.
    pub combine_units: u32,
    /// Bytes of a KV head in the time that a request's own key takes longer beside shared keys than in a flat plan.
    pub own_key_bytes: u32,
    /// What runs the items.
    pub workers: Workers,
}

impl Tiling {
    /// Whether a batch may be cut into equal shares, if its longest request has so many query rows. Where a tail is there to
    /// cut, tiles of one request read its keys at the same time, and each would begin at other ones.
    pub fn may_be_shared(&self, rows: u32) -> bool {
        rows <= self.q_tile || self.tail.most_chunks == 0
    }

    /// With items of so many parts.
    fn of_parts(self, q_parts: u32) -> Tiling {
        Tiling {
            q_tile: self.q_tile / self.q_parts * q_parts,
            q_parts,
            ..self
        }
    }

    /// With items of fewer parts, the narrowest first.
    pub fn narrower(self) -> impl Iterator<Item = Tiling> {
        (1..self.q_parts).map(move |q_parts| self.of_parts(q_parts))
    }

    /// For batches whose requests have few keys: in tiles of one part, whose keys are not split.
    pub fn of_few_keys(self) -> Tiling {
        Tiling {
            max_splits: 1,
            max_shares: 0,
            tail: TailCosts::NO_TAIL,
            ..self.of_parts(1)
        }
    }
}

/// What it takes to cut the last tiles of a prefill, where whole tiles would leave workers idle at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TailCosts {
    /// Chunks of all cut tiles together, at most. 0: none is cut.
    pub most_chunks: u32,
    /// Units of `kv_unit` keys in the time that an item takes beside its keys.
    pub item_units: u32,
    /// Units in the time of the kernel that puts parts together.
    pub combine_units: u32,
    /// Units that the batch is to take less, at least.
    pub least_gain: u32,
}

impl TailCosts {
    /// No tile is cut.
    pub const NO_TAIL: TailCosts = TailCosts {
        most_chunks: 0,
        item_units: 0,
        combine_units: 0,
        least_gain: 0,
    };
}

/// Workers that run at a time, threads or blocks of a device, and how many of them an item occupies: a piece of it for
/// each KV head or block of heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workers {
    /// At least one.
    pub all: u32,
    /// At least one.
    pub of_item: u32,
    /// Items of which a worker takes several pieces at a time. In cascades they stand last.
    pub small: SmallItems,
}

/// Items of few query rows and few keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmallItems {
    /// So many rows at most; 0: there are no such items.
    pub rows: u32,
    /// So many keys at most.
    pub keys: u32,
    /// Workers that one of them occupies.
    pub of_item: u32,
}

impl SmallItems {
    /// Whether items of so many rows and keys are small.
    pub fn include(&self, rows: u32, keys: u32) -> bool {
        rows <= self.rows && keys <= self.keys
    }

    /// Every worker takes one piece at a time.
    pub const NONE: SmallItems = SmallItems {
        rows: 0,
        keys: 0,
        of_item: 1,
    };
}

impl Workers {
    /// One worker that takes whole items.
    pub const ONE: Workers = Workers {
        all: 1,
        of_item: 1,
        small: SmallItems::NONE,
    };

    /// Items that run at a time.
    pub fn items_at_a_time(&self) -> usize {
        (self.all / self.of_item) as usize
    }
}
