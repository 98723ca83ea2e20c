//! Queries of MLA in fp8: a launch before the attention kernel makes rows of 16 bits of them in the workspace, `folio_latent_queries`
//! of `kernels/widen/latent_queries.cu`. To the kernels for MLA that is a problem with such queries. Queries of other attention are
//! `widen_queries`' matter.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::keyless::LATENT_QUERIES;
use crate::cuda::latent_queries_params::LatentQueriesParams;
use crate::cuda::params::{Divisor, PlanView, Rows, dtype_code, row_alignment};
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionDesc, Checked, Kind};
use crate::tensor::Tensor;

/// Elements that a lane takes at a time.
const PIECE: u32 = 8;
/// Threads that take a row together.
const WARP: u32 = 32;
/// Rows that there may be: the kernel counts them in 31 bits.
const MOST_ROWS: u32 = i32::MAX as u32;
/// Blocks for each multiprocessor, at most.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// The kernel for one problem.
#[derive(Debug)]
pub struct LatentQueries {
    function: Function,
    desc: AttentionDesc,
    most_blocks: u32,
}

impl LatentQueries {
    /// Loads the kernel, where the problem is MLA over queries in fp8.
    ///
    /// # Errors
    /// As [`Loader::find`]; [`Error::Unsupported`] for more rows than the kernel counts.
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Option<Self>> {
        if !is_widened(desc) {
            return Ok(None);
        }
        let most_tokens = MOST_ROWS / desc.num_qo_heads;
        if desc.max_num_tokens > most_tokens {
            return Err(Error::Unsupported(format!(
                "max_num_tokens: {} is not supported with q_dtype {} and num_heads {} by the CUDA backend; up to {most_tokens} is",
                desc.max_num_tokens, desc.q_dtype, desc.num_qo_heads
            )));
        }
        let cc = context.device().compute_capability;
        let find = || LATENT_QUERIES.unsupported(cc);
        let (_, function) = loader.find(LATENT_QUERIES.candidates(cc), find)?;
        Ok(Some(LatentQueries {
            function,
            desc: *desc,
            most_blocks: BLOCKS_PER_MULTIPROCESSOR * context.device().sm_count,
        }))
    }

    /// Memory for the rows of the largest batch.
    pub fn bytes(desc: &AttentionDesc) -> usize {
        let elements = u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_qk);
        let element = desc.o_dtype.size() as u64;
        match is_widened(desc) {
            true => (u64::from(desc.max_num_tokens) * elements * element) as usize,
            false => 0,
        }
    }

    /// A run as one over the rows that the kernel writes at `rows`.
    ///
    /// # Errors
    /// `Internal` where the room cannot be a tensor's.
    pub fn as_rows(
        &self,
        args: &Checked<AttentionArgs>,
        view: &PlanView,
        rows: u64,
    ) -> Result<(LatentQueriesParams, Checked<AttentionArgs>)> {
        let desc = &self.desc;
        let num_tokens = args.q.extent(0).min(desc.max_num_tokens.into());
        let parts = [Some(&args.q), args.q_rope.as_ref()];
        let is_aligned = (parts.into_iter().flatten()).all(|part| row_alignment(part) >= PIECE);
        let params = LatentQueriesParams {
            qo_indptr: view.qo_indptr,
            counts: view.counts,
            q: Rows::of(&args.q),
            q_rope: args.q_rope.as_ref().map_or(Rows::default(), Rows::of),
            rows,
            num_heads: Divisor::new(desc.num_qo_heads),
            num_tokens: num_tokens as u32,
            pieces: desc.head_dim_vo / PIECE,
            rope_pieces: desc.rope_dim() / PIECE,
            q_dtype: dtype_code(desc.q_dtype),
            row_dtype: dtype_code(desc.o_dtype),
            is_aligned: is_aligned.into(),
            reserved: 0,
        };
        let [heads, width] = [desc.num_qo_heads, desc.head_dim_qk].map(i64::from);
        let strides = [heads * width, width, 1];
        let part = |name, first: u32, columns: u32| {
            let address = (rows + u64::from(first) * desc.o_dtype.size() as u64) as *mut u8;
            let shape = [num_tokens, heads, columns.into()];
            let device = args.q.device();
            // SAFETY: room of the workspace, which the host keeps for as long as the plan.
            unsafe { Tensor::new(name, address, device, desc.o_dtype, &shape, Some(&strides)) }
        };
        let q_rope = match args.q_rope {
            Some(_) => Some(part("q_rope", desc.head_dim_vo, desc.rope_dim())?),
            None => None,
        };
        let widened = AttentionArgs {
            q: part("q_latent", 0, desc.head_dim_vo)?,
            q_rope,
            ..**args
        };
        Ok((params, Checked::new(widened)))
    }

    /// Enqueues the kernel.
    pub fn launch(
        &self,
        current: &Current<'_>,
        params: &LatentQueriesParams,
        stream: Stream,
    ) -> Result<()> {
        let rows = u64::from(params.num_tokens) * u64::from(self.desc.num_qo_heads);
        let threads = LATENT_QUERIES.threads();
        let blocks = rows
            .div_ceil(u64::from(threads / WARP))
            .clamp(1, self.most_blocks.into());
        let launch = Launch {
            grid: [blocks as u32, 1, 1],
            threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the kernel takes a `FolioLatentQueriesParams`; it reads the plan and the caller's queries, which `api` checked,
        // and writes rows of as many tokens as there is room for.
        unsafe { launch.enqueue(current, &self.function, params, &[]) }
    }
}

/// The problem that the attention kernels get: with queries in the type of o, which has 16 bits beside queries in fp8.
pub fn over_rows(desc: &AttentionDesc) -> AttentionDesc {
    AttentionDesc {
        q_dtype: match is_widened(desc) {
            true => desc.o_dtype,
            false => desc.q_dtype,
        },
        ..*desc
    }
}

fn is_widened(desc: &AttentionDesc) -> bool {
    desc.kind == Kind::Mla && desc.q_dtype.is_fp8()
}
