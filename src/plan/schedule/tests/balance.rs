//! Which cut a batch gets, and how evenly it keeps workers busy.

use super::*;

/// Keys of the busiest of `workers` that take the largest item left, against the mean.
fn imbalance(work: &WorkList, workers: usize) -> f64 {
    let mut keys: Vec<u32> = work.items.iter().map(|i| i.kv_end - i.kv_start).collect();
    keys.sort_unstable();
    let mut loads = vec![0; workers];
    for item in keys.into_iter().rev() {
        *loads.iter_mut().min().unwrap() += item;
    }
    let mean = f64::from(loads.iter().sum::<u32>()) / workers as f64;
    f64::from(*loads.iter().max().unwrap()) / mean
}

/// Tiles of 48 rows would leave 92 of 132 multiprocessors idle, and others have the fewest parts that run at a time.
#[test]
fn tiles_of_short_prompts_are_narrow() {
    let tiling = Tiling {
        q_parts: 3,
        ..prefill_on_hopper(48, 8)
    };
    let rows_of_items = |lens: &[(i32, i32)], batch_invariant| {
        let work = cut_as(lens, &tiling, batch_invariant, Kind::Prefill);
        work.items.iter().map(|item| item.q_len).max().unwrap()
    };
    assert_eq!(rows_of_items(&[(200, 200)], false), 16);
    assert_eq!(rows_of_items(&[(400, 400)], false), 32);
    assert_eq!(rows_of_items(&[(600, 600)], false), 48);
    assert_eq!(rows_of_items(&[(200, 200)], true), 48);
    // Whose keys are cut, they are as wide as can be.
    assert_eq!(rows_of_items(&[(48, 30_000)], false), 48);
}

/// 27 requests of 16 query tokens on 31,000 keys, for 33 workers: one tile each, so that nobody shares its keys.
#[test]
fn requests_of_one_tile_are_cut_into_shares() {
    let tiling = Tiling {
        max_shares: 33,
        ..prefill_on_hopper(27, 4)
    };
    for kind in [Kind::Prefill, Kind::Decode] {
        let work = cut_as(&[(16, 31_000); 27], &tiling, false, kind);
        assert_eq!(work.small as usize, work.items.len());
        let busiest = imbalance(&work, 33);
        assert!(busiest < 1.05, "{busiest}");
    }
    // 27 workers keep a slower memory busy. The heads of the tests are fewer, so it is slower than any.
    let slow_memory = Tiling {
        unit_bytes: 1,
        ..tiling
    };
    let work = cut_as(&[(16, 31_000); 27], &slow_memory, false, Kind::Decode);
    assert_eq!(work.items.len(), 27);
}

/// Those of three tiles each, which read the same keys, are not: only the last ones are cut, all three at the same keys.
#[test]
fn requests_of_several_tiles_are_not_cut_into_shares() {
    let tiling = Tiling {
        max_shares: 33,
        ..prefill_on_hopper(24, 4)
    };
    for kind in [Kind::Prefill, Kind::Decode] {
        let work = cut_as(&[(64, 8000); 16], &tiling, false, kind);
        assert!(0 < work.small && (work.small as usize) < work.items.len());
        let ends = |q_start| {
            let of_tile = |item: &&WorkItem| item.request == 15 && item.q_start == q_start;
            let mut ends: Vec<_> = work
                .items
                .iter()
                .filter(of_tile)
                .map(|item| item.kv_end)
                .collect();
            ends.sort_unstable();
            ends
        };
        assert_eq!(ends(0)[..2], ends(24)[..2]);
    }
}

/// The numbers of requests that chunks of one size leave unbalanced, and lengths of all sizes.
#[test]
fn shares_keep_all_workers_busy() {
    let tiling = Tiling {
        q_tile: 1,
        kv_unit: 48,
        max_splits: 132,
        max_shares: 132,
        invariant_chunk: 2016,
        ..PLAIN
    };
    let ragged = (0..64).map(|i| (1, 100 + (i * i * 37) % 30_000)).collect();
    let equal = [16, 64, 90, 128, 132, 133, 150, 200, 260, 300, 1000];
    let equal = equal.map(|requests| vec![(1, 4096); requests]);
    for lens in equal.into_iter().chain([ragged]) {
        let work = cut_as(&lens, &tiling, false, Kind::Mla);
        let busiest = imbalance(&work, 132);
        assert!(busiest < 1.2, "{} requests: {busiest}", lens.len());
    }
}

/// A Hopper prefill kernel on the 132 multiprocessors of an H200: so many query rows in a tile, and blocks of heads.
fn prefill_on_hopper(q_tile: u32, head_blocks: u32) -> Tiling {
    Tiling {
        q_tile,
        kv_unit: 80,
        unit_bytes: 6 << 20,
        max_splits: 132 / head_blocks,
        tail: TailCosts {
            most_chunks: 3 * 132 / head_blocks,
            item_units: 3,
            combine_units: 5,
            least_gain: 8,
        },
        least_gain: 3,
        invariant_chunk: u32::MAX,
        combine_units: 5,
        workers: Workers {
            all: 132,
            of_item: head_blocks,
            ..Workers::ONE
        },
        ..PLAIN
    }
}

/// When the last multiprocessor ends that takes pieces in the order of the plan, against the mean. A causal mask hides keys.
fn imbalance_of_prefill(work: &WorkList, tiling: &Tiling) -> f64 {
    let mut loads = vec![0; tiling.workers.all as usize];
    for item in &work.items {
        for _ in 0..tiling.workers.of_item {
            *loads.iter_mut().min().unwrap() += item.cost / item.q_len + 240;
        }
    }
    let mean = f64::from(loads.iter().sum::<u32>()) / loads.len() as f64;
    f64::from(*loads.iter().max().unwrap()) / mean
}

/// A few tiles more than there are multiprocessors: chunks of one size took 1.2 to 1.9 times the mean.
#[test]
fn prompts_on_long_contexts_keep_all_workers_busy() {
    let lengths = |requests, rows, keys| vec![(rows, keys); requests];
    for (lens, q_tile, head_blocks) in [
        (lengths(2, 210, 12_141), 24, 8),
        (lengths(3, 136, 22_560), 24, 8),
        (lengths(6, 206, 4199), 128, 12),
        (lengths(4, 811, 31_503), 24, 2),
        (lengths(1, 1496, 29_045), 128, 16),
        (vec![(712, 23_377), (1, 23_377), (1, 23_377)], 24, 2),
        ([vec![(60, 2600)], lengths(17, 1, 2600)].concat(), 192, 8),
    ] {
        let tiling = prefill_on_hopper(q_tile, head_blocks);
        let work = cut(&lens, &tiling, false);
        // The tail is last. Few tiles are cut in any case, and have none.
        let (others, tail) = work.items.split_at(work.items.len() - work.small as usize);
        let is_whole = |item: &WorkItem| item.partial == NO_PARTIAL;
        assert!(tail.is_empty() || others.iter().all(is_whole));
        assert!(!tail.iter().any(is_whole));
        let last = imbalance_of_prefill(&work, &tiling);
        assert!(last < 1.12, "{} × {:?}: {last}", lens.len(), lens[0]);
    }
}

/// Many tiles, and tiles of all lengths under a causal mask, even out whole.
#[test]
fn prompts_that_even_out_are_not_split() {
    for (requests, rows, keys) in [(4, 4096, 4096), (16, 1024, 1024), (2, 1500, 1500)] {
        let tiling = prefill_on_hopper(48, 8);
        let work = cut(&vec![(rows, keys); requests], &tiling, false);
        assert!(work.combines.is_empty(), "{requests} × {rows} on {keys}");
    }
}

/// The time of the worker that has the most, against the mean: shares, or rounds of which every other one goes
/// backwards. An item takes the time of 192 keys beside its own.
fn imbalance_of_deal(work: &WorkList, workers: usize) -> f64 {
    let time = |item: &WorkItem| u64::from(item.kv_end - item.kv_start + 192);
    let mut loads = vec![0; workers];
    for (at, item) in work.items.iter().enumerate() {
        let (round, place) = (at / workers, at % workers);
        let of_rounds = if round % 2 == 1 {
            workers - 1 - place
        } else {
            place
        };
        let share = work
            .shares
            .windows(2)
            .position(|others| (others[0]..others[1]).contains(&(at as u32)));
        let worker = match work.shares.len() {
            0 => of_rounds,
            _ => share.unwrap_or(at),
        };
        loads[worker] += time(item);
    }
    let mean = loads.iter().sum::<u64>() as f64 / workers as f64;
    *loads.iter().max().unwrap() as f64 / mean
}

/// Lengths of all sizes. Dealt out in two rounds, the largest first and the second backwards, they leave workers idle
/// for a seventh to a third of the time.
#[test]
fn workers_take_shares_of_one_size() {
    for (requests, workers) in [(64, 66), (200, 66), (64, 132), (200, 132)] {
        let tiling = Tiling {
            q_tile: 1,
            kv_unit: 48,
            max_splits: workers,
            max_shares: workers,
            takes_shares: true,
            invariant_chunk: 2016,
            combine_units: 5,
            ..PLAIN
        };
        // From 100 to 32k, as many between any two powers of two.
        let length = |i: u32| {
            (
                1,
                (100.0 * 327.0f64.powf(f64::from(i * 89 % requests) / f64::from(requests))) as i32,
            )
        };
        let lens: Vec<_> = (0..requests).map(length).collect();
        let work = cut_as(&lens, &tiling, false, Kind::Mla);
        assert!(work.shares.len() as u32 <= workers + 1, "{requests}");
        let last = work.shares.last().copied();
        assert!(last.is_none_or(|last| last as usize == work.items.len()));
        let busiest = imbalance_of_deal(&work, workers as usize);
        assert!(
            busiest < 1.1,
            "{requests} requests, {workers} workers: {busiest}"
        );
    }
}

/// On the 33 workers that a KV head of 8 has on an H200. When half of the budget was all that a long request got, the
/// first batch took 1.48 times the mean.
#[test]
fn unequal_lengths_keep_all_workers_busy() {
    let tiling = Tiling {
        q_tile: 1,
        kv_unit: 64,
        max_splits: 33,
        max_shares: 33,
        invariant_chunk: 2048,
        combine_units: 5,
        ..PLAIN
    };
    let one_long = std::iter::once((1, 200_000)).chain(std::iter::repeat_n((1, 2048), 31));
    // From 128 to 32k, evenly by their logarithms.
    let logarithmic = |requests: u32| {
        let share = move |n| f64::from(n) / f64::from(requests);
        let keys = move |n| (128.0 * 256f64.powf(share(n))) as i32;
        (0..requests).map(move |n| (1, keys(n))).collect()
    };
    for lens in [
        one_long.collect::<Vec<_>>(),
        logarithmic(16),
        logarithmic(64),
    ] {
        let work = cut_as(&lens, &tiling, false, Kind::Decode);
        let busiest = imbalance(&work, 33);
        assert!(busiest < 1.15, "{} requests: {busiest}", lens.len());
    }
}

/// A chunk of 374 rows among decodes, under a window of 1100: tiles of 12 units, which ten and two would not spare more
/// than combining takes.
#[test]
fn a_split_that_gains_little_is_not_made() {
    let splits = |window, least_gain| {
        let tiling = Tiling {
            q_tile: 48,
            kv_unit: 112,
            max_splits: 16,
            least_gain,
            invariant_chunk: u32::MAX,
            combine_units: 5,
            ..PLAIN
        };
        let decodes = std::iter::repeat_n((1, 14_793), 6);
        let lens: Vec<_> = std::iter::once((374, 14_793)).chain(decodes).collect();
        let desc = desc(false, Kind::Prefill);
        let work = cut_within(Some(window), &lens, &tiling, Keys::All, &desc);
        work.partials.len()
    };
    assert!(splits(1100, 0) > 0);
    assert_eq!(splits(1100, 3), 0);
}

/// Rows of a prompt under a narrow window, each tile of which sees four units of the prompt's 50.
#[test]
fn tiles_that_see_few_keys_are_not_split() {
    let tiling = Tiling {
        q_tile: 96,
        kv_unit: 112,
        max_splits: 132,
        least_gain: 3,
        ..PLAIN
    };
    let desc = desc(false, Kind::Prefill);
    let lens = [(5057, 7797), (1100, 2596)];
    let partials = |window| {
        cut_within(window, &lens, &tiling, Keys::All, &desc)
            .partials
            .len()
    };
    assert_eq!(partials(Some(127)), 0);
    assert!(partials(None) > 0);
}

/// Requests of four units each on 132 workers: by a launch's time alone it pays to halve 50 of them, but not to put so many rows
/// together.
#[test]
fn many_rows_are_split_only_where_chunks_spare_more() {
    let partials = |requests, rows_of_unit| {
        let tiling = Tiling {
            q_tile: 1,
            kv_unit: 48,
            max_splits: 132,
            least_gain: 1,
            rows_of_unit,
            ..PLAIN
        };
        let desc = desc(false, Kind::Decode);
        let lens = vec![(1, 180); requests];
        cut_within(None, &lens, &tiling, Keys::All, &desc)
            .partials
            .len()
    };
    assert!(partials(50, 0) > 0);
    assert_eq!(partials(50, 9), 0);
    assert!(partials(5, 9) > 0);
}
