//! Which kernel a handle is named after, which one takes a run, and what the log says of it; and plans that
//! fail.

use std::sync::{Arc, Mutex};

use folio::cuda::params::{
    CombineParams, DecodeParams, GenericParams, QUERIES_BF16, QUERIES_E4M3, QUERIES_E5M2,
};
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::log::{Level, Logger};
use folio::problem::{AttentionArgs, AttentionDesc, CacheForm, Kind, KvStorage, Mask};

use crate::fixture::{
    CAPTURED, DIM, Handle, OURS, PAGE_SIZE, SOMEWHERE, at, context, context_with, desc,
    device_tensor, plain,
};
use crate::stub::Recorder;

type Messages = Arc<Mutex<Vec<String>>>;

/// A logger of everything, and what it has heard.
fn listener() -> (Logger, Messages) {
    let messages = Messages::default();
    let heard = Arc::clone(&messages);
    let sink = move |level, message: &str| {
        assert_eq!(level, Level::Info, "{message}");
        heard.lock().unwrap().push(message.to_owned());
    };
    (Logger::new(Arc::new(sink), Level::Info), messages)
}

/// Takes the messages that hold `part`, and forgets all.
fn take(messages: &Messages, part: &str) -> Vec<String> {
    let mut messages = std::mem::take(&mut *messages.lock().unwrap());
    messages.retain(|message| message.contains(part));
    messages
}

fn paged(page_size: u32) -> KvStorage {
    match desc(false).kv {
        KvStorage::Paged { layout, .. } => KvStorage::Paged { page_size, layout },
        KvStorage::Ragged => unreachable!("decode is paged"),
    }
}

pub fn creates_say_what_the_faster_kernels_lack() {
    let (logger, messages) = listener();
    let context = context_with(logger);
    let fp32 = AttentionDesc {
        q_dtype: DType::F32,
        kv_format: DType::F32.into(),
        o_dtype: DType::F32,
        ..desc(false)
    };
    let small_pages = AttentionDesc {
        kv: paged(5),
        ..desc(false)
    };
    let prefill = AttentionDesc {
        kind: Kind::Prefill,
        max_qo_len: 100,
        max_num_tokens: 400,
        ..small_pages
    };
    let long = AttentionDesc {
        max_kv_len: (1 << 30) + 1,
        ..desc(false)
    };
    let ragged = AttentionDesc {
        kv: KvStorage::Ragged,
        max_qo_len: 2,
        max_num_tokens: 8,
        ..prefill
    };
    let fp8_queries = AttentionDesc {
        q_dtype: DType::F8E4M3,
        kv_format: DType::F8E5M2.into(),
        ..desc(false)
    };
    let fp8_prefill = AttentionDesc {
        max_qo_len: 100,
        max_num_tokens: 400,
        ..fp8_queries
    };
    // Probabilities in e4m3 where the caller permits them and all types are e4m3; otherwise without a word.
    let e4m3 = AttentionDesc {
        kv_format: DType::F8E4M3.into(),
        fp8_products: true,
        ..fp8_prefill
    };
    let of_width = |head_dim| AttentionDesc {
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        ..e4m3
    };
    let e5m2 = AttentionDesc {
        fp8_products: true,
        ..fp8_prefill
    };
    let e4m3_decode = AttentionDesc {
        kv_format: DType::F8E4M3.into(),
        fp8_products: true,
        ..fp8_queries
    };
    let e4m3_small_pages = AttentionDesc {
        kv: paged(5),
        ..e4m3
    };
    for (desc, kernel, lacks) in [
        (e4m3, "prefill_sm90a_e4m3_d128_q192_paged", ""),
        (of_width(64), "prefill_sm90a_e4m3_d64_q192_paged", ""),
        (of_width(256), "prefill_sm90a_e4m3_d256_q128_paged", ""),
        (of_width(96), "prefill_sm90a_e4m3_d128_q192_paged", ""),
        (of_width(160), "prefill_sm90a_e4m3_d256_q128_paged", ""),
        (
            AttentionDesc {
                head_dim_vo: 64,
                ..e4m3
            },
            "prefill_sm90a_f16_kve4m3_d128_q192_rows_qfloat8_e4m3",
            "so few queries",
        ),
        // Rows of 72 bytes are no whole number of pieces.
        (
            of_width(72),
            "prefill_sm90a_f16_kve4m3_d128_q192_rows_qfloat8_e4m3",
            "so few queries",
        ),
        (
            e5m2,
            "prefill_sm90a_f16_kve5m2_d128_q192_rows_qfloat8_e4m3",
            "so few queries",
        ),
        (e4m3_decode, "decode_sm90a_f16_kve4m3_d128_q8_tma", ""),
        (
            e4m3_small_pages,
            "prefill_sm90a_e4m3_d128_q192_rows",
            "page_size",
        ),
        (desc(false), "decode_sm90a_bf16_d128_q8_tma", ""),
        (fp8_queries, "decode_sm90a_f16_kve5m2_d128_q8_tma", ""),
        (
            fp8_prefill,
            "prefill_sm90a_f16_kve5m2_d128_q192_rows_qfloat8_e4m3",
            "so few queries",
        ),
        (small_pages, "decode_sm90a_bf16_d128_q8_gather", "page_size"),
        (fp32, "decode_sm80_f32_d128_q16", "dtypes"),
        (prefill, "prefill_sm90a_bf16_d128_q128_rows", "page_size"),
        (long, "decode_sm80_bf16_d128_q16", "max_kv_len"),
        (ragged, "decode_sm80_bf16_d128_q16", "ragged k and v"),
    ] {
        let handle = Handle::of(&context, desc);
        let Ok(handle) = handle else {
            panic!("{kernel}: {:?}", handle.err());
        };
        let name = handle.attention.kernel();
        assert!(name.starts_with(kernel), "{name}");
        let told = take(&messages, "lack ");
        assert_eq!(told.len(), usize::from(!lacks.is_empty()), "{told:?}");
        for message in told {
            assert!(
                message.contains(lacks) && message.contains(name),
                "{message}"
            );
        }
    }
}

/// Kernels for fp16 queries over fp8 caches take queries in fp8, and decode in bf16, and are told of their type.
pub fn queries_over_fp8() {
    let context = context();
    let recorder = Recorder::new();
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<GenericParams>("folio_attention");
    let [q, k, o] = [plain().q, plain().k, plain().o].map(|tensor| tensor.shape().to_vec());
    for (q_dtype, flag) in [
        (DType::F16, 0),
        (DType::BF16, 0),
        (DType::F8E4M3, QUERIES_E4M3),
        (DType::F8E5M2, QUERIES_E5M2),
    ] {
        let kv_dtype = DType::F8E4M3;
        let desc = AttentionDesc {
            q_dtype,
            kv_format: kv_dtype.into(),
            o_dtype: DType::F32,
            ..desc(false)
        };
        let mut handle = Handle::of(&context, desc).unwrap();
        handle.plan_host(100, OURS).unwrap();
        let args = AttentionArgs::new(
            device_tensor(q_dtype, &q),
            device_tensor(kv_dtype, &k),
            device_tensor(kv_dtype, &k),
            device_tensor(DType::F32, &o),
        );
        recorder.forget();
        handle.attention.run(&args, OURS).unwrap();
        let launched = &recorder.launches()[0];
        assert_eq!(launched.name(), "folio_sm90_decode_tma");
        let params = launched.params::<DecodeParams>();
        let bf16_queries = u32::from(q_dtype == DType::BF16);
        assert_eq!(
            (params.attention.flags, params.bf16_queries),
            (flag, bf16_queries)
        );
        // The decode kernel reads four elements of q at a time, the portable one any.
        let misaligned = AttentionArgs {
            q: at(SOMEWHERE + 2, q_dtype, &q, None),
            ..args
        };
        recorder.forget();
        handle.attention.run(&misaligned, OURS).unwrap();
        let launched = &recorder.launches()[0];
        assert_eq!(launched.name(), "folio_attention");
        let params = launched.params::<GenericParams>();
        let flags = flag | (QUERIES_BF16 * bf16_queries);
        assert_eq!((params.attention.flags, params.q_copy_bytes), (flags, 2));
    }
}

/// Wider rows than any kernel has are refused by field and value.
pub fn rows_wider_than_any_kernel() {
    let context = context();
    let keys = AttentionDesc {
        head_dim_qk: 520,
        ..desc(false)
    };
    let codes = AttentionDesc {
        head_dim_vo: 264,
        kv_format: CacheForm::TokenHeadScales.of(DType::I8),
        ..desc(false)
    };
    for (desc, words) in [
        (keys, ["head_dim_qk: 520", "up to 512"]),
        (codes, ["head_dim_vo: 264", "up to 256"]),
    ] {
        let refused = Handle::of(&context, desc).err();
        let named = |m: &str| words.iter().all(|word| m.contains(word));
        assert!(
            matches!(&refused, Some(Error::Unsupported(m)) if named(m)),
            "{refused:?}"
        );
        let names_form =
            matches!(&refused, Some(Error::Unsupported(m)) if m.contains("TOKEN_HEAD_SCALES"));
        assert_eq!(names_form, words[1] == "up to 256", "{refused:?}");
    }
}

/// Rows above 256 are the portable kernel's, one for few and for many rows, with their own combine kernel.
pub fn wide_rows_are_portable() {
    let recorder = Recorder::new();
    recorder.expect::<GenericParams>("folio_attention");
    recorder.expect::<GenericParams>("folio_attention_f32");
    recorder.expect::<CombineParams>("folio_combine");
    let context = context();
    for (q_dtype, kv_dtype, symbol, row) in [
        (DType::BF16, DType::BF16, "folio_attention", "bf16_d512_q32"),
        (
            DType::F16,
            DType::F8E4M3,
            "folio_attention",
            "f16_kve4m3_d512_q32",
        ),
        (
            DType::F8E5M2,
            DType::F8E5M2,
            "folio_attention",
            "f16_kve5m2_d512_q32",
        ),
        (
            DType::F32,
            DType::F32,
            "folio_attention_f32",
            "f32_d512_q16",
        ),
    ] {
        let o_dtype = if q_dtype.is_fp8() {
            DType::F16
        } else {
            q_dtype
        };
        for (qk, vo) in [(264, 264), (512, 64), (128, 512)] {
            let wide = AttentionDesc {
                q_dtype,
                kv_format: kv_dtype.into(),
                o_dtype,
                head_dim_qk: qk,
                head_dim_vo: vo,
                ..desc(false)
            };
            let many = AttentionDesc {
                kind: Kind::Prefill,
                max_qo_len: 100,
                max_num_tokens: 400,
                ..wide
            };
            let prefill = Handle::of(&context, many).unwrap();
            assert_eq!(prefill.attention.kernel(), format!("prefill_sm80_{row}"));
            let mut handle = Handle::of(&context, wide).unwrap();
            assert_eq!(handle.attention.kernel(), format!("decode_sm80_{row}"));
            handle.plan_host(5000, OURS).unwrap();
            let rows = |dtype, dim: u32| device_tensor(dtype, &[4, 8, dim.into()]);
            let pages = |dim: u32| device_tensor(kv_dtype, &[1 << 14, 16, 8, dim.into()]);
            let args =
                AttentionArgs::new(rows(q_dtype, qk), pages(qk), pages(vo), rows(o_dtype, vo));
            recorder.forget();
            handle.attention.run(&args, OURS).unwrap();
            let launched = recorder.launches();
            let names: Vec<_> = launched.iter().map(|launch| launch.name()).collect();
            assert_eq!(names, [symbol, "folio_combine"]);
            let params: GenericParams = launched[0].params();
            assert_eq!(
                (params.head_dim_qk, params.head_dim_vo, params.row_tiles),
                (qk, vo, 1)
            );
            assert_eq!((launched[0].block[0], launched[0].grid[0] % 8), (128, 0));
            assert_eq!(launched[1].params::<CombineParams>().head_dim_vo, vo);
        }
    }
}

/// The symbol of the kernel that takes a run.
fn taken(handle: &Handle, args: &AttentionArgs) -> String {
    let recorder = Recorder::new();
    recorder.forget();
    handle.attention.run(args, OURS).unwrap();
    recorder.launches()[0].name().to_owned()
}

/// A reason is told once for a handle, whatever the number of runs.
pub fn runs_say_what_the_first_choice_lacks() {
    let (logger, messages) = listener();
    let context = context_with(logger);
    let mut handle = Handle::new(&context, false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let first = handle.attention.kernel().to_owned();
    take(&messages, "");
    let masked = AttentionArgs {
        mask: Mask::Bytes(at(0x9_0000_0000, DType::U8, &[200], None)),
        ..plain()
    };
    let ranges = AttentionArgs {
        mm_prefix_ranges: Some(at(0x9_0000_0000, DType::I32, &[2, 1, 2], None)),
        ..plain()
    };
    let by_request = AttentionArgs {
        mask: Mask::CausalByRequest(at(0x9_0000_0000, DType::U8, &[2], None)),
        ..plain()
    };
    let shape = plain().k.shape().to_vec();
    let mut strides = plain().k.strides().to_vec();
    strides[0] += strides[1];
    let far_pages = AttentionArgs {
        k: at(0x9_0000_0000, DType::BF16, &shape, Some(&strides)),
        ..plain()
    };
    let misaligned = AttentionArgs {
        q: at(0x9_0000_0004, DType::BF16, plain().q.shape(), None),
        ..plain()
    };
    for (args, symbol, reason) in [
        (plain(), "folio_sm90_decode_tma", None),
        (masked, "folio_sm90_decode_tma", None),
        (by_request, "folio_sm90_decode_tma", None),
        (
            far_pages,
            "folio_sm90_decode_gather",
            Some("pages of k and v"),
        ),
        (ranges, "folio_sm90_decode_tma", None),
        (misaligned, "folio_attention", Some("q with this address")),
    ] {
        for run in 0..3 {
            assert_eq!(taken(&handle, &args), symbol);
            let told = take(&messages, "run: ");
            match reason.filter(|_| run == 0) {
                None => assert!(told.is_empty(), "{told:?}"),
                Some(reason) => {
                    assert_eq!(told.len(), 1, "{told:?}");
                    assert!(told[0].contains(reason), "{told:?}");
                    assert!(told[0].contains(&first), "{told:?}");
                }
            }
        }
    }
    // Another handle tells its own.
    let mut other = Handle::new(&context, false).unwrap();
    other.plan_host(100, OURS).unwrap();
    take(&messages, "");
    taken(&other, &misaligned);
    assert_eq!(take(&messages, "q with this address").len(), 1);
}

/// 2^32 ranges of a request are not none.
pub fn more_ranges_than_a_kernel_counts() {
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let ranges = at(0x9_0000_0000, DType::I32, &[2, 1 << 32, 2], None);
    let args = AttentionArgs {
        mm_prefix_ranges: Some(ranges),
        ..plain()
    };
    let refused = handle.attention.run(&args, OURS);
    assert!(
        matches!(&refused, Err(Error::Shape(m)) if m.contains("mm_prefix_ranges: shape [2, 4294967296")),
        "{refused:?}"
    );
}

/// Narrower heads take the narrowest row that they fit in, by boxes where these are no slower than gathering.
pub fn head_dims_take_the_next_row() {
    for (qk, vo, kernel) in [
        (64, 64, "d64_q8_tma"),
        (8, 8, "d64_q8_gather"),
        (80, 80, "d80_q8_tma"),
        (72, 72, "d96_q8_gather"),
        (96, 80, "d96_q8_tma"),
        (104, 104, "d128_q8_gather"),
        (112, 112, "d112_q8_tma"),
        (120, 120, "d128_q8_gather"),
        (64, 128, "d128_q8_tma"),
        (136, 136, "d160_q8_gather"),
        (192, 128, "d192_dv128_q8_tma"),
        (192, 192, "d224_q8_tma"),
        (240, 256, "d256_q8_gather"),
    ] {
        let desc = AttentionDesc {
            head_dim_qk: qk,
            head_dim_vo: vo,
            ..desc(false)
        };
        let handle = Handle::of(&context(), desc).unwrap();
        let name = handle.attention.kernel();
        assert_eq!(name, format!("decode_sm90a_bf16_{kernel}"), "{qk} / {vo}");
    }
}

/// Which kernel takes how many rows for each KV head: decode's up to 16, and more over fp8 keys, unless another reads these once.
pub fn packed_rows_choose_the_kernel() {
    let many = |group: u32, qo_len: u32| AttentionDesc {
        num_qo_heads: 2 * group,
        num_kv_heads: 2,
        max_qo_len: qo_len,
        max_num_tokens: 4 * qo_len,
        ..desc(false)
    };
    let fp8 = |desc| AttentionDesc {
        kv_format: DType::F8E4M3.into(),
        ..desc
    };
    let small_pages = |desc| AttentionDesc {
        kv: paged(5),
        ..desc
    };
    let wide = |desc| AttentionDesc {
        head_dim_qk: 256,
        head_dim_vo: 256,
        ..desc
    };
    for (desc, kernel) in [
        (many(16, 1), "decode_sm90a_bf16_d128_q16_tma"),
        (many(17, 1), "prefill_sm90a_bf16_d128_q192_paged"),
        (many(7, 4), "prefill_sm90a_bf16_d128_q192_paged"),
        (wide(many(8, 1)), "decode_sm90a_bf16_d256_q8_tma"),
        (wide(many(9, 1)), "prefill_sm90a_bf16_d256_q128_paged"),
        (
            small_pages(wide(many(3, 5))),
            "prefill_sm90a_bf16_d256_q128_rows",
        ),
        (
            wide(fp8(many(9, 1))),
            "decode_sm90a_f16_kve4m3_d256_q16_tma",
        ),
        (many(4, 5), "prefill_sm90a_bf16_d128_q192_paged"),
        (fp8(many(8, 1)), "decode_sm90a_f16_kve4m3_d128_q8_tma"),
        (
            fp8(many(9, 1)),
            "decode_sm90a_f16_kve4m3_d128_q16_warpgroup_tma",
        ),
        (
            fp8(many(4, 5)),
            "decode_sm90a_f16_kve4m3_d128_q32_warpgroup_tma",
        ),
        (
            fp8(many(8, 5)),
            "decode_sm90a_f16_kve4m3_d128_q64_warpgroup_tma",
        ),
        (
            fp8(many(17, 2)),
            "decode_sm90a_f16_kve4m3_d128_q64_warpgroup_tma",
        ),
        (
            small_pages(fp8(many(8, 8))),
            "decode_sm90a_f16_kve4m3_d128_q64_warpgroup_gather",
        ),
        (
            wide(fp8(many(8, 4))),
            "decode_sm90a_f16_kve4m3_d256_q32_tma",
        ),
        (
            wide(fp8(many(8, 5))),
            "prefill_sm90a_f16_kve4m3_d256_q128_rows",
        ),
        (small_pages(many(4, 5)), "prefill_sm90a_bf16_d128_q192_rows"),
        (
            small_pages(many(17, 2)),
            "prefill_sm90a_bf16_d128_q192_rows",
        ),
        (
            fp8(many(71, 1)),
            "decode_sm90a_f16_kve4m3_d128_q64_warpgroup_tma",
        ),
        (many(64, 1), "prefill_sm90a_bf16_d128_q192_paged"),
        (many(128, 1), "prefill_sm90a_bf16_d128_q192_paged"),
        (many(71, 1), "prefill_sm90a_bf16_d128_q192_paged"),
        (many(16, 5), "prefill_sm90a_bf16_d128_q192_paged"),
        (many(43, 3), "prefill_sm90a_bf16_d128"),
    ] {
        let handle = Handle::of(&context(), desc).unwrap();
        let name = handle.attention.kernel();
        assert!(name.starts_with(kernel), "{name} for {kernel}");
    }
}

/// Warps that multiply together have no masks in memory: other decode kernels take those runs.
pub fn masks_over_fp8_choose_the_kernel() {
    let recorder = Recorder::new();
    for kernel in [
        "folio_sm90_decode_warpgroup_tma",
        "folio_sm90_decode_warpgroup_gather",
        "folio_sm90_decode_tma",
        "folio_sm90_decode_gather",
    ] {
        recorder.expect::<DecodeParams>(kernel);
    }
    for (page_size, source) in [(PAGE_SIZE, "tma"), (5, "gather")] {
        let desc = AttentionDesc {
            num_qo_heads: 24,
            num_kv_heads: 2,
            kv_format: DType::F8E4M3.into(),
            kv: paged(page_size),
            ..desc(false)
        };
        let mut handle = Handle::of(&context(), desc).unwrap();
        handle.plan_host(5, OURS).unwrap();
        let dim = i64::from(DIM);
        let rows = device_tensor(DType::BF16, &[4, 24, dim]);
        let cache = device_tensor(DType::F8E4M3, &[1 << 14, i64::from(page_size), 2, dim]);
        let plain = AttentionArgs::new(rows, cache, cache, rows);
        let masked = AttentionArgs {
            mask: Mask::Bytes(at(0x9_0000_0000, DType::U8, &[200], None)),
            ..plain
        };
        for (args, products) in [(&plain, "decode_warpgroup"), (&masked, "decode")] {
            recorder.forget();
            handle.attention.run(args, OURS).unwrap();
            let launched = &recorder.launches()[0];
            assert_eq!(launched.name(), format!("folio_sm90_{products}_{source}"));
        }
    }
}

/// What a run is launched with, to the byte.
fn launched(handle: &Handle) -> (String, [u32; 3], Vec<u8>) {
    let recorder = Recorder::new();
    recorder.forget();
    handle.attention.run(&plain(), OURS).unwrap();
    let launch = &recorder.launches()[0];
    (launch.name().to_owned(), launch.grid, launch.raw().to_vec())
}

/// A plan that fails, for whatever reason, leaves the one before it in force.
pub fn failed_plans_leave_the_previous_one() {
    let recorder = Recorder::new();
    recorder.expect::<folio::cuda::params::DecodeParams>("folio_sm90_decode_tma");
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let before = launched(&handle);

    recorder.fail("cuMemcpyHtoDAsync");
    assert_driver(handle.plan_host(5000, OURS), "cuMemcpyHtoDAsync");
    assert_eq!(launched(&handle), before);

    recorder.fail("cuLaunchKernelEx");
    assert_driver(handle.plan_device(OURS), "cuLaunchKernelEx(folio_plan)");
    assert_eq!(launched(&handle), before);

    let captured = handle.plan_host(5000, CAPTURED);
    assert!(matches!(&captured, Err(Error::Capture(_))), "{captured:?}");
    assert_eq!(launched(&handle), before);

    // And one that succeeds does not.
    handle.plan_host(5000, OURS).unwrap();
    assert_ne!(launched(&handle), before);
}

fn assert_driver(result: Result<()>, call: &str) {
    assert!(
        matches!(&result, Err(Error::Driver(message)) if message.contains(call)),
        "{result:?}"
    );
}

/// A copy that is on its way cannot be taken back: where it cannot be marked, plan waits for it.
pub fn a_copy_without_its_event_is_waited_for() {
    let recorder = Recorder::new();
    recorder.expect::<folio::cuda::params::DecodeParams>("folio_sm90_decode_tma");
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let before = launched(&handle);
    recorder.forget();
    recorder.fail("cuEventRecord");
    handle.plan_host(5000, OURS).unwrap();
    let waits = |call: &String| call == "cuStreamSynchronize";
    assert!(recorder.calls().iter().any(waits), "{:?}", recorder.calls());
    assert_ne!(launched(&handle), before);
}

/// A plan for graphs that failed binds them to nothing.
pub fn a_failed_plan_binds_no_graph() {
    let recorder = Recorder::new();
    let mut handle = Handle::new(&context(), true).unwrap();
    recorder.fail("cuLaunchKernelEx");
    assert_driver(handle.plan_device(OURS), "cuLaunchKernelEx(folio_plan)");
    handle.plan_host(100, OURS).unwrap();
    let refused = handle.plan_device(OURS);
    assert!(
        matches!(&refused, Err(Error::InvalidArgument(m)) if m.starts_with("block_table: ids at")),
        "{refused:?}"
    );
    let refused = handle.plan_csr(OURS);
    assert!(
        matches!(&refused, Err(Error::InvalidArgument(m)) if m.starts_with("kv_indices: ids at")),
        "{refused:?}"
    );
}
