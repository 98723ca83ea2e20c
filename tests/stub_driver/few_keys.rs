//! Which plans the Hopper prefill kernel of one warpgroup takes: those whose tiles see few keys, where a launch serves no
//! other plan or there is none.

use folio::api::BatchInput;
use folio::cuda::prefill_params::PrefillParams;
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvStorage};
use folio::tensor::Tensor;

use crate::fixture::{DIM, HEADS, Handle, OURS, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

/// Threads of the two kernels: one that loads and one or three that multiply, of 128 each.
const FEW: u32 = 256;
const ANY: u32 = 512;

/// Ragged prompts of up to so many keys.
fn prompts(max_kv_len: u32, graph: bool) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        max_batch_size: 2,
        max_qo_len: 4096,
        max_num_tokens: 8192,
        max_kv_len,
        kv: KvStorage::Ragged,
        ..desc(graph)
    }
}

fn rows(address: usize, tokens: i32) -> Tensor {
    let shape = [i64::from(tokens), i64::from(HEADS), i64::from(DIM)];
    at(address, DType::BF16, &shape, None)
}

/// The launch for two requests of so many rows each, and so many keys.
fn launch(recorder: &Recorder, handle: &mut Handle, qo_len: i32, kv_len: [i32; 2]) -> Launched {
    launch_with(recorder, handle, qo_len, (kv_len, None), |_| {})
}

/// The same with a plan for a window, and with more arguments.
fn launch_with(
    recorder: &Recorder,
    handle: &mut Handle,
    qo_len: i32,
    (kv_len, window_left): ([i32; 2], Option<u32>),
    more: impl Fn(&mut AttentionArgs),
) -> Launched {
    let keys = kv_len[0] + kv_len[1];
    // A tensor is the address of these.
    let (qo_indptr, kv_indptr) = ([0, qo_len, 2 * qo_len], [0, kv_len[0], keys]);
    let batch = BatchInput {
        qo_indptr: host_tensor(&qo_indptr, &[3]),
        kv_indptr: host_tensor(&kv_indptr, &[3]),
        window_left,
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    let [q, o] = [0x1_0000_0000, 0x4_0000_0000].map(|address| rows(address, 2 * qo_len));
    let [k, v] = [0x2_0000_0000, 0x3_0000_0000].map(|address| rows(address, keys));
    recorder.forget();
    let mut args = AttentionArgs::new(q, k, v, o);
    more(&mut args);
    handle.attention.run(&args, OURS).unwrap();
    recorder.launches().swap_remove(0)
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    for kernel in ["folio_prefill_sm90", "folio_prefill_sm90_masked"] {
        recorder.expect::<PrefillParams>(kernel);
    }
    recorder
}

/// A handle for any lengths takes it for the plans that suit it, by tiles and boxes of its own.
pub fn plans_of_few_keys() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), prompts(4096, false)).unwrap();
    for _ in 0..2 {
        let few = launch(&recorder, &mut handle, 150, [256, 200]);
        assert_eq!(few.block[0], FEW);
        // Three tiles of 64 rows a request.
        assert_eq!(few.grid, [2 * 3 * HEADS, 1, 1]);
        assert_eq!(few.maps()[1].boxes[..2], [64, 64]);
        let any = launch(&recorder, &mut handle, 150, [257, 200]);
        assert_eq!(any.block[0], ANY);
        assert_eq!(any.maps()[1].boxes[..2], [64, 80]);
    }
}

/// Of many keys a window leaves few to a tile: those before each of its rows, and the rows' own.
pub fn plans_of_windows() {
    let recorder = recorder();
    let threads = |graph, window_left| {
        let mut handle = Handle::of(&context(), prompts(4096, graph)).unwrap();
        let lens = ([4000, 3000], window_left);
        launch_with(&recorder, &mut handle, 1000, lens, |args| {
            args.window.left = window_left;
        })
        .block[0]
    };
    assert_eq!(threads(false, None), ANY);
    assert_eq!(threads(false, Some(256 - 64)), FEW);
    assert_eq!(threads(false, Some(257 - 64)), ANY);
    assert_eq!(threads(true, Some(100)), ANY);
}

/// Where a launch serves other plans too, and where a request has the same tiles in all, only the desc decides.
pub fn handles_of_few_keys() {
    let recorder = recorder();
    for graph in [false, true] {
        for (max_kv_len, threads) in [(256, FEW), (257, ANY)] {
            let desc = AttentionDesc {
                batch_invariant: !graph,
                ..prompts(max_kv_len, graph)
            };
            let mut handle = Handle::of(&context(), desc).unwrap();
            let launched = launch(&recorder, &mut handle, 40, [200, 100]);
            assert_eq!(launched.block[0], threads);
            let name = handle.attention.kernel();
            assert_eq!(name.contains("_q64_"), threads == FEW, "{name}");
        }
    }
}

/// Whatever a run asks for has a kernel of the same small tiles.
pub fn runs_of_few_keys() {
    let recorder = recorder();
    let slopes = |shape: &[i64]| at(0x5_0000_0000, DType::F32, shape, None);
    let (by_head, by_request) = (slopes(&[HEADS.into()]), slopes(&[2, HEADS.into()]));
    for max_kv_len in [256, 4096] {
        let mut handle = Handle::of(&context(), prompts(max_kv_len, false)).unwrap();
        let mut kernel = |more: &dyn Fn(&mut AttentionArgs)| {
            let launched = launch_with(&recorder, &mut handle, 150, ([256, 200], None), more);
            assert_eq!(launched.block[0], FEW);
            assert_eq!(launched.maps()[1].boxes[..2], [64, 64]);
            launched.name().to_owned()
        };
        assert_eq!(
            kernel(&|args| args.logits_soft_cap = 30.0),
            "folio_prefill_sm90"
        );
        for slopes in [by_head, by_request] {
            assert_eq!(
                kernel(&|args| args.alibi_slopes = Some(slopes)),
                "folio_prefill_sm90_masked"
            );
        }
    }
}
