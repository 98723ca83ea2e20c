//! How a row of the kernel table becomes code on a device. [`mod@unit`] is one compilation and
//! [`mod@hash`] its name, [`nvrtc`] compiles it, [`workers`] many of them side by side, [`cubin_cache`]
//! and [`bundle`] keep the result [`packed`], and [`loader`] brings it to a device. (`build.rs` includes all files but the loader.)

pub mod bundle;
pub mod compile;
pub mod cubin_cache;
pub mod hash;
pub mod loader;
pub mod nvrtc;
pub mod packed;
pub mod unit;
pub mod workers;
