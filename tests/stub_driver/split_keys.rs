//! What attention with keys in two parts is launched with: the Hopper prefill kernel with a map of k_rope, and the
//! portable kernels where that one has no map or no row.

use folio::api::BatchInput;
use folio::cuda::params::GenericParams;
use folio::cuda::prefill_params::PrefillParams;
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage};
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;
const K_ROPE: usize = 0x5_0000_0000;

const HEADS: i64 = 8;
const PAGES: i64 = 40;

/// MLA in its multi-head form, in prompts of up to so many rows.
fn mla(kv: KvStorage, max_qo_len: u32) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        head_dim_qk: 192,
        max_batch_size: 2,
        max_qo_len,
        max_num_tokens: 8192,
        kv,
        ..desc(false)
    }
}

const PAGED: KvStorage = KvStorage::Paged {
    page_size: 16,
    layout: KvLayout::Nhd,
};

fn rows(address: usize, dim: i64) -> Tensor {
    at(address, DType::BF16, &[20, HEADS, dim], None)
}

fn pages(address: usize, dim: i64) -> Tensor {
    at(address, DType::BF16, &[PAGES, 16, HEADS, dim], None)
}

/// Pages of k_rope, of one head, two pages apart.
fn args(k_rope: Tensor) -> AttentionArgs {
    let nope_dim = 192 - k_rope.extent(k_rope.rank() - 1);
    AttentionArgs {
        k_rope: Some(k_rope),
        ..AttentionArgs::new(
            rows(Q, 192),
            pages(K, nope_dim),
            pages(V, 128),
            rows(O, 128),
        )
    }
}

fn k_rope(address: usize, rope_dim: i64) -> Tensor {
    let strides = [2 * 16 * rope_dim, rope_dim, 1];
    at(
        address,
        DType::BF16,
        &[PAGES - 1, 16, rope_dim],
        Some(&strides),
    )
}

fn planned(recorder: &Recorder, desc: AttentionDesc) -> Handle {
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_split_keys");
    recorder.expect::<GenericParams>("folio_attention");
    let mut handle = Handle::of(&context(), desc).unwrap();
    let ids = [1; 8];
    let paged = BatchInput {
        qo_indptr: host_tensor(&[0, 12, 20], &[3]),
        kv_len: host_tensor(&[50, 64], &[2]),
        block_table: host_tensor(&ids, &[2, 4]),
        ..BatchInput::default()
    };
    let ragged = BatchInput {
        qo_indptr: host_tensor(&[0, 12, 20], &[3]),
        kv_indptr: host_tensor(&[0, 50, 114], &[3]),
        ..BatchInput::default()
    };
    let batch = if desc.kv == KvStorage::Ragged {
        ragged
    } else {
        paged
    };
    handle.plan(&batch, OURS).unwrap();
    handle
}

fn launched(recorder: &Recorder, handle: &Handle, args: &AttentionArgs) -> Launched {
    recorder.forget();
    handle.attention.run(args, OURS).unwrap();
    recorder.launches().swap_remove(0)
}

pub fn prefill_by_tma() {
    let recorder = Recorder::new();
    let handle = planned(&recorder, mla(PAGED, 4096));
    let whole = AttentionArgs {
        k: pages(K, 192),
        k_rope: None,
        ..args(k_rope(K_ROPE, 64))
    };
    let launch = launched(&recorder, &handle, &whole);
    assert_eq!(
        (launch.name(), launch.maps().len()),
        ("folio_prefill_sm90", 3)
    );
    let launch = launched(&recorder, &handle, &args(k_rope(K_ROPE, 64)));
    assert_eq!(launch.name(), "folio_prefill_sm90_split_keys");
    let params = launch.params::<PrefillParams>().attention;
    // k_rope has the fewest pages; two groups of 8 tokens are a page, and its pages are two apart.
    assert_eq!((params.num_pages, params.k_rope_page_groups), (39, 4));
    assert_eq!(params.k.stride_token, HEADS * 128);
    let [_, k, v, k_rope] = launch.maps().try_into().unwrap();
    for (map, address) in [(k, K), (v, V)] {
        assert_eq!(map.address, address as u64);
        assert_eq!(map.extents, [64, 8, 2, 8, 80]);
        assert_eq!(map.strides, [2048, 128, 256, 16384]);
        assert_eq!(map.boxes, [64, 8, 2, 1, 2]);
    }
    assert_eq!((k_rope.address, k_rope.swizzle), (K_ROPE as u64, 3));
    assert_eq!(k_rope.extents, [64, 8, 1, 1, 38 * 4 + 2]);
    assert_eq!((k_rope.strides[0], k_rope.strides[3]), (128, 1024));
    assert_eq!(k_rope.boxes, [64, 8, 1, 1, 2]);
}

pub fn prefill_of_rows_by_tma() {
    let recorder = Recorder::new();
    let handle = planned(&recorder, mla(KvStorage::Ragged, 4096));
    let ragged = |address, dim| at(address, DType::BF16, &[114, HEADS, dim], None);
    let run = AttentionArgs {
        k: ragged(K, 128),
        v: ragged(V, 128),
        ..args(at(K_ROPE, DType::BF16, &[120, 64], Some(&[576, 1])))
    };
    let launch = launched(&recorder, &handle, &run);
    assert_eq!(launch.name(), "folio_prefill_sm90_split_keys");
    let [_, k, _, k_rope] = launch.maps().try_into().unwrap();
    assert_eq!(
        (k.extents, k.boxes),
        ([128, 114, 8, 0, 0], [64, 128, 1, 0, 0])
    );
    assert_eq!(
        (k_rope.extents, k_rope.boxes),
        ([64, 120, 1, 0, 0], [64, 128, 1, 0, 0])
    );
    assert_eq!(k_rope.strides[0], 1152);
}

/// More rows than decode kernels have of so many columns.
pub fn short_prompts_by_tma() {
    let recorder = Recorder::new();
    let handle = planned(&recorder, mla(PAGED, 16));
    let launch = launched(&recorder, &handle, &args(k_rope(K_ROPE, 64)));
    assert_eq!(launch.name(), "folio_prefill_sm90_split_keys");
}

/// A skew address, and another width.
pub fn portable_takes_the_rest() {
    let recorder = Recorder::new();
    for (k_rope, copy_bytes) in [(k_rope(K_ROPE + 8, 64), 8), (k_rope(K_ROPE, 32), 16)] {
        let handle = planned(&recorder, mla(PAGED, 4096));
        let run = args(k_rope);
        let launch = launched(&recorder, &handle, &run);
        assert_eq!(launch.name(), "folio_attention");
        let params: GenericParams = launch.params();
        let rope_dim = k_rope.extent(2);
        assert_eq!(
            (params.head_dim_qk, params.rope_dim),
            (192, rope_dim as u32)
        );
        assert_eq!(
            (params.k_copy_bytes, params.k_rope_copy_bytes),
            (16, copy_bytes)
        );
        assert_eq!(params.k_rope.data, k_rope.address() as u64);
        let stated = (params.k_rope.stride_page, params.k_rope.stride_token);
        assert_eq!(stated, (32 * rope_dim, rope_dim));
        let whole = AttentionArgs {
            k: pages(K, 192),
            k_rope: None,
            ..run
        };
        let launch = launched(&recorder, &handle, &whole);
        assert_ne!(launch.name(), "folio_prefill_sm90_split_keys");
    }
}
