//! Caches whose pages lie further apart than 32 bits can count. The memory is only reserved; the few
//! pages that hold keys are all that is ever touched.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::DOORS;
use crate::common::instance::{LayerData, Planned};
use crate::common::memory::HostMemory;
use crate::common::problem::Problem;
use crate::common::reserved::Reserved;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::Kind;

/// Bytes from page to page: eight pages are 4 GiB apart, and 8 · 2^29 elements overflow 32 bits.
const STRIDE: i64 = (1 << 29) + 8;

#[test]
fn pages_beyond_32_bits() {
    let mut problem = Problem::plain(&[(1, 70), (3, 48), (1, 16)]).of(DType::BF16);
    problem.kv_dtype = DType::F8E4M3;
    let want = dense::attention(&problem);
    for kind in [Kind::Decode, Kind::Prefill] {
        problem.kind = kind;
        for door in DOORS {
            let session = door.open(Target::Cpu { num_threads: 2 }).unwrap();
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
            let layer = LayerData::new(&HostMemory, &problem);
            let mut input = layer.input();
            let (k, v) = (input.k, input.v);
            assert_eq!(k.dtype().size(), 1);
            assert!((k.extent(0) - 1) * STRIDE > i64::from(u32::MAX));
            let bytes = (k.extent(0) * STRIDE) as usize;
            let (far_k, far_v) = (Reserved::new(bytes), Reserved::new(bytes));
            (input.k, input.v) = (far_k.spread(&k, STRIDE), far_v.spread(&v, STRIDE));
            planned.handle.run(&input, Stream::default()).unwrap();
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = compare(&problem, &want, &layer.output(), tolerance);
            assert_eq!(result, Ok(()), "{} door, {kind:?}", door.name());
        }
    }
}
