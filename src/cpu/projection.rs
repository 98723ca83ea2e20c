//! Products per head: the projections of MLA. Blocks of both operands are staged as fp32 in a thread's scratch, where
//! the crate `gemm` multiplies them; sums are rounded to the output's type once.
//!
//! A piece of work is one head's block of columns over many tokens, so that a block of the weight is staged once. The
//! blocks are laid out so that `gemm` packs nothing, for which it would allocate; a few bytes per product of two blocks
//! it allocates in any case.
#![allow(unsafe_code)]

use super::kernels::convert::{Stage, Store};
use super::kernels::rows::Rows;
use super::kernels::table::Kernels;
use super::kernels::transpose::{BLOCK, Transpose};
use super::threads::Pool;
use crate::dtype::{self, DType};
use crate::problem::{Checked, CopyWeightsArgs, ProjectArgs};
use crate::tensor::Tensor;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Columns of a piece: with `DEPTH` rows 256 KiB of fp32, which stay in L2 for all tokens of the piece.
const COLUMNS: usize = 128;
/// Rows of the weight that are staged at a time.
const DEPTH: usize = 512;
/// Tokens that are multiplied at a time.
const TOKENS: usize = 64;
/// Tokens that are multiplied at least, the rest with sums that nobody reads: `gemm` takes 1.5 times as long for one
/// column as for four.
const FEWEST_TOKENS: usize = 4;
/// Tokens of a piece: staging a weight costs as much as eight of them.
const PIECE_TOKENS: usize = 512;
/// What `Stage` pads rows to.
const PADDED: usize = 16;

/// The operator with what its threads work in.
#[derive(Debug)]
pub struct Projection {
    /// One per thread of the pool, made at its first piece.
    scratch: Vec<Mutex<Option<Scratch>>>,
}

/// A thread's blocks.
#[derive(Debug)]
struct Scratch {
    /// `[DEPTH][COLUMNS]`.
    weight: Vec<f32>,
    /// `[TOKENS][DEPTH]`.
    x: Vec<f32>,
    /// `[TOKENS][COLUMNS]`.
    out: Vec<f32>,
    /// Rows of the weight on their way to columns: `[BLOCK][DEPTH]`.
    rows: Vec<f32>,
    offsets: [i64; DEPTH],
}

impl Scratch {
    fn new() -> Scratch {
        let floats = |count| vec![0.0; count];
        Scratch {
            weight: floats(DEPTH * COLUMNS),
            x: floats(TOKENS * DEPTH),
            out: floats(TOKENS * COLUMNS),
            rows: floats(BLOCK * DEPTH),
            offsets: [0; DEPTH],
        }
    }
}

/// A matrix in memory, any strides, in elements.
#[derive(Clone, Copy)]
struct Matrix {
    data: *const u8,
    dtype: DType,
    strides: [i64; 2],
}

impl Matrix {
    /// Rows and columns of a tensor are dimensions `rows` and 2; the other one is at `index`.
    fn of(tensor: &Tensor, rows: usize, index: i64) -> Matrix {
        let other = 1 - rows;
        Matrix {
            data: tensor.address() as *const u8,
            dtype: tensor.dtype(),
            strides: [tensor.stride(rows), tensor.stride(2)],
        }
        .at(index, tensor.stride(other))
    }

    fn at(mut self, index: i64, stride: i64) -> Matrix {
        let bytes = index * stride * self.dtype.size() as i64;
        self.data = self.data.wrapping_offset(bytes as isize);
        self
    }

    fn from(self, row: usize, column: usize) -> Matrix {
        self.at(row as i64, self.strides[0])
            .at(column as i64, self.strides[1])
    }

    fn transposed(self) -> Matrix {
        let [rows, columns] = self.strides;
        Matrix {
            strides: [columns, rows],
            ..self
        }
    }
}

impl Projection {
    /// For so many threads. Allocates no blocks yet.
    pub fn new(num_threads: usize) -> Projection {
        Projection {
            scratch: (0..num_threads).map(|_| Mutex::default()).collect(),
        }
    }

    /// Computes a product per head.
    pub fn project(&self, pool: &Pool, kernels: &Kernels, args: &Checked<ProjectArgs>) {
        if args.is_empty() {
            return;
        }
        let [tokens, heads, depth, columns] = args.extents().map(|extent| extent as usize);
        let token_blocks = tokens.div_ceil(PIECE_TOKENS);
        let column_blocks = columns.div_ceil(COLUMNS);
        pool.turn()
            .for_each(heads * column_blocks * token_blocks, &|thread, piece| {
                let (block, tokens_at) = (piece / token_blocks, piece % token_blocks);
                let (head, columns_at) = (block / column_blocks, block % column_blocks);
                let piece = Piece {
                    kernels,
                    args,
                    head: head as i64,
                    tokens: part(tokens_at, PIECE_TOKENS, tokens),
                    columns: part(columns_at, COLUMNS, columns),
                    depth,
                };
                // A thread's scratch is its own; the lock says so to the compiler.
                let mut scratch = self.scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                piece.compute(scratch.get_or_insert_with(Scratch::new));
            });
    }
}

/// Part `index` of `0..end`.
fn part(index: usize, size: usize, end: usize) -> Range<usize> {
    index * size..end.min((index + 1) * size)
}

/// Copies weights.
pub fn copy_weights(pool: &Pool, args: &Checked<CopyWeightsArgs>) {
    let [heads, rows, columns] = [0, 1, 2].map(|dim| args.target.extent(dim) as usize);
    pool.turn().for_each(heads * rows, &|_, piece| {
        let (head, row) = (piece / rows, piece % rows);
        let row_of = |tensor| Matrix::of(tensor, 1, head as i64).from(row, 0);
        let (source, target) = (row_of(&args.source), row_of(&args.target));
        for column in 0..columns {
            let [from, to] = [source, target].map(|row| row.from(0, column).data);
            // SAFETY: the elements lie within tensors that were checked, the target's are its own.
            unsafe {
                let value = dtype::load(from, source.dtype, 0);
                dtype::store(to.cast_mut(), target.dtype, 0, value);
            }
        }
    });
}

/// Columns of one head over some tokens.
struct Piece<'a> {
    kernels: &'a Kernels,
    args: &'a ProjectArgs,
    head: i64,
    tokens: Range<usize>,
    columns: Range<usize>,
    depth: usize,
}

impl Piece<'_> {
    fn compute(&self, scratch: &mut Scratch) {
        let weight = Matrix::of(&self.args.weight, 1, self.head).from(0, self.columns.start);
        // Heads that share their rows have one.
        let x = Matrix::of(&self.args.x, 0, self.head.min(self.args.x.extent(1) - 1));
        let one_step = self.depth <= DEPTH;
        if one_step {
            self.stage_weight(scratch, weight, self.depth);
        }
        for first in self.tokens.clone().step_by(TOKENS) {
            let tokens = TOKENS.min(self.tokens.end - first);
            for from in (0..self.depth).step_by(DEPTH) {
                let depth = DEPTH.min(self.depth - from);
                if !one_step {
                    self.stage_weight(scratch, weight.from(from, 0), depth);
                }
                stage(
                    self.kernels,
                    x.from(first, from),
                    [tokens, depth],
                    (scratch.x.as_mut_ptr(), DEPTH),
                    &mut scratch.offsets,
                );
                self.multiply(scratch, tokens, depth, from > 0);
            }
            self.store(scratch, first, tokens);
        }
    }

    /// Fills `scratch.weight`: `[depth][COLUMNS]`.
    fn stage_weight(&self, scratch: &mut Scratch, weight: Matrix, depth: usize) {
        let columns = self.columns.len();
        let target = scratch.weight.as_mut_ptr();
        let offsets = &mut scratch.offsets;
        if weight.strides[0] != 1 || weight.strides[1] == 1 {
            stage(
                self.kernels,
                weight,
                [depth, columns],
                (target, COLUMNS),
                offsets,
            );
            return;
        }
        for first in (0..columns).step_by(BLOCK) {
            let rows = BLOCK.min(columns - first);
            let staged = scratch.rows.as_mut_ptr();
            let part = weight.from(0, first).transposed();
            stage(self.kernels, part, [rows, depth], (staged, DEPTH), offsets);
            let transpose = Transpose {
                rows: rows_of(staged.cast(), DEPTH * size_of::<f32>(), rows, offsets),
                // SAFETY: below COLUMNS, as `first` is.
                dst: unsafe { target.add(first) },
                ld: COLUMNS,
                columns: depth.next_multiple_of(PADDED),
            };
            // SAFETY: the rows were staged up to the multiple, which DEPTH is not below; the target has as many rows
            // of COLUMNS, and `BLOCK` columns from `first` on, as it divides COLUMNS.
            unsafe { (self.kernels.transpose)(&transpose) }
        }
    }

    /// `out = x · weight`, or adds it. To `gemm` this is `outᵀ = weightᵀ · xᵀ`, whose operands and result are
    /// column-major, with a whole number of vectors per column: then it packs nothing.
    fn multiply(&self, scratch: &mut Scratch, tokens: usize, depth: usize, add: bool) {
        let columns = self.columns.len().next_multiple_of(PADDED);
        // SAFETY: the blocks hold these extents: `tokens` up to TOKENS, `depth` up to DEPTH, `columns` up to COLUMNS,
        // which PADDED divides.
        unsafe {
            gemm::gemm(
                columns,
                tokens.max(FEWEST_TOKENS),
                depth,
                scratch.out.as_mut_ptr(),
                COLUMNS as isize,
                1,
                add,
                scratch.weight.as_ptr(),
                COLUMNS as isize,
                1,
                scratch.x.as_ptr(),
                DEPTH as isize,
                1,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }

    fn store(&self, scratch: &Scratch, first: usize, tokens: usize) {
        let out = Matrix::of(&self.args.out, 0, self.head).from(first, self.columns.start);
        for (token, sums) in scratch.out.chunks(COLUMNS).take(tokens).enumerate() {
            let store = Store {
                src: sums.as_ptr(),
                factor: 1.0,
                dst: out.from(token, 0).data.cast_mut(),
                dim: self.columns.len(),
            };
            // SAFETY: the row is the output's, whose extents and unit stride were checked; `sums` holds COLUMNS.
            unsafe { self.kernels.store[out.dtype as usize](&store) }
        }
    }
}

/// Converts rows and columns of `from` to fp32 rows of `width` elements, padded with zeros to a multiple of `PADDED`.
fn stage(
    kernels: &Kernels,
    from: Matrix,
    [rows, columns]: [usize; 2],
    (target, width): (*mut f32, usize),
    offsets: &mut [i64; DEPTH],
) {
    let [row_stride, column_stride] = from.strides;
    if column_stride != 1 {
        stage_elements(from, [rows, columns], (target, width));
        return;
    }
    let row_bytes = row_stride as usize * from.dtype.size();
    let stage = Stage {
        rows: rows_of(from.data, row_bytes, rows, offsets),
        dim: columns,
        dst: target,
        width,
        strip: 0,
    };
    // SAFETY: rows and columns lie within a tensor that was checked, with unit stride; the target has `rows` rows of
    // `width`, a multiple of 16 not below `columns`, which is one of 8.
    unsafe { kernels.stage[from.dtype as usize](&stage) };
}

/// As `stage`, for strides that no vector has.
fn stage_elements(from: Matrix, [rows, columns]: [usize; 2], (target, width): (*mut f32, usize)) {
    for row in 0..rows {
        for column in 0..columns.next_multiple_of(PADDED) {
            // SAFETY: the element lies within a tensor that was checked, its place within the target.
            unsafe {
                let value = match column < columns {
                    true => dtype::load(from.from(row, column).data, from.dtype, 0),
                    false => 0.0,
                };
                *target.add(row * width + column) = value;
            }
        }
    }
}

/// Up to DEPTH rows that are equally far apart.
fn rows_of(base: *const u8, bytes: usize, count: usize, offsets: &mut [i64; DEPTH]) -> Rows {
    for (row, offset) in offsets.iter_mut().enumerate().take(count) {
        *offset = (row * bytes) as i64;
    }
    Rows {
        base,
        offsets: offsets.as_ptr(),
        count,
    }
}
