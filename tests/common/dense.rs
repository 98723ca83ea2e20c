//! Attention over plain dense arrays in float64: a second reading of the contract, to check the oracle
//! with. It knows no pages, strides or tensors, and shares no code with the library.

use super::problem::{Alibi, MaskKind, Problem};
use super::values::{ScaleOf, Values};
use folio::problem::{CacheForm, MaskColumns};

/// What one query row of one head must come to.
#[derive(Debug, Clone)]
pub struct Row {
    /// Before the division by `o_scale`.
    pub o: Vec<f64>,
    /// `Σ p |v|` per element: what the errors of a weighted sum are proportional to.
    pub magnitude: Vec<f64>,
    /// What weights that are denormal in fp16 add to the error per element, where weights are rounded to fp16: half the
    /// least fp16 number, or the weight itself, times `|v|`.
    pub denormal_weights: Vec<f64>,
    /// What weights that are denormal in float32 add to a sum, per element: all that is lost where they are 0.
    pub flushed_weights: Vec<f64>,
    /// What independent errors of the weights add to the row's norm, in parts of a weight: see [`spread`].
    pub spread: f64,
    /// Keys that the row sees: the terms of its sums.
    pub keys: usize,
    /// In base e.
    pub lse: f64,
    /// The largest scaled product before cap and masks: what the error of its scale is proportional to.
    pub largest_score: f64,
    /// The largest `Σ |q k|` of those: what the error of summing them up is proportional to (Higham, Accuracy
    /// and Stability of Numerical Algorithms, §3.1). The product itself may be much smaller.
    pub score_magnitude: f64,
}

/// Every row of the batch, `[token][head]`.
pub fn attention(problem: &Problem) -> Vec<Vec<Row>> {
    let mut rows = Vec::with_capacity(problem.num_tokens());
    for (b, request) in problem.requests.iter().enumerate() {
        let mut heads: Vec<Vec<Row>> = vec![Vec::new(); request.qo_len as usize];
        for kv_head in 0..problem.num_kv_heads as usize {
            let memory = KvHead::of(problem, b, kv_head);
            for g in 0..problem.group_size as usize {
                let head = kv_head * problem.group_size as usize + g;
                for (i, row) in heads.iter_mut().enumerate() {
                    row.push(memory.attend(problem, b, i, head));
                }
            }
        }
        rows.extend(heads);
    }
    rows
}

/// Keys and values of one KV head of one request.
struct KvHead {
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    /// Of keys in the cache, and of those beside it.
    k_scales: [f64; 2],
    v_scales: [f64; 2],
    /// Keys in the cache.
    cached: usize,
}

impl KvHead {
    fn of(problem: &Problem, b: usize, head: usize) -> KvHead {
        let (values, layer) = (Values::of(problem), &problem.layer);
        let kv_len = problem.requests[b].kv_len as usize;
        let (dims_k, dims_v) = (problem.head_dim_qk as usize, problem.head_dim_vo as usize);
        let [q_scales, k_scales, v_scales] = [ScaleOf::Query, ScaleOf::Key, ScaleOf::Value]
            .map(|of| f64::from(values.scale(of, b, head)));
        let one_if_zero = |scale: f32| if scale == 0.0 { 1.0 } else { f64::from(scale) };
        let sm_scale = match layer.sm_scale {
            0.0 => 1.0 / f64::from(problem.head_dim_qk).sqrt(),
            stated => stated.into(),
        };
        KvHead {
            k: (0..kv_len)
                .map(|j| (0..dims_k).map(|d| values.k(b, j, head, d)).collect())
                .collect(),
            v: (0..kv_len)
                .map(|j| (0..dims_v).map(|d| values.v(b, j, head, d)).collect())
                .collect(),
            k_scales: [one_if_zero(layer.k_scale) * k_scales, 1.0]
                .map(|scale| sm_scale * one_if_zero(layer.q_scale) * q_scales * scale),
            v_scales: [one_if_zero(layer.v_scale) * v_scales, 1.0],
            cached: problem.cached_len(b) as usize,
        }
    }

    fn k_scale(&self, j: usize) -> f64 {
        self.k_scales[usize::from(j >= self.cached)]
    }

    fn v_scale(&self, j: usize) -> f64 {
        self.v_scales[usize::from(j >= self.cached)]
    }

    fn attend(&self, problem: &Problem, b: usize, i: usize, head: usize) -> Row {
        let (values, layer) = (Values::of(problem), &problem.layer);
        let q: Vec<f64> = (0..problem.head_dim_qk as usize)
            .map(|d| values.q(b, i, head, d))
            .collect();
        let (mut largest_score, mut score_magnitude) = (0f64, 0f64);
        // Logits of all keys, -inf where hidden; the sink comes last and has no value.
        let mut logits: Vec<f64> = (0..self.k.len())
            .map(|j| {
                if !is_visible(problem, b, i, j) {
                    return f64::NEG_INFINITY;
                }
                let score = sum_of(&q, &self.k[j], |q, k| q * k) * self.k_scale(j);
                largest_score = largest_score.max(score.abs());
                let magnitude = sum_of(&q, &self.k[j], |q, k| (q * k).abs());
                score_magnitude = score_magnitude.max(magnitude * self.k_scale(j).abs());
                let distance = alibi(problem, b, i, j, head);
                capped(score, layer.logits_soft_cap.into()) + distance + values.bias(b, i, j, head)
            })
            .collect();
        let keys = logits.iter().filter(|s| **s > f64::NEG_INFINITY).count();
        if layer.sinks {
            logits.push(values.sink(head).into());
        }
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, larger);
        let mut row = Row {
            o: vec![0.0; problem.head_dim_vo as usize],
            magnitude: vec![0.0; problem.head_dim_vo as usize],
            denormal_weights: vec![0.0; problem.head_dim_vo as usize],
            flushed_weights: vec![0.0; problem.head_dim_vo as usize],
            spread: 0.0,
            keys,
            lse: f64::NEG_INFINITY,
            largest_score,
            score_magnitude,
        };
        if top == f64::NEG_INFINITY {
            return row;
        }
        row.lse = top + logits.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
        for (j, (v, logit)) in self.v.iter().zip(&logits).enumerate() {
            if *logit == f64::NEG_INFINITY {
                continue;
            }
            let weight = (logit - row.lse).exp() * self.v_scale(j);
            for (d, v) in v.iter().enumerate() {
                row.o[d] += weight * v;
                row.magnitude[d] += (weight * v).abs();
            }
            let relative = (logit - top).exp();
            if relative < f32::MIN_POSITIVE.into() {
                for (d, v) in v.iter().enumerate() {
                    row.flushed_weights[d] += (weight * v).abs();
                }
            }
            let least_normal = LEAST_NORMAL_FP16 * weight_spread(problem);
            if relative < least_normal {
                let error = relative.min(least_normal * 2f64.powi(-11))
                    * (top - row.lse).exp()
                    * self.v_scale(j);
                for (d, v) in v.iter().enumerate() {
                    row.denormal_weights[d] += (error * v).abs();
                }
            }
        }
        let shares = logits.iter().map(|logit| (logit - row.lse).exp());
        let terms = shares.zip(&self.v).enumerate();
        row.spread = spread(
            &row.o,
            terms.map(|(j, (share, v))| (share, self.v_scale(j), v)),
        );
        row
    }
}

/// Of a sum `o` of values with their shares and scales: `√(Σ p² |v - o|² / (1 - Σ p²))`. Shares that are wrong by the parts δ move
/// `o` by `Σ p δ (v - o)`, since their sum is as wrong. Of equal shares of orthogonal values, the worst signs of δ make that δ times
/// this, and of two shares no more than it.
pub fn spread<'a>(o: &[f64], terms: impl Iterator<Item = (f64, f64, &'a Vec<f64>)>) -> f64 {
    let (mut moved, mut squares) = (0.0, 0.0);
    for (share, scale, v) in terms.filter(|term| term.0 != 0.0) {
        let distance = sum_of(o, v, |o, v| (scale * v - o).powi(2));
        moved += share * share * distance;
        squares += share * share;
    }
    match squares < 1.0 {
        true => (moved / (1.0 - squares)).sqrt(),
        false => 0.0,
    }
}

/// Weights below this, relative to the row's largest, are denormal in fp16: their rounding has an absolute error.
const LEAST_NORMAL_FP16: f64 = 6.103515625e-5;

/// Weights that take over scales of tokens are in units of the largest scale, rounded up to a power of two: at most twice
/// the largest over the least, which `stored` draws from 0.6 to 1.6.
fn weight_spread(problem: &Problem) -> f64 {
    match problem.form {
        _ if problem.rounds_rows => 1.0,
        CacheForm::TokenHeadScales => 2.0 * 1.6 / 0.6,
        _ => 1.0,
    }
}

/// NaN if either is.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() {
        return f64::NAN;
    }
    a.max(b)
}

/// The sum of `term` over the elements of `a` and those of `b` beside them. In eight sums, which one CPU core adds up faster than
/// one.
pub fn sum_of(a: &[f64], b: &[f64], term: impl Fn(f64, f64) -> f64) -> f64 {
    let (whole, rest) = a.as_chunks::<8>();
    let (b_whole, b_rest) = b[..a.len()].as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in whole.iter().zip(b_whole) {
        for lane in 0..8 {
            sums[lane] += term(a[lane], b[lane]);
        }
    }
    let rest = rest.iter().zip(b_rest).map(|(a, b)| term(*a, *b));
    sums.iter().sum::<f64>() + rest.sum::<f64>()
}

fn capped(score: f64, cap: f64) -> f64 {
    if cap > 0.0 {
        cap * (score / cap).tanh()
    } else {
        score
    }
}

fn alibi(problem: &Problem, b: usize, i: usize, j: usize, head: usize) -> f64 {
    let slope = f64::from(Values::of(problem).alibi_slope(b, head));
    let distance = position(problem, b, i) - j as i64;
    match problem.layer.alibi {
        None => 0.0,
        Some(Alibi::Linear) => -slope * distance as f64,
        Some(Alibi::Sqrt) if distance > 0 => -slope * (distance as f64).sqrt(),
        Some(Alibi::Sqrt) => 0.0,
    }
}

/// The position of row `i` among the request's keys; negative where there are more rows than keys.
fn position(problem: &Problem, b: usize, i: usize) -> i64 {
    let request = problem.requests[b];
    i64::from(request.kv_len) - i64::from(request.qo_len) + i as i64
}

/// `(base AND window) OR mm-prefix`, or `(base OR mm-prefix) AND window`.
pub fn is_visible(problem: &Problem, b: usize, i: usize, j: usize) -> bool {
    let (values, layer) = (Values::of(problem), &problem.layer);
    let (p, key) = (position(problem, b, i), j as i64);
    let within = |limit: i32, distance: i64| limit < 0 || distance <= i64::from(limit);
    let (left, right) = layer.window.unwrap_or((-1, -1));
    let in_chunks = layer.chunks.is_none_or(|(size, look_back)| {
        let chunk = |position: i64| position.div_euclid(i64::from(size));
        chunk(p) - chunk(key) <= i64::from(look_back)
    });
    let in_window = within(left, p - key) && within(right, key - p) && in_chunks;
    let is_old = key < position(problem, b, 0);
    let base = match layer.mask {
        MaskKind::Full => true,
        MaskKind::Causal => key <= p,
        MaskKind::CausalByRequest => !values.is_causal(b) || key <= p,
        MaskKind::Items => {
            let start = values.item_start(b);
            let in_item = |n| p - key <= values.item_position(b, n);
            key <= p && (key < start || in_item(p - start))
        }
        MaskKind::Bytes(_) | MaskKind::Bits(_) => match layer.mask_columns {
            MaskColumns::Keys => values.mask(b, i, j),
            _ => is_old || values.mask(b, i, j),
        },
    };
    let in_prefix = (0..layer.mm_prefix_ranges as usize).any(|r| {
        let (start, end) = values.range(b, r);
        let range = i64::from(start)..=i64::from(end);
        start < end && range.contains(&p) && range.contains(&key)
    });
    match layer.mm_prefix_in_window {
        true => (base || in_prefix) && in_window,
        false => base && in_window || in_prefix,
    }
}
