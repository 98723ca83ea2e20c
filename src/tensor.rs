//! A checked description of memory: address, device, element type, extents and strides.
//!
//! This is where raw pointers die. [`Tensor::new`] checks what can be checked without knowing the
//! operator (NULL, alignment, overflow); the `api` layer checks what each operator wants. It is not an
//! array library: nothing here allocates, copies or computes.

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Most dimensions any Folio tensor has.
pub const MAX_RANK: usize = 5;

/// Elements from one index to the next in any memory there is: today's processors address 2^57 bytes at most.
const LONGEST_STRIDE: i64 = 1 << 48;

/// Where memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// Memory of the CUDA device with this ordinal.
    Cuda(i32),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(id) => write!(f, "cuda:{id}"),
        }
    }
}

/// Borrowed memory with a shape. Copying a `Tensor` copies the description only.
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    address: usize,
    device: Device,
    dtype: DType,
    rank: usize,
    is_page_locked: bool,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
}

impl Tensor {
    /// Describes memory at `data`. `strides` are in elements; `None` means compact row-major.
    /// `name` is the field's name for messages.
    ///
    /// # Errors
    /// [`Error::Shape`] when the rank exceeds [`MAX_RANK`], an extent or stride is negative, the byte
    /// size overflows or the address is not a multiple of the element size;
    /// [`Error::InvalidArgument`] when `data` is null although the tensor has elements.
    ///
    /// # Safety
    /// While any Folio call uses the tensor, or the plan that was made with it, `data` must stay valid
    /// for the described extent: for reads, and for writes where the call documents an output.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        name: &str,
        data: *mut u8,
        device: Device,
        dtype: DType,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Result<Tensor> {
        if shape.len() > MAX_RANK {
            return Err(Error::Shape(format!(
                "{name}: rank {} is not supported; at most {MAX_RANK} dimensions are",
                shape.len()
            )));
        }
        let mut tensor = Tensor {
            address: data as usize,
            device,
            dtype,
            rank: shape.len(),
            is_page_locked: false,
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        tensor.shape[..shape.len()].copy_from_slice(shape);
        match strides {
            Some(strides) => tensor.strides[..shape.len()].copy_from_slice(strides),
            None => tensor.fill_compact_strides(name)?,
        }
        tensor.check(name)?;
        tensor.drop_unused_strides();
        Ok(tensor)
    }

    fn fill_compact_strides(&mut self, name: &str) -> Result<()> {
        let mut stride = 1i64;
        for dim in (0..self.rank).rev() {
            self.strides[dim] = stride;
            stride = stride
                .checked_mul(self.shape[dim].max(1))
                .ok_or_else(|| overflow(name))?;
        }
        Ok(())
    }

    fn check(&self, name: &str) -> Result<()> {
        for (dim, (&extent, &stride)) in self.shape().iter().zip(self.strides()).enumerate() {
            if extent < 0 || stride < 0 {
                return Err(Error::Shape(format!(
                    "{name}: dimension {dim} has extent {extent} and stride {stride}; both must be 0 or more"
                )));
            }
        }
        if self.is_empty() {
            return Ok(());
        }
        if self.address == 0 {
            return Err(Error::InvalidArgument(format!(
                "{name}: data is NULL although the tensor has elements"
            )));
        }
        if !self.address.is_multiple_of(self.dtype.size()) {
            return Err(Error::Shape(format!(
                "{name}: address {:#x} is not aligned to its element size of {} bytes",
                self.address,
                self.dtype.size()
            )));
        }
        let mut last = 0i64;
        for (&extent, &stride) in self.shape().iter().zip(self.strides()) {
            last = (extent - 1)
                .checked_mul(stride)
                .and_then(|span| last.checked_add(span))
                .ok_or_else(|| overflow(name))?;
        }
        last.checked_add(1)
            .and_then(|n| n.checked_mul(self.dtype.size() as i64))
            .and_then(|bytes| i64::try_from(self.address).ok()?.checked_add(bytes))
            .map(|_| ())
            .ok_or_else(|| overflow(name))
    }

    /// A stride that no index is ever multiplied with may be any number, and such a number times a few bytes
    /// is none any more: strides that no memory is large enough for become 0. Others stay as they are stated.
    fn drop_unused_strides(&mut self) {
        let is_empty = self.is_empty();
        for (stride, extent) in self.strides.iter_mut().zip(self.shape) {
            if *stride > LONGEST_STRIDE && (is_empty || extent <= 1) {
                *stride = 0;
            }
        }
    }

    /// The address of element 0.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Where the memory lives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The same tensor, whose host memory was page-locked by the CUDA driver, so that kernels may reach it.
    pub fn page_locked(mut self) -> Tensor {
        debug_assert_eq!(self.device, Device::Cpu);
        self.is_page_locked = true;
        self
    }

    /// Whether the memory is the host's and was page-locked by the CUDA driver.
    pub fn is_page_locked(&self) -> bool {
        self.is_page_locked
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Extents.
    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.rank]
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    /// Extent of dimension `dim`.
    pub fn extent(&self, dim: usize) -> i64 {
        self.shape[dim]
    }

    /// Stride of dimension `dim`, in elements.
    pub fn stride(&self, dim: usize) -> i64 {
        self.strides[dim]
    }

    /// No elements.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// The number of elements. (Cannot overflow: the constructor checked the span, and zero strides,
    /// which could make the count exceed the span, saturate here.)
    pub fn num_elements(&self) -> i64 {
        self.shape()
            .iter()
            .fold(1i64, |count, &extent| count.saturating_mul(extent))
    }

    /// Row-major without gaps; extents of one may have any stride, and so may all where there is no element.
    pub fn is_compact(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut expected = 1i64;
        for dim in (0..self.rank).rev() {
            if self.shape[dim] != 1 && self.strides[dim] != expected {
                return false;
            }
            expected = expected.saturating_mul(self.shape[dim].max(1));
        }
        true
    }

    /// Two different indices never name the same element: what an output needs. (A sufficient rule:
    /// ordered by stride, each dimension must step over all the smaller ones.)
    pub fn is_injective(&self) -> bool {
        let mut dims = [(0, 1); MAX_RANK];
        for (dim, step) in dims.iter_mut().enumerate().take(self.rank) {
            *step = (self.strides[dim], self.shape[dim]);
        }
        dims.sort_unstable();
        let mut reach = 0i64;
        for (stride, extent) in dims.into_iter().filter(|&(_, extent)| extent > 1) {
            if stride <= reach {
                return false;
            }
            reach += stride * (extent - 1);
        }
        true
    }

    /// The same memory with dimensions `a` and `b` exchanged.
    pub fn swap_dims(mut self, a: usize, b: usize) -> Tensor {
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// The same memory with a dimension of extent one inserted before `dim`. The rank must be below
    /// [`MAX_RANK`].
    pub fn insert_dim(mut self, dim: usize) -> Tensor {
        self.shape.copy_within(dim..self.rank, dim + 1);
        self.strides.copy_within(dim..self.rank, dim + 1);
        self.shape[dim] = 1;
        self.strides[dim] = 0;
        self.rank += 1;
        self
    }

    /// The same memory with dimension `dim` cut into two: `[n · inner]` becomes `[n, inner]`. `inner` must divide the
    /// extent, and the rank be below [`MAX_RANK`].
    pub fn split_dim(self, dim: usize, inner: i64) -> Tensor {
        let mut split = self.insert_dim(dim);
        split.shape[dim] = self.shape[dim] / inner;
        split.shape[dim + 1] = inner;
        // Where there is one index, or no element, the stride may be anything.
        split.strides[dim] = self.strides[dim].saturating_mul(inner);
        split
    }

    /// The same memory with dimension `dim` and the one behind it made one: `[m, n]` becomes `[m · n]`. The tensor must be
    /// compact.
    pub fn join_dims(mut self, dim: usize) -> Tensor {
        debug_assert!(self.is_compact());
        self.shape[dim] *= self.shape[dim + 1];
        self.shape.copy_within(dim + 2..self.rank, dim + 1);
        self.rank -= 1;
        let mut stride = 1;
        for dim in (0..self.rank).rev() {
            self.strides[dim] = stride;
            stride *= self.shape[dim].max(1);
        }
        self
    }

    /// The part of `count` indices from `first` on of dimension `dim`, which must lie within its extent.
    pub fn narrow(mut self, dim: usize, first: i64, count: i64) -> Tensor {
        debug_assert!(first >= 0 && count >= 0 && first + count <= self.shape[dim]);
        self.shape[dim] = count;
        if !self.is_empty() {
            self.address += (first * self.strides[dim]) as usize * self.dtype.size();
        }
        self
    }

    /// The same memory without dimension `dim`, whose extent is one.
    pub fn remove_dim(mut self, dim: usize) -> Tensor {
        debug_assert_eq!(self.shape[dim], 1);
        self.shape.copy_within(dim + 1..self.rank, dim);
        self.strides.copy_within(dim + 1..self.rank, dim);
        self.rank -= 1;
        self
    }

    /// A part of every row along the last dimension, whose elements lie side by side: `count` elements of another type
    /// from byte `first` of the row on. `None` where they do not lie on multiples of their size.
    pub fn part_of_rows(mut self, first: usize, dtype: DType, count: i64) -> Option<Tensor> {
        let (from, to) = (self.dtype.size() as i64, dtype.size() as i64);
        self.address = self.address.wrapping_add(first);
        self.dtype = dtype;
        let last = self.rank - 1;
        let is_empty = self.is_empty();
        for dim in 0..last {
            let bytes = self.strides[dim].wrapping_mul(from);
            // A stride that no index is multiplied with may be anything.
            if bytes % to != 0 && self.shape[dim] > 1 && !is_empty {
                return None;
            }
            self.strides[dim] = bytes / to;
        }
        (self.shape[last], self.strides[last]) = (count, 1);
        (is_empty || self.address.is_multiple_of(dtype.size())).then_some(self)
    }

    /// The bytes that each index of the first dimension covers, `[n, bytes]`. `None` where they do not lie side by side,
    /// in whatever order of the other dimensions. The rank must be one or more.
    pub fn pages_of_bytes(mut self) -> Option<Tensor> {
        let mut dims = [(0, 1); MAX_RANK];
        for (dim, step) in dims.iter_mut().enumerate().take(self.rank).skip(1) {
            *step = (self.strides[dim], self.shape[dim]);
        }
        dims.sort_unstable();
        let mut count = 1i64;
        for (stride, extent) in dims.into_iter().filter(|&(_, extent)| extent != 1) {
            if stride != count && !self.is_empty() {
                return None;
            }
            count = count.saturating_mul(extent);
        }
        let size = self.dtype.size() as i64;
        let stride = self.strides[0].saturating_mul(size);
        self.shape = [self.shape[0], count.saturating_mul(size), 1, 1, 1];
        self.strides = [stride, 1, 0, 0, 0];
        (self.dtype, self.rank) = (DType::U8, 2);
        Some(self)
    }

    /// The same bytes read as another type of the same size.
    pub fn with_dtype(mut self, dtype: DType) -> Tensor {
        debug_assert_eq!(self.dtype.size(), dtype.size());
        self.dtype = dtype;
        self
    }

    /// Element `index` as `f32`; for host tensors. Bounds are checked.
    #[allow(unsafe_code)]
    pub fn get(&self, index: &[i64]) -> f32 {
        let offset = self.offset(index);
        // SAFETY: the constructor's contract makes the described extent readable, and `offset` checked
        // that the index lies inside it and that the memory is the host's.
        unsafe { crate::dtype::load(self.address as *const u8, self.dtype, offset) }
    }

    /// Stores `value`, rounded, as element `index`; for host tensors. Bounds are checked.
    #[allow(unsafe_code)]
    pub fn set(&self, index: &[i64], value: f32) {
        let offset = self.offset(index);
        // SAFETY: as in `get`; the caller of `Tensor::new` promised that outputs are writable.
        unsafe { crate::dtype::store(self.address as *mut u8, self.dtype, offset, value) }
    }

    /// Element `index` of int32 or int64; for host tensors. Bounds are checked.
    #[allow(unsafe_code)]
    pub fn integer(&self, index: &[i64]) -> i64 {
        let offset = self.offset(index);
        // SAFETY: as in `get`; the constructor checked the alignment.
        unsafe {
            match self.dtype {
                DType::I32 => (self.address as *const i32).offset(offset).read().into(),
                DType::I64 => (self.address as *const i64).offset(offset).read(),
                dtype => panic!("{dtype} is no integer"),
            }
        }
    }

    /// Stores an element of int32 or int64, which must hold `value`; for host tensors. Bounds are checked.
    #[allow(unsafe_code)]
    pub fn set_integer(&self, index: &[i64], value: i64) {
        let offset = self.offset(index);
        // SAFETY: as in `set`.
        unsafe {
            match self.dtype {
                DType::I32 => {
                    let value = i32::try_from(value).expect("a number of int32");
                    (self.address as *mut i32).offset(offset).write(value);
                }
                DType::I64 => (self.address as *mut i64).offset(offset).write(value),
                dtype => panic!("{dtype} is no integer"),
            }
        }
    }

    /// Copies a row along the last dimension, of which `at` and `from_at` are the other indices, bit by bit; for host
    /// tensors of one type. Bounds are checked.
    #[allow(unsafe_code)]
    pub fn copy_row(&self, at: &[i64], from: &Tensor, from_at: &[i64]) {
        assert_eq!(self.dtype, from.dtype, "a row of another type");
        let size = self.dtype.size();
        for d in 0..self.extent(self.rank - 1) {
            let to = self.offset(&[at, &[d]].concat()) * size as isize;
            let source = from.offset(&[from_at, &[d]].concat()) * size as isize;
            // SAFETY: as in `get` and `set`.
            unsafe {
                let source = (from.address as *const u8).offset(source);
                (self.address as *mut u8).offset(to).copy_from(source, size);
            }
        }
    }

    fn offset(&self, index: &[i64]) -> isize {
        assert_eq!(
            self.device,
            Device::Cpu,
            "only host tensors have elements here"
        );
        assert_eq!(index.len(), self.rank, "index rank");
        let mut offset = 0i64;
        for (dim, &i) in index.iter().enumerate() {
            assert!(
                (0..self.shape[dim]).contains(&i),
                "index {i} of dimension {dim}"
            );
            offset += i * self.strides[dim];
        }
        offset as isize
    }

    /// A compact host tensor of `i32` as a slice; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_i32(&self) -> Option<&[i32]> {
        let host = self.device == Device::Cpu && self.dtype == DType::I32 && self.is_compact();
        // SAFETY: compact, aligned and readable for the whole extent, by the constructor's contract.
        host.then(|| unsafe { slice(self.address, self.num_elements()) })
    }

    /// All memory of a host tensor of `i32` from its first to its last element, gaps between rows
    /// included; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_i32_rows(&self) -> Option<&[i32]> {
        let host = self.device == Device::Cpu && self.dtype == DType::I32;
        let span: i64 = match self.is_empty() {
            true => 0,
            false => {
                1 + self
                    .shape()
                    .iter()
                    .zip(self.strides())
                    .map(|(n, s)| (n - 1) * s)
                    .sum::<i64>()
            }
        };
        // SAFETY: the constructor's contract makes the described extent readable; gaps between rows of
        // one allocation are memory of the caller's too, and every bit pattern is an i32.
        host.then(|| unsafe { slice(self.address, span) })
    }

    /// A compact host tensor of slots, `i32` or `i64`; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_slots(&self) -> Option<Slots<'_>> {
        if self.dtype == DType::I32 {
            return self.as_i32().map(Slots::I32);
        }
        let host = self.device == Device::Cpu && self.dtype == DType::I64 && self.is_compact();
        // SAFETY: as in `as_i32`.
        host.then(|| Slots::I64(unsafe { slice(self.address, self.num_elements()) }))
    }

    /// A compact host tensor of bytes as a slice; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        let host = self.device == Device::Cpu && self.dtype == DType::U8 && self.is_compact();
        // SAFETY: as in `as_i32`.
        host.then(|| unsafe { slice(self.address, self.num_elements()) })
    }

    /// A compact host tensor of `i64` as a slice; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_i64(&self) -> Option<&[i64]> {
        let host = self.device == Device::Cpu && self.dtype == DType::I64 && self.is_compact();
        // SAFETY: as in `as_i32`.
        host.then(|| unsafe { slice(self.address, self.num_elements()) })
    }

    /// A compact host tensor of `f32` as a slice; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_f32(&self) -> Option<&[f32]> {
        let host = self.device == Device::Cpu && self.dtype == DType::F32 && self.is_compact();
        // SAFETY: as in `as_i32`.
        host.then(|| unsafe { slice(self.address, self.num_elements()) })
    }
}

/// A slot mapping of either integer type.
#[derive(Debug, Clone, Copy)]
pub enum Slots<'a> {
    /// int32 slots.
    I32(&'a [i32]),
    /// int64 slots.
    I64(&'a [i64]),
}

impl Slots<'_> {
    /// The slot of `token`.
    pub fn get(&self, token: usize) -> i64 {
        match self {
            Slots::I32(slots) => i64::from(slots[token]),
            Slots::I64(slots) => slots[token],
        }
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Slots::I32(slots) => slots.len(),
            Slots::I64(slots) => slots.len(),
        }
    }

    /// No tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first slot that `found` accepts, and its token.
    pub fn position_of(&self, found: impl Fn(i64) -> bool) -> Option<(usize, i64)> {
        (0..self.len())
            .map(|token| (token, self.get(token)))
            .find(|&(_, slot)| found(slot))
    }
}

/// # Safety
/// `address` must be valid for reading `len` elements of `T`, unless `len` is 0.
#[allow(unsafe_code)]
unsafe fn slice<'a, T>(address: usize, len: i64) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(address as *const T, len as usize) }
}

fn overflow(name: &str) -> Error {
    Error::Shape(format!(
        "{name}: extents times strides overflow the address space"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(unsafe_code)]
    fn tensor(shape: &[i64], strides: Option<&[i64]>) -> Result<Tensor> {
        // SAFETY: the tests below never read or write elements.
        unsafe { Tensor::new("x", 64 as *mut u8, Device::Cpu, DType::F32, shape, strides) }
    }

    #[test]
    fn overflowing_extents_are_refused() {
        assert!(matches!(
            tensor(&[1 << 40, 1 << 40], None),
            Err(Error::Shape(_))
        ));
        assert!(matches!(
            tensor(&[2, 2], Some(&[i64::MAX, 1])),
            Err(Error::Shape(_))
        ));
        assert!(matches!(tensor(&[i64::MAX], None), Err(Error::Shape(_))));
        assert!(matches!(tensor(&[-1], None), Err(Error::Shape(_))));
        assert!(matches!(tensor(&[1; 6], None), Err(Error::Shape(_))));
        assert!(tensor(&[0, 1 << 40, 1 << 40], Some(&[1, 1, 1])).is_ok());
    }

    #[test]
    #[allow(unsafe_code)]
    fn memory_ends_at_half_of_all_addresses() {
        let at = |address: usize, count: i64| {
            let data = address as *mut u8;
            // SAFETY: never read or written.
            unsafe { Tensor::new("x", data, Device::Cpu, DType::F32, &[count], None) }
        };
        assert!(at((1 << 63) - 64, 15).is_ok());
        assert!(matches!(at((1 << 63) - 64, 16), Err(Error::Shape(_))));
        assert!(matches!(at(1 << 63, 1), Err(Error::Shape(_))));
        assert!(matches!(at(usize::MAX - 63, 1), Err(Error::Shape(_))));
        assert!(at(1 << 63, 0).is_ok());
    }

    #[test]
    fn strides_that_no_index_is_multiplied_with_may_be_any_number() {
        let strides =
            |shape: &[i64], strides| tensor(shape, Some(strides)).unwrap().strides().to_vec();
        assert_eq!(strides(&[1, 4], &[i64::MAX, 1]), [0, 1]);
        assert_eq!(strides(&[1, 4], &[1 << 48, 1]), [1 << 48, 1]);
        assert_eq!(strides(&[1, 4], &[7, 1]), [7, 1]);
        assert_eq!(strides(&[0, 4, 4], &[i64::MAX, i64::MAX, 1]), [0, 0, 1]);
        assert!(tensor(&[2, 4], Some(&[i64::MAX, 1])).is_err());
    }

    /// As many elements as the tensor has, and as its memory spans.
    #[test]
    #[allow(unsafe_code)]
    fn slices_hold_what_the_tensor_describes() {
        let mut memory: Vec<i32> = (0..64).collect();
        let mut of = |dtype, shape: &[i64], strides: Option<&[i64]>| {
            let data = memory.as_mut_ptr().cast();
            // SAFETY: every tensor of this test lies within the 256 bytes of `memory`.
            unsafe { Tensor::new("x", data, Device::Cpu, dtype, shape, strides) }.unwrap()
        };
        let rows = of(DType::I32, &[3, 4], Some(&[10, 1]));
        assert!(rows.as_i32().is_none());
        let all: Vec<i32> = (0..24).collect();
        assert_eq!(rows.as_i32_rows(), Some(&all[..]));
        assert_eq!(of(DType::I32, &[3, 0], None).as_i32_rows(), Some(&[][..]));
        assert_eq!(of(DType::I32, &[3, 2], None).as_i32(), Some(&all[..6]));
        assert_eq!(of(DType::I32, &[7], None).as_slots().unwrap().len(), 7);
        let wide = of(DType::I64, &[5], None);
        assert_eq!(wide.as_slots().unwrap().len(), 5);
        assert_eq!(wide.as_slots().unwrap().get(1), 2 | 3 << 32);
        assert_eq!(of(DType::U8, &[9], None).as_bytes().unwrap().len(), 9);
        assert_eq!(of(DType::F32, &[2, 5], None).as_f32().unwrap().len(), 10);
        assert!(of(DType::F32, &[2, 5], None).as_i32_rows().is_none());
    }

    #[test]
    fn injective_means_no_shared_element() {
        assert!(tensor(&[4, 8], None).unwrap().is_injective());
        assert!(tensor(&[4, 8], Some(&[16, 1])).unwrap().is_injective());
        assert!(tensor(&[8, 4], Some(&[1, 8])).unwrap().is_injective());
        assert!(!tensor(&[4, 8], Some(&[7, 1])).unwrap().is_injective());
        assert!(!tensor(&[4, 8], Some(&[0, 1])).unwrap().is_injective());
        assert!(tensor(&[1, 8], Some(&[0, 1])).unwrap().is_injective());
    }

    #[test]
    fn parts_of_rows_keep_to_their_bytes() {
        #[allow(unsafe_code)]
        let bytes = |address: usize, shape: &[i64], strides: &[i64]| {
            let data = address as *mut u8;
            // SAFETY: never read or written.
            unsafe { Tensor::new("x", data, Device::Cpu, DType::U8, shape, Some(strides)) }.unwrap()
        };
        let part = bytes(64, &[3, 4, 656], &[4000, 656, 1]).part_of_rows(512, DType::F32, 4);
        let part = part.unwrap();
        assert_eq!((part.address(), part.dtype()), (576, DType::F32));
        assert_eq!(
            (part.shape(), part.strides()),
            (&[3i64, 4, 4][..], &[1000i64, 164, 1][..])
        );
        assert!(
            bytes(66, &[3, 4, 656], &[4000, 656, 1])
                .part_of_rows(512, DType::F32, 4)
                .is_none()
        );
        assert!(
            bytes(64, &[3, 4, 656], &[4000, 658, 1])
                .part_of_rows(512, DType::F32, 4)
                .is_none()
        );
        assert!(
            bytes(64, &[3, 1, 656], &[4000, 658, 1])
                .part_of_rows(512, DType::F32, 4)
                .is_some()
        );
        assert!(
            bytes(66, &[0, 4, 656], &[4001, 658, 1])
                .part_of_rows(512, DType::F32, 4)
                .is_some()
        );
    }

    #[test]
    fn pages_are_bytes_where_they_have_no_gaps() {
        let bytes = |shape: &[i64], strides: &[i64]| {
            let t = tensor(shape, Some(strides)).unwrap().pages_of_bytes()?;
            Some((t.shape().to_vec(), t.strides().to_vec()))
        };
        let page = |n, bytes, stride| Some((vec![n, bytes], vec![stride, 1]));
        assert_eq!(bytes(&[3, 4, 5], &[50, 5, 1]), page(3, 80, 200));
        assert_eq!(bytes(&[3, 4, 5], &[50, 1, 4]), page(3, 80, 200));
        assert_eq!(bytes(&[3, 1, 5], &[20, 7, 1]), page(3, 20, 80));
        assert_eq!(bytes(&[3], &[2]), page(3, 4, 8));
        assert_eq!(bytes(&[3, 0, 5], &[50, 9, 9]), page(3, 0, 200));
        assert_eq!(bytes(&[3, 4, 5], &[50, 6, 1]), None);
        assert_eq!(bytes(&[3, 4, 5], &[50, 0, 1]), None);
        assert_eq!(bytes(&[3, 4], &[50, 2]), None);
    }

    #[test]
    fn dims_can_be_inserted_and_swapped() {
        let t = tensor(&[3, 5], None).unwrap().insert_dim(1);
        assert_eq!(
            (t.shape(), t.strides()),
            (&[3i64, 1, 5][..], &[5i64, 0, 1][..])
        );
        let t = t.swap_dims(0, 2);
        assert_eq!(t.shape(), &[5, 1, 3]);
    }

    #[test]
    fn dims_of_compact_tensors_can_be_joined() {
        let joined = tensor(&[2, 3, 4], None).unwrap().join_dims(0);
        assert_eq!(
            (joined.shape(), joined.strides()),
            (&[6, 4][..], &[4, 1][..])
        );
        // A stride that no index is multiplied with may be anything.
        let joined = tensor(&[3, 1], Some(&[1, 7])).unwrap().join_dims(0);
        assert_eq!((joined.shape(), joined.strides()), (&[3][..], &[1][..]));
    }

    #[test]
    fn dims_can_be_cut_into_two_and_into_parts() {
        let t = tensor(&[6, 5], Some(&[8, 1])).unwrap().split_dim(0, 3);
        assert_eq!(
            (t.shape(), t.strides()),
            (&[2i64, 3, 5][..], &[24i64, 8, 1][..])
        );
        let part = t.narrow(1, 1, 2);
        assert_eq!(
            (part.shape(), part.strides()),
            (&[2i64, 2, 5][..], t.strides())
        );
        assert_eq!(part.address(), t.address() + 8 * 4);
        assert_eq!(t.narrow(0, 2, 0).address(), t.address());
    }
}
