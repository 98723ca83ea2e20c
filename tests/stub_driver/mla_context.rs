//! MLA over a cached context on a device: which kernels a run launches, in which order, and on which of the caller's and
//! the workspace's tensors.

use folio::api::{BatchInput, MlaContext};
use folio::cuda::merge_params::MergeGeneralParams;
use folio::cuda::mla_cache_params::MlaGatherParams;
use folio::cuda::params::{CombineParams, MergeStatesParams};
use folio::cuda::plan_params::PlanBatchParams;
use folio::cuda::prefill_params::PrefillParams;
use folio::cuda::projection_params::CopyWeightsParams;
use folio::cuda::up_projection_params::UpProjectionParams;
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{
    LatentCache, LogBase, MlaContextArgs, MlaContextDesc, Unpacking, UpProjection,
};

use crate::fixture::{CAPTURED, OURS, Room, WORKSPACE, at, context, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const K_ROPE: usize = 0x3_0000_0000;
const V: usize = 0x4_0000_0000;
const KV: usize = 0x5_0000_0000;
const W_UK: usize = 0x6_0000_0000;
const W_UV: usize = 0x7_0000_0000;
const O: usize = 0x8_0000_0000;
const LSE: usize = 0x9_0000_0000;
const TABLE: usize = 0xa_0000_0000;

const HEADS: i64 = 16;
const CHUNK: u32 = 1024;

/// DeepSeek's dimensions.
fn desc(graph: bool) -> MlaContextDesc {
    MlaContextDesc {
        dtype: DType::BF16,
        cache: DType::BF16.into(),
        num_heads: HEADS as u32,
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
        page_size: 64,
        max_batch_size: 2,
        max_qo_len: 600,
        max_num_tokens: 700,
        max_kv_len: 2048,
        max_num_pages: 0,
        max_chunk_tokens: CHUNK,
        in_steps: false,
        graph,
    }
}

fn args() -> MlaContextArgs {
    let of = |address, shape: &[i64]| at(address, DType::BF16, shape, None);
    MlaContextArgs {
        q: of(Q, &[700, HEADS, 192]),
        k_nope: of(K, &[700, HEADS, 128]),
        k_rope: of(K_ROPE, &[700, 64]),
        v: of(V, &[700, HEADS, 128]),
        cache: LatentCache {
            kv: of(KV, &[100, 64, 576]),
            kv_rope: None,
            kv_dtype: None,
            is_ds_mla: false,
        },
        unpacking: Unpacking::Weights(UpProjection {
            w_uk: of(W_UK, &[HEADS, 128, 512]),
            w_uv: of(W_UV, &[HEADS, 512, 128]),
        }),
        o: of(O, &[700, HEADS, 128]),
        lse: Some(at(LSE, DType::F32, &[700, HEADS], None)),
        lse_base: LogBase::E,
        sm_scale: 0.0,
        k_scale: 0.0,
    }
}

/// A handle with room for its plans.
struct Handle {
    context: MlaContext,
    room: Room,
}

impl Handle {
    fn new(graph: bool) -> Handle {
        let context = MlaContext::new(&context(), desc(graph)).unwrap();
        let room = Room::new(context.workspace());
        Handle { context, room }
    }

    /// 500 new tokens behind `contexts[0]`, and 100 behind the other one.
    fn plan(&mut self, contexts: [i32; 2]) {
        let lengths = [contexts[0] + 500, contexts[1] + 100];
        let batch = BatchInput {
            qo_indptr: host_tensor(&[0, 500, 600], &[3]),
            kv_len: host_tensor(&lengths, &[2]),
            block_table: Some(at(TABLE, DType::I32, &[2, 32], None)),
            ..BatchInput::default()
        };
        let (workspace, bytes) = self.room.workspace();
        self.context.plan(&batch, &workspace, bytes, OURS).unwrap();
    }

    fn run(&self, recorder: &Recorder) -> Vec<Launched> {
        recorder.forget();
        self.context.run(&args(), OURS).unwrap();
        recorder.launches()
    }
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_split_keys");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder.expect::<MlaGatherParams>("folio_mla_gather");
    recorder.expect::<UpProjectionParams>("folio_up_project");
    recorder.expect::<MergeStatesParams>("folio_merge_state");
    recorder.expect::<MergeGeneralParams>("folio_merge_state_general");
    recorder.expect::<CopyWeightsParams>("folio_copy_weights");
    recorder
}

/// Names without the combine kernel, which runs where keys are split.
fn names(launched: &[Launched]) -> Vec<&str> {
    let names = launched.iter().map(Launched::name);
    names.filter(|name| *name != "folio_combine").collect()
}

const NEW_TOKENS: [&str; 1] = ["folio_prefill_sm90_split_keys"];
const CHUNK_KERNELS: [&str; 5] = [
    "folio_mla_gather",
    "folio_up_project",
    "folio_plan",
    "folio_prefill_sm90_split_keys",
    "folio_merge_state",
];

/// Merges to the output.
const LAST_CHUNK_KERNELS: [&str; 5] = [
    "folio_mla_gather",
    "folio_up_project",
    "folio_plan",
    "folio_prefill_sm90_split_keys",
    "folio_merge_state_general",
];

pub fn a_run_goes_chunk_by_chunk() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    handle.plan([1100, 300]);
    let launched = handle.run(&recorder);
    let expected = [&NEW_TOKENS[..], &CHUNK_KERNELS, &LAST_CHUNK_KERNELS];
    assert_eq!(names(&launched), expected.concat());
    let workspace =
        WORKSPACE as u64..WORKSPACE as u64 + handle.context.workspace().device_bytes as u64;
    let attends: Vec<_> = launched
        .iter()
        .filter(|launch| launch.name() == NEW_TOKENS[0])
        .map(|launch| launch.params::<PrefillParams>().attention)
        .collect();
    let [first, all, both] = attends.try_into().unwrap();
    // New tokens over themselves: to a sum in the workspace, and to the caller's lse.
    assert_eq!(
        (first.q.data, first.k.data, first.v.data),
        (Q as u64, K as u64, V as u64)
    );
    assert_eq!(first.lse, LSE as u64);
    assert!(workspace.contains(&first.o.data));
    // The first request alone fills a chunk; the rest of its context shares the second one with the other's.
    assert_eq!((all.q.data, all.num_tokens), (Q as u64, 500));
    assert_eq!((both.q.data, both.num_tokens), (Q as u64, 600));
    for part in [&all, &both] {
        assert!(workspace.contains(&part.o.data) && part.o.data != first.o.data);
        assert!(workspace.contains(&part.k.data) && workspace.contains(&part.v.data));
        assert_eq!(part.mask_mode as i32, 1);
    }
    assert_eq!((all.num_pages, both.num_pages), (1024, 376));
    let gathers: Vec<MlaGatherParams> = launched
        .iter()
        .filter(|launch| launch.name() == CHUNK_KERNELS[0])
        .map(Launched::params)
        .collect();
    assert_eq!(gathers.len(), 2);
    let merge: MergeStatesParams = launched
        .iter()
        .find(|launch| launch.name() == CHUNK_KERNELS[4])
        .unwrap()
        .params();
    // In place: of the sum, and of the lse.
    assert_eq!((merge.first.v, merge.first.s), (first.o.data, LSE as u64));
    assert_eq!((merge.v_out.data, merge.s_out), (first.o.data, LSE as u64));
    assert_eq!(merge.second.v, all.o.data);
    let last = launched.last().unwrap().params::<MergeGeneralParams>();
    assert_eq!(last.merge.first.v, first.o.data);
    assert_eq!((last.merge.v_out.data, last.o_dtype), (O as u64, 2));
    // Of the up-projected rows as many exist as the chunk's table says.
    let tables: Vec<u64> = launched
        .iter()
        .filter(|launch| launch.name() == CHUNK_KERNELS[1])
        .map(|launch| launch.params::<UpProjectionParams>().existing_tokens)
        .collect();
    for (gather, end) in gathers.iter().zip(tables) {
        let offsets = u64::from(gather.batch_size) * 4;
        assert_eq!(end, gather.cu_seq_lens.data + offsets);
    }
}

/// Only the last request has a context: nothing of the other one's rows is touched for it but that its sum is rounded. A
/// chunk alone was planned with the batch.
pub fn rows_without_context_are_left_alone() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    handle.plan([0, 300]);
    let launched = handle.run(&recorder);
    let expected = [
        "folio_prefill_sm90_split_keys",
        "folio_mla_gather",
        "folio_up_project",
        "folio_prefill_sm90_split_keys",
        "folio_merge_state_general",
        "folio_copy_weights",
    ];
    assert_eq!(names(&launched), expected);
    let merge = launched[launched.len() - 2].params::<MergeGeneralParams>();
    let row = 500 * HEADS as u64 * 128 * 2;
    assert_eq!(merge.merge.v_out.data, O as u64 + row);
    let copy: CopyWeightsParams = launched.last().unwrap().params();
    assert_eq!((copy.target, copy.num_heads), (O as u64, 500));
    let chunk = launched
        .iter()
        .filter(|launch| launch.name() == NEW_TOKENS[0])
        .nth(1)
        .unwrap()
        .params::<PrefillParams>()
        .attention;
    let row = 500 * HEADS as u64 * 192 * 2;
    assert_eq!((chunk.q.data, chunk.num_tokens), (Q as u64 + row, 100));
    // Without any context the output is written at once.
    handle.plan([0, 0]);
    let launched = handle.run(&recorder);
    assert_eq!(names(&launched), ["folio_prefill_sm90_split_keys"]);
    let alone = launched[0].params::<PrefillParams>().attention;
    assert_eq!((alone.o.data, alone.lse), (O as u64, LSE as u64));
}

/// A captured run has as many chunks as any batch, of all rows; what differs from plan to plan is in the workspace.
pub fn a_graph_has_all_chunks() {
    let recorder = recorder();
    let mut handle = Handle::new(true);
    handle.plan([0, 300]);
    // Kernels are loaded by the first run.
    let launched = handle.run(&recorder);
    let count = |launched: &[Launched]| {
        let gathers = launched
            .iter()
            .filter(|launch| launch.name() == CHUNK_KERNELS[0]);
        gathers.count()
    };
    assert_eq!(count(&launched), 4);
    recorder.forget();
    handle.context.run(&args(), CAPTURED).unwrap();
    assert_eq!(count(&recorder.launches()), 4);
    for launch in recorder.launches() {
        if launch.name() == NEW_TOKENS[0] {
            assert_eq!(launch.params::<PrefillParams>().attention.num_tokens, 700);
        }
    }
    // Without the flag a capture is refused.
    let mut plain = Handle::new(false);
    plain.plan([0, 300]);
    plain.run(&recorder);
    assert!(matches!(
        plain.context.run(&args(), CAPTURED),
        Err(Error::Capture(_))
    ));
}
