//! The two fp8 formats, as stores of vectors of integers need them.

/// What rounds a float to fp8 in 32-bit lanes: a magnitude from `min_normal` on by its bits, a smaller one by an
/// addition whose result has the subnormal step as its last place.
pub struct Fp8 {
    /// Bits of the largest finite value.
    pub max: i32,
    /// Bits of the smallest normal value.
    pub min_normal: i32,
    /// A float whose last place is the subnormal step.
    pub aligner: f32,
    /// Mantissa bits that are rounded off.
    pub shift: u32,
    /// Change of the exponent bias, in units of the result.
    pub rebias: i32,
}

pub const E4M3: Fp8 = Fp8 {
    max: 0x43e0_0000,
    min_normal: 0x3c80_0000,
    aligner: 16384.0,
    shift: 20,
    rebias: 120 << 3,
};
pub const E5M2: Fp8 = Fp8 {
    max: 0x4760_0000,
    min_normal: 0x3880_0000,
    aligner: 128.0,
    shift: 21,
    rebias: 112 << 2,
};
