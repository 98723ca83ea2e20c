//! Mixed batches: the decodes of a batch, beside its prompts, are a plan of their own, and a run is a decode kernel and then a
//! prefill kernel. For caches whose keys a prefill kernel converts: a tile of it has one warpgroup for the few rows of a
//! decode, whose steps are longer than it takes to read their bytes (166 decodes on 30101 keys in fp8, 32/1 heads of 96, beside
//! 30 rows, on an H200: 1250 µs, where the bytes are read in 230). A second kernel, and what combines its parts, take about
//! 15 µs, and so decodes of few keys stay with the prompts.
//!
//! Both plans have all lengths of the batch. In batch-invariant plans it depends on a request's query rows alone whose it is.

use std::sync::Arc;

use super::handle::CudaAttention;
use super::kernel::packed_rows;
use super::sm90_decode::Sm90Decode;
use crate::backend::{Attention, Stream, Workspace, WorkspaceInfo};
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::attention::{KeySource, Masks};
use crate::error::{Error, Result};
use crate::log::Level;
use crate::plan::{PARTS_ALIGNMENT, schedule};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, CacheForm, Checked, HostBatch, Kind, Requests, Tiling,
    WorkList,
};

/// Packed rows of a decode: the least that decode kernels have tiles of. With 32, so that drafts are verified by the kernel that
/// decodes, 200 random batches with drafts of 2 to 8 tokens took up to 2.4 times less, but those with decodes up to 1.3 times
/// more (on an H200, fp8).
const DECODE_ROWS: u32 = 8;

/// Bytes of the keys and values of decodes that are worth a kernel of their own. Of 186 random batches in fp8 on an H200,
/// the 79 with so many were 1.27 times as fast with it, and the others 0.78 times.
const LEAST_BYTES: u64 = 32 << 20;

/// One attention problem whose batches may be mixed.
pub struct Mixed {
    prompts: Part,
    decodes: Part,
    workspace: WorkspaceInfo,
    planned: Option<Planned>,
}

/// Some requests of a batch.
struct Part {
    attention: CudaAttention,
    desc: AttentionDesc,
    work: WorkList,
    /// Its part of the workspace.
    at: Workspace,
}

/// The parts that have requests, or may have some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planned {
    /// All requests are planned as prompts.
    Prompts,
    /// All are decodes.
    Decodes,
    Both,
}

impl Mixed {
    /// Loads the kernels of a problem: of both parts where its decodes are to be planned apart, or of one.
    ///
    /// # Errors
    /// As [`CudaAttention::new`].
    pub fn load(
        loader: &Loader,
        context: &Arc<Context>,
        desc: &AttentionDesc,
    ) -> Result<Box<dyn Attention>> {
        let all = CudaAttention::new(loader, context, desc)?;
        let Some(decode_desc) = decodes_of(desc) else {
            return Ok(Box::new(all));
        };
        if !decodes_on_hopper(loader, context, &decode_desc)? {
            return Ok(Box::new(all));
        }
        let decodes = CudaAttention::new(loader, context, &decode_desc)?;
        loader.logger().log(
            Level::Info,
            format_args!(
                "{:?}: requests of up to {} query rows in a batch with longer ones: kernel {}",
                desc.kind,
                decode_desc.max_qo_len,
                decodes.kernel()
            ),
        );
        let mut workspace = WorkspaceInfo {
            alignment: PARTS_ALIGNMENT,
            ..WorkspaceInfo::default()
        };
        let mut part = |attention: CudaAttention, desc: AttentionDesc| Part {
            at: workspace.place(&attention.workspace()),
            attention,
            desc,
            work: WorkList::default(),
        };
        let (prompts, decodes) = (part(all, *desc), part(decodes, decode_desc));
        Ok(Box::new(Mixed {
            prompts,
            decodes,
            workspace,
            planned: None,
        }))
    }

    /// Query rows of a decode, at most.
    fn decode_rows(&self) -> u32 {
        self.decodes.desc.max_qo_len
    }

    /// Which parts a batch has, as far as the host knows, and the requests of both.
    fn parts_of(&self, batch: &Batch<'_>) -> (Planned, Requests) {
        let least_keys = least_keys(&self.prompts.desc);
        let decodes = Requests::Decodes {
            most_rows: self.decode_rows(),
            least_keys,
        };
        let Batch::Host(host) = batch else {
            return (Planned::Both, decodes);
        };
        let (mut has_prompts, mut keys_of_decodes) = (false, 0);
        for b in (0..host.batch_size()).filter(|&b| host.qo_len(b) > 0) {
            match decodes.include(host.qo_len(b)) {
                true => keys_of_decodes += u64::from(host.num_keys_in_window(b, 1)),
                false => has_prompts = true,
            }
        }
        let is_worth_it = keys_of_decodes >= least_keys;
        match (has_prompts, is_worth_it) {
            // What a graph has captured, it launches for every batch.
            (_, true) if self.prompts.desc.graph => (Planned::Both, decodes),
            (_, false) if self.prompts.desc.graph => (Planned::Both, NO_DECODES),
            (true, true) => (Planned::Both, decodes),
            (false, _) => (Planned::Decodes, Requests::All),
            (true, false) => (Planned::Prompts, Requests::All),
        }
    }

    /// The others.
    fn prompts_beside(&self, decodes: Requests) -> Result<Requests> {
        Ok(match decodes {
            NO_DECODES => Requests::All,
            _ => Requests::Prompts {
                decode_rows: self.decode_rows(),
                decode_counts: self.decodes.attention.counts()?,
            },
        })
    }
}

/// Requests without rows.
const NO_DECODES: Requests = Requests::Decodes {
    most_rows: 0,
    least_keys: 0,
};

impl Part {
    fn plan(
        &mut self,
        planned: Requests,
        batch: &Batch<'_>,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()> {
        let mut batch = *batch;
        match &mut batch {
            Batch::Host(host) => {
                *host = HostBatch { planned, ..*host };
                schedule(host, &self.desc, &self.attention.tiling(), &mut self.work)?;
            }
            Batch::Device(device) => device.planned = planned,
        }
        let workspace = workspace.part(self.at);
        self.attention.plan(&batch, &self.work, &workspace, stream)
    }
}

impl Attention for Mixed {
    fn kernel(&self) -> &str {
        self.prompts.attention.kernel()
    }

    fn tiling(&self) -> Tiling {
        self.prompts.attention.tiling()
    }

    fn workspace(&self) -> WorkspaceInfo {
        self.workspace
    }

    fn plan(
        &mut self,
        batch: &Batch<'_>,
        work: &WorkList,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<()> {
        let (parts, decodes) = self.parts_of(batch);
        match parts {
            Planned::Prompts => self
                .prompts
                .attention
                .plan(batch, work, workspace, stream)?,
            Planned::Decodes => self.decodes.plan(decodes, batch, workspace, stream)?,
            Planned::Both => {
                // What is refused, both refuse, and the first one leaves the plan before in force.
                self.decodes.plan(decodes, batch, workspace, stream)?;
                self.planned = None;
                let prompts = self.prompts_beside(decodes)?;
                self.prompts.plan(prompts, batch, workspace, stream)?;
            }
        }
        self.planned = Some(parts);
        Ok(())
    }

    fn run(&self, args: &Checked<AttentionArgs>, stream: Stream) -> Result<()> {
        let (decodes, prompts) = (&self.decodes.attention, &self.prompts.attention);
        match self.planned {
            None => Err(Error::NotPlanned(
                "run: the last plan failed half-way; a successful plan is needed first".into(),
            )),
            Some(Planned::Prompts) => prompts.run(args, stream),
            Some(Planned::Decodes) => decodes.run(args, stream),
            Some(Planned::Both) => {
                decodes.run_before(Some(prompts), args, stream)?;
                prompts.run(args, stream)
            }
        }
    }
}

/// The problem of the decodes of a batch, where they are planned apart.
fn decodes_of(desc: &AttentionDesc) -> Option<AttentionDesc> {
    let converts = desc.kv_format.form() != CacheForm::Plain || desc.kv_format.element.is_fp8();
    let max_qo_len = (DECODE_ROWS / desc.group_size()).max(1);
    let is_mixed = desc.kind == Kind::Prefill
        && desc.shared_levels == 0
        && !desc.mask_items
        && !desc.fp8_products
        && desc.max_batch_size > 1
        && max_qo_len < desc.max_qo_len
        && packed_rows(desc) > most_rows_of_decode(desc);
    let may_be_worth_it = desc.most_keys() >= least_keys(desc);
    (converts && is_mixed && may_be_worth_it).then_some(AttentionDesc {
        kind: Kind::Decode,
        max_qo_len,
        ..*desc
    })
}

/// Packed rows up to which no batch is taken for a mixed one. A graph of few rows most often verifies drafts, and would launch
/// both kernels.
fn most_rows_of_decode(desc: &AttentionDesc) -> u32 {
    match desc.graph {
        true => Sm90Decode::most_rows(false),
        false => Sm90Decode::most_converting_rows(desc),
    }
}

/// Keys of decodes that are planned apart. In a batch-invariant plan, all.
fn least_keys(desc: &AttentionDesc) -> u64 {
    match desc.batch_invariant {
        true => 0,
        false => LEAST_BYTES.div_ceil(u64::from(desc.num_kv_heads) * desc.kv_bytes()),
    }
}

fn decodes_on_hopper(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<bool> {
    for keys in [KeySource::Tma, KeySource::Gather] {
        if Sm90Decode::load(keys, Masks::ByPosition, loader, context, desc)?.is_ok() {
            return Ok(true);
        }
    }
    Ok(false)
}
