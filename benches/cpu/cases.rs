//! The workloads: a Llama-3-8B-shaped layer, 32 query heads and 8 KV heads of 128, and decode of a DeepSeek-V3 layer by
//! absorbed MLA.

use crate::data::{Array, permutation};
use crate::{Limit, Options, timed};
use folio::api::{Attention, BatchInput, Context, Stream, Target, Workspace};
use folio::dtype::DType;
use folio::log::Logger;
use folio::problem::{
    AppendArgs, AttentionArgs, AttentionDesc, CacheForm, Kind, KvLayout, KvStorage,
};
use std::time::Duration;

pub const QO_HEADS: u32 = 32;
pub const KV_HEADS: u32 = 8;
pub const HEAD_DIM: u32 = 128;

/// Elements of the latent and of the rotary part of a record, and of both; tokens per page of records.
const RANK: u32 = 512;
const ROPE: u32 = 64;
const RECORD: u32 = RANK + ROPE;
const RECORDS_PER_PAGE: u32 = 64;

/// Bytes of caches that cold cases use in turn: beyond any last-level cache.
const COLD_BYTES: usize = 768 << 20;

/// One workload.
#[derive(Debug, Clone)]
pub enum Case {
    Attention(Shape),
    /// Decode of equal requests over cold latent records of 512 + 64, in pages of 64.
    Mla {
        dtype: DType,
        heads: u32,
        batch: u32,
        kv_len: u32,
    },
    Append {
        dtype: DType,
        tokens: u32,
    },
    Plan {
        requests: u32,
        pages: u32,
    },
}

/// A batch of equal requests.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub dtype: DType,
    pub batch: u32,
    pub qo_len: u32,
    pub kv_len: u32,
    pub page_size: u32,
    /// The same cache every call; otherwise copies in turn.
    pub warm: bool,
    /// What the project wants, as a share of the limit (microseconds for warm cases).
    pub floor: f64,
}

/// A case with its memory, ready to be timed.
pub struct Prepared {
    call: Box<dyn FnMut()>,
    calls: usize,
}

impl Prepared {
    /// Time of one call: the mean of a few where one is short.
    pub fn round(&mut self) -> Duration {
        let calls = self.calls as u32;
        timed(|| (0..calls).for_each(|_| (self.call)())) / calls
    }
}

/// The table, in order.
pub fn all(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    let decode = |dtype, batch, kv_len, page_size, warm, floor| {
        Case::Attention(Shape {
            dtype,
            batch,
            qo_len: 1,
            kv_len,
            page_size,
            warm,
            floor,
        })
    };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let lengths: &[(u32, u32)] = match options.quick {
            true => &[(8, 2048)],
            false => &[(8, 2048), (32, 2048), (8, 8192)],
        };
        for &(batch, kv_len) in lengths {
            cases.push(decode(dtype, batch, kv_len, 16, false, 0.60));
            cases.push(decode(dtype, batch, kv_len, 128, false, 0.75));
        }
    }
    cases.push(decode(DType::BF16, 1, 512, 16, true, 40.0));
    for (dtype, floor) in [(DType::BF16, 0.25), (DType::F32, 0.75), (DType::F16, 0.75)] {
        for (qo_len, kv_len) in [(2048, 2048), (256, 4096)] {
            cases.push(Case::Attention(Shape {
                dtype,
                batch: 1,
                qo_len,
                kv_len,
                page_size: 16,
                warm: false,
                floor,
            }));
        }
    }
    for heads in [16, 4] {
        cases.push(Case::Mla {
            dtype: DType::BF16,
            heads,
            batch: 8,
            kv_len: 4096,
        });
    }
    for dtype in [DType::BF16, DType::F32] {
        cases.push(Case::Append {
            dtype,
            tokens: 2048,
        });
    }
    cases.push(Case::Plan {
        requests: 1024,
        pages: 128,
    });
    let only = options.only.clone().unwrap_or_default();
    cases.retain(|case| case.name().contains(&only));
    cases
}

impl Case {
    pub fn name(&self) -> String {
        match self {
            Case::Attention(s) => format!(
                "{} b{} q{} kv{} page {} {} {}",
                if s.qo_len == 1 { "decode" } else { "prefill" },
                s.batch,
                s.qo_len,
                s.kv_len,
                s.page_size,
                s.dtype,
                if s.warm { "warm" } else { "cold" }
            ),
            Case::Mla {
                dtype,
                heads,
                batch,
                kv_len,
            } => format!("mla decode h{heads} b{batch} kv{kv_len} {dtype} cold"),
            Case::Append { dtype, tokens } => format!("append {tokens} tokens {dtype}"),
            Case::Plan { requests, pages } => format!("plan {requests} requests × {pages} pages"),
        }
    }

    pub fn limit(&self) -> Limit {
        match self {
            Case::Attention(s) if s.warm => Limit::Time,
            Case::Attention(s) if s.qo_len == 1 => Limit::Read,
            Case::Attention(s) if s.dtype == DType::BF16 => Limit::Matrix,
            Case::Attention(_) => Limit::Fma,
            Case::Mla { .. } => Limit::Read,
            Case::Append { .. } => Limit::Copy,
            Case::Plan { .. } => Limit::Time,
        }
    }

    pub fn floor(&self) -> f64 {
        match self {
            Case::Attention(s) => s.floor,
            Case::Mla { .. } => 0.6,
            Case::Append { .. } => 0.9,
            Case::Plan { .. } => 100.0,
        }
    }

    /// Bytes of keys and values, each counted once. MLA's values are part of its keys.
    pub fn bytes(&self) -> f64 {
        match self {
            Case::Mla {
                dtype,
                batch,
                kv_len,
                ..
            } => f64::from(*batch) * f64::from(*kv_len) * (RECORD as usize * dtype.size()) as f64,
            Case::Attention(s) => f64::from(s.batch) * f64::from(s.kv_len) * token_bytes(s.dtype),
            Case::Append { dtype, tokens } => f64::from(*tokens) * token_bytes(*dtype),
            Case::Plan { .. } => 0.0,
        }
    }

    /// Multiplications and additions of the pairs that a causal mask shows.
    pub fn operations(&self) -> f64 {
        let Case::Attention(s) = self else { return 0.0 };
        let (q, kv) = (f64::from(s.qo_len), f64::from(s.kv_len));
        let pairs = q * (kv - q) + q * (q + 1.0) / 2.0;
        4.0 * f64::from(s.batch) * pairs * f64::from(QO_HEADS * HEAD_DIM)
    }

    pub fn prepare(&self, threads: usize) -> Prepared {
        let target = Target::Cpu {
            num_threads: threads as u32,
        };
        let context = Context::new(target, Logger::silent()).expect("a CPU context");
        match self {
            Case::Attention(shape) => attention(&context, shape),
            Case::Mla {
                dtype,
                heads,
                batch,
                kv_len,
            } => mla(&context, *dtype, *heads, *batch, *kv_len),
            Case::Append { dtype, tokens } => append(&context, *dtype, *tokens),
            Case::Plan { requests, pages } => plan(&context, *requests, *pages),
        }
    }
}

fn token_bytes(dtype: DType) -> f64 {
    2.0 * f64::from(KV_HEADS * HEAD_DIM) * dtype.size() as f64
}

fn desc(shape: &Shape) -> AttentionDesc {
    AttentionDesc {
        kind: if shape.qo_len == 1 {
            Kind::Decode
        } else {
            Kind::Prefill
        },
        q_dtype: shape.dtype,
        kv_format: shape.dtype.into(),
        o_dtype: shape.dtype,
        num_qo_heads: QO_HEADS,
        num_kv_heads: KV_HEADS,
        head_dim_qk: HEAD_DIM,
        head_dim_vo: HEAD_DIM,
        kv: KvStorage::Paged {
            page_size: shape.page_size,
            layout: KvLayout::Nhd,
        },
        max_batch_size: shape.batch,
        max_qo_len: shape.qo_len,
        max_num_tokens: shape.batch * shape.qo_len,
        max_kv_len: shape.kv_len,
        max_num_pages: 0,
        graph: false,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

/// A handle that was planned, with the workspace it was planned into.
struct Planned {
    handle: Attention,
    _workspace: Vec<[u64; 8]>,
}

fn planned(context: &Context, shape: &Shape, pages: &[i32]) -> Planned {
    planned_as(context, desc(shape), shape, pages)
}

fn planned_as(context: &Context, desc: AttentionDesc, shape: &Shape, pages: &[i32]) -> Planned {
    let mut handle = Attention::new(context, desc).expect("a supported problem");
    let mut memory = workspace(&handle);
    let per_request = shape.kv_len.div_ceil(shape.page_size) as i32;
    let batch = shape.batch as i32;
    let column = |f: &dyn Fn(i32) -> i32, n: i32| Array::i32(&(0..n).map(f).collect::<Vec<_>>());
    let qo_indptr = column(&|b| b * shape.qo_len as i32, batch + 1);
    let kv_indptr = column(&|b| b * per_request, batch + 1);
    let kv_len = column(&|_| shape.kv_len as i32, batch);
    let ids = Array::i32(pages);
    let input = BatchInput {
        qo_indptr: Some(qo_indptr.tensor()),
        kv_indptr: Some(kv_indptr.tensor()),
        kv_indices: Some(ids.tensor()),
        kv_len: Some(kv_len.tensor()),
        ..BatchInput::default()
    };
    let (place, bytes) = place(&mut memory);
    let outcome = handle.plan(&input, &place, bytes, Stream::default());
    outcome.expect("a legal batch");
    Planned {
        handle,
        _workspace: memory,
    }
}

fn workspace(handle: &Attention) -> Vec<[u64; 8]> {
    vec![[0; 8]; handle.workspace().host_bytes.div_ceil(64) + 1]
}

fn place(memory: &mut [[u64; 8]]) -> (Workspace, (usize, usize)) {
    let start = (memory.as_mut_ptr() as usize).next_multiple_of(64);
    let host_bytes = size_of_val(memory) - 64;
    (
        Workspace {
            device: 0,
            host: start,
        },
        (0, host_bytes),
    )
}

fn attention(context: &Context, shape: &Shape) -> Prepared {
    let cache_bytes = Case::Attention(*shape).bytes() as usize;
    let copies = if shape.warm {
        1
    } else {
        COLD_BYTES.div_ceil(cache_bytes)
    };
    let pages = (shape.batch * shape.kv_len.div_ceil(shape.page_size)) as usize;
    let dims = [
        pages * copies,
        shape.page_size as usize,
        KV_HEADS as usize,
        HEAD_DIM as usize,
    ];
    let dims = dims.map(|extent| extent as i64);
    let (k, v) = (
        Array::random(shape.dtype, &dims),
        Array::random(shape.dtype, &dims),
    );
    let ids = permutation(pages * copies);
    let plans: Vec<Planned> = ids
        .chunks(pages)
        .map(|ids| planned(context, shape, ids))
        .collect();
    let tokens = i64::from(shape.batch * shape.qo_len);
    let rows = [tokens, i64::from(QO_HEADS), i64::from(HEAD_DIM)];
    let (q, o) = (
        Array::random(shape.dtype, &rows),
        Array::zeros(shape.dtype, &rows),
    );
    let mut turn = 0;
    let call = move || {
        let input = AttentionArgs::new(q.tensor(), k.tensor(), v.tensor(), o.tensor());
        let outcome = plans[turn].handle.run(&input, Stream::default());
        outcome.expect("legal arguments");
        turn = (turn + 1) % plans.len();
    };
    Prepared {
        call: Box::new(call),
        calls: if shape.warm { 200 } else { 1 },
    }
}

fn mla(context: &Context, dtype: DType, heads: u32, batch: u32, kv_len: u32) -> Prepared {
    let shape = Shape {
        dtype,
        batch,
        qo_len: 1,
        kv_len,
        page_size: RECORDS_PER_PAGE,
        warm: false,
        floor: 0.0,
    };
    let desc = AttentionDesc {
        kind: Kind::Mla,
        num_qo_heads: heads,
        num_kv_heads: 1,
        head_dim_qk: RECORD,
        head_dim_vo: RANK,
        ..desc(&shape)
    };
    let pages = (batch * kv_len.div_ceil(RECORDS_PER_PAGE)) as usize;
    let page_bytes = (RECORDS_PER_PAGE * RECORD) as usize * dtype.size();
    let all = pages * COLD_BYTES.div_ceil(pages * page_bytes);
    let dims = [all as i64, RECORDS_PER_PAGE.into(), RECORD.into()];
    let kv = Array::random(dtype, &dims);
    let ids = permutation(all);
    let plans: Vec<Planned> = ids
        .chunks(pages)
        .map(|ids| planned_as(context, desc, &shape, ids))
        .collect();
    let rows = |dim: u32| [i64::from(batch), i64::from(heads), i64::from(dim)];
    let (q, o) = (
        Array::random(dtype, &rows(RECORD)),
        Array::zeros(dtype, &rows(RANK)),
    );
    let mut turn = 0;
    let call = move || {
        let part = |range: std::ops::Range<i64>| {
            q.tensor().narrow(2, range.start, range.end - range.start)
        };
        let (latent, rope) = (part(0..RANK.into()), part(RANK.into()..RECORD.into()));
        let args = AttentionArgs {
            sm_scale: 192f32.powf(-0.5),
            ..AttentionArgs::mla(latent, Some(rope), kv.tensor(), None, o.tensor())
        };
        let outcome = plans[turn].handle.run(&args, Stream::default());
        outcome.expect("legal arguments");
        turn = (turn + 1) % plans.len();
    };
    Prepared {
        call: Box::new(call),
        calls: 1,
    }
}

fn append(context: &Context, dtype: DType, tokens: u32) -> Prepared {
    let bytes = Case::Append { dtype, tokens }.bytes() as usize;
    let copies = COLD_BYTES.div_ceil(2 * bytes) as i64;
    let rows = [copies, tokens.into(), KV_HEADS.into(), HEAD_DIM.into()];
    let (key, value) = (Array::random(dtype, &rows), Array::random(dtype, &rows));
    let pages = copies * i64::from(tokens) / 16;
    let dims = [pages, 16, KV_HEADS.into(), HEAD_DIM.into()];
    let (k_cache, v_cache) = (Array::random(dtype, &dims), Array::random(dtype, &dims));
    let slots: Vec<i32> = permutation(pages as usize)
        .iter()
        .flat_map(|page| (0..16).map(move |slot| page * 16 + slot))
        .collect();
    let slots: Vec<Array> = slots.chunks(tokens as usize).map(Array::i32).collect();
    let context = context.clone();
    let mut turn = 0;
    let call = move || {
        let source = |array: &Array| {
            let all = array.tensor();
            let offset = turn * all.stride(0) as usize * dtype.size();
            let data = (all.address() + offset) as *mut u8;
            // SAFETY: copy `turn` of the array.
            let own = unsafe {
                folio::tensor::Tensor::new(
                    "new",
                    data,
                    all.device(),
                    dtype,
                    &all.shape()[1..],
                    None,
                )
            };
            own.expect("part of a plain tensor")
        };
        let input = AppendArgs {
            key: source(&key),
            value: source(&value),
            k_cache: k_cache.tensor(),
            v_cache: v_cache.tensor(),
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: slots[turn].tensor(),
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: None,
            v_scales: None,
        };
        let outcome = folio::api::append(&context, &input, Stream::default());
        outcome.expect("legal arguments");
        turn = (turn + 1) % slots.len();
    };
    Prepared {
        call: Box::new(call),
        calls: 1,
    }
}

fn plan(context: &Context, requests: u32, pages: u32) -> Prepared {
    let shape = Shape {
        dtype: DType::BF16,
        batch: requests,
        qo_len: 1,
        kv_len: pages * 16,
        page_size: 16,
        warm: true,
        floor: 0.0,
    };
    let mut handle = Attention::new(context, desc(&shape)).expect("a supported problem");
    let mut memory = workspace(&handle);
    let column = |values: Vec<i32>| Array::i32(&values);
    let count = requests as i32;
    let kv_indptr = column((0..=count).map(|b| b * pages as i32).collect());
    let kv_len = column((0..count).map(|b| shape.kv_len as i32 - b % 16).collect());
    let ids = column(permutation((requests * pages) as usize));
    let call = move || {
        let input = BatchInput {
            kv_indptr: Some(kv_indptr.tensor()),
            kv_indices: Some(ids.tensor()),
            kv_len: Some(kv_len.tensor()),
            ..BatchInput::default()
        };
        let (place, bytes) = place(&mut memory);
        let outcome = handle.plan(&input, &place, bytes, Stream::default());
        outcome.expect("a legal batch");
    };
    Prepared {
        call: Box::new(call),
        calls: 20,
    }
}
