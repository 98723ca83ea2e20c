//! Append and decode by one call on the device: what it leaves is what two calls leave, in graphs too, and it launches no more
//! than decode alone where one kernel does both.

use crate::common::append_run::{Angle, AppendRun, append_runs};
use crate::common::random;
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::dtype::DType;
use folio::problem::KvLayout;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn check(step: &AppendRun) -> Result<(), String> {
    let session = session();
    let [one, two] = [true, false].map(|one| step.take(&*session, &DeviceMemory, one).unwrap());
    step.compare(&one, &two)
}

pub fn append_run() {
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(200)
    });
    let result = runner.run(&append_runs(3000), |step| {
        check(&step).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Every kernel that makes new tokens, over one and several tiles of rows, split keys and drafts that two tiles share.
pub fn append_run_by_every_kernel() {
    let caches = |dtype| [dtype, DType::F8E4M3, DType::F8E5M2];
    let all = [DType::BF16, DType::F16].into_iter();
    let all = all.flat_map(|dtype| caches(dtype).map(|cache| (dtype, cache)));
    let mut seed = 0;
    for (dtype, cache) in all {
        for (dim, group) in [(64, 8), (128, 4), (128, 1), (256, 2), (64, 16), (128, 12)] {
            for requests in [
                vec![(1, 1), (1, 16), (1, 17), (1, 4096)],
                vec![(3, 65), (2, 31), (4, 2000), (0, 5)],
                vec![(1, 130); 70],
            ] {
                seed += 1;
                let step = AppendRun {
                    cache,
                    group,
                    kv_heads: 4,
                    dim,
                    requests,
                    page_size: [8, 16, 64][seed % 3],
                    layout: [KvLayout::Nhd, KvLayout::Hnd][seed % 2],
                    angle: [
                        Angle::Computed,
                        Angle::Table { is_f32: true },
                        Angle::Table { is_f32: false },
                    ][seed / 2 % 3],
                    rotary_dim: dim >> (seed / 3 % 2),
                    is_interleaved: seed % 5 == 0,
                    norm: [None, Some(true), Some(false)][seed % 3],
                    uncached: [0, 3][seed % 2],
                    seed: seed as u64,
                    ..AppendRun::of_one_token(dtype, 16)
                };
                assert_eq!(check(&step), Ok(()), "{step:?}");
            }
        }
    }
}

/// A captured step: as many nodes as decode alone, and each replay leaves what two calls leave.
pub fn append_run_in_a_graph() {
    let session = session();
    let step = AppendRun {
        graph: true,
        group: 4,
        requests: vec![(1, 700), (1, 16), (1, 5000)],
        ..AppendRun::of_one_token(DType::BF16, 16)
    };
    let [mut fused, mut alone] = [0, 0];
    let one = step
        .take_with(&*session, &DeviceMemory, |handle, append, args| {
            let stream = gpu::new_stream();
            gpu::synchronize_all();
            let run = gpu::capture(stream, || handle.run(args, stream).unwrap());
            let graph = gpu::capture(stream, || handle.append_run(append, args, stream).unwrap());
            (alone, fused) = (run.num_nodes(), graph.num_nodes());
            graph.launch(stream);
            graph.launch(stream);
            gpu::synchronize_all();
            Ok(())
        })
        .unwrap();
    assert_eq!(fused, alone);
    let two = step.take(&*session, &DeviceMemory, false).unwrap();
    assert_eq!(step.compare(&one, &two), Ok(()));
}
