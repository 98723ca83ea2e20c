//! One run of a plan: the arguments as addresses, and what every walk over an item shares: finding
//! keys, reading queries, writing results, merging split rows.
#![allow(unsafe_code)]

#[cfg(folio_avx512)]
use super::many_rows_bf16;
use super::mask::{Masks, Sight};
use super::scratch::{Pad, Tile};
use super::shape::{KEY_TILE, Shape};
use super::{few_rows, many_rows};
use crate::cpu::kernels::convert::{Stage, Store};
use crate::cpu::kernels::prefetch_rows::Ahead;
use crate::cpu::kernels::product::{Panel, Product};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::softmax::{Logits, Softmax};
use crate::cpu::kernels::table::Kernels;
use crate::dtype::DType;
use crate::problem::{
    AttentionArgs, AttentionDesc, Checked, KvStorage, LogBase, MergeItem, NO_PARTIAL, WorkItem,
};
use crate::tensor::Tensor;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// What plan wrote into the workspace.
pub struct Plan<'a> {
    pub qo_indptr: &'a [i32],
    pub kv_len: &'a [i32],
    /// First entry of `page_ids`; of ragged requests the first K/V row.
    pub page_start: &'a [u64],
    /// First element of a custom mask of bytes, and first byte of one of bits.
    pub mask_start: &'a [[u64; 2]],
    pub page_ids: &'a [i32],
    pub partial_o: *mut f32,
    pub partial_lse: *mut f32,
}

/// A cache tensor: address, and strides in bytes.
#[derive(Clone, Copy)]
pub struct Cache {
    pub base: *const u8,
    pub page: i64,
    pub token: i64,
    pub head: i64,
}

/// A `[token, head]` tensor of rows: address, and strides in bytes.
#[derive(Clone, Copy)]
struct Grid {
    base: *mut u8,
    token: i64,
    head: i64,
}

/// Everything that the walks over items read.
pub struct Run<'a> {
    pub shape: &'a Shape,
    pub kernels: &'a Kernels,
    pub plan: Plan<'a>,
    pub kv_dtype: DType,
    pub k: Cache,
    pub v: Cache,
    kv: KvStorage,
    pub q_dtype: DType,
    o_dtype: DType,
    q: Grid,
    o: Grid,
    lse: Option<(Grid, LogBase)>,
    masks: Masks<'a>,
    logits: Logits,
    k_scales: &'a [f32],
    v_factor: f32,
    v_scales: &'a [f32],
    slopes: Option<&'a [f32]>,
    sinks: Option<&'a [f32]>,
}

// SAFETY: the pointers are the caller's tensors and the plan's workspace: inputs are only read, and each
// piece of work writes rows of its own.
unsafe impl Sync for Run<'_> {}

/// Rows of scores, `lds` apart, that become weights in place, and the rows' running state.
pub struct Scores<'a> {
    pub s: &'a mut [f32],
    pub lds: usize,
    pub limits: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub alpha: &'a mut [f32],
}

/// A work item in the terms of this run.
pub struct Item<'a> {
    pub request: usize,
    /// First query row within the request, and within the batch.
    pub q_start: i64,
    pub token: i64,
    pub tokens: usize,
    /// `tokens` times the group.
    pub rows: usize,
    /// The keys of the item that any of its rows sees.
    pub keys: Range<i64>,
    pub sight: Sight<'a>,
    /// First partial row, or [`NO_PARTIAL`].
    partial: u32,
}

impl Item<'_> {
    /// The part of the tile `keys` that some of `tokens` see, from a multiple of `unit` on, counted from
    /// the tile's start.
    pub fn seen(
        &self,
        tokens: &Range<usize>,
        keys: &Range<i64>,
        unit: usize,
    ) -> Option<Range<usize>> {
        let row = |token: usize| self.q_start + token as i64;
        let hull = self.sight.hull(row(tokens.start)..row(tokens.end));
        let low = (hull.start.max(keys.start) - keys.start) as usize / unit * unit;
        let end = hull.end.min(keys.end) - keys.start;
        (end > low as i64).then_some(low..end as usize)
    }

    /// The part of the tile `keys` that each of `tokens` sees, counted from the tile's start, and whether
    /// some token sees less, or more, than its range says.
    pub fn open(&self, tokens: &Range<usize>, keys: &Range<i64>) -> (Range<usize>, bool) {
        let (mut start, mut end, mut has_holes) = (keys.start, keys.end, false);
        for token in tokens.clone() {
            let row = self.q_start + token as i64;
            let seen = self.sight.row(row);
            (start, end) = (start.max(seen.start), end.min(seen.end));
            has_holes |= self.sight.has_holes(row);
        }
        let open = (start - keys.start) as usize..(end.max(start) - keys.start) as usize;
        (open, has_holes)
    }
}

impl Cache {
    fn new(tensor: &Tensor) -> Cache {
        let bytes = tensor.dtype().size() as i64;
        Cache {
            base: tensor.address() as *const u8,
            page: tensor.stride(0) * bytes,
            token: tensor.stride(1) * bytes,
            head: tensor.stride(2) * bytes,
        }
    }

    /// Keys or values of one head at `offsets`.
    pub fn rows(&self, head: usize, offsets: &[i64]) -> Rows {
        Rows {
            base: self
                .base
                .wrapping_offset((head as i64 * self.head) as isize),
            offsets: offsets.as_ptr(),
            count: offsets.len(),
        }
    }
}

impl Grid {
    fn new(tensor: &Tensor) -> Grid {
        let bytes = tensor.dtype().size() as i64;
        Grid {
            base: tensor.address() as *mut u8,
            token: tensor.stride(0) * bytes,
            head: tensor.stride(1) * bytes,
        }
    }

    fn offset(&self, token: i64, head: usize) -> i64 {
        token * self.token + head as i64 * self.head
    }

    fn at(&self, token: i64, head: usize) -> *mut u8 {
        self.base.wrapping_offset(self.offset(token, head) as isize)
    }
}

impl<'a> Run<'a> {
    /// `args` were checked against `desc` and the plan by the caller of the backend.
    pub fn new(
        desc: &AttentionDesc,
        shape: &'a Shape,
        kernels: &'a Kernels,
        plan: Plan<'a>,
        args: &'a Checked<AttentionArgs>,
    ) -> Run<'a> {
        Run {
            shape,
            kernels,
            plan,
            kv_dtype: desc.kv_dtype,
            k: Cache::new(&args.k),
            v: Cache::new(&args.v),
            kv: desc.kv,
            q_dtype: desc.q_dtype,
            o_dtype: desc.o_dtype,
            q: Grid::new(&args.q),
            o: Grid::new(&args.o),
            lse: args.lse.map(|lse| (Grid::new(&lse), args.lse_base)),
            masks: Masks::new(args),
            logits: Logits {
                scale: args.logits_scale(),
                cap: args.logits_soft_cap,
                alibi_sqrt: args.alibi_sqrt,
            },
            k_scales: floats(&args.k_scales).unwrap_or(&[1.0]),
            v_factor: args.v_scale / args.o_scale,
            v_scales: floats(&args.v_scales).unwrap_or(&[1.0]),
            slopes: floats(&args.alibi_slopes),
            sinks: floats(&args.sinks),
        }
    }

    /// Computes some heads of an item of few rows.
    pub fn compute_heads(&self, work: &WorkItem, heads: Range<usize>, pad: &mut Pad<'_>) {
        few_rows::walk(self, &self.item(work), heads, pad);
    }

    /// Computes a head of an item of many rows.
    pub fn compute_head(&self, work: &WorkItem, head: usize, pad: &mut Pad<'_>) {
        let item = self.item(work);
        #[cfg(folio_avx512)]
        if let Some(matrix) = self.shape.matrix {
            return many_rows_bf16::walk(self, &item, head, matrix, pad);
        }
        many_rows::walk(self, &item, head, pad);
    }

    fn item(&self, work: &WorkItem) -> Item<'a> {
        let b = work.request as usize;
        let first = i64::from(self.plan.qo_indptr[b]);
        let qo_len = i64::from(self.plan.qo_indptr[b + 1]) - first;
        let kv_len = i64::from(self.plan.kv_len[b]);
        let sight = self.masks.of(b, qo_len, kv_len, self.plan.mask_start[b]);
        let q_start = i64::from(work.q_start);
        let hull = sight.hull(q_start..q_start + i64::from(work.q_len));
        let start = hull.start.max(i64::from(work.kv_start));
        let end = hull.end.min(i64::from(work.kv_end));
        Item {
            request: b,
            q_start,
            token: first + q_start,
            tokens: work.q_len as usize,
            rows: work.q_len as usize * self.shape.group,
            keys: start..end.max(start),
            sight,
            partial: work.partial,
        }
    }

    /// Byte offsets of the keys and values at `keys` of a request, for head 0.
    pub fn locate(&self, request: usize, keys: &Range<i64>, tile: &mut Tile<'_>) {
        let start = self.plan.page_start[request];
        let (page_size, ragged) = match self.kv {
            KvStorage::Paged { page_size, .. } => (i64::from(page_size), false),
            KvStorage::Ragged => (1, true),
        };
        let (mut page, mut slot) = (keys.start / page_size, keys.start % page_size);
        let mut i = 0;
        while i < (keys.end - keys.start) as usize {
            let id = match ragged {
                true => start as i64 + page,
                false => i64::from(self.plan.page_ids[start as usize + page as usize]),
            };
            while slot < page_size && i < (keys.end - keys.start) as usize {
                tile.k_offsets[i] = id * self.k.page + slot * self.k.token;
                tile.v_offsets[i] = id * self.v.page + slot * self.v.token;
                (slot, i) = (slot + 1, i + 1);
            }
            (page, slot) = (page + 1, 0);
        }
    }

    /// Locates the query rows of a KV head: row `token · group + g`.
    pub fn queries(&self, item: &Item<'_>, head: usize, offsets: &mut [i64]) -> Rows {
        self.grid_rows(&self.q, item, head, offsets)
    }

    /// The rows of o that belong to the query rows of a KV head, to be asked for; none where the item makes
    /// partial results.
    pub fn outputs_ahead(&self, item: &Item<'_>, head: usize, offsets: &mut [i64]) -> Ahead {
        let mut rows = self.grid_rows(&self.o, item, head, offsets);
        if item.partial != NO_PARTIAL {
            rows.count = 0;
        }
        Ahead::new(rows, self.shape.dim_vo * self.o_dtype.size())
    }

    /// The token of the batch and the query head of a KV head's row.
    fn place(&self, item: &Item<'_>, head: usize, row: usize) -> (i64, usize) {
        let group = self.shape.group;
        let token = item.token + (row / group) as i64;
        (token, head * group + row % group)
    }

    fn grid_rows(&self, grid: &Grid, item: &Item<'_>, head: usize, offsets: &mut [i64]) -> Rows {
        for (row, offset) in offsets[..item.rows].iter_mut().enumerate() {
            let (token, qo_head) = self.place(item, head, row);
            *offset = grid.offset(token, qo_head);
        }
        Rows {
            base: grid.base,
            offsets: offsets.as_ptr(),
            count: item.rows,
        }
    }

    /// Query rows to be asked for.
    pub fn queries_ahead(&self, rows: Rows) -> Ahead {
        Ahead::new(rows, self.shape.dim_qk * self.q_dtype.size())
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

    /// Online softmax over the scores of the rows of `tokens`, head by head, which hold `keys`.
    pub fn softmax(
        &self,
        item: &Item<'_>,
        heads: Range<usize>,
        tokens: &Range<usize>,
        keys: &Range<i64>,
        rows: Scores<'_>,
    ) {
        let group = self.shape.group;
        let n = (keys.end - keys.start) as usize;
        let count = heads.len() * tokens.len() * group;
        let room = (count - 1) * rows.lds + n.next_multiple_of(32);
        assert!(rows.s.len() >= room && n <= KEY_TILE && rows.limits.len() >= KEY_TILE);
        assert!(rows.max.len() >= count && rows.sum.len() >= count && rows.alpha.len() >= count);
        let mut task = Softmax {
            s: rows.s.as_mut_ptr(),
            lds: rows.lds,
            rows: count,
            n,
            logits: self.logits(heads.start),
            low: 0,
            high: n,
            limits: std::ptr::null(),
            slopes: std::ptr::null(),
            distance: 0.0,
            max: rows.max.as_mut_ptr(),
            sum: rows.sum.as_mut_ptr(),
            alpha: rows.alpha.as_mut_ptr(),
        };
        let alike = self.slopes.is_none() && (heads.len() == 1 || self.k_scales.len() == 1);
        if alike && self.sees_all(item, tokens, keys) {
            // SAFETY: the arrays have room for the rows, as just asserted.
            unsafe { (self.kernels.softmax)(&task) };
            return;
        }
        task.rows = group;
        for head in heads {
            task.logits = self.logits(head);
            task.slopes = self.slopes(head).map_or(std::ptr::null(), <[f32]>::as_ptr);
            for token in tokens.clone() {
                self.look(item, token, keys, rows.limits, &mut task);
                // SAFETY: as above; the pointers stay within the rows.
                unsafe { (self.kernels.softmax)(&task) };
                task.s = task.s.wrapping_add(group * rows.lds);
                task.max = task.max.wrapping_add(group);
                task.sum = task.sum.wrapping_add(group);
                task.alpha = task.alpha.wrapping_add(group);
            }
        }
    }

    /// Fills in what one token sees of `keys`.
    fn look(
        &self,
        item: &Item<'_>,
        token: usize,
        keys: &Range<i64>,
        limits: &mut [f32],
        task: &mut Softmax,
    ) {
        let row = item.q_start + token as i64;
        let n = task.n as i64;
        task.distance = (keys.start - item.sight.position(row)) as f32;
        if item.sight.has_holes(row) {
            item.sight.limits(row, keys.clone(), limits);
            limits[task.n..task.n.next_multiple_of(32)].fill(f32::NEG_INFINITY);
            task.limits = limits.as_ptr();
            (task.low, task.high) = (0, task.n);
        } else {
            let seen = item.sight.row(row);
            let low = (seen.start - keys.start).clamp(0, n);
            task.limits = std::ptr::null();
            task.low = low as usize;
            task.high = (seen.end - keys.start).clamp(low, n) as usize;
        }
    }

    /// ALiBi slopes of a KV head's query heads.
    pub fn slopes(&self, head: usize) -> Option<&'a [f32]> {
        let group = self.shape.group;
        self.slopes
            .map(|all| &all[head * group..(head + 1) * group])
    }

    /// How the raw scores of a KV head become logits.
    pub fn logits(&self, head: usize) -> Logits {
        Logits {
            scale: self.logits.scale * per_head(self.k_scales, head),
            ..self.logits
        }
    }

    /// Every row of the item sees all of `keys`.
    pub fn sees_all(&self, item: &Item<'_>, tokens: &Range<usize>, keys: &Range<i64>) -> bool {
        tokens.clone().all(|token| {
            let row = item.q_start + token as i64;
            let seen = item.sight.row(row);
            seen.start <= keys.start && seen.end >= keys.end && !item.sight.has_holes(row)
        })
    }

    /// Writes rows of a KV head: outputs, or partial results where the keys were split. `o`, `max` and
    /// `sum` begin with the first of `rows`.
    pub fn finish(
        &self,
        item: &Item<'_>,
        head: usize,
        rows: Range<usize>,
        o: &[f32],
        max: &[f32],
        sum: &[f32],
    ) {
        for (i, row) in rows.enumerate() {
            let (token, qo_head) = self.place(item, head, row);
            let values = &o[i * self.shape.ld_vo..][..self.shape.ld_vo];
            if item.partial == NO_PARTIAL {
                self.output(token, qo_head, values, max[i], sum[i]);
            } else {
                let at = item.partial as usize + (token - item.token) as usize;
                self.partial(
                    at * self.shape.num_qo_heads + qo_head,
                    values,
                    max[i],
                    sum[i],
                );
            }
        }
    }

    fn partial(&self, at: usize, values: &[f32], max: f32, sum: f32) {
        let empty = saw_nothing(max, sum);
        let store = Store {
            src: values.as_ptr(),
            factor: if empty { 0.0 } else { 1.0 / sum },
            dst: self
                .plan
                .partial_o
                .wrapping_add(at * self.shape.ld_vo)
                .cast(),
            dim: self.shape.ld_vo,
        };
        // SAFETY: plan checked that the item's partial rows lie in the workspace, and no other item has
        // them.
        unsafe {
            self.kernels.store[DType::F32 as usize](&store);
            let lse = if empty { max } else { max + sum.log2() };
            *self.plan.partial_lse.add(at) = lse;
        }
    }

    /// Divides by the sum, the sink's share included, and stores o and lse. `max` and `sum` in base 2.
    fn output(&self, token: i64, head: usize, values: &[f32], max: f32, sum: f32) {
        let store = Store {
            src: values.as_ptr(),
            factor: self.settle(token, head, max, sum),
            dst: self.o.at(token, head),
            dim: self.shape.dim_vo,
        };
        // SAFETY: token and head are the batch's, for which o was checked; rows of other items are others.
        unsafe { self.kernels.store[self.o_dtype as usize](&store) };
    }

    /// Stores the lse of a row; returns what its weighted sum of values is to be multiplied with.
    fn settle(&self, token: i64, head: usize, max: f32, sum: f32) -> f32 {
        let sink = self
            .sinks
            .map_or(f32::NEG_INFINITY, |sinks| sinks[head] * LOG2_E);
        let top = max.max(sink);
        let empty = saw_nothing(top, sum);
        let (keep, total) = if empty {
            (0.0, 0.0)
        } else if sink == f32::NEG_INFINITY {
            (1.0, sum)
        } else {
            let keep = (max - top).exp2();
            (keep, sum * keep + (sink - top).exp2())
        };
        if let Some((lse, base)) = &self.lse {
            let value = if empty { top } else { top + total.log2() };
            let value = match base {
                LogBase::E => value * LN_2,
                LogBase::Two => value,
            };
            // SAFETY: as in `output`, of lse.
            unsafe { lse.at(token, head).cast::<f32>().write(value) };
        }
        let v_scale = self.v_factor * per_head(self.v_scales, head / self.shape.group);
        if empty { 0.0 } else { keep / total * v_scale }
    }

    /// Whether the rows of an item are stored as they are, in bf16.
    pub fn stores_bf16(&self, item: &Item<'_>) -> bool {
        item.partial == NO_PARTIAL && self.o_dtype == DType::BF16
    }

    /// What the rows of a KV head are to be multiplied with; stores their lse. `max` and `sum` begin with
    /// the first of `rows`.
    pub fn settle_rows(
        &self,
        item: &Item<'_>,
        head: usize,
        rows: Range<usize>,
        max: &[f32],
        sum: &[f32],
        factors: &mut [f32],
    ) {
        for (i, row) in rows.enumerate() {
            let (token, qo_head) = self.place(item, head, row);
            factors[i] = self.settle(token, qo_head, max[i], sum[i]);
        }
    }

    /// Stores rows of a KV head that are in bf16 already, `ld_vo` apart; those of [`Run::stores_bf16`].
    pub fn store_bf16(&self, item: &Item<'_>, head: usize, rows: Range<usize>, values: &[u16]) {
        for (row, values) in rows.zip(values.chunks_exact(self.shape.ld_vo)) {
            let (token, qo_head) = self.place(item, head, row);
            let to = self.o.at(token, qo_head);
            let bytes = 2 * self.shape.dim_vo;
            // SAFETY: as in `output`; `dim_vo` is no more than `ld_vo`.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), to, bytes) };
        }
    }

    /// Puts the rows of a split tile together, those of one KV head.
    pub fn merge(&self, merge: &MergeItem, kv_head: usize, pad: &mut Pad<'_>) {
        let first = i64::from(self.plan.qo_indptr[merge.request as usize]);
        let group = self.shape.group;
        for row in 0..merge.q_len as usize {
            for head in kv_head * group..(kv_head + 1) * group {
                let (max, sum) = self.merge_row(merge, row, head, pad);
                let token = first + i64::from(merge.q_start) + row as i64;
                self.output(token, head, &pad.o[..self.shape.ld_vo], max, sum);
            }
        }
    }

    /// `Σ w_c o_c` in `pad.o`, and the maximum and sum of the weights `w_c = 2^(lse_c - max)`.
    fn merge_row(
        &self,
        merge: &MergeItem,
        row: usize,
        head: usize,
        pad: &mut Pad<'_>,
    ) -> (f32, f32) {
        let heads = self.shape.num_qo_heads;
        let chunks = merge.num_chunks as usize;
        let at =
            |c: usize| (merge.partial as usize + c * merge.q_len as usize + row) * heads + head;
        // SAFETY: plan checked that the partial rows of the merge lie in the workspace.
        let lse = |c: usize| unsafe { *self.plan.partial_lse.add(at(c)) };
        let max = (0..chunks).map(lse).fold(f32::NEG_INFINITY, larger);
        let mut sum = 0.0;
        pad.o[..self.shape.ld_vo].fill(0.0);
        if max == f32::NEG_INFINITY {
            return (max, sum);
        }
        for start in (0..chunks).step_by(KEY_TILE) {
            let count = (chunks - start).min(KEY_TILE);
            for (c, weight) in pad.s[..count].iter_mut().enumerate() {
                *weight = (lse(start + c) - max).exp2();
                sum += *weight;
            }
            let product = Product {
                a: pad.s.as_ptr(),
                lda: 0,
                rows: 1,
                depth: count,
                b: Panel {
                    base: self
                        .plan
                        .partial_o
                        .wrapping_add(at(start) * self.shape.ld_vo),
                    ld: merge.q_len as usize * heads * self.shape.ld_vo,
                },
                columns: self.shape.ld_vo,
                c: pad.o.as_mut_ptr(),
                ldc: 0,
                alpha: &1.0,
            };
            // SAFETY: as above; `pad.o` holds a row and `pad.s` the weights.
            unsafe { (self.kernels.product)(&product) };
        }
        (max, sum)
    }
}

/// Whether a row has neither keys nor a sink. One that saw nothing but NaN has no maximum either.
fn saw_nothing(max: f32, sum: f32) -> bool {
    max == f32::NEG_INFINITY && !sum.is_nan()
}

/// NaN if either is: what one chunk of a row saw must not be lost.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

fn floats(tensor: &Option<Tensor>) -> Option<&[f32]> {
    tensor.as_ref().and_then(Tensor::as_f32)
}

/// A scale for all heads, or one each.
fn per_head(scales: &[f32], head: usize) -> f32 {
    scales[if scales.len() == 1 { 0 } else { head }]
}
