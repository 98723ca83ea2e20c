//! When prefill on Hopper loads keys and values row by row: pages and strides that no tensor map describes, and fp8. And
//! when not even that.

use folio::api::BatchInput;
use folio::cuda::params::{GenericParams, QUERIES_BF16};
use folio::cuda::prefill_fp8_params::PrefillFp8Params;
use folio::cuda::prefill_params::{O_DTYPE_SHIFT, PrefillParams};
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage, Mask};
use folio::tensor::Tensor;

use crate::fixture::{DIM, HEADS, Handle, OURS, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;

const PAGES: i64 = 40;
const KEYS: i32 = 64;
/// Elements from token to token.
const TOKEN: i64 = HEADS as i64 * DIM as i64;

const RAGGED: KvStorage = KvStorage::Ragged;

fn pages(page_size: u32) -> KvStorage {
    KvStorage::Paged {
        page_size,
        layout: KvLayout::Nhd,
    }
}

fn prompts(kv: KvStorage, kv_dtype: DType) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        kv_format: kv_dtype.into(),
        max_batch_size: 2,
        max_qo_len: 4096,
        max_num_tokens: 8192,
        kv,
        ..desc(false)
    }
}

/// Keys or values whose pages (ragged: rows) are so many elements apart.
fn cache(address: usize, dtype: DType, kv: KvStorage, apart: i64) -> Tensor {
    let (heads, dim) = (i64::from(HEADS), i64::from(DIM));
    match kv {
        KvStorage::Ragged => at(
            address,
            dtype,
            &[2 * 64, heads, dim],
            Some(&[apart, dim, 1]),
        ),
        KvStorage::Paged { page_size, .. } => at(
            address,
            dtype,
            &[PAGES, i64::from(page_size), heads, dim],
            Some(&[apart, TOKEN, dim, 1]),
        ),
    }
}

/// The first choice, and the first launch of a run of two requests of 40 rows, more than drafts have, and 64 keys.
fn run(desc: AttentionDesc, k: Tensor, v: Tensor) -> (String, Launched) {
    run_under(desc, k, v, Mask::Causal)
}

fn run_under(desc: AttentionDesc, k: Tensor, v: Tensor, mask: Mask) -> (String, Launched) {
    run_with(desc, k, v, |args| args.mask = mask)
}

/// The same with more arguments.
fn run_with(
    desc: AttentionDesc,
    k: Tensor,
    v: Tensor,
    more: impl Fn(&mut AttentionArgs),
) -> (String, Launched) {
    let dim = i64::from(desc.head_dim_qk);
    let recorder = Recorder::new();
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_masked");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_capped");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_biased");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_rows");
    recorder.expect::<PrefillFp8Params>("folio_prefill_fp8_sm90");
    recorder.expect::<PrefillFp8Params>("folio_prefill_fp8_sm90_rows");
    recorder.expect::<GenericParams>("folio_attention");
    let mut handle = Handle::of(&context(), desc).unwrap();
    let columns = (KEYS as u32).div_ceil(desc.kv.page_size()) as i32;
    let ids = vec![1; 2 * columns as usize];
    let mut batch = BatchInput {
        qo_indptr: host_tensor(&[0, 40, 80], &[3]),
        ..BatchInput::default()
    };
    let lens = [KEYS; 2];
    if desc.kv == RAGGED {
        batch.kv_indptr = host_tensor(&[0, 64, 128], &[3]);
        handle.plan(&batch, OURS).unwrap();
    } else {
        batch.kv_len = host_tensor(&lens, &[2]);
        batch.block_table = host_tensor(&ids, &[2, i64::from(columns)]);
        handle.plan(&batch, OURS).unwrap();
    }
    let rows = |address, dtype| at(address, dtype, &[80, i64::from(HEADS), dim], None);
    let mut args = AttentionArgs::new(rows(Q, desc.q_dtype), k, v, rows(O, desc.o_dtype));
    more(&mut args);
    recorder.forget();
    handle.attention.run(&args, OURS).unwrap();
    let launch = recorder.launches().swap_remove(0);
    (handle.attention.kernel().to_owned(), launch)
}

/// The handle's first choice ends so, and so is the symbol of what runs.
fn assert_taken(desc: AttentionDesc, k: Tensor, v: Tensor, first: &str, taken: &str) -> Launched {
    let (kernel, launch) = run(desc, k, v);
    assert!(kernel.ends_with(first), "{kernel}");
    assert_eq!(launch.name(), taken, "{kernel}");
    launch
}

/// Pages of sizes that no box has: the first choice, with no map but those of q.
pub fn small_pages() {
    for page_size in [1, 2, 3, 4, 5, 7, 12] {
        let kv = pages(page_size);
        let apart = i64::from(page_size) * TOKEN;
        let [k, v] = [(K, apart), (V, 3 * apart)]
            .map(|(address, apart)| cache(address, DType::BF16, kv, apart));
        let desc = AttentionDesc {
            max_qo_len: 1024,
            ..prompts(kv, DType::BF16)
        };
        let launch = assert_taken(desc, k, v, "bf16_d128_q128_rows", "folio_prefill_sm90_rows");
        let addresses: Vec<_> = launch.maps().iter().map(|map| map.address).collect();
        assert_eq!(addresses, [Q as u64; 3]);
        let params = launch.params::<PrefillParams>().attention;
        assert_eq!(
            (params.page_size, params.num_pages),
            (page_size, PAGES as u32)
        );
        assert_eq!((params.k.data, params.v.data), (K as u64, V as u64));
        assert_eq!(
            (params.k.stride_page, params.v.stride_page),
            (apart, 3 * apart)
        );
        assert_eq!(params.k.stride_token, TOKEN);
    }
}

/// Boxes are the first choice, and a run that they do not describe goes row by row: pages that are no whole number of
/// 8-token groups apart, and ragged rows that coincide.
pub fn strides() {
    let kv = pages(16);
    let regular = || cache(K, DType::BF16, kv, 16 * TOKEN);
    let desc = prompts(kv, DType::BF16);
    let launch = assert_taken(desc, regular(), regular(), "_paged", "folio_prefill_sm90");
    assert_eq!(launch.maps().len(), 3);
    let apart = cache(V, DType::BF16, kv, 17 * TOKEN);
    for (k, v) in [(regular(), apart), (apart, regular())] {
        assert_taken(desc, k, v, "_paged", "folio_prefill_sm90_rows");
    }
    let desc = prompts(RAGGED, DType::BF16);
    let same = cache(K, DType::BF16, RAGGED, 0);
    let launch = assert_taken(desc, same, same, "_ragged", "folio_prefill_sm90_rows");
    let params = launch.params::<PrefillParams>().attention;
    assert_eq!((params.plan.page_ids, params.k.stride_page), (0, 0));
}

/// Whatever the pages are, fp8 of few queries is converted row by row: where some batches are widened, and where none is. Up to 64 rows
/// are a decode kernel's, unless there are small tiles for few keys.
pub fn fp8() {
    let [tma, gather] = ["tma", "gather"].map(|keys| format!("folio_sm90_decode_warpgroup_{keys}"));
    let rows = "folio_prefill_sm90_rows".to_owned();
    for (dtype, name, taken) in [
        (DType::F8E4M3, "e4m3", [&rows; 3]),
        (DType::F8E5M2, "e5m2", [&tma, &gather, &rows]),
    ] {
        for (kv, taken) in [pages(16), pages(1), RAGGED].into_iter().zip(taken) {
            let apart = i64::from(kv.page_size()) * TOKEN;
            let [k, v] = [K, V].map(|address| cache(address, dtype, kv, apart));
            let desc = prompts(kv, dtype);
            let short = AttentionDesc {
                max_qo_len: 300,
                ..desc
            };
            let by_tiles = format!("f16_kv{name}_d128_q192_rows");
            let widened = format!("_widened_from_{}", dtype.name());
            for (desc, first) in [(desc, widened), (short, by_tiles)] {
                assert_taken(desc, k, v, &first, taken);
            }
        }
    }
}

/// Rows of fp8 come to those who convert them by boxes where maps describe them: of all columns of some tokens where rows are whole blocks
/// of 64, else of 64 columns. Else they come one by one.
pub fn boxes_of_fp8() {
    for (kv, dim, tokens, of_rows, boxes) in [
        (pages(16), 128, 16, 1, [64, 8, 2, 1, 2]),
        (pages(8), 128, 8, 1, [64, 8, 2, 1, 1]),
        (pages(64), 64, 64, 1, [64, 8, 1, 1, 8]),
        (pages(64), 256, 16, 1, [64, 8, 4, 1, 2]),
        (pages(16), 192, 16, 0, [64, 8, 1, 1, 2]),
        (pages(16), 96, 16, 0, [64, 8, 1, 1, 2]),
        (RAGGED, 128, 64, 0, [64, 64, 1, 0, 0]),
        (pages(16), 72, 0, 0, [0; 5]),
        (pages(5), 128, 0, 0, [0; 5]),
        (pages(1), 128, 0, 0, [0; 5]),
    ] {
        let desc = of_width(
            AttentionDesc {
                max_qo_len: 300,
                ..prompts(kv, DType::F8E4M3)
            },
            dim,
        );
        let [k, v] = [K, V].map(|address| cache_of_width(address, &desc));
        let (_, launch) = run(desc, k, v);
        assert_eq!(launch.name(), "folio_prefill_sm90_rows");
        let params = launch.params::<PrefillParams>();
        let told = (params.raw_box_tokens, params.raw_boxes_of_rows);
        assert_eq!(told, (tokens, of_rows), "{kv:?} {dim}");
        let [_, of_keys, of_values] = <[_; 3]>::try_from(launch.maps()).unwrap();
        if tokens > 0 {
            assert_eq!((of_keys.address, of_values.address), (K as u64, V as u64));
            assert_eq!((of_keys.boxes, of_keys.swizzle), (boxes, 0), "{kv:?} {dim}");
        } else {
            assert_eq!((of_keys.address, of_values.address), (Q as u64, Q as u64));
        }
    }
}

/// Products in e4m3 are of boxes where a page is described by some, and otherwise of rows, with no map but that of q. Rows of
/// fewer elements than a tile's are told.
pub fn products_in_fp8() {
    let boxes = ("_paged", "folio_prefill_fp8_sm90", 3);
    let rows = ("_rows", "folio_prefill_fp8_sm90_rows", 1);
    let of_16 = 16 * TOKEN;
    for (kv, apart, (first, taken, maps)) in [
        (pages(16), of_16, boxes),
        (pages(16), of_16 + 16, ("_paged", rows.1, rows.2)),
        (pages(5), 5 * TOKEN, rows),
        (pages(1), TOKEN, rows),
        (RAGGED, TOKEN, rows),
    ] {
        let desc = AttentionDesc {
            q_dtype: DType::F8E4M3,
            fp8_products: true,
            ..prompts(kv, DType::F8E4M3)
        };
        let [k, v] = [K, V].map(|address| cache(address, DType::F8E4M3, kv, apart));
        let launch = assert_taken(desc, k, v, first, taken);
        assert_eq!(launch.maps().len(), maps);
        let params = launch.params::<PrefillFp8Params>();
        assert_eq!(params.head_dim_vo, DIM);
        assert_eq!(params.page_size.divisor, kv.page_size());
        if maps == 1 {
            let [page, token] = [apart, TOKEN].map(|stride| (stride / 16) as u32);
            let in_page = if kv.page_size() > 1 { token } else { 0 };
            assert_eq!((params.k.page, params.k.token), (page, in_page));
            assert_eq!((params.v.head, params.v.head_dim), (DIM / 16, DIM));
        }
    }
}

/// Rows that begin within 16 bytes are no pieces. Another kernel converts them, behind one that makes rows of the queries.
pub fn products_in_fp8_of_uneven_rows() {
    let kv = pages(1);
    let desc = AttentionDesc {
        q_dtype: DType::F8E4M3,
        fp8_products: true,
        ..prompts(kv, DType::F8E4M3)
    };
    let [k, v] = [K, V + 8].map(|address| cache(address, DType::F8E4M3, kv, TOKEN));
    assert_taken(desc, k, v, "e4m3_d128_q192_rows", "folio_widen_queries");
}

/// Over fp8 the kernel is one for fp16, which is told of queries in bf16; other kernels are of the queries' type.
pub fn types_of_queries() {
    for (q_dtype, kv_dtype, of_kernel, flag) in [
        (DType::BF16, DType::F8E4M3, "_f16_kve4m3_", QUERIES_BF16),
        (DType::F16, DType::F8E4M3, "_f16_kve4m3_", 0),
        (DType::BF16, DType::BF16, "_bf16_d128_", 0),
        (DType::F16, DType::F16, "_f16_d128_", 0),
    ] {
        let kv = pages(1);
        let desc = AttentionDesc {
            q_dtype,
            o_dtype: q_dtype,
            max_qo_len: 300,
            ..prompts(kv, kv_dtype)
        };
        let [k, v] = [K, V].map(|address| cache(address, kv_dtype, kv, TOKEN));
        let (kernel, launch) = run(desc, k, v);
        assert!(kernel.contains(of_kernel), "{kernel}");
        let flags = launch.params::<PrefillParams>().attention.flags;
        assert_eq!(flags & QUERIES_BF16, flag, "{kernel}");
    }
}

/// Rows in fp8 may begin at odd multiples of 8 bytes, as those of 72 elements or of 120 do; the kernel is told.
pub fn fp8_rows_of_eight_bytes() {
    let (kv, dtype) = (pages(1), DType::F8E4M3);
    let desc = AttentionDesc {
        max_qo_len: 512,
        ..prompts(kv, dtype)
    };
    for (skew, alignment) in [(0, 16), (8, 8)] {
        let k = cache(K, dtype, kv, TOKEN);
        let v = cache(V + skew, dtype, kv, TOKEN);
        let (_, launch) = run(desc, k, v);
        assert_eq!(launch.name(), "folio_prefill_sm90_rows");
        assert_eq!(launch.params::<PrefillParams>().row_alignment, alignment);
    }
}

/// The same where they begin at multiples of 16, and end at an odd one of 8.
pub fn fp8_rows_that_end_at_eight_bytes() {
    let (kv, dtype, dim) = (pages(1), DType::F8E4M3, 40);
    let desc = AttentionDesc {
        max_qo_len: 512,
        head_dim_qk: dim,
        head_dim_vo: dim,
        ..prompts(kv, dtype)
    };
    let heads = i64::from(HEADS);
    let rows = |address, apart: i64| {
        let (shape, token) = ([PAGES, 1, heads, dim.into()], heads * apart);
        at(address, dtype, &shape, Some(&[token, token, apart, 1]))
    };
    for (k, v) in [(48, 48), (48, 40), (40, 48)] {
        let (_, launch) = run(desc, rows(K, k), rows(V, v));
        assert_eq!(launch.name(), "folio_prefill_sm90_rows");
        assert_eq!(launch.params::<PrefillParams>().row_alignment, 8);
    }
}

/// Rows of 16 bits that do not start at 16 bytes are the portable kernel's, and rows in fp8 that do not start at 8.
pub fn portable_takes_the_rest() {
    for (kv, dtype, skew) in [
        (pages(16), DType::BF16, 8),
        (pages(1), DType::BF16, 8),
        (pages(1), DType::F8E4M3, 4),
        (RAGGED, DType::F8E5M2, 4),
    ] {
        let apart = i64::from(kv.page_size()) * TOKEN;
        let even = cache(K, dtype, kv, apart);
        let skew = cache(V + skew, dtype, kv, apart);
        let desc = prompts(kv, dtype);
        for (k, v) in [(even, skew), (skew, even)] {
            let (_, launch) = run(desc, k, v);
            assert_eq!(launch.name(), "folio_attention");
        }
    }
}

/// The same head dims everywhere.
fn of_width(desc: AttentionDesc, dim: u32) -> AttentionDesc {
    AttentionDesc {
        head_dim_qk: dim,
        head_dim_vo: dim,
        ..desc
    }
}

fn cache_of_width(address: usize, desc: &AttentionDesc) -> Tensor {
    let (heads, dim) = (i64::from(desc.num_kv_heads), i64::from(desc.head_dim_qk));
    let dtype = desc.kv_format.element;
    match desc.kv {
        KvStorage::Ragged => at(address, dtype, &[2 * 64, heads, dim], None),
        KvStorage::Paged { page_size, .. } => {
            at(address, dtype, &[PAGES, page_size.into(), heads, dim], None)
        }
    }
}

/// Few rows in handles of long queries: where those are copied or widened in tiles of 192 rows, others are as wide, but for
/// requests of few keys, as these are up to head_dim 128.
pub fn few_rows_of_long_queries() {
    for (dim, kv_dtype, tile) in [
        (96, DType::BF16, 64),
        (64, DType::BF16, 64),
        (128, DType::F8E4M3, 64),
        (72, DType::F8E4M3, 64),
        (160, DType::F8E5M2, 192),
        (144, DType::BF16, 192),
        (160, DType::BF16, 192),
        (160, DType::F8E4M3, 192),
        (192, DType::BF16, 128),
    ] {
        let desc = of_width(prompts(pages(1), kv_dtype), dim);
        let [k, v] = [K, V].map(|address| cache_of_width(address, &desc));
        let (_, launch) = run(desc, k, v);
        assert_eq!(launch.name(), "folio_prefill_sm90_rows", "{dim}");
        assert_eq!(launch.block[0], 128 * (tile / 64 + 1));
    }
}

/// Runs with soft caps and with ALiBi at head_dims between whole blocks, by a handle that has no small tiles: kernels of their own
/// where there are some, else the plain one and the one for any masks.
pub fn logits_of_every_width() {
    let slopes = || Some(at(O, DType::F32, &[HEADS.into()], None));
    for (dim, kv, capped, biased) in [
        (40, RAGGED, "_capped", "_biased"),
        (72, pages(16), "_capped", "_masked"),
        (80, RAGGED, "_capped", "_masked"),
        (96, pages(16), "_capped", "_masked"),
        (112, RAGGED, "_capped", "_masked"),
        (120, pages(16), "_capped", "_masked"),
        (120, RAGGED, "_capped", "_biased"),
        (120, pages(1), "_rows", "_rows"),
        (144, pages(16), "", "_rows"),
        (160, RAGGED, "", "_rows"),
    ] {
        let desc = AttentionDesc {
            graph: true,
            ..of_width(prompts(kv, DType::BF16), dim)
        };
        let [k, v] = [K, V].map(|address| cache_of_width(address, &desc));
        let (_, launch) = run_with(desc, k, v, |args| args.logits_soft_cap = 30.0);
        assert_eq!(
            launch.name(),
            format!("folio_prefill_sm90{capped}"),
            "{dim} {kv:?}"
        );
        let (_, launch) = run_with(desc, k, v, |args| args.alibi_slopes = slopes());
        assert_eq!(
            launch.name(),
            format!("folio_prefill_sm90{biased}"),
            "{dim} {kv:?}"
        );
    }
}

/// Runs under masks that positions do not say: by boxes where there is a kernel for such rows, else row by row, whatever the
/// cache's pages and its type.
pub fn masks() {
    let custom = || Mask::Bytes(at(O, DType::U8, &[2 * 40 * 64], None));
    let (bf16, e4m3) = (DType::BF16, DType::F8E4M3);
    for (dim, kv, kv_dtype, taken) in [
        (128, pages(16), bf16, "folio_prefill_sm90_masked"),
        (64, pages(16), bf16, "folio_prefill_sm90_masked"),
        (96, RAGGED, bf16, "folio_prefill_sm90_masked"),
        (96, pages(16), bf16, "folio_prefill_sm90_masked"),
        (96, pages(1), bf16, "folio_prefill_sm90_rows"),
        (120, pages(16), bf16, "folio_prefill_sm90_masked"),
        (120, pages(1), bf16, "folio_prefill_sm90_rows"),
        (160, pages(16), bf16, "folio_prefill_sm90_rows"),
        (160, RAGGED, bf16, "folio_prefill_sm90_rows"),
        (224, pages(16), bf16, "folio_prefill_sm90_rows"),
        (64, pages(1), bf16, "folio_prefill_sm90_rows"),
        (128, pages(1), bf16, "folio_prefill_sm90_rows"),
        (160, pages(3), bf16, "folio_prefill_sm90_rows"),
        (256, pages(1), bf16, "folio_prefill_sm90_rows"),
        (64, pages(16), e4m3, "folio_prefill_sm90_rows"),
        (128, pages(1), e4m3, "folio_prefill_sm90_rows"),
        (256, RAGGED, e4m3, "folio_prefill_sm90_rows"),
        // Bits of masks would spill beside rows that are converted.
        (160, pages(16), e4m3, "folio_attention"),
    ] {
        // Heads that do not share tiles: queries of any length, and short ones.
        for max_qo_len in [4096, 1024] {
            let desc = AttentionDesc {
                max_qo_len,
                ..of_width(prompts(kv, kv_dtype), dim)
            };
            let [k, v] = [K, V].map(|address| cache_of_width(address, &desc));
            for mask in [
                custom(),
                Mask::CausalByRequest(at(O, DType::U8, &[2], None)),
            ] {
                let (_, launch) = run_under(desc, k, v, mask);
                assert_eq!(
                    launch.name(),
                    taken,
                    "{dim}, {kv:?}, {kv_dtype:?}, {max_qo_len}"
                );
            }
        }
    }
}

/// No head_dim, group or maximum leaves such a run to the portable kernel, but for those that the test above names.
pub fn masks_of_every_width() {
    for dim in (8..=256).step_by(8) {
        for (kv, kv_dtype) in [
            (pages(16), DType::BF16),
            (pages(1), DType::BF16),
            (RAGGED, DType::BF16),
            (pages(16), DType::F8E4M3),
            (pages(1), DType::F8E5M2),
        ] {
            if kv_dtype.is_fp8() && (136..=160).contains(&dim) {
                continue;
            }
            for (num_kv_heads, max_qo_len) in [(HEADS, 4096), (HEADS, 1024), (HEADS, 100), (1, 300)]
            {
                let desc = AttentionDesc {
                    num_kv_heads,
                    max_qo_len,
                    ..of_width(prompts(kv, kv_dtype), dim)
                };
                let [k, v] = [K, V].map(|address| cache_of_width(address, &desc));
                let mask = Mask::CausalByRequest(at(O, DType::U8, &[2], None));
                let (_, launch) = run_under(desc, k, v, mask);
                // Up to 64 rows over fp8 that have no small tiles are a decode kernel's, where keys may have 32 MiB.
                let has_chunks = (16..=128).contains(&dim) && num_kv_heads == HEADS;
                let few = kv_dtype == DType::F8E5M2 && has_chunks;
                let taken = match few {
                    true => "folio_sm90_decode_",
                    false => "folio_prefill_sm90_",
                };
                assert!(
                    launch.name().starts_with(taken),
                    "{} of {desc:?}",
                    launch.name()
                );
            }
        }
    }
}

/// Outputs of every type are the same kernels': they are told which.
pub fn outputs() {
    for (o_dtype, code) in [
        (DType::BF16, 2),
        (DType::F32, 0),
        (DType::F8E4M3, 3),
        (DType::F8E5M2, 4),
    ] {
        for (kv, taken) in [
            (pages(16), "folio_prefill_sm90"),
            (pages(1), "folio_prefill_sm90_rows"),
            (RAGGED, "folio_prefill_sm90"),
        ] {
            let desc = AttentionDesc {
                o_dtype,
                ..prompts(kv, DType::BF16)
            };
            let [k, v] = [K, V].map(|address| cache_of_width(address, &desc));
            let (_, launch) = run(desc, k, v);
            assert_eq!(launch.name(), taken);
            let flags = launch.params::<PrefillParams>().attention.flags;
            assert_eq!(flags >> O_DTYPE_SHIFT, code);
        }
    }
}
