//! Hopper prefill over fp8 caches whose keys many tiles of queries read: all keys of the batch are widened to rows of q's
//! type first, `kernels/sm90/widen/widen.cu`, and the kernel over ragged rows reads those. The rows lie in the workspace. What
//! does not pay, or has no room there, is converted tile by tile, in `sm90_prefill.rs`.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, OrLacks, Run, packed_rows};
use super::sm90_prefill::{Keys, Sm90Prefill, not_by_position};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::attention::{KeySource, Masks};
use crate::cuda::kernels::keyless::{Keyless, WIDEN_PLACES, WIDEN_ROWS};
use crate::cuda::params::{AttentionParams, Cache, Divisor, PlanView, dtype_code, row_alignment};
use crate::cuda::widen_params::{ROWS_TOGETHER, WidenParams};
use crate::error::Result;
use crate::plan::PARTS_ALIGNMENT;
use crate::problem::{AttentionDesc, KvStorage, Tiling, WorkItem};
use crate::tensor::Tensor;

/// Of widened rows: 80 Ki keys of 8 heads of 128.
const MOST_BYTES: u64 = 320 << 20;
/// Head dims that are widened. The kernels take every multiple of 8; these ran on a device, with checked answers.
const DIMS: [u32; 2] = [64, 128];
/// Elements that a lane reads at a time.
const PIECE: u32 = 8;
/// Query rows of a request that share keys, at least: four tiles. To widen a key once takes the multiprocessors about as
/// long as to convert it for three.
const LEAST_ROWS: u64 = 4 * 192;
/// Blocks of 8 warps that run at a time on a multiprocessor.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;
/// Work items that a block places at a time.
const ITEMS_OF_BLOCK: u32 = 256;

/// The kernels for one problem.
#[derive(Debug)]
pub struct Sm90PrefillWidened {
    name: String,
    prefill: Sm90Prefill,
    places: Function,
    rows: Function,
    desc: AttentionDesc,
    parts: Parts,
    choice: Choice,
    sm_count: u32,
}

/// Which batches are widened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    /// All within the desc.
    All,
    /// As each is.
    ByBatch,
}

/// Offsets in the memory of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parts {
    /// Rows of K and of V that there is room for.
    num_rows: u32,
    v_rows: usize,
    first_row: usize,
    page_start: usize,
    items: usize,
}

impl Parts {
    fn new(desc: &AttentionDesc, num_rows: u32) -> Parts {
        let after = |start: usize, count: usize, size: usize| {
            (start + count * size).next_multiple_of(PARTS_ALIGNMENT)
        };
        let (rows, requests) = (num_rows as usize, desc.max_batch_size as usize);
        let v_rows = after(0, rows, row_bytes(desc, desc.head_dim_qk) as usize);
        let first_row = after(v_rows, rows, row_bytes(desc, desc.head_dim_vo) as usize);
        let page_start = after(first_row, requests + 1, 4);
        Parts {
            num_rows,
            v_rows,
            first_row,
            page_start,
            items: after(page_start, requests, 8),
        }
    }
}

impl Sm90PrefillWidened {
    /// Loads the kernels for a problem.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<OrLacks<Self>> {
        let Some((parts, choice)) = room(desc) else {
            return Ok(Err(Feature::Widening.into()));
        };
        if desc.head_dim_qk != desc.head_dim_vo || !DIMS.contains(&desc.head_dim_qk) {
            return Ok(Err(Feature::TypesAndDims.into()));
        }
        let over_rows = AttentionDesc {
            kv: KvStorage::Ragged,
            kv_format: desc.q_dtype.into(),
            ..*desc
        };
        let (source, masks) = (KeySource::Tma, Masks::ByPosition);
        let prefill = match Sm90Prefill::load(source, masks, loader, context, &over_rows)? {
            Ok(prefill) => prefill,
            Err(lacks) => return Ok(Err(lacks)),
        };
        let cc = context.device().compute_capability;
        let find = |kernel: &'static Keyless| {
            let found = loader.find(kernel.candidates(cc), || kernel.unsupported(cc));
            found.map(|(_, function)| function)
        };
        Ok(Ok(Sm90PrefillWidened {
            name: format!(
                "{}_widened_from_{}",
                prefill.name(),
                desc.kv_format.element.name()
            ),
            prefill,
            places: find(&WIDEN_PLACES)?,
            rows: find(&WIDEN_ROWS)?,
            desc: *desc,
            parts,
            choice,
            sm_count: context.device().sm_count,
        }))
    }

    /// Enqueues what widens, and says where the rows are.
    fn widen(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<WidenParams> {
        let params = self.params(run);
        let launch = |blocks: u32, dependent| Launch {
            grid: [blocks, 1, 1],
            threads: WIDEN_ROWS.threads(),
            cluster: 1,
            dependent,
            stream,
        };
        let for_items = run
            .num_items
            .div_ceil(ITEMS_OF_BLOCK)
            .clamp(1, self.sm_count);
        let resident = BLOCKS_PER_MULTIPROCESSOR * self.sm_count;
        // SAFETY: both kernels take a `FolioWidenParams`. Its addresses are the caller's tensors, the plan, and the memory
        // that `scratch_bytes` asked for, which has room for the plan's requests and items and for `most_rows` rows.
        unsafe {
            launch(for_items, false).enqueue(current, &self.places, &params, &[])?;
            launch(resident, true).enqueue(current, &self.rows, &params, &[])?;
        }
        Ok(params)
    }

    fn params(&self, run: &Run<'_>) -> WidenParams {
        let (args, given) = (run.args, run.params);
        let at = |offset: usize| run.scratch + offset as u64;
        WidenParams {
            plan: given.plan,
            k: Cache::of(&args.k),
            v: Cache::of(&args.v),
            k_rows: at(0),
            v_rows: at(self.parts.v_rows),
            first_row: at(self.parts.first_row),
            page_start: at(self.parts.page_start),
            items: at(self.parts.items),
            page_size: Divisor::new(given.page_size),
            num_kv_heads: Divisor::new(given.num_kv_heads),
            k_pieces: self.desc.head_dim_qk / PIECE,
            v_pieces: self.desc.head_dim_vo / PIECE,
            num_pages: given.num_pages,
            most_rows: self.parts.num_rows,
            // All keys: a chunk of keys that a tile does not see at all is multiplied by zero, and memory that nobody wrote
            // may hold NaN.
            window_left: -1,
            cache_dtype: dtype_code(self.desc.kv_format.element),
            row_dtype: dtype_code(self.desc.q_dtype),
            reserved: 0,
        }
    }

    /// `[row, 1, head, dim]`: ragged rows, as they are checked.
    fn rows(&self, name: &str, address: u64, dim: u32, run: &Run<'_>) -> Result<Tensor> {
        let shape = [
            i64::from(self.parts.num_rows),
            1,
            i64::from(self.desc.num_kv_heads),
            i64::from(dim),
        ];
        // SAFETY: that memory of the workspace is the launch's.
        unsafe {
            Tensor::new(
                name,
                address as *mut u8,
                run.args.k.device(),
                self.desc.q_dtype,
                &shape,
                None,
            )
        }
    }
}

impl AttentionKernel for Sm90PrefillWidened {
    fn name(&self) -> &str {
        &self.name
    }

    fn tiling(&self) -> Tiling {
        self.prefill.tiling()
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let aligned = row_alignment(&args.k).min(row_alignment(&args.v)) >= PIECE;
        let suits = match self.choice {
            Choice::All => true,
            Choice::ByBatch => {
                let requests = u64::from(run.num_requests);
                pays(run.num_rows, requests, &self.desc)
                    && rows_of(run.num_keys, requests) <= u64::from(self.parts.num_rows)
            }
        };
        // Of a window's or a chunk's keys a tile loads few.
        let windowed = args.window.left.is_some() || args.chunks.is_some();
        (self.prefill.missing_beside_keys(args) | not_by_position(args))
            .and(Feature::Widening, windowed)
            .and(Feature::SplitKeys, args.k_rope.is_some())
            .and(Feature::KvStrides, !aligned)
            .and(Feature::Widening, !suits)
    }

    fn scratch_bytes(&self, most_items: usize) -> usize {
        let items = most_items.saturating_mul(size_of::<WorkItem>());
        self.parts.items.saturating_add(items)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let widened = self.widen(current, run, stream)?;
        let k = self.rows("k", widened.k_rows, self.desc.head_dim_qk, run)?;
        let v = self.rows("v", widened.v_rows, self.desc.head_dim_vo, run)?;
        let keys = Keys {
            k: &k,
            v: &v,
            params: AttentionParams {
                plan: PlanView {
                    items: widened.items,
                    page_ids: 0,
                    ..run.params.plan
                },
                k: Cache::of(&k),
                v: Cache::of(&v),
                num_pages: self.parts.num_rows,
                page_size: 1,
                ..*run.params
            },
            dependent: true,
        };
        self.prefill.launch_over(&keys, current, run, stream)
    }
}

/// How the memory is divided, and for which batches; `None` where none would be widened.
fn room(desc: &AttentionDesc) -> Option<(Parts, Choice)> {
    if desc.kv_format.element == desc.q_dtype
        || desc.shared_levels > 0
        || u64::from(packed_rows(desc)) < LEAST_ROWS
    {
        return None;
    }
    let requests = u64::from(desc.max_batch_size);
    let by_requests = requests.saturating_mul(desc.max_kv_len.into());
    let most_keys = match desc.kv {
        KvStorage::Paged { page_size, .. } => {
            by_requests.min(desc.max_num_pages.saturating_mul(page_size.into()))
        }
        KvStorage::Ragged => by_requests,
    };
    let most_rows = rows_of(most_keys, requests);
    let room = MOST_BYTES / row_bytes(desc, desc.head_dim_qk + desc.head_dim_vo);
    let parts = Parts::new(desc, most_rows.min(room) as u32);
    // A graph launches what it captured whatever its batches are, and where requests do not depend on the batch, neither
    // does the kernel.
    if !desc.graph && !desc.batch_invariant {
        return Some((parts, Choice::ByBatch));
    }
    let pays = pays(desc.max_num_tokens.into(), requests, desc);
    (pays && most_rows <= room).then_some((parts, Choice::All))
}

/// Rows that so many keys take: those of a request begin at a multiple of [`ROWS_TOGETHER`].
fn rows_of(keys: u64, requests: u64) -> u64 {
    let padding = requests.saturating_mul((ROWS_TOGETHER - 1).into());
    keys.saturating_add(padding)
        .next_multiple_of(ROWS_TOGETHER.into())
}

fn pays(rows: u64, requests: u64, desc: &AttentionDesc) -> bool {
    rows.saturating_mul(desc.group_size().into()) >= LEAST_ROWS.saturating_mul(requests)
}

/// Bytes of `dim` widened elements of every KV head.
fn row_bytes(desc: &AttentionDesc, dim: u32) -> u64 {
    u64::from(desc.num_kv_heads) * u64::from(dim) * desc.q_dtype.size() as u64
}
