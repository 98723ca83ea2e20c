//! Tests of `schedule`: what its cuts cover, how evenly, and in which order.

use super::*;
use crate::dtype::DType;
use crate::plan::chunk_size::{UNITS_NOT_SPLIT, split_budget};
use crate::problem::{
    Keys, Kind, KvLayout, KvStorage, PageIds, Pages, Requests, TailCosts, Workers,
};
use proptest::prelude::*;

fn desc(batch_invariant: bool, kind: Kind) -> AttentionDesc {
    AttentionDesc {
        kind,
        q_dtype: DType::F32,
        kv_format: DType::F32.into(),
        o_dtype: DType::F32,
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: 8,
        head_dim_vo: 8,
        kv: KvStorage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
        },
        max_batch_size: 64,
        max_qo_len: 1 << 20,
        max_num_tokens: 1 << 20,
        max_kv_len: 1 << 20,
        max_num_pages: 1 << 20,
        graph: false,
        batch_invariant,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

fn cut(lens: &[(i32, i32)], tiling: &Tiling, batch_invariant: bool) -> WorkList {
    cut_as(lens, tiling, batch_invariant, Kind::Prefill)
}

fn cut_as(lens: &[(i32, i32)], tiling: &Tiling, batch_invariant: bool, kind: Kind) -> WorkList {
    cut_of(lens, tiling, Keys::All, &desc(batch_invariant, kind))
}

fn cut_of(lens: &[(i32, i32)], tiling: &Tiling, keys: Keys, desc: &AttentionDesc) -> WorkList {
    cut_within(None, lens, tiling, keys, desc)
}

fn cut_within(
    window_left: Option<u32>,
    lens: &[(i32, i32)],
    tiling: &Tiling,
    keys: Keys,
    desc: &AttentionDesc,
) -> WorkList {
    cut_planned(Requests::All, window_left, lens, tiling, keys, desc)
}

fn cut_planned(
    planned: Requests,
    window_left: Option<u32>,
    lens: &[(i32, i32)],
    tiling: &Tiling,
    keys: Keys,
    desc: &AttentionDesc,
) -> WorkList {
    let mut qo_indptr = vec![0];
    let mut kv_len = Vec::new();
    for &(q, kv) in lens {
        qo_indptr.push(qo_indptr.last().unwrap() + q);
        kv_len.push(kv);
    }
    let batch = HostBatch {
        qo_indptr: &qo_indptr,
        kv_len: &kv_len,
        keys,
        window_left,
        pages: match keys {
            Keys::New => Pages::Ragged { indptr: &qo_indptr },
            _ => Pages::Table {
                ids: PageIds::Host(&[]),
                row_stride: 0,
            },
        },
        num_pages: 0,
        max_page_id: -1,
        planned,
    };
    let mut work = WorkList::default();
    schedule(&batch, desc, tiling, &mut work).unwrap();
    work
}

/// Neither splits nor shares; tests say what theirs has beside.
const PLAIN: Tiling = Tiling {
    q_tile: 64,
    q_parts: 1,
    kv_unit: 16,
    unit_bytes: u32::MAX,
    max_splits: 0,
    max_shares: 0,
    tail: TailCosts::NO_TAIL,
    takes_shares: false,
    least_gain: 0,
    invariant_chunk: 256,
    combine_units: 0,
    own_key_bytes: 0,
    workers: Workers::ONE,
};

/// Decodes on so many keys each.
fn cut_into_splits(kv: &[i32], max_splits: u32) -> WorkList {
    let lens: Vec<_> = kv.iter().map(|&kv| (1, kv)).collect();
    let tiling = Tiling {
        q_tile: 4,
        max_splits,
        ..PLAIN
    };
    cut(&lens, &tiling, false)
}

fn tilings() -> impl Strategy<Value = Tiling> {
    let shares = prop_oneof![Just(0u32), 1u32..80];
    (
        (1u32..40, 1u32..4),
        1u32..40,
        0u32..50,
        shares,
        any::<bool>(),
        1u32..20,
        (0u32..80, 1u32..9),
    )
        .prop_map(
            |(
                (q_part, q_parts),
                kv_unit,
                max_splits,
                max_shares,
                takes_shares,
                n,
                (tail_chunks, of_item),
            )| {
                Tiling {
                    q_tile: q_part * q_parts,
                    q_parts,
                    kv_unit,
                    max_splits,
                    max_shares,
                    tail: TailCosts {
                        most_chunks: tail_chunks,
                        ..TailCosts::NO_TAIL
                    },
                    takes_shares,
                    invariant_chunk: kv_unit * n,
                    workers: Workers {
                        all: (tail_chunks / 2).max(1) * of_item,
                        of_item,
                        ..Workers::ONE
                    },
                    ..PLAIN
                }
            },
        )
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Prefill), Just(Kind::Decode), Just(Kind::Mla)]
}

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

proptest! {
    /// Both plans of a batch together have every row once, each with the keys that it has in one plan; and a plan of some
    /// requests is cut as if there were no others.
    #[test]
    fn a_batch_in_two_plans(
        lens in prop::collection::vec((0i32..70, 0i32..400), 1..12),
        tiling in tilings(),
        batch_invariant: bool,
        kind in kinds(),
        decode_rows in 1u32..40,
    ) {
        let desc = desc(batch_invariant, kind);
        let planned = |planned| cut_planned(planned, None, &lens, &tiling, Keys::All, &desc);
        let decodes = Requests::Decodes { most_rows: decode_rows, least_keys: 0 };
        let prompts = Requests::Prompts { decode_rows, decode_counts: 0 };
        for some in [decodes, prompts] {
            let is_planned = |rows: i32| some.include(rows as u32);
            let work = planned(some);
            // Others without rows and keys.
            let alone: Vec<(i32, i32)> = lens.iter().map(|&(rows, keys)| match is_planned(rows) {
                true => (rows, keys),
                false => (0, 0),
            }).collect();
            let of = |work: &WorkList| -> Vec<_> {
                let mut items: Vec<_> = work.items.iter().map(|i| (i.request, i.q_start, i.q_len, i.kv_start, i.kv_end)).collect();
                items.sort_unstable();
                items
            };
            let want = of(&cut_of(&alone, &tiling, Keys::All, &desc));
            prop_assert_eq!(of(&work), want);
            let mut first_row = vec![0];
            first_row.extend(lens.iter().scan(0, |sum, l| { *sum += l.0; Some(*sum) }));
            for item in &work.items {
                prop_assert_eq!(item.q_token, first_row[item.request as usize] + item.q_start as i32);
            }
        }
        let rows: i32 = [decodes, prompts].into_iter().map(|some| {
            planned(some).items.iter().filter(|i| i.kv_start == 0).map(|i| i.q_len as i32).sum::<i32>()
        }).sum();
        prop_assert_eq!(rows, lens.iter().map(|l| l.0).sum::<i32>());
    }

    #[test]
    fn every_row_and_key_is_covered_once(
        lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
        tiling in tilings(),
        kind in kinds(),
        batch_invariant: bool,
    ) {
        let work = cut_as(&lens, &tiling, batch_invariant, kind);
        let mut seen: Vec<Vec<u8>> =
            lens.iter().map(|&(q, kv)| vec![0; (q * kv.max(1)) as usize]).collect();
        for item in &work.items {
            let (_, kv_len) = lens[item.request as usize];
            prop_assert!(item.q_len >= 1 && item.q_len <= tiling.q_tile);
            prop_assert_eq!(item.kv_start % tiling.kv_unit, 0);
            prop_assert!(item.kv_end as i32 <= kv_len);
            for q in item.q_start..item.q_start + item.q_len {
                let keys = if kv_len == 0 { 0..1 } else { item.kv_start..item.kv_end };
                for k in keys {
                    seen[item.request as usize][(q as i32 * kv_len.max(1)) as usize + k as usize] += 1;
                }
            }
        }
        for row in seen {
            prop_assert!(row.iter().all(|&count| count == 1));
        }
    }

    /// The plans over cached and over new keys have every key of every row once between them, at the positions of a
    /// plan over all; a new key's row is that of its query.
    #[test]
    fn cached_and_new_keys_are_all_keys(
        lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
        tiling in tilings(),
    ) {
        let lens: Vec<(i32, i32)> = lens.iter().map(|&(q, kv)| (q, kv + q)).collect();
        let mut seen: Vec<Vec<u8>> = lens.iter().map(|&(q, kv)| vec![0; (q * kv) as usize]).collect();
        for keys in [Keys::Cached, Keys::New] {
            let work = cut_of(&lens, &tiling, keys, &desc(false, Kind::Prefill));
            for item in &work.items {
                let (qo_len, kv_len) = lens[item.request as usize];
                let cached = kv_len - qo_len;
                prop_assert_eq!(item.position, cached + item.q_start as i32);
                if keys == Keys::New {
                    let first_row = item.q_token - item.q_start as i32;
                    prop_assert_eq!(item.page_start + i64::from(cached), i64::from(first_row));
                }
                for q in item.q_start..item.q_start + item.q_len {
                    for key in item.kv_start..item.kv_end {
                        prop_assert_eq!((key as i32) < cached, keys == Keys::Cached);
                        seen[item.request as usize][(q as i32 * kv_len + key as i32) as usize] += 1;
                    }
                }
            }
        }
        for row in seen {
            prop_assert!(row.iter().all(|&count| count == 1));
        }
    }

    /// What a row sees within a window has one item. Before that there is less than a unit.
    #[test]
    fn keys_before_the_window_have_no_items(
        lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
        left in 0u32..300,
        tiling in tilings(),
        batch_invariant: bool,
    ) {
        let desc = desc(batch_invariant, Kind::Decode);
        let work = cut_within(Some(left), &lens, &tiling, Keys::All, &desc);
        let mut seen: Vec<Vec<u8>> =
            lens.iter().map(|&(q, kv)| vec![0; (q * kv) as usize]).collect();
        for item in &work.items {
            let (_, kv_len) = lens[item.request as usize];
            let first = i64::from(item.position) - i64::from(left);
            prop_assert!(i64::from(item.kv_start + tiling.kv_unit) > first);
            for q in item.q_start..item.q_start + item.q_len {
                for k in item.kv_start..item.kv_end {
                    seen[item.request as usize][(q as i32 * kv_len) as usize + k as usize] += 1;
                }
            }
        }
        for (&(qo_len, kv_len), seen) in lens.iter().zip(&seen) {
            for q in 0..qo_len {
                let position = kv_len - qo_len + q;
                let first = position.saturating_sub(left as i32).max(0);
                for key in 0..kv_len {
                    let count = seen[(q * kv_len + key) as usize];
                    prop_assert!(count == 1 || (count == 0 && key < first));
                }
            }
        }
    }

    #[test]
    fn partial_rows_are_disjoint_and_within_the_bound(
        lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
        tiling in tilings(),
        kind in kinds(),
    ) {
        let work = cut_as(&lens, &tiling, false, kind);
        let rows = work.partials.len();
        let splits: u32 = work.items.iter().filter(|i| i.kv_start > 0).count() as u32;
        prop_assert!(splits <= tiling.max_splits.max(tiling.max_shares).max(tiling.tail.most_chunks));
        let chunks = tiling.max_splits.max(2 * tiling.max_shares).max(tiling.tail.most_chunks);
        prop_assert!(rows as u32 <= chunks * tiling.q_tile);
        let mut used = vec![false; rows];
        for item in work.items.iter().filter(|item| item.partial != NO_PARTIAL) {
            for row in item.partial..item.partial + item.q_len {
                prop_assert!(!std::mem::replace(&mut used[row as usize], true));
            }
        }
        prop_assert!(used.iter().all(|&u| u));
    }

    /// A split row is listed once, and its partial rows are those of its items, by keys.
    #[test]
    fn combine_items_name_the_parts_of_their_row(
        lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
        tiling in tilings(),
        kind in kinds(),
        batch_invariant: bool,
    ) {
        let work = cut_as(&lens, &tiling, batch_invariant, kind);
        let mut parts: Vec<(u32, u32, u32)> = Vec::new();
        for item in work.items.iter().filter(|item| item.partial != NO_PARTIAL) {
            let rows = (0..item.q_len).map(|r| (item.q_token as u32 + r, item.kv_start, item.partial + r));
            parts.extend(rows);
        }
        parts.sort_unstable();
        let listed = work.combines.iter().flat_map(|c| {
            let rows = &work.partials[c.first as usize..][..c.count as usize];
            rows.iter().map(|&row| (c.q_token, row))
        });
        prop_assert!(listed.eq(parts.iter().map(|&(token, _, row)| (token, row))));
        prop_assert!(work.combines.iter().all(|c| c.count >= 2));
    }

    /// What an item says of where its rows and keys are follows from the batch.
    #[test]
    fn items_know_their_place(
        lens in prop::collection::vec((0i32..90, 0i32..700), 1..12),
        tiling in tilings(),
        kind in kinds(),
    ) {
        let work = cut_as(&lens, &tiling, false, kind);
        for item in &work.items {
            let b = item.request as usize;
            let tokens: i32 = lens[..b].iter().map(|l| l.0).sum();
            let pages: i32 = lens[..b].iter().map(|l| (l.1 + 15) / 16).sum();
            prop_assert_eq!(item.q_token, tokens + item.q_start as i32);
            prop_assert_eq!(item.position, lens[b].1 - lens[b].0 + item.q_start as i32);
            prop_assert_eq!(item.page_start, i64::from(pages));
        }
    }

    #[test]
    fn invariant_cuts_do_not_depend_on_the_batch(
        lens in prop::collection::vec((0i32..90, 0i32..700), 1..8),
        tiling in tilings(),
        kind in kinds(),
    ) {
        let shape = |work: &WorkList, b: u32| {
            let mut cuts: Vec<_> = work.items.iter().filter(|i| i.request == b)
                .map(|i| (i.q_start, i.q_len, i.kv_start, i.kv_end, i.partial == NO_PARTIAL))
                .collect();
            cuts.sort_unstable();
            cuts
        };
        let whole = cut_as(&lens, &tiling, true, kind);
        for (b, &one) in lens.iter().enumerate() {
            let alone = cut_as(&[one], &tiling, true, kind);
            prop_assert_eq!(shape(&alone, 0), shape(&whole, b as u32));
        }
    }

    #[test]
    fn no_item_is_larger_than_the_fair_share_allows(
        kv in prop::collection::vec(1i32..5000, 1..40),
        max_splits in 1u32..200,
    ) {
        let work = cut_into_splits(&kv, max_splits);
        let total: i32 = kv.iter().sum();
        let budget = split_budget(max_splits, kv.len() as u64) as u32;
        let bound = match budget {
            0 => u32::MAX,
            budget => ((total as u32).div_ceil(budget) + 16).max(UNITS_NOT_SPLIT * 16),
        };
        prop_assert!(work.items.iter().all(|i| i.kv_end - i.kv_start <= bound));
    }

    #[test]
    fn items_that_fit_at_a_time_are_not_exceeded_by_splits(
        kv in prop::collection::vec(1i32..5000, 1..40),
        max_splits in 1u32..200,
    ) {
        let work = cut_into_splits(&kv, max_splits);
        let split = work.items.iter().filter(|item| item.partial != NO_PARTIAL).count();
        prop_assert!(split <= max_splits as usize);
        // Short requests do not count where a long one takes its share.
        let longest = work.items.iter().map(|item| item.kv_end - item.kv_start).max();
        let total: u32 = kv.iter().map(|&kv| kv as u32).sum();
        let fair = total.div_ceil(max_splits).next_multiple_of(16).max(UNITS_NOT_SPLIT * 16);
        let most = (max_splits as usize).max(kv.len() + max_splits as usize / 2);
        prop_assert!(work.items.len() <= most || longest >= Some(fair));
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

/// A chunk of 374 rows among decodes, under a window of 1024: tiles of 13 units, which ten and three would not spare more
/// than combining takes.
#[test]
fn a_split_that_gains_little_is_not_made() {
    let splits = |least_gain| {
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
        let work = cut_within(Some(1023), &lens, &tiling, Keys::All, &desc);
        work.partials.len()
    };
    assert!(splits(0) > 0);
    assert_eq!(splits(3), 0);
}

fn order(lens: &[(i32, i32)], kind: Kind) -> Vec<(u32, u32)> {
    let work = cut_as(lens, &PLAIN, false, kind);
    work.items.iter().map(|i| (i.request, i.q_start)).collect()
}

proptest! {
    #[test]
    fn decode_goes_by_cost(kv in prop::collection::vec(0i32..100_000, 1..400)) {
        let lens: Vec<_> = kv.iter().map(|&kv| (1, kv)).collect();
        let order = order(&lens, Kind::Decode);
        let most = kv.iter().max().unwrap();
        for pair in order.windows(2) {
            let [first, second] = [pair[0].0, pair[1].0].map(|b| kv[b as usize]);
            prop_assert!(first + most / 64 >= second, "{first} before {second}");
        }
        let mut requests: Vec<u32> = order.iter().map(|&(request, _)| request).collect();
        requests.sort_unstable();
        prop_assert!(requests.into_iter().eq(0..kv.len() as u32));
    }
}

#[test]
fn the_largest_item_of_decode_comes_first() {
    let lens = [(1, 10), (64, 640), (1, 700)];
    assert_eq!(order(&lens, Kind::Decode), [(1, 0), (2, 0), (0, 0)]);
}

#[test]
fn prefill_keeps_requests_together() {
    let lens = [(128, 640), (128, 640), (1, 700)];
    assert_eq!(
        order(&lens, Kind::Prefill),
        [(2, 0), (0, 64), (0, 0), (1, 64), (1, 0)]
    );
}
