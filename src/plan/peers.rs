//! Figures of other libraries' plans, for hosts that drive their kernels beside Folio's or compare with them:
//! FlashMLA's tile scheduler, FastDeploy's and SGLang's numbers of splits, vLLM's division of a batch into decodes and
//! prefills, and when it takes a cascade.
//! Folio's own plans are [`schedule`](super::schedule)'s.

/// Keys of a block of FlashMLA's tile scheduler, and query rows of a tile.
const FLASHMLA_BLOCK: u64 = 64;
/// Blocks that the start of a piece of a request costs.
const FLASHMLA_OVERHEAD: u64 = 5;

/// Numbers of a part in FlashMLA's tile scheduler metadata.
pub const FLASHMLA_RECORD: usize = 8;

/// Parts that FlashMLA's dense decode kernel cuts its work into.
pub fn flashmla_parts(num_sms: u64, q_len: u64, num_heads: u64, num_kv_heads: u64) -> u64 {
    let tiles = (q_len * num_heads / num_kv_heads).div_ceil(FLASHMLA_BLOCK);
    (num_sms / num_kv_heads / tiles.max(1)).max(1)
}

/// A place in the keys of a batch: before block `block` of request `request`, which `split` parts have begun.
#[derive(Clone, Copy)]
struct Cursor {
    request: usize,
    block: u64,
    split: u64,
}

/// Fills FlashMLA's tile scheduler metadata, a record for each part: first request, last request, first block, block
/// after the last, first split, whether the first and whether the last request are split, 0. A part whose first
/// request is after its last one is idle. `num_splits` gets the splits before each request, and all of them.
pub fn flashmla_metadata(
    seq_lens: &[i32],
    metadata: &mut [[i32; FLASHMLA_RECORD]],
    num_splits: &mut [i32],
) {
    let blocks = |request: usize| (seq_lens[request] as u64).div_ceil(FLASHMLA_BLOCK);
    let costs = (0..seq_lens.len()).map(|request| blocks(request).max(1) + FLASHMLA_OVERHEAD);
    let payload = costs.sum::<u64>().div_ceil(metadata.len() as u64) + FLASHMLA_OVERHEAD;
    let mut at = Cursor {
        request: 0,
        block: 0,
        split: 0,
    };
    num_splits[0] = 0;
    for record in metadata.iter_mut() {
        let begin = at;
        let mut left = payload;
        while at.request < seq_lens.len() {
            let cost = blocks(at.request).max(1) - at.block + FLASHMLA_OVERHEAD;
            if left < cost {
                if left > FLASHMLA_OVERHEAD {
                    at.block += left - FLASHMLA_OVERHEAD;
                    at.split += 1;
                }
                break;
            }
            left -= cost;
            num_splits[at.request + 1] = num_splits[at.request] + at.split as i32 + 1;
            at = Cursor {
                request: at.request + 1,
                block: 0,
                split: 0,
            };
        }
        let (last, end) = match at.block {
            0 => (at.request as i64 - 1, None),
            block => (at.request as i64, Some(block)),
        };
        let end = end.or_else(|| (last >= begin.request as i64).then(|| blocks(last as usize)));
        *record = [
            begin.request as i32,
            last as i32,
            begin.block as i32,
            end.unwrap_or(0) as i32,
            begin.split as i32,
            0,
            0,
            0,
        ];
    }
    for record in metadata.iter_mut().filter(|record| record[0] <= record[1]) {
        let is_split = |request: i32| {
            let request = request as usize;
            i32::from(num_splits[request + 1] - num_splits[request] > 1)
        };
        (record[5], record[6]) = (is_split(record[0]), is_split(record[1]));
    }
}

/// Splits of a request's keys in FastDeploy's Triton decode: one for each 256 keys, 1 to `most`.
pub fn num_kv_splits(kv_len: u64, most: u64) -> u64 {
    kv_len.div_ceil(256).clamp(1, most)
}

/// Keys of each of these splits but the last ones, which may have fewer or none: whole blocks of 32.
pub fn keys_per_split(kv_len: u64, splits: u64) -> u64 {
    kv_len.div_ceil(splits).next_multiple_of(32)
}

/// Heads and multiprocessors that a peer's heuristic weighs.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Query heads, a multiple of the KV heads.
    pub num_heads: u64,
    /// KV heads.
    pub num_kv_heads: u64,
    /// Multiprocessors of the device.
    pub num_sms: u64,
}

/// Splits of each request's keys as SGLang's get_num_kv_splits makes them, by two rules of which the larger number
/// counts: lengths that differ are cut to about the shortest, and all rows together fill the device. Lengths are 1 or more.
pub fn balanced_kv_splits(
    seq_lens: &[i32],
    num_group: u64,
    machine: Machine,
    most: u64,
) -> impl Iterator<Item = u64> + '_ {
    let lens = || seq_lens.iter().map(|&len| len as u64);
    let longest = lens().max().unwrap_or(1);
    let shortest = match lens().min().unwrap_or(1) {
        // A quarter more is as good as equal.
        shortest if 8 * longest < 10 * shortest => longest,
        shortest => shortest,
    };
    let by_length = longest.div_ceil(longest.div_ceil(shortest).min(most));
    // Long requests are worth more waves, by the logarithm of their blocks of 64 keys, in float32 as there.
    let waves = (longest as f32 / 64.0).log2().max(1.0);
    let blocks = (machine.num_sms as f32 * waves) as u64;
    let group_size = machine.num_heads / machine.num_kv_heads;
    let rows_of_request = match group_size {
        1 => machine.num_heads,
        _ => machine.num_heads.div_ceil(group_size.min(16)),
    };
    let rows = seq_lens.len() as u64 * num_group * rows_of_request;
    let by_rows = longest.div_ceil(blocks.div_ceil(rows.max(1)).clamp(1, most));
    lens().map(move |len| len.div_ceil(by_length).max(len.div_ceil(by_rows)))
}

/// Whether vLLM takes a cascade for requests that share so many keys, where no window and no ALiBi is in the way.
pub fn takes_cascade(shared: u64, query_lens: &[i32], machine: Machine) -> bool {
    /// Query rows, and keys, of a tile of the kernels that it compares.
    const TILE: u64 = 128;
    let requests = query_lens.len() as u64;
    if shared < 256 || requests < 8 {
        return false;
    }
    let group_size = machine.num_heads / machine.num_kv_heads;
    // Only then would split keys be an alternative.
    if group_size == 1 || query_lens.iter().any(|&len| len != 1) {
        return true;
    }
    let tiles = shared.div_ceil(TILE);
    let rows = machine.num_heads * requests.div_ceil(TILE);
    let cascade = rows.div_ceil(machine.num_sms) * tiles;
    let of_all = requests * machine.num_kv_heads * group_size.div_ceil(TILE) * tiles;
    cascade < of_all.div_ceil(machine.num_sms)
}

/// A batch whose decodes come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSplit {
    /// Requests that are decodes.
    pub num_decodes: usize,
    /// The others.
    pub num_prefills: usize,
    /// Query rows of decodes.
    pub num_decode_tokens: u64,
    /// Query rows of the others.
    pub num_prefill_tokens: u64,
}

/// Where prefills begin, as vLLM has it: at the first request with more than `threshold` rows or with none. Where
/// decodes must be `uniform`, and the threshold is above 1: at the first whose rows are not as many as the first one's.
pub fn split_decodes_and_prefills(query_lens: &[i32], threshold: i64, uniform: bool) -> BatchSplit {
    let first = query_lens.first().copied().unwrap_or(0);
    let longest = query_lens.iter().copied().max().unwrap_or(0);
    let is_prefill = |len: &i32| match uniform {
        true => *len != first,
        false => i64::from(*len) > threshold || *len == 0,
    };
    let all_are_decodes = i64::from(longest) <= threshold && (!uniform || threshold <= 1);
    let num_decodes = match all_are_decodes {
        true => query_lens.len(),
        false if i64::from(first) > threshold => 0,
        false => query_lens
            .iter()
            .position(is_prefill)
            .unwrap_or(query_lens.len()),
    };
    let rows = |lens: &[i32]| lens.iter().map(|&len| len as u64).sum();
    BatchSplit {
        num_decodes,
        num_prefills: query_lens.len() - num_decodes,
        num_decode_tokens: rows(&query_lens[..num_decodes]),
        num_prefill_tokens: rows(&query_lens[num_decodes..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(seq_lens: &[i32], parts: usize) -> (Vec<[i32; FLASHMLA_RECORD]>, Vec<i32>) {
        let mut metadata = vec![[-9; FLASHMLA_RECORD]; parts];
        let mut num_splits = vec![-9; seq_lens.len() + 1];
        flashmla_metadata(seq_lens, &mut metadata, &mut num_splits);
        (metadata, num_splits)
    }

    #[test]
    fn parts_of_flashmla() {
        assert_eq!(flashmla_parts(132, 1, 128, 1), 66);
        assert_eq!(flashmla_parts(132, 1, 16, 1), 132);
        assert_eq!(flashmla_parts(132, 4, 128, 1), 16);
        assert_eq!(flashmla_parts(4, 512, 128, 1), 1);
    }

    #[test]
    fn tile_scheduler_of_flashmla() {
        let (records, num_splits) = metadata(&[4096, 100, 0, 1000], 4);
        assert_eq!(
            records,
            [
                [0, 0, 0, 26, 0, 1, 1, 0],
                [0, 0, 26, 52, 1, 1, 1, 0],
                [0, 2, 52, 0, 2, 1, 0, 0],
                [3, 3, 0, 16, 0, 0, 0, 0],
            ]
        );
        assert_eq!(num_splits, [0, 3, 4, 5, 6]);
        let (records, num_splits) = metadata(&[128, 128], 4);
        let busy = records.iter().filter(|record| record[0] <= record[1]);
        assert_eq!((busy.count(), num_splits), (2, vec![0, 1, 2]));
        assert_eq!(metadata(&[], 2).1, [0]);
    }

    #[test]
    fn splits_of_keys() {
        for (kv_len, splits) in [
            (0, 1),
            (1, 1),
            (256, 1),
            (257, 2),
            (1024, 4),
            (7936, 31),
            (7937, 32),
            (1 << 20, 32),
        ] {
            assert_eq!(num_kv_splits(kv_len, 32), splits, "{kv_len}");
        }
        assert_eq!(keys_per_split(1000, 4), 256);
        assert_eq!(keys_per_split(257, 2), 160);
        assert_eq!(keys_per_split(8193, 32), 288);
        assert_eq!(8193u64.div_ceil(288), 29);
    }

    fn machine(num_heads: u64, num_kv_heads: u64) -> Machine {
        Machine {
            num_heads,
            num_kv_heads,
            num_sms: 132,
        }
    }

    #[test]
    fn splits_of_sglang() {
        let splits = |lens: &[i32], heads, kv_heads, group| {
            let machine = machine(heads, kv_heads);
            balanced_kv_splits(lens, group, machine, 8).collect::<Vec<_>>()
        };
        assert_eq!(splits(&[1], 32, 8, 1), [1]);
        assert_eq!(splits(&[100], 32, 8, 1), [8]);
        assert_eq!(splits(&[1024; 64], 32, 8, 1), [2; 64]);
        assert_eq!(splits(&[128, 4096], 32, 8, 1), [1, 8]);
        assert_eq!(splits(&[1000, 1100, 1200], 32, 8, 1), [7, 8, 8]);
        assert_eq!(splits(&[1, 5000], 128, 1, 1), [1, 8]);
        assert_eq!(splits(&[100, 3000], 32, 8, 2), [1, 8]);
        assert_eq!(splits(&[], 32, 8, 1), []);
    }

    #[test]
    fn cascades_of_vllm() {
        let takes = |shared, lens: &[i32], heads, kv_heads| {
            takes_cascade(shared, lens, machine(heads, kv_heads))
        };
        assert!(!takes(255, &[1; 64], 32, 8));
        assert!(!takes(256, &[1; 7], 32, 32));
        assert!(!takes(256, &[1; 8], 32, 8));
        assert!(takes(256, &[1; 8], 32, 32));
        assert!(takes(4096, &[1; 64], 32, 8));
        assert!(!takes(4096, &[1; 8], 32, 8));
        assert!(takes(2048, &[1, 1, 1, 5, 1, 1, 1, 1], 32, 8));
    }

    #[test]
    fn decodes_and_prefills() {
        let split = |lens: &[i32], threshold, uniform| {
            let split = split_decodes_and_prefills(lens, threshold, uniform);
            (
                split.num_decodes,
                split.num_prefills,
                split.num_decode_tokens,
                split.num_prefill_tokens,
            )
        };
        assert_eq!(split(&[1, 1, 1, 1], 1, false), (4, 0, 4, 0));
        assert_eq!(split(&[1, 1, 5, 7], 1, false), (2, 2, 2, 12));
        assert_eq!(split(&[3, 3, 3, 1], 4, true), (3, 1, 9, 1));
        assert_eq!(split(&[3, 3, 3, 1], 4, false), (4, 0, 10, 0));
        assert_eq!(split(&[9, 1], 4, false), (0, 2, 0, 10));
        assert_eq!(split(&[2, 0, 9], 4, false), (1, 2, 2, 9));
        assert_eq!(split(&[3, 3], 4, true), (2, 0, 6, 0));
        assert_eq!(split(&[], 1, false), (0, 0, 0, 0));
    }
}
