//! Multi-head latent attention with few rows on Hopper: which of the kernels takes a run, what it is launched with,
//! and the tensor maps that it reads records by.

use folio::api::BatchInput;
use folio::cuda::mla_few_params::MlaFewParams;
use folio::cuda::mla_params::{MlaHopperParams, MlaParams};
use folio::cuda::params::CombineParams;
use folio::cuda::plan_params::PlanBatchParams;
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, CacheFormat, Kind, KvLayout, KvStorage};
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, at, context, desc, divides, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const Q_ROPE: usize = 0x2_0000_0000;
const KV: usize = 0x3_0000_0000;
const KV_ROPE: usize = 0x4_0000_0000;
const O: usize = 0x5_0000_0000;

const HEADS: i64 = 16;
const RANK: i64 = 512;
const ROPE: i64 = 64;
const RECORD: i64 = RANK + ROPE;
const PAGES: i64 = 40;

fn mla(kv_format: CacheFormat, page_size: u32) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Mla,
        kv_format,
        num_qo_heads: HEADS as u32,
        num_kv_heads: 1,
        head_dim_qk: RECORD as u32,
        head_dim_vo: RANK as u32,
        kv: KvStorage::Paged {
            page_size,
            layout: KvLayout::Nhd,
        },
        ..desc(false)
    }
}

fn args(kv: Tensor, kv_rope: Option<Tensor>) -> AttentionArgs {
    let rows = |address, dim, strides| {
        let shape = [6, HEADS, dim];
        at(address, DType::BF16, &shape, Some(strides))
    };
    AttentionArgs {
        sm_scale: 0.125,
        k_scale: 0.25,
        ..AttentionArgs::mla(
            rows(Q, RANK, &[12_000, 576, 1]),
            Some(rows(Q_ROPE, ROPE, &[1304, 80, 1])),
            kv,
            kv_rope,
            rows(O, RANK, &[10_240, 516, 1]),
        )
    }
}

/// Records of a token, `apart` elements from page to page.
fn records(dtype: DType, page_size: i64, width: i64, apart: i64) -> Tensor {
    let strides = [apart, width, 1];
    at(KV, dtype, &[PAGES, page_size, width], Some(&strides))
}

/// Plans two requests of a row each.
fn plan(handle: &mut Handle, page_size: i32, keys: i32) {
    let columns = (keys + page_size - 1) / page_size;
    let table: Vec<i32> = (0..2 * columns).map(|id| id % PAGES as i32).collect();
    let batch = BatchInput {
        kv_len: host_tensor(&[keys; 2], &[2]),
        block_table: host_tensor(&table, &[2, i64::from(columns)]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<MlaFewParams>("folio_sm90_mla_few_tma");
    recorder.expect::<MlaFewParams>("folio_sm90_mla_few_gather");
    recorder.expect::<MlaFewParams>("folio_sm90_mla_few_records");
    recorder.expect::<MlaHopperParams>("folio_sm90_mla_gather");
    recorder.expect::<MlaParams>("folio_mla");
    recorder.expect::<CombineParams>("folio_combine_latent");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder
}

fn launches(recorder: &Recorder, handle: &Handle, args: &AttentionArgs) -> Vec<Launched> {
    recorder.forget();
    handle.attention.run(args, OURS).unwrap();
    recorder.launches()
}

fn assert_launch(launch: &Launched, symbol: &str, units: u32, warps: u32) {
    assert_eq!(launch.name(), symbol);
    assert_eq!(
        (launch.grid, launch.block),
        ([units, 1, 1], [32 * warps, 1, 1])
    );
    assert_eq!(launch.shared_bytes, 232_448);
    assert_eq!((launch.dependent, launch.cluster), (1, 1));
    assert_eq!(launch.stream, OURS.0 as u64);
}

/// Whole records of 16-bit elements: a box is nine atoms of 16 tokens, or of 8 where pages are no multiple of 16.
pub fn whole_records_by_tma() {
    let recorder = recorder();
    for (page_size, boxes_log2, groups_of_box) in [(64, 0, 2), (24, 1, 1)] {
        let mut handle = Handle::of(&context(), mla(DType::BF16.into(), page_size)).unwrap();
        assert_eq!(handle.attention.kernel(), "mla_sm90a_bf16_r512_q16_tma");
        plan(&mut handle, page_size as i32, 100);
        let page = i64::from(page_size) * RECORD;
        let run = args(
            records(DType::BF16, page_size.into(), RECORD, 3 * page),
            None,
        );
        let launched = launches(&recorder, &handle, &run);
        assert_eq!(launched.len(), 1);
        assert_launch(&launched[0], "folio_sm90_mla_few_tma", 2, 9);
        let params: MlaFewParams = launched[0].params();
        let attention = params.mla.attention;
        assert_eq!((attention.q.data, attention.q.stride_head), (Q as u64, 576));
        assert_eq!(params.mla.q_rope.stride_head, 80);
        assert_eq!(
            (attention.logits_scale, attention.v_scale),
            (0.125 * 0.25, 0.25)
        );
        assert_eq!((params.mla.row_tiles, params.one_record), (1, 1));
        assert_eq!((params.boxes_log2, params.kv_evict_first), (boxes_log2, 1));
        let step = 3 * page_size / 8;
        assert_eq!([params.page_step, params.rope_page_step], [step; 2]);
        for n in [0, 1, 63, 64, 99, 1 << 20, i32::MAX as u32] {
            assert_eq!(divides(n, params.mla.page_size), n / page_size);
            assert_eq!(divides(n, params.mla.num_heads), n / 16);
        }
        let map = &launched[0].maps()[0];
        assert_eq!((map.address, map.swizzle), (KV as u64, 3));
        let groups = (PAGES as u64 - 1) * u64::from(step) + u64::from(page_size / 8);
        assert_eq!(map.extents[..4], [64, 8, 9, groups]);
        assert_eq!(map.strides[..3], [1152, 128, 8 * 1152]);
        assert_eq!(map.boxes[..4], [64, 8, 9, groups_of_box]);
    }
}

/// The two parts in two tensors: boxes of 8 tokens, so that the parts of a group lie together.
pub fn split_records_by_tma() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mla(DType::BF16.into(), 16)).unwrap();
    plan(&mut handle, 16, 100);
    let latent = records(DType::BF16, 16, RANK, 16 * RANK);
    let strides = [2 * 16 * 72, 72, 1];
    let rope = at(KV_ROPE, DType::BF16, &[PAGES, 16, ROPE], Some(&strides));
    let launched = launches(&recorder, &handle, &args(latent, Some(rope)));
    assert_launch(&launched[0], "folio_sm90_mla_few_tma", 2, 9);
    let params: MlaFewParams = launched[0].params();
    assert_eq!((params.one_record, params.boxes_log2), (0, 1));
    assert_eq!([params.page_step, params.rope_page_step], [2, 4]);
    let pages = PAGES as u64;
    for (map, address, atoms, groups, token) in [
        (0, KV, 8, 2 * pages, 1024),
        (1, KV_ROPE, 1, 4 * (pages - 1) + 2, 144),
    ] {
        let map = &launched[0].maps()[map];
        assert_eq!((map.address, map.swizzle), (address as u64, 3));
        assert_eq!(map.extents[..4], [64, 8, atoms, groups]);
        // One atom has no stride; it may be anything.
        assert_eq!([map.strides[0], map.strides[2]], [token, 8 * token]);
        assert_eq!(map.boxes[..4], [64, 8, atoms as u32, 1]);
    }
}

/// Pages that are no whole number of 8 tokens, and pages that are not, once the handle is made.
pub fn gathers_where_tma_cannot() {
    let recorder = recorder();
    for page_size in [1, 64] {
        let mut handle = Handle::of(&context(), mla(DType::BF16.into(), page_size)).unwrap();
        let is_named = handle.attention.kernel().ends_with("_gather");
        assert_eq!(is_named, page_size == 1, "{}", handle.attention.kernel());
        plan(&mut handle, page_size as i32, 30);
        let page = i64::from(page_size) * RECORD + 8;
        let run = args(records(DType::BF16, page_size.into(), RECORD, page), None);
        let launched = launches(&recorder, &handle, &run);
        assert_launch(&launched[0], "folio_sm90_mla_few_gather", 2, 12);
        assert!(launched[0].maps().is_empty());
        let params: MlaFewParams = launched[0].params();
        let k = params.mla.attention.k;
        assert_eq!((k.stride_page, k.stride_token), (page, RECORD));
        assert_eq!(params.mla.k_rope.data, KV as u64 + 1024);
    }
}

/// Bytes of a record.
fn width(format: CacheFormat) -> i64 {
    if format == CacheFormat::DS_MLA {
        656
    } else {
        RECORD
    }
}

/// fp8 records come one by one, in pages of any size.
pub fn bytes_by_record() {
    let recorder = recorder();
    for (format, dtype, name) in [
        (
            CacheFormat::from(DType::F8E4M3),
            DType::F8E4M3,
            "kve4m3_r512",
        ),
        (DType::F8E5M2.into(), DType::F8E5M2, "kve5m2_r512"),
        (CacheFormat::DS_MLA, DType::U8, "kve4m3_ds_r512"),
    ] {
        for page_size in [1, 64] {
            let mut handle = Handle::of(&context(), mla(format, page_size)).unwrap();
            let kernel = handle.attention.kernel();
            assert_eq!(kernel, format!("mla_sm90a_bf16_{name}_q16_records"));
            plan(&mut handle, page_size as i32, 30);
            let page = i64::from(page_size) * width(format);
            let run = args(records(dtype, page_size.into(), width(format), page), None);
            let launched = launches(&recorder, &handle, &run);
            assert_launch(&launched[0], "folio_sm90_mla_few_records", 2, 12);
            assert!(launched[0].maps().is_empty());
            let params: MlaFewParams = launched[0].params();
            assert_eq!(params.mla.attention.k.stride_token, width(format));
            assert_eq!(params.one_record, u32::from(format != CacheFormat::DS_MLA));
        }
    }
}

/// Split rows are combined. More rows than a tile have the kernel of 64 rows.
pub fn splits_and_more_rows() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mla(CacheFormat::DS_MLA, 64)).unwrap();
    plan(&mut handle, 64, 50_000);
    let width = width(CacheFormat::DS_MLA);
    let run = args(records(DType::U8, 64, width, 64 * width), None);
    let launched = launches(&recorder, &handle, &run);
    assert_eq!(launched.len(), 2);
    // The stub has 132 multiprocessors.
    assert_launch(&launched[0], "folio_sm90_mla_few_records", 132, 12);
    let params: MlaFewParams = launched[0].params();
    assert_eq!((params.mla.row_tiles, params.kv_evict_first), (1, 1));
    assert_eq!(launched[1].name(), "folio_combine_latent");
    for (format, name) in [
        (DType::F8E4M3.into(), "kve4m3_r512"),
        (CacheFormat::DS_MLA, "kve4m3_ds_r512"),
    ] {
        let two_tokens = AttentionDesc {
            max_qo_len: 2,
            max_num_tokens: 8,
            ..mla(format, 64)
        };
        let handle = Handle::of(&context(), two_tokens).unwrap();
        let kernel = format!("mla_sm90a_bf16_{name}_q64_gather");
        assert_eq!(handle.attention.kernel(), kernel);
    }
}

/// Queries whose rows are not aligned to 16 bytes, outputs to 8; more rows than the kernel is for have another.
pub fn the_portable_kernel_takes_the_rest() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mla(DType::BF16.into(), 64)).unwrap();
    plan(&mut handle, 64, 100);
    let run = || args(records(DType::BF16, 64, RECORD, 64 * RECORD), None);
    let rows = |address, dim, head| {
        let strides = [12_000, head, 1];
        at(address, DType::BF16, &[6, HEADS, dim], Some(&strides))
    };
    let taken = |args: &AttentionArgs| launches(&recorder, &handle, args)[0].name().to_owned();
    let q = AttentionArgs {
        q: rows(Q, RANK, 572),
        ..run()
    };
    let q_rope = AttentionArgs {
        q_rope: Some(rows(Q_ROPE + 8, ROPE, 64)),
        ..run()
    };
    let o = AttentionArgs {
        o: rows(O + 4, RANK, 512),
        ..run()
    };
    assert_eq!(taken(&run()), "folio_sm90_mla_few_tma");
    for args in [q, q_rope, o] {
        assert_eq!(taken(&args), "folio_mla");
    }
    let many = AttentionDesc {
        num_qo_heads: 33,
        ..mla(DType::BF16.into(), 64)
    };
    let handle = Handle::of(&context(), many).unwrap();
    assert_eq!(handle.attention.kernel(), "mla_sm90a_bf16_r512_q64_tma");
}

/// Rows of a prompt beside decodes.
const PROMPT: i32 = 300;
const REQUESTS: usize = 4;
/// Of two decodes as many as are planned apart.
const MANY_KEYS: i32 = 140_000;

fn mixed(heads: u32) -> AttentionDesc {
    AttentionDesc {
        num_qo_heads: heads,
        max_batch_size: REQUESTS as u32,
        max_num_tokens: 400,
        max_qo_len: 400,
        max_kv_len: MANY_KEYS as u32,
        max_num_pages: 0,
        ..mla(DType::F8E4M3.into(), 64)
    }
}

/// Plans requests of these rows, and so many keys each.
fn plan_rows(handle: &mut Handle, rows: [i32; REQUESTS], keys: i32) {
    let indptr: Vec<i32> = (0..=REQUESTS).map(|n| rows[..n].iter().sum()).collect();
    let columns = (keys + 63) / 64;
    let table: Vec<i32> = (0..REQUESTS as i32 * columns)
        .map(|id| id % PAGES as i32)
        .collect();
    let batch = BatchInput {
        qo_indptr: host_tensor(&indptr, &[REQUESTS as i64 + 1]),
        kv_len: host_tensor(&[keys; REQUESTS], &[REQUESTS as i64]),
        block_table: host_tensor(&table, &[REQUESTS as i64, i64::from(columns)]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

/// Names of what a run launches, without those of the kernels that combine split rows.
fn attended(recorder: &Recorder, handle: &Handle, heads: u32) -> Vec<Launched> {
    let rows = |address, dim| {
        let shape = [400, i64::from(heads), dim];
        at(address, DType::BF16, &shape, None)
    };
    let run = AttentionArgs {
        q: rows(Q, RANK),
        q_rope: Some(rows(Q_ROPE, ROPE)),
        o: rows(O, RANK),
        ..args(records(DType::F8E4M3, 64, RECORD, 64 * RECORD), None)
    };
    let mut launched = launches(recorder, handle, &run);
    launched.retain(|launch| launch.name() != "folio_combine_latent");
    launched
}

fn names(launched: &[Launched]) -> Vec<&str> {
    launched.iter().map(Launched::name).collect()
}

const DECODES: &str = "folio_sm90_mla_few_records";
const PROMPTS: &str = "folio_sm90_mla_gather";

/// Decodes of many keys beside a prompt are launched first, of few keys they are the prompts' kernel's.
pub fn decodes_beside_prompts() {
    const FEW_KEYS: i32 = 2000;
    let recorder = recorder();
    let context = context();
    for (heads, decode_rows) in [(16, 1), (5, 3)] {
        let beside = [decode_rows, PROMPT, 1, 0];
        let mut handle = Handle::of(&context, mixed(heads)).unwrap();
        plan_rows(&mut handle, beside, MANY_KEYS);
        let launched = attended(&recorder, &handle, heads);
        assert_eq!(names(&launched), [DECODES, PROMPTS]);
        let of_decodes = launched[0].params::<MlaFewParams>().mla.attention;
        let of_prompts = launched[1].params::<MlaHopperParams>().mla.attention;
        assert_ne!(of_decodes.plan.items, of_prompts.plan.items);
        assert_ne!(of_decodes.plan.partial_o, of_prompts.plan.partial_o);
        assert_eq!(of_decodes.q.data, of_prompts.q.data);
        plan_rows(&mut handle, beside, FEW_KEYS);
        assert_eq!(names(&attended(&recorder, &handle, heads)), [PROMPTS]);
        plan_rows(&mut handle, [decode_rows, 1, 1, 0], FEW_KEYS);
        assert_eq!(names(&attended(&recorder, &handle, heads)), [DECODES]);
        plan_rows(&mut handle, [decode_rows + 1, 1, 1, 0], FEW_KEYS);
        assert_eq!(names(&attended(&recorder, &handle, heads)), [PROMPTS]);
    }
}

/// Where two kernels would be launched for every batch, no tile of 16 rows has a token of so many heads, or only the device knows
/// the lengths.
pub fn decodes_with_prompts() {
    let recorder = recorder();
    let context = context();
    let graph = AttentionDesc {
        graph: true,
        ..mixed(16)
    };
    let batch_invariant = AttentionDesc {
        batch_invariant: true,
        ..mixed(16)
    };
    for desc in [graph, batch_invariant, mixed(17)] {
        let mut handle = Handle::of(&context, desc).unwrap();
        plan_rows(&mut handle, [1, PROMPT, 1, 1], MANY_KEYS);
        let launched = attended(&recorder, &handle, desc.num_qo_heads);
        assert_eq!(names(&launched), [PROMPTS]);
    }
    let mut handle = Handle::of(&context, mixed(16)).unwrap();
    recorder.forget();
    handle.plan_device(OURS).unwrap();
    assert_eq!(recorder.launches().len(), 1);
    let launched = attended(&recorder, &handle, 16);
    assert_eq!(names(&launched), [PROMPTS]);
}
