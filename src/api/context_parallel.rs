//! The operators of decode context parallelism: the checks, and the calls of the backend.

use super::Context;
use super::check::{Extent, FLOATS, named, rising};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::Ranks;
use crate::problem::{Checked, CpCorrectArgs, CpReorderArgs};

/// Types of records, and their bytes.
const RECORDS: [DType; 6] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
    DType::U8,
];

/// Puts records that were gathered rank by rank request by request.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn cp_reorder(context: &Context, args: &CpReorderArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let gathered = named("gathered", args.gathered)
        .on(device)?
        .one_of(&RECORDS)?
        .shaped(&[
            Extent::CountFrom(1),
            Extent::CountFrom(0),
            Extent::CountFrom(0),
        ])?
        .unit_last_stride()?
        .tensor;
    let dst = named("dst", args.dst)
        .on(device)?
        .one_of(&[gathered.dtype()])?
        .shaped(&[Extent::CountFrom(0), Extent::Is(gathered.extent(2))])?
        .unit_last_stride()?
        .writable()?
        .tensor;
    let numbers = |name, tensor, extent| {
        let numbers = named(name, tensor).on(device)?.of(DType::I32)?;
        Ok::<_, Error>(numbers.shaped(&[extent])?.compact()?.tensor)
    };
    let context_lens = numbers("context_lens", args.context_lens, Extent::CountFrom(0))?;
    let ends = Extent::Is(context_lens.extent(0) + 1);
    let checked = Checked::new(CpReorderArgs {
        gathered,
        dst,
        context_lens,
        cu_seq_lens: numbers("cu_seq_lens", args.cu_seq_lens, ends)?,
        cu_padded_lens: numbers("cu_padded_lens", args.cu_padded_lens, ends)?,
        interleave: args.interleave.max(1),
        ..*args
    });
    check_lengths(&checked)?;
    context.backend().cp_reorder(&checked, stream)
}

/// Numbers on the host are checked one by one; on a device the kernel skips rows that lie outside.
fn check_lengths(args: &CpReorderArgs) -> Result<()> {
    let (Some(lens), Some(ends), Some(padded)) = (
        args.context_lens.as_i32(),
        args.cu_seq_lens.as_i32(),
        args.cu_padded_lens.as_i32(),
    ) else {
        return Ok(());
    };
    rising("cu_seq_lens", ends, args.dst.extent(0), "rows")?;
    rising("cu_padded_lens", padded, args.gathered.extent(1), "rows")?;
    let ranks = Ranks {
        world_size: args.gathered.extent(0) as u64,
        interleave: args.interleave.into(),
    };
    for (b, &len) in lens.iter().enumerate() {
        if len < 0 {
            return refused(format!(
                "context_lens[{b}]: {len} is not accepted; 0 or more is"
            ));
        }
        let most = (padded[b + 1] - padded[b]) as u64;
        let held = |rank| {
            let local = ranks.local_length(len as u64, rank);
            local.saturating_sub(args.local_start.into()).min(most)
        };
        let all: u64 = (0..ranks.world_size).map(held).sum();
        let rows = (ends[b + 1] - ends[b]) as u64;
        if all != rows {
            return refused(format!(
                "cu_seq_lens[{}]: {rows} rows of request {b} are not accepted; {all}, which the ranks hold, are",
                b + 1
            ));
        }
    }
    Ok(())
}

fn refused(message: String) -> Result<()> {
    Err(Error::InvalidArgument(message))
}

/// Scales one rank's output by its share of the softmax over all ranks' keys.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn cp_correct(context: &Context, args: &CpCorrectArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let o = named("o", args.o)
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::CountFrom(0); 3])?
        .unit_last_stride()?
        .tensor;
    let [tokens, heads, dim] = [0, 1, 2].map(|d| Extent::Is(o.extent(d)));
    let lse_all = named("lse_all", args.lse_all)
        .on(device)?
        .of(DType::F32)?
        .shaped(&[Extent::CountFrom(1), tokens, heads])?
        .tensor;
    let world_size = lse_all.extent(0);
    if i64::from(args.rank) >= world_size {
        return refused(format!(
            "rank: {} is not accepted; below {world_size}, the ranks of lse_all, is",
            args.rank
        ));
    }
    let o_out = named("o_out", args.o_out)
        .on(device)?
        .of(o.dtype())?
        .shaped(&[tokens, heads, dim])?
        .unit_last_stride()?
        .writable()?;
    let lse_out = match args.lse_out {
        None => None,
        Some(tensor) => {
            let lse_out = named("lse_out", tensor).on(device)?.of(DType::F32)?;
            Some(lse_out.shaped(&[tokens, heads])?.writable()?.tensor)
        }
    };
    let checked = Checked::new(CpCorrectArgs {
        lse_all,
        o,
        o_out: o_out.tensor,
        lse_out,
        ..*args
    });
    context.backend().cp_correct(&checked, stream)
}
