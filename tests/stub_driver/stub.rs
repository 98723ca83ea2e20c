//! Builds the stub driver, and asks it what it was asked.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;

/// Which driver library a case finds.
#[derive(Clone, Copy)]
pub enum Stub {
    /// None.
    Absent,
    /// A whole one.
    Complete,
    /// One that lacks `cuTensorMapEncodeTiled`.
    WithoutTensorMaps,
}

/// The folder that holds the library, for the loader's path; or why there is none.
pub fn build(stub: Stub) -> Result<PathBuf, String> {
    let (name, flags): (&str, &[&str]) = match stub {
        Stub::Absent => ("absent", &[]),
        Stub::Complete => ("complete", &[]),
        Stub::WithoutTensorMaps => ("without_tensor_maps", &["-DWITHOUT_TENSOR_MAPS"]),
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("stub_driver")
        .join(name);
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    if !matches!(stub, Stub::Absent) {
        compile("stub.c", &folder.join("libcuda.so.1"), flags)?;
    }
    Ok(folder)
}

/// The stub of the compiler; or why there is none.
pub fn build_compiler() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stub_driver/nvrtc");
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    let library = folder.join("libnvrtc.so.13");
    compile("nvrtc.c", &library, &[])?;
    Ok(library)
}

/// Once in a process, whose cases are hundreds and may be prepared side by side.
fn compile(source: &str, library: &Path, flags: &[&str]) -> Result<(), String> {
    static COMPILED: Mutex<BTreeMap<PathBuf, Result<(), String>>> = Mutex::new(BTreeMap::new());
    let mut compiled = COMPILED.lock().expect("the stub compiles");
    compiled
        .entry(library.to_owned())
        .or_insert_with(|| run_compiler(source, library, flags))
        .clone()
}

fn run_compiler(source: &str, library: &Path, flags: &[&str]) -> Result<(), String> {
    let soname = library.file_name().unwrap_or_default().to_string_lossy();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/stub_driver")
        .join(source);
    // Under a name of this process and then renamed: another run may be using the library.
    let temporary = library.with_extension(format!("{}", std::process::id()));
    let status = Command::new("cc")
        .args([
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fvisibility=hidden",
        ])
        .args(["-shared", "-fPIC"])
        .arg(format!("-Wl,-soname,{soname}"))
        .args(flags)
        .arg(&source)
        .arg("-o")
        .arg(&temporary)
        .status();
    let status = status.map_err(|error| format!("no C compiler: cc: {error}"))?;
    assert!(status.success(), "{} compiles", source.display());
    std::fs::rename(&temporary, library).expect("the target folder is writable");
    Ok(())
}

/// What a launch carried: `struct launch` of stub.c.
#[repr(C)]
#[derive(Clone)]
pub struct Launched {
    name: [u8; 64],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub cluster: u32,
    pub dependent: u32,
    num_maps: u32,
    pub stream: u64,
    param_bytes: u64,
    params: [u8; 4096],
    maps: [[u64; 16]; 7],
}

/// What the stub's driver encoded in a tensor map.
#[derive(Debug, PartialEq, Eq)]
pub struct Mapped {
    pub address: u64,
    pub swizzle: u64,
    pub extents: [u64; 5],
    /// Bytes, from the second dimension on.
    pub strides: [u64; 4],
    pub boxes: [u32; 5],
}

impl Launched {
    /// The kernel's symbol.
    pub fn name(&self) -> &str {
        let name = CStr::from_bytes_until_nul(&self.name).expect("a string of C");
        name.to_str().expect("a symbol")
    }

    /// The kernel's first parameter, as the test said that it is.
    pub fn params<P: Copy>(&self) -> P {
        assert_eq!(self.param_bytes as usize, size_of::<P>(), "{}", self.name());
        // SAFETY: the bytes were a `P` when the backend passed them to the driver, or the sizes would not
        // agree: no two structs of the kernels are of one size.
        unsafe { self.params.as_ptr().cast::<P>().read_unaligned() }
    }

    /// The bytes of the first parameter.
    pub fn raw(&self) -> &[u8] {
        &self.params[..self.param_bytes as usize]
    }

    /// The tensor maps that follow.
    pub fn maps(&self) -> Vec<Mapped> {
        let maps = &self.maps[..self.num_maps as usize];
        maps.iter()
            .map(|words| Mapped {
                address: words[1],
                swizzle: words[0] >> 20 & 0xf,
                extents: std::array::from_fn(|i| words[2 + i]),
                strides: std::array::from_fn(|i| words[7 + i]),
                boxes: std::array::from_fn(|i| (words[11 + i / 2] >> (32 * (i % 2))) as u32),
            })
            .collect()
    }
}

/// Bytes on their way to the device.
pub struct Upload {
    pub address: u64,
    pub bytes: Vec<u8>,
}

impl Upload {
    /// The numbers at a device address.
    pub fn i64s(&self, address: u64, count: usize) -> Vec<i64> {
        let bytes = &self.bytes[(address - self.address) as usize..][..8 * count];
        let numbers = bytes.chunks_exact(8);
        numbers
            .map(|bytes| i64::from_ne_bytes(bytes.try_into().expect("eight bytes")))
            .collect()
    }

    /// As [`Upload::i64s`].
    pub fn i32s(&self, address: u64, count: usize) -> Vec<i32> {
        let bytes = &self.bytes[(address - self.address) as usize..][..4 * count];
        let numbers = bytes.chunks_exact(4);
        numbers
            .map(|bytes| i32::from_ne_bytes(bytes.try_into().expect("four bytes")))
            .collect()
    }
}

/// The stub in this process.
pub struct Recorder(Library);

impl Recorder {
    /// Finds the stub that the driver layer opens.
    pub fn new() -> Recorder {
        // SAFETY: the stub has no initialisers.
        Recorder(unsafe { Library::new("libcuda.so.1") }.expect("the stub is on the loader's path"))
    }

    /// The recorded calls since the last [`Recorder::forget`].
    pub fn calls(&self) -> Vec<String> {
        // SAFETY: the function's type is that of stub.c; it answers a string that ends with a zero.
        let text = unsafe {
            CStr::from_ptr(self
                .get::<unsafe extern "C" fn() -> *const c_char>("folio_stub_calls")(
            ))
        };
        text.to_string_lossy().lines().map(str::to_owned).collect()
    }

    /// Forgets the calls so far.
    pub fn forget(&self) {
        // SAFETY: the function's type is that of stub.c.
        unsafe { self.get::<unsafe extern "C" fn()>("folio_stub_forget")() }
    }

    /// Makes the next call of a driver function fail.
    pub fn fail(&self, call: &str) {
        let call = CString::new(call).expect("a name");
        // SAFETY: the function's type is that of stub.c, which copies the name.
        unsafe { self.get::<unsafe extern "C" fn(*const c_char)>("folio_stub_fail")(call.as_ptr()) }
    }

    /// Says that the kernel's first parameter is a `P`.
    pub fn expect<P>(&self, kernel: &str) {
        let kernel = CString::new(kernel).expect("a name");
        // SAFETY: as above.
        unsafe {
            self.get::<unsafe extern "C" fn(*const c_char, usize)>("folio_stub_params")(
                kernel.as_ptr(),
                size_of::<P>(),
            )
        }
    }

    /// The launches since the last [`Recorder::forget`].
    pub fn launches(&self) -> Vec<Launched> {
        let mut count = 0;
        // SAFETY: the function's type is that of stub.c, and `Launched` mirrors what it answers.
        unsafe {
            let first = self
                .get::<unsafe extern "C" fn(*mut c_uint) -> *const Launched>("folio_stub_launches")(
                &mut count,
            );
            std::slice::from_raw_parts(first, count as usize).to_vec()
        }
    }

    /// Where the last upload went, and its bytes.
    pub fn upload(&self) -> Upload {
        self.last_upload_but(0).expect("nothing was uploaded")
    }

    /// The newest of the last uploads that wrote to a device address.
    pub fn upload_to(&self, address: u64) -> Upload {
        let mut uploads = (0..).map_while(|later| self.last_upload_but(later));
        let wrote = |upload: &Upload| {
            (upload.address..upload.address + upload.bytes.len() as u64).contains(&address)
        };
        uploads.find(wrote).expect("an upload to this address")
    }

    fn last_upload_but(&self, later: c_uint) -> Option<Upload> {
        let (mut address, mut len) = (0, 0);
        // SAFETY: the function's type is that of stub.c, which keeps the bytes until there are later uploads.
        unsafe {
            let data = self.get::<unsafe extern "C" fn(c_uint, *mut u64, *mut u64) -> *const u8>(
                "folio_stub_upload",
            )(later, &mut address, &mut len);
            (!data.is_null()).then(|| Upload {
                address,
                bytes: std::slice::from_raw_parts(data, len as usize).to_vec(),
            })
        }
    }

    /// This thread's current context.
    pub fn current(&self) -> *mut c_void {
        // SAFETY: as above.
        unsafe { self.get::<unsafe extern "C" fn() -> *mut c_void>("folio_stub_current")() }
    }

    /// How often the primary context is retained.
    pub fn retained(&self) -> c_int {
        // SAFETY: as above.
        unsafe { self.get::<unsafe extern "C" fn() -> c_int>("folio_stub_retained")() }
    }

    /// Makes a context current, as a host would.
    pub fn push(&self, context: *mut c_void) {
        // SAFETY: as above; the stub takes any value.
        let code = unsafe {
            self.get::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuCtxPushCurrent_v2")(context)
        };
        assert_eq!(code, 0);
    }

    fn get<F: Copy>(&self, name: &str) -> F {
        // SAFETY: every caller names the type that stub.c defines.
        unsafe {
            *self
                .0
                .get::<F>(name.as_bytes())
                .expect("a function of the stub")
        }
    }
}
