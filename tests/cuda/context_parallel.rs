//! Context parallelism on the device, with all ranks on one.

use crate::common::context_parallel::{Dealt, Shares, ranks_attend};
use crate::common::mla::Cache;
use crate::common::mla_cache::FLOATS;
use crate::gpu::DeviceMemory;
use crate::problems::session;
use folio::dtype::DType;
use folio::problem::LogBase;

pub fn cp_reorder() {
    let device = session();
    // More requests than a warp has lanes.
    let many: Vec<i32> = (0..70).map(|b| (b * 13) % 40).collect();
    for (n, (world_size, interleave, page_size)) in
        [(1, 1, 16), (2, 8, 8), (4, 1, 16), (5, 3, 4), (8, 16, 16)]
            .into_iter()
            .enumerate()
    {
        for (context_lens, width, gap) in [
            (vec![700, 0, 130, 1000], 8, 0),
            (vec![40, 0, 30], 5, 3),
            (many.clone(), 4, 4),
        ] {
            let round = u64::from(world_size * interleave * page_size);
            let dealt = Dealt {
                workspace_tokens: context_lens.len() as u64 * round * (2 + n as u64),
                context_lens,
                world_size,
                interleave,
                page_size,
                width,
                gap,
            };
            assert_eq!(
                dealt.check_chunks(&*device, &DeviceMemory),
                Ok(()),
                "{dealt:?}"
            );
        }
    }
}

pub fn cp_correct() {
    let device = session();
    for dtype in FLOATS {
        for (n, (world_size, dim, gap)) in [(1, 128, 0), (2, 512, 8), (8, 64, 0), (5, 13, 3)]
            .into_iter()
            .enumerate()
        {
            let shares = Shares {
                world_size,
                tokens: 37,
                heads: 5,
                dim,
                dtype,
                base: if n % 2 == 0 { LogBase::E } else { LogBase::Two },
                heads_first: n % 2 == 1,
                in_place: n > 1,
                gap,
                seed: 3 + n as u64,
            };
            assert_eq!(shares.check(&*device, &DeviceMemory), Ok(()), "{shares:?}");
        }
    }
}

/// Few rows and many, by every kernel that attends on the ranks.
pub fn cp_attend() {
    let device = session();
    for (heads, dtype, cache) in [
        (8, DType::BF16, Cache::Records),
        (8, DType::F16, Cache::Two),
        (8, DType::BF16, Cache::DsMla),
        (40, DType::BF16, Cache::Records),
        (40, DType::BF16, Cache::DsMla),
    ] {
        ranks_attend(&*device, &DeviceMemory, heads, dtype, cache);
    }
}
