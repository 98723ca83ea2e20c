//! The CUDA driver and its objects, each a thin owner of a handle. Nothing outside this folder calls a
//! driver function. What kernels exist and what they compute is not known here.
//!
//! From the bottom: `version` and `symbols` say what a driver must have, `library` opens it, `context`
//! is a device's primary context, and `module`, `event`, `tensor_map` and `launch` stand on that.

mod context;
mod event;
mod launch;
mod library;
mod module;
mod symbols;
mod tensor_map;
mod version;

pub use context::{Context, Current};
pub use event::Event;
pub use launch::{Launch, MAX_TENSOR_MAPS, blocks_of};
pub use library::{DeviceInfo, Driver, device_count};
pub use module::{Function, Module};
pub use tensor_map::{L2Promotion, MAX_MAP_RANK, Swizzle, TensorMap, Tiled};
pub use version::{MIN_VERSION, version_name};
