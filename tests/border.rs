//! Whatever numbers a desc holds, create answers with a handle or with a sentence, never with an internal
//! error; and what it promises as workspace is a number, not an overflow.

use folio::ffi::*;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::ffi::CStr;
use std::ptr::null_mut;

/// Numbers that matter: small ones, powers of two, the ends of the types.
fn number() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0u32..300,
        2 => (0u32..32, -1i64..2).prop_map(|(bit, off)| ((1i64 << bit) + off) as u32),
        1 => Just(i32::MAX as u32),
        1 => Just(u32::MAX),
        1 => any::<u32>(),
    ]
}

/// Mostly types that Folio knows.
/// The default, or none.
const NO_DTYPE: folio_dtype = folio_dtype {
    code: 0,
    bits: 0,
    lanes: 0,
};

fn dtype() -> impl Strategy<Value = folio_dtype> {
    let known = [
        (2, 32),
        (2, 16),
        (4, 16),
        (10, 8),
        (12, 8),
        (0, 32),
        (1, 8),
        (0, 8),
        (0, 0),
    ];
    prop_oneof![
        8 => prop::sample::select(known.to_vec()).prop_map(|(code, bits)| (code, bits, u16::from(bits != 0))),
        1 => any::<(u8, u8, u16)>(),
    ]
    .prop_map(|(code, bits, lanes)| folio_dtype { code, bits, lanes })
}

fn heads() -> impl Strategy<Value = (u32, u32)> {
    prop_oneof![
        3 => (1u32..10, 1u32..10).prop_map(|(kv, group)| (kv * group, kv)),
        1 => (number(), number()),
    ]
}

fn dim() -> impl Strategy<Value = u32> {
    prop_oneof![3 => (1u32..33).prop_map(|n| n * 8), 1 => number()]
}

fn error() -> folio_error {
    folio_error {
        struct_size: size_of::<folio_error>() as u32,
        status: FOLIO_OK,
        message: [0; 504],
    }
}

fn context() -> *mut folio_context {
    let desc = folio_context_desc {
        struct_size: size_of::<folio_context_desc>() as u32,
        flags: 0,
        device_type: FOLIO_DEVICE_CPU,
        device_id: 0,
        num_threads: 2,
        log_level: 0,
        log: None,
        log_user: null_mut(),
        cpus: std::ptr::null(),
        parallel_for: None,
        parallel_for_user: null_mut(),
        num_cpus: 0,
        reserved: 0,
    };
    let mut context = null_mut();
    // SAFETY: valid pointers.
    let status = unsafe { folio_context_create(&desc, &mut context, null_mut()) };
    assert_eq!(status, FOLIO_OK);
    context
}

/// A failure names what failed and is not a bug's.
fn explained(status: folio_status, err: &folio_error) -> Result<(), TestCaseError> {
    // SAFETY: the message is NUL-terminated.
    let message = unsafe { CStr::from_ptr(err.message.as_ptr()) }.to_string_lossy();
    prop_assert_ne!(status, FOLIO_ERR_INTERNAL, "{}", message);
    prop_assert_eq!(status, err.status);
    prop_assert!(message.contains(':') && message.len() > 10, "{}", message);
    Ok(())
}

fn info() -> folio_workspace_info {
    folio_workspace_info {
        struct_size: size_of::<folio_workspace_info>() as u32,
        reserved: 0,
        device_bytes: 0,
        host_bytes: 0,
        alignment: 0,
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_decode_desc_is_taken_or_explained(
        (q_dtype, kv_dtype, o_dtype) in (dtype(), dtype(), dtype()),
        kv_format in prop_oneof![2 => Just(0), 2 => -1i32..7],
        (num_qo_heads, num_kv_heads) in heads(),
        (head_dim_qk, head_dim_vo) in (dim(), dim()),
        (page_size, max_batch_size, max_qo_len, max_kv_len) in (number(), number(), number(), number()),
        (flags, kv_layout, max_num_pages) in (0u32..5, -1i32..3, prop_oneof![Just(0), any::<u64>(), 0u64..1000]),
    ) {
        let desc = folio_decode_desc {
            struct_size: size_of::<folio_decode_desc>() as u32,
            flags, q_dtype, kv_dtype, o_dtype, kv_layout, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
            page_size, max_batch_size, max_qo_len, max_kv_len, max_num_pages, kv_format, reserved: 0,
        };
        let (mut err, mut handle, mut info) = (error(), null_mut(), info());
        let context = context();
        // SAFETY: valid pointers throughout; each object is destroyed once.
        unsafe {
            let status = folio_decode_create(context, &desc, &mut handle, &mut err);
            folio_context_destroy(context);
            if status != FOLIO_OK {
                prop_assert!(handle.is_null());
                return explained(status, &err);
            }
            prop_assert_eq!(folio_decode_workspace(handle, &mut info, &mut err), FOLIO_OK);
            prop_assert!(info.alignment.is_power_of_two() && info.host_bytes < 1 << 62);
            folio_decode_destroy(handle);
        }
    }

    #[test]
    fn any_prefill_desc_is_taken_or_explained(
        (q_dtype, kv_dtype, o_dtype) in (dtype(), dtype(), dtype()),
        new_kv_dtype in prop_oneof![3 => Just(NO_DTYPE), 1 => dtype()],
        kv_format in prop_oneof![2 => Just(0), 2 => -1i32..7],
        (num_qo_heads, num_kv_heads) in heads(),
        (head_dim_qk, head_dim_vo) in (dim(), dim()),
        (page_size, max_batch_size, max_qo_len, max_kv_len) in (number(), number(), number(), number()),
        (flags, kv_layout, kv_storage, max_num_tokens) in (0u32..5, -1i32..3, -1i32..3, number()),
    ) {
        let desc = folio_prefill_desc {
            struct_size: size_of::<folio_prefill_desc>() as u32,
            flags, q_dtype, kv_dtype, o_dtype, kv_layout, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo,
            kv_storage, page_size, max_batch_size, max_num_tokens, max_qo_len, max_kv_len, max_num_pages: 0, kv_format, new_kv_dtype,
        };
        let (mut err, mut handle, mut info) = (error(), null_mut(), info());
        let context = context();
        // SAFETY: as above.
        unsafe {
            let status = folio_prefill_create(context, &desc, &mut handle, &mut err);
            folio_context_destroy(context);
            if status != FOLIO_OK {
                prop_assert!(handle.is_null());
                return explained(status, &err);
            }
            prop_assert_eq!(folio_prefill_workspace(handle, &mut info, &mut err), FOLIO_OK);
            prop_assert!(info.alignment.is_power_of_two() && info.host_bytes < 1 << 62);
            folio_prefill_destroy(handle);
        }
    }
}
