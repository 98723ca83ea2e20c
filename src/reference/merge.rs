//! The oracle's merges of attention states.

use super::{from_base, in_base};
use crate::problem::{LogBase, MergeArgs, MergeStatesArgs, MergeVarlenArgs};
use crate::tensor::Tensor;

pub(super) fn merge(args: &MergeArgs) {
    let output = Output {
        v: args.v_out,
        s: args.s_out,
        base: args.lse_base,
        o_scale: args.o_scale,
    };
    for token in 0..args.v_out.extent(0) {
        if args.mask.is_some_and(|mask| mask.get(&[token]) == 0.0) {
            continue;
        }
        for head in 0..args.v_out.extent(1) {
            let at = [token, head];
            let mut parts = vec![part(&args.v_b, &args.s_b, &at)];
            if token < args.num_tokens_with_a() {
                parts.push(part(&args.v_a, &args.s_a, &at));
            }
            output.write(at, &parts);
        }
    }
}

pub(super) fn merge_states(args: &MergeStatesArgs) {
    let output = Output {
        v: args.v_out,
        s: args.s_out,
        base: args.lse_base,
        o_scale: args.o_scale,
    };
    for token in 0..args.v_out.extent(0) {
        for head in 0..args.v_out.extent(1) {
            let parts = (0..args.v.extent(1)).map(|n| part(&args.v, &args.s, &[token, n, head]));
            output.write([token, head], &parts.collect::<Vec<_>>());
        }
    }
}

pub(super) fn merge_varlen(args: &MergeVarlenArgs) {
    let output = Output {
        v: args.v_out,
        s: args.s_out,
        base: args.lse_base,
        o_scale: args.o_scale,
    };
    for token in 0..args.v_out.extent(0) {
        let states = args.indptr.integer(&[token])..args.indptr.integer(&[token + 1]);
        for head in 0..args.v_out.extent(1) {
            let parts = states.clone().map(|n| part(&args.v, &args.s, &[n, head]));
            output.write([token, head], &parts.collect::<Vec<_>>());
        }
    }
}

/// One attention state of one row and head.
struct Part {
    lse: f32,
    values: Vec<f32>,
}

fn part(v: &Tensor, s: &Tensor, at: &[i64]) -> Part {
    let dim = v.extent(v.rank() - 1);
    Part {
        lse: s.get(at),
        values: (0..dim).map(|d| v.get(&[at, &[d]].concat())).collect(),
    }
}

/// Where merged states go.
struct Output {
    v: Tensor,
    s: Option<Tensor>,
    base: LogBase,
    o_scale: f32,
}

impl Output {
    /// Writes `Σ w_i v_i / Σ w_i` with `w_i = exp(lse_i - max)`, and `max + ln Σ w_i`. An lse of +inf or NaN
    /// counts as empty (FlashAttention-2 marks empty rows with +inf); only empty parts give 0 and -inf.
    fn write(&self, [token, head]: [i64; 2], parts: &[Part]) {
        let lse: Vec<f64> = parts
            .iter()
            .map(|part| match part.lse < f32::INFINITY {
                true => from_base(part.lse, self.base),
                false => f64::NEG_INFINITY,
            })
            .collect();
        let max = lse.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = lse
            .iter()
            .map(|&l| match max == f64::NEG_INFINITY {
                true => 0.0,
                false => (l - max).exp(),
            })
            .collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..self.v.extent(2) {
            let total: f64 = parts
                .iter()
                .zip(&weights)
                .filter(|&(_, &weight)| weight > 0.0)
                .map(|(part, weight)| weight * f64::from(part.values[d as usize]))
                .sum();
            let value = if sum > 0.0 { total / sum } else { 0.0 };
            let value = value / f64::from(self.o_scale);
            self.v.set(&[token, head, d], value as f32);
        }
        if let Some(s) = self.s {
            let merged = match sum > 0.0 {
                true => max + sum.ln(),
                false => f64::NEG_INFINITY,
            };
            s.set(&[token, head], in_base(merged, self.base));
        }
    }
}
