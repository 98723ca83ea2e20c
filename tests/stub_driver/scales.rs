//! Scales that kernels do not read where they lie: what folds them into others. And what no kernel takes.

use folio::cuda::params::{AttentionParams, CombineParams, DecodeParams};
use folio::cuda::scales_params::{FoldScalesParams, RowScales};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{AttentionArgs, AttentionDesc, Mask};
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, WORKSPACE, at, context, desc, host_tensor};
use crate::stub::Recorder;
use folio::api::BatchInput;

const Q_SCALES: usize = 0x1_0000_0000;
const K_SCALES: usize = 0x2_0000_0000;
const O_SCALES: usize = 0x4_0000_0000;
const TENSORS: usize = 0x8_0000_0000;

const HEADS: i64 = 8;
const REQUESTS: i64 = 2;

fn scaled() -> AttentionDesc {
    AttentionDesc {
        num_qo_heads: 16,
        num_kv_heads: 8,
        o_dtype: DType::F8E4M3,
        ..desc(false)
    }
}

fn args() -> AttentionArgs {
    let rows = |dtype| at(TENSORS, dtype, &[REQUESTS, 16, 128], None);
    let pages = at(TENSORS, DType::BF16, &[40, 16, HEADS, 128], None);
    AttentionArgs::new(rows(DType::BF16), pages, pages, rows(DType::F8E4M3))
}

fn floats(address: usize, shape: &[i64]) -> Option<Tensor> {
    Some(at(address, DType::F32, shape, None))
}

fn scales(address: usize, stride: u32) -> RowScales {
    RowScales {
        data: address as u64,
        stride,
        reserved: 0,
    }
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<CombineParams>("folio_combine");
    recorder.expect::<FoldScalesParams>("folio_fold_scales");
    recorder
}

/// Two requests, of which long ones are split.
fn planned(keys: i32) -> Handle {
    let mut handle = Handle::of(&context(), scaled()).unwrap();
    let columns = (keys + 15) / 16;
    let table: Vec<i32> = (0..2 * columns).map(|id| id % 40).collect();
    let batch = BatchInput {
        kv_len: host_tensor(&[keys, 30], &[REQUESTS]),
        block_table: host_tensor(&table, &[REQUESTS, columns.into()]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    handle
}

/// The folded factors lie in the workspace, and kernels read them with a scale for each head.
fn assert_folded(handle: &Handle, fold: &FoldScalesParams, attention: &AttentionParams) {
    let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
    let bytes = 4 * u64::from(fold.num_kv_heads);
    assert_eq!(fold.v_out, fold.k_out + bytes);
    assert!(fold.k_out > attention.plan.partial_o && fold.v_out + bytes <= end);
    assert_eq!(
        [attention.k_scales, attention.v_scales],
        [fold.k_out, fold.v_out]
    );
    let strides = [attention.k_scales_stride, attention.v_scales_stride];
    assert_eq!(strides, [1, 1]);
}

/// Scales of q and o go into those of k and v, before the same kernel.
pub fn of_heads() {
    let recorder = recorder();
    let handle = planned(100);
    let stated = AttentionArgs {
        q_scales: floats(Q_SCALES, &[1]),
        k_scales: floats(K_SCALES, &[HEADS]),
        o_scales: floats(O_SCALES, &[1]),
        ..args()
    };
    recorder.forget();
    handle.attention.run(&stated, OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(launched[0].name(), "folio_fold_scales");
    assert_eq!(launched[1].name(), "folio_sm90_decode_tma");
    let fold = launched[0].params::<FoldScalesParams>();
    assert_eq!(fold.q, scales(Q_SCALES, 0));
    assert_eq!(fold.k, scales(K_SCALES, 1));
    assert_eq!(fold.v, RowScales::default());
    assert_eq!((fold.o, fold.num_kv_heads), (O_SCALES as u64, 8));
    let attention = launched[1].params::<DecodeParams>().attention;
    assert_folded(&handle, &fold, &attention);
}

/// Scales of requests and items are refused, before anything is launched.
pub fn what_no_kernel_takes() {
    let recorder = recorder();
    let handle = planned(100);
    let of_requests = AttentionArgs {
        k_scales: floats(K_SCALES, &[REQUESTS, HEADS]),
        ..args()
    };
    let of_items = AttentionArgs {
        mask: Mask::Items {
            starts: at(TENSORS, DType::I64, &[REQUESTS], None),
            positions: at(TENSORS, DType::I32, &[REQUESTS, 70], None),
        },
        ..args()
    };
    for (stated, words) in [
        (of_requests, ["k_scales", "[2, 8]", "[1] or [8]"]),
        (
            of_items,
            ["mask_mode", "FOLIO_PLAN_MASK_ITEMS", "custom mask"],
        ),
    ] {
        recorder.forget();
        let refused = handle.attention.run(&stated, OURS);
        let Err(Error::Unsupported(message)) = refused else {
            panic!("{refused:?}");
        };
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert!(recorder.launches().is_empty());
    }
}

/// What kernels read where it lies needs no launch.
pub fn of_keys_alone() {
    let recorder = recorder();
    let handle = planned(100);
    let stated = AttentionArgs {
        k_scales: floats(K_SCALES, &[1]),
        ..args()
    };
    recorder.forget();
    handle.attention.run(&stated, OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(launched[0].name(), "folio_sm90_decode_tma");
    let attention = launched[0].params::<DecodeParams>().attention;
    assert_eq!(
        (attention.k_scales, attention.k_scales_stride),
        (K_SCALES as u64, 0)
    );
}
