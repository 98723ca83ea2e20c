//! An lse in 16 bits: where kernels write it instead, and what rounds it after them.

use folio::cuda::lse_params::RoundLseParams;
use folio::cuda::params::{CombineParams, DecodeParams};
use folio::dtype::DType;
use folio::problem::AttentionArgs;

use crate::fixture::{HEADS, Handle, OURS, WORKSPACE, at, context, plain};
use crate::stub::Recorder;

const LSE: usize = 0x3_0000_0000;
/// FolioDtype of float16 and bfloat16.
const CODES: [(DType, u32); 2] = [(DType::F16, 1), (DType::BF16, 2)];

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<RoundLseParams>("folio_round_lse");
    recorder
}

/// An lse as `[heads, 9]` in memory.
fn run(handle: &Handle, dtype: DType) {
    let args = AttentionArgs {
        lse: Some(at(LSE, dtype, &[9, HEADS.into()], Some(&[1, 9]))),
        ..plain()
    };
    handle.attention.run(&args, OURS).unwrap();
}

fn assert_rounds(handle: &Handle, decode: &DecodeParams, round: &RoundLseParams, dtype: u32) {
    let attention = &decode.attention;
    let strides = [attention.lse_stride_token, attention.lse_stride_head];
    assert_eq!((attention.lse, strides), (round.from, [HEADS.into(), 1]));
    assert_eq!((round.to, round.dtype), (LSE as u64, dtype));
    assert_eq!([round.stride_token, round.stride_head], [1, 9]);
    assert_eq!((round.num_tokens, round.num_heads), (4, HEADS));
    let plan = attention.plan;
    assert_eq!(
        [round.qo_indptr, round.counts],
        [plan.qo_indptr, plan.counts]
    );
    // The room is the workspace's, behind all else that the run writes.
    let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
    assert!(round.from > plan.partial_lse && round.from + 4 * 4 * u64::from(HEADS) <= end);
}

/// With rows that are split, and without; an lse in fp32 needs no launch.
pub fn of_16_bits() {
    let recorder = recorder();
    let mut handle = Handle::new(&context(), false).unwrap();
    for (keys, names) in [
        (40, &["folio_sm90_decode_tma"][..]),
        (30000, &["folio_sm90_decode_tma", "folio_combine"]),
    ] {
        handle.plan_host(keys, OURS).unwrap();
        for (dtype, code) in CODES {
            recorder.forget();
            run(&handle, dtype);
            let launched = recorder.launches();
            let (last, before) = launched.split_last().unwrap();
            let before: Vec<&str> = before.iter().map(|launched| launched.name()).collect();
            assert_eq!(before, names);
            let round = last.params::<RoundLseParams>();
            assert_eq!(last.name(), "folio_round_lse");
            // A warp for each of two rows.
            assert_eq!((last.grid, last.block), ([1, 1, 1], [256, 1, 1]));
            assert_rounds(&handle, &launched[0].params(), &round, code);
            if let Some(combine) = launched.get(1).filter(|_| names.len() == 2) {
                let combine = combine.params::<CombineParams>();
                let strides = [combine.lse_stride_token, combine.lse_stride_head];
                assert_eq!((combine.lse, strides), (round.from, [HEADS.into(), 1]));
            }
        }
        recorder.forget();
        run(&handle, DType::F32);
        let launched = recorder.launches();
        assert_eq!(launched.len(), names.len());
        let attention = launched[0].params::<DecodeParams>().attention;
        let strides = [attention.lse_stride_token, attention.lse_stride_head];
        assert_eq!((attention.lse, strides), (LSE as u64, [1, 9]));
    }
}

/// Blocks for the rows of every later plan, of which the kernel asks the device.
pub fn of_graphs() {
    let recorder = recorder();
    let mut handle = Handle::new(&context(), true).unwrap();
    handle.plan_device(OURS).unwrap();
    recorder.forget();
    run(&handle, DType::BF16);
    let launched = recorder.launches();
    let last = launched.last().unwrap();
    assert_eq!((last.name(), last.grid), ("folio_round_lse", [1, 1, 1]));
    assert_rounds(&handle, &launched[0].params(), &last.params(), 2);
}
