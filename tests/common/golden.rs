//! Golden values of MLA, computed by hand: a merge of two states, and the bytes of records.

use super::codec::encode;
use super::door::Session;
use super::memory::{Image, Memory, Resident, View};
use super::mla_cache::FLOATS;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{LatentCache, LogBase, MergeArgs, MergeStatesArgs, MlaAppendArgs};

/// Sums of 2 and 6 make one of 8: the states weigh a quarter and three, in natural logarithms and in binary ones.
pub fn golden_merge(session: &dyn Session, memory: &dyn Memory) {
    for dtype in FLOATS {
        for (base, lse, want) in [
            (LogBase::E, [2f32.ln(), 6f32.ln()], 2.079_441_5),
            (LogBase::Two, [1.0, 6f32.log2()], 3.0),
        ] {
            merge_two(session, memory, dtype, (base, lse, want));
        }
    }
}

/// Elements of a row of the states.
const DIM: i64 = 16;

/// Merges the states as two, and as a tensor of two.
fn merge_two(
    session: &dyn Session,
    memory: &dyn Memory,
    dtype: DType,
    (lse_base, lse, want): (LogBase, [f32; 2], f64),
) {
    let resident = |image| Resident::new(memory, image);
    // Multiples of 4, whose quarters no type rounds.
    let values = [|d: i64| (4 * d - 28) as f64, |d: i64| (16 - 8 * d) as f64];
    let bits = |n: usize| (0..DIM).map(move |d| encode(dtype, values[n](d)));
    let rows = |shape: &[i64], bits: Vec<u64>| resident(Image::of_bits(dtype, shape, bits));
    let [v_a, v_b] = [0, 1].map(|n| rows(&[1, 1, DIM], bits(n).collect()));
    let [s_a, s_b] = lse.map(|lse| resident(Image::of_f32(&[1, 1], &[lse])));
    let both = rows(&[1, 2, 1, DIM], bits(0).chain(bits(1)).collect());
    let lse_of_both = resident(Image::of_f32(&[1, 2, 1], &lse));
    let blank = |dtype, shape: &[i64]| resident(Image::poisoned(View::compact(dtype, shape)));
    let outputs = [0, 1].map(|_| (blank(dtype, &[1, 1, DIM]), blank(DType::F32, &[1, 1])));
    let two = MergeArgs {
        v_a: v_a.tensor(),
        s_a: s_a.tensor(),
        v_b: v_b.tensor(),
        s_b: s_b.tensor(),
        v_out: outputs[0].0.tensor(),
        s_out: Some(outputs[0].1.tensor()),
        mask: None,
        lse_base,
        num_tokens_without_a: 0,
        o_scale: 0.0,
    };
    session.merge(&two, Stream::default()).unwrap();
    let states = MergeStatesArgs {
        v: both.tensor(),
        s: lse_of_both.tensor(),
        v_out: outputs[1].0.tensor(),
        s_out: Some(outputs[1].1.tensor()),
        lse_base,
        o_scale: 0.0,
    };
    session.merge_states(&states, Stream::default()).unwrap();
    for (v, s) in &outputs {
        let (v, is) = (v.current(), s.current().value(&[0, 0]));
        let bound = 2e-6 * (1.0 + want);
        assert!((is - want).abs() <= bound, "{dtype}: lse {is}, not {want}");
        for d in 0..DIM {
            let [a, b] = [0, 1].map(|n| values[n](d));
            let (is, want) = (v.value(&[0, 0, d]), a / 4.0 + b * 3.0 / 4.0);
            // Weights are right to 1e-6.
            let bound = 1e-6 * (a.abs() / 4.0 + b.abs() * 3.0 / 4.0);
            assert!(
                (is - want).abs() <= bound,
                "{dtype} [{d}]: {is}, not {want}"
            );
        }
    }
}

/// A token of 512 + 64 elements, and its record as vLLM's writers make it.
struct Record {
    /// Of its elements; of bytes where it is `fp8_ds_mla`.
    element: DType,
    bytes: usize,
    k_scale: f32,
    /// What is not 0.
    latent: &'static [(i64, f64)],
    rope: &'static [(i64, f64)],
    stored: &'static [(usize, u8)],
}

/// `fp8_ds_mla`: blocks of the largest magnitudes 448, 896, 0 and 1.
const DS_MLA: Record = Record {
    element: DType::U8,
    bytes: 656,
    k_scale: 0.0,
    latent: &[
        (0, -448.0),
        (1, 1.0),
        (133, 896.0),
        (134, 3.0),
        (510, -0.5),
        (511, 1.0),
    ],
    rope: &[(0, 1.0), (1, -2.0)],
    stored: &[
        // e4m3: 448 is 0x7e, 1 is 0x38, 1.5 is 0x3c, 224 is 0x76.
        (0, 0xfe),
        (1, 0x38),
        (133, 0x7e),
        (134, 0x3c),
        (510, 0xf6),
        (511, 0x7e),
        // fp32 scales: 1, 2, the smallest normal number where there is nothing, and 1 / 448.
        (514, 0x80),
        (515, 0x3f),
        (519, 0x40),
        (522, 0x80),
        (524, 0x25),
        (525, 0x49),
        (526, 0x12),
        (527, 0x3b),
        // 1 and -2 in bf16.
        (528, 0x80),
        (529, 0x3f),
        (531, 0xc0),
    ],
};

const LATENT: &[(i64, f64)] = &[(0, 1.0), (7, -2.0), (511, 0.5)];
const ROPE: &[(i64, f64)] = &[(0, -1.5), (63, 2.0)];

/// The token's own bits, the rotary ones from byte 1024 on.
const BF16: Record = Record {
    element: DType::BF16,
    bytes: 1152,
    k_scale: 0.0,
    latent: LATENT,
    rope: ROPE,
    stored: &[
        (0, 0x80),
        (1, 0x3f),
        (15, 0xc0),
        (1023, 0x3f),
        (1024, 0xc0),
        (1025, 0xbf),
        (1151, 0x40),
    ],
};

const F16: Record = Record {
    element: DType::F16,
    stored: &[
        (1, 0x3c),
        (15, 0xc0),
        (1023, 0x38),
        (1025, 0xbe),
        (1151, 0x40),
    ],
    ..BF16
};

/// All of a token divided by one scale: -448, 1, what saturates, 1.5 and -1/8.
const E4M3: Record = Record {
    element: DType::F8E4M3,
    bytes: 576,
    k_scale: 2.0,
    latent: &[(0, -896.0), (1, 2.0), (511, 4096.0)],
    rope: &[(0, 3.0), (63, -0.25)],
    stored: &[(0, 0xfe), (1, 0x38), (511, 0x7e), (512, 0x3c), (575, 0xa0)],
};

/// Here 2048 does not saturate.
const E5M2: Record = Record {
    element: DType::F8E5M2,
    stored: &[(0, 0xdf), (1, 0x3c), (511, 0x68), (512, 0x3e), (575, 0xb0)],
    ..E4M3
};

/// Records that vLLM's writers make, by hand, in every format.
pub fn golden_records(session: &dyn Session, memory: &dyn Memory) {
    for record in [&BF16, &F16] {
        record.check(session, memory, record.element);
    }
    for record in [&E4M3, &E5M2, &DS_MLA] {
        for source in FLOATS {
            record.check(session, memory, source);
        }
    }
}

impl Record {
    /// Appends the token to the second of two slots.
    fn check(&self, session: &dyn Session, memory: &dyn Memory, source: DType) {
        let row = |dim: i64, elements: &[(i64, f64)]| {
            let mut image = Image::of_bits(source, &[1, dim], vec![0; dim as usize]);
            for &(d, value) in elements {
                image.put(&[0, d], encode(source, value));
            }
            Resident::new(memory, image)
        };
        let (latent, rope) = (row(512, self.latent), row(64, self.rope));
        let width = (self.bytes / self.element.size()) as i64;
        let cache = Image::poisoned(View::compact(self.element, &[1, 2, width]));
        let cache = Resident::new(memory, cache);
        let slot = Resident::new(memory, Image::of_i32(&[1], &[1]));
        let input = MlaAppendArgs {
            latent: latent.tensor(),
            rope: Some(rope.tensor()),
            cache: LatentCache {
                kv: cache.tensor(),
                kv_rope: None,
                kv_dtype: None,
                is_ds_mla: self.element == DType::U8,
            },
            slot_mapping: slot.tensor(),
            k_scale: self.k_scale,
            rotary: None,
        };
        session.mla_append(&input, Stream::default()).unwrap();
        let mut want = cache.image().bytes.clone();
        want[self.bytes..2 * self.bytes].fill(0);
        for &(at, byte) in self.stored {
            want[self.bytes + at] = byte;
        }
        let got = cache.current().bytes;
        let differs = (0..want.len()).find(|&at| got[at] != want[at]);
        assert_eq!(differs, None, "byte of {} from {source}", self.element);
    }
}
