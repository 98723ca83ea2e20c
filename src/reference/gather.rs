//! The oracle's gather of keys and values: element by element.

use super::mla_cache::index;
use crate::problem::{GatherArgs, RecordPages};
use crate::tensor::Tensor;

pub(super) fn gather(args: &GatherArgs) {
    let page_size = args.k_cache.extent(1);
    let requests = &args.requests;
    for b in 0..requests.cu_seq_lens.extent(0) - 1 {
        let first = index(&requests.cu_seq_lens, &[b]);
        let start = requests.seq_starts.map_or(0, |starts| index(&starts, &[b]));
        for row in first..index(&requests.cu_seq_lens, &[b + 1]) {
            let token = start + row - first;
            let column = token / page_size;
            let page = match requests.pages {
                RecordPages::Table(table) => index(&table, &[b, column]),
                RecordPages::Csr { indptr, indices } => {
                    index(&indices, &[index(&indptr, &[b]) + column])
                }
            };
            let at = [page, token % page_size];
            load_token(
                &args.k_cache,
                at,
                &args.key,
                row,
                args.k_scale,
                args.k_scales,
            );
            load_token(
                &args.v_cache,
                at,
                &args.value,
                row,
                args.v_scale,
                args.v_scales,
            );
        }
    }
}

fn load_token(
    cache: &Tensor,
    [page, at]: [i64; 2],
    rows: &Tensor,
    row: i64,
    scale: f32,
    scales: Option<Tensor>,
) {
    for head in 0..rows.extent(1) {
        let head_scale = match scales {
            None => 1.0,
            Some(one) if one.extent(0) == 1 => one.get(&[0]),
            Some(all) => all.get(&[head]),
        };
        for d in 0..rows.extent(2) {
            let value = cache.get(&[page, at, head, d]);
            let value = match cache.dtype().is_fp8() {
                true => value * (scale * head_scale),
                false => value,
            };
            rows.set(&[row, head, d], value);
        }
    }
}
