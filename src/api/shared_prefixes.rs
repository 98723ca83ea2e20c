//! What requests of a batch share: the checks of what a caller states, and finding it in a page table.

use super::batch::{self, BatchInput, Scratch};
use super::desc;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan;
use crate::problem::{AttentionDesc, Batch, Kind, KvLayout, KvStorage, SharedPrefix};
use crate::tensor::Device;

/// What requests of a batch share, as the caller states it.
#[derive(Debug, Clone, Copy, Default)]
pub struct SharedPrefixes<'a> {
    /// First keys that all requests share; 0 where `request_begin` says which do.
    pub common_prefix_len: u32,
    /// First request of each prefix.
    pub request_begin: &'a [i32],
    /// The request behind its last one.
    pub request_end: &'a [i32],
    /// Its keys.
    pub kv_len: &'a [i32],
}

/// The prefixes of the current batch.
#[derive(Default)]
pub(super) struct Prefixes {
    list: Vec<SharedPrefix>,
    /// Ends of the prefixes around the last one, the innermost last.
    open: Vec<u32>,
}

impl Prefixes {
    /// Each behind those around it.
    pub fn list(&self) -> &[SharedPrefix] {
        &self.list
    }

    /// Checks prefixes and lists them.
    pub fn take_over(&mut self, input: &SharedPrefixes<'_>, batch_size: usize) -> Result<()> {
        self.list.clear();
        self.open.clear();
        let count = input.request_begin.len();
        if input.common_prefix_len > 0 && count > 0 {
            return Err(Error::InvalidArgument(format!(
                "common_prefix_len: {} is not accepted together with num_prefixes {count}; one of them is 0",
                input.common_prefix_len
            )));
        }
        let no_memory =
            |_| Error::OutOfMemory(format!("num_prefixes: no memory for {count} prefixes"));
        self.list.try_reserve(count + 1).map_err(no_memory)?;
        self.open.try_reserve(count).map_err(no_memory)?;
        if input.common_prefix_len > 0 {
            self.list.push(SharedPrefix {
                requests: 0..batch_size as u32,
                kv_len: input.common_prefix_len,
            });
        }
        (0..count).try_for_each(|i| {
            let prefix = prefix(input, i, batch_size)?;
            self.push(prefix, i)
        })
    }

    /// A prefix comes behind those around it, and no two overlap otherwise.
    fn push(&mut self, prefix: SharedPrefix, i: usize) -> Result<()> {
        let (begin, end) = (prefix.requests.start, prefix.requests.end);
        if let Some(last) = self.list.last().filter(|last| last.requests.start > begin) {
            return Err(Error::InvalidArgument(format!(
                "request_begin[{i}]: {begin} is not accepted behind {}; prefixes in the order of their first requests are",
                last.requests.start
            )));
        }
        while self.open.last().is_some_and(|open| *open <= begin) {
            self.open.pop();
        }
        if let Some(open) = self.open.last().filter(|open| **open < end) {
            return Err(Error::InvalidArgument(format!(
                "request_end[{i}]: {end} is not accepted, since a prefix before it has requests up to {open}; one within the other, the wider one first, is"
            )));
        }
        self.open.push(end);
        self.list.push(prefix);
        Ok(())
    }
}

fn prefix(input: &SharedPrefixes<'_>, i: usize, batch_size: usize) -> Result<SharedPrefix> {
    let number = |name: &str, value: i32, least: i64, most: i64| {
        if (least..=most).contains(&i64::from(value)) {
            return Ok(value as u32);
        }
        Err(Error::InvalidArgument(format!(
            "{name}[{i}]: {value} is not accepted; {least} to {most} is"
        )))
    };
    let most = batch_size as i64;
    let begin = number("request_begin", input.request_begin[i], 0, most)?;
    let end = number("request_end", input.request_end[i], begin.into(), most)?;
    Ok(SharedPrefix {
        requests: begin..end,
        kv_len: number("kv_len", input.kv_len[i], 0, i32::MAX.into())?,
    })
}

/// What is to be found, and where it goes: columns of [`SharedPrefixes`], as long as there is room.
#[derive(Debug)]
pub struct FindSharedPrefixes<'a> {
    /// Lengths and page table, all on the host.
    pub batch: BatchInput,
    /// Tokens per page.
    pub page_size: u32,
    /// First request of each.
    pub request_begin: &'a mut [i32],
    /// The request behind its last one.
    pub request_end: &'a mut [i32],
    /// Its keys.
    pub kv_len: &'a mut [i32],
    /// How many there are.
    pub num_prefixes: &'a mut u32,
}

/// Lists what neighbouring requests of a batch share by its page table: prefixes of whole pages, as
/// [`Cascade::plan`](super::Cascade::plan) takes them.
///
/// # Errors
/// What is wrong with the batch, and where there is not enough room; then nothing was written.
pub fn find_shared_prefixes(find: FindSharedPrefixes<'_>) -> Result<()> {
    let found = found(&find.batch, find.page_size)?;
    if found.len() > find.request_begin.len() {
        return Err(Error::InvalidArgument(format!(
            "capacity: {} is not accepted; {} prefixes were found",
            find.request_begin.len(),
            found.len()
        )));
    }
    for (i, prefix) in found.iter().enumerate() {
        find.request_begin[i] = prefix.requests.start as i32;
        find.request_end[i] = prefix.requests.end as i32;
        find.kv_len[i] = prefix.kv_len as i32;
    }
    *find.num_prefixes = found.len() as u32;
    Ok(())
}

fn found(input: &BatchInput, page_size: u32) -> Result<Vec<SharedPrefix>> {
    const ANY: u32 = i32::MAX as u32;
    let requests = [input.kv_len, input.kv_indptr].into_iter().flatten();
    let max_batch_size = requests
        .map(|tensor| tensor.num_elements().clamp(1, ANY.into()) as u32)
        .max()
        .unwrap_or(1);
    let desc = desc::check(AttentionDesc {
        kind: Kind::Decode,
        q_dtype: DType::F32,
        kv_format: DType::F32.into(),
        o_dtype: DType::F32,
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: 8,
        head_dim_vo: 8,
        kv: KvStorage::Paged {
            page_size,
            layout: KvLayout::Nhd,
        },
        max_batch_size,
        // Their product is the most query rows.
        max_qo_len: ANY / max_batch_size,
        max_num_tokens: ANY,
        max_kv_len: ANY,
        max_num_pages: ANY.into(),
        graph: false,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    })?;
    let mut scratch = Scratch::for_desc(&desc)?;
    let Batch::Host(batch) = batch::check(input, &desc, Device::Cpu, &mut scratch)? else {
        return Err(Error::Internal(
            "a host batch became one of a device".into(),
        ));
    };
    let mut found = Vec::new();
    plan::shared_prefixes(&batch, page_size, &mut found)?;
    Ok(found)
}
