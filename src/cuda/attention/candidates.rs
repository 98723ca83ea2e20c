//! Which kernel runs: an ordered list of what could, asked before every run. The first that lacks nothing
//! takes the run, and the portable kernel, which stands last, takes every run. Where the first choice is
//! passed over, the log says what it lacks.

use std::sync::atomic::{AtomicU32, Ordering};

use super::features::{Feature, Features};
use super::generic::Generic;
use super::kernel::{AttentionKernel, OrLacks, Run, packed_rows, phase};
use super::mla::GenericMla;
use super::prefill_widened::PrefillWidened;
use super::queries_widened::QueriesWidened;
use super::sm90_decode::Sm90Decode;
use super::sm90_mla::Sm90Mla;
use super::sm90_mla_few::Sm90MlaFew;
use super::sm90_prefill::{Behind, Sm90Prefill};
use super::sm90_prefill_fp8::Sm90PrefillFp8;
use super::stored::Stored;
use super::widen_queries::{row_dtype, widens_queries};
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
        let special = Special {
            loader,
            context,
            desc,
        };
        for candidate in special.kernels()? {
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

type Found = OrLacks<Box<dyn AttentionKernel>>;

fn boxed<K: AttentionKernel + 'static>(loaded: OrLacks<K>) -> Found {
    loaded.map(|kernel| Box::new(kernel) as Box<dyn AttentionKernel>)
}

/// What there is for a problem and a device beside the portable kernel. On Hopper its kernels, of which few rows are decode's, as
/// many as it has a row for, and many prefill's; elsewhere what makes plain rows of caches in other forms.
struct Special<'a> {
    loader: &'a Loader,
    context: &'a Context,
    desc: &'a AttentionDesc,
}

impl Special<'_> {
    fn kernels(&self) -> Result<Vec<Found>> {
        let desc = self.desc;
        let is_stored = desc.kv_format.form() != CacheForm::Plain;
        if !Arch::Sm90a.runs_on(self.context.device().compute_capability) {
            return Ok(match is_stored {
                true => vec![self.widened(Masks::ByPosition, Behind::PORTABLE)?],
                false => Vec::new(),
            });
        }
        match (desc.kind, phase(desc)) {
            _ if is_stored => self.over_other_forms(),
            (Kind::Mla, phase) => self.mla(phase),
            (_, Phase::Decode) if Sm90Decode::is_for(desc) => self.few_rows(),
            _ => self.many_rows(),
        }
    }

    fn over_other_forms(&self) -> Result<Vec<Found>> {
        let mut kernels = match packed_rows(self.desc) <= Sm90Decode::most_rows(false) {
            true => self.decode_by_position()?,
            false => Vec::new(),
        };
        // What decode takes, rows would not make faster.
        if !kernels.iter().any(OrLacks::is_ok) {
            kernels.push(self.widened(Masks::ByPosition, Behind::PORTABLE)?);
            kernels.push(self.widened(Masks::Any, Behind::PORTABLE)?);
            if kernels.iter().any(OrLacks::is_ok) {
                kernels.retain(OrLacks::is_ok);
            }
        }
        // Tiles under masks are narrower than others at head_dims of 136 to 160.
        Ok(that_take_items_of_the_first(
            self.desc,
            kernels,
            MOST_COMMON_UNIT,
        ))
    }

    fn mla(&self, phase: Phase) -> Result<Vec<Found>> {
        let few = |source: &RecordSource| {
            Sm90MlaFew::load(*source, self.loader, self.context, self.desc).map(boxed)
        };
        let many =
            |variant| Sm90Mla::load(variant, self.loader, self.context, self.desc).map(boxed);
        match phase {
            Phase::Decode => Sm90MlaFew::sources(self.desc).iter().map(few).collect(),
            Phase::Prefill if self.desc.kv_format.is_scaled() => {
                Ok(vec![many(MlaVariant::Sm90Gather)?])
            }
            Phase::Prefill => Ok(vec![many(MlaVariant::Sm90)?, many(MlaVariant::Sm90Rows)?]),
        }
    }

    /// Those without masks in memory have others for runs with them.
    fn few_rows(&self) -> Result<Vec<Found>> {
        let of_parts = Sm90Prefill::load_of_parts(self.loader, self.context, self.desc)?;
        if let Some(of_parts) = of_parts {
            return Ok(vec![boxed(Ok(of_parts))]);
        }
        let mut kernels = Vec::new();
        let mut lack_masks = Vec::new();
        for keys in [KeySource::Tma, KeySource::Gather] {
            let kernel = self.decode(keys, Masks::ByPosition)?;
            if kernel.as_ref().is_ok_and(|kernel| !kernel.takes_masks()) {
                lack_masks.push(keys);
            }
            kernels.push(boxed(kernel));
        }
        for keys in lack_masks {
            kernels.push(boxed(self.decode(keys, Masks::Any)?));
        }
        Ok(kernels)
    }

    fn many_rows(&self) -> Result<Vec<Found>> {
        let desc = self.desc;
        let mut kernels = Vec::new();
        if Sm90PrefillFp8::is_for(desc) {
            kernels = self.products_in_fp8()?;
            if kernels.iter().any(OrLacks::is_ok) {
                // What stands behind adds to the workspace of all such handles: rows of keys would be the most of it.
                let masked = self.over_rows_of_queries(self.one_by_one(Masks::Any)?)?;
                kernels.extend(masked.is_ok().then_some(masked));
                return Ok(that_take_items_of_the_first(desc, kernels, 0));
            }
        }
        kernels.extend(self.prefill_under(Masks::ByPosition)?);
        let masked = self.prefill_under(Masks::Any)?;
        kernels.extend(masked.into_iter().filter(OrLacks::is_ok));
        let reads_keys_once = Sm90Prefill::reads_keys_once(desc);
        let most_decoding = Sm90Decode::most_converting_rows(desc, reads_keys_once);
        // Over keys of 16 bits prefill is 1.05 to 2 times as fast as decode for more than 16 rows.
        if desc.kv_format.element.is_fp8() && packed_rows(desc) <= most_decoding {
            let converts = desc.kv_format.element != row_dtype(desc);
            let at = match converts || !reads_keys_once {
                true => 0,
                false => kernels.len(),
            };
            kernels.splice(at..at, self.decode_by_position()?);
        }
        let is_short = packed_rows(desc) <= Sm90Decode::most_rows(reads_keys_once);
        // What another one takes, nobody lacks.
        if is_short && kernels.iter().any(OrLacks::is_ok) {
            kernels.retain(OrLacks::is_ok);
        }
        // Not a multiple that a step of common caches would be coarse by, nor one that few rows would be cut coarsely by.
        let most_unit = match PrefillWidened::is_for(desc) && !is_short {
            true => MOST_COMMON_UNIT,
            false => 0,
        };
        Ok(that_take_items_of_the_first(desc, kernels, most_unit))
    }

    /// Prefill's kernels whose products are in e4m3.
    fn products_in_fp8(&self) -> Result<Vec<Found>> {
        [KeySource::Tma, KeySource::Gather]
            .into_iter()
            .map(|keys| Sm90PrefillFp8::load(keys, self.loader, self.context, self.desc).map(boxed))
            .collect()
    }

    /// Prefill's kernels for some masks.
    fn prefill_under(&self, masks: Masks) -> Result<Vec<Found>> {
        let desc = self.desc;
        let rows = self.one_by_one(masks)?;
        let mut kernels = Vec::new();
        if desc.kv_format.element == row_dtype(desc) {
            let boxes = self.over_16_bit_queries(KeySource::Tma, masks)?;
            kernels.push(self.over_rows_of_queries(boxes)?);
        }
        // What no box describes becomes rows before, or with every tile.
        if PrefillWidened::is_for(desc) {
            let behind = match &rows {
                Ok(rows) => rows.behind(desc),
                Err(_) => Behind::PORTABLE,
            };
            kernels.push(self.widened(masks, behind)?);
        }
        // What another one takes, it need not.
        if rows.is_ok() || !kernels.iter().any(OrLacks::is_ok) {
            kernels.push(self.over_rows_of_queries(rows)?);
        }
        Ok(kernels)
    }

    fn one_by_one(&self, masks: Masks) -> Result<OrLacks<Sm90Prefill>> {
        self.over_16_bit_queries(KeySource::Gather, masks)
    }

    /// A kernel of theirs, whose maps of queries are of 16 bits.
    fn over_16_bit_queries(&self, keys: KeySource, masks: Masks) -> Result<OrLacks<Sm90Prefill>> {
        let over_rows = AttentionDesc {
            q_dtype: row_dtype(self.desc),
            ..*self.desc
        };
        Sm90Prefill::load(keys, masks, self.loader, self.context, &over_rows)
    }

    /// Behind a kernel that widens queries, where they are in fp8.
    fn over_rows_of_queries(&self, prefill: OrLacks<Sm90Prefill>) -> Result<Found> {
        match prefill {
            Ok(prefill) if widens_queries(self.desc) => {
                QueriesWidened::load(prefill, self.loader, self.context, self.desc).map(boxed)
            }
            prefill => Ok(boxed(prefill)),
        }
    }

    fn widened(&self, masks: Masks, behind: Behind) -> Result<Found> {
        PrefillWidened::load(masks, self.loader, self.context, self.desc, behind).map(boxed)
    }

    fn decode_by_position(&self) -> Result<Vec<Found>> {
        [KeySource::Tma, KeySource::Gather]
            .into_iter()
            .map(|keys| self.decode(keys, Masks::ByPosition).map(boxed))
            .collect()
    }

    fn decode(&self, keys: KeySource, masks: Masks) -> Result<OrLacks<Sm90Decode>> {
        Sm90Decode::load(keys, masks, self.loader, self.context, self.desc)
    }
}

/// Keys of the largest unit that chunks are cut in for the sake of a kernel that is not the first choice.
const MOST_COMMON_UNIT: u32 = 640;

/// Without the kernels that could not take what is cut for the first that is there: tiles of more rows than theirs, or
/// chunks that begin within their steps, where no unit up to `most_unit` serves both.
fn that_take_items_of_the_first(
    desc: &AttentionDesc,
    mut kernels: Vec<Found>,
    most_unit: u32,
) -> Vec<Found> {
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
