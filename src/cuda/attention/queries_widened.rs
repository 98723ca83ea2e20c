//! Hopper's prefill kernel behind one that makes fp16 rows of queries in fp8. It loads keys as it does for queries of 16 bits: rows
//! of keys, where they pay, are `prefill_widened`'s. For queries in fp8 whose products the caller does not permit in fp8.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, Inputs, OrLacks, Run};
use super::sm90_prefill::Sm90Prefill;
use super::widen_queries::{WidenQueries, missing_of_queries, params_without_rows};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current};
use crate::cuda::params::{AttentionParams, Rows};
use crate::cuda::widen_params::WidenParams;
use crate::error::Result;
use crate::problem::{AttentionDesc, Tiling};

/// The kernels for one problem.
#[derive(Debug)]
pub struct QueriesWidened {
    name: String,
    queries: WidenQueries,
    prefill: Sm90Prefill,
    desc: AttentionDesc,
    /// Tokens of Q that there is room for.
    num_tokens: u32,
}

impl QueriesWidened {
    /// Puts the kernel that widens before one for rows.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(
        prefill: Sm90Prefill,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        let num_tokens = WidenQueries::most_tokens(desc);
        // Where a launch serves other batches too, or does not depend on the batch, all have to have room.
        let is_for_all = desc.graph || desc.batch_invariant;
        let has_room = num_tokens == desc.max_num_tokens || !is_for_all;
        let queries = WidenQueries::load(loader, context, desc)?;
        Ok(match queries {
            Some(queries) if has_room && desc.shared_levels == 0 => Ok(QueriesWidened {
                name: format!("{}_q{}", prefill.name(), desc.q_dtype.name()),
                queries,
                prefill,
                desc: *desc,
                num_tokens,
            }),
            _ => Err(Feature::Widening.into()),
        })
    }
}

impl AttentionKernel for QueriesWidened {
    fn name(&self) -> &str {
        &self.name
    }

    fn tiling(&self) -> Tiling {
        self.prefill.tiling()
    }

    fn few_keys(&self) -> u32 {
        self.prefill.few_keys()
    }

    fn most_rows(&self) -> u32 {
        self.prefill.most_rows()
    }

    fn starts_at(&self) -> u32 {
        self.prefill.starts_at()
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        (self.prefill.missing_over(run) | missing_of_queries(&self.desc, &args.q, &args.o))
            .and(Feature::SplitKeys, args.k_rope.is_some())
            .and(
                Feature::Widening,
                run.num_tokens > u64::from(self.num_tokens),
            )
    }

    fn scratch_bytes(&self, _most_items: usize) -> usize {
        WidenQueries::bytes(&self.desc, self.num_tokens)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let of_run = params_without_rows(&self.desc, run);
        let params = WidenParams {
            q_rows: run.scratch,
            num_tokens: of_run.num_tokens.min(self.num_tokens),
            ..of_run
        };
        // SAFETY: the memory that `scratch_bytes` asked for has room for so many tokens, and is the launch's.
        let q = unsafe {
            self.queries.enqueue(current, &params, false, stream)?;
            self.queries.rows(run.scratch, self.num_tokens, run)?
        };
        let inputs = Inputs {
            q: &q,
            k: &run.args.k,
            v: &run.args.v,
            params: AttentionParams {
                q: Rows::of(&q),
                ..*run.params
            },
            dependent: true,
        };
        self.prefill.launch_over(&inputs, current, run, stream)
    }
}
