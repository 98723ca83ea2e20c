//! What the operators on caches of latent records are launched with.

use folio::api::{mla_append, mla_gather};
use folio::cuda::mla_cache_params::{MlaAppendParams, MlaGatherParams};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{LatentCache, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary};

use crate::fixture::{CAPTURED, OURS, at, context, divides};
use crate::stub::Recorder;

const LATENT: usize = 0x1_0000_0000;
const ROPE: usize = 0x2_0000_0000;
const KV: usize = 0x3_0000_0000;
const SLOTS: usize = 0x4_0000_0000;
const TABLE: usize = 0x5_0000_0000;
const POSITIONS: usize = 0x6_0000_0000;
const Q: usize = 0x7_0000_0000;
const OUT: usize = 0x8_0000_0000;

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<MlaAppendParams>("folio_mla_append");
    recorder.expect::<MlaGatherParams>("folio_mla_gather");
    recorder
}

/// Three bf16 tokens for an fp8 cache of ten pages of 24 records, and queries of two heads.
fn tokens() -> MlaAppendArgs {
    MlaAppendArgs {
        latent: at(LATENT, DType::BF16, &[4, 512], Some(&[576, 1])),
        rope: Some(at(ROPE, DType::BF16, &[4, 1, 64], Some(&[576, 64, 1]))),
        cache: LatentCache {
            kv: at(KV, DType::U8, &[10, 24, 576], None),
            kv_rope: None,
            kv_dtype: Some(DType::F8E4M3),
            is_ds_mla: false,
        },
        slot_mapping: at(SLOTS, DType::I64, &[3], None),
        k_scale: 0.5,
        rotary: Some(Rotary {
            cos_sin_cache: at(TABLE, DType::F32, &[1000, 64], None),
            positions: at(POSITIONS, DType::I32, &[3], None),
            is_interleaved: true,
            rope_out: None,
            q_rope: Some(at(Q, DType::BF16, &[3, 2, 64], Some(&[384, 192, 1]))),
            q_rope_out: None,
        }),
    }
}

/// Rows of two requests from a cache of 656-byte records.
fn records() -> MlaGatherArgs {
    MlaGatherArgs {
        cache: LatentCache {
            kv: at(KV, DType::U8, &[10, 24, 656], None),
            kv_rope: None,
            kv_dtype: None,
            is_ds_mla: true,
        },
        dst: at(OUT, DType::BF16, &[9, 576], None),
        dst_rope: None,
        cu_seq_lens: at(SLOTS, DType::I32, &[3], None),
        seq_starts: None,
        pages: RecordPages::Table(at(TABLE, DType::I32, &[2, 5], Some(&[7, 1]))),
        k_scale: 0.0,
    }
}

pub fn append() {
    let recorder = recorder();
    let context = context();
    let refused = mla_append(&context, &tokens(), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    let skew = MlaAppendArgs {
        latent: at(LATENT + 2, DType::BF16, &[4, 512], Some(&[576, 1])),
        ..tokens()
    };
    for (args, latent, vectors) in [(tokens(), LATENT, 1), (skew, LATENT + 2, 0)] {
        recorder.forget();
        mla_append(&context, &args, OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(
            (launched.len(), launched[0].name()),
            (1, "folio_mla_append")
        );
        assert_eq!(
            (launched[0].grid, launched[0].block),
            ([3, 1, 1], [128, 1, 1])
        );
        let p: MlaAppendParams = launched[0].params();
        let cache = &p.cache;
        assert_eq!(
            (cache.latent.data, cache.rope.data),
            (KV as u64, KV as u64 + 512)
        );
        assert_eq!(
            (cache.scales.data, cache.latent_dtype, cache.rope_dtype),
            (0, 3, 3)
        );
        for part in [&cache.latent, &cache.rope] {
            let strides = [part.stride_page, part.stride_token, part.stride_head];
            assert_eq!(strides, [24 * 576, 576, 0]);
        }
        assert_eq!((p.latent.data, p.latent.stride_token), (latent as u64, 576));
        assert_eq!((p.rope.data, p.rope.stride_token), (ROPE as u64, 576));
        assert_eq!(p.rope_out.data, 0);
        for q in [&p.q, &p.q_out] {
            assert_eq!(
                (q.data, q.stride_token, q.stride_head),
                (Q as u64, 384, 192)
            );
        }
        assert_eq!(
            (p.cos_sin, p.cos_sin_stride, p.max_position),
            (TABLE as u64, 64, 1000)
        );
        assert_eq!((p.positions, p.position_bytes), (POSITIONS as u64, 4));
        assert_eq!((p.slots, p.slot_bytes, p.num_slots), (SLOTS as u64, 8, 240));
        assert_eq!(divides(1000, p.page_size), 1000 / 24);
        assert_eq!(
            (p.rope_pieces.divisor, divides(999, p.rope_pieces)),
            (4, 999 / 4)
        );
        assert_eq!((p.rank, p.rope_dim, p.num_heads), (512, 64, 2));
        assert_eq!((p.dtype, p.cos_sin_dtype, p.is_interleaved), (2, 0, 1));
        assert_eq!((p.vectors, p.k_scale), (vectors, 0.5));
    }
    recorder.forget();
    mla_append(&context, &tokens(), CAPTURED).unwrap();
    assert_eq!(recorder.launches().len(), 1);
}

/// Without RoPE there are no queries and no table, and 656-byte records have parts of their own types.
pub fn append_of_656_byte_records() {
    let recorder = recorder();
    let args = MlaAppendArgs {
        cache: records().cache,
        k_scale: 0.0,
        rotary: None,
        ..tokens()
    };
    mla_append(&context(), &args, OURS).unwrap();
    let p: MlaAppendParams = recorder.launches()[0].params();
    let at = [&p.cache.latent, &p.cache.scales, &p.cache.rope];
    assert_eq!(at.map(|part| part.data - KV as u64), [0, 512, 528]);
    assert_eq!(at.map(|part| part.stride_token), [656, 164, 328]);
    assert_eq!(
        at.map(|part| part.stride_page),
        [24 * 656, 24 * 164, 24 * 328]
    );
    assert_eq!((p.cache.latent_dtype, p.cache.rope_dtype), (3, 2));
    assert_eq!(
        (p.cos_sin, p.positions, p.q.data, p.num_heads),
        (0, 0, 0, 0)
    );
    assert_eq!((p.vectors, p.k_scale), (1, 1.0));
}

pub fn append_of_no_tokens() {
    let recorder = recorder();
    let args = MlaAppendArgs {
        slot_mapping: at(SLOTS, DType::I64, &[0], None),
        rotary: None,
        ..tokens()
    };
    mla_append(&context(), &args, OURS).unwrap();
    assert!(recorder.launches().is_empty());
}

pub fn gather() {
    let recorder = recorder();
    let context = context();
    let refused = mla_gather(&context, &records(), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    mla_gather(&context, &records(), OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(
        (launched.len(), launched[0].name()),
        (1, "folio_mla_gather")
    );
    // A warp takes a row.
    assert_eq!(
        (launched[0].grid, launched[0].block),
        ([3, 1, 1], [128, 1, 1])
    );
    let p: MlaGatherParams = launched[0].params();
    let at_of = [&p.cache.latent, &p.cache.scales, &p.cache.rope];
    assert_eq!(at_of.map(|part| part.data - KV as u64), [0, 512, 528]);
    assert_eq!((p.dst.data, p.dst.stride_token), (OUT as u64, 576));
    assert_eq!(
        (p.dst_rope.data, p.dst_rope.stride_token),
        (OUT as u64 + 1024, 576)
    );
    let requests = [p.cu_seq_lens, p.seq_starts, p.page_indptr, p.page_ids];
    let expected = [SLOTS as u64, 0, 0, TABLE as u64];
    assert_eq!(requests.map(|tensor| tensor.data), expected);
    assert_eq!(requests.map(|tensor| tensor.bytes), [4, 0, 0, 4]);
    assert_eq!(
        (p.page_ids.stride, p.page_ids.columns, p.num_rows),
        (7, 5, 9)
    );
    assert_eq!(divides(1000, p.page_size), 1000 / 24);
    assert_eq!((p.batch_size, p.num_pages), (2, 10));
    assert_eq!((p.rank, p.rope_dim, p.dst_dtype), (512, 64, 2));
    assert_eq!((p.vectors, p.k_scale), (1, 1.0));
    let csr = MlaGatherArgs {
        seq_starts: Some(at(POSITIONS, DType::I32, &[2], None)),
        pages: RecordPages::Csr {
            indptr: at(TABLE, DType::I64, &[3], None),
            indices: at(ROPE, DType::I64, &[11], None),
        },
        ..records()
    };
    recorder.forget();
    mla_gather(&context, &csr, OURS).unwrap();
    let p: MlaGatherParams = recorder.launches()[0].params();
    let requests = [p.seq_starts, p.page_indptr, p.page_ids];
    let expected = [(POSITIONS, 4), (TABLE, 8), (ROPE, 8)];
    assert_eq!(
        requests.map(|tensor| (tensor.data as usize, tensor.bytes)),
        expected
    );
    assert_eq!(p.page_ids.columns, 11);
}

pub fn gather_of_no_requests() {
    let recorder = recorder();
    let args = MlaGatherArgs {
        cu_seq_lens: at(SLOTS, DType::I32, &[1], None),
        pages: RecordPages::Table(at(TABLE, DType::I32, &[0, 5], None)),
        ..records()
    };
    mla_gather(&context(), &args, OURS).unwrap();
    assert!(recorder.launches().is_empty());
}
