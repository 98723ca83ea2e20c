//! Multi-head latent attention: what the kernels are launched with, how work is cut for them, how split rows are
//! combined, and what is refused. Widths below 512 / 64 are nothing for the Hopper kernels.

use folio::api::BatchInput;
use folio::cuda::latent_queries_params::LatentQueriesParams;
use folio::cuda::mla_params::{MlaHopperParams, MlaParams};
use folio::cuda::params::{CombineParams, dtype_code};
use folio::cuda::plan_params::{PlanBatchParams, PlanOrder};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{
    AttentionArgs, AttentionDesc, CacheFormat, Kind, KvLayout, KvStorage, LogBase,
};
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, WORKSPACE, at, context, desc, divides, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const Q_ROPE: usize = 0x2_0000_0000;
const KV: usize = 0x3_0000_0000;
const KV_ROPE: usize = 0x4_0000_0000;
const O: usize = 0x5_0000_0000;
const LSE: usize = 0x6_0000_0000;

const HEADS: i64 = 20;
const RANK: i64 = 504;
const ROPE: i64 = 56;
/// The widths of the Hopper kernels.
const FULL_RANK: i64 = 512;
const FULL_ROPE: i64 = 64;
const PAGES: i64 = 40;
const PAGE_SIZE: i64 = 5;

/// bf16 with 20 heads.
fn mla(kv_format: CacheFormat) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Mla,
        kv_format,
        num_qo_heads: HEADS as u32,
        num_kv_heads: 1,
        head_dim_qk: (RANK + ROPE) as u32,
        head_dim_vo: RANK as u32,
        kv: KvStorage::Paged {
            page_size: PAGE_SIZE as u32,
            layout: KvLayout::Nhd,
        },
        max_qo_len: 3,
        max_num_tokens: 12,
        ..desc(false)
    }
}

fn rows(address: usize, tokens: i64, dim: i64, strides: [i64; 3]) -> Tensor {
    let shape = [tokens, HEADS, dim];
    at(address, DType::BF16, &shape, Some(&strides))
}

fn records(dtype: DType, width: i64) -> Tensor {
    at(KV, dtype, &[PAGES, PAGE_SIZE, width], None)
}

/// A run over whole records, or with `kv_rope` over their latent parts.
fn args(kv: Tensor, kv_rope: Option<Tensor>) -> AttentionArgs {
    AttentionArgs {
        lse: Some(at(LSE, DType::F32, &[7, HEADS], Some(&[32, 1]))),
        lse_base: LogBase::Two,
        sm_scale: 0.125,
        q_scale: 2.0,
        k_scale: 0.25,
        ..AttentionArgs::mla(
            rows(Q, 6, RANK, [12_000, 576, 1]),
            Some(rows(Q_ROPE, 7, ROPE, [1304, 66, 1])),
            kv,
            kv_rope,
            rows(O, 8, RANK, [10_240, 512, 1]),
        )
    }
}

/// Plans two requests of 3 rows each.
fn plan(handle: &mut Handle, keys: i32) {
    let columns = (keys + 4) / 5;
    let table: Vec<i32> = (0..2 * columns).map(|id| id % 30).collect();
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 3, 6], &[3]),
        kv_len: host_tensor(&[keys; 2], &[2]),
        block_table: host_tensor(&table, &[2, i64::from(columns)]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<MlaParams>("folio_mla");
    recorder.expect::<CombineParams>("folio_combine_latent");
    recorder.expect::<MlaHopperParams>("folio_sm90_mla");
    recorder.expect::<MlaHopperParams>("folio_sm90_mla_rows");
    recorder.expect::<MlaHopperParams>("folio_sm90_mla_gather");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder
}

fn launches(recorder: &Recorder, handle: &Handle, args: &AttentionArgs) -> Vec<Launched> {
    recorder.forget();
    handle.attention.run(args, OURS).unwrap();
    recorder.launches()
}

/// Every field, for records in one tensor and in two.
pub fn portable() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mla(DType::F8E4M3.into())).unwrap();
    assert_eq!(handle.attention.kernel(), "mla_sm80_bf16_kve4m3_r512_q32");
    plan(&mut handle, 100);
    let whole = args(records(DType::F8E4M3, RANK + ROPE), None);
    let kv_rope = at(
        KV_ROPE + 4,
        DType::F8E4M3,
        &[PAGES - 1, PAGE_SIZE, ROPE],
        Some(&[1000, 68, 1]),
    );
    let apart = args(records(DType::F8E4M3, RANK), Some(kv_rope));
    for (args, k, k_rope, num_pages, copies) in [
        (
            whole,
            [2800, 560],
            (KV as u64 + 504, [2800, 560]),
            40,
            [16, 8],
        ),
        (
            apart,
            [2520, 504],
            (KV_ROPE as u64 + 4, [1000, 68]),
            39,
            [8, 4],
        ),
    ] {
        let launched = launches(&recorder, &handle, &args);
        assert_eq!(launched.len(), 1);
        let launch = &launched[0];
        assert_eq!(launch.name(), "folio_mla");
        let params: MlaParams = launch.params();
        let attention = params.attention;
        let rows = [attention.q, params.q_rope, attention.o];
        assert_eq!(
            rows.map(|rows| (rows.data, rows.stride_token, rows.stride_head)),
            [
                (Q as u64, 12_000, 576),
                (Q_ROPE as u64, 1304, 66),
                (O as u64, 10_240, 512)
            ]
        );
        let cache = |cache: folio::cuda::params::Cache| {
            (cache.data, [cache.stride_page, cache.stride_token])
        };
        assert_eq!(cache(attention.k), (KV as u64, k));
        assert_eq!(cache(attention.v), (KV as u64, k));
        assert_eq!(cache(params.k_rope), k_rope);
        // The fewest rows of q, q_rope, o and lse, and the fewer pages.
        assert_eq!((attention.num_tokens, attention.num_pages), (6, num_pages));
        assert_eq!((attention.logits_scale, attention.v_scale), (0.0625, 0.25));
        assert_eq!((attention.o_scale, attention.flags), (1.0, 1));
        let lse = (attention.lse, attention.lse_stride_token);
        assert_eq!((lse, attention.lse_stride_head), ((LSE as u64, 32), 1));
        assert_eq!((attention.num_qo_heads, attention.num_kv_heads), (20, 1));
        assert_eq!((params.kv_lora_rank, params.qk_rope_head_dim), (504, 56));
        // bf16; a token of 20 rows fits a tile.
        assert_eq!((params.o_dtype, params.row_tiles), (2, 1));
        assert_eq!([params.q_copy_bytes, params.q_rope_copy_bytes], [16, 4]);
        assert_eq!([params.k_copy_bytes, params.k_rope_copy_bytes], copies);
        for n in [0, 1, 19, 20, 99, 1 << 20, i32::MAX as u32] {
            assert_eq!(divides(n, params.page_size), n / 5);
            assert_eq!(divides(n, params.num_heads), n / 20);
        }
        // A tile for each of six tokens.
        assert_eq!((launch.grid, launch.block), ([6, 1, 1], [128, 1, 1]));
        let (keys, products) = (3 * 16 * (512 / 4 + 64), 2 * 32 * 16 * 4);
        let queries = 16 * 256 + 32 * 64;
        assert_eq!(launch.shared_bytes, 4 * (keys + products + queries));
        assert_eq!((launch.dependent, launch.cluster), (0, 1));
    }
}

/// Records of `fp8_ds_mla` hold the rotary part; without one there is none.
pub fn absent_tensors() {
    let recorder = recorder();
    let context = context();
    let ds_mla = AttentionDesc {
        q_dtype: DType::F16,
        o_dtype: DType::F16,
        head_dim_qk: (FULL_RANK + FULL_ROPE) as u32,
        head_dim_vo: FULL_RANK as u32,
        ..mla(CacheFormat::DS_MLA)
    };
    let mut handle = Handle::of(&context, ds_mla).unwrap();
    assert_eq!(handle.attention.kernel(), "mla_sm80_f16_kve4m3_ds_r512_q32");
    plan(&mut handle, 100);
    let half = |address, dim| at(address, DType::F16, &[6, HEADS, dim], None);
    let run = AttentionArgs {
        sm_scale: 1.0,
        ..AttentionArgs::mla(
            half(Q, FULL_RANK),
            Some(half(Q_ROPE, FULL_ROPE)),
            records(DType::U8, 656),
            None,
            half(O, FULL_RANK),
        )
    };
    let params: MlaParams = launches(&recorder, &handle, &run)[0].params();
    assert_eq!(
        (params.attention.k.stride_token, params.k_rope.data),
        (656, 0)
    );
    assert_eq!(params.q_rope.data, Q_ROPE as u64);

    let latent = AttentionDesc {
        head_dim_qk: RANK as u32,
        ..mla(DType::BF16.into())
    };
    let mut handle = Handle::of(&context, latent).unwrap();
    plan(&mut handle, 100);
    let run = AttentionArgs {
        q_rope: None,
        ..args(records(DType::BF16, RANK), None)
    };
    let params: MlaParams = launches(&recorder, &handle, &run)[0].params();
    assert_eq!((params.q_rope.data, params.k_rope.data), (0, 0));
    assert_eq!((params.kv_lora_rank, params.qk_rope_head_dim), (504, 0));
}

/// Items have the tokens that fill a tile, or one token of several tiles.
pub fn tiles() {
    let recorder = recorder();
    let context = context();
    for (heads, tokens_of_item, row_tiles) in
        [(11, 2, 1), (16, 2, 1), (17, 1, 1), (33, 1, 2), (128, 1, 4)]
    {
        let desc = AttentionDesc {
            num_qo_heads: heads,
            ..mla(DType::BF16.into())
        };
        let mut handle = Handle::of(&context, desc).unwrap();
        plan(&mut handle, 100);
        let tensor = |address| {
            let shape = [6, i64::from(heads), RANK];
            at(address, DType::BF16, &shape, None)
        };
        let rope = at(Q_ROPE, DType::BF16, &[6, i64::from(heads), ROPE], None);
        let run = AttentionArgs {
            sm_scale: 1.0,
            ..AttentionArgs::mla(
                tensor(Q),
                Some(rope),
                records(DType::BF16, RANK + ROPE),
                None,
                tensor(O),
            )
        };
        let launched = launches(&recorder, &handle, &run);
        let params: MlaParams = launched[0].params();
        assert_eq!(params.row_tiles, row_tiles, "{heads}");
        let items = 2 * 3_u32.div_ceil(tokens_of_item);
        assert_eq!(launched[0].grid, [items * row_tiles, 1, 1], "{heads}");
    }
}

/// Chunks of 128 columns are shares of their own where there are few rows.
pub fn split_rows_are_combined() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mla(DType::BF16.into())).unwrap();
    plan(&mut handle, 50_000);
    let run = args(records(DType::BF16, RANK + ROPE), None);
    let launched = launches(&recorder, &handle, &run);
    assert_eq!(launched.len(), 2);
    let attention = launched[0].params::<MlaParams>().attention;
    let combine = &launched[1];
    assert_eq!(combine.name(), "folio_combine_latent");
    let params: CombineParams = combine.params();
    assert_eq!(params.plan.partial_o, attention.plan.partial_o);
    assert_eq!((params.head_dim_vo, params.o_dtype), (504, 2));
    assert_eq!((params.num_qo_heads, params.group_size), (20, 20));
    assert_eq!((params.v_scale, params.o_scale), (0.25, 1.0));
    assert_eq!((params.flags, params.num_tokens), (1, 6));
    // A block for each of four chunks of 20 heads of six rows. The kernel deals them.
    assert_eq!((params.blocks_of_row, combine.grid), (0, [480, 1, 1]));
}

/// The kernel that plans cuts by the same tiles.
pub fn plan_on_the_device() {
    let recorder = recorder();
    let desc = AttentionDesc {
        num_qo_heads: 33,
        ..mla(DType::BF16.into())
    };
    let mut handle = Handle::of(&context(), desc).unwrap();
    recorder.forget();
    handle.plan_device(OURS).unwrap();
    let planned = recorder.launches();
    assert_eq!(planned[0].name(), "folio_plan");
    let params = planned[0].params::<PlanBatchParams>().plan;
    assert_eq!((params.q_tile.divisor, params.kv_unit), (1, 128));
    // Two blocks run on each of 132 multiprocessors, and an item has two.
    assert_eq!(
        (params.max_splits, params.order),
        (132, PlanOrder::ByCost as u32)
    );
    assert_eq!((params.max_qo_len, params.max_num_tokens), (3, 12));
}

pub fn fp32_is_refused() {
    let fp32 = AttentionDesc {
        q_dtype: DType::F32,
        o_dtype: DType::F32,
        ..mla(DType::F32.into())
    };
    let refused = Handle::of(&context(), fp32).err();
    assert!(
        matches!(&refused, Some(Error::Unsupported(m)) if m.starts_with("q_dtype: float32")),
        "{refused:?}"
    );
}

/// They become rows of the output's type before the kernel, which gets those: as many as the largest batch has.
pub fn fp8_queries() {
    let recorder = recorder();
    recorder.expect::<LatentQueriesParams>("folio_latent_queries");
    let [plain, in_fp8] = [DType::BF16, DType::F8E5M2].map(|q_dtype| AttentionDesc {
        q_dtype,
        o_dtype: DType::BF16,
        ..mla(DType::F8E4M3.into())
    });
    let room = 2 * 12 * HEADS as usize * (RANK + ROPE) as usize;
    let bytes = [plain, in_fp8].map(|desc| {
        let handle = Handle::of(&context(), desc).unwrap();
        handle.attention.workspace().device_bytes
    });
    assert_eq!(bytes[1] - bytes[0], room.next_multiple_of(256));
    let mut handle = Handle::of(&context(), in_fp8).unwrap();
    assert_eq!(handle.attention.kernel(), "mla_sm80_bf16_kve4m3_r512_q32");
    plan(&mut handle, 100);
    let rows = |address, tokens, dim, strides: [i64; 3]| {
        let shape = [tokens, HEADS, dim];
        at(address, DType::F8E5M2, &shape, Some(&strides))
    };
    for (q_rope, is_aligned) in [(Q_ROPE, 1), (Q_ROPE + 4, 0)] {
        let args = AttentionArgs {
            q: rows(Q, 6, RANK, [12_000, 576, 1]),
            q_rope: Some(rows(q_rope, 7, ROPE, [1304, 72, 1])),
            ..args(records(DType::F8E4M3, RANK + ROPE), None)
        };
        let launched = launches(&recorder, &handle, &args);
        assert_eq!(launched[0].name(), "folio_latent_queries");
        assert_eq!(launched[0].grid, [15, 1, 1]);
        let queries = launched[0].params::<LatentQueriesParams>();
        let run = launched[1].params::<MlaParams>();
        let plan = run.attention.plan;
        assert_eq!(
            [queries.qo_indptr, queries.counts],
            [plan.qo_indptr, plan.counts]
        );
        assert_eq!(
            (queries.q.data, queries.q_rope.data),
            (Q as u64, q_rope as u64)
        );
        assert_eq!(
            [queries.q.stride_token, queries.q.stride_head],
            [12_000, 576]
        );
        assert_eq!(
            [queries.q_rope.stride_token, queries.q_rope.stride_head],
            [1304, 72]
        );
        assert_eq!(queries.num_heads.divisor, HEADS as u32);
        assert_eq!(
            [queries.num_tokens, queries.pieces, queries.rope_pieces],
            [6, 63, 7]
        );
        assert_eq!(
            [queries.q_dtype, queries.row_dtype],
            [DType::F8E5M2, DType::BF16].map(dtype_code)
        );
        assert_eq!(queries.is_aligned, is_aligned);
        let (q, rope) = (run.attention.q, run.q_rope);
        assert_eq!([q.data, rope.data], [queries.rows, queries.rows + 2 * 504]);
        for part in [q, rope] {
            assert_eq!([part.stride_token, part.stride_head], [20 * 560, 560]);
        }
        let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
        assert!(queries.rows > plan.partial_lse && queries.rows + room as u64 <= end);
    }
    let too_many = AttentionDesc {
        num_qo_heads: 4096,
        max_num_tokens: 524_288,
        ..in_fp8
    };
    let refused = Handle::of(&context(), too_many).err();
    assert!(
        matches!(&refused, Some(Error::Unsupported(m)) if m.starts_with("max_num_tokens: 524288") && m.contains("524287")),
        "{refused:?}"
    );
}

/// bf16 records in pages of `page_size`.
fn hopper(heads: u32, page_size: u32, max_qo_len: u32) -> AttentionDesc {
    AttentionDesc {
        num_qo_heads: heads,
        kv: KvStorage::Paged {
            page_size,
            layout: KvLayout::Nhd,
        },
        max_qo_len,
        head_dim_qk: (FULL_RANK + FULL_ROPE) as u32,
        head_dim_vo: FULL_RANK as u32,
        ..mla(DType::BF16.into())
    }
}

/// One request of 3 rows.
fn plan_pages(handle: &mut Handle, keys: i32, page_size: i32) {
    let columns = (keys + page_size - 1) / page_size;
    let table: Vec<i32> = (0..columns).map(|id| id % PAGES as i32).collect();
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 3], &[2]),
        kv_len: host_tensor(&[keys], &[1]),
        block_table: host_tensor(&table, &[1, i64::from(columns)]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

/// Whole records by one map; latent and rotary rows apart by two, whose boxes are 8 tokens.
pub fn hopper_maps() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), hopper(20, 32, 3)).unwrap();
    assert_eq!(handle.attention.kernel(), "mla_sm90a_bf16_r512_q64_tma");
    plan_pages(&mut handle, 96, 32);
    let paged = |address, dim, page| {
        let (shape, strides) = ([PAGES, 32, dim], [page, 576, 1]);
        at(address, DType::BF16, &shape, Some(&strides))
    };
    // Pages are further apart than their tokens need, as in a cache that holds all layers of a page together.
    let whole = run_args(paged(KV, 576, 50_000), None);
    let apart = run_args(paged(KV, 512, 50_000), Some(paged(KV_ROPE, 64, 20_000)));
    let token = 2 * 576;
    for (args, is_whole, box_log2, atoms, rope_page) in
        [(whole, 1, 1, 9, 100_000), (apart, 0, 0, 8, 40_000)]
    {
        let launched = launches(&recorder, &handle, &args);
        assert_eq!(launched.len(), 1);
        let launch = &launched[0];
        assert_eq!(launch.name(), "folio_sm90_mla");
        let params: MlaHopperParams = launch.params();
        assert_eq!(
            (params.whole_records, params.box_log2),
            (is_whole, box_log2)
        );
        assert_eq!((params.mla.row_tiles, params.mla.o_dtype), (1, 2));
        // 60 rows of one item.
        assert_eq!((launch.grid, launch.block), ([1, 1, 1], [384, 1, 1]));
        assert_eq!((launch.dependent, launch.cluster), (1, 1));
        let [latent, rope] = launch.maps().try_into().unwrap();
        assert_eq!((latent.address, latent.swizzle), (KV as u64, 3));
        assert_eq!(latent.extents, [64, 8, atoms, 4, PAGES as u64]);
        assert_eq!(latent.strides, [token, 128, 8 * token, 100_000]);
        assert_eq!(latent.boxes, [64, 8, atoms as u32, 1 << box_log2, 1]);
        assert_eq!(rope.extents, [64, 8, 1, 4, PAGES as u64]);
        assert_eq!((rope.strides[0], rope.strides[3]), (token, rope_page));
    }
}

/// The tokens of a short request are one item, of several tiles where the desc has room for them; of a longer one, those whose
/// heads fill a tile. A plan on the device is told of both.
pub fn hopper_tiles() {
    let recorder = recorder();
    let context = context();
    for (heads, max_qo_len, items, row_tiles, slots) in [
        (20, 3, 1, 1, 132),
        (64, 3, 1, 3, 132),
        (85, 3, 1, 4, 66),
        (86, 3, 1, 5, 66),
        (16, 16, 1, 1, 132),
        (16, 17, 1, 1, 132),
        (170, 3, 1, 8, 44),
        (171, 3, 3, 3, 44),
        (200, 3, 3, 4, 33),
    ] {
        let desc = hopper(heads, 16, max_qo_len);
        let mut handle = Handle::of(&context, desc).unwrap();
        plan_pages(&mut handle, 90, 16);
        let run = tight_args(heads, 1.0);
        let launched = launches(&recorder, &handle, &run);
        let params: MlaHopperParams = launched[0].params();
        let named = format!("{heads} heads, {max_qo_len} rows");
        assert_eq!(params.mla.row_tiles, row_tiles, "{named}");
        assert_eq!(launched[0].grid, [row_tiles * items, 1, 1], "{named}");
        recorder.forget();
        handle.plan_device(OURS).unwrap();
        let PlanBatchParams {
            plan,
            workers,
            tail,
            narrow,
        } = recorder.launches()[0].params();
        assert_eq!(
            (plan.max_splits, plan.kv_unit, plan.order),
            (slots, 48, PlanOrder::ByShare as u32),
            "{named}"
        );
        assert_eq!(
            (workers.most_rows, workers.num_heads, workers.rows_of_tile),
            (512 / heads, heads, 64),
            "{named}"
        );
        assert_eq!((workers.all / workers.of_item, workers.all), (slots, 132));
        assert_eq!((tail.most_chunks, narrow.count), (0, 0));
    }
}

/// Requests of these rows on 960 keys each.
fn plan_rows(handle: &mut Handle, rows: &[i32]) {
    let indptr: Vec<i32> = (0..=rows.len()).map(|n| rows[..n].iter().sum()).collect();
    let count = rows.len() as i64;
    let (keys, table) = (vec![960; rows.len()], vec![0; 60 * rows.len()]);
    let batch = BatchInput {
        qo_indptr: host_tensor(&indptr, &[count + 1]),
        kv_len: host_tensor(&keys, &[count]),
        block_table: host_tensor(&table, &[count, 60]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

/// A multiprocessor that is reserved for rows of a draft is idle at requests without one: such batches are cut into smaller
/// items. A graph launches the same for every batch, and finds in the plan how many row tiles there are.
pub fn hopper_drafts() {
    let (context, recorder) = (context(), recorder());
    let [none, some, all] = [vec![1; 128], [1, 1, 1, 4].repeat(32), vec![4; 128]];
    for (heads, rows, row_tiles, items) in [
        (64, &none, 1, 128),
        (64, &some, 1, 132),
        (64, &all, 4, 33),
        (128, &none, 2, 66),
        (32, &none, 1, 128),
        (32, &all, 2, 66),
        (80, &all, 5, 26),
        (128, &all, 8, 16),
    ] {
        let desc = AttentionDesc {
            max_batch_size: 128,
            max_num_tokens: 512,
            max_num_pages: 128 * 60,
            max_kv_len: 960,
            ..hopper(heads, 16, 4)
        };
        let grids = [(false, row_tiles, items * row_tiles), (true, 0, 132)];
        for (graph, stated, ctas) in grids {
            let named = format!("{heads} heads, {graph}, {rows:?}");
            let mut handle = Handle::of(&context, AttentionDesc { graph, ..desc }).unwrap();
            recorder.forget();
            plan_rows(&mut handle, rows);
            let upload = recorder.upload();
            let launched = launches(&recorder, &handle, &tight_args_of(512, heads, 1.0));
            let params: MlaHopperParams = launched[0].params();
            let counts = upload.i32s(params.mla.attention.plan.counts, 6);
            assert_eq!(launched[0].grid, [ctas, 1, 1], "{named}");
            assert_eq!(params.mla.row_tiles, stated, "{named}");
            assert_eq!(counts[5], row_tiles as i32, "{named}");
        }
    }
}

/// What the Hopper kernel lacks, the portable one takes.
pub fn hopper_lacks() {
    let recorder = recorder();
    let context = context();
    let mut handle = Handle::of(&context, hopper(20, 16, 3)).unwrap();
    plan_pages(&mut handle, 90, 16);
    let kernel = |args: &AttentionArgs| launches(&recorder, &handle, args)[0].name().to_owned();
    let right = tight_args(20, 1.0);
    assert_eq!(kernel(&right), "folio_sm90_mla");
    assert_eq!(kernel(&tight_args(20, -1.0)), "folio_mla");
    let moved = |tensor: Tensor| at(tensor.address() + 2, DType::BF16, tensor.shape(), None);
    let unaligned = AttentionArgs {
        o: moved(right.o),
        ..right
    };
    assert_eq!(kernel(&unaligned), "folio_mla");
    let unaligned = AttentionArgs {
        q: moved(right.q),
        ..right
    };
    assert_eq!(kernel(&unaligned), "folio_mla");
    let mut pages_of_four = Handle::of(&context, hopper(20, 4, 3)).unwrap();
    assert_eq!(
        pages_of_four.attention.kernel(),
        "mla_sm90a_bf16_r512_q64_gather"
    );
    plan_pages(&mut pages_of_four, 90, 4);
    let kv = at(KV, DType::BF16, &[PAGES, 4, 576], None);
    let of_four = AttentionArgs {
        k: kv,
        v: kv,
        ..right
    };
    let launched = launches(&recorder, &pages_of_four, &of_four);
    assert_eq!(launched[0].name(), "folio_sm90_mla_rows");
    let params: MlaHopperParams = launched[0].params();
    assert_eq!(params.whole_records, 1);
    let narrow = AttentionDesc {
        head_dim_qk: 320,
        head_dim_vo: 256,
        ..hopper(20, 16, 3)
    };
    let narrow = Handle::of(&context, narrow).unwrap();
    assert_eq!(narrow.attention.kernel(), "mla_sm80_bf16_r512_q32");
}

/// Three rows of 20 heads whose parts lie next to each other.
fn run_args(kv: Tensor, kv_rope: Option<Tensor>) -> AttentionArgs {
    AttentionArgs {
        sm_scale: 0.125,
        ..AttentionArgs::mla(
            rows(Q, 3, FULL_RANK, [11_520, 576, 1]),
            Some(rows(Q_ROPE, 3, FULL_ROPE, [1280, 64, 1])),
            kv,
            kv_rope,
            rows(O, 3, FULL_RANK, [10_240, 512, 1]),
        )
    }
}

fn tight_args(heads: u32, sm_scale: f32) -> AttentionArgs {
    tight_args_of(3, heads, sm_scale)
}

fn tight_args_of(tokens: i64, heads: u32, sm_scale: f32) -> AttentionArgs {
    let heads = i64::from(heads);
    let tensor = |address, dim| at(address, DType::BF16, &[tokens, heads, dim], None);
    AttentionArgs {
        sm_scale,
        ..AttentionArgs::mla(
            tensor(Q, FULL_RANK),
            Some(tensor(Q_ROPE, FULL_ROPE)),
            at(KV, DType::BF16, &[PAGES, 16, 576], None),
            None,
            tensor(O, FULL_RANK),
        )
    }
}
