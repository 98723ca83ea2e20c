//! The oracle's norm, RoPE and append: element by element, in float64.

use super::mla_cache::{integers, values};
use super::stored;
use crate::error::Result;
use crate::problem::{Angles, Frequencies, Norm, Rope, RopeAppendArgs};
use crate::tensor::Tensor;
use std::f64::consts::TAU;

pub(super) fn append(args: &RopeAppendArgs) -> Result<()> {
    let append = &args.append;
    let slots = integers("slot_mapping", &append.slot_mapping)?;
    let page_size = append.k_cache.extent(1);
    for row in 0..args.num_rows() {
        let turned = |heads: &Tensor, head, weight: &Option<Tensor>| -> Result<Vec<f64>> {
            let x = values(heads, &[row, head]);
            let x = normalised(x.into_iter().map(f64::from).collect(), weight, &args.norm);
            match &args.rope {
                None => Ok(x),
                Some(rope) => rotated(rope, x, row),
            }
        };
        if let (Some(q), Some(out)) = (args.q, args.q_out) {
            for head in 0..q.extent(1) {
                set(&out, [row, head], &turned(&q, head, &args.norm.q_weight)?);
            }
        }
        let token = row as usize;
        if token >= slots.len() {
            continue;
        }
        let slot = slots.get(token);
        let at = [slot / page_size, slot % page_size];
        for head in 0..append.key.extent(1) {
            let key = turned(&append.key, head, &args.norm.k_weight)?;
            if let Some(out) = args.key_out {
                set(&out, [row, head], &key);
            }
            if slot < 0 {
                continue;
            }
            let key: Vec<f32> = key.into_iter().map(|x| x as f32).collect();
            let value = values(&append.value, &[row, head]);
            let [keys, of_values] = append.caches();
            let [page, slot] = at;
            stored::store(&keys, &key, [page, slot, head], append.k_scale);
            stored::store(&of_values, &value, [page, slot, head], append.v_scale);
        }
    }
    Ok(())
}

fn set(out: &Tensor, [row, head]: [i64; 2], values: &[f64]) {
    for (d, value) in (0..).zip(values) {
        out.set(&[row, head, d], *value as f32);
    }
}

fn normalised(x: Vec<f64>, weight: &Option<Tensor>, norm: &Norm) -> Vec<f64> {
    let Some(weight) = weight else { return x };
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let rms = (mean + f64::from(norm.eps)).sqrt();
    let weight = |d| f64::from(weight.get(&[d]));
    (0..).zip(x).map(|(d, x)| x / rms * weight(d)).collect()
}

fn rotated(rope: &Rope, mut x: Vec<f64>, row: i64) -> Result<Vec<f64>> {
    let mut position = integers("positions", &rope.positions)?.get(row as usize);
    if let Some(offsets) = &rope.position_offsets {
        position += integers("position_offsets", offsets)?.get(row as usize);
    }
    let pairs = rope.rotary_dim as usize / 2;
    for pair in 0..pairs {
        let (sin, cos) = match &rope.angles {
            Angles::Table(table) => {
                let of = |plane| f64::from(table.get(&[plane, position, pair as i64]));
                (of(1), of(0))
            }
            Angles::Computed(all) => (position as f64 * frequency(all, pair, pairs)).sin_cos(),
        };
        let (a, b) = match rope.is_interleaved {
            true => (2 * pair, 2 * pair + 1),
            false => (pair, pair + pairs),
        };
        (x[a], x[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
    }
    Ok(x)
}

/// Radians per position. Llama 3.1 knows pairs by their wavelength.
fn frequency(all: &Frequencies, pair: usize, pairs: usize) -> f64 {
    let frequency = f64::from(all.theta).powf(-(pair as f64) / pairs as f64);
    let divided = frequency / f64::from(all.scale);
    let Some(llama3) = all.llama3 else {
        return divided;
    };
    let (wavelength, context) = (TAU / frequency, f64::from(llama3.old_context_len));
    let [low, high] = [llama3.low_freq_factor, llama3.high_freq_factor].map(f64::from);
    if wavelength < context / high {
        frequency
    } else if wavelength > context / low {
        divided
    } else {
        let smooth = (context / wavelength - low) / (high - low);
        (1.0 - smooth) * divided + smooth * frequency
    }
}
