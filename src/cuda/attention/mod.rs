//! Attention on a device: [`handle`] plans and runs by the kernels of one problem, of which [`candidates`]
//! picks one for each run. [`kernel`] says what such a kernel offers and [`features`] what it may lack;
//! [`mod@generic`], [`sm90_decode`] and [`sm90_prefill`] are those that there are.

pub mod candidates;
pub mod features;
pub mod generic;
pub mod handle;
pub mod kernel;
mod sm90;
pub mod sm90_decode;
pub mod sm90_prefill;
