//! Tests of `schedule`: what its cuts cover, how evenly, and in which order. Here are the batches and tilings of all of them.

mod balance;
mod coverage;
mod order;

use super::*;
use crate::dtype::DType;
use crate::plan::chunk_size::{UNITS_NOT_SPLIT, split_budget};
use crate::problem::{
    Keys, Kind, KvLayout, KvStorage, PageIds, Pages, Requests, SmallItems, TailCosts, Workers,
};
use proptest::prelude::*;

fn desc(batch_invariant: bool, kind: Kind) -> AttentionDesc {
    AttentionDesc {
        kind,
        q_dtype: DType::F32,
        kv_format: DType::F32.into(),
        o_dtype: DType::F32,
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: 8,
        head_dim_vo: 8,
        kv: KvStorage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
        },
        max_batch_size: 64,
        max_qo_len: 1 << 20,
        max_num_tokens: 1 << 20,
        max_kv_len: 1 << 20,
        max_num_pages: 1 << 20,
        graph: false,
        batch_invariant,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

fn cut(lens: &[(i32, i32)], tiling: &Tiling, batch_invariant: bool) -> WorkList {
    cut_as(lens, tiling, batch_invariant, Kind::Prefill)
}

fn cut_as(lens: &[(i32, i32)], tiling: &Tiling, batch_invariant: bool, kind: Kind) -> WorkList {
    cut_of(lens, tiling, Keys::All, &desc(batch_invariant, kind))
}

fn cut_of(lens: &[(i32, i32)], tiling: &Tiling, keys: Keys, desc: &AttentionDesc) -> WorkList {
    cut_within(None, lens, tiling, keys, desc)
}

fn cut_within(
    window_left: Option<u32>,
    lens: &[(i32, i32)],
    tiling: &Tiling,
    keys: Keys,
    desc: &AttentionDesc,
) -> WorkList {
    cut_planned(Requests::All, window_left, lens, tiling, keys, desc)
}

fn cut_planned(
    planned: Requests,
    window_left: Option<u32>,
    lens: &[(i32, i32)],
    tiling: &Tiling,
    keys: Keys,
    desc: &AttentionDesc,
) -> WorkList {
    let mut qo_indptr = vec![0];
    let mut kv_len = Vec::new();
    for &(q, kv) in lens {
        qo_indptr.push(qo_indptr.last().unwrap() + q);
        kv_len.push(kv);
    }
    let batch = HostBatch {
        qo_indptr: &qo_indptr,
        kv_len: &kv_len,
        keys,
        window_left,
        pages: match keys {
            Keys::New => Pages::Ragged { indptr: &qo_indptr },
            _ => Pages::Table {
                ids: PageIds::Host(&[]),
                row_stride: 0,
            },
        },
        num_pages: 0,
        max_page_id: -1,
        planned,
    };
    let mut work = WorkList::default();
    schedule(&batch, desc, tiling, &mut work).unwrap();
    work
}

/// Neither splits nor shares; tests say what theirs has beside.
const PLAIN: Tiling = Tiling {
    q_tile: 64,
    q_parts: 1,
    kv_unit: 16,
    unit_bytes: u32::MAX,
    max_splits: 0,
    max_shares: 0,
    tail: TailCosts::NO_TAIL,
    takes_shares: false,
    least_gain: 0,
    rows_of_unit: 0,
    invariant_chunk: 256,
    combine_units: 0,
    own_key_bytes: 0,
    workers: Workers::ONE,
};

/// Decodes on so many keys each.
fn cut_into_splits(kv: &[i32], max_splits: u32) -> WorkList {
    let lens: Vec<_> = kv.iter().map(|&kv| (1, kv)).collect();
    let tiling = Tiling {
        q_tile: 4,
        max_splits,
        ..PLAIN
    };
    cut(&lens, &tiling, false)
}
