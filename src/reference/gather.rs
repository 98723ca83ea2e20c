//! The oracle's gather of keys and values: element by element.

use super::{head_scale, stored};
use crate::problem::{GatherArgs, RecordPages, RowTensors};
use crate::tensor::Tensor;

pub(super) fn gather(args: &GatherArgs) {
    let page_size = args.k_cache.extent(1);
    let requests = &args.requests;
    for b in 0..requests.cu_seq_lens.extent(0) - 1 {
        let first = requests.cu_seq_lens.integer(&[b]);
        let start = requests.seq_starts.map_or(0, |starts| starts.integer(&[b]));
        for row in first..requests.cu_seq_lens.integer(&[b + 1]) {
            let token = start + row - first;
            let column = token / page_size;
            let page = match requests.pages {
                RecordPages::Table(table) => table.integer(&[b, column]),
                RecordPages::Csr { indptr, indices } => {
                    indices.integer(&[indptr.integer(&[b]) + column])
                }
            };
            let at = [page, token % page_size];
            let [keys, values] = args.caches();
            load_token(&keys, at, (&args.key, row), args.k_scale);
            load_token(&values, at, (&args.value, row), args.v_scale);
        }
    }
}

fn load_token(cache: &RowTensors, [page, at]: [i64; 2], (rows, row): (&Tensor, i64), scale: f32) {
    for head in 0..rows.extent(1) {
        let factor = match cache.format.is_scaled() {
            true => (f64::from(scale) * head_scale(cache.head_scales(), head)) as f32,
            false => 1.0,
        };
        for d in 0..rows.extent(2) {
            let value = stored::element(cache, [page, at, head, d]);
            rows.set(&[row, head, d], (value * f64::from(factor)) as f32);
        }
    }
}
