//! What a host does with CUDA on its own: device memory for the suite's tensors, streams, graphs. Not
//! through Folio, which offers none of it.
#![allow(unsafe_code)]

use crate::common::memory::Memory;
use cudarc::driver::sys;
use folio::api::Stream;
use folio::tensor::Device;

fn check(call: &str, result: sys::CUresult) {
    assert_eq!(result as u32, 0, "{call}");
}

/// Makes device 0's primary context current on this thread, as the CUDA runtime does.
pub fn enter() {
    // SAFETY: plain driver calls with writable results; the caller found a device before.
    unsafe {
        check("cuInit", sys::cuInit(0));
        let mut context = std::ptr::null_mut();
        check(
            "cuDevicePrimaryCtxRetain",
            sys::cuDevicePrimaryCtxRetain(&mut context, 0),
        );
        check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context));
    }
}

/// Device 0's memory.
pub struct DeviceMemory;

impl Memory for DeviceMemory {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn alloc(&self, bytes: usize) -> usize {
        let mut address = 0;
        // SAFETY: `address` is writable.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut address, bytes.max(1))
        });
        address as usize
    }

    fn free(&self, address: usize, _: usize) {
        // SAFETY: the address is one of `alloc`; the call waits for work that uses it.
        check("cuMemFree", unsafe { sys::cuMemFree_v2(address as u64) });
    }

    fn upload(&self, address: usize, bytes: &[u8]) {
        // SAFETY: `alloc` made at least this many bytes.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(address as u64, bytes.as_ptr().cast(), bytes.len())
        });
        // The driver may return while the last bytes are on their way, and streams that do not block are not ordered behind it.
        // SAFETY: the default stream.
        check("cuStreamSynchronize", unsafe {
            sys::cuStreamSynchronize(std::ptr::null_mut())
        });
    }

    fn download(&self, address: usize, bytes: &mut [u8]) {
        synchronize_all();
        // SAFETY: as in `upload`.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), address as u64, bytes.len())
        });
    }
}

/// Page-locked host memory.
pub struct PinnedMemory;

impl Memory for PinnedMemory {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn is_page_locked(&self) -> bool {
        true
    }

    fn alloc(&self, bytes: usize) -> usize {
        let mut address = std::ptr::null_mut();
        // SAFETY: `address` is writable.
        check("cuMemHostAlloc", unsafe {
            sys::cuMemHostAlloc(&mut address, bytes.max(1), 0)
        });
        address as usize
    }

    fn free(&self, address: usize, _: usize) {
        // SAFETY: the address is one of `alloc`.
        check("cuMemFreeHost", unsafe {
            sys::cuMemFreeHost(address as *mut _)
        });
    }

    fn upload(&self, address: usize, bytes: &[u8]) {
        // SAFETY: `alloc` made at least this many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) }
    }

    fn download(&self, address: usize, bytes: &mut [u8]) {
        synchronize_all();
        // SAFETY: as in `upload`.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len())
        }
    }
}

/// Waits for everything on the device.
pub fn synchronize_all() {
    // SAFETY: a context is current.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() });
}

/// Sets `bytes` bytes of device memory.
pub fn fill(address: usize, byte: u8, bytes: usize) {
    // SAFETY: the caller's memory has this many bytes.
    check("cuMemsetD8", unsafe {
        sys::cuMemsetD8_v2(address as u64, byte, bytes)
    });
}

/// Copies within the device.
pub fn copy(target: usize, source: usize, bytes: usize) {
    // SAFETY: both ranges are the caller's.
    check("cuMemcpyDtoD", unsafe {
        sys::cuMemcpyDtoD_v2(target as u64, source as u64, bytes)
    });
}

/// Bytes of device memory that nobody uses.
pub fn free_bytes() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are writable.
    check("cuMemGetInfo", unsafe {
        sys::cuMemGetInfo_v2(&mut free, &mut total)
    });
    free
}

/// A stream that does not wait for the legacy default stream.
pub fn new_stream() -> Stream {
    let mut stream = std::ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: `stream` is writable.
    check("cuStreamCreate", unsafe {
        sys::cuStreamCreate(&mut stream, flags)
    });
    Stream(stream as usize)
}

/// Work that was captured from a stream.
pub struct Graph {
    executable: sys::CUgraphExec,
    num_nodes: usize,
}

/// Captures what `body` puts on `stream`.
pub fn capture(stream: Stream, body: impl FnOnce()) -> Graph {
    let handle = stream.0 as sys::CUstream;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
    let mut num_nodes = 0;
    // SAFETY: the stream was made by `new_stream`, and the results are writable.
    unsafe {
        check(
            "cuStreamBeginCapture",
            sys::cuStreamBeginCapture_v2(handle, mode),
        );
        body();
        check(
            "cuStreamEndCapture",
            sys::cuStreamEndCapture(handle, &mut graph),
        );
        check(
            "cuGraphGetNodes",
            sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut num_nodes),
        );
        check(
            "cuGraphInstantiate",
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0),
        );
    }
    Graph {
        executable,
        num_nodes,
    }
}

impl Graph {
    /// Kernels, copies and the like that were captured.
    pub fn num_nodes(&self) -> usize {
        self.num_nodes
    }

    /// Puts the captured work on a stream.
    pub fn launch(&self, stream: Stream) {
        // SAFETY: the graph was instantiated by `capture`.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.executable, stream.0 as sys::CUstream)
        });
    }
}
