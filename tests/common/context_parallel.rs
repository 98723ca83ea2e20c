//! Several ranks in one process: what each holds of some contexts, and what the operators make of it.

use super::codec::{decode, encode, rounded, unit_roundoff};
use super::dense::Row;
use super::door::Session;
use super::instance::{Planned, for_each_index};
use super::memory::{HostMemory, Image, Memory, Resident, View};
use super::mla::{self, Cache, MlaLayer, MlaProblem, Queries, Share};
use super::problem::MaskKind;
use super::values::{mix, normal};
use folio::api::{CpLocalLengths, MlaContextChunks, Stream, cp_local_lengths, mla_context_chunks};
use folio::dtype::DType;
use folio::problem::{
    AttentionArgs, CpCorrectArgs, CpReorderArgs, LatentCache, LogBase, MlaGatherArgs, RecordPages,
};
use folio::tensor::Tensor;

/// Contexts whose tokens are dealt to ranks.
#[derive(Debug, Clone)]
pub struct Dealt {
    pub context_lens: Vec<i32>,
    pub world_size: u32,
    pub interleave: u32,
    pub page_size: u32,
    pub workspace_tokens: u64,
    pub width: i64,
    /// Between rows.
    pub gap: u32,
}

/// The tables of all chunks.
pub struct Tables {
    pub num_chunks: usize,
    pub chunk_tokens: u32,
    pub seq_starts: Vec<i32>,
    pub cu_seq_lens: Vec<i32>,
    pub cu_padded_lens: Vec<i32>,
    pub max_lens: Vec<i32>,
}

impl Dealt {
    pub fn tables(&self) -> Tables {
        let requests = self.context_lens.len();
        let rows = 200;
        let mut tables = Tables {
            num_chunks: 0,
            chunk_tokens: 0,
            seq_starts: vec![-1; rows * requests],
            cu_seq_lens: vec![-1; rows * (requests + 1)],
            cu_padded_lens: vec![-1; rows * (requests + 1)],
            max_lens: vec![-1; rows],
        };
        let mut num_chunks = 0;
        mla_context_chunks(MlaContextChunks {
            context_lens: &self.context_lens,
            workspace_tokens: self.workspace_tokens,
            page_size: self.page_size,
            world_size: self.world_size,
            interleave: self.interleave,
            max_num_chunks: rows as u32,
            seq_starts: Some(&mut tables.seq_starts),
            cu_seq_lens: Some(&mut tables.cu_seq_lens),
            cu_padded_lens: Some(&mut tables.cu_padded_lens),
            max_lens: Some(&mut tables.max_lens),
            num_chunks: &mut num_chunks,
            chunk_tokens: Some(&mut tables.chunk_tokens),
        })
        .unwrap();
        tables.num_chunks = num_chunks as usize;
        tables
    }

    /// Which rank holds a token, and as which of its own.
    fn place(&self, token: i64) -> (u32, i64) {
        let (world, interleave) = (i64::from(self.world_size), i64::from(self.interleave));
        let round = token / (world * interleave);
        let rank = token / interleave % world;
        (rank as u32, round * interleave + token % interleave)
    }

    /// Pages of a request on every rank: as many tokens as the first rank's.
    fn pages(&self, b: usize) -> i64 {
        let round = self.world_size * self.interleave;
        let padded = (self.context_lens[b] as u32).div_ceil(round) * self.interleave;
        padded.div_ceil(self.page_size).into()
    }

    /// A number for each token of all requests.
    fn number(b: usize, token: i64) -> f64 {
        (b as i64 * 4096 + token + 1) as f64
    }

    /// One rank's cache of records, each full of its token's number, and its block table.
    fn cache(&self, rank: u32) -> (Image, Image) {
        let requests = self.context_lens.len();
        let all: i64 = (0..requests).map(|b| self.pages(b)).sum();
        let columns = (0..requests).map(|b| self.pages(b)).max().unwrap_or(0);
        let page_size = i64::from(self.page_size);
        let shape = [all, page_size, self.width];
        let mut cache = Image::poisoned(View::compact(DType::F32, &shape));
        let mut table = Image::poisoned(View::compact(DType::I32, &[requests as i64, columns]));
        let mut first = 0;
        for b in 0..requests {
            for page in 0..self.pages(b) {
                table.put(&[b as i64, page], (first + page) as u64);
            }
            for token in 0..i64::from(self.context_lens[b]) {
                let (owner, at) = self.place(token);
                if owner == rank {
                    let page = first + at / page_size;
                    for d in 0..self.width {
                        let bits = encode(DType::F32, Self::number(b, token));
                        cache.put(&[page, at % page_size, d], bits);
                    }
                }
            }
            first += self.pages(b);
        }
        (cache, table)
    }

    /// Gathers every chunk on every rank, puts the ranks' rows together, and looks whether each request has the
    /// tokens of its chunk, each once, and no other row was written.
    pub fn check_chunks(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let tables = self.tables();
        let requests = self.context_lens.len();
        let resident = |image| Resident::new(memory, image);
        let lens = resident(Image::of_i32(&[requests as i64], &self.context_lens));
        for chunk in 0..tables.num_chunks {
            let row = |table: &[i32], columns: usize| {
                let values = &table[chunk * columns..][..columns];
                resident(Image::of_i32(&[columns as i64], values))
            };
            let starts = row(&tables.seq_starts, requests);
            let ends = row(&tables.cu_seq_lens, requests + 1);
            let padded = row(&tables.cu_padded_lens, requests + 1);
            let number = |table: &Resident<'_>| table.image().bits(&[requests as i64]) as i64;
            let (rows, rank_rows) = (number(&ends), number(&padded));
            let gathered = self.gathered(session, memory, &starts, &padded, rank_rows);
            let view = View::gapped(
                DType::F32,
                &[rows + 3, self.width],
                &[self.gap, 0],
                self.gap,
            );
            let dst = resident(Image::poisoned(view));
            let input = CpReorderArgs {
                gathered: gathered.tensor(),
                dst: dst.tensor(),
                context_lens: lens.tensor(),
                cu_seq_lens: ends.tensor(),
                cu_padded_lens: padded.tensor(),
                local_start: tables.seq_starts[chunk * requests] as u32,
                interleave: self.interleave,
            };
            session.cp_reorder(&input, Stream::default()).unwrap();
            self.check_rows(&tables, chunk, &dst.current())?;
        }
        Ok(())
    }

    /// `[world_size, rank_rows, width]`: what the ranks gather of a chunk.
    fn gathered<'m>(
        &self,
        session: &dyn Session,
        memory: &'m dyn Memory,
        starts: &Resident<'_>,
        padded: &Resident<'_>,
        rank_rows: i64,
    ) -> Resident<'m> {
        let shape = [self.world_size.into(), rank_rows, self.width];
        let view = View::gapped(DType::F32, &shape, &[0, self.gap, 0], 0);
        let mut all = Image::poisoned(view);
        for rank in 0..self.world_size {
            let (cache, table) = self.cache(rank);
            let (cache, table) = (Resident::new(memory, cache), Resident::new(memory, table));
            let view = View::compact(DType::F32, &[rank_rows, self.width]);
            let dst = Resident::new(memory, Image::poisoned(view));
            let input = MlaGatherArgs {
                cache: LatentCache {
                    kv: cache.tensor(),
                    kv_rope: None,
                    kv_dtype: None,
                    is_ds_mla: false,
                },
                dst: dst.tensor(),
                dst_rope: None,
                cu_seq_lens: padded.tensor(),
                seq_starts: Some(starts.tensor()),
                pages: RecordPages::Table(table.tensor()),
                k_scale: 0.0,
            };
            session.mla_gather(&input, Stream::default()).unwrap();
            let rows = dst.current();
            for_each_index(&[rank_rows, self.width], |at| {
                all.put(&[rank.into(), at[0], at[1]], rows.bits(at));
            });
        }
        Resident::new(memory, all)
    }

    fn check_rows(&self, tables: &Tables, chunk: usize, dst: &Image) -> Result<(), String> {
        let requests = self.context_lens.len();
        let ends = &tables.cu_seq_lens[chunk * (requests + 1)..][..requests + 1];
        for b in 0..requests {
            let mut numbers = Vec::new();
            for row in ends[b]..ends[b + 1] {
                let values = (0..self.width).map(|d| dst.value(&[row.into(), d]));
                let values: Vec<f64> = values.collect();
                if values.iter().any(|value| *value != values[0]) {
                    return Err(format!("chunk {chunk}: row {row} is {values:?}"));
                }
                numbers.push(values[0]);
            }
            numbers.sort_by(f64::total_cmp);
            let tokens = i64::from(tables.chunk_tokens);
            let first = chunk as i64 * tokens;
            let all = first..i64::from(self.context_lens[b]).min(first + tokens);
            let want: Vec<f64> = all.map(|token| Self::number(b, token)).collect();
            if numbers != want {
                return Err(format!(
                    "chunk {chunk}, request {b}: {numbers:?}, not {want:?}"
                ));
            }
        }
        let mut blank = dst.clone();
        let poisoned = Image::poisoned(dst.view.clone());
        for_each_index(&[ends[requests].into(), self.width], |at| {
            blank.put(at, poisoned.bits(at));
        });
        match blank == poisoned {
            true => Ok(()),
            false => Err(format!("chunk {chunk}: other rows were written")),
        }
    }
}

/// A softmax whose keys are dealt to ranks.
#[derive(Debug, Clone)]
pub struct Shares {
    pub world_size: i64,
    pub tokens: i64,
    pub heads: i64,
    pub dim: i64,
    pub dtype: DType,
    pub base: LogBase,
    /// lse_all is `[world_size, heads, tokens]` in memory.
    pub heads_first: bool,
    pub in_place: bool,
    pub gap: u32,
    pub seed: u64,
}

impl Shares {
    /// lse of a rank's keys in base e: `None` where it has none.
    fn lse(&self, rank: i64, token: i64, head: i64) -> Option<f64> {
        let hash = [rank, token, head]
            .iter()
            .fold(mix(self.seed), |hash, &i| mix(hash ^ i as u64));
        let row = mix(self.seed ^ mix((token * 64 + head) as u64));
        // Some rows have no keys on any rank.
        (hash % 4 != 0 && !row.is_multiple_of(9)).then(|| normal(hash) * 6.0 + 50.0)
    }

    /// As memory holds it: a rank without keys in one of three ways.
    fn stated(&self, rank: i64, token: i64, head: i64) -> f32 {
        let empty = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
        match self.lse(rank, token, head) {
            None => empty[((rank + token + head) % 3) as usize],
            Some(lse) => match self.base {
                LogBase::E => lse as f32,
                LogBase::Two => (lse * std::f64::consts::LOG2_E) as f32,
            },
        }
    }

    /// In base e, as the stated number is.
    fn exact(&self, rank: i64, token: i64, head: i64) -> f64 {
        let stated = f64::from(self.stated(rank, token, head));
        match self.base {
            _ if !stated.is_finite() => f64::NEG_INFINITY,
            LogBase::E => stated,
            LogBase::Two => stated * std::f64::consts::LN_2,
        }
    }

    fn value(&self, rank: i64, token: i64, head: i64, d: i64) -> f64 {
        if self.lse(rank, token, head).is_none() {
            return f64::NAN;
        }
        let index = [rank, token, head, d];
        let hash = index
            .iter()
            .fold(mix(!self.seed), |hash, &i| mix(hash ^ i as u64));
        rounded(self.dtype, normal(hash))
    }

    fn rows(&self) -> View {
        let shape = [self.tokens, self.heads, self.dim];
        View::gapped(self.dtype, &shape, &[self.gap, self.gap, 0], self.gap)
    }

    /// Corrects the outputs of all ranks: each against the formula, and their sum against attention over all keys.
    pub fn check(&self, session: &dyn Session, memory: &dyn Memory) -> Result<(), String> {
        let resident = |image| Resident::new(memory, image);
        let shape = [self.world_size, self.tokens, self.heads];
        let mut lse_all = View::compact(DType::F32, &shape);
        if self.heads_first {
            lse_all.strides = vec![self.tokens * self.heads, 1, self.tokens];
        }
        let mut lse_all = Image::poisoned(lse_all);
        for_each_index(&shape, |at| {
            lse_all.put(at, self.stated(at[0], at[1], at[2]).to_bits().into());
        });
        let lse_all = resident(lse_all);
        let mut sums = vec![0.0; (self.tokens * self.heads * self.dim) as usize];
        for rank in 0..self.world_size {
            let mut o = Image::poisoned(self.rows());
            for_each_index(&self.rows().shape, |at| {
                o.put(
                    at,
                    encode(self.dtype, self.value(rank, at[0], at[1], at[2])),
                );
            });
            let o = resident(o);
            let new = (!self.in_place).then(|| resident(Image::poisoned(self.rows())));
            let out = new.as_ref().unwrap_or(&o);
            let lse_out = View::compact(DType::F32, &[self.tokens, self.heads]);
            let lse_out = resident(Image::poisoned(lse_out));
            let input = CpCorrectArgs {
                lse_all: lse_all.tensor(),
                rank: rank as u32,
                o: o.tensor(),
                o_out: out.tensor(),
                lse_out: Some(lse_out.tensor()),
                lse_base: self.base,
            };
            session.cp_correct(&input, Stream::default()).unwrap();
            self.check_rank(rank, &out.current(), &lse_out.current(), &mut sums)?;
        }
        self.check_sums(&sums)
    }

    fn all(&self, token: i64, head: i64) -> f64 {
        let ranks = || (0..self.world_size).map(|rank| self.exact(rank, token, head));
        let max = ranks().fold(f64::NEG_INFINITY, f64::max);
        match max == f64::NEG_INFINITY {
            true => max,
            false => max + ranks().map(|lse| (lse - max).exp()).sum::<f64>().ln(),
        }
    }

    fn check_rank(
        &self,
        rank: i64,
        out: &Image,
        lse_out: &Image,
        sums: &mut [f64],
    ) -> Result<(), String> {
        let mut result = Ok(());
        for_each_index(&[self.tokens, self.heads], |at| {
            let all = self.all(at[0], at[1]);
            let in_base = match self.base {
                LogBase::E => all,
                LogBase::Two => all * std::f64::consts::LOG2_E,
            };
            let is = lse_out.value(at);
            // One rounding of a number around 50, and weights that are right to 1e-6.
            let is_close = (is - in_base).abs() <= 2e-6 + in_base.abs() * 2f64.powi(-23);
            if is != in_base && !is_close {
                result = Err(format!("lse {at:?} is {is}, not {in_base}"));
            }
            let own = self.exact(rank, at[0], at[1]);
            for d in 0..self.dim {
                let index = [at[0], at[1], d];
                let value = self.value(rank, at[0], at[1], d);
                let want = match own == f64::NEG_INFINITY {
                    true => 0.0,
                    false => value * (own - all).exp(),
                };
                let is = out.value(&index);
                // Weights are right to 2e-6, and to that of themselves; then a rounding.
                let slack = 2e-6 * want.abs() + subnormal(self.dtype);
                let bound = slack + unit_roundoff(self.dtype) * (want.abs() + slack);
                // NaN is not close to anything.
                let is_close = (is - want).abs() <= bound;
                if !is_close {
                    result = Err(format!("rank {rank}, {index:?} is {is}, not {want}"));
                }
                sums[((at[0] * self.heads + at[1]) * self.dim + d) as usize] += is;
            }
        });
        result
    }

    /// The sum of all ranks' outputs is the softmax over all keys, as one rank computes it.
    fn check_sums(&self, sums: &[f64]) -> Result<(), String> {
        let mut result = Ok(());
        for_each_index(&[self.tokens, self.heads, self.dim], |at| {
            let all = self.all(at[0], at[1]);
            let mut want = 0.0;
            let mut magnitude = 0.0;
            for rank in 0..self.world_size {
                let own = self.exact(rank, at[0], at[1]);
                if own > f64::NEG_INFINITY {
                    let term = self.value(rank, at[0], at[1], at[2]) * (own - all).exp();
                    want += term;
                    magnitude += term.abs() + subnormal(self.dtype);
                }
            }
            let is = sums[((at[0] * self.heads + at[1]) * self.dim + at[2]) as usize];
            let bound = (unit_roundoff(self.dtype) + 2e-6) * 1.01 * magnitude
                + self.world_size as f64 * subnormal(self.dtype);
            let is_close = (is - want).abs() <= bound;
            if !is_close {
                result = Err(format!("the sum {at:?} is {is}, not {want}"));
            }
        });
        result
    }
}

/// Attention over a context that is dealt to ranks.
#[derive(Debug, Clone)]
pub struct DealtContext {
    /// All keys, which every row sees; of queries as runtimes have them under context parallelism.
    pub whole: MlaProblem,
    pub world_size: usize,
    pub interleave: usize,
    pub base: LogBase,
    /// lse is `[heads, tokens]` in memory.
    pub heads_first: bool,
}

impl DealtContext {
    /// What one rank has.
    fn of_rank(&self, rank: usize) -> MlaProblem {
        let requests = &self.whole.batch.requests;
        let lengths: Vec<i32> = requests.iter().map(|r| r.kv_len as i32).collect();
        let mut own = vec![-1; lengths.len()];
        cp_local_lengths(CpLocalLengths {
            lengths: &lengths,
            world_size: self.world_size as u32,
            interleave: self.interleave as u32,
            rank: rank as i32,
            out: &mut own,
        })
        .unwrap();
        let mut problem = self.whole.clone();
        for (request, own) in problem.batch.requests.iter_mut().zip(own) {
            request.kv_len = own as u32;
        }
        problem.share = Some(Share {
            rank,
            world_size: self.world_size,
            interleave: self.interleave,
        });
        problem
    }

    /// Every rank attends to its own keys; their outputs are corrected as they come out, and added up: as one rank's
    /// attention over all keys, whose rows are `want`.
    pub fn check(
        &self,
        session: &dyn Session,
        memory: &dyn Memory,
        want: &[Vec<Row>],
    ) -> Result<(), String> {
        let batch = &self.whole.batch;
        let shape = [
            self.world_size,
            batch.num_tokens(),
            batch.num_qo_heads() as usize,
        ];
        let [ranks, tokens, heads] = shape.map(|n| n as i64);
        let mut lse_all = View::compact(DType::F32, &[ranks, tokens, heads]);
        if self.heads_first {
            lse_all.strides = vec![tokens * heads, 1, tokens];
        }
        let lse_all = Resident::new(memory, Image::poisoned(lse_all));
        let layers: Vec<MlaLayer<'_>> = (0..self.world_size)
            .map(|rank| {
                let of_rank = lse_all.tensor().narrow(0, rank as i64, 1).remove_dim(0);
                self.attend(session, memory, rank, of_rank)
            })
            .collect();
        let mut sums = vec![0.0; tokens as usize * heads as usize * batch.head_dim_vo as usize];
        for (rank, layer) in layers.iter().enumerate() {
            let lse_out = View::compact(DType::F32, &[tokens, heads]);
            let lse_out = Resident::new(memory, Image::poisoned(lse_out));
            let o = layer.input().o;
            let input = CpCorrectArgs {
                lse_all: lse_all.tensor(),
                rank: rank as u32,
                o,
                o_out: o,
                lse_out: Some(lse_out.tensor()),
                lse_base: self.base,
            };
            session.cp_correct(&input, Stream::default()).unwrap();
            self.check_lse(want, &lse_out.current())?;
            for (sum, bits) in sums.iter_mut().zip(layer.output().o) {
                *sum += decode(batch.o_dtype, bits);
            }
        }
        self.check_sum_of_ranks(want, &sums)
    }

    /// One rank's attention over its own keys.
    fn attend<'m>(
        &self,
        session: &dyn Session,
        memory: &'m dyn Memory,
        rank: usize,
        lse: Tensor,
    ) -> MlaLayer<'m> {
        let problem = self.of_rank(rank);
        let handle = session.attention(self.whole.desc()).unwrap();
        let planned = Planned::new(handle, memory, &HostMemory, &problem.batch).unwrap();
        let layer = MlaLayer::new(memory, &problem);
        let args = AttentionArgs {
            lse: Some(lse),
            lse_base: self.base,
            ..layer.input()
        };
        planned.run_args(&args).unwrap();
        layer
    }

    fn check_lse(&self, want: &[Vec<Row>], lse: &Image) -> Result<(), String> {
        let unit = match self.base {
            LogBase::E => 1.0,
            LogBase::Two => std::f64::consts::LOG2_E,
        };
        for (token, rows) in want.iter().enumerate() {
            for (head, row) in rows.iter().enumerate() {
                let (is, want) = (lse.value(&[token as i64, head as i64]), row.lse * unit);
                // Of the ranks' lse, of their sum, and a rounding of each.
                let bound = (self.lse_error(row) + 2e-6) * unit + want.abs() * 2f64.powi(-22);
                if is != want && (is - want).abs() > bound || is.is_nan() {
                    return Err(format!(
                        "lse of row {token}, head {head} is {is}, not {want}"
                    ));
                }
            }
        }
        Ok(())
    }

    fn lse_error(&self, row: &Row) -> f64 {
        let tolerance = self.whole.tolerance();
        tolerance.score
            + tolerance.score_growth * row.largest_score
            + tolerance.score_sum * row.score_magnitude
    }

    /// A rank's share of the weights comes from two lse; its output is rounded twice.
    fn check_sum_of_ranks(&self, want: &[Vec<Row>], sums: &[f64]) -> Result<(), String> {
        let (batch, tolerance) = (&self.whole.batch, self.whole.tolerance());
        let (unit, dim) = (unit_roundoff(batch.o_dtype), batch.head_dim_vo as usize);
        let heads = batch.num_qo_heads() as usize;
        let ranks = self.world_size as f64;
        for (n, &sum) in sums.iter().enumerate() {
            let row = &want[n / dim / heads][n / dim % heads];
            let d = n % dim;
            let relative = tolerance.weight + 4.0 * self.lse_error(row) + 2.02 * unit + 4e-6;
            let denormal = match tolerance.fp16_weights {
                true => row.denormal_weights[d],
                false => 0.0,
            };
            let bound = relative * row.magnitude[d]
                + row.keys as f64 * tolerance.underflow
                + denormal
                + row.flushed_weights[d]
                + 2.0 * ranks * subnormal(batch.o_dtype);
            // A row without keys is 0 on every rank.
            let is_close = match row.keys {
                0 => sum == 0.0,
                _ => (sum - row.o[d]).abs() <= bound,
            };
            if !is_close {
                return Err(format!(
                    "the sum of the ranks' element {n} is {sum:e}, not within {bound:e} of {:e}",
                    row.o[d]
                ));
            }
        }
        Ok(())
    }
}

/// As many ranks as one: by every number of ranks, interleave, base and layout of lse. Some ranks have no keys of some
/// requests, or of none.
pub fn ranks_attend(
    session: &dyn Session,
    memory: &dyn Memory,
    heads: u32,
    dtype: DType,
    cache: Cache,
) {
    let lens = [(1, 0), (1, 3), (2, 17), (1, 1000)];
    let mut whole = MlaProblem::plain(&lens).of(dtype).heads(heads);
    whole = whole.tensors(Queries::Two, cache);
    whole.batch.layer.mask = MaskKind::Full;
    whole.batch.layer.lse = None;
    let want = mla::attention(&whole);
    for world_size in [2, 4, 8] {
        for (interleave, base, heads_first) in [
            (1, LogBase::E, false),
            (1, LogBase::Two, true),
            (4, LogBase::E, true),
            (4, LogBase::Two, false),
        ] {
            let dealt = DealtContext {
                whole: whole.clone(),
                world_size,
                interleave,
                base,
                heads_first,
            };
            let checked = dealt.check(session, memory, &want);
            assert_eq!(checked, Ok(()), "{dealt:?}");
        }
    }
}

/// Half the distance of the smallest numbers.
fn subnormal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-25),
        _ => decode(DType::F32, 1),
    }
}
