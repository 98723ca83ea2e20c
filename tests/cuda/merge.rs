//! Merges with outputs in fp8, tokens without state a, a number of states for every token, and any layout and
//! type of the lse, on the device. The oracle merges the same numbers in float32, so that its own rounding does not count.

use crate::common::codec::{encode, rounded};
use crate::common::door::Session;
use crate::common::instance::for_each_index;
use crate::common::memory::{HostMemory, Image, Memory, Resident, View};
use crate::common::values::{mix, uniform};
use crate::gpu::DeviceMemory;
use crate::operators::{LSE_ERROR, VALUE_ERROR, assert_close, fresh_seed, oracle, random};
use crate::problems::session;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{LogBase, MergeArgs, MergeStatesArgs, MergeVarlenArgs};

const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

/// The output of a merge: its type, that of the states where it is none, and its divisor.
type Format = (Option<DType>, f32);

const SAME: Format = (None, 0.0);
/// Some values saturate.
const E4M3: Format = (Some(DType::F8E4M3), 0.1);
const E5M2: Format = (Some(DType::F8E5M2), 3e-4);

/// Types of the states' lse, and of the merged one.
const LSE_DTYPES: [[DType; 2]; 6] = [
    [DType::F32; 2],
    [DType::BF16; 2],
    [DType::F32, DType::F16],
    [DType::F32; 2],
    [DType::F16; 2],
    [DType::BF16, DType::F32],
];

/// A merge as plain data. The oracle's has `dtype` float32.
#[derive(Clone, Copy, Debug)]
struct Merge {
    dtype: DType,
    format: Format,
    heads: i64,
    dim: i64,
    gap: u32,
    /// An lse lies as `[heads, tokens]`.
    heads_first: bool,
    /// The type that the states' lse are rounded to, those that they and the merged one are kept in.
    lse_of: DType,
    lse_dtype: DType,
    lse_out: DType,
    base: LogBase,
    seed: u64,
}

impl Merge {
    /// The values of states, those of type `of` in the type of this merge.
    fn values(&self, of: DType, outer: &[i64], seed: u64) -> Image {
        let shape = [outer, &[self.heads, self.dim]].concat();
        let image = random(of, &shape, self.gap, self.seed ^ seed);
        if of == self.dtype {
            return image;
        }
        let mut wide = Image::poisoned(View::compact(self.dtype, &shape));
        for_each_index(&shape, |at| {
            wide.put(at, (image.value(at) as f32).to_bits().into());
        });
        wide
    }

    fn lse_view(&self, dtype: DType, outer: &[i64]) -> View {
        let mut shape = [outer, &[self.heads]].concat();
        if !self.heads_first {
            return View::compact(dtype, &shape);
        }
        let last = outer.len();
        shape.swap(0, last);
        let mut view = View::compact(dtype, &shape);
        view.shape.swap(0, last);
        view.strides.swap(0, last);
        view
    }

    /// Around 0, and every seventh of an empty state in one of three ways.
    fn lse(&self, outer: &[i64], seed: u64) -> Image {
        let mut image = Image::poisoned(self.lse_view(self.lse_dtype, outer));
        let shape = image.view.shape.clone();
        for_each_index(&shape, |at| {
            let hash = at
                .iter()
                .fold(mix(self.seed ^ seed), |hash, &i| mix(hash ^ i as u64));
            let lse = match hash % 21 {
                0 => f32::NEG_INFINITY,
                1 => f32::INFINITY,
                2 => f32::NAN,
                _ => rounded(self.lse_of, 12.0 * uniform(hash) - 4.0) as f32,
            };
            image.put(at, encode(self.lse_dtype, lse.into()));
        });
        image
    }

    fn output(&self, tokens: i64) -> [Image; 2] {
        let dtype = self.format.0.unwrap_or(self.dtype);
        let shape = [tokens, self.heads, self.dim];
        let v = View::gapped(dtype, &shape, &[self.gap, self.gap, 0], self.gap);
        [v, self.lse_view(self.lse_out, &[tokens])].map(Image::poisoned)
    }

    /// The same in float32, unscaled.
    fn wide(self) -> Merge {
        Merge {
            dtype: DType::F32,
            format: SAME,
            lse_dtype: DType::F32,
            lse_out: DType::F32,
            ..self
        }
    }

    /// What the device made against what the oracle did.
    fn assert_near(&self, [v, s]: &[Image; 2], [want_v, want_s]: &[Image; 2]) {
        let divisor = match self.format {
            (None, _) => 1.0,
            (Some(_), o_scale) => f64::from(o_scale),
        };
        let dtype = v.view.dtype;
        for_each_index(&v.view.shape, |at| {
            let (got, want) = (v.value(at), want_v.value(at));
            let t = VALUE_ERROR.absolute + want.abs() * 2f64.powi(-24);
            let [low, high] = [want - t, want + t].map(|x| rounded(dtype, x / divisor));
            assert!(
                low <= got && got <= high || got.is_nan() && want.is_nan(),
                "{self:?} {at:?}: {got} is not {want} / {divisor}"
            );
        });
        if s.view.dtype == DType::F32 {
            return assert_close(want_s, s, &LSE_ERROR, &format!("s of {self:?} "));
        }
        for_each_index(&s.view.shape, |at| {
            let (got, want) = (s.value(at), want_s.value(at));
            let t = LSE_ERROR.absolute + LSE_ERROR.relative * want.abs();
            let [low, high] = [want - t, want + t].map(|lse| rounded(s.view.dtype, lse));
            let right = got == want || low <= got && got <= high || got.is_nan() && want.is_nan();
            assert!(right, "{self:?} {at:?}: lse {got} is not {want}");
        });
    }
}

/// How two states are merged.
#[derive(Clone, Copy)]
struct Two {
    tokens: i64,
    without_a: i64,
    in_place: bool,
}

/// The states b, and the outputs. State a of tokens that have none is poison under the largest lse.
fn run_two(
    session: &dyn Session,
    memory: &dyn Memory,
    (of, merge): (DType, Merge),
    two: Two,
) -> ([Image; 2], [Image; 2]) {
    let outer = [two.tokens];
    let (mut v_a, mut s_a) = (merge.values(of, &outer, 1), merge.lse(&outer, 2));
    for_each_index(&[two.tokens, merge.heads], |at| {
        if at[0] >= two.tokens - two.without_a {
            // Of every type, and outweighs all others.
            s_a.put(at, encode(merge.lse_dtype, rounded(merge.lse_of, 6e4)));
            for d in 0..merge.dim {
                let nan = encode(merge.dtype, f64::NAN);
                v_a.put(&[at[0], at[1], d], nan);
            }
        }
    });
    let b = [merge.values(of, &outer, 3), merge.lse(&outer, 4)];
    let resident = |image| Resident::new(memory, image);
    let [v_a, s_a] = [v_a, s_a].map(resident);
    let [v_b, s_b] = b.clone().map(resident);
    let [v_new, s_new] = merge.output(two.tokens).map(resident);
    let (v_out, s_out) = match two.in_place {
        true => (&v_a, &s_a),
        false => (&v_new, &s_new),
    };
    let bytes = (0..two.tokens as u64).map(|token| u64::from(token % 4 != 1));
    let mask = resident(Image::of_bits(DType::U8, &outer, bytes));
    let input = MergeArgs {
        v_a: v_a.tensor(),
        s_a: s_a.tensor(),
        v_b: v_b.tensor(),
        s_b: s_b.tensor(),
        v_out: v_out.tensor(),
        s_out: Some(s_out.tensor()),
        // A masked row of an output elsewhere has nothing to be compared with.
        mask: two.in_place.then(|| mask.tensor()),
        lse_base: merge.base,
        num_tokens_without_a: two.without_a,
        o_scale: merge.format.1,
    };
    session.merge(&input, Stream::default()).unwrap();
    (b, [v_out.current(), s_out.current()])
}

/// Tokens without state a are state b, exactly.
fn assert_copied([v, s]: &[Image; 2], [v_b, s_b]: &[Image; 2], first: i64) {
    for_each_index(&s.view.shape, |at| {
        if at[0] < first || !s_b.value(at).is_finite() {
            return;
        }
        let want = rounded(s.view.dtype, s_b.value(at));
        assert_eq!(s.value(at), want, "s{at:?}");
        for d in 0..v.view.shape[2] {
            let at = [at[0], at[1], d];
            assert_eq!(v.value(&at), v_b.value(&at), "v{at:?}");
        }
    });
}

/// Every type with rows of vectors, of elements, and of more than a warp takes at once.
fn merges(seed: u64) -> Vec<Merge> {
    let mut merges = Vec::new();
    for dtype in FLOATS {
        for (n, (format, dim, gap)) in [
            (SAME, 128, 0),
            (E4M3, 128, 0),
            (E5M2, 64, 8),
            (E4M3, 192, 8),
            (SAME, 520, 8),
            (E5M2, 520, 0),
            (E4M3, 13, 1),
            (SAME, 24, 3),
        ]
        .into_iter()
        .enumerate()
        {
            let [lse_of, lse_out] = LSE_DTYPES[n % LSE_DTYPES.len()];
            merges.push(Merge {
                dtype,
                format,
                lse_of,
                lse_dtype: lse_of,
                lse_out,
                heads: 1 + (n as i64 * 3) % 7,
                dim,
                gap,
                heads_first: n % 2 == 0,
                base: match n % 3 {
                    0 => LogBase::E,
                    _ => LogBase::Two,
                },
                seed: seed ^ n as u64,
            });
        }
    }
    merges
}

pub fn merge_general() {
    let (device, oracle) = (session(), oracle());
    for merge in merges(fresh_seed()) {
        for (tokens, without_a) in [(41, 0), (41, 7), (3, 3), (1, 0), (0, 0)] {
            let in_place = [false, true];
            for in_place in &in_place[..1 + usize::from(merge.format.0.is_none())] {
                let two = Two {
                    tokens,
                    without_a,
                    in_place: *in_place,
                };
                let of = (merge.dtype, merge.wide());
                let (_, want) = run_two(&*oracle, &HostMemory, of, two);
                let of = (merge.dtype, merge);
                let (b, got) = run_two(&*device, &DeviceMemory, of, two);
                merge.assert_near(&got, &want);
                if merge.format.0.is_none() && !in_place {
                    assert_copied(&got, &b, tokens - without_a);
                }
            }
        }
        for (tokens, n) in [(17, 1), (17, 2), (33, 9), (5, 40)] {
            let many = |session: &dyn Session, memory: &dyn Memory, of: Merge| {
                let resident = |image| Resident::new(memory, image);
                let v = resident(of.values(merge.dtype, &[tokens, n], 5));
                let s = resident(of.lse(&[tokens, n], 6));
                let [v_out, s_out] = of.output(tokens).map(resident);
                let input = MergeStatesArgs {
                    v: v.tensor(),
                    s: s.tensor(),
                    v_out: v_out.tensor(),
                    s_out: Some(s_out.tensor()),
                    lse_base: of.base,
                    o_scale: of.format.1,
                };
                session.merge_states(&input, Stream::default()).unwrap();
                [v_out.current(), s_out.current()]
            };
            let want = many(&*oracle, &HostMemory, merge.wide());
            let got = many(&*device, &DeviceMemory, merge);
            merge.assert_near(&got, &want);
        }
    }
}

/// The outputs of tokens whose states `indptr` names, of `all`.
fn run_varlen(
    session: &dyn Session,
    memory: &dyn Memory,
    (of, merge): (DType, Merge),
    all: i64,
    indptr: &[i32],
) -> [Image; 2] {
    let resident = |image| Resident::new(memory, image);
    let v = resident(merge.values(of, &[all], 7));
    let s = resident(merge.lse(&[all], 8));
    let offsets = resident(Image::of_i32(&[indptr.len() as i64], indptr));
    let [v_out, s_out] = merge.output(indptr.len() as i64 - 1).map(resident);
    let input = MergeVarlenArgs {
        v: v.tensor(),
        s: s.tensor(),
        indptr: offsets.tensor(),
        v_out: v_out.tensor(),
        s_out: Some(s_out.tensor()),
        lse_base: merge.base,
        o_scale: merge.format.1,
    };
    session.merge_varlen(&input, Stream::default()).unwrap();
    [v_out.current(), s_out.current()]
}

pub fn merge_varlen() {
    let (device, oracle) = (session(), oracle());
    for merge in merges(fresh_seed()) {
        for tokens in [37, 1, 0] {
            let mut indptr = vec![(merge.seed % 3) as i32];
            for token in 0..tokens {
                let count = [0, 1, 2, 3, 9, 40][(mix(merge.seed ^ token as u64) % 6) as usize];
                indptr.push(indptr[token] + count);
            }
            let all = i64::from(indptr[tokens]) + 2;
            let of = (merge.dtype, merge.wide());
            let want = run_varlen(&*oracle, &HostMemory, of, all, &indptr);
            let of = (merge.dtype, merge);
            let got = run_varlen(&*device, &DeviceMemory, of, all, &indptr);
            merge.assert_near(&got, &want);
        }
    }
}

/// Tokens have those of the states that exist, whatever their numbers say.
pub fn states_beyond_the_tensors() {
    let (device, oracle) = (session(), oracle());
    let all = 9;
    let wrong = [
        3,
        i32::MAX,
        i32::MIN,
        -1,
        4,
        1,
        1 << 30,
        1 << 24,
        2,
        -1000,
        9,
        10,
        6,
        9,
    ];
    for merge in merges(fresh_seed()) {
        let of = (merge.dtype, merge);
        let got = run_varlen(&*device, &DeviceMemory, of, all, &wrong);
        for (token, pair) in wrong.windows(2).enumerate() {
            let [first, after] = [pair[0], pair[1]].map(|n| n.clamp(0, all as i32));
            let right = [first, after.max(first)];
            let of = (merge.dtype, merge.wide());
            let want = run_varlen(&*oracle, &HostMemory, of, all, &right);
            merge.assert_near(&row(&got, token as i64), &want);
        }
    }
}

/// A token's part of the outputs.
fn row([v, s]: &[Image; 2], token: i64) -> [Image; 2] {
    let of = |image: &Image| {
        let mut shape = image.view.shape.clone();
        shape[0] = 1;
        let mut row = Image::poisoned(View::compact(image.view.dtype, &shape));
        for_each_index(&shape, |at| {
            let from = [&[token], &at[1..]].concat();
            row.put(at, image.bits(&from));
        });
        row
    };
    [of(v), of(s)]
}
