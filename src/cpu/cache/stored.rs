//! Rows of a cache that are not elements one after the other, in the type that they are computed with: what formats with
//! scales beside the cache and vLLM's first layout store, as rows of floats, and such rows written.
//!
//! A row goes through a chunk of f32. What is stored times its scale is rounded to float32 there, but in NVFP4, whose products
//! fp16 and bf16 hold exactly.
#![allow(unsafe_code)]

use super::rows::{CHUNK, Chunk, Row};
use crate::cpu::kernels::packed::{
    Channels, Divide, FromChannels, Largest, Pack, Parts, Small, ToChannels, Unpack,
};
use crate::cpu::kernels::table::Kernels;
use crate::dtype::{self, DType, F8E4M3_MAX};
use crate::problem::{CacheForm, CacheFormat, RowTensors};

/// The least scale that is computed for a token and head: vLLM's.
const LEAST_SCALE: f32 = 1e-6;
/// What the largest magnitude is divided by.
const MOST_I8: f32 = 127.0;
const MOST_E2M1: f32 = 6.0;

/// Elements that share a scale in NVFP4.
const BLOCK: usize = CacheFormat::NVFP4_BLOCK as usize;
// A chunk has whole blocks.
const _: () = assert!(CHUNK.is_multiple_of(BLOCK));

/// A cache of keys or of values.
#[derive(Clone, Copy)]
pub struct StoredRows<'a> {
    kernels: &'a Kernels,
    cache: RowTensors,
    form: CacheForm,
    dim: usize,
}

/// A row: page, token of the page, head.
pub type Place = [i64; 3];

impl<'a> StoredRows<'a> {
    pub fn new(kernels: &'a Kernels, cache: RowTensors) -> StoredRows<'a> {
        StoredRows {
            kernels,
            form: cache.format.form(),
            dim: cache.dim() as usize,
            cache,
        }
    }

    /// Reads a row to one of another type.
    ///
    /// # Safety
    /// The row is in the cache, and `to` has room for its elements.
    pub unsafe fn load(&self, at: Place, to: Row, scale: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.form == CacheForm::PackedKeys && to.dtype == self.cache.format.element {
                return self.load_packed(at, 0, self.dim, to.at);
            }
            let mut chunk: Chunk = [0.0; CHUNK];
            for first in (0..self.dim).step_by(CHUNK) {
                let count = CHUNK.min(self.dim - first);
                let factor = self.load_chunk(at, first, count, &mut chunk);
                to.skip(first)
                    .store(self.kernels, count, &chunk, factor * scale);
            }
        }
    }

    /// Reads a chunk, but for the factor that it returns.
    unsafe fn load_chunk(&self, at: Place, first: usize, count: usize, to: &mut Chunk) -> f32 {
        let row = to.as_mut_ptr();
        // SAFETY: the caller's promise; `count` elements from `first` on are in the row.
        unsafe {
            match self.form {
                CacheForm::Plain => {
                    let row = Row::of(&self.cache.rows, &at);
                    row.skip(first).load(self.kernels, count, to);
                    1.0
                }
                CacheForm::PackedKeys => {
                    let mut elements = [0u32; CHUNK];
                    let elements = Row {
                        at: elements.as_mut_ptr().cast(),
                        dtype: self.cache.format.element,
                    };
                    self.load_packed(at, first, count, elements.at);
                    elements.load(self.kernels, count, to);
                    1.0
                }
                CacheForm::TokenHeadScales => {
                    let elements = Row::of(&self.cache.rows, &at).skip(first);
                    match elements.dtype {
                        DType::I8 => self.unpack(Small::I8, elements.at, count, row),
                        _ => elements.load(self.kernels, count, to),
                    }
                    self.scale_at(&at)
                }
                CacheForm::ChannelScales => {
                    self.unpack(Small::I8, self.bytes(at, first), count, row);
                    self.multiply_channels(at, first, count, row);
                    1.0
                }
                CacheForm::ChannelZeroPoints => {
                    self.unpack(Small::I4, self.bytes(at, first), count, row);
                    self.multiply_channels(at, first, count, row);
                    1.0
                }
                CacheForm::Nvfp4 => {
                    self.unpack(Small::E2m1, self.bytes(at, first), count, row);
                    let scales = self.block_scales(at, first);
                    for (n, block) in to[..count]
                        .as_chunks_mut::<BLOCK>()
                        .0
                        .iter_mut()
                        .enumerate()
                    {
                        let scale = dtype::f8e4m3_to_f32(scales.add(n).read());
                        block.iter_mut().for_each(|x| *x *= scale);
                    }
                    1.0
                }
            }
        }
    }

    /// Writes a row of floats, which are divided by `scale` first.
    ///
    /// # Safety
    /// The row is in the cache, which is writable, and `from` has as many elements.
    pub unsafe fn store(&self, at: Place, from: Row, scale: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let row_scale = match self.form {
                CacheForm::TokenHeadScales => self.compute_scale(at, from, scale),
                _ => 1.0,
            };
            let mut chunk: Chunk = [0.0; CHUNK];
            for first in (0..self.dim).step_by(CHUNK) {
                let count = CHUNK.min(self.dim - first);
                self.load_divided(from.skip(first), count, scale, &mut chunk);
                self.store_chunk(at, first, count, &mut chunk, row_scale);
            }
        }
    }

    /// Elements to be stored, divided by the scale of the whole cache.
    unsafe fn load_divided(&self, from: Row, count: usize, scale: f32, to: &mut Chunk) {
        // SAFETY: the caller's promise.
        unsafe {
            from.load(self.kernels, count, to);
            if scale != 1.0 {
                (self.kernels.divide)(&Divide {
                    row: to.as_mut_ptr(),
                    divisor: scale,
                    dim: count,
                });
            }
        }
    }

    /// Computes the scale of a row and writes it.
    unsafe fn compute_scale(&self, at: Place, from: Row, scale: f32) -> f32 {
        let mut largest = 0f32;
        let mut chunk: Chunk = [0.0; CHUNK];
        for first in (0..self.dim).step_by(CHUNK) {
            let count = CHUNK.min(self.dim - first);
            // SAFETY: the caller's promise.
            unsafe {
                self.load_divided(from.skip(first), count, scale, &mut chunk);
                largest = largest.max(self.largest(&chunk[..count]));
            }
        }
        let most = match self.cache.format.element {
            DType::I8 => MOST_I8,
            _ => F8E4M3_MAX,
        };
        let computed = (largest / most).max(LEAST_SCALE);
        if let Some(scales) = &self.cache.scales {
            scales.set(&at, computed);
        }
        computed
    }

    unsafe fn store_chunk(
        &self,
        at: Place,
        first: usize,
        count: usize,
        chunk: &mut Chunk,
        row_scale: f32,
    ) {
        let row = chunk.as_mut_ptr();
        // SAFETY: the caller's promise; `count` elements from `first` on are in the row.
        unsafe {
            match self.form {
                CacheForm::Plain => {
                    let to = Row::of(&self.cache.rows, &at);
                    to.skip(first).store(self.kernels, count, chunk, 1.0);
                }
                CacheForm::PackedKeys => {
                    let mut elements = [0u32; CHUNK];
                    let elements = Row {
                        at: elements.as_mut_ptr().cast(),
                        dtype: self.cache.format.element,
                    };
                    elements.store(self.kernels, count, chunk, 1.0);
                    self.store_packed(at, first, count, elements.at);
                }
                CacheForm::TokenHeadScales => {
                    let to = Row::of(&self.cache.rows, &at).skip(first);
                    match to.dtype {
                        DType::I8 => self.pack(Small::I8, row, row_scale, count, to.at),
                        _ => {
                            let from = Row {
                                at: row.cast(),
                                dtype: DType::F32,
                            };
                            to.quantise(self.kernels, count, from, row_scale);
                        }
                    }
                }
                CacheForm::ChannelScales => {
                    self.divide_by_channels(at, first, count, row);
                    self.pack(Small::I8, row, 1.0, count, self.bytes(at, first));
                }
                CacheForm::ChannelZeroPoints => {
                    self.divide_by_channels(at, first, count, row);
                    self.pack(Small::I4, row, 1.0, count, self.bytes(at, first));
                }
                CacheForm::Nvfp4 => {
                    let scales = self.block_scales(at, first);
                    let to = self.bytes(at, first);
                    for (n, block) in chunk[..count].as_chunks::<BLOCK>().0.iter().enumerate() {
                        let byte = dtype::f32_to_f8e4m3(self.largest(block) / MOST_E2M1);
                        scales.add(n).write(byte);
                        let to = to.add(n * BLOCK / 2);
                        match dtype::f8e4m3_to_f32(byte) {
                            0.0 => to.write_bytes(0, BLOCK / 2),
                            scale => self.pack(Small::E2m1, block.as_ptr(), scale, BLOCK, to),
                        }
                    }
                }
            }
        }
    }

    /// Where the byte of an element is; of pairs, an even one.
    fn bytes(&self, at: Place, first: usize) -> *mut u8 {
        let lanes = usize::from(self.cache.format.element.lanes());
        Row::of(&self.cache.rows, &at)
            .at
            .wrapping_add(first / lanes)
    }

    unsafe fn unpack(&self, element: Small, src: *const u8, dim: usize, dst: *mut f32) {
        let task = Unpack {
            src,
            element,
            dst,
            dim,
        };
        // SAFETY: the caller's promise.
        unsafe { (self.kernels.unpack)(&task) }
    }

    unsafe fn pack(&self, element: Small, src: *const f32, divisor: f32, dim: usize, dst: *mut u8) {
        let task = Pack {
            src,
            divisor,
            element,
            dst,
            dim,
        };
        // SAFETY: the caller's promise.
        unsafe { (self.kernels.pack)(&task) }
    }

    fn largest(&self, row: &[f32]) -> f32 {
        let task = Largest {
            row: row.as_ptr(),
            dim: row.len(),
        };
        // SAFETY: a slice is readable.
        unsafe { (self.kernels.largest)(&task) }
    }

    unsafe fn multiply_channels(&self, at: Place, first: usize, dim: usize, row: *mut f32) {
        let channels = self.channels(at, first);
        // SAFETY: the caller's promise; `api` checked that a head has as many scales as elements.
        unsafe {
            (self.kernels.from_channels)(&FromChannels { row, channels, dim });
        }
    }

    unsafe fn divide_by_channels(&self, at: Place, first: usize, dim: usize, row: *mut f32) {
        let channels = self.channels(at, first);
        // SAFETY: as in `multiply_channels`.
        unsafe {
            (self.kernels.to_channels)(&ToChannels { row, channels, dim });
        }
    }

    fn channels(&self, [_, _, head]: Place, first: usize) -> Channels {
        let of = |tensor: &Option<_>| match tensor {
            Some(tensor) => Row::of(tensor, &[head]).skip(first).at.cast_const().cast(),
            None => std::ptr::null(),
        };
        Channels {
            scales: of(&self.cache.scales),
            zeros: of(&self.cache.zero_points),
        }
    }

    /// The scale of a token and head.
    fn scale_at(&self, at: &Place) -> f32 {
        self.cache.scales.map_or(1.0, |scales| scales.get(at))
    }

    /// The scales of blocks, from that of element `first` on.
    fn block_scales(&self, at: Place, first: usize) -> *mut u8 {
        match &self.cache.scales {
            Some(scales) => Row::of(scales, &at).skip(first / BLOCK).at,
            None => std::ptr::null_mut(),
        }
    }

    /// Copies elements of vLLM's first layout to a row.
    unsafe fn load_packed(&self, at: Place, first: usize, count: usize, to: *mut u8) {
        let apart = self.parts(at, first, count);
        // SAFETY: the caller's promise; the parts are the row's.
        unsafe {
            (self.kernels.parts)(&Parts {
                to,
                to_stride: apart.bytes,
                ..apart
            });
        }
    }

    /// Copies a row to elements of vLLM's first layout.
    unsafe fn store_packed(&self, at: Place, first: usize, count: usize, from: *const u8) {
        let apart = self.parts(at, first, count);
        // SAFETY: as in `load_packed`.
        unsafe {
            (self.kernels.parts)(&Parts {
                from,
                from_stride: apart.bytes,
                ..apart
            });
        }
    }

    /// Where the parts of some elements are: 16 bytes of a key, an element of a value.
    fn parts(&self, at: Place, first: usize, count: usize) -> Parts {
        let (rows, size) = (&self.cache.rows, self.cache.format.element.size());
        let together = match rows.rank() {
            5 => rows.extent(4) as usize,
            _ => 1,
        };
        let stride = rows.stride(3) as usize * size;
        let start = Row::of(rows, &at).at;
        let start = start.wrapping_add(first / together * stride);
        Parts {
            from: start,
            from_stride: stride,
            to: start,
            to_stride: stride,
            bytes: together * size,
            count: count / together,
        }
    }
}
