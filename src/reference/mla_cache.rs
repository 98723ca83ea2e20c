//! The oracle's operators on a cache of latent records: element by element, in float64.

use crate::dtype::{DType, F8E4M3_MAX};
use crate::error::{Error, Result};
use crate::problem::{
    DS_MLA_BLOCK, LatentRecords, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary,
};
use crate::tensor::{Integers, Tensor};

pub(super) fn append(args: &MlaAppendArgs<LatentRecords>) -> Result<()> {
    let slots = integers("slot_mapping", &args.slot_mapping)?;
    let page_size = args.cache.latent.extent(1);
    for token in 0..slots.len() {
        let (row, slot) = (token as i64, slots.get(token));
        let mut rope = args.rope.map_or(Vec::new(), |rope| values(&rope, &[row]));
        if let Some(rotary) = &args.rotary {
            let position = integers("positions", &rotary.positions)?.get(token);
            rope = rotate_token(rotary, args.latent.dtype(), &rope, row, position);
        }
        if slot < 0 {
            continue;
        }
        let at = [slot / page_size, slot % page_size];
        let latent = values(&args.latent, &[row]);
        match args.cache.scales {
            None => store(&args.cache.latent, at, &latent, args.k_scale),
            Some(scales) => store_blocks(&args.cache.latent, &scales, at, &latent),
        }
        if let Some(to) = args.cache.rope {
            store(&to, at, &rope, args.k_scale);
        }
    }
    Ok(())
}

/// Rotates the rows of a token. Gives that of `rope`, as the tokens' type holds it.
fn rotate_token(
    rotary: &Rotary,
    dtype: DType,
    rope: &[f32],
    token: i64,
    position: i64,
) -> Vec<f32> {
    if let (Some(q), Some(out)) = (rotary.q_rope, rotary.q_rope_out) {
        for head in 0..q.extent(1) {
            let row = rotated(rotary, &values(&q, &[token, head]), position);
            for (d, value) in (0..).zip(row) {
                out.set(&[token, head, d], value);
            }
        }
    }
    let row = rotated(rotary, rope, position);
    if let Some(out) = rotary.rope_out {
        for (d, value) in (0..).zip(&row) {
            out.set(&[token, d], *value);
        }
    }
    row.iter().map(|value| dtype.rounded(*value)).collect()
}

fn rotated(rotary: &Rotary, row: &[f32], position: i64) -> Vec<f32> {
    let pairs = row.len() / 2;
    let angle = |at: usize| f64::from(rotary.cos_sin_cache.get(&[position, at as i64]));
    let mut rotated = row.to_vec();
    for pair in 0..pairs {
        let (x, y) = match rotary.is_interleaved {
            true => (2 * pair, 2 * pair + 1),
            false => (pair, pair + pairs),
        };
        let (cos, sin) = (angle(pair), angle(pairs + pair));
        let (a, b) = (f64::from(row[x]), f64::from(row[y]));
        rotated[x] = (a * cos - b * sin) as f32;
        rotated[y] = (b * cos + a * sin) as f32;
    }
    rotated
}

/// Plain elements: as they are, or fp8 after a division.
fn store(to: &Tensor, [page, at]: [i64; 2], row: &[f32], k_scale: f32) {
    for (d, value) in (0..).zip(row) {
        let divisor = if to.dtype().is_fp8() { k_scale } else { 1.0 };
        to.set(&[page, at, d], value / divisor);
    }
}

/// fp8 with a scale for each block, which maps its largest magnitude to the largest e4m3.
fn store_blocks(to: &Tensor, scales: &Tensor, [page, at]: [i64; 2], row: &[f32]) {
    for (n, block) in (0..).zip(row.chunks(DS_MLA_BLOCK)) {
        // `f32::max` leaves NaN out.
        let largest = block.iter().fold(0f32, |max, x| max.max(x.abs()));
        let scale = (largest / F8E4M3_MAX).max(f32::MIN_POSITIVE);
        scales.set(&[page, at, n], scale);
        for (d, value) in (n * DS_MLA_BLOCK as i64..).zip(block) {
            to.set(&[page, at, d], value / scale);
        }
    }
}

pub(super) fn gather(args: &MlaGatherArgs<LatentRecords>) -> Result<()> {
    let page_size = args.cache.latent.extent(1);
    for b in 0..args.cu_seq_lens.extent(0) - 1 {
        let first = args.cu_seq_lens.integer(&[b]);
        let start = args.seq_starts.map_or(0, |starts| starts.integer(&[b]));
        for row in first..args.cu_seq_lens.integer(&[b + 1]) {
            let token = start + row - first;
            let page = match args.pages {
                RecordPages::Table(table) => table.integer(&[b, token / page_size]),
                RecordPages::Csr { indptr, indices } => {
                    indices.integer(&[indptr.integer(&[b]) + token / page_size])
                }
            };
            load_record(args, row, [page, token % page_size]);
        }
    }
    Ok(())
}

fn load_record(args: &MlaGatherArgs<LatentRecords>, row: i64, [page, at]: [i64; 2]) {
    for (d, value) in (0..).zip(values(&args.cache.latent, &[page, at])) {
        let scale = match args.cache.scales {
            Some(scales) => scales.get(&[page, at, d / DS_MLA_BLOCK as i64]),
            None => args.k_scale,
        };
        args.dst.set(&[row, d], value * scale);
    }
    let (Some(rope), Some(dst)) = (args.cache.rope, args.dst_rope) else {
        return;
    };
    for (d, value) in (0..).zip(values(&rope, &[page, at])) {
        dst.set(&[row, d], value * args.k_scale);
    }
}

/// A row along the last dimension.
pub(super) fn values(tensor: &Tensor, at: &[i64]) -> Vec<f32> {
    let last = tensor.extent(tensor.rank() - 1);
    (0..last)
        .map(|d| tensor.get(&[at, &[d]].concat()))
        .collect()
}

pub(super) fn integers<'a>(name: &str, tensor: &'a Tensor) -> Result<Integers<'a>> {
    tensor
        .as_integers()
        .ok_or_else(|| Error::Internal(format!("{name} passed its checks and is no host integer")))
}
