//! Copies of pages: every bit of the pairs' pages arrives, and no other bit changes.

use crate::common::copy::{Copying, Places};
use crate::common::door::{DOORS, Session};
use crate::common::memory::HostMemory;
use crate::common::random;
use folio::api::Target;
use folio::dtype::DType;
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

/// Keys and values of 16 bits.
fn plain() -> Copying {
    Copying {
        dtype: DType::BF16,
        num_pages: [9, 7],
        k_page: [16, 4, 32],
        v_page: Some([16, 4, 24]),
        is_swapped: false,
        is_in_place: false,
        is_wide: false,
        num_pairs: 6,
        gaps: [0, 0],
        lead: 0,
        seed: 1,
    }
}

fn copying() -> impl Strategy<Value = Copying> {
    let dtypes = [
        DType::F32,
        DType::F16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::U8,
        DType::I64,
    ];
    let page = || [1i64..5, 1i64..4, 1i64..40];
    (
        prop::sample::select(dtypes.to_vec()),
        [0i64..12, 0i64..12],
        page(),
        prop::option::of(page()),
        any::<[bool; 3]>(),
        0usize..12,
        ([0u32..3, 0u32..3], 0u32..4, any::<u64>()),
    )
        .prop_map(
            |(dtype, num_pages, k_page, v_page, flags, num_pairs, (gaps, lead, seed))| Copying {
                dtype,
                num_pages,
                k_page,
                v_page,
                is_swapped: flags[0],
                is_in_place: flags[1],
                is_wide: flags[2],
                num_pairs,
                gaps,
                lead,
                seed,
            },
        )
        .prop_map(|mut copying| {
            if copying.is_in_place {
                copying.num_pages[1] = copying.num_pages[0];
            }
            copying
        })
}

fn check(copying: &Copying) -> Result<(), String> {
    for session in sessions() {
        copying.check(&*session, &Places::all(&HostMemory))?;
    }
    Ok(())
}

#[test]
fn records_of_656_bytes() {
    let records = Copying {
        dtype: DType::U8,
        k_page: [64, 1, 656],
        v_page: None,
        ..plain()
    };
    assert_eq!(check(&records), Ok(()));
}

/// Enough bytes that the CPU writes past its caches, in pages whose ends are within a piece of work.
#[test]
fn many_bytes() {
    let large = Copying {
        num_pages: [20, 16],
        k_page: [16, 8, 640],
        v_page: Some([16, 8, 647]),
        num_pairs: 16,
        gaps: [13, 0],
        ..plain()
    };
    let session = DOORS[0].open(Target::Cpu { num_threads: 2 }).unwrap();
    assert_eq!(large.check(&*session, &Places::all(&HostMemory)), Ok(()));
}

#[test]
fn a_page_may_be_its_own_copy() {
    let in_place = Copying {
        is_in_place: true,
        num_pages: [8, 8],
        ..plain()
    };
    for session in sessions() {
        let pairs = [[3, 3], [5, 2], [5, 6]];
        let places = Places::all(&HostMemory);
        let outcome = in_place.check_pairs(&*session, &places, &pairs, &pairs);
        assert_eq!(outcome, Ok(()));
    }
}

proptest! {
    #![proptest_config(random::cases(150))]

    #[test]
    fn pages_are_copied(copying in copying()) {
        prop_assert_eq!(check(&copying), Ok(()));
    }
}
