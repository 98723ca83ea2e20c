//! The checks of requests whose tokens are gathered from a paged cache.

use super::check::{Extent, named, rising};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{GatheredRequests, RecordPages};
use crate::tensor::{Device, Tensor};
use std::ops::Range;

/// The requests as backends get them. `rows` are what they go to, the first of its dimensions; `cache` is
/// `[num_pages, page_size, ..]`. Both stand under their fields' names.
pub(super) fn gathered_requests(
    stated: &GatheredRequests,
    device: Device,
    rows: (&str, &Tensor),
    cache: (&str, &Tensor),
) -> Result<GatheredRequests> {
    let lengths = |name, tensor| named(name, tensor).on(device)?.of(DType::I32);
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
    let ids = |name, tensor| named(name, tensor).on(device)?.of(DType::I32);
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
    let Some(ends) = requests.cu_seq_lens.as_i32() else {
        return Ok(());
    };
    rising(
        "cu_seq_lens",
        ends,
        rows.extent(0),
        format_args!("rows of {rows_name}"),
    )?;
    let starts = requests.seq_starts.as_ref().and_then(Tensor::as_i32);
    for (b, ends) in ends.windows(2).enumerate() {
        let start = starts.map_or(0, |starts| starts[b]);
        if start < 0 {
            return Err(Error::InvalidArgument(format!(
                "seq_starts[{b}]: {start} is not accepted; 0 or more is"
            )));
        }
        if ends[0] < ends[1] {
            let tokens = i64::from(start)..i64::from(start) + i64::from(ends[1] - ends[0]);
            check_pages(&requests.pages, b, tokens, cache)?;
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
    let (ids, name) = match pages {
        RecordPages::Table(table) => {
            let row = table.stride(0) as usize * b;
            let all = table.as_i32_rows().unwrap_or_default();
            let columns = table.extent(1) as usize;
            (
                all.get(row..row + columns).unwrap_or_default(),
                "block_table",
            )
        }
        RecordPages::Csr { indptr, indices } => {
            let (indptr, ids) = (indptr.as_i32(), indices.as_i32());
            let (indptr, ids) = (indptr.unwrap_or_default(), ids.unwrap_or_default());
            let (first, end) = (indptr[b], indptr[b + 1]);
            if first < 0 || end < first || end as usize > ids.len() {
                return Err(Error::InvalidArgument(format!(
                    "kv_indptr[{b}], kv_indptr[{}]: {first} and {end} are not accepted; rising numbers up to {}, the entries of kv_indices, are",
                    b + 1,
                    ids.len()
                )));
            }
            (&ids[first as usize..end as usize], "kv_indices")
        }
    };
    let pages = (tokens.start / page_size) as usize..((tokens.end - 1) / page_size + 1) as usize;
    let Some(ids) = ids.get(pages.clone()) else {
        return Err(Error::InvalidArgument(format!(
            "{name}: {} pages of request {b} are not accepted; {}, for its tokens up to {}, are",
            ids.len(),
            pages.end,
            tokens.end
        )));
    };
    match ids
        .iter()
        .find(|&&id| !(0..num_pages).contains(&i64::from(id)))
    {
        None => Ok(()),
        Some(id) => Err(Error::InvalidArgument(format!(
            "{name}: page {id} of request {b} is not accepted; 0 or more and below {num_pages}, the pages of {cache_name}, is"
        ))),
    }
}
