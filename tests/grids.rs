//! The peers' grids on the CPU, through the C functions.

mod common;

use common::c_door::CDoor;
use common::door::Door;
use common::grids::{GRIDS, Grid, Place};
use common::memory::HostMemory;
use folio::api::Target;

fn run(name: &str) {
    let session = CDoor
        .open(Target::Cpu { num_threads: 2 })
        .expect("a CPU context");
    let grid: Option<&(&str, Grid)> = GRIDS.iter().find(|grid| grid.0 == name);
    grid.expect("a grid of this name").1(&Place {
        session: &*session,
        memory: &HostMemory,
    });
}

#[test]
fn unified_attention() {
    run("unified_attention");
}

#[test]
fn unified_attention_over_fp8() {
    run("unified_attention_over_fp8");
}

#[test]
fn encoder_attention() {
    run("encoder_attention");
}

#[test]
fn cross_attention() {
    run("cross_attention");
}

#[test]
fn named_batches() {
    run("named_batches");
}

#[test]
fn batch_decode() {
    run("batch_decode");
}

#[test]
fn batch_prefill() {
    run("batch_prefill");
}

#[test]
fn sliding_windows() {
    run("sliding_windows");
}

#[test]
fn caps_and_alibi() {
    run("caps_and_alibi");
}

#[test]
fn sinks() {
    run("sinks");
}

#[test]
fn draft_trees() {
    run("draft_trees");
}

#[test]
fn every_head_dim_and_group_size() {
    run("every_head_dim_and_group_size");
}

#[test]
fn nan_queries() {
    run("nan_queries");
}

#[test]
fn no_grid_is_forgotten() {
    assert_eq!(GRIDS.len(), 13);
}
