//! The same memory described otherwise: other dimensions, a part of it, another type.

use super::{MAX_RANK, Tensor};
use crate::dtype::DType;

impl Tensor {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Result;
    use crate::tensor::Device;

    #[allow(unsafe_code)]
    fn tensor(shape: &[i64], strides: Option<&[i64]>) -> Result<Tensor> {
        // SAFETY: the tests below never read or write elements.
        unsafe { Tensor::new("x", 64 as *mut u8, Device::Cpu, DType::F32, shape, strides) }
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
