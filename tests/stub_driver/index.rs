//! What the operators that build indices are launched with.

use folio::api::{self, Context};
use folio::backend::Stream;
use folio::cuda::index_params::{
    BatchLengthsParams, BlockTableParams, DraftKvIndicesParams, KvIndicesParams, SlotMappingParams,
};
use folio::cuda::integers_params::Integers;
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    SlotMappingArgs, TokenRows,
};
use folio::tensor::Tensor;

use crate::fixture::{CAPTURED, OURS, at, context, divides};
use crate::stub::{Launched, Recorder};

const TABLE: usize = 0x1_0000_0000;
const IDS: usize = 0x2_0000_0000;
const LENS: usize = 0x3_0000_0000;
const STARTS: usize = 0x4_0000_0000;
const INDPTR: usize = 0x5_0000_0000;
const LIST: usize = 0x6_0000_0000;
const LAST: usize = 0x7_0000_0000;

fn i32s(address: usize, count: i64) -> Tensor {
    at(address, DType::I32, &[count], None)
}

fn i64s(address: usize, count: i64) -> Tensor {
    at(address, DType::I64, &[count], None)
}

/// A list as a kernel is told of it.
fn of(address: usize, columns: i64, bytes: u32) -> Integers {
    Integers {
        data: address as u64,
        rows: 1,
        columns,
        stride: 0,
        bytes,
        reserved: 0,
    }
}

/// 100 rows of `columns` int32 in memory of 5000.
fn table(columns: i64) -> (Tensor, Integers) {
    let told = Integers {
        data: TABLE as u64,
        rows: 100,
        columns,
        stride: 5000,
        bytes: 4,
        reserved: 0,
    };
    let tensor = at(TABLE, DType::I32, &[100, columns], Some(&[5000, 1]));
    (tensor, told)
}

fn rows(columns: i64, page_size: u32) -> TokenRows {
    TokenRows {
        table: table(columns).0,
        row_ids: Some(i64s(IDS, 3)),
        page_size,
    }
}

/// The one launch of an operator, which a capture refuses before it was loaded.
fn launched<A>(
    recorder: &Recorder,
    name: &str,
    operator: fn(&Context, &A, Stream) -> Result<()>,
    args: &A,
) -> Launched {
    let context = context();
    let refused = operator(&context, args, CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    operator(&context, args, OURS).unwrap();
    recorder.forget();
    // Now it may be captured.
    operator(&context, args, CAPTURED).unwrap();
    let mut launches = recorder.launches();
    assert_eq!((launches.len(), launches[0].name()), (1, name));
    let threads = match name {
        "folio_block_table" => 256,
        "folio_kv_indices" | "folio_draft_kv_indices" => 512,
        _ => 1024,
    };
    assert_eq!(launches[0].block, [threads, 1, 1]);
    launches.remove(0)
}

pub fn batch_lengths() {
    let recorder = Recorder::new();
    recorder.expect::<BatchLengthsParams>("folio_batch_lengths");
    let mut args = BatchLengthsArgs {
        qo_len: i32s(LENS, 500),
        cached_len: Some(at(STARTS, DType::I64, &[500, 1], None)),
        encoder_len: None,
        qo_indptr: Some(i32s(INDPTR, 1025)),
        kv_len: None,
        kv_indptr: Some(i64s(LIST, 501)),
        row_kind: None,
    };
    let operator = api::batch_lengths;
    let launch = launched(&recorder, "folio_batch_lengths", operator, &args);
    // A thread for each of 1025 numbers.
    assert_eq!(launch.grid, [2, 1, 1]);
    let p: BatchLengthsParams = launch.params();
    assert_eq!(
        (p.qo_len, p.cached_len),
        (of(LENS, 500, 4), of(STARTS, 500, 8))
    );
    assert_eq!(
        (p.qo_indptr, p.kv_indptr),
        (of(INDPTR, 1025, 4), of(LIST, 501, 8))
    );
    let absent = Integers::default();
    assert_eq!([p.encoder_len, p.kv_len, p.row_kind], [absent; 3]);
    assert_eq!(p.batch_size, 500);
    // Kinds of no requests are nothing to launch.
    args = BatchLengthsArgs {
        qo_len: i32s(LENS, 0),
        cached_len: None,
        encoder_len: Some(i32s(STARTS, 0)),
        qo_indptr: None,
        kv_indptr: None,
        row_kind: Some(i32s(LIST, 0)),
        ..args
    };
    recorder.forget();
    api::batch_lengths(&context(), &args, OURS).unwrap();
    assert!(recorder.launches().is_empty());
}

pub fn kv_indices() {
    let recorder = Recorder::new();
    recorder.expect::<KvIndicesParams>("folio_kv_indices");
    let mut args = KvIndicesArgs {
        rows: rows(4096, 16),
        kv_len: i32s(LENS, 3),
        kv_start: Some(i32s(STARTS, 3)),
        window: 77,
        page_size: 1,
        kv_indptr: i32s(INDPTR, 9),
        kv_indices: i64s(LIST, 20_000),
        last_page_len: Some(i32s(LAST, 8)),
    };
    let launch = launched(&recorder, "folio_kv_indices", api::kv_indices, &args);
    // Three requests of up to 258 pieces, a warp for each, and 16 warps to a block.
    assert_eq!(launch.grid, [49, 1, 1]);
    let p: KvIndicesParams = launch.params();
    assert_eq!(p.rows.table, table(4096).1);
    assert_eq!(p.rows.row_ids, of(IDS, 3, 8));
    assert_eq!(divides(100, p.rows.page_size), 6);
    assert_eq!((p.kv_len, p.kv_start), (of(LENS, 3, 4), of(STARTS, 3, 4)));
    assert_eq!(
        (p.kv_indptr, p.kv_indices),
        (of(INDPTR, 9, 4), of(LIST, 20_000, 8))
    );
    assert_eq!(p.last_page_len, of(LAST, 8, 4));
    assert_eq!((divides(100, p.page_size), p.page_size.divisor), (100, 1));
    assert_eq!((p.window, p.parts.divisor, p.batch_size), (77, 49, 3));
    // As many tokens per index as per entry, and no requests: kv_indptr is still written.
    args = KvIndicesArgs {
        rows: TokenRows {
            row_ids: None,
            ..args.rows
        },
        kv_len: i32s(LENS, 0),
        kv_start: None,
        page_size: 0,
        last_page_len: None,
        ..args
    };
    let launch = launched(&recorder, "folio_kv_indices", api::kv_indices, &args);
    let p: KvIndicesParams = launch.params();
    assert_eq!((launch.grid, p.batch_size), ([1, 1, 1], 0));
    assert_eq!(
        (p.page_size.divisor, p.rows.row_ids),
        (16, Integers::default())
    );
    // Groups of 32 requests share 132 multiprocessors, and have a block each where there are more of them.
    args.rows.table = at(TABLE, DType::I32, &[5000, 4096], None);
    args.kv_indices = i64s(LIST, 1_000_000);
    for (requests, grid, parts) in [(1000, 128, 4), (5000, 157, 1)] {
        (args.kv_len, args.kv_indptr) = (i32s(LENS, requests), i32s(INDPTR, requests + 1));
        let launch = launched(&recorder, "folio_kv_indices", api::kv_indices, &args);
        let p: KvIndicesParams = launch.params();
        assert_eq!((launch.grid, p.parts.divisor), ([grid, 1, 1], parts));
    }
}

pub fn block_table() {
    let recorder = Recorder::new();
    recorder.expect::<BlockTableParams>("folio_block_table");
    let args = BlockTableArgs {
        kv_indptr: i32s(INDPTR, 81),
        kv_indices: i64s(LIST, 900),
        block_table: table(4097).0,
        fill: -7,
    };
    let launch = launched(&recorder, "folio_block_table", api::block_table, &args);
    // 17 warps for 4097 columns, and eight to a block.
    assert_eq!(launch.grid, [213, 1, 1]);
    let p: BlockTableParams = launch.params();
    assert_eq!(
        (p.kv_indptr, p.kv_indices),
        (of(INDPTR, 81, 4), of(LIST, 900, 8))
    );
    assert_eq!(p.block_table, table(4097).1);
    assert_eq!((p.fill, p.batch_size, p.parts), (-7, 80, 17));
}

pub fn slot_mapping() {
    let recorder = Recorder::new();
    recorder.expect::<SlotMappingParams>("folio_slot_mapping");
    let absent = Integers::default();
    for (queries, told) in [
        (
            QueryRows::Indptr(i32s(INDPTR, 4)),
            [of(INDPTR, 4, 4), absent],
        ),
        (QueryRows::Len(i64s(STARTS, 3)), [absent, of(STARTS, 3, 8)]),
    ] {
        let args = SlotMappingArgs {
            rows: rows(64, 24),
            queries,
            kv_len: i32s(LENS, 3),
            slot_mapping: i64s(LIST, 8193),
            positions: Some(i32s(LAST, 8193)),
        };
        let launch = launched(&recorder, "folio_slot_mapping", api::slot_mapping, &args);
        // A block for each 256 tokens.
        assert_eq!(launch.grid, [33, 1, 1]);
        let p: SlotMappingParams = launch.params();
        assert_eq!((p.rows.table, p.rows.row_ids), (table(64).1, of(IDS, 3, 8)));
        assert_eq!(divides(50, p.rows.page_size), 2);
        assert_eq!([p.qo_indptr, p.qo_len], told);
        assert_eq!(p.kv_len, of(LENS, 3, 4));
        assert_eq!(
            (p.slot_mapping, p.positions),
            (of(LIST, 8193, 8), of(LAST, 8193, 4))
        );
        assert_eq!(p.batch_size, 3);
    }
}

pub fn draft_kv_indices() {
    let recorder = Recorder::new();
    recorder.expect::<DraftKvIndicesParams>("folio_draft_kv_indices");
    for (slots, layout, page_size) in [
        (DraftSlots::StepMajor, 0, 0),
        (DraftSlots::BranchMajor, 1, 0),
        (DraftSlots::Paged(64), 2, 64),
    ] {
        let args = DraftKvIndicesArgs {
            rows: rows(4097, 1),
            kv_len: i32s(LENS, 3),
            topk: 4,
            num_steps: 6,
            slots,
            kv_indptr: at(INDPTR, DType::I32, &[5, 20], Some(&[33, 1])),
            kv_indices: at(LIST, DType::I64, &[5, 70_000], None),
        };
        let operator = api::draft_kv_indices;
        let launch = launched(&recorder, "folio_draft_kv_indices", operator, &args);
        // For each of five steps a warp for each of 73 pieces of three requests, and 16 warps to a block.
        assert_eq!(launch.grid, [70, 1, 1]);
        let p: DraftKvIndicesParams = launch.params();
        assert_eq!(
            (p.rows.table, p.rows.row_ids),
            (table(4097).1, of(IDS, 3, 8))
        );
        assert_eq!((p.rows.page_size.divisor, p.kv_len), (1, of(LENS, 3, 4)));
        let (indptr, list) = (p.kv_indptr, p.kv_indices);
        assert_eq!((indptr.rows, indptr.columns, indptr.stride), (5, 20, 33));
        assert_eq!((list.columns, list.stride, list.bytes), (70_000, 70_000, 8));
        assert_eq!((p.batch_size, p.topk, p.num_steps), (3, 4, 6));
        assert_eq!((p.slot_layout, p.page_size), (layout, page_size));
        assert_eq!((p.blocks.divisor, p.parts.divisor), (14, 14));
    }
}
