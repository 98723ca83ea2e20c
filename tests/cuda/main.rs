//! The CUDA backend on a real GPU, through the C functions: the attention contract over the same random
//! problems as the CPU, and what only a device has: streams, graphs, lengths in device memory. Skipped
//! without a device.

mod bounds;
#[path = "../common/mod.rs"]
mod common;
mod context_parallel;
mod gpu;
#[path = "../harness/mod.rs"]
mod harness;
mod mla_cache;
mod operators;
mod problems;
mod steps;

use folio::api::cuda_device_count;
use harness::case;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cases = [
        case("peers_grids", (), problems::peers_grids),
        case("host_lengths", (), problems::host_lengths),
        case("device_lengths", (), problems::device_lengths),
        case("device_page_ids", (), problems::device_page_ids),
        case("long_splits", (), problems::long_splits),
        case("many_requests", (), problems::many_requests),
        case(
            "more_parts_than_there_is_room_for",
            (),
            problems::more_parts_than_there_is_room_for,
        ),
        case("any_group", (), problems::any_group),
        case("batch_invariant", (), problems::batch_invariant),
        case("far_offsets", (), problems::far_offsets),
        case("graph_replays", (), steps::graph_replays),
        case(
            "graph_plans_on_the_device",
            (),
            steps::graph_plans_on_the_device,
        ),
        case(
            "batch_invariant_replays",
            (),
            steps::batch_invariant_replays,
        ),
        case("destroyed_in_flight", (), steps::destroyed_in_flight),
        case("replan_in_flight", (), steps::replan_in_flight),
        case("two_streams", (), steps::two_streams),
        case("threads_share_a_plan", (), steps::threads_share_a_plan),
        case("captures_are_refused", (), steps::captures_are_refused),
        case("append", (), operators::append),
        case("merge", (), operators::merge),
        case("cp_reorder", (), context_parallel::cp_reorder),
        case("cp_correct", (), context_parallel::cp_correct),
        case("mla_append", (), mla_cache::mla_append),
        case("mla_gather", (), mla_cache::mla_gather),
        case(
            "records_beyond_the_tensors",
            (),
            mla_cache::records_beyond_the_tensors,
        ),
        case(
            "batches_beyond_the_tensors",
            (),
            bounds::batches_beyond_the_tensors,
        ),
        case("slots_beyond_the_cache", (), bounds::slots_beyond_the_cache),
    ];
    harness::main(&cases, |_, _| match cuda_device_count() {
        0 => Err("no CUDA device".into()),
        _ => Ok(()),
    })
}
