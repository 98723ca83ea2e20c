//! Element types as bit patterns, written a second time: the tests must not trust the conversions that
//! they test. fp8 is read from a table of all values, and rounded by counting steps.

use folio::dtype::DType;
use half::{bf16, f16};
use std::sync::LazyLock;

/// The values of all bytes.
static E4M3: LazyLock<[f64; 256]> = LazyLock::new(|| fp8_values(3, 7));
static E5M2: LazyLock<[f64; 256]> = LazyLock::new(|| fp8_values(2, 15));

/// The value of an element's bits.
pub fn decode(dtype: DType, bits: u64) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::from_bits(bits as u32)),
        DType::F16 => f16::from_bits(bits as u16).to_f64(),
        DType::BF16 => bf16::from_bits(bits as u16).to_f64(),
        DType::F8E4M3 => E4M3[bits as usize & 0xff],
        DType::F8E5M2 => E5M2[bits as usize & 0xff],
        DType::U8 | DType::I4x2 | DType::F4E2M1x2 => bits as u8 as f64,
        DType::I8 => f64::from(bits as u8 as i8),
        DType::I32 => f64::from(bits as u32 as i32),
        DType::I64 => bits as i64 as f64,
    }
}

/// `value` rounded to nearest, ties to even; fp8 saturates.
pub fn encode(dtype: DType, value: f64) -> u64 {
    let value = value as f32;
    match dtype {
        DType::F32 => value.to_bits().into(),
        DType::F16 => f16::from_f32(value).to_bits().into(),
        DType::BF16 => bf16::from_f32(value).to_bits().into(),
        DType::F8E4M3 => nearest_fp8(value.into(), 3, 7, 0x7e),
        DType::F8E5M2 => nearest_fp8(value.into(), 2, 15, 0x7b),
        DType::U8 | DType::I4x2 | DType::F4E2M1x2 => value as u8 as u64,
        DType::I8 => u64::from(value.round_ties_even() as i8 as u8),
        DType::I32 => u64::from(value as i32 as u32),
        DType::I64 => value as i64 as u64,
    }
}

/// `value` as an element of this type holds it.
pub fn rounded(dtype: DType, value: f64) -> f64 {
    decode(dtype, encode(dtype, value))
}

/// Half the distance between 1 and its successor: the relative error of one rounding.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// Half the least number above 0 of a type of 16 or 32 bits: what rounding a number near 0 may add.
pub fn half_of_least(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-25),
        DType::BF16 => 2f64.powi(-134),
        _ => 2f64.powi(-150),
    }
}

/// Bit patterns that must never reach an output: NaN of several kinds and both infinities (e4m3 has only
/// its two NaN). Integers get values that no index may have.
pub fn poison(dtype: DType, element: usize) -> u64 {
    let patterns: [u64; 4] = match dtype {
        DType::F32 => [0x7fc0_0000, 0x7f80_0000, 0xff80_0000, 0xffff_ffff],
        DType::F16 => [0x7e00, 0x7c00, 0xfc00, 0xffff],
        DType::BF16 => [0x7fc0, 0x7f80, 0xff80, 0xffff],
        DType::F8E4M3 => [0x7f, 0xff, 0x7f, 0xff],
        DType::F8E5M2 => [0x7f, 0x7c, 0xfc, 0xff],
        DType::U8 | DType::I4x2 | DType::F4E2M1x2 => [0xff; 4],
        // Far from what the tests store.
        DType::I8 => [0x80, 0x81, 0x80, 0x7f],
        DType::I32 | DType::I64 => [u64::MAX; 4],
    };
    patterns[element % 4]
}

fn fp8_values(mantissa_bits: u32, bias: i32) -> [f64; 256] {
    std::array::from_fn(|byte| fp8(byte as u8, mantissa_bits, bias))
}

/// An fp8 value with `mantissa_bits` and this exponent bias.
fn fp8(byte: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let units = byte & 0x7f;
    let (exponent, mantissa) = (
        i32::from(units >> mantissa_bits),
        units & ((1 << mantissa_bits) - 1),
    );
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    let top = if mantissa_bits == 2 { 0x7c } else { 0x7f };
    let magnitude = match units {
        0x7c if mantissa_bits == 2 => f64::INFINITY,
        _ if units >= top => f64::NAN,
        _ if exponent == 0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if byte & 0x80 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// The byte whose value is nearest, of a type with `mantissa_bits` and this exponent bias; `largest` is the largest finite one.
/// Bytes count the steps of values, which are as long as the least one below the second power of two.
fn nearest_fp8(value: f64, mantissa_bits: u32, bias: i32, largest: u8) -> u64 {
    if value.is_nan() {
        return 0x7f;
    }
    let exponent = (value.abs().to_bits() >> 52) as i32 - 1023;
    let binade = (exponent + bias - 1).max(0);
    let step = power_of_two(binade + 1 - bias - mantissa_bits as i32);
    let steps = (value.abs() / step).round_ties_even() as u64;
    let byte = ((binade as u64) << mantissa_bits).saturating_add(steps);
    u64::from(value.is_sign_negative()) << 7 | byte.min(largest.into())
}

/// `2^exponent`, for exponents of normal numbers. The standard library's `powi` is a call for each element.
pub fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}
