//! Cascades on a device: which kernels a run launches, and on which of the two plans in the workspace.

use folio::api::{BatchInput, Cascade, SharedPrefixes};
use folio::cuda::cascade_params::{NO_SEGMENT, PlanCascadeParams, SHARED_SEGMENTS};
use folio::cuda::params::{CombineParams, DecodeParams, GenericParams, PlanView};
use folio::cuda::plan_params::PlanBatchParams;
use folio::cuda::prefill_params::PrefillParams;
use folio::dtype::DType;
use folio::problem::{
    AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage, Mask, MaskColumns, ScoreBias, Window,
};

use crate::fixture::{self, OURS, Room, WORKSPACE, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const TABLE: usize = 0xa_0000_0000;
const ROWS: usize = 0xd_0000_0000;
const LENGTHS: usize = 0xe_0000_0000;
const REQUESTS: usize = 64;
const KEYS: i32 = 8192 + 100;
const SHARED: u32 = 8192;

/// Llama's heads, one new token for each request.
fn cascade_desc(graph: bool) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        num_qo_heads: 32,
        num_kv_heads: 8,
        kv: KvStorage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
        },
        max_batch_size: REQUESTS as u32,
        max_num_tokens: REQUESTS as u32,
        shared_levels: 1,
        ..desc(graph)
    }
}

fn args() -> AttentionArgs {
    let of = |address, shape: &[i64]| at(address, DType::BF16, shape, None);
    let rows = [REQUESTS as i64, 32, 128];
    let cache = [1 << 16, 16, 8, 128];
    AttentionArgs::new(
        of(0x1_0000_0000, &rows),
        of(0x2_0000_0000, &cache),
        of(0x4_0000_0000, &cache),
        of(0x9_0000_0000, &rows),
    )
}

/// A mask of bytes, one for every row and new key, or for every row and key.
fn with_mask(mask_columns: MaskColumns) -> AttentionArgs {
    let of_row = match mask_columns {
        MaskColumns::NewKeys => 1,
        _ => i64::from(KEYS),
    };
    let bytes = [REQUESTS as i64 * of_row];
    let starts = at(0xc_0000_0000, DType::I64, &[REQUESTS as i64 + 1], None);
    AttentionArgs {
        mask: Mask::Bytes(at(0xb_0000_0000, DType::U8, &bytes, None)),
        custom_mask_indptr: Some(starts),
        mask_columns,
        ..args()
    }
}

fn with_window() -> AttentionArgs {
    AttentionArgs {
        window: Window {
            left: Some(100),
            right: None,
        },
        ..args()
    }
}

/// Requests whose lengths are on the host.
fn tokens_of(qo_indptr: &[i32], kv_lens: &[i32]) -> BatchInput {
    let requests = kv_lens.len() as i64;
    BatchInput {
        qo_indptr: host_tensor(qo_indptr, &[requests + 1]),
        kv_len: host_tensor(kv_lens, &[requests]),
        block_table: Some(at(TABLE, DType::I32, &[requests, 600], None)),
        ..BatchInput::default()
    }
}

/// A handle with room for its plans.
struct Handle {
    cascade: Cascade,
    room: Room,
}

impl Handle {
    fn new(graph: bool) -> Handle {
        Handle::with_levels(1, graph)
    }

    fn with_levels(shared_levels: u32, graph: bool) -> Handle {
        Handle::of(AttentionDesc {
            shared_levels,
            ..cascade_desc(graph)
        })
    }

    fn of(desc: AttentionDesc) -> Handle {
        let cascade = Cascade::new(&context(), desc).unwrap();
        let room = Room::new(cascade.workspace());
        Handle { cascade, room }
    }

    /// With lengths on the host.
    fn plan(&mut self, common_prefix_len: u32) {
        self.plan_keys(KEYS, common_prefix_len);
    }

    /// Requests of so many keys.
    fn plan_keys(&mut self, kv_len: i32, common_prefix_len: u32) {
        let prefixes = SharedPrefixes {
            common_prefix_len,
            ..SharedPrefixes::default()
        };
        let qo_indptr: Vec<i32> = (0..=REQUESTS as i32).collect();
        let kv_lens = [kv_len; REQUESTS];
        self.plan_batch(&tokens_of(&qo_indptr, &kv_lens), &prefixes);
    }

    /// With lengths on the device.
    fn plan_on_device(
        &mut self,
        recorder: &Recorder,
        prefixes: &SharedPrefixes<'_>,
    ) -> Vec<Launched> {
        self.plan_requests_on_device(recorder, REQUESTS, prefixes)
    }

    fn plan_requests_on_device(
        &mut self,
        recorder: &Recorder,
        requests: usize,
        prefixes: &SharedPrefixes<'_>,
    ) -> Vec<Launched> {
        recorder.forget();
        let lengths = |address, count: usize| Some(at(address, DType::I32, &[count as i64], None));
        let batch = BatchInput {
            qo_indptr: lengths(ROWS, requests + 1),
            kv_len: lengths(LENGTHS, requests),
            block_table: Some(at(TABLE, DType::I32, &[requests as i64, 600], None)),
            ..BatchInput::default()
        };
        self.plan_batch(&batch, prefixes);
        recorder.launches()
    }

    fn plan_batch(&mut self, batch: &BatchInput, prefixes: &SharedPrefixes<'_>) {
        let (workspace, bytes) = self.room.workspace();
        self.cascade
            .plan(batch, prefixes, &workspace, bytes, OURS)
            .unwrap();
    }

    fn run(&self, recorder: &Recorder, args: &AttentionArgs) -> Vec<Launched> {
        recorder.forget();
        self.cascade.run(args, OURS).unwrap();
        recorder.launches()
    }
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_masked");
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<GenericParams>("folio_attention");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder.expect::<PlanCascadeParams>("folio_plan_cascade");
    recorder
}

fn names(launched: &[Launched]) -> Vec<&str> {
    launched.iter().map(Launched::name).collect()
}

/// The plan that a run's first kernel reads.
fn plan_of(launched: &[Launched]) -> PlanView {
    match launched[0].name() {
        "folio_prefill_sm90" | "folio_prefill_sm90_masked" => {
            launched[0].params::<PrefillParams>().attention.plan
        }
        _ => launched[0].params::<DecodeParams>().attention.plan,
    }
}

pub fn what_pays_is_one_kernel_and_a_combine() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    handle.plan(SHARED);
    assert_eq!(handle.cascade.shares(), Ok(true));
    let shared = handle.run(&recorder, &args());
    assert_eq!(names(&shared), ["folio_prefill_sm90", "folio_combine"]);
    // A page table on the device is read where it is, and a row for each request is put together.
    assert_eq!(plan_of(&shared).page_ids, TABLE as u64);
    let combine: CombineParams = shared[1].params();
    let rows = shared[1].grid[0] / combine.blocks_of_row;
    assert_eq!(rows as usize, REQUESTS);
    // Windows depend on positions, which the rows of several requests do not share.
    let flat = handle.run(&recorder, &with_window());
    assert_eq!(flat[0].name(), "folio_sm90_decode_tma");
    assert!(plan_of(&flat).items < plan_of(&shared).items);
}

/// What hides none of the shared keys reads them once, whatever it says of others.
pub fn masks_of_later_keys_share() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    handle.plan(SHARED);
    let shared = plan_of(&handle.run(&recorder, &args()));
    for columns in [MaskColumns::NewKeys, MaskColumns::KeysAfterPrefix] {
        let launched = handle.run(&recorder, &with_mask(columns));
        let expected = ["folio_prefill_sm90_masked", "folio_combine"];
        assert_eq!(names(&launched), expected, "{columns:?}");
        assert_eq!(plan_of(&launched).items, shared.items, "{columns:?}");
    }
    let flat = handle.run(&recorder, &with_mask(MaskColumns::Keys));
    assert!(plan_of(&flat).items < shared.items);
}

/// Rows of a request are another thing in a cut of several; those before its new keys get nothing in any.
pub fn biases_of_rows_of_the_batch_share() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    handle.plan(SHARED);
    let shared = plan_of(&handle.run(&recorder, &args()));
    let shape = [REQUESTS as i64, i64::from(KEYS)];
    for (request_rows, new_keys, shares) in [
        (false, false, true),
        (true, true, true),
        (false, true, true),
        (true, false, false),
    ] {
        let launched = handle.run(
            &recorder,
            &AttentionArgs {
                score_bias: Some(ScoreBias {
                    tensor: at(0xb_0000_0000, DType::F32, &shape, None),
                    request_rows,
                    new_keys,
                }),
                ..args()
            },
        );
        assert_eq!(launched[0].name(), "folio_attention");
        let plan = launched[0].params::<GenericParams>().attention.plan;
        assert_eq!(plan.items == shared.items, shares);
    }
}

/// Heads that do not share a tile's rows have no keys of their own in it.
pub fn the_kernel_follows_from_the_heads() {
    for (heads, kernel) in [
        (32, "prefill_sm90a_bf16_d128_q192_paged_own"),
        (136, "prefill_sm90a_bf16_d128_q192_paged"),
    ] {
        let desc = AttentionDesc {
            num_qo_heads: heads,
            ..cascade_desc(true)
        };
        let cascade = Cascade::new(&context(), desc).unwrap();
        assert_eq!(cascade.kernel(), kernel, "{heads}");
    }
}

pub fn what_does_not_pay_is_flat() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    for common_prefix_len in [0, 64] {
        handle.plan(common_prefix_len);
        assert_eq!(handle.cascade.shares(), Ok(false));
        let launched = handle.run(&recorder, &args());
        assert_eq!(launched[0].name(), "folio_sm90_decode_tma");
    }
}

/// An item for the few keys of each request takes longer than these keys do.
pub fn own_keys_of_many_requests_cost_their_items() {
    let mut handle = Handle::of(AttentionDesc {
        num_qo_heads: 40,
        head_dim_qk: 64,
        head_dim_vo: 64,
        ..cascade_desc(false)
    });
    // On an H200, 33 µs shared and 27 flat.
    handle.plan_keys(816 + 144, 816);
    assert_eq!(handle.cascade.shares(), Ok(false));
    handle.plan_keys(2048 + 144, 2048);
    assert_eq!(handle.cascade.shares(), Ok(true));
}

/// It is the plan of folio_prefill: one for few keys where the batch has few, not by the desc alone.
pub fn a_flat_plan_is_that_of_prefill() {
    let tokens = 64;
    let desc = AttentionDesc {
        max_qo_len: tokens,
        max_num_tokens: tokens * REQUESTS as u32,
        ..cascade_desc(false)
    };
    let qo_indptr: Vec<i32> = (0..=REQUESTS as i32).map(|b| b * tokens as i32).collect();
    for kv_len in [200, 2000] {
        let kv_lens = [kv_len; REQUESTS];
        let batch = tokens_of(&qo_indptr, &kv_lens);
        let mut cascade = Handle::of(desc);
        cascade.plan_batch(&batch, &SharedPrefixes::default());
        let prefill = AttentionDesc {
            shared_levels: 0,
            ..desc
        };
        let mut prefill = fixture::Handle::of(&context(), prefill).unwrap();
        prefill.plan(&batch, OURS).unwrap();
        // The flat plan has the first part of the workspace.
        let alone = prefill.room.host();
        assert!(alone == &cascade.room.host()[..alone.len()], "{kv_len}");
    }
}

/// Captured runs have the kernels and the addresses of every plan.
pub fn a_graph_has_one_kernel_for_all_plans() {
    let recorder = recorder();
    let mut handle = Handle::new(true);
    let mut runs = Vec::new();
    for common_prefix_len in [SHARED, 0, 64] {
        handle.plan(common_prefix_len);
        let launched = handle.run(&recorder, &args());
        assert_eq!(names(&launched), ["folio_prefill_sm90", "folio_combine"]);
        runs.push(launched);
    }
    for run in &runs[1..] {
        for (one, other) in run.iter().zip(&runs[0]) {
            assert_eq!(one.raw(), other.raw());
            assert_eq!(one.grid, other.grid);
        }
    }
    assert!(names(&handle.run(&recorder, &with_window())).contains(&"folio_sm90_decode_tma"));
}

/// Where batches of a handle that share two thirds of its keys would not gain, its captured runs have the kernel of flat plans.
pub fn a_graph_that_never_shares_is_flat() {
    let recorder = recorder();
    let long = AttentionDesc {
        max_kv_len: KEYS as u32,
        ..cascade_desc(true)
    };
    // All of the keys would be worth sharing.
    let short = AttentionDesc {
        max_kv_len: 512,
        ..long
    };
    let invariant = AttentionDesc {
        batch_invariant: true,
        ..long
    };
    let check = |desc: AttentionDesc, kv_len: i32, shares: bool, kernel: &str| {
        let mut handle = Handle::of(desc);
        handle.plan_keys(kv_len, kv_len as u32 / 2);
        assert_eq!(handle.cascade.shares(), Ok(shares));
        assert_eq!(handle.run(&recorder, &args())[0].name(), kernel);
    };
    check(long, 250, true, "folio_prefill_sm90");
    check(short, 250, false, "folio_sm90_decode_tma");
    check(invariant, KEYS, false, "folio_sm90_decode_tma");
    let mut handle = Handle::of(short);
    let planned = handle.plan_on_device(&recorder, &PREFIXES);
    assert_eq!(names(&planned), ["folio_plan"]);
    assert_eq!(handle.cascade.shares(), Ok(false));
}

const PREFIXES: SharedPrefixes<'_> = SharedPrefixes {
    common_prefix_len: 0,
    request_begin: &[0, 8],
    request_end: &[64, 40],
    kv_len: &[SHARED as i32, SHARED as i32 + 4000],
};

/// A kernel for each plan; that of shared keys is told who shares how many, at most. Runs read where it writes.
pub fn lengths_on_the_device_are_cut_there() {
    let recorder = recorder();
    let mut handle = Handle::with_levels(2, false);
    let planned = handle.plan_on_device(&recorder, &PREFIXES);
    assert_eq!(names(&planned), ["folio_plan", "folio_plan_cascade"]);
    assert_eq!(handle.cascade.shares(), Ok(true));
    let flat = planned[0].params::<PlanBatchParams>().plan;
    let params: PlanCascadeParams = planned[1].params();
    let plan = &params.plan;
    for of in [&flat, plan] {
        assert_eq!(
            [of.qo_indptr, of.kv_len],
            [ROWS as u64, LENGTHS as u64],
            "{of:?}"
        );
        assert_eq!((of.table_stride, of.batch_size), (600, REQUESTS as u32));
    }
    assert_eq!((plan.max_qo_len, plan.order), (REQUESTS as u32, 0));
    let unit = plan.kv_unit;
    let listed: Vec<[u32; 4]> = params.segments[..params.num_segments as usize]
        .iter()
        .map(|of| [of.begin, of.end, of.keys, of.parent])
        .collect();
    let floor = |keys: u32| keys / unit * unit;
    assert_eq!(
        listed,
        [
            [0, 64, floor(SHARED), NO_SEGMENT],
            [8, 40, floor(SHARED + 4000), 0]
        ]
    );
    // Room for the records of all requests and of as many segments as there may be.
    let entries = (REQUESTS + SHARED_SEGMENTS) as u64;
    for (at, next, bytes) in [
        (plan.requests, plan.first_item, 32),
        (plan.first_item, plan.first_combine, 4),
        (plan.first_combine, params.shares, 4),
    ] {
        assert!(next - at >= entries * bytes, "{at} {next}");
    }
    let end = WORKSPACE as u64 + handle.cascade.workspace().device_bytes as u64;
    assert!(params.shares + 16 * entries <= end);

    let shared = handle.run(&recorder, &args());
    assert_eq!(names(&shared), ["folio_prefill_sm90", "folio_combine"]);
    let view = plan_of(&shared);
    assert_eq!(
        [view.items, view.combines, view.partials, view.counts],
        [plan.items, plan.combines, plan.partials, plan.counts]
    );
    let flat_run = handle.run(&recorder, &with_window());
    assert_eq!(plan_of(&flat_run).items, flat.items);
}

/// Where nothing is shared there is one plan; runs of graphs need both.
pub fn what_the_device_does_not_share() {
    let recorder = recorder();
    let nothing = SharedPrefixes::default();
    let mut handle = Handle::new(false);
    let planned = handle.plan_on_device(&recorder, &nothing);
    assert_eq!(names(&planned), ["folio_plan"]);
    assert_eq!(handle.cascade.shares(), Ok(false));
    let mut handle = Handle::new(true);
    let planned = handle.plan_on_device(&recorder, &nothing);
    assert_eq!(names(&planned), ["folio_plan", "folio_plan_cascade"]);
    assert_eq!(planned[1].params::<PlanCascadeParams>().num_segments, 0);
    let before = handle.run(&recorder, &args());
    // The desc has room for one level.
    let planned = handle.plan_on_device(&recorder, &PREFIXES);
    assert_eq!(planned[1].params::<PlanCascadeParams>().num_segments, 1);
    for (one, other) in handle.run(&recorder, &args()).iter().zip(&before) {
        assert_eq!((one.raw(), one.grid), (other.raw(), other.grid));
    }
}

/// Segments that the kernel's parameters have no room for stay with their requests.
pub fn more_segments_than_there_is_room_for() {
    const MANY: usize = 600;
    let recorder = recorder();
    let desc = AttentionDesc {
        max_batch_size: MANY as u32,
        max_num_tokens: MANY as u32,
        ..cascade_desc(true)
    };
    let mut handle = Handle::of(desc);
    let begin: Vec<i32> = (0..MANY as i32).step_by(2).collect();
    let end: Vec<i32> = begin.iter().map(|begin| begin + 2).collect();
    let prefixes = SharedPrefixes {
        common_prefix_len: 0,
        request_begin: &begin,
        request_end: &end,
        kv_len: &vec![SHARED as i32; begin.len()],
    };
    let planned = handle.plan_requests_on_device(&recorder, MANY, &prefixes);
    let params: PlanCascadeParams = planned[1].params();
    assert_eq!(params.num_segments as usize, SHARED_SEGMENTS);
    let last = params.segments[SHARED_SEGMENTS - 1];
    assert_eq!((last.begin, last.end), (478, 480));
}
