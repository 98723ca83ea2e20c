//! The Hopper prefill kernels, `kernels/sm90/prefill/prefill.cu`: what they take, and which of them takes a run. Q, K and V are read
//! by `sm90_prefill_maps`. Where maps do not describe K and V, another loads them row by row.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, Inputs, OrLacks, Run, find, phase, query};
use super::sm90::GROUP;
use super::sm90_decode::Sm90Decode;
use super::sm90_prefill_maps::{PrefillMaps, SWIZZLE, missing_of_rows, rows_suit};
use super::sm90_prefill_tiling::{rows_of_tile, tiling, unit_bytes};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::kernels::attention::{
    AttentionQuery, AttentionRow, KeyParts, KeySource, KvRows, Logits, MOST_SOFT_CAP, Masks, Phase,
    SPLIT_ROPE_DIM, Variant, prefill_ctas,
};
use crate::cuda::params::{
    AttentionParams, Divisor, SumParams, dtype_code, flag_of_queries, piece_bytes,
};
use crate::cuda::prefill_params::{O_DTYPE_SHIFT, Packing, PrefillParams, WARPGROUP_ROWS};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionArgs, AttentionDesc, ContextKeys, Kind, KvStorage, Mask, SmallItems, TailCosts, Tiling,
};
use crate::tensor::Tensor;

/// Items of more steps are as fast one head at a time, and balance better (H200: 64 requests of 2048 keys, 162 µs side by side,
/// 145 one at a time; of 256, 36.2 and 38.4).
const MOST_STEPS_OF_SMALL: u32 = 8;

/// Columns of tiles up to which a problem of fewer has [`Loads::UnevenRows`].
const MOST_OF_UNEVEN_ROWS: u32 = 128;

/// The kernel of one warpgroup a tile and several CTAs a multiprocessor, beside the one of several warpgroups: while one CTA
/// waits for the memory, others multiply. Of requests with few keys most of the time is such waiting.
#[derive(Debug)]
struct Few {
    row: &'static AttentionRow,
    function: Function,
    most_keys: u32,
    /// No request of the problem has more.
    always: bool,
}

/// Keys of a request up to which it is the faster one. Measured on an H200: with 512 at head_dim 128, 16 × 512 causal (32/8)
/// takes 104 µs instead of 96; with 256 at 88, 64 × 256 (16/16) 143 instead of 131: columns that the problem does not have are
/// multiplied too. Every tile converts its keys: with 1024 over e4m3, 33 × 493 (12/12 of 64) take 126 instead of 119.
fn most_few_keys(desc: &AttentionDesc) -> u32 {
    match (desc.head_dim_qk, desc.head_dim_vo) {
        (..=64, ..=64) if desc.kv_format.element.is_fp8() => 384,
        (..=64, ..=64) => 1024,
        (128, 128) => 256,
        _ => 128,
    }
}

/// Whether a plan may take it. Where a launch serves other plans too, or a request is to be cut alike in every batch, only all
/// of them may.
fn may_have_few_keys(desc: &AttentionDesc) -> bool {
    let by_plan = !desc.graph && !desc.batch_invariant;
    desc.shared_levels == 0 && (by_plan || desc.max_kv_len <= most_few_keys(desc))
}

/// One of the kernels for one problem.
#[derive(Debug)]
pub struct Sm90Prefill {
    /// The row is that of the preferred form of keys; both forms have the same shape.
    maps: PrefillMaps,
    masks: Masks,
    /// For whole keys.
    few: Option<Few>,
    /// Warpgroups take heads of small items side by side.
    own_keys: bool,
    whole_keys: Function,
    split_keys: Option<Function>,
    /// Over the same, for runs that go on from earlier keys, and where [`Self::split_keys`] is not for all.
    after: Option<Function>,
    /// Over whole keys, for runs with a soft cap, and with ALiBi.
    capped: Option<Function>,
    biased: Option<Function>,
    sm_count: u32,
    unit_bytes: u32,
    /// Query heads of a KV head, at most [`u16::MAX`].
    group_size: u32,
    head_blocks: u32,
    kind: Kind,
    o_dtype: DType,
    /// A request may have several tiles, which read the same keys.
    tiles_share_keys: bool,
}

/// What takes the runs of a problem that another kernel leaves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Behind {
    pub loads: Loads,
    /// As [`AttentionKernel::few_keys`].
    pub few_keys: u32,
}

/// How it loads keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loads {
    /// The portable kernel.
    Portable,
    /// This one, one by one with every tile of queries.
    Rows,
    /// The same, where the problem's rows are no whole blocks of 64 columns, in tiles of up to 128.
    UnevenRows,
    /// The same, in tiles of 256 columns for rows of 136 to 248: a third slower.
    WiderTiles,
}

impl Behind {
    pub const PORTABLE: Behind = Behind {
        loads: Loads::Portable,
        few_keys: 0,
    };
}

impl Sm90Prefill {
    /// Loads the row for a problem of many query rows, or of few that are not decode's.
    ///
    /// # Errors
    /// As [`find`].
    pub fn load(
        keys: KeySource,
        masks: Masks,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        let phase = match Sm90Decode::is_for(desc) {
            true => phase(desc),
            false => Phase::Prefill,
        };
        Self::load_in(phase, (keys, masks), loader, context, desc)
    }

    /// Loads that for ragged keys in two parts, however few query rows there are: of few rows, no other kernel on Hopper is.
    ///
    /// # Errors
    /// As [`find`].
    pub fn load_of_parts(
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<Option<Self>> {
        if desc.kv != KvStorage::Ragged {
            return Ok(None);
        }
        let form = (KeySource::Tma, Masks::ByPosition);
        let loaded = Self::load_in(Phase::Prefill, form, loader, context, desc)?.ok();
        Ok(loaded.filter(|kernel| kernel.after.is_some()))
    }

    fn load_in(
        phase: Phase,
        (keys, masks): (KeySource, Masks),
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        // A position plus or minus an unlimited window, 2^30 in the kernel, stays within i32.
        const MOST_KEYS: u32 = 1 << 29;
        let (forms, page_fits): (&[KvRows], bool) = match (keys, desc.kv) {
            (KeySource::Gather, _) => (&[KvRows::Rows], true),
            (KeySource::Tma, KvStorage::Paged { page_size, .. }) => (
                forms_of_boxes(
                    page_size,
                    desc.shared_levels > 0 && Self::reads_keys_once(desc),
                ),
                page_size % GROUP == 0,
            ),
            (KeySource::Tma, KvStorage::Ragged) => (&[KvRows::Ragged], true),
        };
        let is_long = desc.max_kv_len.max(desc.max_qo_len) > MOST_KEYS;
        let lacks = Features::default()
            .and(Feature::PageSize, !page_fits)
            .and(Feature::Lengths, is_long)
            .and(Feature::Rows, desc.group_size() > u16::MAX.into());
        if !lacks.is_empty() {
            return Ok(Err(lacks));
        }
        let mut loaded = Err(Features::default());
        for &kv in forms {
            loaded = Self::load_form(phase, (keys, kv, masks), loader, context, desc)?;
            if loaded.is_ok() {
                break;
            }
        }
        Ok(loaded)
    }

    /// The row that reads keys in one way.
    fn load_form(
        phase: Phase,
        (keys, kv, masks): (KeySource, KvRows, Masks),
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        let query = AttentionQuery {
            phase,
            ..query(context, desc)
        };
        let packing = packing(desc);
        let of_tile = |parts, logits, suits: &dyn Fn(&AttentionRow) -> bool| {
            let wanted = Variant::Sm90Prefill {
                kv,
                parts,
                masks,
                logits,
            };
            find(loader, query, |row| row.variant == wanted && suits(row))
        };
        let of_parts = |parts| {
            let suits = |row: &AttentionRow| {
                !is_for_few_keys(row) && tile_suits(row, (kv, masks), packing, desc)
            };
            of_tile(parts, Logits::Some, &suits)
        };
        let (whole, split) = (of_parts(KeyParts::One)?, of_parts(KeyParts::Two)?);
        let after = of_parts(KeyParts::TwoAfter)?;
        let (row, whole) = match whole {
            Ok(whole) => whole,
            Err(lacks) => return Ok(Err(lacks)),
        };
        let with = |logits| -> Result<Option<Function>> {
            let suits = |of: &AttentionRow| of.shape == row.shape;
            let found = of_tile(KeyParts::One, logits, &suits)?.ok();
            Ok(found.map(|(_, function)| function))
        };
        let suits_few = |row: &AttentionRow| is_for_few_keys(row) && has_blocks_of(row, desc);
        let few = match may_have_few_keys(desc) {
            true => of_tile(KeyParts::One, Logits::Some, &suits_few)?.ok(),
            false => None,
        };
        let most_keys = most_few_keys(desc);
        Ok(Ok(Sm90Prefill {
            maps: PrefillMaps {
                keys,
                kv: desc.kv,
                row,
                columns_together: matches!(kv, KvRows::Paged | KvRows::PagedOwn),
                packing,
            },
            masks,
            few: few.map(|(row, function)| Few {
                row,
                function,
                most_keys,
                always: desc.max_kv_len <= most_keys,
            }),
            own_keys: kv == KvRows::PagedOwn,
            whole_keys: whole,
            split_keys: split.ok().map(|(_, function)| function),
            after: after.ok().map(|(_, function)| function),
            capped: with(Logits::Capped)?,
            biased: with(Logits::Biased)?,
            sm_count: context.device().sm_count,
            unit_bytes: unit_bytes(context.device()),
            group_size: desc.group_size(),
            head_blocks: desc.num_kv_heads * packing.blocks_of(desc.group_size()),
            kind: desc.kind,
            o_dtype: desc.o_dtype,
            tiles_share_keys: desc.max_qo_len > rows_of_tile(row, packing.positions()),
        }))
    }

    /// Whether one tile has all heads of a group, as long as its rows are no more than the tile's.
    pub fn reads_keys_once(desc: &AttentionDesc) -> bool {
        packing(desc).blocks_of(desc.group_size()) == 1
    }

    /// What it is behind another kernel of the problem.
    pub(super) fn behind(&self, desc: &AttentionDesc) -> Behind {
        let shape = &self.maps.row.shape;
        let dims = [desc.head_dim_qk, desc.head_dim_vo];
        let are_blocks = dims.iter().all(|dim| dim % 64 == 0);
        let loads = match are_blocks && dims == [shape.head_dim_qk, shape.head_dim_vo] {
            true => Loads::Rows,
            false if shape.head_dim_qk > MOST_OF_UNEVEN_ROWS => Loads::WiderTiles,
            false => Loads::UnevenRows,
        };
        Behind {
            loads,
            few_keys: self.few_keys(),
        }
    }

    /// What of a run's masks the kernel lacks. ALiBi is for the one that has all, where there is no kernel for it alone.
    pub(super) fn missing_of_masks(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        match self.masks {
            Masks::ByPosition => {
                let has_bias = self.few(run).is_none() && self.with_bias(args).is_some();
                other_masks(args).and(Feature::Alibi, args.alibi_slopes.is_some() && !has_bias)
            }
            Masks::Any => Features::default(),
        }
    }

    /// What a run asks for over whole keys, its queries and outputs apart.
    pub(super) fn missing_over(&self, run: &Run<'_>) -> Features {
        self.missing_of_masks(run)
            | self.maps.missing_of_cache(&run.args.k)
            | self.maps.missing_of_cache(&run.args.v)
    }

    /// Enqueues the kernel for inputs with whole keys.
    pub(super) fn launch_over(
        &self,
        inputs: &Inputs<'_>,
        current: &Current<'_>,
        run: &Run<'_>,
        stream: Stream,
    ) -> Result<()> {
        let (function, row) = self.with_row(run);
        let launch = Launch {
            dependent: inputs.dependent,
            ..self.shape_of_launch(row, run, stream)
        };
        let raw = self.maps.raw_boxes(row, [inputs.k, inputs.v]);
        let params = PrefillParams {
            raw_box_tokens: raw.map_or(0, |boxes| boxes.tokens),
            raw_boxes_of_rows: raw.is_some_and(|boxes| boxes.of_rows).into(),
            ..self.params(inputs.params, inputs.q, inputs.k, inputs.v)
        };
        let tensors = [inputs.q, inputs.k, inputs.v];
        let maps = self.maps.all(row, raw, current, tensors)?;
        // SAFETY: the kernel takes a `FolioPrefillParams` and three maps; their addresses are the caller's tensors, which were
        // checked against the plan, and the workspace. The plan's list has room for `num_items` items.
        unsafe { launch.enqueue(current, function, &params, &maps) }
    }

    fn params(
        &self,
        attention: AttentionParams,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> PrefillParams {
        let section_bytes = match self.tiles_share_keys {
            true => attention.section_bytes,
            false => u32::MAX,
        };
        let of_queries = flag_of_queries(q.dtype(), self.maps.row.types.q);
        PrefillParams {
            attention: AttentionParams {
                section_bytes,
                flags: attention.flags | of_queries | dtype_code(self.o_dtype) << O_DTYPE_SHIFT,
                v_scale: match self.o_dtype.is_fp8() {
                    true => attention.v_scale / attention.o_scale,
                    false => attention.v_scale,
                },
                ..attention
            },
            head_dim_qk: q.extent(2) as u32,
            head_dim_vo: v.extent(3) as u32,
            packing: self.maps.packing,
            row_alignment: piece_bytes(k).min(piece_bytes(v)) as u16,
            raw_box_tokens: 0,
            raw_boxes_of_rows: 0,
            page_size: Divisor::new(attention.page_size),
            group_blocks: self.maps.packing.blocks_of(self.group_size) as u16,
            group_size: self.group_size as u16,
            sum: SumParams::default(),
            context_indptr: 0,
        }
    }

    fn shape_of_launch(&self, row: &AttentionRow, run: &Run<'_>, stream: Stream) -> Launch {
        let tiles = u64::from(run.num_items) * u64::from(self.head_blocks);
        let ctas = self.sm_count * prefill_ctas(row.types, row.shape);
        Launch {
            grid: [tiles.min(u64::from(ctas)) as u32, 1, 1],
            threads: row.shape.threads,
            cluster: 1,
            dependent: false,
            stream,
        }
    }

    /// The kernel for keys of which this is the second part, where there is one and maps can describe it.
    fn of_split_keys(&self, k_rope: &Tensor) -> OrLacks<&Function> {
        let lacks = self.maps.missing_of_cache(k_rope);
        match self.split_keys.as_ref().or(self.after.as_ref()) {
            Some(split) if k_rope.extent(3) == i64::from(SPLIT_ROPE_DIM) => {
                if lacks.is_empty() {
                    Ok(split)
                } else {
                    Err(lacks)
                }
            }
            _ => Err(Feature::SplitKeys.into()),
        }
    }

    /// The kernel for a run over whole keys: the one for its logits, or for any.
    fn of_whole_keys(&self, args: &AttentionArgs) -> &Function {
        let of_logits = self.with_cap(args).or(self.with_bias(args));
        of_logits.unwrap_or(&self.whole_keys)
    }

    /// The same for a plan, and its row.
    fn with_row(&self, run: &Run<'_>) -> (&Function, &'static AttentionRow) {
        match self.few(run) {
            Some(few) => (&few.function, few.row),
            None => (self.of_whole_keys(run.args), self.maps.row),
        }
    }

    /// The kernel for few keys, where it takes the plan: whatever the logits, since items have its tiles' rows. (With a soft
    /// cap or ALiBi, a wider kernel for them would leave two of its three warpgroups idle.)
    fn few(&self, run: &Run<'_>) -> Option<&Few> {
        self.few.as_ref().filter(|few| {
            // Items may have been cut for another kernel, by its tiles.
            let fits = few.always && run.q_tile <= self.maps.packing.positions();
            fits || run.has_few_keys
        })
    }

    fn with_cap(&self, args: &AttentionArgs) -> Option<&Function> {
        let suits = args.logits_soft_cap > 0.0 && args.logits_soft_cap <= MOST_SOFT_CAP;
        self.capped.as_ref().filter(|_| suits)
    }

    fn with_bias(&self, args: &AttentionArgs) -> Option<&Function> {
        let of_heads = args.alibi_slopes.is_some_and(|slopes| slopes.rank() == 1);
        let suits = of_heads && !args.alibi_sqrt && args.logits_soft_cap == 0.0;
        self.biased.as_ref().filter(|_| suits)
    }
}

impl AttentionKernel for Sm90Prefill {
    fn name(&self) -> &str {
        match &self.few {
            Some(few) if few.always => &few.row.row.name,
            _ => &self.maps.row.row.name,
        }
    }

    fn tiling(&self) -> Tiling {
        let mut tiling = tiling(
            self.maps.row,
            self.maps.packing.positions(),
            (self.sm_count, self.unit_bytes),
            self.head_blocks,
        );
        if self.few.as_ref().is_some_and(|few| few.always) {
            return tiling.of_few_keys();
        }
        if self.kind == Kind::Decode {
            tiling.max_shares = tiling.max_splits;
            if !self.tiles_share_keys {
                tiling.tail = TailCosts::NO_TAIL;
            }
        }
        if self.own_keys {
            (tiling.max_shares, tiling.tail) = (0, TailCosts::NO_TAIL);
            tiling.workers.small = SmallItems {
                rows: self.maps.packing.positions(),
                keys: MOST_STEPS_OF_SMALL * self.maps.row.shape.kv_tile,
                of_item: self
                    .head_blocks
                    .div_ceil(self.maps.row.shape.q_tile / WARPGROUP_ROWS),
            };
        }
        tiling
    }

    fn few_keys(&self) -> u32 {
        self.few.as_ref().map_or(0, |few| few.most_keys)
    }

    fn most_rows(&self) -> u32 {
        rows_of_tile(self.maps.row, self.maps.packing.positions())
    }

    /// Steps are of whole blocks. Only masks of any kind hide what is before an item's first key.
    fn starts_at(&self) -> u32 {
        match self.masks {
            Masks::ByPosition => self.maps.row.shape.kv_tile,
            Masks::Any => 1,
        }
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let split = (args.k_rope.as_ref()).and_then(|k_rope| self.of_split_keys(k_rope).err());
        self.missing_over(run)
            | missing_of_rows(rows_suit(&args.q), &args.q, &args.o)
            | split.unwrap_or_default()
    }

    /// The kernels of keys in two parts are those of MLA, whose contexts are attended chunk by chunk.
    fn may_go_on(&self) -> bool {
        self.after.is_some()
    }

    fn goes_on(&self, run: &Run<'_>) -> bool {
        let suits = |context: ContextKeys| {
            let caches = [&context.k, &context.k_rope, &context.v];
            let lacks = caches.map(|cache| self.maps.missing_of_cache(cache));
            lacks.iter().all(|lacks| lacks.is_empty())
        };
        let after = self.after.is_some() && run.args.k_rope.is_some();
        after && run.earlier.context.is_none_or(suits)
    }

    fn context_step(&self) -> Option<u32> {
        self.after.as_ref().map(|_| self.maps.row.shape.kv_tile)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let args = run.args;
        let Some(k_rope) = &args.k_rope else {
            let inputs = Inputs {
                q: &args.q,
                k: &args.k,
                v: &args.v,
                params: *run.params,
                dependent: false,
            };
            return self.launch_over(&inputs, current, run, stream);
        };
        let function = self.of_split_keys(k_rope).map_err(wrong_choice)?;
        let launch = self.shape_of_launch(self.maps.row, run, stream);
        let attention = AttentionParams {
            k_rope_page_groups: self.maps.page_groups(k_rope),
            ..*run.params
        };
        let params = PrefillParams {
            sum: SumParams::new(run.earlier.sum.as_ref()),
            context_indptr: (run.earlier.context)
                .map_or(0, |context| context.indptr.address() as u64),
            ..self.params(attention, &args.q, &args.k, &args.v)
        };
        let q = self.maps.query(&args.q).encode(current.driver(), SWIZZLE)?;
        let [k, v, k_rope] = self.maps.split(current, [&args.k, &args.v, k_rope])?;
        let after = match (&self.split_keys, &self.after) {
            (Some(_), _) if run.earlier.is_nothing() => None,
            (_, after) => after.as_ref(),
        };
        let Some(after) = after else {
            // SAFETY: as in `launch_over`, with four maps.
            return unsafe { launch.enqueue(current, function, &params, &[q, k, v, k_rope]) };
        };
        let of_context = match &run.earlier.context {
            Some(of) => self.maps.split(current, [&of.k, &of.v, &of.k_rope])?,
            None => [k, v, k_rope],
        };
        let [context_k, context_v, context_k_rope] = of_context;
        let maps = [q, k, v, k_rope, context_k, context_v, context_k_rope];
        // SAFETY: as above, with those of a context's tensors.
        unsafe { launch.enqueue(current, after, &params, &maps) }
    }
}

fn wrong_choice(lacks: Features) -> Error {
    Error::Internal(format!("a run was given to a kernel that lacks {lacks}"))
}

/// What a run's masks ask for beside positions, ALiBi apart.
pub(super) fn other_masks(args: &AttentionArgs) -> Features {
    let custom = matches!(args.mask, Mask::Bytes(_) | Mask::Bits(_));
    let by_request = matches!(args.mask, Mask::CausalByRequest(_));
    Features::default()
        .and(Feature::CustomMask, custom)
        .and(Feature::CausalByRequest, by_request)
        .and(Feature::MmPrefix, args.mm_prefix_ranges.is_some())
}

fn packing(desc: &AttentionDesc) -> Packing {
    Packing::new(desc.group_size(), desc.max_qo_len)
}

fn is_for_few_keys(row: &AttentionRow) -> bool {
    row.shape.q_tile == WARPGROUP_ROWS
}

/// How keys come by boxes. A box for each block of columns has to have 16 tokens: with eight, as many boxes take longer than to load
/// rows one by one (drafts and mixed batches at head_dims of 80 to 224 on an H200: 0.83 to 0.91 of the time).
fn forms_of_boxes(page_size: u32, own_keys: bool) -> &'static [KvRows] {
    const FORMS: &[KvRows] = &[KvRows::PagedOwn, KvRows::Paged, KvRows::PagedColumns];
    let columns = usize::from(page_size.is_multiple_of(2 * GROUP));
    &FORMS[usize::from(!own_keys)..2 + columns]
}

/// Whether the problem's rows are as many blocks of 64 columns.
fn has_blocks_of(row: &AttentionRow, desc: &AttentionDesc) -> bool {
    let blocks = |qk: u32, vo: u32| qk.max(vo).div_ceil(64);
    let shape = &row.shape;
    blocks(shape.head_dim_qk, shape.head_dim_vo) == blocks(desc.head_dim_qk, desc.head_dim_vo)
}

/// Whether the row's tile is the one for queries of this length, where head_dim 128 has two. The one of
/// 192 rows takes a third less from L2 for every product. But short requests whose heads do not share tiles
/// come to few and unequal ones (on an H200, 8 × 1000 causal with 16/16 heads: 93 µs against 88). Problems that a row has
/// columns too many for have plain kernels of 192 rows, whose items those for masks are given.
fn tile_suits(
    row: &AttentionRow,
    (kv, masks): (KvRows, Masks),
    packing: Packing,
    desc: &AttentionDesc,
) -> bool {
    const WIDE: u32 = 192;
    let shape = &row.shape;
    let is_whole = [desc.head_dim_qk, desc.head_dim_vo] == [shape.head_dim_qk, shape.head_dim_vo];
    let is_plain = masks == Masks::ByPosition;
    let short = packing.heads == 1 && desc.max_qo_len < 2048 && (is_whole || is_plain);
    let converts = row.types.kv != row.types.q;
    let has_two = shape.head_dim_qk == 128 && !converts && kv != KvRows::PagedColumns;
    !has_two || short == (shape.q_tile < WIDE)
}
