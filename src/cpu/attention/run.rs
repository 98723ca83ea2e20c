//! One run of a plan: the arguments as addresses, and what every walk needs of them. That is locating keys and
//! queries, loading queries, and scales. Outputs are in `outputs`.
#![allow(unsafe_code)]

use super::addresses::{Cache, Grid};
use super::before::Before;
use super::bias::Bias;
use super::item::Item;
use super::keys::Keys;
use super::mask::{Extents, Masks};
use super::row_scales::RowScales;
use super::scratch::{Scratch, Tile};
use super::shape::Shape;
use super::whole_rows::{Queries, Records, copy_row};
use crate::cpu::kernels::convert::Stage;
use crate::cpu::kernels::prefetch_rows::RowPrefetch;
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::softmax::Logits;
use crate::cpu::kernels::table::Kernels;
use crate::dtype::DType;
use crate::problem::{
    AttentionArgs, AttentionDesc, Checked, Kind, KvStorage, LogBase, NO_PARTIAL, Sum, WorkItem,
};
use crate::tensor::Tensor;
use std::ops::Range;

/// The plan, as it lies in the workspace.
pub struct Plan<'a> {
    /// The start of the workspace.
    pub base: *const u8,
    pub qo_indptr: &'a [i32],
    pub kv_len: &'a [i32],
    /// First byte of a custom mask of bytes.
    pub mask_bytes_start: &'a [i64],
    /// First byte of a custom mask of bits.
    pub mask_bits_start: &'a [i64],
    pub page_ids: &'a [i32],
    /// Partial rows that combine items name.
    pub partials: &'a [u32],
    pub partial_o: *mut f32,
    pub partial_lse: *mut f32,
}

/// Everything that the walks over items read.
pub struct Run<'a> {
    pub shape: &'a Shape,
    pub kernels: &'a Kernels,
    pub plan: Plan<'a>,
    /// The type of the rows of k and v as the walks read them: where they lie, or as copies in scratch.
    pub row_dtype: DType,
    pub records: Records<'a>,
    pub k: Keys,
    pub v: Cache,
    kv: KvStorage,
    pub q_dtype: DType,
    pub o_dtype: DType,
    q: Queries,
    pub o: Grid,
    pub lse: Option<(Grid, DType, LogBase)>,
    masks: Masks<'a>,
    pub logits: Logits,
    q_scales: RowScales<'a>,
    k_scales: RowScales<'a>,
    pub v_factor: f32,
    pub v_scales: RowScales<'a>,
    slopes: Option<Slopes<'a>>,
    bias: Option<Bias>,
    pub sinks: Option<&'a [f32]>,
    /// What the outputs are added to; then there are no sinks.
    pub before: Option<Before>,
}

// SAFETY: the pointers are the caller's tensors and the plan's workspace: inputs are only read, and each
// piece of work writes rows of its own.
unsafe impl Sync for Run<'_> {}

impl<'a> Run<'a> {
    /// `args` were checked against `desc` and the plan by the caller of the backend.
    pub fn new(
        desc: &AttentionDesc,
        shape: &'a Shape,
        kernels: &'a Kernels,
        plan: Plan<'a>,
        args: &'a Checked<AttentionArgs>,
        sum: Option<&Sum>,
    ) -> Run<'a> {
        let of_rows = |scales: &'a Option<Tensor>| desc.kv_format.head_scales(scales.as_ref());
        let o_scale = args.o_scale * RowScales::of(args.o_scales.as_ref()).of_head(0, 0);
        let records = Records::of(desc, args, kernels);
        let (k, v) = match records {
            Records::Whole if desc.kind == Kind::Mla => (
                Keys::whole_rows(Cache::new(&args.k), shape),
                Cache::new(&args.v),
            ),
            Records::Whole => (Keys::new(args), Cache::new(&args.v)),
            // Rows of a token's heads lie one after the other.
            Records::Stored { .. } => {
                let copies = |row_bytes: usize| Cache {
                    head: row_bytes as i64,
                    ..Cache::anywhere(plan.base)
                };
                (
                    Keys::whole_rows(copies(shape.k_row_bytes), shape),
                    copies(shape.v_row_bytes),
                )
            }
            _ => {
                let copies = Cache::anywhere(plan.base);
                (Keys::whole_rows(copies, shape), copies)
            }
        };
        Run {
            shape,
            kernels,
            plan,
            row_dtype: shape.row_dtype,
            records,
            k,
            v,
            kv: desc.kv,
            q_dtype: desc.q_dtype,
            o_dtype: desc.o_dtype,
            q: Queries::of(desc, args),
            o: Grid::new(&args.o),
            lse: args
                .lse
                .map(|lse| (Grid::new(&lse), lse.dtype(), args.lse_base)),
            masks: Masks::new(args),
            logits: Logits {
                scale: args.logits_scale(),
                cap: args.logits_soft_cap,
                alibi_sqrt: args.alibi_sqrt,
            },
            q_scales: RowScales::of(args.q_scales.as_ref()),
            k_scales: RowScales::of(of_rows(&args.k_scales)),
            v_factor: args.v_scale / o_scale,
            v_scales: RowScales::of(of_rows(&args.v_scales)),
            slopes: Slopes::of(args),
            bias: args.score_bias.as_ref().map(Bias::of),
            sinks: floats(&args.sinks),
            before: sum.map(|sum| Before::new(sum, args.lse_base)),
        }
    }

    /// A work item in the terms of this run.
    pub fn item(&self, work: &WorkItem) -> Item<'a> {
        let b = work.request as usize;
        let q_start = i64::from(work.q_start);
        let kv_len = i64::from(self.plan.kv_len[b]);
        let past = i64::from(work.position) - q_start;
        let mask_start = [self.plan.mask_bytes_start[b], self.plan.mask_bits_start[b]];
        let mask = self.masks.of(
            b,
            Extents {
                past,
                kv_len,
                mask_start,
            },
        );
        let span = mask.span(q_start..q_start + i64::from(work.q_len));
        let start = span.start.max(i64::from(work.kv_start));
        let end = span.end.min(i64::from(work.kv_end));
        Item {
            request: b,
            page_start: work.page_start,
            q_start,
            token: i64::from(work.q_token),
            tokens: work.q_len as usize,
            rows: work.q_len as usize * self.shape.group,
            keys: start..end.max(start),
            mask,
            partial: work.partial,
        }
    }

    /// Byte offsets of the keys and values at `keys` of the item's request, for head 0. Keys that are not whole rows
    /// are copied to the tile; where every head has rows of its own, those of `heads`.
    pub fn locate(
        &self,
        item: &Item<'_>,
        heads: &Range<usize>,
        keys: &Range<i64>,
        tile: &mut Tile<'_>,
    ) {
        let start = item.page_start;
        let (page_size, ragged) = match self.kv {
            KvStorage::Paged { page_size, .. } => (i64::from(page_size), false),
            KvStorage::Ragged => (1, true),
        };
        let (mut page, mut slot) = (keys.start / page_size, keys.start % page_size);
        let mut i = 0;
        while i < (keys.end - keys.start) as usize {
            let id = match ragged {
                true => start + page,
                false => i64::from(self.plan.page_ids[(start + page) as usize]),
            };
            while slot < page_size && i < (keys.end - keys.start) as usize {
                match &self.records {
                    Records::Whole => {
                        self.k.locate(id, slot, i, tile);
                        tile.v_offsets[i] = self.v.offset(id, slot);
                    }
                    Records::Stored { .. } => self.copy_heads([id, slot], heads, i, tile),
                    _ => {
                        let copy = tile.rows.wrapping_add(i * self.shape.k_row_bytes);
                        // SAFETY: a tile has room for as many rows as it has offsets.
                        unsafe { self.records.copy(id, slot, self.kernels, copy) };
                        let offset = copy as i64 - self.plan.base as i64;
                        (tile.k_offsets[i], tile.v_offsets[i]) = (offset, offset);
                    }
                }
                (slot, i) = (slot + 1, i + 1);
            }
            (page, slot) = (page + 1, 0);
        }
    }

    /// Copies the key and value of some heads of a token, as key `i` of a tile: the keys of all heads, then their values.
    fn copy_heads(
        &self,
        [page, slot]: [i64; 2],
        heads: &Range<usize>,
        i: usize,
        tile: &mut Tile<'_>,
    ) {
        let Records::Stored {
            keys,
            values,
            dtype,
        } = &self.records
        else {
            return;
        };
        let (k_bytes, v_bytes) = (self.shape.k_row_bytes, self.shape.v_row_bytes);
        let k = tile
            .rows
            .wrapping_add(i * heads.len() * (k_bytes + v_bytes));
        let v = k.wrapping_add(heads.len() * k_bytes);
        for (n, head) in heads.clone().enumerate() {
            let at = [page, slot, head as i64];
            // SAFETY: a tile has room for the rows of as many keys as it has offsets.
            unsafe {
                copy_row(keys, at, *dtype, k.wrapping_add(n * k_bytes));
                copy_row(values, at, *dtype, v.wrapping_add(n * v_bytes));
            }
        }
        let offset = |rows: *mut u8, bytes: usize| {
            rows as i64 - self.plan.base as i64 - (heads.start * bytes) as i64
        };
        (tile.k_offsets[i], tile.v_offsets[i]) = (offset(k, k_bytes), offset(v, v_bytes));
    }

    /// Locates the query rows of a KV head: row `token · group + g`. Rows in two parts are copied to the scratch.
    pub fn queries(&self, item: &Item<'_>, head: usize, scratch: &mut Scratch<'_>) -> Rows {
        if let Queries::Whole(q) = &self.q {
            return self.grid_rows(q, item, head, scratch.q_offsets);
        }
        let bytes = self.shape.dim_qk * self.q_dtype.size();
        for (row, offset) in scratch.q_offsets[..item.rows].iter_mut().enumerate() {
            let (token, qo_head) = self.token_and_head(item, head, row);
            *offset = (row * bytes) as i64;
            // SAFETY: the row is the batch's; the scratch has room for the rows of an item.
            unsafe {
                let copy = scratch.q_rows.add(row * bytes);
                self.q.copy(token, qo_head, copy);
            }
        }
        Rows {
            base: scratch.q_rows,
            offsets: scratch.q_offsets.as_ptr(),
            count: item.rows,
        }
    }

    /// Prefetch of the output rows of a KV head. It is empty where the item stores partial results.
    pub fn prefetch_outputs(
        &self,
        item: &Item<'_>,
        head: usize,
        offsets: &mut [i64],
    ) -> RowPrefetch {
        let mut rows = self.grid_rows(&self.o, item, head, offsets);
        if item.partial != NO_PARTIAL {
            rows.count = 0;
        }
        RowPrefetch::new(rows, self.shape.dim_vo * self.o_dtype.size())
    }

    /// The token of the batch and the query head of a KV head's row.
    pub fn token_and_head(&self, item: &Item<'_>, head: usize, row: usize) -> (i64, usize) {
        let group = self.shape.group;
        let token = item.token + (row / group) as i64;
        (token, head * group + row % group)
    }

    fn grid_rows(&self, grid: &Grid, item: &Item<'_>, head: usize, offsets: &mut [i64]) -> Rows {
        for (row, offset) in offsets[..item.rows].iter_mut().enumerate() {
            let (token, qo_head) = self.token_and_head(item, head, row);
            *offset = grid.offset(token, qo_head);
        }
        Rows {
            base: grid.base,
            offsets: offsets.as_ptr(),
            count: item.rows,
        }
    }

    /// Prefetch of query rows.
    pub fn prefetch_queries(&self, rows: Rows) -> RowPrefetch {
        RowPrefetch::new(rows, self.shape.dim_qk * self.q_dtype.size())
    }

    /// Reads query rows as f32.
    pub fn load_queries(&self, rows: Rows, q: &mut [f32]) {
        let ld = self.shape.ld_qk;
        assert!(q.len() >= rows.count * ld);
        let stage = Stage {
            rows,
            dim: self.shape.dim_qk,
            dst: q.as_mut_ptr(),
            width: ld,
            strip: 0,
        };
        // SAFETY: the rows lie inside q, which was checked; `q` has room for them.
        unsafe { self.kernels.stage[self.q_dtype as usize](&stage) };
    }

    /// ALiBi slopes of a KV head's query heads.
    pub fn slopes(&self, item: &Item<'_>, head: usize) -> Option<&'a [f32]> {
        let group = self.shape.group;
        self.slopes.map(|slopes| {
            let first = item.request * slopes.request_stride + head * group;
            &slopes.all[first..first + group]
        })
    }

    /// Whether slopes bend logits.
    pub fn has_slopes(&self) -> bool {
        self.slopes.is_some()
    }

    /// What is added to logits of `keys`, if anything is.
    pub fn bias(&self, item: &Item<'_>, keys: &Range<i64>) -> Option<Bias> {
        self.bias.filter(|bias| bias.is_over(item, keys))
    }

    /// How the raw scores of a KV head become logits.
    pub fn logits(&self, item: &Item<'_>, head: usize) -> Logits {
        let scales = [&self.q_scales, &self.k_scales].map(|s| s.of_head(item.request, head));
        Logits {
            scale: self.logits.scale * scales[0] * scales[1],
            ..self.logits
        }
    }

    /// Whether the raw scores of all KV heads become logits in the same way.
    pub fn are_logits_alike(&self) -> bool {
        self.q_scales.are_alike() && self.k_scales.are_alike()
    }
}

/// ALiBi slopes of all query heads, for each request or for all of them.
#[derive(Clone, Copy)]
struct Slopes<'a> {
    all: &'a [f32],
    request_stride: usize,
}

impl Slopes<'_> {
    fn of(args: &Checked<AttentionArgs>) -> Option<Slopes<'_>> {
        let tensor = args.alibi_slopes.as_ref()?;
        Some(Slopes {
            all: tensor.as_f32()?,
            request_stride: match tensor.rank() {
                1 => 0,
                _ => tensor.extent(1) as usize,
            },
        })
    }
}

fn floats(tensor: &Option<Tensor>) -> Option<&[f32]> {
    tensor.as_ref().and_then(Tensor::as_f32)
}
