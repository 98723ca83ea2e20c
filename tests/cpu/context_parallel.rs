//! Context parallelism with all ranks in one process: what ranks gather and put together is what one rank has, and
//! corrected outputs add up to the output over all keys.

use crate::common::context_parallel::{Dealt, Shares, ranks_attend};
use crate::common::door::{DOORS, Session};
use crate::common::memory::HostMemory;
use crate::common::mla::Cache;
use crate::common::mla_cache::FLOATS;
use crate::common::random;
use folio::api::Target;
use folio::dtype::DType;
use folio::problem::LogBase;
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

fn dealt() -> impl Strategy<Value = Dealt> {
    let lens = prop::collection::vec(prop_oneof![1 => Just(0i32), 3 => 0i32..90], 1..6);
    let sizes = (1u32..6, 1u32..9, prop::sample::select(vec![8u32, 1, 3, 16]));
    (
        lens,
        sizes,
        0u64..200,
        prop::sample::select(vec![4i64, 1, 5]),
        0u32..4,
    )
        .prop_map(
            |(context_lens, (world_size, interleave, page_size), spare, width, gap)| {
                let round = u64::from(world_size * interleave * page_size);
                Dealt {
                    workspace_tokens: context_lens.len() as u64 * round + spare,
                    context_lens,
                    world_size,
                    interleave,
                    page_size,
                    width,
                    gap,
                }
            },
        )
}

fn shares() -> impl Strategy<Value = Shares> {
    let sizes = (
        1i64..7,
        0i64..6,
        1i64..4,
        prop::sample::select(vec![64i64, 8, 13, 300]),
    );
    let dtype = prop::sample::select(FLOATS.to_vec());
    (sizes, dtype, any::<[bool; 3]>(), 0u32..9, any::<u64>()).prop_map(
        |((world_size, tokens, heads, dim), dtype, flags, gap, seed)| Shares {
            world_size,
            tokens,
            heads,
            dim,
            dtype,
            base: if flags[0] { LogBase::Two } else { LogBase::E },
            heads_first: flags[1],
            in_place: flags[2],
            gap,
            seed,
        },
    )
}

/// The page is no multiple of a round: a chunk of vLLM's would differ from rank to rank.
#[test]
fn chunks_are_whole_rounds() {
    let dealt = Dealt {
        context_lens: vec![40, 0, 30],
        world_size: 2,
        interleave: 8,
        page_size: 8,
        workspace_tokens: 48,
        width: 4,
        gap: 0,
    };
    assert_eq!(dealt.tables().chunk_tokens, 16);
    for session in sessions() {
        assert_eq!(dealt.check_chunks(&*session, &HostMemory), Ok(()));
    }
}

/// The heads are those of a rank of tensor parallelism, and more than a tile takes.
#[test]
fn ranks_attend_as_one() {
    for door in DOORS {
        let session = door.open(Target::Cpu { num_threads: 2 }).unwrap();
        for (heads, dtype, cache) in [
            (8, DType::F32, Cache::Records),
            (5, DType::F16, Cache::Two),
            (40, DType::BF16, Cache::Records),
            (8, DType::BF16, Cache::DsMla),
        ] {
            ranks_attend(&*session, &HostMemory, heads, dtype, cache);
        }
    }
}

proptest! {
    #![proptest_config(random::cases(60))]

    #[test]
    fn ranks_put_together_have_every_token_once(dealt in dealt()) {
        for session in sessions() {
            prop_assert_eq!(dealt.check_chunks(&*session, &HostMemory), Ok(()));
        }
    }

    #[test]
    fn corrected_outputs_add_up(shares in shares()) {
        for session in sessions() {
            prop_assert_eq!(shares.check(&*session, &HostMemory), Ok(()));
        }
    }
}
