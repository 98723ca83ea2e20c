//! Memory between pages that nobody may touch. What is allocated ends, or begins, right at such a page, so a
//! read or a write one byte too far kills the process. Memory of a made-up device may not be touched at all.

#![allow(unsafe_code)]

use crate::common::memory::Memory;
use folio::tensor::Device;
use std::sync::Mutex;

const PAGE: usize = 4096;

/// All allocations of one case; they live as long as it does.
pub struct Guarded {
    device: Device,
    allocations: Mutex<Vec<Allocation>>,
}

/// One allocation and the mapping around it.
struct Allocation {
    mapping: usize,
    mapped: usize,
    address: usize,
    bytes: usize,
}

impl Guarded {
    pub fn new(device: Device) -> Guarded {
        Guarded {
            device,
            allocations: Mutex::new(Vec::new()),
        }
    }

    fn is_host(&self) -> bool {
        self.device == Device::Cpu
    }

    /// What every allocation holds; nothing for memory of a device.
    pub fn snapshot(&self) -> Vec<Vec<u8>> {
        if !self.is_host() {
            return Vec::new();
        }
        let allocations = self.allocations.lock().expect("no panic while it is held");
        // SAFETY: host allocations are readable, and nobody writes while a case takes stock.
        let bytes = |a: &Allocation| unsafe {
            std::slice::from_raw_parts(a.address as *const u8, a.bytes).to_vec()
        };
        allocations.iter().map(bytes).collect()
    }

    /// Brings a snapshot back.
    pub fn restore(&self, snapshot: &[Vec<u8>]) {
        let allocations = self.allocations.lock().expect("no panic while it is held");
        for (allocation, bytes) in allocations.iter().zip(snapshot) {
            self.upload(allocation.address, bytes);
        }
    }

    /// The allocation that holds `address`, as its index and the offset within it.
    pub fn locate(&self, address: usize) -> Option<(usize, usize)> {
        let allocations = self.allocations.lock().expect("no panic while it is held");
        let holds = |a: &Allocation| (a.address..a.address + a.bytes.max(1)).contains(&address);
        let at = allocations.iter().position(holds)?;
        Some((at, address - allocations[at].address))
    }

    /// The range of addresses of the allocation that holds `address`.
    pub fn range_around(&self, address: usize) -> Option<(usize, usize)> {
        let (at, offset) = self.locate(address)?;
        let allocations = self.allocations.lock().expect("no panic while it is held");
        let start = address - offset;
        Some((start, start + allocations[at].bytes))
    }
}

impl Memory for Guarded {
    fn device(&self) -> Device {
        self.device
    }

    fn alloc(&self, bytes: usize) -> usize {
        let inner = bytes.max(1).next_multiple_of(PAGE);
        let mapped = inner + 2 * PAGE;
        let access = if self.is_host() {
            libc::PROT_READ | libc::PROT_WRITE
        } else {
            libc::PROT_NONE
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new memory at an address of the system's choice.
        let mapping =
            unsafe { libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED, "{mapped} bytes of address space");
        let first = mapping as usize + PAGE;
        // SAFETY: the pages between the first and the last of the new mapping.
        let outcome = unsafe { libc::mprotect(first as *mut libc::c_void, inner, access) };
        assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
        let mut allocations = self.allocations.lock().expect("no panic while it is held");
        // Three of four end at a forbidden page: reads beyond the end are the usual mistake. Workspaces are a
        // multiple of their alignment, and tensors of their element, so either end is aligned well enough.
        let address = match allocations.len() % 4 {
            3 => first,
            _ => first + inner - bytes,
        };
        allocations.push(Allocation {
            mapping: mapping as usize,
            mapped,
            address,
            bytes,
        });
        address
    }

    /// Everything goes at once, with the case.
    fn free(&self, _: usize, _: usize) {}

    fn upload(&self, address: usize, bytes: &[u8]) {
        if self.is_host() {
            // SAFETY: `alloc` made at least this many bytes, which nobody else uses meanwhile.
            unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len())
            }
        }
    }

    fn download(&self, address: usize, bytes: &mut [u8]) {
        if self.is_host() {
            // SAFETY: as in `upload`.
            unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len())
            }
        }
    }

    fn is_guarded(&self) -> bool {
        true
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let allocations = self.allocations.lock().expect("no panic while it is held");
        for allocation in allocations.iter() {
            // SAFETY: mapped by `alloc`; no tensor of the case is used any more.
            unsafe { libc::munmap(allocation.mapping as *mut libc::c_void, allocation.mapped) };
        }
    }
}
