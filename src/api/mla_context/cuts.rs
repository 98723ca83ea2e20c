//! The chunks of a plan and their tables: which requests and rows each has, and the offsets that its gather and its
//! attention read. Where the contexts are cut is decided in `plan::ContextChunks`; a graph's plan has as many chunks as
//! any, with all requests in each.

use super::memory::Memory;
use crate::error::{Error, Result};
use crate::plan::ContextChunks;
use crate::problem::{HostBatch, MlaContextDesc};
use crate::tensor::Tensor;
use std::ops::Range;

/// A chunk: some neighbouring requests, their query rows, and the rows of unpacked context. Its tables start at `table`:
/// the offsets of the query rows and of the context rows, and the first context token of each request.
#[derive(Debug, Clone)]
pub(super) struct Cut {
    pub requests: Range<usize>,
    pub tokens: Range<i64>,
    pub rows: i64,
    table: usize,
}

/// The tables of a chunk as tensors.
pub(super) struct CutTables {
    pub qo_indptr: Tensor,
    pub kv_indptr: Tensor,
    pub starts: Tensor,
}

impl Cut {
    /// The tables, where the numbers of all of them start at address `numbers`.
    pub fn tables(&self, memory: &Memory, numbers: usize) -> Result<CutTables> {
        let count = self.requests.len();
        let table = |first, count| memory.table(numbers, self.table + first, count);
        Ok(CutTables {
            qo_indptr: table(0, count + 1)?,
            kv_indptr: table(count + 1, count + 1)?,
            starts: table(2 * count + 2, count)?,
        })
    }
}

/// Where the offsets of the page table are among the numbers, behind a zero.
pub(super) const PAGE_INDPTR: usize = 1;

/// Numbers in a chunk's tables.
fn numbers_of(requests: usize) -> usize {
    3 * requests + 2
}

/// The most numbers in all tables: those of the page table, and of every chunk. Neighbouring chunks share at most one
/// request; those of a graph all have all requests.
pub(super) fn most_numbers(desc: &MlaContextDesc, most_chunks: usize) -> usize {
    let requests = desc.max_batch_size as usize;
    let of_chunks = match desc.graph {
        true => most_chunks.saturating_mul(numbers_of(requests)),
        false => most_chunks
            .saturating_mul(numbers_of(1))
            .saturating_add(3 * requests),
    };
    of_chunks.saturating_add(PAGE_INDPTR + requests + 1)
}

/// The chunks of the current plan.
pub(super) struct Cuts {
    chunks: ContextChunks,
    list: Vec<Cut>,
    /// The number of chunks of every plan of a graph.
    of_graph: Option<usize>,
}

impl Cuts {
    /// Room for every batch within the desc.
    pub fn new(desc: &MlaContextDesc, most_chunks: usize) -> Result<Cuts> {
        let mut list = Vec::new();
        list.try_reserve_exact(most_chunks).map_err(|_| {
            Error::OutOfMemory(format!(
                "max_chunk_tokens: no memory for {most_chunks} chunks; a larger chunk is accepted"
            ))
        })?;
        Ok(Cuts {
            chunks: ContextChunks::for_batches(
                desc.max_batch_size as usize,
                desc.max_chunk_tokens,
            )?,
            list,
            of_graph: desc.graph.then_some(most_chunks),
        })
    }

    pub fn list(&self) -> &[Cut] {
        &self.list
    }

    /// Whether one plan of the chunk's attention serves all runs.
    pub fn has_one_chunk(&self) -> bool {
        self.list.len() == 1
    }

    /// Lists the chunks of another batch. Allocates nothing within the room.
    pub fn cut(&mut self, batch: &HostBatch<'_>) {
        let batch_size = batch.batch_size();
        let contexts = (0..batch_size).map(|b| batch.kv_len[b] as u32 - batch.qo_len(b));
        self.chunks.cut(contexts);
        self.list.clear();
        let mut table = PAGE_INDPTR + batch_size + 1;
        for chunk in 0..self.of_graph.unwrap_or(self.chunks.count()) {
            let (requests, rows) = match self.of_graph {
                Some(_) => (0..batch_size, self.chunks.size()),
                None => (self.chunks.requests(chunk), self.chunks.tokens(chunk)),
            };
            let [first, end] = [requests.start, requests.end].map(|b| batch.qo_indptr[b].into());
            self.list.push(Cut {
                tokens: first..end,
                rows: rows.into(),
                table,
                requests: requests.clone(),
            });
            table += numbers_of(requests.len());
        }
    }

    /// Writes the tables: the page offsets, and those of every chunk.
    pub fn write_tables(
        &self,
        numbers: &mut [i32],
        batch: &HostBatch<'_>,
        page_indptr: Option<&[i32]>,
    ) {
        numbers[0] = 0;
        if let Some(indptr) = page_indptr {
            numbers[PAGE_INDPTR..][..indptr.len()].copy_from_slice(indptr);
        }
        for (chunk, cut) in self.list.iter().enumerate() {
            let count = cut.requests.len();
            let table = &mut numbers[cut.table..][..numbers_of(count)];
            let (qo_indptr, rest) = table.split_at_mut(count + 1);
            let (kv_indptr, starts) = rest.split_at_mut(count + 1);
            let first = batch.qo_indptr[cut.requests.start];
            (qo_indptr[0], kv_indptr[0]) = (0, 0);
            for (i, b) in cut.requests.clone().enumerate() {
                let piece = self.chunks.piece(chunk, b);
                qo_indptr[i + 1] = batch.qo_indptr[b + 1] - first;
                kv_indptr[i + 1] = kv_indptr[i] + piece.len as i32;
                starts[i] = piece.start as i32;
            }
        }
    }
}
