//! The choice of the walk for an item: `few_rows` computes several KV heads at once, `many_rows` and
//! `many_rows_bf16` one head.

#[cfg(folio_avx512)]
use super::many_rows_bf16;
use super::run::Run;
use super::scratch::ThreadMemory;
use super::{few_rows, many_rows};
use crate::problem::WorkItem;
use std::ops::Range;

/// Computes some heads of an item of few rows.
pub fn heads(run: &Run<'_>, work: &WorkItem, heads: Range<usize>, memory: &mut ThreadMemory<'_>) {
    few_rows::walk(run, &run.item(work), heads, &mut memory.few());
}

/// Computes a head of an item of many rows.
pub fn head(run: &Run<'_>, work: &WorkItem, head: usize, memory: &mut ThreadMemory<'_>) {
    let item = run.item(work);
    #[cfg(folio_avx512)]
    if let Some(matrix) = run.shape.matrix {
        return many_rows_bf16::walk(run, &item, head, matrix, memory);
    }
    many_rows::walk(run, &item, head, &mut memory.many());
}
