//! The indices of a batch: every operator through both doors, against what token by token must come out, the golden values
//! of the libraries that they stand for, and round trips.

use crate::common::door::{DOORS, Session};
use crate::common::index::{
    Drafts, Lengths, Listing, Lists, NewTokens, Rows, check_far_slots, list, numbers,
};
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::random;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    SlotMappingArgs, TokenRows,
};
use proptest::prelude::*;

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 2 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

fn resident(image: Image) -> Resident<'static> {
    Resident::new(&HostMemory, image)
}

fn of(values: &[i64]) -> Resident<'static> {
    resident(list(DType::I32, values))
}

fn blank(dtype: DType, shape: &[i64]) -> Resident<'static> {
    resident(Image::poisoned(View::compact(dtype, shape)))
}

fn table(rows: &[&[i64]]) -> Resident<'static> {
    let bits = rows.concat().into_iter().map(|value| value as u64);
    let shape = [rows.len() as i64, rows[0].len() as i64];
    resident(Image::of_bits(DType::I32, &shape, bits))
}

fn is(output: &Resident<'_>) -> Vec<i64> {
    numbers(&output.current())
}

/// Pages of 16 as FlashInfer takes them.
#[test]
fn a_block_table_as_flashinfer_takes_it() {
    let pages = table(&[&[7, 99], &[3, 99], &[5, 1]]);
    let (kv_len, indptr) = (of(&[1, 16, 17]), blank(DType::I32, &[4]));
    let (indices, last) = (blank(DType::I32, &[6]), blank(DType::I32, &[3]));
    for session in sessions() {
        let args = KvIndicesArgs {
            rows: TokenRows {
                table: pages.tensor(),
                row_ids: None,
                page_size: 16,
            },
            kv_len: kv_len.tensor(),
            kv_start: None,
            window: 0,
            page_size: 0,
            kv_indptr: indptr.tensor(),
            kv_indices: indices.tensor(),
            last_page_len: Some(last.tensor()),
        };
        session.kv_indices(&args, Stream::default()).unwrap();
        assert_eq!(is(&indptr), [0, 1, 2, 4]);
        assert_eq!(is(&indices)[..4], [7, 3, 5, 1]);
        assert_eq!(is(&last), [1, 16, 1]);
    }
}

/// FlashMLA's page table of SGLang's slots: every 64th slot, divided by 64.
#[test]
fn slots_as_pages_of_64() {
    let slots: Vec<i64> = (0..150)
        .map(|token| [9, 2, 4][token / 64] * 64 + token as i64 % 64)
        .collect();
    let slots = table(&[&slots, &slots]);
    let (row_ids, kv_len) = (of(&[1]), of(&[130]));
    let (indptr, indices) = (blank(DType::I32, &[2]), blank(DType::I32, &[3]));
    for session in sessions() {
        let args = KvIndicesArgs {
            rows: TokenRows {
                table: slots.tensor(),
                row_ids: Some(row_ids.tensor()),
                page_size: 1,
            },
            kv_len: kv_len.tensor(),
            kv_start: None,
            window: 0,
            page_size: 64,
            kv_indptr: indptr.tensor(),
            kv_indices: indices.tensor(),
            last_page_len: None,
        };
        session.kv_indices(&args, Stream::default()).unwrap();
        assert_eq!((is(&indptr), is(&indices)), (vec![0, 3], vec![9, 2, 4]));
    }
}

/// FastDeploy: a prefill that hit the prefix cache, an inactive request, a decode, and a first prefill.
#[test]
fn lengths_and_slots_of_fastdeploy() {
    let encoder = of(&[5, 0, 0, 2]);
    let (decoder, this_time) = (of(&[8, 9, 4, 0]), of(&[5, 0, 1, 2]));
    let (qo_indptr, kv_indptr) = (blank(DType::I32, &[5]), blank(DType::I32, &[5]));
    let (kv_len, row_kind) = (blank(DType::I32, &[4]), blank(DType::I32, &[4]));
    let pages = table(&[
        &[3, 0, 8, 5],
        &[1, 1, 1, 1],
        &[6, -1, -1, -1],
        &[-1, 2, 2, 2],
    ]);
    let (slots, positions) = (blank(DType::I64, &[10]), blank(DType::I64, &[10]));
    for session in sessions() {
        let args = BatchLengthsArgs {
            qo_len: this_time.tensor(),
            cached_len: Some(decoder.tensor()),
            encoder_len: Some(encoder.tensor()),
            qo_indptr: Some(qo_indptr.tensor()),
            kv_len: Some(kv_len.tensor()),
            kv_indptr: Some(kv_indptr.tensor()),
            row_kind: Some(row_kind.tensor()),
        };
        session.batch_lengths(&args, Stream::default()).unwrap();
        assert_eq!(is(&qo_indptr), [0, 5, 5, 6, 8]);
        assert_eq!(is(&kv_len), [13, 0, 5, 2]);
        assert_eq!(is(&kv_indptr), [0, 13, 13, 18, 20]);
        assert_eq!(is(&row_kind), [1, 0, 2, 1]);
        let args = SlotMappingArgs {
            rows: TokenRows {
                table: pages.tensor(),
                row_ids: None,
                page_size: 4,
            },
            queries: QueryRows::Indptr(qo_indptr.tensor()),
            kv_len: kv_len.tensor(),
            slot_mapping: slots.tensor(),
            positions: Some(positions.tensor()),
        };
        session.slot_mapping(&args, Stream::default()).unwrap();
        assert_eq!(is(&slots), [32, 33, 34, 35, 20, -1, -1, -1, -1, -1]);
        assert_eq!(is(&positions), [8, 9, 10, 11, 12, 4, 0, 1, -1, -1]);
    }
}

/// FastDeploy's pre_cache_len_concat.
#[test]
fn cumulative_lengths_with_the_cache() {
    let (cached, new) = (of(&[8, 4, 2]), of(&[2, 3, 1]));
    let kv_indptr = blank(DType::I32, &[4]);
    for session in sessions() {
        let args = BatchLengthsArgs {
            qo_len: new.tensor(),
            cached_len: Some(cached.tensor()),
            encoder_len: None,
            qo_indptr: None,
            kv_len: None,
            kv_indptr: Some(kv_indptr.tensor()),
            row_kind: None,
        };
        session.batch_lengths(&args, Stream::default()).unwrap();
        assert_eq!(is(&kv_indptr), [0, 10, 17, 20]);
    }
}

/// SGLang's multi-step draft decoding: entry j of row r is 100 r + j.
#[test]
fn drafts_of_sglang() {
    let row = |r: i64| (0..8).map(|j| 100 * r + j).collect::<Vec<i64>>();
    let slots = table(&[&row(0), &row(1)]);
    let kv_len = of(&[2, 1]);
    let (indptr, indices) = (blank(DType::I32, &[2, 5]), blank(DType::I32, &[2, 14]));
    let paged = DraftSlots::Paged(2);
    for (layout, first, second) in [
        (
            DraftSlots::StepMajor,
            vec![0, 1, 2, 0, 1, 3, 100, 101, 100, 102],
            vec![0, 1, 2, 4, 0, 1, 3, 5, 100, 101, 103, 100, 102, 104],
        ),
        (
            DraftSlots::BranchMajor,
            vec![0, 1, 2, 0, 1, 4, 100, 101, 100, 103],
            vec![0, 1, 2, 3, 0, 1, 4, 5, 100, 101, 102, 100, 103, 104],
        ),
        // Request 0 ends with a page: two more slots are a page of its own for each branch. Request 1 has one token in
        // its last page: with two drafts a branch takes two pages.
        (
            paged,
            vec![0, 1, 2, 0, 1, 4, 100, 101, 100, 105],
            vec![0, 1, 2, 3, 0, 1, 4, 5, 100, 101, 102, 100, 105, 106],
        ),
    ] {
        for session in sessions() {
            let args = DraftKvIndicesArgs {
                rows: TokenRows {
                    table: slots.tensor(),
                    row_ids: None,
                    page_size: 1,
                },
                kv_len: kv_len.tensor(),
                topk: 2,
                num_steps: 0,
                slots: layout,
                kv_indptr: indptr.tensor(),
                kv_indices: indices.tensor(),
            };
            session.draft_kv_indices(&args, Stream::default()).unwrap();
            assert_eq!(is(&indptr), [0, 3, 6, 8, 10, 0, 4, 8, 11, 14]);
            assert_eq!(is(&indices)[..10], first, "{layout:?}");
            assert_eq!(is(&indices)[14..], second, "{layout:?}");
        }
    }
}

const INTEGERS: [DType; 2] = [DType::I32, DType::I64];

fn integer() -> impl Strategy<Value = DType> {
    prop::sample::select(INTEGERS.to_vec())
}

/// Rows for so many requests, with or without row ids.
fn rows(requests: usize, page_sizes: &'static [u32]) -> impl Strategy<Value = Rows> {
    let sizes = (
        prop::sample::select(page_sizes.to_vec()),
        0i64..9,
        0i64..3,
        any::<bool>(),
    );
    (sizes, integer(), 0u32..4, any::<u64>()).prop_flat_map(
        move |((page_size, columns, spare, by_id), dtype, gap, seed)| {
            let count = requests as i64 + spare + i64::from(by_id);
            prop::collection::vec(0..count.max(1), requests).prop_map(move |ids| Rows {
                dtype,
                page_size,
                columns,
                rows: count,
                row_ids: by_id.then_some(ids),
                gap,
                seed,
            })
        },
    )
}

/// Lengths from 0 to the tokens of a row, of which each request has a share.
fn shares(requests: usize) -> impl Strategy<Value = Vec<[f64; 2]>> {
    let share = || prop_oneof![1 => Just(0.0), 1 => Just(1.0), 4 => 0.0..1.0f64];
    prop::collection::vec([share(), share()], requests)
}

fn part(share: f64, of: i64) -> i64 {
    (share * of as f64) as i64
}

fn listing() -> impl Strategy<Value = Listing> {
    (0usize..8).prop_flat_map(|requests| {
        let rows = rows(requests, &[1, 2, 4, 16]);
        let window = prop_oneof![2 => Just(0u32), 2 => 1u32..40];
        let sizes = (prop::sample::select(vec![0u32, 1, 2, 4, 8, 64]), window);
        (
            rows,
            shares(requests),
            sizes,
            any::<[bool; 2]>(),
            integer(),
            0i64..4,
        )
            .prop_map(|(rows, shares, (page_size, window), flags, dtype, spare)| {
                let tokens = rows.columns * i64::from(rows.page_size);
                let kv_len: Vec<i64> = shares.iter().map(|s| part(s[0], tokens)).collect();
                let starts = kv_len.iter().zip(&shares);
                let starts: Vec<i64> = starts.map(|(len, s)| part(s[1], *len)).collect();
                Listing {
                    kv_len,
                    kv_start: flags[0].then_some(starts),
                    window,
                    page_size,
                    dtype,
                    with_last: flags[1],
                    spare,
                    rows,
                }
            })
    })
}

fn new_tokens() -> impl Strategy<Value = NewTokens> {
    (0usize..8).prop_flat_map(|requests| {
        let rows = rows(requests, &[1, 3, 16]);
        let dtypes = [integer(), integer()];
        (rows, shares(requests), any::<[bool; 2]>(), dtypes, 0i64..9).prop_map(
            |(rows, shares, flags, dtypes, spare)| {
                let tokens = rows.columns * i64::from(rows.page_size);
                let request = |s: &[f64; 2]| {
                    let all = part(s[0], tokens);
                    [part(s[1], all), all]
                };
                NewTokens {
                    requests: shares.iter().map(request).collect(),
                    by_len: flags[0],
                    with_positions: flags[1],
                    dtypes,
                    spare,
                    rows,
                }
            },
        )
    })
}

fn lengths() -> impl Strategy<Value = Lengths> {
    let len = || prop_oneof![1 => Just(0i64), 3 => 0i64..5000];
    let requests = prop::collection::vec([len(), len(), len()], 0..300);
    let outputs = any::<[bool; 3]>();
    (
        requests,
        outputs,
        any::<[bool; 2]>(),
        [integer(), integer()],
        0i64..9,
    )
        .prop_map(|(requests, outputs, flags, dtypes, spare)| Lengths {
            requests,
            with_cached: flags[0],
            // One output there must be.
            with_kinds: flags[1] || outputs == [false; 3],
            outputs,
            dtypes,
            spare,
        })
}

fn lists() -> impl Strategy<Value = Lists> {
    let list = prop::collection::vec(prop_oneof![1 => Just(-3i64), 6 => 0i64..1 << 30], 0..9);
    let lists = prop::collection::vec(list, 0..7);
    (
        lists,
        0i64..4,
        0usize..3,
        -2i32..3,
        0u32..4,
        [integer(), integer()],
    )
        .prop_map(|(lists, spare, spare_rows, fill, gap, dtypes)| Lists {
            columns: lists.iter().map(Vec::len).max().unwrap_or(0) as i64 + spare,
            lists,
            spare_rows,
            fill,
            gap,
            dtypes,
        })
}

fn drafts() -> impl Strategy<Value = Drafts> {
    (0usize..5).prop_flat_map(|requests| {
        let layouts = vec![
            DraftSlots::StepMajor,
            DraftSlots::BranchMajor,
            DraftSlots::Paged(1),
            DraftSlots::Paged(4),
        ];
        let sizes = (1u32..5, 0i64..4, 0u32..3);
        let lens = prop::collection::vec(0i64..20, requests);
        let slots = prop::sample::select(layouts);
        let rest = (integer(), 0u32..4, 0i64..4);
        (rows(requests, &[1]), lens, sizes, slots, rest).prop_map(
            |(rows, kv_len, (topk, steps, more), slots, (dtype, gap, spare))| {
                let mut drafts = Drafts {
                    rows,
                    kv_len,
                    topk,
                    steps,
                    num_steps: if more == 0 { 0 } else { steps as u32 + more },
                    slots,
                    dtype,
                    gap,
                    spare,
                };
                drafts.rows.columns += drafts.columns();
                drafts
            },
        )
    })
}

/// As SGLang's own test of create_flashinfer_kv_indices, on rows of 4096 slots.
#[test]
fn many_long_rows() {
    for requests in [1, 37] {
        let lens: Vec<i64> = (0..requests).map(|b| (b * 1237 + 7) % 4097).collect();
        let listing = Listing {
            rows: Rows {
                dtype: DType::I32,
                page_size: 1,
                columns: 4096,
                rows: 64,
                row_ids: Some((0..requests).map(|b| (b * 29) % 64).collect()),
                gap: 0,
                seed: 11,
            },
            kv_start: Some(lens.iter().map(|len| len / 3).collect()),
            kv_len: lens,
            window: 0,
            page_size: 0,
            dtype: DType::I32,
            with_last: false,
            spare: 0,
        };
        for session in sessions() {
            assert_eq!(listing.check(&*session, &HostMemory), Ok(()));
        }
    }
}

#[test]
fn far_slots() {
    for session in sessions() {
        assert_eq!(check_far_slots(&*session, &HostMemory), Ok(()));
    }
}

/// All sessions agree with the formula.
fn everywhere(check: impl Fn(&dyn Session) -> Result<(), String>) -> Result<(), TestCaseError> {
    for session in sessions() {
        prop_assert_eq!(check(&*session), Ok(()));
    }
    Ok(())
}

proptest! {
    #![proptest_config(random::cases(150))]

    #[test]
    fn lengths_are_summed_up(lengths in lengths()) {
        everywhere(|session| lengths.check(session, &HostMemory))?;
    }

    #[test]
    fn rows_are_listed(listing in listing()) {
        everywhere(|session| listing.check(session, &HostMemory))?;
    }

    #[test]
    fn lists_become_rows(lists in lists()) {
        everywhere(|session| lists.check(session, &HostMemory))?;
    }

    #[test]
    fn new_tokens_have_slots(tokens in new_tokens()) {
        everywhere(|session| tokens.check(session, &HostMemory))?;
    }

    #[test]
    fn branches_are_listed(drafts in drafts()) {
        everywhere(|session| drafts.check(session, &HostMemory))?;
    }

    /// A table, listed and made a table again, is what it was, but for entries that nobody has.
    #[test]
    fn there_and_back(
        lens in prop::collection::vec(0i64..30, 1..7),
        page_size in 1u32..5,
        fill in -1i32..3,
    ) {
        let columns = 30;
        let entry = |b: usize, column: i64| b as i64 * 1000 + column;
        let row = |b: usize| (0..columns).map(|c| entry(b, c)).collect::<Vec<i64>>();
        let all: Vec<Vec<i64>> = (0..lens.len()).map(row).collect();
        let pages = table(&all.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let (batch, kv_len) = (lens.len() as i64, of(&lens));
        let (indptr, indices) = (blank(DType::I32, &[batch + 1]), blank(DType::I32, &[batch * 30]));
        let back = blank(DType::I32, &[batch, columns]);
        let want = lens.iter().enumerate().flat_map(|(b, len)| {
            let used = (*len as u64).div_ceil(page_size.into()) as i64;
            (0..columns).map(move |c| if c < used { entry(b, c) } else { fill.into() })
        });
        let want: Vec<i64> = want.collect();
        for session in sessions() {
            let args = KvIndicesArgs {
                rows: TokenRows { table: pages.tensor(), row_ids: None, page_size },
                kv_len: kv_len.tensor(),
                kv_start: None,
                window: 0,
                page_size: 0,
                kv_indptr: indptr.tensor(),
                kv_indices: indices.tensor(),
                last_page_len: None,
            };
            session.kv_indices(&args, Stream::default()).unwrap();
            let args = BlockTableArgs {
                kv_indptr: indptr.tensor(),
                kv_indices: indices.tensor(),
                block_table: back.tensor(),
                fill,
            };
            session.block_table(&args, Stream::default()).unwrap();
            prop_assert_eq!(is(&back), want.clone());
        }
    }
}
