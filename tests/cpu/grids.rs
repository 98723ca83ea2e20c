//! The peers' grids on the CPU, through the C functions.

use crate::common::c_door::CDoor;
use crate::common::door::{Door, Session};
use crate::common::grids::{GRIDS, Grid, Place};
use crate::common::memory::HostMemory;
use crate::common::problem::Problem;
use folio::api::Target;
use folio::dtype::DType;

fn session() -> Box<dyn Session> {
    CDoor
        .open(Target::Cpu { num_threads: 2 })
        .expect("a CPU context")
}

fn run(name: &str) {
    let session = session();
    let grid: Option<&(&str, Grid)> = GRIDS.iter().find(|grid| grid.0 == name);
    grid.expect("a grid of this name").1(&Place::new(&*session, &HostMemory));
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
fn score_biases() {
    run("score_biases");
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

/// Rows wider than any of the peers' grids, up to those of absorbed MLA: the CPU backend takes them.
#[test]
fn rows_as_wide_as_mla() {
    let session = session();
    let place = Place::new(&*session, &HostMemory);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (head_dim_qk, head_dim_vo) in [(264, 264), (576, 512), (512, 512), (576, 64), (64, 512)]
        {
            for group_size in [1, 16] {
                let lens = [(1, 300), (2, 33), (20, 90), (3, 0)];
                let mut problem = Problem::plain(&lens).of(dtype).heads(group_size, 1, 8);
                problem.head_dim_qk = head_dim_qk;
                problem.head_dim_vo = head_dim_vo;
                place.check(&problem);
            }
        }
    }
}

#[test]
fn no_grid_is_forgotten() {
    assert_eq!(GRIDS.len(), 14);
}
