//! What a host does with CUDA on its own: memory, streams, captures, contexts. Not through Folio, which
//! offers none of it.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::LazyLock;

use folio::backend::Stream;
use libloading::Library;

type Pointer = *mut c_void;

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    // SAFETY: Folio has loaded the same library before.
    unsafe { Library::new("libcuda.so.1") }.expect("the CUDA driver")
});

/// # Safety
/// `F` must be the type of that function.
unsafe fn function<F: Copy>(name: &str) -> F {
    // SAFETY: the caller's promise.
    unsafe {
        *LIBRARY
            .get::<F>(name.as_bytes())
            .expect("a driver function")
    }
}

fn check(call: &str, code: c_int) {
    assert_eq!(code, 0, "{call}");
}

/// Device memory that lives as long as the process.
pub fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    // SAFETY: the type is the driver's, and `address` is writable.
    let code = unsafe {
        function::<unsafe extern "C" fn(*mut u64, usize) -> c_int>("cuMemAlloc_v2")(
            &mut address,
            bytes,
        )
    };
    check("cuMemAlloc", code);
    address
}

/// Copies numbers to the host, after all work.
pub fn read<T: Copy + Default>(address: u64, len: usize) -> Vec<T> {
    let mut values = vec![T::default(); len];
    // SAFETY: the vector has the length that is copied to it.
    let code = unsafe {
        function::<unsafe extern "C" fn(Pointer, u64, usize) -> c_int>("cuMemcpyDtoH_v2")(
            values.as_mut_ptr().cast(),
            address,
            size_of_val(values.as_slice()),
        )
    };
    check("cuMemcpyDtoH", code);
    values
}

/// A stream of the current context, which does not wait for the legacy default stream.
pub fn new_stream() -> Stream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: `stream` is writable; 1 is CU_STREAM_NON_BLOCKING.
    let code = unsafe {
        function::<unsafe extern "C" fn(*mut Pointer, c_uint) -> c_int>("cuStreamCreate")(
            &mut stream,
            1,
        )
    };
    check("cuStreamCreate", code);
    Stream(stream as usize)
}

/// Waits for a stream.
pub fn synchronize(stream: Stream) {
    // SAFETY: the stream was made by `new_stream`.
    let code = unsafe {
        function::<unsafe extern "C" fn(Pointer) -> c_int>("cuStreamSynchronize")(
            stream.0 as Pointer,
        )
    };
    check("cuStreamSynchronize", code);
}

/// Runs `body` while `stream` is captured; the graph is dropped.
pub fn capture(stream: Stream, body: impl FnOnce()) {
    let handle = stream.0 as Pointer;
    // SAFETY: the stream was made by `new_stream`; 0 is CU_STREAM_CAPTURE_MODE_GLOBAL.
    let code = unsafe {
        function::<unsafe extern "C" fn(Pointer, c_uint) -> c_int>("cuStreamBeginCapture_v2")(
            handle, 0,
        )
    };
    check("cuStreamBeginCapture", code);
    body();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the capture was begun above and `graph` is writable.
    let code = unsafe {
        function::<unsafe extern "C" fn(Pointer, *mut Pointer) -> c_int>("cuStreamEndCapture")(
            handle, &mut graph,
        )
    };
    check("cuStreamEndCapture", code);
}

/// This thread's context.
pub fn current_context() -> Pointer {
    let mut context = std::ptr::null_mut();
    // SAFETY: `context` is writable.
    let code = unsafe {
        function::<unsafe extern "C" fn(*mut Pointer) -> c_int>("cuCtxGetCurrent")(&mut context)
    };
    check("cuCtxGetCurrent", code);
    context
}

/// A context that is not the primary one, current from its creation on.
pub struct OtherContext(Pointer);

impl OtherContext {
    /// Creates it on device 0.
    pub fn new() -> OtherContext {
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is writable; no flags.
        let code =
            unsafe {
                function::<unsafe extern "C" fn(*mut Pointer, c_uint, c_int) -> c_int>(
                    "cuCtxCreate_v2",
                )(&mut context, 0, 0)
            };
        check("cuCtxCreate", code);
        OtherContext(context)
    }

    /// Makes it not current.
    pub fn leave(&self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is writable.
        let code = unsafe {
            function::<unsafe extern "C" fn(*mut Pointer) -> c_int>("cuCtxPopCurrent_v2")(
                &mut popped,
            )
        };
        check("cuCtxPopCurrent", code);
        assert_eq!(popped, self.0);
    }
}

impl Drop for OtherContext {
    fn drop(&mut self) {
        // SAFETY: the context was created by `new`.
        let code = unsafe {
            function::<unsafe extern "C" fn(Pointer) -> c_int>("cuCtxDestroy_v2")(self.0)
        };
        check("cuCtxDestroy", code);
    }
}
