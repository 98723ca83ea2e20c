//! Caches whose pages lie further apart than 32 bits can count. The memory is only reserved; the few
//! pages that hold keys are all that is ever touched.
#![allow(unsafe_code)]

mod common;

use common::compare::{Tolerance, compare};
use common::dense;
use common::door::DOORS;
use common::instance::{LayerData, Planned};
use common::memory::HostMemory;
use common::problem::Problem;
use folio::api::{Stream, Target};
use folio::dtype::DType;
use folio::problem::Kind;
use folio::tensor::Tensor;

/// Bytes from page to page: eight pages are 4 GiB apart, and 8 · 2^29 elements overflow 32 bits.
const STRIDE: i64 = (1 << 29) + 8;

/// Reserved address space.
struct Reserved {
    address: *mut libc::c_void,
    bytes: usize,
}

impl Reserved {
    fn new(bytes: usize) -> Reserved {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new memory at an address of the system's choice.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED, "{bytes} bytes of address space");
        Reserved { address, bytes }
    }

    /// The same cache with its pages `STRIDE` elements apart.
    fn spread(&self, cache: &Tensor) -> Tensor {
        assert_eq!(cache.dtype().size(), 1);
        let page = cache.stride(0);
        for n in 0..cache.extent(0) {
            let from = (cache.address() as i64 + n * page) as *const u8;
            let to = (self.address as i64 + n * STRIDE) as *mut u8;
            // SAFETY: a page of the compact cache, and room for it in the reserved space.
            unsafe { to.copy_from_nonoverlapping(from, page as usize) };
        }
        let mut strides = cache.strides().to_vec();
        strides[0] = STRIDE;
        // SAFETY: the reserved space holds the whole extent and outlives the test's runs.
        let far = unsafe {
            Tensor::new(
                "far",
                self.address.cast(),
                cache.device(),
                cache.dtype(),
                cache.shape(),
                Some(&strides),
            )
        };
        far.expect("a valid tensor")
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no tensor of it is used any more.
        unsafe { libc::munmap(self.address, self.bytes) };
    }
}

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
            let (k, v) = (input.k.unwrap(), input.v.unwrap());
            assert!((k.extent(0) - 1) * STRIDE > i64::from(u32::MAX));
            let bytes = (k.extent(0) * STRIDE) as usize;
            let (far_k, far_v) = (Reserved::new(bytes), Reserved::new(bytes));
            (input.k, input.v) = (Some(far_k.spread(&k)), Some(far_v.spread(&v)));
            planned.handle.run(&input, Stream::default()).unwrap();
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = compare(&problem, &want, &layer.output(), tolerance);
            assert_eq!(result, Ok(()), "{} door, {kind:?}", door.name());
        }
    }
}
