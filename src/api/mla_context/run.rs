//! One run of a planned MLA context handle, or a step of one: of every chunk the gather, the up-projection and attention, which
//! is added to a sum in fp32, and then attention over the new tokens, which is added to it too; the last chunk with them at once,
//! where a kernel does that. Which chunks there are is in `cuts`.

use super::cuts::Cut;
use super::operators::{Operators, Planned};
use crate::api::mla_cache::{checked_gather, mla_gather};
use crate::api::projection::up_project_existing;
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{
    AttentionArgs, Checked, ChunkRows, ContextKeys, CopyWeightsArgs, Earlier, Mask, MergeArgs,
    MlaContextArgs, MlaGatherArgs, RecordPages, Sum, Unpacking, UpProjectArgs,
};
use crate::tensor::Tensor;
use std::ops::Range;

/// One run, or a step of one.
pub(super) struct Run<'a> {
    operators: &'a Operators,
    planned: &'a Planned,
    args: MlaContextArgs,
    /// Rows of the sum.
    tokens: i64,
    stream: Stream,
}

impl<'a> Run<'a> {
    /// The run of checked arguments, whose cache is checked here.
    pub fn new(
        operators: &'a Operators,
        planned: &'a Planned,
        args: MlaContextArgs,
        stream: Stream,
    ) -> Result<Run<'a>> {
        // A graph's rows are those of every later plan.
        let tokens = match operators.desc.graph {
            true => common_rows(&args).min(operators.desc.max_num_tokens.into()),
            false => planned.num_tokens,
        };
        let run = Run {
            operators,
            planned,
            args,
            tokens,
            stream,
        };
        run.check_cache()?;
        Ok(run)
    }

    /// Everything. What may be refused of the gathers is, before anything is written.
    pub fn whole(&self) -> Result<()> {
        for cut in self.operators.cuts.list() {
            let gather = self.gather_args(cut, &self.chunk_rows(cut))?;
            checked_gather(&gather, self.operators.context.device())?;
        }
        // The sum begins without keys: so plans make it, and the last part of a run leaves it.
        self.parts().inspect_err(|_| drop(self.start()))
    }

    fn parts(&self) -> Result<()> {
        let Some((last, others)) = self.operators.cuts.list().split_last() else {
            return self.new_tokens();
        };
        for cut in others {
            let rows = self.make_rows(cut)?;
            self.attend(cut, &rows)?;
        }
        self.make_rows(last)?;
        self.last(last)
    }

    /// A chunk's rows, from the cache and the weights.
    fn make_rows(&self, cut: &Cut) -> Result<ChunkRows> {
        let rows = self.chunk_rows(cut);
        self.gather(cut, &rows)?;
        self.unpack(cut, &rows)?;
        Ok(rows)
    }

    /// Attention over the last chunk, and over the new tokens.
    pub fn last(&self, cut: &Cut) -> Result<()> {
        let rows = self.chunk_rows(cut);
        if self.new_tokens_with(&rows)? {
            return Ok(());
        }
        if !self.operators.has_sum() {
            self.start()?;
        }
        self.attend(cut, &rows)?;
        self.new_tokens()
    }

    /// Both at once. False where the kernel that takes the run cannot: then nothing was done.
    fn new_tokens_with(&self, last: &ChunkRows) -> Result<bool> {
        let Some(with_last_chunk) = &self.operators.with_last_chunk else {
            return Ok(false);
        };
        let context = ContextKeys {
            k: last.k_nope.insert_dim(1),
            k_rope: last.rope.insert_dim(1).insert_dim(1),
            v: last.v.insert_dim(1),
            indptr: self.operators.last_chunk_indptr(self.planned)?,
        };
        let earlier = Earlier {
            sum: self.operators.has_sum().then(|| self.ending_sum()),
            context: Some(context),
        };
        let attention = &with_last_chunk.attention;
        attention.run_after(&self.attend_new_tokens(), &earlier, self.stream)
    }

    /// The sum of all rows, which the last part of a run ends.
    fn ending_sum(&self) -> Sum {
        Sum {
            ends: true,
            ..self.sum(&(0..self.tokens))
        }
    }

    /// New tokens over themselves.
    fn attend_new_tokens(&self) -> AttentionArgs {
        let args = &self.args;
        AttentionArgs {
            k_rope: Some(args.k_rope),
            lse: args.lse,
            lse_base: args.lse_base,
            sm_scale: args.sm_scale,
            ..AttentionArgs::new(args.q, args.k_nope, args.v, args.o)
        }
    }

    /// Begins a run that goes step by step: the steps of the one before may not have been the last ones.
    pub fn begin(&self) -> Result<()> {
        match self.operators.has_sum() {
            true => self.start(),
            false => Ok(()),
        }
    }

    /// A sum of which no row has seen a key.
    fn start(&self) -> Result<()> {
        self.clear(self.sum(&(0..self.tokens)).lse)
    }

    /// The last part: attention of the new tokens over themselves, and what they came to over the chunks. Of both, each row's
    /// output. Last, because every row has this part: no other one has to write the rows without context.
    pub fn new_tokens(&self) -> Result<()> {
        let attention = &self.operators.alone;
        let attend = self.attend_new_tokens();
        if self.operators.cuts.list().is_empty() {
            return attention.run(&attend, self.stream);
        }
        let sum = self.ending_sum();
        match attention.run_after(&attend, &of_sum(sum), self.stream)? {
            true => Ok(()),
            false => self.merge_new_tokens(&attend, &sum, &(0..self.tokens)),
        }
    }

    /// The same by two operators, where no kernel does it at once: both parts are of the output's type then.
    fn merge_new_tokens(&self, attend: &AttentionArgs, sum: &Sum, rows: &Range<i64>) -> Result<()> {
        let part = self.part(rows);
        let attention = &self.operators.alone;
        let apart = AttentionArgs {
            lse: Some(part.lse),
            ..*attend
        };
        attention.run(&apart, self.stream)?;
        let of_rows = |tensor: Tensor| tensor.narrow(0, rows.start, rows.end - rows.start);
        let o = of_rows(self.args.o);
        let of_chunks = match o.dtype() {
            DType::F32 => sum.o,
            _ => {
                let rounded = of_rows(self.planned.buffers.rounded_o);
                self.copy(sum.o, rounded)?;
                rounded
            }
        };
        self.merge(MergeArgs {
            v_a: of_chunks,
            s_a: sum.lse,
            v_b: o,
            s_b: part.lse,
            v_out: o,
            s_out: self.args.lse.map(of_rows),
            ..self.merge_args(sum, &part)
        })?;
        self.clear(sum.lse)
    }

    /// What some rows came to over the chunks so far.
    fn sum(&self, rows: &Range<i64>) -> Sum {
        let buffers = &self.planned.buffers;
        let of_rows = |tensor: Tensor| tensor.narrow(0, rows.start, rows.end - rows.start);
        Sum {
            o: of_rows(buffers.sum_o),
            lse: of_rows(buffers.sum_lse),
            ends: false,
        }
    }

    /// Room for what as many rows come to over one part alone.
    fn part(&self, rows: &Range<i64>) -> Sum {
        let buffers = &self.planned.buffers;
        let of_rows = |tensor: Tensor| tensor.narrow(0, 0, rows.end - rows.start);
        Sum {
            o: of_rows(buffers.part_o),
            lse: of_rows(buffers.part_lse),
            ends: false,
        }
    }

    /// A chunk's rows: the caller's, or the workspace's.
    pub fn chunk_rows(&self, cut: &Cut) -> ChunkRows {
        let rows = match self.args.unpacking {
            Unpacking::Caller(rows) => rows,
            Unpacking::Weights(_) => {
                let buffers = &self.planned.buffers;
                ChunkRows {
                    latent: buffers.latent,
                    rope: buffers.rope,
                    k_nope: buffers.k_nope,
                    v: buffers.v,
                }
            }
        };
        let of_chunk = |rows: Tensor| rows.narrow(0, 0, cut.rows);
        ChunkRows {
            latent: of_chunk(rows.latent),
            rope: of_chunk(rows.rope),
            k_nope: of_chunk(rows.k_nope),
            v: of_chunk(rows.v),
        }
    }

    /// Records of a chunk to its rows.
    pub fn gather(&self, cut: &Cut, rows: &ChunkRows) -> Result<()> {
        let gather = self.gather_args(cut, rows)?;
        mla_gather(&self.operators.context, &gather, self.stream)
    }

    fn gather_args(&self, cut: &Cut, rows: &ChunkRows) -> Result<MlaGatherArgs> {
        let tables = self.operators.tables(self.planned, cut)?;
        Ok(MlaGatherArgs {
            cache: self.args.cache,
            dst: rows.latent,
            dst_rope: Some(rows.rope),
            cu_seq_lens: tables.kv_indptr,
            seq_starts: Some(tables.starts),
            pages: self.pages(&cut.requests),
            k_scale: self.args.k_scale,
        })
    }

    /// Checks the cache of a run, whether or not there is something to gather.
    fn check_cache(&self) -> Result<()> {
        let (operators, buffers) = (self.operators, &self.planned.buffers);
        let nothing = MlaGatherArgs {
            cache: self.args.cache,
            dst: buffers.latent.narrow(0, 0, 0),
            dst_rope: Some(buffers.rope.narrow(0, 0, 0)),
            cu_seq_lens: operators.zero(self.planned)?,
            seq_starts: None,
            pages: self.pages(&(0..0)),
            k_scale: self.args.k_scale,
        };
        checked_gather(&nothing, operators.context.device()).map(drop)
    }

    /// The page ids of some requests.
    fn pages(&self, requests: &Range<usize>) -> RecordPages {
        let (first, count) = (requests.start as i64, requests.len() as i64);
        match self.planned.pages {
            RecordPages::Table(table) => RecordPages::Table(table.narrow(0, first, count)),
            RecordPages::Csr { indptr, indices } => RecordPages::Csr {
                indptr: indptr.narrow(0, first, count + 1),
                indices,
            },
        }
    }

    /// Keys and values of a chunk. One of a graph has room for more rows than a plan fills.
    fn unpack(&self, cut: &Cut, rows: &ChunkRows) -> Result<()> {
        let Unpacking::Weights(weights) = self.args.unpacking else {
            return Ok(());
        };
        let project = UpProjectArgs {
            kv_c: rows.latent,
            w_uk: Some(weights.w_uk),
            w_uv: Some(weights.w_uv),
            k_nope: Some(rows.k_nope),
            v: Some(rows.v),
        };
        let tables = self.operators.tables(self.planned, cut)?;
        let existing = tables.kv_indptr.narrow(0, cut.requests.len() as i64, 1);
        let context = &self.operators.context;
        up_project_existing(context, &project, Some(&existing), self.stream)
    }

    /// Attention over a chunk, added to the sum.
    pub fn attend(&self, cut: &Cut, rows: &ChunkRows) -> Result<()> {
        let tokens = self.tokens_of(cut);
        let sum = self.sum(&tokens);
        let q = (self.args.q).narrow(0, tokens.start, tokens.end - tokens.start);
        let attend = AttentionArgs {
            k_rope: Some(rows.rope),
            lse: Some(sum.lse),
            lse_base: self.args.lse_base,
            sm_scale: self.args.sm_scale,
            mask: Mask::Full,
            ..AttentionArgs::new(q, rows.k_nope, rows.v, sum.o)
        };
        let chunk = match self.operators.cuts.has_one_chunk() {
            true => self.operators.planned_chunk(),
            false => self.operators.plan_chunk(self.planned, cut, self.stream)?,
        };
        if chunk.run_after(&attend, &of_sum(sum), self.stream)? {
            return Ok(());
        }
        let part = self.part(&tokens);
        // A graph's plan has the rows of those requests alone that have tokens in the chunk.
        self.clear(part.lse)?;
        let apart = AttentionArgs {
            lse: Some(part.lse),
            o: part.o,
            ..attend
        };
        chunk.run(&apart, self.stream)?;
        self.merge(self.merge_args(&sum, &part))
    }

    /// The merge of a part with the sum, in place.
    fn merge_args(&self, sum: &Sum, part: &Sum) -> MergeArgs {
        MergeArgs {
            v_a: sum.o,
            s_a: sum.lse,
            v_b: part.o,
            s_b: part.lse,
            v_out: sum.o,
            s_out: Some(sum.lse),
            mask: None,
            lse_base: self.args.lse_base,
            num_tokens_without_a: 0,
            o_scale: 1.0,
        }
    }

    fn merge(&self, args: MergeArgs) -> Result<()> {
        let backend = self.operators.context.backend();
        backend.merge(&Checked::new(args), self.stream)
    }

    /// The rows that attend a chunk.
    fn tokens_of(&self, cut: &Cut) -> Range<i64> {
        match self.operators.desc.graph {
            true => 0..self.tokens,
            false => cut.tokens.clone(),
        }
    }

    fn clear(&self, lse: Tensor) -> Result<()> {
        self.operators.clear(self.planned, lse, self.stream)
    }

    fn copy(&self, source: Tensor, target: Tensor) -> Result<()> {
        let copy = Checked::new(CopyWeightsArgs { source, target });
        let backend = self.operators.context.backend();
        backend.copy_weights(&copy, self.stream)
    }
}

fn of_sum(sum: Sum) -> Earlier {
    Earlier {
        sum: Some(sum),
        context: None,
    }
}

/// Rows that queries and outputs have.
fn common_rows(args: &MlaContextArgs) -> i64 {
    let rows = args.q.extent(0).min(args.o.extent(0));
    args.lse.map_or(rows, |lse| rows.min(lse.extent(0)))
}
