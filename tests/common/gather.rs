//! Random gathers of keys and values: every row holds the bits that its token's conversion gives, and nothing else
//! changes.

use super::codec::{decode, encode};
use super::door::Session;
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::values::{mix, normal, uniform};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{CacheForm, GatherArgs, GatheredRequests, KvLayout, RecordPages};

/// A gather.
#[derive(Debug, Clone)]
pub struct Gathering {
    pub cache: DType,
    pub rows: DType,
    /// The caches are tensors of bytes and the input says what they hold.
    pub as_bytes: bool,
    pub heads: i64,
    /// Of keys and of values.
    pub dims: [i64; 2],
    pub page_size: i64,
    pub num_pages: i64,
    pub layout: KvLayout,
    /// Tokens of each request, and the first of them.
    pub requests: Vec<(i32, i32)>,
    pub has_starts: bool,
    /// A block table, not CSR.
    pub as_table: bool,
    pub scale: f32,
    /// Elements of the scale tensors: none, one, one per head.
    pub scales: Option<bool>,
    /// Types of cu_seq_lens, seq_starts, kv_indptr and page ids.
    pub integers: [DType; 4],
    /// After pages, tokens, heads of caches; after rows and heads of rows.
    pub gaps: [u32; 5],
    pub seed: u64,
}

impl Gathering {
    fn start(&self, b: usize) -> i64 {
        match self.has_starts {
            true => self.requests[b].1.into(),
            false => 0,
        }
    }

    /// Pages up to the last token that is asked for.
    fn page_ids(&self, b: usize) -> Vec<i32> {
        let tokens = self.start(b) + i64::from(self.requests[b].0);
        let pages = (tokens + self.page_size - 1) / self.page_size;
        let page = |n: i64| mix(self.seed ^ mix((b as i64 * 1000 + n) as u64));
        (0..pages)
            .map(|n| (page(n) % self.num_pages as u64) as i32)
            .collect()
    }

    /// `cu_seq_lens`; the first rows belong to nobody.
    fn ends(&self) -> Vec<i32> {
        let mut ends = vec![1];
        for (tokens, _) in &self.requests {
            ends.push(ends[ends.len() - 1] + tokens);
        }
        ends
    }

    fn bits(&self, side: usize, at: [i64; 4]) -> u64 {
        let start = mix(self.seed ^ (side as u64 + 1) << 32);
        let hash = at.iter().fold(start, |hash, &i| mix(hash ^ i as u64));
        encode(self.cache, normal(hash) * 3.0)
    }

    fn head_scales(&self, side: usize) -> Option<Vec<f32>> {
        let count = if self.scales? { self.heads } else { 1 };
        let scale = |n: i64| uniform(mix(self.seed ^ (side as u64 + 7) << 40 ^ n as u64));
        Some((0..count).map(|n| (0.01 + scale(n)) as f32).collect())
    }

    /// What a row holds of an element of the cache: one float32 product, rounded.
    fn row_bits(&self, side: usize, at: [i64; 4]) -> u64 {
        let value = decode(self.cache, self.bits(side, at)) as f32;
        let value = match self.cache.is_fp8() {
            false => value,
            true => {
                let scale = if self.scale == 0.0 { 1.0 } else { self.scale };
                let of_head = match self.head_scales(side) {
                    None => 1.0,
                    Some(all) => all[at[2] as usize % all.len()],
                };
                value * (scale * of_head)
            }
        };
        encode(self.rows, value.into())
    }

    fn cache_image(&self, side: usize) -> Image {
        let dtype = if self.as_bytes { DType::U8 } else { self.cache };
        let inner = match self.layout {
            KvLayout::Nhd => [self.page_size, self.heads],
            KvLayout::Hnd => [self.heads, self.page_size],
        };
        let shape = [self.num_pages, inner[0], inner[1], self.dims[side]];
        let gaps = [self.gaps[0], self.gaps[1], self.gaps[2], 0];
        let mut image = Image::poisoned(View::gapped(dtype, &shape, &gaps, self.gaps[0]));
        for_each_index(&shape, |at| {
            let (token, head) = match self.layout {
                KvLayout::Nhd => (at[1], at[2]),
                KvLayout::Hnd => (at[2], at[1]),
            };
            image.put(at, self.bits(side, [at[0], token, head, at[3]]));
        });
        image
    }

    fn rows_image(&self, side: usize) -> Image {
        let rows = i64::from(self.ends()[self.requests.len()]) + 2;
        let shape = [rows, self.heads, self.dims[side]];
        let gaps = [self.gaps[3], self.gaps[4], 0];
        Image::poisoned(View::gapped(self.rows, &shape, &gaps, self.gaps[3]))
    }

    fn expected(&self, side: usize) -> Image {
        let mut image = self.rows_image(side);
        let ends = self.ends();
        for b in 0..self.requests.len() {
            let ids = self.page_ids(b);
            for row in ends[b]..ends[b + 1] {
                let token = self.start(b) + i64::from(row - ends[b]);
                let page = i64::from(ids[(token / self.page_size) as usize]);
                for_each_index(&[self.heads, self.dims[side]], |at| {
                    let from = [page, token % self.page_size, at[0], at[1]];
                    image.put(&[row.into(), at[0], at[1]], self.row_bits(side, from));
                });
            }
        }
        image
    }

    /// Gathers, and compares every bit.
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let resident = |image| Resident::new(memory, image);
        let list = |dtype: DType, values: &[i32]| {
            resident(Image::of_integers(dtype, &[values.len() as i64], values))
        };
        let [of_ends, of_starts, of_indptr, of_ids] = self.integers;
        let caches = [0, 1].map(|side| resident(self.cache_image(side)));
        let rows = [0, 1].map(|side| resident(self.rows_image(side)));
        let scales = [0, 1].map(|side| {
            let scales = self.head_scales(side)?;
            Some(resident(Image::of_f32(&[scales.len() as i64], &scales)))
        });
        let batch = self.requests.len();
        let starts: Vec<i32> = self.requests.iter().map(|request| request.1).collect();
        let (ends, starts) = (list(of_ends, &self.ends()), list(of_starts, &starts));
        let ids: Vec<Vec<i32>> = (0..batch).map(|b| self.page_ids(b)).collect();
        let mut indptr = vec![0];
        for ids in &ids {
            indptr.push(indptr[indptr.len() - 1] + ids.len() as i32);
        }
        let (indptr, indices) = (list(of_indptr, &indptr), list(of_ids, &ids.concat()));
        let columns = ids.iter().map(Vec::len).max().unwrap_or(0) as i64;
        let view = View::gapped(of_ids, &[batch as i64, columns], &[3, 0], 1);
        let mut table = Image::poisoned(view);
        for (b, ids) in (0..).zip(&ids) {
            for (column, id) in (0..).zip(ids) {
                table.put(&[b, column], *id as u64);
            }
        }
        let table = resident(table);
        let [k_scales, v_scales] = scales.each_ref().map(|s| s.as_ref().map(Resident::tensor));
        let input = GatherArgs {
            key: rows[0].tensor(),
            value: rows[1].tensor(),
            k_cache: caches[0].tensor(),
            v_cache: caches[1].tensor(),
            layout: self.layout,
            kv_dtype: self.as_bytes.then_some(self.cache),
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            requests: GatheredRequests {
                cu_seq_lens: ends.tensor(),
                seq_starts: self.has_starts.then(|| starts.tensor()),
                pages: match self.as_table {
                    true => RecordPages::Table(table.tensor()),
                    false => RecordPages::Csr {
                        indptr: indptr.tensor(),
                        indices: indices.tensor(),
                    },
                },
            },
            k_scale: self.scale,
            v_scale: self.scale,
            k_scales,
            v_scales,
        };
        session
            .gather(&input, Stream::default())
            .map_err(|error| error.to_string())?;
        for (side, name) in [(0, "key"), (1, "value")] {
            if rows[side].current() != self.expected(side) {
                return Err(format!("{name}: other bits than those of the tokens"));
            }
            if !caches[side].is_untouched() {
                return Err(format!("{name}: the cache was written"));
            }
        }
        Ok(())
    }
}
