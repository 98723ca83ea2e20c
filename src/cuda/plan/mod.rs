//! A plan on its way to the device: [`regions`] says where its parts lie in the workspace, [`image`]
//! writes their bytes, and [`staging`] copies them. How work is cut is decided elsewhere (`src/plan` on
//! the host, `kernels/plan.cu` on the device).

pub mod image;
pub mod regions;
pub mod staging;
