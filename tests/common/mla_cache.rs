//! Appends to caches of latent records and gathers from them, as plain data: what is there, what the operators must
//! write by the formulas of the formats, and the calls. Written a second time, with the codec of the tests.

use super::codec::{decode, encode};
use super::door::Session;
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::values::{mix, normal, shuffled};
use folio::api::Stream;
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{LatentCache, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary};

pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// How records are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Plain(DType),
    DsMla,
}

/// A cache.
#[derive(Debug, Clone)]
pub struct Records {
    pub format: Format,
    pub rank: i64,
    pub rope_dim: i64,
    pub num_pages: i64,
    pub page_size: i64,
    /// Rotary elements have a tensor of their own.
    pub split: bool,
    /// The tensors are of bytes and the input says what they hold.
    pub as_bytes: bool,
    /// Elements (`fp8_ds_mla`: words) between pages, between tokens, and before the first.
    pub gaps: [u32; 3],
}

/// A part of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Latent,
    Scale,
    Rope,
}

/// An element of a record: which tensor's memory holds it, and where.
pub struct Cell {
    pub image: usize,
    pub byte: usize,
    pub dtype: DType,
}

impl Records {
    fn element(&self) -> DType {
        match self.format {
            Format::Plain(dtype) => dtype,
            Format::DsMla => DType::F8E4M3,
        }
    }

    /// The memory of the cache's tensors, all of it poisoned.
    pub fn images(&self) -> Vec<Image> {
        let ds_mla = self.format == Format::DsMla;
        let dtype = if ds_mla || self.as_bytes {
            DType::U8
        } else {
            self.element()
        };
        let unit = if ds_mla { 4 } else { 1 };
        let [page, token, lead] = self.gaps.map(|gap| gap * unit);
        let image = |dim| {
            let shape = [self.num_pages, self.page_size, dim];
            Image::poisoned(View::gapped(dtype, &shape, &[page, token, 0], lead))
        };
        match (ds_mla, self.split) {
            (true, _) => vec![image(656)],
            (_, false) => vec![image(self.rank + self.rope_dim)],
            (_, true) => vec![image(self.rank), image(self.rope_dim)],
        }
    }

    pub fn stated(&self, tensors: &[Resident<'_>]) -> LatentCache {
        LatentCache {
            kv: tensors[0].tensor(),
            kv_rope: tensors.get(1).map(Resident::tensor),
            kv_dtype: self.as_bytes.then_some(self.element()),
            is_ds_mla: self.format == Format::DsMla,
        }
    }

    /// Element `d` of a part of the record in `slot`.
    pub fn cell(&self, images: &[Image], part: Part, slot: i64, d: i64) -> Cell {
        let own = self.split && part == Part::Rope;
        let (image, dtype, byte) = match (self.format, part) {
            (Format::DsMla, Part::Latent) => (0, DType::F8E4M3, d),
            (Format::DsMla, Part::Scale) => (0, DType::F32, 512 + 4 * d),
            (Format::DsMla, Part::Rope) => (0, DType::BF16, 528 + 2 * d),
            (Format::Plain(dtype), Part::Rope) if !own => {
                (0, dtype, (self.rank + d) * dtype.size() as i64)
            }
            (Format::Plain(dtype), _) => (usize::from(own), dtype, d * dtype.size() as i64),
        };
        let view = &images[image].view;
        let (page, token) = (slot / self.page_size, slot % self.page_size);
        let row = view.lead as i64 + page * view.strides[0] + token * view.strides[1];
        Cell {
            image,
            byte: (row * view.dtype.size() as i64 + byte) as usize,
            dtype,
        }
    }

    fn num_slots(&self) -> i64 {
        self.num_pages * self.page_size
    }
}

impl Cell {
    fn bits(&self, images: &[Image]) -> u64 {
        let mut bits = [0; 8];
        let size = self.dtype.size();
        bits[..size].copy_from_slice(&images[self.image].bytes[self.byte..self.byte + size]);
        u64::from_le_bytes(bits)
    }

    fn put(&self, images: &mut [Image], bits: u64) {
        let size = self.dtype.size();
        let bytes = &mut images[self.image].bytes[self.byte..self.byte + size];
        bytes.copy_from_slice(&bits.to_le_bytes()[..size]);
    }
}

/// A NaN that was converted may be any; everything else must be the same to the bit.
fn same(dtype: DType, a: u64, b: u64) -> bool {
    a == b || decode(dtype, a).is_nan() && decode(dtype, b).is_nan()
}

/// What RoPE is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    pub is_interleaved: bool,
    pub f32_table: bool,
    pub wide_positions: bool,
    /// Rotated rows are wanted, in place or not.
    pub rope_out: Option<bool>,
    /// Heads of queries, and whether they are rotated in place.
    pub queries: Option<(i64, bool)>,
}

pub const MAX_POSITION: i64 = 37;

/// One append.
#[derive(Debug, Clone)]
pub struct MlaAppend {
    pub source: DType,
    pub records: Records,
    pub num_tokens: i64,
    /// Source rows without a slot.
    pub padded_rows: i64,
    /// Source tensors have a dimension of one in the middle.
    pub middle: bool,
    pub wide_slots: bool,
    pub k_scale: f32,
    pub rotation: Option<Rotation>,
    /// Between rows, and before the first.
    pub gaps: [u32; 2],
    pub seed: u64,
}

/// What an append writes.
#[derive(Debug, Clone, PartialEq)]
pub struct Appended {
    pub caches: Vec<Image>,
    pub rope_out: Option<Image>,
    pub q_out: Option<Image>,
}

/// Rows of tokens.
#[derive(Clone, Copy)]
enum Of {
    Latent = 1,
    Rope,
    Query,
}

impl MlaAppend {
    /// The slot of each token: no two alike, some negative.
    pub fn slots(&self) -> Vec<i64> {
        let free = shuffled(self.seed, self.records.num_slots() as usize);
        let mut free = free.into_iter();
        let draw = |token| match mix(self.seed ^ token) % 5 {
            0 => Some(-1 - (token as i64 % 3)),
            _ => free.next().map(i64::from),
        };
        // Tokens that find no slot any more are skipped too.
        let slots = (0..self.num_tokens as u64).map(draw);
        slots.map(|slot| slot.unwrap_or(-1)).collect()
    }

    fn position(&self, token: i64) -> i64 {
        (mix(self.seed ^ token as u64 ^ 77) % MAX_POSITION as u64) as i64
    }

    /// Bits of a source element: what is hard to round; and for RoPE numbers whose products and sums are exact.
    fn bits(&self, of: Of, token: i64, head: i64, d: i64) -> u64 {
        let start = mix(self.seed ^ (of as u64) << 32);
        let hash = [token, head, d]
            .iter()
            .fold(start, |hash, &i| mix(hash ^ i as u64));
        if self.rotation.is_some() && !matches!(of, Of::Latent) {
            return encode(self.source, f64::from((hash >> 32) as i8) * 0.125);
        }
        let special = [f64::NAN, f64::INFINITY, -0.0, 1e-6, -1e30, 448.0, 1e-42];
        let value = match hash % 200 {
            pick if pick < special.len() as u64 => special[pick as usize],
            // Halfway between fp8 values: ties.
            10..50 => f64::from((hash >> 32) as u8) * 0.0625,
            _ => normal(hash) * 3.0,
        };
        // Some tokens are zero, and their scale is the smallest.
        let value = if mix(self.seed ^ token as u64).is_multiple_of(11) {
            0.0
        } else {
            value
        };
        encode(self.source, value)
    }

    /// Cosine and sine of a pair: multiples of 1/4.
    fn angle(&self, position: i64, at: i64) -> f64 {
        let hash = mix(self.seed ^ (position as u64) << 20 ^ at as u64);
        (hash % 9) as f64 * 0.25 - 1.0
    }

    /// Bits of a rotary element, rotated where that is asked for.
    fn rope(&self, of: Of, token: i64, head: i64, d: i64) -> u64 {
        let Some(rotation) = &self.rotation else {
            return self.bits(of, token, head, d);
        };
        let pairs = self.records.rope_dim / 2;
        let (pair, is_second, other) = match rotation.is_interleaved {
            true => (d / 2, d % 2 == 1, d ^ 1),
            false => (d % pairs, d >= pairs, (d + pairs) % self.records.rope_dim),
        };
        let value = |d| decode(self.source, self.bits(of, token, head, d));
        let position = self.position(token);
        let (cos, sin) = (
            self.angle(position, pair),
            self.angle(position, pairs + pair),
        );
        let sign = if is_second { 1.0 } else { -1.0 };
        encode(self.source, value(d) * cos + sign * value(other) * sin)
    }

    fn rows(&self, of: Of) -> Image {
        let rows = self.num_tokens + self.padded_rows;
        let (dim, heads) = match of {
            Of::Latent => (self.records.rank, self.middle.then_some(1)),
            Of::Rope => (self.records.rope_dim, self.middle.then_some(1)),
            Of::Query => (
                self.records.rope_dim,
                self.rotation.and_then(|r| r.queries).map(|q| q.0),
            ),
        };
        let shape: Vec<i64> = [Some(rows), heads, Some(dim)]
            .into_iter()
            .flatten()
            .collect();
        let mut gaps = vec![0; shape.len()];
        gaps[0] = self.gaps[0];
        let mut image = Image::poisoned(View::gapped(self.source, &shape, &gaps, self.gaps[1]));
        self.fill(&mut image, |token, head, d| self.bits(of, token, head, d));
        image
    }

    /// Writes the rows of tokens that have a slot number, whatever it is.
    fn fill(&self, image: &mut Image, bits: impl Fn(i64, i64, i64) -> u64) {
        let shape = image.view.shape.clone();
        for_each_index(&[&[self.num_tokens], &shape[1..]].concat(), |at| {
            let head = if at.len() == 3 { at[1] } else { 0 };
            image.put(at, bits(at[0], head, at[at.len() - 1]));
        });
    }

    fn table(&self) -> Image {
        let f32_table = self.rotation.is_some_and(|rotation| rotation.f32_table);
        let dtype = if f32_table { DType::F32 } else { self.source };
        let shape = [MAX_POSITION, self.records.rope_dim];
        let mut image = Image::poisoned(View::gapped(dtype, &shape, &[self.gaps[0], 0], 0));
        for_each_index(&shape, |at| {
            image.put(at, encode(dtype, self.angle(at[0], at[1])));
        });
        image
    }

    fn integers(values: impl Iterator<Item = i64>, count: i64, wide: bool) -> Image {
        let dtype = if wide { DType::I64 } else { DType::I32 };
        Image::of_bits(dtype, &[count], values.map(|value| value as u64))
    }

    /// Every element of the cache that is written, and its bits.
    fn cells(&self, images: &[Image]) -> Vec<(Cell, u64)> {
        let mut cells = Vec::new();
        for (token, slot) in (0..).zip(self.slots()).filter(|&(_, slot)| slot >= 0) {
            let mut put =
                |part, d, bits| cells.push((self.records.cell(images, part, slot, d), bits));
            let latent: Vec<u64> = (0..self.records.rank)
                .map(|d| self.bits(Of::Latent, token, 0, d))
                .collect();
            match self.records.format {
                Format::Plain(dtype) => {
                    for (d, &bits) in (0..).zip(&latent) {
                        put(Part::Latent, d, self.stored(dtype, bits));
                    }
                }
                Format::DsMla => {
                    for (n, block) in (0..).zip(latent.chunks(128)) {
                        let scale = block_scale(self.source, block);
                        put(Part::Scale, n, scale.to_bits().into());
                        for (d, &bits) in (128 * n..).zip(block) {
                            let value = decode(self.source, bits) as f32 / scale;
                            put(Part::Latent, d, encode(DType::F8E4M3, value.into()));
                        }
                    }
                }
            }
            for d in 0..self.records.rope_dim {
                let bits = self.rope(Of::Rope, token, 0, d);
                let dtype = match self.records.format {
                    Format::Plain(dtype) => dtype,
                    Format::DsMla => DType::BF16,
                };
                put(Part::Rope, d, self.stored(dtype, bits));
            }
        }
        cells
    }

    /// What an element becomes without a scale of its own.
    fn stored(&self, dtype: DType, bits: u64) -> u64 {
        if dtype == self.source {
            return bits;
        }
        let scale = match self.k_scale {
            scale if scale == 0.0 || !dtype.is_fp8() => 1.0,
            scale => scale,
        };
        let value = decode(self.source, bits) as f32 / scale;
        encode(dtype, value.into())
    }

    /// Rotated rows in the memory that gets them.
    fn expected_rows(&self, of: Of) -> Image {
        let in_place = match (of, self.rotation) {
            (Of::Query, Some(rotation)) => rotation.queries.is_some_and(|q| q.1),
            (_, Some(rotation)) => rotation.rope_out == Some(true),
            _ => false,
        };
        let mut image = if in_place {
            self.rows(of)
        } else {
            self.blank(of)
        };
        self.fill(&mut image, |token, head, d| self.rope(of, token, head, d));
        image
    }

    fn blank(&self, of: Of) -> Image {
        Image::poisoned(self.rows(of).view)
    }

    pub fn run(&self, session: &dyn Session, memory: &dyn Memory) -> Result<Appended> {
        let resident = |image| Resident::new(memory, image);
        let [latent, rope, table] =
            [self.rows(Of::Latent), self.rows(Of::Rope), self.table()].map(resident);
        let caches: Vec<_> = self.records.images().into_iter().map(resident).collect();
        let slots = self.slots();
        let slots = resident(Self::integers(
            slots.into_iter(),
            self.num_tokens,
            self.wide_slots,
        ));
        let wide = self
            .rotation
            .is_some_and(|rotation| rotation.wide_positions);
        let positions = (0..self.num_tokens).map(|token| self.position(token));
        let positions = resident(Self::integers(positions, self.num_tokens, wide));
        let rope_out = self.rotation.and_then(|rotation| rotation.rope_out);
        let queries = self.rotation.and_then(|rotation| rotation.queries);
        let q = queries.map(|_| resident(self.rows(Of::Query)));
        let new_rope = (rope_out == Some(false)).then(|| resident(self.blank(Of::Rope)));
        let new_q = queries
            .filter(|(_, in_place)| !in_place)
            .map(|_| resident(self.blank(Of::Query)));
        let rope_to = rope_out.map(|_| new_rope.as_ref().unwrap_or(&rope));
        let q_to = q.as_ref().map(|q| new_q.as_ref().unwrap_or(q));
        let input = MlaAppendArgs {
            latent: latent.tensor(),
            rope: (self.records.rope_dim > 0).then(|| rope.tensor()),
            cache: self.records.stated(&caches),
            slot_mapping: slots.tensor(),
            k_scale: self.k_scale,
            rotary: self.rotation.map(|rotation| Rotary {
                cos_sin_cache: table.tensor(),
                positions: positions.tensor(),
                is_interleaved: rotation.is_interleaved,
                rope_out: rope_to.map(Resident::tensor),
                q_rope: q.as_ref().map(Resident::tensor),
                q_rope_out: new_q.as_ref().map(Resident::tensor),
            }),
        };
        session.mla_append(&input, Stream::default())?;
        assert!(latent.is_untouched() && slots.is_untouched() && table.is_untouched());
        assert!(rope_out == Some(true) || rope.is_untouched());
        Ok(Appended {
            caches: caches.iter().map(Resident::current).collect(),
            rope_out: rope_to.map(Resident::current),
            q_out: q_to.map(Resident::current),
        })
    }

    /// Whether every element is what the formulas say, and no other byte has changed.
    pub fn check(&self, got: &Appended) -> std::result::Result<(), String> {
        let mut want = self.records.images();
        let mut normalised = got.caches.clone();
        for (cell, bits) in self.cells(&want) {
            let is = cell.bits(&got.caches);
            if !same(cell.dtype, is, bits) {
                let (image, byte, dtype) = (cell.image, cell.byte, cell.dtype);
                return Err(format!(
                    "cache {image}, byte {byte}: {dtype} {is:#x} ({}), not {bits:#x} ({})",
                    decode(dtype, is),
                    decode(dtype, bits)
                ));
            }
            cell.put(&mut want, bits);
            cell.put(&mut normalised, bits);
        }
        if normalised != want {
            return Err("bytes outside of the records changed".into());
        }
        for (name, of, got) in [
            ("rope_out", Of::Rope, &got.rope_out),
            ("q_rope_out", Of::Query, &got.q_out),
        ] {
            if got
                .as_ref()
                .is_some_and(|got| *got != self.expected_rows(of))
            {
                return Err(format!("{name} differs"));
            }
        }
        Ok(())
    }
}

/// `max(max |x| / 448, FLT_MIN)`; NaN counts for nothing.
fn block_scale(dtype: DType, block: &[u64]) -> f32 {
    let magnitudes = block.iter().map(|&bits| decode(dtype, bits).abs() as f32);
    let largest = magnitudes.filter(|x| !x.is_nan()).fold(0f32, f32::max);
    (largest / 448.0).max(f32::MIN_POSITIVE)
}

/// One gather.
#[derive(Debug, Clone)]
pub struct MlaGather {
    pub records: Records,
    pub dst: DType,
    /// Rotary elements have a tensor of their own.
    pub split_dst: bool,
    /// Tokens of each request, and the first of them.
    pub requests: Vec<(i64, i64)>,
    /// Rows before the first request, and after the last.
    pub spare_rows: [i64; 2],
    pub with_starts: bool,
    pub as_table: bool,
    /// Types of cu_seq_lens, seq_starts, kv_indptr and page ids.
    pub integers: [DType; 4],
    pub k_scale: f32,
    pub gap: u32,
    pub seed: u64,
}

impl MlaGather {
    /// The cache with a number in every element.
    fn caches(&self) -> Vec<Image> {
        let mut images = self.records.images();
        let (rank, rope_dim) = (self.records.rank, self.records.rope_dim);
        let ds_mla = self.records.format == Format::DsMla;
        let scales = if ds_mla { rank / 128 } else { 0 };
        for slot in 0..self.records.num_slots() {
            for (part, count) in [
                (Part::Latent, rank),
                (Part::Scale, scales),
                (Part::Rope, rope_dim),
            ] {
                for d in 0..count {
                    let cell = self.records.cell(&images, part, slot, d);
                    let hash =
                        mix(self.seed ^ mix((slot as u64) << 20 ^ (part as u64) << 16 ^ d as u64));
                    let bits = match part {
                        Part::Scale => u64::from((0.01 + (hash % 100) as f32 * 0.037).to_bits()),
                        // All bytes, NaN and infinities too.
                        _ if cell.dtype.is_fp8() => hash & 0xff,
                        _ => encode(cell.dtype, normal(hash)),
                    };
                    cell.put(&mut images, bits);
                }
            }
        }
        images
    }

    fn start(&self, b: usize) -> i64 {
        if self.with_starts {
            self.requests[b].1
        } else {
            0
        }
    }

    /// Pages of each request; those of earlier tokens too.
    fn page_ids(&self) -> Vec<Vec<i32>> {
        let pages = |b: usize| {
            let tokens = self.requests[b].0 + self.start(b);
            let count = (tokens + self.records.page_size - 1) / self.records.page_size;
            let id = |n: i64| {
                (mix(self.seed ^ (b as u64) << 8 ^ n as u64) % self.records.num_pages as u64) as i32
            };
            (0..count).map(id).collect()
        };
        (0..self.requests.len()).map(pages).collect()
    }

    fn ends(&self) -> Vec<i32> {
        let mut ends = vec![self.spare_rows[0] as i32];
        for request in &self.requests {
            ends.push(ends[ends.len() - 1] + request.0 as i32);
        }
        ends
    }

    fn num_rows(&self) -> i64 {
        let ends = self.ends();
        i64::from(ends[ends.len() - 1]) + self.spare_rows[1]
    }

    /// The outputs before the call.
    fn blank(&self) -> Vec<Image> {
        let image = |dim| {
            let view = View::gapped(self.dst, &[self.num_rows(), dim], &[self.gap, 0], 0);
            Image::poisoned(view)
        };
        let (rank, rope_dim) = (self.records.rank, self.records.rope_dim);
        match self.split_dst {
            true => vec![image(rank), image(rope_dim)],
            false => vec![image(rank + rope_dim)],
        }
    }

    /// The outputs after it.
    pub fn expected(&self) -> Vec<Image> {
        let (mut out, caches, ids, ends) =
            (self.blank(), self.caches(), self.page_ids(), self.ends());
        let Records {
            rank,
            rope_dim,
            page_size,
            ..
        } = self.records;
        for (b, request) in self.requests.iter().enumerate() {
            for i in 0..request.0 {
                let token = self.start(b) + i;
                let page = i64::from(ids[b][(token / page_size) as usize]);
                let slot = page * page_size + token % page_size;
                let row = i64::from(ends[b]) + i;
                for d in 0..rank + rope_dim {
                    let (part, at) = if d < rank {
                        (Part::Latent, d)
                    } else {
                        (Part::Rope, d - rank)
                    };
                    let bits = self.loaded(&caches, part, slot, at);
                    match self.split_dst && part == Part::Rope {
                        true => out[1].put(&[row, at], bits),
                        false => out[0].put(&[row, d], bits),
                    }
                }
            }
        }
        out
    }

    fn loaded(&self, caches: &[Image], part: Part, slot: i64, d: i64) -> u64 {
        let cell = self.records.cell(caches, part, slot, d);
        let bits = cell.bits(caches);
        if cell.dtype == self.dst {
            return bits;
        }
        let scale = match (self.records.format, part) {
            (Format::DsMla, Part::Latent) => {
                let scale = self.records.cell(caches, Part::Scale, slot, d / 128);
                f32::from_bits(scale.bits(caches) as u32)
            }
            (Format::Plain(_), _) if self.k_scale != 0.0 => self.k_scale,
            _ => 1.0,
        };
        encode(self.dst, (decode(cell.dtype, bits) as f32 * scale).into())
    }

    pub fn run(&self, session: &dyn Session, memory: &dyn Memory) -> Result<Vec<Image>> {
        let resident = |image| Resident::new(memory, image);
        let caches: Vec<_> = self.caches().into_iter().map(resident).collect();
        let out: Vec<_> = self.blank().into_iter().map(resident).collect();
        let batch = self.requests.len() as i64;
        let [of_ends, of_starts, of_indptr, of_ids] = self.integers;
        let ends = resident(Image::of_integers(of_ends, &[batch + 1], &self.ends()));
        let starts: Vec<i32> = self
            .requests
            .iter()
            .map(|request| request.1 as i32)
            .collect();
        let starts = resident(Image::of_integers(of_starts, &[batch], &starts));
        let ids = self.page_ids();
        let (first, second) = match self.as_table {
            true => (self.table(&ids), None),
            false => {
                let mut indptr = vec![0];
                for ids in &ids {
                    indptr.push(indptr[indptr.len() - 1] + ids.len() as i32);
                }
                let all = ids.concat();
                let indices = Image::of_integers(of_ids, &[all.len() as i64], &all);
                let indptr = Image::of_integers(of_indptr, &[batch + 1], &indptr);
                (indptr, Some(indices))
            }
        };
        let (first, second) = (resident(first), second.map(resident));
        let input = MlaGatherArgs {
            cache: self.records.stated(&caches),
            dst: out[0].tensor(),
            dst_rope: out.get(1).map(Resident::tensor),
            cu_seq_lens: ends.tensor(),
            seq_starts: self.with_starts.then(|| starts.tensor()),
            pages: match &second {
                None => RecordPages::Table(first.tensor()),
                Some(indices) => RecordPages::Csr {
                    indptr: first.tensor(),
                    indices: indices.tensor(),
                },
            },
            k_scale: self.k_scale,
        };
        session.mla_gather(&input, Stream::default())?;
        assert!(caches.iter().all(Resident::is_untouched));
        Ok(out.iter().map(Resident::current).collect())
    }

    /// A block table with room behind the page ids, which no one may look at.
    fn table(&self, ids: &[Vec<i32>]) -> Image {
        let columns = ids.iter().map(Vec::len).max().unwrap_or(0) as i64 + 1;
        let shape = [ids.len() as i64, columns];
        let mut image = Image::poisoned(View::gapped(self.integers[3], &shape, &[self.gap, 0], 0));
        for_each_index(&shape, |at| image.put(at, 2_147_480_000));
        for (b, ids) in (0..).zip(ids) {
            for (n, id) in (0..).zip(ids) {
                image.put(&[b, n], *id as u64);
            }
        }
        image
    }

    /// As [`MlaAppend::check`].
    pub fn check(&self, got: &[Image]) -> std::result::Result<(), String> {
        let want = self.expected();
        for (n, (got, want)) in got.iter().zip(&want).enumerate() {
            let mut normalised = got.clone();
            let mut difference = Ok(());
            for_each_index(&want.view.shape, |at| {
                let (is, wanted) = (got.bits(at), want.bits(at));
                if !same(self.dst, is, wanted) {
                    difference = Err(format!("dst {n}, {at:?} is {is:#x}, not {wanted:#x}"));
                }
                normalised.put(at, wanted);
            });
            difference?;
            if normalised.bytes != want.bytes {
                return Err(format!("dst {n}: bytes outside of its elements changed"));
            }
        }
        Ok(())
    }
}
