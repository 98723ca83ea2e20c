//! The Hopper kernels for latent attention with few rows, `kernels/sm90/mla_few`: what they take, and the tensor maps
//! that one of them reads 16-bit records by. Where a map cannot describe the cache, another gathers them row by row.
#![allow(unsafe_code)]

use super::features::{Feature, Features};
use super::kernel::{AttentionKernel, COMBINE_UNITS, OrLacks, Run};
use super::mla::{MlaDims, is_one_record, query};
use super::sm90::{GROUP, Map, evict_first_bytes, rows_are_distinct};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, Swizzle, TensorMap};
use crate::cuda::kernels::mla::{MlaRow, MlaVariant, RecordSource, candidates, unsupported};
use crate::cuda::mla_few_params::MlaFewParams;
use crate::cuda::params::row_alignment;
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, SmallItems, TailCosts, Tiling, Workers};
use crate::tensor::Tensor;

/// Tokens of a slot of the ring, which a box fills where pages allow it.
const SLOT_TOKENS: u32 = 16;
/// Elements of a swizzle atom, 128 bytes.
const ATOM: u32 = 64;
/// One of the kernels for one problem.
#[derive(Debug)]
pub struct Sm90MlaFew {
    desc: AttentionDesc,
    dims: MlaDims,
    page_size: u32,
    row: &'static MlaRow,
    function: Function,
    keys: RecordSource,
    sm_count: u32,
    /// Bytes of records up to which they are loaded with the evict-first policy.
    evict_first_bytes: u64,
}

impl Sm90MlaFew {
    /// Loads the row for a problem.
    ///
    /// # Errors
    /// As [`Loader::find`], but for [`Error::Unsupported`].
    pub fn load(
        keys: RecordSource,
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<OrLacks<Self>> {
        // Positions and their distances stay far from the ends of i32.
        const MOST_KEYS: u32 = 1 << 30;
        let page_size = desc.kv.page_size();
        let page_fits = keys != RecordSource::Boxes || page_size.is_multiple_of(GROUP);
        let is_long = desc.max_kv_len.max(desc.max_qo_len) > MOST_KEYS;
        let lacks = Features::default()
            .and(Feature::PageSize, !page_fits)
            .and(Feature::Lengths, is_long);
        if !lacks.is_empty() {
            return Ok(Err(lacks));
        }
        let query = query(context, desc);
        let mut found = candidates(query)
            .filter(|row| row.variant == MlaVariant::Sm90Few { keys })
            .peekable();
        if found.peek().is_none() {
            return Ok(Err(Feature::TypesAndDims.into()));
        }
        let (row, function) = match loader.find(found, || unsupported(&query)) {
            Ok(found) => found,
            Err(Error::Unsupported(_)) => return Ok(Err(Feature::Code.into())),
            Err(error) => return Err(error),
        };
        Ok(Ok(Sm90MlaFew {
            desc: *desc,
            dims: MlaDims::of(desc),
            page_size,
            row,
            function,
            keys,
            sm_count: context.device().sm_count,
            evict_first_bytes: evict_first_bytes(context.device().l2_bytes),
        }))
    }

    /// Whether one of the kernels takes a problem.
    ///
    /// # Errors
    /// As [`Sm90MlaFew::load`].
    pub fn is_for(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<bool> {
        for keys in Sm90MlaFew::sources(desc) {
            if Sm90MlaFew::load(*keys, loader, context, desc)?.is_ok() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// How the kernels for a problem bring records, the preferred way first.
    pub fn sources(desc: &AttentionDesc) -> &'static [RecordSource] {
        match desc.kv_format.is_scaled() {
            true => &[RecordSource::Records],
            false => &[RecordSource::Boxes, RecordSource::Rows],
        }
    }

    /// 8-token groups from page to page; `None` where pages are not a whole number of them apart, or a map could not
    /// describe the cache at all.
    fn page_step(&self, cache: &Tensor) -> Option<u32> {
        if !rows_are_distinct(cache) {
            return None;
        }
        let in_page = i64::from(self.page_size / GROUP);
        let group = i64::from(GROUP) * cache.stride(1);
        let step = match cache.extent(0) {
            0 | 1 => in_page,
            _ if group > 0 && cache.stride(0) % group == 0 => cache.stride(0) / group,
            _ => return None,
        };
        let end = cache.extent(0).checked_mul(step)?;
        (step >= in_page && end <= i64::from(i32::MAX)).then_some(step as u32)
    }

    /// Tokens of a box: as many as a page and a slot have in common. The two parts of a record come as one box of a
    /// slot only where they are neighbours: the slot has them group by group.
    fn box_tokens(&self, one_record: bool) -> u32 {
        match one_record {
            true => 1 << (self.page_size | SLOT_TOKENS).trailing_zeros(),
            false => GROUP,
        }
    }

    /// A box is `[8-token group][swizzle atom][token][byte]`.
    fn map(
        &self,
        current: &Current<'_>,
        cache: &Tensor,
        atoms: u32,
        page_step: u32,
        box_tokens: u32,
    ) -> Result<TensorMap> {
        let token = cache.stride(1);
        let groups = (cache.extent(0) as u32 - 1) * page_step + self.page_size / GROUP;
        Map::new(cache)
            .dimension(ATOM, ATOM, 1)
            .dimension(GROUP, GROUP, token)
            .dimension(atoms, atoms, i64::from(ATOM))
            .dimension(groups, box_tokens / GROUP, i64::from(GROUP) * token)
            .encode(current.driver(), Swizzle::Span128)
    }

    /// Whether records are loaded with the evict-first policy. It serves where they are few (on an H200, loads alone at
    /// 16 x 4k bf16: 26.9 against 29.8 µs) and slows a longer stream (128 x 4k: 3.87 against 4.03 TB/s).
    fn evict_first(&self, run: &Run<'_>) -> bool {
        run.num_keys.saturating_mul(self.desc.kv_bytes()) <= self.evict_first_bytes
    }
}

impl AttentionKernel for Sm90MlaFew {
    fn name(&self) -> &str {
        &self.row.row.name
    }

    fn tiling(&self) -> Tiling {
        Tiling {
            // All rows of a request are one tile.
            q_tile: self.desc.max_qo_len,
            q_parts: 1,
            kv_unit: 128,
            unit_bytes: u32::MAX,
            max_splits: self.sm_count,
            max_shares: self.sm_count,
            tail: TailCosts::NO_TAIL,
            // Its memory is shared by whoever still has items, and those of fp8 records take longer beside their keys.
            takes_shares: false,
            least_gain: 0,
            rows_of_unit: 0,
            invariant_chunk: 2048,
            combine_units: COMBINE_UNITS,
            own_key_bytes: 0,
            workers: Workers {
                all: self.sm_count,
                of_item: 1,
                small: SmallItems::NONE,
            },
        }
    }

    fn missing(&self, run: &Run<'_>) -> Features {
        let args = run.args;
        let aligned = |tensor: &Tensor| row_alignment(tensor) >= 16;
        let of_four = 4 * args.o.dtype().size() as u32;
        let caches = || [&args.k].into_iter().chain(&args.k_rope);
        let by_maps = self.keys == RecordSource::Boxes;
        let is_empty = by_maps && caches().any(|cache| cache.is_empty());
        let mapped = is_empty || !by_maps || caches().all(|cache| self.page_step(cache).is_some());
        let queries = aligned(&args.q) && args.q_rope.as_ref().is_some_and(aligned);
        Features::default()
            .and(Feature::QStrides, !queries)
            .and(Feature::OStrides, row_alignment(&args.o) < of_four)
            .and(Feature::EmptyKv, is_empty)
            .and(Feature::KvStrides, !caches().all(aligned))
            .and(Feature::PageSteps, !mapped)
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let one_record = is_one_record(run);
        let box_tokens = self.box_tokens(one_record);
        let page_step = |cache: &Tensor| self.page_step(cache).unwrap_or_default();
        let (latent, rope) = (&run.args.k, run.args.k_rope.as_ref());
        let params = MlaFewParams {
            mla: self.dims.params(run, 1),
            kv_evict_first: u32::from(self.evict_first(run)),
            one_record: u32::from(one_record),
            boxes_log2: (SLOT_TOKENS / box_tokens).ilog2(),
            page_step: page_step(latent),
            rope_page_step: rope.map_or(0, page_step),
            reserved: 0,
        };
        let launch = Launch {
            grid: [run.num_items.min(self.sm_count), 1, 1],
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: true,
            stream,
        };
        let Some(rope) = rope.filter(|_| self.keys == RecordSource::Boxes) else {
            // SAFETY: the kernel takes a `FolioMlaFewParams`; its addresses are the caller's tensors, which were checked
            // against the plan, and the workspace, whose list of items has room for the grid.
            return unsafe { launch.enqueue(current, &self.function, &params, &[]) };
        };
        let of_latent = latent.extent(3) as u32 / ATOM;
        let of_rope = rope.extent(3) as u32 / ATOM;
        let atoms = if one_record {
            of_latent + of_rope
        } else {
            of_latent
        };
        let maps = [
            self.map(current, latent, atoms, params.page_step, box_tokens)?,
            self.map(current, rope, of_rope, params.rope_page_step, box_tokens)?,
        ];
        // SAFETY: as above, and two tensor maps.
        unsafe { launch.enqueue(current, &self.function, &params, &maps) }
    }
}
