//! The attention handle on a device: plans go to the workspace by one copy, or by one kernel where the
//! lengths are on the device; a run is one kernel, a second where rows were split, one before them each where it has scales
//! that have to be folded, items that become a mask, queries of MLA in fp8 or new tokens that its kernel cannot append, and one after them where its
//! lse has to be rounded.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use super::candidates::Candidates;
use super::combine::{Combine, SplitRows};
use super::fold_scales::FoldScales;
use super::given_page_ids::GivenPageIds;
use super::kernel::{AttentionKernel, Run};
use super::latent_queries::{self, LatentQueries};
use super::mask_items::{MaskItems, Places};
use super::narrow::{Narrow, Room};
use super::own_memory::OwnMemory;
use super::planned::Planned;
use super::planner::Planner;
use super::round_lse::RoundLse;
use super::run_params::{self, MaskStarts};
use super::tilings::Tilings;
use crate::backend::{Append, Attention, Stream, Workspace, WorkspaceInfo};
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current};
use crate::cuda::items_params::MaskItemsParams;
use crate::cuda::kernels::attention::{MOST_HEAD_DIM, MOST_WIDE_HEAD_DIM};
use crate::cuda::latent_queries_params::LatentQueriesParams;
use crate::cuda::lse_params::RoundLseParams;
use crate::cuda::params::SumParams;
use crate::cuda::plan::regions::view;
use crate::cuda::plan::staging::{BUFFERS, Ring};
use crate::cuda::scales_params::FoldScalesParams;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::{Capacity, Counts, Layout, PARTS_ALIGNMENT, Regions, device_page_ids};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, CacheForm, CacheFormat, Checked, DeviceBatch, Earlier,
    HostBatch, Keys, Kind, KvStorage, Mask, Tiling, WorkList,
};

/// One attention problem on one device.
pub struct CudaAttention {
    context: Arc<Context>,
    desc: AttentionDesc,
    candidates: Candidates,
    combine: Combine,
    planner: Planner,
    fold_scales: FoldScales,
    round_lse: RoundLse,
    mask_items: Option<MaskItems>,
    latent_queries: Option<LatentQueries>,
    narrow: Narrow,
    capacity: Capacity,
    regions: Regions,
    own: OwnMemory,
    ring: Ring,
    planned: Option<Planned>,
    /// Held while a run is enqueued: its kernels share the workspace's partial results, so those of
    /// another thread may not come between them.
    enqueuing: Mutex<()>,
    /// Where the page ids of the plan are: `None` before the first plan, then `None` for ids in the
    /// workspace. Captured graphs read them there.
    bound_page_ids: Option<Option<u64>>,
}

impl CudaAttention {
    /// Loads the kernels of a problem.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for rows wider than any kernel's, and for MLA in fp32; otherwise as [`Loader::find`].
    pub fn new(
        loader: &Loader,
        context: &Arc<Context>,
        desc: &AttentionDesc,
    ) -> Result<CudaAttention> {
        check(desc)?;
        let latent_queries = LatentQueries::load(loader, context, desc)?;
        // Kernels are loaded for the problem that they get.
        let (asked, desc) = (desc, &latent_queries::over_rows(desc));
        let candidates = Candidates::load(loader, context, desc)?;
        let tilings = Tilings {
            candidates: &candidates,
            desc,
        };
        let capacity = tilings.capacity();
        let own = OwnMemory::new(&capacity, asked);
        let regions = Regions::new(
            &capacity,
            desc.num_qo_heads as usize,
            desc.head_dim_vo as usize,
            own.scratch
                .saturating_add(candidates.scratch_bytes(capacity.counts.items)),
        );
        let places = (&capacity, &regions);
        Ok(CudaAttention {
            context: Arc::clone(context),
            desc: *desc,
            combine: Combine::load(loader, context, desc, candidates.may_go_on())?,
            candidates,
            fold_scales: FoldScales::load(loader, context, desc)?,
            round_lse: RoundLse::load(loader, context, desc)?,
            mask_items: MaskItems::load(loader, context, desc)?,
            latent_queries,
            narrow: Narrow::load(loader, context, desc)?,
            planner: Planner::load(loader, context, desc, places)?,
            capacity,
            regions,
            own,
            ring: Ring::new(context)?,
            planned: None,
            enqueuing: Mutex::default(),
            bound_page_ids: None,
        })
    }

    fn plan_host(
        &mut self,
        current: &Current<'_>,
        batch: &HostBatch<'_>,
        work: &WorkList,
        page_ids: Option<u64>,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<Planned> {
        if current.is_capturing(stream)? {
            return Err(Error::Capture(
                "plan: lengths in host memory are not accepted while the stream is captured; lengths on the device are"
                    .into(),
            ));
        }
        let copies = self
            .narrow
            .page_ids(device_page_ids(batch), self.room(workspace))?;
        let counts = Counts::of(batch, work);
        // A graph has the addresses of its first plan, so there every part has room for its maximum.
        let layout = if self.desc.graph {
            self.regions.plan
        } else {
            Layout::new(&counts)
        };
        let page_size = self.desc.kv.page_size();
        let bytes = layout.page_ids + 4 * counts.page_ids;
        let base = workspace.device as u64;
        // SAFETY: `api` checked that the workspace has the size that `workspace` asked for, and that is
        // enough for every batch within the desc; the host keeps it for as long as the plan.
        unsafe {
            self.ring.upload(
                current,
                (workspace.host, self.regions.plan.end),
                (base, bytes),
                stream,
                |bytes| {
                    crate::plan::write(bytes, &layout, batch, work, work.items.iter(), page_size)
                },
            )?;
        }
        // SAFETY: as above; the ids are the caller's.
        unsafe { self.narrow.launch(current, &copies, stream)? };
        let mut planned = self.largest(&layout, base, page_ids);
        planned.keys = batch.keys;
        planned.has_few_keys = self.has_few_keys(batch) && self.is_of_parts(work);
        if !self.desc.graph {
            planned.num_items = counts.items;
            planned.split = SplitRows::Exactly(counts.combines);
            let requests =
                (0..batch.batch_size()).filter(|&b| batch.planned.include(batch.qo_len(b)));
            planned.num_keys = requests.clone().map(|b| u64::from(batch.num_keys(b))).sum();
            planned.num_rows = requests.clone().map(|b| u64::from(batch.qo_len(b))).sum();
            planned.num_requests = requests.count() as u32;
            planned.num_tokens = batch.num_tokens() as u64;
        }
        if !self.desc.graph && self.tilings().side_by_side().is_some() {
            let rows_of_items = work.items.iter().map(|item| item.q_len);
            planned.q_tile = rows_of_items.max().unwrap_or(1);
            planned.q_tile_is_exact = true;
        }
        Ok(planned)
    }

    /// Whether it cuts a batch in tiles of one part, because its requests have few keys.
    pub(super) fn has_few_keys(&self, batch: &HostBatch<'_>) -> bool {
        self.tilings().has_few_keys(batch)
    }

    /// Whether a part of a tile has room for every item: also of work that was not cut by [`Tilings::of_host`].
    fn is_of_parts(&self, work: &WorkList) -> bool {
        let rows = self.tilings().of_desc().of_few_keys().q_tile;
        work.items.iter().all(|item| item.q_len <= rows)
    }

    fn plan_device(
        &mut self,
        current: &Current<'_>,
        batch: &DeviceBatch,
        work: &WorkList,
        page_ids: Option<u64>,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<Planned> {
        self.check_capture("plan", current, stream)?;
        let base = workspace.device as u64;
        let layout = self.regions.plan;
        let (batch, copies) = self.narrow.batch(batch, self.room(workspace))?;
        let tilings = self.tilings();
        let cut = (tilings.of_device(), tilings.side_by_side());
        // SAFETY: the lengths are the caller's, of the shapes that `api` checked, and the workspace has room
        // for the largest plan.
        unsafe {
            self.narrow.launch(current, &copies, stream)?;
            self.planner
                .launch(current, &batch, &work.segments, &cut, base, stream)?;
        }
        Ok(self.largest(&layout, base, page_ids))
    }

    fn tilings(&self) -> Tilings<'_> {
        Tilings {
            candidates: &self.candidates,
            desc: &self.desc,
        }
    }

    /// Where the device keeps copies of lengths and page ids.
    fn room(&self, workspace: &Workspace) -> Room {
        let base = workspace.device as u64;
        Room {
            lengths: base + (self.regions.own + self.own.lengths) as u64,
            page_ids: base + self.regions.plan.page_ids as u64,
        }
    }

    /// A plan whose counts only the device knows: it may be the largest.
    fn largest(&self, layout: &Layout, base: u64, page_ids: Option<u64>) -> Planned {
        Planned {
            view: view(&self.regions, layout, base, page_ids),
            mask_starts: MaskStarts {
                bytes: base + layout.mask_bytes_start as u64,
                bits: base + layout.mask_bits_start as u64,
            },
            scales: base + (self.regions.own + self.own.scales) as u64,
            lse: base + (self.regions.own + self.own.lse) as u64,
            items_mask: base + (self.regions.own + self.own.items_mask) as u64,
            latent_queries: base + (self.regions.own + self.own.latent_queries) as u64,
            num_items: self.capacity.counts.items,
            split: SplitRows::UpTo(self.capacity.counts.combines),
            q_tile: self.tilings().most_rows_of_item(),
            q_tile_is_exact: false,
            has_few_keys: false,
            keys: Keys::All,
            num_keys: u64::from(self.desc.max_batch_size) * u64::from(self.desc.max_kv_len),
            num_rows: u64::from(self.desc.max_num_tokens),
            num_requests: self.desc.max_batch_size,
            num_tokens: u64::from(self.desc.max_num_tokens),
            scratch: base + (self.regions.own + self.own.scratch) as u64,
        }
    }

    /// What is launched before a run with items, and the run with the mask that comes of it.
    fn items_as_mask(
        &self,
        args: &Checked<AttentionArgs>,
        planned: &Planned,
    ) -> Result<Option<(MaskItemsParams, Checked<AttentionArgs>)>> {
        let Some(kernel) = &self.mask_items else {
            return Ok(None);
        };
        let places = Places {
            view: planned.view,
            mask_start: planned.mask_starts.bits,
            mask: planned.items_mask,
        };
        kernel.as_mask(args, &places)
    }
}

impl Attention for CudaAttention {
    fn kernel(&self) -> &str {
        self.candidates.first().name()
    }

    fn tiling(&self) -> Tiling {
        self.tilings().of_desc()
    }

    fn tiling_of(&self, batch: &HostBatch<'_>) -> Tiling {
        self.tilings().of_host(batch)
    }

    fn workspace(&self) -> WorkspaceInfo {
        WorkspaceInfo {
            device_bytes: self.regions.end,
            host_bytes: self.regions.plan.end * BUFFERS,
            alignment: PARTS_ALIGNMENT,
        }
    }

    fn plan(
        &mut self,
        batch: &Batch<'_>,
        work: &WorkList,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()> {
        let context = Arc::clone(&self.context);
        let current = context.enter()?;
        current.check_stream(stream)?;
        let given = GivenPageIds::of(batch);
        // A graph has the address of the page ids of its plan.
        if let Some(bound) = self.bound_page_ids.filter(|_| self.desc.graph) {
            given.check_bound(bound)?;
        }
        let page_ids = match self.desc.kv {
            // Ragged tensors have no ids.
            KvStorage::Ragged => Some(0),
            KvStorage::Paged { .. } if given.is_wide => Some(self.room(workspace).page_ids),
            KvStorage::Paged { .. } => given.address,
        };
        let planned = match batch {
            Batch::Host(batch) => {
                self.plan_host(&current, batch, work, page_ids, workspace, stream)?
            }
            Batch::Device(batch) => {
                self.plan_device(&current, batch, work, page_ids, workspace, stream)?
            }
        };
        // Only now: what fails leaves the previous plan in force.
        self.planned = Some(planned);
        self.bound_page_ids = Some(given.address);
        Ok(())
    }

    fn run(&self, args: &Checked<AttentionArgs>, stream: Stream) -> Result<()> {
        self.enqueue(&Around::default(), args, stream).map(drop)
    }

    fn run_after(
        &self,
        args: &Checked<AttentionArgs>,
        earlier: &Earlier,
        stream: Stream,
    ) -> Result<bool> {
        let around = Around {
            earlier: *earlier,
            ..Around::default()
        };
        self.enqueue(&around, args, stream)
    }

    fn context_step(&self) -> Option<u32> {
        self.candidates.first().context_step()
    }

    fn append_run(
        &self,
        append: &Append<'_>,
        args: &Checked<AttentionArgs>,
        stream: Stream,
    ) -> Result<()> {
        let around = Around {
            append: Some(append),
            ..Around::default()
        };
        self.enqueue(&around, args, stream).map(drop)
    }
}

/// What is enqueued together with a run.
#[derive(Clone, Copy, Default)]
struct Around<'a> {
    /// Before it, or by its kernel.
    append: Option<&'a Append<'a>>,
    /// After it.
    last: Option<&'a CudaAttention>,
    /// What the run goes on from.
    earlier: Earlier,
}

/// What is enqueued for a run.
struct Launches<'a> {
    /// Of new tokens that the kernel does not append.
    append: Option<&'a Append<'a>>,
    folded: Option<FoldScalesParams>,
    items: Option<&'a MaskItemsParams>,
    queries: Option<&'a LatentQueriesParams>,
    kernel: &'a dyn AttentionKernel,
    split: SplitRows,
    rounded: Option<RoundLseParams>,
}

impl CudaAttention {
    /// Computes the requests that are planned. Where the batch has others, `last` computes those afterwards, and rounds the lse
    /// of all.
    pub(super) fn run_before(
        &self,
        last: Option<&CudaAttention>,
        args: &Checked<AttentionArgs>,
        stream: Stream,
    ) -> Result<()> {
        let around = Around {
            last,
            ..Around::default()
        };
        self.enqueue(&around, args, stream).map(drop)
    }

    /// False where the run is to go on from earlier keys and its kernel cannot: then nothing is enqueued.
    fn enqueue(
        &self,
        around: &Around<'_>,
        args: &Checked<AttentionArgs>,
        stream: Stream,
    ) -> Result<bool> {
        let planned = self.planned()?;
        let current = self.context.enter()?;
        current.check_stream(stream)?;
        self.check_capture("run", &current, stream)?;
        check_run(args, &self.desc)?;
        let masked = self.items_as_mask(args, &planned)?;
        let (items, args) = match &masked {
            Some((items, masked)) => (Some(items), masked),
            None => (None, args),
        };
        let as_rows =
            |kernel: &LatentQueries| kernel.as_rows(args, &planned.view, planned.latent_queries);
        let widened = self.latent_queries.as_ref().map(as_rows).transpose()?;
        let (queries, args) = match &widened {
            Some((queries, widened)) => (Some(queries), widened),
            None => (None, args),
        };
        let l2_bytes = self.context.device().l2_bytes;
        let mut params = run_params::of(
            &self.desc,
            l2_bytes,
            planned.view,
            &planned.mask_starts,
            args,
        );
        params.flags |= SumParams::flags(around.earlier.sum.as_ref());
        let folded = self.fold_scales.fold(args, planned.scales, &mut params);
        let lse_room = around.last.map_or(Ok(planned), CudaAttention::planned)?.lse;
        let rounded = self.round_lse.redirect(args, lse_room, &mut params);
        let mut run = planned.run(args, &params, around.earlier)?;
        // Before the lock: it may log, and the host's sink may do anything.
        let kernel = self.candidates.pick(&run);
        if !around.earlier.is_nothing() && !kernel.goes_on(&run) {
            return Ok(false);
        }
        let tokens = around.append.map(|append| append.args);
        let new_tokens = tokens.and_then(|tokens| kernel.new_tokens(&run, tokens));
        run.new_tokens = new_tokens.as_ref();
        let launches = Launches {
            append: around.append.filter(|_| new_tokens.is_none()),
            folded,
            items,
            queries,
            kernel,
            split: planned.split,
            rounded: rounded.filter(|_| around.last.is_none()),
        };
        self.launch(&launches, &run, &current, stream)?;
        Ok(true)
    }

    /// Only a handle for graphs is called while its stream is captured.
    fn check_capture(&self, call: &str, current: &Current<'_>, stream: Stream) -> Result<()> {
        if self.desc.graph || !current.is_capturing(stream)? {
            return Ok(());
        }
        Err(Error::Capture(format!(
            "{call}: the stream is captured and this handle is not for graphs; one made with the graph flag is"
        )))
    }

    /// Enqueues what a run is, in order.
    fn launch(
        &self,
        launches: &Launches<'_>,
        run: &Run<'_>,
        current: &Current<'_>,
        stream: Stream,
    ) -> Result<()> {
        let _enqueuing = self
            .enqueuing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(append) = launches.append {
            append.enqueue(stream)?;
        }
        if let Some(folded) = &launches.folded {
            self.fold_scales.launch(current, folded, stream)?;
        }
        if let (Some(kernel), Some(items)) = (&self.mask_items, launches.items) {
            kernel.launch(current, items, run.num_requests, stream)?;
        }
        if let (Some(kernel), Some(queries)) = (&self.latent_queries, launches.queries) {
            kernel.launch(current, queries, stream)?;
        }
        launches.kernel.launch(current, run, stream)?;
        if launches.split.most() > 0 {
            let of_parts = (&launches.kernel.of_parts(run), run.earlier.sum.as_ref());
            self.combine
                .launch(current, of_parts, launches.split, stream)?;
        }
        if let Some(rounded) = &launches.rounded {
            self.round_lse
                .launch(current, rounded, run.num_tokens, stream)?;
        }
        Ok(())
    }

    /// Device address of the counts of the current plan.
    pub(super) fn counts(&self) -> Result<u64> {
        Ok(self.planned()?.view.counts)
    }

    fn planned(&self) -> Result<Planned> {
        self.planned
            .ok_or_else(|| Error::Internal("run came before plan".into()))
    }
}

/// What the tables of kernels would refuse too, by the name of the field: rows of so many elements, and MLA in fp32.
fn check(desc: &AttentionDesc) -> Result<()> {
    match desc.kind {
        Kind::Decode | Kind::Prefill => {
            within("head_dim_qk", desc.head_dim_qk, desc.kv_format)?;
            within("head_dim_vo", desc.head_dim_vo, desc.kv_format)
        }
        Kind::Mla if desc.q_dtype == DType::F32 => Err(Error::Unsupported(
            "q_dtype: float32 is not supported for MLA by the CUDA backend; float16, bfloat16, float8_e4m3 and float8_e5m2 are"
                .into(),
        )),
        Kind::Mla => Ok(()),
    }
}

/// What no kernel takes.
fn check_run(args: &Checked<AttentionArgs>, desc: &AttentionDesc) -> Result<()> {
    let has_items = matches!(args.mask, Mask::Items { .. });
    if has_items && !desc.mask_items {
        return Err(Error::Unsupported(
            "mask_mode: FOLIO_MASK_ITEMS (5) is not supported by the CUDA backend for a handle without FOLIO_PLAN_MASK_ITEMS; one with that flag is, and so is a custom mask that says the same".into(),
        ));
    }
    Ok(())
}

fn within(name: &str, dim: u32, format: CacheFormat) -> Result<()> {
    let (most, cache) = match format.form() {
        CacheForm::Plain => (MOST_WIDE_HEAD_DIM, String::new()),
        form => (
            MOST_HEAD_DIM,
            format!(" with FOLIO_KV_FORMAT_{}", form.name()),
        ),
    };
    if dim <= most {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{name}: {dim} is not supported{cache} by the CUDA backend; up to {most} is"
    )))
}
