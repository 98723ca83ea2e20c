//! What gathers of keys and values are launched with.

use folio::api::gather;
use folio::cuda::gather_params::KvGatherParams;
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{CacheForm, GatherArgs, GatheredRequests, KvLayout, RecordPages};

use crate::fixture::{CAPTURED, OURS, at, context, divides};
use crate::stub::Recorder;

const KEY: usize = 0x1_0000_0000;
const VALUE: usize = 0x2_0000_0000;
const K: usize = 0x3_0000_0000;
const V: usize = 0x4_0000_0000;
const ENDS: usize = 0x5_0000_0000;
const STARTS: usize = 0x6_0000_0000;
const TABLE: usize = 0x7_0000_0000;
const IDS: usize = 0x8_0000_0000;
const SCALES: usize = 0x9_0000_0000;

/// Two requests, whose pages hold the heads one after the other.
fn args() -> GatherArgs {
    let fp8 = |address, dim| at(address, DType::F8E4M3, &[40, 8, 24, dim], None);
    GatherArgs {
        key: at(KEY, DType::BF16, &[9, 8, 128], Some(&[2048, 128, 1])),
        value: at(VALUE, DType::BF16, &[9, 8, 64], None),
        k_cache: fp8(K, 128),
        v_cache: fp8(V, 64),
        layout: KvLayout::Hnd,
        kv_dtype: None,
        form: CacheForm::Plain,
        k_zero_points: None,
        v_zero_points: None,
        requests: GatheredRequests {
            cu_seq_lens: at(ENDS, DType::I32, &[3], None),
            seq_starts: None,
            pages: RecordPages::Table(at(TABLE, DType::I32, &[2, 5], Some(&[7, 1]))),
        },
        k_scale: 0.5,
        v_scale: 0.0,
        k_scales: Some(at(SCALES, DType::F32, &[8], None)),
        v_scales: None,
    }
}

pub fn gathers() {
    let recorder = Recorder::new();
    recorder.expect::<KvGatherParams>("folio_kv_gather");
    let context = context();
    let refused = gather(&context, &args(), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    gather(&context, &args(), OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!((launched.len(), launched[0].name()), (1, "folio_kv_gather"));
    // A warp takes a row.
    assert_eq!(
        (launched[0].grid, launched[0].block),
        ([3, 1, 1], [128, 1, 1])
    );
    let p: KvGatherParams = launched[0].params();
    let cache = [
        p.k.cache.stride_page,
        p.k.cache.stride_token,
        p.k.cache.stride_head,
    ];
    assert_eq!((p.k.cache.data, cache), (K as u64, [24576, 128, 3072]));
    let rows = [p.k.rows.stride_token, p.k.rows.stride_head];
    assert_eq!((p.k.rows.data, rows), (KEY as u64, [2048, 128]));
    assert_eq!((p.v.cache.data, p.v.rows.data), (V as u64, VALUE as u64));
    assert_eq!((p.v.cache.stride_page, p.v.rows.stride_token), (12288, 512));
    assert_eq!(
        (p.k.scales, p.k.scale, p.k.scales_stride),
        (SCALES as u64, 0.5, 1)
    );
    assert_eq!((p.v.scales, p.v.scale, p.v.scales_stride), (0, 1.0, 0));
    assert_eq!([p.k.head_dim, p.v.head_dim], [128, 64]);
    assert_eq!(
        [divides(33, p.k.head_pieces), divides(33, p.v.head_pieces)],
        [2, 4]
    );
    let requests = [p.cu_seq_lens, p.seq_starts, p.page_indptr, p.page_ids];
    let expected = [ENDS as u64, 0, 0, TABLE as u64];
    assert_eq!(requests.map(|tensor| tensor.data), expected);
    assert_eq!(requests.map(|tensor| tensor.bytes), [4, 0, 0, 4]);
    assert_eq!(
        (p.page_ids.stride, p.page_ids.columns, p.num_rows),
        (7, 5, 9)
    );
    assert_eq!(divides(1000, p.page_size), 1000 / 24);
    assert_eq!((p.batch_size, p.num_pages, p.num_kv_heads), (2, 40, 8));
    assert_eq!((p.cache_dtype, p.row_dtype, p.vectors), (3, 2, 1));
    let csr = GatherArgs {
        requests: GatheredRequests {
            seq_starts: Some(at(STARTS, DType::I64, &[2], None)),
            pages: RecordPages::Csr {
                indptr: at(TABLE, DType::I32, &[3], None),
                indices: at(IDS, DType::I64, &[11], None),
            },
            ..args().requests
        },
        key: at(KEY + 2, DType::BF16, &[9, 8, 128], None),
        ..args()
    };
    recorder.forget();
    gather(&context, &csr, OURS).unwrap();
    let p: KvGatherParams = recorder.launches()[0].params();
    let requests = [p.seq_starts, p.page_indptr, p.page_ids];
    let expected = [(STARTS, 8), (TABLE, 4), (IDS, 8)];
    assert_eq!(
        requests.map(|tensor| (tensor.data as usize, tensor.bytes)),
        expected
    );
    assert_eq!((p.page_ids.columns, p.vectors), (11, 0));
    let none = GatherArgs {
        requests: GatheredRequests {
            cu_seq_lens: at(ENDS, DType::I32, &[1], None),
            pages: RecordPages::Table(at(TABLE, DType::I32, &[0, 5], None)),
            seq_starts: None,
        },
        ..args()
    };
    recorder.forget();
    gather(&context, &none, OURS).unwrap();
    assert!(recorder.launches().is_empty());
}
