//! Append and merges on the device against the oracle on the host, from the same bytes.

use crate::common::codec::{encode, rounded, unit_roundoff};
use crate::common::door::{Door, RustDoor, Session};
use crate::common::golden;
use crate::common::instance::for_each_index;
use crate::common::memory::{HostMemory, Image, Memory, Resident, View};
use crate::common::values::{mix, normal, uniform};
use crate::gpu::DeviceMemory;
use crate::problems::session;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{AppendArgs, CacheForm, KvLayout, LogBase, MergeArgs, MergeStatesArgs};

pub fn oracle() -> Box<dyn Session> {
    RustDoor.open(Target::Reference).expect("the oracle")
}

/// A tensor of normal numbers, with gaps around its rows.
pub fn random(dtype: DType, shape: &[i64], gap: u32, seed: u64) -> Image {
    let mut gaps = vec![gap; shape.len()];
    gaps[shape.len() - 1] = 0;
    let mut image = Image::poisoned(View::gapped(dtype, shape, &gaps, gap));
    for_each_index(shape, |index| {
        let hash = index
            .iter()
            .fold(mix(seed), |hash, &i| mix(hash ^ i as u64));
        image.put(index, encode(dtype, 20.0 * normal(hash)));
    });
    image
}

/// Another one in every run; a failing case says which.
pub fn fresh_seed() -> u64 {
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
    println!("  seed {seed:#x}");
    seed
}

/// One append as plain data.
struct Append {
    source: DType,
    cache: DType,
    layout: KvLayout,
    dims: (i64, i64),
    page_size: i64,
    gap: u32,
    slots: DType,
    per_head: bool,
    seed: u64,
}

const HEADS: i64 = 3;
const TOKENS: i64 = 37;
const PAGES: i64 = 23;

impl Append {
    /// The bytes of both caches afterwards.
    fn run(&self, session: &dyn Session, memory: &dyn Memory) -> [Vec<u8>; 2] {
        let resident = |image| Resident::new(memory, image);
        let source = |dim, seed| {
            resident(random(
                self.source,
                &[TOKENS + 2, HEADS, dim],
                self.gap,
                seed,
            ))
        };
        let cache = |dim| {
            let shape = match self.layout {
                KvLayout::Nhd => [PAGES, self.page_size, HEADS, dim],
                KvLayout::Hnd => [PAGES, HEADS, self.page_size, dim],
            };
            let gaps = [self.gap, self.gap, self.gap, 0];
            resident(Image::poisoned(View::gapped(
                self.cache, &shape, &gaps, self.gap,
            )))
        };
        let (key, value) = (
            source(self.dims.0, self.seed),
            source(self.dims.1, mix(self.seed)),
        );
        let (k_cache, v_cache) = (cache(self.dims.0), cache(self.dims.1));
        let slots = resident(Image::of_bits(self.slots, &[TOKENS], self.slots()));
        let fp8 = self.cache != self.source;
        let scales = |values: &[f32]| {
            let image = Image::of_f32(&[values.len() as i64], values);
            (fp8 && self.per_head).then(|| resident(image))
        };
        let k_scales = scales(&[0.5, 0.3, 2.0]);
        // One for all heads, or one each.
        let v_scales = match self.layout {
            KvLayout::Nhd => scales(&[1.7]),
            KvLayout::Hnd => scales(&[3.0, 0.2, 0.9]),
        };
        let input = AppendArgs {
            key: key.tensor(),
            value: value.tensor(),
            k_cache: k_cache.tensor(),
            v_cache: v_cache.tensor(),
            layout: self.layout,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: slots.tensor(),
            k_scale: if fp8 { 0.07 } else { 0.0 },
            v_scale: if fp8 { 0.3 } else { 0.0 },
            k_scales: k_scales.as_ref().map(Resident::tensor),
            v_scales: v_scales.as_ref().map(Resident::tensor),
        };
        session.append(&input, Stream::default()).unwrap();
        [k_cache.current().bytes, v_cache.current().bytes]
    }

    /// Different slots in no order; every fifth token has none.
    fn slots(&self) -> Vec<u64> {
        let all = PAGES * self.page_size;
        (0..TOKENS)
            .map(|token| match token % 5 {
                3 => u64::MAX,
                _ => ((token * 7) % all.max(1)) as u64,
            })
            .map(|slot| match self.slots {
                DType::I32 => u64::from(slot as u32),
                _ => slot,
            })
            .collect()
    }
}

pub fn append() {
    let (device, oracle) = (session(), oracle());
    let seed = fresh_seed();
    for source in [DType::BF16, DType::F16, DType::F32] {
        for cache in [source, DType::F8E4M3, DType::F8E5M2] {
            for (n, layout) in [(0, KvLayout::Nhd), (1, KvLayout::Hnd)] {
                for (gap, dims) in [(0, (64, 64)), (8, (128, 80)), (3, (72, 8)), (16, (16, 256))] {
                    let append = Append {
                        source,
                        cache,
                        layout,
                        dims,
                        page_size: [16, 13][n],
                        gap,
                        slots: [DType::I32, DType::I64][n],
                        per_head: gap >= 8,
                        seed,
                    };
                    let want = append.run(&*oracle, &HostMemory);
                    let got = append.run(&*device, &DeviceMemory);
                    assert!(
                        want == got,
                        "{source} to {cache}, {layout:?}, gap {gap}, dims {dims:?}"
                    );
                }
            }
        }
    }
}

/// lse around 0, and every seventh empty in one of three ways.
fn states(shape: &[i64], seed: u64) -> Image {
    let mut image = Image::poisoned(View::compact(DType::F32, shape));
    for_each_index(shape, |index| {
        let hash = index
            .iter()
            .fold(mix(seed), |hash, &i| mix(hash ^ i as u64));
        let lse = match hash % 21 {
            0 => f32::NEG_INFINITY,
            1 => f32::INFINITY,
            2 => f32::NAN,
            _ => (12.0 * uniform(hash) - 4.0) as f32,
        };
        image.put(index, lse.to_bits().into());
    });
    image
}

/// What an element may be off by before it is rounded: so much, and so much of itself.
pub struct Error {
    pub absolute: f64,
    pub relative: f64,
}

/// Of `v_out`: weights are right to 1e-6, and `Σ p·|v|` is at most 20 · 3.5.
pub const VALUE_ERROR: Error = Error {
    absolute: 70.0 * 1e-6,
    relative: 0.0,
};
/// Of `s_out`.
pub const LSE_ERROR: Error = Error {
    absolute: 2e-6,
    relative: 2e-6,
};

/// Every element is a rounding of a number near the oracle's, which was rounded itself.
pub fn assert_close(want: &Image, got: &Image, error: &Error, what: &str) {
    let dtype = want.view.dtype;
    for_each_index(&want.view.shape, |index| {
        let (want, got) = (want.value(index), got.value(index));
        // A row that the mask leaves alone keeps its NaN.
        if want == got || want.is_nan() && got.is_nan() {
            return;
        }
        let t = error.absolute + want.abs() * (error.relative + unit_roundoff(dtype));
        let (low, high) = (rounded(dtype, want - t), rounded(dtype, want + t));
        assert!(
            low <= got && got <= high,
            "{what}{index:?}: {got} is not {want}"
        );
    });
}

/// `v_out` and `s_out` after a merge of `n` states, or of two in place.
fn merged(
    session: &dyn Session,
    memory: &dyn Memory,
    dtype: DType,
    [tokens, n, heads, dim]: [i64; 4],
    (gap, seed): (u32, u64),
) -> [Image; 2] {
    let resident = |image| Resident::new(memory, image);
    if n == 0 {
        let side = |seed| {
            (
                resident(random(dtype, &[tokens, heads, dim], gap, seed)),
                resident(states(&[tokens, heads], seed)),
            )
        };
        let ((v_a, s_a), (v_b, s_b)) = (side(seed), side(mix(seed)));
        let bytes = (0..tokens as u64).map(|token| u64::from(token % 4 != 1));
        let mask = resident(Image::of_bits(DType::U8, &[tokens], bytes));
        let input = MergeArgs {
            v_a: v_a.tensor(),
            s_a: s_a.tensor(),
            v_b: v_b.tensor(),
            s_b: s_b.tensor(),
            v_out: v_a.tensor(),
            s_out: Some(s_a.tensor()),
            mask: Some(mask.tensor()),
            lse_base: base(gap == 0),
            num_tokens_without_a: 0,
            o_scale: 0.0,
        };
        session.merge(&input, Stream::default()).unwrap();
        return [v_a.current(), s_a.current()];
    }
    let v = resident(random(dtype, &[tokens, n, heads, dim], gap, seed));
    let s = resident(states(&[tokens, n, heads], mix(seed)));
    let v_out = resident(Image::poisoned(View::compact(dtype, &[tokens, heads, dim])));
    let s_out = resident(Image::poisoned(View::compact(DType::F32, &[tokens, heads])));
    let input = MergeStatesArgs {
        v: v.tensor(),
        s: s.tensor(),
        v_out: v_out.tensor(),
        s_out: Some(s_out.tensor()),
        lse_base: base(gap != 0),
        o_scale: 0.0,
    };
    session.merge_states(&input, Stream::default()).unwrap();
    [v_out.current(), s_out.current()]
}

fn base(two: bool) -> LogBase {
    if two { LogBase::Two } else { LogBase::E }
}

pub fn merge() {
    let (device, oracle) = (session(), oracle());
    let seed = fresh_seed();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (shape, gap) in [
            ([41, 0, 5, 128], 0),
            ([41, 0, 1, 24], 3),
            ([3, 0, 2, 520], 8),
            ([17, 1, 3, 64], 0),
            ([17, 9, 3, 192], 8),
            ([5, 40, 2, 13], 1),
            ([0, 2, 2, 64], 0),
        ] {
            let want = merged(&*oracle, &HostMemory, dtype, shape, (gap, seed));
            let got = merged(&*device, &DeviceMemory, dtype, shape, (gap, seed));
            let what = format!("of {dtype} {shape:?} ");
            assert_close(&want[0], &got[0], &VALUE_ERROR, &format!("v {what}"));
            assert_close(&want[1], &got[1], &LSE_ERROR, &format!("s {what}"));
        }
    }
}

/// States by hand.
pub fn golden_merge() {
    golden::golden_merge(&*session(), &DeviceMemory);
}
