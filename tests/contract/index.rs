//! The operators that build indices with callers who err.

use crate::common::c_door::{
    Tensors, c_batch_lengths, c_block_table, c_draft_kv_indices, c_kv_indices, c_slot_mapping,
};
use crate::common::index::list;
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::fixture::{Context, Reply};
use crate::structs::sizes;
use crate::table::{INVALID, UNKNOWN, check, poke};
use crate::tensors::Dim::{AtLeast, Exact, Free};
use crate::tensors::{field, input, optional, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    SlotMappingArgs, TokenRows,
};
use std::ptr::{null, null_mut};

fn numbers(values: &[i64]) -> Resident<'static> {
    Resident::new(&HostMemory, list(DType::I32, values))
}

fn blank(shape: &[i64]) -> Resident<'static> {
    Resident::new(
        &HostMemory,
        Image::poisoned(View::compact(DType::I32, shape)),
    )
}

/// Two rows of three pages.
fn pages() -> Resident<'static> {
    Resident::new(&HostMemory, Image::of_i32(&[2, 3], &[5, 6, 7, 8, -1, 9]))
}

/// Two requests of ten and five tokens, of which three and one are new, in pages of four.
struct Batch {
    context: Context,
    pages: Resident<'static>,
    row_ids: Resident<'static>,
    kv_len: Resident<'static>,
    kv_start: Resident<'static>,
    qo_len: Resident<'static>,
    cached_len: Resident<'static>,
    qo_indptr: Resident<'static>,
    kv_indptr: Resident<'static>,
    kv_indices: Resident<'static>,
    /// In the order of the operator's fields.
    outputs: Vec<Resident<'static>>,
}

impl Batch {
    fn new(outputs: &[&[i64]]) -> Batch {
        Batch {
            context: Context::cpu(),
            pages: pages(),
            row_ids: numbers(&[1, 0]),
            kv_len: numbers(&[10, 5]),
            kv_start: numbers(&[3, 0]),
            qo_len: numbers(&[3, 1]),
            cached_len: numbers(&[7, 4]),
            qo_indptr: numbers(&[0, 3, 4]),
            kv_indptr: numbers(&[0, 3, 5]),
            kv_indices: numbers(&[5, 6, 7, 8, 9]),
            outputs: outputs.iter().map(|shape| blank(shape)).collect(),
        }
    }

    fn is_untouched(&self) -> bool {
        self.outputs.iter().all(Resident::is_untouched)
    }

    fn rows(&self, page_size: u32) -> TokenRows {
        TokenRows {
            table: self.pages.tensor(),
            row_ids: Some(self.row_ids.tensor()),
            page_size,
        }
    }
}

macro_rules! operator {
    ($caller:ident, $function:ident, $args:ident) => {
        fn $caller(batch: &Batch, args: *const $args) -> Reply {
            // SAFETY: a live context and the caller's struct, or NULL.
            Reply::of(|err| unsafe { $function(batch.context.0, args, null_mut(), err) })
        }
    };
}

operator!(lengths, folio_batch_lengths, folio_batch_lengths_args);
operator!(listed, folio_kv_indices, folio_kv_indices_args);
operator!(tabled, folio_block_table, folio_block_table_args);
operator!(slots, folio_slot_mapping, folio_slot_mapping_args);
operator!(drafts, folio_draft_kv_indices, folio_draft_kv_indices_args);

fn batch_lengths() -> Batch {
    Batch::new(&[&[3], &[2], &[3], &[2]])
}

fn lengths_input(batch: &Batch) -> BatchLengthsArgs {
    let output = |n: usize| Some(batch.outputs[n].tensor());
    BatchLengthsArgs {
        qo_len: batch.qo_len.tensor(),
        cached_len: Some(batch.cached_len.tensor()),
        encoder_len: Some(batch.kv_start.tensor()),
        qo_indptr: output(0),
        kv_len: output(1),
        kv_indptr: output(2),
        row_kind: output(3),
    }
}

fn kv_indices() -> Batch {
    Batch::new(&[&[3], &[5], &[2]])
}

fn listed_input(batch: &Batch) -> KvIndicesArgs {
    KvIndicesArgs {
        rows: batch.rows(4),
        kv_len: batch.kv_len.tensor(),
        kv_start: Some(batch.kv_start.tensor()),
        window: 0,
        page_size: 0,
        kv_indptr: batch.outputs[0].tensor(),
        kv_indices: batch.outputs[1].tensor(),
        last_page_len: Some(batch.outputs[2].tensor()),
    }
}

fn block_table() -> Batch {
    Batch::new(&[&[2, 3]])
}

fn tabled_input(batch: &Batch) -> BlockTableArgs {
    BlockTableArgs {
        kv_indptr: batch.kv_indptr.tensor(),
        kv_indices: batch.kv_indices.tensor(),
        block_table: batch.outputs[0].tensor(),
        fill: -1,
    }
}

fn slot_mapping() -> Batch {
    Batch::new(&[&[6], &[6]])
}

fn slots_input(batch: &Batch, by_len: bool) -> SlotMappingArgs {
    SlotMappingArgs {
        rows: batch.rows(4),
        queries: match by_len {
            true => QueryRows::Len(batch.qo_len.tensor()),
            false => QueryRows::Indptr(batch.qo_indptr.tensor()),
        },
        kv_len: batch.kv_len.tensor(),
        slot_mapping: batch.outputs[0].tensor(),
        positions: Some(batch.outputs[1].tensor()),
    }
}

/// Two branches of two steps, behind one token each of two requests: five columns are needed.
fn draft_kv_indices() -> Batch {
    let lists = Batch::new(&[&[2, 5], &[2, 12]]);
    let table: Vec<i32> = (0..10).collect();
    Batch {
        pages: Resident::new(&HostMemory, Image::of_i32(&[2, 5], &table)),
        kv_len: numbers(&[1, 1]),
        ..lists
    }
}

fn drafts_input(batch: &Batch) -> DraftKvIndicesArgs {
    DraftKvIndicesArgs {
        rows: batch.rows(1),
        kv_len: batch.kv_len.tensor(),
        topk: 2,
        num_steps: 0,
        slots: DraftSlots::StepMajor,
        kv_indptr: batch.outputs[0].tensor(),
        kv_indices: batch.outputs[1].tensor(),
    }
}

#[test]
fn tensors_of_lengths() {
    type Args = folio_batch_lengths_args;
    let batch = batch_lengths();
    let fields = [
        field!(input, Args, qo_len, [Free]),
        field!(optional, Args, cached_len, [Exact]),
        field!(optional, Args, encoder_len, [Exact]),
        field!(output, Args, qo_indptr, [AtLeast]).or_none(),
        field!(output, Args, kv_len, [AtLeast]).or_none(),
        field!(output, Args, kv_indptr, [AtLeast]).or_none(),
        field!(output, Args, row_kind, [AtLeast]).or_none(),
    ];
    walk(
        "batch_lengths",
        &fields,
        |tensors| c_batch_lengths(&lengths_input(&batch), tensors),
        |args| lengths(&batch, args),
        || batch.is_untouched(),
    );
}

#[test]
fn tensors_of_a_list() {
    type Args = folio_kv_indices_args;
    let batch = kv_indices();
    let fields = [
        field!(input, Args, block_table, [Free, Free]),
        field!(optional, Args, row_ids, [Exact]),
        field!(input, Args, kv_len, [Free]),
        field!(optional, Args, kv_start, [Exact]),
        field!(output, Args, kv_indptr, [AtLeast]),
        field!(output, Args, kv_indices, [Free]),
        field!(output, Args, last_page_len, [AtLeast]).or_none(),
    ];
    walk(
        "kv_indices",
        &fields,
        |tensors| c_kv_indices(&listed_input(&batch), tensors),
        |args| listed(&batch, args),
        || batch.is_untouched(),
    );
}

#[test]
fn tensors_of_a_block_table() {
    type Args = folio_block_table_args;
    let batch = block_table();
    let fields = [
        field!(input, Args, kv_indptr, [Free]),
        field!(input, Args, kv_indices, [Free]),
        field!(output, Args, block_table, [AtLeast, Free]),
    ];
    walk(
        "block_table",
        &fields,
        |tensors| c_block_table(&tabled_input(&batch), tensors),
        |args| tabled(&batch, args),
        || batch.is_untouched(),
    );
}

#[test]
fn tensors_of_a_slot_mapping() {
    type Args = folio_slot_mapping_args;
    let common = [
        field!(input, Args, block_table, [Free, Free]),
        field!(optional, Args, row_ids, [Exact]),
        field!(input, Args, kv_len, [Free]),
        field!(output, Args, slot_mapping, [Free]),
        field!(output, Args, positions, [Exact]).or_none(),
    ];
    let indptr = [field!(input, Args, qo_indptr, [Exact])];
    let len = [field!(optional, Args, qo_len, [Exact])];
    for (by_len, queries) in [(false, &indptr), (true, &len)] {
        for fields in [&common[..], queries] {
            let batch = slot_mapping();
            walk(
                "slot_mapping",
                fields,
                |tensors| c_slot_mapping(&slots_input(&batch, by_len), tensors),
                |args| slots(&batch, args),
                || batch.is_untouched(),
            );
        }
    }
}

#[test]
fn tensors_of_drafts() {
    type Args = folio_draft_kv_indices_args;
    let batch = draft_kv_indices();
    let fields = [
        field!(input, Args, req_to_token, [Free, Free]),
        field!(optional, Args, row_ids, [Exact]),
        field!(input, Args, kv_len, [Free]),
        field!(output, Args, kv_indptr, [Free, AtLeast]),
        field!(output, Args, kv_indices, [Exact, Free]),
    ];
    walk(
        "draft_kv_indices",
        &fields,
        |tensors| c_draft_kv_indices(&drafts_input(&batch), tensors),
        |args| drafts(&batch, args),
        || batch.is_untouched(),
    );
}

#[test]
fn arguments_of_lengths() {
    type Args = folio_batch_lengths_args;
    let (batch, tensors) = (batch_lengths(), Tensors::default());
    let right = c_batch_lengths(&lengths_input(&batch), &tensors);
    check(
        &right,
        |args| lengths(&batch, args),
        &[
            (
                &|a: &mut Args| (a.kv_len, a.kv_indptr) = (null(), null()),
                INVALID,
                &["cached_len", "kv_len or kv_indptr"],
            ),
            (
                &|a: &mut Args| a.row_kind = null(),
                INVALID,
                &["encoder_len", "row_kind"],
            ),
            (
                &|a: &mut Args| a.encoder_len = null(),
                INVALID,
                &["encoder_len", "NULL", "row_kind"],
            ),
            (
                &|a: &mut Args| {
                    (a.qo_indptr, a.kv_len, a.kv_indptr) = (null(), null(), null());
                    (a.row_kind, a.cached_len, a.encoder_len) = (null(), null(), null());
                },
                INVALID,
                &["qo_indptr", "NULL"],
            ),
        ],
    );
    for (which, at, value, words) in [
        (0, 1, -1, ["qo_len[1]", "-1"]),
        (1, 0, -4, ["cached_len[0]", "-4"]),
        (1, 0, i32::MAX, ["cached_len[0]", "2147483644"]),
        (2, 1, -1, ["encoder_len[1]", "-1"]),
        (0, 1, i32::MAX, ["qo_indptr", "2147483650"]),
    ] {
        let batch = batch_lengths();
        let mut args = c_batch_lengths(&lengths_input(&batch), &tensors);
        if which == 0 && value > 0 {
            args.cached_len = null();
        }
        poke(
            [args.qo_len, args.cached_len, args.encoder_len][which],
            at,
            value,
        );
        lengths(&batch, &args).assert(words[0], INVALID, &words);
        assert!(batch.is_untouched());
    }
    sizes("folio_batch_lengths_args", &right, 0, |args| {
        lengths(&batch, args)
    });
}

#[test]
fn arguments_of_a_list() {
    type Args = folio_kv_indices_args;
    let (batch, tensors) = (kv_indices(), Tensors::default());
    let right = c_kv_indices(&listed_input(&batch), &tensors);
    check(
        &right,
        |args| listed(&batch, args),
        &[
            (
                &|a: &mut Args| a.page_size = 0,
                INVALID,
                &["page_size", "0"],
            ),
            (
                &|a: &mut Args| a.page_size = 1 << 31,
                INVALID,
                &["page_size", "2147483648"],
            ),
            (
                &|a: &mut Args| a.indices_page_size = 3,
                INVALID,
                &["indices_page_size", "3", "page_size (4)"],
            ),
            // Twelve slots do not fit a list of five.
            (
                &|a: &mut Args| a.indices_page_size = 1,
                INVALID,
                &["kv_indices", "5", "12"],
            ),
            (&|a: &mut Args| a.reserved = 9, UNKNOWN, &["reserved", "9"]),
        ],
    );
    for (which, at, value, words) in [
        (0, 0, 13, ["kv_len[0]", "13"]),
        (0, 0, -1, ["kv_len[0]", "-1"]),
        (1, 0, 11, ["kv_start[0]", "0 to 10"]),
        (1, 1, -1, ["kv_start[1]", "-1"]),
        (2, 1, 2, ["row_ids[1]", "below 2"]),
        (2, 0, -1, ["row_ids[0]", "-1"]),
    ] {
        let batch = kv_indices();
        let args = c_kv_indices(&listed_input(&batch), &tensors);
        poke([args.kv_len, args.kv_start, args.row_ids][which], at, value);
        listed(&batch, &args).assert(words[0], INVALID, &words);
        assert!(batch.is_untouched());
    }
    sizes("folio_kv_indices_args", &right, 0, |args| {
        listed(&batch, args)
    });
}

#[test]
fn arguments_of_a_block_table() {
    type Args = folio_block_table_args;
    let (batch, tensors) = (block_table(), Tensors::default());
    let right = c_block_table(&tabled_input(&batch), &tensors);
    check(
        &right,
        |args| tabled(&batch, args),
        &[(&|a: &mut Args| a.reserved = 2, UNKNOWN, &["reserved", "2"])],
    );
    for (at, value, words) in [
        (0, 1, ["kv_indptr[0]", "0 to 0"]),
        (1, -1, ["kv_indptr[1]", "-1"]),
        (2, 2, ["kv_indptr[2]", "3 to 5"]),
        (2, 6, ["kv_indptr[2]", "6"]),
        (1, 4, ["block_table", "request 0"]),
    ] {
        let batch = block_table();
        let args = c_block_table(&tabled_input(&batch), &tensors);
        poke(args.kv_indptr, at, value);
        tabled(&batch, &args).assert(words[0], INVALID, &words);
        assert!(batch.is_untouched());
    }
    sizes("folio_block_table_args", &right, 0, |args| {
        tabled(&batch, args)
    });
}

#[test]
fn arguments_of_a_slot_mapping() {
    type Args = folio_slot_mapping_args;
    let (batch, tensors) = (slot_mapping(), Tensors::default());
    let right = c_slot_mapping(&slots_input(&batch, false), &tensors);
    let len = tensors.of(batch.qo_len.tensor());
    check(
        &right,
        |args| slots(&batch, args),
        &[
            (
                &|a: &mut Args| a.page_size = 0,
                INVALID,
                &["page_size", "0"],
            ),
            (
                &|a: &mut Args| a.qo_len = len,
                INVALID,
                &["qo_indptr", "qo_len"],
            ),
            (&|a: &mut Args| a.reserved = 2, UNKNOWN, &["reserved", "2"]),
        ],
    );
    for (by_len, which, at, value, words) in [
        (false, 0, 0, 1, ["qo_indptr[0]", "1"]),
        (false, 0, 1, 5, ["qo_indptr[2]", "5 to 6"]),
        (false, 0, 2, 7, ["qo_indptr[2]", "7"]),
        (true, 1, 0, -1, ["qo_len[0]", "-1"]),
        (true, 1, 1, 4, ["slot_mapping", "7"]),
        (true, 2, 0, 2, ["kv_len[0]", "3 to 12"]),
        (false, 2, 1, 13, ["kv_len[1]", "13"]),
        (false, 3, 0, 2, ["row_ids[0]", "2"]),
    ] {
        let batch = slot_mapping();
        let args = c_slot_mapping(&slots_input(&batch, by_len), &tensors);
        let lists = [args.qo_indptr, args.qo_len, args.kv_len, args.row_ids];
        poke(lists[which], at, value);
        slots(&batch, &args).assert(words[0], INVALID, &words);
        assert!(batch.is_untouched());
    }
    sizes("folio_slot_mapping_args", &right, 0, |args| {
        slots(&batch, args)
    });
}

#[test]
fn arguments_of_drafts() {
    type Args = folio_draft_kv_indices_args;
    let (batch, tensors) = (draft_kv_indices(), Tensors::default());
    let right = c_draft_kv_indices(&drafts_input(&batch), &tensors);
    check(
        &right,
        |args| drafts(&batch, args),
        &[
            (&|a: &mut Args| a.topk = 0, INVALID, &["topk", "0"]),
            (&|a: &mut Args| a.topk = 65536, INVALID, &["topk", "65536"]),
            (
                &|a: &mut Args| a.num_steps = 1,
                INVALID,
                &["num_steps", "1", "2"],
            ),
            (
                &|a: &mut Args| a.num_steps = 65536,
                INVALID,
                &["num_steps", "65536"],
            ),
            (
                &|a: &mut Args| a.slot_layout = 3,
                INVALID,
                &["slot_layout", "3"],
            ),
            (
                &|a: &mut Args| a.page_size = 4,
                INVALID,
                &["page_size", "4", "FOLIO_DRAFT_PAGED"],
            ),
            (
                &|a: &mut Args| a.slot_layout = FOLIO_DRAFT_PAGED,
                INVALID,
                &["page_size", "0"],
            ),
            (
                &|a: &mut Args| (a.slot_layout, a.num_steps) = (FOLIO_DRAFT_BRANCH_MAJOR, 3),
                INVALID,
                &["kv_len[0]", "6 columns"],
            ),
            (
                &|a: &mut Args| (a.slot_layout, a.page_size) = (FOLIO_DRAFT_PAGED, 4),
                INVALID,
                &["kv_len[0]", "7 columns"],
            ),
        ],
    );
    for (which, at, value, words) in [
        (0, 1, 2, ["kv_len[1]", "6 columns"]),
        (0, 0, -1, ["kv_len[0]", "-1"]),
        (1, 0, 2, ["row_ids[0]", "rows of req_to_token"]),
    ] {
        let batch = draft_kv_indices();
        let args = c_draft_kv_indices(&drafts_input(&batch), &tensors);
        poke([args.kv_len, args.row_ids][which], at, value);
        drafts(&batch, &args).assert(words[0], INVALID, &words);
        assert!(batch.is_untouched());
    }
    let short = blank(&[2, 11]);
    let mut args = right;
    args.kv_indices = tensors.of(short.tensor());
    drafts(&batch, &args).assert("a short list", INVALID, &["kv_indices", "11", "12"]);
    assert!(short.is_untouched());
    sizes("folio_draft_kv_indices_args", &right, 0, |args| {
        drafts(&batch, args)
    });
}

/// A column of numbers is as good as a list.
#[test]
fn columns_are_lists() {
    let (batch, tensors) = (kv_indices(), Tensors::default());
    let column = Resident::new(&HostMemory, Image::of_i32(&[2, 1], &[10, 5]));
    let mut args = c_kv_indices(&listed_input(&batch), &tensors);
    args.kv_len = tensors.of(column.tensor());
    listed(&batch, &args).assert_ok("a column");
    let pair = Resident::new(&HostMemory, Image::of_i32(&[2, 2], &[10, 5, 1, 1]));
    args.kv_len = tensors.of(pair.tensor());
    listed(&batch, &args).assert("two columns", FOLIO_ERR_SHAPE, &["kv_len", "[2, 2]"]);
}

#[test]
fn nulls() {
    let batch = kv_indices();
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(lengths(&batch, null()), "folio_batch_lengths_args");
    refused(listed(&batch, null()), "folio_kv_indices_args");
    refused(tabled(&batch, null()), "folio_block_table_args");
    refused(slots(&batch, null()), "folio_slot_mapping_args");
    refused(drafts(&batch, null()), "folio_draft_kv_indices_args");
    // SAFETY: NULL, which every entry refuses.
    unsafe {
        let entries: [&dyn Fn(*mut folio_error) -> folio_status; 5] = [
            &|err| folio_batch_lengths(null(), null(), null_mut(), err),
            &|err| folio_kv_indices(null(), null(), null_mut(), err),
            &|err| folio_block_table(null(), null(), null_mut(), err),
            &|err| folio_slot_mapping(null(), null(), null_mut(), err),
            &|err| folio_draft_kv_indices(null(), null(), null_mut(), err),
        ];
        for entry in entries {
            refused(Reply::of(entry), "ctx");
        }
    }
}
