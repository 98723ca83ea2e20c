//! Attention on a device: [`handle`] plans and runs by the kernels of one problem. [`kernel`] says what
//! such a kernel offers, [`generic`], [`sm90_decode`] and [`sm90_prefill`] are those that there are.

pub mod generic;
pub mod handle;
pub mod kernel;
pub mod sm90_decode;
pub mod sm90_prefill;
