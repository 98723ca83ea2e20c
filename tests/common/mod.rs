//! What the integration tests share: whole attention problems as plain data, their memory, the two
//! doors into the library, a second implementation of the contract, and the comparison. No tests here.

// Every integration test is a crate of its own and uses its own part of this module.
#![allow(dead_code)]

pub mod append_run;
pub mod bias;
pub mod c_door;
pub mod cascade;
pub mod codec;
pub mod compare;
pub mod context_parallel;
pub mod copy;
pub mod dense;
pub mod door;
pub mod formats;
pub mod gather;
pub mod golden;
pub mod grids;
pub mod index;
pub mod instance;
pub mod memory;
pub mod mla;
pub mod mla_cache;
pub mod mla_context;
pub mod mla_forms;
pub mod mla_lists;
pub mod pages;
pub mod problem;
pub mod projections;
pub mod random;
pub mod reserved;
pub mod rope_append;
pub mod rope_append_forms;
pub mod stored;
pub mod strategy;
pub mod tree;
pub mod values;
