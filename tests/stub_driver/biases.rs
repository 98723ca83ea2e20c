//! What a bias of scores is launched as: the portable kernels take it, and other runs of the same handle keep their kernel.

use folio::api::BatchInput;
use folio::cuda::params::{BIAS_NEW_KEYS, BIAS_REQUEST_ROWS, BiasParams, Divisor, GenericParams};
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage, ScoreBias};
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, at, context, desc, host_tensor};
use crate::stub::Recorder;

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;
const BIAS: usize = 0x5_0000_0000;

/// Two query heads for each KV head.
const HEADS: i64 = 16;
const KV_HEADS: i64 = 8;

fn planned(kind: Kind) -> Handle {
    let desc = AttentionDesc {
        kind,
        num_qo_heads: HEADS as u32,
        num_kv_heads: KV_HEADS as u32,
        max_qo_len: 40,
        max_num_tokens: 100,
        kv: KvStorage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
        },
        ..desc(false)
    };
    let mut handle = Handle::of(&context(), desc).unwrap();
    let table = [1; 2 * 7];
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 40, 43], &[3]),
        kv_len: host_tensor(&[100, 37], &[2]),
        block_table: host_tensor(&table, &[2, 7]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    handle
}

fn args(bias: Option<ScoreBias>) -> AttentionArgs {
    let rows = |address| at(address, DType::BF16, &[43, HEADS, 128], None);
    let pages = |address| at(address, DType::BF16, &[40, 16, KV_HEADS, 128], None);
    AttentionArgs {
        score_bias: bias,
        ..AttentionArgs::new(rows(Q), pages(K), pages(V), rows(O))
    }
}

fn bias(tensor: Tensor, request_rows: bool, new_keys: bool) -> ScoreBias {
    ScoreBias {
        tensor,
        request_rows,
        new_keys,
    }
}

pub fn portable_takes_them() {
    let recorder = Recorder::new();
    recorder.expect::<GenericParams>("folio_attention");
    let of_heads = at(BIAS, DType::BF16, &[HEADS, 43, 100], None);
    let transposed = at(BIAS, DType::F32, &[1, 50, 128], Some(&[9, 1, 50]));
    let of_trees = at(BIAS, DType::F16, &[40, 41], Some(&[64, 1]));
    let stated = BiasParams {
        data: BIAS as u64,
        stride_head: 2 * 43 * 100,
        stride_row: 2 * 100,
        stride_column: 2,
        rows: 43,
        columns: 100,
        dtype: 2,
        flags: 0,
        group_size: Divisor::new(2),
        reserved: 0,
    };
    let cases = [
        (bias(of_heads, false, false), stated),
        (
            bias(transposed, true, false),
            BiasParams {
                stride_head: 0,
                stride_row: 4,
                stride_column: 4 * 50,
                rows: 50,
                columns: 128,
                dtype: 0,
                flags: BIAS_REQUEST_ROWS,
                ..stated
            },
        ),
        (
            bias(of_trees, true, true),
            BiasParams {
                stride_head: 0,
                stride_row: 2 * 64,
                rows: 40,
                columns: 41,
                dtype: 1,
                flags: BIAS_NEW_KEYS | BIAS_REQUEST_ROWS,
                ..stated
            },
        ),
    ];
    for kind in [Kind::Decode, Kind::Prefill] {
        let handle = planned(kind);
        for (bias, wanted) in cases {
            recorder.forget();
            handle.attention.run(&args(Some(bias)), OURS).unwrap();
            let launched = recorder.launches();
            assert_eq!(launched[0].name(), "folio_attention");
            assert_eq!(launched[0].params::<GenericParams>().bias, wanted);
        }
        recorder.forget();
        handle.attention.run(&args(None), OURS).unwrap();
        assert_ne!(recorder.launches()[0].name(), "folio_attention");
    }
}
