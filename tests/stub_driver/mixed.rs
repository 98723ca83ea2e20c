//! Prompts and decodes of one batch: which plans there are, and which launches of a run. On Hopper over an fp8 cache.

use folio::api::BatchInput;
use folio::cuda::lse_params::RoundLseParams;
use folio::cuda::params::{CombineParams, DecodeParams, GenericParams};
use folio::cuda::plan_params::PlanBatchParams;
use folio::cuda::prefill_fp8_params::PrefillFp8Params;
use folio::cuda::prefill_params::PrefillParams;
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage};

use crate::fixture::{DIM, HEADS, Handle, OURS, SOMEWHERE, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const LSE: usize = 0x1_0000_0000;
const REQUESTS: i32 = 4;
const ROWS_OF_PROMPT: i32 = 300;
/// Rows of a decode where every query head has a KV head.
const DECODE_ROWS: u32 = 8;
/// Of three decodes: their keys and values of 8 heads of 128 are 3 times 20 MiB, and of few keys 3 times 2.
const MANY_KEYS: i32 = 10240;
const FEW_KEYS: i32 = 1024;
/// Up to which prompts have small tiles.
const KEYS_OF_A_TILE: i32 = 256;

fn mixed(graph: bool) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        kv_format: DType::F8E4M3.into(),
        max_batch_size: REQUESTS as u32,
        max_num_tokens: 1000,
        max_qo_len: 1000,
        ..desc(graph)
    }
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<DecodeParams>("folio_sm90_decode_warpgroup_tma");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_rows");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<RoundLseParams>("folio_round_lse");
    recorder
}

/// A batch of requests with these rows and so many keys each.
fn plan(handle: &mut Handle, rows: [i32; REQUESTS as usize], keys: i32) {
    plan_over_pages(handle, rows, keys, 16);
}

fn plan_over_pages(
    handle: &mut Handle,
    rows: [i32; REQUESTS as usize],
    keys: i32,
    page_size: usize,
) {
    let mut indptr = vec![0];
    indptr.extend(rows.iter().scan(0, |sum, rows| {
        *sum += rows;
        Some(*sum)
    }));
    let pages = (keys as usize).div_ceil(page_size);
    let ids = vec![1; REQUESTS as usize * pages];
    let batch = BatchInput {
        qo_indptr: host_tensor(&indptr, &[i64::from(REQUESTS) + 1]),
        kv_len: host_tensor(&[keys; REQUESTS as usize], &[REQUESTS.into()]),
        block_table: host_tensor(&ids, &[REQUESTS.into(), pages as i64]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
}

fn run(recorder: &Recorder, handle: &Handle, lse_dtype: Option<DType>) -> Vec<Launched> {
    recorder.forget();
    let args = arguments(DType::F8E4M3);
    let args = AttentionArgs {
        lse: lse_dtype.map(|dtype| at(LSE, dtype, &[TOKENS, HEADS.into()], None)),
        ..args
    };
    handle.attention.run(&args, OURS).unwrap();
    recorder.launches()
}

const TOKENS: i64 = ROWS_OF_PROMPT as i64 + 130;

fn arguments(kv_dtype: DType) -> AttentionArgs {
    let (heads, dim) = (i64::from(HEADS), i64::from(DIM));
    let rows = at(SOMEWHERE, DType::BF16, &[TOKENS, heads, dim], None);
    let cache = at(SOMEWHERE, kv_dtype, &[4096, 16, heads, dim], None);
    AttentionArgs::new(rows, cache, cache, rows)
}

fn names(launches: &[Launched]) -> Vec<&str> {
    launches.iter().map(Launched::name).collect()
}

const DECODES: [&str; 2] = ["folio_sm90_decode_tma", "folio_combine"];
const PROMPTS: [&str; 2] = ["folio_prefill_sm90_rows", "folio_combine"];

/// By the batch: decodes of many keys beside a prompt are launched first, of few keys they are the prompts' kernel's.
pub fn decodes_apart() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mixed(false)).unwrap();
    let beside = [1, ROWS_OF_PROMPT, 1, 1];
    plan(&mut handle, beside, MANY_KEYS);
    let launches = run(&recorder, &handle, None);
    assert_eq!(names(&launches), [DECODES, PROMPTS].concat());
    let of_decodes = launches[0].params::<DecodeParams>().attention;
    let of_prompts = launches[2].params::<PrefillParams>().attention;
    assert_ne!(of_decodes.plan.items, of_prompts.plan.items);
    assert_ne!(of_decodes.plan.partial_o, of_prompts.plan.partial_o);
    assert_eq!(of_decodes.q.data, of_prompts.q.data);
    let combined = [&launches[1], &launches[3]].map(|launch| launch.params::<CombineParams>().plan);
    assert_eq!(
        combined.map(|plan| plan.partial_o),
        [of_decodes.plan.partial_o, of_prompts.plan.partial_o]
    );
    plan(&mut handle, beside, FEW_KEYS);
    assert_eq!(names(&run(&recorder, &handle, None))[..1], PROMPTS[..1]);
    plan(&mut handle, [1; 4], FEW_KEYS);
    assert_eq!(names(&run(&recorder, &handle, None))[..1], DECODES[..1]);
    plan(&mut handle, [1, ROWS_OF_PROMPT, 0, 0], FEW_KEYS);
    assert_eq!(names(&run(&recorder, &handle, None))[..1], PROMPTS[..1]);
}

/// Where most requests of few rows are drafts, or all requests, these and the decodes take the kernel of more rows. But requests
/// of few keys are prompts.
pub fn drafts_apart() {
    const DRAFTS: [&str; 2] = ["folio_sm90_decode_warpgroup_tma", "folio_combine"];
    let rows = DECODE_ROWS as i32 + 1;
    let recorder = recorder();
    for (desc, batch, keys, expected) in [
        (
            mixed(false),
            [rows, ROWS_OF_PROMPT, rows, 1],
            MANY_KEYS,
            [DRAFTS, PROMPTS].concat(),
        ),
        (
            mixed(false),
            [rows, ROWS_OF_PROMPT, 1, 1],
            MANY_KEYS,
            [DECODES, PROMPTS].concat(),
        ),
        (mixed(false), [rows, rows, 1, 1], FEW_KEYS, DRAFTS.to_vec()),
        (
            mixed(false),
            [rows, rows, 1, 1],
            KEYS_OF_A_TILE,
            vec!["folio_prefill_sm90_rows"],
        ),
        (mixed(false), [1; 4], KEYS_OF_A_TILE, DECODES.to_vec()),
        // Up to 64 rows, where most keys are theirs.
        (mixed(false), [64, 64, 1, 1], MANY_KEYS, DRAFTS.to_vec()),
        (
            mixed(false),
            [64, ROWS_OF_PROMPT, 64, 1],
            MANY_KEYS,
            [DRAFTS, PROMPTS].concat(),
        ),
        (
            mixed(false),
            [64, 65, 1, 1],
            MANY_KEYS,
            [DECODES, PROMPTS].concat(),
        ),
        (
            mixed(false),
            [64, 1, 1, 1],
            MANY_KEYS,
            [DECODES, PROMPTS].concat(),
        ),
        (
            mixed(true),
            [rows, ROWS_OF_PROMPT, rows, 1],
            MANY_KEYS,
            [DECODES, PROMPTS].concat(),
        ),
    ] {
        let mut handle = Handle::of(&context(), desc).unwrap();
        plan(&mut handle, batch, keys);
        let launches = run(&recorder, &handle, None);
        assert_eq!(names(&launches), expected, "{batch:?} of {keys} keys");
    }
}

/// Products in e4m3 keep decodes with the prompts where the heads of a group share a tile. Other groups' keys would be read once for
/// each tile of heads.
pub fn decodes_apart_from_products_in_fp8() {
    let recorder = recorder();
    let (boxes, rows) = ("folio_prefill_fp8_sm90", "folio_prefill_fp8_sm90_rows");
    for kernel in [boxes, rows] {
        recorder.expect::<PrefillFp8Params>(kernel);
    }
    recorder.expect::<DecodeParams>("folio_sm90_decode_gather");
    for (group_size, page_size, first, of_prompts) in [
        (1, 16, boxes, boxes),
        (2, 16, boxes, boxes),
        (3, 16, DECODES[0], boxes),
        (4, 16, boxes, boxes),
        (7, 16, DECODES[0], boxes),
        (4, 1, rows, rows),
        (7, 1, "folio_sm90_decode_gather", rows),
    ] {
        let heads = group_size * HEADS;
        let desc = AttentionDesc {
            q_dtype: DType::F8E4M3,
            fp8_products: true,
            num_qo_heads: heads,
            kv: KvStorage::Paged {
                page_size,
                layout: KvLayout::Nhd,
            },
            ..mixed(false)
        };
        let mut handle = Handle::of(&context(), desc).unwrap();
        let beside = [1, ROWS_OF_PROMPT, 1, 1];
        plan_over_pages(&mut handle, beside, MANY_KEYS, page_size as usize);
        recorder.forget();
        let rows = |dtype| {
            let shape = [TOKENS, heads.into(), DIM.into()];
            at(SOMEWHERE, dtype, &shape, None)
        };
        let page = i64::from(page_size);
        let shape = [65536 / page, page, HEADS.into(), DIM.into()];
        let cache = at(SOMEWHERE, DType::F8E4M3, &shape, None);
        let args = AttentionArgs::new(rows(DType::F8E4M3), cache, cache, rows(desc.o_dtype));
        handle.attention.run(&args, OURS).unwrap();
        let launches = recorder.launches();
        assert_eq!(launches[0].name(), first, "{group_size}, {page_size}");
        assert!(launches.iter().any(|launch| launch.name() == of_prompts));
    }
}

/// A graph launches for every batch what it launched when it was captured.
pub fn of_a_graph() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mixed(true)).unwrap();
    for keys in [MANY_KEYS, FEW_KEYS] {
        plan(&mut handle, [1, ROWS_OF_PROMPT, 1, 1], keys);
        let launches = run(&recorder, &handle, None);
        assert_eq!(names(&launches), [DECODES, PROMPTS].concat());
    }
}

/// Where only the device knows the lengths it plans both, and the prompts' plan reads how many decodes there are.
pub fn decodes_apart_on_the_device() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mixed(false)).unwrap();
    let list = |count| Some(at(SOMEWHERE, DType::I32, &[count], None));
    let batch = BatchInput {
        qo_indptr: list(i64::from(REQUESTS) + 1),
        kv_len: list(REQUESTS.into()),
        block_table: Some(at(SOMEWHERE, DType::I32, &[REQUESTS.into(), 640], None)),
        ..BatchInput::default()
    };
    recorder.forget();
    handle.plan(&batch, OURS).unwrap();
    let planned = recorder.launches();
    assert_eq!(names(&planned), ["folio_plan"; 2]);
    let [decodes, prompts] = [0, 1].map(|n: usize| planned[n].params::<PlanBatchParams>().plan);
    assert_eq!([decodes.decode_rows, prompts.decode_rows], [DECODE_ROWS; 2]);
    assert_eq!(
        [decodes.decode_counts, prompts.decode_counts],
        [0, decodes.counts]
    );
    // 32 MiB of 8 heads of 128, and units of 64 keys.
    assert_eq!([decodes.least_units, prompts.least_units], [256, 0]);
    // What is longer is no decode, and is not cut off to be one.
    assert!(decodes.max_qo_len > prompts.max_qo_len);
    assert_ne!(decodes.items, prompts.items);
    let launches = run(&recorder, &handle, None);
    assert_eq!(names(&launches), [DECODES, PROMPTS].concat());
}

/// The portable kernels do so over every cache, and with decodes of twice as many rows.
pub fn portably() {
    let recorder = recorder();
    recorder.expect::<GenericParams>("folio_attention");
    let both = ["folio_attention", "folio_combine", "folio_attention"];
    for kv_dtype in [DType::BF16, DType::F8E4M3] {
        let desc = AttentionDesc {
            kv_format: kv_dtype.into(),
            ..mixed(false)
        };
        let mut handle = Handle::of(&context(), desc).unwrap();
        let run = |handle: &Handle| {
            recorder.forget();
            handle.attention.run(&arguments(kv_dtype), OURS).unwrap();
            recorder.launches()
        };
        plan(
            &mut handle,
            [2 * DECODE_ROWS as i32, ROWS_OF_PROMPT, 1, 1],
            MANY_KEYS,
        );
        let launches = run(&handle);
        assert_eq!(names(&launches)[..3], both);
        let [decodes, prompts] = [0, 2].map(|n: usize| launches[n].params::<GenericParams>());
        assert_ne!(decodes.attention.plan.items, prompts.attention.plan.items);
        // Tiles of 16 rows and of 128.
        assert_eq!((decodes.row_tiles, prompts.row_tiles), (1, 1));
        plan(&mut handle, [1, ROWS_OF_PROMPT, 0, 0], FEW_KEYS);
        assert_eq!(names(&run(&handle)), [both[0], both[1]]);
    }
}

/// An lse in 16 bits is rounded once, of the rows of both.
pub fn lse_of_16_bits() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), mixed(false)).unwrap();
    plan(&mut handle, [1, ROWS_OF_PROMPT, 1, 1], MANY_KEYS);
    let launches = run(&recorder, &handle, Some(DType::BF16));
    let (last, before) = launches.split_last().unwrap();
    assert_eq!(names(before), [DECODES, PROMPTS].concat());
    let rounded = last.params::<RoundLseParams>();
    let written = [
        before[0].params::<DecodeParams>().attention.lse,
        before[1].params::<CombineParams>().lse,
        before[2].params::<PrefillParams>().attention.lse,
        before[3].params::<CombineParams>().lse,
    ];
    assert_eq!(written, [rounded.from; 4]);
    assert_eq!(rounded.to, LSE as u64);
}
