//! A window skips the pages that no row sees: they are memory that must not be read.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::{DOORS, Door};
use crate::common::instance::{LayerData, Planned};
use crate::common::memory::HostMemory;
use crate::common::pages::PageTable;
use crate::common::problem::{Layer, Problem};
use crate::common::reserved::Reserved;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::Kind;

/// Bytes from page to page of the cache: whole pages of the system's, and room for one of float32.
const STRIDE: usize = 8192;

/// Keys before its own that a row sees.
const WINDOW_LEFT: u32 = 100;

/// Forbids all pages of the cache but those with keys that some row sees.
fn forbid_unseen(problem: &Problem, cache: &Reserved) {
    for (request, ids) in problem.requests.iter().zip(PageTable::of(problem).ids) {
        let first_seen = (request.kv_len - request.qo_len).saturating_sub(WINDOW_LEFT);
        let unseen = (first_seen / problem.page_size()) as usize;
        assert!(unseen > 0, "a problem that tests nothing");
        for id in &ids[..unseen] {
            cache.forbid(*id as usize * STRIDE, STRIDE);
        }
    }
}

fn check(problem: &Problem, door: &dyn Door) {
    let session = door.open(Target::Cpu { num_threads: 2 }).unwrap();
    let handle = session.attention(problem.desc()).unwrap();
    let planned = Planned::new(handle, &HostMemory, &HostMemory, problem).unwrap();
    let layer = LayerData::new(&HostMemory, problem);
    let mut input = layer.input();
    let [k, v] = [input.k, input.v].map(|cache| {
        let memory = Reserved::new(cache.extent(0) as usize * STRIDE);
        let spread = memory.spread(&cache, STRIDE as i64);
        forbid_unseen(problem, &memory);
        (memory, spread)
    });
    (input.k, input.v) = (k.1, v.1);
    planned.handle.run(&input, Stream::default()).unwrap();
    let tolerance = Tolerance::fast(problem.q_dtype);
    let result = compare(
        problem,
        &dense::attention(problem),
        &layer.output(),
        tolerance,
    );
    assert_eq!(result, Ok(()), "{} door, {:?}", door.name(), problem.kind);
}

#[test]
fn pages_that_no_row_sees_are_not_read() {
    let window = Some((WINDOW_LEFT as i32, 0));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (kind, lens) in [
            (Kind::Decode, [(1, 1000), (4, 777)]),
            (Kind::Prefill, [(64, 1000), (300, 700)]),
        ] {
            let mut problem = Problem::plain(&lens).of(dtype).with_layer(Layer {
                window,
                ..Layer::plain()
            });
            problem.kind = kind;
            DOORS.iter().for_each(|door| check(&problem, *door));
        }
    }
}
