//! Tokens of a paged cache copied to dense rows: every bit of every row, and no other.

use crate::common::door::{DOORS, Session};
use crate::common::gather::Gathering;
use crate::common::memory::HostMemory;
use crate::common::random;
use folio::api::Target;
use folio::dtype::DType;
use folio::problem::KvLayout;
use proptest::prelude::*;

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 3 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

fn check(gathering: &Gathering) -> Result<(), String> {
    for session in sessions() {
        gathering.check(&*session, &HostMemory)?;
    }
    Ok(())
}

fn gatherings() -> impl Strategy<Value = Gathering> {
    let floats = [DType::F32, DType::F16, DType::BF16];
    let caches = [floats.to_vec(), vec![DType::F8E4M3, DType::F8E5M2]].concat();
    let types = (
        prop::sample::select(caches),
        prop::sample::select(floats.to_vec()),
    );
    let dim = || prop::sample::select(vec![64i64, 8, 13, 72, 200]);
    let pages = (prop::sample::select(vec![16i64, 1, 3, 8]), 1i64..9);
    let requests = prop::collection::vec((0i32..30, 0i32..20), 0..6);
    let gap = || prop_oneof![2 => Just(0u32), 1 => Just(8), 1 => 1u32..9];
    let gaps = [gap(), gap(), gap(), gap(), gap()];
    let scales = (
        prop_oneof![Just(0.0f32), 0.01f32..4.0],
        any::<Option<bool>>(),
    );
    (
        types,
        (1i64..6, [dim(), dim()]),
        pages,
        requests,
        (any::<[bool; 4]>(), random::integers()),
        scales,
        (gaps, any::<u64>()),
    )
        .prop_map(
            |(types, (heads, dims), pages, requests, (flags, integers), scales, (gaps, seed))| {
                let (cache, rows) = types;
                Gathering {
                    cache,
                    rows,
                    as_bytes: cache.is_fp8() && flags[0],
                    heads,
                    dims,
                    page_size: pages.0,
                    num_pages: pages.1,
                    layout: if flags[1] {
                        KvLayout::Nhd
                    } else {
                        KvLayout::Hnd
                    },
                    requests,
                    has_starts: flags[2],
                    as_table: flags[3],
                    integers,
                    scale: if cache.is_fp8() { scales.0 } else { 0.0 },
                    scales: scales.1.filter(|_| cache.is_fp8()),
                    gaps,
                    seed,
                }
            },
        )
}

proptest! {
    #![proptest_config(random::cases(150))]

    #[test]
    fn rows_hold_what_the_cache_holds(gathering in gatherings()) {
        prop_assert_eq!(check(&gathering), Ok(()));
    }
}
