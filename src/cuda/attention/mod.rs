//! Attention on a device: [`handle`] plans and runs one problem. [`planner`] plans where lengths are on the
//! device, [`candidates`] picks the kernel of each run, and [`combine`] puts split rows together after it. `tilings` says how
//! batches are cut, `planned` what a plan leaves to runs, `own_memory` what else is in the workspace, and `run_params` what kernels
//! are told of a run. [`mixed`] plans and runs the decodes of a batch apart
//! from its prompts.
//!
//! [`kernel`] says what a kernel that computes attention offers and [`features`] what it may lack;
//! [`mod@generic`], [`sm90_decode`] and [`sm90_prefill`] are those that there are, and [`mla`] and
//! [`sm90_mla_few`] for latent attention.

pub mod candidates;
pub mod combine;
pub mod features;
mod fold_scales;
pub mod generic;
mod given_page_ids;
pub mod handle;
pub mod kernel;
mod latent_queries;
mod mask_items;
pub mod mixed;
pub mod mla;
pub mod narrow;
mod own_memory;
mod planned;
pub mod planner;
mod prefill_widened;
mod queries_widened;
mod round_lse;
mod run_params;
pub(in crate::cuda) mod sm90;
pub mod sm90_decode;
mod sm90_mla;
pub mod sm90_mla_few;
pub mod sm90_prefill;
mod sm90_prefill_fp8;
mod sm90_prefill_maps;
mod sm90_prefill_tiling;
pub mod stored;
mod tilings;
mod widen_queries;
mod widen_stored;
