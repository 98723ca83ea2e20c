//! The driver layer on a real GPU, below any attention: contexts, streams, launches with clusters,
//! programmatic dependence and tensor maps, and every kernel of the bundle. Skipped without a device.
#![allow(unsafe_code)]

mod gpu;
#[path = "../harness/mod.rs"]
mod harness;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use folio::backend::Stream;
use folio::cuda::compiler::compile;
use folio::cuda::compiler::loader::{self, Loader};
use folio::cuda::compiler::nvrtc::Nvrtc;
use folio::cuda::compiler::unit::{Sources, Unit};
use folio::cuda::driver::{
    Context, Driver, Event, L2Promotion, Launch, Module, Swizzle, TensorMap, Tiled, device_count,
};
use folio::cuda::kernels;
use folio::dtype::DType;
use folio::error::Error;
use folio::log::Logger;
use harness::case;

fn main() -> ExitCode {
    let cases = [
        case("properties", (), properties),
        case("host_context_is_restored", (), host_context_is_restored),
        case("streams", (), streams),
        case("uploads_and_events", (), uploads_and_events),
        case(
            "dependent_cluster_launch_with_tensor_map",
            (),
            dependent_cluster_launch,
        ),
        case("launch_failures_are_told", (), launch_failures_are_told),
        case("every_bundled_kernel_loads", (), every_bundled_kernel_loads),
        case("portable_ptx_loads", (), portable_ptx_loads),
        case(
            "a_kernel_outside_the_bundle_is_compiled",
            (),
            kernel_outside_the_bundle,
        ),
    ];
    harness::main(&cases, |_, command| {
        let cache = std::env::temp_dir().join(format!("folio-device-{}", std::process::id()));
        command.env("FOLIO_CACHE_DIR", cache);
        match Driver::get().and_then(Driver::device_count) {
            Ok(1..) => Ok(()),
            Ok(0) => Err("no CUDA device".into()),
            Err(reason) => Err(format!("no CUDA device ({reason})")),
        }
    })
}

fn context() -> Arc<Context> {
    Context::retain(Driver::get().unwrap(), 0).unwrap()
}

fn properties() {
    let driver = Driver::get().unwrap();
    let device = driver.device(0).unwrap();
    println!("{device:?} {driver:?}");
    assert!(device.compute_capability >= (5, 0) && device.sm_count > 0);
    assert!(device.l2_bytes > 0 && device.shared_bytes_per_block >= 48 * 1024);
    assert!(!device.name.is_empty());
    let beyond = device_count() as i32;
    assert!(matches!(driver.device(beyond), Err(Error::NoDevice(_))));
}

fn host_context_is_restored() {
    let context = context();
    assert!(gpu::current_context().is_null());
    let own = gpu::OtherContext::new();
    let host = gpu::current_context();
    assert!(!host.is_null());
    {
        let _current = context.enter().unwrap();
        assert_ne!(gpu::current_context(), host);
    }
    assert_eq!(gpu::current_context(), host);
    drop(own);
}

fn streams() {
    let context = context();
    let other = gpu::OtherContext::new();
    let foreign = gpu::new_stream();
    drop_current(&other);
    let current = context.enter().unwrap();
    let error = current.check_stream(foreign).unwrap_err();
    assert!(matches!(error, Error::DeviceMismatch(_)), "{error:?}");

    let stream = gpu::new_stream();
    for stream in [stream, Stream(0), Stream(1), Stream(2)] {
        current.check_stream(stream).unwrap();
        assert!(!current.is_capturing(stream).unwrap());
    }
    gpu::capture(stream, || {
        assert!(current.is_capturing(stream).unwrap());
        assert!(
            !current.is_capturing(Stream(0)).unwrap(),
            "asked while another stream captures"
        );
    });
    assert!(!current.is_capturing(stream).unwrap());
}

/// Takes the context off this thread; its streams stay.
fn drop_current(other: &gpu::OtherContext) {
    other.leave();
    assert!(gpu::current_context().is_null());
}

fn uploads_and_events() {
    let context = context();
    let current = context.enter().unwrap();
    let stream = gpu::new_stream();
    let memory = gpu::allocate(1 << 20);
    let bytes: Vec<u8> = (0..1 << 20).map(|i| (i % 253) as u8).collect();
    let event = Event::new(&context).unwrap();
    assert!(
        event.is_reached(&current).unwrap(),
        "nothing was recorded yet"
    );
    // SAFETY: the memory has the length of `bytes`, which are pageable.
    unsafe { current.upload(memory, &bytes, stream) }.unwrap();
    event.record(&current, stream).unwrap();
    event.wait(&current).unwrap();
    assert!(event.is_reached(&current).unwrap());
    assert_eq!(gpu::read::<u8>(memory, 1 << 20), bytes);
}

/// What [`PROBE`]'s kernels take.
#[repr(C)]
#[derive(Clone, Copy)]
struct Params {
    data: u64,
    out: u64,
}

/// `fill` lets its successor start at once and writes late; `gather` waits for it, and then each block
/// reads its own tile of 8 rows of 32 numbers through the tensor map. Block 0 of each cluster adds the
/// sum of block 1, out of that block's shared memory.
const PROBE: &str = r#"
struct Params { float *data; float *out; };
struct alignas(128) Map { unsigned long long words[16]; };

extern "C" __global__ void fill(const Params p) {
    asm volatile("griddepcontrol.launch_dependents;");
    long long start = clock64();
    while (clock64() - start < 2000000) {}
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    p.data[i] = (float)(i % 1000);
}

extern "C" __global__ void gather(const Params p, const __grid_constant__ Map map) {
    extern __shared__ __align__(128) float tile[];
    __shared__ unsigned long long barrier;
    __shared__ float sum;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier);
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
        asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(bar));
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];"
                     :: "r"((unsigned)__cvta_generic_to_shared(tile)), "l"(&map), "r"(0), "r"(8 * blockIdx.x), "r"(bar)
                     : "memory");
        unsigned done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(bar) : "memory");
        float total = 0;
        for (int i = 0; i < 256; ++i) total += tile[i];
        sum = total;
    }
    asm volatile("barrier.cluster.arrive.release.aligned;");
    asm volatile("barrier.cluster.wait.acquire.aligned;");
    if (threadIdx.x == 0) {
        float other = 0;
        if (rank == 0) {
            unsigned remote;
            asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(remote) : "r"((unsigned)__cvta_generic_to_shared(&sum)));
            asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(other) : "r"(remote));
        }
        p.out[blockIdx.x] = sum + other;
    }
    asm volatile("barrier.cluster.arrive.release.aligned;");
    asm volatile("barrier.cluster.wait.acquire.aligned;");
}

extern "C" __global__ void __launch_bounds__(128) small(const Params p) {}
"#;

/// Compiles [`PROBE`] for the device, or skips.
fn probe(context: &Arc<Context>) -> Arc<Module> {
    if context.device().compute_capability < (9, 0) {
        harness::skip("the device has no clusters and no tensor memory accelerator");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(compile::NVRTC_FOLDER);
    let nvrtc = Nvrtc::find(&[folder]).unwrap_or_else(|reason| harness::skip(&reason.to_string()));
    let sources = Sources::new([("probe.cu".to_owned(), PROBE.to_owned())]);
    let unit = Unit {
        source: "probe.cu".into(),
        defines: Vec::new(),
        target: kernels::target(context.device().compute_capability),
    };
    let compiled = compile::compile(&unit, &sources, &nvrtc, None).unwrap();
    Module::load(context, &compiled.image.unpack().unwrap()).unwrap()
}

fn dependent_cluster_launch() {
    const BLOCKS: u32 = 64;
    let context = context();
    let module = probe(&context);
    let fill = module.function("fill", 0).unwrap();
    let gather = module.function("gather", 100 * 1024).unwrap();
    let current = context.enter().unwrap();
    assert_eq!(gather.blocks_per_sm(&current, 128).unwrap(), 2);
    let stream = gpu::new_stream();
    let params = Params {
        data: gpu::allocate(BLOCKS as usize * 256 * 4),
        out: gpu::allocate(BLOCKS as usize * 4),
    };
    let tiled = Tiled {
        dtype: DType::F32,
        address: params.data,
        extents: &[32, u64::from(BLOCKS) * 8],
        strides: &[128],
        box_extents: &[32, 8],
        element_strides: &[1, 1],
        swizzle: Swizzle::None,
        l2_promotion: L2Promotion::Bytes128,
    };
    let map = TensorMap::encode(context.driver(), &tiled).unwrap();
    let first = Launch {
        grid: [BLOCKS, 1, 1],
        threads: 256,
        cluster: 1,
        dependent: false,
        stream,
    };
    let second = Launch {
        threads: 128,
        cluster: 2,
        dependent: true,
        ..first
    };
    // SAFETY: the kernels take these parameters, and write within the two allocations.
    unsafe {
        first.enqueue(&current, &fill, &params, &[]).unwrap();
        second.enqueue(&current, &gather, &params, &[map]).unwrap();
    }
    gpu::synchronize(stream);
    let tile = |block: u32| {
        (0..256)
            .map(|i| ((block * 256 + i) % 1000) as f32)
            .sum::<f32>()
    };
    let expected: Vec<f32> = (0..BLOCKS)
        .map(|block| tile(block) + if block % 2 == 0 { tile(block + 1) } else { 0.0 })
        .collect();
    assert_eq!(gpu::read::<f32>(params.out, BLOCKS as usize), expected);
}

fn launch_failures_are_told() {
    let context = context();
    let function = probe(&context).function("small", 0).unwrap();
    let current = context.enter().unwrap();
    let launch = Launch {
        grid: [1, 1, 1],
        threads: 256,
        cluster: 1,
        dependent: false,
        stream: Stream(0),
    };
    // SAFETY: the kernel touches no memory, and allows 128 threads.
    let error = unsafe { launch.enqueue(&current, &function, &Params { data: 0, out: 0 }, &[]) };
    let error = error.unwrap_err();
    assert!(
        matches!(&error, Error::Driver(m) if m.contains("small") && m.contains("CUDA_ERROR_INVALID_VALUE")),
        "{error:?}"
    );
}

fn every_bundled_kernel_loads() {
    let context = context();
    let loader = Loader::new(&context, Logger::silent()).unwrap();
    let bundle = loader::embedded().unwrap();
    let target = kernels::target(context.device().compute_capability);
    let rows: Vec<_> = kernels::table()
        .filter(|row| bundle.contains(&Unit::new(row, &target)))
        .filter(|row| row.arch.runs_on(context.device().compute_capability))
        .collect();
    if rows.is_empty() {
        harness::skip(&format!("the bundle holds no kernel for {target}"));
    }
    let current = context.enter().unwrap();
    for row in rows {
        let function = loader
            .load(row)
            .unwrap_or_else(|error| panic!("{}: {error}", row.name));
        let blocks = function.blocks_per_sm(&current, row.threads).unwrap();
        assert!(blocks > 0, "{} does not fit on a multiprocessor", row.name);
    }
}

/// What newer devices load, which this one can load too. One kernel of each source: the driver compiles them.
fn portable_ptx_loads() {
    let context = context();
    let bundle = loader::embedded().unwrap();
    let mut sources = Vec::new();
    for row in kernels::table().filter(|row| row.bundled) {
        let Some(target) = row.arch.ptx_target() else {
            continue;
        };
        if sources.contains(&row.source) {
            continue;
        }
        let Some(ptx) = bundle.image(&Unit::new(row, target)).unwrap() else {
            harness::skip("the library was built without NVRTC");
        };
        let module =
            Module::load(&context, &ptx).unwrap_or_else(|error| panic!("{}: {error}", row.name));
        module.function(row.symbol, row.shared_bytes).unwrap();
        sources.push(row.source);
    }
    assert!(sources.len() > 4, "{sources:?}");
}

fn kernel_outside_the_bundle() {
    let context = context();
    let loader = Loader::new(&context, Logger::silent()).unwrap();
    let cc = context.device().compute_capability;
    let mut row = kernels::table()
        .find(|row| row.arch.runs_on(cc))
        .unwrap()
        .clone();
    row.defines.push("NOT_IN_THE_BUNDLE".into());
    if let Err(reason) = Nvrtc::find(&[]) {
        assert!(matches!(loader.load(&row), Err(Error::Unsupported(_))));
        harness::skip(&reason.to_string());
    }
    loader.load(&row).unwrap();
    let cache = std::env::var("FOLIO_CACHE_DIR").unwrap();
    let cached = std::fs::read_dir(&cache).unwrap().count();
    assert_eq!(cached, 1, "the result is kept for the next process");
    Loader::new(&context, Logger::silent())
        .unwrap()
        .load(&row)
        .unwrap();
    std::fs::remove_dir_all(cache).unwrap();
}
