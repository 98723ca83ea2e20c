//! What the backend asks of the driver in each call, and what it makes of the driver's refusals. What the
//! launches carry is tested in `launches.rs`.

use folio::api::{Attention, append};
use folio::backend::Stream;
use folio::cuda::compiler::loader;
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::{AppendArgs, CacheForm, KvLayout};

use crate::fixture::{
    CAPTURED, DIM, FOREIGN, HEADS, Handle, OURS, PAGE_SIZE, SOMEWHERE, context, desc, device_tensor,
};
use crate::harness;
use crate::stub::Recorder;

/// The calls of `body`, by their functions.
fn calls(body: impl FnOnce()) -> Vec<String> {
    let recorder = Recorder::new();
    recorder.forget();
    body();
    let first_word = |call: &String| call.split(' ').next().unwrap_or_default().to_owned();
    recorder.calls().iter().map(first_word).collect()
}

/// Questions change nothing on the device: whose is the stream, is it captured, is the event reached; and
/// the context is pushed and popped.
fn acts(calls: &[String]) -> Vec<&str> {
    let questions = [
        "cuCtxPushCurrent",
        "cuCtxPopCurrent",
        "cuStreamGetCtx",
        "cuStreamIsCapturing",
        "cuEventQuery",
    ];
    calls
        .iter()
        .map(String::as_str)
        .filter(|call| !questions.contains(call))
        .collect()
}

/// The whole way down: decode, combine and planning kernels, of the bundle.
pub fn a_newer_device_gets_portable_kernels() {
    if loader::embedded().unwrap().is_empty() {
        harness::skip("the library was built without NVRTC");
    }
    let recorder = Recorder::new();
    let handle = Handle::new(&context(), false).unwrap();
    let kernel = handle.attention.kernel();
    assert!(kernel.contains("decode_sm80_bf16_d128"), "{kernel}");
    let loads = recorder.calls().into_iter();
    let loads: Vec<String> = loads
        .filter(|call| call.starts_with("cuModuleLoadData"))
        .collect();
    assert!(!loads.is_empty());
    assert!(loads.iter().all(|call| call.contains(" PTX ")), "{loads:?}");
}

pub fn run_is_one_launch() {
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let calls = calls(|| handle.run(OURS).unwrap());
    assert_eq!(acts(&calls), ["cuLaunchKernelEx"], "{calls:?}");
}

pub fn split_run_is_two_launches() {
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(50_000, OURS).unwrap();
    for stream in [OURS, Stream(0), Stream(1), Stream(2)] {
        let calls = calls(|| handle.run(stream).unwrap());
        assert_eq!(
            acts(&calls),
            ["cuLaunchKernelEx", "cuLaunchKernelEx"],
            "{calls:?}"
        );
    }
}

/// From the fourth plan on, the ring of staging buffers has to wait for the oldest copy.
pub fn plan_is_one_copy() {
    let mut handle = Handle::new(&context(), false).unwrap();
    for step in 0..6 {
        let calls = calls(|| handle.plan_host(100 + step, OURS).unwrap());
        let expected = match step {
            0..3 => ["cuMemcpyHtoDAsync", "cuEventRecord"].as_slice(),
            _ => ["cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"].as_slice(),
        };
        assert_eq!(acts(&calls), expected, "step {step}: {calls:?}");
    }
}

pub fn device_plan_is_one_launch() {
    let mut handle = Handle::new(&context(), false).unwrap();
    let planning = calls(|| handle.plan_device(OURS).unwrap());
    assert_eq!(acts(&planning), ["cuLaunchKernelEx"], "{planning:?}");
    let running = calls(|| handle.run(OURS).unwrap());
    assert!((1..=2).contains(&acts(&running).len()), "{running:?}");
    assert!(
        acts(&running)
            .iter()
            .all(|call| *call == "cuLaunchKernelEx"),
        "{running:?}"
    );
}

fn assert_capture(result: Result<()>) {
    assert!(
        matches!(&result, Err(Error::Capture(m)) if m.contains("graph")),
        "{result:?}"
    );
}

pub fn capture_needs_the_graph_flag() {
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let calls = calls(|| {
        assert_capture(handle.run(CAPTURED));
        assert_capture(handle.plan_device(CAPTURED));
    });
    assert!(acts(&calls).is_empty(), "{calls:?}");
}

/// Lengths on the host cannot be captured: the graph would replay the numbers of the first step.
pub fn captures_graph_plans() {
    let mut handle = Handle::new(&context(), true).unwrap();
    let refused = handle.plan_host(100, CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    let calls = calls(|| {
        handle.plan_device(CAPTURED).unwrap();
        handle.run(CAPTURED).unwrap();
    });
    assert!(
        acts(&calls).iter().all(|call| *call == "cuLaunchKernelEx"),
        "{calls:?}"
    );
    assert!((2..=3).contains(&acts(&calls).len()), "{calls:?}");
}

/// A graph reads page ids where they were in the handle's first plan. Lengths may move, and without a graph all
/// of a batch may.
pub fn graph_page_ids_keep_their_address() {
    const ELSEWHERE: usize = SOMEWHERE + (1 << 20);
    let mut free = Handle::new(&context(), false).unwrap();
    let mut graph = Handle::new(&context(), true).unwrap();
    for handle in [&mut free, &mut graph] {
        handle.plan_device_at(SOMEWHERE, SOMEWHERE, OURS).unwrap();
        handle.plan_device_at(ELSEWHERE, SOMEWHERE, OURS).unwrap();
    }
    free.plan_device_at(SOMEWHERE, ELSEWHERE, OURS).unwrap();
    let moved = graph.plan_device_at(SOMEWHERE, ELSEWHERE, OURS);
    let copied = graph.plan_host(100, OURS);
    for refused in [moved, copied] {
        let named = |m: &str| m.starts_with("block_table: ids") && m.contains("graph");
        assert!(
            matches!(&refused, Err(Error::InvalidArgument(m)) if named(m)),
            "{refused:?}"
        );
    }
}

pub fn refuses_foreign_streams() {
    let mut handle = Handle::new(&context(), false).unwrap();
    let calls_of_plan = calls(|| {
        let result = handle.plan_host(100, FOREIGN);
        assert!(
            matches!(&result, Err(Error::DeviceMismatch(_))),
            "{result:?}"
        );
    });
    assert!(acts(&calls_of_plan).is_empty(), "{calls_of_plan:?}");
    handle.plan_host(100, OURS).unwrap();
    let calls_of_run = calls(|| {
        let result = handle.run(FOREIGN);
        assert!(
            matches!(&result, Err(Error::DeviceMismatch(_))),
            "{result:?}"
        );
    });
    assert!(acts(&calls_of_run).is_empty(), "{calls_of_run:?}");
}

/// The first call loads the kernel, and may not be captured; later ones may.
pub fn append_is_one_launch() {
    let context = context();
    let (heads, dim) = (i64::from(HEADS), i64::from(DIM));
    let cache = [64, i64::from(PAGE_SIZE), heads, dim];
    let input = AppendArgs {
        key: device_tensor(DType::BF16, &[3, heads, dim]),
        value: device_tensor(DType::BF16, &[3, heads, dim]),
        k_cache: device_tensor(DType::BF16, &cache),
        v_cache: device_tensor(DType::BF16, &cache),
        slot_mapping: device_tensor(DType::I64, &[3]),
        layout: KvLayout::Nhd,
        kv_dtype: None,
        form: CacheForm::Plain,
        k_zero_points: None,
        v_zero_points: None,
        k_scale: 1.0,
        v_scale: 1.0,
        k_scales: None,
        v_scales: None,
    };
    assert!(matches!(
        append(&context, &input, CAPTURED),
        Err(Error::Capture(_))
    ));
    append(&context, &input, OURS).unwrap();
    for stream in [OURS, CAPTURED] {
        let calls = calls(|| append(&context, &input, stream).unwrap());
        assert_eq!(acts(&calls), ["cuLaunchKernelEx"], "{calls:?}");
    }
}

pub fn out_of_memory() {
    let error = Attention::new(&context(), desc(false)).err();
    assert!(matches!(&error, Some(Error::OutOfMemory(_))), "{error:?}");
}

pub fn launch_failure() {
    let mut handle = Handle::new(&context(), false).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let error = handle.run(OURS).unwrap_err();
    assert!(
        matches!(&error, Error::Driver(m) if m.contains("unspecified launch failure")),
        "{error:?}"
    );
}
