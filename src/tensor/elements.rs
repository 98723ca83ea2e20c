//! Elements of host tensors: one by one, by index, and as slices. What a device holds is not read here.

use super::integers::Integers;
use super::{Device, Tensor};
use crate::dtype::DType;

impl Tensor {
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

    /// A compact host tensor of `i32` or `i64`; `None` for any other tensor.
    #[allow(unsafe_code)]
    pub fn as_integers(&self) -> Option<Integers<'_>> {
        if self.dtype == DType::I32 {
            return self.as_i32().map(Integers::I32);
        }
        let host = self.device == Device::Cpu && self.dtype == DType::I64 && self.is_compact();
        // SAFETY: as in `as_i32`.
        host.then(|| Integers::I64(unsafe { slice(self.address, self.num_elements()) }))
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(of(DType::I32, &[7], None).as_integers().unwrap().len(), 7);
        let wide = of(DType::I64, &[5], None);
        assert_eq!(wide.as_integers().unwrap().len(), 5);
        assert_eq!(wide.as_integers().unwrap().get(1), 2 | 3 << 32);
        assert_eq!(of(DType::U8, &[9], None).as_bytes().unwrap().len(), 9);
        assert_eq!(of(DType::F32, &[2, 5], None).as_f32().unwrap().len(), 10);
        assert!(of(DType::F32, &[2, 5], None).as_i32_rows().is_none());
    }
}
