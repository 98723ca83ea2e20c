//! Element types, their DLPack codes and their conversions to and from `f32`.
//!
//! fp16 and bf16 come from the `half` crate; the two fp8 formats are converted here. "e4m3" means
//! what NVIDIA and PyTorch mean by it: `e4m3fn` of the OCP 8-bit floating point specification
//! (no infinities, largest finite value 448), DLPack code 10, not code 8.

use crate::error::{Error, Result};
use half::{bf16, f16};

/// Largest finite e4m3 value.
pub const F8E4M3_MAX: f32 = 448.0;
/// Largest finite e5m2 value.
pub const F8E5M2_MAX: f32 = 57344.0;

/// An element type that Folio reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// fp8 e4m3fn.
    F8E4M3,
    /// fp8 e5m2.
    F8E5M2,
    /// Bytes: masks, and fp8 pages that the host carries as bytes.
    U8,
    /// 32-bit indices.
    I32,
    /// 64-bit indices.
    I64,
    /// Integers of a quantised cache.
    I8,
    /// Two 4-bit integers in a byte, the first in the low bits.
    I4x2,
    /// Two fp4 e2m1 in a byte, the first in the low bits.
    F4E2M1x2,
}

/// What one type is called.
struct Row {
    dtype: DType,
    /// DLPack's type code, bits of a lane, and lanes.
    code: u8,
    bits: u8,
    lanes: u16,
    name: &'static str,
}

const fn row(dtype: DType, (code, bits, lanes): (u8, u8, u16), name: &'static str) -> Row {
    Row {
        dtype,
        code,
        bits,
        lanes,
        name,
    }
}

/// In the order of the types.
const TABLE: [Row; 11] = [
    row(DType::F32, (2, 32, 1), "float32"),
    row(DType::F16, (2, 16, 1), "float16"),
    row(DType::BF16, (4, 16, 1), "bfloat16"),
    row(DType::F8E4M3, (10, 8, 1), "float8_e4m3"),
    row(DType::F8E5M2, (12, 8, 1), "float8_e5m2"),
    row(DType::U8, (1, 8, 1), "uint8"),
    row(DType::I32, (0, 32, 1), "int32"),
    row(DType::I64, (0, 64, 1), "int64"),
    row(DType::I8, (0, 8, 1), "int8"),
    row(DType::I4x2, (0, 4, 2), "int4_x2"),
    row(DType::F4E2M1x2, (17, 4, 2), "float4_e2m1_x2"),
];

/// DLPack's code of a boolean byte; accepted where bytes are.
const DLPACK_BOOL: u8 = 6;

impl DType {
    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// The type with this DLPack code, width and lane count.
    pub fn from_dlpack(code: u8, bits: u8, lanes: u16) -> Result<DType> {
        let stored = if code == DLPACK_BOOL { 1 } else { code };
        TABLE
            .iter()
            .find(|row| (row.code, row.bits, row.lanes) == (stored, bits, lanes))
            .map(|row| row.dtype)
            .ok_or_else(|| {
                Error::DType(format!(
                    "dtype (code {code}, bits {bits}, lanes {lanes}) is not one that Folio knows"
                ))
            })
    }

    /// The DLPack (code, bits) pair.
    pub fn to_dlpack(self) -> (u8, u8) {
        (self.row().code, self.row().bits)
    }

    /// DLPack's lanes: numbers in one element of a tensor. It is 2 for pairs of 4 bits, and 1 otherwise.
    pub fn lanes(self) -> u16 {
        self.row().lanes
    }

    /// Bytes per element of a tensor; a pair of 4 bits is one.
    pub fn size(self) -> usize {
        self.row().bits as usize * self.lanes() as usize / 8
    }

    /// The name used in messages.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Types of caches that hosts may describe as uint8.
    pub fn may_be_bytes(self) -> bool {
        self.is_fp8() || matches!(self, DType::I8 | DType::I4x2 | DType::F4E2M1x2)
    }

    /// One of the two fp8 formats.
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }

    /// `value` as an element of this type holds it.
    #[allow(unsafe_code)]
    pub fn rounded(self, value: f32) -> f32 {
        let mut element = [0u8; 8];
        // SAFETY: no element is larger.
        unsafe {
            store(element.as_mut_ptr(), self, 0, value);
            load(element.as_ptr(), self, 0)
        }
    }

    /// fp32, fp16 or bf16.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// An e4m3fn byte as `f32`; 0x7f and 0xff are NaN.
pub fn f8e4m3_to_f32(byte: u8) -> f32 {
    let sign = if byte & 0x80 != 0 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = ((byte >> 3) & 0xf, byte & 7);
    match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, m) => sign * f32::from(m) * (-9f32).exp2(),
        (e, m) => sign * (8.0 + f32::from(m)) * (f32::from(e) - 10.0).exp2(),
    }
}

/// An e5m2 byte as `f32`: it is the upper byte of an IEEE binary16.
pub fn f8e5m2_to_f32(byte: u8) -> f32 {
    f16::from_bits(u16::from(byte) << 8).to_f32()
}

/// `value` rounded to e4m3fn, ties to even, saturated to ±448; NaN stays NaN.
pub fn f32_to_f8e4m3(value: f32) -> u8 {
    quantise(value, F8E4M3_MAX, 3, -6, 0x7f)
}

/// `value` rounded to e5m2, ties to even, saturated to ±57344; NaN stays NaN.
pub fn f32_to_f8e5m2(value: f32) -> u8 {
    quantise(value, F8E5M2_MAX, 2, -14, 0x7f)
}

/// Rounds to a small format with `mantissa_bits`, smallest normal exponent `min_exponent` and largest
/// finite value `max`. The arithmetic is exact: scaling by powers of two, and one rounding in
/// `round_ties_even`.
fn quantise(value: f32, max: f32, mantissa_bits: i32, min_exponent: i32, nan: u8) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    if value.is_nan() {
        return sign | nan;
    }
    let magnitude = value.abs().min(max);
    let exponent = (((magnitude.to_bits() >> 23) as i32) - 127).max(min_exponent);
    let step = ((exponent - mantissa_bits) as f32).exp2();
    let units = (magnitude / step).round_ties_even() as u32;
    // `units` counts steps; in the normal range it lies in 2^m..=2^(m+1), and a carry into the next
    // binade falls out of the addition below by itself.
    let biased = (exponent - min_exponent) as u32;
    sign | ((biased << mantissa_bits) + units) as u8
}

/// Element `index` (in elements, not bytes) of memory of type `dtype`, as `f32`. A pair of 4 bits is read as its byte:
/// `reference::stored` and `cpu::cache::stored` know what it holds.
///
/// # Safety
/// `base` must be valid for reading the element; it need not be aligned.
#[allow(unsafe_code)]
pub unsafe fn load(base: *const u8, dtype: DType, index: isize) -> f32 {
    // SAFETY: the caller promises that the element is readable; reads are unaligned.
    unsafe {
        let at = base.offset(index * dtype.size() as isize);
        match dtype {
            DType::F32 => at.cast::<f32>().read_unaligned(),
            DType::F16 => f16::from_bits(at.cast::<u16>().read_unaligned()).to_f32(),
            DType::BF16 => bf16::from_bits(at.cast::<u16>().read_unaligned()).to_f32(),
            DType::F8E4M3 => f8e4m3_to_f32(at.read()),
            DType::F8E5M2 => f8e5m2_to_f32(at.read()),
            DType::U8 | DType::I4x2 | DType::F4E2M1x2 => f32::from(at.read()),
            DType::I8 => f32::from(at.cast::<i8>().read()),
            DType::I32 => at.cast::<i32>().read_unaligned() as f32,
            DType::I64 => at.cast::<i64>().read_unaligned() as f32,
        }
    }
}

/// Stores `value`, rounded to nearest even (fp8, int8: saturated; int8 has 0 for NaN), as element `index`. A pair of 4 bits
/// is stored as its byte.
///
/// # Safety
/// `base` must be valid for writing the element; it need not be aligned.
#[allow(unsafe_code)]
pub unsafe fn store(base: *mut u8, dtype: DType, index: isize, value: f32) {
    // SAFETY: the caller promises that the element is writable; writes are unaligned.
    unsafe {
        let at = base.offset(index * dtype.size() as isize);
        match dtype {
            DType::F32 => at.cast::<f32>().write_unaligned(value),
            DType::F16 => at
                .cast::<u16>()
                .write_unaligned(f16::from_f32(value).to_bits()),
            DType::BF16 => at
                .cast::<u16>()
                .write_unaligned(bf16::from_f32(value).to_bits()),
            DType::F8E4M3 => at.write(f32_to_f8e4m3(value)),
            DType::F8E5M2 => at.write(f32_to_f8e5m2(value)),
            DType::U8 | DType::I4x2 | DType::F4E2M1x2 => at.write(value as u8),
            DType::I8 => at.cast::<i8>().write(value.round_ties_even() as i8),
            DType::I32 => at.cast::<i32>().write_unaligned(value as i32),
            DType::I64 => at.cast::<i64>().write_unaligned(value as i64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fp8_byte_round_trips() {
        for byte in 0..=255u8 {
            let e4m3 = f8e4m3_to_f32(byte);
            if !e4m3.is_nan() {
                assert_eq!(f32_to_f8e4m3(e4m3), byte, "e4m3 {byte:#x}");
            }
            let e5m2 = f8e5m2_to_f32(byte);
            if e5m2.is_finite() {
                assert_eq!(f32_to_f8e5m2(e5m2), byte, "e5m2 {byte:#x}");
            }
        }
    }

    #[test]
    fn fp8_rounds_to_nearest_even_and_saturates() {
        assert_eq!(f8e4m3_to_f32(f32_to_f8e4m3(1.0625)), 1.0);
        assert_eq!(f8e4m3_to_f32(f32_to_f8e4m3(1.1875)), 1.25);
        assert_eq!(f8e4m3_to_f32(f32_to_f8e4m3(1e9)), 448.0);
        assert_eq!(f8e4m3_to_f32(f32_to_f8e4m3(f32::NEG_INFINITY)), -448.0);
        assert_eq!(f8e5m2_to_f32(f32_to_f8e5m2(1e9)), 57344.0);
        assert_eq!(f32_to_f8e4m3(-0.0), 0x80);
        assert!(f8e4m3_to_f32(f32_to_f8e4m3(f32::NAN)).is_nan());
        assert!(f8e5m2_to_f32(f32_to_f8e5m2(f32::NAN)).is_nan());
    }

    #[test]
    fn fp8_is_the_nearest_of_all_values() {
        let mut x = -500.0f32;
        while x < 500.0 {
            let got = f8e4m3_to_f32(f32_to_f8e4m3(x));
            let best = (0..=255u8)
                .map(f8e4m3_to_f32)
                .filter(|v| !v.is_nan())
                .map(|v| (v - x).abs())
                .fold(f32::INFINITY, f32::min);
            assert_eq!((got - x).abs(), best, "{x} became {got}");
            x += 0.37;
        }
    }

    #[test]
    fn dlpack_codes_are_the_published_ones() {
        assert_eq!(DType::from_dlpack(10, 8, 1).unwrap(), DType::F8E4M3);
        assert_eq!(DType::from_dlpack(12, 8, 1).unwrap(), DType::F8E5M2);
        assert_eq!(DType::from_dlpack(6, 8, 1).unwrap(), DType::U8);
        assert!(DType::from_dlpack(2, 16, 2).is_err());
        for row in TABLE {
            let found = DType::from_dlpack(row.code, row.bits, row.lanes);
            assert_eq!(found.unwrap(), row.dtype);
            assert_eq!(row.dtype.row().dtype, row.dtype);
        }
    }
}
