//! The oracle's rows of a cache: what an element of a row is, and how a row is written, in every format.

use super::{head_scale, mla_cache::values};
use crate::dtype::{DType, F8E4M3_MAX};
use crate::problem::{CacheForm, CacheFormat, RowTensors};
use crate::tensor::Tensor;

/// Largest int8 that is stored, and largest e2m1.
const MAX_I8: f64 = 127.0;
const MAX_E2M1: f64 = 6.0;
/// The least scale that an append computes for a token and head: vLLM's.
const LEAST_SCALE: f32 = 1e-6;

/// The numbers of e2m1, by their bits without the sign.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Element `[page, slot, head, d]`, but for factors of the whole head.
pub(super) fn element(cache: &RowTensors, index: [i64; 4]) -> f64 {
    let [page, slot, head, d] = index;
    let scale = |at: &[i64]| f64::from(cache.scales.expect("checked scales").get(at));
    match cache.format.form() {
        CacheForm::Plain => f64::from(cache.rows.get(&index)),
        CacheForm::PackedKeys => f64::from(cache.rows.get(&place(cache, index))),
        CacheForm::TokenHeadScales => {
            f64::from(cache.rows.get(&index)) * scale(&[page, slot, head])
        }
        CacheForm::ChannelScales => f64::from(cache.rows.get(&index)) * scale(&[head, d]),
        CacheForm::ChannelZeroPoints => {
            let zero = cache.zero_points.expect("checked zero points");
            // Two's complement.
            let number = match nibble(cache, index) {
                bits @ 0..8 => i32::from(bits),
                bits => i32::from(bits) - 16,
            };
            (f64::from(number) - f64::from(zero.get(&[head, d]))) * scale(&[head, d])
        }
        CacheForm::Nvfp4 => {
            let bits = nibble(cache, index);
            let magnitude = E2M1[usize::from(bits & 7)];
            let value = if bits & 8 == 0 { magnitude } else { -magnitude };
            value * scale(&[page, slot, head, d / i64::from(CacheFormat::NVFP4_BLOCK)])
        }
    }
}

/// Writes a row of a token and head. `scale` is that of the whole cache.
pub(super) fn store(cache: &RowTensors, row: &[f32], at: [i64; 3], scale: f32) {
    let [page, slot, head] = at;
    let form = cache.format.form();
    let divisor = match form {
        CacheForm::Plain | CacheForm::PackedKeys if cache.format.is_scaled() => {
            (f64::from(scale) * head_scale(cache.scales, head)) as f32
        }
        _ => scale,
    };
    let row: Vec<f32> = row.iter().map(|x| x / divisor).collect();
    let set = |d: i64, value: f32| {
        cache.rows.set(&place(cache, [page, slot, head, d]), value);
    };
    let of_channel = |tensor: &Option<Tensor>, d: i64| tensor.map(|all| all.get(&[head, d]));
    match form {
        CacheForm::Plain | CacheForm::PackedKeys => (0..).zip(row).for_each(|(d, x)| set(d, x)),
        CacheForm::TokenHeadScales => {
            let most = match cache.format.element {
                DType::I8 => MAX_I8 as f32,
                _ => F8E4M3_MAX,
            };
            let scale = (largest(&row) / most).max(LEAST_SCALE);
            cache.scales.expect("checked scales").set(&at, scale);
            for (d, x) in (0..).zip(row) {
                set(d, (x / scale).clamp(-most, most));
            }
        }
        CacheForm::ChannelScales => {
            for (d, x) in (0..).zip(row) {
                let scale = of_channel(&cache.scales, d).expect("checked scales");
                set(d, (x / scale).clamp(-MAX_I8 as f32, MAX_I8 as f32));
            }
        }
        CacheForm::ChannelZeroPoints => {
            let numbers = (0..).zip(row).map(|(d, x)| {
                let scale = of_channel(&cache.scales, d).expect("checked scales");
                let zero = of_channel(&cache.zero_points, d).expect("checked zero points");
                let number = (x / scale + zero).round_ties_even().clamp(-8.0, 7.0);
                (number as i8 & 15) as u8
            });
            store_pairs(cache, at, &numbers.collect::<Vec<u8>>());
        }
        CacheForm::Nvfp4 => {
            let scales = cache.scales.expect("checked scales");
            let mut numbers = Vec::new();
            for (n, block) in (0..).zip(row.chunks(CacheFormat::NVFP4_BLOCK as usize)) {
                let at = [page, slot, head, n];
                scales.set(&at, largest(block) / MAX_E2M1 as f32);
                let scale = scales.get(&at);
                numbers.extend(block.iter().map(|x| match scale {
                    0.0 => 0,
                    scale => e2m1(x / scale),
                }));
            }
            store_pairs(cache, at, &numbers);
        }
    }
}

/// The largest magnitude but NaN.
fn largest(row: &[f32]) -> f32 {
    // `f32::max` leaves NaN out.
    row.iter().fold(0f32, |max, x| max.max(x.abs()))
}

/// The bits of the nearest e2m1, of two the even one; 0 for NaN.
fn e2m1(x: f32) -> u8 {
    if x.is_nan() {
        return 0;
    }
    let magnitude = f64::from(x.abs()).min(MAX_E2M1);
    let distance = |bits: &u8| (E2M1[usize::from(*bits)] - magnitude).abs();
    let nearest = (0..8u8).min_by(|a, b| {
        let by_distance = distance(a).total_cmp(&distance(b));
        by_distance.then((a & 1).cmp(&(b & 1)))
    });
    nearest.unwrap_or(0) | if x.is_sign_negative() { 8 } else { 0 }
}

/// The four bits of an element.
fn nibble(cache: &RowTensors, [page, slot, head, d]: [i64; 4]) -> u8 {
    let byte = cache.rows.get(&[page, slot, head, d / 2]) as u8;
    if d % 2 == 0 { byte & 15 } else { byte >> 4 }
}

fn store_pairs(cache: &RowTensors, [page, slot, head]: [i64; 3], bits: &[u8]) {
    for (at, pair) in (0..).zip(bits.chunks(2)) {
        let byte = pair[0] | pair[1] << 4;
        cache.rows.set(&[page, slot, head, at], byte.into());
    }
}

/// The index of an element in the tensor.
fn place(cache: &RowTensors, [page, slot, head, d]: [i64; 4]) -> Vec<i64> {
    match cache.rows.rank() {
        5 => {
            let x = cache.rows.extent(4);
            vec![page, slot, head, d / x, d % x]
        }
        _ => vec![page, slot, head, d],
    }
}

/// Writes the rows of a token.
pub(super) fn store_token(
    cache: &RowTensors,
    (source, token): (&Tensor, i64),
    [page, slot]: [i64; 2],
    scale: f32,
) {
    for head in 0..source.extent(1) {
        let row = values(source, &[token, head]);
        store(cache, &row, [page, slot, head], scale);
    }
}
