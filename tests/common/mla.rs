//! Problems of absorbed multi-head latent attention: a batch as of other attention, and how its queries and records
//! lie in memory. Their numbers come from `values`; the formula in float64 stands here a second time, over dense arrays.

#![allow(unsafe_code)]

use super::codec::{decode, encode, rounded, unit_roundoff};
use super::compare::{self, Tolerance};
use super::dense::{Row, spread, sum_of};
use super::door::Session;
use super::instance::{Output, Planned, for_each_index, lse_view, rows, take_lse, take_rows};
use super::memory::{HostMemory, Image, Memory, Resident, View};
use super::pages::PageTable;
use super::problem::{Gaps, Layer, MaskKind, Problem, Request, Storage, TableForm};
use super::strategy;
use super::values::Values;
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::{AttentionArgs, AttentionDesc, CacheFormat, Kind, KvLayout, LogBase, Mask};
use folio::tensor::Tensor;
use proptest::prelude::*;
use std::ops::Range;

/// One problem.
#[derive(Debug, Clone)]
pub struct MlaProblem {
    /// Types, heads (all of one KV head), lengths, page table, scales. `head_dim_vo` is the latent rank, and the rest of
    /// `head_dim_qk` is rotary. `kv_dtype` is that of latent elements; a layer has no more than a mask, scales and lse.
    /// `memory.q` and `memory.k` are the gaps of the only or latent tensor, `memory.v` those of rotary ones.
    pub batch: Problem,
    pub queries: Queries,
    pub cache: Cache,
    /// The keys are one rank's of a context that is dealt to several: `kv_len` counts those.
    pub share: Option<Share>,
}

/// The part of a context that a rank holds.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    pub rank: usize,
    pub world_size: usize,
    /// Tokens that are dealt to a rank at a time.
    pub interleave: usize,
}

impl Share {
    /// The position in the context of a rank's `j`th key.
    fn position(self, j: usize) -> usize {
        let round = j / self.interleave * self.world_size + self.rank;
        round * self.interleave + j % self.interleave
    }
}

/// The tensors that hold queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queries {
    /// Two views of one tensor of whole rows.
    One,
    /// Latent and rotary rows lie apart.
    Two,
}

/// The tensors that hold records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// One tensor of whole records.
    Records,
    /// The same, given as two views.
    Views,
    /// Latent and rotary parts lie apart.
    Two,
    /// `fp8_ds_mla`: 656 bytes per token.
    DsMla,
}

/// The scale of DeepSeek-V2's heads, without YaRN: 192^-½.
pub const SM_SCALE: f32 = 0.072_168_78;

impl MlaProblem {
    /// bf16, 16 heads of 512 + 64, pages of 16 behind CSR, compact memory; to be changed field by field. `lens` are
    /// `(qo_len, kv_len)`.
    pub fn plain(lens: &[(u32, u32)]) -> MlaProblem {
        let batch = Problem {
            kind: Kind::Mla,
            num_kv_heads: 1,
            layer: Layer {
                sm_scale: SM_SCALE,
                ..Layer::plain()
            },
            ..Problem::plain(lens).of(DType::BF16)
        };
        let problem = MlaProblem {
            batch,
            queries: Queries::One,
            cache: Cache::Records,
            share: None,
        };
        problem.heads(16).dims(512, 64)
    }

    /// The same with all of q, the cache and o of this type.
    pub fn of(mut self, dtype: DType) -> MlaProblem {
        self.batch = self.batch.of(dtype);
        self
    }

    pub fn heads(mut self, heads: u32) -> MlaProblem {
        self.batch.group_size = heads;
        self
    }

    pub fn dims(mut self, rank: u32, rope: u32) -> MlaProblem {
        (self.batch.head_dim_qk, self.batch.head_dim_vo) = (rank + rope, rank);
        self
    }

    pub fn pages(mut self, page_size: u32, form: TableForm) -> MlaProblem {
        self.batch.storage = Storage::Paged {
            page_size,
            layout: KvLayout::Nhd,
            form,
            unused_pages: 2,
            shared_pages: 0,
        };
        self
    }

    /// The same with these tensors; `fp8_ds_mla` has a type of its own.
    pub fn tensors(mut self, queries: Queries, cache: Cache) -> MlaProblem {
        (self.queries, self.cache) = (queries, cache);
        if cache == Cache::DsMla {
            self.batch.kv_dtype = DType::F8E4M3;
        }
        self
    }

    /// Only request `b`.
    pub fn alone(&self, b: usize) -> MlaProblem {
        MlaProblem {
            batch: self.batch.alone(b),
            ..self.clone()
        }
    }

    fn rank(&self) -> usize {
        self.batch.head_dim_vo as usize
    }

    fn width(&self) -> usize {
        self.batch.head_dim_qk as usize
    }

    fn has_rope(&self) -> bool {
        self.width() > self.rank()
    }

    /// The desc that fits the batch.
    pub fn desc(&self) -> AttentionDesc {
        let desc = self.batch.desc();
        AttentionDesc {
            kv_format: match self.cache {
                Cache::DsMla => CacheFormat::DS_MLA,
                _ => desc.kv_format,
            },
            ..desc
        }
    }

    /// What a fast kernel may be off: its weights are rounded to the type of q, or to fp16 beside fp8 records
    /// (`kernels/sm90/mla_few/format.cuh`). Beside 16-bit queries `fp8_ds_mla` records are rounded once to bf16. Queries in fp8 become
    /// rows of the output's type on a device, and of a matrix unit's on a CPU.
    pub fn tolerance(&self) -> Tolerance {
        let of_queries = match self.batch.q_dtype.is_fp8() {
            true => Tolerance {
                fp16_weights: true,
                flushes_weights: true,
                ..Tolerance::fast(self.batch.q_dtype)
            },
            false => Tolerance::of_matrix_unit(&self.batch),
        };
        let is_half = self.batch.q_dtype != DType::F32;
        let plain = Tolerance {
            fp16_weights: of_queries.fp16_weights || is_half && self.batch.kv_dtype.is_fp8(),
            ..of_queries
        };
        match self.cache {
            Cache::DsMla if is_half => Tolerance {
                weight: plain.weight + unit_roundoff(DType::BF16),
                score_sum: plain.score_sum + unit_roundoff(DType::BF16),
                ..plain
            },
            _ => plain,
        }
    }

    /// The most cosine distance of outputs: vLLM's tests allow fp8 records 1e-4.
    fn most_distance(&self) -> f64 {
        match self.cache {
            Cache::DsMla => 1e-4,
            _ => 5e-6,
        }
    }
}

/// Plans and runs a problem once, with its tensors and its index tensors in these memories.
pub fn solve(
    session: &dyn Session,
    memory: &dyn Memory,
    index_memory: &dyn Memory,
    problem: &MlaProblem,
) -> Result<Output> {
    let handle = session.attention(problem.desc())?;
    let planned = Planned::new(handle, memory, index_memory, &problem.batch)?;
    run(&planned, &MlaLayer::new(memory, problem))
}

/// As [`solve`], on the host.
pub fn solve_on_host(session: &dyn Session, problem: &MlaProblem) -> Result<Output> {
    solve(session, &HostMemory, &HostMemory, problem)
}

/// Runs one layer and reads its outputs.
pub fn run(planned: &Planned<'_>, layer: &MlaLayer<'_>) -> Result<Output> {
    layer.reset_outputs();
    planned.run_args(&layer.input())?;
    Ok(layer.output())
}

/// Compares a result with float64: element by element within the error of its arithmetic, and as a whole within the
/// cosine distance of FlashMLA's `tests/test_flash_mla_dense_decoding.py`.
pub fn check(problem: &MlaProblem, got: &Output) -> std::result::Result<(), String> {
    let want = attention(problem);
    compare::compare(&problem.batch, &want, got, problem.tolerance())?;
    let distance = cosine_distance(problem, &want, got);
    match distance <= problem.most_distance() {
        true => Ok(()),
        false => Err(format!("o is {distance:e} off in its direction")),
    }
}

/// `1 - 2 Σxy / Σ(x² + y²)` of the outputs; 0 where both are 0.
fn cosine_distance(problem: &MlaProblem, want: &[Vec<Row>], got: &Output) -> f64 {
    let values = want.iter().flatten().flat_map(|row| &row.o);
    let (mut product, mut squares) = (0.0, 0.0);
    for (&want, &bits) in values.zip(&got.o) {
        let got = decode(problem.batch.o_dtype, bits);
        product += 2.0 * got * want;
        squares += got * got + want * want;
    }
    if squares > 0.0 {
        1.0 - product / squares
    } else {
        0.0
    }
}

/// Element `d` of the record of key `j`, as the cache holds it.
fn record(problem: &MlaProblem, b: usize, j: usize, d: usize) -> f64 {
    let values = Values::of(&problem.batch);
    let j = position(problem, j);
    match problem.cache {
        // The rotary part is none of e4m3's numbers.
        Cache::DsMla if d >= 512 => rounded(DType::BF16, 1.1 * values.v(b, j, 0, d)),
        Cache::DsMla => values.k(b, j, 0, d) * f64::from(values.block_scale(b, j, d / 128)),
        _ => values.k(b, j, 0, d),
    }
}

/// The position of key `j` of a request among the keys that numbers are drawn for.
fn position(problem: &MlaProblem, j: usize) -> usize {
    problem.share.map_or(j, |share| share.position(j))
}

/// Every row of the batch, `[token][head]`.
pub fn attention(problem: &MlaProblem) -> Vec<Vec<Row>> {
    attention_over(problem, |request, i| {
        let past = request.kv_len as i64 - request.qo_len as i64 + i as i64 + 1;
        let seen = match problem.batch.layer.mask {
            MaskKind::Full => request.kv_len as usize,
            _ => past.max(0) as usize,
        };
        (0..seen).collect()
    })
}

/// The same where `seen` says which keys token `i` of a request sees.
pub fn attention_over(
    problem: &MlaProblem,
    seen: impl Fn(&Request, usize) -> Vec<usize>,
) -> Vec<Vec<Row>> {
    let mut all = Vec::new();
    for (b, request) in problem.batch.requests.iter().enumerate() {
        let records: Vec<Vec<f64>> = (0..request.kv_len as usize)
            .map(|j| {
                (0..problem.width())
                    .map(|d| record(problem, b, j, d))
                    .collect()
            })
            .collect();
        for i in 0..request.qo_len as usize {
            let seen: Vec<&Vec<f64>> = seen(request, i).into_iter().map(|j| &records[j]).collect();
            let heads = 0..problem.batch.num_qo_heads() as usize;
            all.push(
                heads
                    .map(|head| attend(problem, (b, i, head), &seen))
                    .collect(),
            );
        }
    }
    all
}

/// Weights below this, relative to the row's largest, are denormal in fp16.
const LEAST_NORMAL_FP16: f64 = 6.103515625e-5;

fn attend(problem: &MlaProblem, (b, i, head): (usize, usize, usize), records: &[&Vec<f64>]) -> Row {
    let (values, layer) = (Values::of(&problem.batch), &problem.batch.layer);
    let one_if_zero = |scale: f32| if scale == 0.0 { 1.0 } else { f64::from(scale) };
    let k_scale = one_if_zero(layer.k_scale);
    let scale = f64::from(layer.sm_scale) * one_if_zero(layer.q_scale) * k_scale;
    let q: Vec<f64> = (0..problem.width())
        .map(|d| values.q(b, i, head, d))
        .collect();
    let zeros = vec![0.0; problem.rank()];
    let mut row = Row {
        o: zeros.clone(),
        magnitude: zeros.clone(),
        flushed_weights: zeros.clone(),
        denormal_weights: zeros,
        spread: 0.0,
        keys: records.len(),
        lse: f64::NEG_INFINITY,
        largest_score: 0.0,
        score_magnitude: 0.0,
    };
    let logits: Vec<f64> = records
        .iter()
        .map(|record| {
            let sum = sum_of(&q, record, |q, k| q * k);
            let size = sum_of(&q, record, |q, k| (q * k).abs());
            row.largest_score = row.largest_score.max((sum * scale).abs());
            row.score_magnitude = row.score_magnitude.max(size * scale.abs());
            sum * scale
        })
        .collect();
    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if records.is_empty() {
        return row;
    }
    row.lse = top + logits.iter().map(|s| (s - top).exp()).sum::<f64>().ln();
    for (record, logit) in records.iter().zip(&logits) {
        let weight = (logit - row.lse).exp() * k_scale;
        let relative = (logit - top).exp();
        let denormal = match relative < LEAST_NORMAL_FP16 {
            true => {
                relative.min(LEAST_NORMAL_FP16 * 2f64.powi(-11)) * (top - row.lse).exp() * k_scale
            }
            false => 0.0,
        };
        for (d, v) in record[..row.o.len()].iter().enumerate() {
            row.o[d] += weight * v;
            row.magnitude[d] += (weight * v).abs();
        }
        if denormal > 0.0 {
            for (d, v) in record[..row.o.len()].iter().enumerate() {
                row.denormal_weights[d] += (denormal * v).abs();
            }
        }
        if relative < f32::MIN_POSITIVE.into() {
            for (d, v) in record[..row.o.len()].iter().enumerate() {
                row.flushed_weights[d] += (weight * v).abs();
            }
        }
    }
    let shares = logits.iter().map(|logit| (logit - row.lse).exp());
    let terms = shares.zip(records);
    row.spread = spread(
        &row.o,
        terms.map(|(share, record)| (share, k_scale, *record)),
    );
    row
}

/// The tensors of one layer.
pub struct MlaLayer<'m> {
    q: Resident<'m>,
    q_rope: Option<Resident<'m>>,
    kv: Resident<'m>,
    kv_rope: Option<Resident<'m>>,
    o: Resident<'m>,
    lse: Option<Resident<'m>>,
    problem: MlaProblem,
}

impl<'m> MlaLayer<'m> {
    pub fn new(memory: &'m dyn Memory, problem: &MlaProblem) -> MlaLayer<'m> {
        let resident = |image| Resident::new(memory, image);
        let (rank, width) = (problem.rank(), problem.width());
        let (batch, shape) = (&problem.batch, &problem.batch.memory);
        let (q, q_rope) = match problem.queries {
            Queries::Two if problem.has_rope() => {
                let rope = queries(problem, rank..width, shape.v);
                (queries(problem, 0..rank, shape.q), Some(rope))
            }
            _ => (queries(problem, 0..width, shape.q), None),
        };
        let (kv, kv_rope) = match problem.cache {
            Cache::Two if problem.has_rope() => {
                let rope = elements(problem, rank..width, shape.v);
                (elements(problem, 0..rank, shape.k), Some(rope))
            }
            Cache::DsMla => (ds_mla(problem), None),
            _ => (elements(problem, 0..width, shape.k), None),
        };
        let o = rows(batch, batch.o_dtype, batch.head_dim_vo, shape.o);
        MlaLayer {
            q: resident(q),
            q_rope: q_rope.map(resident),
            kv: resident(kv),
            kv_rope: kv_rope.map(resident),
            o: resident(Image::poisoned(o)),
            lse: batch
                .layer
                .lse
                .map(|_| resident(Image::poisoned(lse_view(batch)))),
            problem: problem.clone(),
        }
    }

    pub fn input(&self) -> AttentionArgs {
        let layer = &self.problem.batch.layer;
        let (rank, width) = (self.problem.rank(), self.problem.width());
        let views = |whole: &Resident<'_>| {
            let rope = (width > rank).then(|| columns(&whole.tensor(), rank..width));
            (columns(&whole.tensor(), 0..rank), rope)
        };
        let (q_latent, q_rope) = match &self.q_rope {
            Some(rope) => (self.q.tensor(), Some(rope.tensor())),
            None => views(&self.q),
        };
        let (kv, kv_rope) = match (self.problem.cache, &self.kv_rope) {
            (Cache::Views, _) => views(&self.kv),
            (_, rope) => (self.kv.tensor(), rope.as_ref().map(Resident::tensor)),
        };
        AttentionArgs {
            lse: self.lse.as_ref().map(Resident::tensor),
            lse_base: layer.lse.unwrap_or(LogBase::E),
            sm_scale: layer.sm_scale,
            q_scale: layer.q_scale,
            k_scale: layer.k_scale,
            mask: match layer.mask {
                MaskKind::Full => Mask::Full,
                _ => Mask::Causal,
            },
            ..AttentionArgs::mla(q_latent, q_rope, kv, kv_rope, self.o.tensor())
        }
    }

    /// Takes over the queries and the cache of a smaller batch with the same strides.
    pub fn take_inputs_of(&self, other: &MlaLayer<'_>) {
        self.q.copy_from(&other.q);
        self.kv.copy_from(&other.kv);
        for (part, other) in [
            (&self.q_rope, &other.q_rope),
            (&self.kv_rope, &other.kv_rope),
        ] {
            if let (Some(part), Some(other)) = (part, other) {
                part.copy_from(other);
            }
        }
    }

    /// Takes over the leading rows of a larger batch's outputs.
    pub fn take_outputs_of(&self, other: &MlaLayer<'_>) {
        self.o.copy_from(&other.o);
        if let (Some(lse), Some(other)) = (&self.lse, &other.lse) {
            lse.copy_from(other);
        }
    }

    /// Fills the outputs with poison again.
    pub fn reset_outputs(&self) {
        self.o.reset();
        if let Some(lse) = &self.lse {
            lse.reset();
        }
    }

    /// Nothing was written at all.
    pub fn is_untouched(&self) -> bool {
        self.o.is_untouched() && self.lse.as_ref().is_none_or(Resident::is_untouched)
    }

    /// Reads the outputs of the batch's rows. Everything else in their memory, and all inputs, must be as they were.
    pub fn output(&self) -> Output {
        let inputs = [Some(&self.q), Some(&self.kv)];
        let optional = [&self.q_rope, &self.kv_rope].map(Option::as_ref);
        for input in inputs.into_iter().chain(optional) {
            assert!(input.is_none_or(Resident::is_untouched), "an input changed");
        }
        let tokens = self.problem.batch.num_tokens() as i64;
        Output {
            o: take_rows(&self.o, tokens),
            lse: self.lse.as_ref().map(|lse| take_lse(lse, tokens)),
        }
    }
}

/// Some columns of a tensor of rows.
fn columns(tensor: &Tensor, range: Range<usize>) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    *shape.last_mut().expect("rows") = range.len() as i64;
    let data = (tensor.address() + range.start * tensor.dtype().size()) as *mut u8;
    // SAFETY: a part of the tensor, which is alive as long as the part is used.
    unsafe {
        Tensor::new(
            "columns",
            data,
            tensor.device(),
            tensor.dtype(),
            &shape,
            Some(tensor.strides()),
        )
    }
    .expect("a part of a valid tensor")
}

/// Some columns of the queries.
fn queries(problem: &MlaProblem, range: Range<usize>, gaps: Gaps) -> Image {
    let (batch, values) = (&problem.batch, Values::of(&problem.batch));
    let view = rows(batch, batch.q_dtype, range.len() as u32, gaps);
    let mut image = Image::poisoned(view);
    let indptr = batch.qo_indptr();
    for (b, request) in batch.requests.iter().enumerate() {
        let shape = [
            request.qo_len.into(),
            batch.num_qo_heads().into(),
            range.len() as i64,
        ];
        for_each_index(&shape, |index| {
            let [i, head, d] = [0, 1, 2].map(|n| index[n] as usize);
            let value = values.q(b, i, head, range.start + d);
            let at = [i64::from(indptr[b]) + index[0], index[1], index[2]];
            image.put(&at, encode(batch.q_dtype, value));
        });
    }
    image
}

/// Some columns of a plain cache.
fn elements(problem: &MlaProblem, range: Range<usize>, gaps: Gaps) -> Image {
    let dtype = problem.batch.kv_dtype;
    cache(problem, dtype, range.len(), gaps, |b, j, d| {
        encode(dtype, record(problem, b, j, range.start + d))
    })
}

/// A cache of `fp8_ds_mla` records.
fn ds_mla(problem: &MlaProblem) -> Image {
    let values = Values::of(&problem.batch);
    let byte = |b: usize, j: usize, at: usize| match at {
        0..512 => encode(DType::F8E4M3, values.k(b, position(problem, j), 0, at)),
        512..528 => {
            let scale = values.block_scale(b, position(problem, j), (at - 512) / 4);
            u64::from(scale.to_le_bytes()[(at - 512) % 4])
        }
        _ => {
            let rope = encode(DType::BF16, record(problem, b, j, 512 + (at - 528) / 2));
            rope >> (8 * (at % 2)) & 0xff
        }
    };
    cache(problem, DType::U8, 656, problem.batch.memory.k, byte)
}

/// A cache tensor: what `bits` says of every key where the page table says, everything else poisoned.
fn cache(
    problem: &MlaProblem,
    dtype: DType,
    width: usize,
    gaps: Gaps,
    bits: impl Fn(usize, usize, usize) -> u64,
) -> Image {
    let batch = &problem.batch;
    let (table, page_size) = (PageTable::of(batch), i64::from(batch.page_size()));
    let by_token = matches!(
        batch.storage,
        Storage::Paged {
            form: TableForm::TokenSlots,
            ..
        }
    );
    let (pages, width) = (table.num_pages as i64, width as i64);
    let view = match by_token {
        true => View::gapped(dtype, &[pages, width], &[gaps.inner, 0], gaps.lead),
        false => View::gapped(
            dtype,
            &[pages, page_size, width],
            &[gaps.outer, gaps.inner, 0],
            gaps.lead,
        ),
    };
    let mut image = Image::poisoned(view);
    for (b, request) in batch.requests.iter().enumerate() {
        for_each_index(&[request.kv_len.into(), width], |index| {
            let (j, d) = (index[0], index[1]);
            let page = i64::from(table.ids[b][(j / page_size) as usize]);
            let bits = bits(b, j as usize, d as usize);
            match by_token {
                true => image.put(&[page, d], bits),
                false => image.put(&[page, j % page_size, d], bits),
            }
        });
    }
    image
}

/// Multiplications that a random problem may take.
const BUDGET: u64 = 1 << 22;

/// Any problem that the contract covers; small, and often at an edge.
pub fn problems() -> impl Strategy<Value = MlaProblem> {
    problems_within(BUDGET)
}

/// The same with at most so many multiplications in the oracle.
pub fn problems_within(budget: u64) -> impl Strategy<Value = MlaProblem> {
    let dims = prop::sample::select(vec![
        (512u32, 64u32),
        (512, 64),
        (512, 64),
        (256, 64),
        (256, 32),
        (128, 32),
        (512, 0),
        (72, 8),
    ]);
    let heads = prop::sample::select(vec![1u32, 3, 8, 9, 16, 17, 63, 64, 126, 128, 200]);
    let queries = prop_oneof![Just(Queries::One), Just(Queries::Two)];
    let cache = prop_oneof![
        2 => Just(Cache::Records),
        1 => Just(Cache::Views),
        2 => Just(Cache::Two),
        2 => Just(Cache::DsMla),
    ];
    (
        strategy::problems_within(budget),
        dims,
        heads,
        queries,
        cache,
    )
        .prop_map(move |(mut other, (rank, rope), heads, queries, cache)| {
            other.layer.o_scale = 0.0;
            other.o_dtype = match (other.q_dtype, other.o_dtype) {
                (DType::F8E4M3 | DType::F8E5M2, DType::F16) => DType::F16,
                (DType::F8E4M3 | DType::F8E5M2, _) => DType::BF16,
                (q_dtype, _) => q_dtype,
            };
            if cache == Cache::DsMla {
                // Queries are not in fp8 there.
                other.q_dtype = other.o_dtype;
            }
            let (rank, rope) = match cache {
                Cache::DsMla => (512, 64),
                _ => (rank, rope),
            };
            let problem = MlaProblem {
                batch: absorbed(other),
                queries,
                cache: Cache::Records,
                share: None,
            };
            let problem = problem.heads(heads).dims(rank, rope);
            let mut problem = problem.tensors(queries, cache);
            problem.batch = strategy::within_budget(problem.batch, budget);
            problem
        })
}

/// What MLA takes of a problem.
fn absorbed(other: Problem) -> Problem {
    let given = &other.layer;
    let layer = Layer {
        mask: match given.mask {
            MaskKind::Full => MaskKind::Full,
            _ => MaskKind::Causal,
        },
        sm_scale: match given.sm_scale {
            0.0 => SM_SCALE,
            // Rows are longer than those that the scale was drawn for.
            stated => stated / 2.0,
        },
        q_scale: given.q_scale,
        k_scale: given.k_scale,
        lse: given.lse,
        ..Layer::plain()
    };
    Problem {
        kind: Kind::Mla,
        num_kv_heads: 1,
        split_keys: None,
        storage: match other.storage {
            Storage::Ragged => Storage::paged(3),
            Storage::Paged {
                page_size,
                form,
                unused_pages,
                shared_pages,
                ..
            } => Storage::Paged {
                page_size,
                layout: KvLayout::Nhd,
                form,
                unused_pages,
                shared_pages,
            },
        },
        layer,
        ..other
    }
}
