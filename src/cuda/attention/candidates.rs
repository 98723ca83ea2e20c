//! Which kernel runs: an ordered list of what could, asked before every run. The first that lacks nothing
//! takes the run, and the portable kernel, which stands last, takes every run. Where the first choice is
//! passed over, the log says what it lacks.

use std::sync::atomic::{AtomicU32, Ordering};

use super::features::{Feature, Features};
use super::generic::Generic;
use super::kernel::{AttentionKernel, OrLacks, Run, packed_rows, phase};
use super::mla::GenericMla;
use super::prefill_widened::PrefillWidened;
use super::sm90_decode::Sm90Decode;
use super::sm90_mla::Sm90Mla;
use super::sm90_mla_few::Sm90MlaFew;
use super::sm90_prefill::{Beside, Sm90Prefill};
use super::sm90_prefill_fp8::Sm90PrefillFp8;
use super::stored::Stored;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::Arch;
use crate::cuda::kernels::attention::{KeySource, Masks, Phase};
use crate::cuda::kernels::mla::{MlaVariant, RecordSource};
use crate::error::Result;
use crate::log::{Level, Logger};
use crate::problem::{AttentionDesc, CacheForm, Keys, Kind, Tiling};

/// The kernels of one problem, the preferred ones first.
pub struct Candidates {
    preferred: Vec<Box<dyn AttentionKernel>>,
    portable: Box<dyn AttentionKernel>,
    logger: Logger,
    /// Features that the log has heard of: a reason is told once, not once a run.
    told: AtomicU32,
}

impl Candidates {
    /// Loads every kernel that takes the problem.
    ///
    /// # Errors
    /// As [`Loader::find`]; [`Error::Unsupported`](crate::error::Error::Unsupported) where not even the
    /// portable kernel does.
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Candidates> {
        let mut preferred = Vec::new();
        let mut missing = Features::default();
        for candidate in special(loader, context, desc)? {
            match candidate {
                Ok(kernel) => preferred.push(kernel),
                Err(lacks) => missing = missing | lacks,
            }
        }
        let candidates = Candidates {
            preferred,
            portable: match desc.kind {
                Kind::Mla => Box::new(GenericMla::load(loader, context, desc)?),
                Kind::Decode | Kind::Prefill => match desc.kv_format.form() {
                    CacheForm::Plain => Box::new(Generic::load(loader, context, desc)?),
                    _ => Box::new(Stored::load(loader, context, desc)?),
                },
            },
            logger: loader.logger().clone(),
            told: AtomicU32::new(0),
        };
        if !missing.is_empty() {
            candidates.logger.log(
                Level::Info,
                format_args!(
                    "{:?}: kernel {} is the first choice; the faster ones for this device lack {missing}",
                    desc.kind,
                    candidates.first().name()
                ),
            );
        }
        Ok(candidates)
    }

    /// The first choice, which plans are cut for.
    pub fn first(&self) -> &dyn AttentionKernel {
        match self.preferred.first() {
            Some(kernel) => kernel.as_ref(),
            None => self.portable.as_ref(),
        }
    }

    /// How plans are cut: as the first choice wants, in units that every other one takes.
    pub fn tiling(&self) -> Tiling {
        let mut tiling = self.first().tiling();
        for kernel in &self.preferred {
            tiling.kv_unit = least_common_multiple(tiling.kv_unit, kernel.starts_at());
        }
        tiling
    }

    /// Memory that the one that takes a run may need.
    pub fn scratch_bytes(&self, most_items: usize) -> usize {
        let of_each = self
            .preferred
            .iter()
            .map(|kernel| kernel.scratch_bytes(most_items));
        of_each.max().unwrap_or(0)
    }

    /// Whether a run may go on from earlier keys.
    pub fn may_go_on(&self) -> bool {
        self.preferred.iter().any(|kernel| kernel.may_go_on())
    }

    /// The kernel that takes a run.
    pub fn pick(&self, run: &Run<'_>) -> &dyn AttentionKernel {
        let mut missing = Features::default();
        for kernel in &self.preferred {
            let lacks = kernel.missing(run) | only_portable(run);
            if lacks.is_empty() {
                self.tell(missing, kernel.as_ref());
                return kernel.as_ref();
            }
            missing = missing | lacks;
        }
        self.tell(missing, self.portable.as_ref());
        self.portable.as_ref()
    }

    /// Logs a fall-back, unless all of its reasons were told before.
    fn tell(&self, missing: Features, taken: &dyn AttentionKernel) {
        let is_told = |told: u32| missing.bits() & !told == 0;
        // Runs of other threads tell at the same time: whoever adds the bits is the one to tell.
        if is_told(self.told.load(Ordering::Relaxed))
            || is_told(self.told.fetch_or(missing.bits(), Ordering::Relaxed))
        {
            return;
        }
        self.logger.log(
            Level::Info,
            format_args!(
                "run: kernel {} instead of {}, which lacks {missing}",
                taken.name(),
                self.first().name()
            ),
        );
    }
}

/// What a run asks for that the portable kernels alone have.
fn only_portable(run: &Run<'_>) -> Features {
    Features::default()
        .and(Feature::StartsInBlocks, run.keys == Keys::New)
        .and(Feature::ScoreBias, run.args.score_bias.is_some())
}

/// What there is for this device beside the portable kernel. On Hopper its kernels, of which few rows are decode's, as many as it
/// has a row for, and many prefill's; elsewhere what makes plain rows of caches in other forms.
fn special(
    loader: &Loader,
    context: &Context,
    desc: &AttentionDesc,
) -> Result<Vec<OrLacks<Box<dyn AttentionKernel>>>> {
    fn boxed<K: AttentionKernel + 'static>(
        loaded: OrLacks<K>,
    ) -> OrLacks<Box<dyn AttentionKernel>> {
        loaded.map(|kernel| Box::new(kernel) as Box<dyn AttentionKernel>)
    }
    let is_stored = desc.kv_format.form() != CacheForm::Plain;
    let widened = |beside| PrefillWidened::load(loader, context, desc, beside).map(boxed);
    if !Arch::Sm90a.runs_on(context.device().compute_capability) {
        return Ok(match is_stored {
            true => vec![widened(Beside::Portable)?],
            false => Vec::new(),
        });
    }
    let decode = |keys| Sm90Decode::load(keys, Masks::ByPosition, loader, context, desc).map(boxed);
    let few = |keys: &RecordSource| Sm90MlaFew::load(*keys, loader, context, desc).map(boxed);
    let many = |variant| Sm90Mla::load(variant, loader, context, desc).map(boxed);
    let prefill = |keys, masks| Sm90Prefill::load(keys, masks, loader, context, desc).map(boxed);
    if is_stored {
        let mut kernels = match packed_rows(desc) <= Sm90Decode::most_rows(false) {
            true => vec![decode(KeySource::Tma)?, decode(KeySource::Gather)?],
            false => Vec::new(),
        };
        // What decode takes, rows would not make faster.
        if !kernels.iter().any(OrLacks::is_ok) {
            kernels.push(widened(Beside::Portable)?);
            if kernels.iter().any(OrLacks::is_ok) {
                kernels.retain(OrLacks::is_ok);
            }
        }
        return Ok(kernels);
    }
    match (desc.kind, phase(desc)) {
        (Kind::Mla, Phase::Decode) => Sm90MlaFew::sources(desc).iter().map(few).collect(),
        (Kind::Mla, Phase::Prefill) if desc.kv_format.is_scaled() => {
            Ok(vec![many(MlaVariant::Sm90Gather)?])
        }
        (Kind::Mla, Phase::Prefill) => {
            Ok(vec![many(MlaVariant::Sm90)?, many(MlaVariant::Sm90Gather)?])
        }
        (_, Phase::Decode) => {
            let load = |keys, masks| Sm90Decode::load(keys, masks, loader, context, desc);
            let mut kernels = Vec::new();
            let mut lack_masks = Vec::new();
            for keys in [KeySource::Tma, KeySource::Gather] {
                let kernel = load(keys, Masks::ByPosition)?;
                if kernel.as_ref().is_ok_and(|kernel| !kernel.takes_masks()) {
                    lack_masks.push(keys);
                }
                kernels.push(boxed(kernel));
            }
            for keys in lack_masks {
                kernels.push(boxed(load(keys, Masks::Any)?));
            }
            if let Some(of_parts) = Sm90Prefill::load_of_parts(loader, context, desc)? {
                kernels = vec![boxed(Ok(of_parts))];
            }
            Ok(kernels)
        }
        (_, Phase::Prefill) => {
            let mut boxes = Vec::new();
            if Sm90PrefillFp8::is_for(desc) {
                boxes.push(boxed(Sm90PrefillFp8::load(loader, context, desc)?));
                if boxes[0].is_ok() {
                    return Ok(boxes);
                }
            }
            let rows =
                Sm90Prefill::load(KeySource::Gather, Masks::ByPosition, loader, context, desc)?;
            let beside = match &rows {
                Ok(rows) => rows.beside(desc),
                Err(_) => Beside::Portable,
            };
            let rows = boxed(rows);
            // Maps of queries are of 16 bits.
            if !desc.q_dtype.is_fp8() && desc.kv_format.element == desc.q_dtype {
                boxes.push(prefill(KeySource::Tma, Masks::ByPosition)?);
                boxes.push(prefill(KeySource::Tma, Masks::Any)?);
            }
            // What no box describes becomes rows before, or with every tile.
            if PrefillWidened::is_for(desc) {
                boxes.push(widened(beside)?);
            }
            let reads_keys_once = Sm90Prefill::reads_keys_once(desc);
            if packed_rows(desc) > Sm90Decode::most_rows(reads_keys_once) {
                // What another one takes, it need not.
                if rows.is_ok() || !boxes.iter().any(OrLacks::is_ok) {
                    boxes.push(rows);
                }
                // Not a multiple that a step of common caches would be coarse by.
                let most_unit = match PrefillWidened::is_for(desc) {
                    true => MOST_COMMON_UNIT,
                    false => 0,
                };
                return Ok(that_take_items_of_the_first(desc, boxes, most_unit));
            }
            // Where both read keys once, prefill is up to 2.5 times as fast (20 to 64 rows on an H200; 64 requests of 4k and
            // 32 rows, 3 %). Where both convert keys, decode is faster: up to 64 rows where it converts each once (head_dims up to
            // 128: 1.3 to 2.3 times as fast over many keys, but 0.9 over few), up to 32 where each of its warps converts for
            // itself. Where prefill reads keys more than once, decode is up to four times as fast.
            let few = [decode(KeySource::Tma)?, decode(KeySource::Gather)?];
            let converts = desc.kv_format.element != desc.q_dtype;
            let decodes_first = !reads_keys_once
                || (converts && packed_rows(desc) <= Sm90Decode::most_converting_rows(desc));
            let mut kernels: Vec<_> = match decodes_first {
                true => few.into_iter().chain(boxes).chain([rows]).collect(),
                false => boxes.into_iter().chain([rows]).chain(few).collect(),
            };
            // What another one takes, nobody lacks.
            if kernels.iter().any(OrLacks::is_ok) {
                kernels.retain(OrLacks::is_ok);
            }
            Ok(that_take_items_of_the_first(desc, kernels, 0))
        }
    }
}

/// Keys of the largest unit that chunks are cut in for the sake of a kernel that is not the first choice.
const MOST_COMMON_UNIT: u32 = 640;

/// Without the kernels that could not take what is cut for the first that is there: tiles of more rows than theirs, or
/// chunks that begin within their steps, where no unit up to `most_unit` serves both.
fn that_take_items_of_the_first(
    desc: &AttentionDesc,
    mut kernels: Vec<OrLacks<Box<dyn AttentionKernel>>>,
    most_unit: u32,
) -> Vec<OrLacks<Box<dyn AttentionKernel>>> {
    let Some(first) = kernels.iter().find_map(|kernel| kernel.as_ref().ok()) else {
        return kernels;
    };
    let Tiling {
        q_tile, kv_unit, ..
    } = first.tiling();
    let rows = q_tile.min(desc.max_qo_len);
    kernels.retain(|kernel| {
        kernel.as_ref().map_or(true, |kernel| {
            let unit = least_common_multiple(kv_unit, kernel.starts_at());
            kernel.most_rows() >= rows && (unit == kv_unit || unit <= most_unit)
        })
    });
    kernels
}

fn least_common_multiple(a: u32, b: u32) -> u32 {
    let (mut greatest, mut rest) = (a, b);
    while rest != 0 {
        (greatest, rest) = (rest, greatest % rest);
    }
    a / greatest * b
}
