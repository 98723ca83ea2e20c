//! The operators that build a batch's indices: the checks, and the calls of the backend. Numbers on the host are checked
//! one by one; on a device kernels keep within the tensors.

use super::Context;
use super::check::{Extent, INTEGERS, Named};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    BatchLengthsArgs, BlockTableArgs, Checked, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs,
    QueryRows, SlotMappingArgs, TokenRows,
};
use crate::tensor::{Device, Tensor};

/// Most tokens of a request, and of all where int32 counts them.
const MOST: i64 = i32::MAX as i64;

/// Most branches and steps of a draft.
const MOST_DRAFTS: u32 = u16::MAX as u32;

/// Computes cumulative lengths and what else follows from the lengths of a step.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn batch_lengths(context: &Context, args: &BatchLengthsArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let qo_len = of_requests("qo_len", args.qo_len, device, Extent::CountFrom(0))?;
    let batch_size = qo_len.extent(0);
    let input = |name, tensor: Option<Tensor>| {
        let of = |tensor| of_requests(name, tensor, device, Extent::Is(batch_size));
        tensor.map(of).transpose()
    };
    let output = |name, tensor: Option<Tensor>, extent| {
        let of = |tensor| list(name, tensor, device, Extent::AtLeast(extent));
        tensor.map(of).transpose()
    };
    let checked = Checked::new(BatchLengthsArgs {
        qo_len,
        cached_len: input("cached_len", args.cached_len)?,
        encoder_len: input("encoder_len", args.encoder_len)?,
        qo_indptr: output("qo_indptr", args.qo_indptr, batch_size + 1)?,
        kv_len: output("kv_len", args.kv_len, batch_size)?,
        kv_indptr: output("kv_indptr", args.kv_indptr, batch_size + 1)?,
        row_kind: output("row_kind", args.row_kind, batch_size)?,
    });
    check_use(&checked)?;
    if device == Device::Cpu {
        check_lengths(&checked)?;
    }
    context.backend().batch_lengths(&checked, stream)
}

/// Nothing that is given may be of no use.
fn check_use(args: &BatchLengthsArgs) -> Result<()> {
    let of_keys = args.kv_len.is_some() || args.kv_indptr.is_some();
    if args.qo_indptr.is_none() && args.row_kind.is_none() && !of_keys {
        return refused("qo_indptr: NULL is not accepted where kv_len, kv_indptr and row_kind are NULL too; an output is".into());
    }
    if args.cached_len.is_some() && !of_keys {
        return refused(
            "cached_len: a tensor is not accepted without kv_len or kv_indptr; NULL is".into(),
        );
    }
    match (args.encoder_len.is_some(), args.row_kind.is_some()) {
        (true, false) => {
            refused("encoder_len: a tensor is not accepted without row_kind; NULL is".into())
        }
        (false, true) => {
            refused("encoder_len: NULL is not accepted with row_kind; a tensor is".into())
        }
        _ => Ok(()),
    }
}

fn check_lengths(args: &BatchLengthsArgs) -> Result<()> {
    let (mut rows, mut keys) = (0, 0);
    for b in 0..args.qo_len.extent(0) {
        let new = within("qo_len", &args.qo_len, b, 0, MOST)?;
        if let Some(lens) = &args.encoder_len {
            within("encoder_len", lens, b, 0, MOST)?;
        }
        let cached = match &args.cached_len {
            None => 0,
            Some(lens) => within("cached_len", lens, b, 0, MOST - new)?,
        };
        rows += new;
        keys += if new > 0 { cached + new } else { 0 };
    }
    for (name, indptr, sum) in [
        ("qo_indptr", args.qo_indptr, rows),
        ("kv_indptr", args.kv_indptr, keys),
    ] {
        if sum > MOST && indptr.is_some_and(|indptr| indptr.dtype() == DType::I32) {
            return refused(format!(
                "{name}: int32 is not accepted for {sum} tokens; int64 is"
            ));
        }
    }
    Ok(())
}

/// Lists the pages or slots of every request.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn kv_indices(context: &Context, args: &KvIndicesArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let kv_len = of_requests("kv_len", args.kv_len, device, Extent::CountFrom(0))?;
    let batch_size = kv_len.extent(0);
    let rows = token_rows("block_table", &args.rows, batch_size, device)?;
    let listed = match args.page_size {
        0 => rows.page_size,
        size => size,
    };
    page_size("indices_page_size", listed)?;
    if rows.page_size % listed != 0 && listed % rows.page_size != 0 {
        return refused(format!(
            "indices_page_size: {listed} is not accepted; a divisor or a multiple of page_size ({}) is",
            rows.page_size
        ));
    }
    let kv_start = |tensor| of_requests("kv_start", tensor, device, Extent::Is(batch_size));
    let last = |tensor| list("last_page_len", tensor, device, Extent::AtLeast(batch_size));
    let checked = Checked::new(KvIndicesArgs {
        rows,
        kv_len,
        kv_start: args.kv_start.map(kv_start).transpose()?,
        page_size: listed,
        kv_indptr: list(
            "kv_indptr",
            args.kv_indptr,
            device,
            Extent::AtLeast(batch_size + 1),
        )?,
        kv_indices: list("kv_indices", args.kv_indices, device, Extent::CountFrom(0))?,
        last_page_len: args.last_page_len.map(last).transpose()?,
        ..*args
    });
    if device == Device::Cpu {
        check_listed(&checked)?;
    }
    context.backend().kv_indices(&checked, stream)
}

fn check_listed(args: &KvIndicesArgs) -> Result<()> {
    let mut all = 0;
    for b in 0..args.kv_len.extent(0) {
        check_row("block_table", &args.rows, b)?;
        let kv_len = within("kv_len", &args.kv_len, b, 0, args.rows.tokens().min(MOST))?;
        let kv_start = match &args.kv_start {
            None => 0,
            Some(starts) => within("kv_start", starts, b, 0, kv_len)?,
        };
        let listed = args.listed(kv_start, kv_len);
        all += listed.end - listed.start;
    }
    room("kv_indices", args.kv_indices.extent(0), all)
}

/// Makes a block table of a list.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn block_table(context: &Context, args: &BlockTableArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let kv_indptr = list("kv_indptr", args.kv_indptr, device, Extent::CountFrom(1))?;
    let batch_size = kv_indptr.extent(0) - 1;
    let extents = [Extent::AtLeast(batch_size), Extent::CountFrom(0)];
    let checked = Checked::new(BlockTableArgs {
        kv_indptr,
        kv_indices: list("kv_indices", args.kv_indices, device, Extent::CountFrom(0))?,
        block_table: table("block_table", args.block_table, device, extents)?
            .writable()?
            .tensor,
        fill: args.fill,
    });
    if device == Device::Cpu {
        let columns = checked.block_table.extent(1);
        let all = checked.kv_indices.extent(0);
        rising("kv_indptr", &checked.kv_indptr, all, |b, count| {
            match columns >= count {
                true => Ok(()),
                false => refused(format!(
                    "block_table: rows of {columns} entries are not accepted; {count}, the indices of request {b}, or more are"
                )),
            }
        })?;
    }
    context.backend().block_table(&checked, stream)
}

/// Finds slots and positions of new tokens.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn slot_mapping(context: &Context, args: &SlotMappingArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let kv_len = of_requests("kv_len", args.kv_len, device, Extent::CountFrom(0))?;
    let batch_size = kv_len.extent(0);
    let slot_mapping = list(
        "slot_mapping",
        args.slot_mapping,
        device,
        Extent::CountFrom(0),
    )?;
    let tokens = Extent::Is(slot_mapping.extent(0));
    let positions = |tensor| list("positions", tensor, device, tokens);
    let checked = Checked::new(SlotMappingArgs {
        rows: token_rows("block_table", &args.rows, batch_size, device)?,
        queries: match args.queries {
            QueryRows::Indptr(indptr) => {
                let extent = Extent::Is(batch_size + 1);
                QueryRows::Indptr(list("qo_indptr", indptr, device, extent)?)
            }
            QueryRows::Len(len) => {
                QueryRows::Len(of_requests("qo_len", len, device, Extent::Is(batch_size))?)
            }
        },
        kv_len,
        slot_mapping,
        positions: args.positions.map(positions).transpose()?,
    });
    if device == Device::Cpu {
        check_new_tokens(&checked)?;
    }
    context.backend().slot_mapping(&checked, stream)
}

fn check_new_tokens(args: &SlotMappingArgs) -> Result<()> {
    let all = args.slot_mapping.extent(0);
    let check = |b: i64, new: i64| {
        check_row("block_table", &args.rows, b)?;
        within("kv_len", &args.kv_len, b, new, args.rows.tokens().min(MOST)).map(|_| ())
    };
    match &args.queries {
        QueryRows::Indptr(indptr) => rising("qo_indptr", indptr, all, check),
        QueryRows::Len(lens) => {
            let mut rows = 0;
            for b in 0..lens.extent(0) {
                let new = within("qo_len", lens, b, 0, MOST)?;
                check(b, new)?;
                rows += new;
            }
            room("slot_mapping", all, rows)
        }
    }
}

/// Lists the slots of every branch of a draft for each of its steps.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn draft_kv_indices(
    context: &Context,
    args: &DraftKvIndicesArgs,
    stream: Stream,
) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let kv_len = of_requests("kv_len", args.kv_len, device, Extent::CountFrom(0))?;
    let batch_size = kv_len.extent(0);
    if !(1..=MOST_DRAFTS).contains(&args.topk) {
        return refused(format!(
            "topk: {} is not accepted; 1 to {MOST_DRAFTS} is",
            args.topk
        ));
    }
    if let DraftSlots::Paged(size) = args.slots {
        page_size("page_size", size)?;
    }
    let rows = batch_size * i64::from(args.topk);
    let extents = [Extent::CountFrom(0), Extent::AtLeast(rows + 1)];
    let kv_indptr = table("kv_indptr", args.kv_indptr, device, extents)?;
    let kv_indptr = kv_indptr.writable()?.tensor;
    let steps = kv_indptr.extent(0);
    let extents = [Extent::Is(steps), Extent::CountFrom(0)];
    let kv_indices = table("kv_indices", args.kv_indices, device, extents)?;
    let num_steps = match args.num_steps {
        0 => steps as u32,
        stated => stated,
    };
    if i64::from(num_steps) < steps || num_steps > MOST_DRAFTS {
        return refused(format!(
            "num_steps: {num_steps} is not accepted; {steps}, the rows of kv_indptr, to {MOST_DRAFTS} is"
        ));
    }
    let checked = Checked::new(DraftKvIndicesArgs {
        rows: token_rows("req_to_token", &args.rows, batch_size, device)?,
        kv_len,
        num_steps,
        kv_indptr,
        kv_indices: kv_indices.writable()?.tensor,
        ..*args
    });
    if device == Device::Cpu {
        check_drafts(&checked)?;
    }
    context.backend().draft_kv_indices(&checked, stream)
}

fn check_drafts(args: &DraftKvIndicesArgs) -> Result<()> {
    let steps = args.kv_indptr.extent(0);
    let columns = args.rows.table.extent(1);
    let (topk, num_steps) = (i64::from(args.topk), i64::from(args.num_steps));
    let mut all = 0i64;
    for b in 0..args.kv_len.extent(0) {
        check_row("req_to_token", &args.rows, b)?;
        let kv_len = within("kv_len", &args.kv_len, b, 0, columns)?;
        let last = args
            .slots
            .entry(kv_len, [steps - 1, topk - 1], [num_steps, topk]);
        if steps > 0 && last >= columns {
            return refused(format!(
                "kv_len[{b}]: {kv_len} is not accepted; with the drafts behind it, req_to_token would need {} columns and has {columns}",
                last + 1
            ));
        }
        all = all.saturating_add((kv_len + steps).saturating_mul(topk));
    }
    match steps {
        0 => Ok(()),
        _ => room("kv_indices", args.kv_indices.extent(1), all),
    }
}

/// A number per request; a column is as good as a list.
fn of_requests(name: &str, tensor: Tensor, device: Device, extent: Extent) -> Result<Tensor> {
    let is_column = tensor.rank() == 2 && tensor.extent(1) == 1;
    let tensor = if is_column {
        tensor.remove_dim(1)
    } else {
        tensor
    };
    list(name, tensor, device, extent)
}

fn list(name: &str, tensor: Tensor, device: Device, extent: Extent) -> Result<Tensor> {
    let numbers = Named { name, tensor }.on(device)?.one_of(&INTEGERS)?;
    Ok(numbers.shaped(&[extent])?.compact()?.tensor)
}

fn table<'a>(
    name: &'a str,
    tensor: Tensor,
    device: Device,
    extents: [Extent; 2],
) -> Result<Named<'a>> {
    let numbers = Named { name, tensor }.on(device)?.one_of(&INTEGERS)?;
    numbers.shaped(&extents)?.unit_last_stride()
}

fn token_rows(name: &str, rows: &TokenRows, batch_size: i64, device: Device) -> Result<TokenRows> {
    page_size("page_size", rows.page_size)?;
    let count = match rows.row_ids {
        None => Extent::AtLeast(batch_size),
        Some(_) => Extent::Any,
    };
    let row_ids = |ids| of_requests("row_ids", ids, device, Extent::Is(batch_size));
    Ok(TokenRows {
        table: table(name, rows.table, device, [count, Extent::CountFrom(0)])?.tensor,
        row_ids: rows.row_ids.map(row_ids).transpose()?,
        page_size: rows.page_size,
    })
}

fn page_size(name: &str, value: u32) -> Result<()> {
    match (1..=i32::MAX as u32).contains(&value) {
        true => Ok(()),
        false => refused(format!(
            "{name}: {value} is not accepted; 1 to {} is",
            i32::MAX
        )),
    }
}

/// The row of a request exists.
fn check_row(name: &str, rows: &TokenRows, b: i64) -> Result<()> {
    let Some(ids) = rows.row_ids else {
        return Ok(());
    };
    let (row, count) = (ids.integer(&[b]), rows.table.extent(0));
    match (0..count).contains(&row) {
        true => Ok(()),
        false => refused(format!(
            "row_ids[{b}]: {row} is not accepted; 0 or more and below {count}, the rows of {name}, is"
        )),
    }
}

/// An element that lies in a range.
fn within(name: &str, numbers: &Tensor, b: i64, least: i64, most: i64) -> Result<i64> {
    match numbers.integer(&[b]) {
        value if (least..=most).contains(&value) => Ok(value),
        value => refused(format!(
            "{name}[{b}]: {value} is not accepted; {least} to {most} is"
        )),
    }
}

/// Cumulative lengths from 0 up to `most`, each of which passes `check`.
fn rising(
    name: &str,
    indptr: &Tensor,
    most: i64,
    check: impl Fn(i64, i64) -> Result<()>,
) -> Result<()> {
    within(name, indptr, 0, 0, 0)?;
    for b in 0..indptr.extent(0) - 1 {
        let before = indptr.integer(&[b]);
        check(b, within(name, indptr, b + 1, before, most)? - before)?;
    }
    Ok(())
}

fn room(name: &str, is: i64, wanted: i64) -> Result<()> {
    match is >= wanted {
        true => Ok(()),
        false => refused(format!(
            "{name}: room for {is} numbers is not accepted; {wanted} or more is"
        )),
    }
}

fn refused<T>(message: String) -> Result<T> {
    Err(Error::InvalidArgument(message))
}
