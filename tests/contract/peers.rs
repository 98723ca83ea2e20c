//! What the schedulers of SGLang and vLLM decide: the figures of their sources through C, and callers who err.

use crate::figures::with;
use crate::fixture::Reply;
use crate::structs::sizes;
use crate::table::{INVALID, UNKNOWN, check};
use folio::ffi::*;
use std::ptr::{null, null_mut};

fn balanced(args: *const folio_balanced_kv_splits_args) -> Reply {
    // SAFETY: the struct is as it says, or NULL.
    Reply::of(|err| unsafe { folio_balanced_kv_splits(args, err) })
}

fn cascade(args: *const folio_use_cascade_args) -> Reply {
    // SAFETY: as above.
    Reply::of(|err| unsafe { folio_use_cascade(args, err) })
}

fn reorder(args: *const folio_reorder_batch_args) -> Reply {
    // SAFETY: as above.
    Reply::of(|err| unsafe { folio_reorder_batch(args, err) })
}

#[test]
fn splits_of_sglang() {
    type Args = folio_balanced_kv_splits_args;
    let (lens, mut out) = ([100, 3000], [-7; 5]);
    let right: Args = with(|a: &mut Args| {
        (a.num_requests, a.num_group, a.num_sms) = (2, 2, 132);
        (a.num_heads, a.num_kv_heads) = (32, 8);
        (a.seq_lens, a.out, a.capacity) = (lens.as_ptr(), out.as_mut_ptr(), 5);
    });
    let idle = [5, 0];
    check(
        &right,
        |args| balanced(args),
        &[
            (
                &|a: &mut Args| a.capacity = 3,
                INVALID,
                &["capacity", "3", "4"],
            ),
            (
                &|a: &mut Args| a.seq_lens = idle.as_ptr(),
                INVALID,
                &["seq_lens[1]", "0", "1 or more"],
            ),
            (
                &|a: &mut Args| a.num_heads = 33,
                INVALID,
                &["num_heads", "33", "num_kv_heads"],
            ),
            (
                &|a: &mut Args| a.num_kv_heads = 0,
                INVALID,
                &["num_kv_heads", "0"],
            ),
            (
                &|a: &mut Args| a.out = null_mut(),
                INVALID,
                &["out", "NULL"],
            ),
        ],
    );
    assert_eq!(out, [1, 1, 8, 8, -7]);
    for (lens, heads, kv_heads, want) in [
        (vec![1], 32, 8, vec![1]),
        (vec![100], 32, 8, vec![8]),
        (vec![1024], 32, 8, vec![8]),
        (vec![1024; 64], 32, 8, vec![2; 64]),
        (vec![8192; 8], 32, 8, vec![8; 8]),
        (vec![128, 4096], 32, 8, vec![1, 8]),
        (vec![1000, 1100, 1200], 32, 8, vec![7, 8, 8]),
        (vec![64, 1024, 8192], 32, 32, vec![1, 1, 8]),
        (vec![1, 5000], 128, 1, vec![1, 8]),
        (vec![], 32, 8, vec![]),
    ] {
        let (mut args, mut out) = (right, vec![-7; lens.len()]);
        (args.seq_lens, args.num_requests) = (lens.as_ptr(), lens.len() as u32);
        (args.num_heads, args.num_kv_heads, args.num_group) = (heads, kv_heads, 0);
        (args.out, args.capacity) = (out.as_mut_ptr(), out.len() as u64);
        balanced(&args).assert_ok("a batch");
        assert_eq!(out, want, "{lens:?}");
        for (num_sms, flags) in [(0, 0), (132, FOLIO_BALANCED_KV_SPLITS_STATIC)] {
            (args.num_sms, args.flags, args.max_splits) = (num_sms, flags, 5);
            balanced(&args).assert_ok("as many as there are");
            assert!(out.iter().all(|splits| *splits == 5));
        }
    }
    let flags = FOLIO_BALANCED_KV_SPLITS_STATIC;
    sizes("folio_balanced_kv_splits_args", &right, flags, balanced);
}

#[test]
fn cascades_of_vllm() {
    type Args = folio_use_cascade_args;
    let (lens, mut out) = ([1; 256], 7);
    let right: Args = with(|a: &mut Args| {
        (a.num_requests, a.common_prefix_len, a.num_sms) = (64, 4096, 132);
        (a.num_heads, a.num_kv_heads) = (32, 8);
        (a.query_lens, a.out) = (lens.as_ptr(), &raw mut out);
    });
    check(
        &right,
        |args| cascade(args),
        &[
            (&|a: &mut Args| a.num_sms = 0, INVALID, &["num_sms", "0"]),
            (
                &|a: &mut Args| a.num_heads = 4,
                INVALID,
                &["num_heads", "4", "num_kv_heads"],
            ),
            (
                &|a: &mut Args| a.query_lens = null(),
                INVALID,
                &["query_lens", "NULL"],
            ),
            (
                &|a: &mut Args| a.out = null_mut(),
                INVALID,
                &["out", "NULL"],
            ),
            (&|a: &mut Args| a.reserved = 3, UNKNOWN, &["reserved", "3"]),
        ],
    );
    assert_eq!(out, 1);
    let mut takes = |prefix, requests, heads, kv_heads, flags| {
        let mut args = right;
        (args.common_prefix_len, args.num_requests) = (prefix, requests);
        (args.num_heads, args.num_kv_heads, args.flags) = (heads, kv_heads, flags);
        args.out = &raw mut out;
        cascade(&args).assert_ok("a batch");
        out
    };
    assert_eq!(takes(255, 64, 32, 8, 0), 0);
    assert_eq!(takes(256, 7, 32, 32, 0), 0);
    assert_eq!(takes(256, 8, 32, 8, 0), 0);
    assert_eq!(takes(4096, 8, 32, 8, 0), 0);
    assert_eq!(takes(512, 256, 32, 8, 0), 1);
    assert_eq!(takes(256, 8, 32, 32, 0), 1);
    assert_eq!(takes(8192, 32, 64, 8, 0), 1);
    for flag in [
        FOLIO_USE_CASCADE_ALIBI,
        FOLIO_USE_CASCADE_SLIDING_WINDOW,
        FOLIO_USE_CASCADE_LOCAL_ATTENTION,
        FOLIO_USE_CASCADE_CONTEXT_PARALLEL,
    ] {
        assert_eq!(takes(8192, 32, 64, 8, flag), 0);
    }
    let mut verify = [1; 8];
    verify[3] = 5;
    let (mut args, mut out) = (right, 7);
    (args.common_prefix_len, args.num_requests) = (2048, 8);
    (args.query_lens, args.out) = (verify.as_ptr(), &raw mut out);
    cascade(&args).assert_ok("a verification");
    assert_eq!(out, 1);
    sizes("folio_use_cascade_args", &args, 15, cascade);
}

#[test]
fn orders_of_a_batch() {
    type Args = folio_reorder_batch_args;
    let (lens, contexts) = ([100, 10, 200, 20], [0, 50, 0, 75]);
    let (mut order, mut swaps, mut num_swaps) = ([-7; 5], [-7; 9], 77);
    let right: Args = with(|a: &mut Args| {
        (a.num_requests, a.decode_threshold) = (4, 1);
        (a.query_lens, a.context_lens) = (lens.as_ptr(), contexts.as_ptr());
        (a.order, a.order_capacity) = (order.as_mut_ptr(), 5);
        (a.swaps, a.swaps_capacity) = (swaps.as_mut_ptr(), 9);
        a.num_swaps = &raw mut num_swaps;
    });
    let negative = [1, 1, 1, -1];
    check(
        &right,
        |args| reorder(args),
        &[
            (
                &|a: &mut Args| a.order_capacity = 3,
                INVALID,
                &["order_capacity", "3", "4"],
            ),
            (
                &|a: &mut Args| a.swaps_capacity = 1,
                INVALID,
                &["swaps_capacity", "1", "2"],
            ),
            (
                &|a: &mut Args| a.query_lens = negative.as_ptr(),
                INVALID,
                &["query_lens[3]", "-1"],
            ),
            (
                &|a: &mut Args| a.context_lens = negative.as_ptr(),
                INVALID,
                &["context_lens[3]", "-1"],
            ),
            (
                &|a: &mut Args| a.num_swaps = null_mut(),
                INVALID,
                &["num_swaps", "NULL"],
            ),
        ],
    );
    assert_eq!((order, num_swaps), ([3, 1, 2, 0, -7], 1));
    assert_eq!(swaps[2..], [-7; 7]);
    let mut by = |requests: &[(i32, i32)], threshold, with_contexts| {
        let (lens, contexts): (Vec<i32>, Vec<i32>) = requests.iter().copied().unzip();
        let (mut args, mut order, mut swaps) = (right, vec![-7; lens.len()], vec![0; 20]);
        (args.num_requests, args.decode_threshold) = (lens.len() as u32, threshold);
        args.query_lens = lens.as_ptr();
        args.context_lens = if with_contexts {
            contexts.as_ptr()
        } else {
            null()
        };
        (args.order, args.order_capacity) = (order.as_mut_ptr(), order.len() as u64);
        (args.swaps, args.swaps_capacity) = (swaps.as_mut_ptr(), 20);
        args.num_swaps = &raw mut num_swaps;
        reorder(&args).assert_ok("a batch");
        let mut swapped: Vec<i32> = (0..lens.len() as i32).collect();
        for pair in swaps[..2 * num_swaps as usize].chunks(2) {
            swapped.swap(pair[0] as usize, pair[1] as usize);
        }
        assert_eq!(swapped, order);
        order
    };
    let crossed = [(100, 100), (1, 10), (200, 200), (1, 20)];
    assert_eq!(by(&crossed, 1, true), [3, 1, 2, 0]);
    assert_eq!(by(&crossed, 1, false), [3, 1, 2, 0]);
    let last = [(100, 100), (200, 200), (1, 10), (1, 20)];
    assert_eq!(by(&last, 1, true), [2, 3, 0, 1]);
    assert_eq!(by(&last, 1, false), [3, 2, 1, 0]);
    assert_eq!(by(&[(100, 0), (10, 50), (1, 10)], 1, true), [2, 1, 0]);
    let many = [
        (1, 20),
        (1, 50),
        (374, 0),
        (300, 20),
        (1, 20),
        (256, 0),
        (1, 5),
        (27, 0),
        (1, 4),
    ];
    assert_eq!(by(&many, 1, true), [0, 1, 6, 8, 4, 3, 2, 7, 5]);
    let ordered = [(2, 10), (3, 20), (5, 30), (6, 40)];
    assert_eq!(by(&ordered, 4, true), [0, 1, 2, 3]);
    assert_eq!(by(&[(1, 5); 3], 1, true), [0, 1, 2]);
    assert_eq!(by(&[(9, 0); 3], 1, true), [0, 1, 2]);
    assert!(by(&[], 1, true).is_empty());
    sizes("folio_reorder_batch_args", &right, 0, reorder);
}

#[test]
fn nulls() {
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(balanced(null()), "folio_balanced_kv_splits_args");
    refused(cascade(null()), "folio_use_cascade_args");
    refused(reorder(null()), "folio_reorder_batch_args");
}
