//! Gathers of keys and values on the device: every row as the formula has it, and no other memory written.

use crate::common::codec::encode;
use crate::common::gather::Gathering;
use crate::common::instance::for_each_index;
use crate::common::memory::{Image, Resident, View};
use crate::common::mla_cache::FLOATS;
use crate::gpu::DeviceMemory;
use crate::problems::{integer_types, session};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{CacheForm, GatherArgs, GatheredRequests, KvLayout, RecordPages};

pub fn gather() {
    let device = session();
    // More requests than a warp has lanes, some without tokens.
    let many: Vec<(i32, i32)> = (0..1100).map(|b| ((b * 7) % 5, b % 90)).collect();
    let few = vec![(0, 3), (100, 0), (0, 0), (37, 5), (1, 60), (0, 1)];
    let caches = [&FLOATS[..], &[DType::F8E4M3, DType::F8E5M2]].concat();
    let mut seed = 0;
    for rows in FLOATS {
        for &cache in &caches {
            for (heads, dims, page_size, gap) in [
                (8, [128, 128], 16, 0),
                (4, [192, 128], 64, 16),
                (1, [64, 64], 1, 0),
                (3, [13, 20], 3, 3),
                (2, [256, 72], 48, 8),
            ] {
                seed += 1;
                let gathering = Gathering {
                    cache,
                    rows,
                    as_bytes: cache.is_fp8() && seed % 2 == 0,
                    heads,
                    dims,
                    page_size,
                    num_pages: 37,
                    layout: [KvLayout::Nhd, KvLayout::Hnd][seed as usize % 2],
                    requests: if heads == 3 {
                        many.clone()
                    } else {
                        few.clone()
                    },
                    has_starts: seed % 3 != 0,
                    as_table: seed % 4 < 2,
                    integers: integer_types(seed as usize),
                    scale: if cache.is_fp8() { 0.3 } else { 0.0 },
                    scales: [None, Some(false), Some(true)][seed as usize % 3]
                        .filter(|_| cache.is_fp8()),
                    gaps: [gap; 5],
                    seed,
                };
                let outcome = gathering.check(&*device, &DeviceMemory);
                assert_eq!(outcome, Ok(()), "{gathering:?}");
            }
        }
    }
}

/// Lengths and page ids of no token: their rows are left out, and no other memory is read or written.
pub fn gathers_beyond_the_tensors() {
    let device = session();
    let integers = |values: &[i32]| {
        Resident::new(&DeviceMemory, Image::of_i32(&[values.len() as i64], values))
    };
    // Page p of one token holds p + 1.
    let cache = || {
        let shape = [6, 1, 2, 8];
        let mut image = Image::poisoned(View::compact(DType::F32, &shape));
        for_each_index(&shape, |at| {
            image.put(at, encode(DType::F32, (at[0] + 1) as f64))
        });
        Resident::new(&DeviceMemory, image)
    };
    let (k_cache, v_cache) = (cache(), cache());
    let run = |ends: &[i32], starts: Option<&[i32]>, indptr: &[i32], ids: &[i32]| {
        let blank = || {
            let view = View::gapped(DType::F32, &[8, 2, 8], &[0, 0, 0], 16);
            Resident::new(&DeviceMemory, Image::poisoned(view))
        };
        let (key, value) = (blank(), blank());
        let starts = starts.map(integers);
        let (ends, indptr, ids) = (integers(ends), integers(indptr), integers(ids));
        let input = GatherArgs {
            key: key.tensor(),
            value: value.tensor(),
            k_cache: k_cache.tensor(),
            v_cache: v_cache.tensor(),
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            requests: GatheredRequests {
                cu_seq_lens: ends.tensor(),
                seq_starts: starts.as_ref().map(Resident::tensor),
                pages: RecordPages::Csr {
                    indptr: indptr.tensor(),
                    indices: ids.tensor(),
                },
            },
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: None,
            v_scales: None,
        };
        device.gather(&input, Stream::default()).unwrap();
        let (keys, values) = (key.current(), value.current());
        assert!(keys == values);
        // Nothing but rows is written.
        let mut normalised = keys.clone();
        for_each_index(&[8, 2, 8], |at| normalised.put(at, key.image().bits(at)));
        assert!(normalised == *key.image());
        (0..8)
            .map(|row| keys.value(&[row, 1, 7]))
            .map(|value| if value.is_finite() { value as i64 } else { 0 })
            .collect::<Vec<_>>()
    };
    // Row 2 of request 0 has page 6, which is none; row 3 page -1.
    assert_eq!(
        run(&[0, 4, 6], None, &[0, 4, 6], &[5, 0, 6, -1, 1, 2]),
        [6, 1, 0, 0, 2, 3, 0, 0]
    );
    // Request 1 asks for more rows than there are, and for more pages than there are ids.
    let far = i32::MAX;
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
}
