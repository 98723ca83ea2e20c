//! What the operator on trees of draft tokens is launched with.

use folio::api::tree_mask;
use folio::cuda::tree_mask_params::{
    TreeMaskParams, WIDE_NEXT_SIBLING, WIDE_NEXT_TOKEN, WIDE_POSITIONS,
};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::TreeMaskArgs;

use crate::fixture::{CAPTURED, OURS, at, context};
use crate::stub::Recorder;

const PARENTS: usize = 0x1_0000_0000;
const LENS: usize = 0x2_0000_0000;
const ENDS: usize = 0x3_0000_0000;
const BYTES: usize = 0x4_0000_0000;
const BITS: usize = 0x5_0000_0000;
const TREE: usize = 0x6_0000_0000;
const ROWS: usize = 0x7_0000_0000;
const POSITIONS: usize = 0x8_0000_0000;
const TOKENS: usize = 0x9_0000_0000;
const SIBLINGS: usize = 0xa_0000_0000;

/// Three trees of ten tokens, with every output.
fn equal() -> TreeMaskArgs {
    TreeMaskArgs {
        parents: at(PARENTS, DType::I32, &[3, 10], None),
        prefix_lens: at(LENS, DType::I32, &[3], None),
        qo_indptr: None,
        mask_bytes: Some(at(BYTES + 3, DType::U8, &[5000], None)),
        mask_bits: Some(at(BITS, DType::U8, &[700], None)),
        tree_mask: Some(at(TREE, DType::U8, &[3, 10, 10], None)),
        tree_bits: Some(at(ROWS, DType::U8, &[3, 10, 2], None)),
        positions: Some(at(POSITIONS, DType::I64, &[3, 10], None)),
        next_token: Some(at(TOKENS, DType::I32, &[3, 10], None)),
        next_sibling: Some(at(SIBLINGS, DType::I64, &[3, 10], None)),
    }
}

/// Tokens of three trees, and room for more.
fn ragged() -> TreeMaskArgs {
    TreeMaskArgs {
        parents: at(PARENTS, DType::I32, &[77], None),
        qo_indptr: Some(at(ENDS, DType::I32, &[4], None)),
        mask_bytes: None,
        mask_bits: None,
        tree_mask: Some(at(TREE, DType::U8, &[900], None)),
        tree_bits: Some(at(ROWS, DType::U8, &[77, 4], None)),
        positions: None,
        next_token: Some(at(TOKENS, DType::I64, &[77], None)),
        next_sibling: None,
        ..equal()
    }
}

fn launched(recorder: &Recorder, blocks: u32) -> TreeMaskParams {
    let launched = recorder.launches();
    assert_eq!((launched.len(), launched[0].name()), (1, "folio_tree_mask"));
    // A block takes 32 tokens of a tree.
    let size = (launched[0].grid, launched[0].block);
    assert_eq!(size, ([blocks, 1, 1], [256, 1, 1]));
    launched[0].params()
}

pub fn launches() {
    let recorder = Recorder::new();
    recorder.expect::<TreeMaskParams>("folio_tree_mask");
    let context = context();
    let refused = tree_mask(&context, &equal(), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");

    recorder.forget();
    tree_mask(&context, &equal(), OURS).unwrap();
    let p = launched(&recorder, 3);
    let inputs = [p.parents, p.prefix_lens, p.qo_indptr];
    assert_eq!(inputs, [PARENTS as u64, LENS as u64, 0]);
    let masks = [p.mask_bytes, p.mask_bits, p.tree_mask, p.tree_bits];
    assert_eq!(masks, [BYTES + 3, BITS, TREE, ROWS].map(|a| a as u64));
    let rows = [p.positions, p.next_token, p.next_sibling];
    assert_eq!(rows, [POSITIONS, TOKENS, SIBLINGS].map(|a| a as u64));
    assert_eq!([p.bytes_room, p.bits_room, p.tree_room], [5000, 700, 300]);
    assert_eq!((p.num_tokens, p.batch_size, p.tree_size), (30, 3, 10));
    assert_eq!(p.parts, 1);
    assert_eq!(p.row_bytes, 2);
    assert_eq!(p.wide, WIDE_POSITIONS | WIDE_NEXT_SIBLING);

    // Loaded by now: a capture takes it.
    recorder.forget();
    tree_mask(&context, &ragged(), CAPTURED).unwrap();
    let p = launched(&recorder, 3);
    assert_eq!(
        (p.qo_indptr, p.mask_bytes, p.mask_bits),
        (ENDS as u64, 0, 0)
    );
    assert_eq!((p.positions, p.next_sibling), (0, 0));
    assert_eq!([p.bytes_room, p.bits_room, p.tree_room], [0, 0, 900]);
    assert_eq!((p.num_tokens, p.batch_size, p.row_bytes), (77, 3, 4));
    // 26 tokens of a tree on average.
    assert_eq!(p.parts, 1);
    assert_eq!(p.wide, WIDE_NEXT_TOKEN);
}

/// Tokens of no request have no row.
pub fn no_requests() {
    let recorder = Recorder::new();
    let context = context();
    let args = TreeMaskArgs {
        prefix_lens: at(LENS, DType::I32, &[0], None),
        qo_indptr: Some(at(ENDS, DType::I32, &[1], None)),
        ..ragged()
    };
    tree_mask(&context, &args, OURS).unwrap();
    assert_eq!(recorder.launches().len(), 0);
}
