//! One step's lengths and page table, checked.

use crate::tensor::Tensor;
use std::ops::Range;

/// The lengths of a batch: on the host, where `plan` reads them, or on the device, where a planning
/// kernel does.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "lives on the stack for one call")]
pub enum Batch<'a> {
    /// Lengths in host memory.
    Host(HostBatch<'a>),
    /// Lengths in device memory; nothing but their shapes is known here.
    Device(DeviceBatch),
}

/// Lengths in host memory. `qo_indptr` starts at 0 and never falls; every `kv_len` and page span was
/// checked against the desc's maxima, and every host page id is at least 0.
#[derive(Debug, Clone, Copy)]
pub struct HostBatch<'a> {
    /// `[batch_size + 1]` query-row offsets.
    pub qo_indptr: &'a [i32],
    /// `[batch_size]` keys per request, those of this step included.
    pub kv_len: &'a [i32],
    /// Those of them that the batch is over.
    pub keys: Keys,
    /// No row sees a key more than so many before its own position; `None`: unlimited.
    pub window_left: Option<u32>,
    /// Where the keys are.
    pub pages: Pages<'a>,
    /// Pages that the keys need; 0 for ragged tensors.
    pub num_pages: usize,
    /// The largest page id in use, or -1: the cache tensors of a run need more pages than this.
    pub max_page_id: i32,
    /// The requests that are planned.
    pub planned: Requests,
}

/// Requests of a batch by their numbers of query rows. A batch may have two plans, each with all its lengths and with items of
/// some requests alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    /// All.
    All,
    /// Those of few rows.
    Decodes {
        /// So many.
        most_rows: u32,
        /// Where lengths are on the device: none, unless they have so many keys together.
        least_keys: u64,
    },
    /// All but the decodes.
    Prompts {
        /// Rows of a decode.
        decode_rows: u32,
        /// Where lengths are on the device: the counts of the decodes' plan. Where it has no items, all requests are prompts.
        decode_counts: u64,
    },
}

impl Requests {
    /// Whether one of so many rows is among them.
    pub fn include(&self, qo_len: u32) -> bool {
        match *self {
            Requests::All => true,
            Requests::Decodes { most_rows, .. } => qo_len <= most_rows,
            Requests::Prompts { decode_rows, .. } => qo_len > decode_rows,
        }
    }
}

/// Keys of every request. Positions count all keys, whichever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// All.
    All,
    /// All but the last `qo_len`, which are in no cache. There are at least as many.
    Cached,
    /// The last `qo_len`. There are at least as many.
    New,
}

/// A page table.
#[derive(Debug, Clone, Copy)]
pub enum Pages<'a> {
    /// Request `b` owns ids `indptr[b]..indptr[b + 1]`.
    Csr {
        /// `[batch_size + 1]`.
        indptr: &'a [i32],
        /// The ids.
        ids: PageIds<'a>,
    },
    /// Request `b` owns the leading ids of row `b`.
    Table {
        /// The ids.
        ids: PageIds<'a>,
        /// Elements from row to row.
        row_stride: usize,
    },
    /// Request `b` owns rows `indptr[b]..indptr[b + 1]` of the ragged K and V: those of its [`Keys`].
    Ragged {
        /// `[batch_size + 1]`.
        indptr: &'a [i32],
    },
}

/// Page ids in host memory (copied by plan) or on the device (read by run).
#[derive(Debug, Clone, Copy)]
pub enum PageIds<'a> {
    /// Host ids.
    Host(&'a [i32]),
    /// Device ids; they must stay as they are until the last run of the plan. Those of int64 are copied by plan, of a block
    /// table [`AttentionDesc::copied_columns`] without gaps between rows.
    ///
    /// [`AttentionDesc::copied_columns`]: super::AttentionDesc::copied_columns
    Device(Tensor),
}

impl PageIds<'_> {
    /// They are on the device.
    pub fn is_device(self) -> bool {
        matches!(self, PageIds::Device(_))
    }
}

impl<'a> HostBatch<'a> {
    /// The number of requests.
    pub fn batch_size(&self) -> usize {
        self.kv_len.len()
    }

    /// Query rows of the whole batch.
    pub fn num_tokens(&self) -> usize {
        self.qo_indptr[self.batch_size()] as usize
    }

    /// Query rows of request `b`.
    pub fn qo_len(&self, b: usize) -> u32 {
        (self.qo_indptr[b + 1] - self.qo_indptr[b]) as u32
    }

    /// Query rows of request `b` that are planned: all or none.
    pub fn planned_rows(&self, b: usize) -> u32 {
        match self.planned.include(self.qo_len(b)) {
            true => self.qo_len(b),
            false => 0,
        }
    }

    /// Those keys of request `b` that the batch is over.
    pub fn keys(&self, b: usize) -> Range<u32> {
        let (all, new) = (self.kv_len[b] as u32, self.qo_len(b));
        match self.keys {
            Keys::All => 0..all,
            Keys::Cached => 0..all - new,
            Keys::New => all - new..all,
        }
    }

    /// Their number.
    pub fn num_keys(&self, b: usize) -> u32 {
        let keys = self.keys(b);
        keys.end - keys.start
    }

    /// Those that rows of request `b` from `q_start` on may see, and as many before them as are left of a unit.
    pub fn keys_in_window(&self, b: usize, q_start: u32, unit: u32) -> Range<u32> {
        let keys = self.keys(b);
        let Some(left) = self.window_left else {
            return keys;
        };
        let position = i64::from(self.kv_len[b]) - i64::from(self.qo_len(b)) + i64::from(q_start);
        let seen = (position - i64::from(left)).clamp(0, i64::from(keys.end)) as u32;
        keys.start.max(seen - seen % unit)..keys.end
    }

    /// The number of those of all its rows.
    pub fn num_keys_in_window(&self, b: usize, unit: u32) -> u32 {
        let keys = self.keys_in_window(b, 0, unit);
        keys.end - keys.start
    }

    /// Of so many keys of a request, how many the rows of one tile see at most: under a window, no more than its rows and the window
    /// span.
    pub fn most_seen(&self, keys: u32, rows_of_tile: u32) -> u32 {
        self.window_left
            .map_or(keys, |left| keys.min(left.saturating_add(rows_of_tile)))
    }

    /// Page ids that only the device knows.
    pub fn are_page_ids_on_device(&self) -> bool {
        let (Pages::Csr { ids, .. } | Pages::Table { ids, .. }) = self.pages else {
            return false;
        };
        matches!(ids, PageIds::Device(_))
    }

    /// All host page ids in use, where they follow each other without gaps: in CSR form, when no request owns
    /// more pages than its keys need.
    pub fn dense_page_ids(&self) -> Option<&'a [i32]> {
        match self.pages {
            Pages::Csr {
                indptr,
                ids: PageIds::Host(ids),
            } if indptr[self.batch_size()] as usize == self.num_pages => {
                Some(&ids[..self.num_pages])
            }
            _ => None,
        }
    }

    /// The host page ids of request `b`, of pages of `page_size` tokens; `None` when there are none on
    /// the host.
    pub fn page_ids(&self, b: usize, page_size: u32) -> Option<&'a [i32]> {
        let count = self.keys(b).end.div_ceil(page_size) as usize;
        let (ids, start) = match self.pages {
            Pages::Csr { indptr, ids } => (ids, indptr[b] as usize),
            Pages::Table { ids, row_stride } => (ids, b * row_stride),
            Pages::Ragged { .. } => return None,
        };
        match ids {
            // A table without columns has no row to begin in.
            PageIds::Host(_) if count == 0 => Some(&[]),
            PageIds::Host(ids) => Some(&ids[start..start + count]),
            PageIds::Device(_) => None,
        }
    }
}

/// Lengths in device memory: int32, or int64, which plan copies.
#[derive(Debug, Clone, Copy)]
pub struct DeviceBatch {
    /// Requests.
    pub batch_size: u32,
    /// Query rows of every request where `qo_indptr` is absent.
    pub qo_len: u32,
    /// `[batch_size + 1]`; `None` for decode with a fixed number of rows per request.
    pub qo_indptr: Option<Tensor>,
    /// `[batch_size + 1]` page (or ragged token) offsets, for CSR and ragged.
    pub kv_indptr: Option<Tensor>,
    /// `[batch_size]` keys per request.
    pub kv_len: Option<Tensor>,
    /// `[batch_size]` tokens in the last page, where `kv_len` is absent.
    pub last_page_len: Option<Tensor>,
    /// The ids: `[num_ids]`, or `[batch_size, columns]` for a block table; `None` for ragged.
    pub page_ids: Option<Tensor>,
    /// No row sees a key more than so many before its own position; `None`: unlimited.
    pub window_left: Option<u32>,
    /// The requests that are planned.
    pub planned: Requests,
}
