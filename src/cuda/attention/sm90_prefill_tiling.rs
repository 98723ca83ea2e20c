//! How work is cut for the Hopper prefill kernels, by the tiles of a row of the kernel table. What kernels do with it is
//! `sm90_prefill`'s matter and `sm90_prefill_fp8`'s.

use super::kernel::{COMBINE_UNITS, OWN_KEY_BYTES};
use crate::cuda::driver::DeviceInfo;
use crate::cuda::kernels::attention::AttentionRow;
use crate::cuda::prefill_params::WARPGROUP_ROWS;
use crate::problem::{SmallItems, TailCosts, Tiling, Workers};

/// Query rows of a tile, whose warpgroups have so many positions.
pub fn rows_of_tile(row: &AttentionRow, positions: u32) -> u32 {
    row.shape.q_tile / WARPGROUP_ROWS * positions
}

/// [`Tiling::unit_bytes`]: a unit is 1.4 µs on an H200.
pub fn unit_bytes(device: &DeviceInfo) -> u32 {
    device.memory_bytes_in(1400)
}

/// How work is cut for a kernel whose warpgroups have so many positions in each of so many blocks of heads.
pub fn tiling(
    row: &AttentionRow,
    positions: u32,
    (sm_count, unit_bytes): (u32, u32),
    head_blocks: u32,
) -> Tiling {
    // One tile per multiprocessor.
    let at_a_time = sm_count / head_blocks;
    Tiling {
        q_tile: rows_of_tile(row, positions),
        q_parts: row.shape.q_tile / WARPGROUP_ROWS,
        kv_unit: row.shape.kv_tile,
        unit_bytes,
        max_splits: at_a_time,
        max_shares: 0,
        tail: TailCosts {
            most_chunks: 3 * sm_count / head_blocks,
            // 5 µs where a unit is 1.4 on an H200.
            item_units: 3,
            combine_units: 5,
            // With 3, 1000 new tokens with 32/8 heads took 38 µs instead of 35.
            least_gain: 8,
        },
        // About what combining takes: 4 to 5 µs on an H200, where a unit is 1.5 to 2.
        takes_shares: false,
        least_gain: 3,
        rows_of_unit: 0,
        invariant_chunk: u32::MAX,
        combine_units: COMBINE_UNITS,
        own_key_bytes: OWN_KEY_BYTES,
        workers: Workers {
            all: sm_count,
            of_item: head_blocks,
            small: SmallItems::NONE,
        },
    }
}
