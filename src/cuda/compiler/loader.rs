//! From a row of the kernel table to a kernel in a context: the cubin in the bundle, else the bundle's PTX,
//! which the driver compiles, else compiled here and now where NVRTC is installed, with a cache on disk.
//! Slow, and called when a handle is created. What takes seconds is told at info level.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use once_cell::sync::OnceCell;

use super::bundle::Bundle;
use super::compile;
use super::cubin_cache::CubinCache;
use super::nvrtc::{Compiled, Nvrtc};
use super::unit::{Closure, Unit};
use crate::cuda::driver::{Context, Driver, Function, Module, version_name};
use crate::cuda::kernels::{self, Row};
use crate::error::{Error, Result};
use crate::log::{Level, Logger};

/// The bundle inside this library.
pub fn embedded() -> Result<&'static Bundle> {
    static BUNDLE: OnceCell<Bundle> = OnceCell::new();
    BUNDLE.get_or_try_init(|| {
        Bundle::parse(include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bundle")))
    })
}

/// The kernels of one context.
#[derive(Debug)]
pub struct Loader {
    context: Arc<Context>,
    logger: Logger,
    bundle: &'static Bundle,
    cache: Option<CubinCache>,
    modules: Mutex<HashMap<Unit, Arc<Module>>>,
}

impl Loader {
    /// Loads nothing yet.
    pub fn new(context: &Arc<Context>, logger: Logger) -> Result<Loader> {
        Ok(Loader::with_bundle(context, logger, embedded()?))
    }

    /// The same for another bundle than the library's.
    pub fn with_bundle(context: &Arc<Context>, logger: Logger, bundle: &'static Bundle) -> Loader {
        Loader {
            context: Arc::clone(context),
            logger,
            bundle,
            cache: CubinCache::of_user(),
            modules: Mutex::default(),
        }
    }

    /// Where the choice of a kernel is told.
    pub fn logger(&self) -> &Logger {
        &self.logger
    }

    /// The first of an operator's rows that can be had, with its kernel. `unsupported` is the refusal
    /// where there is no row at all.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there is no row, or none of them is in the bundle or can be compiled
    /// here; [`Error::DriverTooOld`], [`Error::Compile`], [`Error::OutOfMemory`] and [`Error::Driver`]
    /// when one should have worked.
    pub fn find<R: AsRef<Row>>(
        &self,
        candidates: impl IntoIterator<Item = &'static R>,
        unsupported: impl FnOnce() -> Error,
    ) -> Result<(&'static R, Function)> {
        let mut refusal = None;
        for row in candidates {
            match self.load(row.as_ref()) {
                Ok(function) => return Ok((row, function)),
                Err(error @ Error::Unsupported(_)) => refusal = refusal.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        Err(refusal.unwrap_or_else(unsupported))
    }

    /// All of an operator's rows that can be had, with their kernels.
    ///
    /// # Errors
    /// As [`Loader::find`], but for [`Error::Unsupported`].
    pub fn find_all<R: AsRef<Row>>(
        &self,
        candidates: impl IntoIterator<Item = &'static R>,
    ) -> Result<Vec<(&'static R, Function)>> {
        let mut found = Vec::new();
        for row in candidates {
            match self.load(row.as_ref()) {
                Ok(function) => found.push((row, function)),
                Err(Error::Unsupported(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// The kernel of one row.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(&self, row: &Row) -> Result<Function> {
        let target = kernels::target(self.context.device().own_compute_capability);
        let unit = Unit::new(row, &target);
        let module = match self.loaded(&unit) {
            Some(module) => module,
            None => self.load_unit(row, unit)?,
        };
        module.function(row.symbol, row.shared_bytes)
    }

    fn loaded(&self, unit: &Unit) -> Option<Arc<Module>> {
        let modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        modules.get(unit).cloned()
    }

    /// Without the lock: another thread that wants the same unit does the work twice, and one result
    /// stays.
    fn load_unit(&self, row: &Row, unit: Unit) -> Result<Arc<Module>> {
        let module = if let Some(cubin) = self.bundled(&unit)? {
            Module::load(&self.context, &cubin)?
        } else if let Some(ptx) = self.bundled_ptx(row)? {
            self.load_ptx(row, &ptx)?
        } else {
            Module::load(&self.context, &self.compile(row, &unit)?)?
        };
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(modules.entry(unit).or_insert(module)))
    }

    fn bundled(&self, unit: &Unit) -> Result<Option<Vec<u8>>> {
        if !self.bundle.contains(unit) {
            return Ok(None);
        }
        check_version(self.context.driver(), self.bundle.version())?;
        self.bundle.image(unit)
    }

    fn bundled_ptx(&self, row: &Row) -> Result<Option<Vec<u8>>> {
        match row.arch.ptx_target() {
            Some(target) => self.bundle.image(&Unit::new(row, target)),
            None => Ok(None),
        }
    }

    /// Asks no version beforehand: a driver takes cubins of its whole major version, but PTX of its own
    /// release and older ones only, and says so itself.
    fn load_ptx(&self, row: &Row, ptx: &[u8]) -> Result<Arc<Module>> {
        let device = self.context.device();
        let (major, minor) = device.own_compute_capability;
        self.logger.log(
            Level::Info,
            format_args!(
                "kernel {}: the driver compiles it from PTX for compute capability {major}.{minor}, and keeps it",
                row.name
            ),
        );
        Module::load(&self.context, ptx).map_err(|error| match error {
            Error::DriverTooOld(answer) => Error::DriverTooOld(format!(
                "kernels for compute capability {major}.{minor} are PTX of CUDA {needed} here; the driver is of \
                 CUDA {}, and {needed} or newer is needed: {answer}",
                version_name(self.context.driver().version()),
                needed = version_name(self.bundle.version()),
            )),
            other => other,
        })
    }

    fn compile(&self, row: &Row, unit: &Unit) -> Result<Vec<u8>> {
        let nvrtc = nvrtc().map_err(|reason| self.missing(row, unit, &reason))?;
        check_version(self.context.driver(), nvrtc.version())?;
        let compile = |closure: &Closure<'_>| self.compile_now(row, unit, nvrtc, closure);
        let (sources, cache) = (self.bundle.sources(), self.cache.as_ref());
        let run = std::slice::from_ref(unit);
        let results = compile::through_cache(run, sources, nvrtc.version(), cache, compile)?;
        results[0].image.unpack()
    }

    fn compile_now(
        &self,
        row: &Row,
        unit: &Unit,
        nvrtc: &Nvrtc,
        closure: &Closure<'_>,
    ) -> Result<Vec<Compiled>> {
        self.logger.log(
            Level::Info,
            format_args!(
                "kernel {}: NVRTC {} compiles it for {}; it is not in this library",
                row.name,
                version_name(nvrtc.version()),
                unit.target
            ),
        );
        nvrtc.compile(unit, &[], closure)
    }

    fn missing(&self, row: &Row, unit: &Unit, reason: &Error) -> Error {
        let same_target = |other: &&'static Row| {
            other.operator == row.operator && self.bundle.contains(&Unit::new(other, &unit.target))
        };
        let names: Vec<&str> = kernels::table()
            .filter(same_target)
            .map(|row| row.name.as_str())
            .collect();
        let held = match (self.bundle.is_empty(), names.is_empty()) {
            (true, _) => "no compiled kernels: it was built without NVRTC".to_owned(),
            (false, true) => format!("no {} kernel for {}", row.operator, unit.target),
            (false, false) => names.join(", "),
        };
        Error::Unsupported(format!(
            "kernel {} for {} is not in this library, and {reason}; the library holds {held}",
            row.name, unit.target
        ))
    }
}

/// Found once; a failure is not remembered, so that a host may install the compiler later.
fn nvrtc() -> Result<&'static Nvrtc> {
    static NVRTC: OnceCell<Nvrtc> = OnceCell::new();
    NVRTC.get_or_try_init(|| Nvrtc::find(&[]))
}

fn check_version(driver: Driver, compiler: u32) -> Result<()> {
    if driver.accepts_cubins_of(compiler) {
        return Ok(());
    }
    Err(Error::DriverTooOld(format!(
        "the kernels were compiled by CUDA {}; the driver is of CUDA {}, and {}.0 or newer is needed",
        version_name(compiler),
        version_name(driver.version()),
        compiler / 1000
    )))
}
