//! The CUDA backend. It links no CUDA library: the driver is opened when a CUDA device is first asked
//! for, and [`driver::Driver`] is the proof that it could be.

pub mod context;
pub mod driver;
pub mod event;
pub mod kernels;
pub mod launch;
pub mod module;
mod symbols;
pub mod tensor_map;
