//! New keys beside the cache on a device: the kernels of both passes and the merge, what of the arguments each gets, and the
//! lengths that are refused.

use folio::api::{BatchInput, Stream};
use folio::cuda::params::{AttentionParams, CombineParams, GenericParams, MergeStatesParams};
use folio::cuda::prefill_params::PrefillParams;
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{AttentionArgs, AttentionChunks, AttentionDesc, Kind};
use std::num::NonZeroU32;

use crate::fixture::{CAPTURED, Handle, OURS, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;
const K_NEW: usize = 0x5_0000_0000;
const V_NEW: usize = 0x6_0000_0000;
const SINKS: usize = 0x7_0000_0000;
const TABLE: usize = 0x8_0000_0000;

const ROWS: i64 = 300;

fn extend_desc(graph: bool) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        max_batch_size: 2,
        max_qo_len: 4096,
        max_num_tokens: 4096,
        new_kv: Some(DType::BF16),
        ..desc(graph)
    }
}

fn args() -> AttentionArgs {
    let of = |address, shape: &[i64]| at(address, DType::BF16, shape, None);
    let (rows, cache) = ([ROWS, 8, 128], [100, 16, 8, 128]);
    AttentionArgs {
        k_new: Some(of(K_NEW, &rows)),
        v_new: Some(of(V_NEW, &rows)),
        k_scale: 0.5,
        v_scale: 3.0,
        sinks: Some(at(SINKS, DType::F32, &[8], None)),
        ..AttentionArgs::new(of(Q, &rows), of(K, &cache), of(V, &cache), of(O, &rows))
    }
}

/// Plans 200 rows after 500 keys and 100 rows after `cached`.
fn planned(recorder: &Recorder, cached: i32, graph: bool) -> Handle {
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<GenericParams>("folio_attention");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<MergeStatesParams>("folio_merge_state");
    let mut handle = Handle::of(&context(), extend_desc(graph)).unwrap();
    let lengths = [5 * cached, cached];
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 200, 300], &[3]),
        kv_len: host_tensor(&lengths, &[2]),
        block_table: Some(at(TABLE, DType::I32, &[2, 40], None)),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    handle
}

fn launched(recorder: &Recorder, handle: &Handle, args: &AttentionArgs) -> Vec<Launched> {
    launched_on(OURS, recorder, handle, args)
}

fn launched_on(
    stream: Stream,
    recorder: &Recorder,
    handle: &Handle,
    args: &AttentionArgs,
) -> Vec<Launched> {
    recorder.forget();
    handle.attention.run(args, stream).unwrap();
    let launches = recorder.launches().into_iter();
    launches.filter(|l| l.name() != "folio_combine").collect()
}

fn names(launched: &[Launched]) -> Vec<&str> {
    launched.iter().map(Launched::name).collect()
}

fn params(launched: &Launched) -> AttentionParams {
    launched.params::<PrefillParams>().attention
}

pub fn two_passes_and_a_merge() {
    let recorder = Recorder::new();
    let handle = planned(&recorder, 100, false);
    let launches = launched(&recorder, &handle, &args());
    let prefill = "folio_prefill_sm90";
    assert_eq!(names(&launches), [prefill, prefill, "folio_merge_state"]);
    let [cached, new] = [0, 1].map(|n| params(&launches[n]));
    assert_eq!((cached.k.data, cached.v.data), (K as u64, V as u64));
    assert_eq!((new.k.data, new.v.data), (K_NEW as u64, V_NEW as u64));
    assert_eq!((cached.plan.page_ids, new.plan.page_ids), (TABLE as u64, 0));
    // The second writes to the output, where the first is merged in; the sink counts once, and scales are the cache's.
    assert_eq!(new.o.data, O as u64);
    assert_eq!((cached.sinks, new.sinks), (0, SINKS as u64));
    assert_eq!((cached.v_scale, new.v_scale), (3.0, 1.0));
    assert_eq!(new.logits_scale, 2.0 * cached.logits_scale);
    let merge: MergeStatesParams = launches[2].params();
    assert_eq!((merge.first.v, merge.second.v), (cached.o.data, O as u64));
    assert_eq!((merge.first.s, merge.second.s), (cached.lse, new.lse));
    assert_eq!((merge.v_out.data, merge.num_tokens), (O as u64, ROWS));
}

/// Chunks go by position: a request's new keys need not begin on a block, which the portable kernel takes.
pub fn positions_take_other_kernels() {
    let recorder = Recorder::new();
    let handle = planned(&recorder, 100, false);
    let near = launched(&recorder, &handle, &args());
    let chunks = AttentionChunks {
        size: NonZeroU32::new(64).unwrap(),
        look_back: 1,
    };
    let in_chunks = AttentionArgs {
        chunks: Some(chunks),
        ..args()
    };
    let placed = launched(&recorder, &handle, &in_chunks);
    assert_eq!(
        names(&placed)[..2],
        ["folio_prefill_sm90", "folio_attention"]
    );
    assert_eq!(params(&near[0]).plan.items, params(&placed[0]).plan.items);
    let portable: GenericParams = placed[1].params();
    assert_ne!(params(&near[1]).plan.items, portable.attention.plan.items);
    assert_eq!(portable.attention.k.data, K_NEW as u64);
}

/// Where nothing is cached there is one pass; a captured run, were it the first, has both, for plans to come.
pub fn without_a_cache_there_is_one_pass() {
    let recorder = Recorder::new();
    let handle = planned(&recorder, 0, false);
    let launches = launched(&recorder, &handle, &args());
    assert_eq!(names(&launches), ["folio_prefill_sm90"]);
    assert_eq!(params(&launches[0]).k.data, K_NEW as u64);
    let handle = planned(&recorder, 0, true);
    let launches = launched_on(CAPTURED, &recorder, &handle, &args());
    assert_eq!(launches.len(), 3);
    // Its merge knows the batch's rows by marks.
    assert_ne!(launches[2].params::<MergeStatesParams>().mask, 0);
}

pub fn lengths_on_the_device_are_refused() {
    let recorder = Recorder::new();
    let mut handle = planned(&recorder, 100, false);
    let lengths = |address, count| Some(at(address, DType::I32, &[count], None));
    let batch = BatchInput {
        qo_indptr: lengths(TABLE, 3),
        kv_len: lengths(TABLE, 2),
        block_table: Some(at(TABLE, DType::I32, &[2, 40], None)),
        ..BatchInput::default()
    };
    match handle.plan(&batch, OURS) {
        Err(Error::Unsupported(message)) => {
            assert!(message.contains("kv_len") && message.contains("new_kv_dtype"));
        }
        other => panic!("{other:?}"),
    }
    // The plan before is in force.
    assert_eq!(launched(&recorder, &handle, &args()).len(), 3);
}
