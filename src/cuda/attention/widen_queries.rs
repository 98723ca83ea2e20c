//! Queries in fp8 to rows of fp16, which has all numbers of fp8: `folio_widen_queries` of `kernels/widen/widen.cu`. For Hopper's
//! prefill kernel, which reads queries of 16 bits. Where in the workspace the rows lie, the caller says.
#![allow(unsafe_code)]

use super::features::Features;
use super::kernel::Run;
use super::sm90_prefill_maps::{missing_of_rows, rows_suit};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::keyless::WIDEN_QUERIES;
use crate::cuda::params::{Cache, Divisor, Rows, dtype_code, row_alignment};
use crate::cuda::widen_params::{ROWS_TOGETHER, WidenParams};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{AttentionDesc, Keys};
use crate::tensor::Tensor;

/// Elements that a lane reads at a time.
pub const PIECE: u32 = 8;
/// Bytes of an element of a row.
pub const ROW_ELEMENT: u64 = 2;
/// Of rows of queries: 40 Ki tokens of 32 heads of 128.
const MOST_BYTES: u64 = 320 << 20;
/// Rows that a block of 8 warps writes at a time.
const ROWS_OF_BLOCK: u64 = 8 * ROWS_TOGETHER as u64;
/// Blocks of the kernels of `kernels/widen` that run at a time on a multiprocessor.
pub const BLOCKS_PER_MULTIPROCESSOR: u32 = 3;

/// The kernel for one problem.
#[derive(Debug)]
pub struct WidenQueries {
    function: Function,
    num_qo_heads: u32,
    head_dim: u32,
    most_blocks: u32,
}

impl WidenQueries {
    /// Loads the kernel, where the problem's queries are in fp8.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Option<Self>> {
        if !widens_queries(desc) {
            return Ok(None);
        }
        let cc = context.device().compute_capability;
        let candidates = WIDEN_QUERIES.candidates(cc);
        let (_, function) = loader.find(candidates, || WIDEN_QUERIES.unsupported(cc))?;
        Ok(Some(WidenQueries {
            function,
            num_qo_heads: desc.num_qo_heads,
            head_dim: desc.head_dim_qk,
            most_blocks: BLOCKS_PER_MULTIPROCESSOR * context.device().sm_count,
        }))
    }

    /// Tokens of the problem that there is room for.
    pub fn most_tokens(desc: &AttentionDesc) -> u32 {
        let room = MOST_BYTES / query_bytes(desc);
        u64::from(desc.max_num_tokens).min(room) as u32
    }

    /// Memory for the rows of so many tokens. Rows are written in whole chunks.
    pub fn bytes(desc: &AttentionDesc, num_tokens: u32) -> usize {
        let spare = u64::from(ROWS_TOGETHER) * u64::from(desc.head_dim_qk) * ROW_ELEMENT;
        match num_tokens {
            0 => 0,
            tokens => (u64::from(tokens) * query_bytes(desc) + spare) as usize,
        }
    }

    /// The rows of `num_tokens` tokens at an address, `[token, head, dim]`.
    ///
    /// # Safety
    /// So many elements must be there, on the device of the run's keys.
    pub unsafe fn rows(&self, address: u64, num_tokens: u32, run: &Run<'_>) -> Result<Tensor> {
        let shape = [num_tokens, self.num_qo_heads, self.head_dim].map(i64::from);
        let (address, device) = (address as *mut u8, run.args.k.device());
        // SAFETY: the caller's promise.
        unsafe { Tensor::new("q", address, device, DType::F16, &shape, None) }
    }

    /// Enqueues the kernel, for rows at `params.q_rows`.
    ///
    /// # Safety
    /// There must be room for `params.num_tokens` tokens.
    pub unsafe fn enqueue(
        &self,
        current: &Current<'_>,
        params: &WidenParams,
        dependent: bool,
        stream: Stream,
    ) -> Result<()> {
        let rows = u64::from(params.num_tokens) * u64::from(self.num_qo_heads);
        let blocks = rows
            .div_ceil(ROWS_OF_BLOCK)
            .clamp(1, self.most_blocks.into());
        let launch = Launch {
            grid: [blocks as u32, 1, 1],
            threads: WIDEN_QUERIES.threads(),
            cluster: 1,
            dependent,
            stream,
        };
        // SAFETY: the kernel takes a `FolioWidenParams`, and reads the caller's queries and the plan. The rest is the caller's
        // promise.
        unsafe { launch.enqueue(current, &self.function, params, &[]) }
    }
}

/// What the kernels of `kernels/widen` are told of a run that makes no rows.
pub fn params_without_rows(desc: &AttentionDesc, run: &Run<'_>) -> WidenParams {
    let (args, given) = (run.args, run.params);
    WidenParams {
        plan: given.plan,
        q: Rows::of(&args.q),
        k: Cache::of(&args.k),
        v: Cache::of(&args.v),
        q_rows: 0,
        k_rows: 0,
        v_rows: 0,
        first_row: 0,
        page_start: 0,
        items: 0,
        page_size: Divisor::new(given.page_size),
        num_qo_heads: Divisor::new(given.num_qo_heads),
        num_kv_heads: Divisor::new(given.num_kv_heads),
        k_pieces: desc.head_dim_qk / PIECE,
        v_pieces: desc.head_dim_vo / PIECE,
        num_pages: given.num_pages,
        most_rows: 0,
        num_tokens: given.num_tokens,
        q_dtype: dtype_code(desc.q_dtype),
        cache_dtype: dtype_code(desc.kv_format.element),
        row_dtype: dtype_code(row_dtype(desc)),
        num_units: 0,
        new_keys_apart: (run.keys == Keys::Cached).into(),
        reserved: 0,
        units: 0,
    }
}

/// What a run's queries and outputs lack: those that become rows, or rows as they are.
pub fn missing_of_queries(desc: &AttentionDesc, q: &Tensor, o: &Tensor) -> Features {
    let q_suits = match widens_queries(desc) {
        true => !q.is_empty() && row_alignment(q) >= PIECE,
        false => rows_suit(q),
    };
    missing_of_rows(q_suits, q, o)
}

/// Whether queries become rows.
pub fn widens_queries(desc: &AttentionDesc) -> bool {
    desc.q_dtype.is_fp8()
}

/// The type of rows of queries, widened or as they are.
pub fn row_dtype(desc: &AttentionDesc) -> DType {
    match widens_queries(desc) {
        true => DType::F16,
        false => desc.q_dtype,
    }
}

/// Bytes of the rows of a token's query heads.
fn query_bytes(desc: &AttentionDesc) -> u64 {
    u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_qk) * ROW_ELEMENT
}
