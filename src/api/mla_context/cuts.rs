//! The chunks of a plan and their tables: which requests and rows each has, and the offsets that its gather and its
//! attention read. Where the contexts are cut is decided in `plan::ContextChunks`; a graph's plan has as many chunks as
//! any, with all requests in each.

use super::memory::Memory;
use crate::error::{Error, Result};
use crate::plan::ContextChunks;
use crate::problem::{HostBatch, MlaContextDesc};
use crate::tensor::{Device, Tensor};
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

/// Where a zero is among the numbers: the offsets of no request.
pub(super) const ZERO: usize = 0;

/// Where the bits of an fp32 -inf are: the lse of a row that has seen no key.
pub(super) const NO_KEYS: usize = 1;

/// Where the offsets of the page table are.
pub(super) const PAGE_INDPTR: usize = 2;

/// Where the tables of a batch's chunks are, behind the offsets of the page table and those of the last chunk.
fn tables_of_chunks(batch_size: usize) -> usize {
    last_chunk_indptr(batch_size) + batch_size + 1
}

fn last_chunk_indptr(batch_size: usize) -> usize {
    PAGE_INDPTR + batch_size + 1
}

/// Numbers in a chunk's tables.
fn numbers_of(requests: usize) -> usize {
    3 * requests + 2
}

/// The most numbers in all tables: those of the page table, of the last chunk, and of every chunk. Neighbouring chunks
/// share at most one request; those of a graph all have all requests.
pub(super) fn most_numbers(desc: &MlaContextDesc, most_chunks: usize) -> usize {
    let requests = desc.max_batch_size as usize;
    let of_chunks = match desc.graph {
        true => most_chunks.saturating_mul(numbers_of(requests)),
        false => most_chunks
            .saturating_mul(numbers_of(1))
            .saturating_add(3 * requests),
    };
    of_chunks.saturating_add(tables_of_chunks(requests))
}

/// The chunks of the current plan.
pub(super) struct Cuts {
    chunks: ContextChunks,
    list: Vec<Cut>,
    /// The number of chunks of every plan of a graph.
    of_graph: Option<usize>,
    /// Offsets of query rows need not begin with 0: they are read on a device.
    from_any_row: bool,
    /// The table of a chunk that is alone.
    alone: Vec<i32>,
    /// The offsets of the keys that new tokens and the last chunk have together.
    with_last: Vec<i32>,
}

impl Cuts {
    /// Room for every batch within the desc.
    pub fn new(desc: &MlaContextDesc, most_chunks: usize, device: Device) -> Result<Cuts> {
        let (mut list, mut alone, mut with_last) = (Vec::new(), Vec::new(), Vec::new());
        list.try_reserve_exact(most_chunks).map_err(|_| {
            Error::OutOfMemory(format!(
                "max_chunk_tokens: no memory for {most_chunks} chunks; a larger chunk is accepted"
            ))
        })?;
        let requests = desc.max_batch_size as usize;
        for (numbers, count) in [
            (&mut alone, numbers_of(requests)),
            (&mut with_last, requests + 1),
        ] {
            numbers.try_reserve_exact(count).map_err(|_| {
                Error::OutOfMemory(format!(
                    "max_batch_size: no memory for the context of {requests} requests"
                ))
            })?;
        }
        Ok(Cuts {
            chunks: ContextChunks::for_batches(
                desc.max_batch_size as usize,
                desc.max_chunk_tokens,
            )?,
            list,
            of_graph: desc.graph.then_some(most_chunks),
            from_any_row: device != Device::Cpu,
            alone,
            with_last,
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
        let mut table = tables_of_chunks(batch_size);
        for place in 0..self.of_graph.unwrap_or(self.chunks.count()) {
            let (requests, rows) = match self.of_graph {
                Some(_) => (0..batch_size, self.chunks.size()),
                None => (self.chunks.requests(place), self.chunks.tokens(place)),
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
        self.keep_alone(batch);
    }

    /// A chunk that is alone is planned with the batch, and by what the host knows, but for a graph: there the same is launched for
    /// every plan.
    fn keep_alone(&mut self, batch: &HostBatch<'_>) {
        let mut alone = std::mem::take(&mut self.alone);
        alone.clear();
        if let ([cut], None) = (&self.list[..], self.of_graph) {
            alone.resize(numbers_of(cut.requests.len()), 0);
            self.write_table(self.chunk_at(0), cut, batch, &mut alone);
        }
        self.alone = alone;
    }

    /// Offsets of the query rows and of the context rows of a chunk that the host plans.
    pub fn on_host(&self) -> Option<(&[i32], &[i32])> {
        let [cut] = &self.list[..] else { return None };
        let offsets = cut.requests.len() + 1;
        (!self.alone.is_empty())
            .then(|| self.alone.split_at(offsets))
            .map(|(qo_indptr, rest)| (qo_indptr, &rest[..offsets]))
    }

    /// The number among the contexts' chunks of the one at a place of the list. A graph's last places have those that there
    /// are, because the last one is attended with the new tokens; the others have none.
    fn chunk_at(&self, place: usize) -> usize {
        let count = self.chunks.count();
        let missing = self.list.len() - count;
        place.checked_sub(missing).unwrap_or(count)
    }

    /// Where in the tables the offsets of the requests' tokens in the last chunk are, and how many.
    pub fn last_chunk_indptr(&self) -> (usize, usize) {
        let requests = self.chunks.num_requests();
        (last_chunk_indptr(requests), requests + 1)
    }

    /// Tokens of a request in the last chunk.
    fn last_piece(&self, request: usize) -> u32 {
        let last = self.chunks.count().saturating_sub(1);
        self.chunks.piece(last, request).len
    }

    /// Offsets of the keys of each request: those of the last chunk, in whole steps of so many, and the new ones.
    pub fn keys_with_last_chunk(&mut self, batch: &HostBatch<'_>, step: u32) -> &[i32] {
        let mut offsets = std::mem::take(&mut self.with_last);
        offsets.clear();
        offsets.push(0);
        let mut end = 0;
        for b in 0..batch.batch_size() {
            end += self.last_piece(b).next_multiple_of(step) + batch.qo_len(b);
            offsets.push(end as i32);
        }
        self.with_last = offsets;
        &self.with_last
    }

    /// The requests of a chunk whose rows attend it. The others of a graph's have no rows there, where the first of all rows need
    /// not be the batch's.
    fn attending(&self, chunk: usize, cut: &Cut) -> Range<usize> {
        match self.of_graph.is_some() && self.from_any_row {
            true => self.chunks.requests(chunk),
            false => cut.requests.clone(),
        }
    }

    /// Writes the tables: the page offsets, those of the last chunk, and those of every chunk.
    pub fn write_tables(
        &self,
        numbers: &mut [i32],
        batch: &HostBatch<'_>,
        page_indptr: Option<&[i32]>,
    ) {
        numbers[ZERO] = 0;
        numbers[NO_KEYS] = f32::NEG_INFINITY.to_bits() as i32;
        if let Some(indptr) = page_indptr {
            numbers[PAGE_INDPTR..][..indptr.len()].copy_from_slice(indptr);
        }
        let (first, count) = self.last_chunk_indptr();
        let offsets = &mut numbers[first..][..count];
        offsets[0] = 0;
        for b in 0..self.chunks.num_requests() {
            offsets[b + 1] = offsets[b] + self.last_piece(b) as i32;
        }
        for (place, cut) in self.list.iter().enumerate() {
            let table = &mut numbers[cut.table..][..numbers_of(cut.requests.len())];
            self.write_table(self.chunk_at(place), cut, batch, table);
        }
    }

    fn write_table(&self, chunk: usize, cut: &Cut, batch: &HostBatch<'_>, table: &mut [i32]) {
        let count = cut.requests.len();
        let (qo_indptr, rest) = table.split_at_mut(count + 1);
        let (kv_indptr, starts) = rest.split_at_mut(count + 1);
        let first = batch.qo_indptr[cut.requests.start];
        let attending = self.attending(chunk, cut);
        let row = |b: usize| batch.qo_indptr[b.clamp(attending.start, attending.end)] - first;
        (qo_indptr[0], kv_indptr[0]) = (row(cut.requests.start), 0);
        for (i, b) in cut.requests.clone().enumerate() {
            let piece = self.chunks.piece(chunk, b);
            qo_indptr[i + 1] = row(b + 1);
            kv_indptr[i + 1] = kv_indptr[i] + piece.len as i32;
            starts[i] = piece.start as i32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Keys, Pages, Requests};

    fn desc(graph: bool) -> MlaContextDesc {
        MlaContextDesc {
            dtype: DType::BF16,
            cache: DType::BF16.into(),
            num_heads: 2,
            kv_lora_rank: 16,
            qk_nope_head_dim: 16,
            qk_rope_head_dim: 8,
            v_head_dim: 16,
            page_size: 1,
            max_batch_size: 4,
            max_qo_len: 10,
            max_num_tokens: 40,
            max_kv_len: 100,
            max_num_pages: 0,
            max_chunk_tokens: 50,
            in_steps: false,
            graph,
        }
    }

    /// The query offsets of each chunk of requests of 3, 5, 7 and 2 new tokens behind contexts of 0, 60, 30 and 0.
    fn query_offsets(graph: bool, device: Device) -> Vec<Vec<i32>> {
        let qo_indptr = [0, 3, 8, 15, 17];
        let batch = HostBatch {
            qo_indptr: &qo_indptr,
            kv_len: &[3, 65, 37, 2],
            keys: Keys::All,
            window_left: None,
            pages: Pages::Ragged { indptr: &qo_indptr },
            num_pages: 0,
            max_page_id: -1,
            planned: Requests::All,
        };
        const MOST_CHUNKS: usize = 3;
        let mut cuts = Cuts::new(&desc(graph), MOST_CHUNKS, device).unwrap();
        cuts.cut(&batch);
        let mut numbers = vec![-1; most_numbers(&desc(graph), MOST_CHUNKS)];
        cuts.write_tables(&mut numbers, &batch, None);
        let offsets = |cut: &Cut| numbers[cut.table..][..cut.requests.len() + 1].to_vec();
        cuts.list().iter().map(offsets).collect()
    }

    #[test]
    fn rows_of_requests_with_tokens_in_a_chunk_attend_it() {
        let plain = query_offsets(false, Device::Cuda(0));
        assert_eq!(plain, [vec![0, 5], vec![0, 5, 12]]);
        // On a host offsets begin with 0, and so all rows attend.
        let on_host = query_offsets(true, Device::Cpu);
        assert_eq!(on_host, vec![vec![0, 3, 8, 15, 17]; 3]);
        let on_device = query_offsets(true, Device::Cuda(0));
        assert_eq!(
            on_device,
            [[0, 0, 0, 0, 0], [3, 3, 8, 8, 8], [3, 3, 8, 15, 15]]
        );
    }
}
