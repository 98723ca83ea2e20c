//! What the operators of context parallelism are launched with.

use folio::api::{cp_correct, cp_reorder};
use folio::cuda::context_parallel_params::{CpCorrectParams, CpReorderParams};
use folio::dtype::DType;
use folio::error::Error;
use folio::problem::{CpCorrectArgs, CpReorderArgs, LogBase};

use crate::fixture::{CAPTURED, OURS, at, context, divides};
use crate::stub::Recorder;

const ROWS: usize = 0x1_0000_0000;
const OUT: usize = 0x2_0000_0000;
const LENS: usize = 0x3_0000_0000;
const ENDS: usize = 0x4_0000_0000;
const PADDED: usize = 0x5_0000_0000;
const LSE: usize = 0x6_0000_0000;

pub fn reorder() {
    let recorder = Recorder::new();
    recorder.expect::<CpReorderParams>("folio_cp_reorder");
    let context = context();
    let args = |dst: usize| CpReorderArgs {
        gathered: at(ROWS, DType::BF16, &[4, 10, 576], Some(&[7000, 584, 1])),
        dst: at(dst, DType::BF16, &[9, 576], None),
        context_lens: at(LENS, DType::I32, &[3], None),
        cu_seq_lens: at(ENDS, DType::I32, &[4], None),
        cu_padded_lens: at(PADDED, DType::I32, &[4], None),
        local_start: 32,
        interleave: 0,
    };
    let refused = cp_reorder(&context, &args(OUT), CAPTURED);
    assert!(matches!(&refused, Err(Error::Capture(_))), "{refused:?}");
    for (dst, unit) in [(OUT, 16), (OUT + 2, 2)] {
        recorder.forget();
        cp_reorder(&context, &args(dst), OURS).unwrap();
        let launched = recorder.launches();
        assert_eq!(
            (launched.len(), launched[0].name()),
            (1, "folio_cp_reorder")
        );
        // A warp takes a row.
        assert_eq!(
            (launched[0].grid, launched[0].block),
            ([3, 1, 1], [128, 1, 1])
        );
        let p: CpReorderParams = launched[0].params();
        assert_eq!((p.gathered, p.dst), (ROWS as u64, dst as u64));
        let strides = [
            p.gathered_stride_rank,
            p.gathered_stride_row,
            p.dst_stride_row,
        ];
        assert_eq!(strides, [14000, 1168, 1152]);
        let lengths = [p.context_lens, p.cu_seq_lens, p.cu_padded_lens];
        assert_eq!(lengths, [LENS, ENDS, PADDED].map(|address| address as u64));
        assert_eq!((p.num_rows, p.rank_rows, p.local_start), (9, 10, 32));
        assert_eq!((p.batch_size, p.world_size, p.interleave), (3, 4, 1));
        assert_eq!((p.row_bytes, p.unit_bytes), (1152, unit));
    }
}

pub fn correct() {
    let recorder = Recorder::new();
    recorder.expect::<CpCorrectParams>("folio_cp_correct");
    let context = context();
    let args = CpCorrectArgs {
        // Heads come first in memory.
        lse_all: at(LSE, DType::F32, &[4, 5, 3], Some(&[15, 1, 5])),
        rank: 2,
        o: at(ROWS, DType::F16, &[5, 3, 128], Some(&[400, 128, 1])),
        o_out: at(OUT, DType::F16, &[5, 3, 128], None),
        lse_out: Some(at(LENS, DType::F32, &[5, 3], None)),
        lse_base: LogBase::Two,
    };
    cp_correct(&context, &args, OURS).unwrap();
    let launched = recorder.launches();
    assert_eq!(
        (launched.len(), launched[0].name()),
        (1, "folio_cp_correct")
    );
    assert_eq!(
        (launched[0].grid, launched[0].block),
        ([4, 1, 1], [128, 1, 1])
    );
    let p: CpCorrectParams = launched[0].params();
    let strides = [p.lse_stride_rank, p.lse_stride_token, p.lse_stride_head];
    assert_eq!((p.lse_all, strides), (LSE as u64, [15, 1, 5]));
    assert_eq!(
        (p.o.data, p.o.stride_token, p.o.stride_head),
        (ROWS as u64, 400, 128)
    );
    assert_eq!((p.o_out.data, p.o_out.stride_token), (OUT as u64, 384));
    assert_eq!(
        (p.lse_out, p.lse_out_stride_token, p.lse_out_stride_head),
        (LENS as u64, 3, 1)
    );
    assert_eq!((p.num_rows, divides(14, p.num_heads)), (15, 4));
    assert_eq!((p.rank, p.world_size, p.head_dim), (2, 4, 128));
    assert_eq!((p.dtype, p.flags, p.vectors), (1, 1, 1));
}
