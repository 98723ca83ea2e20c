//! Attention states and their merges: the formula, its edges, and that attention over parts of the keys
//! merges into attention over all of them.

use crate::common::codec::{decode, encode, rounded, unit_roundoff};
use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::{DOORS, Session};
use crate::common::golden;
use crate::common::instance::{LayerData, Output, Planned, for_each_index, solve};
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::problem::{Layer, MaskKind, Pattern, Problem};
use crate::common::random;
use crate::common::values::{mix, normal, uniform};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{LogBase, MergeArgs, MergeStatesArgs, MergeVarlenArgs};

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

/// How an lse lies in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    /// FlashInfer's: `[num_tokens, num_heads]`.
    TokensFirst,
    /// vLLM's and FlashAttention's: `[num_heads, num_tokens]`.
    HeadsFirst,
}

impl Layout {
    /// A tensor whose first dimension is tokens and whose last one heads, with `gap` elements after each slice of the
    /// outermost in memory.
    fn view(self, dtype: DType, shape: &[i64], gap: u32) -> View {
        let last = shape.len() - 1;
        let mut gaps = vec![0; shape.len()];
        gaps[0] = gap;
        match self {
            Layout::TokensFirst => View::gapped(dtype, shape, &gaps, 0),
            Layout::HeadsFirst => {
                let mut shape = shape.to_vec();
                shape.swap(0, last);
                let mut view = View::gapped(dtype, &shape, &gaps, 1);
                view.shape.swap(0, last);
                view.strides.swap(0, last);
                view
            }
        }
    }
}

/// Type and scale of an output.
#[derive(Debug, Clone, Copy)]
enum Format {
    /// The states' type.
    Same,
    /// fp8, and the divisor of what it holds. The largest values saturate.
    Scaled(DType, f32),
}

const E4M3: Format = Format::Scaled(DType::F8E4M3, 0.0078);
const E5M2: Format = Format::Scaled(DType::F8E5M2, 5e-5);

impl Format {
    fn dtype(self, states: DType) -> DType {
        match self {
            Format::Same => states,
            Format::Scaled(dtype, _) => dtype,
        }
    }

    fn o_scale(self) -> f32 {
        match self {
            Format::Same => 0.0,
            Format::Scaled(_, o_scale) => o_scale,
        }
    }

    /// What values are divided by.
    fn divisor(self) -> f64 {
        match self {
            Format::Same => 1.0,
            Format::Scaled(_, o_scale) => o_scale.into(),
        }
    }
}

/// `n` states per row.
struct States {
    dtype: DType,
    /// tokens, n, heads, dim
    shape: [i64; 4],
    lse_base: LogBase,
    /// Types of the states' lse, and of the merged one where it is a tensor of its own.
    lse_dtypes: [DType; 2],
    seed: u64,
}

impl States {
    fn value(&self, index: &[i64]) -> f64 {
        rounded(self.dtype, normal(self.hash(index)))
    }

    /// One in seven is empty, in one of the three ways that kernels mark it.
    fn lse(&self, index: &[i64]) -> f32 {
        let hash = mix(self.hash(index) ^ u64::MAX);
        match hash % 21 {
            0 => f32::NEG_INFINITY,
            1 => f32::INFINITY,
            2 => f32::NAN,
            _ => rounded(self.lse_dtypes[0], 12.0 * uniform(hash) - 4.0) as f32,
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
        let weights: Vec<f64> = parts.iter().map(|&n| weight(n)).collect();
        let sum: f64 = weights.iter().sum();
        let dim = self.shape[3] as usize;
        let (mut v, mut magnitude) = (vec![0.0; dim], vec![0.0; dim]);
        for (&n, weight) in parts.iter().zip(weights).filter(|part| part.1 > 0.0) {
            for d in 0..dim {
                let share = weight / sum * self.value(&[token, n, head, d as i64]);
                v[d] += share;
                magnitude[d] += share.abs();
            }
        }
        (v, magnitude, sum.ln() / unit)
    }

    /// State `part` of all rows, or all of them; values behind an empty lse are poison.
    fn images(&self, part: Option<i64>, layout: Layout) -> (Image, Image) {
        let [tokens, n, heads, dim] = self.shape;
        let (v_shape, s_shape) = match part {
            Some(_) => (vec![tokens, heads, dim], vec![tokens, heads]),
            None => (vec![tokens, n, heads, dim], vec![tokens, n, heads]),
        };
        let dtype = self.lse_dtypes[0];
        let mut v = Image::poisoned(View::compact(self.dtype, &v_shape));
        let mut s = Image::poisoned(layout.view(dtype, &s_shape, 0));
        for_each_index(&s_shape, |row| {
            let [token, n, head] = match part {
                Some(n) => [row[0], n, row[1]],
                None => [row[0], row[1], row[2]],
            };
            let lse = self.lse(&[token, n, head]);
            s.put(row, encode(dtype, lse.into()));
            if !lse.is_finite() {
                return;
            }
            let mut element = [row, &[0]].concat();
            for d in 0..dim {
                *element.last_mut().expect("a row has elements") = d;
                v.put(
                    &element,
                    encode(self.dtype, self.value(&[token, n, head, d])),
                );
            }
        });
        (v, s)
    }

    /// A row against the formula.
    fn check(
        &self,
        (v, format): (&Image, Format),
        s: Option<&Image>,
        [token, head]: [i64; 2],
        parts: &[i64],
    ) {
        let (want, magnitude, lse) = self.merged(token, head, parts);
        for (d, want) in want.iter().enumerate() {
            let t = magnitude[d] * 1e-6;
            let [low, high] =
                [want - t, want + t].map(|value| rounded(v.view.dtype, value / format.divisor()));
            let got = v.value(&[token, head, d as i64]);
            assert!(
                low <= got && got <= high,
                "[{token}, {head}, {d}]: {got} is not {want} / {}",
                format.divisor()
            );
        }
        if let Some(s) = s {
            let got = s.value(&[token, head]);
            let bound = |lse| match s.view.dtype {
                DType::F32 => lse,
                dtype => rounded(dtype, lse),
            };
            let within = bound(lse - 2e-6) <= got && got <= bound(lse + 2e-6);
            assert!(got == lse || within, "lse {got} is not {lse}");
        }
    }

    /// A row that is one state and nothing else: what is left of it in the output are its own numbers.
    fn check_copied(
        &self,
        (v, format): (&Image, Format),
        s: &Image,
        [token, head]: [i64; 2],
        n: i64,
    ) {
        self.check((v, format), Some(s), [token, head], &[n]);
        let lse = self.lse(&[token, n, head]);
        if !lse.is_finite() {
            return;
        }
        assert_eq!(s.value(&[token, head]), rounded(s.view.dtype, lse.into()));
        if matches!(format, Format::Same) {
            for d in 0..self.shape[3] {
                let want = self.value(&[token, n, head, d]);
                assert_eq!(v.value(&[token, head, d]), want);
            }
        }
    }
}

/// A number of every type that outweighs all others.
const HEAVIEST: f64 = 6e4;

/// Of every problem of the grid.
const TOKENS: i64 = 39;

/// Of the states' lse, and of the merged one.
const LSE_DTYPES: [[DType; 2]; 5] = [
    [DType::F32; 2],
    [DType::BF16; 2],
    [DType::F32, DType::F16],
    [DType::F16; 2],
    [DType::BF16, DType::F32],
];

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
                    shape: [TOKENS, n, 1 + (seed as i64 * 5 + n) % 8, dim],
                    lse_base: match (seed + n as u64).is_multiple_of(2) {
                        true => LogBase::Two,
                        false => LogBase::E,
                    },
                    lse_dtypes: LSE_DTYPES[(seed as usize + n as usize) % LSE_DTYPES.len()],
                    seed: 10 * seed + n as u64,
                });
            }
        }
    }
    random::of_grid(grid)
}

#[test]
fn golden_merge() {
    for session in sessions() {
        golden::golden_merge(&*session, &HostMemory);
    }
}

#[test]
fn n_states_merge_as_the_formula_says() {
    for session in sessions() {
        for states in grid() {
            let [tokens, n, heads, dim] = states.shape;
            // Two of three for each problem, which saves time.
            let mut outputs = vec![
                (true, Layout::TokensFirst, Format::Same),
                (false, Layout::TokensFirst, E5M2),
                (true, Layout::HeadsFirst, E4M3),
            ];
            outputs.remove(states.seed as usize % 3);
            for (with_lse, layout, format) in outputs {
                let (v, s) = states.images(None, layout);
                let (v, s) = (Resident::new(&HostMemory, v), Resident::new(&HostMemory, s));
                let dtype = format.dtype(states.dtype);
                let gapped = View::gapped(dtype, &[tokens, heads, dim], &[5, 3, 0], 1);
                let v_out = Resident::new(&HostMemory, Image::poisoned(gapped));
                let s_out = Image::poisoned(layout.view(states.lse_dtypes[1], &[tokens, heads], 2));
                let s_out = Resident::new(&HostMemory, s_out);
                let input = MergeStatesArgs {
                    v: v.tensor(),
                    s: s.tensor(),
                    v_out: v_out.tensor(),
                    s_out: with_lse.then(|| s_out.tensor()),
                    lse_base: states.lse_base,
                    o_scale: format.o_scale(),
                };
                session.merge_states(&input, Stream::default()).unwrap();
                let (v_now, s_now) = (v_out.current(), s_out.current());
                let parts: Vec<i64> = (0..n).collect();
                for_each_index(&[tokens, heads], |at| {
                    let s_now = with_lse.then_some(&s_now);
                    states.check((&v_now, format), s_now, [at[0], at[1]], &parts);
                });
                assert!(v.is_untouched() && s.is_untouched());
                assert!(with_lse || s_out.is_untouched());
                assert_gaps_untouched(&v_out, &[tokens, heads, dim]);
                assert_gaps_untouched(&s_out, &[tokens, heads]);
            }
        }
    }
}

/// Tokens with no state, with one and with many, among states that belong to none.
#[test]
fn numbers_of_states_of_their_own_merge_as_the_formula_says() {
    for session in sessions() {
        for states in grid().into_iter().filter(|states| states.shape[1] >= 7) {
            let [tokens, most, heads, dim] = states.shape;
            let count = |token: i64| match states.hash(&[token]) % 4 {
                0 => 0,
                1 => 1,
                _ => (states.hash(&[token, 7]) % (most as u64 + 1)) as i64,
            };
            let mut indptr = vec![2];
            indptr.extend((0..tokens).scan(2, |end, token| {
                *end += count(token) as i32;
                Some(*end)
            }));
            let all = i64::from(indptr[tokens as usize]) + 3;
            let start = |token: i64| i64::from(indptr[token as usize]);
            for (layout, format) in [
                (Layout::TokensFirst, Format::Same),
                (Layout::HeadsFirst, E4M3),
                (Layout::TokensFirst, E5M2),
            ] {
                let compact = View::compact(states.dtype, &[all, heads, dim]);
                let mut v = Image::poisoned(compact);
                let lse_dtype = states.lse_dtypes[0];
                let mut s = Image::poisoned(layout.view(lse_dtype, &[all, heads], 1));
                // What no token names weighs more than all that one does.
                for_each_index(&[all, heads], |at| s.put(at, encode(lse_dtype, HEAVIEST)));
                for_each_index(&[tokens, heads], |at| {
                    for n in 0..count(at[0]) {
                        let (from, to) = ([at[0], n, at[1]], [start(at[0]) + n, at[1]]);
                        s.put(&to, encode(lse_dtype, states.lse(&from).into()));
                        for d in (0..dim).filter(|_| states.lse(&from).is_finite()) {
                            let value = states.value(&[at[0], n, at[1], d]);
                            v.put(&[to[0], to[1], d], encode(states.dtype, value));
                        }
                    }
                });
                let dtype = format.dtype(states.dtype);
                let v_out = View::gapped(dtype, &[tokens, heads, dim], &[5, 3, 0], 1);
                let s_out = layout.view(states.lse_dtypes[1], &[tokens, heads], 2);
                let resident = |image| Resident::new(&HostMemory, image);
                let (v, s) = (resident(v), resident(s));
                let offsets = resident(Image::of_i32(&[tokens + 1], &indptr));
                let [v_out, s_out] = [v_out, s_out].map(|view| resident(Image::poisoned(view)));
                let input = MergeVarlenArgs {
                    v: v.tensor(),
                    s: s.tensor(),
                    indptr: offsets.tensor(),
                    v_out: v_out.tensor(),
                    s_out: Some(s_out.tensor()),
                    lse_base: states.lse_base,
                    o_scale: format.o_scale(),
                };
                session.merge_varlen(&input, Stream::default()).unwrap();
                let (v_now, s_now) = (v_out.current(), s_out.current());
                for_each_index(&[tokens, heads], |at| {
                    let at = [at[0], at[1]];
                    match count(at[0]) {
                        1 => states.check_copied((&v_now, format), &s_now, at, 0),
                        n => {
                            let parts: Vec<i64> = (0..n).collect();
                            states.check((&v_now, format), Some(&s_now), at, &parts);
                        }
                    }
                });
                assert!(v.is_untouched() && s.is_untouched() && offsets.is_untouched());
                assert_gaps_untouched(&v_out, &[tokens, heads, dim]);
                assert_gaps_untouched(&s_out, &[tokens, heads]);
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

/// What a merge of two states is asked for.
struct Asked {
    in_place: bool,
    with_mask: bool,
    num_tokens_without_a: i64,
    layout: Layout,
    format: Format,
}

const PLAIN: Asked = Asked {
    in_place: false,
    with_mask: false,
    num_tokens_without_a: 0,
    layout: Layout::TokensFirst,
    format: Format::Same,
};

const ASKED: [Asked; 8] = [
    PLAIN,
    Asked {
        in_place: true,
        ..PLAIN
    },
    Asked {
        in_place: true,
        with_mask: true,
        ..PLAIN
    },
    Asked {
        num_tokens_without_a: 11,
        layout: Layout::HeadsFirst,
        ..PLAIN
    },
    Asked {
        in_place: true,
        with_mask: true,
        num_tokens_without_a: 20,
        layout: Layout::HeadsFirst,
        ..PLAIN
    },
    Asked {
        num_tokens_without_a: TOKENS,
        ..PLAIN
    },
    Asked {
        layout: Layout::HeadsFirst,
        format: E4M3,
        ..PLAIN
    },
    Asked {
        with_mask: true,
        num_tokens_without_a: 1,
        format: E5M2,
        ..PLAIN
    },
];

#[test]
fn two_states_merge_as_the_formula_says() {
    for session in sessions() {
        for states in grid().into_iter().filter(|states| states.shape[1] == 2) {
            for asked in &ASKED {
                two_states_merge(&*session, &states, asked);
            }
        }
    }
}

fn two_states_merge(session: &dyn Session, states: &States, asked: &Asked) {
    let [tokens, _, heads, dim] = states.shape;
    let masked = |token: i64| asked.with_mask && token % 3 == 1;
    let has_a = |token: i64| token < tokens - asked.num_tokens_without_a;
    let bytes = (0..tokens).map(|token| if masked(token) { 0 } else { 1 << (token % 8) });
    let resident = |image| Resident::new(&HostMemory, image);
    let mask = resident(Image::of_bits(DType::U8, &[tokens], bytes));
    let (mut v_a, mut s_a) = states.images(Some(0), asked.layout);
    // A state a that is none would weigh more than state b, and ruin it.
    for_each_index(&[tokens, heads, dim], |at| {
        if !has_a(at[0]) {
            v_a.put(at, encode(states.dtype, f64::NAN));
            s_a.put(&at[..2], encode(states.lse_dtypes[0], HEAVIEST));
        }
    });
    let (v_b, s_b) = states.images(Some(1), asked.layout);
    let [v_a, s_a, v_b, s_b] = [v_a, s_a, v_b, s_b].map(resident);
    let dtype = asked.format.dtype(states.dtype);
    let v_new = View::gapped(dtype, &[tokens, heads, dim], &[5, 3, 0], 1);
    let s_new = asked.layout.view(states.lse_dtypes[1], &[tokens, heads], 2);
    let [v_new, s_new] = [v_new, s_new].map(|view| resident(Image::poisoned(view)));
    let (v_out, s_out) = match asked.in_place {
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
        mask: asked.with_mask.then(|| mask.tensor()),
        lse_base: states.lse_base,
        num_tokens_without_a: asked.num_tokens_without_a,
        o_scale: asked.format.o_scale(),
    };
    session.merge(&input, Stream::default()).unwrap();
    let (v_now, s_now) = (v_out.current(), s_out.current());
    for_each_index(&[tokens, heads], |at| {
        let v = (&v_now, asked.format);
        if masked(at[0]) {
            let kept = (0..dim).all(|d| {
                let index = [at[0], at[1], d];
                v_now.bits(&index) == v_out.image().bits(&index)
            });
            let kept = kept && s_now.bits(at) == s_out.image().bits(at);
            assert!(kept, "row {at:?}");
        } else if has_a(at[0]) {
            states.check(v, Some(&s_now), [at[0], at[1]], &[0, 1]);
        } else {
            states.check_copied(v, &s_now, [at[0], at[1]], 1);
        }
    });
    assert!(v_b.is_untouched() && s_b.is_untouched() && mask.is_untouched());
    assert!(asked.in_place || v_a.is_untouched() && s_a.is_untouched());
    assert_gaps_untouched(v_out, &[tokens, heads, dim]);
    assert_gaps_untouched(s_out, &[tokens, heads]);
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
                o_scale: 0.0,
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
