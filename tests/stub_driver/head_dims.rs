//! The row that a handle takes: prefill on Hopper at every head dim, with the tensor maps of rows that are narrower than it, and
//! the portable kernels by the number of query rows.

use folio::api::BatchInput;
use folio::cuda::prefill_params::PrefillParams;
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvStorage};

use crate::fixture::{HEADS, Handle, OURS, PAGE_SIZE, at, context, desc, host_tensor};
use crate::stub::Recorder;

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;

fn prefill(head_dim_qk: u32, head_dim_vo: u32, kv: KvStorage) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        max_batch_size: 1,
        max_qo_len: 4096,
        max_num_tokens: 4096,
        head_dim_qk,
        head_dim_vo,
        kv,
        ..desc(false)
    }
}

/// The dims of a row by its name, such as `prefill_sm90a_bf16_d192_dv128_q128_paged`.
fn dims_of(name: &str) -> (u32, u32) {
    let parts = || name.split('_');
    let number = |prefix| parts().find_map(|part| part.strip_prefix(prefix)?.parse().ok());
    let head_dim_qk = number("d").unwrap();
    (head_dim_qk, number("dv").unwrap_or(head_dim_qk))
}

/// Every multiple of 8 up to 256, for keys and values, on the narrowest row that there is; in pages, rows of whole blocks of
/// 64 columns have rows of their own.
pub fn every_width_has_a_hopper_row() {
    const WHOLE_BLOCKS: [(u32, u32); 5] =
        [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)];
    const OF_ANY: [u32; 10] = [64, 80, 96, 112, 128, 144, 160, 192, 224, 256];
    let context = context();
    for kv in [desc(false).kv, KvStorage::Ragged] {
        let paged = kv != KvStorage::Ragged;
        for n in 0..32 * 32 {
            // All pairs of pages; of ragged rows those of equal widths and their neighbours.
            let (qk, vo): (u32, u32) = (8 + n % 32 * 8, 8 + n / 32 * 8);
            if !paged && qk.abs_diff(vo) > 8 {
                continue;
            }
            let of_any = OF_ANY.into_iter().find(|&dim| dim >= qk.max(vo)).unwrap();
            let (wanted, source) = match (paged, WHOLE_BLOCKS.contains(&(qk, vo))) {
                (true, true) => ((qk, vo), "_paged"),
                (true, false) => ((of_any, of_any), "_paged_columns"),
                (false, _) => ((of_any, of_any), "_ragged"),
            };
            let handle = Handle::of(&context, prefill(qk, vo, kv)).unwrap();
            let name = handle.attention.kernel();
            assert!(
                name.starts_with("prefill_sm90a_bf16_"),
                "{qk} / {vo}: {name}"
            );
            assert!(name.ends_with(source), "{qk} / {vo}: {name}");
            assert_eq!(dims_of(name), wanted, "{qk} / {vo}: {name}");
        }
    }
}

/// Keys of 72 and values of 40 elements, on the row of 80: what the maps do not have reads as zeros, and the kernel is
/// told where rows of o end.
pub fn narrow_rows_end_where_the_maps_do() {
    let recorder = Recorder::new();
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    let heads = i64::from(HEADS);
    let rows = |address, dim| at(address, DType::BF16, &[300, heads, dim], None);
    let pages = |address, dim: i64| {
        let (page, token) = (i64::from(PAGE_SIZE), heads * (dim + 8));
        let strides = [page * token, token, dim + 8, 1];
        at(
            address,
            DType::BF16,
            &[20, page, heads, dim],
            Some(&strides),
        )
    };
    let ragged = |address, dim| at(address, DType::BF16, &[310, heads, dim], None);
    for kv in [desc(false).kv, KvStorage::Ragged] {
        let mut handle = Handle::of(&context(), prefill(72, 40, kv)).unwrap();
        let table: Vec<i32> = (0..19).collect();
        let paged = kv != KvStorage::Ragged;
        let mut batch = BatchInput {
            qo_indptr: host_tensor(&[0, 300], &[2]),
            ..BatchInput::default()
        };
        if paged {
            batch.kv_len = host_tensor(&[300], &[1]);
            batch.block_table = host_tensor(&table, &[1, 19]);
        } else {
            batch.kv_indptr = host_tensor(&[0, 300], &[2]);
        }
        handle.plan(&batch, OURS).unwrap();
        let (k, v) = match paged {
            true => (pages(K, 72), pages(V, 40)),
            false => (ragged(K, 72), ragged(V, 40)),
        };
        let args = AttentionArgs::new(rows(Q, 72), k, v, rows(O, 40));
        recorder.forget();
        handle.attention.run(&args, OURS).unwrap();
        let launch = recorder.launches().swap_remove(0);
        assert_eq!(launch.name(), "folio_prefill_sm90");
        assert_eq!(launch.params::<PrefillParams>().head_dim_vo, 40);
        let [q, k, v] = launch.maps().try_into().unwrap();
        assert_eq!(
            (q.extents, q.boxes),
            ([72, 8, 300, 0, 0], [64, 1, 64, 0, 0])
        );
        for (map, dim) in [(k, 72), (v, 40)] {
            // A step is 112 keys: boxes of a page of 16.
            let (extents, boxes) = match paged {
                true => ([dim, 8, 1, 8, 40], [64, 8, 1, 1, 2]),
                false => ([dim, 310, 8, 0, 0], [64, 112, 1, 0, 0]),
            };
            assert_eq!((map.extents, map.boxes), (extents, boxes));
        }
    }
}

/// Few query rows have tiles of their own where a warp holds their outputs, and never rows of wider heads.
pub fn portable_rows_by_their_number() {
    const BF16: DType = DType::BF16;
    const E4M3: DType = DType::F8E4M3;
    let context = context();
    for (packed, dim, kv_dtype, wanted) in [
        (16, 128, BF16, "decode_sm80_bf16_d128_q16"),
        (17, 128, BF16, "decode_sm80_bf16_d128_q32"),
        (32, 72, BF16, "decode_sm80_bf16_d128_q32"),
        (33, 128, BF16, "prefill_sm80_bf16_d128_q128"),
        (64, 64, E4M3, "decode_sm80_f16_kve4m3_d64_q32"),
        (65, 64, E4M3, "prefill_sm80_bf16_kve4m3_d64_q128"),
        (16, 192, BF16, "decode_sm80_bf16_d256_q16"),
        (17, 192, BF16, "prefill_sm80_bf16_d256_q64"),
        (32, 256, E4M3, "prefill_sm80_bf16_kve4m3_d256_q64"),
        (32, 264, BF16, "decode_sm80_bf16_d512_q32"),
    ] {
        let desc = AttentionDesc {
            kv_format: kv_dtype.into(),
            num_qo_heads: packed,
            num_kv_heads: 1,
            head_dim_qk: dim,
            head_dim_vo: dim,
            ..desc(false)
        };
        let handle = Handle::of(&context, desc).unwrap();
        assert_eq!(handle.attention.kernel(), wanted, "{packed} rows of {dim}");
    }
}
