//! Division of many 32-bit numbers by one, without the instruction for it.

/// Divides many numbers by one: with m = ⌈2^64 / d⌉, n / d is the upper half of n · m for every 32-bit n.
#[derive(Clone, Copy)]
pub(super) struct Divisor {
    pub divisor: u32,
    reciprocal: u64,
}

impl Divisor {
    pub fn new(divisor: u32) -> Divisor {
        Divisor {
            divisor,
            // Not used for 1, whose reciprocal does not fit.
            reciprocal: (u64::MAX / u64::from(divisor)).wrapping_add(1),
        }
    }

    pub fn divide_up(self, n: u32) -> u32 {
        match (n, self.divisor) {
            (0, _) | (_, 1) => n,
            _ => ((u128::from(n - 1) * u128::from(self.reciprocal)) >> u64::BITS) as u32 + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_divisor_rounds_up(n: u32, d in 1u32.., q in 0u32..1000) {
            for n in [n, q.saturating_mul(d), q.saturating_mul(d).saturating_add(1)] {
                prop_assert_eq!(Divisor::new(d).divide_up(n), n.div_ceil(d));
            }
        }
    }
}
