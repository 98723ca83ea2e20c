//! The CUDA driver, opened at run time, and the devices it knows. A [`Driver`] is the proof that the
//! library is there, complete, new enough and initialised; every other type of this backend is made
//! from one, so no driver call can come before the check. No context, memory or kernel is touched here.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;

use cudarc::driver::sys;
use libloading::Library;
use once_cell::sync::OnceCell;

use super::symbols::Symbols;
use super::version::{MIN_VERSION, version_name};
use crate::error::{Error, Result};

/// The driver's soname, which every installation has, then the name that only development packages
/// have. (Toolkits put a stub library under the second name, which cannot do anything.)
const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Successful outcomes only: a host may install or preload the library after a first failure.
static SYMBOLS: OnceCell<Loaded> = OnceCell::new();

struct Loaded {
    symbols: Symbols,
    version: u32,
}

/// Proof that the CUDA driver can be called.
#[derive(Clone, Copy)]
pub struct Driver(&'static Loaded);

impl Driver {
    /// Opens and checks the driver, or returns what an earlier call found.
    ///
    /// # Errors
    /// [`Error::NoDriver`] when the library is missing, lacks a function or is a toolkit's stub;
    /// [`Error::DriverTooOld`]; [`Error::NoDevice`] when it finds no GPU; [`Error::Driver`] otherwise.
    pub fn get() -> Result<Driver> {
        SYMBOLS.get_or_try_init(preflight).map(Driver)
    }

    /// The CUDA version of the driver, as in 13000 for 13.0.
    pub fn version(self) -> u32 {
        self.0.version
    }

    /// Whether cubins of the compiler `version` (as in 13000) can be loaded: a driver takes those of
    /// every release of its own major version ("minor version compatibility") and of older ones.
    pub fn accepts_cubins_of(self, version: u32) -> bool {
        version / 1000 <= self.version() / 1000
    }

    /// The number of devices.
    pub fn device_count(self) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        let code = unsafe { (self.symbols().cuDeviceGetCount)(&mut count) };
        self.check("cuDeviceGetCount", code)?;
        Ok(count.max(0) as u32)
    }

    /// What the device can do.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is no such device.
    pub fn device(self, ordinal: i32) -> Result<DeviceInfo> {
        let count = self.device_count()?;
        if !(0..count as i64).contains(&i64::from(ordinal)) {
            return Err(Error::NoDevice(format!(
                "device_id {ordinal} does not exist; the CUDA driver knows {count} device(s)"
            )));
        }
        let mut handle = 0;
        // SAFETY: `handle` is writable.
        let code = unsafe { (self.symbols().cuDeviceGet)(&mut handle, ordinal) };
        self.check("cuDeviceGet", code)?;
        use sys::CUdevice_attribute as A;
        let attribute = |attribute| self.attribute(handle, attribute);
        let own = (
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let named = std::env::var_os(KERNELS_OF).map(|named| named.to_string_lossy().into_owned());
        Ok(DeviceInfo {
            ordinal,
            handle,
            name: self.device_name(handle)?,
            compute_capability: kernels_of(own, named.as_deref())?,
            own_compute_capability: own,
            sm_count: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            memory_bytes_per_us: memory_bytes_per_us(
                attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?,
                attribute(A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
            ),
            shared_bytes_per_block: attribute(
                A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
        })
    }

    fn device_name(self, device: sys::CUdevice) -> Result<String> {
        let mut name = [0u8; 256];
        // SAFETY: the driver writes at most the given length, with its terminating zero.
        let code = unsafe {
            (self.symbols().cuDeviceGetName)(
                name.as_mut_ptr().cast::<c_char>(),
                name.len() as c_int - 1,
                device,
            )
        };
        self.check("cuDeviceGetName", code)?;
        let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    fn attribute(self, device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: `value` is writable, and the device came from the driver.
        let code =
            unsafe { (self.symbols().cuDeviceGetAttribute)(&mut value, attribute as u32, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value.max(0) as u32)
    }

    /// The driver's functions.
    pub(super) fn symbols(self) -> &'static Symbols {
        &self.0.symbols
    }

    /// Turns the answer of the driver function `call` into a [`Result`].
    pub(super) fn check(self, call: &str, code: u32) -> Result<()> {
        check(self.symbols(), call, code)
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({})", version_name(self.version()))
    }
}

/// What one device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The ordinal that hosts name it by.
    pub ordinal: i32,
    pub(super) handle: sys::CUdevice,
    /// The product's name.
    pub name: String,
    /// Major and minor compute capability that kernels are chosen for: its own, or a lower one that
    /// `FOLIO_COMPUTE_CAPABILITY` names.
    pub compute_capability: (u32, u32),
    /// Its own, which machine code is for.
    pub own_compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Bytes of L2 cache.
    pub l2_bytes: u32,
    /// Bytes that its memory moves in a microsecond, by its clock and its width. 0 where the driver does not know these.
    pub memory_bytes_per_us: u32,
    /// Most dynamic shared memory of a block, in bytes.
    pub shared_bytes_per_block: u32,
}

impl DeviceInfo {
    /// Bytes that its memory moves in so many nanoseconds, at 0.9 of its peak. `u32::MAX` where the peak is not known.
    pub fn memory_bytes_in(&self, nanoseconds: u32) -> u32 {
        let peak = u64::from(self.memory_bytes_per_us) * u64::from(nanoseconds) / 1000;
        match u32::try_from(peak * 9 / 10) {
            Ok(0) | Err(_) => u32::MAX,
            Ok(bytes) => bytes,
        }
    }
}

/// Two transfers a clock, of so many bits.
fn memory_bytes_per_us(clock_khz: u32, bus_bits: u32) -> u32 {
    let bytes = u64::from(clock_khz) * u64::from(bus_bits) / (8 * 1000) * 2;
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Names a compute capability whose kernels a device of a higher one is to run.
const KERNELS_OF: &str = "FOLIO_COMPUTE_CAPABILITY";

/// The compute capability that kernels are chosen for on a device of `own`, where the environment says
/// `named`.
fn kernels_of(own: (u32, u32), named: Option<&str>) -> Result<(u32, u32)> {
    let Some(named) = named.filter(|named| !named.is_empty()) else {
        return Ok(own);
    };
    let parsed = named
        .split_once('.')
        .and_then(|(major, minor)| Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?)));
    parsed.filter(|capability| *capability <= own).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "the environment variable {KERNELS_OF} is {named:?}; accepted: unset, or a compute capability up to the \
             device's own, {}.{}, such as 8.0",
            own.0, own.1
        ))
    })
}

/// The number of CUDA devices; 0 where there is no usable driver. Never fails.
pub fn device_count() -> u32 {
    Driver::get()
        .and_then(Driver::device_count)
        .unwrap_or_default()
}

fn preflight() -> Result<Loaded> {
    let library = open()?;
    // SAFETY: the signature is the driver's, and the library is never unloaded (`open`).
    let version = unsafe { driver_version(&library)? };
    // SAFETY: as above.
    let symbols = unsafe { Symbols::load(&library)? };
    // SAFETY: flags must be 0 and are.
    let code = unsafe { (symbols.cuInit)(0) };
    check(&symbols, "cuInit", code)?;
    Ok(Loaded { symbols, version })
}

/// Opens the driver library for the rest of the process: unloading a driver that has started threads
/// would crash the host.
fn open() -> Result<ManuallyDrop<Library>> {
    for name in LIBRARY_NAMES {
        // SAFETY: the initialisers of the CUDA driver library are safe to run in any process that may
        // use CUDA, which the host decided by asking for a CUDA device.
        if let Ok(library) = unsafe { Library::new(name) } {
            return Ok(ManuallyDrop::new(library));
        }
    }
    Err(Error::NoDriver(format!(
        "the CUDA driver library {} cannot be loaded; install the NVIDIA driver, or use the CPU device",
        LIBRARY_NAMES[0]
    )))
}

/// Asks for the version before the other functions are looked up, so that an old driver is reported as
/// old and not by the first function that it lacks.
///
/// # Safety
/// `library` must be a CUDA driver library.
unsafe fn driver_version(library: &Library) -> Result<u32> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> u32;
    // SAFETY: this is the function's signature.
    let get = unsafe { library.get::<GetVersion>(b"cuDriverGetVersion\0") }.map_err(|_| {
        Error::NoDriver("the CUDA driver library has no function cuDriverGetVersion".into())
    })?;
    let mut version: c_int = 0;
    // SAFETY: `version` is writable.
    let code = unsafe { get(&mut version) };
    if code != 0 {
        return Err(describe(code, "cuDriverGetVersion", None));
    }
    let version = version.max(0) as u32;
    if version < MIN_VERSION {
        return Err(Error::DriverTooOld(format!(
            "the CUDA driver is of CUDA {}; Folio needs {} or newer",
            version_name(version),
            version_name(MIN_VERSION)
        )));
    }
    Ok(version)
}

fn check(symbols: &Symbols, call: &str, code: u32) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    Err(describe(code, call, driver_text(symbols, code)))
}

/// `"CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"`; `None` for codes unknown to the driver.
fn driver_text(symbols: &Symbols, code: u32) -> Option<String> {
    let text = |get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
        let mut text = std::ptr::null();
        // SAFETY: `text` is writable; the driver answers a static string or leaves it null.
        unsafe {
            let known = get(code, &mut text) == 0 && !text.is_null();
            known.then(|| CStr::from_ptr(text).to_string_lossy())
        }
    };
    let name = text(symbols.cuGetErrorName)?;
    Some(match text(symbols.cuGetErrorString) {
        Some(sentence) => format!("{name}: {sentence}"),
        None => name.into_owned(),
    })
}

/// The codes that are not simply [`Error::Driver`], by their numbers in `cuda.h`.
fn describe(code: u32, call: &str, text: Option<String>) -> Error {
    let text = text.unwrap_or_else(|| "no text".into());
    let message = format!("{call} returned {code} ({text})");
    match code {
        2 => Error::OutOfMemory(message),
        34 => Error::NoDriver(format!(
            "the CUDA driver library found first is a toolkit's stub, which has no driver behind it \
             ({call} returned 34); take the stubs folder off the loader's path"
        )),
        100 | 101 => Error::NoDevice(message),
        // 222: the PTX is of a newer compiler. 803 and 804: driver and library, or device, do not match.
        222 | 803 | 804 => Error::DriverTooOld(message),
        _ => Error::Driver(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_for_the_device_or_for_a_lower_capability_that_is_named() {
        let hopper = (9, 0);
        for (named, chosen) in [
            (None, hopper),
            (Some(""), hopper),
            (Some("9.0"), hopper),
            (Some("8.0"), (8, 0)),
        ] {
            assert!(matches!(kernels_of(hopper, named), Ok(found) if found == chosen));
        }
        for named in ["10.0", "9.1", "8", "sm_80", "8.x", "-8.0"] {
            let refused = kernels_of(hopper, Some(named));
            assert!(
                matches!(&refused, Err(Error::InvalidArgument(m)) if m.contains(named) && m.contains("9.0")),
                "{named}: {refused:?}"
            );
        }
    }

    #[test]
    fn codes_become_the_errors_that_hosts_act_on() {
        assert!(matches!(describe(2, "f", None), Error::OutOfMemory(_)));
        assert!(matches!(describe(34, "f", None), Error::NoDriver(m) if m.contains("stub")));
        assert!(matches!(describe(100, "f", None), Error::NoDevice(_)));
        assert!(matches!(describe(222, "f", None), Error::DriverTooOld(_)));
        assert!(matches!(describe(804, "f", None), Error::DriverTooOld(_)));
        let Error::Driver(message) = describe(12345, "cuLaunchKernelEx", None) else {
            panic!("an unknown code is a driver error");
        };
        assert_eq!(message, "cuLaunchKernelEx returned 12345 (no text)");
    }
}
