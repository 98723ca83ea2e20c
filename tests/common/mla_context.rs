//! MLA over a cached context as plain data: new tokens, a cache of records, weights; what attention over all of it comes
//! to in float64, where only what is stored between the steps is rounded; and how near a result must be.

use super::codec::{decode, encode, rounded, unit_roundoff};
use super::dense::sum_of;
use super::door::{ContextHandle, Session};
use super::instance::for_each_index;
use super::memory::{HostMemory, Image, Memory, Resident, View, WorkspaceMemory};
use super::pages::{page_table, prefix_sums};
use super::values::{mix, normal, shuffled};
use folio::api::{BatchInput, Stream};
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{
    CacheFormat, ChunkRows, LatentCache, LogBase, MlaContextArgs, MlaContextDesc, Unpacking,
    UpProjectArgs, UpProjection,
};

/// One problem.
#[derive(Debug, Clone)]
pub struct Case {
    pub dtype: DType,
    pub cache: CacheFormat,
    /// Latent and rotary parts of the records have tensors of their own.
    pub split_cache: bool,
    pub heads: i64,
    pub rank: i64,
    pub nope: i64,
    pub rope: i64,
    pub value: i64,
    pub page_size: i64,
    /// The page table is CSR, not a block table.
    pub csr: bool,
    /// Lengths, offsets and page ids are int64.
    pub wide_indices: bool,
    /// New tokens and context of each request.
    pub lens: Vec<(u32, u32)>,
    pub chunk_tokens: u32,
    pub in_steps: bool,
    /// Between the steps chunks are unpacked by `folio_mla_up_project`, as `run` does it, not on the host.
    pub up_project: bool,
    pub graph: bool,
    pub lse: Option<LogBase>,
    pub lse_dtype: DType,
    pub sm_scale: f32,
    pub k_scale: f32,
    /// Rows of q and o beyond the batch.
    pub padded_rows: i64,
    pub seed: u64,
}

/// What a number is of.
#[derive(Clone, Copy)]
enum Of {
    Query,
    Key,
    Rope,
    Value,
    Latent,
    Scale,
    KeyWeight,
    ValueWeight,
}

impl Case {
    /// Two heads over pages of 4, in fp32; to be changed field by field. `lens` are (new tokens, context).
    pub fn plain(lens: &[(u32, u32)]) -> Case {
        Case {
            dtype: DType::F32,
            cache: DType::F32.into(),
            split_cache: false,
            heads: 2,
            rank: 32,
            nope: 16,
            rope: 8,
            value: 24,
            page_size: 4,
            csr: false,
            wide_indices: false,
            lens: lens.to_vec(),
            chunk_tokens: 64,
            in_steps: false,
            up_project: false,
            graph: false,
            lse: Some(LogBase::E),
            lse_dtype: DType::F32,
            sm_scale: 0.0,
            k_scale: 0.0,
            padded_rows: 2,
            seed: 1,
        }
    }

    /// The same in another type, and over records of it.
    pub fn of(self, dtype: DType) -> Case {
        Case {
            dtype,
            cache: dtype.into(),
            ..self
        }
    }

    /// The same over other records.
    pub fn over(self, cache: CacheFormat) -> Case {
        match cache == CacheFormat::DS_MLA {
            false => Case { cache, ..self },
            true => Case {
                cache,
                rank: 512,
                rope: 64,
                ..self
            },
        }
    }

    pub fn desc(&self) -> MlaContextDesc {
        let most = |f: fn(&(u32, u32)) -> u32| self.lens.iter().map(f).max().unwrap_or(0).max(1);
        MlaContextDesc {
            dtype: self.dtype,
            cache: self.cache,
            num_heads: self.heads as u32,
            kv_lora_rank: self.rank as u32,
            qk_nope_head_dim: self.nope as u32,
            qk_rope_head_dim: self.rope as u32,
            v_head_dim: self.value as u32,
            page_size: self.page_size as u32,
            max_batch_size: (self.lens.len() as u32).max(1),
            max_qo_len: most(|r| r.0),
            max_num_tokens: (self.num_tokens() as u32).max(1),
            max_kv_len: most(|r| r.0 + r.1),
            max_num_pages: 0,
            max_chunk_tokens: self.chunk_tokens,
            in_steps: self.in_steps,
            graph: self.graph,
        }
    }

    pub fn num_tokens(&self) -> i64 {
        self.lens.iter().map(|r| i64::from(r.0)).sum()
    }

    /// Chunks are unpacked in float64.
    fn unpacks_on_the_host(&self) -> bool {
        self.in_steps && !self.up_project
    }

    /// The heads that are looked at: the formula takes its time, so of many it is some, the first and the last among them.
    fn sampled_heads(&self) -> Vec<i64> {
        match self.heads {
            heads @ ..=4 => (0..heads).collect(),
            heads => vec![0, 3, heads / 2, heads - 1],
        }
    }

    fn number(&self, of: Of, index: [i64; 3]) -> f64 {
        let start = mix(self.seed ^ (of as u64) << 40);
        let hash = index.iter().fold(start, |hash, &i| mix(hash ^ i as u64));
        normal(hash)
    }

    /// A number as it is stored in the type of the problem.
    fn stored(&self, of: Of, index: [i64; 3]) -> f64 {
        let spread = match of {
            Of::KeyWeight | Of::ValueWeight => 1.0 / (self.rank as f64).sqrt(),
            _ => 1.0,
        };
        rounded(self.dtype, spread * self.number(of, index))
    }

    /// Element `d` of the record of a token: the bits that are stored, and the value that the gather makes of them. Those
    /// from `rank` on are rotary.
    fn record(&self, b: usize, j: i64, d: i64) -> (u64, f64) {
        let number = self.number(Of::Latent, [b as i64, j, d]);
        let element = match (self.cache == CacheFormat::DS_MLA, d < self.rank) {
            (true, true) => DType::F8E4M3,
            (true, false) => DType::BF16,
            _ => self.cache.element,
        };
        let scale = match (self.cache == CacheFormat::DS_MLA, d < self.rank) {
            (true, true) => f64::from(self.block_scale(b, j, d / 128)),
            (false, _) if element.is_fp8() && self.k_scale != 0.0 => self.k_scale.into(),
            _ => 1.0,
        };
        let bits = encode(element, number);
        let value = (decode(element, bits) as f32 * scale as f32) as f64;
        (bits, rounded(self.dtype, value))
    }

    fn block_scale(&self, b: usize, j: i64, block: i64) -> f32 {
        let number = self.number(Of::Scale, [b as i64, j, block]);
        (0.5 + number.abs() / 4.0) as f32
    }
}

/// The tensors of a case in memory.
pub struct Data<'m> {
    case: Case,
    memory: &'m dyn Memory,
    q: Resident<'m>,
    k_nope: Resident<'m>,
    k_rope: Resident<'m>,
    v: Resident<'m>,
    cache: Vec<Resident<'m>>,
    weights: [Resident<'m>; 2],
    unpacking: Weights,
    chunk: [Resident<'m>; 4],
    pub o: Resident<'m>,
    pub lse: Option<Resident<'m>>,
    qo_indptr: Resident<'m>,
    kv_len: Resident<'m>,
    indptr: Option<Resident<'m>>,
    ids: Resident<'m>,
}

/// Page ids of every request, shuffled, and the number of pages.
fn pages(case: &Case) -> (Vec<Vec<i32>>, i64) {
    let counts = case
        .lens
        .iter()
        .map(|r| i64::from(r.0 + r.1).div_euclid(case.page_size) + 1);
    let counts: Vec<usize> = counts.map(|n| n as usize).collect();
    let all = counts.iter().sum::<usize>() + 3;
    let ids = shuffled(case.seed, all);
    let mut next = 0;
    let owned = counts.iter().map(|&count| {
        next += count;
        ids[next - count..next].to_vec()
    });
    (owned.collect(), all as i64)
}

impl<'m> Data<'m> {
    pub fn new(memory: &'m dyn Memory, case: &Case) -> Data<'m> {
        let rows = case.num_tokens() + case.padded_rows;
        let (h, tokens) = (case.heads, case.num_tokens());
        let filled = |shape: &[i64], rows: i64, of: Of| {
            let mut image = Image::poisoned(View::compact(case.dtype, shape));
            let mut inner = shape.to_vec();
            inner[0] = rows;
            for_each_index(&inner, |index| {
                let at = [0, 1, 2].map(|n| index.get(n).copied().unwrap_or(0));
                image.put(index, encode(case.dtype, case.stored(of, at)));
            });
            Resident::new(memory, image)
        };
        let empty = |shape: &[i64]| {
            let shape = if case.in_steps { shape } else { &[0] };
            Resident::new(memory, Image::poisoned(View::compact(case.dtype, shape)))
        };
        let context: i64 = case.lens.iter().map(|r| i64::from(r.1)).sum();
        let chunk = match case.chunk_tokens {
            0 => context.max(1),
            stated => stated.into(),
        };
        let (owned, num_pages) = pages(case);
        let kv_lens: Vec<i32> = case.lens.iter().map(|r| (r.0 + r.1) as i32).collect();
        let indices = match case.wide_indices {
            true => DType::I64,
            false => DType::I32,
        };
        let host = |numbers: &[i32]| {
            let image = Image::of_integers(indices, &[numbers.len() as i64], numbers);
            Resident::new(&HostMemory, image)
        };
        let (indptr, ids) = page_table(case.csr, indices, &owned);
        Data {
            q: filled(&[rows, h, case.nope + case.rope], tokens, Of::Query),
            k_nope: filled(&[rows, h, case.nope], tokens, Of::Key),
            k_rope: filled(&[rows, case.rope], tokens, Of::Rope),
            v: filled(&[rows, h, case.value], tokens, Of::Value),
            cache: records(case, &owned, num_pages)
                .into_iter()
                .map(|image| Resident::new(memory, image))
                .collect(),
            weights: [
                filled(&[h, case.nope, case.rank], h, Of::KeyWeight),
                filled(&[h, case.rank, case.value], h, Of::ValueWeight),
            ],
            unpacking: Weights::of(case),
            chunk: [
                empty(&[chunk, case.rank]),
                empty(&[chunk, case.rope]),
                empty(&[chunk, h, case.nope]),
                empty(&[chunk, h, case.value]),
            ],
            o: Resident::new(
                memory,
                Image::poisoned(View::compact(case.dtype, &[rows, h, case.value])),
            ),
            lse: case.lse.map(|_| {
                // As [head, token] in memory.
                let mut view = View::compact(case.lse_dtype, &[h, rows]);
                view.shape.swap(0, 1);
                view.strides.swap(0, 1);
                Resident::new(memory, Image::poisoned(view))
            }),
            qo_indptr: host(&prefix_sums(case.lens.iter().map(|r| r.0 as i32))),
            kv_len: host(&kv_lens),
            indptr: indptr.as_deref().map(host),
            ids: Resident::new(memory, ids),
            case: case.clone(),
            memory,
        }
    }

    /// Makes contexts shorter than those that the cache holds.
    pub fn set_contexts(&mut self, contexts: &[u32]) {
        for (request, &context) in self.case.lens.iter_mut().zip(contexts) {
            request.1 = context;
        }
        let lens: Vec<i32> = self.case.lens.iter().map(|r| (r.0 + r.1) as i32).collect();
        let image = Image::of_i32(&[lens.len() as i64], &lens);
        self.kv_len = Resident::new(&HostMemory, image);
    }

    pub fn batch(&self) -> BatchInput {
        let mut batch = BatchInput {
            qo_indptr: Some(self.qo_indptr.tensor()),
            kv_len: Some(self.kv_len.tensor()),
            ..BatchInput::default()
        };
        match &self.indptr {
            Some(indptr) => {
                batch.kv_indptr = Some(indptr.tensor());
                batch.kv_indices = Some(self.ids.tensor());
            }
            None => batch.block_table = Some(self.ids.tensor()),
        }
        batch
    }

    pub fn args(&self) -> MlaContextArgs {
        let case = &self.case;
        let [w_uk, w_uv] = [0, 1].map(|n| self.weights[n].tensor());
        let chunk = || {
            let [latent, rope, k_nope, v] = [0, 1, 2, 3].map(|n| self.chunk[n].tensor());
            ChunkRows {
                latent,
                rope,
                k_nope,
                v,
            }
        };
        MlaContextArgs {
            q: self.q.tensor(),
            k_nope: self.k_nope.tensor(),
            k_rope: self.k_rope.tensor(),
            v: self.v.tensor(),
            cache: LatentCache {
                kv: self.cache[0].tensor(),
                kv_rope: self.cache.get(1).map(Resident::tensor),
                kv_dtype: (case.cache != CacheFormat::DS_MLA).then_some(case.cache.element),
                is_ds_mla: case.cache == CacheFormat::DS_MLA,
            },
            unpacking: match case.in_steps {
                false => Unpacking::Weights(UpProjection { w_uk, w_uv }),
                true => Unpacking::Caller(chunk()),
            },
            o: self.o.tensor(),
            lse: self.lse.as_ref().map(Resident::tensor),
            lse_base: case.lse.unwrap_or(LogBase::E),
            sm_scale: case.sm_scale,
            k_scale: case.k_scale,
        }
    }

    /// What a caller does between gather and attend, with weights of its own.
    pub fn unpack(&self, rows: i64) {
        let case = &self.case;
        let latent = self.chunk[0].current();
        let (mut keys, mut values) = (self.chunk[2].current(), self.chunk[3].current());
        for row in 0..rows {
            let latent: Vec<f64> = (0..case.rank).map(|l| latent.value(&[row, l])).collect();
            for head in 0..case.heads {
                let put = |image: &mut Image, unpacked: Vec<f64>| {
                    for (d, value) in unpacked.into_iter().enumerate() {
                        image.put(&[row, head, d as i64], encode(case.dtype, value));
                    }
                };
                put(&mut keys, self.unpacking.keys(case, head, &latent));
                put(&mut values, self.unpacking.values(case, head, &latent));
            }
        }
        for (target, image) in [(&self.chunk[2], keys), (&self.chunk[3], values)] {
            self.memory.upload(target.tensor().address(), &image.bytes);
        }
    }

    /// Runs a planned handle.
    pub fn run(
        &self,
        session: &dyn Session,
        handle: &dyn ContextHandle,
        stream: Stream,
    ) -> Result<()> {
        match self.case.in_steps {
            true => self.first_steps(handle.num_chunks()?, session, handle, stream),
            false => handle.run(&self.args(), stream),
        }
    }

    /// The steps of a run up to so many chunks.
    fn first_steps(
        &self,
        chunks: usize,
        session: &dyn Session,
        handle: &dyn ContextHandle,
        stream: Stream,
    ) -> Result<()> {
        let args = self.args();
        handle.new_tokens(&args, stream)?;
        for chunk in 0..chunks {
            handle.gather(chunk, &args, stream)?;
            let rows = handle.chunk_tokens(chunk)?;
            match self.case.up_project {
                true => session.up_project(&self.products(rows), stream)?,
                false => self.unpack(rows),
            }
            handle.attend(chunk, &args, stream)?;
        }
        Ok(())
    }

    /// A chunk's keys and values from its latent rows.
    fn products(&self, rows: i64) -> UpProjectArgs {
        let [latent, _, k_nope, v] =
            [0, 1, 2, 3].map(|n| self.chunk[n].tensor().narrow(0, 0, rows));
        UpProjectArgs {
            kv_c: latent,
            w_uk: Some(self.weights[0].tensor()),
            w_uv: Some(self.weights[1].tensor()),
            k_nope: Some(k_nope),
            v: Some(v),
        }
    }

    fn outputs(&self) -> impl Iterator<Item = &Resident<'m>> {
        [&self.o].into_iter().chain(&self.lse).chain(&self.chunk)
    }

    /// Fills what a call may write with poison again.
    pub fn reset_outputs(&self) {
        self.outputs().for_each(Resident::reset);
    }

    /// Nothing was written at all.
    pub fn is_untouched(&self) -> bool {
        self.outputs().all(Resident::is_untouched)
    }

    /// Compares the outputs; other memory and rows beyond the batch must be as they were.
    pub fn check(&self) -> std::result::Result<(), String> {
        let inputs = [&self.q, &self.k_nope, &self.k_rope, &self.v];
        let inputs = inputs.into_iter().chain(&self.cache).chain(&self.weights);
        assert!(
            inputs.into_iter().all(Resident::is_untouched),
            "an input changed"
        );
        let (o, lse) = (self.o.current(), self.lse.as_ref().map(Resident::current));
        let mut errors = Errors::default();
        let mut token = 0;
        for (b, &(new, _)) in self.case.lens.iter().enumerate() {
            let request = Unpacked::of(&self.case, &self.unpacking, b, token);
            for i in 0..i64::from(new) {
                for (sample, head) in self.case.sampled_heads().into_iter().enumerate() {
                    let (want, want_lse) = request.attend(&self.case, (token + i, head), i, sample);
                    for (d, want) in want.iter().enumerate() {
                        let got = o.value(&[token + i, head, d as i64]);
                        errors.add(&self.case, got, want);
                    }
                    if let Some(lse) = &lse {
                        let got = lse.value(&[token + i, head]);
                        let base = match self.case.lse {
                            Some(LogBase::Two) => std::f64::consts::LOG2_E,
                            _ => 1.0,
                        };
                        let rounding = match self.case.lse_dtype {
                            DType::F32 => 0.0,
                            dtype => unit_roundoff(dtype) * got.abs(),
                        };
                        errors.add_lse(got / base, &want_lse, rounding / base);
                    }
                }
            }
            token += i64::from(new);
        }
        if !self.case.graph {
            self.check_padding(&o, token);
        }
        errors.check(&self.case)
    }

    fn check_padding(&self, o: &Image, tokens: i64) {
        for_each_index(
            &[self.case.padded_rows, self.case.heads, self.case.value],
            |index| {
                let at = [tokens + index[0], index[1], index[2]];
                assert_eq!(
                    o.bits(&at),
                    self.o.image().bits(&at),
                    "a row beyond the batch"
                );
            },
        );
    }
}

/// Both weights, with the latent element last.
struct Weights {
    rank: usize,
    /// `[H, P, L]` and `[H, V, L]`.
    key: Vec<f64>,
    value: Vec<f64>,
}

impl Weights {
    fn of(case: &Case) -> Weights {
        let all = |dim: i64, at: &dyn Fn(i64, i64, i64) -> f64| {
            let mut all = Vec::new();
            for_each_index(&[case.heads, dim, case.rank], |index| {
                all.push(at(index[0], index[1], index[2]));
            });
            all
        };
        Weights {
            rank: case.rank as usize,
            key: all(case.nope, &|h, d, l| case.stored(Of::KeyWeight, [h, d, l])),
            value: all(case.value, &|h, d, l| {
                case.stored(Of::ValueWeight, [h, l, d])
            }),
        }
    }

    /// A head's rows of a weight, each of which makes one element.
    fn rows<'w>(
        &self,
        weight: &'w [f64],
        head: i64,
        dim: i64,
    ) -> impl Iterator<Item = &'w [f64]> + use<'w> {
        let first = (head * dim) as usize * self.rank;
        weight[first..][..dim as usize * self.rank].chunks_exact(self.rank)
    }

    /// What a head makes of a latent row, as it is stored in the type of the problem.
    fn keys(&self, case: &Case, head: i64, latent: &[f64]) -> Vec<f64> {
        let rows = self.rows(&self.key, head, case.nope);
        rows.map(|row| rounded(case.dtype, products(row, latent).sum()))
            .collect()
    }

    fn values(&self, case: &Case, head: i64, latent: &[f64]) -> Vec<f64> {
        let rows = self.rows(&self.value, head, case.value);
        rows.map(|row| rounded(case.dtype, products(row, latent).sum()))
            .collect()
    }

    /// How far a value may be off before it is rounded.
    fn value_errors(&self, case: &Case, head: i64, latent: &[f64]) -> Vec<f64> {
        let rows = self.rows(&self.value, head, case.value);
        rows.map(|row| self.sum_error(row, latent)).collect()
    }

    /// How far a key of 16 bits may be off: the sum next to a border between two numbers of the type may be rounded to
    /// either. What fp32 keys are off is within what their results may be.
    fn key_errors(&self, case: &Case, head: i64, latent: &[f64]) -> Vec<f64> {
        if case.dtype == DType::F32 {
            return vec![0.0; case.nope as usize];
        }
        let error = |row: &[f64]| {
            let (sum, error) = (products(row, latent).sum(), self.sum_error(row, latent));
            let [below, here, above] =
                [sum - error, sum, sum + error].map(|sum: f64| rounded(case.dtype, sum));
            (above - here).max(here - below)
        };
        self.rows(&self.key, head, case.nope).map(error).collect()
    }

    /// Of the fp32 sum over the latent row: `n u Σ |w c|` (Higham, Accuracy and Stability of Numerical Algorithms, 2002, §3.1).
    /// Where the sum cancels, that is far more than a rounding.
    fn sum_error(&self, row: &[f64], latent: &[f64]) -> f64 {
        let size: f64 = products(row, latent).map(f64::abs).sum();
        self.rank as f64 * unit_roundoff(DType::F32) * size
    }
}

fn products(weight: &[f64], latent: &[f64]) -> impl Iterator<Item = f64> {
    weight.iter().zip(latent).map(|(w, c)| w * c)
}

/// The cache: records where a context token is, everything else poisoned.
fn records(case: &Case, owned: &[Vec<i32>], num_pages: i64) -> Vec<Image> {
    let is_ds_mla = case.cache == CacheFormat::DS_MLA;
    let image =
        |dtype, width| Image::poisoned(View::compact(dtype, &[num_pages, case.page_size, width]));
    let mut images = match (is_ds_mla, case.split_cache) {
        (true, _) => vec![image(DType::U8, 656)],
        (_, false) => vec![image(case.cache.element, case.rank + case.rope)],
        (_, true) => vec![
            image(case.cache.element, case.rank),
            image(case.cache.element, case.rope),
        ],
    };
    for (b, &(_, context)) in case.lens.iter().enumerate() {
        for j in 0..i64::from(context) {
            let page = i64::from(owned[b][(j / case.page_size) as usize]);
            let slot = j % case.page_size;
            let mut bytes = |first: i64, from: &[u8]| {
                for (i, &byte) in from.iter().enumerate() {
                    images[0].put(&[page, slot, first + i as i64], byte.into());
                }
            };
            if is_ds_mla {
                for d in 0..case.rank {
                    bytes(d, &[case.record(b, j, d).0 as u8]);
                }
                for block in 0..4 {
                    bytes(
                        512 + 4 * block,
                        &case.block_scale(b, j, block).to_le_bytes(),
                    );
                }
                for d in 0..case.rope {
                    let bits = case.record(b, j, case.rank + d).0 as u16;
                    bytes(528 + 2 * d, &bits.to_le_bytes());
                }
                continue;
            }
            for d in 0..case.rank + case.rope {
                let bits = case.record(b, j, d).0;
                match case.split_cache && d >= case.rank {
                    true => images[1].put(&[page, slot, d - case.rank], bits),
                    false => images[0].put(&[page, slot, d], bits),
                }
            }
        }
    }
    images
}

/// Keys and values of a request, `[sampled head][key]`; the context's as they are unpacked.
struct Unpacked {
    context: i64,
    keys: Vec<Vec<Vec<f64>>>,
    values: Vec<Vec<Vec<f64>>>,
    /// How far Folio's values may be off before they are rounded.
    value_errors: Vec<Vec<Vec<f64>>>,
    /// How far its keys may be off.
    key_errors: Vec<Vec<Vec<f64>>>,
}

/// An element of the output.
#[derive(Clone, Copy, Default)]
struct Wanted {
    value: f64,
    /// `Σ p |v|`
    magnitude: f64,
    /// What errors of unpacked keys and values come to.
    error: f64,
}

/// An lse, and what errors of unpacked keys come to.
struct WantedLse {
    value: f64,
    error: f64,
}

impl Unpacked {
    fn of(case: &Case, weights: &Weights, b: usize, first_token: i64) -> Unpacked {
        let (new, context) = case.lens[b];
        let mut all = Unpacked {
            context: context.into(),
            keys: Vec::new(),
            values: Vec::new(),
            value_errors: Vec::new(),
            key_errors: Vec::new(),
        };
        let record = |j: i64| -> Vec<f64> {
            (0..case.rank + case.rope)
                .map(|d| case.record(b, j, d).1)
                .collect()
        };
        let records: Vec<Vec<f64>> = (0..i64::from(context)).map(record).collect();
        for head in case.sampled_heads() {
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            let (mut value_errors, mut key_errors) = (Vec::new(), Vec::new());
            for record in &records {
                let (latent, rope) = record.split_at(case.rank as usize);
                let mut key = weights.keys(case, head, latent);
                key.extend(rope);
                keys.push(key);
                values.push(weights.values(case, head, latent));
                if case.unpacks_on_the_host() {
                    value_errors.push(vec![0.0; case.value as usize]);
                    key_errors.push(vec![0.0; case.nope as usize]);
                } else {
                    value_errors.push(weights.value_errors(case, head, latent));
                    key_errors.push(weights.key_errors(case, head, latent));
                }
            }
            for token in first_token..first_token + i64::from(new) {
                let nope = (0..case.nope).map(|d| case.stored(Of::Key, [token, head, d]));
                let rope = (0..case.rope).map(|d| case.stored(Of::Rope, [token, d, 0]));
                keys.push(nope.chain(rope).collect());
                let value = (0..case.value).map(|d| case.stored(Of::Value, [token, head, d]));
                values.push(value.collect());
                value_errors.push(vec![0.0; case.value as usize]);
                key_errors.push(vec![0.0; case.nope as usize]);
            }
            all.keys.push(keys);
            all.values.push(values);
            all.value_errors.push(value_errors);
            all.key_errors.push(key_errors);
        }
        all
    }

    /// Each element of o, and lse, of new token `i` of the request, row `token` of the batch, and of a sampled head.
    fn attend(
        &self,
        case: &Case,
        (token, head): (i64, i64),
        i: i64,
        sample: usize,
    ) -> (Vec<Wanted>, WantedLse) {
        let width = case.nope + case.rope;
        let scale = match case.sm_scale {
            0.0 => 1.0 / (width as f64).sqrt(),
            stated => stated.into(),
        };
        let q: Vec<f64> = (0..width)
            .map(|d| case.stored(Of::Query, [token, head, d]))
            .collect();
        let seen = (self.context + i + 1) as usize;
        let [keys, values, value_errors, key_errors] = [
            &self.keys,
            &self.values,
            &self.value_errors,
            &self.key_errors,
        ]
        .map(|of_heads| &of_heads[sample]);
        let score = |key: &Vec<f64>| sum_of(&q, key, |q, k| q * k) * scale;
        let scores: Vec<f64> = keys[..seen].iter().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = top + scores.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
        let mut o = vec![Wanted::default(); case.value as usize];
        let weights = || scores.iter().map(|score| (score - lse).exp());
        for ((weight, value), error) in weights().zip(values).zip(value_errors) {
            for ((o, v), error) in o.iter_mut().zip(value).zip(error) {
                o.value += weight * v;
                o.magnitude += (weight * v).abs();
                o.error += weight * error;
            }
        }
        // A score that grows by s moves its key's weight, the lse by weight · s, and o by weight · s · (v - o).
        let mut lse_error = 0.0;
        for ((weight, value), errors) in weights().zip(values).zip(key_errors) {
            // Rotary columns have no errors.
            let of_score = sum_of(errors, &q, |error, q| q.abs() * error);
            let moved = weight * of_score * scale.abs();
            lse_error += moved;
            for (o, v) in o.iter_mut().zip(value) {
                o.error += moved * (v - o.value).abs();
            }
        }
        let lse = WantedLse {
            value: lse,
            error: lse_error,
        };
        (o, lse)
    }
}

/// How far outputs are off.
#[derive(Default)]
struct Errors {
    /// Largest `|got - want|` as a part of what is accepted.
    o: f64,
    lse: f64,
    dot: f64,
    got: f64,
    want: f64,
    has_nan: bool,
}

impl Errors {
    /// Accepted are one rounding of the output, one of the weights where a matrix unit takes them in 16 bits, float32
    /// errors of scores, and those of the sums that unpack keys and values. A value that Folio unpacks may be rounded to the other
    /// neighbour than here, where its sum is next to the border between the two, and so may a key.
    fn add(&mut self, case: &Case, got: f64, wanted: &Wanted) {
        let want = wanted.value;
        self.has_nan |= !got.is_finite();
        let unit = unit_roundoff(case.dtype);
        let roundings = match case.unpacks_on_the_host() {
            true => 1.0,
            false => 3.0,
        };
        let accepted =
            unit * want.abs() + (roundings * unit + 1e-5) * wanted.magnitude + wanted.error;
        self.o = self.o.max((got - want).abs() / accepted);
        self.dot += got * want;
        self.got += got * got;
        self.want += want * want;
    }

    /// `rounding` is what rounding to a type of 16 bits may change.
    fn add_lse(&mut self, got: f64, want: &WantedLse, rounding: f64) {
        self.has_nan |= !got.is_finite();
        self.lse = (self.lse).max((got - want.value).abs() - want.error - rounding);
    }

    /// The angle between result and truth is bounded as FlashMLA's tests do for 16-bit types.
    fn check(&self, case: &Case) -> std::result::Result<(), String> {
        let (angle, lse) = match (case.dtype, case.unpacks_on_the_host()) {
            (DType::F32, _) => (1e-10, 1e-5),
            (_, true) => (5e-6, 1e-4),
            (_, false) => (5e-6, 2e-4),
        };
        let off = match self.got * self.want > 0.0 {
            true => 1.0 - self.dot / (self.got * self.want).sqrt(),
            false => self.got - self.want,
        };
        if !self.has_nan && self.o <= 1.0 && off.abs() <= angle && self.lse <= lse {
            return Ok(());
        }
        Err(format!(
            "o is off by {} times what is accepted, angle {off:e}, lse {:e}, nan {}",
            self.o, self.lse, self.has_nan
        ))
    }
}

/// A handle with its workspace.
pub struct Handle<'m> {
    pub context: Box<dyn ContextHandle>,
    workspace: WorkspaceMemory<'m>,
}

impl<'m> Handle<'m> {
    pub fn new(
        session: &dyn Session,
        memory: &'m dyn Memory,
        desc: MlaContextDesc,
    ) -> Result<Handle<'m>> {
        let context = session.mla_context(desc)?;
        Ok(Handle {
            workspace: WorkspaceMemory::new(memory, context.workspace()?),
            context,
        })
    }

    pub fn plan(&mut self, batch: &BatchInput, stream: Stream) -> Result<()> {
        let (workspace, bytes) = self.workspace.place();
        self.context.plan(batch, &workspace, bytes, stream)
    }
}

/// Computes a case and compares.
pub fn check(
    session: &dyn Session,
    memory: &dyn Memory,
    case: &Case,
) -> std::result::Result<(), String> {
    let data = Data::new(memory, case);
    let solve = || {
        let mut handle = Handle::new(session, memory, case.desc())?;
        handle.plan(&data.batch(), Stream::default())?;
        let (context, stream) = (&*handle.context, Stream::default());
        data.run(session, context, stream)?;
        // Again: the sum begins anew, also where the steps of a run were given up.
        if case.in_steps {
            data.first_steps(context.num_chunks()?.min(1), session, context, stream)?;
        }
        data.reset_outputs();
        data.run(session, context, stream)
    };
    solve().map_err(|error| error.to_string())?;
    data.check()
}
