//! Writing to paged caches on the CPU, copying their pages, and reading tokens and latent records back.

pub mod append;
pub mod copy;
pub mod gather;
pub mod mla_append;
pub mod mla_gather;
pub mod requests;
pub mod rope_append;
pub mod rotation;
pub mod rows;
pub mod stored;
