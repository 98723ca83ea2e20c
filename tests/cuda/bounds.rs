//! Wrong numbers in device memory: results of the rows and slots that they name are lost, and nothing outside of the
//! tensors that were passed is written, or read where reading would end the context.

use crate::common::codec::encode;
use crate::common::door::{Door, RustDoor, Session};
use crate::common::instance::{LayerData, Scratch, for_each_index};
use crate::common::memory::{HostMemory, Image, Memory, Resident, View};
use crate::common::pages::PageTable;
use crate::common::problem::{Layer, MaskKind, Pattern, Problem, Storage, TableForm};
use crate::common::values::{mix, normal};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session, with_lens};
use folio::api::{BatchInput, Stream, Target};
use folio::dtype::DType;
use folio::problem::{AppendArgs, CacheForm, Kind, KvLayout};

/// The keys of the request that is not there: enough to be split.
const KEYS: u32 = 3000;

/// Page ids that no cache has.
const NO_PAGES: [i32; 6] = [i32::MAX, -1, i32::MIN, 1 << 24, -1000, 1 << 30];

fn index_tensor(values: &[i32]) -> Resident<'static> {
    Resident::new(&DeviceMemory, Image::of_i32(&[values.len() as i64], values))
}

/// `of` with a request more in device memory, whose rows and pages the tensors do not have.
fn run_with_one_more(session: &dyn Session, of: &Problem) {
    let qo_len = of.requests.iter().map(|r| r.qo_len).max().unwrap();
    let mut lens: Vec<_> = of.requests.iter().map(|r| (r.qo_len, r.kv_len)).collect();
    lens.push((qo_len, KEYS));
    let all = with_lens(of, &lens);
    let kv_lens: Vec<i32> = lens.iter().map(|&(_, keys)| keys as i32).collect();
    let qo_indptr = index_tensor(&all.qo_indptr());
    let kv_len = index_tensor(&kv_lens);
    let (mut ids, mut kv_indptr) = (Vec::new(), all.token_indptr());
    if of.storage != Storage::Ragged {
        kv_indptr = vec![0];
        for pages in PageTable::of(of).ids {
            ids.extend(pages);
            kv_indptr.push(ids.len() as i32);
        }
        let pages = KEYS.div_ceil(of.page_size()) as usize;
        ids.extend(NO_PAGES.iter().cycle().take(pages));
        kv_indptr.push(ids.len() as i32);
    }
    let (kv_indptr, kv_indices) = (index_tensor(&kv_indptr), index_tensor(&ids));
    let paged = of.storage != Storage::Ragged;
    let batch = BatchInput {
        qo_indptr: Some(qo_indptr.tensor()),
        qo_len: 0,
        kv_indptr: Some(kv_indptr.tensor()),
        kv_indices: paged.then(|| kv_indices.tensor()),
        last_page_len: None,
        kv_len: paged.then(|| kv_len.tensor()),
        block_table: None,
        window_left: None,
    };
    let mut handle = session.attention(all.desc()).unwrap();
    let scratch = Scratch::new(&DeviceMemory, &handle.workspace().unwrap());
    scratch.plan(&mut *handle, &batch).unwrap();
    let layer = LayerData::new(&DeviceMemory, of);
    handle.run(&layer.input(), Stream::default()).unwrap();
    // Fails where a row past the batch's, or anything beside the rows, was written.
    let output = layer.output();
    scratch.assert_within_bounds();
    assert_right(of, &output);
}

/// Rows past q, o and lse, page ids past the cache, rows past ragged K and V, bytes past a custom mask; decode and
/// prefill by every kernel that there is for them.
pub fn batches_beyond_the_tensors() {
    let session = session();
    let paged = |page_size| Storage::Paged {
        page_size,
        layout: KvLayout::Nhd,
        form: TableForm::CsrKvLen { spare_pages: 0 },
        unused_pages: 0,
        shared_pages: 0,
    };
    let masks = [
        MaskKind::Causal,
        MaskKind::Bytes(Pattern::Causal),
        MaskKind::Bits(Pattern::Tree),
    ];
    for (dtype, kv_dtype) in [
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
        (DType::F32, DType::F32),
        (DType::BF16, DType::F8E4M3),
    ] {
        for (kind, lens) in [
            (Kind::Decode, [(2, 100), (1, 50)]),
            (Kind::Prefill, [(70, 300), (130, 130)]),
        ] {
            for storage in [paged(16), paged(5), Storage::Ragged] {
                if storage == Storage::Ragged && kind == Kind::Decode {
                    continue;
                }
                for &mask in &masks {
                    let problem = Problem {
                        kind,
                        kv_dtype,
                        storage,
                        layer: Layer {
                            mask,
                            ..Layer::plain()
                        },
                        ..Problem::plain(&lens).of(dtype).heads(8, 2, 128)
                    };
                    run_with_one_more(&*session, &problem);
                }
            }
        }
    }
}

const HEADS: i64 = 2;
const DIM: i64 = 64;
const PAGE_SIZE: i64 = 8;
const PAGES: i64 = 5;

/// The bytes of a cache with room before and behind it, after an append of both sides.
fn appended(session: &dyn Session, memory: &dyn Memory, dtype: DType, slots: &[i64]) -> Vec<u8> {
    let tokens = slots.len() as i64;
    let page = PAGE_SIZE * HEADS * DIM;
    let mut rows = Image::poisoned(View::compact(dtype, &[tokens, HEADS, DIM]));
    for_each_index(&[tokens, HEADS, DIM], |index| {
        let hash = index.iter().fold(mix(3), |hash, &i| mix(hash ^ i as u64));
        rows.put(index, encode(dtype, normal(hash)));
    });
    let rows = Resident::new(memory, rows);
    // Two pages of room: the tensor is the pages between them.
    let shape = [PAGES + 1, PAGE_SIZE, HEADS, DIM];
    let mut cache = Image::poisoned(View::gapped(dtype, &shape, &[0; 4], page as u32));
    cache.view.shape[0] = PAGES;
    let cache = Resident::new(memory, cache);
    let mut other = Image::poisoned(View::compact(dtype, &shape));
    other.view.shape[0] = PAGES;
    let other = Resident::new(memory, other);
    let slots = Image::of_bits(DType::I64, &[tokens], slots.iter().map(|&slot| slot as u64));
    let slots = Resident::new(memory, slots);
    let input = AppendArgs {
        key: rows.tensor(),
        value: rows.tensor(),
        k_cache: cache.tensor(),
        v_cache: other.tensor(),
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
    };
    session.append(&input, Stream::default()).unwrap();
    let mut bytes = cache.current().bytes;
    bytes.extend(other.current().bytes);
    bytes
}

/// Slots past the cache count as negative ones: the token is skipped.
pub fn slots_beyond_the_cache() {
    let (device, oracle) = (session(), RustDoor.open(Target::Reference).unwrap());
    let all = PAGES * PAGE_SIZE;
    let slots = [
        3,
        all,
        all - 1,
        -1,
        all + 1,
        i64::MAX,
        0,
        i64::MIN,
        1 << 31,
        1 << 40,
        -7,
        17,
    ];
    let kept = slots.map(|slot| if (0..all).contains(&slot) { slot } else { -1 });
    for dtype in [DType::BF16, DType::F32] {
        let want = appended(&*oracle, &HostMemory, dtype, &kept);
        assert!(
            want == appended(&*device, &DeviceMemory, dtype, &kept),
            "{dtype}"
        );
        assert!(
            want == appended(&*device, &DeviceMemory, dtype, &slots),
            "{dtype}"
        );
    }
}
