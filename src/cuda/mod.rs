//! The CUDA backend. It links no CUDA library: the driver is opened when a CUDA device is first asked
//! for, and [`driver::Driver`] is the proof that it could be.
//!
//! From the bottom: [`driver`] calls the driver; [`kernels`] says what code exists, [`compiler`] makes
//! and keeps it, and [`params`] and the modules `…_params` mirror what it is launched with; [`plan`] brings plans to the
//! device; on that stand [`attention`] and [`ops`], and [`backend`] offers both to `api`.

pub mod attention;
pub mod backend;
pub mod cascade_params;
pub mod compiler;
pub mod context_parallel_params;
pub mod copy_params;
pub mod driver;
pub mod gather_params;
pub mod index_params;
pub mod integers_params;
pub mod items_params;
pub mod kernels;
pub mod latent_queries_params;
pub mod lse_params;
pub mod merge_params;
pub mod mla_cache_params;
pub mod mla_few_params;
pub mod mla_params;
pub mod narrow_params;
pub mod new_tokens_params;
pub mod ops;
pub mod params;
pub mod plan;
pub mod plan_params;
pub mod prefill_fp8_params;
pub mod prefill_params;
pub mod projection_params;
pub mod rope_append_params;
pub mod scales_params;
pub mod stored_params;
pub mod tree_mask_params;
pub mod up_projection_params;
pub mod widen_params;
