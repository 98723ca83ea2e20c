//! When prefill on Hopper makes rows of the keys of a batch first, of whatever form, and of queries in fp8: which launches there are, and what
//! goes from one to the next.

use folio::api::BatchInput;
use folio::cuda::params::{GenericParams, MergeStatesParams, V_SCALES_OF_REQUESTS};
use folio::cuda::prefill_params::{O_DTYPE_SHIFT, PrefillParams};
use folio::cuda::stored_params::{StoredAttentionParams, StoredWidenParams};
use folio::cuda::widen_params::WidenParams;
use folio::dtype::DType;
use folio::problem::{
    AttentionArgs, AttentionDesc, CacheForm, Kind, KvLayout, KvStorage, Mask, Window,
};

use crate::fixture::{DIM, HEADS, Handle, OURS, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const Q: usize = 0x1_0000_0000;
const K: usize = 0x2_0000_0000;
const V: usize = 0x3_0000_0000;
const O: usize = 0x4_0000_0000;

const E4M3: DType = DType::F8E4M3;
const E5M2: DType = DType::F8E5M2;

/// Two prompts of up to 1000 tokens, over pages.
fn prompts(page_size: u32, [q_dtype, kv_dtype, o_dtype]: [DType; 3]) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        q_dtype,
        kv_format: kv_dtype.into(),
        o_dtype,
        max_batch_size: 2,
        max_num_tokens: 2000,
        max_qo_len: 1000,
        max_kv_len: 1000,
        kv: KvStorage::Paged {
            page_size,
            layout: KvLayout::Nhd,
        },
        ..desc(false)
    }
}

/// The same of two heads for each KV head, as many products as pay over fp8.
fn prompts_of_pairs(types: [DType; 3]) -> AttentionDesc {
    AttentionDesc {
        num_qo_heads: 2 * HEADS,
        ..prompts(16, types)
    }
}

/// Two requests of so many rows and 1000 keys.
fn planned(desc: AttentionDesc, rows: i32) -> Handle {
    let mut handle = Handle::of(&context(), desc).unwrap();
    let pages = 1000_usize.div_ceil(desc.kv.page_size() as usize);
    let ids = vec![1; 2 * pages];
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, rows, 2 * rows], &[3]),
        kv_len: host_tensor(&[1000; 2], &[2]),
        block_table: host_tensor(&ids, &[2, pages as i64]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    handle
}

fn arguments(desc: &AttentionDesc, rows: i64) -> AttentionArgs {
    let page_size = i64::from(desc.kv.page_size());
    let of_rows = |address, dtype, dim: u32| {
        let shape = [2 * rows, desc.num_qo_heads.into(), dim.into()];
        at(address, dtype, &shape, None)
    };
    let cache = |address, dim: u32| {
        let shape = [40, page_size, desc.num_kv_heads.into(), dim.into()];
        at(address, desc.kv_format.element, &shape, None)
    };
    AttentionArgs::new(
        of_rows(Q, desc.q_dtype, desc.head_dim_qk),
        cache(K, desc.head_dim_qk),
        cache(V, desc.head_dim_vo),
        of_rows(O, desc.o_dtype, desc.head_dim_vo),
    )
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    for kernel in ["places", "rows", "queries"] {
        recorder.expect::<WidenParams>(&format!("folio_widen_{kernel}"));
    }
    recorder.expect::<WidenParams>("folio_copy_rows");
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_masked");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_rows");
    recorder.expect::<GenericParams>("folio_attention");
    recorder
}

/// What a run enqueues.
fn launches(recorder: &Recorder, handle: &Handle, args: &AttentionArgs) -> Vec<Launched> {
    recorder.forget();
    handle.attention.run(args, OURS).unwrap();
    recorder.launches()
}

fn names(launches: &[Launched]) -> Vec<&str> {
    launches.iter().map(Launched::name).collect()
}

fn under_a_window(args: &AttentionArgs) -> AttentionArgs {
    AttentionArgs {
        window: Window {
            left: Some(100),
            right: None,
        },
        ..*args
    }
}

fn under_a_mask(args: &AttentionArgs, rows: i64) -> AttentionArgs {
    AttentionArgs {
        mask: Mask::Bytes(at(O, DType::U8, &[2 * rows * 1000], None)),
        ..*args
    }
}

/// Keys in fp8 become rows that the kernel over ragged rows reads by the work items that were written beside them.
pub fn keys_in_fp8() {
    let recorder = recorder();
    for graph in [false, true] {
        let desc = AttentionDesc {
            graph,
            ..prompts_of_pairs([DType::BF16, E4M3, DType::BF16])
        };
        let handle = planned(desc, 1000);
        let args = arguments(&desc, 1000);
        let launches = launches(&recorder, &handle, &args);
        let expected = [
            "folio_widen_places",
            "folio_widen_rows",
            "folio_prefill_sm90",
        ];
        assert_eq!(names(&launches)[..3], expected);
        let dependent: Vec<_> = launches[..3].iter().map(|l| l.dependent).collect();
        assert_eq!(dependent, [0, 1, 1]);
        let widened = launches[1].params::<WidenParams>();
        assert_eq!((widened.k.data, widened.v.data), (K as u64, V as u64));
        assert_eq!((widened.k_pieces, widened.v_pieces), (DIM / 8, DIM / 8));
        // 2 * 1000 keys, and 31 for each request, in whole 32s.
        assert_eq!(widened.most_rows, 2080);
        assert_eq!((widened.cache_dtype, widened.row_dtype), (3, 2));
        assert_eq!(widened.num_tokens, 0);
        let taken = launches[2].params::<PrefillParams>().attention;
        assert_eq!((taken.plan.items, taken.plan.page_ids), (widened.items, 0));
        assert_eq!(
            (taken.k.data, taken.v.data),
            (widened.k_rows, widened.v_rows)
        );
        let maps = launches[2].maps();
        let addresses: Vec<_> = maps.iter().map(|map| map.address).collect();
        assert_eq!(addresses, [Q as u64, widened.k_rows, widened.v_rows]);
        // A window is not widened.
        recorder.forget();
        handle.attention.run(&under_a_window(&args), OURS).unwrap();
        assert_eq!(recorder.launches()[0].name(), "folio_prefill_sm90_rows");
    }
}

/// Queries in fp8 become rows of fp16 too. The kernel over rows writes outputs of any type.
pub fn queries_in_fp8() {
    let recorder = recorder();
    for (types, kernel, o_dtype) in [
        ([E4M3, E4M3, DType::BF16], "float8_e4m3", 2),
        ([E5M2, E4M3, DType::F16], "float8_e4m3", 1),
        ([E4M3, E5M2, E5M2], "float8_e5m2", 4),
        ([E4M3, E4M3, DType::F32], "float8_e4m3", 0),
    ] {
        let o_scale = if types[2].is_fp8() { 0.5 } else { 1.0 };
        let of_requests = at(V_SCALES, DType::F32, &[2, HEADS.into()], None);
        let desc = prompts_of_pairs(types);
        let handle = planned(desc, 1000);
        let name = handle.attention.kernel();
        let suffix = format!("f16_d128_q192_ragged_widened_from_{kernel}");
        assert!(name.ends_with(&suffix), "{name}");
        let args = AttentionArgs {
            v_scale: 3.0,
            v_scales: Some(of_requests),
            o_scale,
            ..arguments(&desc, 1000)
        };
        let launches = launches(&recorder, &handle, &args);
        let expected = [
            "folio_widen_places",
            "folio_widen_rows",
            "folio_widen_queries",
            "folio_prefill_sm90",
        ];
        assert_eq!(names(&launches)[..4], expected);
        let dependent: Vec<_> = launches[..4].iter().map(|l| l.dependent).collect();
        assert_eq!(dependent, [0, 1, 1, 1]);
        let widened = launches[2].params::<WidenParams>();
        assert_eq!((widened.q.data, widened.num_tokens), (Q as u64, 2000));
        assert_eq!(widened.row_dtype, 1);
        assert_eq!(widened.num_qo_heads.divisor, 2 * HEADS);
        // Behind the rows of values.
        let row_of_keys = u64::from(HEADS * DIM) * 2;
        assert!(widened.q_rows >= widened.v_rows + 2080 * row_of_keys);
        assert!(widened.first_row >= widened.q_rows + 2000 * 2 * row_of_keys);
        assert_eq!(launches[3].maps()[0].address, widened.q_rows);
        let taken = launches[3].params::<PrefillParams>().attention;
        assert_eq!(taken.flags >> O_DTYPE_SHIFT, o_dtype);
        assert_eq!((taken.o.data, taken.v_scales), (O as u64, V_SCALES as u64));
        assert_eq!(taken.v_scale, 3.0 / o_scale);
        let of_requests = taken.flags & V_SCALES_OF_REQUESTS;
        assert_eq!(of_requests, V_SCALES_OF_REQUESTS);
    }
}

/// Queries in fp8 become rows beside keys that stay in the cache: of few rows, under windows over many more keys than rows, of
/// decodes with more rows than a decode kernel has.
pub fn queries_in_fp8_alone() {
    let recorder = recorder();
    let prompts = prompts_of_pairs([E4M3, E4M3, DType::BF16]);
    let drafts = AttentionDesc {
        kind: Kind::Decode,
        num_kv_heads: 1,
        max_num_tokens: 128,
        max_qo_len: 64,
        ..prompts
    };
    for (desc, rows, windowed) in [
        (prompts, 1000, true),
        (prompts, 300, false),
        (drafts, 64, false),
    ] {
        let handle = planned(desc, rows);
        let args = arguments(&desc, rows.into());
        let args = if windowed {
            under_a_window(&args)
        } else {
            args
        };
        let launches = launches(&recorder, &handle, &args);
        let expected = ["folio_widen_queries", "folio_prefill_sm90_rows"];
        assert_eq!(names(&launches)[..2], expected);
        assert_eq!([launches[0].dependent, launches[1].dependent], [0, 1]);
        let widened = launches[0].params::<WidenParams>();
        assert_eq!(
            (widened.q.data, widened.num_tokens),
            (Q as u64, 2 * rows as u32)
        );
        assert_eq!(launches[1].maps()[0].address, widened.q_rows);
        let taken = launches[1].params::<PrefillParams>().attention;
        assert_eq!((taken.q.data, taken.k.data), (widened.q_rows, K as u64));
    }
}

/// Which queries in fp8 do not: rows that do not start at 8 bytes.
pub fn portable_takes_other_queries_in_fp8() {
    let recorder = recorder();
    let desc = prompts_of_pairs([E4M3, E4M3, DType::BF16]);
    let args = arguments(&desc, 1000);
    let long = planned(desc, 1000);
    let skewed = AttentionArgs {
        q: at(Q + 4, E4M3, args.q.shape(), None),
        ..args
    };
    assert_eq!(
        launches(&recorder, &long, &skewed)[0].name(),
        "folio_attention"
    );
    let other_widths = AttentionDesc {
        head_dim_qk: 192,
        ..desc
    };
    for (handle, args) in [
        (&long, under_a_mask(&args, 1000)),
        (&planned(other_widths, 1000), arguments(&other_widths, 1000)),
    ] {
        let launches = launches(&recorder, handle, &args);
        assert_eq!(launches[2].name(), "folio_widen_queries");
    }
}

/// Behind a kernel whose products are in e4m3, for runs under masks that it does not have: no rows of keys, so that the workspace has no
/// room for these.
pub fn beside_fp8_products() {
    let recorder = recorder();
    let desc = AttentionDesc {
        fp8_products: true,
        ..prompts_of_pairs([E4M3, E4M3, DType::BF16])
    };
    let handle = planned(desc, 1000);
    let args = under_a_mask(&arguments(&desc, 1000), 1000);
    let launches = launches(&recorder, &handle, &args);
    let expected = ["folio_widen_queries", "folio_prefill_sm90_rows"];
    assert_eq!(names(&launches)[..2], expected);
}

/// Where `FOLIO_PLAN_FP8_PRODUCTS` finds no kernel of its own: rows that are no whole number of 16 bytes.
pub fn without_fp8_products() {
    let recorder = recorder();
    for head_dim in [72, 120] {
        let desc = AttentionDesc {
            fp8_products: true,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            ..prompts_of_pairs([E4M3, E4M3, DType::BF16])
        };
        let launches = launches(&recorder, &planned(desc, 1000), &arguments(&desc, 1000));
        assert_eq!(launches[2].name(), "folio_widen_queries");
    }
}

/// Keys in 16 bits on pages that no box has are copied for many rows, else loaded one by one; for fewer rows where tiles are
/// wider than those of the problem. A mask changes nothing of that.
pub fn small_pages() {
    let recorder = recorder();
    for dtype in [DType::BF16, DType::F16] {
        let of_width = |head_dim, num_qo_heads| AttentionDesc {
            num_qo_heads,
            num_kv_heads: 8,
            head_dim_qk: head_dim,
            head_dim_vo: head_dim,
            ..prompts(3, [dtype; 3])
        };
        for (head_dim, num_qo_heads, rows, few_rows) in [
            (128, 64, 790, 770),
            (96, 64, 790, 770),
            (192, 64, 480, 450),
            (256, 128, 730, 710),
        ] {
            let desc = of_width(head_dim, num_qo_heads);
            let name = planned(desc, rows).attention.kernel().to_owned();
            assert!(name.ends_with("_ragged_copied_from_pages"), "{name}");
            let args = arguments(&desc, rows.into());
            let copied = launches(&recorder, &planned(desc, rows), &args);
            let expected = [
                "folio_widen_places",
                "folio_copy_rows",
                "folio_prefill_sm90",
            ];
            assert_eq!(names(&copied)[..3], expected);
            let params = copied[1].params::<WidenParams>();
            assert_eq!(params.cache_dtype, params.row_dtype);
            let few = planned(desc, few_rows);
            let few = launches(&recorder, &few, &arguments(&desc, few_rows.into()));
            assert_eq!(few[0].name(), "folio_prefill_sm90_rows");
            let windowed = launches(&recorder, &planned(desc, rows), &under_a_window(&args));
            assert_eq!(windowed[0].name(), "folio_prefill_sm90_rows");
            let masked = under_a_mask(&args, rows.into());
            let masked = launches(&recorder, &planned(desc, rows), &masked);
            assert_eq!(
                names(&masked)[1..3],
                ["folio_copy_rows", "folio_prefill_sm90_masked"]
            );
            let masked = under_a_mask(&arguments(&desc, few_rows.into()), few_rows.into());
            let masked = launches(&recorder, &planned(desc, few_rows), &masked);
            assert_eq!(masked[0].name(), "folio_prefill_sm90_rows");
            let maps = masked[0].maps();
            let addresses: Vec<_> = maps.iter().map(|map| map.address).collect();
            assert_eq!(addresses, [Q as u64; 3]);
        }
    }
}

const K_SCALES: usize = 0x5_0000_0000;
const V_SCALES: usize = 0x6_0000_0000;
const K_ZEROS: usize = 0x7_0000_0000;
const V_ZEROS: usize = 0x8_0000_0000;
const K_NEW: usize = 0x9_0000_0000;
const V_NEW: usize = 0xa_0000_0000;

/// The same prompts over another form, with the first of its elements.
fn prompts_over(form: CacheForm, q_dtype: DType) -> AttentionDesc {
    AttentionDesc {
        kv_format: form.of(form.elements(q_dtype)[0]),
        ..prompts(16, [q_dtype; 3])
    }
}

fn arguments_over(desc: &AttentionDesc, rows: i64) -> AttentionArgs {
    let (form, element) = (desc.kv_format.form(), desc.kv_format.element);
    let (heads, dim) = (i64::from(HEADS), i64::from(desc.head_dim_qk));
    let rows_of = |address, is_key| {
        let shape: &[i64] = match (form, is_key) {
            (CacheForm::PackedKeys, true) => &[40, heads, 16, 16, 8],
            (CacheForm::PackedKeys, false) => &[40, heads, dim, 16],
            _ => &[40, 16, heads, dim / i64::from(element.lanes())],
        };
        at(address, element, shape, None)
    };
    let scales = |address| {
        let tensor = |dtype, shape: &[i64]| Some(at(address, dtype, shape, None));
        match form {
            CacheForm::TokenHeadScales => tensor(DType::F32, &[40, 16, heads]),
            CacheForm::Nvfp4 => tensor(E4M3, &[40, 16, heads, dim / 16]),
            CacheForm::PackedKeys | CacheForm::Plain => None,
            _ => tensor(DType::F32, &[heads, dim]),
        }
    };
    let zeros = |address| {
        (form == CacheForm::ChannelZeroPoints).then(|| at(address, DType::F32, &[heads, dim], None))
    };
    let of_rows = |address| at(address, desc.q_dtype, &[2 * rows, heads, dim], None);
    AttentionArgs {
        k_scales: scales(K_SCALES),
        v_scales: scales(V_SCALES),
        k_zero_points: zeros(K_ZEROS),
        v_zero_points: zeros(V_ZEROS),
        ..AttentionArgs::new(of_rows(Q), rows_of(K, true), rows_of(V, false), of_rows(O))
    }
}

fn recorder_of_forms() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<WidenParams>("folio_widen_places");
    recorder.expect::<StoredWidenParams>("folio_widen_units");
    recorder.expect::<StoredWidenParams>("folio_widen_stored");
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_masked");
    recorder.expect::<StoredAttentionParams>("folio_attention_stored");
    recorder
}

/// Keys of every form become rows of q's type. In fp16 the rows of forms with float32 scales are divided by units, whose factors
/// the kernel over rows, and no other, is given.
pub fn other_forms() {
    let recorder = recorder_of_forms();
    let forms = [
        (CacheForm::TokenHeadScales, "token_head_scales", true),
        (CacheForm::ChannelScales, "channel_scales", true),
        (CacheForm::ChannelZeroPoints, "channel_zero_points", true),
        (CacheForm::Nvfp4, "nvfp4", false),
        (CacheForm::PackedKeys, "packed_keys", false),
    ];
    for (form, name, has_scales) in forms {
        for q_dtype in [DType::BF16, DType::F16] {
            let desc = prompts_over(form, q_dtype);
            let handle = planned(desc, 1000);
            let kernel = handle.attention.kernel();
            let suffix = format!("d128_q128_ragged_widened_from_{name}");
            assert!(kernel.ends_with(&suffix), "{kernel}");
            let launches = launches(&recorder, &handle, &arguments_over(&desc, 1000));
            let has_units = has_scales && q_dtype == DType::F16;
            let mut expected = vec!["folio_widen_places"];
            expected.extend(has_units.then_some("folio_widen_units"));
            expected.extend(["folio_widen_stored", "folio_prefill_sm90"]);
            assert_eq!(names(&launches)[..expected.len()], expected);
            let prefill = expected.len() - 1;
            let dependent = launches[..=prefill].iter().map(|l| l.dependent);
            assert!(dependent.eq((0..=prefill).map(|n| u32::from(n > 0))));
            let places = launches[0].params::<WidenParams>();
            let widened = launches[prefill - 1].params::<StoredWidenParams>();
            assert_eq!(widened.widen.k_rows, places.k_rows);
            assert_eq!((places.k_pieces, places.v_pieces), (DIM / 8, DIM / 8));
            let row_dtype = if q_dtype == DType::F16 { 1 } else { 2 };
            assert_eq!(widened.widen.row_dtype, row_dtype);
            let of_form = |address, is_there| if is_there { address as u64 } else { 0 };
            let is_packed = form == CacheForm::PackedKeys;
            assert_eq!(widened.cache.k.scales, of_form(K_SCALES, !is_packed));
            assert_eq!(widened.cache.v.scales, of_form(V_SCALES, !is_packed));
            let has_zeros = form == CacheForm::ChannelZeroPoints;
            assert_eq!(widened.cache.v.zero_points, of_form(V_ZEROS, has_zeros));
            let taken = launches[prefill].params::<PrefillParams>().attention;
            assert_eq!(
                (taken.k.data, taken.plan.items),
                (places.k_rows, places.items)
            );
            // One for keys and one for values of a head, and behind them the factors, with room for those of two requests.
            let bytes = u64::from(HEADS) * 4;
            assert_eq!(places.num_units, if has_units { 2 * HEADS } else { 0 });
            let factors = match has_units {
                true => [2, 4].map(|n| places.units + n * bytes),
                false => [0; 2],
            };
            assert_eq!([widened.k_factors, widened.v_factors], factors);
            assert_eq!([taken.k_scales, taken.v_scales], factors);
            assert!(places.units >= places.page_start + 2 * 8);
            assert!(!has_units || places.items >= factors[1] + 2 * bytes);
        }
    }
}

/// Rows are made of the keys that a request has in the cache, whatever its new ones are.
pub fn new_keys_stay_out() {
    let recorder = recorder_of_forms();
    recorder.expect::<MergeStatesParams>("folio_merge_state");
    let rows = 600;
    for new_kv in [None, Some(DType::F16)] {
        let desc = AttentionDesc {
            new_kv,
            max_kv_len: 2000,
            ..prompts_over(CacheForm::TokenHeadScales, DType::F16)
        };
        let handle = planned(desc, rows);
        let shape = [2 * i64::from(rows), HEADS.into(), DIM.into()];
        let new = |address| new_kv.map(|dtype| at(address, dtype, &shape, None));
        let args = AttentionArgs {
            k_new: new(K_NEW),
            v_new: new(V_NEW),
            ..arguments_over(&desc, rows.into())
        };
        let first = &launches(&recorder, &handle, &args)[0];
        assert_eq!(first.name(), "folio_widen_places");
        let apart = first.params::<WidenParams>().new_keys_apart;
        assert_eq!(apart, u32::from(new_kv.is_some()));
    }
}

/// Devices without Hopper's kernels make the same rows, and their own kernel takes them under any mask. No launch begins before
/// the one before it has ended, since nothing waits there.
pub fn forms_portably() {
    let recorder = recorder_of_forms();
    recorder.expect::<GenericParams>("folio_attention");
    let desc = prompts_over(CacheForm::ChannelScales, DType::F16);
    let handle = planned(desc, 1000);
    let name = handle.attention.kernel();
    assert!(name.ends_with("_widened_from_channel_scales"), "{name}");
    let args = arguments_over(&desc, 1000);
    for args in [args, under_a_mask(&args, 1000)] {
        let launches = launches(&recorder, &handle, &args);
        let expected = [
            "folio_widen_places",
            "folio_widen_units",
            "folio_widen_stored",
            "folio_attention",
        ];
        assert_eq!(names(&launches)[..4], expected);
        assert!(launches.iter().all(|launch| launch.dependent == 0));
        let widened = launches[0].params::<WidenParams>();
        let taken = launches[3].params::<GenericParams>();
        assert_eq!(taken.attention.k.data, widened.k_rows);
        assert_eq!(taken.attention.plan.items, widened.items);
        assert_eq!((taken.k_copy_bytes, taken.page_size.divisor), (16, 1));
    }
    let few = launches(&recorder, &planned(desc, 100), &arguments_over(&desc, 100));
    assert_eq!(few[0].name(), "folio_attention_stored");
}

/// Scales of whole heads, which an x-packed cache of fp8 has, stay out of the rows.
pub fn head_scales_stay_out() {
    let recorder = recorder_of_forms();
    let desc = AttentionDesc {
        kv_format: CacheForm::PackedKeys.of(E4M3),
        ..prompts(16, [DType::BF16; 3])
    };
    let (heads, dim) = (i64::from(HEADS), i64::from(DIM));
    let scales = |address| Some(at(address, DType::F32, &[heads], None));
    let args = AttentionArgs {
        k: at(K, E4M3, &[40, heads, 8, 16, 16], None),
        v: at(V, E4M3, &[40, heads, dim, 16], None),
        k_scales: scales(K_SCALES),
        v_scales: scales(V_SCALES),
        ..arguments(&prompts(16, [DType::BF16; 3]), 1000)
    };
    let launches = launches(&recorder, &planned(desc, 1000), &args);
    let widened = launches[1].params::<StoredWidenParams>();
    assert_eq!((widened.cache.k.scales, widened.cache.v.scales), (0, 0));
    let taken = launches[2].params::<PrefillParams>().attention;
    let scales = (taken.k_scales, taken.v_scales);
    assert_eq!(scales, (K_SCALES as u64, V_SCALES as u64));
}

/// What the portable kernel keeps: few rows, windows over many more keys than rows, and, where results may not depend on the
/// batch, units that are found in it. Masks in memory are no reason.
pub fn portable_takes_other_runs_over_forms() {
    let recorder = recorder_of_forms();
    let form = CacheForm::TokenHeadScales;
    let desc = prompts_over(form, DType::F16);
    let alone = |q_dtype| AttentionDesc {
        batch_invariant: true,
        ..prompts_over(form, q_dtype)
    };
    let cases = [
        (desc, 127, false, false),
        (desc, 128, false, true),
        (desc, 300, true, false),
        (desc, 1000, true, true),
        (alone(DType::F16), 1000, false, false),
        (alone(DType::BF16), 1000, false, true),
        (
            AttentionDesc {
                batch_invariant: true,
                ..prompts_over(CacheForm::ChannelScales, DType::F16)
            },
            1000,
            false,
            true,
        ),
    ];
    for (desc, rows, windowed, is_widened) in cases {
        let args = arguments_over(&desc, rows.into());
        let args = match windowed {
            true => under_a_window(&args),
            false => args,
        };
        let launches = launches(&recorder, &planned(desc, rows), &args);
        let first = match is_widened {
            true => "folio_widen_places",
            false => "folio_attention_stored",
        };
        assert_eq!(
            launches[0].name(),
            first,
            "{rows} rows of {:?}",
            desc.kv_format
        );
    }
    let masked = under_a_mask(&arguments_over(&desc, 1000), 1000);
    let launches = launches(&recorder, &planned(desc, 1000), &masked);
    assert_eq!(launches[0].name(), "folio_widen_places");
    assert_eq!(launches[3].name(), "folio_prefill_sm90_masked");
}

/// Items are cut for tiles of 192 rows at head_dims of 136 to 160. Under masks tiles have 128 there, and would leave out the others.
pub fn masks_take_no_items_of_wider_tiles() {
    let recorder = recorder_of_forms();
    for (dim, is_widened) in [
        (120, true),
        (128, true),
        (136, false),
        (160, false),
        (168, true),
        (256, true),
    ] {
        let desc = AttentionDesc {
            head_dim_qk: dim,
            head_dim_vo: dim,
            ..prompts_over(CacheForm::ChannelScales, DType::F16)
        };
        let handle = planned(desc, 1000);
        let args = arguments_over(&desc, 1000);
        let plain = launches(&recorder, &handle, &args);
        assert_eq!(plain[0].name(), "folio_widen_places", "{dim}");
        let masked = launches(&recorder, &handle, &under_a_mask(&args, 1000));
        let first = match is_widened {
            true => "folio_widen_places",
            false => "folio_attention_stored",
        };
        assert_eq!(masked[0].name(), first, "{dim}");
    }
}
