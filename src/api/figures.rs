//! Pure functions of numbers on the host: the checks, and the calls of `plan`. Nothing here has a device.

use crate::error::{Error, Result};
use crate::plan::{
    ChunkTables, FLASHMLA_RECORD, Ranks, flashmla_metadata as metadata, flashmla_parts,
    keys_per_split, least_workspace, num_kv_splits as splits_of,
    split_decodes_and_prefills as split_batch,
};

pub use crate::plan::context_tokens as mla_context_tokens;

/// Tokens that ranks hold of sequences.
#[derive(Debug)]
pub struct CpLocalLengths<'a> {
    /// Of the sequences.
    pub lengths: &'a [i32],
    /// Number of ranks.
    pub world_size: u32,
    /// Tokens that are dealt to a rank at a time; 0 means 1.
    pub interleave: u32,
    /// -1: all.
    pub rank: i32,
    /// `[lengths]`, or `[lengths, world_size]` for all ranks, or more.
    pub out: &'a mut [i32],
}

/// Fills [`CpLocalLengths::out`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn cp_local_lengths(args: CpLocalLengths<'_>) -> Result<()> {
    let ranks = ranks(args.world_size, args.interleave)?;
    let all = 0..ranks.world_size;
    let wanted = match args.rank {
        -1 => all,
        rank if all.contains(&(rank as u64)) => rank as u64..rank as u64 + 1,
        rank => {
            return Err(invalid(format!(
                "rank: {rank} is not accepted; -1 for all, or 0 to {}, is",
                ranks.world_size - 1
            )));
        }
    };
    not_negative("lengths", args.lengths)?;
    let count = (args.lengths.len()).saturating_mul((wanted.end - wanted.start) as usize);
    room("capacity", args.out.len(), count)?;
    let lengths = args.lengths.iter().flat_map(|&length| {
        let local = move |rank| ranks.local_length(length as u64, rank) as i32;
        wanted.clone().map(local)
    });
    for (out, length) in args.out.iter_mut().zip(lengths) {
        *out = length;
    }
    Ok(())
}

/// Chunks of contexts.
#[derive(Debug)]
pub struct MlaContextChunks<'a> {
    /// Tokens in the cache before the new ones, per request.
    pub context_lens: &'a [i32],
    /// Rows of the workspace.
    pub workspace_tokens: u64,
    /// Tokens per page.
    pub page_size: u32,
    /// Ranks that share the contexts; 0 means 1.
    pub world_size: u32,
    /// As in [`CpLocalLengths`].
    pub interleave: u32,
    /// Chunks that the tables have room for.
    pub max_num_chunks: u32,
    /// `[chunks, requests]`: first token of each request, on every rank.
    pub seq_starts: Option<&'a mut [i32]>,
    /// `[chunks, requests + 1]`: tokens before each request, of all ranks.
    pub cu_seq_lens: Option<&'a mut [i32]>,
    /// `[chunks, requests + 1]`: tokens before each request, on every rank.
    pub cu_padded_lens: Option<&'a mut [i32]>,
    /// `[chunks]`: most tokens of a request.
    pub max_lens: Option<&'a mut [i32]>,
    /// The number of chunks.
    pub num_chunks: &'a mut u32,
    /// Tokens of a chunk of a request.
    pub chunk_tokens: Option<&'a mut u32>,
}

/// Fills the tables of [`MlaContextChunks`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn mla_context_chunks(args: MlaContextChunks<'_>) -> Result<()> {
    let ranks = ranks(args.world_size.max(1), args.interleave)?;
    let page_size = positive("page_size", args.page_size)?;
    not_negative("context_lens", args.context_lens)?;
    let most = i32::MAX as u64;
    if args.workspace_tokens > most {
        return Err(invalid(format!(
            "workspace_tokens: {} is not accepted; up to {most} is",
            args.workspace_tokens
        )));
    }
    let lens = args.context_lens;
    let chunks = ChunkTables::new(lens, args.workspace_tokens, page_size, ranks);
    let Some(chunks) = chunks else {
        let with_context = lens.iter().filter(|&&len| len > 0).count() as u64;
        return Err(invalid(format!(
            "workspace_tokens: {} is not accepted; {} or more, a page of each request with a context (on several ranks: of whole rounds of interleave), is",
            args.workspace_tokens,
            least_workspace(with_context, page_size, ranks)
        )));
    };
    let wants_tables = args.seq_starts.is_some()
        || args.cu_seq_lens.is_some()
        || args.cu_padded_lens.is_some()
        || args.max_lens.is_some();
    if wants_tables {
        room(
            "max_num_chunks",
            args.max_num_chunks as usize,
            chunks.count as usize,
        )?;
    }
    fill(args.seq_starts, lens.len(), chunks.count, |chunk, row| {
        row.fill((chunk * chunks.local_tokens(ranks)) as i32);
    });
    let len = |chunk: u64, len: i32| chunks.len(len as u64, chunk) as i32;
    fill(
        args.cu_seq_lens,
        lens.len() + 1,
        chunks.count,
        |chunk, row| {
            prefix_sums(row, lens.iter().map(|&context| len(chunk, context)));
        },
    );
    fill(
        args.cu_padded_lens,
        lens.len() + 1,
        chunks.count,
        |chunk, row| {
            let padded = |&len: &i32| chunks.padded_len(len as u64, chunk, ranks) as i32;
            prefix_sums(row, lens.iter().map(padded));
        },
    );
    fill(args.max_lens, 1, chunks.count, |chunk, row| {
        let lens = lens.iter().map(|&context| len(chunk, context));
        row[0] = lens.max().unwrap_or(0);
    });
    *args.num_chunks = chunks.count as u32;
    if let Some(tokens) = args.chunk_tokens {
        *tokens = chunks.tokens as u32;
    }
    Ok(())
}

/// Fills a table of a row for each chunk.
fn fill(
    table: Option<&mut [i32]>,
    columns: usize,
    chunks: u64,
    mut row: impl FnMut(u64, &mut [i32]),
) {
    let Some(table) = table.filter(|_| columns > 0) else {
        return;
    };
    for (chunk, values) in (0..chunks).zip(table.chunks_exact_mut(columns)) {
        row(chunk, values);
    }
}

fn prefix_sums(sums: &mut [i32], values: impl Iterator<Item = i32>) {
    sums[0] = 0;
    for (n, value) in values.enumerate() {
        sums[n + 1] = sums[n] + value;
    }
}

/// FlashMLA's plan of a dense decode step.
#[derive(Debug)]
pub struct FlashMlaMetadata<'a> {
    /// Keys per request, those of this step included.
    pub seq_lens: &'a [i32],
    /// Multiprocessors of the device.
    pub num_sms: u32,
    /// Query rows of every request.
    pub q_len: u32,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// `[parts, 8]` or more.
    pub metadata: &'a mut [i32],
    /// `[requests + 1]` or more.
    pub num_splits: &'a mut [i32],
    /// The number of parts.
    pub num_parts: &'a mut u32,
}

/// Fills the outputs of [`FlashMlaMetadata`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn flashmla_metadata(args: FlashMlaMetadata<'_>) -> Result<()> {
    let num_sms = positive("num_sms", args.num_sms)?;
    let q_len = positive("q_len", args.q_len)?;
    let num_heads = positive("num_heads", args.num_heads)?;
    let num_kv_heads = positive("num_kv_heads", args.num_kv_heads)?;
    if num_heads % num_kv_heads != 0 {
        return Err(invalid(format!(
            "num_heads: {num_heads} is not accepted; a multiple of num_kv_heads ({num_kv_heads}) is"
        )));
    }
    not_negative("seq_lens", args.seq_lens)?;
    let parts = flashmla_parts(num_sms, q_len, num_heads, num_kv_heads);
    let numbers = parts as usize * FLASHMLA_RECORD;
    room("metadata_capacity", args.metadata.len(), numbers)?;
    let splits = args.seq_lens.len() + 1;
    room("num_splits_capacity", args.num_splits.len(), splits)?;
    let records = args.metadata[..numbers].as_chunks_mut().0;
    metadata(args.seq_lens, records, &mut args.num_splits[..splits]);
    *args.num_parts = parts as u32;
    Ok(())
}

/// Splits of keys as FastDeploy makes them.
#[derive(Debug)]
pub struct NumKvSplits<'a> {
    /// Keys per request.
    pub kv_lens: &'a [i32],
    /// Most splits; 0 means 32.
    pub max_splits: u32,
    /// `[requests]` or more: 1 in what is more.
    pub out: &'a mut [i32],
    /// As `out`: keys of a split, 0 in what is more.
    pub keys_per_split: Option<&'a mut [i32]>,
}

/// Fills the outputs of [`NumKvSplits`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn num_kv_splits(args: NumKvSplits<'_>) -> Result<()> {
    not_negative("kv_lens", args.kv_lens)?;
    room("capacity", args.out.len(), args.kv_lens.len())?;
    let most = match args.max_splits {
        0 => 32,
        most => most.min(i32::MAX as u32).into(),
    };
    let lens = || args.kv_lens.iter().map(|&len| len as u64);
    let splits = lens().map(|len| splits_of(len, most));
    for (out, splits) in args.out.iter_mut().zip(splits.chain(std::iter::repeat(1))) {
        *out = splits as i32;
    }
    if let Some(keys) = args.keys_per_split {
        let per_split = lens().map(|len| keys_per_split(len, splits_of(len, most)));
        for (out, keys) in keys.iter_mut().zip(per_split.chain(std::iter::repeat(0))) {
            *out = keys.min(i32::MAX as u64) as i32;
        }
    }
    Ok(())
}

/// A batch whose decodes come first, cut in two.
#[derive(Debug)]
pub struct SplitDecodesAndPrefills<'a> {
    /// Query rows per request.
    pub query_lens: &'a [i32],
    /// Most rows of a decode.
    pub decode_threshold: u32,
    /// All decodes have as many rows.
    pub uniform: bool,
    /// Decodes, prefills, rows of decodes, rows of prefills.
    pub out: &'a mut [i32],
}

/// Fills [`SplitDecodesAndPrefills::out`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn split_decodes_and_prefills(args: SplitDecodesAndPrefills<'_>) -> Result<()> {
    not_negative("query_lens", args.query_lens)?;
    room("capacity", args.out.len(), 4)?;
    let split = split_batch(args.query_lens, args.decode_threshold.into(), args.uniform);
    let rows = split.num_decode_tokens + split.num_prefill_tokens;
    if rows > i32::MAX as u64 {
        return Err(invalid(format!(
            "query_lens: {rows} rows in all are not accepted; up to {} are",
            i32::MAX
        )));
    }
    args.out[..4].copy_from_slice(&[
        split.num_decodes as i32,
        split.num_prefills as i32,
        split.num_decode_tokens as i32,
        split.num_prefill_tokens as i32,
    ]);
    Ok(())
}

fn ranks(world_size: u32, interleave: u32) -> Result<Ranks> {
    Ok(Ranks {
        world_size: positive("world_size", world_size)?,
        interleave: interleave.max(1).into(),
    })
}

pub(super) fn positive(name: &str, value: u32) -> Result<u64> {
    match value {
        0 => Err(invalid(format!("{name}: 0 is not accepted; 1 or more is"))),
        _ => Ok(value.into()),
    }
}

pub(super) fn not_negative(name: &str, values: &[i32]) -> Result<()> {
    match values.iter().position(|&value| value < 0) {
        None => Ok(()),
        Some(at) => Err(invalid(format!(
            "{name}[{at}]: {} is not accepted; 0 or more is",
            values[at]
        ))),
    }
}

pub(super) fn room(name: &str, is: usize, wanted: usize) -> Result<()> {
    match is >= wanted {
        true => Ok(()),
        false => Err(invalid(format!(
            "{name}: {is} is not accepted; {wanted} or more is"
        ))),
    }
}

pub(super) fn invalid(message: String) -> Error {
    Error::InvalidArgument(message)
}
