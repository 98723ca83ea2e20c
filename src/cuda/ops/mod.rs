//! The operators around attention, each one launch: [`append`] writes new tokens to a cache, [`merge`]
//! merges attention states, [`projection`] computes products per head. Their kernels are loaded at their first use ([`kernels`]); [`rows`] says how
//! they move rows.

pub mod append;
pub mod kernels;
pub mod merge;
pub mod projection;
pub mod rows;
