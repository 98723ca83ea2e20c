//! RoPE on rows of f32: a pair `(x, y)` becomes `(x · cos - y · sin, y · cos + x · sin)`. Products and sums are rounded
//! one by one. Loops are over slices of one length each, so that the compiler keeps them in vectors.

/// Rotates elements of the first half of a row and those of the second.
pub fn rotate_halves(x: &mut [f32], y: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (((x, y), cos), sin) in x.iter_mut().zip(y).zip(cos).zip(sin) {
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

/// Rotates elements that are neighbours.
pub fn rotate_neighbours(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    for (([x, y], cos), sin) in row.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

/// Cosines and sines of `position · turns · 2^-64` turns. What is left of an angle below an eighth of a turn goes through
/// the Taylor series, of which the first term left out is below 2^-28. The error is below four times 2^-24.
pub fn angles(position: i64, turns: &[u64], cos: &mut [f32], sin: &mut [f32]) {
    // The upper half of the product is the angle in 2^-32 turns.
    const RADIANS: f32 = (std::f64::consts::TAU / 4_294_967_296.0) as f32;
    for ((turns, cos), sin) in turns.iter().zip(cos).zip(sin) {
        let angle = ((position as u64).wrapping_mul(*turns) >> 32) as u32;
        let quarters = angle.wrapping_add(1 << 29) >> 30;
        let x = angle.wrapping_sub(quarters << 30) as i32 as f32 * RADIANS;
        let z = x * x;
        let s = x + x * z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z / 362_880.0)));
        let c = 1.0
            + z * (-0.5
                + z * (1.0 / 24.0 + z * (-1.0 / 720.0 + z * (1.0 / 40320.0 - z / 3_628_800.0))));
        let (c, s) = if quarters & 1 == 0 { (c, s) } else { (-s, c) };
        (*cos, *sin) = if quarters & 2 == 0 { (c, s) } else { (-c, -s) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn angles_are_right_all_around() {
        for i in 0..100_000u64 {
            let turns = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for position in [1i64, -1, 3, 1 << 20, i64::MAX] {
                let (mut cos, mut sin) = ([0.0], [0.0]);
                angles(position, &[turns], &mut cos, &mut sin);
                let fraction = (position as u64).wrapping_mul(turns) as f64 / 2f64.powi(64);
                let want = (fraction * std::f64::consts::TAU).sin_cos();
                let error = (f64::from(sin[0]) - want.0).abs();
                let error = error.max((f64::from(cos[0]) - want.1).abs());
                assert!(
                    error <= 4.0 * 2f64.powi(-24),
                    "{turns} {position}: {error:e}"
                );
            }
        }
    }
}
