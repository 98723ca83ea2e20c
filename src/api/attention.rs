//! The attention handle: create, plan, run. Decode, prefill and MLA are the same handle with another desc.

use super::batch::{self, BatchInput, Scratch};
use super::extend::Extend;
use super::planned::{Planned, no_plan};
use super::{Context, appended, args, desc, rope_append};
use crate::backend::{Append, Attention as Kernel, Stream, Workspace, WorkspaceInfo};
use crate::error::{Error, Result};
use crate::log::Level;
use crate::problem::{AttentionArgs, AttentionDesc, Earlier, RopeAppendArgs, WorkList};

/// One attention problem on one context, with its current plan.
///
/// `plan` needs exclusive access; `run` may be called from several threads at once, with different
/// output tensors, and on CUDA on one stream or on streams that the host orders: parts of split rows meet
/// in the workspace. A plan serves every layer of a step: what differs between layers is in [`AttentionArgs`].
pub struct Attention {
    context: Context,
    desc: AttentionDesc,
    code: Code,
    scratch: Scratch,
    work: WorkList,
}

/// What computes, and what runs of the current plan are checked against.
enum Code {
    /// All keys are in the cache, or ragged.
    One {
        kernel: Box<dyn Kernel>,
        planned: Option<Planned>,
    },
    /// The keys of the query rows are beside the cache.
    Extend(Box<Extend>),
}

impl Attention {
    /// Picks the code for a problem. Maxima that may be derived and are 0 are filled in.
    ///
    /// # Errors
    /// `InvalidArgument` for values that no problem has, `Unsupported` for problems that this library,
    /// build or device has no code for.
    pub fn new(context: &Context, desc: AttentionDesc) -> Result<Attention> {
        let desc = desc::check(desc)?;
        let code = match desc.new_kv {
            None => Code::One {
                kernel: context.backend().attention(&desc)?,
                planned: None,
            },
            Some(_) => Code::Extend(Box::new(Extend::new(context, &desc)?)),
        };
        context.log(
            Level::Info,
            format_args!("{:?}: kernel {}", desc.kind, code.kernel()),
        );
        Ok(Attention {
            context: context.clone(),
            scratch: Scratch::for_desc(&desc)?,
            work: WorkList::default(),
            desc,
            code,
        })
    }

    /// The checked desc, derived maxima included.
    pub fn desc(&self) -> &AttentionDesc {
        &self.desc
    }

    /// Name of the kernel that was picked.
    pub fn kernel(&self) -> &str {
        self.code.kernel()
    }

    /// Memory that suffices for every batch within the desc.
    pub fn workspace(&self) -> WorkspaceInfo {
        self.code.workspace()
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
        check_workspace(&self.code.workspace(), workspace, workspace_bytes)?;
        let device = self.context.device();
        let batch = batch::check(input, &self.desc, device, &mut self.scratch)?;
        input.check_room(&self.desc)?;
        let work = &mut self.work;
        match &mut self.code {
            Code::One { kernel, planned } => {
                let cut = Planned::cut(&batch, &self.desc, kernel.as_ref(), work)?;
                kernel.plan(&batch, work, workspace, stream)?;
                *planned = Some(Planned {
                    window_left: input.window_left,
                    ..cut
                });
                Ok(())
            }
            Code::Extend(extend) => extend.plan(&batch, work, workspace, stream),
        }
    }

    /// Computes attention for the planned batch. Rows of the outputs beyond the batch keep what they
    /// hold.
    ///
    /// # Errors
    /// What is wrong with the arguments; then no output was touched.
    pub fn run(&self, args: &AttentionArgs, stream: Stream) -> Result<()> {
        let (kernel, planned) = match &self.code {
            Code::One { kernel, planned } => (kernel, planned.ok_or_else(no_plan)?),
            Code::Extend(extend) => return extend.run(args, stream),
        };
        self.context.check_stream(stream)?;
        let args = args::check(args, &self.desc, &planned, self.context.device())?;
        kernel.run(&args, stream)
    }

    /// What [`Kernel::run_after`] does.
    ///
    /// # Errors
    /// As [`Attention::run`].
    pub(super) fn run_after(
        &self,
        args: &AttentionArgs,
        earlier: &Earlier,
        stream: Stream,
    ) -> Result<bool> {
        let Code::One { kernel, planned } = &self.code else {
            return Ok(false);
        };
        self.context.check_stream(stream)?;
        let planned = planned.ok_or_else(no_plan)?;
        let planned = match earlier.context {
            None => planned,
            // The run's own keys are those of its rows, without the context.
            Some(_) => Planned {
                kv_rows: planned.num_tokens,
                ..planned
            },
        };
        let args = args::check(args, &self.desc, &planned, self.context.device())?;
        kernel.run_after(&args, earlier, stream)
    }

    /// What [`Kernel::context_step`] says.
    pub(super) fn context_step(&self) -> Option<u32> {
        match &self.code {
            Code::One { kernel, .. } => kernel.context_step(),
            Code::Extend(_) => None,
        }
    }

    /// Normalises, rotates and appends new tokens, and computes attention for the planned batch, whose last keys they are: what
    /// [`rope_append`](super::rope_append()) and then [`Attention::run`] do. The queries of the run are those that were made.
    ///
    /// # Errors
    /// What is wrong with the arguments; then nothing was written.
    pub fn append_run(
        &self,
        append: &RopeAppendArgs,
        args: &AttentionArgs,
        stream: Stream,
    ) -> Result<()> {
        let (kernel, planned) = match &self.code {
            Code::One { kernel, planned } => (kernel, planned.ok_or_else(no_plan)?),
            Code::Extend(_) => {
                return Err(Error::Unsupported(
                    "new_kv_dtype: keys beside the cache are not supported where new tokens are appended; 0 is"
                        .into(),
                ));
            }
        };
        self.context.check_stream(stream)?;
        let device = self.context.device();
        let append = rope_append::checked(append, device)?;
        let args = args::check(args, &self.desc, &planned, device)?;
        appended::check(&append, &args)?;
        let append = Append {
            args: &append,
            backend: self.context.backend(),
        };
        kernel.append_run(&append, &args, stream)
    }
}

impl Code {
    fn kernel(&self) -> &str {
        match self {
            Code::One { kernel, .. } => kernel.kernel(),
            Code::Extend(extend) => extend.kernel(),
        }
    }

    fn workspace(&self) -> WorkspaceInfo {
        match self {
            Code::One { kernel, .. } => kernel.workspace(),
            Code::Extend(extend) => extend.workspace(),
        }
    }
}

pub(super) fn check_workspace(
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
