//! What holds of every cut: all rows and keys once, the parts of a row, places, and bounds.

use super::*;

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
