//! Builds the stub driver, and asks it what it was asked.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

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
        compile(&folder.join("libcuda.so.1"), flags)?;
    }
    Ok(folder)
}

fn compile(library: &Path, flags: &[&str]) -> Result<(), String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub_driver/stub.c");
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
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"])
        .args(flags)
        .arg(&source)
        .arg("-o")
        .arg(&temporary)
        .status();
    let status = status.map_err(|error| format!("no C compiler: cc: {error}"))?;
    assert!(status.success(), "stub.c compiles");
    std::fs::rename(&temporary, library).expect("the target folder is writable");
    Ok(())
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
