//! Memory that a tensor lives in, on the host or elsewhere, with everything around the tensor's own
//! elements poisoned and watched.

#![allow(unsafe_code)]

use super::codec::{decode, poison};
use folio::api::{Workspace, WorkspaceInfo};
use folio::dtype::DType;
use folio::tensor::{Device, Tensor};
use std::alloc::Layout;

/// Where tensors live: the host here, a GPU in the tests of that backend.
pub trait Memory: Sync {
    /// The device that Folio is told.
    fn device(&self) -> Device;
    /// New memory, aligned to at least 256 bytes.
    fn alloc(&self, bytes: usize) -> usize;
    /// Gives back memory of `alloc`.
    fn free(&self, address: usize, bytes: usize);
    /// Copies to memory of `alloc`.
    fn upload(&self, address: usize, bytes: &[u8]);
    /// Copies from memory of `alloc`.
    fn download(&self, address: usize, bytes: &mut [u8]);
    /// It is host memory that the CUDA driver page-locked.
    fn is_page_locked(&self) -> bool {
        false
    }
    /// Forbidden pages lie around what `alloc` gives, so nothing has to be watched behind a tensor.
    fn is_guarded(&self) -> bool {
        false
    }
}

/// The host's memory.
pub struct HostMemory;

const ALIGNMENT: usize = 256;

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).expect("a size below isize::MAX")
}

impl Memory for HostMemory {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn alloc(&self, bytes: usize) -> usize {
        // SAFETY: the layout's size is not zero.
        let data = unsafe { std::alloc::alloc(layout(bytes)) };
        assert!(!data.is_null(), "out of memory");
        data as usize
    }

    fn free(&self, address: usize, bytes: usize) {
        // SAFETY: the address is one of `alloc` with the same size.
        unsafe { std::alloc::dealloc(address as *mut u8, layout(bytes)) }
    }

    fn upload(&self, address: usize, bytes: &[u8]) {
        // SAFETY: `alloc` made at least this many bytes, which nobody else uses meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) }
    }

    fn download(&self, address: usize, bytes: &mut [u8]) {
        // SAFETY: as in `upload`.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len())
        }
    }
}

/// A tensor's shape within its allocation.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    pub dtype: DType,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
    /// Elements before the first.
    pub lead: usize,
}

impl View {
    /// Row-major without gaps.
    pub fn compact(dtype: DType, shape: &[i64]) -> View {
        View::gapped(dtype, shape, &vec![0; shape.len()], 0)
    }

    /// Row-major with `gaps[d]` elements after each slice of dimension `d`; the last one's must be 0.
    pub fn gapped(dtype: DType, shape: &[i64], gaps: &[u32], lead: u32) -> View {
        let mut strides = vec![1; shape.len()];
        for d in (0..shape.len().saturating_sub(1)).rev() {
            strides[d] = strides[d + 1] * shape[d + 1] + i64::from(gaps[d]);
        }
        View {
            dtype,
            shape: shape.to_vec(),
            strides,
            lead: lead as usize,
        }
    }

    /// Elements from the first to behind the last.
    fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let last: i64 = (self.shape.iter().zip(&self.strides))
            .map(|(n, stride)| (n - 1) * stride)
            .sum();
        last as usize + 1
    }

    fn position(&self, index: &[i64]) -> usize {
        assert_eq!(index.len(), self.shape.len());
        let mut offset = 0;
        for (d, &i) in index.iter().enumerate() {
            assert!(
                (0..self.shape[d]).contains(&i),
                "index {i} of dimension {d}"
            );
            offset += i * self.strides[d];
        }
        self.lead + offset as usize
    }
}

/// Elements after the last one of an image.
const TRAIL: usize = 16;

/// The bytes of an allocation and the tensor within it.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    pub view: View,
    pub bytes: Vec<u8>,
}

impl Image {
    /// Every element poisoned, those around the tensor included.
    pub fn poisoned(view: View) -> Image {
        let size = view.dtype.size();
        let elements = view.lead + view.span() + TRAIL;
        // The patterns of four elements, again and again.
        let four = (0..4).flat_map(|element| {
            let bits = poison(view.dtype, element).to_le_bytes();
            bits.into_iter().take(size)
        });
        let mut bytes = four.collect::<Vec<u8>>().repeat(elements.div_ceil(4));
        bytes.truncate(elements * size);
        Image { view, bytes }
    }

    /// A compact tensor of these elements' bits.
    pub fn of_bits(dtype: DType, shape: &[i64], bits: impl IntoIterator<Item = u64>) -> Image {
        let mut image = Image::poisoned(View::compact(dtype, shape));
        for (at, bits) in bits.into_iter().enumerate() {
            image.store(at, bits);
        }
        image
    }

    pub fn of_i32(shape: &[i64], values: &[i32]) -> Image {
        Image::of_integers(DType::I32, shape, values)
    }

    /// Of int32 or int64.
    pub fn of_integers(dtype: DType, shape: &[i64], values: &[i32]) -> Image {
        Image::of_bits(dtype, shape, values.iter().map(|&v| i64::from(v) as u64))
    }

    pub fn of_f32(shape: &[i64], values: &[f32]) -> Image {
        let bits = values.iter().map(|v| u64::from(v.to_bits()));
        Image::of_bits(DType::F32, shape, bits)
    }

    pub fn bits(&self, index: &[i64]) -> u64 {
        let size = self.view.dtype.size();
        let at = self.view.position(index) * size;
        let mut bits = [0; 8];
        bits[..size].copy_from_slice(&self.bytes[at..at + size]);
        u64::from_le_bytes(bits)
    }

    pub fn value(&self, index: &[i64]) -> f64 {
        decode(self.view.dtype, self.bits(index))
    }

    pub fn put(&mut self, index: &[i64], bits: u64) {
        let at = self.view.position(index);
        self.store(at, bits);
    }

    fn store(&mut self, at: usize, bits: u64) {
        let size = self.view.dtype.size();
        self.bytes[at * size..(at + 1) * size].copy_from_slice(&bits.to_le_bytes()[..size]);
    }
}

/// An image in memory.
pub struct Resident<'m> {
    memory: &'m dyn Memory,
    address: usize,
    image: Image,
}

impl<'m> Resident<'m> {
    pub fn new(memory: &'m dyn Memory, mut image: Image) -> Resident<'m> {
        if memory.is_guarded() {
            let size = image.view.dtype.size();
            let elements = image.view.lead + image.view.span();
            image.bytes.truncate(elements * size);
        }
        let address = memory.alloc(image.bytes.len());
        memory.upload(address, &image.bytes);
        Resident {
            memory,
            address,
            image,
        }
    }

    /// What was uploaded.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// What is there now.
    pub fn current(&self) -> Image {
        let mut image = self.image.clone();
        self.memory.download(self.address, &mut image.bytes);
        image
    }

    /// Uploads the image again.
    pub fn reset(&self) {
        self.memory.upload(self.address, &self.image.bytes);
    }

    /// Takes over what another tensor's memory holds, as far as both reach.
    pub fn copy_from(&self, other: &Resident<'_>) {
        let bytes = other.current().bytes;
        let len = bytes.len().min(self.image.bytes.len());
        self.memory.upload(self.address, &bytes[..len]);
    }

    /// Nothing was written since the upload.
    pub fn is_untouched(&self) -> bool {
        self.current().bytes == self.image.bytes
    }

    pub fn tensor(&self) -> Tensor {
        let view = &self.image.view;
        let data = self.address + view.lead * view.dtype.size();
        // SAFETY: the view lies within the allocation, which lives as long as `self`; the tests drop no
        // memory that a plan still refers to.
        let tensor = unsafe {
            Tensor::new(
                "test tensor",
                data as *mut u8,
                self.memory.device(),
                view.dtype,
                &view.shape,
                Some(&view.strides),
            )
        };
        let tensor = tensor.expect("a view makes a valid tensor");
        match self.memory.is_page_locked() {
            true => tensor.page_locked(),
            false => tensor,
        }
    }
}

impl Drop for Resident<'_> {
    fn drop(&mut self) {
        self.memory.free(self.address, self.image.bytes.len());
    }
}

/// A workspace of exactly the size that a handle asks for, poisoned; what lies behind it is watched until it goes.
pub struct WorkspaceMemory<'m> {
    info: WorkspaceInfo,
    device: Resident<'m>,
    host: Resident<'m>,
}

/// Bytes behind a workspace that are watched.
const WATCHED: usize = 4096;

impl<'m> WorkspaceMemory<'m> {
    pub fn new(memory: &'m dyn Memory, info: WorkspaceInfo) -> WorkspaceMemory<'m> {
        fn part(memory: &dyn Memory, bytes: usize) -> Resident<'_> {
            let watched = if memory.is_guarded() { 0 } else { WATCHED };
            let view = View::compact(DType::U8, &[(bytes + watched) as i64]);
            Resident::new(memory, Image::poisoned(view))
        }
        let workspace = WorkspaceMemory {
            device: part(memory, info.device_bytes),
            host: part(&HostMemory, info.host_bytes),
            info,
        };
        let (address, _) = workspace.place();
        assert!(address.device.is_multiple_of(info.alignment));
        assert!(address.host.is_multiple_of(info.alignment));
        workspace
    }

    /// Where it is, and how large its parts are.
    pub fn place(&self) -> (Workspace, (usize, usize)) {
        let workspace = Workspace {
            device: self.device.tensor().address(),
            host: self.host.tensor().address(),
        };
        (workspace, (self.info.device_bytes, self.info.host_bytes))
    }

    /// Nothing behind the workspace was written.
    pub fn assert_within_bounds(&self) {
        for (part, bytes) in [
            (&self.device, self.info.device_bytes),
            (&self.host, self.info.host_bytes),
        ] {
            let (was, is) = (&part.image().bytes, part.current().bytes);
            assert!(was[bytes..] == is[bytes..], "written behind the workspace");
        }
    }
}

impl Drop for WorkspaceMemory<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_within_bounds();
        }
    }
}
