//! Index tensors of int64 as int32, which is what plans are made of. Those on the host are copied here, where numbers that
//! do not fit are refused; those on a device a backend copies. What nobody may read is not looked at.

use crate::error::{Error, Result};
use crate::problem::AttentionDesc;
use crate::tensor::Tensor;

/// Copies of the tensors of a batch that are int64; kept from step to step to save the allocations.
#[derive(Debug, Default)]
pub(super) struct Narrowed {
    pub qo_indptr: Vec<i32>,
    pub kv_indptr: Vec<i32>,
    pub kv_len: Vec<i32>,
    pub page_ids: Vec<i32>,
}

/// Lengths or offsets on the host.
pub(super) fn lengths<'a>(
    name: &str,
    tensor: &'a Option<Tensor>,
    copy: &'a mut Vec<i32>,
) -> Result<Option<&'a [i32]>> {
    let Some(tensor) = tensor else {
        return Ok(None);
    };
    if let Some(values) = tensor.as_i32() {
        return Ok(Some(values));
    }
    let values = tensor.as_i64().ok_or_else(|| {
        Error::Internal(format!("{name} passed its checks and is no host integer"))
    })?;
    empty(name, copy, values.len())?;
    for (at, &value) in values.iter().enumerate() {
        copy.push(narrow(value, || format!("{name}[{at}]:"))?);
    }
    Ok(Some(copy))
}

/// The page ids of a list that requests use: of each, so many from an offset on. The others are 0.
pub(super) fn listed_ids<'a>(
    ids: &Tensor,
    in_use: impl Iterator<Item = (usize, usize)>,
    copy: &'a mut Vec<i32>,
) -> Result<&'a [i32]> {
    copy.clear();
    let most = ids.extent(0) as usize;
    for (start, count) in in_use {
        // Ids beyond the tensor are refused by whoever counts them.
        let end = most.min(start + count);
        empty_from("kv_indices", copy, end)?;
        for (at, id) in copy.iter_mut().enumerate().take(end).skip(start) {
            let value = ids.integer(&[at as i64]);
            *id = narrow(value, || format!("kv_indices[{at}]: page id"))?;
        }
    }
    Ok(copy)
}

/// The page ids of a block table that requests use: of each, so many of its row. The others are 0, and rows follow without
/// gaps.
pub(super) fn table_ids<'a>(
    table: &Tensor,
    in_use: impl Iterator<Item = usize>,
    copy: &'a mut Vec<i32>,
) -> Result<&'a [i32]> {
    let (rows, columns) = (table.extent(0) as usize, table.extent(1) as usize);
    copy.clear();
    empty_from("block_table", copy, rows.saturating_mul(columns))?;
    for (b, count) in in_use.enumerate() {
        for n in 0..count.min(columns) {
            let value = table.integer(&[b as i64, n as i64]);
            copy[b * columns + n] = narrow(value, || format!("block_table[{b}][{n}]: page id"))?;
        }
    }
    Ok(copy)
}

/// Page ids on a device are copied to where ids of the host would be, which has to have room for them. Of a block table, the
/// columns that a request may need.
pub(super) fn check_room(name: &str, ids: &Tensor, desc: &AttentionDesc) -> Result<()> {
    let copied = match ids.rank() {
        2 => ids.extent(0) * desc.copied_columns(ids.extent(1)),
        _ => ids.extent(0),
    };
    if copied as u64 <= desc.max_num_pages {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name}: {copied} page ids of int64 on a device are not accepted; up to max_num_pages ({}), or int32, is",
        desc.max_num_pages
    )))
}

fn narrow(value: i64, what: impl FnOnce() -> String) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        let what = what();
        Error::InvalidArgument(format!(
            "{what} {value} is not accepted; 0 to {} is",
            i32::MAX
        ))
    })
}

fn empty(name: &str, copy: &mut Vec<i32>, room: usize) -> Result<()> {
    copy.clear();
    reserve(name, copy, room)
}

/// Zeros up to `end`.
fn empty_from(name: &str, copy: &mut Vec<i32>, end: usize) -> Result<()> {
    let end = end.max(copy.len());
    reserve(name, copy, end - copy.len())?;
    copy.resize(end, 0);
    Ok(())
}

fn reserve(name: &str, copy: &mut Vec<i32>, more: usize) -> Result<()> {
    // Page ids are counted in 31 bits: an extent beyond that asks for no allocation.
    let reserved = match more <= i32::MAX as usize {
        true => copy.try_reserve(more).is_ok(),
        false => false,
    };
    match reserved {
        true => Ok(()),
        false => Err(Error::OutOfMemory(format!(
            "{name}: int32 copies of {more} numbers do not fit into host memory"
        ))),
    }
}
