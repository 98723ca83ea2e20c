//! Norm, RoPE and append on the device, by the formulas.

use crate::common::codec::encode;
use crate::common::instance::for_each_index;
use crate::common::memory::{Image, Resident, View};
use crate::common::random;
use crate::common::rope_append::{RopeAppend, Rotation, Source};
use crate::common::rope_append_forms::appends_in_forms;
use crate::gpu::DeviceMemory;
use crate::problems::session;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{
    Angles, AppendArgs, CacheForm, Frequencies, KvLayout, Llama3Scaling, Norm, Rope, RopeAppendArgs,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

const LLAMA_3_1: Frequencies = Frequencies {
    theta: 5e5,
    scale: 8.0,
    llama3: Some(Llama3Scaling {
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        old_context_len: 8192,
    }),
};

const LINEAR: Frequencies = Frequencies {
    theta: 1e4,
    scale: 4.0,
    llama3: None,
};

/// Widths of rows, of what is rotated of them and of values, and the gaps around rows.
const SHAPES: [([i64; 3], u32); 11] = [
    ([128, 128, 128], 0),
    ([128, 64, 128], 8),
    ([128, 128, 64], 3),
    ([64, 64, 64], 0),
    ([256, 64, 256], 8),
    ([512, 512, 128], 0),
    ([512, 128, 520], 8),
    ([80, 80, 80], 0),
    ([72, 32, 40], 0),
    ([13, 6, 5], 1),
    ([300, 142, 8], 0),
];

pub fn rope_append() {
    let device = session();
    let mut seed = 3;
    for source in FLOATS {
        for cache in [source, DType::F8E4M3, DType::F8E5M2] {
            for ([dim, rotary_dim, dim_vo], gap) in SHAPES {
                for angles in 0..5 {
                    seed += 1;
                    let rotation = (angles < 4).then_some(Rotation {
                        source: match angles {
                            0 => Source::Table {
                                is_f32: true,
                                planes: seed % 2 == 0,
                            },
                            1 => Source::Table {
                                is_f32: false,
                                planes: seed % 2 == 1,
                            },
                            2 => Source::Computed(LINEAR),
                            _ => Source::Computed(LLAMA_3_1),
                        },
                        rotary_dim,
                        is_interleaved: seed % 3 == 0,
                        with_offsets: seed % 2 == 0,
                        wide_positions: seed % 5 < 2,
                    });
                    let is_fp8 = cache.is_fp8();
                    let norm = [None, Some(true), Some(false)][seed as usize % 3];
                    let queries = (seed % 4 > 0).then_some((5, 2, seed % 2 == 0));
                    let append = RopeAppend {
                        source,
                        cache,
                        as_bytes: is_fp8 && seed % 2 == 0,
                        queries,
                        heads: 3,
                        dim,
                        dim_vo,
                        page_size: if gap == 0 { 16 } else { 3 },
                        num_pages: 11,
                        layout: if seed % 2 == 0 {
                            KvLayout::Nhd
                        } else {
                            KvLayout::Hnd
                        },
                        num_tokens: 27,
                        padded_rows: 1,
                        wide_slots: seed % 3 == 1,
                        scale: if is_fp8 { 0.3 } else { 0.0 },
                        scales: is_fp8.then_some(seed % 4 < 2).filter(|_| seed % 3 > 0),
                        norms: [norm.filter(|_| queries.is_some()), norm],
                        rotation,
                        key_out: [None, Some(true), Some(false)][(seed / 3) as usize % 3],
                        gaps: [gap; 3],
                        seed,
                    };
                    let got = append.run(&*device, &DeviceMemory).unwrap();
                    assert_eq!(append.check(&got), Ok(()), "{append:?}");
                }
            }
        }
    }
}

pub fn rope_append_to_every_form() {
    let session = session();
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(400)
    });
    let result = runner.run(&appends_in_forms(), |append| {
        append
            .check(&*session, &DeviceMemory)
            .map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// One token, whose rows several CTAs share, and many, of which each has one CTA; more heads than a lane has at a time.
pub fn rope_append_of_one_and_of_many() {
    let device = session();
    for (num_tokens, q_heads, heads) in [(1, 32, 8), (1500, 32, 8), (1300, 71, 9)] {
        let append = RopeAppend {
            source: DType::BF16,
            cache: DType::F8E4M3,
            as_bytes: false,
            queries: Some((q_heads, 0, true)),
            heads,
            dim: 128,
            dim_vo: 128,
            page_size: 16,
            num_pages: 200,
            layout: KvLayout::Nhd,
            num_tokens,
            padded_rows: 0,
            wide_slots: true,
            scale: 0.5,
            scales: None,
            norms: [Some(true); 2],
            rotation: Some(Rotation {
                source: Source::Computed(LLAMA_3_1),
                rotary_dim: 128,
                is_interleaved: false,
                with_offsets: false,
                wide_positions: true,
            }),
            key_out: None,
            gaps: [0; 3],
            seed: 7,
        };
        let got = append.run(&*device, &DeviceMemory).unwrap();
        assert_eq!(append.check(&got), Ok(()), "{num_tokens} tokens");
    }
}

/// Numbers in device memory beyond the tensors: a position is that of the table's nearest end, and a token whose slot
/// the cache does not have is not cached.
pub fn rope_append_beyond_the_tensors() {
    let device = session();
    let resident = |image| Resident::new(&DeviceMemory, image);
    let wide = |values: &[i64]| {
        let bits = values.iter().map(|&value| value as u64);
        resident(Image::of_bits(DType::I64, &[values.len() as i64], bits))
    };
    let slots = wide(&[3, 0, i64::MAX, i64::MIN, 1]);
    let positions = wide(&[9, 10, i64::MAX, -1, i64::MIN]);
    let rows = |value: &dyn Fn(&[i64]) -> f64| {
        let mut image = Image::poisoned(View::gapped(DType::F32, &[5, 1, 8], &[0; 3], 16));
        for_each_index(&[5, 1, 8], |at| {
            image.put(at, encode(DType::F32, value(at)))
        });
        image
    };
    let ones = resident(rows(&|_| 1.0));
    // Rows are multiplied by the position and one.
    let mut table = Image::poisoned(View::gapped(DType::F32, &[10, 8], &[0; 2], 16));
    for_each_index(&[10, 8], |at| {
        let value = if at[1] < 4 { 1.0 + at[0] as f64 } else { 0.0 };
        table.put(at, encode(DType::F32, value));
    });
    let table = resident(table);
    let blank = |shape: &[i64]| {
        let view = View::gapped(DType::F32, shape, &vec![0; shape.len()], 24);
        resident(Image::poisoned(view))
    };
    let (q_out, caches) = (blank(&[5, 1, 8]), [(); 2].map(|()| blank(&[1, 3, 1, 8])));
    let input = RopeAppendArgs {
        append: AppendArgs {
            key: ones.tensor(),
            value: ones.tensor(),
            k_cache: caches[0].tensor(),
            v_cache: caches[1].tensor(),
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: slots.tensor(),
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: None,
            v_scales: None,
        },
        key_out: None,
        q: Some(ones.tensor()),
        q_out: Some(q_out.tensor()),
        norm: Norm {
            q_weight: None,
            k_weight: None,
            eps: 0.0,
        },
        rope: Some(Rope {
            positions: positions.tensor(),
            position_offsets: None,
            angles: Angles::Table(table.tensor()),
            rotary_dim: 8,
            is_interleaved: false,
        }),
    };
    device.rope_append(&input, Stream::default()).unwrap();
    let factor = |row: i64| if row < 3 { 10.0 } else { 1.0 };
    let mut want = q_out.image().clone();
    for_each_index(&[5, 1, 8], |at| {
        want.put(at, encode(DType::F32, factor(at[0])))
    });
    assert!(want == q_out.current(), "q_out");
    // Token 1 has slot 0, token 4 slot 1, and the others none.
    for (cache, values) in caches.iter().zip([[10.0, 1.0], [1.0, 1.0]]) {
        let mut want = cache.image().clone();
        for_each_index(&[2, 8], |at| {
            want.put(
                &[0, at[0], 0, at[1]],
                encode(DType::F32, values[at[0] as usize]),
            );
        });
        assert!(want == cache.current(), "a cache");
    }
}
