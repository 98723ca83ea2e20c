//! What merges that ask for more than numbers of states in tensors are launched with: the general kernels.

use folio::api::{Context, merge, merge_states, merge_varlen};
use folio::cuda::merge_params::MergeGeneralParams;
use folio::cuda::params::MergeStatesParams;
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::{LogBase, MergeArgs, MergeStatesArgs, MergeVarlenArgs};
use folio::tensor::Tensor;

use crate::fixture::{CAPTURED, OURS, at, context};
use crate::stub::{Launched, Recorder};

const V_A: usize = 0x1_0000_0000;
const V_B: usize = 0x2_0000_0000;
const S_A: usize = 0x3_0000_0000;
const S_B: usize = 0x4_0000_0000;
const V_OUT: usize = 0x5_0000_0000;
const S_OUT: usize = 0x6_0000_0000;
const INDPTR: usize = 0x7_0000_0000;

/// The only launch of `body`.
fn launch(recorder: &Recorder, body: impl FnOnce() -> Result<()>) -> Launched {
    recorder.forget();
    body().unwrap();
    let mut launched = recorder.launches();
    assert_eq!(launched.len(), 1);
    launched.remove(0)
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<MergeStatesParams>("folio_merge_state");
    recorder.expect::<MergeStatesParams>("folio_merge_states");
    recorder.expect::<MergeGeneralParams>("folio_merge_state_general");
    recorder.expect::<MergeGeneralParams>("folio_merge_states_general");
    recorder
}

/// An lse of 5 tokens and 6 heads that lies as `[heads, tokens]`.
fn heads_first(address: usize) -> Tensor {
    at(address, DType::F32, &[5, 6], Some(&[1, 5]))
}

/// Two states of 5 tokens and 6 heads.
fn two(o_dtype: DType, dim: i64) -> MergeArgs {
    let rows = |address, dtype| at(address, dtype, &[5, 6, dim], None);
    MergeArgs {
        v_a: rows(V_A, DType::BF16),
        s_a: heads_first(S_A),
        v_b: rows(V_B, DType::BF16),
        s_b: heads_first(S_B),
        v_out: rows(V_OUT, o_dtype),
        s_out: Some(heads_first(S_OUT)),
        mask: None,
        lse_base: LogBase::E,
        num_tokens_without_a: 0,
        o_scale: 0.0,
    }
}

pub fn of_two_states() {
    let recorder = recorder();
    let context = context();
    let (e4m3, bf16) = (DType::F8E4M3, DType::BF16);
    // 128 elements are 16 lanes of a vector each: 128 threads take 8 of 30 rows. 20 elements are no whole vectors.
    for (o_dtype, code, dim, without_a, name, blocks) in [
        (e4m3, 3, 128, 0, "folio_merge_state_general", 4),
        (e4m3, 3, 20, 0, "folio_merge_states_general", 8),
        (bf16, 2, 128, 2, "folio_merge_state_general", 4),
        (bf16, 2, 128, 5, "folio_merge_state_general", 4),
    ] {
        let args = MergeArgs {
            num_tokens_without_a: without_a,
            o_scale: if o_dtype == e4m3 { 0.25 } else { 0.0 },
            ..two(o_dtype, dim)
        };
        let launch = launch(&recorder, || merge(&context, &args, OURS));
        assert_eq!(launch.name(), name);
        assert_eq!((launch.grid, launch.block), ([blocks, 1, 1], [128, 1, 1]));
        let params: MergeGeneralParams = launch.params();
        assert_eq!(params.indptr, 0);
        assert_eq!(params.num_tokens_with_first, 5 - without_a);
        assert_eq!(
            (params.o_factor, params.o_dtype),
            (if o_dtype == e4m3 { 4.0 } else { 1.0 }, code)
        );
        let p = params.merge;
        assert_eq!((p.first.v, p.first.s), (V_A as u64, S_A as u64));
        assert_eq!((p.second.v, p.second.s), (V_B as u64, S_B as u64));
        assert_eq!((p.first.s_stride_token, p.first.s_stride_head), (1, 5));
        assert_eq!((p.s_out_stride_token, p.s_out_stride_head), (1, 5));
        assert_eq!((p.v_out.data, p.s_out), (V_OUT as u64, S_OUT as u64));
        assert_eq!((p.num_states, p.vectors), (2, u32::from(dim == 128)));
    }
    // Rows of fp8 move as vectors of eight bytes.
    for (skew, vectors) in [(8, 1), (4, 0)] {
        let args = MergeArgs {
            v_out: at(V_OUT + skew, e4m3, &[5, 6, 128], None),
            ..two(e4m3, 128)
        };
        let launch = launch(&recorder, || merge(&context, &args, OURS));
        let params: MergeGeneralParams = launch.params();
        assert_eq!(params.merge.vectors, vectors);
    }
    let plain = launch(&recorder, || merge(&context, &two(bf16, 128), OURS));
    assert_eq!(plain.name(), "folio_merge_state");
}

pub fn of_many_states() {
    let recorder = recorder();
    let context = context();
    for (n, name) in [
        (2, "folio_merge_state_general"),
        (3, "folio_merge_states_general"),
    ] {
        let args = MergeStatesArgs {
            v: at(V_A, DType::F16, &[4, n, 2, 64], None),
            s: at(S_A, DType::F32, &[4, n, 2], None),
            v_out: at(V_OUT, DType::F8E5M2, &[4, 2, 64], None),
            s_out: None,
            lse_base: LogBase::Two,
            o_scale: 0.0,
        };
        let launch = launch(&recorder, || merge_states(&context, &args, OURS));
        assert_eq!(launch.name(), name);
        let params: MergeGeneralParams = launch.params();
        assert_eq!((params.o_factor, params.o_dtype), (1.0, 4));
        assert_eq!((params.indptr, params.num_tokens_with_first), (0, 4));
        assert_eq!((params.merge.num_states, params.merge.flags), (n as u32, 1));
    }
}

/// `all` states of 5 tokens and 6 heads.
fn varlen(all: i64) -> MergeVarlenArgs {
    MergeVarlenArgs {
        v: at(V_A, DType::F16, &[all, 6, 64], Some(&[400, 64, 1])),
        s: at(S_A, DType::F32, &[all, 6], Some(&[1, all])),
        indptr: at(INDPTR, DType::I32, &[6], None),
        v_out: at(V_OUT, DType::F16, &[5, 6, 64], None),
        s_out: Some(heads_first(S_OUT)),
        lse_base: LogBase::E,
        o_scale: 0.0,
    }
}

pub fn of_numbers_of_states_of_their_own() {
    let recorder = recorder();
    let context: Context = context();
    let refused = merge_varlen(&context, &varlen(9), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    // Two states are not two of each token.
    for all in [9, 2, 0] {
        let launch = launch(&recorder, || merge_varlen(&context, &varlen(all), OURS));
        assert_eq!(launch.name(), "folio_merge_states_general");
        assert_eq!((launch.grid, launch.block), ([2, 1, 1], [128, 1, 1]));
        let params: MergeGeneralParams = launch.params();
        assert_eq!((params.indptr, params.o_dtype), (INDPTR as u64, 1));
        let p = params.merge;
        assert_eq!((p.first.v, p.first.s), (V_A as u64, S_A as u64));
        assert_eq!((p.second.v, p.mask), (0, 0));
        let strides = [
            p.first.v_stride_token,
            p.first.v_stride_state,
            p.first.v_stride_head,
        ];
        assert_eq!(strides, [0, 400, 64]);
        let strides = [
            p.first.s_stride_token,
            p.first.s_stride_state,
            p.first.s_stride_head,
        ];
        assert_eq!(strides, [0, 1, all]);
        assert_eq!((p.num_tokens, p.num_states), (5, all as u32));
        assert_eq!((p.num_heads.divisor, p.head_dim), (6, 64));
        assert_eq!((p.s_out_stride_token, p.s_out_stride_head), (1, 5));
    }
    // One call of a type loads the kernels of all merges of it: any may be captured then.
    let two = MergeStatesArgs {
        v: at(V_A, DType::F16, &[4, 2, 2, 64], None),
        s: at(S_A, DType::F32, &[4, 2, 2], None),
        v_out: at(V_OUT, DType::F16, &[4, 2, 64], None),
        s_out: None,
        lse_base: LogBase::Two,
        o_scale: 0.0,
    };
    merge_states(&context, &two, CAPTURED).unwrap();
}
