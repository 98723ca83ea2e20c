//! What an accepted call must have done: what the float64 oracle does with the very same arguments, and
//! nothing else. What a refused one must have done: nothing.
//!
//! The oracle's output is rounded to the output's type, so its own rounding comes on top of the tolerance. What
//! errors are proportional to, `Σ p·|v|`, is the oracle's answer where values have lost their signs.

#![allow(unsafe_code)]

use super::guarded::Guarded;
use super::structs::Described;
use crate::common::codec::{decode, rounded};
use crate::common::instance::for_each_index;
use folio::dtype::DType;
use folio::ffi::folio_status;

/// Why a call was refused.
#[derive(Debug)]
pub struct Refusal {
    pub status: folio_status,
    pub message: String,
}

/// Which backend computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    Backend,
    Oracle,
}

/// An output of a call.
pub struct Output {
    pub name: &'static str,
    /// The elements that the call may write.
    pub elements: Described,
    /// Every bit counts, but for those of fp8 NaN of this type.
    pub exact_in: Option<DType>,
}

/// How far an element may be from the oracle's, given its magnitude: `(relative, absolute)`.
pub type Bound<'a> = dyn Fn(&str, &[i64]) -> (f64, f64) + 'a;

/// One call with its arguments.
pub struct Run<'a> {
    pub memory: &'a Guarded,
    pub call: &'a dyn Fn(By) -> Result<(), Refusal>,
    pub outputs: Vec<Output>,
    /// Tensors whose signs are taken away for the magnitude.
    pub values: Vec<Described>,
    pub bound: &'a Bound<'a>,
}

/// How a call ended that did what it must.
#[derive(Debug)]
pub enum Ending {
    Accepted,
    Refused(Refusal),
}

impl Run<'_> {
    /// Makes the call and judges it.
    pub fn check(&self) -> Result<Ending, String> {
        let before = self.memory.snapshot();
        let outcome = (self.call)(By::Backend);
        let after = self.memory.snapshot();
        if let Err(refusal) = outcome {
            return match after == before {
                true => Ok(Ending::Refused(refusal)),
                false => Err(format!("memory changed although: {}", refusal.message)),
            };
        }
        self.memory.restore(&before);
        let want = self.by_the_oracle()?;
        self.memory.restore(&before);
        self.values.iter().for_each(take_signs_away);
        let magnitude = self.by_the_oracle()?;
        self.memory.restore(&before);
        self.compare(&before, &after, &want, &magnitude)?;
        Ok(Ending::Accepted)
    }

    fn by_the_oracle(&self) -> Result<Vec<Vec<u8>>, String> {
        match (self.call)(By::Oracle) {
            Ok(()) => Ok(self.memory.snapshot()),
            Err(refusal) => Err(format!("accepted; the oracle says: {}", refusal.message)),
        }
    }

    fn compare(
        &self,
        before: &[Vec<u8>],
        after: &[Vec<u8>],
        want: &[Vec<u8>],
        magnitude: &[Vec<u8>],
    ) -> Result<(), String> {
        let mut expected = before.to_vec();
        for output in &self.outputs {
            let elements = &output.elements;
            let Some((at, start)) = self.memory.locate(elements.address) else {
                continue;
            };
            let size = elements.dtype.size();
            let mut difference = Ok(());
            for_each_index(&elements.shape, |index| {
                let offset = start + (elements.at(index) - elements.address);
                let bits = |snapshot: &[Vec<u8>]| {
                    let mut bits = [0; 8];
                    bits[..size].copy_from_slice(&snapshot[at][offset..offset + size]);
                    u64::from_le_bytes(bits)
                };
                expected[at][offset..offset + size]
                    .copy_from_slice(&after[at][offset..offset + size]);
                let numbers = [after, want, magnitude].map(bits);
                if difference.is_ok() && !self.is_right(output, index, numbers) {
                    let [is, wanted, of] = numbers.map(|bits| decode(elements.dtype, bits));
                    difference = Err(format!(
                        "{}{index:?} is {is:e}, the oracle's {wanted:e} with a magnitude of {of:e}",
                        output.name
                    ));
                }
            });
            difference?;
        }
        match expected == after {
            true => Ok(()),
            false => Err("memory outside of the outputs changed".into()),
        }
    }

    fn is_right(&self, output: &Output, index: &[i64], [is, want, of]: [u64; 3]) -> bool {
        let dtype = output.elements.dtype;
        if is == want {
            return true;
        }
        if let Some(exact) = output.exact_in {
            return exact.is_fp8() && decode(exact, is).is_nan() && decode(exact, want).is_nan();
        }
        let [is, want, of] = [is, want, of].map(|bits| decode(dtype, bits));
        if want.is_nan() {
            return is.is_nan();
        }
        let (relative, absolute) = (self.bound)(output.name, index);
        let t = of.abs() * relative + absolute + rounding(dtype, want);
        // Where the magnitude overflows, or saturates, nothing is known of the error.
        let is_known = of.is_finite() && of.abs() < largest(dtype);
        if want.is_infinite() || !is_known || !t.is_finite() {
            return is == want || !is_known || want.is_infinite() && is.is_nan();
        }
        rounded(dtype, want - t) <= is && is <= rounded(dtype, want + t)
    }
}

/// Half a unit in the last place of a rounded number.
fn rounding(dtype: DType, value: f64) -> f64 {
    let (digits, least) = match dtype {
        DType::F16 => (11, -25),
        DType::BF16 => (8, -134),
        DType::F8E4M3 => (4, -10),
        DType::F8E5M2 => (3, -17),
        _ => (24, -150),
    };
    (value.abs() * 2f64.powi(-digits)).max(2f64.powi(least))
}

/// What a number that is too large becomes.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F8E4M3 => 448.0,
        DType::F8E5M2 => 57344.0,
        _ => f64::INFINITY,
    }
}

fn sign_bit(dtype: DType) -> u64 {
    1 << (8 * dtype.size() - 1)
}

/// Clears the sign of every element.
fn take_signs_away(values: &Described) {
    for_each_index(&values.shape, |index| {
        let bits = values.bits(index) & !sign_bit(values.dtype);
        poke(values.at(index), bits, values.dtype.size());
    });
}

/// Writes `size` bytes of host memory that belongs to the case.
pub fn poke(address: usize, bits: u64, size: usize) {
    // SAFETY: every caller names an element of a tensor of the case, which lives and which nobody else uses.
    unsafe {
        std::ptr::copy_nonoverlapping(bits.to_le_bytes().as_ptr(), address as *mut u8, size);
    }
}

/// Gives every element that is no number a small one, so that what a corrupted index leads to is comparable.
pub fn make_finite(values: &Described) {
    let mut next = 0u64;
    for_each_index(&values.shape, |index| {
        let bits = values.bits(index);
        next = crate::common::values::mix(next);
        if !decode(values.dtype, bits).is_finite() {
            let value = (next % 64) as f64 / 16.0 - 2.0;
            let bits = crate::common::codec::encode(values.dtype, value);
            poke(values.at(index), bits, values.dtype.size());
        }
    });
}
