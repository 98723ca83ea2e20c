//! MLA over a cached context on a device: which kernels a run launches, in which order, and on which of the caller's and
//! the workspace's tensors.

use folio::api::{BatchInput, MlaContext};
use folio::cuda::mla_cache_params::MlaGatherParams;
use folio::cuda::params::{CombineParams, ENDS_SUM, GenericParams, MergeStatesParams};
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
    recorder.expect::<PrefillParams>(SPLIT_KEYS);
    recorder.expect::<PrefillParams>(AFTER);
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder.expect::<MlaGatherParams>("folio_mla_gather");
    recorder.expect::<UpProjectionParams>("folio_up_project");
    recorder.expect::<MergeStatesParams>("folio_merge_state");
    recorder.expect::<GenericParams>(PORTABLE);
    recorder.expect::<CopyWeightsParams>("folio_copy_weights");
    recorder
}

/// Names without the combine kernel, which runs where keys are split.
fn names(launched: &[Launched]) -> Vec<&str> {
    let names = launched.iter().map(Launched::name);
    names.filter(|name| *name != "folio_combine").collect()
}

const CLEAR: &str = "folio_copy_weights";
const UNPACK: [&str; 2] = ["folio_mla_gather", "folio_up_project"];
/// Of keys in two parts alone, and of what goes on from earlier keys.
const SPLIT_KEYS: &str = "folio_prefill_sm90_split_keys";
const AFTER: &str = "folio_prefill_sm90_split_keys_after";
const ATTEND: [&str; 2] = ["folio_plan", AFTER];
const PORTABLE: &str = "folio_attention";

fn attends(launched: &[Launched]) -> Vec<PrefillParams> {
    let named = |launch: &&Launched| [SPLIT_KEYS, AFTER].contains(&launch.name());
    launched
        .iter()
        .filter(named)
        .map(Launched::params)
        .collect()
}

fn of_name<P: Copy>(launched: &[Launched], name: &str) -> Vec<P> {
    let named = launched.iter().filter(|launch| launch.name() == name);
    named.map(Launched::params).collect()
}

/// Chunks are added to a sum in the workspace. The last one is attended with the new tokens, which are added to the sum in the
/// caller's output.
pub fn a_run_goes_chunk_by_chunk() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    recorder.forget();
    handle.plan([1100, 300]);
    let clears: Vec<CopyWeightsParams> = of_name(&recorder.launches(), CLEAR);
    let launched = handle.run(&recorder);
    let expected = [UNPACK, ATTEND, UNPACK].concat();
    assert_eq!(names(&launched), [&expected[..], &[AFTER]].concat());
    let workspace =
        WORKSPACE as u64..WORKSPACE as u64 + handle.context.workspace().device_bytes as u64;
    let [first, new] = attends(&launched).try_into().unwrap();
    let sum = first.sum;
    assert!(workspace.contains(&sum.o) && workspace.contains(&sum.lse));
    // The first request alone fills a chunk; the rest of its context shares the second one with the other's.
    let part = &first.attention;
    assert_eq!((part.q.data, part.num_tokens), (Q as u64, 500));
    assert_eq!((part.o.data, part.lse), (sum.o, sum.lse));
    assert!(workspace.contains(&part.k.data) && workspace.contains(&part.v.data));
    assert_eq!((part.mask_mode as i32, part.num_pages), (1, 1024));
    assert_eq!(first.context_indptr, 0);
    let attention = &new.attention;
    assert!(workspace.contains(&new.context_indptr));
    assert_eq!(
        [attention.q.data, attention.k.data, attention.v.data],
        [Q, K, V].map(|address| address as u64)
    );
    assert_eq!((attention.o.data, attention.lse), (O as u64, LSE as u64));
    assert_eq!(attention.mask_mode as i32, 0);
    assert_eq!(new.sum, sum);
    // All rows begin without keys: a plan writes one number of the tables to their lse, and the last part of a run does so again.
    let [clear] = clears.try_into().unwrap();
    assert_eq!((clear.target, clear.rows), (sum.lse, 600));
    assert_eq!(clear.source_strides, [0; 3]);
    let ends = [&first, &new].map(|part| part.attention.flags & ENDS_SUM != 0);
    assert_eq!(ends, [false, true]);
    // A split row is added to the same.
    let combines: Vec<CombineParams> = of_name(&launched, "folio_combine");
    assert!(combines.iter().all(|combine| combine.sum == sum));
    // Of the up-projected rows as many exist as the chunk's table says.
    let gathers: Vec<MlaGatherParams> = of_name(&launched, UNPACK[0]);
    let products: Vec<UpProjectionParams> = of_name(&launched, UNPACK[1]);
    assert_eq!(gathers.len(), 2);
    for (gather, product) in gathers.iter().zip(products) {
        let offsets = u64::from(gather.batch_size) * 4;
        assert_eq!(product.existing_tokens, gather.cu_seq_lens.data + offsets);
    }
}

/// A chunk that is alone is attended with the new tokens. Tensor maps say where its rows are, a table which each request has, and
/// the plan that they take whole steps of 128 keys.
pub fn a_chunk_alone_is_attended_with_new_tokens() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    recorder.forget();
    handle.plan([0, 300]);
    // There is no sum to begin.
    assert!(names(&recorder.launches()).is_empty());
    let launched = handle.run(&recorder);
    // By lengths of the host: nothing is put together where no row is split.
    let all: Vec<&str> = launched.iter().map(Launched::name).collect();
    assert_eq!(all, [&UNPACK[..], &[AFTER]].concat());
    let workspace =
        WORKSPACE as u64..WORKSPACE as u64 + handle.context.workspace().device_bytes as u64;
    let [new] = attends(&launched).try_into().unwrap();
    assert_eq!((new.sum.o, new.attention.o.data), (0, O as u64));
    assert_eq!(new.attention.flags & ENDS_SUM, 0);
    let maps = launched[2].maps();
    let [q, k, v, k_rope, of_context @ ..] = &maps[..] else {
        panic!("{} maps", maps.len());
    };
    let addresses = [q, k, v, k_rope].map(|map| map.address);
    assert_eq!(addresses, [Q, K, V, K_ROPE].map(|address| address as u64));
    assert_eq!(of_context.len(), 3);
    for map in of_context {
        assert!(workspace.contains(&map.address));
    }
    let numbers = |address, count| recorder.upload_to(address).i32s(address, count);
    assert_eq!(numbers(new.context_indptr, 3), [0, 0, 300]);
    assert_eq!(numbers(new.attention.plan.kv_len, 2), [500, 384 + 100]);
    // Without any context the output is written at once.
    handle.plan([0, 0]);
    let launched = handle.run(&recorder);
    assert_eq!(names(&launched), [SPLIT_KEYS]);
    let [alone] = attends(&launched).try_into().unwrap();
    assert_eq!(
        (alone.attention.o.data, alone.attention.lse, alone.sum.o),
        (O as u64, LSE as u64, 0)
    );
    assert_eq!(alone.context_indptr, 0);
}

/// Rows that no tensor map describes: the kernel that takes them does not add, and so parts are merged, in the output's type in
/// the end.
pub fn parts_are_merged_where_no_kernel_adds() {
    let recorder = recorder();
    let mut handle = Handle::new(false);
    handle.plan([0, 300]);
    recorder.forget();
    let odd = |address, shape: [i64; 3]| {
        let strides = [shape[1] * shape[2] + 1, shape[2], 1];
        at(address, DType::BF16, &shape, Some(&strides))
    };
    let args = MlaContextArgs {
        q: odd(Q, [700, HEADS, 192]),
        ..args()
    };
    handle.context.run(&args, OURS).unwrap();
    let expected = [
        "folio_mla_gather",
        "folio_up_project",
        // Plans begin no sum for a chunk that is alone.
        CLEAR,
        // The part's rows begin without keys, too.
        CLEAR,
        PORTABLE,
        "folio_merge_state",
        PORTABLE,
        // The sum is rounded.
        "folio_copy_weights",
        "folio_merge_state",
        CLEAR,
    ];
    let launched = recorder.launches();
    assert_eq!(names(&launched), expected);
    let last: MergeStatesParams = launched[launched.len() - 2].params();
    assert_eq!(last.second.v, O as u64);
    assert_eq!((last.v_out.data, last.s_out), (O as u64, LSE as u64));
}

/// A captured run has as many chunks as any batch; what differs from plan to plan, rows included, is in the workspace.
pub fn a_graph_has_all_chunks() {
    let recorder = recorder();
    let mut handle = Handle::new(true);
    handle.plan([0, 300]);
    // Kernels are loaded by the first run.
    let launched = handle.run(&recorder);
    let count = |launched: &[Launched]| {
        let gathers = launched.iter().filter(|launch| launch.name() == UNPACK[0]);
        gathers.count()
    };
    assert_eq!(count(&launched), 4);
    recorder.forget();
    handle.context.run(&args(), CAPTURED).unwrap();
    assert_eq!(count(&recorder.launches()), 4);
    for launch in recorder.launches() {
        if launch.name() == AFTER {
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
