//! Mixed batches: the decodes of a batch, beside its prompts, are a plan of their own, and a run is a decode kernel and then a
//! prefill kernel. For prefill kernels whose tiles take longer for the few rows of a decode than it takes to read their bytes:
//! Hopper's where it converts keys (166 decodes on 30101 keys in fp8, 32/1 heads of 96, beside 30 rows, on an H200: 1250 µs, where
//! the bytes are read in 230), or multiplies in e4m3 and the heads of a group do not share a tile, that for latent attention with many
//! rows, a decode of which fills a quarter of a tile or less, and the portable one, of whose four warps one has all rows. A second
//! kernel, and what combines its parts, take 15 to 20 µs, and so decodes of few keys stay with the prompts.
//!
//! Drafts that are verified, and short chunks, are too few rows for a prefill kernel as well, but more than a tile of decodes has. Where
//! the host sees that they have more keys than shorter requests of a batch, or that nothing is longer, a decode kernel with larger
//! tiles takes all of these.
//!
//! Both plans have all lengths of the batch. In batch-invariant plans it depends on a request's query rows alone whose it is.

use std::sync::Arc;

use super::generic::Generic;
use super::handle::CudaAttention;
use super::kernel::packed_rows;
use super::sm90_decode::Sm90Decode;
use super::sm90_mla_few::Sm90MlaFew;
use super::sm90_prefill_fp8::Sm90PrefillFp8;
use crate::backend::{Attention, Stream, Workspace, WorkspaceInfo};
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::Arch;
use crate::cuda::kernels::attention::{KeySource, Masks};
use crate::error::{Error, Result};
use crate::log::Level;
use crate::plan::{PARTS_ALIGNMENT, schedule};
use crate::problem::{
    AttentionArgs, AttentionDesc, Batch, CacheForm, Checked, HostBatch, Kind, Requests, Tiling,
    WorkList,
};

/// Packed rows of a decode: the least that Hopper's decode kernels have tiles of.
const HOPPER_DECODE_ROWS: u32 = 8;

/// Packed rows of drafts. Decodes in tiles of so many take up to 1.3 times as long as in tiles of [`HOPPER_DECODE_ROWS`], and drafts
/// down to 0.4 of what prefill kernels take (random batches in fp8 on an H200, drafts of 2 to 8 tokens).
const DRAFT_ROWS: u32 = 32;

/// Packed rows of longer drafts and of short chunks, on Hopper: 64 requests of so many on 4096 keys in fp8 take 0.60 to 0.73 of what
/// the prefill kernel takes, 128 on 1024 keys 0.74 to 0.82 (H200; 32/8, 28/4 and 16/16 heads of 128, 64/8 and 12/12 of 64).
const CHUNK_ROWS: u32 = 64;

/// How many kernels there may be for requests of few rows.
const MOST_FEW: usize = 3;

/// The first of them, for decodes alone.
const DECODES: usize = 0;

/// Bytes of the keys and values of decodes that are worth a kernel of their own. Of 186 random batches in fp8 on an H200,
/// the 79 with so many were 1.27 times as fast with it, and the others 0.78 times. By the portable kernels 36 of 96
/// were 1.37 times as fast, and the others 0.73 times.
const LEAST_BYTES: u64 = 32 << 20;

/// The same by the kernel that multiplies in e4m3, which converts nothing but reads keys once for each tile: over the tiles of a
/// decode. Of 82 random batches in e4m3 with three tiles and more, the 46 with so many took 0.53 times as long apart, the worst of them
/// 1.15 times.
const LEAST_BYTES_OF_TILES: u64 = 48 << 20;

/// The same of keys that no kernel converts: by the portable kernels, 185 of 407 random batches in bf16 were 1.29 times as fast, and
/// the others 0.71 times.
const LEAST_BYTES_UNCONVERTED: u64 = 64 << 20;

/// Packed rows of a decode over latent records: those of a tile of Hopper's kernel for few rows.
const LATENT_DECODE_ROWS: u32 = 16;

/// Latent records of decodes that are worth a kernel of their own. Of 411 random batches over fp8 records on an H200, the 59 with so
/// many were 1.17 times as fast with it, up to 1.56, and the others 0.78 times.
const LATENT_KEYS: u64 = 1 << 18;

/// One attention problem whose batches may be mixed.
pub struct Mixed {
    prompts: Part,
    /// For requests of few rows: those of [`DECODES`], and then of more.
    few: Vec<Part>,
    /// Keys of requests of few rows that are planned apart.
    least_keys: u64,
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

/// The keys of a batch by the part of few rows that its requests need, and the most rows.
#[derive(Debug, Default)]
struct KeysByRows {
    of_few: [u64; MOST_FEW],
    longest: u32,
}

/// The parts that have requests, or may have some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planned {
    /// All requests are planned as prompts.
    Prompts,
    /// All have few rows, for this part of [`Mixed::few`].
    Few(usize),
    Both(usize),
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
        let Some(few_rows) = FewRows::of(loader, context, desc)? else {
            return Ok(Box::new(all));
        };
        let few = |&few_desc: &AttentionDesc| -> Result<(CudaAttention, AttentionDesc)> {
            let attention = CudaAttention::new(loader, context, &few_desc)?;
            loader.logger().log(
                Level::Info,
                format_args!(
                    "{:?}: requests of up to {} query rows in a batch with longer ones: kernel {}",
                    desc.kind,
                    few_desc.max_qo_len,
                    attention.kernel()
                ),
            );
            Ok((attention, few_desc))
        };
        let few: Vec<_> = few_rows.of.iter().map(few).collect::<Result<_>>()?;
        let mut workspace = WorkspaceInfo {
            alignment: PARTS_ALIGNMENT,
            ..WorkspaceInfo::default()
        };
        let mut part = |(attention, desc): (CudaAttention, AttentionDesc)| Part {
            at: workspace.place(&attention.workspace()),
            attention,
            desc,
            work: WorkList::default(),
        };
        let prompts = part((all, *desc));
        Ok(Box::new(Mixed {
            prompts,
            few: few.into_iter().map(part).collect(),
            least_keys: few_rows.least_keys,
            workspace,
            planned: None,
        }))
    }

    fn keys_by_rows(&self, host: &HostBatch<'_>) -> KeysByRows {
        let mut keys = KeysByRows::default();
        for b in (0..host.batch_size()).filter(|&b| host.qo_len(b) > 0) {
            let rows = host.qo_len(b);
            keys.longest = keys.longest.max(rows);
            let needed = |part: &Part| rows <= part.desc.max_qo_len;
            if let Some(part) = self.few.iter().position(needed) {
                keys.of_few[part] += u64::from(host.num_keys_in_window(b, 1));
            }
        }
        keys
    }

    /// Whose the requests of few rows are: the decodes', but where those of more rows have most of the keys, or are drafts and nothing
    /// is longer.
    fn few_of(&self, keys: &KeysByRows) -> usize {
        let takes_all = |&part: &usize| {
            let (own, shorter) = (keys.of_few[part], keys.of_few[..part].iter().sum());
            let nothing_is_longer = keys.longest <= self.few[part].desc.max_qo_len;
            let most = own >= shorter;
            let is_little_slower = packed_rows(&self.few[part].desc) <= DRAFT_ROWS;
            match nothing_is_longer {
                true => own > 0 && (most || is_little_slower),
                false => most && own >= self.least_keys.max(1),
            }
        };
        let parts = DECODES + 1..self.few.len();
        parts.rev().find(takes_all).unwrap_or(DECODES)
    }

    /// Which parts a batch has, as far as the host knows, and the requests of few rows.
    fn parts_of(&self, batch: &Batch<'_>) -> (Planned, Requests) {
        let least_keys = self.least_keys;
        let of_part = |few: usize| Requests::Decodes {
            most_rows: self.few[few].desc.max_qo_len,
            least_keys,
        };
        let Batch::Host(host) = batch else {
            return match self.prompts.desc.kind {
                // Two kernels pay for few of its batches.
                Kind::Mla => (Planned::Prompts, Requests::All),
                _ => (Planned::Both(DECODES), of_part(DECODES)),
            };
        };
        let keys = self.keys_by_rows(host);
        let few = self.few_of(&keys);
        let decodes = of_part(few);
        let has_prompts = keys.longest > self.few[few].desc.max_qo_len;
        let keys_of_few: u64 = keys.of_few[..=few].iter().sum();
        let is_worth_it = keys_of_few >= least_keys;
        match (has_prompts, is_worth_it) {
            // What a graph has captured, it launches for every batch.
            (_, true) if self.prompts.desc.graph => (Planned::Both(few), decodes),
            (_, false) if self.prompts.desc.graph => (Planned::Both(few), NO_DECODES),
            (true, true) => (Planned::Both(few), decodes),
            (true, false) => (Planned::Prompts, Requests::All),
            // Drafts on few keys are quicker in small tiles of prompts: 409 × 20 tokens in fp8, 16/16 heads of 128, take 102 µs so
            // on an H200, and 159 as drafts.
            (false, _) if few != DECODES && self.prompts.attention.has_few_keys(host) => {
                (Planned::Prompts, Requests::All)
            }
            (false, _) => (Planned::Few(few), Requests::All),
        }
    }

    /// The others.
    fn prompts_beside(&self, few: usize, decodes: Requests) -> Result<Requests> {
        let part = &self.few[few];
        Ok(match decodes {
            NO_DECODES => Requests::All,
            _ => Requests::Prompts {
                decode_rows: part.desc.max_qo_len,
                decode_counts: part.attention.counts()?,
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
                let tiling = self.attention.tiling_of(host);
                schedule(host, &self.desc, &tiling, &mut self.work)?;
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

    fn tiling_of(&self, batch: &HostBatch<'_>) -> Tiling {
        self.prompts.attention.tiling_of(batch)
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
            Planned::Few(few) => self.few[few].plan(decodes, batch, workspace, stream)?,
            Planned::Both(few) => {
                // What is refused, both refuse, and the first one leaves the plan before in force.
                self.few[few].plan(decodes, batch, workspace, stream)?;
                self.planned = None;
                let prompts = self.prompts_beside(few, decodes)?;
                self.prompts.plan(prompts, batch, workspace, stream)?;
            }
        }
        self.planned = Some(parts);
        Ok(())
    }

    fn run(&self, args: &Checked<AttentionArgs>, stream: Stream) -> Result<()> {
        let prompts = &self.prompts.attention;
        let of_few = |few: usize| &self.few[few].attention;
        match self.planned {
            None => Err(Error::NotPlanned(
                "run: the last plan failed half-way; a successful plan is needed first".into(),
            )),
            Some(Planned::Prompts) => prompts.run(args, stream),
            Some(Planned::Few(few)) => of_few(few).run(args, stream),
            Some(Planned::Both(few)) => {
                of_few(few).run_before(Some(prompts), args, stream)?;
                prompts.run(args, stream)
            }
        }
    }
}

/// The problems of the requests of few rows, where a device has kernels for them that pay: of decodes, and then of more rows.
struct FewRows {
    of: Vec<AttentionDesc>,
    least_keys: u64,
}

impl FewRows {
    fn of(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Option<FewRows>> {
        let is_hopper = Arch::Sm90a.runs_on(context.device().compute_capability);
        match (is_hopper, desc.kind) {
            (true, Kind::Mla) => FewRows::of_latent(loader, context, desc),
            (true, _) => FewRows::on_hopper(loader, context, desc),
            (false, Kind::Mla) => Ok(None),
            (false, _) => Ok(FewRows::of_portable(context, desc)),
        }
    }

    /// For caches whose keys the prefill kernel converts.
    fn on_hopper(
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<Option<FewRows>> {
        let is_plain = desc.kv_format.form() == CacheForm::Plain;
        if is_plain && !desc.kv_format.element.is_fp8() {
            return Ok(None);
        }
        let most_converting = Sm90Decode::most_converting_rows(desc, true);
        // A graph of few rows most often verifies drafts, and would launch both kernels.
        let most_rows = match desc.graph {
            true => Sm90Decode::most_rows(false),
            false => most_converting,
        };
        let least_bytes = match Sm90PrefillFp8::tiles_of_decode(desc) {
            Some(tiles) => LEAST_BYTES_OF_TILES / u64::from(tiles),
            None => LEAST_BYTES,
        };
        let least_keys = least_keys(desc, least_bytes);
        let Some(decodes) = apart(desc, HOPPER_DECODE_ROWS, most_rows, least_keys) else {
            return Ok(None);
        };
        if !decodes_on_hopper(loader, context, &decodes)? {
            return Ok(None);
        }
        let mut of = vec![decodes];
        if is_plain && most_converting >= CHUNK_ROWS {
            for rows in [DRAFT_ROWS, CHUNK_ROWS] {
                match of_more_rows(rows, &of, desc) {
                    Some(more) if decodes_on_hopper(loader, context, &more)? => of.push(more),
                    _ => {}
                }
            }
        }
        Ok(Some(FewRows { of, least_keys }))
    }

    /// For latent records that kernels convert, as [`LATENT_KEYS`] says: not for graphs, which would launch both kernels for every
    /// batch, nor batch-invariant plans, which would divide every batch.
    fn of_latent(
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<Option<FewRows>> {
        if desc.graph || desc.batch_invariant || !desc.kv_format.is_scaled() {
            return Ok(None);
        }
        let decodes = apart(desc, LATENT_DECODE_ROWS, LATENT_DECODE_ROWS, LATENT_KEYS)
            .filter(|few| packed_rows(few) <= LATENT_DECODE_ROWS);
        let Some(decodes) = decodes else {
            return Ok(None);
        };
        let is_fast = Sm90MlaFew::is_for(loader, context, &decodes)?;
        Ok(is_fast.then_some(FewRows {
            of: vec![decodes],
            least_keys: LATENT_KEYS,
        }))
    }

    /// Not for graphs, which would launch both kernels for every batch.
    fn of_portable(context: &Context, desc: &AttentionDesc) -> Option<FewRows> {
        if desc.graph || !Generic::divides_warps(desc) {
            return None;
        }
        let least_bytes = match desc.kv_format.element == desc.q_dtype {
            true => LEAST_BYTES_UNCONVERTED,
            false => LEAST_BYTES,
        };
        let least_keys = least_keys(desc, least_bytes);
        let most_rows = Generic::most_rows_of_decode(context, desc);
        let takes = |few: &AttentionDesc| packed_rows(few) <= most_rows;
        let decodes = apart(desc, Generic::DECODE_ROWS, most_rows, least_keys).filter(takes)?;
        let mut of = vec![decodes];
        of.extend(of_more_rows(DRAFT_ROWS, &of, desc).filter(takes));
        Some(FewRows { of, least_keys })
    }
}

/// The problem of the decodes of a batch, which have up to so many packed rows, where they are planned apart. Where none of
/// its requests have more than `most_rows`, no batch is taken for a mixed one.
fn apart(
    desc: &AttentionDesc,
    packed: u32,
    most_rows: u32,
    least_keys: u64,
) -> Option<AttentionDesc> {
    let max_qo_len = (packed / desc.group_size()).max(1);
    let kind = match desc.kind {
        Kind::Decode => return None,
        Kind::Prefill => Kind::Decode,
        Kind::Mla => Kind::Mla,
    };
    let is_mixed = desc.shared_levels == 0
        && !desc.mask_items
        && Sm90PrefillFp8::tiles_of_decode(desc) != Some(1)
        && desc.max_batch_size > 1
        && max_qo_len < desc.max_qo_len
        && packed_rows(desc) > most_rows;
    (is_mixed && desc.most_keys() >= least_keys).then_some(AttentionDesc {
        kind,
        max_qo_len,
        // Decode kernels have probabilities of 16 bits at the same rate.
        fp8_products: false,
        ..*desc
    })
}

/// The problem of requests of up to so many packed rows, where that is more than those before have, for handles whose batches choose
/// between them: not those of graphs, which launch the same kernels for every batch, nor batch-invariant ones.
fn of_more_rows(
    packed: u32,
    before: &[AttentionDesc],
    desc: &AttentionDesc,
) -> Option<AttentionDesc> {
    let chooses = !desc.graph && !desc.batch_invariant;
    let max_qo_len = packed / desc.group_size();
    let last = before.last().filter(|last| max_qo_len > last.max_qo_len)?;
    (chooses && max_qo_len < desc.max_qo_len).then_some(AttentionDesc {
        max_qo_len,
        ..*last
    })
}

/// Keys that have so many bytes. In a batch-invariant plan none: all decodes are planned apart.
fn least_keys(desc: &AttentionDesc, bytes: u64) -> u64 {
    match desc.batch_invariant {
        true => 0,
        false => bytes.div_ceil(u64::from(desc.num_kv_heads) * desc.kv_bytes()),
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
