//! Appends with norm and RoPE as plain data: what is there, what float64 formulas give, how far float32 may be from that,
//! and the calls.
//!
//! Bounds: with u = 2^-24, the norm of a row of D elements errs by (D / 2 + 6) u of each element: D u for the sum of
//! squares in any order, halved by the root, and the other operations one by one. A rotation errs by 2 u of
//! |x cos| + |y sin|; computed cosines and sines by 4 u each. Rounding keeps the order of numbers, so an output lies
//! between the rounded ends of the interval.

use super::codec::{decode, encode};
use super::door::Session;
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::values::{mix, normal, shuffled, uniform};
use folio::api::Stream;
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{
    Angles, AppendArgs, CacheForm, Frequencies, KvLayout, Llama3Scaling, Norm, Rope, RopeAppendArgs,
};
use std::f64::consts::TAU;

const U: f64 = 1.0 / 16_777_216.0;

pub const MAX_POSITION: i64 = 37;

/// Where angles come from.
#[derive(Debug, Clone, Copy)]
pub enum Source {
    /// Of fp32 or of the tokens' type, in one plane or two.
    Table {
        is_f32: bool,
        planes: bool,
    },
    Computed(Frequencies),
}

#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    pub source: Source,
    pub rotary_dim: i64,
    pub is_interleaved: bool,
    pub with_offsets: bool,
    pub wide_positions: bool,
}

#[derive(Debug, Clone)]
pub struct RopeAppend {
    pub source: DType,
    pub cache: DType,
    /// The caches are tensors of bytes and the input says what they hold.
    pub as_bytes: bool,
    /// Heads of queries, rows of them beyond the tokens, and whether they are written in place.
    pub queries: Option<(i64, i64, bool)>,
    pub heads: i64,
    pub dim: i64,
    pub dim_vo: i64,
    pub page_size: i64,
    pub num_pages: i64,
    pub layout: KvLayout,
    pub num_tokens: i64,
    /// Keys and values without a slot.
    pub padded_rows: i64,
    pub wide_slots: bool,
    pub scale: f32,
    /// A scale per head, one for all, or none.
    pub scales: Option<bool>,
    /// Norm weights of queries and keys: fp32, or of the tokens' type.
    pub norms: [Option<bool>; 2],
    pub rotation: Option<Rotation>,
    /// Keys are wanted, in place or not.
    pub key_out: Option<bool>,
    /// Between rows and between heads, and before the first.
    pub gaps: [u32; 3],
    pub seed: u64,
}

/// What a call has written.
pub struct Written {
    pub k_cache: Image,
    pub v_cache: Image,
    pub q_out: Option<Image>,
    pub key_out: Option<Image>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Query = 1,
    Key,
    Value,
}

/// A number, and how far an output may be from it before it is rounded.
#[derive(Clone, Copy)]
struct Near {
    value: f64,
    error: f64,
}

impl RopeAppend {
    /// The slot of each token: no two alike, some negative.
    pub fn slots(&self) -> Vec<i64> {
        let free = shuffled(self.seed, (self.num_pages * self.page_size) as usize);
        let mut free = free.into_iter();
        let draw = |token| match mix(self.seed ^ token) % 5 {
            0 => Some(-1 - (token as i64 % 3)),
            _ => free.next().map(i64::from),
        };
        // Tokens that find no slot any more are skipped too.
        let slots = (0..self.num_tokens as u64).map(draw);
        slots.map(|slot| slot.unwrap_or(-1)).collect()
    }

    fn num_rows(&self) -> i64 {
        self.num_tokens + self.queries.map_or(0, |(_, beyond, _)| beyond)
    }

    fn bits(&self, of: Of, row: i64, head: i64, d: i64) -> u64 {
        let start = mix(self.seed ^ (of as u64) << 32);
        let indices = [row, head, d];
        let hash = indices.iter().fold(start, |hash, &i| mix(hash ^ i as u64));
        // Some rows are zero.
        let is_zero = mix(self.seed ^ row as u64 ^ (head as u64) << 9).is_multiple_of(17);
        let value = if is_zero { 0.0 } else { normal(hash) * 3.0 };
        encode(self.source, value)
    }

    fn value(&self, of: Of, row: i64, head: i64, d: i64) -> f64 {
        decode(self.source, self.bits(of, row, head, d))
    }

    fn weight_type(&self, of: Of) -> Option<DType> {
        let is_f32 = self.norms[usize::from(of == Of::Key)]?;
        Some(if is_f32 { DType::F32 } else { self.source })
    }

    fn weight(&self, of: Of, d: i64) -> Option<u64> {
        let hash = mix(self.seed ^ 0x3000 ^ (of as u64) << 20 ^ d as u64);
        Some(encode(self.weight_type(of)?, 0.5 + uniform(hash)))
    }

    const EPS: f32 = 1e-5;

    /// Position and offset of a row.
    fn position(&self, row: i64) -> [i64; 2] {
        let rotation = self.rotation.expect("a rotation");
        let hash = mix(self.seed ^ row as u64 ^ 77);
        let all = match rotation.source {
            Source::Table { .. } => MAX_POSITION as u64,
            Source::Computed(_) => 1 << 20,
        };
        let position = (hash % all) as i64;
        let offset = match rotation.with_offsets {
            true => (hash >> 32) as i64 % (position + 1),
            false => 0,
        };
        [position - offset, offset]
    }

    fn table_type(&self) -> DType {
        match self.rotation.map(|rotation| rotation.source) {
            Some(Source::Table { is_f32: false, .. }) => self.source,
            _ => DType::F32,
        }
    }

    /// Bits of the cosine (plane 0) or sine of a pair.
    fn entry(&self, plane: i64, position: i64, pair: i64) -> u64 {
        let hash = mix(self.seed ^ (position as u64) << 20 ^ (pair as u64) << 2 ^ plane as u64);
        encode(self.table_type(), 2.0 * uniform(hash) - 1.0)
    }

    /// Cosine and sine of a pair of a row, and their error.
    fn angle(&self, row: i64, pair: i64) -> (f64, f64, f64) {
        let rotation = self.rotation.expect("a rotation");
        let position = self.position(row).iter().sum::<i64>();
        match rotation.source {
            Source::Table { .. } => {
                let of = |plane| decode(self.table_type(), self.entry(plane, position, pair));
                (of(0), of(1), 0.0)
            }
            Source::Computed(all) => {
                let angle = position as f64 * frequency(&all, pair, rotation.rotary_dim);
                // Positions below 2^20 times frequencies that are right to a few 2^-53.
                (angle.cos(), angle.sin(), 4.0 * U + 2f64.powi(-30))
            }
        }
    }

    /// A row of queries or keys, normalised and rotated.
    fn computed(&self, of: Of, row: i64, head: i64) -> Vec<Near> {
        let x = |d| self.value(of, row, head, d);
        let mut near: Vec<Near> = (0..self.dim)
            .map(|d| Near {
                value: x(d),
                error: 0.0,
            })
            .collect();
        if let Some(dtype) = self.weight_type(of) {
            let squares: f64 = (0..self.dim).map(|d| x(d) * x(d)).sum();
            let rms = (squares / self.dim as f64 + f64::from(Self::EPS)).sqrt();
            for (d, near) in (0..).zip(&mut near) {
                let weight = decode(dtype, self.weight(of, d).expect("a weight"));
                near.value *= weight / rms;
                near.error = near.value.abs() * (self.dim as f64 / 2.0 + 6.0) * U;
            }
        }
        let Some(rotation) = self.rotation else {
            return near;
        };
        let pairs = rotation.rotary_dim / 2;
        for pair in 0..pairs {
            let (first, second) = match rotation.is_interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + pairs),
            };
            let (first, second) = (first as usize, second as usize);
            let (cos, sin, error) = self.angle(row, pair);
            let (x, y) = (near[first], near[second]);
            let sum = |a: Near, by_a: f64, b: Near, by_b: f64| Near {
                value: a.value * by_a + b.value * by_b,
                error: a.error * by_a.abs()
                    + b.error * by_b.abs()
                    + 2.0 * U * ((a.value * by_a).abs() + (b.value * by_b).abs())
                    + error * (a.value.abs() + b.value.abs()),
            };
            (near[first], near[second]) = (sum(x, cos, y, -sin), sum(y, cos, x, sin));
        }
        near
    }

    fn divisor(&self, of: Of, head: i64) -> f32 {
        let scale = if self.scale == 0.0 { 1.0 } else { self.scale };
        scale * self.head_scale(of, head)
    }

    fn head_scale(&self, of: Of, head: i64) -> f32 {
        match self.scales {
            None => 1.0,
            Some(per_head) => {
                let index = if per_head { head } else { 0 };
                let hash = mix(self.seed ^ (of as u64 + 7) << 40 ^ index as u64);
                (0.01 + uniform(hash)) as f32
            }
        }
    }

    fn heads_of(&self, of: Of) -> [i64; 3] {
        match of {
            Of::Query => [self.num_rows(), self.queries.map_or(0, |q| q.0), self.dim],
            Of::Key => [self.num_tokens, self.heads, self.dim],
            Of::Value => [self.num_tokens, self.heads, self.dim_vo],
        }
    }

    fn rows(&self, of: Of) -> Image {
        let mut image = self.blank(of);
        for_each_index(&self.heads_of(of), |at| {
            image.put(at, self.bits(of, at[0], at[1], at[2]));
        });
        image
    }

    fn blank(&self, of: Of) -> Image {
        let mut shape = self.heads_of(of);
        if of != Of::Query {
            shape[0] += self.padded_rows;
        }
        let [row, head, lead] = self.gaps;
        Image::poisoned(View::gapped(self.source, &shape, &[row, head, 0], lead))
    }

    fn cache_image(&self, of: Of) -> Image {
        let dim = self.heads_of(of)[2];
        let dtype = if self.as_bytes { DType::U8 } else { self.cache };
        let shape = match self.layout {
            KvLayout::Nhd => [self.num_pages, self.page_size, self.heads, dim],
            KvLayout::Hnd => [self.num_pages, self.heads, self.page_size, dim],
        };
        let [middle, outer, lead] = self.gaps;
        Image::poisoned(View::gapped(dtype, &shape, &[outer, middle, 0, 0], lead))
    }

    /// What `slot_mapping` holds.
    pub fn slot_mapping(&self) -> Image {
        Self::integers(self.slots().into_iter(), self.wide_slots)
    }

    /// The new values.
    pub fn new_values(&self) -> Image {
        self.rows(Of::Value)
    }

    fn integers(values: impl Iterator<Item = i64>, wide: bool) -> Image {
        let dtype = if wide { DType::I64 } else { DType::I32 };
        let bits: Vec<u64> = values.map(|value| value as u64).collect();
        Image::of_bits(dtype, &[bits.len() as i64], bits)
    }

    fn table(&self) -> Option<Image> {
        let rotation = self.rotation?;
        let Source::Table { planes, .. } = rotation.source else {
            return None;
        };
        let pairs = rotation.rotary_dim / 2;
        let (shape, gaps) = match planes {
            true => (vec![2, MAX_POSITION, pairs], vec![0, self.gaps[0], 0]),
            false => (vec![MAX_POSITION, 2 * pairs], vec![self.gaps[0], 0]),
        };
        let mut image = Image::poisoned(View::gapped(self.table_type(), &shape, &gaps, 0));
        for_each_index(&[2, MAX_POSITION, pairs], |at| {
            let bits = self.entry(at[0], at[1], at[2]);
            match planes {
                true => image.put(at, bits),
                false => image.put(&[at[1], at[0] * pairs + at[2]], bits),
            }
        });
        Some(image)
    }

    fn weights(&self, of: Of) -> Option<Image> {
        let bits = (0..self.dim).map(|d| self.weight(of, d).unwrap_or_default());
        Some(Image::of_bits(self.weight_type(of)?, &[self.dim], bits))
    }

    fn scale_tensor(&self, of: Of) -> Option<Image> {
        let count = if self.scales? { self.heads } else { 1 };
        let scales: Vec<f32> = (0..count).map(|head| self.head_scale(of, head)).collect();
        Some(Image::of_f32(&[count], &scales))
    }

    pub fn run(&self, session: &dyn Session, memory: &dyn Memory) -> Result<Written> {
        self.run_into(session, memory, |image| image, |append| append)
    }

    /// Runs with tensors of floats that `hold` has changed, and what `store` makes of the append.
    pub fn run_into(
        &self,
        session: &dyn Session,
        memory: &dyn Memory,
        hold: impl Fn(Image) -> Image,
        store: impl Fn(AppendArgs) -> AppendArgs,
    ) -> Result<Written> {
        let integers = |image| Resident::new(memory, image);
        let resident = |image| Resident::new(memory, hold(image));
        let [key, value] = [Of::Key, Of::Value].map(|of| resident(self.rows(of)));
        let caches = [Of::Key, Of::Value].map(|of| resident(self.cache_image(of)));
        let q = self.queries.map(|_| resident(self.rows(Of::Query)));
        let new_q = self.queries.filter(|queries| !queries.2);
        let new_q = new_q.map(|_| resident(self.blank(Of::Query)));
        let new_key = (self.key_out == Some(false)).then(|| resident(self.blank(Of::Key)));
        let key_out = self.key_out.map(|_| new_key.as_ref().unwrap_or(&key));
        let slots = integers(self.slot_mapping());
        let scales = [Of::Key, Of::Value].map(|of| self.scale_tensor(of).map(resident));
        let weights = [Of::Query, Of::Key].map(|of| self.weights(of).map(resident));
        let table = self.table().map(resident);
        let places = self.rotation.map(|rotation| {
            [0, 1].map(|part| {
                let all = (0..self.num_rows()).map(|row| self.position(row)[part]);
                integers(Self::integers(all, rotation.wide_positions))
            })
        });
        let tensor = |resident: &Option<Resident<'_>>| resident.as_ref().map(Resident::tensor);
        let input = RopeAppendArgs {
            append: store(AppendArgs {
                key: key.tensor(),
                value: value.tensor(),
                k_cache: caches[0].tensor(),
                v_cache: caches[1].tensor(),
                layout: self.layout,
                kv_dtype: self.as_bytes.then_some(self.cache),
                form: CacheForm::Plain,
                k_zero_points: None,
                v_zero_points: None,
                slot_mapping: slots.tensor(),
                k_scale: self.scale,
                v_scale: self.scale,
                k_scales: tensor(&scales[0]),
                v_scales: tensor(&scales[1]),
            }),
            key_out: key_out.map(Resident::tensor),
            q: tensor(&q),
            q_out: tensor(&new_q),
            norm: Norm {
                q_weight: tensor(&weights[0]),
                k_weight: tensor(&weights[1]),
                eps: match self.norms {
                    [None, None] => 0.0,
                    _ => Self::EPS,
                },
            },
            rope: self
                .rotation
                .zip(places.as_ref())
                .map(|(rotation, places)| Rope {
                    positions: places[0].tensor(),
                    position_offsets: rotation.with_offsets.then(|| places[1].tensor()),
                    angles: match rotation.source {
                        Source::Computed(frequencies) => Angles::Computed(frequencies),
                        Source::Table { .. } => Angles::Table(tensor(&table).expect("a table")),
                    },
                    rotary_dim: rotation.rotary_dim as u32,
                    is_interleaved: rotation.is_interleaved,
                }),
        };
        session.rope_append(&input, Stream::default())?;
        assert!(value.is_untouched() && slots.is_untouched());
        assert!(self.key_out == Some(true) || key.is_untouched());
        assert!(new_q.is_none() || q.as_ref().is_some_and(Resident::is_untouched));
        Ok(Written {
            k_cache: caches[0].current(),
            v_cache: caches[1].current(),
            q_out: new_q.as_ref().or(q.as_ref()).map(Resident::current),
            key_out: key_out.map(Resident::current),
        })
    }

    /// Whether every element is as near to the formulas as it must be, and no other byte has changed.
    pub fn check(&self, got: &Written) -> std::result::Result<(), String> {
        self.check_cache(Of::Key, &got.k_cache)?;
        self.check_cache(Of::Value, &got.v_cache)?;
        self.check_rows(got)
    }

    /// The same of queries and of `key_out`.
    pub fn check_rows(&self, got: &Written) -> std::result::Result<(), String> {
        let in_place = [
            self.queries.is_some_and(|queries| queries.2),
            self.key_out == Some(true),
        ];
        let outputs = [(Of::Query, &got.q_out), (Of::Key, &got.key_out)];
        for ((of, got), in_place) in outputs.into_iter().zip(in_place) {
            let Some(got) = got else { continue };
            let mut want = if in_place {
                self.rows(of)
            } else {
                self.blank(of)
            };
            let [rows, heads, _] = self.heads_of(of);
            for_each_index(&[rows, heads], |at| {
                for (d, near) in (0..).zip(self.computed(of, at[0], at[1])) {
                    let at = [at[0], at[1], d];
                    let bits = near.judge(self.source, got.bits(&at), &at);
                    want.put(&at, bits.unwrap_or_else(|wrong| panic!("{of:?}: {wrong}")));
                }
            });
            if *got != want {
                return Err(format!("{of:?}: other bytes changed"));
            }
        }
        Ok(())
    }

    fn check_cache(&self, of: Of, got: &Image) -> std::result::Result<(), String> {
        let mut want = self.cache_image(of);
        for (token, slot) in (0..).zip(self.slots()).filter(|&(_, slot)| slot >= 0) {
            let (page, at) = (slot / self.page_size, slot % self.page_size);
            for head in 0..self.heads {
                for (d, near) in (0..).zip(self.stored(of, token, head)) {
                    let index = match self.layout {
                        KvLayout::Nhd => [page, at, head, d],
                        KvLayout::Hnd => [page, head, at, d],
                    };
                    want.put(&index, near.judge(self.cache, got.bits(&index), &index)?);
                }
            }
        }
        match *got == want {
            true => Ok(()),
            false => Err(format!("cache of {of:?}: other bytes changed")),
        }
    }

    /// A row as the cache gets it, before it is rounded.
    fn stored(&self, of: Of, token: i64, head: i64) -> Vec<Near> {
        let mut row = match of {
            Of::Value => (0..self.dim_vo)
                .map(|d| Near {
                    value: self.value(of, token, head, d),
                    error: 0.0,
                })
                .collect(),
            _ => self.computed(of, token, head),
        };
        if self.cache.is_fp8() {
            let divisor = f64::from(self.divisor(of, head));
            for near in &mut row {
                near.value /= divisor;
                // The quotient is rounded to float32 before fp8.
                near.error = near.error / divisor.abs() + U * near.value.abs();
            }
        }
        row
    }
}

impl Near {
    /// The bits, where they are those of a rounded number of the interval.
    fn judge(&self, dtype: DType, bits: u64, at: &[i64]) -> std::result::Result<u64, String> {
        let error = 1.001 * self.error;
        let end = |value| decode(dtype, encode(dtype, value));
        let is = decode(dtype, bits);
        if (end(self.value - error)..=end(self.value + error)).contains(&is) {
            return Ok(bits);
        }
        Err(format!("{at:?} is {is}, not {} ± {error:e}", self.value))
    }
}

fn frequency(all: &Frequencies, pair: i64, rotary_dim: i64) -> f64 {
    let frequency = (-2.0 * pair as f64 / rotary_dim as f64 * f64::from(all.theta).ln()).exp();
    let scale = if all.scale == 0.0 {
        1.0
    } else {
        f64::from(all.scale)
    };
    let Some(Llama3Scaling {
        low_freq_factor,
        high_freq_factor,
        old_context_len,
    }) = all.llama3
    else {
        return frequency / scale;
    };
    let turns = f64::from(old_context_len) * frequency / TAU;
    let [low, high] = [low_freq_factor, high_freq_factor].map(f64::from);
    match turns {
        turns if turns <= low => frequency / scale,
        turns if turns >= high => frequency,
        turns => {
            let smooth = (turns - low) / (high - low);
            frequency * (smooth + (1.0 - smooth) / scale)
        }
    }
}
