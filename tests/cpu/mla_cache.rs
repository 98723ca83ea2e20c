//! Caches of latent records: which bytes an append writes where, what a gather makes of them, and that no other byte
//! changes.

#[path = "../fuzz/guarded.rs"]
#[allow(dead_code)]
mod guarded;

use crate::common::codec::{encode, rounded, unit_roundoff};
use crate::common::door::{DOORS, Door, RustDoor, Session};
use crate::common::golden;
use crate::common::instance::for_each_index;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::mla_cache::{FLOATS, Format, MlaAppend, MlaGather, Records, Rotation};
use crate::common::random;
use crate::common::reserved::Reserved;
use crate::common::values::{mix, normal};
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{LatentCache, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary};
use folio::tensor::{Device, Tensor};
use guarded::Guarded;
use proptest::prelude::*;

fn gap() -> impl Strategy<Value = u32> {
    prop_oneof![2 => Just(0u32), 1 => Just(8), 1 => 1u32..9]
}

/// A cache for tokens of `source`; what a gather reads is of any type.
fn records(source: Option<DType>) -> impl Strategy<Value = Records> {
    let plain = match source {
        Some(source) => vec![source, DType::F8E4M3, DType::F8E5M2],
        None => [&FLOATS[..], &[DType::F8E4M3, DType::F8E5M2]].concat(),
    };
    let format = prop_oneof![
        2 => prop::sample::select(plain).prop_map(Format::Plain),
        1 => Just(Format::DsMla),
    ];
    let rank = prop::sample::select(vec![512i64, 128, 8, 256, 13, 200]);
    let rope_dim = prop::sample::select(vec![64i64, 64, 0, 32, 6, 142, 300]);
    let pages = (1i64..6, prop::sample::select(vec![16i64, 1, 3, 64]));
    (
        format,
        rank,
        rope_dim,
        pages,
        any::<[bool; 2]>(),
        [gap(), gap(), gap()],
    )
        .prop_map(
            |(format, rank, rope_dim, (num_pages, page_size), [split, bytes], gaps)| match format {
                Format::DsMla => Records {
                    format,
                    rank: 512,
                    rope_dim: 64,
                    num_pages,
                    page_size,
                    split: false,
                    as_bytes: bytes,
                    gaps,
                },
                Format::Plain(dtype) => Records {
                    format,
                    rank,
                    rope_dim,
                    num_pages,
                    page_size,
                    split: split && rope_dim > 0,
                    as_bytes: bytes && dtype.is_fp8(),
                    gaps,
                },
            },
        )
}

fn rotations() -> impl Strategy<Value = Rotation> {
    let queries = prop::option::of((0i64..5, any::<bool>()));
    (any::<[bool; 3]>(), any::<Option<bool>>(), queries).prop_map(|(flags, rope_out, queries)| {
        Rotation {
            is_interleaved: flags[0],
            f32_table: flags[1],
            wide_positions: flags[2],
            rope_out,
            queries,
        }
    })
}

fn appends() -> impl Strategy<Value = MlaAppend> {
    prop::sample::select(FLOATS.to_vec()).prop_flat_map(|source| {
        let scale = prop_oneof![1 => Just(0.0f32), 2 => 0.01f32..4.0, 1 => -2.0f32..-0.1];
        (
            records(Some(source)),
            (0i64..43, 0i64..3, any::<[bool; 2]>()),
            scale,
            prop::option::of(rotations()),
            [gap(), gap()],
            any::<u64>(),
        )
            .prop_map(
                move |(records, (num_tokens, padded_rows, flags), scale, rotation, gaps, seed)| {
                    let scaled = matches!(records.format, Format::Plain(dtype) if dtype.is_fp8());
                    MlaAppend {
                        source,
                        num_tokens,
                        padded_rows,
                        middle: flags[0],
                        wide_slots: flags[1],
                        k_scale: if scaled { scale } else { 0.0 },
                        rotation: rotation.filter(|_| records.rope_dim > 0),
                        gaps,
                        seed,
                        records,
                    }
                },
            )
    })
}

fn gathers() -> impl Strategy<Value = MlaGather> {
    let lengths = prop_oneof![1 => Just(0i64), 3 => 0i64..40];
    let requests = prop::collection::vec((lengths, 0i64..70), 0..9);
    let scale = prop_oneof![1 => Just(0.0f32), 2 => 0.01f32..4.0];
    (
        records(None),
        prop::sample::select(FLOATS.to_vec()),
        requests,
        (any::<[bool; 3]>(), random::integers()),
        (scale, gap(), [0i64..3, 0i64..3]),
        any::<u64>(),
    )
        .prop_map(
            |(
                records,
                dst,
                requests,
                ([split, with_starts, as_table], integers),
                (scale, gap, spare_rows),
                seed,
            )| {
                let scaled = matches!(records.format, Format::Plain(dtype) if dtype.is_fp8());
                MlaGather {
                    dst,
                    split_dst: split && records.rope_dim > 0,
                    requests,
                    spare_rows,
                    with_starts,
                    as_table,
                    integers,
                    k_scale: if scaled { scale } else { 0.0 },
                    gap,
                    seed,
                    records,
                }
            },
        )
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

#[test]
fn golden_records() {
    for session in sessions() {
        golden::golden_records(&*session, &HostMemory);
    }
}

/// Angles as models have them, whose products are not exact: a rounding of a number near that of float64.
#[test]
fn rotations_by_any_angle() {
    let (tokens, heads, dim, max_position) = (7i64, 3i64, 64i64, 1000i64);
    let angle = |position: i64, pair: i64| position as f64 * 10000f64.powf(-(pair as f64) / 32.0);
    let entry = |position, at: i64| match at < 32 {
        true => angle(position, at).cos(),
        false => angle(position, at - 32).sin(),
    };
    let position = |token: i64| token * 142;
    for (dtype, is_interleaved) in FLOATS.into_iter().flat_map(|d| [(d, false), (d, true)]) {
        let filled = |shape: &[i64], value: &dyn Fn(&[i64]) -> f64, dtype| {
            let mut image = Image::poisoned(View::compact(dtype, shape));
            for_each_index(shape, |at| image.put(at, encode(dtype, value(at))));
            Resident::new(&HostMemory, image)
        };
        let number = |at: &[i64]| normal(at.iter().fold(5, |hash, &i| mix(hash ^ i as u64)));
        let table = filled(&[max_position, dim], &|at| entry(at[0], at[1]), DType::F32);
        let latent = filled(&[tokens, 8], &number, dtype);
        let rope = filled(&[tokens, dim], &number, dtype);
        let positions: Vec<i32> = (0..tokens).map(|token| position(token) as i32).collect();
        let positions = Resident::new(&HostMemory, Image::of_i32(&[tokens], &positions));
        let slots = Resident::new(&HostMemory, Image::of_i32(&[tokens], &[-1; 7]));
        let cache = Resident::new(
            &HostMemory,
            Image::poisoned(View::compact(dtype, &[1, 1, 8 + dim])),
        );
        for session in sessions() {
            let q = filled(&[tokens, heads, dim], &number, dtype);
            let input = MlaAppendArgs {
                latent: latent.tensor(),
                rope: Some(rope.tensor()),
                cache: LatentCache {
                    kv: cache.tensor(),
                    kv_rope: None,
                    kv_dtype: None,
                    is_ds_mla: false,
                },
                slot_mapping: slots.tensor(),
                k_scale: 0.0,
                rotary: Some(Rotary {
                    cos_sin_cache: table.tensor(),
                    positions: positions.tensor(),
                    is_interleaved,
                    rope_out: None,
                    q_rope: Some(q.tensor()),
                    q_rope_out: None,
                }),
            };
            session.mla_append(&input, Stream::default()).unwrap();
            assert!(cache.is_untouched(), "no token has a slot");
            let got = q.current();
            for_each_index(&[tokens, heads, 32], |at| {
                let (token, head, pair) = (at[0], at[1], at[2]);
                let (x, y) = match is_interleaved {
                    true => (2 * pair, 2 * pair + 1),
                    false => (pair, pair + 32),
                };
                let value = |d| q.image().value(&[token, head, d]);
                let angle = |at| rounded(DType::F32, entry(position(token), at));
                let (cos, sin) = (angle(pair), angle(32 + pair));
                // Two products and a sum of at most |x| + |y|, each rounded to fp32; then a rounding to the type.
                let slack = 2.0 * 2f64.powi(-24) * (value(x).abs() + value(y).abs());
                for (d, want) in [
                    (x, value(x) * cos - value(y) * sin),
                    (y, value(y) * cos + value(x) * sin),
                ] {
                    let is = got.value(&[token, head, d]);
                    let bound = slack + unit_roundoff(dtype) * (want.abs() + slack);
                    assert!(
                        (is - want).abs() <= bound,
                        "{dtype} {at:?}: {is} is not {want}"
                    );
                }
            });
        }
    }
}

/// A cache that is larger than 32 bits count, and some of its slots in a row.
struct FarCache {
    format: Format,
    page_size: i64,
    /// Bytes from page to page.
    stride: i64,
    /// Those that the tokens go to.
    pages: Vec<i64>,
}

impl FarCache {
    const RANK: i64 = 512;
    const ROPE: i64 = 64;
    const TOKENS: i64 = 20;

    fn slot(&self, token: i64) -> i64 {
        self.pages[(token / self.page_size) as usize] * self.page_size + token % self.page_size
    }

    fn record(&self) -> (DType, i64) {
        match self.format {
            Format::Plain(dtype) => (dtype, Self::RANK + Self::ROPE),
            Format::DsMla => (DType::U8, 656),
        }
    }

    fn stated(&self, kv: Tensor) -> LatentCache {
        LatentCache {
            kv,
            kv_rope: None,
            kv_dtype: None,
            is_ds_mla: self.format == Format::DsMla,
        }
    }

    /// Appends tokens to these slots.
    fn append(&self, session: &dyn Session, cache: Tensor, slots: &[i64]) {
        let rows = |dim: i64, seed: u64| {
            let numbers = 0..Self::TOKENS * dim;
            let bits = numbers.map(|n| encode(DType::BF16, normal(mix(seed ^ n as u64))));
            let image = Image::of_bits(DType::BF16, &[Self::TOKENS, dim], bits);
            Resident::new(&HostMemory, image)
        };
        let (latent, rope) = (rows(Self::RANK, 3 << 32), rows(Self::ROPE, 4 << 32));
        let slots = slots.iter().map(|&slot| slot as u64);
        let slots = Image::of_bits(DType::I64, &[Self::TOKENS], slots);
        let slots = Resident::new(&HostMemory, slots);
        let input = MlaAppendArgs {
            latent: latent.tensor(),
            rope: Some(rope.tensor()),
            cache: self.stated(cache),
            slot_mapping: slots.tensor(),
            k_scale: 0.0,
            rotary: None,
        };
        session.mla_append(&input, Stream::default()).unwrap();
    }

    /// Gathers one request of these pages.
    fn gather(&self, session: &dyn Session, cache: Tensor, pages: &[i64]) -> Image {
        let view = View::compact(DType::BF16, &[Self::TOKENS, Self::RANK + Self::ROPE]);
        let dst = Resident::new(&HostMemory, Image::poisoned(view));
        let ends = Image::of_i32(&[2], &[0, Self::TOKENS as i32]);
        let ends = Resident::new(&HostMemory, ends);
        let ids = pages.iter().map(|&page| page as u64);
        let table = Image::of_bits(DType::I64, &[1, pages.len() as i64], ids);
        let table = Resident::new(&HostMemory, table);
        let input = MlaGatherArgs {
            cache: self.stated(cache),
            dst: dst.tensor(),
            dst_rope: None,
            cu_seq_lens: ends.tensor(),
            seq_starts: None,
            pages: RecordPages::Table(table.tensor()),
            k_scale: 0.0,
        };
        session.mla_gather(&input, Stream::default()).unwrap();
        dst.current()
    }

    /// What comes to the slots, byte by byte, and what is read there is that of the first pages of a small cache.
    fn check(&self, session: &dyn Session) {
        let (dtype, width) = self.record();
        let (num_pages, size) = (self.pages.len() as i64, dtype.size() as i64);
        let small = View::compact(dtype, &[num_pages, self.page_size, width]);
        let small = Resident::new(&HostMemory, Image::poisoned(small));
        let slots: Vec<i64> = (0..Self::TOKENS).collect();
        self.append(session, small.tensor(), &slots);
        let bytes = small.current().bytes;

        let shape = [self.pages.iter().max().unwrap() + 1, self.page_size, width];
        let reserved = Reserved::new((shape[0] * self.stride) as usize);
        let far = reserved.tensor(dtype, &shape, &[self.stride / size, width, 1]);
        let slots: Vec<i64> = (0..Self::TOKENS).map(|token| self.slot(token)).collect();
        self.append(session, far, &slots);
        let record = (width * size) as usize;
        for (token, slot) in slots.into_iter().enumerate() {
            let page = slot / self.page_size * self.stride;
            let start = page as usize + (slot % self.page_size) as usize * record;
            let want = &bytes[token * record..][..record];
            assert!(reserved.bytes(start, record) == want, "slot {slot}");
        }
        let pages: Vec<i64> = (0..num_pages).collect();
        let want = self.gather(session, small.tensor(), &pages);
        assert!(self.gather(session, far, &self.pages) == want, "rows");
    }
}

/// Slots beyond 2^31, and pages more than 2^32 bytes apart.
#[test]
fn far_slots() {
    for format in [
        Format::Plain(DType::BF16),
        Format::Plain(DType::F8E4M3),
        Format::DsMla,
    ] {
        let single = FarCache {
            format,
            page_size: 1,
            stride: 1152,
            pages: (0..FarCache::TOKENS).map(|n| n * 113_025_777).collect(),
        };
        assert!(single.slot(FarCache::TOKENS - 1) > i64::from(i32::MAX));
        let apart = FarCache {
            format,
            page_size: 16,
            stride: 6 << 30,
            pages: vec![4, 1],
        };
        for session in sessions() {
            single.check(&*session);
            apart.check(&*session);
        }
    }
}

/// For memory whose neighbours may not even be read.
fn cpu() -> Box<dyn Session> {
    let session = RustDoor.open(Target::Cpu { num_threads: 1 });
    session.expect("a CPU context")
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn every_record_is_written_to_its_slot_and_nowhere_else(append in appends()) {
        for session in sessions() {
            let got = append.run(&*session, &HostMemory).unwrap();
            prop_assert_eq!(append.check(&got), Ok(()));
        }
        append.run(&*cpu(), &Guarded::new(Device::Cpu)).unwrap();
    }

    #[test]
    fn every_row_gets_its_record_and_no_other_changes(gather in gathers()) {
        for session in sessions() {
            let got = gather.run(&*session, &HostMemory).unwrap();
            prop_assert_eq!(gather.check(&got), Ok(()));
        }
        gather.run(&*cpu(), &Guarded::new(Device::Cpu)).unwrap();
    }
}
