//! Prefill over keys that many tiles of queries read, and that are not what a kernel multiplies: all keys of the batch become
//! 16-bit rows first, `kernels/widen/`, and a kernel over ragged rows reads those. Keys in other forms than plain rows are
//! widened on every device. For Hopper's kernel, keys in fp8 are too, and those of small pages, which no tensor map describes,
//! copied; queries in fp8 become rows. The rows lie in the workspace.
//! For what does not pay, or has no room there, other kernels stand behind this one.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::generic::Generic;
use super::kernel::{AttentionKernel, Inputs, OrLacks, Run, packed_rows};
use super::sm90::GROUP;
use super::sm90_prefill::{Behind, Loads, Sm90Prefill};
use super::widen_queries::{
    BLOCKS_PER_MULTIPROCESSOR, PIECE, ROW_ELEMENT, WidenQueries, missing_of_queries,
    params_without_rows, row_dtype, widens_queries,
};
use super::widen_stored::{WidenStored, num_units, unit_bytes};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::attention::{KeySource, MOST_HEAD_DIM, Masks};
use crate::cuda::kernels::keyless::{COPY_ROWS, Keyless, WIDEN_PLACES, WIDEN_ROWS};
use crate::cuda::kernels::{Arch, waits_for_prerequisites};
use crate::cuda::params::{AttentionParams, Cache, PlanView, Rows, row_alignment};
use crate::cuda::widen_params::{ROWS_TOGETHER, WidenParams};
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::PARTS_ALIGNMENT;
use crate::problem::{AttentionDesc, CacheForm, KvStorage, Tiling, WorkItem};
use crate::tensor::Tensor;

/// Of rows of keys and values: 80 Ki keys of 8 heads of 128.
const MOST_BYTES: u64 = 320 << 20;
/// Rows of the kernel's tiles.
const TILE: u64 = 192;
/// The same of the portable kernel over caches in other forms.
const TILE_OF_STORED: u64 = 64;
/// Work items that a block places at a time.
const ITEMS_OF_BLOCK: u32 = 256;

/// The kernels for one problem.
#[derive(Debug)]
pub struct PrefillWidened {
    name: String,
    prefill: OverRows,
    places: Function,
    rows: Keys,
    /// Where they are in fp8.
    queries: Option<WidenQueries>,
    desc: AttentionDesc,
    /// Of rows.
    dtype: DType,
    parts: Parts,
    choice: Choice,
    /// What stands behind this one.
    behind: Behind,
    sm_count: u32,
    /// Whether a launch may begin while the one before it ends.
    depends: bool,
}

/// What multiplies the rows.
#[derive(Debug)]
enum OverRows {
    Hopper(Sm90Prefill),
    Portable(Generic),
}

/// What writes rows of keys and values.
#[derive(Debug)]
enum Keys {
    /// Of plain rows, widened or copied.
    Plain(Function),
    Stored(WidenStored),
}

/// Which batches become rows.
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
    /// Tokens of Q that there is room for.
    num_tokens: u32,
    v_rows: usize,
    q_rows: usize,
    first_row: usize,
    page_start: usize,
    units: usize,
    items: usize,
}

impl Parts {
    fn new(desc: &AttentionDesc, num_rows: u32, num_tokens: u32) -> Parts {
        let after = |start: usize, count: usize, size: usize| {
            (start + count * size).next_multiple_of(PARTS_ALIGNMENT)
        };
        let (rows, requests) = (num_rows as usize, desc.max_batch_size as usize);
        let v_rows = after(0, rows, row_bytes(desc, desc.head_dim_qk) as usize);
        let q_rows = after(v_rows, rows, row_bytes(desc, desc.head_dim_vo) as usize);
        let q_bytes = WidenQueries::bytes(desc, num_tokens);
        let first_row = after(q_rows, q_bytes, 1);
        let page_start = after(first_row, requests + 1, 4);
        let units = after(page_start, requests, 8);
        Parts {
            num_rows,
            num_tokens,
            v_rows,
            q_rows,
            first_row,
            page_start,
            units,
            items: after(units, unit_bytes(desc), 1),
        }
    }
}

impl OverRows {
    /// Loads the kernel for a problem over rows.
    ///
    /// # Errors
    /// As [`Loader::find`].
    fn load(
        masks: Masks,
        loader: &Loader,
        context: &Context,
        over_rows: &AttentionDesc,
    ) -> Result<OrLacks<OverRows>> {
        if !Arch::Sm90a.runs_on(context.device().compute_capability) {
            let kernel = Generic::load(loader, context, over_rows)?;
            return Ok(Ok(OverRows::Portable(kernel)));
        }
        let loaded = Sm90Prefill::load(KeySource::Tma, masks, loader, context, over_rows)?;
        Ok(loaded.map(OverRows::Hopper))
    }

    fn kernel(&self) -> &dyn AttentionKernel {
        match self {
            OverRows::Hopper(kernel) => kernel,
            OverRows::Portable(kernel) => kernel,
        }
    }

    fn launch(
        &self,
        inputs: &Inputs<'_>,
        current: &Current<'_>,
        run: &Run<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            OverRows::Hopper(kernel) => kernel.launch_over(inputs, current, run, stream),
            OverRows::Portable(kernel) => kernel.launch_over(inputs, current, run, stream),
        }
    }
}

impl PrefillWidened {
    /// Whether keys of the problem are not what boxes are of.
    pub fn is_for(desc: &AttentionDesc) -> bool {
        match desc.kv {
            _ if desc.kv_format.form() != CacheForm::Plain => true,
            _ if desc.kv_format.element.is_fp8() => true,
            KvStorage::Paged { page_size, .. } => page_size % GROUP != 0,
            KvStorage::Ragged => false,
        }
    }

    /// Loads the kernels for a problem. The portable kernel over rows has all masks.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(
        masks: Masks,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
        behind: Behind,
    ) -> Result<OrLacks<Self>> {
        let Some((parts, choice)) = room(desc, behind.loads) else {
            return Ok(Err(Feature::Widening.into()));
        };
        let dtype = row_dtype(desc);
        let over_rows = AttentionDesc {
            q_dtype: dtype,
            kv: KvStorage::Ragged,
            kv_format: dtype.into(),
            ..*desc
        };
        let prefill = match OverRows::load(masks, loader, context, &over_rows)? {
            Ok(prefill) => prefill,
            Err(lacks) => return Ok(Err(lacks)),
        };
        let cc = context.device().compute_capability;
        let find = |kernel: &'static Keyless| {
            let found = loader.find(kernel.candidates(cc), || kernel.unsupported(cc));
            found.map(|(_, function)| function)
        };
        let (element, form) = (desc.kv_format.element, desc.kv_format.form());
        let rows = match (form, element.is_fp8()) {
            (CacheForm::Plain, true) => Keys::Plain(find(&WIDEN_ROWS)?),
            (CacheForm::Plain, false) => Keys::Plain(find(&COPY_ROWS)?),
            _ => match WidenStored::load(desc, find)? {
                Ok(stored) => Keys::Stored(stored),
                Err(lacks) => return Ok(Err(lacks)),
            },
        };
        let from = match (form, element.is_fp8()) {
            (CacheForm::Plain, true) => format!("widened_from_{}", element.name()),
            (CacheForm::Plain, false) => "copied_from_pages".to_owned(),
            _ => format!("widened_from_{}", form.name().to_lowercase()),
        };
        Ok(Ok(PrefillWidened {
            name: format!("{}_{from}", prefill.kernel().name()),
            prefill,
            places: find(&WIDEN_PLACES)?,
            rows,
            queries: WidenQueries::load(loader, context, desc)?,
            desc: *desc,
            dtype,
            parts,
            choice,
            behind,
            sm_count: context.device().sm_count,
            depends: waits_for_prerequisites(cc),
        }))
    }

    /// Enqueues what writes the rows, and says where they are.
    fn widen(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<WidenParams> {
        let params = self.widen_params(run);
        let for_items = run
            .num_items
            .div_ceil(ITEMS_OF_BLOCK)
            .clamp(1, self.sm_count);
        let blocks = BLOCKS_PER_MULTIPROCESSOR * self.sm_count;
        let of_all = launch(blocks, self.depends, stream);
        // SAFETY: these kernels take a `FolioWidenParams`. Its addresses are the caller's tensors, the plan, and the memory
        // that `scratch_bytes` asked for, which has room for the plan's requests and items, for `most_rows` rows of keys and
        // for `num_tokens` of queries.
        unsafe {
            launch(for_items, false, stream).enqueue(current, &self.places, &params, &[])?;
            match &self.rows {
                Keys::Plain(rows) => of_all.enqueue(current, rows, &params, &[])?,
                Keys::Stored(stored) => stored.enqueue(&of_all, current, &params, run)?,
            }
            if let Some(queries) = &self.queries {
                queries.enqueue(current, &params, self.depends, stream)?;
            }
        }
        Ok(params)
    }

    fn widen_params(&self, run: &Run<'_>) -> WidenParams {
        let at = |offset: usize| run.scratch + offset as u64;
        let of_run = params_without_rows(&self.desc, run);
        WidenParams {
            q_rows: at(self.parts.q_rows),
            k_rows: at(0),
            v_rows: at(self.parts.v_rows),
            first_row: at(self.parts.first_row),
            page_start: at(self.parts.page_start),
            items: at(self.parts.items),
            most_rows: self.parts.num_rows,
            num_tokens: of_run.num_tokens.min(self.parts.num_tokens),
            num_units: num_units(&self.desc),
            units: at(self.parts.units),
            ..of_run
        }
    }

    /// `[row, 1, head, dim]`: ragged rows, as they are checked.
    fn key_rows(&self, name: &str, address: u64, dim: u32, run: &Run<'_>) -> Result<Tensor> {
        let shape = [
            i64::from(self.parts.num_rows),
            1,
            i64::from(self.desc.num_kv_heads),
            i64::from(dim),
        ];
        // SAFETY: that memory of the workspace is the launch's.
        unsafe { self.rows_at(name, address, &shape, run) }
    }

    /// # Safety
    /// So many elements must be there.
    unsafe fn rows_at(
        &self,
        name: &str,
        address: u64,
        shape: &[i64],
        run: &Run<'_>,
    ) -> Result<Tensor> {
        let (address, device) = (address as *mut u8, run.args.k.device());
        // SAFETY: the caller's promise.
        unsafe { Tensor::new(name, address, device, self.dtype, shape, None) }
    }

    /// Whether the batch is one that pays, and that there is room for.
    fn suits(&self, run: &Run<'_>) -> bool {
        let requests = u64::from(run.num_requests);
        let has_room = rows_of(run.num_keys, requests) <= u64::from(self.parts.num_rows)
            && (!widens_queries(&self.desc) || run.num_tokens <= u64::from(self.parts.num_tokens));
        let batch = Sizes {
            rows: run.num_rows,
            keys: run.num_keys,
            requests,
        };
        has_room && batch.pays(&self.desc, self.behind.loads)
    }

    /// Whether tiles load so few of the keys that a window or chunks leave that it pays not to touch the others. Not beside the
    /// portable kernel where most keys are those of query rows: every tile's own.
    fn leaves_keys(&self, run: &Run<'_>) -> bool {
        let windowed = run.args.window.left.is_some() || run.args.chunks.is_some();
        let all_have_tiles = self.choice == Choice::ByBatch && run.num_keys <= 2 * run.num_rows;
        windowed && (self.behind.loads != Loads::Portable || !all_have_tiles)
    }
}

impl AttentionKernel for PrefillWidened {
    fn name(&self) -> &str {
        &self.name
    }

    fn tiling(&self) -> Tiling {
        self.prefill.kernel().tiling()
    }

    fn few_keys(&self) -> u32 {
        let over_rows = self.prefill.kernel().few_keys();
        over_rows.min(self.behind.few_keys)
    }

    fn most_rows(&self) -> u32 {
        self.prefill.kernel().most_rows()
    }

    fn starts_at(&self) -> u32 {
        self.prefill.kernel().starts_at()
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let piece = PIECE * self.desc.kv_format.element.size() as u32;
        let aligned = match self.rows {
            Keys::Plain(_) => row_alignment(&args.k).min(row_alignment(&args.v)) >= piece,
            Keys::Stored(_) => true,
        };
        let suits = self.choice == Choice::All || self.suits(run);
        let of_kernel = match &self.prefill {
            OverRows::Hopper(kernel) => {
                missing_of_queries(&self.desc, &args.q, &args.o) | kernel.missing_of_masks(run)
            }
            OverRows::Portable(_) => Features::default(),
        };
        of_kernel
            .and(Feature::SplitKeys, args.k_rope.is_some())
            .and(Feature::KvStrides, !aligned)
            .and(Feature::Widening, !suits || self.leaves_keys(run))
    }

    fn scratch_bytes(&self, most_items: usize) -> usize {
        let items = most_items.saturating_mul(size_of::<WorkItem>());
        self.parts.items.saturating_add(items)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let widened = self.widen(current, run, stream)?;
        let k = self.key_rows("k", widened.k_rows, self.desc.head_dim_qk, run)?;
        let v = self.key_rows("v", widened.v_rows, self.desc.head_dim_vo, run)?;
        let q = match &self.queries {
            // SAFETY: that memory of the workspace is the launch's.
            Some(queries) => unsafe { queries.rows(widened.q_rows, self.parts.num_tokens, run)? },
            None => run.args.q,
        };
        let over_rows = AttentionParams {
            plan: PlanView {
                items: widened.items,
                page_ids: 0,
                ..run.params.plan
            },
            q: Rows::of(&q),
            k: Cache::of(&k),
            v: Cache::of(&v),
            num_pages: self.parts.num_rows,
            page_size: 1,
            ..self.of_parts(run)
        };
        let inputs = Inputs {
            q: &q,
            k: &k,
            v: &v,
            params: over_rows,
            dependent: self.depends,
        };
        self.prefill.launch(&inputs, current, run, stream)
    }

    fn of_parts(&self, run: &Run<'_>) -> AttentionParams {
        match &self.rows {
            Keys::Plain(_) => *run.params,
            Keys::Stored(stored) => {
                stored.with_factors(run.params, run.scratch + self.parts.units as u64)
            }
        }
    }
}

fn launch(blocks: u32, dependent: bool, stream: Stream) -> Launch {
    Launch {
        grid: [blocks, 1, 1],
        threads: WIDEN_ROWS.threads(),
        cluster: 1,
        dependent,
        stream,
    }
}

/// Query rows of a request that share keys, from which on rows pay. Beside the portable kernel, which multiplies at a third
/// of the rate, a tile of them is enough; over caches in other forms, whose portable kernel has tiles of 64, two of those. To
/// widen a key once takes the multiprocessors about as long as to convert it for two tiles. To copy one costs a third more, and a
/// tile saves a tenth of its time; where tiles are wider than rows, a fifth to a third of it (2 × 172 on 4633 with 64 / 8 heads of
/// 160 over pages of one token take 135 µs copied, 229 one by one, on an H200).
///
/// For what is copied in tiles of their own these were chosen with [`least_products`], by 230 random batches of head dims from 64 to
/// 128 over pages of one and four tokens: on average 0.3 to 0.8 % more than the faster way takes, by head dims. At 256 a tile saves
/// a fifteenth of its time alone: it moves 8 bytes a column of a key in 3.5 TB/s to spare a fifteenth of 4 products a row in 680
/// TFLOP/s, which are as long at 5800 rows that see all keys, and at 11700 under a causal mask (4 × 2k tokens with 16/8 heads: 262 µs
/// copied, 230 one by one).
fn least_rows(desc: &AttentionDesc, behind: Loads) -> u64 {
    if desc.kv_format.form() != CacheForm::Plain {
        return 2 * TILE_OF_STORED;
    }
    match (behind, desc.kv_format.element.is_fp8()) {
        (Loads::Portable, _) => TILE,
        (Loads::UnevenRows | Loads::WiderTiles, true) => 3 * TILE / 2,
        (Loads::Rows, true) => 2 * TILE,
        (Loads::WiderTiles, false) => 4 * TILE,
        (Loads::Rows, false) if desc.head_dim_qk == MOST_HEAD_DIM => 60 * TILE,
        (Loads::Rows | Loads::UnevenRows, false) => 12 * TILE,
    }
}

/// Products of a row of a query head with a key, from which on the two launches pay, 10 µs on an H200. Less than that would be
/// spared of what tiles one by one take: over pages of one token with 28 heads of 80 4 × 806 take 48 and 54 µs, 2 × 2405 with
/// 24 182 and 169. Those over fp8 were chosen with [`least_rows`], by 3127 random batches of all head dims: on average 1.5 % more
/// than the faster way takes.
fn least_products(desc: &AttentionDesc, behind: Loads) -> u64 {
    let is_plain = desc.kv_format.form() == CacheForm::Plain;
    match (behind, desc.kv_format.element.is_fp8()) {
        (Loads::Portable, _) => 0,
        _ if !is_plain => 0,
        (_, true) if desc.head_dim_qk <= 64 => 12_000_000,
        (_, true) => 20_000_000,
        (Loads::WiderTiles, false) => 60_000_000,
        (Loads::Rows | Loads::UnevenRows, false) => 100_000_000,
    }
}

/// How the memory is divided, and for which batches; `None` where there would be none.
fn room(desc: &AttentionDesc, behind: Loads) -> Option<(Parts, Choice)> {
    if desc.shared_levels > 0 || u64::from(packed_rows(desc)) < least_rows(desc, behind) {
        return None;
    }
    let requests = u64::from(desc.max_batch_size);
    let most_rows = rows_of(desc.most_keys(), requests);
    let room = MOST_BYTES / row_bytes(desc, desc.head_dim_qk + desc.head_dim_vo);
    let (num_tokens, queries_fit) = match widens_queries(desc) {
        true => {
            let most = WidenQueries::most_tokens(desc);
            (most, most == desc.max_num_tokens)
        }
        false => (0, true),
    };
    let parts = Parts::new(desc, most_rows.min(room) as u32, num_tokens);
    // A graph launches what it captured whatever its batches are, and where requests do not depend on the batch, neither
    // does the kernel.
    if !desc.graph && !desc.batch_invariant {
        return Some((parts, Choice::ByBatch));
    }
    let largest = Sizes {
        rows: desc.max_num_tokens.into(),
        keys: desc.most_keys(),
        requests,
    };
    let pays = largest.pays(desc, behind);
    let has_room = most_rows <= room && queries_fit;
    (pays && has_room).then_some((parts, Choice::All))
}

/// Rows that so many keys take: those of a request begin at a multiple of [`ROWS_TOGETHER`].
fn rows_of(keys: u64, requests: u64) -> u64 {
    let padding = requests.saturating_mul((ROWS_TOGETHER - 1).into());
    keys.saturating_add(padding)
        .next_multiple_of(ROWS_TOGETHER.into())
}

/// Of a batch: query rows, keys and requests.
struct Sizes {
    rows: u64,
    keys: u64,
    requests: u64,
}

impl Sizes {
    /// Whether to make rows of the keys pays.
    fn pays(&self, desc: &AttentionDesc, behind: Loads) -> bool {
        let packed = self.rows.saturating_mul(desc.group_size().into());
        let heads = u64::from(desc.num_qo_heads);
        let products = self.rows.saturating_mul(heads).saturating_mul(self.keys);
        packed >= least_rows(desc, behind).saturating_mul(self.requests)
            && products / self.requests.max(1) >= least_products(desc, behind)
    }
}

/// Bytes of `dim` elements in rows of every KV head.
fn row_bytes(desc: &AttentionDesc, dim: u32) -> u64 {
    u64::from(desc.num_kv_heads) * u64::from(dim) * ROW_ELEMENT
}
