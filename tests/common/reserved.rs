//! Address space that is reserved and not touched: caches whose pages lie far apart, or must not be read.
#![allow(unsafe_code)]

use folio::dtype::DType;
use folio::tensor::{Device, Tensor};

/// Reserved address space.
pub struct Reserved {
    address: *mut libc::c_void,
    bytes: usize,
}

impl Reserved {
    pub fn new(bytes: usize) -> Reserved {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new memory at an address of the system's choice.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(address, libc::MAP_FAILED, "{bytes} bytes of address space");
        Reserved { address, bytes }
    }

    /// The same cache with its pages `stride` bytes apart.
    pub fn spread(&self, cache: &Tensor, stride: i64) -> Tensor {
        let size = cache.dtype().size() as i64;
        let page = cache.stride(0) * size;
        assert!(stride >= page && stride % size == 0);
        assert!((cache.extent(0) * stride) as usize <= self.bytes);
        for n in 0..cache.extent(0) {
            let from = (cache.address() as i64 + n * page) as *const u8;
            let to = (self.address as i64 + n * stride) as *mut u8;
            // SAFETY: a page of the compact cache, and room for it in the reserved space.
            unsafe { to.copy_from_nonoverlapping(from, page as usize) };
        }
        let mut strides = cache.strides().to_vec();
        strides[0] = stride / size;
        self.tensor(cache.dtype(), cache.shape(), &strides)
    }

    /// A tensor over the reserved space from its start on.
    pub fn tensor(&self, dtype: DType, shape: &[i64], strides: &[i64]) -> Tensor {
        let last: i64 = (shape.iter().zip(strides))
            .map(|(n, stride)| (n - 1) * stride)
            .sum();
        assert!((last + 1) as usize * dtype.size() <= self.bytes);
        let data = self.address.cast();
        // SAFETY: the reserved space holds the whole extent and outlives the test's runs.
        let far = unsafe { Tensor::new("far", data, Device::Cpu, dtype, shape, Some(strides)) };
        far.expect("a valid tensor")
    }

    /// What is there now.
    pub fn bytes(&self, start: usize, count: usize) -> Vec<u8> {
        assert!(start + count <= self.bytes);
        let mut bytes = vec![0; count];
        // SAFETY: within the mapping, which nobody writes meanwhile.
        unsafe {
            let from = self.address.byte_add(start).cast::<u8>();
            from.copy_to_nonoverlapping(bytes.as_mut_ptr(), count);
        }
        bytes
    }

    /// From now on whoever reads or writes these bytes, whole pages of the system's, is killed.
    pub fn forbid(&self, start: usize, bytes: usize) {
        assert!(start + bytes <= self.bytes);
        // SAFETY: within the mapping, which holds nothing but the test's own bytes.
        let outcome =
            unsafe { libc::mprotect(self.address.byte_add(start), bytes, libc::PROT_NONE) };
        assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no tensor of it is used any more.
        unsafe { libc::munmap(self.address, self.bytes) };
    }
}
