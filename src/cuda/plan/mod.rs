//! A plan on its way to the device: [`regions`] says where kernels find its parts, and [`staging`] copies them. [`tables`] are
//! numbers that need no layout. How
//! work is cut and laid out is decided elsewhere (`src/plan` on the host, `kernels/plan` on the device).

pub mod regions;
pub mod staging;
pub mod tables;
