//! The indices of a batch whose tensors are on the host, one after the other. `api` has checked every length, so all of
//! them fit their outputs.

use crate::dtype::DType;
use crate::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, KvIndicesArgs, QueryRows, RowKind,
    SlotMappingArgs, TokenRows,
};
use crate::tensor::Tensor;

pub(super) fn batch_lengths(args: &BatchLengthsArgs) {
    let batch_size = args.qo_len.extent(0);
    let or_0 = |tensor: Option<Tensor>, b| tensor.map_or(0, |tensor| tensor.integer(&[b]));
    let qo_len = |b| args.qo_len.integer(&[b]);
    let kv_len = |b| match qo_len(b) {
        0 => 0,
        new => or_0(args.cached_len, b) + new,
    };
    let kind = |b| match (qo_len(b), or_0(args.encoder_len, b)) {
        (0, _) => RowKind::Inactive,
        (_, 0) => RowKind::Decode,
        _ => RowKind::Prefill,
    };
    let requests = || 0..batch_size;
    each(args.qo_indptr, cumulative(requests().map(qo_len)));
    each(args.kv_indptr, cumulative(requests().map(kv_len)));
    each(args.kv_len, padded(requests().map(kv_len), 0));
    let kinds = requests().map(|b| kind(b) as i64);
    each(args.row_kind, padded(kinds, RowKind::Inactive as i64));
}

pub(super) fn kv_indices(args: &KvIndicesArgs) {
    let listed = |b: i64| {
        let start = args.kv_start.map_or(0, |start| start.integer(&[b]));
        args.listed(start, args.kv_len.integer(&[b]))
    };
    let page_size = i64::from(args.page_size);
    let requests = || 0..args.kv_len.extent(0);
    let mut at = 0;
    for b in requests() {
        for index in listed(b) {
            let slot = slot(&args.rows, b, index * page_size);
            let id = slot.map(|slot| slot / page_size);
            args.kv_indices
                .set_integer(&[at], id_or_none(&args.kv_indices, id));
            at += 1;
        }
    }
    let counts = requests().map(|b| listed(b).end - listed(b).start);
    each(Some(args.kv_indptr), cumulative(counts));
    let last = requests().map(|b| match listed(b) {
        listed if listed.is_empty() => 0,
        listed => args.kv_len.integer(&[b]) - (listed.end - 1) * page_size,
    });
    each(args.last_page_len, padded(last, 0));
}

pub(super) fn block_table(args: &BlockTableArgs) {
    let batch_size = args.kv_indptr.extent(0) - 1;
    for b in 0..args.block_table.extent(0) {
        let (begin, end) = match b < batch_size {
            true => (
                args.kv_indptr.integer(&[b]),
                args.kv_indptr.integer(&[b + 1]),
            ),
            false => (0, 0),
        };
        for column in 0..args.block_table.extent(1) {
            let id = match begin + column < end {
                true => {
                    let id = args.kv_indices.integer(&[begin + column]);
                    id_or_none(&args.block_table, Some(id))
                }
                false => args.fill.into(),
            };
            args.block_table.set_integer(&[b, column], id);
        }
    }
}

pub(super) fn slot_mapping(args: &SlotMappingArgs) {
    let put = |row: i64, slot: Option<i64>, position: i64| {
        let slot = id_or_none(&args.slot_mapping, slot);
        args.slot_mapping.set_integer(&[row], slot);
        if let Some(positions) = args.positions {
            positions.set_integer(&[row], position);
        }
    };
    let mut row = 0;
    for b in 0..args.kv_len.extent(0) {
        let new = match args.queries {
            QueryRows::Indptr(indptr) => indptr.integer(&[b + 1]) - indptr.integer(&[b]),
            QueryRows::Len(len) => len.integer(&[b]),
        };
        let kv_len = args.kv_len.integer(&[b]);
        for position in kv_len - new..kv_len {
            put(row, slot(&args.rows, b, position), position);
            row += 1;
        }
    }
    for row in row..args.slot_mapping.extent(0) {
        put(row, None, -1);
    }
}

pub(super) fn draft_kv_indices(args: &DraftKvIndicesArgs) {
    let topk = i64::from(args.topk);
    let sizes = [args.num_steps.into(), topk];
    let rows = args.kv_len.extent(0) * topk;
    for step in 0..args.kv_indptr.extent(0) {
        let mut at = 0;
        for row in 0..rows {
            let (b, branch) = (row / topk, row % topk);
            let kv_len = args.kv_len.integer(&[b]);
            let drafted = (0..=step).map(|i| args.slots.entry(kv_len, [i, branch], sizes));
            for token in (0..kv_len).chain(drafted) {
                let id = id_or_none(&args.kv_indices, slot(&args.rows, b, token));
                args.kv_indices.set_integer(&[step, at], id);
                at += 1;
            }
        }
        let counts = (0..rows).map(|row| args.kv_len.integer(&[row / topk]) + step + 1);
        for (row, sum) in (0..args.kv_indptr.extent(1)).zip(cumulative(counts)) {
            args.kv_indptr.set_integer(&[step, row], sum);
        }
    }
}

/// The slot of a request's token.
fn slot(rows: &TokenRows, b: i64, token: i64) -> Option<i64> {
    let page_size = i64::from(rows.page_size);
    let row = rows.row_ids.map_or(b, |ids| ids.integer(&[b]));
    let page = rows.table.integer(&[row, token / page_size]);
    let first = page.checked_mul(page_size).filter(|_| page >= 0)?;
    first.checked_add(token % page_size)
}

/// -1 where there is no id, or where the type of `tensor` cannot hold it.
fn id_or_none(tensor: &Tensor, id: Option<i64>) -> i64 {
    let most = match tensor.dtype() {
        DType::I32 => i32::MAX.into(),
        _ => i64::MAX,
    };
    id.filter(|id| (0..=most).contains(id)).unwrap_or(-1)
}

/// 0, the sums so far, and then the sum of all without end.
fn cumulative(values: impl Iterator<Item = i64>) -> impl Iterator<Item = i64> {
    let values = values.chain(std::iter::repeat(0));
    std::iter::once(0).chain(values.scan(0, |sum, value| {
        *sum += value;
        Some(*sum)
    }))
}

fn padded(values: impl Iterator<Item = i64>, rest: i64) -> impl Iterator<Item = i64> {
    values.chain(std::iter::repeat(rest))
}

/// Fills a tensor of one dimension, where there is one.
fn each(tensor: Option<Tensor>, values: impl Iterator<Item = i64>) {
    if let Some(tensor) = tensor {
        for (at, value) in (0..tensor.extent(0)).zip(values) {
            tensor.set_integer(&[at], value);
        }
    }
}
