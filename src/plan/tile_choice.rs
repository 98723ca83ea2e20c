//! Which of two tilings a batch is cut by. Large items read their keys once for many query rows, but workers are reserved for the
//! rows of the largest: where other requests have fewer, some of them are idle. `schedule` cuts.

use super::shares::Shares;
use crate::problem::{HostBatch, Tiling};

/// Smaller items have to take less time by one in so many: a request's keys are read for each of them.
const LEAST_GAIN: u64 = 20;

/// Of two tilings with equal units of keys, the one whose equal shares are shorter.
pub fn quicker(batch: &HostBatch<'_>, large: Tiling, small: Tiling) -> Tiling {
    let [of_large, of_small] = [large, small].map(|tiling| Shares::of(batch, &tiling).cost());
    match of_small + of_small / LEAST_GAIN < of_large {
        true => small,
        false => large,
    }
}
