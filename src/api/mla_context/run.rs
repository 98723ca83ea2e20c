//! One run of a planned MLA context handle, or a step of one: attention over the new tokens, and of every chunk the
//! gather, the up-projection, attention and the sum. Which chunks there are is in `cuts`.

use super::cuts::Cut;
use super::operators::{Operators, Planned};
use crate::api::mla_cache::{checked_gather, mla_gather};
use crate::api::projection::up_project_existing;
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{
    AttentionArgs, Checked, ChunkRows, CopyWeightsArgs, Mask, MergeArgs, MlaContextArgs,
    MlaGatherArgs, RecordPages, Unpacking, UpProjectArgs,
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
        let cuts = self.operators.cuts.list().iter();
        for cut in cuts.clone() {
            let gather = self.gather_args(cut, &self.chunk_rows(cut))?;
            checked_gather(&gather, self.operators.context.device())?;
        }
        self.new_tokens()?;
        for cut in cuts {
            let rows = self.chunk_rows(cut);
            self.gather(cut, &rows)?;
            self.unpack(cut, &rows)?;
            self.attend(cut, &rows)?;
        }
        self.finish()
    }

    /// Attention of the new tokens over themselves: the output, or the first part of the sum.
    pub fn new_tokens(&self) -> Result<()> {
        let args = &self.args;
        let alone = self.operators.cuts.list().is_empty();
        let (attention, o, lse) = match alone {
            true => (&self.operators.alone, args.o, args.lse),
            false => (&self.operators.first, self.sum(), Some(self.sum_lse())),
        };
        let attend = AttentionArgs {
            k_rope: Some(args.k_rope),
            lse,
            lse_base: args.lse_base,
            sm_scale: args.sm_scale,
            ..AttentionArgs::new(args.q, args.k_nope, args.v, o)
        };
        attention.run(&attend, self.stream)
    }

    /// Outputs so far: the caller's, where they are fp32.
    fn sum(&self) -> Tensor {
        match self.args.o.dtype() {
            DType::F32 => self.args.o,
            _ => self.planned.buffers.sum_o,
        }
    }

    /// Its lse: the caller's, where it is fp32.
    fn sum_lse(&self) -> Tensor {
        let lse = self.args.lse.filter(|lse| lse.dtype() == DType::F32);
        lse.unwrap_or(self.planned.buffers.sum_lse)
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

    /// Attention over a chunk, added to the sum. With the last chunk the sum is rounded to the output.
    pub fn attend(&self, cut: &Cut, rows: &ChunkRows) -> Result<()> {
        let tokens = self.tokens_of(cut);
        let of_chunk = |rows: Tensor| rows.narrow(0, tokens.start, tokens.end - tokens.start);
        let buffers = &self.planned.buffers;
        let count = tokens.end - tokens.start;
        let (part_o, part_lse) = (
            buffers.part_o.narrow(0, 0, count),
            buffers.part_lse.narrow(0, 0, count),
        );
        let attend = AttentionArgs {
            k_rope: Some(rows.rope),
            lse: Some(part_lse),
            lse_base: self.args.lse_base,
            sm_scale: self.args.sm_scale,
            mask: Mask::Full,
            ..AttentionArgs::new(of_chunk(self.args.q), rows.k_nope, rows.v, part_o)
        };
        self.attend_part(cut, &attend)?;
        let (sum_o, sum_lse) = (of_chunk(self.sum()), of_chunk(self.sum_lse()));
        let add = MergeArgs {
            v_a: sum_o,
            s_a: sum_lse,
            v_b: part_o,
            s_b: part_lse,
            v_out: match self.is_last(cut) {
                true => of_chunk(self.args.o),
                false => sum_o,
            },
            s_out: Some(sum_lse),
            mask: None,
            lse_base: self.args.lse_base,
            num_tokens_without_a: 0,
            o_scale: 1.0,
        };
        let backend = self.operators.context.backend();
        backend.merge(&Checked::new(add), self.stream)
    }

    fn is_last(&self, cut: &Cut) -> bool {
        let last = self.operators.cuts.list().last();
        last.is_some_and(|last| std::ptr::eq(last, cut))
    }

    /// The rows that attend a chunk.
    fn tokens_of(&self, cut: &Cut) -> Range<i64> {
        match self.operators.desc.graph {
            true => 0..self.tokens,
            false => cut.tokens.clone(),
        }
    }

    /// Attention over a chunk alone.
    fn attend_part(&self, cut: &Cut, args: &AttentionArgs) -> Result<()> {
        let chunk = match self.operators.cuts.has_one_chunk() {
            true => self.operators.planned_chunk(),
            false => self.operators.plan_chunk(self.planned, cut, self.stream)?,
        };
        chunk.run(args, self.stream)
    }

    /// Rounds the sums of the rows that the last chunk was not for, and the lse of all.
    pub fn finish(&self) -> Result<()> {
        let Some(last) = self.operators.cuts.list().last() else {
            return Ok(());
        };
        if self.args.o.dtype() != DType::F32 {
            let rounded = self.tokens_of(last);
            for tokens in [0..rounded.start, rounded.end..self.tokens] {
                let count = tokens.end - tokens.start;
                let rows = |tensor: Tensor| tensor.narrow(0, tokens.start, count);
                self.round(rows(self.sum()), rows(self.args.o))?;
            }
        }
        match self.args.lse {
            Some(lse) if lse.dtype() != DType::F32 => {
                let rows = |lse: Tensor| lse.narrow(0, 0, self.tokens).insert_dim(0);
                self.round(rows(self.sum_lse()), rows(lse))
            }
            _ => Ok(()),
        }
    }

    fn round(&self, source: Tensor, target: Tensor) -> Result<()> {
        let copy = Checked::new(CopyWeightsArgs { source, target });
        let backend = self.operators.context.backend();
        backend.copy_weights(&copy, self.stream)
    }
}

/// Rows that queries and outputs have.
fn common_rows(args: &MlaContextArgs) -> i64 {
    let rows = args.q.extent(0).min(args.o.extent(0));
    args.lse.map_or(rows, |lse| rows.min(lse.extent(0)))
}
