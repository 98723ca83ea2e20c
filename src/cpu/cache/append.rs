//! Append: writes new tokens to a paged cache. Rows are copied where the types agree, and quantised to fp8
//! otherwise. Formats whose rows are more than elements one after the other are written by [`StoredRows`].
#![allow(unsafe_code)]

use super::rows::Row;
use super::stored::StoredRows;
use crate::cpu::kernels::convert::Quantise;
use crate::cpu::kernels::nontemporal_copy::NontemporalCopy;
use crate::cpu::kernels::table::Kernels;
use crate::cpu::threads::Pool;
use crate::dtype::{self, DType};
use crate::error::{Error, Result};
use crate::problem::{AppendArgs, CacheForm, Checked, RowTensors};
use crate::tensor::{Integers, Tensor};
use std::ops::Range;

/// Bytes per piece of work. One core copies fewer bytes as fast as another thread wakes up.
pub(super) const BYTES_PER_PIECE: usize = 64 << 10;

/// Nontemporal copies: bytes per thread from which on an append uses them, bytes of a piece of work then, and bytes
/// of the shortest such copy. The near caches would not hold so many bytes until attention reads them. Compared with
/// ordinary copies, 8 MiB take 0.66 to 0.74 of the time on an Emerald Rapids, and 0.85 to 0.91 on a Zen 5.
pub(super) const NONTEMPORAL_BYTES: usize = 1 << 20;
pub(super) const NONTEMPORAL_PIECE: usize = 256 << 10;
pub(super) const NONTEMPORAL_COPY: usize = 4 << 10;

/// New rows and the cache they go to.
pub struct Side<'a> {
    from: &'a Tensor,
    to: &'a Tensor,
    scale: f32,
    scales: Option<&'a [f32]>,
    kernels: &'a Kernels,
    is_nontemporal: bool,
    /// Values are divided by a scale and rounded.
    is_scaled: bool,
    /// Rows that are no plain elements.
    stored: Option<StoredRows<'a>>,
}

/// Writes keys and values; negative slots are skipped.
pub fn append(pool: &Pool, kernels: &Kernels, args: &Checked<AppendArgs>) -> Result<()> {
    let Some(slots) = args.slot_mapping.as_integers() else {
        return Err(Error::Internal(
            "slot_mapping passed its checks and is no host integer".into(),
        ));
    };
    let token_bytes = token_bytes(&args.key) + token_bytes(&args.value);
    let is_nontemporal = slots.len() * token_bytes / pool.num_threads() >= NONTEMPORAL_BYTES;
    let sides = sides(args, kernels, is_nontemporal);
    let piece_bytes = if is_nontemporal {
        NONTEMPORAL_PIECE
    } else {
        BYTES_PER_PIECE
    };
    let tokens_per_piece = piece_bytes.div_ceil(token_bytes.max(1));
    let pieces = slots.len().div_ceil(tokens_per_piece);
    pool.turn().for_each(pieces, &|_, piece| {
        let first = piece * tokens_per_piece;
        let tokens = first..slots.len().min(first + tokens_per_piece);
        for side in &sides {
            side.tokens(tokens.clone(), &slots);
        }
    });
    Ok(())
}

/// Keys and values of checked arguments.
pub fn sides<'a>(
    args: &'a AppendArgs,
    kernels: &'a Kernels,
    is_nontemporal: bool,
) -> [Side<'a>; 2] {
    let format = args.format();
    let [keys, values] = args.caches();
    let side = |from, to, cache: RowTensors, scale, scales: &'a Option<Tensor>| Side {
        from,
        to,
        scale,
        scales: match format.has_scales_beside() {
            true => None,
            false => scales.as_ref().and_then(Tensor::as_f32),
        },
        kernels,
        is_nontemporal,
        is_scaled: format.is_scaled(),
        stored: (args.form != CacheForm::Plain).then(|| StoredRows::new(kernels, cache)),
    };
    let (k_scales, v_scales) = (&args.k_scales, &args.v_scales);
    [
        side(&args.key, &args.k_cache, keys, args.k_scale, k_scales),
        side(&args.value, &args.v_cache, values, args.v_scale, v_scales),
    ]
}

fn token_bytes(rows: &Tensor) -> usize {
    (rows.extent(1) * rows.extent(2)) as usize * rows.dtype().size()
}

impl Side<'_> {
    /// Writes tokens as they are; negative slots are skipped.
    pub fn tokens(&self, tokens: Range<usize>, slots: &Integers<'_>) {
        let mut token = tokens.start;
        while token < tokens.end {
            let slot = slots.get(token);
            let count = self.run(token..tokens.end, slots);
            if slot >= 0 {
                self.write(token, slot, count);
            }
            token += count;
        }
    }

    /// How many of the first `tokens` are contiguous on both sides. One long copy is faster than one per token.
    fn run(&self, tokens: Range<usize>, slots: &Integers<'_>) -> usize {
        let size = self.from.extent(1) * self.from.extent(2);
        let rows =
            self.is_copy_of_rows() && self.from.stride(0) == size && self.to.stride(1) == size;
        let first = slots.get(tokens.start);
        if !rows || first < 0 {
            return 1;
        }
        let page_size = self.to.extent(1);
        let in_page = (page_size - first % page_size) as usize;
        let follows = |&i: &usize| slots.get(tokens.start + i) == first + i as i64;
        1 + (1..in_page.min(tokens.len())).take_while(follows).count()
    }

    /// Whether the heads of a token are contiguous on both sides, and of one type.
    fn is_copy_of_rows(&self) -> bool {
        let dim = self.from.extent(2);
        let is_plain = !self.is_scaled && self.stored.is_none();
        is_plain && self.from.stride(1) == dim && self.to.stride(2) == dim
    }

    fn write(&self, token: usize, slot: i64, count: usize) {
        let page_size = self.to.extent(1);
        let (page, slot) = (slot / page_size, slot % page_size);
        if let Some(stored) = &self.stored {
            for head in 0..self.from.extent(1) {
                let from = Row::of(self.from, &[token as i64, head]);
                let divisor = self.divisor(head as usize);
                // SAFETY: as in `copy`.
                unsafe { stored.store([page, slot, head], from, divisor) };
            }
            return;
        }
        let to = page * self.to.stride(0) + slot * self.to.stride(1);
        let from = token as i64 * self.from.stride(0);
        let (heads, dim) = (self.from.extent(1), self.from.extent(2));
        if self.is_copy_of_rows() {
            self.copy(from, to, count as i64 * heads * dim);
            return;
        }
        for head in 0..heads {
            let from = from + head * self.from.stride(1);
            let to = to + head * self.to.stride(2);
            match self.is_scaled {
                true => self.quantise(from, to, head as usize),
                false => self.copy(from, to, dim),
            }
        }
    }

    /// Writes a row of a token that was computed; the length of `values` is a multiple of 16.
    pub fn write_computed(&self, slot: i64, head: i64, values: &[f32]) {
        let page_size = self.to.extent(1);
        let place = [slot / page_size, slot % page_size, head];
        let dim = self.from.extent(2) as usize;
        let from = Row {
            at: values.as_ptr().cast_mut().cast(),
            dtype: DType::F32,
        };
        // SAFETY: as in `copy`; `store` and `quantise` only read `values`.
        unsafe {
            if let Some(stored) = &self.stored {
                return stored.store(place, from, self.divisor(head as usize));
            }
            let to = Row::of(self.to, &place);
            match self.is_scaled {
                true => to.quantise(self.kernels, dim, from, self.divisor(head as usize)),
                false => to.store(self.kernels, dim, values, 1.0),
            }
        }
    }

    /// Copies `count` elements; offsets in elements.
    fn copy(&self, from: i64, to: i64, count: i64) {
        let bytes = count as usize * self.from.dtype().size();
        let (from, to) = (self.source(from), self.target(to));
        // SAFETY: token and slot are within the tensors, which were checked, and source and cache are
        // different memory by the operator's contract.
        unsafe {
            match self.is_nontemporal && bytes >= NONTEMPORAL_COPY {
                true => (self.kernels.nontemporal_copy)(&NontemporalCopy { from, to, bytes }),
                false => std::ptr::copy_nonoverlapping(from, to, bytes),
            }
        }
    }

    fn quantise(&self, from: i64, to: i64, head: usize) {
        let divisor = self.divisor(head);
        let dim = self.from.extent(2) as usize;
        let task = Quantise {
            src: self.source(from),
            divisor,
            dst: self.target(to),
            dim: dim / 8 * 8,
            e5m2: self.to.dtype() == DType::F8E5M2,
        };
        // SAFETY: as in `copy`.
        unsafe {
            self.kernels.quantise[self.from.dtype() as usize](&task);
            for d in task.dim..dim {
                let value = dtype::load(task.src, self.from.dtype(), d as isize);
                dtype::store(task.dst, self.to.dtype(), d as isize, value / divisor);
            }
        }
    }

    /// What a head's values are divided by.
    fn divisor(&self, head: usize) -> f32 {
        match self.scales {
            None => self.scale,
            Some([one]) => self.scale * one,
            Some(all) => self.scale * all[head],
        }
    }

    fn source(&self, offset: i64) -> *const u8 {
        let address = self.from.address() as *const u8;
        address.wrapping_offset(offset as isize * self.from.dtype().size() as isize)
    }

    fn target(&self, offset: i64) -> *mut u8 {
        let address = self.to.address() as *mut u8;
        address.wrapping_offset(offset as isize * self.to.dtype().size() as isize)
    }
}
