//! Attention states and their merges: the formula, its edges, and that attention over parts of the keys
//! merges into attention over all of them.

mod common;

use common::codec::{decode, encode, rounded, unit_roundoff};
use common::compare::{Tolerance, compare};
use common::dense;
use common::door::{DOORS, Session};
use common::instance::{LayerData, Output, Planned, for_each_index, solve};
use common::memory::{HostMemory, Image, Resident, View};
use common::problem::{Layer, MaskKind, Pattern, Problem};
use common::values::{mix, normal, uniform};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{LogBase, MergeArgs, MergeStatesArgs};

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

/// `n` states per row.
struct States {
    dtype: DType,
    /// tokens, n, heads, dim
    shape: [i64; 4],
    lse_base: LogBase,
    seed: u64,
}

impl States {
    fn value(&self, index: &[i64]) -> f64 {
        rounded(self.dtype, normal(self.hash(index)))
    }

    /// One in seven is empty, in one of the three ways that kernels mark it.
    fn lse(&self, index: &[i64]) -> f32 {
        let hash = self.hash(&[index, &[-1]].concat());
        match hash % 21 {
            0 => f32::NEG_INFINITY,
            1 => f32::INFINITY,
            2 => f32::NAN,
            _ => (12.0 * uniform(hash) - 4.0) as f32,
        }
    }

    fn hash(&self, index: &[i64]) -> u64 {
        index
            .iter()
            .fold(mix(self.seed), |hash, &i| mix(hash ^ i as u64))
    }

    /// The merged row of `token` and `head`: values, their magnitudes, and lse in the states' base.
    fn merged(&self, token: i64, head: i64, parts: &[i64]) -> (Vec<f64>, Vec<f64>, f64) {
        let unit = if self.lse_base == LogBase::Two {
            std::f64::consts::LN_2
        } else {
            1.0
        };
        let weight = |n: i64| match self.lse(&[token, n, head]) {
            lse if lse < f32::INFINITY => (f64::from(lse) * unit).exp(),
            _ => 0.0,
        };
        let sum: f64 = parts.iter().map(|&n| weight(n)).sum();
        let dim = self.shape[3] as usize;
        let (mut v, mut magnitude) = (vec![0.0; dim], vec![0.0; dim]);
        for &n in parts.iter().filter(|&&n| weight(n) > 0.0) {
            for d in 0..dim {
                let share = weight(n) / sum * self.value(&[token, n, head, d as i64]);
                v[d] += share;
                magnitude[d] += share.abs();
            }
        }
        (v, magnitude, sum.ln() / unit)
    }

    /// State `part` of all rows, or all of them; values behind an empty lse are poison.
    fn images(&self, part: Option<i64>) -> (Image, Image) {
        let [tokens, n, heads, dim] = self.shape;
        let (v_shape, s_shape) = match part {
            Some(_) => (vec![tokens, heads, dim], vec![tokens, heads]),
            None => (vec![tokens, n, heads, dim], vec![tokens, n, heads]),
        };
        let whole = |index: &[i64]| match part {
            Some(n) => [&[index[0], n], &index[1..]].concat(),
            None => index.to_vec(),
        };
        let mut v = Image::poisoned(View::compact(self.dtype, &v_shape));
        for_each_index(&v_shape, |index| {
            let at = whole(index);
            if self.lse(&at[..3]).is_finite() {
                v.put(index, encode(self.dtype, self.value(&at)));
            }
        });
        let mut s = Image::poisoned(View::compact(DType::F32, &s_shape));
        for_each_index(&s_shape, |index| {
            s.put(index, self.lse(&whole(index)).to_bits().into());
        });
        (v, s)
    }

    /// A row against the formula.
    fn check(&self, v: &Image, s: Option<&Image>, token: i64, head: i64, parts: &[i64]) {
        let (want, magnitude, lse) = self.merged(token, head, parts);
        for (d, want) in want.iter().enumerate() {
            let t = magnitude[d] * 1e-6;
            let (low, high) = (rounded(self.dtype, want - t), rounded(self.dtype, want + t));
            let got = v.value(&[token, head, d as i64]);
            assert!(
                low <= got && got <= high,
                "[{token}, {head}, {d}]: {got} is not {want}"
            );
        }
        if let Some(s) = s {
            let got = s.value(&[token, head]);
            assert!(
                got == lse || (got - lse).abs() < 2e-6,
                "lse {got} is not {lse}"
            );
        }
    }
}

fn grid() -> Vec<States> {
    let mut grid = Vec::new();
    // Also more elements than are added up at a time, and rows that are no whole vectors.
    let dims = [32, 48, 64, 96, 128, 256, 8, 264, 520, 13, 301];
    for (seed, dim) in (0..).zip(dims) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // More states than are added up at a time, of rows whose formula is computed soon.
            let most = if matches!(dim, 64 | 13) { 35 } else { 7 };
            for n in [1, 2, 7, 17, 35].into_iter().filter(|n| *n <= most) {
                grid.push(States {
                    dtype,
                    shape: [39, n, 1 + (seed as i64 * 5 + n) % 8, dim],
                    lse_base: match (seed + n as u64).is_multiple_of(2) {
                        true => LogBase::Two,
                        false => LogBase::E,
                    },
                    seed: 10 * seed + n as u64,
                });
            }
        }
    }
    grid
}

#[test]
fn n_states_merge_as_the_formula_says() {
    for session in sessions() {
        for states in grid() {
            let [tokens, n, heads, dim] = states.shape;
            let (v, s) = states.images(None);
            let (v, s) = (Resident::new(&HostMemory, v), Resident::new(&HostMemory, s));
            let gapped = View::gapped(states.dtype, &[tokens, heads, dim], &[5, 3, 0], 1);
            let v_out = Resident::new(&HostMemory, Image::poisoned(gapped));
            let s_out = View::gapped(DType::F32, &[tokens, heads], &[2, 0], 0);
            let s_out = Resident::new(&HostMemory, Image::poisoned(s_out));
            for with_lse in [true, false] {
                let input = MergeStatesArgs {
                    v: v.tensor(),
                    s: s.tensor(),
                    v_out: v_out.tensor(),
                    s_out: with_lse.then(|| s_out.tensor()),
                    lse_base: states.lse_base,
                };
                v_out.reset();
                s_out.reset();
                session.merge_states(&input, Stream::default()).unwrap();
                let (v_now, s_now) = (v_out.current(), s_out.current());
                let parts: Vec<i64> = (0..n).collect();
                for_each_index(&[tokens, heads], |at| {
                    states.check(&v_now, with_lse.then_some(&s_now), at[0], at[1], &parts);
                });
                assert!(v.is_untouched() && s.is_untouched());
                assert!(with_lse || s_out.is_untouched());
                assert_gaps_untouched(&v_out, &[tokens, heads, dim]);
            }
        }
    }
}

/// Memory between the elements of an output is as uploaded.
fn assert_gaps_untouched(part: &Resident<'_>, shape: &[i64]) {
    let mut current = part.current();
    for_each_index(shape, |index| current.put(index, part.image().bits(index)));
    assert!(current.bytes == part.image().bytes);
}

#[test]
fn two_states_merge_in_place_and_under_a_mask() {
    for session in sessions() {
        for states in grid().into_iter().filter(|states| states.shape[1] == 2) {
            let [tokens, _, heads, dim] = states.shape;
            let masked = |token: i64| token % 3 == 1;
            let mask = (0..tokens).map(|token| if masked(token) { 0 } else { 1 << (token % 8) });
            let mask = Image::of_bits(DType::U8, &[tokens], mask);
            let mask = Resident::new(&HostMemory, mask);
            let resident = |n| {
                let (v, s) = states.images(Some(n));
                (Resident::new(&HostMemory, v), Resident::new(&HostMemory, s))
            };
            for (in_place, with_mask) in [(false, false), (true, false), (true, true)] {
                let ((v_a, s_a), (v_b, s_b)) = (resident(0), resident(1));
                let (v_new, s_new) = resident(0);
                let (v_out, s_out) = match in_place {
                    true => (&v_a, &s_a),
                    false => (&v_new, &s_new),
                };
                let input = MergeArgs {
                    v_a: v_a.tensor(),
                    s_a: s_a.tensor(),
                    v_b: v_b.tensor(),
                    s_b: s_b.tensor(),
                    v_out: v_out.tensor(),
                    s_out: Some(s_out.tensor()),
                    mask: with_mask.then(|| mask.tensor()),
                    lse_base: states.lse_base,
                };
                session.merge(&input, Stream::default()).unwrap();
                let (v_now, s_now) = (v_out.current(), s_out.current());
                for_each_index(&[tokens, heads], |at| {
                    if !(with_mask && masked(at[0])) {
                        states.check(&v_now, Some(&s_now), at[0], at[1], &[0, 1]);
                        return;
                    }
                    let kept = (0..dim).all(|d| {
                        let index = [at[0], at[1], d];
                        v_now.bits(&index) == v_out.image().bits(&index)
                    });
                    assert!(
                        kept && s_now.bits(at) == s_out.image().bits(at),
                        "row {at:?}"
                    );
                });
                assert!(v_b.is_untouched() && s_b.is_untouched());
            }
        }
    }
}

/// What `solve` gave, as inputs of a merge.
fn stack(problem: &Problem, parts: &[Output]) -> (Resident<'static>, Resident<'static>) {
    let (tokens, n) = (problem.num_tokens() as i64, parts.len() as i64);
    let (heads, dim) = (
        problem.num_qo_heads() as i64,
        i64::from(problem.head_dim_vo),
    );
    let mut v = Image::poisoned(View::compact(problem.o_dtype, &[tokens, n, heads, dim]));
    let mut s = Image::poisoned(View::compact(DType::F32, &[tokens, n, heads]));
    for (n, part) in (0..).zip(parts) {
        for_each_index(&[tokens, heads, dim], |at| {
            let bits = part.o[((at[0] * heads + at[1]) * dim + at[2]) as usize];
            v.put(&[at[0], n, at[1], at[2]], bits);
        });
        for_each_index(&[tokens, heads], |at| {
            let lse = part.lse.as_ref().unwrap()[(at[0] * heads + at[1]) as usize];
            s.put(&[at[0], n, at[1]], lse.to_bits().into());
        });
    }
    (Resident::new(&HostMemory, v), Resident::new(&HostMemory, s))
}

#[test]
fn parts_of_the_keys_merge_into_the_whole() {
    for session in sessions() {
        for (dtype, base) in [
            (DType::F32, LogBase::E),
            (DType::F32, LogBase::Two),
            (DType::F16, LogBase::E),
            (DType::BF16, LogBase::Two),
        ] {
            let mut problem = Problem::plain(&[(3, 200), (1, 5), (2, 0), (1, 1)]).of(dtype);
            problem.layer.lse = Some(base);
            let cuts = [0, 10, 90, 100, 256];
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
            let parts: Vec<Output> = cuts
                .windows(2)
                .map(|cut| {
                    let mask = MaskKind::Bits(Pattern::Range(cut[0], cut[1]));
                    let part = problem.with_layer(Layer {
                        mask,
                        ..problem.layer.clone()
                    });
                    planned.run(&LayerData::new(&HostMemory, &part)).unwrap()
                })
                .collect();
            let (v, s) = stack(&problem, &parts);
            let shape = [
                problem.num_tokens() as i64,
                problem.num_qo_heads() as i64,
                i64::from(problem.head_dim_vo),
            ];
            let resident = |image| Resident::new(&HostMemory, image);
            let v_out = resident(Image::poisoned(View::compact(dtype, &shape)));
            let s_out = resident(Image::poisoned(View::compact(DType::F32, &shape[..2])));
            let input = MergeStatesArgs {
                v: v.tensor(),
                s: s.tensor(),
                v_out: v_out.tensor(),
                s_out: Some(s_out.tensor()),
                lse_base: base,
            };
            session.merge_states(&input, Stream::default()).unwrap();
            let (v_now, s_now) = (v_out.current(), s_out.current());
            let (mut o, mut lse) = (Vec::new(), Vec::new());
            for_each_index(&shape, |at| o.push(v_now.bits(at)));
            for_each_index(&shape[..2], |at| lse.push(s_now.value(at) as f32));
            let merged = Output { o, lse: Some(lse) };
            let whole = problem.with_layer(Layer {
                mask: MaskKind::Full,
                ..problem.layer.clone()
            });
            // Each part was rounded to the output type once.
            let fast = Tolerance::fast(dtype);
            let tolerance = Tolerance {
                weight: fast.weight + unit_roundoff(dtype),
                ..fast
            };
            let result = compare(&whole, &dense::attention(&whole), &merged, tolerance);
            assert_eq!(result, Ok(()), "{dtype} base {base:?}");
        }
    }
}

/// Rows of requests without keys are empty states: o = 0 and lse = -inf to the bit.
#[test]
fn rows_that_see_nothing_are_the_identity_of_the_merge() {
    for session in sessions() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let problem = Problem::plain(&[(2, 4), (131, 0), (1, 3)]).of(dtype);
            let got = solve(&*session, &HostMemory, &problem).unwrap();
            let lse = got.lse.as_ref().unwrap();
            let (heads, dim) = (
                problem.num_qo_heads() as usize,
                problem.head_dim_vo as usize,
            );
            for token in 0..134 {
                let empty = (2..133).contains(&token);
                let lse = &lse[token * heads..][..heads];
                assert!(lse.iter().all(|&lse| (lse == f32::NEG_INFINITY) == empty));
                let o = &got.o[token * heads * dim..][..heads * dim];
                let all_zero = o.iter().all(|&bits| decode(dtype, bits) == 0.0);
                assert_eq!(all_zero, empty, "token {token}");
            }
        }
    }
}
