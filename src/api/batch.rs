//! Checks of a step's lengths and page table.
//!
//! Lengths are all on the host or all on the context's device. Host lengths are checked here to the
//! last value; of device lengths only the shapes can be.

use super::check::{Extent, INTEGERS, Named, required};
use super::largest::largest_of;
use super::narrow::{self, Narrowed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionDesc, Batch, DeviceBatch, HostBatch, Keys, Kind, KvStorage, PageIds, Pages, Requests,
};
use crate::tensor::{Device, Integers, Tensor};

/// A step's batch as the caller states it. Page tables come in three forms:
/// CSR (`kv_indptr`, `kv_indices` and `last_page_len` or `kv_len`; token slots are CSR with page size 1,
/// where neither is needed), block table (`block_table`, `kv_len`), and ragged (`kv_indptr`).
#[derive(Debug, Clone, Copy, Default)]
pub struct BatchInput {
    /// `[batch_size + 1]` int32 or int64, as all of these: query-row offsets; decode may leave it out.
    pub qo_indptr: Option<Tensor>,
    /// Rows of every request where `qo_indptr` is absent; 0 means 1.
    pub qo_len: u32,
    /// `[batch_size + 1]`, in pages (ragged: in tokens).
    pub kv_indptr: Option<Tensor>,
    /// `[num_pages]` page ids.
    pub kv_indices: Option<Tensor>,
    /// `[batch_size]`, 1 to page_size; not read for requests without pages.
    pub last_page_len: Option<Tensor>,
    /// `[batch_size]` keys per request; where new keys are beside the cache, those in it.
    pub kv_len: Option<Tensor>,
    /// `[batch_size, columns]` page ids.
    pub block_table: Option<Tensor>,
    /// No run sees a key more than so many before its row's own position; `None`: unlimited.
    pub window_left: Option<u32>,
}

impl BatchInput {
    /// Where page ids on a device are copied as int32: there is room for them.
    pub(super) fn check_room(&self, desc: &AttentionDesc) -> Result<()> {
        for (name, ids) in [
            ("kv_indices", self.kv_indices),
            ("block_table", self.block_table),
        ] {
            let copied = |ids: &Tensor| ids.device() != Device::Cpu && ids.dtype() == DType::I64;
            if let Some(ids) = ids.filter(copied) {
                narrow::check_room(name, &ids, desc)?;
            }
        }
        Ok(())
    }
}

/// Lengths that a batch states only indirectly or in int64; kept from step to step to save the allocation.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    qo_indptr: Vec<i32>,
    kv_len: Vec<i32>,
    /// With the keys that are beside the cache.
    all_keys: Vec<i32>,
    narrowed: Narrowed,
}

impl Scratch {
    /// Room for the largest batch of the desc.
    ///
    /// # Errors
    /// `OutOfMemory` where there is none.
    pub fn for_desc(desc: &AttentionDesc) -> Result<Scratch> {
        let lengths = |count: usize| {
            let mut lengths = Vec::new();
            lengths.try_reserve_exact(count).map_err(|_| {
                Error::OutOfMemory(format!(
                    "max_batch_size: the lengths of {} requests do not fit into host memory",
                    desc.max_batch_size
                ))
            })?;
            Ok(lengths)
        };
        Ok(Scratch {
            qo_indptr: lengths(desc.max_batch_size as usize + 1)?,
            kv_len: lengths(desc.max_batch_size as usize)?,
            all_keys: match desc.new_kv {
                None => Vec::new(),
                Some(_) => lengths(desc.max_batch_size as usize)?,
            },
            narrowed: Narrowed::default(),
        })
    }
}

/// How the caller states the page table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Csr,
    Table,
    Ragged,
}

/// Checks a batch against the desc.
pub(super) fn check<'a>(
    input: &'a BatchInput,
    desc: &AttentionDesc,
    device: Device,
    scratch: &'a mut Scratch,
) -> Result<Batch<'a>> {
    if let Some(left) = input.window_left {
        window_is_planned(left, desc)?;
    }
    let form = form(input, desc)?;
    let batch_size = batch_size(input, form)?;
    if batch_size > i64::from(desc.max_batch_size) {
        return Err(exceeds(
            &format!("{}: batch size", batch_size_field(form)),
            batch_size,
            "max_batch_size",
            desc.max_batch_size.into(),
        ));
    }
    shapes(input, desc, form, batch_size)?;
    if lengths_device(input, form)? == Device::Cpu {
        host(input, desc, form, device, scratch).map(Batch::Host)
    } else {
        device_batch(input, desc, batch_size, device).map(Batch::Device)
    }
}

fn form(input: &BatchInput, desc: &AttentionDesc) -> Result<Form> {
    let form = match desc.kv {
        KvStorage::Ragged => Form::Ragged,
        KvStorage::Paged { .. } if input.block_table.is_some() => Form::Table,
        KvStorage::Paged { .. } => Form::Csr,
    };
    let unused: &[(&str, bool)] = match form {
        Form::Csr => &[("block_table", input.block_table.is_some())],
        Form::Table => &[
            ("kv_indptr", input.kv_indptr.is_some()),
            ("kv_indices", input.kv_indices.is_some()),
            ("last_page_len", input.last_page_len.is_some()),
        ],
        Form::Ragged => &[
            ("kv_indices", input.kv_indices.is_some()),
            ("last_page_len", input.last_page_len.is_some()),
            ("kv_len", input.kv_len.is_some()),
            ("block_table", input.block_table.is_some()),
        ],
    };
    let with = match form {
        Form::Csr => "kv_indptr",
        Form::Table => "block_table",
        Form::Ragged => "ragged keys and values",
    };
    match unused.iter().find(|field| field.1) {
        Some((name, _)) => Err(Error::InvalidArgument(format!(
            "{name}: a tensor is not accepted together with {with}; NULL is"
        ))),
        None if input.last_page_len.is_some() && input.kv_len.is_some() => {
            Err(Error::InvalidArgument(
                "kv_len: a tensor is not accepted together with last_page_len; one of the two is"
                    .into(),
            ))
        }
        None => Ok(form),
    }
}

/// The tensor whose length says how many requests there are.
fn batch_size_field(form: Form) -> &'static str {
    match form {
        Form::Table => "kv_len",
        Form::Csr | Form::Ragged => "kv_indptr",
    }
}

fn batch_size(input: &BatchInput, form: Form) -> Result<i64> {
    let (name, tensor, extra) = match form {
        Form::Table => ("kv_len", input.kv_len, 0),
        Form::Csr | Form::Ragged => ("kv_indptr", input.kv_indptr, 1),
    };
    let lengths = required(name, tensor)?.shaped(&[Extent::AtLeast(extra)])?;
    Ok(lengths.tensor.extent(0) - extra)
}

fn shapes(input: &BatchInput, desc: &AttentionDesc, form: Form, batch_size: i64) -> Result<()> {
    let per_request = [Extent::Is(batch_size)];
    let offsets = [Extent::Is(batch_size + 1)];
    for (name, tensor, extents) in [
        ("qo_indptr", input.qo_indptr, &offsets[..]),
        ("kv_indptr", input.kv_indptr, &offsets[..]),
        ("kv_indices", input.kv_indices, &[Extent::Any][..]),
        ("last_page_len", input.last_page_len, &per_request[..]),
        ("kv_len", input.kv_len, &per_request[..]),
    ] {
        if let Some(tensor) = tensor {
            Named { name, tensor }
                .one_of(&INTEGERS)?
                .shaped(extents)?
                .compact()?;
        }
    }
    if let Some(tensor) = input.block_table {
        Named {
            name: "block_table",
            tensor,
        }
        .one_of(&INTEGERS)?
        .shaped(&[Extent::Is(batch_size), Extent::Any])?
        .unit_last_stride()?;
    }
    if form == Form::Csr {
        required("kv_indices", input.kv_indices)?;
        let needs_length = desc.kv.page_size() > 1;
        if needs_length && input.last_page_len.is_none() && input.kv_len.is_none() {
            return Err(Error::InvalidArgument(
                "last_page_len: NULL is not accepted where page_size is above 1; last_page_len or kv_len is".into(),
            ));
        }
    }
    match (input.qo_indptr, desc.kind) {
        (None, crate::problem::Kind::Prefill) => required("qo_indptr", None).map(|_| ()),
        (Some(_), _) if input.qo_len != 0 => Err(Error::InvalidArgument(format!(
            "qo_len: {} is not accepted together with qo_indptr; 0 is",
            input.qo_len
        ))),
        _ => Ok(()),
    }
}

/// The one device that all lengths are on.
fn lengths_device(input: &BatchInput, form: Form) -> Result<Device> {
    let first = match form {
        Form::Table => required("kv_len", input.kv_len)?,
        Form::Csr | Form::Ragged => required("kv_indptr", input.kv_indptr)?,
    };
    for (name, tensor) in [
        ("qo_indptr", input.qo_indptr),
        ("last_page_len", input.last_page_len),
        ("kv_len", input.kv_len),
    ] {
        if let Some(tensor) = tensor.filter(|t| t.device() != first.tensor.device()) {
            return Err(Error::DeviceMismatch(format!(
                "{name}: the tensor is on {}, {} on {}; all lengths are needed on one device",
                tensor.device(),
                first.name,
                first.tensor.device()
            )));
        }
    }
    Ok(first.tensor.device())
}

fn host<'a>(
    input: &'a BatchInput,
    desc: &AttentionDesc,
    form: Form,
    device: Device,
    scratch: &'a mut Scratch,
) -> Result<HostBatch<'a>> {
    let Scratch {
        qo_indptr: uniform_indptr,
        kv_len: derived_kv_len,
        all_keys,
        narrowed,
    } = scratch;
    let kv_indptr = narrow::lengths("kv_indptr", &input.kv_indptr, &mut narrowed.kv_indptr)?;
    if let Some(kv_indptr) = kv_indptr {
        offsets("kv_indptr", kv_indptr)?;
    }
    let stated_kv_len = narrow::lengths("kv_len", &input.kv_len, &mut narrowed.kv_len)?;
    let kv_len: &[i32] = match (stated_kv_len, kv_indptr) {
        (Some(kv_len), _) => kv_len,
        (None, Some(kv_indptr)) => {
            let last = input.last_page_len.as_ref().and_then(Tensor::as_integers);
            derive_kv_len(kv_indptr, last, desc, derived_kv_len)?;
            derived_kv_len
        }
        (None, None) => {
            return Err(Error::Internal(
                "a batch without lengths passed its checks".into(),
            ));
        }
    };
    bounded("kv_len", kv_len, 0, desc.max_kv_len, "max_kv_len")?;
    let stated = narrow::lengths("qo_indptr", &input.qo_indptr, &mut narrowed.qo_indptr)?;
    let qo_indptr: &[i32] = match stated {
        Some(qo_indptr) => qo_indptr,
        None => {
            uniform_rows(kv_len.len(), input.qo_len.max(1), desc, uniform_indptr)?;
            uniform_indptr
        }
    };
    rows(qo_indptr, desc)?;
    let table = PageTable {
        desc,
        device,
        kv_len,
        indptr: kv_indptr.unwrap_or_default(),
        copy: &mut narrowed.page_ids,
    };
    let pages = match (form, &input.kv_indices, &input.block_table) {
        (Form::Csr, Some(ids), _) => table.list(ids)?,
        (Form::Table, _, Some(ids)) => table.rows(ids)?,
        _ => Pages::Ragged {
            indptr: table.indptr,
        },
    };
    let (keys, kv_len) = match desc.new_kv {
        None => (Keys::All, kv_len),
        Some(_) => {
            add_new_keys(kv_len, qo_indptr, desc, all_keys)?;
            (Keys::Cached, &all_keys[..])
        }
    };
    let mut batch = HostBatch {
        qo_indptr,
        kv_len,
        keys,
        window_left: input.window_left,
        pages,
        num_pages: 0,
        max_page_id: -1,
        planned: Requests::All,
    };
    batch.num_pages = spans(&batch, desc, input)?;
    batch.max_page_id = largest_page_id(&batch, desc.kv.page_size())?;
    Ok(batch)
}

/// Windows are of plans whose runs see all keys of the cache, row by row.
fn window_is_planned(left: u32, desc: &AttentionDesc) -> Result<()> {
    let of = match desc {
        AttentionDesc {
            kind: Kind::Mla, ..
        } => "MLA",
        AttentionDesc {
            new_kv: Some(_), ..
        } => "handles with a new_kv_dtype",
        AttentionDesc {
            shared_levels: 1.., ..
        } => "cascades",
        _ => return Ok(()),
    };
    Err(Error::Unsupported(format!(
        "folio_batch.window_left: {left} is not accepted by plans of {of}; no FOLIO_BATCH_WINDOW in flags is"
    )))
}

/// All keys of requests whose batch counts those in the cache: every query row has one more.
fn add_new_keys(
    cached: &[i32],
    qo_indptr: &[i32],
    desc: &AttentionDesc,
    all: &mut Vec<i32>,
) -> Result<()> {
    all.clear();
    for (b, (&cached, rows)) in cached.iter().zip(qo_indptr.windows(2)).enumerate() {
        let keys = i64::from(cached) + i64::from(rows[1] - rows[0]);
        if keys > i64::from(desc.max_kv_len) {
            let name = format!("kv_len[{b}]: {cached} keys in the cache and new ones, together");
            return Err(exceeds(&name, keys, "max_kv_len", desc.max_kv_len.into()));
        }
        all.push(keys as i32);
    }
    Ok(())
}

/// Offsets start at 0 and never fall.
fn offsets(name: &str, indptr: &[i32]) -> Result<()> {
    if indptr.first() != Some(&0) {
        return Err(Error::InvalidArgument(format!(
            "{name}[0]: {} is not accepted; 0 is",
            indptr.first().copied().unwrap_or(-1)
        )));
    }
    match indptr.windows(2).position(|pair| pair[1] < pair[0]) {
        None => Ok(()),
        Some(i) => Err(Error::InvalidArgument(format!(
            "{name}[{}]: {} is below {name}[{i}] = {}; offsets may not fall",
            i + 1,
            indptr[i + 1],
            indptr[i]
        ))),
    }
}

/// `(pages - 1) · page_size + last_page_len`; 0 for a request without pages, whatever its
/// `last_page_len` (FlashInfer's rule).
fn derive_kv_len(
    kv_indptr: &[i32],
    last_page_len: Option<Integers<'_>>,
    desc: &AttentionDesc,
    kv_len: &mut Vec<i32>,
) -> Result<()> {
    let page_size = desc.kv.page_size();
    kv_len.clear();
    for (b, span) in kv_indptr.windows(2).enumerate() {
        let pages = i64::from(span[1]) - i64::from(span[0]);
        let last = last_page_len.map_or(1, |last| last.get(b));
        if pages > 0 && !(1..=i64::from(page_size)).contains(&last) {
            return Err(Error::InvalidArgument(format!(
                "last_page_len[{b}]: {last} is not accepted; 1 to page_size ({page_size}) is"
            )));
        }
        let len = if pages == 0 {
            0
        } else {
            (pages - 1) * i64::from(page_size) + last
        };
        kv_len.push(i32::try_from(len).map_err(|_| {
            let name = format!("kv_indptr: keys of request {b}");
            exceeds(&name, len, "max_kv_len", desc.max_kv_len.into())
        })?);
    }
    Ok(())
}

fn bounded(name: &str, values: &[i32], least: i32, most: u32, limit: &str) -> Result<()> {
    let most = i32::try_from(most).unwrap_or(i32::MAX);
    match values.iter().position(|v| !(least..=most).contains(v)) {
        None => Ok(()),
        Some(i) => Err(Error::InvalidArgument(format!(
            "{name}[{i}]: {} is not accepted; {least} to {limit} ({most}) is",
            values[i]
        ))),
    }
}

fn uniform_rows(
    batch_size: usize,
    qo_len: u32,
    desc: &AttentionDesc,
    out: &mut Vec<i32>,
) -> Result<()> {
    if qo_len > desc.max_qo_len {
        return Err(exceeds(
            "qo_len",
            qo_len.into(),
            "max_qo_len",
            desc.max_qo_len.into(),
        ));
    }
    out.clear();
    out.extend((0..=batch_size).map(|b| (b * qo_len as usize) as i32));
    Ok(())
}

fn rows(qo_indptr: &[i32], desc: &AttentionDesc) -> Result<()> {
    offsets("qo_indptr", qo_indptr)?;
    let total = qo_indptr[qo_indptr.len() - 1];
    if i64::from(total) > i64::from(desc.max_num_tokens) {
        let name = format!("qo_indptr[{}]", qo_indptr.len() - 1);
        return Err(exceeds(
            &name,
            total.into(),
            "max_num_tokens",
            desc.max_num_tokens.into(),
        ));
    }
    match qo_indptr
        .windows(2)
        .position(|p| i64::from(p[1] - p[0]) > i64::from(desc.max_qo_len))
    {
        None => Ok(()),
        Some(b) => {
            let name = format!("qo_indptr: rows of request {b}");
            let len = qo_indptr[b + 1] - qo_indptr[b];
            Err(exceeds(
                &name,
                len.into(),
                "max_qo_len",
                desc.max_qo_len.into(),
            ))
        }
    }
}

/// What page ids are read by.
struct PageTable<'s, 'a> {
    desc: &'s AttentionDesc,
    device: Device,
    kv_len: &'a [i32],
    indptr: &'a [i32],
    copy: &'a mut Vec<i32>,
}

impl<'a> PageTable<'_, 'a> {
    fn list(self, ids: &'a Tensor) -> Result<Pages<'a>> {
        let PageTable { indptr, .. } = self;
        if ids.device() != Device::Cpu {
            let ids = self.on_device("kv_indices", ids)?;
            return Ok(Pages::Csr { indptr, ids });
        }
        let ids = match ids.as_i32() {
            Some(ids) => ids,
            None => {
                let needed = self.needed();
                let in_use = indptr.windows(2).zip(needed).map(|(span, needed)| {
                    let owned = (span[1] - span[0]) as usize;
                    (span[0] as usize, needed.min(owned))
                });
                narrow::listed_ids(ids, in_use, self.copy)?
            }
        };
        Ok(Pages::Csr {
            indptr,
            ids: PageIds::Host(ids),
        })
    }

    fn rows(self, table: &'a Tensor) -> Result<Pages<'a>> {
        if table.device() != Device::Cpu {
            let ids = self.on_device("block_table", table)?;
            let row_stride = match table.dtype() {
                DType::I64 => self.desc.copied_columns(table.extent(1)),
                _ => table.stride(0),
            };
            return Ok(Pages::Table {
                ids,
                row_stride: row_stride as usize,
            });
        }
        let (ids, row_stride) = match table.as_i32_rows() {
            Some(ids) => (ids, table.stride(0)),
            None => {
                let needed = self.needed();
                (
                    narrow::table_ids(table, needed, self.copy)?,
                    table.extent(1),
                )
            }
        };
        Ok(Pages::Table {
            ids: PageIds::Host(ids),
            row_stride: row_stride as usize,
        })
    }

    fn on_device(&self, name: &str, ids: &Tensor) -> Result<PageIds<'a>> {
        let ids = Named { name, tensor: *ids }.on(self.device)?.tensor;
        Ok(PageIds::Device(ids))
    }

    /// Pages that the keys of each request need.
    fn needed(&self) -> impl Iterator<Item = usize> + use<'a> {
        let page_size = self.desc.kv.page_size();
        let pages = move |&keys: &i32| (keys as u32).div_ceil(page_size) as usize;
        self.kv_len.iter().map(pages)
    }
}

/// Every request's keys lie within the pages it owns. Returns the pages they need.
fn spans(batch: &HostBatch<'_>, desc: &AttentionDesc, input: &BatchInput) -> Result<usize> {
    if let Pages::Ragged { .. } = batch.pages {
        return Ok(0);
    }
    let page_size = desc.kv.page_size();
    let mut total = 0u64;
    for b in 0..batch.batch_size() {
        let kv_len = batch.num_keys(b);
        let needed = i64::from(kv_len.div_ceil(page_size));
        total += needed as u64;
        let (owned, field) = match batch.pages {
            Pages::Csr { indptr, .. } => (i64::from(indptr[b + 1] - indptr[b]), "kv_indptr"),
            Pages::Table { .. } => (input.block_table.map_or(0, |t| t.extent(1)), "block_table"),
            Pages::Ragged { .. } => continue,
        };
        if needed > owned {
            return Err(Error::InvalidArgument(format!(
                "kv_len[{b}]: {kv_len} keys need {needed} pages of {page_size}, {field} gives request {b} {owned}"
            )));
        }
    }
    if let (Pages::Csr { indptr, .. }, Some(ids)) = (batch.pages, input.kv_indices) {
        let end = i64::from(indptr[batch.batch_size()]);
        if end > ids.extent(0) {
            return Err(Error::Shape(format!(
                "kv_indices: {} ids are not enough; kv_indptr ends at {end}",
                ids.extent(0)
            )));
        }
    }
    if total > desc.max_num_pages {
        return Err(exceeds(
            &format!("{}: pages of the batch", pages_field(batch)),
            total as i64,
            "max_num_pages",
            desc.max_num_pages as i64,
        ));
    }
    Ok(total as usize)
}

/// The largest id in use, or -1; no id may be negative.
fn largest_page_id(batch: &HostBatch<'_>, page_size: u32) -> Result<i32> {
    let mut largest = -1;
    if let Some(ids) = batch.dense_page_ids()
        && let Ok(most) = i32::try_from(largest_of(ids))
    {
        return Ok(if ids.is_empty() { -1 } else { most });
    }
    for b in 0..batch.batch_size() {
        let Some(ids) = batch.page_ids(b, page_size) else {
            return Ok(-1);
        };
        match i32::try_from(largest_of(ids)) {
            Ok(_) if ids.is_empty() => {}
            Ok(most) => largest = largest.max(most),
            Err(_) => return Err(negative_page_id(batch, b, ids)),
        }
    }
    Ok(largest)
}

fn pages_field(batch: &HostBatch<'_>) -> &'static str {
    match batch.pages {
        Pages::Table { .. } => "kv_len",
        _ => "kv_indptr",
    }
}

fn negative_page_id(batch: &HostBatch<'_>, b: usize, ids: &[i32]) -> Error {
    let at = ids.iter().position(|&id| id < 0).unwrap_or(0);
    let field = match batch.pages {
        Pages::Csr { indptr, .. } => format!("kv_indices[{}]", indptr[b] as usize + at),
        _ => format!("block_table[{b}][{at}]"),
    };
    Error::InvalidArgument(format!(
        "{field}: page id {} is not accepted; 0 or more is",
        ids[at]
    ))
}

fn device_batch(
    input: &BatchInput,
    desc: &AttentionDesc,
    batch_size: i64,
    device: Device,
) -> Result<DeviceBatch> {
    for (name, tensor) in [
        ("qo_indptr", input.qo_indptr),
        ("kv_indptr", input.kv_indptr),
        ("kv_len", input.kv_len),
        ("last_page_len", input.last_page_len),
        ("kv_indices", input.kv_indices),
        ("block_table", input.block_table),
    ] {
        if let Some(tensor) = tensor {
            Named { name, tensor }.on(device)?;
        }
    }
    let qo_len = input.qo_len.max(1);
    if qo_len > desc.max_qo_len {
        return Err(exceeds(
            "qo_len",
            qo_len.into(),
            "max_qo_len",
            desc.max_qo_len.into(),
        ));
    }
    Ok(DeviceBatch {
        batch_size: batch_size as u32,
        qo_len,
        qo_indptr: input.qo_indptr,
        kv_indptr: input.kv_indptr,
        kv_len: input.kv_len,
        last_page_len: input.last_page_len,
        page_ids: match desc.kv {
            KvStorage::Ragged => None,
            KvStorage::Paged { .. } => input.block_table.or(input.kv_indices),
        },
        window_left: input.window_left,
        planned: Requests::All,
    })
}

fn exceeds(name: &str, value: i64, limit: &str, most: i64) -> Error {
    Error::InvalidArgument(format!(
        "{name}: {value} is not accepted; at most {limit} ({most}) is"
    ))
}
