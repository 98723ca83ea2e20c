//! Trees of draft tokens: masks, positions and links against the closure of the matrix of parents, and attention under
//! the masks against attention of every path alone.

use crate::common::door::{DOORS, Session};
use crate::common::instance::Scratch;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::random;
use crate::common::tree::{ALL_BUT_BITS, Forest, Grown, grown};
use crate::common::values::{mix, normal, shuffled};
use folio::api::{BatchInput, Stream, Target};
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage, Mask};
use folio::tensor::Tensor;
use proptest::prelude::*;

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

fn shape() -> impl Strategy<Value = Grown> {
    prop_oneof![
        6 => Just(Grown::Anyhow),
        1 => Just(Grown::Chain),
        1 => Just(Grown::Star),
    ]
}

fn forests() -> impl Strategy<Value = Forest> {
    let request = (
        prop_oneof![3 => 0usize..12, 2 => 0usize..70],
        0i32..40,
        shape(),
    );
    let batch = prop::collection::vec(request, 0..6);
    let flags = (any::<bool>(), 0u32..128, 0u32..128, 0i64..5);
    (batch, flags, any::<u64>()).prop_map(|(batch, (is_ragged, wanted, wide, spare), seed)| {
        let size = batch.first().map_or(0, |request| request.0);
        let trees = (0..).zip(&batch).map(|(b, &(own, _, shape))| {
            grown(shape, if is_ragged { own } else { size }, mix(seed ^ b))
        });
        let prefix_lens = batch.iter().map(|request| request.1).collect();
        let forest = Forest::new(trees.collect(), prefix_lens);
        Forest {
            is_ragged,
            wanted: forest.wanted & wanted,
            wide,
            spare,
            ..forest
        }
    })
}

proptest! {
    #![proptest_config(random::cases(200))]

    #[test]
    fn any_trees(forest in forests()) {
        for session in sessions() {
            prop_assert_eq!(forest.check(&*session, &HostMemory), Ok(()));
        }
    }
}

/// The parents that belong to first children and next siblings.
fn parents_of(next_token: &[i64], next_sibling: &[i64]) -> Vec<i32> {
    let mut parents = vec![-1; next_token.len()];
    for (token, &first) in (0..).zip(next_token) {
        let mut child = first;
        while child >= 0 {
            parents[child as usize] = token;
            child = next_sibling[child as usize];
        }
    }
    parents
}

/// SGLang's test of its tree kernel (`test_build_eagle_tree`): its lists come back from the parents that they mean.
#[test]
fn sglang_trees() {
    let next_token = [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]];
    let next_sibling = [
        [-1, 2, -1, -1, -1, -1, -1, -1],
        [-1, -1, 3, 4, 5, -1, -1, -1],
    ];
    let positions = [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14];
    let parents: Vec<Vec<i32>> = (0..2)
        .map(|b| parents_of(&next_token[b], &next_sibling[b]))
        .collect();
    assert_eq!(parents[0], [-1, 0, 0, 1, 2, 3, 4, 5]);
    assert_eq!(parents[1], [-1, 0, 1, 1, 1, 1, 3, 6]);
    let forest = Forest {
        wide: 0x7f,
        ..Forest::new(parents, vec![5, 10])
    };
    for session in sessions() {
        let tensors = forest.tensors(&HostMemory);
        forest.call(&*session, &tensors).unwrap();
        assert_eq!(forest.compare(&tensors), Ok(()));
        let values = |at: usize| {
            let image = tensors.output(at);
            let all = (0..16).map(|n| image.bits(&[n / 8, n % 8]) as i64);
            all.collect::<Vec<i64>>()
        };
        assert_eq!(values(4), positions);
        assert_eq!(values(5), next_token.concat());
        assert_eq!(values(6), next_sibling.concat());
        // Chains 0 1 3 5 7 and 0 2 4 6 of the first tree: the rows of 7 and 6.
        let rows = tensors.output(3);
        assert_eq!(rows.bits(&[0, 7, 0]), 0b1010_1011);
        assert_eq!(rows.bits(&[0, 6, 0]), 0b0101_0101);
    }
}

#[test]
fn large_trees() {
    let trees = [
        (Grown::Anyhow, 1024, 33),
        (Grown::Chain, 1030, 0),
        (Grown::Star, 300, 5),
    ];
    let parents = trees.map(|(how, size, _)| grown(how, size, 7)).to_vec();
    let forest = Forest {
        wanted: ALL_BUT_BITS,
        ..Forest::new(parents, trees.map(|tree| tree.2).to_vec())
    };
    // The oracle asks for every element with a walk of its own.
    for door in DOORS {
        let session = door.open(Target::Cpu { num_threads: 2 }).unwrap();
        assert_eq!(forest.check(&*session, &HostMemory), Ok(()));
    }
}

/// Positions that are no float32.
#[test]
fn far_positions() {
    let prefix_len = i32::MAX - 3;
    let forest = Forest {
        wanted: 1 << 4,
        ..Forest::new(vec![vec![-1, 0, 1]], vec![prefix_len])
    };
    for session in sessions() {
        assert_eq!(forest.check(&*session, &HostMemory), Ok(()));
    }
}

const HEADS: [i64; 2] = [4, 2];
const DIM: i64 = 16;

/// A cache of a row per slot, and decodes over it.
struct Layer<'a> {
    session: &'a dyn Session,
    k: Resident<'static>,
    v: Resident<'static>,
}

fn integers(values: &[i32]) -> Resident<'static> {
    Resident::new(&HostMemory, Image::of_i32(&[values.len() as i64], values))
}

fn numbers(shape: &[i64], seed: u64) -> Resident<'static> {
    let count = shape.iter().product::<i64>() as u64;
    let values: Vec<f32> = (0..count)
        .map(|n| normal(mix(seed ^ mix(n))) as f32)
        .collect();
    Resident::new(&HostMemory, Image::of_f32(shape, &values))
}

impl Layer<'_> {
    /// Attention of rows `q` in requests of `qo_len` rows, each over its slots.
    fn attend(&self, q: Tensor, qo_len: u32, slots: &[Vec<i32>], mask: Mask) -> Image {
        let batch = slots.len() as u32;
        let lens: Vec<i32> = slots.iter().map(|slots| slots.len() as i32).collect();
        let desc = AttentionDesc {
            kind: Kind::Decode,
            q_dtype: DType::F32,
            kv_format: DType::F32.into(),
            o_dtype: DType::F32,
            num_qo_heads: HEADS[0] as u32,
            num_kv_heads: HEADS[1] as u32,
            head_dim_qk: DIM as u32,
            head_dim_vo: DIM as u32,
            kv: KvStorage::Paged {
                page_size: 1,
                layout: KvLayout::Nhd,
            },
            max_batch_size: batch,
            max_qo_len: qo_len,
            max_num_tokens: batch * qo_len,
            max_kv_len: lens.iter().copied().max().unwrap_or(1) as u32,
            max_num_pages: 0,
            graph: false,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        };
        let mut handle = self.session.attention(desc).unwrap();
        let ends: Vec<i32> = (0..=slots.len())
            .map(|b| lens[..b].iter().sum::<i32>())
            .collect();
        let [ends, ids, lens] = [&ends, &slots.concat(), &lens].map(|values| integers(values));
        let batch = BatchInput {
            qo_len,
            kv_indptr: Some(ends.tensor()),
            kv_indices: Some(ids.tensor()),
            kv_len: Some(lens.tensor()),
            ..BatchInput::default()
        };
        let scratch = Scratch::new(&HostMemory, &handle.workspace().unwrap());
        scratch.plan(&mut *handle, &batch).unwrap();
        let o = View::compact(DType::F32, q.shape());
        let o = Resident::new(&HostMemory, Image::poisoned(o));
        let args = AttentionArgs {
            mask,
            ..AttentionArgs::new(q, self.k.tensor(), self.v.tensor(), o.tensor())
        };
        handle.run(&args, Stream::default()).unwrap();
        o.current()
    }
}

/// A token under the built masks attends as the last token of its path, from the first key to it, alone.
#[test]
fn attention_is_that_of_each_path() {
    let (size, prefix_lens) = (13, vec![21, 0, 6]);
    let trees: Vec<Vec<i32>> = (1..=3)
        .map(|seed| grown(Grown::Anyhow, size, seed))
        .collect();
    let forest = Forest::new(trees.clone(), prefix_lens.clone());
    let rows = (size * trees.len()) as i64;
    let num_slots = 100;
    for session in sessions() {
        let cache = [num_slots, HEADS[1], DIM];
        let layer = Layer {
            session: &*session,
            k: numbers(&cache, 1),
            v: numbers(&cache, 2),
        };
        let q = numbers(&[rows, HEADS[0], DIM], 3);
        let mut pool = shuffled(4, num_slots as usize).into_iter();
        let own = prefix_lens
            .iter()
            .map(|&prefix_len| pool.by_ref().take(prefix_len as usize + size).collect());
        let slots: Vec<Vec<i32>> = own.collect();
        let mut paths = Vec::new();
        for ((tree, &prefix_len), slots) in trees.iter().zip(&prefix_lens).zip(&slots) {
            let (prefix, drafts) = slots.split_at(prefix_len as usize);
            for token in 0..size {
                let above = |&at: &usize| usize::try_from(tree[at]).ok();
                let path = std::iter::successors(Some(token), above).map(|at| drafts[at]);
                let mut path: Vec<i32> = path.collect();
                path.reverse();
                paths.push([prefix, &path].concat());
            }
        }
        let want = layer.attend(q.tensor(), 1, &paths, Mask::Causal);
        let tensors = forest.tensors(&HostMemory);
        forest.call(&*session, &tensors).unwrap();
        let args = tensors.args();
        for mask in [
            Mask::Bytes(args.mask_bytes.unwrap()),
            Mask::Bits(args.mask_bits.unwrap()),
        ] {
            let is = layer.attend(q.tensor(), size as u32, &slots, mask);
            crate::common::instance::for_each_index(&[rows, HEADS[0], DIM], |at| {
                let (is, want) = (is.value(at), want.value(at));
                // Sums of at most 34 terms in another order.
                let close = (is - want).abs() <= 34.0 * f64::from(f32::EPSILON);
                assert!(close, "{at:?}: {is}, not {want}");
            });
        }
    }
}
