//! The oracle's operators of decode context parallelism.

use super::mla_cache::values;
use super::{from_base, in_base};
use crate::error::Result;
use crate::problem::{CpCorrectArgs, CpReorderArgs};

pub(super) fn reorder(args: &CpReorderArgs) -> Result<()> {
    let world_size = args.gathered.extent(0);
    let round = world_size * i64::from(args.interleave);
    for b in 0..args.context_lens.extent(0) {
        let len = args.context_lens.integer(&[b]);
        let first = args.cu_padded_lens.integer(&[b]);
        let padded = args.cu_padded_lens.integer(&[b + 1]) - first;
        let mut row = args.cu_seq_lens.integer(&[b]);
        for rank in 0..world_size {
            // One by one: the tokens that are the rank's.
            let is_own = |token: &i64| token % round / i64::from(args.interleave) == rank;
            let local = (0..len).filter(is_own).count() as i64;
            let held = (local - i64::from(args.local_start)).clamp(0, padded);
            for from in first..first + held {
                args.dst.copy_row(&[row], &args.gathered, &[rank, from]);
                row += 1;
            }
        }
    }
    Ok(())
}

pub(super) fn correct(args: &CpCorrectArgs) {
    let o = &args.o;
    for token in 0..o.extent(0) {
        for head in 0..o.extent(1) {
            let lse = |rank: i64| match args.lse_all.get(&[rank, token, head]) {
                lse if lse < f32::INFINITY => from_base(lse, args.lse_base),
                // NaN and +inf.
                _ => f64::NEG_INFINITY,
            };
            let ranks = 0..args.lse_all.extent(0);
            let max = ranks.clone().map(lse).fold(f64::NEG_INFINITY, f64::max);
            let all = match max == f64::NEG_INFINITY {
                true => max,
                false => max + ranks.map(|rank| (lse(rank) - max).exp()).sum::<f64>().ln(),
            };
            let own = lse(args.rank.into());
            let share = if own == f64::NEG_INFINITY {
                0.0
            } else {
                (own - all).exp()
            };
            for (d, value) in (0..).zip(values(o, &[token, head])) {
                let scaled = if share == 0.0 {
                    0.0
                } else {
                    f64::from(value) * share
                };
                args.o_out.set(&[token, head, d], scaled as f32);
            }
            if let Some(out) = args.lse_out {
                out.set(&[token, head], in_base(all, args.lse_base));
            }
        }
    }
}
