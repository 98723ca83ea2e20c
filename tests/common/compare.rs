//! How close a result must come, and the comparison.
//!
//! An output element must lie between the roundings of `want - t` and `want + t`, where `t` bounds the
//! error before the final rounding to the output type. So an output of any type, fp8 included, may only
//! be a neighbour of the true value if the true value lies near the border between the two.
//! `t = m · (u + 2e)`: m = Σ p·|v| is the size of the sum; u is one rounding of P to the type of q, which
//! a matrix unit needs; e is the error of scores and exponentials in float32, which a weight has twice, in
//! its own score and in the sum that it is divided by. For unit values this is
//! 2e-5 in float32, 7e-4 in float16 and 4e-3 in bfloat16; the peers' own tests allow 1e-3 and 1e-2. Sums of
//! denormals have an absolute error as well: half the least float32 per term, and where a matrix unit takes weights
//! in fp16, half the least float16 per weight that is denormal there. Where exponentials flush to zero, weights that are
//! denormal in float32 are lost.

use super::codec::{decode, half_of_least, rounded, unit_roundoff};
use super::dense::Row;
use super::instance::Output;
use super::problem::Problem;
use super::stored::Side;
use super::values::Values;
use folio::dtype::DType;
use folio::problem::{CacheForm, LogBase};

/// The errors that a kind of code may make.
#[derive(Debug, Clone, Copy)]
pub struct Tolerance {
    /// Relative error of the weights of a row.
    pub weight: f64,
    /// Absolute error of scores and lse that do not exceed 1.
    pub score: f64,
    /// Error of scores per unit of the largest one.
    pub score_growth: f64,
    /// Error of scores per unit of the largest `Σ |q k|`.
    pub score_sum: f64,
    /// Absolute error per term of a weighted sum.
    pub underflow: f64,
    /// Absolute error of a sum that is rounded to a type of its own: half the least number of that type.
    pub least_part: f64,
    /// Error of the lse of parts, for each unit of it and for one more.
    pub part_lse: f64,
    /// Weights are rounded to fp16, denormal ones too.
    pub fp16_weights: bool,
    /// Weights below the least normal float32 are 0.
    pub flushes_weights: bool,
    /// Rounded weights meet codes, from whose sums zero points are subtracted.
    pub sums_codes: bool,
}

impl Tolerance {
    /// Fast code, for q of this type.
    pub fn fast(q_dtype: DType) -> Tolerance {
        Tolerance {
            weight: match q_dtype {
                DType::F32 => 0.0,
                // Weights keep 8 bits beside queries in fp8 too.
                DType::F8E4M3 | DType::F8E5M2 => unit_roundoff(DType::BF16),
                _ => unit_roundoff(q_dtype),
            },
            score: if q_dtype == DType::F32 { 1e-5 } else { 1e-4 },
            score_growth: 2f64.powi(-22),
            score_sum: 2f64.powi(-23),
            underflow: 2f64.powi(-150),
            least_part: 0.0,
            part_lse: 0.0,
            fp16_weights: false,
            flushes_weights: false,
            sums_codes: false,
        }
    }

    /// Fast code whose weights go through a matrix unit in the type of q, and whose exponentials flush to zero. Beside
    /// queries or keys in fp8 the weights are fp16.
    pub fn of_matrix_unit(problem: &Problem) -> Tolerance {
        let of_queries = match problem.q_dtype.is_fp8() {
            true => DType::F16,
            false => problem.q_dtype,
        };
        let is_plain = problem.form == CacheForm::Plain;
        let mut keys = problem.new_kv.into_iter().chain([problem.kv_dtype]);
        let has_fp8_keys = is_plain && of_queries != DType::F32 && keys.any(DType::is_fp8);
        Tolerance {
            fp16_weights: of_queries == DType::F16 || has_fp8_keys,
            flushes_weights: true,
            ..Tolerance::fast(of_queries)
        }
    }

    /// The same over caches of other forms, whose codes a matrix unit takes as they are. Queries times channel scales are
    /// sums of two numbers of q's type: what is lost of a term is `u²` of it. Decode multiplies codes of 8 bits and fewer in
    /// fp16 beside queries in bf16 too, and prefill of few rows takes it.
    pub fn of_codes(problem: &Problem) -> Tolerance {
        let plain = Tolerance::of_matrix_unit(problem);
        let by_channel = matches!(
            problem.form,
            CacheForm::ChannelScales | CacheForm::ChannelZeroPoints
        );
        let split = if by_channel {
            unit_roundoff(problem.q_dtype).powi(2)
        } else {
            0.0
        };
        Tolerance {
            score_sum: plain.score_sum + split,
            fp16_weights: plain.fp16_weights
                || !matches!(problem.form, CacheForm::Plain | CacheForm::PackedKeys),
            sums_codes: true,
            ..plain
        }
    }

    /// The same where a run is of two parts, over the cache and over the keys beside it: a part of an output is rounded to
    /// the output's type, or q's where that is fp8, before they are added up. Their weights sum up to 1. These come from the
    /// parts' lse in float32.
    pub fn of_parts(self, problem: &Problem) -> Tolerance {
        let of_part = match (problem.o_dtype, problem.q_dtype) {
            (o, _) if !o.is_fp8() => o,
            (_, q) if !q.is_fp8() => q,
            _ => DType::BF16,
        };
        if problem.new_kv.is_none() {
            return self;
        }
        Tolerance {
            weight: self.weight + unit_roundoff(of_part),
            least_part: half_of_least(of_part),
            part_lse: unit_roundoff(DType::F32),
            ..self
        }
    }

    /// The same where prefill rounds outputs in fp8 from fp16, in which it wrote them: of queries that are in fp8 too.
    pub fn of_rounded_rows(self, problem: &Problem) -> Tolerance {
        let rounding = match problem.q_dtype.is_fp8() && problem.o_dtype.is_fp8() {
            true => unit_roundoff(DType::F16),
            false => 0.0,
        };
        Tolerance {
            weight: self.weight + rounding,
            ..self
        }
    }

    /// The oracle: float64, rounded to float32 once. The scales reach it as one float32 product.
    pub fn oracle() -> Tolerance {
        Tolerance {
            weight: 2f64.powi(-24),
            score: 1e-12,
            score_growth: 2f64.powi(-22),
            score_sum: 0.0,
            underflow: 0.0,
            least_part: 0.0,
            part_lse: 0.0,
            fp16_weights: false,
            flushes_weights: false,
            sums_codes: false,
        }
    }
}

/// Compares with the first difference as the error.
pub fn compare(
    problem: &Problem,
    want: &[Vec<Row>],
    got: &Output,
    tolerance: Tolerance,
) -> Result<(), String> {
    (0..want.len()).try_for_each(|token| compare_token(problem, want, got, token, tolerance))
}

/// The same of one query token.
pub fn compare_token(
    problem: &Problem,
    want: &[Vec<Row>],
    got: &Output,
    token: usize,
    tolerance: Tolerance,
) -> Result<(), String> {
    let (heads, dim) = (
        problem.num_qo_heads() as usize,
        problem.head_dim_vo as usize,
    );
    for (head, row) in want[token].iter().enumerate() {
        let at = token * heads + head;
        let name = |what: &str| format!("{what} of token {token}, head {head}");
        let zero_points = zero_points(problem, head, tolerance);
        compare_o(
            problem,
            row,
            &got.o[at * dim..][..dim],
            tolerance,
            &zero_points,
        )
        .map_err(|difference| format!("{}: {difference}", name("o")))?;
        if let Some(lse) = &got.lse {
            compare_lse(problem, row, lse[at], tolerance)
                .map_err(|difference| format!("{}: {difference}", name("lse")))?;
        }
    }
    Ok(())
}

/// Of a query head: what zero points of values are worth, where weights meet codes: a weighted sum of codes is by so much
/// larger than one of values.
fn zero_points(problem: &Problem, head: usize, tolerance: Tolerance) -> Vec<f64> {
    if !tolerance.sums_codes || problem.form != CacheForm::ChannelZeroPoints {
        return Vec::new();
    }
    let values = Values::of(problem);
    let v_scale = match problem.layer.v_scale {
        0.0 => 1.0,
        stated => f64::from(stated).abs(),
    };
    let kv_head = head / problem.group_size as usize;
    (0..problem.head_dim_vo as usize)
        .map(|d| {
            let stored = values.stored(Side::Value, 0, 0, [kv_head, d]);
            (stored.zero * stored.scale).abs() * v_scale
        })
        .collect()
}

/// What rounding the weights of a row, which sum up to at most 1, adds to their sum.
fn rounding(row: &Row, tolerance: Tolerance) -> f64 {
    let denormal = match tolerance.fp16_weights {
        true => row.keys as f64 * 2f64.powi(-25),
        false => 0.0,
    };
    tolerance.weight + denormal
}

fn score_error(row: &Row, tolerance: Tolerance) -> f64 {
    tolerance.score
        + tolerance.score_growth * row.largest_score
        + tolerance.score_sum * row.score_magnitude
}

/// What the lse of parts are off by, as far as it shows: that of a part with weight w is `|lse| - ln w` at most, and
/// `-w ln w` below 1.
fn part_error(row: &Row, tolerance: Tolerance) -> f64 {
    match row.lse.is_finite() {
        true => tolerance.part_lse * (row.lse.abs() + 1.0),
        false => 0.0,
    }
}

fn compare_o(
    problem: &Problem,
    row: &Row,
    got: &[u64],
    tolerance: Tolerance,
    zero_points: &[f64],
) -> Result<(), String> {
    let dtype = problem.o_dtype;
    let o_scale = Values::of(problem).o_divisor();
    for (d, &bits) in got.iter().enumerate() {
        let denormal = match tolerance.fp16_weights {
            true => row.denormal_weights[d],
            false => 0.0,
        };
        // A sum of nothing is 0 in every type.
        let least_part = match row.magnitude[d] > 0.0 {
            true => tolerance.least_part,
            false => 0.0,
        };
        let flushed = match tolerance.flushes_weights {
            true => row.flushed_weights[d],
            false => 0.0,
        };
        let t = row.magnitude[d]
            * (tolerance.weight + 2.0 * (score_error(row, tolerance) + part_error(row, tolerance)))
            + row.keys as f64 * tolerance.underflow
            + denormal
            + flushed
            + least_part
            + zero_points
                .get(d)
                .map_or(0.0, |zero| zero * rounding(row, tolerance));
        let bound = |x: f64| rounded(dtype, x / o_scale);
        let (low, high) = (bound(row.o[d] - t), bound(row.o[d] + t));
        let value = decode(dtype, bits);
        // Where a row sees nothing t is 0, and only 0 passes.
        let right = (low <= value && value <= high) || (row.o[d].is_nan() && value.is_nan());
        if !right {
            return Err(format!(
                "element {d} is {value:e}, not within {low:e} to {high:e} (exactly {:e})",
                row.o[d] / o_scale
            ));
        }
    }
    Ok(())
}

fn compare_lse(problem: &Problem, row: &Row, got: f32, tolerance: Tolerance) -> Result<(), String> {
    let unit = match problem.layer.lse {
        Some(LogBase::Two) => std::f64::consts::LOG2_E,
        _ => 1.0,
    };
    let (want, got) = (row.lse * unit, f64::from(got));
    let t = (score_error(row, tolerance) + part_error(row, tolerance)) * unit
        + want.abs() * 2f64.powi(-23);
    // Before it is rounded to a type of 16 bits.
    let bound = |lse: f64| match problem.layer.lse_dtype {
        DType::F32 => lse,
        dtype => rounded(dtype, lse),
    };
    let within = bound(want - t) <= got && got <= bound(want + t);
    let equal = want == got || within || (want.is_nan() && got.is_nan());
    equal
        .then_some(())
        .ok_or_else(|| format!("is {got:e}, not within {t:e} of {want:e}"))
}
