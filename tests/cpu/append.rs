//! Writing new tokens to a paged cache: which bytes land where, and that no other byte changes.

use crate::common::codec::{decode, encode};
use crate::common::door::{DOORS, Session};
use crate::common::instance::for_each_index;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::random;
use crate::common::values::{mix, normal, shuffled, uniform};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{AppendArgs, CacheForm, KvLayout};
use proptest::prelude::*;

/// One append as plain data.
#[derive(Debug, Clone)]
struct Append {
    source: DType,
    cache: DType,
    /// The caches are tensors of bytes and the input says what they hold.
    as_bytes: bool,
    heads: i64,
    head_dim_qk: i64,
    head_dim_vo: i64,
    page_size: i64,
    num_pages: i64,
    layout: KvLayout,
    /// Caches of rank 3; needs pages of one token.
    rank_3: bool,
    num_tokens: i64,
    /// Source rows without a slot.
    padded_rows: i64,
    wide_slots: bool,
    scale: f32,
    /// Elements of the scale tensors: none, one, one per head.
    scales: Option<bool>,
    gaps: [u32; 6],
    seed: u64,
}

fn appends() -> impl Strategy<Value = Append> {
    let float = prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]);
    let fp8 = prop::sample::select(vec![None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let dims = prop::sample::select(vec![8i64, 64, 72, 80, 128, 256, 13, 20, 300]);
    let shape = (1i64..9, dims.clone(), dims, any::<bool>());
    let page_sizes = prop::sample::select(vec![16i64, 1, 3, 8, 32]);
    let pages = (page_sizes, 1i64..9, any::<[bool; 2]>());
    let gap = || prop_oneof![2 => Just(0u32), 1 => Just(8), 1 => 1u32..9];
    let gaps = [gap(), gap(), gap(), gap(), gap(), gap()];
    let tokens = (0i64..43, 0i64..3, any::<bool>());
    let scale = prop_oneof![1 => Just(0.0f32), 2 => 0.01f32..4.0, 1 => -2.0f32..-0.1];
    let scales = (scale, any::<Option<bool>>(), any::<bool>());
    (
        (float, fp8),
        shape,
        pages,
        tokens,
        scales,
        gaps,
        any::<u64>(),
    )
        .prop_map(
            |((source, fp8), shape, pages, tokens, scales, gaps, seed)| {
                let layout = if pages.2[0] {
                    KvLayout::Nhd
                } else {
                    KvLayout::Hnd
                };
                Append {
                    source,
                    cache: fp8.unwrap_or(source),
                    as_bytes: fp8.is_some() && scales.2,
                    heads: shape.0,
                    head_dim_qk: shape.1,
                    head_dim_vo: if shape.3 { shape.1 } else { shape.2 },
                    page_size: pages.0,
                    num_pages: pages.1,
                    layout,
                    rank_3: pages.0 == 1 && pages.2[1],
                    num_tokens: tokens.0,
                    padded_rows: tokens.1,
                    wide_slots: tokens.2,
                    scale: if fp8.is_some() { scales.0 } else { 0.0 },
                    scales: scales.1.filter(|_| fp8.is_some()),
                    gaps,
                    seed,
                }
            },
        )
}

#[derive(Clone, Copy)]
enum Side {
    Key,
    Value,
}

impl Append {
    fn dim(&self, side: Side) -> i64 {
        match side {
            Side::Key => self.head_dim_qk,
            Side::Value => self.head_dim_vo,
        }
    }

    /// The slot of each token: no two alike, some negative.
    fn slots(&self) -> Vec<i64> {
        let free = shuffled(self.seed, (self.num_pages * self.page_size) as usize);
        let mut free = free.into_iter();
        let draw = |token| match mix(self.seed ^ token) % 5 {
            0 => Some(-1 - (token as i64 % 3)),
            _ => free.next().map(i64::from),
        };
        // Tokens that find no slot any more are skipped too.
        (0..self.num_tokens as u64)
            .map(draw)
            .map(|slot| slot.unwrap_or(-1))
            .collect()
    }

    /// Source bits: mostly ordinary numbers, and everything that is hard to round.
    fn bits(&self, side: Side, token: i64, head: i64, d: i64) -> u64 {
        let start = mix(self.seed ^ (side as u64 + 1) << 32);
        let hash = [token, head, d]
            .iter()
            .fold(start, |hash, &i| mix(hash ^ i as u64));
        let special = [
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            -0.0,
            1e-6,
            -1e30,
            448.0,
        ];
        let value = match hash % 50 {
            pick if pick < special.len() as u64 => special[pick as usize],
            // Halfway between fp8 values: ties.
            10..20 => f64::from((hash >> 32) as u8) * 0.0625,
            _ => normal(hash) * 3.0,
        };
        encode(self.source, value)
    }

    fn num_scales(&self) -> Option<usize> {
        self.scales
            .map(|per_head| if per_head { self.heads as usize } else { 1 })
    }

    fn head_scale(&self, side: Side, head: i64) -> f32 {
        match self.num_scales() {
            None => 1.0,
            Some(n) => {
                let index = if n == 1 { 0 } else { head };
                let hash = mix(self.seed ^ (side as u64 + 7) << 40 ^ index as u64);
                (0.01 + uniform(hash)) as f32
            }
        }
    }

    /// The byte or bits that the cache must hold. The divisor is one float32 product.
    fn stored(&self, side: Side, token: i64, head: i64, d: i64) -> u64 {
        let bits = self.bits(side, token, head, d);
        if self.cache == self.source {
            return bits;
        }
        let scale = if self.scale == 0.0 { 1.0 } else { self.scale };
        let value = decode(self.source, bits) as f32;
        let stored = value / (scale * self.head_scale(side, head));
        encode(self.cache, stored.into())
    }

    fn source(&self, side: Side) -> Image {
        let rows = self.num_tokens + self.padded_rows;
        let shape = [rows, self.heads, self.dim(side)];
        let [middle, inner, ..] = self.gaps;
        let mut image = Image::poisoned(View::gapped(self.source, &shape, &[middle, inner, 0], 0));
        for_each_index(&[self.num_tokens, self.heads, self.dim(side)], |at| {
            image.put(at, self.bits(side, at[0], at[1], at[2]));
        });
        image
    }

    fn cache(&self, side: Side) -> Image {
        let dim = self.dim(side);
        let [.., outer, middle, inner, lead] = self.gaps;
        let dtype = if self.as_bytes { DType::U8 } else { self.cache };
        let (shape, gaps) = match (self.rank_3, self.layout) {
            (true, _) => (
                vec![self.num_pages, self.heads, dim],
                vec![middle, inner, 0],
            ),
            (_, KvLayout::Nhd) => (
                vec![self.num_pages, self.page_size, self.heads, dim],
                vec![outer, middle, inner, 0],
            ),
            (_, KvLayout::Hnd) => (
                vec![self.num_pages, self.heads, self.page_size, dim],
                vec![outer, middle, inner, 0],
            ),
        };
        Image::poisoned(View::gapped(dtype, &shape, &gaps, lead))
    }

    /// What a cache must hold afterwards.
    fn expected(&self, side: Side) -> Image {
        let mut image = self.cache(side);
        for (token, slot) in (0..).zip(self.slots()).filter(|&(_, slot)| slot >= 0) {
            let (page, at) = (slot / self.page_size, slot % self.page_size);
            for_each_index(&[self.heads, self.dim(side)], |index| {
                let (head, d) = (index[0], index[1]);
                let bits = self.stored(side, token, head, d);
                match (self.rank_3, self.layout) {
                    (true, _) => image.put(&[page, head, d], bits),
                    (_, KvLayout::Nhd) => image.put(&[page, at, head, d], bits),
                    (_, KvLayout::Hnd) => image.put(&[page, head, at, d], bits),
                }
            });
        }
        image
    }

    fn slot_mapping(&self) -> Image {
        let dtype = if self.wide_slots {
            DType::I64
        } else {
            DType::I32
        };
        let bits = self.slots().into_iter().map(|slot| slot as u64);
        Image::of_bits(dtype, &[self.num_tokens], bits)
    }

    fn scale_tensor(&self, side: Side) -> Option<Image> {
        let scales: Vec<f32> = (0..self.num_scales()? as i64)
            .map(|head| self.head_scale(side, head))
            .collect();
        Some(Image::of_f32(&[scales.len() as i64], &scales))
    }

    /// Appends and gives both caches.
    fn run(&self, session: &dyn Session) -> folio::error::Result<[Image; 2]> {
        let resident = |image| Resident::new(&HostMemory, image);
        let [key, value] = [Side::Key, Side::Value].map(|side| resident(self.source(side)));
        let [k, v] = [Side::Key, Side::Value].map(|side| resident(self.cache(side)));
        let slots = resident(self.slot_mapping());
        let scales = [Side::Key, Side::Value].map(|side| self.scale_tensor(side).map(resident));
        let [k_scales, v_scales] = scales.each_ref().map(|s| s.as_ref().map(Resident::tensor));
        let input = AppendArgs {
            key: key.tensor(),
            value: value.tensor(),
            k_cache: k.tensor(),
            v_cache: v.tensor(),
            layout: self.layout,
            kv_dtype: self.as_bytes.then_some(self.cache),
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: slots.tensor(),
            k_scale: self.scale,
            v_scale: self.scale,
            k_scales,
            v_scales,
        };
        session.append(&input, Stream::default())?;
        assert!(key.is_untouched() && value.is_untouched() && slots.is_untouched());
        Ok([k.current(), v.current()])
    }
}

/// An fp8 NaN may have either sign; everything else must be the same to the bit.
fn same(dtype: DType, a: u64, b: u64) -> bool {
    a == b || dtype.is_fp8() && decode(dtype, a).is_nan() && decode(dtype, b).is_nan()
}

fn compare(append: &Append, side: Side, got: &Image) -> Result<(), String> {
    let want = append.expected(side);
    let mut normalised = got.clone();
    let mut difference = Ok(());
    for_each_index(&want.view.shape, |at| {
        let (is, wanted) = (got.bits(at), want.bits(at));
        if !same(append.cache, is, wanted) {
            difference = Err(format!("{at:?} is {is:#x}, not {wanted:#x}"));
        }
        normalised.put(at, wanted);
    });
    difference?;
    match normalised.bytes == want.bytes {
        true => Ok(()),
        false => Err("bytes outside of the cache's elements changed".into()),
    }
}

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

/// More bytes than caches hold may take another way than few.
#[test]
fn long_appends_land_in_their_slots_too() {
    for (source, gap, lead) in [(DType::F32, 0, 0), (DType::F32, 8, 3), (DType::BF16, 0, 1)] {
        let append = Append {
            source,
            cache: source,
            as_bytes: false,
            heads: 16,
            head_dim_qk: 128,
            head_dim_vo: 136,
            page_size: 4,
            num_pages: 100,
            layout: KvLayout::Nhd,
            rank_3: false,
            num_tokens: 400,
            padded_rows: 0,
            wide_slots: false,
            scale: 0.0,
            scales: None,
            gaps: [gap, 0, gap, 0, 0, lead],
            seed: 11,
        };
        for session in sessions() {
            let [k, v] = append.run(&*session).unwrap();
            assert_eq!(compare(&append, Side::Key, &k), Ok(()), "k_cache");
            assert_eq!(compare(&append, Side::Value, &v), Ok(()), "v_cache");
        }
    }
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn every_token_lands_in_its_slot_and_nowhere_else(append in appends()) {
        for session in sessions() {
            let [k, v] = append.run(&*session).unwrap();
            prop_assert_eq!(compare(&append, Side::Key, &k), Ok(()), "k_cache");
            prop_assert_eq!(compare(&append, Side::Value, &v), Ok(()), "v_cache");
        }
    }
}
