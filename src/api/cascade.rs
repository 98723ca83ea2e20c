//! The cascade handle: attention over batches whose requests share prefixes. It has two plans of a batch, the flat one and
//! one that reads shared keys once, and every run takes the one that its arguments allow. Where the arguments allow both,
//! whether a prefix pays decides. Runs of a graph have one kernel for all plans: that for shared keys, or the flat one where
//! no batch of the handle shares what pays.

use super::attention::check_workspace;
use super::batch::{self, BatchInput, Scratch};
use super::planned::Planned;
use super::shared_prefixes::{Prefixes, SharedPrefixes};
use super::{Context, args, desc};
use crate::backend::{Attention as Kernel, Stream, Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use crate::log::Level;
use crate::plan::{CascadeScratch, PARTS_ALIGNMENT, cascade, cascade_on_device, may_share};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, CacheFormat, Checked, Kind, KvStorage, Mask, MaskColumns,
    WorkList,
};

/// One problem on one context, with its current plan.
///
/// `plan` needs exclusive access; `run` as that of [`Attention`](super::Attention).
pub struct Cascade {
    context: Context,
    desc: AttentionDesc,
    flat_desc: AttentionDesc,
    flat: Part,
    shared: Part,
    workspace: WorkspaceInfo,
    scratch: Scratch,
    prefixes: Prefixes,
    cascade: CascadeScratch,
    work: WorkList,
    planned: Option<PlannedCascade>,
    in_graphs: InGraphs,
}

/// Which kernel runs have that may be captured before other plans are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InGraphs {
    /// The handle is not for graphs: that of the plan.
    Planned,
    Flat,
    Shared,
}

/// A kernel with its part of the workspace.
struct Part {
    kernel: Box<dyn Kernel>,
    at: Workspace,
}

/// What a run is checked against, and whether there is a plan that shares.
#[derive(Debug, Clone, Copy)]
struct PlannedCascade {
    planned: Planned,
    shares: bool,
}

/// Levels that a desc may ask for: more would be a deeper tree than caches of prefixes have.
const MOST_LEVELS: u32 = 16;

/// Query rows of a request up to which the flat plan is one of decode, the most expensive items first.
const DECODE_ROWS: u32 = 16;

impl Cascade {
    /// Picks the code for a problem, that of a paged prefill. Maxima that may be derived and are 0 are filled in;
    /// `shared_levels` 0 stands for one.
    ///
    /// # Errors
    /// As [`Attention::new`](super::Attention::new).
    pub fn new(context: &Context, desc: AttentionDesc) -> Result<Cascade> {
        let desc = checked(desc)?;
        let flat_desc = AttentionDesc {
            kind: match desc.max_qo_len <= DECODE_ROWS {
                true => Kind::Decode,
                false => Kind::Prefill,
            },
            shared_levels: 0,
            ..desc
        };
        // A tile has rows of several requests.
        let shared_desc = AttentionDesc {
            max_qo_len: desc.max_num_tokens,
            // Runs with items take the flat plan.
            mask_items: false,
            ..desc
        };
        let flat = context.backend().attention(&flat_desc)?;
        let shared = context.backend().attention(&shared_desc)?;
        context.log(
            Level::Info,
            format_args!(
                "Cascade: kernel {}, for shared keys {}",
                flat.kernel(),
                shared.kernel()
            ),
        );
        let in_graphs = match desc.graph {
            false => InGraphs::Planned,
            true if may_share(&desc, &shared.tiling())? => InGraphs::Shared,
            true => InGraphs::Flat,
        };
        let mut workspace = WorkspaceInfo {
            alignment: PARTS_ALIGNMENT,
            ..WorkspaceInfo::default()
        };
        let mut part = |kernel: Box<dyn Kernel>| Part {
            at: workspace.place(&kernel.workspace()),
            kernel,
        };
        let (flat, shared) = (part(flat), part(shared));
        Ok(Cascade {
            context: context.clone(),
            scratch: Scratch::for_desc(&desc)?,
            flat,
            shared,
            workspace,
            prefixes: Prefixes::default(),
            cascade: CascadeScratch::default(),
            work: WorkList::default(),
            planned: None,
            in_graphs,
            flat_desc,
            desc,
        })
    }

    /// The checked desc, derived maxima included.
    pub fn desc(&self) -> &AttentionDesc {
        &self.desc
    }

    /// Name of the kernel for shared keys.
    pub fn kernel(&self) -> &str {
        self.shared.kernel.kernel()
    }

    /// Memory that suffices for every batch within the desc.
    pub fn workspace(&self) -> WorkspaceInfo {
        self.workspace
    }

    /// Takes over a batch, whose page table has the shared pages in the rows of every request, and what its requests
    /// share.
    ///
    /// # Errors
    /// What is wrong with the batch, the prefixes or the workspace.
    pub fn plan(
        &mut self,
        input: &BatchInput,
        prefixes: &SharedPrefixes<'_>,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        self.context.check_stream(stream)?;
        check_workspace(&self.workspace, workspace, workspace_bytes)?;
        let device = self.context.device();
        let batch = batch::check(input, &self.desc, device, &mut self.scratch)?;
        input.check_room(&self.desc)?;
        let batch_size = match &batch {
            Batch::Host(host) => host.batch_size(),
            Batch::Device(device) => device.batch_size as usize,
        };
        self.prefixes.take_over(prefixes, batch_size)?;
        let flat = self.flat.kernel.as_ref();
        let planned = Planned::cut(&batch, &self.flat_desc, flat, &mut self.work)?;
        self.flat.plan(&batch, &self.work, workspace, stream)?;
        // From here on only memory and the device can fail, and then there is no plan.
        self.planned = None;
        let (desc, tiling) = (&self.desc, &self.shared.kernel.tiling());
        let (list, scratch, work) = (self.prefixes.list(), &mut self.cascade, &mut self.work);
        let shares = match &batch {
            _ if self.in_graphs == InGraphs::Flat => false,
            Batch::Host(host) => cascade(host, desc, tiling, list, scratch, work)?,
            Batch::Device(device) => {
                cascade_on_device(device.batch_size, desc, tiling, list, scratch, work)?
            }
        };
        if shares || self.in_graphs == InGraphs::Shared {
            self.shared.plan(&batch, &self.work, workspace, stream)?;
        }
        self.planned = Some(PlannedCascade { planned, shares });
        Ok(())
    }

    /// Computes attention for the planned batch.
    ///
    /// # Errors
    /// What is wrong with the arguments; then no output was touched.
    pub fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        let PlannedCascade { planned, shares } = self.planned("run")?;
        self.context.check_stream(stream)?;
        if args.k_rope.is_some() {
            return Err(Error::Unsupported(
                "k_rope: a tensor is not supported by cascades; NULL, and whole keys in k, is"
                    .into(),
            ));
        }
        let args = args::check(args, &self.desc, &planned, self.context.device())?;
        let is_planned = shares || self.in_graphs == InGraphs::Shared;
        let part = match is_planned && sees_what_is_shared(&args, self.desc.kv_format) {
            true => &self.shared,
            false => &self.flat,
        };
        part.kernel.run(&args, stream)
    }

    /// Whether runs without windows and the like read shared keys once: some prefix of the current plan pays.
    ///
    /// # Errors
    /// [`Error::NotPlanned`].
    pub fn shares(&self) -> Result<bool> {
        Ok(self.planned("shares")?.shares)
    }

    fn planned(&self, call: &str) -> Result<PlannedCascade> {
        self.planned.ok_or_else(|| {
            Error::NotPlanned(format!(
                "{call}: there is no plan yet; a successful plan is needed first"
            ))
        })
    }
}

impl Part {
    fn plan(
        &mut self,
        batch: &Batch<'_>,
        work: &WorkList,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()> {
        self.kernel
            .plan(batch, work, &workspace.part(self.at), stream)
    }
}

/// Every row sees all shared keys, which lie before its request's new tokens, and their logits depend neither on where it
/// stands nor on its request. What is only added to a row's keys, as ranges are, takes none away.
fn sees_what_is_shared(args: &Checked<AttentionArgs>, format: CacheFormat) -> bool {
    let by_mask = match args.mask {
        Mask::Causal | Mask::Full | Mask::CausalByRequest(_) => true,
        Mask::Bytes(_) | Mask::Bits(_) => args.mask_columns != MaskColumns::Keys,
        Mask::Items { .. } => false,
    };
    let by_window = args.window.left.is_none() && args.chunks.is_none();
    // Rows of the batch and numbers of shared keys are the same in every cut; rows of a request are not.
    let by_bias = (args.score_bias).is_none_or(|bias| bias.new_keys || !bias.request_rows);
    let by_logits = by_bias && args.alibi_slopes.is_none() && !args.has_request_scales(format);
    by_mask && by_window && by_logits
}

fn checked(desc: AttentionDesc) -> Result<AttentionDesc> {
    let mut desc = desc::check(desc)?;
    if desc.kv == KvStorage::Ragged {
        return Err(Error::Unsupported(
            "kv_storage: ragged keys and values are not supported by cascades; a paged cache is"
                .into(),
        ));
    }
    if let Some(new_kv) = desc.new_kv {
        return Err(Error::Unsupported(format!(
            "new_kv_dtype: {new_kv} is not supported by cascades; all keys in the cache are"
        )));
    }
    if desc.shared_levels > MOST_LEVELS {
        return Err(Error::Unsupported(format!(
            "max_shared_levels: {} is not supported; up to {MOST_LEVELS} is",
            desc.shared_levels
        )));
    }
    desc.shared_levels = desc.shared_levels.max(1);
    // Positions of rows of several requests are counted from the end of the keys that they share.
    if desc.max_kv_len.saturating_add(desc.max_num_tokens) > i32::MAX as u32 {
        return Err(Error::Unsupported(format!(
            "max_kv_len: {} is not supported with max_num_tokens {}; a sum of up to {} is",
            desc.max_kv_len,
            desc.max_num_tokens,
            i32::MAX
        )));
    }
    Ok(desc)
}
