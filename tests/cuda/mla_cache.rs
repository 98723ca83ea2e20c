//! The operators on caches of latent records on the device, by the formulas of the formats.

use crate::common::door::Session;
use crate::common::golden;
use crate::common::instance::for_each_index;
use crate::common::memory::{Image, Resident, View};
use crate::common::mla_cache::{FLOATS, Format, MlaAppend, MlaGather, Records, Rotation};
use crate::gpu::DeviceMemory;
use crate::problems::{integer_types, session};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{LatentCache, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary};

fn formats(source: DType) -> [Format; 4] {
    [
        Format::Plain(source),
        Format::Plain(DType::F8E4M3),
        Format::Plain(DType::F8E5M2),
        Format::DsMla,
    ]
}

/// A cache of these widths; 656-byte records have their own.
fn records(format: Format, rank: i64, rope_dim: i64, split: bool, gap: u32) -> Records {
    let ds_mla = format == Format::DsMla;
    Records {
        format,
        rank: if ds_mla { 512 } else { rank },
        rope_dim: if ds_mla { 64 } else { rope_dim },
        num_pages: 5,
        page_size: if gap == 0 { 64 } else { 13 },
        split: split && !ds_mla && rope_dim > 0,
        as_bytes: split && matches!(format, Format::Plain(dtype) if dtype.is_fp8()),
        gaps: [gap; 3],
    }
}

pub fn mla_append() {
    let device = session();
    let rotations = [None, Some(false), Some(true)];
    for source in FLOATS {
        for format in formats(source) {
            for (n, &(rank, rope_dim, gap)) in [
                (512, 64, 0),
                (512, 64, 8),
                (256, 32, 3),
                (13, 6, 1),
                (200, 142, 0),
                (8, 0, 0),
                (128, 600, 16),
            ]
            .iter()
            .enumerate()
            {
                for is_interleaved in rotations {
                    let rotation = is_interleaved.map(|is_interleaved| Rotation {
                        is_interleaved,
                        f32_table: n % 2 == 0,
                        wide_positions: n % 3 == 0,
                        rope_out: [None, Some(false), Some(true)][n % 3],
                        queries: [Some((3, true)), None, Some((16, false))][n % 3],
                    });
                    let records = records(format, rank, rope_dim, n % 2 == 1, gap);
                    let append = MlaAppend {
                        source,
                        num_tokens: 41,
                        padded_rows: 2,
                        middle: n % 2 == 0,
                        wide_slots: n % 2 == 1,
                        k_scale: match format {
                            Format::Plain(dtype) if dtype.is_fp8() => 0.3,
                            _ => 0.0,
                        },
                        rotation: rotation.filter(|_| records.rope_dim > 0),
                        gaps: [gap, gap],
                        seed: 11 + n as u64,
                        records,
                    };
                    let got = append.run(&*device, &DeviceMemory).unwrap();
                    assert_eq!(append.check(&got), Ok(()), "{append:?}");
                }
            }
        }
    }
}

pub fn mla_gather() {
    let device = session();
    // More requests than a warp has lanes, some without tokens; one is long.
    let many: Vec<(i64, i64)> = (0..1100).map(|b| ((b * 7) % 5, b % 90)).collect();
    let few = vec![(0, 3), (100, 0), (0, 0), (37, 5), (1, 60), (0, 1)];
    for dst in FLOATS {
        for stored in FLOATS {
            for format in formats(stored) {
                for (n, &(rank, rope_dim, gap)) in [
                    (512, 64, 0),
                    (512, 64, 8),
                    (256, 32, 3),
                    (13, 6, 1),
                    (8, 0, 0),
                    (128, 600, 16),
                ]
                .iter()
                .enumerate()
                {
                    let gather = MlaGather {
                        records: records(format, rank, rope_dim, n % 2 == 1, gap),
                        dst,
                        split_dst: n % 3 == 1,
                        requests: if n == 3 { many.clone() } else { few.clone() },
                        spare_rows: [n as i64 % 2, 2],
                        with_starts: n % 2 == 1,
                        as_table: n % 2 == 0,
                        integers: integer_types(3 * n),
                        k_scale: match format {
                            Format::Plain(dtype) if dtype.is_fp8() => 0.3,
                            _ => 0.0,
                        },
                        gap,
                        seed: 5 + n as u64,
                    };
                    let got = gather.run(&*device, &DeviceMemory).unwrap();
                    assert_eq!(gather.check(&got), Ok(()), "{gather:?}");
                }
            }
        }
    }
}

/// Numbers in device memory that are beyond the tensors: nothing is written that should not be, and other tokens and
/// rows are right.
pub fn records_beyond_the_tensors() {
    let device = session();
    let resident = |image| Resident::new(&DeviceMemory, image);
    let filled = |shape: &[i64]| {
        let mut image = Image::poisoned(View::compact(DType::F32, shape));
        for_each_index(shape, |at| {
            image.put(at, (1.0 + at[0] as f32).to_bits().into())
        });
        resident(image)
    };
    appends_beyond(&*device, &filled(&[6, 8]), &filled(&[6, 4]));
    gathers_beyond(&*device, &filled(&[6, 8]));
}

fn integers(dtype: DType, values: &[i64]) -> Resident<'static> {
    let bits = values.iter().map(|&value| value as u64);
    Resident::new(
        &DeviceMemory,
        Image::of_bits(dtype, &[values.len() as i64], bits),
    )
}

fn appends_beyond(device: &dyn Session, latent: &Resident<'_>, rope: &Resident<'_>) {
    // Three slots exist; positions below 10 do.
    let slots = integers(DType::I64, &[3, 0, i64::MAX, i64::MIN, 1, 2]);
    let positions = integers(DType::I64, &[0, 9, 3, 3, 10, i64::MIN]);
    let resident = |image| Resident::new(&DeviceMemory, image);
    let mut table = Image::poisoned(View::compact(DType::F32, &[10, 4]));
    // Cosines of 1, sines of 0.
    for_each_index(&[10, 4], |at| {
        table.put(at, if at[1] < 2 { 0x3f80_0000 } else { 0 });
    });
    let table = resident(table);
    let cache = resident(Image::poisoned(View::gapped(
        DType::F32,
        &[1, 3, 12],
        &[0; 3],
        24,
    )));
    let out = resident(Image::poisoned(View::compact(DType::F32, &[6, 4])));
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
            is_interleaved: false,
            rope_out: Some(out.tensor()),
            q_rope: None,
            q_rope_out: None,
        }),
    };
    device.mla_append(&input, Stream::default()).unwrap();
    let (mut want, mut rows) = (cache.image().clone(), out.image().clone());
    // Token 1 goes to slot 0; tokens 0, 2 and 3 have no slot, tokens 4 and 5 no position.
    for_each_index(&[12], |at| want.put(&[0, 0, at[0]], 2f32.to_bits().into()));
    for_each_index(&[4, 4], |at| {
        rows.put(at, (1.0 + at[0] as f32).to_bits().into())
    });
    assert!(want == cache.current(), "the cache");
    assert!(rows == out.current(), "rope_out");
}

fn gathers_beyond(device: &dyn Session, records: &Resident<'_>) {
    let mut cache = records.tensor();
    // Six pages of one record.
    cache = cache.insert_dim(1);
    let blank = || {
        let image = Image::poisoned(View::gapped(DType::F32, &[8, 8], &[0, 0], 16));
        Resident::new(&DeviceMemory, image)
    };
    let run = |ends: &[i64], starts: Option<&[i64]>, indptr: &[i64], ids: &[i64]| {
        let dst = blank();
        let ends = integers(DType::I32, ends);
        let starts = starts.map(|starts| integers(DType::I32, starts));
        let (indptr, ids) = (integers(DType::I32, indptr), integers(DType::I32, ids));
        let input = MlaGatherArgs {
            cache: LatentCache {
                kv: cache,
                kv_rope: None,
                kv_dtype: None,
                is_ds_mla: false,
            },
            dst: dst.tensor(),
            dst_rope: None,
            cu_seq_lens: ends.tensor(),
            seq_starts: starts.as_ref().map(Resident::tensor),
            pages: RecordPages::Csr {
                indptr: indptr.tensor(),
                indices: ids.tensor(),
            },
            k_scale: 0.0,
        };
        device.mla_gather(&input, Stream::default()).unwrap();
        let got = dst.current();
        let value = |row| got.value(&[row, 7]);
        // Nothing but rows is written.
        let mut normalised = got.clone();
        for_each_index(&[8, 8], |at| normalised.put(at, dst.image().bits(at)));
        assert!(normalised == *dst.image());
        (0..8)
            .map(value)
            .map(|v| if v.is_finite() { v as i64 } else { 0 })
            .collect::<Vec<_>>()
    };
    // Row 2 of request 0 has page 6, which is none; row 3 page -1.
    assert_eq!(
        run(&[0, 4, 6], None, &[0, 4, 6], &[5, 0, 6, -1, 1, 2]),
        [6, 1, 0, 0, 2, 3, 0, 0]
    );
    // Request 1 asks for more rows than there are, and for more pages than there are ids.
    let far = i64::from(i32::MAX);
    assert_eq!(
        run(&[0, 4, far], None, &[0, 4, 6], &[5, 0, 1, 2, 3, 4]),
        [6, 1, 2, 3, 4, 5, 0, 0]
    );
    // Starts and offsets beyond everything.
    assert_eq!(
        run(&[0, 2, 4], Some(&[far, -3]), &[0, 4, 6], &[5; 6]),
        [0; 8]
    );
    assert_eq!(run(&[0, 2, 4], None, &[far, -far, 6], &[5; 6]), [0; 8]);
    // Numbers that do not rise: only that nothing else is written.
    run(&[7, -5, far], None, &[0, 4, 6], &[5; 6]);
}

/// Records by hand.
pub fn golden_records() {
    golden::golden_records(&*session(), &DeviceMemory);
}
