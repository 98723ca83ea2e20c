//! What the kernels of attention are launched with: every field of their parameter blocks, decoded as the
//! structs that mirror `kernels/params`, their tensor maps, and the plan that they read. The numbers are
//! derived here from the tensors that the case passes.

use folio::api::BatchInput;
use folio::cuda::kernels::{self, Row};
use folio::cuda::params::{
    AttentionParams, Cache, CombineParams, DecodeParams, GenericParams, MaskMode, PlanView, Rows,
};
use folio::cuda::plan_params::PlanBatchParams;
use folio::cuda::prefill_params::{O_DTYPE_SHIFT, PrefillParams};
use folio::dtype::DType;
use folio::problem::{
    AttentionArgs, AttentionChunks, AttentionDesc, Kind, KvLayout, KvStorage, LogBase, Mask,
    MaskColumns, Window, WorkItem,
};
use folio::tensor::Tensor;
use std::num::NonZeroU32;

use crate::fixture::{Handle, OURS, WORKSPACE, at, context, desc, divides, host_tensor};
use crate::stub::{Launched, Recorder, Upload};

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;
const LSE: usize = 0x5_0000_0000;
const SINKS: usize = 0x6_0000_0000;
const SLOPES: usize = 0x7_0000_0000;
const K_SCALES: usize = 0x8_0000_0000;
const V_SCALES: usize = 0x9_0000_0000;
const MASK: usize = 0xa_0000_0000;
const RANGES: usize = 0xb_0000_0000;
const TABLE: usize = 0xc_0000_0000;
const LENGTHS: usize = 0xd_0000_0000;
const INDPTR: usize = 0xe_0000_0000;

const KV_HEADS: i64 = 8;
const QO_HEADS: i64 = 16;
const DIM: i64 = 128;
const PAGES: i64 = 40;
/// Elements from token to token of the caches, which have all heads of a token together.
const TOKEN: i64 = KV_HEADS * DIM;

/// Two query heads for each of 8 KV heads.
fn grouped(page_size: u32) -> AttentionDesc {
    AttentionDesc {
        num_qo_heads: QO_HEADS as u32,
        num_kv_heads: KV_HEADS as u32,
        kv: KvStorage::Paged {
            page_size,
            layout: KvLayout::Nhd,
        },
        ..desc(false)
    }
}

/// An NHD cache whose pages are `apart` pages apart.
fn cache(address: usize, pages: i64, page_size: i64, apart: i64) -> Tensor {
    at(
        address,
        DType::BF16,
        &[pages, page_size, KV_HEADS, DIM],
        Some(&[apart * page_size * TOKEN, TOKEN, DIM, 1]),
    )
}

/// Rows of q and o, with gaps between tokens and heads.
fn rows(address: usize, tokens: i64) -> Tensor {
    let strides = [5000, 256, 1];
    at(
        address,
        DType::BF16,
        &[tokens, QO_HEADS, DIM],
        Some(&strides),
    )
}

/// A run that states everything that the Hopper decode kernel takes.
fn full(page_size: i64) -> AttentionArgs {
    AttentionArgs {
        lse: Some(at(LSE, DType::F32, &[6, QO_HEADS], Some(&[20, 1]))),
        lse_base: LogBase::Two,
        sm_scale: 0.5,
        q_scale: 2.0,
        k_scale: 0.25,
        k_scales: Some(at(K_SCALES, DType::F32, &[KV_HEADS], None)),
        v_scale: 1.5,
        v_scales: Some(at(V_SCALES, DType::F32, &[1], None)),
        logits_soft_cap: 30.0,
        window: Window {
            left: Some(7),
            right: None,
        },
        alibi_slopes: Some(at(SLOPES, DType::F32, &[QO_HEADS], None)),
        alibi_sqrt: true,
        sinks: Some(at(SINKS, DType::F32, &[QO_HEADS], None)),
        ..plain(page_size)
    }
}

/// A run that states nothing but the tensors.
fn plain(page_size: i64) -> AttentionArgs {
    AttentionArgs::new(
        rows(Q, 4),
        cache(K, PAGES, page_size, 2),
        cache(V, PAGES + 2, page_size, 3),
        rows(O, 5),
    )
}

/// Two decode requests of 100 and 37 keys with a block table on the host.
fn plan(handle: &mut Handle, page_size: i32) {
    let columns = (100 + page_size - 1) / page_size;
    let table: Vec<i32> = (0..2 * columns).map(|id| id % PAGES as i32).collect();
    let batch = BatchInput {
        kv_len: host_tensor(&[100, 37], &[2]),
        block_table: host_tensor(&table, &[2, i64::from(columns)]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<DecodeParams>("folio_sm90_decode_gather");
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_masked");
    recorder.expect::<GenericParams>("folio_attention");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder
}

/// The launches of a run.
fn launches(recorder: &Recorder, handle: &Handle, args: &AttentionArgs) -> Vec<Launched> {
    recorder.forget();
    handle.attention.run(args, OURS).unwrap();
    recorder.launches()
}

fn assert_rows(rows: Rows, tensor: &Tensor) {
    let stated = (rows.data, rows.stride_token, rows.stride_head);
    let wanted = (tensor.address() as u64, tensor.stride(0), tensor.stride(1));
    assert_eq!(stated, wanted);
}

fn assert_cache(cache: Cache, address: usize, strides: [i64; 3]) {
    assert_eq!(cache.data, address as u64);
    assert_eq!(
        [cache.stride_page, cache.stride_token, cache.stride_head],
        strides
    );
}

/// What [`full`] states, as every kernel is told.
fn assert_full(params: &AttentionParams, page_size: i64) {
    assert_rows(params.q, &rows(Q, 4));
    assert_rows(params.o, &rows(O, 5));
    assert_cache(params.k, K, [2 * page_size * TOKEN, TOKEN, DIM]);
    assert_cache(params.v, V, [3 * page_size * TOKEN, TOKEN, DIM]);
    let lse = (params.lse, params.lse_stride_token, params.lse_stride_head);
    assert_eq!(lse, (LSE as u64, 20, 1));
    assert_eq!(
        [
            params.sinks,
            params.alibi_slopes,
            params.k_scales,
            params.v_scales
        ],
        [SINKS, SLOPES, K_SCALES, V_SCALES].map(|address| address as u64)
    );
    // A scale for each head, and one for all.
    assert_eq!((params.k_scales_stride, params.v_scales_stride), (1, 0));
    assert_eq!(
        [params.mask, params.mask_start, params.mm_prefix_ranges],
        [0; 3]
    );
    assert_eq!((params.logits_scale, params.v_scale), (0.25, 1.5));
    assert_eq!((params.o_scale, params.logits_soft_cap), (1.0, 30.0));
    assert_eq!((params.window_left, params.window_right), (7, -1));
    assert_eq!(params.mask_mode, MaskMode::Causal);
    // FOLIO_RUN_LSE_BASE_2 and FOLIO_RUN_ALIBI_SQRT.
    assert_eq!(params.flags, 1 | 2);
    assert_eq!((params.num_qo_heads, params.num_kv_heads), (16, 8));
    assert_eq!(params.page_size, page_size as u32);
    assert_eq!(params.num_mm_prefix_ranges, 0);
    assert_eq!(
        (params.causal_requests, params.alibi_request_stride),
        (0, 0)
    );
    assert_eq!((params.chunk_size, params.chunk_look_back), (0, 0));
    // The fewest rows of q, o and lse, and the fewer pages of k and v.
    assert_eq!((params.num_tokens, params.num_pages), (4, PAGES as u32));
    assert_eq!(params.mask_bytes, 0);
}

/// What [`plain`] leaves out.
fn assert_plain(params: &AttentionParams) {
    assert_eq!(
        (params.lse, params.lse_stride_token, params.lse_stride_head),
        (0, 0, 0)
    );
    let absent = [
        params.sinks,
        params.alibi_slopes,
        params.k_scales,
        params.v_scales,
    ];
    assert_eq!(absent, [0; 4]);
    assert_eq!((params.k_scales_stride, params.v_scales_stride), (0, 0));
    assert_eq!(
        (params.logits_scale, params.v_scale),
        (1.0 / 128f32.sqrt(), 1.0)
    );
    assert_eq!((params.logits_soft_cap, params.flags), (0.0, 0));
    assert_eq!((params.window_left, params.window_right), (-1, -1));
}

/// The plan of [`plan`] as the device finds it: every address lies in the workspace, and what was uploaded
/// stands there. Returns the number of items and of merges.
fn assert_plan(recorder: &Recorder, handle: &Handle, view: &PlanView, page_size: i32) -> [i32; 2] {
    let upload = recorder.upload();
    assert_eq!(upload.address, WORKSPACE as u64);
    let columns = (100 + page_size - 1) / page_size;
    assert_eq!(upload.i32s(view.qo_indptr, 3), [0, 1, 2]);
    assert_eq!(upload.i32s(view.kv_len, 2), [100, 37]);
    // The second request has fewer pages than the table has columns; ids in use follow without gaps.
    let second = (37 + page_size - 1) / page_size;
    let ids: Vec<i32> = (0..columns + second).map(|id| id % PAGES as i32).collect();
    assert_eq!(upload.i32s(view.page_ids, ids.len()), ids);
    let counts = upload.i32s(view.counts, 4);
    assert_eq!(counts[2..], [2, 0]);
    assert_eq!(upload.i32s(view.next_tile, 1), [0]);
    let mut keys = [0, 0];
    for item in items(&upload, view) {
        let request = item.request as usize;
        assert_eq!(item.page_start, [0, i64::from(columns)][request]);
        // The row of q, and the position of the last key.
        assert_eq!([item.q_token, item.position], [[0, 99], [1, 36]][request]);
        assert_eq!((item.q_start, item.q_len), (0, 1));
        keys[request] += item.kv_end - item.kv_start;
    }
    assert_eq!(keys, [100, 37]);
    let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
    let uploaded = upload.address + upload.bytes.len() as u64;
    for address in [view.partial_o, view.partial_lse] {
        assert!((uploaded..end).contains(&address), "{address:#x}");
        assert!(address.is_multiple_of(256), "{address:#x}");
    }
    [counts[0], counts[1]]
}

/// The work items of an uploaded plan.
pub fn items(upload: &Upload, view: &PlanView) -> Vec<WorkItem> {
    let count = upload.i32s(view.counts, 1)[0] as u64;
    let size = size_of::<WorkItem>() as u64;
    let item = |index| {
        let at = view.items + size * index;
        let words = upload.i32s(at, 12);
        let [
            request,
            q_start,
            q_len,
            kv_start,
            kv_end,
            partial,
            cost,
            reserved,
        ] = std::array::from_fn(|i| words[i] as u32);
        WorkItem {
            request,
            q_start,
            q_len,
            kv_start,
            kv_end,
            partial,
            cost,
            reserved,
            page_start: upload.i64s(at + 32, 1)[0],
            q_token: words[10],
            position: words[11],
        }
    };
    (0..count).map(item).collect()
}

/// The row that a handle is named after.
fn row(handle: &Handle) -> &'static Row {
    let name = handle.attention.kernel();
    kernels::table().find(|row| row.name == name).unwrap()
}

pub fn decode_by_tma() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(8)).unwrap();
    plan(&mut handle, 8);
    let launched = launches(&recorder, &handle, &full(8));
    assert_eq!(launched.len(), 1);
    let launch = &launched[0];
    assert_eq!(launch.name(), "folio_sm90_decode_tma");
    let params: DecodeParams = launch.params();
    assert_full(&params.attention, 8);
    let [items, merges] = assert_plan(&recorder, &handle, &params.attention.plan, 8);
    assert_eq!(merges, 0);
    // Pages in units of 8 tokens, two boxes of 8 tokens for each tile of 16 keys.
    assert_eq!([params.k_page_step, params.v_page_step], [2, 3]);
    assert_eq!((params.boxes_log2, params.pages_by_head), (1, 0));
    assert_eq!((params.group_size, params.o_dtype), (2, 2));
    assert_eq!(params.kv_evict_first, 1);
    let row = row(&handle);
    assert_eq!(row.symbol, launch.name());
    assert_eq!(launch.grid, [8, 1, items as u32]);
    assert_eq!(launch.block, [row.threads, 1, 1]);
    assert_eq!(launch.shared_bytes, row.shared_bytes);
    assert_eq!((launch.dependent, launch.cluster), (1, 1));
    assert_eq!(launch.stream, OURS.0 as u64);
    for (map, address, pages, apart) in [(0, K, PAGES, 2), (1, V, PAGES + 2, 3)] {
        let map = &launch.maps()[map];
        assert_eq!((map.address, map.swizzle), (address as u64, 3));
        let groups = (pages as u64 - 1) * apart + 1;
        assert_eq!(map.extents, [DIM as u64, 8, groups, 8, 1]);
        let token = 2 * TOKEN as u64;
        assert_eq!(map.strides, [token, 8 * token, 2 * DIM as u64, 16]);
        assert_eq!(map.boxes, [64, 8, 1, 1, 1]);
    }
    // A box for each half of a row: two of a tile's boxes do not lie next to each other in both halves.
    assert_eq!([params.k_column_boxes, params.v_column_boxes], [2, 2]);
    assert_eq!([params.head_dim_qk, params.head_dim_vo], [128, 128]);
}

pub fn decode_by_tma_from_pages_by_head() {
    let recorder = recorder();
    let kv = KvStorage::Paged {
        page_size: 16,
        layout: KvLayout::Hnd,
    };
    let mut handle = Handle::of(&context(), AttentionDesc { kv, ..grouped(16) }).unwrap();
    plan(&mut handle, 16);
    let page = [PAGES, KV_HEADS, 16, DIM];
    let args = AttentionArgs {
        k: at(K, DType::BF16, &page, None),
        v: at(V, DType::BF16, &page, None),
        ..plain(16)
    };
    let launched = launches(&recorder, &handle, &args);
    let params: DecodeParams = launched[0].params();
    assert_plain(&params.attention);
    assert_plan(&recorder, &handle, &params.attention.plan, 16);
    assert_cache(params.attention.k, K, [KV_HEADS * 16 * DIM, DIM, 16 * DIM]);
    assert_eq!([params.k_page_step, params.v_page_step], [8, 8]);
    assert_eq!((params.boxes_log2, params.pages_by_head), (0, 1));
    let map = &launched[0].maps()[0];
    assert_eq!(map.extents, [64, 8, 2, 8 * PAGES as u64, 2]);
    assert_eq!(map.strides, [256, 2048, 4096, 128]);
    assert_eq!(map.boxes, [64, 8, 2, 1, 2]);
    assert_eq!([params.k_column_boxes, params.v_column_boxes], [1, 1]);
}

/// A page that is no whole number of 8-token groups, and pages that are not, once the handle is made.
pub fn decode_gathers_where_tma_cannot() {
    let recorder = recorder();
    let context = context();
    for page_size in [5, 16] {
        let mut handle = Handle::of(&context, grouped(page_size)).unwrap();
        let is_named = handle.attention.kernel().ends_with("_gather");
        assert_eq!(is_named, page_size == 5, "{}", handle.attention.kernel());
        plan(&mut handle, page_size as i32);
        let mut args = full(page_size.into());
        let apart = i64::from(page_size) * 2 * TOKEN + if page_size == 5 { 0 } else { TOKEN };
        let shape = [PAGES, page_size.into(), KV_HEADS, DIM];
        args.k = at(K, DType::BF16, &shape, Some(&[apart, TOKEN, DIM, 1]));
        let launched = launches(&recorder, &handle, &args);
        assert_eq!(launched.len(), 1);
        assert_eq!(launched[0].name(), "folio_sm90_decode_gather");
        assert!(launched[0].maps().is_empty());
        let params: DecodeParams = launched[0].params();
        assert_cache(params.attention.k, K, [apart, TOKEN, DIM]);
        let [items, _] = assert_plan(&recorder, &handle, &params.attention.plan, page_size as i32);
        assert_eq!(launched[0].grid, [8, 1, items as u32]);
        assert_eq!([params.k_page_step, params.v_page_step], [0, 0]);
        assert_eq!((params.boxes_log2, params.pages_by_head), (0, 0));
        if page_size == 5 {
            assert_full(&params.attention, 5);
        }
    }
}

/// The stub's L2 has 50 MiB, of which 8/5 are 80: 4 KiB a key, as keys and values of 8 heads have.
pub fn keys_leave_the_l2_first_where_they_fit() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(8)).unwrap();
    for (keys, first) in [(10240, 1), (10241, 0)] {
        let table = vec![0; 2 * 1281];
        let batch = BatchInput {
            kv_len: host_tensor(&[keys, 10240], &[2]),
            block_table: host_tensor(&table, &[2, 1281]),
            ..BatchInput::default()
        };
        handle.plan(&batch, OURS).unwrap();
        let launched = launches(&recorder, &handle, &plain(8));
        let params: DecodeParams = launched[0].params();
        assert_eq!(params.kv_evict_first, first, "{keys}");
    }
}

/// The portable kernel is told what every row's address is a multiple of, up to 16 bytes.
pub fn portable_copies_by_alignment() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(8)).unwrap();
    plan(&mut handle, 8);
    let shape = [PAGES, 8, KV_HEADS, DIM];
    let misaligned = AttentionArgs {
        // 8 bytes by the address, 4 by the heads' stride, 2 by the address.
        q: rows(Q + 8, 4),
        k: at(K, DType::BF16, &shape, Some(&[16384, 2048, 130, 1])),
        v: at(V + 2, DType::BF16, &shape, Some(&[16384, 2048, 136, 1])),
        ..plain(8)
    };
    // The kernels for this device do not store to such rows.
    let aligned = AttentionArgs {
        o: rows(O + 2, 5),
        ..plain(8)
    };
    for (args, copies) in [(misaligned, [8, 4, 2]), (aligned, [16, 16, 16])] {
        let launched = launches(&recorder, &handle, &args);
        assert_eq!(launched.len(), 1);
        assert_eq!(launched[0].name(), "folio_attention");
        let params: GenericParams = launched[0].params();
        assert_eq!(
            [
                params.q_copy_bytes,
                params.k_copy_bytes,
                params.v_copy_bytes
            ],
            copies
        );
        let [items, _] = assert_plan(&recorder, &handle, &params.attention.plan, 8);
        assert_plain(&params.attention);
        assert_rows(params.attention.q, &args.q);
        assert_rows(params.attention.o, &args.o);
        assert_eq!((params.head_dim_qk, params.head_dim_vo), (128, 128));
        assert_eq!((params.row_tiles, params.o_dtype), (1, 2));
        assert_eq!(launched[0].grid, [items as u32 * 8, 1, 1]);
        assert_eq!(launched[0].dependent, 0);
        for n in [0, 1, 7, 8, 99, 1 << 20, i32::MAX as u32] {
            assert_eq!(divides(n, params.page_size), n / 8);
        }
    }
}

pub fn masks_are_found_by_request() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(8)).unwrap();
    plan(&mut handle, 8);
    let bytes = Mask::Bytes(at(MASK, DType::U8, &[137], None));
    let bits = Mask::Bits(at(MASK, DType::U8, &[18], None));
    let modes = [
        (bytes, MaskMode::Bytes, 137, [0, 100]),
        (bits, MaskMode::Bits, 18, [0, 13]),
    ];
    for (mask, mode, len, starts) in modes {
        let ranges = at(RANGES, DType::I32, &[2, 3, 2], None);
        let args = AttentionArgs {
            mask,
            mm_prefix_ranges: Some(ranges),
            ..full(8)
        };
        let launched = launches(&recorder, &handle, &args);
        let params = launched[0].params::<DecodeParams>().attention;
        assert_eq!((params.mask, params.mask_mode), (MASK as u64, mode));
        assert_eq!(params.mask_bytes, len);
        assert_eq!(recorder.upload().i64s(params.mask_start, 2), starts);
        assert_eq!(params.mm_prefix_ranges, RANGES as u64);
        assert_eq!(params.num_mm_prefix_ranges, 3);
        assert_eq!(params.flags, 1 | 2);
    }
    let stated = AttentionArgs {
        mask: bits,
        custom_mask_indptr: Some(at(MASK + 64, DType::I64, &[3], None)),
        mask_columns: MaskColumns::NewKeys,
        mm_prefix_ranges: Some(at(RANGES, DType::I32, &[2, 3, 2], None)),
        mm_prefix_in_window: true,
        ..full(8)
    };
    let params = launches(&recorder, &handle, &stated)[0].params::<DecodeParams>();
    assert_eq!(params.attention.mask_start, MASK as u64 + 64);
    // With FOLIO_RUN_MASK_NEW_KEYS and FOLIO_RUN_MM_PREFIX_IN_WINDOW.
    assert_eq!(params.attention.flags, 1 | 2 | 8 | 16);
    let by_request = AttentionArgs {
        mask: Mask::CausalByRequest(at(MASK, DType::U8, &[2], None)),
        alibi_slopes: Some(at(SLOPES, DType::F32, &[2, 16], None)),
        ..full(8)
    };
    let params = launches(&recorder, &handle, &by_request)[0].params::<DecodeParams>();
    assert_eq!(params.attention.causal_requests, MASK as u64);
    assert_eq!(params.attention.mask_mode, MaskMode::Full);
    assert_eq!(params.attention.alibi_request_stride, 16);
    let chunked = AttentionArgs {
        chunks: Some(AttentionChunks {
            size: NonZeroU32::new(64).unwrap(),
            look_back: 3,
        }),
        ..plain(8)
    };
    let params = launches(&recorder, &handle, &chunked)[0].params::<DecodeParams>();
    let chunks = (
        params.attention.chunk_size,
        params.attention.chunk_look_back,
    );
    assert_eq!(chunks, (64, 3));
    let full = AttentionArgs {
        mask: Mask::Full,
        ..plain(8)
    };
    let params = launches(&recorder, &handle, &full)[0].params::<DecodeParams>();
    assert_eq!(params.attention.mask_mode, MaskMode::Full);
}

/// The parts of both rows are named one after the other, and are those that the items write.
fn assert_combines(upload: &Upload, view: &PlanView) {
    let counts = upload.i32s(view.counts, 2);
    assert_eq!(counts[1], 2);
    let mut written: Vec<_> = items(upload, view)
        .iter()
        .map(|item| (item.q_token, item.partial as i32))
        .collect();
    written.sort_unstable();
    let mut named = Vec::new();
    for item in 0..2 {
        let [q_token, first, count] = upload.i32s(view.combines + 16 * item, 3)[..] else {
            unreachable!("three numbers");
        };
        assert_eq!(first as usize, named.len());
        assert!(count >= 2);
        let parts = upload.i32s(view.partials + 4 * first as u64, count as usize);
        named.extend(parts.into_iter().map(|part| (q_token, part)));
    }
    assert_eq!(written, named);
}

pub fn split_rows_are_combined() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(16)).unwrap();
    let table = vec![0; 2 * 3125];
    let batch = BatchInput {
        kv_len: host_tensor(&[50_000; 2], &[2]),
        block_table: host_tensor(&table, &[2, 3125]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    for (args, flags) in [(full(16), 3), (plain(16), 0)] {
        let launched = launches(&recorder, &handle, &args);
        assert_eq!(launched.len(), 2);
        let attention = launched[0].params::<DecodeParams>().attention;
        assert_combines(&recorder.upload(), &attention.plan);
        let combine = &launched[1];
        assert_eq!(combine.name(), "folio_combine");
        let params: CombineParams = combine.params();
        assert_eq!(
            format!("{:?}", params.plan),
            format!("{:?}", attention.plan)
        );
        assert_rows(params.o, &args.o);
        assert_eq!(
            (params.lse, params.lse_stride_token, params.lse_stride_head),
            (
                attention.lse,
                attention.lse_stride_token,
                attention.lse_stride_head
            )
        );
        assert_eq!(
            (params.sinks, params.v_scales),
            (attention.sinks, attention.v_scales)
        );
        assert_eq!((params.v_scale, params.o_scale), (attention.v_scale, 1.0));
        assert_eq!((params.v_scales_stride, params.flags), (0, flags));
        assert_eq!(params.num_tokens, 4);
        assert_eq!((params.num_qo_heads, params.group_size), (16, 2));
        assert_eq!((params.head_dim_vo, params.o_dtype), (128, 2));
        // A block for each of the 16 heads of a row.
        assert_eq!((params.blocks_of_row, combine.grid), (16, [32, 1, 1]));
        assert_eq!((combine.block, combine.dependent), ([256, 1, 1], 1));
    }
}

/// Of the rows of a graph's largest batch few are split, most often: its blocks are no more than run soon, and share the rows.
pub fn combines_of_a_graph() {
    let recorder = recorder();
    for (max_num_tokens, blocks) in [(8192, 8 * 132), (1000, 2 * 1000)] {
        let desc = AttentionDesc {
            kind: Kind::Prefill,
            graph: true,
            max_qo_len: max_num_tokens,
            max_num_tokens,
            ..grouped(16)
        };
        let mut handle = Handle::of(&context(), desc).unwrap();
        let table: Vec<i32> = (0..2 * 7).collect();
        let batch = BatchInput {
            qo_indptr: host_tensor(&[0, 2, 4], &[3]),
            kv_len: host_tensor(&[100; 2], &[2]),
            block_table: host_tensor(&table, &[2, 7]),
            ..BatchInput::default()
        };
        handle.plan(&batch, OURS).unwrap();
        let launched = launches(&recorder, &handle, &plain(16));
        assert_eq!(launched[1].name(), "folio_combine");
        assert_eq!(launched[1].grid, [blocks, 1, 1]);
    }
}

/// Where each warp takes all parts of a head, since many rows are split, blocks have no more warps than a row has heads. Not where
/// only the device knows how many rows are split, nor where the order of parts may not depend on that.
pub fn combines_of_few_heads() {
    let recorder = recorder();
    let prompt = |heads: u32, graph| AttentionDesc {
        kind: Kind::Prefill,
        num_qo_heads: heads,
        num_kv_heads: 1,
        max_qo_len: 4096,
        max_num_tokens: 4096,
        graph,
        ..grouped(16)
    };
    let decodes = |heads: u32, batch_invariant| AttentionDesc {
        num_qo_heads: heads,
        num_kv_heads: 1,
        max_batch_size: 600,
        max_num_tokens: 600,
        batch_invariant,
        ..grouped(16)
    };
    // Of so many rows, each request's on 8000 keys.
    let threads = |desc: AttentionDesc, rows: i32| {
        let requests = if desc.kind == Kind::Prefill { 1 } else { rows };
        let qo_indptr: Vec<i32> = (0..=requests).map(|b| b * (rows / requests)).collect();
        let (lengths, heads) = (i64::from(requests), desc.num_qo_heads);
        let mut handle = Handle::of(&context(), desc).unwrap();
        let (kv_len, table) = (
            vec![8000; lengths as usize],
            vec![0; 500 * lengths as usize],
        );
        let batch = BatchInput {
            qo_indptr: host_tensor(&qo_indptr, &[lengths + 1]),
            kv_len: host_tensor(&kv_len, &[lengths]),
            block_table: host_tensor(&table, &[lengths, 500]),
            ..BatchInput::default()
        };
        handle.plan(&batch, OURS).unwrap();
        let tensor = |address, shape: &[i64]| at(address, DType::BF16, shape, None);
        let of_rows = |address| tensor(address, &[rows.into(), heads.into(), DIM]);
        let cache = |address| tensor(address, &[PAGES, 16, 1, DIM]);
        let args = AttentionArgs::new(of_rows(Q), cache(K), cache(V), of_rows(O));
        let launched = launches(&recorder, &handle, &args);
        let combine = launched.last().unwrap();
        assert_eq!(combine.name(), "folio_combine");
        combine.block[0]
    };
    for (heads, expected) in [(1, 32), (2, 64), (4, 128), (7, 224), (8, 256)] {
        let of_block = threads(prompt(heads, false), 1200);
        assert_eq!(of_block, expected, "{heads} heads");
    }
    assert_eq!(threads(prompt(2, false), 100), 256);
    assert_eq!(threads(prompt(2, true), 1200), 256);
    assert_eq!(threads(decodes(2, true), 600), 256);
}

/// Page ids on the device are found where the host keeps them: by the rows of a block table, and by the
/// offsets of CSR.
pub fn page_ids_on_the_device() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(8)).unwrap();
    let table = BatchInput {
        kv_len: host_tensor(&[100, 37], &[2]),
        block_table: Some(at(TABLE, DType::I32, &[2, 13], Some(&[40, 1]))),
        ..BatchInput::default()
    };
    let csr = BatchInput {
        kv_len: host_tensor(&[100, 37], &[2]),
        kv_indptr: host_tensor(&[0, 15, 20], &[3]),
        kv_indices: Some(at(TABLE, DType::I32, &[20], None)),
        ..BatchInput::default()
    };
    for (batch, starts) in [(table, [0, 40]), (csr, [0, 15])] {
        handle.plan(&batch, OURS).unwrap();
        let view = launches(&recorder, &handle, &plain(8))[0].params::<DecodeParams>();
        let view = view.attention.plan;
        assert_eq!(view.page_ids, TABLE as u64);
        let upload = recorder.upload();
        for item in items(&upload, &view) {
            assert_eq!(item.page_start, starts[item.request as usize]);
        }
    }
}

/// Lengths on the device are cut by a kernel into the places that the run reads.
pub fn plan_on_the_device() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), grouped(8)).unwrap();
    let batch = BatchInput {
        kv_len: Some(at(LENGTHS, DType::I32, &[2], None)),
        block_table: Some(at(TABLE, DType::I32, &[2, 13], Some(&[40, 1]))),
        ..BatchInput::default()
    };
    recorder.forget();
    handle.plan(&batch, OURS).unwrap();
    let planned = recorder.launches();
    assert_eq!(planned.len(), 1);
    assert_eq!(planned[0].name(), "folio_plan");
    assert_eq!((planned[0].grid, planned[0].block), ([1; 3], [256, 1, 1]));
    let params = planned[0].params::<PlanBatchParams>().plan;
    assert_eq!(
        [params.qo_indptr, params.kv_indptr, params.last_page_len],
        [0; 3]
    );
    assert_eq!((params.kv_len, params.table_stride), (LENGTHS as u64, 40));
    // The columns of a row.
    assert_eq!(params.num_page_ids, 13);
    assert_eq!(params.q_tile.divisor, 1);
    assert_eq!((params.batch_size, params.fixed_qo_len), (2, 1));
    assert_eq!((params.page_size, params.kv_unit), (8, 64));
    // Two blocks on each of 132 multiprocessors, for 8 heads.
    assert_eq!((params.max_splits, params.invariant_chunk), (33, 0));
    assert_eq!((params.max_qo_len, params.max_kv_len), (1, 1 << 16));
    assert_eq!((params.max_num_tokens, params.order), (4, 0));
    // A tile for each of four requests and 33 splits, all of them partial.
    assert_eq!(params.max_items, 4 + 33);
    assert_eq!(params.max_combines, 4);
    assert!(params.max_partial_rows >= params.max_splits);

    let launched = launches(&recorder, &handle, &plain(8));
    assert_eq!(launched.len(), 2);
    let decode: DecodeParams = launched[0].params();
    let view = decode.attention.plan;
    assert_eq!(view.page_ids, TABLE as u64);
    assert_eq!(
        [view.qo_indptr, view.kv_len, view.items, view.combines],
        [
            params.out_qo_indptr,
            params.out_kv_len,
            params.items,
            params.combines
        ]
    );
    assert_eq!(
        [view.partials, view.counts, view.next_tile],
        [params.partials, params.counts, params.next_tile]
    );
    assert_eq!(launched[0].grid, [8, 1, params.max_items]);
    // Everything that the kernel writes has a place of its own in the workspace.
    let mut places = [
        params.out_qo_indptr,
        params.out_kv_len,
        params.out_mask_bytes_start,
        params.out_mask_bits_start,
        params.requests,
        params.first_item,
        params.first_combine,
        params.items,
        params.combines,
        params.partials,
        params.counts,
        params.next_tile,
        view.partial_o,
        view.partial_lse,
    ];
    places.sort_unstable();
    let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
    assert!(places[0] >= WORKSPACE as u64 && places[13] < end);
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 256));
}

/// The planning kernel cuts the last tiles of prompts, and narrows tiles that would leave workers idle, unless a batch is cut like
/// every other. Decodes have neither.
pub fn tiles_of_prompts_on_the_device() {
    let recorder = recorder();
    let prompts = AttentionDesc {
        kind: Kind::Prefill,
        max_qo_len: 640,
        max_num_tokens: 640,
        ..grouped(8)
    };
    let invariant = AttentionDesc {
        batch_invariant: true,
        ..prompts
    };
    for (desc, most_chunks, narrower) in [
        (prompts, 3 * 132 / 8, 2),
        (invariant, 0, 0),
        (grouped(8), 0, 0),
    ] {
        let mut handle = Handle::of(&context(), desc).unwrap();
        let batch = BatchInput {
            qo_indptr: Some(at(LENGTHS, DType::I32, &[3], None)),
            kv_len: Some(at(LENGTHS, DType::I32, &[2], None)),
            block_table: Some(at(TABLE, DType::I32, &[2, 13], None)),
            ..BatchInput::default()
        };
        recorder.forget();
        handle.plan(&batch, OURS).unwrap();
        let params = recorder.launches()[0].params::<PlanBatchParams>();
        assert_eq!(params.tail.most_chunks, most_chunks, "{desc:?}");
        let narrow = params.narrow;
        assert_eq!(narrow.count, narrower, "{desc:?}");
        if narrower > 0 {
            // One and two of three warpgroups of 64 rows, for groups of two heads.
            assert_eq!(narrow.q_tile.map(|tile| tile.divisor), [32, 64]);
            assert_eq!((narrow.at_a_time, narrow.least_gain), (132 / 8, 8));
        }
        if most_chunks > 0 {
            let (workers, tail) = (params.workers, params.tail);
            assert_eq!((workers.all, workers.of_item), (132, 8));
            let costs = (tail.item_units, tail.combine_units, tail.least_gain);
            assert_eq!(costs, (3, 5, 8));
            // A row of fp32 is written, and read.
            let unit_bytes = (2 * 4 * QO_HEADS * DIM) as f32 / tail.units_of_row;
            assert!((2e6..5e6).contains(&unit_bytes), "{unit_bytes}");
        }
    }
}

/// CSR and query offsets on the device, and a plan that is worth all threads.
pub fn large_plan_on_the_device() {
    let recorder = recorder();
    let desc = AttentionDesc {
        kind: Kind::Prefill,
        max_batch_size: 600,
        max_qo_len: 640,
        max_num_tokens: 600 * 64,
        batch_invariant: true,
        ..grouped(8)
    };
    let mut handle = Handle::of(&context(), desc).unwrap();
    let batch = BatchInput {
        qo_indptr: Some(at(LENGTHS, DType::I32, &[601], None)),
        kv_indptr: Some(at(INDPTR, DType::I32, &[601], None)),
        kv_indices: Some(at(TABLE, DType::I32, &[5000], None)),
        last_page_len: Some(at(MASK, DType::I32, &[600], None)),
        ..BatchInput::default()
    };
    recorder.forget();
    handle.plan(&batch, OURS).unwrap();
    let planned = recorder.launches();
    assert_eq!(planned[0].block, [1024, 1, 1]);
    let params = planned[0].params::<PlanBatchParams>().plan;
    assert_eq!(
        [
            params.qo_indptr,
            params.kv_indptr,
            params.kv_len,
            params.last_page_len
        ],
        [LENGTHS as u64, INDPTR as u64, 0, MASK as u64]
    );
    assert_eq!((params.table_stride, params.order), (0, 1));
    assert_eq!(params.num_page_ids, 5000);
    assert_eq!((params.batch_size, params.page_size), (600, 8));
    assert_eq!(params.invariant_chunk, u32::MAX);
    let args = AttentionArgs {
        q: rows(Q, 38400),
        o: rows(O, 38400),
        ..plain(8)
    };
    let launched = launches(&recorder, &handle, &args);
    assert_eq!(launched[0].name(), "folio_prefill_sm90");
    let attention = launched[0].params::<PrefillParams>().attention;
    // Two thirds of the 50 MiB that the stub states.
    assert_eq!(attention.section_bytes, (50 << 20) / 3 * 2);
    let view = attention.plan;
    assert_eq!((view.page_ids, view.items), (TABLE as u64, params.items));
    // Tiles that are all of different requests find nothing of one another's in the L2.
    let desc = AttentionDesc {
        max_qo_len: 64,
        ..desc
    };
    let mut handle = Handle::of(&context(), desc).unwrap();
    handle.plan(&batch, OURS).unwrap();
    let launched = launches(&recorder, &handle, &args);
    let attention = launched[0].params::<PrefillParams>().attention;
    assert_eq!(attention.section_bytes, u32::MAX);
}

fn prefill(kv: KvStorage) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        max_batch_size: 2,
        max_qo_len: 4096,
        max_num_tokens: 8192,
        kv,
        ..grouped(8)
    }
}

/// 500 and 300 query rows, by tensor maps of q and of pages.
pub fn prefill_from_pages() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), prefill(grouped(8).kv)).unwrap();
    let table = vec![1; 2 * 125];
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 500, 800], &[3]),
        kv_len: host_tensor(&[1000, 300], &[2]),
        block_table: host_tensor(&table, &[2, 125]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    let args = AttentionArgs {
        q: rows(Q, 800),
        o: rows(O, 900),
        ..plain(8)
    };
    let launched = launches(&recorder, &handle, &args);
    let launch = &launched[0];
    assert_eq!(launch.name(), "folio_prefill_sm90");
    let PrefillParams {
        attention: params,
        head_dim_vo,
        ..
    } = launch.params();
    assert_eq!(head_dim_vo, 128);
    // The type of o, bf16.
    assert_eq!(params.flags >> O_DTYPE_SHIFT, 2);
    assert_plain(&AttentionParams {
        flags: params.flags & ((1 << O_DTYPE_SHIFT) - 1),
        ..params
    });
    assert_rows(params.q, &args.q);
    assert_cache(params.v, V, [24 * TOKEN, TOKEN, DIM]);
    let upload = recorder.upload();
    assert_eq!(upload.i32s(params.plan.qo_indptr, 3), [0, 500, 800]);
    let items = upload.i32s(params.plan.counts, 1)[0] as u32;
    // Two heads of a group share a tile: 8 tiles of heads.
    assert_eq!(launch.grid, [(8 * items).min(132), 1, 1]);
    let row = row(&handle);
    assert_eq!(
        (row.symbol, launch.block),
        (launch.name(), [row.threads, 1, 1])
    );
    assert_eq!(
        (launch.shared_bytes, launch.dependent),
        (row.shared_bytes, 0)
    );
    let [q, k, v] = launch.maps().try_into().unwrap();
    assert_eq!((q.address, q.swizzle), (Q as u64, 3));
    assert_eq!(q.extents, [128, 16, 800, 0, 0]);
    assert_eq!(q.strides, [512, 10000, 0, 0]);
    assert_eq!(q.boxes, [64, 2, 32, 0, 0]);
    for (map, address, pages, apart) in [(k, K, PAGES, 2), (v, V, PAGES + 2, 3)] {
        assert_eq!(map.address, address as u64);
        // Groups of 8 tokens, the last dimension, of which one is a page.
        let groups = (pages as u64 - 1) * apart + 1;
        assert_eq!(map.extents, [64, 8, 2, 8, groups]);
        assert_eq!(map.strides, [2048, 128, 256, 16384]);
        assert_eq!(map.boxes, [64, 8, 2, 1, 1]);
    }
}

/// What positions do not say goes to the kernel beside the plain one, run by run: on the same items, by maps of its own
/// steps.
pub fn prefill_with_masks() {
    let recorder = recorder();
    for (kv, rows_of_box) in [(grouped(8).kv, 8), (KvStorage::Ragged, 64)] {
        let mut handle = Handle::of(&context(), prefill(kv)).unwrap();
        let table = vec![1; 2 * 125];
        let mut batch = BatchInput {
            qo_indptr: host_tensor(&[0, 500, 800], &[3]),
            ..BatchInput::default()
        };
        match kv {
            KvStorage::Ragged => batch.kv_indptr = host_tensor(&[0, 1000, 1300], &[3]),
            KvStorage::Paged { .. } => {
                batch.kv_len = host_tensor(&[1000, 300], &[2]);
                batch.block_table = host_tensor(&table, &[2, 125]);
            }
        }
        handle.plan(&batch, OURS).unwrap();
        let plain = match kv {
            KvStorage::Ragged => {
                let keys = |address| at(address, DType::BF16, &[1300, KV_HEADS, DIM], None);
                AttentionArgs::new(rows(Q, 800), keys(K), keys(V), rows(O, 800))
            }
            KvStorage::Paged { .. } => AttentionArgs {
                q: rows(Q, 800),
                o: rows(O, 900),
                ..plain(8)
            },
        };
        let first = launches(&recorder, &handle, &plain);
        assert_eq!(first[0].name(), "folio_prefill_sm90");
        let args = |change: fn(&mut AttentionArgs)| {
            let mut args = plain;
            change(&mut args);
            args
        };
        for args in [
            args(|args| args.mask = Mask::Bits(at(MASK, DType::U8, &[73_750], None))),
            args(|args| args.mask = Mask::CausalByRequest(at(MASK, DType::U8, &[2], None))),
            args(|args| args.mm_prefix_ranges = Some(at(RANGES, DType::I32, &[2, 3, 2], None))),
            args(|args| args.alibi_slopes = Some(at(SLOPES, DType::F32, &[2, QO_HEADS], None))),
        ] {
            let launched = launches(&recorder, &handle, &args);
            let launch = &launched[0];
            assert_eq!(launch.name(), "folio_prefill_sm90_masked");
            assert_eq!((launch.grid, launch.block), (first[0].grid, first[0].block));
            let [before, after] =
                [&first[0], launch].map(|it| it.params::<PrefillParams>().attention.plan);
            assert_eq!((before.items, before.counts), (after.items, after.counts));
            let name = format!("{}_masked", handle.attention.kernel());
            let row = kernels::table().find(|row| row.name == name).unwrap();
            assert_eq!(launch.shared_bytes, row.shared_bytes);
            assert!(row.defines.iter().any(|define| define == "FOLIO_MASKED=1"));
            // Rows of a box: a group of a page, or all keys of a step, of which the plain kernel has 80.
            let [_, k, v] = launch.maps().try_into().unwrap();
            assert_eq!([k.boxes[1], v.boxes[1]], [rows_of_box; 2]);
        }
    }
}

/// Runs with a soft cap, or with ALiBi, have kernels of their own for what positions say, which take what the plain one takes.
pub fn prefill_with_logits() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), prefill(grouped(8).kv)).unwrap();
    let table = vec![1; 2 * 125];
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 500, 800], &[3]),
        kv_len: host_tensor(&[1000, 300], &[2]),
        block_table: host_tensor(&table, &[2, 125]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    let slopes = at(SLOPES, DType::F32, &[QO_HEADS], None);
    for (cap, slopes, root, suffix) in [
        (0.0, None, false, ""),
        (50.0, None, false, "_capped"),
        (64.0, None, false, "_capped"),
        (65.0, None, false, ""),
        (0.0, Some(slopes), false, "_biased"),
        (50.0, Some(slopes), false, "_masked"),
        (0.0, Some(slopes), true, "_masked"),
    ] {
        let args = AttentionArgs {
            q: rows(Q, 800),
            o: rows(O, 900),
            logits_soft_cap: cap,
            alibi_slopes: slopes,
            alibi_sqrt: root,
            ..plain(8)
        };
        let launched = launches(&recorder, &handle, &args);
        let name = format!("folio_prefill_sm90{suffix}");
        assert_eq!(launched[0].name(), name, "{cap} {root}");
    }
}

pub fn prefill_from_rows() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), prefill(KvStorage::Ragged)).unwrap();
    assert!(handle.attention.kernel().ends_with("_ragged"));
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 500, 800], &[3]),
        kv_indptr: host_tensor(&[0, 1000, 1300], &[3]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    let ragged = |address, rows, token| {
        let shape = [rows, KV_HEADS, DIM];
        at(address, DType::BF16, &shape, Some(&[token, DIM, 1]))
    };
    let args = AttentionArgs::new(
        rows(Q, 800),
        ragged(K, 1300, TOKEN),
        ragged(V, 1400, 2 * TOKEN),
        rows(O, 800),
    );
    let launched = launches(&recorder, &handle, &args);
    let params = launched[0].params::<PrefillParams>().attention;
    assert_eq!((params.plan.page_ids, params.page_size), (0, 1));
    let upload = recorder.upload();
    for item in items(&upload, &params.plan) {
        assert_eq!(item.page_start, [0, 1000][item.request as usize]);
    }
    assert_eq!(params.k.stride_page, TOKEN);
    assert_eq!(params.v.stride_page, 2 * TOKEN);
    // Rows of ragged keys and values count as pages.
    assert_eq!((params.num_tokens, params.num_pages), (800, 1300));
    let [_, k, v] = launched[0].maps().try_into().unwrap();
    assert_eq!(k.extents, [128, 1300, 8, 0, 0]);
    assert_eq!(k.strides, [2048, 256, 0, 0]);
    assert_eq!(v.extents, [128, 1400, 8, 0, 0]);
    assert_eq!(v.strides, [4096, 256, 0, 0]);
    assert_eq!(k.boxes[0], 64);
}
