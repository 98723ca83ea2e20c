//! The driver functions that Folio calls, looked up once in the driver library. Nothing else of the
//! driver can be called: a function that is not in this table has no address here, and a table exists
//! only when every address was found.
//!
//! Every function returns its `CUresult` as a plain `u32`: a newer driver may answer a code that the
//! generated Rust enum does not know, which would be undefined behaviour the moment it is an enum.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use cudarc::driver::sys;
use libloading::Library;

use super::version::{MIN_VERSION, version_name};
use crate::error::{Error, Result};

macro_rules! symbols {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?);)*) => {
        /// Addresses of driver functions, named as the driver names them.
        #[allow(non_snake_case)]
        pub(super) struct Symbols {
            $(pub(super) $name: unsafe extern "C" fn($($arg: $type),*) -> u32,)*
        }

        impl Symbols {
            /// Looks every function up.
            ///
            /// # Safety
            /// `library` must be a CUDA driver library, and must stay loaded for as long as the table.
            pub(super) unsafe fn load(library: &Library) -> Result<Symbols> {
                Ok(Symbols {
                    // SAFETY: the signatures below are those of the driver's header, and the caller
                    // promises that this is the driver.
                    $($name: unsafe { lookup(library, stringify!($name))? },)*
                })
            }
        }
    };
}

symbols! {
    fn cuInit(flags: c_uint);
    fn cuGetErrorName(code: u32, text: *mut *const c_char);
    fn cuGetErrorString(code: u32, text: *mut *const c_char);

    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, device: sys::CUdevice);

    fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    fn cuCtxPushCurrent_v2(context: sys::CUcontext);
    fn cuCtxPopCurrent_v2(context: *mut sys::CUcontext);

    fn cuStreamGetCtx(stream: sys::CUstream, context: *mut sys::CUcontext);
    fn cuStreamSynchronize(stream: sys::CUstream);
    fn cuStreamIsCapturing(stream: sys::CUstream, status: *mut u32);

    fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    fn cuModuleUnload(module: sys::CUmodule);
    fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    fn cuFuncSetAttribute(function: sys::CUfunction, attribute: u32, value: c_int);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: sys::CUfunction,
        threads: c_int,
        shared_bytes: usize,
    );
    fn cuLaunchKernelEx(
        config: *const sys::CUlaunchConfig,
        function: sys::CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuTensorMapEncodeTiled(
        map: *mut c_void,
        data_type: u32,
        rank: u32,
        address: *mut c_void,
        extents: *const u64,
        strides: *const u64,
        box_extents: *const u32,
        element_strides: *const u32,
        interleave: u32,
        swizzle: u32,
        l2_promotion: u32,
        oob_fill: u32,
    );

    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, pointer: sys::CUdeviceptr);

    fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: sys::CUevent);
    fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    fn cuEventQuery(event: sys::CUevent);
    fn cuEventSynchronize(event: sys::CUevent);
    fn cuMemcpyHtoDAsync_v2(
        device: sys::CUdeviceptr,
        host: *const c_void,
        bytes: usize,
        stream: sys::CUstream,
    );
}

/// # Safety
/// `F` must be the type of the function of that name.
unsafe fn lookup<F: Copy>(library: &Library, name: &str) -> Result<F> {
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| {
        Error::NoDriver(format!(
            "the CUDA driver library has no function {name}; a driver of CUDA {} or newer does",
            version_name(MIN_VERSION)
        ))
    })
}
