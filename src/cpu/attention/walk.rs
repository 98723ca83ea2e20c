//! Which walk computes an item: `few_rows` all KV heads of it at once, `many_rows` or `many_rows_bf16` head by head.

#[cfg(folio_avx512)]
use super::many_rows_bf16;
use super::run::Run;
use super::scratch::Pad;
use super::{few_rows, many_rows};
use crate::problem::WorkItem;
use std::ops::Range;

/// Computes some heads of an item of few rows.
pub fn heads(run: &Run<'_>, work: &WorkItem, heads: Range<usize>, pad: &mut Pad<'_>) {
    few_rows::walk(run, &run.item(work), heads, pad);
}

/// Computes a head of an item of many rows.
pub fn head(run: &Run<'_>, work: &WorkItem, head: usize, pad: &mut Pad<'_>) {
    let item = run.item(work);
    #[cfg(folio_avx512)]
    if let Some(matrix) = run.shape.matrix {
        return many_rows_bf16::walk(run, &item, head, matrix, pad);
    }
    many_rows::walk(run, &item, head, pad);
}
