//! Indices of batches on the device: what comes out token by token, batches of thousands of requests, lengths that lie, and
//! a captured chain.

use crate::common::index::{
    Drafts, Lengths, Listing, Lists, NewTokens, Rows, check_far_slots, list, numbers,
};
use crate::common::memory::{Image, Resident, View};
use crate::common::values::mix;
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{
    BatchLengthsArgs, DraftSlots, KvIndicesArgs, QueryRows, SlotMappingArgs, TokenRows,
};

const INTEGERS: [DType; 2] = [DType::I32, DType::I64];

/// Batches that are empty, small, around a block's threads, and of several requests for each of them.
const BATCHES: [usize; 8] = [0, 1, 37, 1023, 1024, 1025, 1786, 5000];

/// How lengths are spread over a batch.
#[derive(Debug, Clone, Copy)]
enum Spread {
    Evenly,
    /// Most requests are empty, many neighbours of each other.
    MostlyEmpty,
    /// One request has nearly everything.
    OneLong,
}

impl Spread {
    fn of(self, mut lengths: Vec<i64>, most: i64) -> Vec<i64> {
        let requests = lengths.len();
        for (b, length) in lengths.iter_mut().enumerate() {
            match self {
                Spread::Evenly => {}
                Spread::MostlyEmpty if b % 40 == 7 => {}
                Spread::MostlyEmpty => *length = 0,
                Spread::OneLong if b == requests / 3 => *length = most,
                Spread::OneLong => *length = (*length).min(b as i64 % 3),
            }
        }
        lengths
    }
}

/// A number below `end` for each request.
fn below(end: i64, requests: usize, seed: u64) -> Vec<i64> {
    let number = |b: usize| (mix(seed ^ mix(b as u64)) % end as u64) as i64;
    (0..requests).map(number).collect()
}

fn rows(requests: usize, columns: i64, page_size: u32) -> Rows {
    let by_id = requests % 2 == 1;
    let count = requests as i64 + 5;
    Rows {
        dtype: INTEGERS[requests % 2],
        page_size,
        columns,
        rows: count,
        row_ids: by_id.then(|| below(count, requests, 5)),
        gap: 3,
        seed: 9,
    }
}

pub fn batch_lengths() {
    let device = session();
    for requests in BATCHES {
        for (n, dtypes) in [INTEGERS, [DType::I64, DType::I32]].into_iter().enumerate() {
            let numbers = [7, 3000, 2].map(|end| below(end, requests, end as u64));
            let request = |b: usize| [0, 1, 2].map(|n| numbers[n][b]);
            let lengths = Lengths {
                requests: (0..requests).map(request).collect(),
                with_cached: true,
                with_kinds: n == 0,
                outputs: [true, n == 0, true],
                dtypes,
                spare: 300 * n as i64,
            };
            assert_eq!(lengths.check(&*device, &DeviceMemory), Ok(()), "{requests}");
        }
    }
}

/// The sizes of SGLang's own test among them: up to 1786 requests on rows of 4096 slots.
pub fn kv_indices() {
    let device = session();
    for requests in BATCHES {
        for (columns, page_size, listed, window, spread) in [
            (4096, 1, 0, 0, Spread::Evenly),
            (4096, 1, 0, 1000, Spread::OneLong),
            (130, 16, 0, 0, Spread::Evenly),
            (130, 16, 0, 0, Spread::MostlyEmpty),
            (130, 16, 1, 0, Spread::Evenly),
            (130, 16, 1, 0, Spread::MostlyEmpty),
            (130, 16, 1, 0, Spread::OneLong),
            (64, 16, 64, 100, Spread::Evenly),
            (1100, 1, 64, 0, Spread::Evenly),
        ] {
            // What the test itself computes grows with the tokens.
            let columns = columns / (1 + requests as i64 / 500);
            let rows = rows(requests, columns, page_size);
            let tokens = columns * i64::from(page_size);
            let kv_len = spread.of(below(tokens + 1, requests, 3), tokens);
            let start = |(len, part): (&i64, i64)| len * part / 4;
            let starts = kv_len.iter().zip(below(5, requests, 4)).map(start);
            let listing = Listing {
                kv_start: (window == 0).then(|| starts.collect()),
                kv_len,
                window,
                page_size: listed,
                dtype: INTEGERS[usize::from(listed == 1)],
                with_last: true,
                spare: 700,
                rows,
            };
            assert_eq!(
                listing.check(&*device, &DeviceMemory),
                Ok(()),
                "{requests} {columns}"
            );
        }
    }
}

pub fn block_table() {
    let device = session();
    for requests in BATCHES {
        for (columns, fill, dtypes) in [(40, -1, INTEGERS), (9000, -7, [DType::I64, DType::I32])] {
            let columns = columns / (1 + requests as i64 / 20);
            let counts = below(columns + 1, requests, 3);
            // int64 lists have ids that an int32 table cannot hold.
            let ids = if dtypes[0] == DType::I64 { 40 } else { 30 };
            let lists = Lists {
                lists: (counts.iter())
                    .map(|&count| below(1 << ids, count as usize, count as u64))
                    .collect(),
                columns,
                spare_rows: 3,
                fill,
                gap: 5,
                dtypes,
            };
            assert_eq!(lists.check(&*device, &DeviceMemory), Ok(()), "{requests}");
        }
    }
}

pub fn slot_mapping() {
    let device = session();
    assert_eq!(check_far_slots(&*device, &DeviceMemory), Ok(()));
    for requests in BATCHES {
        for (columns, page_size, by_len, spread) in [
            (300, 1, false, Spread::Evenly),
            (20, 16, true, Spread::Evenly),
            (20, 16, true, Spread::MostlyEmpty),
            (40, 24, false, Spread::OneLong),
        ] {
            let rows = rows(requests, columns, page_size);
            let tokens = columns * i64::from(page_size);
            let all = spread.of(below(tokens + 1, requests, 7), tokens);
            let new = |len: &i64| [len % 9, *len];
            let mut batch: Vec<[i64; 2]> = all.iter().map(new).collect();
            if let Some(request) = batch.first_mut() {
                // A prompt.
                *request = [tokens, tokens];
            }
            let new_tokens = NewTokens {
                rows,
                requests: batch,
                by_len,
                with_positions: true,
                dtypes: [DType::I64, INTEGERS[usize::from(by_len)]],
                spare: 1000,
            };
            assert_eq!(
                new_tokens.check(&*device, &DeviceMemory),
                Ok(()),
                "{requests}"
            );
        }
    }
}

fn drafts(requests: usize, slots: DraftSlots, num_steps: u32) -> Drafts {
    let mut drafts = Drafts {
        rows: rows(requests, 0, 1),
        kv_len: below(900 / (1 + requests as i64 / 100), requests, 2),
        topk: 4,
        steps: 3,
        num_steps,
        slots,
        dtype: INTEGERS[requests % 2],
        gap: 2,
        spare: 11,
    };
    drafts.rows.columns = drafts.columns();
    drafts
}

pub fn draft_kv_indices() {
    let device = session();
    for requests in [0, 1, 37, 300, 1025] {
        for (slots, num_steps) in [
            (DraftSlots::StepMajor, 0),
            (DraftSlots::BranchMajor, 5),
            (DraftSlots::Paged(16), 0),
        ] {
            let drafts = drafts(requests, slots, num_steps);
            assert_eq!(
                drafts.check(&*device, &DeviceMemory),
                Ok(()),
                "{requests} {slots:?}"
            );
        }
    }
}

/// Lengths, rows and capacities that do not fit: what is beyond is cut off, and nothing else is written.
pub fn indices_beyond_the_tensors() {
    let device = session();
    let lies = vec![30, i64::from(i32::MAX), -5, 40, 3, i64::from(i32::MIN)];
    let ids = vec![0, 1, 2, 3, -1, 99];
    for spare in [0, -1, -40, -1_000_000] {
        for (by_id, listed) in [(false, 0), (true, 1)] {
            let mut rows = rows(6, 10, 4);
            (rows.row_ids, rows.dtype) = (by_id.then(|| ids.clone()), DType::I32);
            let listing = Listing {
                kv_len: lies.clone(),
                kv_start: Some(vec![-9, 3, 0, i64::from(i32::MAX), i64::from(i32::MIN), 1]),
                window: 0,
                page_size: listed,
                dtype: DType::I32,
                with_last: true,
                spare,
                rows: rows.clone(),
            };
            assert_eq!(
                listing.check(&*device, &DeviceMemory),
                Ok(()),
                "{listing:?}"
            );
            for by_len in [false, true] {
                let new_tokens = NewTokens {
                    rows: rows.clone(),
                    requests: vec![[5, 2], [3, 60], [0, -7], [2, 41], [4, 4], [1, 1000]],
                    by_len,
                    with_positions: true,
                    dtypes: INTEGERS,
                    spare,
                };
                let checked = new_tokens.check(&*device, &DeviceMemory);
                assert_eq!(checked, Ok(()), "{new_tokens:?}");
            }
        }
        let mut short = drafts(37, DraftSlots::BranchMajor, 0);
        short.spare = spare;
        assert_eq!(short.check(&*device, &DeviceMemory), Ok(()), "{spare}");
    }
    // The slots of some drafts are beyond the columns.
    for missing in [1, 40] {
        let mut narrow = drafts(37, DraftSlots::Paged(16), 0);
        narrow.rows.columns -= missing;
        let columns = narrow.rows.columns;
        let lens = narrow.kv_len.iter_mut();
        lens.for_each(|len| *len = (*len).min(columns));
        assert_eq!(narrow.check(&*device, &DeviceMemory), Ok(()), "{missing}");
    }
}

/// Lengths, then lists and slots of them, as a graph over changing lengths.
pub fn indices_are_replayed() {
    let device = session();
    let memory = &DeviceMemory;
    let resident = |image| Resident::new(memory, image);
    let output = |count: i64| resident(Image::poisoned(View::compact(DType::I32, &[count])));
    let (qo_len, cached) = (output(6), output(6));
    let pages: Vec<i32> = (0..60).map(|page| 7 * page % 60).collect();
    let table = resident(Image::of_i32(&[6, 10], &pages));
    let (qo_indptr, kv_len) = (output(7), output(6));
    let (kv_indptr, kv_indices) = (output(7), output(60));
    let slots = output(40);
    let rows = TokenRows {
        table: table.tensor(),
        row_ids: None,
        page_size: 16,
    };
    let stream = gpu::new_stream();
    let chain = |stream: Stream| {
        let lengths = BatchLengthsArgs {
            qo_len: qo_len.tensor(),
            cached_len: Some(cached.tensor()),
            encoder_len: None,
            qo_indptr: Some(qo_indptr.tensor()),
            kv_len: Some(kv_len.tensor()),
            kv_indptr: None,
            row_kind: None,
        };
        device.batch_lengths(&lengths, stream).unwrap();
        let listed = KvIndicesArgs {
            rows,
            kv_len: kv_len.tensor(),
            kv_start: None,
            window: 0,
            page_size: 0,
            kv_indptr: kv_indptr.tensor(),
            kv_indices: kv_indices.tensor(),
            last_page_len: None,
        };
        device.kv_indices(&listed, stream).unwrap();
        let mapping = SlotMappingArgs {
            rows,
            queries: QueryRows::Indptr(qo_indptr.tensor()),
            kv_len: kv_len.tensor(),
            slot_mapping: slots.tensor(),
            positions: None,
        };
        device.slot_mapping(&mapping, stream).unwrap();
    };
    // Code is loaded before the capture.
    chain(stream);
    let graph = gpu::capture(stream, || chain(stream));
    for (new, before) in [
        ([3, 0, 1, 5, 0, 1], [17, 4, 0, 100, 9, 15]),
        ([0; 6], [1; 6]),
        ([1; 6], [0, 15, 16, 31, 32, 159]),
    ] {
        qo_len.copy_from(&resident(list(DType::I32, &new)));
        cached.copy_from(&resident(list(DType::I32, &before)));
        graph.launch(stream);
        gpu::synchronize_all();
        let lens: Vec<i64> = (new.iter().zip(&before))
            .map(|(new, before)| if *new > 0 { new + before } else { 0 })
            .collect();
        let (mut ids, mut indptr, mut want) = (Vec::new(), vec![0], Vec::new());
        for (b, (&len, &new)) in lens.iter().zip(&new).enumerate() {
            let page = |token: i64| i64::from(pages[b * 10 + token as usize / 16]);
            ids.extend((0..len).step_by(16).map(page));
            indptr.push(ids.len() as i64);
            want.extend((len - new..len).map(|token| page(token) * 16 + token % 16));
        }
        want.resize(40, -1);
        assert_eq!(numbers(&kv_len.current()), lens);
        assert_eq!(numbers(&kv_indptr.current()), indptr);
        assert_eq!(numbers(&kv_indices.current())[..ids.len()], ids);
        assert_eq!(numbers(&slots.current()), want);
    }
}
