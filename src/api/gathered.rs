//! The checks of requests whose tokens are gathered from a paged cache.

use super::check::{Extent, INTEGERS, named, rising};
use crate::error::{Error, Result};
use crate::problem::{GatheredRequests, RecordPages};
use crate::tensor::{Device, Tensor};
use std::ops::Range;

/// Tokens of a request are counted in 31 bits.
const MOST_TOKENS: i64 = i32::MAX as i64;

/// The requests as backends get them. `rows` are what they go to, the first of its dimensions; `cache` is
/// `[num_pages, page_size, ..]`. Both stand under their fields' names.
pub(super) fn gathered_requests(
    stated: &GatheredRequests,
    device: Device,
    rows: (&str, &Tensor),
    cache: (&str, &Tensor),
) -> Result<GatheredRequests> {
    let lengths = |name, tensor| named(name, tensor).on(device)?.one_of(&INTEGERS);
    let cu_seq_lens = lengths("cu_seq_lens", stated.cu_seq_lens)?;
    let cu_seq_lens = cu_seq_lens
        .shaped(&[Extent::CountFrom(1)])?
        .compact()?
        .tensor;
    let batch_size = cu_seq_lens.extent(0) - 1;
    let seq_starts = match stated.seq_starts {
        None => None,
        Some(tensor) => {
            let starts = lengths("seq_starts", tensor)?;
            Some(starts.shaped(&[Extent::Is(batch_size)])?.compact()?.tensor)
        }
    };
    let requests = GatheredRequests {
        cu_seq_lens,
        seq_starts,
        pages: pages(&stated.pages, batch_size, device)?,
    };
    check_requests(&requests, rows, cache)?;
    Ok(requests)
}

fn pages(stated: &RecordPages, batch_size: i64, device: Device) -> Result<RecordPages> {
    let ids = |name, tensor| named(name, tensor).on(device)?.one_of(&INTEGERS);
    Ok(match *stated {
        RecordPages::Table(table) => RecordPages::Table(
            ids("block_table", table)?
                .shaped(&[Extent::Is(batch_size), Extent::CountFrom(0)])?
                .unit_last_stride()?
                .tensor,
        ),
        RecordPages::Csr { indptr, indices } => RecordPages::Csr {
            indptr: ids("kv_indptr", indptr)?
                .shaped(&[Extent::Is(batch_size + 1)])?
                .compact()?
                .tensor,
            indices: ids("kv_indices", indices)?
                .shaped(&[Extent::CountFrom(0)])?
                .compact()?
                .tensor,
        },
    })
}

/// Lengths and page ids on the host are checked one by one; on a device the kernel skips what lies outside.
fn check_requests(
    requests: &GatheredRequests,
    (rows_name, rows): (&str, &Tensor),
    cache: (&str, &Tensor),
) -> Result<()> {
    let Some(ends) = requests.cu_seq_lens.as_integers() else {
        return Ok(());
    };
    rising(
        "cu_seq_lens",
        ends,
        rows.extent(0),
        format_args!("rows of {rows_name}"),
    )?;
    let starts = requests.seq_starts.as_ref().and_then(Tensor::as_integers);
    for b in 0..ends.len() - 1 {
        let start = starts.map_or(0, |starts| starts.get(b));
        if !(0..=MOST_TOKENS).contains(&start) {
            return Err(Error::InvalidArgument(format!(
                "seq_starts[{b}]: {start} is not accepted; 0 to {MOST_TOKENS} is"
            )));
        }
        let count = ends.get(b + 1) - ends.get(b);
        if count > 0 {
            check_pages(&requests.pages, b, start..start + count, cache)?;
        }
    }
    Ok(())
}

/// The pages of some tokens of request `b`, at least one.
fn check_pages(
    pages: &RecordPages,
    b: usize,
    tokens: Range<i64>,
    (cache_name, cache): (&str, &Tensor),
) -> Result<()> {
    let (num_pages, page_size) = (cache.extent(0), cache.extent(1));
    let listed = listed_pages(pages, b)?;
    let pages = tokens.start / page_size..(tokens.end - 1) / page_size + 1;
    let ListedPages { name, ids, columns } = listed;
    if pages.end > columns.end - columns.start {
        return Err(Error::InvalidArgument(format!(
            "{name}: {} pages of request {b} are not accepted; {}, for its tokens up to {}, are",
            columns.end - columns.start,
            pages.end,
            tokens.end
        )));
    }
    let id = |page: i64| ids.integer(&[columns.start + page]);
    match pages.map(id).find(|id| !(0..num_pages).contains(id)) {
        None => Ok(()),
        Some(id) => Err(Error::InvalidArgument(format!(
            "{name}: page {id} of request {b} is not accepted; 0 or more and below {num_pages}, the pages of {cache_name}, is"
        ))),
    }
}

/// The page ids of a request: columns of a list.
struct ListedPages {
    name: &'static str,
    ids: Tensor,
    columns: Range<i64>,
}

fn listed_pages(pages: &RecordPages, b: usize) -> Result<ListedPages> {
    match pages {
        RecordPages::Table(table) => Ok(ListedPages {
            name: "block_table",
            ids: table.narrow(0, b as i64, 1).remove_dim(0),
            columns: 0..table.extent(1),
        }),
        RecordPages::Csr { indptr, indices } => {
            let [first, end] = [b, b + 1].map(|at| indptr.integer(&[at as i64]));
            let most = indices.extent(0);
            if first < 0 || end < first || end > most {
                return Err(Error::InvalidArgument(format!(
                    "kv_indptr[{b}], kv_indptr[{}]: {first} and {end} are not accepted; rising numbers up to {most}, the entries of kv_indices, are",
                    b + 1,
                )));
            }
            Ok(ListedPages {
                name: "kv_indices",
                ids: *indices,
                columns: first..end,
            })
        }
    }
}
