//! NVIDIA's run-time compiler: where it is found, and one compilation by it. It needs neither a GPU nor
//! a driver. Both the build (ahead of time) and `loader.rs` (at create) compile with this.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::time::Instant;

use libloading::Library;

use super::packed::Packed;
use super::unit::{Closure, Unit};
use crate::error::{Error, Result};

/// Names the library, or a folder that holds it. Empty: behave as if there were none.
pub const VARIABLE: &str = "FOLIO_NVRTC";

/// Major versions that are used, the preferred one first. 12 is the first that knows `sm_90a`.
const MAJORS: [u32; 2] = [13, 12];

/// Where toolkits and distributions put it.
const USUAL_FOLDERS: [&str; 4] = [
    "/usr/local/cuda",
    "/opt/cuda",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];

/// Where it lies below a toolkit, or below a folder that a wheel was unpacked to.
const SUBFOLDERS: [&str; 5] = [
    "",
    "lib64",
    "lib",
    "nvidia/cu13/lib",
    "nvidia/cuda_nvrtc/lib",
];

/// A compiler that can be called. The library stays loaded: nothing that may have threads or
/// thread-locals is ever unmapped from a host.
pub struct Nvrtc {
    functions: Functions,
    version: u32,
    path: PathBuf,
}

/// The result of a compilation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// What the driver loads: a cubin, or for a virtual target PTX text with the zero that ends it.
    pub image: Packed,
    /// What compiler and assembler had to say: registers, spills, warnings. Nothing of PTX that came with a cubin.
    pub log: String,
    /// How long it took; of PTX that came with a cubin, how long it took beside that.
    pub millis: u32,
}

impl Nvrtc {
    /// Finds the compiler: by `FOLIO_NVRTC` alone where it is set, else in `folders`, the usual places
    /// and on the loader's path.
    ///
    /// # Errors
    /// [`Error::Unsupported`] saying where it was looked for.
    pub fn find(folders: &[PathBuf]) -> Result<Nvrtc> {
        if let Some(named) = std::env::var_os(VARIABLE) {
            return Nvrtc::named(Path::new(&named));
        }
        let usual = USUAL_FOLDERS.iter().map(PathBuf::from);
        for folder in folders.iter().cloned().chain(usual) {
            if let Some(nvrtc) = in_folder(&folder) {
                return Ok(nvrtc);
            }
        }
        MAJORS
            .iter()
            .find_map(|major| by_soname(&format!("libnvrtc.so.{major}")).ok())
            .ok_or_else(|| {
                not_found(format!(
                    "neither {} nor the loader's path holds libnvrtc.so.{}",
                    USUAL_FOLDERS.join(", "),
                    MAJORS.map(|major| major.to_string()).join(" or .")
                ))
            })
    }

    /// Uses the library at `path`, or the one in the folder `path`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when it is not there or not usable.
    pub fn named(path: &Path) -> Result<Nvrtc> {
        if path.as_os_str().is_empty() {
            return Err(not_found(format!("{VARIABLE} is set and empty")));
        }
        if path.is_dir() {
            return in_folder(path).ok_or_else(|| {
                not_found(format!(
                    "{VARIABLE}={} holds no usable libnvrtc.so",
                    path.display()
                ))
            });
        }
        open(path).map_err(|reason| {
            not_found(format!(
                "{VARIABLE}={} cannot be used: {reason}",
                path.display()
            ))
        })
    }

    /// The version, as in 13000 for 13.0.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compiles one unit, and answers the PTX of `more` from the same run. May be called from several threads, which take
    /// turns in it.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's own words.
    pub fn compile(
        &self,
        unit: &Unit,
        more: &[Unit],
        closure: &Closure<'_>,
    ) -> Result<Vec<Compiled>> {
        debug_assert!(more.iter().all(|ptx| ptx.is_ptx_of(unit)));
        let start = Instant::now();
        let program = Program::new(&self.functions, closure)?;
        let compiled = program.compile(&unit.options());
        let log = program.log();
        compiled.map_err(|reason| Error::Compile(format!("{}: {reason}\n{log}", unit.key())))?;
        let first = program.compiled(unit, log, start)?;
        let more = (more.iter()).map(|ptx| program.compiled(ptx, String::new(), Instant::now()));
        std::iter::once(Ok(first)).chain(more).collect()
    }
}

impl std::fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nvrtc({}, {})", self.version, self.path.display())
    }
}

fn not_found(reason: String) -> Error {
    Error::Unsupported(format!("NVRTC is not available: {reason}"))
}

fn in_folder(folder: &Path) -> Option<Nvrtc> {
    SUBFOLDERS.iter().find_map(|subfolder| {
        let folder = folder.join(subfolder);
        MAJORS
            .iter()
            .map(|major| folder.join(format!("libnvrtc.so.{major}")))
            .find_map(|path| path.exists().then(|| open(&path).ok())?)
    })
}

/// Opens the library, after the builtins beside it: libnvrtc has no run path and opens them by their
/// bare name, which only succeeds when they are loaded already or lie on the loader's path.
fn open(path: &Path) -> std::result::Result<Nvrtc, String> {
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    preload_builtins(&path);
    usable(load(&path)?, path)
}

/// Opens what the loader finds, or what the host has loaded already, from wherever that was.
fn by_soname(soname: &str) -> std::result::Result<Nvrtc, String> {
    let library = load(Path::new(soname))?;
    let path = mapped_path(soname).unwrap_or_else(|| soname.into());
    preload_builtins(&path);
    usable(library, path)
}

/// The file of a loaded library, from this process's memory map.
fn mapped_path(soname: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let file = maps
        .lines()
        .find(|line| line.contains(&format!("/{soname}")))?;
    Some(PathBuf::from(&file[file.find('/')?..]))
}

fn preload_builtins(library: &Path) {
    let builtins = library.parent().map(builtins_in).unwrap_or_default();
    for library in builtins
        .into_iter()
        .filter_map(|builtins| load(&builtins).ok())
    {
        std::mem::forget(library);
    }
}

fn usable(library: Library, path: PathBuf) -> std::result::Result<Nvrtc, String> {
    let library = ManuallyDrop::new(library);
    // SAFETY: a library of this name is NVRTC, whose functions have these types.
    let functions = unsafe { Functions::load(&library)? };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are writable.
    let code = unsafe { (functions.version)(&mut major, &mut minor) };
    let version = (major * 1000 + minor * 10) as u32;
    if code != 0 || !MAJORS.contains(&(version / 1000)) {
        return Err(format!(
            "its version is {major}.{minor}; 12 or 13 is needed"
        ));
    }
    Ok(Nvrtc {
        functions,
        version,
        path,
    })
}

fn load(path: &Path) -> std::result::Result<Library, String> {
    // SAFETY: NVRTC and its builtins have no initialisers with preconditions. The path was named by the
    // user, or is where NVIDIA and distributions install.
    unsafe { Library::new(path) }.map_err(|error| match std::error::Error::source(&error) {
        Some(reason) => reason.to_string(),
        None => error.to_string(),
    })
}

fn builtins_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let is_builtins = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc-builtins.so."))
    };
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(is_builtins)
        .collect()
}

type Handle = *mut std::ffi::c_void;

struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
}

impl Functions {
    /// # Safety
    /// `library` must be NVRTC and never be unloaded.
    unsafe fn load(library: &Library) -> std::result::Result<Functions, String> {
        /// # Safety
        /// `F` must be the function's type.
        unsafe fn get<F: Copy>(library: &Library, name: &str) -> std::result::Result<F, String> {
            // SAFETY: the caller's promise.
            unsafe { library.get::<F>(name.as_bytes()) }
                .map(|symbol| *symbol)
                .map_err(|_| format!("it has no function {name}"))
        }
        // SAFETY: the field types are those of `nvrtc.h`.
        unsafe {
            Ok(Functions {
                version: get(library, "nvrtcVersion")?,
                error_text: get(library, "nvrtcGetErrorString")?,
                create: get(library, "nvrtcCreateProgram")?,
                destroy: get(library, "nvrtcDestroyProgram")?,
                compile: get(library, "nvrtcCompileProgram")?,
                log_size: get(library, "nvrtcGetProgramLogSize")?,
                log: get(library, "nvrtcGetProgramLog")?,
                cubin_size: get(library, "nvrtcGetCUBINSize")?,
                cubin: get(library, "nvrtcGetCUBIN")?,
                ptx_size: get(library, "nvrtcGetPTXSize")?,
                ptx: get(library, "nvrtcGetPTX")?,
            })
        }
    }

    fn check(&self, code: c_int) -> std::result::Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function answers a static string for every code.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// A program that is destroyed with the value.
struct Program<'a> {
    functions: &'a Functions,
    handle: Handle,
}

impl<'a> Program<'a> {
    fn new(functions: &'a Functions, closure: &Closure<'_>) -> Result<Program<'a>> {
        let name = c_string(closure.source.0)?;
        let text = c_string(closure.source.1)?;
        let header_names = c_strings(closure.headers.iter().map(|header| header.0))?;
        let header_texts = c_strings(closure.headers.iter().map(|header| header.1))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the strings end with a zero and live until the call returns; NVRTC copies them.
        let code = unsafe {
            (functions.create)(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                header_names.len() as c_int,
                pointers(&header_texts).as_ptr(),
                pointers(&header_names).as_ptr(),
            )
        };
        functions.check(code).map_err(Error::Compile)?;
        Ok(Program { functions, handle })
    }

    fn compile(&self, options: &[String]) -> std::result::Result<(), String> {
        let options =
            c_strings(options.iter().map(String::as_str)).map_err(|error| error.to_string())?;
        // SAFETY: as in `new`; the program was created.
        let code = unsafe {
            (self.functions.compile)(
                self.handle,
                options.len() as c_int,
                pointers(&options).as_ptr(),
            )
        };
        self.functions.check(code)
    }

    fn log(&self) -> String {
        let bytes = self.read(self.functions.log_size, self.functions.log);
        let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
        text.trim_matches(['\0', '\n']).to_owned()
    }

    /// What was compiled, as a unit wants it.
    fn compiled(&self, unit: &Unit, log: String, start: Instant) -> Result<Compiled> {
        Ok(Compiled {
            image: Packed::pack(&self.image(unit.is_ptx())?),
            log,
            millis: start.elapsed().as_millis() as u32,
        })
    }

    fn image(&self, ptx: bool) -> Result<Vec<u8>> {
        let functions = self.functions;
        let image = match ptx {
            true => self.read(functions.ptx_size, functions.ptx),
            false => self.read(functions.cubin_size, functions.cubin),
        };
        image.map_err(Error::Compile)
    }

    fn read(
        &self,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        read: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> std::result::Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program was created and `len` is writable.
        let code = unsafe { size(self.handle, &mut len) };
        self.functions.check(code)?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer has the length that NVRTC asked for.
        let code = unsafe { read(self.handle, bytes.as_mut_ptr().cast()) };
        self.functions.check(code)?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is destroyed once. The only error is an invalid handle.
        unsafe { (self.functions.destroy)(&mut self.handle) };
    }
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Compile("a kernel source holds a zero byte".into()))
}

fn c_strings<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<CString>> {
    texts.map(c_string).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}
