//! Copies of pages on the device: every bit arrives, and no other bit changes.

use crate::common::copy::{Copying, Places};
use crate::common::memory::{HostMemory, Image, Memory, Resident, View};
use crate::gpu::{DeviceMemory, PinnedMemory, capture, new_stream, synchronize_all};
use crate::problems::session;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{CopyArgs, PagesToCopy};

fn plain() -> Copying {
    Copying {
        dtype: DType::BF16,
        num_pages: [90, 70],
        k_page: [16, 4, 128],
        v_page: Some([16, 4, 72]),
        is_swapped: false,
        is_in_place: false,
        is_wide: false,
        num_pairs: 60,
        gaps: [0, 0],
        lead: 0,
        seed: 1,
    }
}

/// Shapes that the kernel takes in different ways: by 16, 4, 2 and 1 bytes, in whole pieces and not.
fn shapes() -> Vec<Copying> {
    let records = Copying {
        dtype: DType::U8,
        k_page: [64, 1, 656],
        v_page: None,
        ..plain()
    };
    let mut shapes = vec![
        plain(),
        records.clone(),
        Copying {
            lead: 1,
            ..records.clone()
        },
        Copying {
            gaps: [2, 4],
            ..records
        },
        Copying {
            dtype: DType::F32,
            k_page: [1, 1, 3],
            v_page: Some([1, 2, 1]),
            num_pages: [700, 5000],
            num_pairs: 5000,
            ..plain()
        },
        Copying {
            k_page: [7, 3, 13],
            v_page: Some([7, 3, 8]),
            lead: 3,
            ..plain()
        },
        // Several pages of a piece, and pages that are a piece and a bit.
        Copying {
            dtype: DType::U8,
            k_page: [1, 1, 656],
            v_page: Some([1, 1, 48]),
            num_pages: [3000, 2000],
            num_pairs: 1500,
            ..plain()
        },
        Copying {
            dtype: DType::U8,
            k_page: [1, 1, 2064],
            v_page: None,
            ..plain()
        },
        Copying {
            dtype: DType::F8E4M3,
            k_page: [16, 8, 128],
            v_page: Some([16, 8, 128]),
            is_swapped: true,
            gaps: [16, 32],
            ..plain()
        },
        Copying {
            num_pages: [3, 2],
            k_page: [256, 64, 128],
            v_page: Some([256, 64, 100]),
            num_pairs: 2,
            ..plain()
        },
    ];
    let both = shapes.clone().into_iter().map(|copying| Copying {
        num_pages: [copying.num_pages[0]; 2],
        is_in_place: true,
        is_wide: true,
        ..copying
    });
    shapes.extend(both);
    shapes
}

pub fn copy() {
    let device = session();
    for (n, copying) in shapes().into_iter().enumerate() {
        let pairs: [&dyn Memory; 3] = [&DeviceMemory, &HostMemory, &PinnedMemory];
        for pairs in pairs {
            let copying = Copying {
                seed: n as u64,
                ..copying.clone()
            };
            let places = Places {
                pairs,
                ..Places::all(&DeviceMemory)
            };
            let outcome = copying.check(&*device, &places);
            assert_eq!(outcome, Ok(()), "{copying:?}, pairs on {}", pairs.device());
        }
    }
}

/// Between the device and page-locked host memory.
pub fn swaps() {
    let device = session();
    let all: [&dyn Memory; 2] = [&DeviceMemory, &PinnedMemory];
    for copying in shapes() {
        for (src, dst) in [(0, 1), (1, 0), (1, 1)] {
            for pairs in all {
                let (src, dst) = (all[src], all[dst]);
                let places = Places { src, dst, pairs };
                let outcome = copying.check(&*device, &places);
                assert_eq!(outcome, Ok(()), "{copying:?}");
            }
        }
    }
}

/// Pairs in device memory whose pages do not exist are skipped.
pub fn pairs_beyond_the_tensors() {
    let device = session();
    for is_wide in [false, true] {
        let copying = Copying { is_wide, ..plain() };
        let valid = copying.pairs();
        let mut pairs = Vec::new();
        for (n, pair) in valid.iter().enumerate() {
            let far = [90, 1 << 20, i32::MAX.into(), i32::MIN.into()][n % 4];
            pairs.push(*pair);
            pairs.push([far, pair[1]]);
            pairs.push([pair[0], far.max(70)]);
            if is_wide {
                pairs.push([1 << 32 | pair[0], pair[1]]);
            }
        }
        let places = Places::all(&DeviceMemory);
        let outcome = copying.check_pairs(&*device, &places, &pairs, &valid);
        assert_eq!(outcome, Ok(()));
    }
}

/// A replay copies by the pairs that are in memory then.
pub fn copy_graph() {
    let device = session();
    let numbers = |first: u64| {
        let view = View::compact(DType::F32, &[4, 8]);
        let mut image = Image::poisoned(view);
        for page in 0..4 {
            for at in 0..8 {
                image.put(&[page, at], first + 8 * page as u64 + at as u64);
            }
        }
        Resident::new(&DeviceMemory, image)
    };
    let (src, dst) = (numbers(1), numbers(1000));
    let pairs = Resident::new(&DeviceMemory, Image::of_i32(&[2, 2], &[0, 1, 3, 2]));
    let others = Resident::new(&DeviceMemory, Image::of_i32(&[2, 2], &[2, 0, -1, 3]));
    let args = CopyArgs {
        k: PagesToCopy {
            src: src.tensor(),
            dst: dst.tensor(),
        },
        v: None,
        page_pairs: pairs.tensor(),
    };
    // Loads the code.
    device.copy(&args, Stream::default()).unwrap();
    synchronize_all();
    let stream = new_stream();
    let graph = capture(stream, || device.copy(&args, stream).unwrap());
    for (pairs_now, copied) in [(&pairs, vec![(0, 1), (3, 2)]), (&others, vec![(2, 0)])] {
        pairs.copy_from(pairs_now);
        dst.reset();
        graph.launch(stream);
        synchronize_all();
        let mut want = dst.image().clone();
        for (from, to) in copied {
            for at in 0..8 {
                want.put(&[to, at], src.image().bits(&[from, at]));
            }
        }
        assert_eq!(dst.current(), want);
    }
}
