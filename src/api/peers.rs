//! Decisions of other libraries' schedulers as pure functions of numbers on the host: the checks, and the calls of `plan`.

use super::figures::{invalid, not_negative, positive, room};
use crate::error::Result;
use crate::plan::{
    BatchOrder, Machine, balanced_kv_splits, decodes_extends_prefills, decodes_first, takes_cascade,
};

/// Splits of keys as SGLang makes them.
#[derive(Debug)]
pub struct BalancedKvSplits<'a> {
    /// Keys per request, 1 or more.
    pub seq_lens: &'a [i32],
    /// Rows of each request; 0 means 1.
    pub num_group: u32,
    /// Query heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Multiprocessors; 0: every request gets the most splits.
    pub num_sms: u32,
    /// Most splits; 0 means 8.
    pub max_splits: u32,
    /// Every request gets the most splits.
    pub is_static: bool,
    /// `[requests, num_group]` or more.
    pub out: &'a mut [i32],
}

/// Fills [`BalancedKvSplits::out`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn balanced_splits(args: BalancedKvSplits<'_>) -> Result<()> {
    let machine = machine(args.num_heads, args.num_kv_heads, args.num_sms)?;
    if let Some(at) = args.seq_lens.iter().position(|&len| len < 1) {
        return Err(invalid(format!(
            "seq_lens[{at}]: {} is not accepted; 1 or more is",
            args.seq_lens[at]
        )));
    }
    let num_group = args.num_group.max(1) as usize;
    let rows = args.seq_lens.len().saturating_mul(num_group);
    room("capacity", args.out.len(), rows)?;
    let most = match args.max_splits {
        0 => 8,
        most => most.min(i32::MAX as u32).into(),
    };
    if args.is_static || args.num_sms == 0 {
        args.out[..rows].fill(most as i32);
        return Ok(());
    }
    let splits = balanced_kv_splits(args.seq_lens, num_group as u64, machine, most);
    for (row, splits) in args.out.chunks_exact_mut(num_group).zip(splits) {
        row.fill(splits as i32);
    }
    Ok(())
}

/// Whether vLLM takes a cascade.
#[derive(Debug)]
pub struct UseCascade<'a> {
    /// Keys that all requests share.
    pub common_prefix_len: u32,
    /// Query rows per request.
    pub query_lens: &'a [i32],
    /// Query heads.
    pub num_heads: u32,
    /// KV heads.
    pub num_kv_heads: u32,
    /// Multiprocessors.
    pub num_sms: u32,
    /// ALiBi, a window, local attention or context parallelism.
    pub is_ruled_out: bool,
    /// 1: yes.
    pub out: &'a mut u32,
}

/// Fills [`UseCascade::out`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn use_cascade(args: UseCascade<'_>) -> Result<()> {
    let machine = machine(args.num_heads, args.num_kv_heads, args.num_sms)?;
    positive("num_sms", args.num_sms)?;
    not_negative("query_lens", args.query_lens)?;
    let takes = takes_cascade(args.common_prefix_len.into(), args.query_lens, machine);
    *args.out = u32::from(takes && !args.is_ruled_out);
    Ok(())
}

/// A batch to be put in the order that vLLM's backends want.
#[derive(Debug)]
pub struct ReorderBatch<'a> {
    /// Query rows per request.
    pub query_lens: &'a [i32],
    /// Tokens in the cache before the new ones; `None`: the order of decodes and prefills.
    pub context_lens: Option<&'a [i32]>,
    /// Most rows of a decode.
    pub decode_threshold: u32,
    /// `[requests]` or more: where each place's request stood.
    pub order: &'a mut [i32],
    /// Pairs of places to be swapped.
    pub swaps: Option<&'a mut [i32]>,
    /// The number of pairs.
    pub num_swaps: &'a mut u32,
}

/// Fills the outputs of [`ReorderBatch`].
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn reorder_batch(args: ReorderBatch<'_>) -> Result<()> {
    let (lens, threshold) = (args.query_lens, args.decode_threshold.into());
    not_negative("query_lens", lens)?;
    room("order_capacity", args.order.len(), lens.len())?;
    let BatchOrder { order, swaps } = match args.context_lens {
        None => decodes_first(lens, threshold),
        Some(contexts) => {
            not_negative("context_lens", contexts)?;
            decodes_extends_prefills(lens, contexts, threshold)
        }
    };
    if let Some(out) = args.swaps {
        room("swaps_capacity", out.len(), 2 * swaps.len())?;
        out[..2 * swaps.len()].copy_from_slice(swaps.as_flattened());
    }
    args.order[..lens.len()].copy_from_slice(&order);
    *args.num_swaps = swaps.len() as u32;
    Ok(())
}

fn machine(num_heads: u32, num_kv_heads: u32, num_sms: u32) -> Result<Machine> {
    let (num_heads, num_kv_heads) = (
        positive("num_heads", num_heads)?,
        positive("num_kv_heads", num_kv_heads)?,
    );
    if num_heads % num_kv_heads != 0 {
        return Err(invalid(format!(
            "num_heads: {num_heads} is not accepted; a multiple of num_kv_heads ({num_kv_heads}) is"
        )));
    }
    Ok(Machine {
        num_heads,
        num_kv_heads,
        num_sms: num_sms.into(),
    })
}
