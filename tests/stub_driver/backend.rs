//! What the backend asks of the driver in each call, and what it makes of the driver's refusals. The stub
//! computes nothing, so addresses are made up; the kernels come from the bundle, and without one these
//! cases are skipped.

use folio::api::{Attention, BatchInput, Context, Target, Workspace, append};
use folio::backend::Stream;
use folio::cuda::compiler::loader;
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::log::Logger;
use folio::problem::{AppendArgs, AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage};
use folio::tensor::{Device, Tensor};

use crate::harness;
use crate::stub::Recorder;

const PAGE_SIZE: u32 = 16;
const HEADS: u32 = 8;
const DIM: u32 = 128;

/// Streams of stub.c.
const OURS: Stream = Stream(0x1000);
const FOREIGN: Stream = Stream(0x2000);
const CAPTURED: Stream = Stream(0x3000);

/// Device memory that nobody looks into.
const SOMEWHERE: usize = 0x7000_0000;

fn context() -> Context {
    if loader::embedded().unwrap().is_empty() {
        harness::skip("the library was built without NVRTC");
    }
    let target = Target::Cuda { ordinal: 0 };
    Context::new(target, Logger::silent()).unwrap()
}

fn desc(graph: bool) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Decode,
        q_dtype: DType::BF16,
        kv_dtype: DType::BF16,
        o_dtype: DType::BF16,
        num_qo_heads: HEADS,
        num_kv_heads: HEADS,
        head_dim_qk: DIM,
        head_dim_vo: DIM,
        kv: KvStorage::Paged {
            page_size: PAGE_SIZE,
            layout: KvLayout::Nhd,
        },
        max_batch_size: 4,
        max_qo_len: 1,
        max_num_tokens: 4,
        max_kv_len: 1 << 16,
        max_num_pages: 0,
        graph,
        batch_invariant: false,
    }
}

fn device_tensor(dtype: DType, shape: &[i64]) -> Tensor {
    device_tensor_at(SOMEWHERE, dtype, shape)
}

fn device_tensor_at(address: usize, dtype: DType, shape: &[i64]) -> Tensor {
    // SAFETY: the stub's device never touches memory.
    let tensor = unsafe {
        Tensor::new(
            "test",
            address as *mut u8,
            Device::Cuda(0),
            dtype,
            shape,
            None,
        )
    };
    tensor.unwrap()
}

/// A handle with room for its plans.
struct Handle {
    attention: Attention,
    host: Vec<u64>,
}

impl Handle {
    fn new(context: &Context, graph: bool) -> Result<Handle> {
        let attention = Attention::new(context, desc(graph))?;
        let words = attention.workspace().host_bytes / 8 + 1024;
        Ok(Handle {
            attention,
            host: vec![0; words],
        })
    }

    fn plan(&mut self, batch: &BatchInput, stream: Stream) -> Result<()> {
        let info = self.attention.workspace();
        let start = self.host.as_mut_ptr() as usize;
        let workspace = Workspace {
            device: SOMEWHERE.next_multiple_of(info.alignment),
            host: start.next_multiple_of(info.alignment),
        };
        self.attention.plan(
            batch,
            &workspace,
            (info.device_bytes, info.host_bytes),
            stream,
        )
    }

    /// Plans two requests of `kv_len` keys each from host lengths.
    fn plan_host(&mut self, kv_len: i32, stream: Stream) -> Result<()> {
        let columns = (kv_len as usize).div_ceil(PAGE_SIZE as usize);
        let table: Vec<i32> = (0..2 * columns as i32).collect();
        let lengths = [kv_len; 2];
        let batch = BatchInput {
            kv_len: host_tensor(&lengths, &[2]),
            block_table: host_tensor(&table, &[2, columns as i64]),
            ..BatchInput::default()
        };
        self.plan(&batch, stream)
    }

    /// Plans two requests from device lengths.
    fn plan_device(&mut self, stream: Stream) -> Result<()> {
        self.plan_device_at(SOMEWHERE, SOMEWHERE, stream)
    }

    /// The same, of lengths and page ids at these addresses.
    fn plan_device_at(&mut self, lengths: usize, ids: usize, stream: Stream) -> Result<()> {
        let batch = BatchInput {
            kv_len: Some(device_tensor_at(lengths, DType::I32, &[2])),
            block_table: Some(device_tensor_at(ids, DType::I32, &[2, 64])),
            ..BatchInput::default()
        };
        self.plan(&batch, stream)
    }

    fn run(&self, stream: Stream) -> Result<()> {
        let heads = i64::from(HEADS);
        let dim = i64::from(DIM);
        let cache = [1 << 14, i64::from(PAGE_SIZE), heads, dim];
        let input = AttentionArgs::new(
            device_tensor(DType::BF16, &[4, heads, dim]),
            device_tensor(DType::BF16, &cache),
            device_tensor(DType::BF16, &cache),
            device_tensor(DType::BF16, &[4, heads, dim]),
        );
        self.attention.run(&input, stream)
    }
}

fn host_tensor(values: &[i32], shape: &[i64]) -> Option<Tensor> {
    let data = values.as_ptr() as *mut u8;
    // SAFETY: every caller keeps `values` until `plan` has returned.
    let tensor = unsafe { Tensor::new("test", data, Device::Cpu, DType::I32, shape, None) };
    Some(tensor.unwrap())
}

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

/// The whole way down: decode, combine and planning kernels.
pub fn a_newer_device_gets_portable_kernels() {
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
        let named = |m: &str| m.contains("kv_indices or block_table") && m.contains("graph");
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
