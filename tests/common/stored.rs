//! How elements of a cache are stored in its form: their bits, and what they are read as. It is written a second time, in
//! float64, as `codec` is: the tests must not trust the conversions that they test.

use super::codec::{decode, encode, power_of_two, rounded};
use super::problem::Problem;
use folio::dtype::DType;
use folio::problem::CacheForm;

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Side {
    Key,
    Value,
}

/// The numbers of e2m1, by their bits without the sign.
pub const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Elements that share a scale in NVFP4.
pub const BLOCK: usize = 16;

/// One element's place in a form.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    pub form: CacheForm,
    pub element: DType,
    /// As the scale tensor holds it; 1 where there is none.
    pub scale: f64,
    pub zero: f64,
}

impl Stored {
    /// `draw` gives numbers from 0 to 1 for a token, a head and an element.
    pub fn new(
        problem: &Problem,
        token: [u64; 2],
        [head, d]: [usize; 2],
        draw: impl Fn([u64; 2], [usize; 2]) -> f64,
    ) -> Stored {
        let (form, element) = (problem.form, problem.kv_dtype);
        // The largest code is that of a number of about 3.5.
        let most = match element {
            DType::I8 => 127.0,
            DType::F8E4M3 => 448.0,
            _ => 7.0,
        };
        let any_token = [0, 0];
        let unit = 3.5 / most * power_of_two(problem.cache_exponent);
        let scale = match form {
            CacheForm::Plain | CacheForm::PackedKeys => {
                return Stored {
                    form,
                    ..Stored::plain(element)
                };
            }
            CacheForm::TokenHeadScales => unit * (0.6 + draw(token, [head, 0])),
            CacheForm::ChannelScales | CacheForm::ChannelZeroPoints => {
                unit * (0.6 + draw(any_token, [head, d]))
            }
            CacheForm::Nvfp4 => 0.3 + draw(token, [head, d / BLOCK]),
        };
        let held = match form {
            CacheForm::Nvfp4 => DType::F8E4M3,
            _ => DType::F32,
        };
        let zero = match form {
            CacheForm::ChannelZeroPoints => 4.0 * draw(any_token, [head, d + 10_000]) - 2.0,
            _ => 0.0,
        };
        Stored {
            form,
            element,
            scale: rounded(held, scale),
            zero: rounded(DType::F32, zero),
        }
    }

    /// An element as it is.
    pub fn plain(element: DType) -> Stored {
        Stored {
            form: CacheForm::Plain,
            element,
            scale: 1.0,
            zero: 0.0,
        }
    }

    /// The bits of an element; four where two share a byte.
    pub fn encode(&self, value: f64) -> u64 {
        // Adding 0 would lose the sign of another 0.
        let code = match self.form {
            CacheForm::ChannelZeroPoints => value / self.scale + self.zero,
            _ => value / self.scale,
        };
        let integer = |least: f64, most: f64| code.round_ties_even().clamp(least, most) as i64;
        match self.element {
            DType::I8 => integer(-127.0, 127.0) as u8 as u64,
            DType::I4x2 => integer(-8.0, 7.0) as u64 & 15,
            DType::F4E2M1x2 => nearest_e2m1(code),
            dtype => encode(dtype, code),
        }
    }

    /// What these bits are read as.
    pub fn decode(&self, bits: u64) -> f64 {
        (self.code(bits) - self.zero) * self.scale
    }

    /// The same by float32 arithmetic, rounded to the bits that a type of q has.
    pub fn decode_rounded(&self, bits: u64, q_dtype: DType) -> f64 {
        let value = (self.code(bits) as f32 - self.zero as f32) * self.scale as f32;
        rounded_to_bits_of(q_dtype, value.into())
    }

    fn code(&self, bits: u64) -> f64 {
        match self.element {
            DType::I4x2 => bits as f64 - if bits < 8 { 0.0 } else { 16.0 },
            DType::F4E2M1x2 => {
                let magnitude = E2M1[bits as usize & 7];
                if bits & 8 == 0 { magnitude } else { -magnitude }
            }
            dtype => decode(dtype, bits),
        }
    }
}

/// `value` in the type that is as long, were its exponents without end.
fn rounded_to_bits_of(dtype: DType, value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let unit = 2f64.powi(value.abs().log2().floor() as i32);
    rounded(dtype, value / unit) * unit
}

/// The bits of the nearest e2m1, of two the even one.
pub fn nearest_e2m1(value: f64) -> u64 {
    let sign = u64::from(value.is_sign_negative()) << 3;
    let magnitude = value.abs().min(6.0);
    let mut best = 0;
    for bits in 1..8 {
        let distance = |bits: usize| (E2M1[bits] - magnitude).abs();
        let is_nearer = distance(bits) < distance(best);
        let is_even_tie = distance(bits) == distance(best) && bits % 2 == 0;
        if is_nearer || is_even_tie {
            best = bits;
        }
    }
    sign | best as u64
}
