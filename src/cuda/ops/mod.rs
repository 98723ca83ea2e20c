//! The operators around attention, each one launch: [`append`] writes new tokens to a cache, [`mla_append`] and
//! [`mla_gather`] write and read a cache of latent records, [`merge`] merges attention states, [`projection`] computes
//! products per head, and [`context_parallel`] serves ranks that share the keys. Their kernels are loaded at their first
//! use ([`kernels`]); [`rows`] says how
//! they move rows.

pub mod append;
pub mod context_parallel;
pub mod kernels;
pub mod merge;
pub mod mla_append;
pub mod mla_gather;
pub mod projection;
pub mod rope_append;
pub mod rows;
