//! The portable attention kernels, `kernels/generic/attention.cu` and `attention_f32.cu`: they take every
//! run.
#![allow(unsafe_code)]

use super::features::Features;
use super::kernel::{AttentionKernel, COMBINE_UNITS, Inputs, Run, packed_rows, query};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, DeviceInfo, Function, Launch, blocks_of};
use crate::cuda::kernels::Arch;
use crate::cuda::kernels::attention::{
    AttentionQuery, AttentionRow, MOST_HEAD_DIM, Phase, candidates, unsupported,
};
use crate::cuda::params::{
    AttentionParams, BiasParams, Cache, Divisor, GenericParams, dtype_code, flag_of_queries,
    row_alignment,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{AttentionDesc, Kind, SmallItems, TailCosts, Tiling, Workers};

/// The portable kernel: takes every run. It is fast where rows are aligned to 16 bytes.
#[derive(Debug)]
pub struct Generic {
    row: &'static AttentionRow,
    function: Function,
    tiling: Tiling,
    params: Dims,
    group_size: u32,
    num_kv_heads: u32,
}

/// What of [`GenericParams`] the desc decides.
#[derive(Debug, Clone, Copy)]
struct Dims {
    head_dim_qk: u32,
    head_dim_vo: u32,
    o_dtype: DType,
    page_size: Divisor,
    /// Flags beside those of a run.
    flags: u32,
}

impl Generic {
    /// Packed rows of the least tile that decode's rows of the kernel table have.
    pub const DECODE_ROWS: u32 = 16;

    /// Whether the warps of decode's rows divide the keys, and those of prefill's the rows. In fp32, and of wider heads, both are one.
    pub fn divides_warps(desc: &AttentionDesc) -> bool {
        desc.q_dtype != DType::F32 && desc.head_dim_qk.max(desc.head_dim_vo) <= MOST_HEAD_DIM
    }

    /// Packed rows up to which decode's rows of the kernel table take requests of a problem's types and dims.
    pub fn most_rows_of_decode(context: &Context, desc: &AttentionDesc) -> u32 {
        let rows = decode_rows(query(context, desc));
        rows.map(most_rows).max().unwrap_or(0)
    }

    /// Loads the row for a problem.
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Generic> {
        let group_size = desc.group_size();
        let query = query(context, desc);
        let rows = rows_for(query, packed_rows(desc));
        let (row, function) = loader.find(rows, || unsupported(&query))?;
        let current = context.enter()?;
        let blocks_per_sm = function.blocks_per_sm(&current, row.shape.threads)?.max(1);
        let slots = context.device().sm_count * blocks_per_sm;
        Ok(Generic {
            row,
            function,
            tiling: tiling(row, desc, slots, context.device()),
            params: Dims {
                head_dim_qk: desc.head_dim_qk,
                head_dim_vo: desc.head_dim_vo,
                o_dtype: desc.o_dtype,
                page_size: Divisor::new(desc.kv.page_size()),
                flags: flag_of_queries(desc.q_dtype, row.types.q),
            },
            group_size,
            num_kv_heads: desc.num_kv_heads,
        })
    }
}

/// What the kernel table has for a problem: rows for few query rows where those fill a tile or two, and else rows whose warps
/// divide the query rows.
fn rows_for(query: AttentionQuery, packed_rows: u32) -> Vec<&'static AttentionRow> {
    let of_few: Vec<_> = decode_rows(query)
        .filter(|row| packed_rows <= most_rows(row))
        .collect();
    match of_few.is_empty() {
        true => of_phase(Phase::Prefill, query).collect(),
        false => of_few,
    }
}

/// Those of decode, without rows that are for wider heads alone: these compute all logits twice.
fn decode_rows(query: AttentionQuery) -> impl Iterator<Item = &'static AttentionRow> {
    let is_wide = |qk: u32, vo: u32| qk.max(vo) > MOST_HEAD_DIM;
    of_phase(Phase::Decode, query).filter(move |row| {
        is_wide(row.shape.head_dim_qk, row.shape.head_dim_vo)
            == is_wide(query.head_dim_qk, query.head_dim_vo)
    })
}

fn of_phase(phase: Phase, query: AttentionQuery) -> impl Iterator<Item = &'static AttentionRow> {
    candidates(AttentionQuery { phase, ..query }).filter(|row| row.row.arch == Arch::Sm80)
}

/// Packed rows up to which decode's tiles are faster than prefill's. Two of 32 rows read keys twice: on an H200, 48 and
/// 64 rows took 0.76 to 1.18 times the time of prefill's tile in bf16, and 0.82 to 1.06 in fp8; 32 rows 0.44 to 0.87.
fn most_rows(row: &AttentionRow) -> u32 {
    let q_tile = row.shape.q_tile;
    match q_tile > Generic::DECODE_ROWS && row.types.kv.is_fp8() {
        true => 2 * q_tile,
        false => q_tile,
    }
}

/// Decode is cut so that all heads' items fill the device about three times; prefill, whose items are longer, once.
fn tiling(row: &AttentionRow, desc: &AttentionDesc, slots: u32, device: &DeviceInfo) -> Tiling {
    let (kv_unit, waves) = match row.phase {
        Phase::Decode => (128, 3),
        Phase::Prefill => (256, 1),
    };
    let tail = match desc.kind {
        Kind::Prefill => TailCosts {
            most_chunks: 3 * slots / desc.num_kv_heads,
            item_units: 1,
            combine_units: 1,
            least_gain: 2,
        },
        Kind::Decode | Kind::Mla => TailCosts::NO_TAIL,
    };
    Tiling {
        q_tile: (row.shape.q_tile / desc.group_size()).max(1),
        q_parts: 1,
        kv_unit,
        // A unit is 8 µs on an H200.
        unit_bytes: device.memory_bytes_in(8000),
        max_splits: (waves * slots).div_ceil(desc.num_kv_heads),
        max_shares: 0,
        tail,
        takes_shares: false,
        least_gain: 0,
        rows_of_unit: 0,
        invariant_chunk: match desc.kind {
            Kind::Decode | Kind::Mla => 2048,
            // Splitting prefill would need partial results for every row of the largest batch.
            Kind::Prefill => u32::MAX,
        },
        combine_units: COMBINE_UNITS,
        own_key_bytes: 0,
        workers: Workers {
            all: slots,
            of_item: desc.num_kv_heads,
            small: SmallItems::NONE,
        },
    }
}

impl AttentionKernel for Generic {
    fn name(&self) -> &str {
        &self.row.row.name
    }

    fn tiling(&self) -> Tiling {
        self.tiling
    }

    fn missing(&self, _: &Run<'_>) -> Features {
        Features::default()
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let params = self.params(run);
        // SAFETY: the kernel takes a `FolioGenericParams`; its addresses are the caller's tensors, which
        // were checked against the plan, and the workspace.
        unsafe { self.enqueue(current, run, &params, stream) }
    }
}

impl Generic {
    /// Row tiles that the largest item needs.
    fn row_tiles(&self, run: &Run<'_>) -> u32 {
        (run.q_tile * self.group_size).div_ceil(self.row.shape.q_tile)
    }

    /// The parameters of a run.
    pub fn params(&self, run: &Run<'_>) -> GenericParams {
        let k_rope = run.args.k_rope.as_ref();
        let inputs = Inputs {
            q: &run.args.q,
            k: &run.args.k,
            v: &run.args.v,
            params: *run.params,
            dependent: false,
        };
        GenericParams {
            k_rope: k_rope.map_or_else(Cache::default, Cache::of),
            rope_dim: k_rope.map_or(0, |k_rope| k_rope.extent(3) as u32),
            k_rope_copy_bytes: k_rope.map_or(0, |k_rope| {
                // The 16 bytes at the seam come from one part where that is a multiple of them.
                let seam = run.args.k.extent(3) as u32 * run.args.k.dtype().size() as u32;
                row_alignment(k_rope).min(1 << seam.trailing_zeros())
            }),
            bias: BiasParams::of(run.args.score_bias, self.group_size),
            ..self.params_over(&inputs, run)
        }
    }

    /// The same of keys that are whole, wherever they are.
    fn params_over(&self, inputs: &Inputs<'_>, run: &Run<'_>) -> GenericParams {
        GenericParams {
            attention: AttentionParams {
                flags: inputs.params.flags | self.params.flags,
                ..inputs.params
            },
            head_dim_qk: self.params.head_dim_qk,
            head_dim_vo: self.params.head_dim_vo,
            row_tiles: self.row_tiles(run),
            o_dtype: dtype_code(self.params.o_dtype),
            q_copy_bytes: row_alignment(inputs.q),
            k_copy_bytes: row_alignment(inputs.k),
            v_copy_bytes: row_alignment(inputs.v),
            page_size: self.params.page_size,
            k_rope: Cache::default(),
            rope_dim: 0,
            k_rope_copy_bytes: 0,
            bias: BiasParams::of(None, self.group_size),
        }
    }

    /// Enqueues the kernel over such keys.
    pub fn launch_over(
        &self,
        inputs: &Inputs<'_>,
        current: &Current<'_>,
        run: &Run<'_>,
        stream: Stream,
    ) -> Result<()> {
        let params = self.params_over(inputs, run);
        let launch = Launch {
            dependent: inputs.dependent,
            ..self.shape_of_launch(run, stream)?
        };
        // SAFETY: the kernel takes a `FolioGenericParams`; its addresses are the caller's tensors, which were checked
        // against the plan, and the workspace.
        unsafe { launch.enqueue(current, &self.function, &params, &[]) }
    }

    fn shape_of_launch(&self, run: &Run<'_>, stream: Stream) -> Result<Launch> {
        let tiles = u64::from(self.row_tiles(run)) * u64::from(self.num_kv_heads);
        let blocks = u64::from(run.num_items) * tiles;
        Ok(Launch {
            grid: [blocks_of("qo_indptr and kv_len", blocks)?, 1, 1],
            threads: self.row.shape.threads,
            cluster: 1,
            dependent: false,
            stream,
        })
    }

    /// Enqueues the kernel with its parameter.
    ///
    /// # Safety
    /// `P` is the kernel's parameter, and every address in it valid until the kernel has run.
    pub unsafe fn enqueue<P: Copy>(
        &self,
        current: &Current<'_>,
        run: &Run<'_>,
        params: &P,
        stream: Stream,
    ) -> Result<()> {
        let launch = self.shape_of_launch(run, stream)?;
        // SAFETY: the caller's promise.
        unsafe { launch.enqueue(current, &self.function, params, &[]) }
    }
}
