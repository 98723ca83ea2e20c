//! The operators around attention, each one launch: [`append`] and [`rope_append`] write new tokens to a cache
//! ([`append_stored`]: in other forms than plain rows), [`copy`] copies its pages, [`gather`] copies its tokens to dense rows, [`mla_append`] and [`mla_gather`] write and read a cache of latent
//! records, [`merge`] merges attention states, [`projection`] computes products per head, [`context_parallel`] serves ranks
//! that share the keys, [`index`] builds the indices of a batch, and [`tree_mask`] makes masks of draft tokens. Their kernels
//! are loaded at their first use ([`kernels`], [`keyless_kernel`]); [`rows`] says how they move rows,
//! and [`page_ids`] where pages are named.

pub mod append;
pub mod append_stored;
pub mod context_parallel;
pub mod copy;
pub mod gather;
pub mod index;
pub mod kernels;
pub mod keyless_kernel;
pub mod merge;
pub mod mla_append;
pub mod mla_gather;
pub mod page_ids;
pub mod projection;
pub mod projection_few;
pub mod projection_maps;
pub mod rope_append;
pub mod rows;
pub mod tree_mask;
pub mod up_projection;
