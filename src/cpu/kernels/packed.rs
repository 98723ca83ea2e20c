//! Rows of caches whose elements are integers or have four bits: to f32, back, and scaled element by element. Rows whose
//! parts lie apart: together, and back. The loops are plain; inside of [`Simd::vectorize`] the compiler makes vectors of them.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]

use super::simd::{Simd, Task};

/// An element that is no float of a byte or more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Small {
    I8,
    /// Two in a byte, the first in the low bits, in two's complement.
    I4,
    /// Two in a byte, the first in the low bits.
    E2m1,
}

/// Reads elements as f32.
#[derive(Clone, Copy)]
pub struct Unpack {
    pub src: *const u8,
    pub element: Small,
    pub dst: *mut f32,
    /// Even where a byte has two elements.
    pub dim: usize,
}

/// Stores `src / divisor`, rounded to nearest even and saturated: int8 to ±127, int4 to -8 to 7, e2m1 to ±6. NaN, which the
/// elements do not have, becomes 0.
#[derive(Clone, Copy)]
pub struct Pack {
    pub src: *const f32,
    pub divisor: f32,
    pub element: Small,
    pub dst: *mut u8,
    /// As in [`Unpack`].
    pub dim: usize,
}

/// Scales and zero points of a head's elements.
#[derive(Clone, Copy)]
pub struct Channels {
    pub scales: *const f32,
    /// Or NULL: no zero points.
    pub zeros: *const f32,
}

/// `(x - zero) · scale` in place.
#[derive(Clone, Copy)]
pub struct FromChannels {
    pub row: *mut f32,
    pub channels: Channels,
    pub dim: usize,
}

/// `x / scale + zero` in place.
#[derive(Clone, Copy)]
pub struct ToChannels {
    pub row: *mut f32,
    pub channels: Channels,
    pub dim: usize,
}

/// `x / divisor` in place.
#[derive(Clone, Copy)]
pub struct Divide {
    pub row: *mut f32,
    pub divisor: f32,
    pub dim: usize,
}

/// The largest magnitude but NaN; at least 0.
#[derive(Clone, Copy)]
pub struct Largest {
    pub row: *const f32,
    pub dim: usize,
}

/// Copies parts of a row from where they lie a stride apart to where they lie another apart.
#[derive(Clone, Copy)]
pub struct Parts {
    pub from: *const u8,
    pub from_stride: usize,
    pub to: *mut u8,
    pub to_stride: usize,
    /// Bytes of a part: 1, 2, 4 or 16.
    pub bytes: usize,
    pub count: usize,
}

impl Task for Parts {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        match self.bytes {
            1 => self.copy::<1>(),
            2 => self.copy::<2>(),
            4 => self.copy::<4>(),
            bytes => {
                debug_assert_eq!(bytes, 16);
                self.copy::<16>();
            }
        }
    }
}

impl Parts {
    #[inline(always)]
    unsafe fn copy<const BYTES: usize>(&self) {
        for n in 0..self.count {
            let part = self.from.add(n * self.from_stride).cast::<[u8; BYTES]>();
            let to = self.to.add(n * self.to_stride).cast::<[u8; BYTES]>();
            to.write(part.read());
        }
    }
}

impl Task for Unpack {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let to = std::slice::from_raw_parts_mut(self.dst, self.dim);
        match self.element {
            Small::I8 => {
                let from = std::slice::from_raw_parts(self.src.cast::<i8>(), self.dim);
                for (to, &x) in to.iter_mut().zip(from) {
                    *to = f32::from(x);
                }
            }
            Small::I4 => unpack_pairs(self.src, to, |bits| (bits ^ 8) - 8),
            Small::E2m1 => unpack_pairs(self.src, to, twice_e2m1),
        }
        if self.element == Small::E2m1 {
            to.iter_mut().for_each(|x| *x *= 0.5);
        }
    }
}

#[inline(always)]
unsafe fn unpack_pairs(src: *const u8, to: &mut [f32], number: impl Fn(i32) -> i32) {
    let from = std::slice::from_raw_parts(src, to.len() / 2);
    for (to, &byte) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
        let byte = i32::from(byte);
        *to = [number(byte & 15) as f32, number(byte >> 4) as f32];
    }
}

/// Twice the number with these four bits: 0 to 4, 6, 8 or 12, and a sign.
#[inline(always)]
fn twice_e2m1(bits: i32) -> i32 {
    let magnitude = bits & 7;
    let twice = if magnitude < 4 {
        magnitude
    } else if magnitude < 6 {
        2 * magnitude - 4
    } else {
        4 * magnitude - 16
    };
    if bits & 8 == 0 { twice } else { -twice }
}

impl Task for Pack {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let from = std::slice::from_raw_parts(self.src, self.dim);
        let divisor = self.divisor;
        match self.element {
            Small::I8 => {
                let to = std::slice::from_raw_parts_mut(self.dst.cast::<i8>(), self.dim);
                for (to, x) in to.iter_mut().zip(from) {
                    *to = nearest(x / divisor, -127.0, 127.0) as i8;
                }
            }
            Small::I4 => pack_pairs(from, self.dst, |x| nearest(x / divisor, -8.0, 7.0) & 15),
            Small::E2m1 => pack_pairs(from, self.dst, |x| e2m1(x / divisor)),
        }
    }
}

#[inline(always)]
unsafe fn pack_pairs(from: &[f32], dst: *mut u8, bits: impl Fn(f32) -> i32) {
    let to = std::slice::from_raw_parts_mut(dst, from.len() / 2);
    for (to, &[low, high]) in to.iter_mut().zip(from.as_chunks::<2>().0) {
        *to = (bits(low) | bits(high) << 4) as u8;
    }
}

/// The nearest integer within two small ones, of two the even one; 0 for NaN.
#[inline(always)]
fn nearest(x: f32, least: f32, most: f32) -> i32 {
    // Adding and subtracting 1.5 · 2^23 rounds without a library call.
    const MAGIC: f32 = 12_582_912.0;
    let x = if x < least { least } else { x };
    let x = if x > most { most } else { x };
    let x = if x.is_nan() { 0.0 } else { x };
    // SAFETY: the number is small, and none is NaN.
    unsafe { ((x + MAGIC) - MAGIC).to_int_unchecked() }
}

/// The bits of the nearest e2m1: the number of borders between neighbours that lie below, where the even neighbour has the
/// border itself.
#[inline(always)]
fn e2m1(x: f32) -> i32 {
    let magnitude = x.abs();
    let mut bits = 0;
    for (odd, even) in [(0.25, 0.75), (1.25, 1.75), (2.5, 3.5)] {
        bits += i32::from(magnitude > odd) + i32::from(magnitude >= even);
    }
    bits += i32::from(magnitude > 5.0);
    let sign = if x.is_nan() { 0 } else { x.to_bits() >> 28 & 8 };
    bits | sign as i32
}

impl Task for FromChannels {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let row = std::slice::from_raw_parts_mut(self.row, self.dim);
        let scales = std::slice::from_raw_parts(self.channels.scales, self.dim);
        if !self.channels.zeros.is_null() {
            let zeros = std::slice::from_raw_parts(self.channels.zeros, self.dim);
            row.iter_mut().zip(zeros).for_each(|(x, zero)| *x -= zero);
        }
        row.iter_mut()
            .zip(scales)
            .for_each(|(x, scale)| *x *= scale);
    }
}

impl Task for ToChannels {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let row = std::slice::from_raw_parts_mut(self.row, self.dim);
        let scales = std::slice::from_raw_parts(self.channels.scales, self.dim);
        row.iter_mut()
            .zip(scales)
            .for_each(|(x, scale)| *x /= scale);
        if !self.channels.zeros.is_null() {
            let zeros = std::slice::from_raw_parts(self.channels.zeros, self.dim);
            row.iter_mut().zip(zeros).for_each(|(x, zero)| *x += zero);
        }
    }
}

impl Task for Divide {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let row = std::slice::from_raw_parts_mut(self.row, self.dim);
        row.iter_mut().for_each(|x| *x /= self.divisor);
    }
}

impl Task for Largest {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) -> f32 {
        let row = std::slice::from_raw_parts(self.row, self.dim);
        // Maxima of lanes, so that the compiler keeps them in a vector. A comparison with NaN is false.
        let mut lanes = [0f32; 16];
        let (blocks, rest) = row.as_chunks::<16>();
        for block in blocks {
            for (largest, x) in lanes.iter_mut().zip(block) {
                let x = x.abs();
                *largest = if x > *largest { x } else { *largest };
            }
        }
        // `f32::max` leaves NaN out.
        let all = lanes.iter().chain(rest);
        all.fold(0f32, |largest, x| largest.max(x.abs()))
    }
}
