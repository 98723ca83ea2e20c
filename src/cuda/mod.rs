//! The CUDA backend. It links no CUDA library: the driver is opened when a CUDA device is first asked
//! for, and [`driver::Driver`] is the proof that it could be.
//!
//! From the bottom: `symbols` and [`driver`] call the driver; [`context`], [`module`], [`event`],
//! [`launch`] and [`tensor_map`] are its objects; [`kernels`] says what code exists, [`mod@unit`],
//! [`nvrtc`], [`compile`], [`cubin_cache`] and [`bundle`] make and keep it, and [`loader`] brings it to a
//! device. On that stand the operators: [`attention`], [`operators`] and what they need.

pub mod attention;
pub mod attention_kernel;
pub mod backend;
pub mod bundle;
pub mod compile;
pub mod context;
pub mod cubin_cache;
pub mod driver;
pub mod event;
pub mod hash;
pub mod kernels;
pub mod launch;
pub mod loader;
pub mod module;
pub mod nvrtc;
pub mod operators;
pub mod params;
pub mod plan_image;
pub mod sm90_decode;
pub mod sm90_prefill;
pub mod staging;
mod symbols;
pub mod tensor_map;
pub mod unit;
pub mod workspace;
