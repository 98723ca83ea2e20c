//! Trees of draft tokens on the device: every byte against the closure of the parents.

use crate::common::memory::{Image, Resident};
use crate::common::tree::{Forest, Grown, grown};
use crate::common::values::mix;
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::api::Stream;
use folio::problem::TreeMaskArgs;

fn forest(sizes: &[usize], prefix_lens: &[i32], seed: u64) -> Forest {
    let shapes = [Grown::Anyhow, Grown::Chain, Grown::Anyhow, Grown::Star];
    let tree = |(b, &size): (usize, &usize)| grown(shapes[b % 4], size, mix(seed ^ b as u64));
    let trees = sizes.iter().enumerate().map(tree).collect();
    Forest::new(trees, prefix_lens.to_vec())
}

/// Trees of one size and of many, up to more tokens than are looked up.
pub fn tree_mask() {
    let device = session();
    let many: Vec<usize> = (0..300).map(|b| b * 7 % 11).collect();
    let lens: Vec<i32> = (0..300).map(|b| b * 13 % 29).collect();
    let cases = [
        (vec![], vec![]),
        (vec![0, 0], vec![3, 4]),
        (vec![1], vec![0]),
        (vec![8, 8], vec![5, 10]),
        (vec![3, 0, 5, 1], vec![0, 1, 2, 3]),
        (vec![6; 40], lens[..40].to_vec()),
        (vec![64, 33, 0, 16], vec![1000, 0, 7, 5003]),
        (vec![32; 3], vec![31, 32, 33]),
        // Whole tiles and parts of one, with rows that begin at any bit of a store.
        (
            vec![16, 17, 48, 7, 31, 65],
            vec![127, 128, 129, 1025, 250, 383],
        ),
        (vec![1024], vec![129]),
        (vec![1500, 700, 1030], vec![3, 0, 17]),
        (many, lens),
    ];
    for (seed, (sizes, prefix_lens)) in (0..).zip(cases) {
        let forest = forest(&sizes, &prefix_lens, seed);
        for (is_ragged, spare) in [(forest.is_ragged, 0), (true, 5)] {
            for wide in [0, 0b1010000, 0x7f] {
                let forest = Forest {
                    is_ragged,
                    spare,
                    wide,
                    ..forest.clone()
                };
                let outcome = forest.check(&*device, &DeviceMemory);
                assert_eq!(outcome, Ok(()), "{sizes:?} {is_ragged} {wide}");
            }
        }
    }
}

/// Wrong parents are those of roots. Wrong lengths, and outputs that are too short, leave everything else as it was: the
/// memory around a tensor is watched.
pub fn tree_mask_of_wrong_numbers() {
    let device = session();
    for is_ragged in [false, true] {
        let mut forest = forest(&[40, 40, 40], &[3, 9, 0], 11);
        forest.is_ragged = is_ragged;
        for (token, parent) in [
            (0, 0),
            (5, 5),
            (7, 39),
            (9, i32::MAX),
            (20, -7),
            (30, i32::MIN),
        ] {
            forest.parents[1][token] = parent;
        }
        assert_eq!(forest.check(&*device, &DeviceMemory), Ok(()));
        // Lengths that are none, and room for those that are stated here.
        for prefix_lens in [[-5, i32::MIN, -1], [i32::MAX, 9, i32::MAX], [1 << 20, 0, 5]] {
            let tensors = forest.tensors(&DeviceMemory);
            let lens = Image::of_i32(&[3], &prefix_lens);
            let lens = Resident::new(&DeviceMemory, lens);
            let args = TreeMaskArgs {
                prefix_lens: lens.tensor(),
                ..tensors.args()
            };
            device.tree_mask(&args, Stream::default()).unwrap();
            gpu::synchronize_all();
            tensors.assert_within_bounds();
        }
    }
    let forest = Forest {
        is_ragged: true,
        ..forest(&[4, 9, 2], &[3, 9, 0], 12)
    };
    for qo_indptr in [[0, -4, 9, 15], [15, 9, 4, 0], [0, 4, i32::MAX, 15], [3; 4]] {
        let tensors = forest.tensors(&DeviceMemory);
        let ends = Image::of_i32(&[4], &qo_indptr);
        let ends = Resident::new(&DeviceMemory, ends);
        let args = TreeMaskArgs {
            qo_indptr: Some(ends.tensor()),
            ..tensors.args()
        };
        device.tree_mask(&args, Stream::default()).unwrap();
        gpu::synchronize_all();
        tensors.assert_within_bounds();
    }
}

/// A captured launch makes the masks of the numbers that are there when it is replayed.
pub fn tree_mask_replays() {
    let device = session();
    let stream = gpu::new_stream();
    let first = forest(&[16; 5], &[10, 20, 30, 40, 50], 1);
    let tensors = first.tensors(&DeviceMemory);
    let args = tensors.args();
    device.tree_mask(&args, stream).unwrap();
    gpu::synchronize_all();
    let graph = gpu::capture(stream, || device.tree_mask(&args, stream).unwrap());
    // The sum of the lengths is the same, and so are the sizes of the masks.
    let second = forest(&[16; 5], &[50, 10, 40, 30, 20], 2);
    let source = second.tensors(&DeviceMemory);
    tensors.take_inputs_of(&source);
    graph.launch(stream);
    gpu::synchronize_all();
    assert_eq!(second.compare(&tensors), Ok(()));
}
