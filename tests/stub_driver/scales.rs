//! Scales that kernels do not read where they lie: what folds them into others. And what no kernel takes.

use folio::cuda::params::{
    AttentionParams, CombineParams, DecodeParams, GenericParams, K_SCALES_OF_REQUESTS,
    V_SCALES_OF_REQUESTS,
};
use folio::cuda::prefill_params::PrefillParams;
use folio::cuda::scales_params::{FoldScalesParams, RowScales};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, Mask};
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, WORKSPACE, at, context, desc, host_tensor};
use crate::stub::Recorder;
use folio::api::BatchInput;

const Q_SCALES: usize = 0x1_0000_0000;
const K_SCALES: usize = 0x2_0000_0000;
const V_SCALES: usize = 0x3_0000_0000;
const O_SCALES: usize = 0x4_0000_0000;
const TENSORS: usize = 0x8_0000_0000;

const HEADS: i64 = 8;
const REQUESTS: i64 = 2;
const OF_REQUESTS: u32 = K_SCALES_OF_REQUESTS | V_SCALES_OF_REQUESTS;

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

fn scales(address: usize, stride: u32, request_stride: u32) -> RowScales {
    RowScales {
        data: address as u64,
        stride,
        request_stride,
    }
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<GenericParams>("folio_attention");
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
    let bytes = 4 * u64::from(fold.num_requests) * u64::from(fold.num_kv_heads);
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
    assert_eq!(fold.q, scales(Q_SCALES, 0, 0));
    assert_eq!(fold.k, scales(K_SCALES, 1, 0));
    assert_eq!(fold.v, RowScales::default());
    assert_eq!((fold.o, fold.num_kv_heads), (O_SCALES as u64, 8));
    assert_eq!(fold.num_requests, 1);
    let attention = launched[1].params::<DecodeParams>().attention;
    assert_folded(&handle, &fold, &attention);
    assert_eq!(attention.flags & OF_REQUESTS, 0);
}

/// Where some scales are a request's, so are all that come of them, and they are in the parts of split rows.
pub fn of_requests() {
    let recorder = recorder();
    let handle = planned(9000);
    let stated = AttentionArgs {
        q_scales: floats(Q_SCALES, &[REQUESTS, HEADS]),
        k_scales: floats(K_SCALES, &[1]),
        o_scales: floats(O_SCALES, &[1]),
        ..args()
    };
    recorder.forget();
    handle.attention.run(&stated, OURS).unwrap();
    let launched = recorder.launches();
    let names: Vec<_> = launched.iter().map(|launch| launch.name()).collect();
    let kernels = [
        "folio_fold_scales",
        "folio_sm90_decode_tma",
        "folio_combine",
    ];
    assert_eq!(names, kernels);
    let fold = launched[0].params::<FoldScalesParams>();
    assert_eq!(fold.q, scales(Q_SCALES, 1, 8));
    assert_eq!(fold.k, scales(K_SCALES, 0, 0));
    assert_eq!((fold.num_requests, fold.num_kv_heads), (2, 8));
    assert_eq!(launched[0].grid, [1, 1, 1]);
    let attention = launched[1].params::<DecodeParams>().attention;
    assert_folded(&handle, &fold, &attention);
    assert_eq!(attention.flags & OF_REQUESTS, OF_REQUESTS);
    assert_eq!(launched[2].params::<CombineParams>().v_scales, 0);
}

/// Scales of k and v that are requests' are read where they lie.
pub fn of_requests_alone() {
    let recorder = recorder();
    let handle = planned(9000);
    let stated = AttentionArgs {
        k_scales: floats(K_SCALES, &[REQUESTS, HEADS]),
        v_scales: floats(V_SCALES, &[HEADS]),
        ..args()
    };
    recorder.forget();
    handle.attention.run(&stated, OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(launched[0].name(), "folio_sm90_decode_tma");
    let attention = launched[0].params::<DecodeParams>().attention;
    let addresses = [attention.k_scales, attention.v_scales];
    assert_eq!(addresses, [K_SCALES, V_SCALES].map(|at| at as u64));
    assert_eq!(
        (attention.k_scales_stride, attention.v_scales_stride),
        (1, 1)
    );
    assert_eq!(attention.flags & OF_REQUESTS, K_SCALES_OF_REQUESTS);
    // Those of heads multiply the whole row.
    assert_eq!(
        launched[1].params::<CombineParams>().v_scales,
        V_SCALES as u64
    );
}

/// Hopper's prefill kernels read them where they lie too.
pub fn of_requests_in_prefill() {
    let recorder = recorder();
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    let many = AttentionDesc {
        kind: Kind::Prefill,
        max_qo_len: 100,
        max_num_tokens: 200,
        o_dtype: DType::BF16,
        ..scaled()
    };
    let mut handle = Handle::of(&context(), many).unwrap();
    let table: Vec<i32> = (0..14).collect();
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 100, 200], &[3]),
        kv_len: host_tensor(&[100, 100], &[REQUESTS]),
        block_table: host_tensor(&table, &[REQUESTS, 7]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    let rows = at(TENSORS, DType::BF16, &[200, 16, 128], None);
    let pages = at(TENSORS, DType::BF16, &[40, 16, HEADS, 128], None);
    let plain = AttentionArgs::new(rows, pages, pages, rows);
    let expanded = |strides| Some(at(V_SCALES, DType::F32, &[REQUESTS, HEADS], Some(strides)));
    for (v_scales, address, flags) in [
        (None, 0, 0),
        (
            floats(V_SCALES, &[REQUESTS, HEADS]),
            V_SCALES,
            V_SCALES_OF_REQUESTS,
        ),
        (expanded(&[0, 1]), V_SCALES, 0),
    ] {
        recorder.forget();
        handle
            .attention
            .run(&AttentionArgs { v_scales, ..plain }, OURS)
            .unwrap();
        let launched = &recorder.launches()[0];
        assert_eq!(launched.name(), "folio_prefill_sm90");
        let attention = launched.params::<PrefillParams>().attention;
        assert_eq!(attention.v_scales, address as u64, "{v_scales:?}");
        assert_eq!(attention.flags & OF_REQUESTS, flags, "{v_scales:?}");
    }
}

/// Scales of all requests that were expanded from one row or one number are that row or number.
pub fn expanded_to_requests() {
    let recorder = recorder();
    let handle = planned(100);
    for (strides, stride) in [([0, 1], 1), ([0, 0], 0)] {
        let expanded = at(K_SCALES, DType::F32, &[REQUESTS, HEADS], Some(&strides));
        let stated = AttentionArgs {
            k_scales: Some(expanded),
            ..args()
        };
        recorder.forget();
        handle.attention.run(&stated, OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(launched[0].name(), "folio_sm90_decode_tma");
        let attention = launched[0].params::<DecodeParams>().attention;
        let k_scales = (attention.k_scales, attention.k_scales_stride);
        assert_eq!(k_scales, (K_SCALES as u64, stride));
        assert_eq!(attention.flags & OF_REQUESTS, 0);
    }
}

/// Items without room for their mask are refused, before anything is launched.
pub fn what_no_kernel_takes() {
    let recorder = recorder();
    let handle = planned(100);
    let of_items = AttentionArgs {
        mask: Mask::Items {
            starts: at(TENSORS, DType::I64, &[REQUESTS], None),
            positions: at(TENSORS, DType::I32, &[REQUESTS, 70], None),
        },
        ..args()
    };
    recorder.forget();
    let refused = handle.attention.run(&of_items, OURS);
    let Err(Error::Unsupported(message)) = refused else {
        panic!("{refused:?}");
    };
    let words = ["mask_mode", "FOLIO_PLAN_MASK_ITEMS", "custom mask"];
    assert!(words.iter().all(|word| message.contains(word)), "{message}");
    assert!(recorder.launches().is_empty());
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
