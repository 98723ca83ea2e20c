//! Queries and records of MLA that do not lie in memory as whole rows of numbers. They are copied as such into scratch of
//! the thread, an item's queries at once and records tile by tile, and the walks read the copies like other rows.
#![allow(unsafe_code)]

use super::run::{Cache, Grid, Run};
use crate::cpu::kernels::convert::{Stage, Store};
use crate::cpu::kernels::rows::Rows;
use crate::dtype::DType;
use crate::problem::{AttentionArgs, AttentionDesc, CacheFormat, Checked};
use crate::tensor::Tensor;

/// How the queries lie.
pub enum Queries {
    /// Whole rows.
    Whole(Grid),
    /// Latent and rotary parts, apart from each other.
    Parts { latent: Grid, rope: Grid },
}

/// How the keys lie.
pub enum Keys {
    /// Whole rows, which are read where they are.
    Whole,
    /// Latent and rotary parts, apart from each other.
    Parts { latent: Cache, rope: Cache },
    /// `fp8_ds_mla` records.
    DsMla(Cache),
}

/// The type of the rows that the walks read. Latent elements of `fp8_ds_mla` are products of e4m3 numbers and fp32
/// scales: fp16 cannot hold all of them, and bf16 rounds them as FlashMLA does.
pub fn row_dtype(desc: &AttentionDesc) -> DType {
    match desc.kv_format {
        CacheFormat::DS_MLA if desc.q_dtype == DType::BF16 => DType::BF16,
        CacheFormat::DS_MLA => DType::F32,
        plain => plain.element,
    }
}

impl Queries {
    pub fn of(args: &Checked<AttentionArgs>) -> Queries {
        match &args.q_rope {
            Some(rope) if !continues(&args.q, rope) => Queries::Parts {
                latent: Grid::new(&args.q),
                rope: Grid::new(rope),
            },
            _ => Queries::Whole(Grid::new(&args.q)),
        }
    }
}

impl Keys {
    pub fn of(desc: &AttentionDesc, args: &Checked<AttentionArgs>) -> Keys {
        match &args.k_rope {
            _ if desc.kv_format == CacheFormat::DS_MLA => Keys::DsMla(Cache::new(&args.k)),
            Some(rope) if !continues(&args.k, rope) => Keys::Parts {
                latent: Cache::new(&args.k),
                rope: Cache::new(rope),
            },
            _ => Keys::Whole,
        }
    }
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

impl Run<'_> {
    /// Copies a query row in two parts to `to`.
    ///
    /// # Safety
    /// `to` has room for a row.
    pub unsafe fn copy_query(&self, latent: *const u8, rope: *const u8, to: *mut u8) {
        // SAFETY: the parts lie inside q, which was checked; the caller's promise.
        unsafe { self.join(latent, rope, self.q_dtype, to) }
    }

    /// Copies the key at `slot` of page `page` to `to`, as a whole row.
    ///
    /// # Safety
    /// `to` has room for a row.
    pub unsafe fn copy_key(&self, page: i64, slot: i64, to: *mut u8) {
        // SAFETY: the key lies in the cache, whose shape was checked; the caller's promise.
        unsafe {
            match &self.keys {
                Keys::Whole => {}
                Keys::Parts { latent, rope } => {
                    let (latent, rope) = (latent.row(page, slot), rope.row(page, slot));
                    self.join(latent, rope, self.row_dtype, to);
                }
                Keys::DsMla(records) => self.dequantise(records.row(page, slot), to),
            }
        }
    }

    /// # Safety
    /// The parts are readable, and `to` has room for both.
    unsafe fn join(&self, latent: *const u8, rope: *const u8, dtype: DType, to: *mut u8) {
        let shape = self.shape;
        let [head, tail] = [shape.dim_vo, shape.dim_qk - shape.dim_vo].map(|n| n * dtype.size());
        // SAFETY: the caller's promise; scratch is no tensor's memory.
        unsafe {
            to.copy_from_nonoverlapping(latent, head);
            to.add(head).copy_from_nonoverlapping(rope, tail);
        }
    }

    /// A `fp8_ds_mla` record as a row of `row_dtype`.
    ///
    /// # Safety
    /// `record` is readable, and `to` has room for a row.
    unsafe fn dequantise(&self, record: *const u8, to: *mut u8) {
        let mut row = [0f32; LATENT + ROPE];
        let size = self.row_dtype.size();
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
            dst: to.wrapping_add(at * size),
            dim,
        };
        let (stages, stores) = (
            &self.kernels.stage,
            self.kernels.store[self.row_dtype as usize],
        );
        let row = row.as_mut_ptr();
        // SAFETY: the parts lie within the record and `row`; the caller's promise.
        unsafe {
            stages[DType::F8E4M3 as usize](&stage(0, LATENT, row));
            stages[DType::BF16 as usize](&stage(ROPE_AT, ROPE, row.add(LATENT)));
            for block in 0..LATENT / BLOCK {
                let scale = record.add(SCALES_AT + block * size_of::<f32>());
                let scale = scale.cast::<f32>().read_unaligned();
                let at = block * BLOCK;
                stores(&store(row.add(at), scale, at, BLOCK));
            }
            stores(&store(row.add(LATENT), 1.0, LATENT, ROPE));
        }
    }
}
