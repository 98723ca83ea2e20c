//! Index tensors of int64 on a device: what copies them, and that plans and runs read the copies.

use folio::api::BatchInput;
use folio::cuda::narrow_params::{NarrowParams, NarrowTable};
use folio::cuda::params::DecodeParams;
use folio::cuda::plan_params::PlanBatchParams;
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::AttentionDesc;
use folio::tensor::Tensor;

use crate::fixture::{Handle, OURS, WORKSPACE, at, context, desc, host_tensor};
use crate::stub::{Launched, Recorder};

const LENGTHS: usize = 0x1_0000_0000;
const ROWS: usize = 0x2_0000_0000;
const TABLE: usize = 0x3_0000_0000;

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    recorder.expect::<NarrowParams>("folio_narrow");
    recorder.expect::<PlanBatchParams>("folio_plan");
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder
}

fn wide(address: usize, shape: &[i64], strides: Option<&[i64]>) -> Option<Tensor> {
    Some(at(address, DType::I64, shape, strides))
}

/// Up to 320 keys: 20 pages of 16.
fn handle() -> Handle {
    let desc = AttentionDesc {
        max_kv_len: 320,
        ..desc(false)
    };
    Handle::of(&context(), desc).unwrap()
}

fn copies(launch: &Launched) -> NarrowParams {
    assert_eq!(launch.name(), "folio_narrow");
    launch.params()
}

fn assert_copy(table: &NarrowTable, from: usize, [stride, rows, columns]: [i64; 3]) {
    let copied = (table.from, table.stride, table.count);
    assert_eq!(copied, (from as u64, stride, rows * columns));
    assert_eq!(i64::from(table.columns.divisor), columns);
}

/// A block table of more columns than a request may need: those of its rows are copied without gaps.
pub fn everything_on_the_device() {
    let recorder = recorder();
    let mut handle = handle();
    let batch = BatchInput {
        qo_indptr: wide(ROWS, &[4], None),
        kv_len: wide(LENGTHS, &[3], None),
        block_table: wide(TABLE, &[3, 64], Some(&[70, 1])),
        ..BatchInput::default()
    };
    recorder.forget();
    handle.plan(&batch, OURS).unwrap();
    let launched = recorder.launches();
    let copied = copies(&launched[0]).tables;
    assert_eq!(launched[0].grid, [1, 3, 1]);
    assert_copy(&copied[0], ROWS, [0, 1, 4]);
    assert_copy(&copied[1], LENGTHS, [0, 1, 3]);
    assert_copy(&copied[2], TABLE, [70, 3, 20]);
    let plan = launched[1].params::<PlanBatchParams>().plan;
    assert_eq!([plan.qo_indptr, plan.kv_len], [copied[0].to, copied[1].to]);
    assert_eq!((plan.table_stride, plan.num_page_ids), (20, 20));
    recorder.forget();
    handle.run(OURS).unwrap();
    let run = recorder.launches()[0].params::<DecodeParams>();
    assert_eq!(run.attention.plan.page_ids, copied[2].to);
    let end = WORKSPACE as u64 + handle.attention.workspace().device_bytes as u64;
    let mut places = copied.map(|table| (table.to, table.to + 4 * table.count as u64));
    places[3..].fill((end, end));
    places.sort_unstable();
    assert!(places[0].0 > WORKSPACE as u64 && places[2].1 <= end);
    assert!(places.windows(2).all(|pair| pair[0].1 <= pair[1].0));
}

/// Page ids alone: the host's plan says where the copies are.
pub fn page_ids_alone() {
    let recorder = recorder();
    let mut handle = handle();
    let batch = BatchInput {
        kv_len: host_tensor(&[100, 37], &[2]),
        block_table: wide(TABLE, &[2, 9], Some(&[12, 1])),
        ..BatchInput::default()
    };
    recorder.forget();
    handle.plan(&batch, OURS).unwrap();
    let copied = copies(&recorder.launches()[0]).tables;
    assert_copy(&copied[0], TABLE, [12, 2, 9]);
    recorder.forget();
    handle.run(OURS).unwrap();
    let run = recorder.launches()[0].params::<DecodeParams>();
    assert_eq!(run.attention.plan.page_ids, copied[0].to);
    // What plan uploaded lies before the copies.
    let upload = recorder.upload();
    assert!(upload.address + upload.bytes.len() as u64 <= copied[0].to);
}

/// More ids than there is room for are refused with both numbers; int32 ones are not.
pub fn more_than_there_is_room_for() {
    let _recorder = recorder();
    let mut handle = handle();
    let batch = |dtype| BatchInput {
        kv_indptr: Some(at(LENGTHS, DType::I32, &[3], None)),
        kv_indices: Some(at(TABLE, dtype, &[81], None)),
        kv_len: Some(at(LENGTHS, DType::I32, &[2], None)),
        ..BatchInput::default()
    };
    let refused = handle.plan(&batch(DType::I64), OURS);
    let Err(Error::InvalidArgument(message)) = refused else {
        panic!("{refused:?}");
    };
    for word in ["kv_indices", "81", "max_num_pages (80)"] {
        assert!(message.contains(word), "{message}");
    }
    handle.plan(&batch(DType::I32), OURS).unwrap();
}
