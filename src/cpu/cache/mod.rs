//! Writing to paged caches on the CPU, and reading latent records back.

pub mod append;
pub mod mla_append;
pub mod mla_gather;
pub mod rope_append;
pub mod rotation;
pub mod rows;
