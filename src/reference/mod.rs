//! The oracle: attention in float64, one key after the other, exactly as the contract is written.
//!
//! It is slow and obvious, shares nothing with the fast paths but the problem types, and is what every
//! test compares with. A context made with the reference flag runs on it, so C programs have it too.

mod context_parallel;
mod copy;
mod gather;
mod merge;
mod mla_cache;
mod rope_append;
mod stored;
mod tree;

use crate::backend::{
    Attention, AttentionOps, Backend, CacheOps, IndexOps, MergeOps, ProjectionOps, Stream, TreeOps,
    Workspace, WorkspaceInfo,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AppendArgs, AttentionArgs, AttentionDesc, Batch, CacheForm, CacheFormat, Checked, CopyArgs,
    CopyWeightsArgs, CpCorrectArgs, CpReorderArgs, GatherArgs, HostBatch, KvStorage, LEAST_BIAS,
    LatentRecords, LogBase, Mask, MaskColumns, MergeArgs, MergeStatesArgs, MergeVarlenArgs,
    MlaAppendArgs, MlaGatherArgs, PageIds, Pages, ProjectArgs, RopeAppendArgs, TailCosts, Tiling,
    TreeMaskArgs, WorkList, Workers,
};
use crate::tensor::{Device, Tensor};
use std::ops::Range;

/// The operators of [`Backend`], in float64 on the calling thread.
#[derive(Debug)]
pub struct ReferenceBackend;

/// One problem and a copy of its current batch.
struct ReferenceAttention {
    desc: AttentionDesc,
    requests: Vec<Request>,
}

/// One request of a batch.
#[derive(Debug, Clone, Default)]
struct Request {
    q_start: i64,
    qo_len: i64,
    kv_len: i64,
    /// Those keys that the batch is over.
    keys: Range<i64>,
    /// Paged: the page ids. Ragged: empty.
    page_ids: Vec<i32>,
    /// Ragged: the row of the first of `keys`.
    kv_start: i64,
    /// First element of the request's custom mask, as bytes and as bit-packed bytes.
    mask_bytes_start: i64,
    mask_bits_start: i64,
}

/// One query row of one head.
struct Row {
    /// Its request.
    b: usize,
    head: i64,
    kv_head: i64,
    /// Among the request's keys.
    position: i64,
    q: Vec<f64>,
}

impl ReferenceAttention {
    /// `(row of the batch, o, lse in base e)` of query row `i` of `request` and query head `head`.
    fn attend(
        &self,
        args: &Checked<AttentionArgs>,
        b: usize,
        i: i64,
        head: i64,
    ) -> (Vec<f64>, f64) {
        let request = &self.requests[b];
        let kv_head = head / i64::from(self.desc.group_size());
        let query = |d| {
            two_parts(
                &args.q,
                args.q_rope.as_ref(),
                [request.q_start + i, head, d],
            )
        };
        let row = Row {
            b,
            head,
            kv_head,
            position: request.kv_len - request.qo_len + i,
            q: (0..i64::from(self.desc.head_dim_qk)).map(query).collect(),
        };
        let mut keys: Vec<(i64, f64)> = Vec::new();
        for j in request.keys.clone() {
            if !allowed(args, request, b, i, j) {
                continue;
            }
            let bias = bias(args, request, head, i, j);
            if bias < f64::from(LEAST_BIAS) {
                continue;
            }
            keys.push((j, self.score(args, request, &row, j) + bias));
        }
        let sink = args
            .sinks
            .map_or(f64::NEG_INFINITY, |s| f64::from(s.get(&[head])));
        let max = keys.iter().map(|key| key.1).fold(sink, f64::max);
        let mut o = vec![0.0; self.desc.head_dim_vo as usize];
        // A row of nothing but NaN has no maximum either.
        if max == f64::NEG_INFINITY && !keys.iter().any(|key| key.1.is_nan()) {
            return (o, max);
        }
        let sum = keys.iter().map(|key| (key.1 - max).exp()).sum::<f64>() + (sink - max).exp();
        let [_, _, v_scales] = args.row_scales(self.desc.kv_format);
        let v_scale = f64::from(args.v_scale) * row_scale(v_scales, b, kv_head);
        for &(j, score) in &keys {
            let weight = (score - max).exp() / sum * v_scale;
            let (page, slot) = self.locate(request, j);
            for (d, o) in o.iter_mut().enumerate() {
                *o += weight * self.value(args, [page, slot, kv_head, d as i64]);
            }
        }
        (o, max + sum.ln())
    }

    /// Of a row and key `j`, without a bias.
    fn score(&self, args: &Checked<AttentionArgs>, request: &Request, row: &Row, j: i64) -> f64 {
        let (page, slot) = self.locate(request, j);
        let terms = row.q.iter().enumerate();
        let dot: f64 = terms
            .map(|(d, q)| q * self.key(args, [page, slot, row.kv_head, d as i64]))
            .sum();
        let [q_scales, k_scales, _] = args.row_scales(self.desc.kv_format);
        let scale = |scales| row_scale(scales, row.b, row.kv_head);
        let scales = scale(q_scales) * scale(k_scales);
        let mut s = dot * f64::from(args.logits_scale()) * scales;
        if args.logits_soft_cap > 0.0 {
            let cap = f64::from(args.logits_soft_cap);
            s = cap * (s / cap).tanh();
        }
        if let Some(slopes) = args.alibi_slopes {
            let slope = f64::from(match slopes.rank() {
                1 => slopes.get(&[row.head]),
                _ => slopes.get(&[row.b as i64, row.head]),
            });
            s += match args.alibi_sqrt {
                false => slope * (j - row.position) as f64,
                true if j <= row.position => -slope * ((row.position - j) as f64).sqrt(),
                true => 0.0,
            };
        }
        s
    }

    /// Element `[page, slot, kv_head, d]` of the keys.
    ///
    /// A call of its own, as [`two_parts`] is: in a loop over elements the compiler would ask for the type of a part before it
    /// knows whether the part is there. That is harmless, but a jump on uninitialised memory to valgrind.
    #[inline(never)]
    fn key(&self, args: &Checked<AttentionArgs>, index: [i64; 4]) -> f64 {
        match self.desc.kv_format {
            CacheFormat::DS_MLA => ds_mla(&args.k, index),
            _ => match (&args.k_rope, index) {
                // All KV heads share the last elements.
                (Some(rope), [page, slot, _, d]) if d >= args.k.extent(3) => {
                    f64::from(rope.get(&[page, slot, 0, d - args.k.extent(3)]))
                }
                _ if self.is_plain() => f64::from(args.k.get(&index)),
                _ => stored::element(&args.caches(self.desc.kv_format)[0], index),
            },
        }
    }

    /// Element `[page, slot, kv_head, d]` of the values. As [`Self::key`].
    #[inline(never)]
    fn value(&self, args: &Checked<AttentionArgs>, index: [i64; 4]) -> f64 {
        match self.desc.kv_format {
            CacheFormat::DS_MLA => ds_mla(&args.v, index),
            _ if self.is_plain() => f64::from(args.v.get(&index)),
            format => stored::element(&args.caches(format)[1], index),
        }
    }

    /// Rows are elements one after the other, which nothing but factors of a head multiplies.
    fn is_plain(&self) -> bool {
        self.desc.kv_format.form() == CacheForm::Plain
    }

    /// Page and offset in the page of key `j`.
    fn locate(&self, request: &Request, j: i64) -> (i64, i64) {
        match self.desc.kv {
            KvStorage::Ragged => (request.kv_start + j - request.keys.start, 0),
            KvStorage::Paged { page_size, .. } => {
                let page_size = i64::from(page_size);
                let page = request.page_ids[(j / page_size) as usize];
                (i64::from(page), j % page_size)
            }
        }
    }
}

/// Element `[row, head, d]` of rows whose last elements may be in a tensor of their own.
#[inline(never)]
fn two_parts(head: &Tensor, tail: Option<&Tensor>, [row, qo_head, d]: [i64; 3]) -> f64 {
    let width = head.extent(2);
    f64::from(match tail {
        Some(tail) if d >= width => tail.get(&[row, qo_head, d - width]),
        _ => head.get(&[row, qo_head, d]),
    })
}

/// Element `[page, slot, 0, d]` of `fp8_ds_mla` records: 512 bytes of e4m3, four little-endian fp32 scales of 128
/// elements each, and 64 bf16.
fn ds_mla(records: &Tensor, [page, slot, head, d]: [i64; 4]) -> f64 {
    let byte = |at: i64| records.get(&[page, slot, head, at]) as u8;
    if d >= 512 {
        let at = 528 + 2 * (d - 512);
        return half::bf16::from_le_bytes([byte(at), byte(at + 1)]).to_f64();
    }
    let at = 512 + d / 128 * 4;
    let scale = f32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]);
    let latent = records.with_dtype(DType::F8E4M3);
    f64::from(latent.get(&[page, slot, head, d])) * f64::from(scale)
}

/// `(base AND window) OR mm-prefix`.
fn allowed(args: &Checked<AttentionArgs>, request: &Request, b: usize, i: i64, j: i64) -> bool {
    let position = request.kv_len - request.qo_len + i;
    let base = match args.mask {
        Mask::Causal => j <= position,
        Mask::Full => true,
        Mask::CausalByRequest(causal) => causal.get(&[b as i64]) == 0.0 || j <= position,
        Mask::Items { starts, positions } => {
            let start = starts.integer(&[b as i64]);
            let of_items = position - start;
            let in_item = (0..positions.extent(1)).contains(&of_items)
                && position - j <= positions.integer(&[b as i64, of_items]);
            j <= position && (j < start || in_item)
        }
        Mask::Bytes(mask) => in_custom_mask(args, request, b, i, j, |at, start| {
            mask.get(&[start.unwrap_or(request.mask_bytes_start) + at]) != 0.0
        }),
        Mask::Bits(mask) => in_custom_mask(args, request, b, i, j, |at, start| {
            let start = start.unwrap_or(request.mask_bits_start);
            (mask.get(&[start + at / 8]) as u8) >> (at % 8) & 1 == 1
        }),
    };
    let left = args
        .window
        .left
        .is_none_or(|left| position - j <= i64::from(left));
    let right = args
        .window
        .right
        .is_none_or(|right| j - position <= i64::from(right));
    let chunk = args.chunks.is_none_or(|chunks| {
        let size = i64::from(chunks.size.get());
        position.div_euclid(size) - j / size <= i64::from(chunks.look_back)
    });
    let window = left && right && chunk;
    let in_range = in_mm_prefix(args.mm_prefix_ranges, b, position, j);
    match args.mm_prefix_in_window {
        true => (base || in_range) && window,
        false => (base && window) || in_range,
    }
}

/// What is added to the logit of row `i` and key `j`: nothing where there is no column.
fn bias(args: &Checked<AttentionArgs>, request: &Request, head: i64, i: i64, j: i64) -> f64 {
    let Some(bias) = args.score_bias else {
        return 0.0;
    };
    let row = match bias.request_rows {
        true => i,
        false => request.q_start + i,
    };
    let column = match bias.new_keys {
        true => j - (request.kv_len - request.qo_len),
        false => j,
    };
    if column < 0 {
        return 0.0;
    }
    let head = head.min(bias.tensor.extent(0) - 1);
    f64::from(bias.tensor.get(&[head, row, column]))
}

/// What a custom mask says of row `i` and key `j`. `element` reads one, given where the request's elements start if that
/// is stated.
fn in_custom_mask(
    args: &Checked<AttentionArgs>,
    request: &Request,
    b: usize,
    i: i64,
    j: i64,
    element: impl Fn(i64, Option<i64>) -> bool,
) -> bool {
    let start = args
        .custom_mask_indptr
        .map(|indptr| indptr.integer(&[b as i64]));
    let prefix = request.kv_len - request.qo_len;
    match args.mask_columns {
        MaskColumns::Keys => element(i * request.kv_len + j, start),
        _ if j < prefix => true,
        MaskColumns::KeysAfterPrefix => element(i * request.kv_len + j, start),
        MaskColumns::NewKeys => element(i * request.qo_len + j - prefix, start),
    }
}

/// A stated start must leave the request's mask within the tensor. One without rows has none.
fn check_custom_mask(args: &Checked<AttentionArgs>, request: &Request, b: usize) -> Result<()> {
    let (Some(starts), Mask::Bytes(mask) | Mask::Bits(mask)) = (args.custom_mask_indptr, args.mask)
    else {
        return Ok(());
    };
    if request.qo_len == 0 {
        return Ok(());
    }
    let start = starts.integer(&[b as i64]);
    let elements = match args.mask_columns {
        MaskColumns::NewKeys => request.qo_len * request.qo_len,
        _ => request.qo_len * request.kv_len,
    };
    let bytes = match args.mask {
        Mask::Bits(_) => (elements + 7) / 8,
        _ => elements,
    };
    if start < 0 || start > mask.extent(0) - bytes {
        return Err(Error::InvalidArgument(format!(
            "custom_mask_indptr: {start} of request {b} is not accepted; 0 to {} is",
            mask.extent(0) - bytes
        )));
    }
    Ok(())
}

fn in_mm_prefix(ranges: Option<Tensor>, b: usize, position: i64, j: i64) -> bool {
    let Some(ranges) = ranges else { return false };
    (0..ranges.extent(1)).any(|r| {
        let start = ranges.get(&[b as i64, r, 0]) as i64;
        let end = ranges.get(&[b as i64, r, 1]) as i64;
        start < end && (start..=end).contains(&position) && (start..=end).contains(&j)
    })
}

/// Factor of a KV head from a tensor of one or `num_kv_heads` scales.
fn head_scale(scales: Option<Tensor>, kv_head: i64) -> f64 {
    scales.map_or(1.0, |scales| {
        let index = if scales.extent(0) == 1 { 0 } else { kv_head };
        f64::from(scales.get(&[index]))
    })
}

/// The same from scales that each request may have of its own.
fn row_scale(scales: Option<Tensor>, b: usize, kv_head: i64) -> f64 {
    match scales {
        Some(scales) if scales.rank() == 2 => f64::from(scales.get(&[b as i64, kv_head])),
        _ => head_scale(scales, kv_head),
    }
}

fn in_base(lse: f64, base: LogBase) -> f32 {
    match base {
        LogBase::E => lse as f32,
        LogBase::Two => (lse * std::f64::consts::LOG2_E) as f32,
    }
}

fn from_base(lse: f32, base: LogBase) -> f64 {
    match base {
        LogBase::E => f64::from(lse),
        LogBase::Two => f64::from(lse) * std::f64::consts::LN_2,
    }
}

impl Attention for ReferenceAttention {
    fn kernel(&self) -> &str {
        "reference/float64"
    }

    fn tiling(&self) -> Tiling {
        Tiling {
            q_tile: u32::MAX,
            q_parts: 1,
            kv_unit: 1,
            unit_bytes: u32::MAX,
            max_splits: 0,
            max_shares: 0,
            tail: TailCosts::NO_TAIL,
            takes_shares: false,
            least_gain: 0,
            rows_of_unit: 0,
            invariant_chunk: u32::MAX,
            combine_units: 0,
            own_key_bytes: 0,
            workers: Workers::ONE,
        }
    }

    fn workspace(&self) -> WorkspaceInfo {
        WorkspaceInfo {
            device_bytes: 0,
            host_bytes: 0,
            alignment: 1,
        }
    }

    fn plan(&mut self, batch: &Batch<'_>, _: &WorkList, _: &Workspace, _: Stream) -> Result<()> {
        let Batch::Host(batch) = batch else {
            return Err(Error::Unsupported(
                "batch: lengths on a device are not supported by the reference context".into(),
            ));
        };
        self.requests = requests(batch, self.desc.kv.page_size())?;
        Ok(())
    }

    fn run(&self, args: &Checked<AttentionArgs>, _: Stream) -> Result<()> {
        for (b, request) in self.requests.iter().enumerate() {
            check_custom_mask(args, request, b)?;
        }
        for (b, request) in self.requests.iter().enumerate() {
            for i in 0..request.qo_len {
                for head in 0..i64::from(self.desc.num_qo_heads) {
                    let (o, lse) = self.attend(args, b, i, head);
                    let row = request.q_start + i;
                    for (d, value) in o.iter().enumerate() {
                        let value =
                            value / (f64::from(args.o_scale) * head_scale(args.o_scales, 0));
                        args.o.set(&[row, head, d as i64], value as f32);
                    }
                    if let Some(out) = args.lse {
                        out.set(&[row, head], in_base(lse, args.lse_base));
                    }
                }
            }
        }
        Ok(())
    }
}

fn requests(batch: &HostBatch<'_>, page_size: u32) -> Result<Vec<Request>> {
    let (mut bytes, mut bits) = (0, 0);
    let mut requests = Vec::new();
    for b in 0..batch.batch_size() {
        let keys = batch.keys(b);
        let mut request = Request {
            q_start: i64::from(batch.qo_indptr[b]),
            qo_len: i64::from(batch.qo_len(b)),
            kv_len: i64::from(batch.kv_len[b]),
            keys: i64::from(keys.start)..i64::from(keys.end),
            mask_bytes_start: bytes,
            mask_bits_start: bits,
            ..Request::default()
        };
        match batch.pages {
            Pages::Ragged { indptr } => request.kv_start = i64::from(indptr[b]),
            Pages::Csr {
                ids: PageIds::Device(_),
                ..
            }
            | Pages::Table {
                ids: PageIds::Device(_),
                ..
            } => {
                return Err(Error::Unsupported(
                    "batch: page ids on a device are not supported by the reference context".into(),
                ));
            }
            _ => request.page_ids = batch.page_ids(b, page_size).unwrap_or_default().to_vec(),
        }
        bytes += request.qo_len * request.kv_len;
        bits += (request.qo_len * request.kv_len + 7) / 8;
        requests.push(request);
    }
    Ok(requests)
}

impl Backend for ReferenceBackend {
    fn device(&self) -> Device {
        Device::Cpu
    }
}

impl AttentionOps for ReferenceBackend {
    fn attention(&self, desc: &AttentionDesc) -> Result<Box<dyn Attention>> {
        Ok(Box::new(ReferenceAttention {
            desc: *desc,
            requests: Vec::new(),
        }))
    }
}

impl CacheOps for ReferenceBackend {
    fn append(&self, args: &Checked<AppendArgs>, _: Stream) -> Result<()> {
        let page_size = args.k_cache.extent(1);
        let Some(slots) = args.slot_mapping.as_integers() else {
            return Err(Error::Internal(
                "slot_mapping passed its checks and is no host integer".into(),
            ));
        };
        for token in 0..slots.len() {
            let (token, slot) = (token as i64, slots.get(token));
            if slot < 0 {
                continue;
            }
            let at = [slot / page_size, slot % page_size];
            let [keys, values] = args.caches();
            stored::store_token(&keys, (&args.key, token), at, args.k_scale);
            stored::store_token(&values, (&args.value, token), at, args.v_scale);
        }
        Ok(())
    }

    fn copy(&self, args: &Checked<CopyArgs>, _: Stream) -> Result<()> {
        copy::copy(args)
    }

    fn gather(&self, args: &Checked<GatherArgs>, _: Stream) -> Result<()> {
        gather::gather(args);
        Ok(())
    }

    fn rope_append(&self, args: &Checked<RopeAppendArgs>, _: Stream) -> Result<()> {
        rope_append::append(args)
    }

    fn mla_append(&self, args: &Checked<MlaAppendArgs<LatentRecords>>, _: Stream) -> Result<()> {
        mla_cache::append(args)
    }

    fn mla_gather(&self, args: &Checked<MlaGatherArgs<LatentRecords>>, _: Stream) -> Result<()> {
        mla_cache::gather(args)
    }

    fn cp_reorder(&self, args: &Checked<CpReorderArgs>, _: Stream) -> Result<()> {
        context_parallel::reorder(args)
    }
}

impl IndexOps for ReferenceBackend {}

impl MergeOps for ReferenceBackend {
    fn cp_correct(&self, args: &Checked<CpCorrectArgs>, _: Stream) -> Result<()> {
        context_parallel::correct(args);
        Ok(())
    }

    fn merge(&self, args: &Checked<MergeArgs>, _: Stream) -> Result<()> {
        merge::merge(args);
        Ok(())
    }

    fn merge_states(&self, args: &Checked<MergeStatesArgs>, _: Stream) -> Result<()> {
        merge::merge_states(args);
        Ok(())
    }

    fn merge_varlen(&self, args: &Checked<MergeVarlenArgs>, _: Stream) -> Result<()> {
        merge::merge_varlen(args);
        Ok(())
    }
}

impl ProjectionOps for ReferenceBackend {
    fn project(&self, args: &Checked<ProjectArgs>, _: Stream) -> Result<()> {
        let [tokens, heads, depth, columns] = args.extents();
        for token in 0..tokens {
            for head in 0..heads {
                // Heads that share their rows have one.
                let row = head.min(args.x.extent(1) - 1);
                for column in 0..columns {
                    let sum: f64 = (0..depth)
                        .map(|k| {
                            let x = f64::from(args.x.get(&[token, row, k]));
                            x * f64::from(args.weight.get(&[head, k, column]))
                        })
                        .sum();
                    args.out.set(&[token, head, column], sum as f32);
                }
            }
        }
        Ok(())
    }

    fn copy_weights(&self, args: &Checked<CopyWeightsArgs>, _: Stream) -> Result<()> {
        let [heads, rows, columns] = [0, 1, 2].map(|dim| args.target.extent(dim));
        for head in 0..heads {
            for row in 0..rows {
                for column in 0..columns {
                    let index = [head, row, column];
                    args.target.set(&index, args.source.get(&index));
                }
            }
        }
        Ok(())
    }
}

impl TreeOps for ReferenceBackend {
    fn tree_mask(&self, args: &Checked<TreeMaskArgs>, _: Stream) -> Result<()> {
        tree::mask(args);
        Ok(())
    }
}
