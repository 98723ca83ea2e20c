//! Queries and records of MLA, and rows of caches in other formats, that do not lie in memory as whole rows of numbers. They
//! are copied as such into scratch of the thread, an item's queries at once and the others tile by tile, and the walks read
//! the copies like other rows.
#![allow(unsafe_code)]

use super::addresses::{Cache, Grid};
use crate::cpu::cache::rows::Row;
use crate::cpu::cache::stored::StoredRows;
use crate::cpu::kernels::convert::{Stage, Store};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::table::Kernels;
use crate::dtype::DType;
use crate::problem::{AttentionArgs, AttentionDesc, CacheForm, CacheFormat, Checked, Kind};
use crate::tensor::Tensor;

/// How the queries lie.
pub enum Queries {
    /// Whole rows.
    Whole(Grid),
    /// Latent and rotary rows, apart from each other.
    Parts {
        latent: Grid,
        rope: Grid,
        bytes: PartBytes,
    },
}

/// How the keys lie.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one for each run, which allocates nothing"
)]
pub enum Records<'a> {
    /// Whole rows, which are read where they are. So are the keys of decode and prefill, in two parts or not.
    Whole,
    /// Latent and rotary rows, apart from each other.
    Parts {
        latent: Cache,
        rope: Cache,
        bytes: PartBytes,
    },
    /// `fp8_ds_mla` records, which become rows of `dtype`.
    DsMla { records: Cache, dtype: DType },
    /// Keys and values in a format of their own, which become rows of `dtype`.
    Stored {
        keys: StoredRows<'a>,
        values: StoredRows<'a>,
        dtype: DType,
    },
}

/// Bytes of a latent and of a rotary row.
#[derive(Clone, Copy)]
pub struct PartBytes {
    latent: usize,
    rope: usize,
}

/// The type of the rows that the walks read. Latent elements of `fp8_ds_mla` are products of e4m3 numbers and fp32
/// scales: fp16 cannot hold all of them, and bf16 rounds them as FlashMLA does. Products of an integer or e4m3 and an fp32
/// scale are rounded to fp32, by 2^-24 of them at most. Those of an e2m1 and an e4m3 number have 6 bits and lie within 2^-10
/// and 2688, so fp16 and bf16 hold them.
pub fn row_dtype(desc: &AttentionDesc) -> DType {
    match (desc.kv_format, desc.kv_format.form()) {
        (CacheFormat::DS_MLA, _) if desc.q_dtype == DType::BF16 => DType::BF16,
        (CacheFormat::DS_MLA, _) => DType::F32,
        (format, CacheForm::Plain | CacheForm::PackedKeys) => format.element,
        (_, CacheForm::Nvfp4) => desc.q_dtype,
        (
            _,
            CacheForm::TokenHeadScales | CacheForm::ChannelScales | CacheForm::ChannelZeroPoints,
        ) => DType::F32,
    }
}

/// Whether keys and values of a problem are copied tile by tile, for each head.
pub fn copies_heads(desc: &AttentionDesc) -> bool {
    desc.kv_format.form() != CacheForm::Plain
}

impl PartBytes {
    fn of(desc: &AttentionDesc, dtype: DType) -> PartBytes {
        PartBytes {
            latent: desc.head_dim_vo as usize * dtype.size(),
            rope: desc.rope_dim() as usize * dtype.size(),
        }
    }

    /// Copies both parts to `to`, one behind the other.
    ///
    /// # Safety
    /// The parts are readable, and `to` is scratch with room for both.
    unsafe fn join(self, latent: *const u8, rope: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise; scratch is no tensor's memory.
        unsafe {
            to.copy_from_nonoverlapping(latent, self.latent);
            to.add(self.latent)
                .copy_from_nonoverlapping(rope, self.rope);
        }
    }
}

impl Queries {
    pub fn of(desc: &AttentionDesc, args: &Checked<AttentionArgs>) -> Queries {
        match &args.q_rope {
            Some(rope) if !continues(&args.q, rope) => Queries::Parts {
                latent: Grid::new(&args.q),
                rope: Grid::new(rope),
                bytes: PartBytes::of(desc, desc.q_dtype),
            },
            _ => Queries::Whole(Grid::new(&args.q)),
        }
    }

    /// Copies a row in two parts to `to`.
    ///
    /// # Safety
    /// The row is one of q's, and `to` is scratch with room for it.
    pub unsafe fn copy(&self, token: i64, head: usize, to: *mut u8) {
        if let Queries::Parts {
            latent,
            rope,
            bytes,
        } = self
        {
            // SAFETY: the caller's promise; both tensors were checked to have the row.
            unsafe { bytes.join(latent.at(token, head), rope.at(token, head), to) }
        }
    }
}

impl<'a> Records<'a> {
    pub fn of(
        desc: &AttentionDesc,
        args: &Checked<AttentionArgs>,
        kernels: &'a Kernels,
    ) -> Records<'a> {
        let dtype = row_dtype(desc);
        match &args.k_rope {
            _ if copies_heads(desc) => {
                let caches = args.caches(desc.kv_format);
                let [keys, values] = caches.map(|cache| StoredRows::new(kernels, cache));
                Records::Stored {
                    keys,
                    values,
                    dtype,
                }
            }
            _ if desc.kv_format == CacheFormat::DS_MLA => Records::DsMla {
                records: Cache::new(&args.k),
                dtype,
            },
            Some(rope) if desc.kind == Kind::Mla && !continues(&args.k, rope) => Records::Parts {
                latent: Cache::new(&args.k),
                rope: Cache::new(rope),
                bytes: PartBytes::of(desc, dtype),
            },
            _ => Records::Whole,
        }
    }

    /// Copies the key at `slot` of page `page`, as a whole row, to `to`.
    ///
    /// # Safety
    /// The key lies in the cache, and `to` is scratch with room for a row.
    pub unsafe fn copy(&self, page: i64, slot: i64, kernels: &Kernels, to: *mut u8) {
        // SAFETY: the caller's promise; the tensors were checked to have the key.
        unsafe {
            match self {
                Records::Whole | Records::Stored { .. } => {}
                Records::Parts {
                    latent,
                    rope,
                    bytes,
                } => bytes.join(latent.row(page, slot), rope.row(page, slot), to),
                Records::DsMla { records, dtype } => {
                    dequantise(records.row(page, slot), *dtype, kernels, to);
                }
            }
        }
    }
}

/// A stored row as one of numbers.
///
/// # Safety
/// The row lies in the cache, and `to` is scratch with room for it.
pub unsafe fn copy_row(rows: &StoredRows<'_>, at: [i64; 3], dtype: DType, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { rows.load(at, Row { at: to, dtype }, 1.0) }
}

/// Whether each row of `tail` lies behind its row of `head`, so that both are one row.
fn continues(head: &Tensor, tail: &Tensor) -> bool {
    let last = head.rank() - 1;
    let end = head.address() + head.extent(last) as usize * head.dtype().size();
    let side_by_side = |dim: usize| {
        let is_used = head.extent(dim).min(tail.extent(dim)) > 1;
        !is_used || head.stride(dim) == tail.stride(dim)
    };
    tail.address() == end && (0..last).all(side_by_side)
}

/// Elements of the latent and the rotary part of a `fp8_ds_mla` record, and of a block that shares a scale. The parts
/// follow one another: e4m3, fp32 scales, bf16.
const LATENT: usize = 512;
const BLOCK: usize = 128;
const ROPE: usize = 64;
const SCALES_AT: usize = LATENT;
const ROPE_AT: usize = SCALES_AT + LATENT / BLOCK * size_of::<f32>();

/// A `fp8_ds_mla` record as a row of `dtype`.
///
/// # Safety
/// `record` is readable, and `to` has room for a row.
unsafe fn dequantise(record: *const u8, dtype: DType, kernels: &Kernels, to: *mut u8) {
    let mut row = [0f32; LATENT + ROPE];
    let stage = |at: usize, dim: usize, dst: *mut f32| Stage {
        rows: Rows {
            base: record.wrapping_add(at),
            offsets: &0,
            count: 1,
        },
        dim,
        dst,
        width: dim,
        strip: 0,
    };
    let store = |src: *const f32, factor: f32, at: usize, dim: usize| Store {
        src,
        factor,
        dst: to.wrapping_add(at * dtype.size()),
        dim,
    };
    let (stages, stores) = (&kernels.stage, kernels.store[dtype as usize]);
    let row = row.as_mut_ptr();
    // SAFETY: the parts lie within the record and `row`; the caller's promise.
    unsafe {
        stages[DType::F8E4M3 as usize](&stage(0, LATENT, row));
        stages[DType::BF16 as usize](&stage(ROPE_AT, ROPE, row.add(LATENT)));
        for at in (0..LATENT).step_by(BLOCK) {
            let scale = record.add(SCALES_AT + at / BLOCK * size_of::<f32>());
            let scale = scale.cast::<f32>().read_unaligned();
            stores(&store(row.add(at), scale, at, BLOCK));
        }
        stores(&store(row.add(LATENT), 1.0, LATENT, ROPE));
    }
}
