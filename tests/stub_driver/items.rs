//! Items: what makes a mask of them before the run, which is then one with a custom mask.

use folio::cuda::items_params::MaskItemsParams;
use folio::cuda::params::{DecodeParams, MaskMode};
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Mask};

use crate::fixture::{Handle, OURS, WORKSPACE, at, context, desc, plain};
use crate::stub::Recorder;

const STARTS: usize = 0x3_0000_0000;
const POSITIONS: usize = 0x4_0000_0000;
const COLUMNS: i64 = 70;

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<MaskItemsParams>("folio_mask_items");
    recorder
}

fn with_room(mask_items: bool) -> AttentionDesc {
    AttentionDesc {
        max_kv_len: 320,
        mask_items,
        ..desc(false)
    }
}

/// A bit for every row and key of the largest batch, and a byte more for each request.
pub fn room_for_the_mask() {
    let _recorder = recorder();
    let [without, with] = [false, true].map(|mask_items| {
        let handle = Handle::of(&context(), with_room(mask_items)).unwrap();
        handle.attention.workspace().device_bytes
    });
    assert_eq!(
        with - without,
        (4 * 320 / 8 + 4_usize).next_multiple_of(256)
    );
}

pub fn become_a_mask() {
    let recorder = recorder();
    let mut handle = Handle::of(&context(), with_room(true)).unwrap();
    handle.plan_host(100, OURS).unwrap();
    let args = AttentionArgs {
        mask: Mask::Items {
            starts: at(STARTS, DType::I64, &[2], None),
            positions: at(POSITIONS, DType::I32, &[2, COLUMNS], None),
        },
        ..plain()
    };
    recorder.forget();
    handle.attention.run(&args, OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(launched[0].name(), "folio_mask_items");
    assert_eq!(launched[0].grid[1], 2);
    let items = launched[0].params::<MaskItemsParams>();
    let run = launched[1].params::<DecodeParams>().attention;
    assert_eq!(run.mask_mode, MaskMode::Bits);
    assert_eq!(
        [items.starts, items.positions],
        [STARTS as u64, POSITIONS as u64]
    );
    assert_eq!(
        (items.columns, items.mask_bytes),
        (COLUMNS, 4 * 320 / 8 + 4)
    );
    assert_eq!(
        (run.mask, run.mask_bytes, run.mask_start),
        (items.mask, items.mask_bytes, items.mask_start)
    );
    assert_eq!(
        [items.qo_indptr, items.kv_len, items.counts],
        [run.plan.qo_indptr, run.plan.kv_len, run.plan.counts]
    );
    let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
    assert!(items.mask > run.plan.partial_lse && items.mask + items.mask_bytes as u64 <= end);
    // Any other run takes the mask it states.
    recorder.forget();
    handle.run(OURS).unwrap();
    assert_eq!(recorder.launches()[0].name(), "folio_sm90_decode_tma");
}
