//! Appends to caches of other forms than rows of plain elements, and gathers of them, as plain data: what is there, what an
//! append writes byte by byte, and what a gather reads back. Written a second time, with the codec of the tests.

use super::codec::{decode, encode, rounded};
use super::door::Session;
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::stored::{BLOCK, Stored};
use super::values::{mix, normal, shuffled, uniform};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{AppendArgs, CacheForm, GatherArgs, GatheredRequests, KvLayout, RecordPages};
use folio::tensor::Tensor;
use proptest::prelude::*;

/// One append, and what is gathered of it, as plain data.
#[derive(Debug, Clone)]
pub struct Case {
    pub form: CacheForm,
    element: DType,
    /// The caches are tensors of bytes.
    as_bytes: bool,
    pub source: DType,
    rows: DType,
    pub heads: i64,
    /// Of keys and of values.
    pub dims: [i64; 2],
    pub page_size: i64,
    pub num_pages: i64,
    pub layout: KvLayout,
    pub num_tokens: i64,
    k_scale: f32,
    gaps: [u32; 4],
    pub seed: u64,
}

pub fn cases() -> impl Strategy<Value = Case> {
    let floats = || prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]);
    let forms = prop::sample::select(vec![
        CacheForm::TokenHeadScales,
        CacheForm::ChannelScales,
        CacheForm::ChannelZeroPoints,
        CacheForm::Nvfp4,
        CacheForm::PackedKeys,
    ]);
    let dim = || prop::sample::select(vec![64i64, 8, 16, 14, 40, 128, 200, 272]);
    let gap = || prop_oneof![2 => Just(0u32), 1 => 1u32..9];
    let pages = (prop::sample::select(vec![16i64, 1, 3, 8, 128]), 1i64..6);
    let scale = prop_oneof![2 => Just(0.0f32), 1 => 0.1f32..4.0, 1 => -2.0f32..-0.1];
    (
        (forms, floats(), floats(), any::<(u8, bool, bool)>()),
        (1i64..5, [dim(), dim()], pages, 0i64..40),
        (scale, [gap(), gap(), gap(), gap()], any::<u64>()),
    )
        .prop_map(|(types, shape, (k_scale, gaps, seed))| {
            let (form, source, rows, (pick, as_bytes, is_hnd)) = types;
            let elements = form.elements(source);
            let element = elements[pick as usize % elements.len()];
            let format = form.of(element);
            let unit = i64::from(format.dim_unit());
            let whole = |dim: i64| (dim + unit - 1) / unit * unit;
            let [qk, vo] = shape.1;
            Case {
                form,
                element,
                as_bytes: as_bytes && element.may_be_bytes(),
                source,
                rows,
                heads: shape.0,
                dims: match form {
                    CacheForm::PackedKeys => [whole(qk), vo],
                    _ => [whole(qk), whole(vo)],
                },
                page_size: shape.2.0,
                num_pages: shape.2.1,
                layout: if is_hnd { KvLayout::Hnd } else { KvLayout::Nhd },
                num_tokens: shape.3,
                k_scale: if format.is_scaled() { k_scale } else { 0.0 },
                gaps,
                seed,
            }
        })
}

/// An append's outputs of keys or of values.
struct Written {
    cache: Image,
    scales: Option<Image>,
}

/// The caches of a case, and what is beside them.
pub struct Caches<'m> {
    rows: [Resident<'m>; 2],
    scales: [Option<Resident<'m>>; 2],
    zeros: [Option<Resident<'m>>; 2],
}

impl Caches<'_> {
    /// The append of these tokens.
    pub fn append(
        &self,
        case: &Case,
        [key, value]: [Tensor; 2],
        slot_mapping: Tensor,
    ) -> AppendArgs {
        let tensors = |all: &[Option<Resident<'_>>; 2]| {
            all.each_ref().map(|one| one.as_ref().map(Resident::tensor))
        };
        let ([k_scales, v_scales], [k_zero_points, v_zero_points]) =
            (tensors(&self.scales), tensors(&self.zeros));
        AppendArgs {
            key,
            value,
            k_cache: self.rows[0].tensor(),
            v_cache: self.rows[1].tensor(),
            layout: case.layout,
            kv_dtype: case.as_bytes.then_some(case.element),
            form: case.form,
            slot_mapping,
            k_scale: case.k_scale,
            v_scale: case.k_scale,
            k_scales,
            v_scales,
            k_zero_points,
            v_zero_points,
        }
    }

    /// Whether others hold the same bytes.
    pub fn same_as(&self, other: &Caches<'_>, element: DType) -> Result<(), String> {
        for side in [0, 1] {
            same(
                &self.rows[side].current(),
                &other.rows[side].current(),
                element,
            )?;
            if let (Some(scales), Some(want)) = (&self.scales[side], &other.scales[side]) {
                let want = want.current();
                same(&scales.current(), &want, want.view.dtype)?;
            }
        }
        Ok(())
    }
}

impl Case {
    /// Caches to which nothing was appended yet.
    pub fn caches<'m>(&self, memory: &'m dyn Memory) -> Caches<'m> {
        let resident = |image| Resident::new(memory, image);
        Caches {
            rows: [0, 1].map(|side| resident(self.cache(side))),
            scales: [0, 1].map(|side| self.scales(side).map(resident)),
            zeros: [0, 1].map(|side| {
                (self.form == CacheForm::ChannelZeroPoints)
                    .then(|| resident(self.channels(side, 1)))
            }),
        }
    }

    /// The type of the elements.
    pub fn element(&self) -> DType {
        self.element
    }

    /// The slot of each token: no two alike, some negative.
    fn slots(&self) -> Vec<i64> {
        let free = shuffled(self.seed, (self.num_pages * self.page_size) as usize);
        let mut free = free.into_iter();
        (0..self.num_tokens as u64)
            .map(|token| match mix(self.seed ^ token) % 5 {
                0 => -1,
                _ => free.next().map_or(-2, i64::from),
            })
            .collect()
    }

    fn hash(&self, side: usize, at: [i64; 3]) -> u64 {
        let start = mix(self.seed ^ (side as u64 + 1) << 32);
        at.iter().fold(start, |hash, &i| mix(hash ^ i as u64))
    }

    /// Mostly ordinary numbers, rows of zeros, and now and then what is hard to round.
    fn source_bits(&self, side: usize, at: [i64; 3]) -> u64 {
        let hash = self.hash(side, at);
        let special = [f64::NAN, f64::INFINITY, -0.0, 1e-12, -3e4];
        let of_row = self.hash(side, [at[0], at[1], -1]);
        let value = match (of_row % 6, hash % 97) {
            (0, _) => 0.0,
            (1, pick) if pick < 5 => special[pick as usize],
            // Halves of small numbers: ties.
            (2, _) => f64::from((hash >> 40) as i8) * 0.5,
            _ => normal(hash) * 3.0,
        };
        encode(self.source, value)
    }

    /// A row as it is stored: divided by the scale of the cache in float32.
    fn row(&self, side: usize, token: i64, head: i64) -> Vec<f32> {
        let k_scale = if self.k_scale == 0.0 {
            1.0
        } else {
            self.k_scale
        };
        (0..self.dims[side])
            .map(|d| {
                let bits = self.source_bits(side, [token, head, d]);
                decode(self.source, bits) as f32 / k_scale
            })
            .collect()
    }

    fn channel(&self, side: usize, head: i64, d: i64) -> [f32; 2] {
        let draw = |n| uniform(self.hash(side + 2, [head, d, n])) as f32;
        [0.02 + 0.3 * draw(0), 4.0 * draw(1) - 2.0]
    }

    /// The scale that goes with an element of a row, and the zero point.
    fn stored(&self, side: usize, row: &[f32], head: i64, d: usize) -> Stored {
        let largest = |part: &[f32]| {
            let numbers = part.iter().filter(|x| !x.is_nan());
            numbers.fold(0f32, |max, x| if x.abs() > max { x.abs() } else { max })
        };
        let [channel, zero] = self.channel(side, head, d as i64);
        let most = match self.element {
            DType::I8 => 127.0f32,
            _ => 448.0,
        };
        let scale = match self.form {
            CacheForm::Plain | CacheForm::PackedKeys => 1.0,
            CacheForm::TokenHeadScales => f64::from((largest(row) / most).max(1e-6)),
            CacheForm::ChannelScales | CacheForm::ChannelZeroPoints => channel.into(),
            CacheForm::Nvfp4 => {
                let block = &row[d / BLOCK * BLOCK..][..BLOCK];
                rounded(DType::F8E4M3, (largest(block) / 6.0).into())
            }
        };
        Stored {
            form: self.form,
            element: self.element,
            scale,
            zero: match self.form {
                CacheForm::ChannelZeroPoints => zero.into(),
                _ => 0.0,
            },
        }
    }

    /// The bits of an element; its quotients are float32 numbers.
    fn bits(&self, stored: &Stored, x: f32) -> u64 {
        let code = match self.form {
            CacheForm::ChannelZeroPoints => x / stored.scale as f32 + stored.zero as f32,
            _ => x / stored.scale as f32,
        };
        let small = Stored {
            scale: 1.0,
            zero: 0.0,
            ..*stored
        };
        match self.element {
            DType::I8 | DType::I4x2 | DType::F4E2M1x2 if code.is_nan() => 0,
            _ if self.form == CacheForm::Nvfp4 && stored.scale == 0.0 => 0,
            _ => small.encode(code.into()),
        }
    }

    /// Index of an element in the cache, and which part of its byte it is.
    fn place(&self, side: usize, [page, slot, head, d]: [i64; 4]) -> (Vec<i64>, i64) {
        if self.form == CacheForm::PackedKeys {
            let x = 16 / self.element.size() as i64;
            return match side {
                0 => (vec![page, head, d / x, slot, d % x], 0),
                _ => (vec![page, head, d, slot], 0),
            };
        }
        let lanes = i64::from(self.element.lanes());
        let at = self.by_layout([page, slot, head, d / lanes]);
        (at.to_vec(), d % lanes)
    }

    fn by_layout(&self, [page, slot, head, last]: [i64; 4]) -> [i64; 4] {
        match self.layout {
            KvLayout::Nhd => [page, slot, head, last],
            KvLayout::Hnd => [page, head, slot, last],
        }
    }

    fn cache(&self, side: usize) -> Image {
        let dtype = if self.as_bytes {
            DType::U8
        } else {
            self.element
        };
        let [a, b, c, lead] = self.gaps;
        let (pages, tokens, heads, dim) =
            (self.num_pages, self.page_size, self.heads, self.dims[side]);
        let view = match (self.form, side) {
            (CacheForm::PackedKeys, 0) => {
                let x = 16 / self.element.size() as i64;
                View::gapped(
                    dtype,
                    &[pages, heads, dim / x, tokens, x],
                    &[a, b, c, 0, 0],
                    lead,
                )
            }
            (CacheForm::PackedKeys, _) => {
                View::gapped(dtype, &[pages, heads, dim, tokens], &[a, b, c, 0], lead)
            }
            _ => {
                let elements = dim / i64::from(self.element.lanes());
                let shape = self.by_layout([pages, tokens, heads, elements]);
                View::gapped(dtype, &shape, &[a, b, c, 0], lead)
            }
        };
        Image::poisoned(view)
    }

    /// Scales before the append: poison where it computes them.
    fn scales(&self, side: usize) -> Option<Image> {
        let [a, b, c, lead] = self.gaps;
        match self.form {
            CacheForm::Plain | CacheForm::PackedKeys => None,
            CacheForm::TokenHeadScales => {
                let shape = [self.num_pages, self.page_size, self.heads, 1];
                let mut view = View::gapped(DType::F32, &shape, &[a, b, c, 0], lead);
                view.shape.pop();
                view.strides.pop();
                Some(Image::poisoned(view))
            }
            CacheForm::Nvfp4 => {
                let blocks = self.dims[side] / BLOCK as i64;
                let shape = self.by_layout([self.num_pages, self.page_size, self.heads, blocks]);
                let view = View::gapped(DType::F8E4M3, &shape, &[a, b, c, 0], lead);
                Some(Image::poisoned(view))
            }
            CacheForm::ChannelScales | CacheForm::ChannelZeroPoints => Some(self.channels(side, 0)),
        }
    }

    /// Scales or zero points of a head's elements.
    fn channels(&self, side: usize, which: usize) -> Image {
        let shape = [self.heads, self.dims[side]];
        let mut image = Image::poisoned(View::gapped(DType::F32, &shape, &[self.gaps[0], 0], 0));
        for_each_index(&shape, |at| {
            let value = self.channel(side, at[0], at[1])[which];
            image.put(at, value.to_bits().into());
        });
        image
    }

    /// What an append writes.
    fn expected(&self, side: usize) -> Written {
        let mut written = Written {
            cache: self.cache(side),
            scales: self.scales(side),
        };
        for (token, slot) in (0..).zip(self.slots()).filter(|&(_, slot)| slot >= 0) {
            let (page, slot) = (slot / self.page_size, slot % self.page_size);
            for head in 0..self.heads {
                let row = self.row(side, token, head);
                for (d, &x) in row.iter().enumerate() {
                    let stored = self.stored(side, &row, head, d);
                    let bits = match self.element == self.source {
                        true => self.source_bits(side, [token, head, d as i64]),
                        false => self.bits(&stored, x),
                    };
                    let (at, part) = self.place(side, [page, slot, head, d as i64]);
                    let bits = match self.element.lanes() {
                        1 => bits,
                        _ => {
                            let mask = 15 << (4 * part);
                            written.cache.bits(&at) & !mask | bits << (4 * part)
                        }
                    };
                    written.cache.put(&at, bits);
                    let scales = written.scales.as_mut();
                    match (self.form, scales) {
                        (CacheForm::TokenHeadScales, Some(scales)) => {
                            let bits = encode(DType::F32, stored.scale);
                            scales.put(&[page, slot, head], bits);
                        }
                        (CacheForm::Nvfp4, Some(scales)) => {
                            let at = self.by_layout([page, slot, head, (d / BLOCK) as i64]);
                            scales.put(&at, encode(DType::F8E4M3, stored.scale));
                        }
                        _ => {}
                    }
                }
            }
        }
        written
    }

    fn source_image(&self, side: usize) -> Image {
        let shape = [self.num_tokens, self.heads, self.dims[side]];
        let gaps = [self.gaps[1], self.gaps[2], 0];
        let mut image = Image::poisoned(View::gapped(self.source, &shape, &gaps, 0));
        for_each_index(&shape, |at| {
            image.put(at, self.source_bits(side, [at[0], at[1], at[2]]));
        });
        image
    }

    /// Appends, compares, gathers, compares.
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let resident = |image| Resident::new(memory, image);
        let sources = [0, 1].map(|side| resident(self.source_image(side)));
        let caches = self.caches(memory);
        let slots = self.slots();
        let bits = slots.iter().map(|&slot| slot as u64);
        let slot_mapping = resident(Image::of_bits(DType::I64, &[self.num_tokens], bits));
        let rows = sources.each_ref().map(Resident::tensor);
        let input = caches.append(self, rows, slot_mapping.tensor());
        let failed = |error: folio::error::Error| error.to_string();
        session.append(&input, Stream::default()).map_err(failed)?;
        for side in [0, 1] {
            let want = self.expected(side);
            same(&caches.rows[side].current(), &want.cache, self.element)?;
            if let (Some(scales), Some(want)) = (&caches.scales[side], &want.scales) {
                same(&scales.current(), want, want.view.dtype)?;
            }
        }
        self.check_gather(session, memory, &input)
    }

    /// Gathers the whole cache as one request, and compares the rows of tokens that were appended.
    fn check_gather(
        &self,
        session: &dyn Session,
        memory: &dyn Memory,
        append: &AppendArgs,
    ) -> Result<(), String> {
        let resident = |image| Resident::new(memory, image);
        let count = self.num_pages * self.page_size;
        let rows = [0, 1].map(|side| {
            let shape = [count, self.heads, self.dims[side]];
            let gaps = [self.gaps[0], self.gaps[3], 0];
            resident(Image::poisoned(View::gapped(self.rows, &shape, &gaps, 0)))
        });
        let ids: Vec<i32> = (0..self.num_pages as i32).collect();
        let ends = resident(Image::of_i32(&[2], &[0, count as i32]));
        let table = resident(Image::of_i32(&[1, self.num_pages], &ids));
        let input = GatherArgs {
            key: rows[0].tensor(),
            value: rows[1].tensor(),
            k_cache: append.k_cache,
            v_cache: append.v_cache,
            layout: append.layout,
            form: append.form,
            kv_dtype: append.kv_dtype.or(append
                .k_cache
                .dtype()
                .may_be_bytes()
                .then_some(self.element)),
            requests: GatheredRequests {
                cu_seq_lens: ends.tensor(),
                seq_starts: None,
                pages: RecordPages::Table(table.tensor()),
            },
            k_scale: append.k_scale,
            v_scale: append.v_scale,
            k_scales: append.k_scales,
            v_scales: append.v_scales,
            k_zero_points: append.k_zero_points,
            v_zero_points: append.v_zero_points,
        };
        let failed = |error: folio::error::Error| error.to_string();
        session.gather(&input, Stream::default()).map_err(failed)?;
        let k_scale = if self.k_scale == 0.0 {
            1.0
        } else {
            f64::from(self.k_scale)
        };
        for side in [0, 1] {
            let got = rows[side].current();
            for (token, slot) in (0..).zip(self.slots()).filter(|&(_, slot)| slot >= 0) {
                for head in 0..self.heads {
                    let row = self.row(side, token, head);
                    for (d, &x) in row.iter().enumerate() {
                        let stored = self.stored(side, &row, head, d);
                        let code = match self.element == self.source {
                            true => self.source_bits(side, [token, head, d as i64]),
                            false => self.bits(&stored, x),
                        };
                        let want = stored.decode(code) * k_scale;
                        let is = got.value(&[slot, head, d as i64]);
                        // Three float32 operations: a difference, a product of scales, a product.
                        let (a, b) = (want * (1.0 - 4e-7), want * (1.0 + 4e-7));
                        let low = rounded(self.rows, a.min(b));
                        let high = rounded(self.rows, a.max(b));
                        let right = low <= is && is <= high || want.is_nan() && is.is_nan();
                        if !right {
                            return Err(format!(
                                "gather of side {side}, slot {slot}, head {head}, element {d}: {is:e}, not {want:e}"
                            ));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Every byte the same, but for the signs of NaN.
fn same(got: &Image, want: &Image, element: DType) -> Result<(), String> {
    let mut normalised = got.clone();
    let mut difference = Ok(());
    for_each_index(&want.view.shape, |at| {
        let (is, wanted) = (got.bits(at), want.bits(at));
        let both_nan = element.lanes() == 1
            && decode(element, is).is_nan()
            && decode(element, wanted).is_nan();
        if is != wanted && !both_nan {
            difference = Err(format!("{at:?} is {is:#x}, not {wanted:#x}"));
        }
        normalised.put(at, wanted);
    });
    difference?;
    match normalised.bytes == want.bytes {
        true => Ok(()),
        false => Err("bytes outside of the elements changed".into()),
    }
}
