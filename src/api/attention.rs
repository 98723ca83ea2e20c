//! The attention handle: create, plan, run. Decode and prefill are the same handle with another desc.

use super::args;
use super::batch::{self, BatchInput, Scratch};
use super::{Context, desc};
use crate::backend::{Attention as Kernel, Stream, Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use crate::log::Level;
use crate::plan::schedule;
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, DeviceBatch, HostBatch, Pages, RequestStarts, WorkList,
};

/// One attention problem on one context, with its current plan.
///
/// `plan` needs exclusive access; `run` may be called from several threads at once, with different
/// output tensors, and on CUDA on one stream or on streams that the host orders: parts of split rows meet
/// in the workspace. A plan serves every layer of a step: what differs between layers is in [`AttentionArgs`].
pub struct Attention {
    context: Context,
    desc: AttentionDesc,
    kernel: Box<dyn Kernel>,
    scratch: Scratch,
    work: WorkList,
    planned: Option<Planned>,
}

/// What a run is checked against.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Planned {
    pub batch_size: i64,
    /// Query rows, as far as the host knows: with offsets on the device it may be none.
    pub num_tokens: i64,
    /// Largest page id that the host knows to be in use, or -1. Kernels clamp ids that only the device knows to
    /// the cache, for which it needs a first page.
    pub max_page_id: i64,
    /// Rows of ragged K and V in use.
    pub kv_rows: i64,
    /// Elements of a custom mask of bytes, and of bits.
    pub mask_bytes: i64,
    pub mask_bits: i64,
}

impl Attention {
    /// Picks the code for a problem. Maxima that may be derived and are 0 are filled in.
    ///
    /// # Errors
    /// `InvalidArgument` for values that no problem has, `Unsupported` for problems that this library,
    /// build or device has no code for.
    pub fn new(context: &Context, desc: AttentionDesc) -> Result<Attention> {
        let desc = desc::check(desc)?;
        let kernel = context.backend().attention(&desc)?;
        context.log(
            Level::Info,
            format_args!("{:?}: kernel {}", desc.kind, kernel.kernel()),
        );
        Ok(Attention {
            context: context.clone(),
            scratch: Scratch::for_desc(&desc)?,
            work: WorkList::default(),
            planned: None,
            desc,
            kernel,
        })
    }

    /// The checked desc, derived maxima included.
    pub fn desc(&self) -> &AttentionDesc {
        &self.desc
    }

    /// Name of the kernel that was picked.
    pub fn kernel(&self) -> &str {
        self.kernel.kernel()
    }

    /// Memory that suffices for every batch within the desc.
    pub fn workspace(&self) -> WorkspaceInfo {
        self.kernel.workspace()
    }

    /// Takes over a batch. Host tensors of the batch are not referred to afterwards; device tensors
    /// must stay as they are until the last run of this plan has finished. The workspace belongs to the
    /// plan until the next `plan` or the end of the handle. On a refused batch the previous plan stays.
    ///
    /// # Errors
    /// What is wrong with the batch or the workspace.
    pub fn plan(
        &mut self,
        input: &BatchInput,
        workspace: &Workspace,
        workspace_bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        self.context.check_stream(stream)?;
        check_workspace(&self.kernel.workspace(), workspace, workspace_bytes)?;
        let device = self.context.device();
        let batch = batch::check(input, &self.desc, device, &mut self.scratch)?;
        let planned = match &batch {
            Batch::Host(host) => {
                schedule(host, &self.desc, &self.kernel.tiling(), &mut self.work)?;
                Planned::of(host, &self.work.starts)
            }
            Batch::Device(device) => {
                self.work.clear();
                Planned::of_device(device)
            }
        };
        self.kernel.plan(&batch, &self.work, workspace, stream)?;
        self.planned = Some(planned);
        Ok(())
    }

    /// Computes attention for the planned batch. Rows of the outputs beyond the batch keep what they
    /// hold.
    ///
    /// # Errors
    /// What is wrong with the arguments; then no output was touched.
    pub fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        let planned = self.planned.ok_or_else(|| {
            Error::NotPlanned("run: there is no plan yet; a successful plan is needed first".into())
        })?;
        self.context.check_stream(stream)?;
        let args = args::check(args, &self.desc, &planned, self.context.device())?;
        self.kernel.run(&args, stream)
    }
}

impl Planned {
    fn of_device(batch: &DeviceBatch) -> Planned {
        let batch_size = i64::from(batch.batch_size);
        let num_ids = batch.page_ids.map_or(0, |ids| ids.num_elements());
        Planned {
            batch_size,
            num_tokens: match batch.qo_indptr {
                None => batch_size * i64::from(batch.qo_len),
                Some(_) => 0,
            },
            max_page_id: if num_ids > 0 { 0 } else { -1 },
            ..Planned::default()
        }
    }

    fn of(batch: &HostBatch<'_>, starts: &RequestStarts) -> Planned {
        let n = batch.batch_size();
        let mut planned = Planned {
            batch_size: n as i64,
            mask_bytes: starts.mask_bytes[n],
            mask_bits: starts.mask_bits[n],
            num_tokens: batch.num_tokens() as i64,
            max_page_id: match batch.are_page_ids_on_device() {
                true if batch.num_pages > 0 => 0,
                _ => i64::from(batch.max_page_id),
            },
            ..Planned::default()
        };
        if let Pages::Ragged { indptr } = batch.pages {
            planned.kv_rows = i64::from(indptr[n]);
        }
        planned
    }
}

fn check_workspace(
    needed: &WorkspaceInfo,
    workspace: &Workspace,
    (device_bytes, host_bytes): (usize, usize),
) -> Result<()> {
    for (name, address, needed_bytes, given_bytes) in [
        (
            "workspace.device",
            workspace.device,
            needed.device_bytes,
            device_bytes,
        ),
        (
            "workspace.host",
            workspace.host,
            needed.host_bytes,
            host_bytes,
        ),
    ] {
        if needed_bytes == 0 {
            continue;
        }
        if address == 0 || given_bytes < needed_bytes {
            return Err(Error::WorkspaceTooSmall(format!(
                "{name}: {needed_bytes} bytes are needed, {} were given",
                if address == 0 { 0 } else { given_bytes }
            )));
        }
        if !address.is_multiple_of(needed.alignment) {
            return Err(Error::WorkspaceTooSmall(format!(
                "{name}: address {address:#x} is not accepted; an alignment of {} bytes is needed",
                needed.alignment
            )));
        }
    }
    Ok(())
}
