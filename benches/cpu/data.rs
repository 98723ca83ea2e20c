//! Tensors of random numbers, and permutations.

use folio::dtype::{self, DType};
use folio::tensor::{Device, Tensor};

/// A cache line. Runtimes give tensors memory that begins on one; a large `Vec` of words begins 16 bytes
/// past one, and then every vector load crosses into the next.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read as words")] [u64; 8]);

/// Words that begin on a cache line.
pub struct Memory {
    lines: Vec<Line>,
}

impl Memory {
    /// `words` of them or a few more, each `word`.
    pub fn filled(words: usize, word: u64) -> Memory {
        Memory {
            lines: vec![Line([word; 8]); words.div_ceil(8)],
        }
    }

    pub fn words(&self) -> &[u64] {
        // SAFETY: a line is eight words and nothing else.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), 8 * self.lines.len()) }
    }

    pub fn words_mut(&mut self) -> &mut [u64] {
        let count = 8 * self.lines.len();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), count) }
    }
}

/// Owned memory with a shape.
pub struct Array {
    memory: Memory,
    dtype: DType,
    shape: Vec<i64>,
}

impl Array {
    pub fn zeros(dtype: DType, shape: &[i64]) -> Array {
        let elements: i64 = shape.iter().product();
        Array {
            memory: Memory::filled((elements as usize * dtype.size()).div_ceil(8) + 1, 0),
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// Values around 0 with a standard deviation near 0.6; a block of them, repeated.
    pub fn random(dtype: DType, shape: &[i64]) -> Array {
        let mut array = Array::zeros(dtype, shape);
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let words = array.memory.words_mut();
        let block = words.len().min(1 << 16);
        let per_word = (8 / dtype.size()) as isize;
        for word in &mut words[..block] {
            for i in 0..per_word {
                state = step(state);
                let value = ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 2.0;
                // SAFETY: the word holds `per_word` elements.
                unsafe { dtype::store((word as *mut u64).cast(), dtype, i, value) };
            }
        }
        for start in (block..words.len()).step_by(block) {
            let count = block.min(words.len() - start);
            words.copy_within(0..count, start);
        }
        array
    }

    pub fn i32(values: &[i32]) -> Array {
        let array = Array::zeros(DType::I32, &[values.len() as i64]);
        for (i, &value) in values.iter().enumerate() {
            array.tensor().set(&[i as i64], value as f32);
        }
        array
    }

    pub fn tensor(&self) -> Tensor {
        let data = self.memory.words().as_ptr() as *mut u8;
        // SAFETY: the memory lives as long as the array, and holds the shape.
        let tensor =
            unsafe { Tensor::new("bench", data, Device::Cpu, self.dtype, &self.shape, None) };
        tensor.expect("a plain tensor")
    }
}

fn step(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}

/// 0..n in random order.
pub fn permutation(n: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..n as i32).collect();
    let mut state = 0x1234_5678_9abc_def1u64;
    for i in (1..n).rev() {
        state = step(state);
        ids.swap(i, (state % (i as u64 + 1)) as usize);
    }
    ids
}
