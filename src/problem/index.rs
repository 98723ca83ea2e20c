//! What the operators that build a batch's indices are given. Every tensor is of int32 or int64.

use crate::tensor::Tensor;
use std::ops::Range;

/// The lengths of a step, from which cumulative lengths follow.
#[derive(Debug, Clone, Copy)]
pub struct BatchLengthsArgs {
    /// `[batch_size]` new tokens; a request without any is inactive. Checked: never a column.
    pub qo_len: Tensor,
    /// `[batch_size]` tokens in the cache before the new ones. As `qo_len`.
    pub cached_len: Option<Tensor>,
    /// `[batch_size]`: above 0 where a request is a prefill. As `qo_len`.
    pub encoder_len: Option<Tensor>,
    /// `[batch_size + 1 or more]`: new tokens before each request; beyond the batch, of all.
    pub qo_indptr: Option<Tensor>,
    /// `[batch_size or more]`: all tokens of an active request; else 0.
    pub kv_len: Option<Tensor>,
    /// As `qo_indptr`, of `kv_len`.
    pub kv_indptr: Option<Tensor>,
    /// `[batch_size or more]`: a [`RowKind`].
    pub row_kind: Option<Tensor>,
}

/// What a request of a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowKind {
    /// It has no new tokens.
    Inactive = 0,
    /// Its prompt, or a part of it.
    Prefill = 1,
    /// What was sampled.
    Decode = 2,
}

/// Where the tokens of requests are: rows of a block table.
#[derive(Debug, Clone, Copy)]
pub struct TokenRows {
    /// `[rows, columns]` page ids, or slots where a page has one token. A negative one is none.
    pub table: Tensor,
    /// `[batch_size]` row of each request; `None`: its own number. Checked: never a column.
    pub row_ids: Option<Tensor>,
    /// Tokens per entry of the table. Checked: never 0.
    pub page_size: u32,
}

/// A block table, or a table of slots, to be listed request by request.
#[derive(Debug, Clone, Copy)]
pub struct KvIndicesArgs {
    /// Where tokens are.
    pub rows: TokenRows,
    /// `[batch_size]` tokens of each request. Checked: never a column.
    pub kv_len: Tensor,
    /// `[batch_size]` first token that is listed; `None`: 0. As `kv_len`.
    pub kv_start: Option<Tensor>,
    /// Only so many last tokens are listed; 0: all.
    pub window: u32,
    /// Tokens per listed index. Checked: never 0; it divides the table's page size or is a multiple of it.
    pub page_size: u32,
    /// `[batch_size + 1 or more]`: indices before each request; beyond the batch, of all.
    pub kv_indptr: Tensor,
    /// `[capacity]`.
    pub kv_indices: Tensor,
    /// `[batch_size or more]`: tokens of each last page, 0 where there is none.
    pub last_page_len: Option<Tensor>,
}

/// A list to be turned into a block table.
#[derive(Debug, Clone, Copy)]
pub struct BlockTableArgs {
    /// `[batch_size + 1]`.
    pub kv_indptr: Tensor,
    /// `[n]`.
    pub kv_indices: Tensor,
    /// `[batch_size or more, columns]`.
    pub block_table: Tensor,
    /// What entries without an index get.
    pub fill: i32,
}

/// Where the rows of new tokens are.
#[derive(Debug, Clone, Copy)]
pub enum QueryRows {
    /// `[batch_size + 1]` rows before each request.
    Indptr(Tensor),
    /// `[batch_size]` rows of each request, one request after the other.
    Len(Tensor),
}

/// New tokens whose slots and positions are wanted: the last ones of every request.
#[derive(Debug, Clone, Copy)]
pub struct SlotMappingArgs {
    /// Where tokens are.
    pub rows: TokenRows,
    /// Which rows are whose.
    pub queries: QueryRows,
    /// `[batch_size]` tokens of each request, the new ones included. Checked: never a column.
    pub kv_len: Tensor,
    /// `[num_tokens or more]`: slots; -1 where there is none.
    pub slot_mapping: Tensor,
    /// As `slot_mapping`: positions in the request.
    pub positions: Option<Tensor>,
}

/// Where the slots of drafted tokens stand in a request's row, behind its other tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftSlots {
    /// All branches of the first step, then those of the second.
    StepMajor,
    /// All steps of the first branch, then those of the second.
    BranchMajor,
    /// Every branch has whole pages of so many slots, the first of which begin with the tokens of the last page.
    Paged(u32),
}

/// Requests whose drafts have branches, to be listed for every step.
#[derive(Debug, Clone, Copy)]
pub struct DraftKvIndicesArgs {
    /// Where tokens are. Checked: a page has one token.
    pub rows: TokenRows,
    /// `[batch_size]` tokens of each request without drafts. Checked: never a column.
    pub kv_len: Tensor,
    /// Branches of each request. Checked: never 0.
    pub topk: u32,
    /// Steps that branches have slots for. Checked: at least those of `kv_indptr`.
    pub num_steps: u32,
    /// Where drafted tokens are.
    pub slots: DraftSlots,
    /// `[steps, batch_size · topk + 1 or more]`.
    pub kv_indptr: Tensor,
    /// `[steps, capacity]`.
    pub kv_indices: Tensor,
}

impl TokenRows {
    /// The most tokens that a row has entries for.
    pub fn tokens(&self) -> i64 {
        self.table.extent(1).saturating_mul(self.page_size.into())
    }
}

impl KvIndicesArgs {
    /// The indices of a request that are listed, counted from its first token. The page of the first listed token is
    /// listed whole.
    pub fn listed(&self, kv_start: i64, kv_len: i64) -> Range<i64> {
        let page_size = i64::from(self.page_size);
        let start = match self.window {
            0 => kv_start,
            window => kv_start.max(kv_len - i64::from(window)),
        };
        match start < kv_len {
            true => start / page_size..(kv_len - 1) / page_size + 1,
            false => 0..0,
        }
    }
}

impl DraftSlots {
    /// The entry of a drafted token in the row of a request with `kv_len` other tokens.
    pub fn entry(self, kv_len: i64, [step, branch]: [i64; 2], [steps, branches]: [i64; 2]) -> i64 {
        match self {
            DraftSlots::StepMajor => kv_len + step * branches + branch,
            DraftSlots::BranchMajor => kv_len + branch * steps + step,
            DraftSlots::Paged(page_size) => {
                let page_size = i64::from(page_size);
                let pages = (kv_len % page_size + steps + page_size - 1) / page_size;
                kv_len + branch * pages * page_size + step
            }
        }
    }
}
