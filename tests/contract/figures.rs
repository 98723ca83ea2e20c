//! The pure functions: the figures of their sources through C, and callers who err.

use crate::common::c_door::init;
use crate::fixture::Reply;
use crate::structs::sizes;
use crate::table::{INVALID, UNKNOWN, check};
use folio::ffi::*;
use std::ptr::{null, null_mut};

/// A struct with its size, filled in.
pub fn with<T>(fill: impl FnOnce(&mut T)) -> T {
    // SAFETY: numbers and pointers behind a size.
    let mut args = unsafe { init::<T>() };
    fill(&mut args);
    args
}

macro_rules! caller {
    ($name:ident, $function:ident, $args:ident) => {
        fn $name(args: *const $args) -> Reply {
            // SAFETY: the struct is as it says, or NULL.
            Reply::of(|err| unsafe { $function(args, err) })
        }
    };
}

caller!(
    local_lengths,
    folio_cp_local_lengths,
    folio_cp_local_lengths_args
);
caller!(
    context_chunks,
    folio_mla_context_chunks,
    folio_mla_context_chunks_args
);
caller!(
    metadata,
    folio_flashmla_metadata,
    folio_flashmla_metadata_args
);
caller!(kv_splits, folio_num_kv_splits, folio_num_kv_splits_args);
caller!(
    split,
    folio_split_decodes_and_prefills,
    folio_split_decodes_and_prefills_args
);

#[test]
fn local_lengths_of_ranks() {
    type Args = folio_cp_local_lengths_args;
    let (lengths, mut out) = ([10, 17, 0], [-7; 12]);
    let right: Args = with(|a: &mut Args| {
        (a.world_size, a.rank, a.num_lengths) = (4, -1, 3);
        (a.lengths, a.out, a.capacity) = (lengths.as_ptr(), out.as_mut_ptr(), 12);
    });
    let negative = [1, -5];
    check(
        &right,
        |args| local_lengths(args),
        &[
            (
                &|a: &mut Args| a.world_size = 0,
                INVALID,
                &["world_size", "0"],
            ),
            (&|a: &mut Args| a.rank = 4, INVALID, &["rank", "4", "3"]),
            (&|a: &mut Args| a.rank = -2, INVALID, &["rank", "-2"]),
            (
                &|a: &mut Args| a.capacity = 11,
                INVALID,
                &["capacity", "11", "12"],
            ),
            (
                &|a: &mut Args| a.capacity = u64::MAX,
                INVALID,
                &["out", "numbers"],
            ),
            (
                &|a: &mut Args| a.lengths = null(),
                INVALID,
                &["lengths", "NULL"],
            ),
            (
                &|a: &mut Args| a.out = null_mut(),
                INVALID,
                &["out", "NULL"],
            ),
            (
                &|a: &mut Args| (a.lengths, a.num_lengths) = (negative.as_ptr(), 2),
                INVALID,
                &["lengths[1]", "-5"],
            ),
        ],
    );
    assert_eq!(out, [3, 3, 2, 2, 5, 4, 4, 4, 0, 0, 0, 0]);
    let mut two = right;
    (two.world_size, two.interleave, two.rank) = (2, 4, 1);
    local_lengths(&two).assert_ok("one rank");
    assert_eq!(out[..4], [4, 8, 0, 2], "what is more is left alone");
    sizes("folio_cp_local_lengths_args", &right, 0, local_lengths);
}

#[test]
fn tokens_of_a_workspace() {
    assert_eq!(folio_mla_context_tokens(4096, 64, 16), 32768);
    assert_eq!(folio_mla_context_tokens(1024, 32, 16), 8192);
    assert_eq!(folio_mla_context_tokens(163_840, 256, 64), 65536);
    assert_eq!(folio_mla_context_tokens(32768, 2048, 64), 131_072);
    assert_eq!(folio_mla_context_tokens(0, 0, 0), 0);
    let most = u32::MAX;
    let all = u64::from(most) * u64::from(most);
    assert_eq!(folio_mla_context_tokens(most, most, most), all);
}

#[test]
fn chunks_of_contexts() {
    type Args = folio_mla_context_chunks_args;
    let lens = [700, 0, 130, 1000];
    let (mut starts, mut ends, mut padded, mut longest) = ([-7; 16], [-7; 20], [-7; 20], [-7; 4]);
    let (mut count, mut tokens) = (0, 0);
    let right: Args = with(|a: &mut Args| {
        (a.num_requests, a.page_size, a.workspace_tokens) = (4, 64, 1024);
        (a.context_lens, a.max_num_chunks) = (lens.as_ptr(), 4);
        (a.seq_starts, a.cu_seq_lens) = (starts.as_mut_ptr(), ends.as_mut_ptr());
        (a.cu_padded_lens, a.max_lens) = (padded.as_mut_ptr(), longest.as_mut_ptr());
        (a.num_chunks, a.chunk_tokens) = (&mut count, &mut tokens);
    });
    let negative = [700, 0, -1, 3];
    check(
        &right,
        |args| context_chunks(args),
        &[
            (
                &|a: &mut Args| a.page_size = 0,
                INVALID,
                &["page_size", "0"],
            ),
            (&|a: &mut Args| a.reserved = 3, UNKNOWN, &["reserved", "3"]),
            (
                &|a: &mut Args| a.workspace_tokens = 191,
                INVALID,
                &["workspace_tokens", "191", "192"],
            ),
            (
                &|a: &mut Args| a.workspace_tokens = 1 << 31,
                INVALID,
                &["workspace_tokens", "2147483648"],
            ),
            (
                &|a: &mut Args| a.max_num_chunks = 3,
                INVALID,
                &["max_num_chunks", "3", "4"],
            ),
            (
                &|a: &mut Args| a.num_chunks = null_mut(),
                INVALID,
                &["num_chunks", "NULL"],
            ),
            (
                &|a: &mut Args| a.context_lens = null(),
                INVALID,
                &["context_lens", "NULL"],
            ),
            (
                &|a: &mut Args| a.context_lens = negative.as_ptr(),
                INVALID,
                &["context_lens[2]", "-1"],
            ),
        ],
    );
    assert_eq!((count, tokens), (4, 320));
    assert_eq!(ends[..5], [0, 320, 320, 450, 770]);
    assert_eq!([4, 9, 14, 19].map(|at| ends[at]), [770, 640, 380, 40]);
    assert_eq!(padded, ends, "there is one rank");
    assert_eq!(longest, [320, 320, 320, 40]);
    assert_eq!(
        [0, 4, 8, 12, 15].map(|at| starts[at]),
        [0, 320, 640, 960, 960]
    );
    // Two ranks, of whom each has half of a chunk.
    let ranks = [40, 0, 21];
    let mut of_ranks = right;
    (of_ranks.num_requests, of_ranks.context_lens) = (3, ranks.as_ptr());
    (
        of_ranks.page_size,
        of_ranks.workspace_tokens,
        of_ranks.world_size,
    ) = (8, 64, 2);
    context_chunks(&of_ranks).assert_ok("two ranks");
    assert_eq!((count, tokens), (2, 32));
    assert_eq!(
        (&padded[..8], &ends[..8]),
        (
            &[0, 16, 16, 27, 0, 4, 4, 4][..],
            &[0, 32, 32, 53, 0, 8, 8, 8][..]
        )
    );
    assert_eq!(starts[..6], [0, 0, 0, 16, 16, 16]);
    // Only the number of chunks.
    let mut counted = right;
    (counted.seq_starts, counted.cu_seq_lens) = (null_mut(), null_mut());
    (counted.cu_padded_lens, counted.max_lens) = (null_mut(), null_mut());
    (counted.max_num_chunks, counted.workspace_tokens) = (0, 512);
    context_chunks(&counted).assert_ok("the number of chunks");
    assert_eq!((count, tokens), (8, 128));
    sizes("folio_mla_context_chunks_args", &right, 0, context_chunks);
}

#[test]
fn metadata_of_flashmla() {
    type Args = folio_flashmla_metadata_args;
    let (lens, mut records, mut splits, mut parts) = ([4096, 100, 0, 1000], [-7; 33], [-7; 6], 0);
    let right: Args = with(|a: &mut Args| {
        (a.batch_size, a.num_sms, a.q_len) = (4, 4, 1);
        (a.num_heads, a.num_kv_heads, a.seq_lens) = (64, 1, lens.as_ptr());
        (a.tile_scheduler_metadata, a.metadata_capacity) = (records.as_mut_ptr(), 33);
        (a.num_splits, a.num_splits_capacity) = (splits.as_mut_ptr(), 6);
        a.num_sm_parts = &mut parts;
    });
    let negative = [1, 2, 3, -4];
    check(
        &right,
        |args| metadata(args),
        &[
            (&|a: &mut Args| a.num_sms = 0, INVALID, &["num_sms", "0"]),
            (&|a: &mut Args| a.q_len = 0, INVALID, &["q_len", "0"]),
            (
                &|a: &mut Args| a.num_heads = 0,
                INVALID,
                &["num_heads", "0"],
            ),
            (
                &|a: &mut Args| a.num_kv_heads = 0,
                INVALID,
                &["num_kv_heads", "0"],
            ),
            (
                &|a: &mut Args| a.num_kv_heads = 3,
                INVALID,
                &["num_heads", "64", "3"],
            ),
            (&|a: &mut Args| a.reserved = 1, UNKNOWN, &["reserved", "1"]),
            (
                &|a: &mut Args| a.metadata_capacity = 31,
                INVALID,
                &["metadata_capacity", "31", "32"],
            ),
            (
                &|a: &mut Args| a.num_splits_capacity = 4,
                INVALID,
                &["num_splits_capacity", "4", "5"],
            ),
            (
                &|a: &mut Args| a.seq_lens = negative.as_ptr(),
                INVALID,
                &["seq_lens[3]", "-4"],
            ),
            (
                &|a: &mut Args| a.num_sm_parts = null_mut(),
                INVALID,
                &["num_sm_parts", "NULL"],
            ),
        ],
    );
    assert_eq!(
        records[..16],
        [0, 0, 0, 26, 0, 1, 1, 0, 0, 0, 26, 52, 1, 1, 1, 0]
    );
    assert_eq!(
        records[16..],
        [0, 2, 52, 0, 2, 1, 0, 0, 3, 3, 0, 16, 0, 0, 0, 0, -7]
    );
    assert_eq!((splits, parts), ([0, 3, 4, 5, 6, -7], 4));
    sizes("folio_flashmla_metadata_args", &right, 0, metadata);
}

#[test]
fn splits_of_keys() {
    type Args = folio_num_kv_splits_args;
    let (lens, mut out, mut keys) = ([1, 257, 1024, 8193, 0], [-7; 6], [-7; 6]);
    let right: Args = with(|a: &mut Args| {
        (a.num_requests, a.kv_lens, a.capacity) = (5, lens.as_ptr(), 6);
        (a.out, a.keys_per_split) = (out.as_mut_ptr(), keys.as_mut_ptr());
    });
    check(
        &right,
        |args| kv_splits(args),
        &[
            (
                &|a: &mut Args| a.capacity = 4,
                INVALID,
                &["capacity", "4", "5"],
            ),
            (
                &|a: &mut Args| a.kv_lens = null(),
                INVALID,
                &["kv_lens", "NULL"],
            ),
            (
                &|a: &mut Args| a.out = null_mut(),
                INVALID,
                &["out", "NULL"],
            ),
        ],
    );
    assert_eq!(
        (out, keys),
        ([1, 2, 4, 32, 1, 1], [32, 160, 256, 288, 0, 0])
    );
    let mut fewer = right;
    (fewer.max_splits, fewer.keys_per_split) = (2, null_mut());
    kv_splits(&fewer).assert_ok("two splits at most");
    assert_eq!(out, [1, 2, 2, 2, 1, 1]);
    sizes("folio_num_kv_splits_args", &right, 0, kv_splits);
}

#[test]
fn decodes_and_prefills() {
    type Args = folio_split_decodes_and_prefills_args;
    let (lens, mut out) = ([3, 3, 3, 1], [-7; 5]);
    let right: Args = with(|a: &mut Args| {
        (a.num_requests, a.decode_threshold, a.flags) = (4, 4, FOLIO_SPLIT_UNIFORM);
        (a.query_lens, a.out, a.capacity) = (lens.as_ptr(), out.as_mut_ptr(), 5);
    });
    let many = [i32::MAX, 1];
    check(
        &right,
        |args| split(args),
        &[
            (
                &|a: &mut Args| a.capacity = 3,
                INVALID,
                &["capacity", "3", "4"],
            ),
            (
                &|a: &mut Args| a.query_lens = null(),
                INVALID,
                &["query_lens", "NULL"],
            ),
            (
                &|a: &mut Args| (a.query_lens, a.num_requests) = (many.as_ptr(), 2),
                INVALID,
                &["query_lens", "2147483648"],
            ),
        ],
    );
    assert_eq!(out, [3, 1, 9, 1, -7]);
    for (lens, threshold, want) in [
        (vec![1, 1, 1, 1], 1, [4, 0, 4, 0]),
        (vec![1, 1, 5, 7], 1, [2, 2, 2, 12]),
        (vec![3, 3, 3, 1], 4, [4, 0, 10, 0]),
        (vec![9, 1], 4, [0, 2, 0, 10]),
        (vec![], 4, [0, 0, 0, 0]),
    ] {
        let mut args = right;
        (args.query_lens, args.num_requests) = (lens.as_ptr(), lens.len() as u32);
        (args.decode_threshold, args.flags) = (threshold, 0);
        split(&args).assert_ok("a batch");
        assert_eq!(out[..4], want, "{lens:?}");
    }
    let flags = FOLIO_SPLIT_UNIFORM;
    sizes(
        "folio_split_decodes_and_prefills_args",
        &right,
        flags,
        split,
    );
}

#[test]
fn nulls() {
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(local_lengths(null()), "folio_cp_local_lengths_args");
    refused(context_chunks(null()), "folio_mla_context_chunks_args");
    refused(metadata(null()), "folio_flashmla_metadata_args");
    refused(kv_splits(null()), "folio_num_kv_splits_args");
    refused(split(null()), "folio_split_decodes_and_prefills_args");
}
