//! Trees of draft tokens, and what must come of them: what a token sees is the closure of the matrix of parents.

use super::door::Session;
use super::memory::{Image, Memory, Resident, View};
use super::values::mix;
use folio::api::Stream;
use folio::dtype::DType;
use folio::error::Result;
use folio::problem::TreeMaskArgs;
use folio::tensor::Tensor;

/// Trees of a batch, and what is wanted of them.
#[derive(Debug, Clone)]
pub struct Forest {
    /// Of every request. A parent that does not stand before its token is a root's on a device.
    pub parents: Vec<Vec<i32>>,
    pub prefix_lens: Vec<i32>,
    /// With a qo_indptr; else all trees have as many tokens.
    pub is_ragged: bool,
    /// Outputs by their place in [`OUTPUTS`].
    pub wanted: u32,
    /// Of those, int64 instead of int32.
    pub wide: u32,
    /// Bytes of a row of tree_bits.
    pub row_bytes: i64,
    /// Elements behind what is needed, where a tensor may have them.
    pub spare: i64,
}

pub const OUTPUTS: [&str; 7] = [
    "mask_bytes",
    "mask_bits",
    "tree_mask",
    "tree_bits",
    "positions",
    "next_token",
    "next_sibling",
];

/// All outputs but tree_bits, which is not wide enough for large trees.
pub const ALL_BUT_BITS: u32 = 0b1110111;

/// The shapes of random trees.
#[derive(Debug, Clone, Copy)]
pub enum Grown {
    /// Every token under any one before it, and some under none.
    Anyhow,
    Chain,
    /// All under the first.
    Star,
}

/// Parents of a random tree.
pub fn grown(how: Grown, size: usize, seed: u64) -> Vec<i32> {
    let parent = |token: usize| match how {
        Grown::Chain => token as i32 - 1,
        Grown::Star => -i32::from(token == 0),
        Grown::Anyhow => {
            let hash = mix(seed ^ mix(token as u64));
            match hash.is_multiple_of(16) {
                true => -1,
                false => (hash >> 8) as i32 % (token as i32).max(1),
            }
        }
    };
    let parents = (0..size).map(parent);
    let rooted = parents
        .enumerate()
        .map(|(t, p)| if t == 0 { -1 } else { p });
    rooted.map(|parent| parent.max(-1)).collect()
}

/// What is known of a tree: `sees[token][other]`.
struct Closure {
    parents: Vec<i32>,
    sees: Vec<Vec<bool>>,
}

impl Closure {
    /// Warshall's algorithm.
    fn of(stated: &[i32]) -> Closure {
        let size = stated.len();
        let stands_before = |(token, &parent): (usize, &i32)| match parent {
            0.. if (parent as usize) < token => parent,
            _ => -1,
        };
        let parents: Vec<i32> = stated.iter().enumerate().map(stands_before).collect();
        let mut sees = vec![vec![false; size]; size];
        for token in 0..size {
            sees[token][token] = true;
            if let Ok(parent) = usize::try_from(parents[token]) {
                sees[token][parent] = true;
            }
        }
        for via in 0..size {
            let through = sees[via].clone();
            for row in sees.iter_mut().filter(|row| row[via]) {
                row.iter_mut().zip(&through).for_each(|(a, b)| *a |= b);
            }
        }
        Closure { parents, sees }
    }
}

/// The tensors of a call.
pub struct Tensors<'m> {
    inputs: [Option<Resident<'m>>; 3],
    outputs: [Option<Resident<'m>>; 7],
}

impl Tensors<'_> {
    pub fn args(&self) -> TreeMaskArgs {
        let tensor = |resident: &Option<Resident<'_>>| resident.as_ref().map(Resident::tensor);
        let [parents, prefix_lens, qo_indptr] = self.inputs.each_ref().map(tensor);
        let outputs: [Option<Tensor>; 7] = self.outputs.each_ref().map(tensor);
        let [
            mask_bytes,
            mask_bits,
            tree_mask,
            tree_bits,
            positions,
            next_token,
            next_sibling,
        ] = outputs;
        TreeMaskArgs {
            parents: parents.expect("an input"),
            prefix_lens: prefix_lens.expect("an input"),
            qo_indptr,
            mask_bytes,
            mask_bits,
            tree_mask,
            tree_bits,
            positions,
            next_token,
            next_sibling,
        }
    }

    /// Nothing was written.
    pub fn is_untouched(&self) -> bool {
        let mut outputs = self.outputs.iter().flatten();
        outputs.all(Resident::is_untouched)
    }

    /// Nothing behind an output was written.
    pub fn assert_within_bounds(&self) {
        for (name, output) in OUTPUTS.iter().zip(&self.outputs) {
            let Some(output) = output else { continue };
            let (view, was, is) = (&output.image().view, output.image(), output.current());
            let elements: i64 = view.shape.iter().product();
            let end = elements as usize * view.dtype.size();
            assert!(was.bytes[end..] == is.bytes[end..], "behind {name}");
        }
    }

    /// Takes over other trees, whose tensors are as large.
    pub fn take_inputs_of(&self, other: &Tensors<'_>) {
        for (input, other) in self.inputs.iter().zip(&other.inputs) {
            if let (Some(input), Some(other)) = (input, other) {
                input.copy_from(other);
            }
        }
    }

    /// An output of [`OUTPUTS`], as it is now.
    pub fn output(&self, at: usize) -> Image {
        self.outputs[at].as_ref().expect("wanted").current()
    }
}

impl Forest {
    /// With everything that is wanted, of trees of any sizes.
    pub fn new(parents: Vec<Vec<i32>>, prefix_lens: Vec<i32>) -> Forest {
        let sizes: Vec<usize> = parents.iter().map(Vec::len).collect();
        let largest = sizes.iter().copied().max().unwrap_or(0);
        Forest {
            is_ragged: sizes.windows(2).any(|pair| pair[0] != pair[1]),
            wanted: if largest > 32 { ALL_BUT_BITS } else { 0x7f },
            wide: 0,
            row_bytes: match largest {
                ..=8 => 1,
                9..=16 => 2,
                _ => 4,
            },
            spare: 0,
            parents,
            prefix_lens,
        }
    }

    fn size(&self, b: usize) -> i64 {
        self.parents[b].len() as i64
    }

    fn kv_len(&self, b: usize) -> i64 {
        i64::from(self.prefix_lens[b]) + self.size(b)
    }

    /// The sum over the requests before `b`.
    fn before(&self, b: usize, of: impl Fn(usize) -> i64) -> i64 {
        (0..b).map(of).sum()
    }

    /// Poisoned outputs, as large as they have to be and `spare` more.
    pub fn tensors<'m>(&self, memory: &'m dyn Memory) -> Tensors<'m> {
        let batch = self.parents.len();
        let tokens = self.before(batch, |b| self.size(b));
        let per_token = match self.is_ragged {
            true => vec![tokens + self.spare],
            false => vec![batch as i64, if batch == 0 { 3 } else { self.size(0) }],
        };
        let resident = |image| Resident::new(memory, image);
        let mut parents = Image::poisoned(View::compact(DType::I32, &per_token));
        for (b, tree) in self.parents.iter().enumerate() {
            for (token, &parent) in (0..).zip(tree) {
                parents.put(&self.at(b, token), parent as u64);
            }
        }
        let ends: Vec<i32> = (0..=batch)
            .map(|b| self.before(b, |b| self.size(b)) as i32)
            .collect();
        let lens = Image::of_i32(&[batch as i64], &self.prefix_lens);
        let ends = self
            .is_ragged
            .then(|| resident(Image::of_i32(&[ends.len() as i64], &ends)));
        let shape = |at: usize| match at {
            0 => vec![self.before(batch, |b| self.bytes(b)) + self.spare],
            1 => vec![self.before(batch, |b| self.bits(b)) + self.spare],
            2 if self.is_ragged => vec![self.before(batch, |b| self.square(b)) + self.spare],
            2 => vec![per_token[0], per_token[1], per_token[1]],
            3 => [per_token.clone(), vec![self.row_bytes]].concat(),
            _ => per_token.clone(),
        };
        let output = |at: usize| {
            let dtype = match at {
                ..4 => DType::U8,
                _ if self.wide >> at & 1 == 1 => DType::I64,
                _ => DType::I32,
            };
            let view = View::compact(dtype, &shape(at));
            (self.wanted >> at & 1 == 1).then(|| resident(Image::poisoned(view)))
        };
        Tensors {
            inputs: [Some(resident(parents)), Some(resident(lens)), ends],
            outputs: [0, 1, 2, 3, 4, 5, 6].map(output),
        }
    }

    fn bytes(&self, b: usize) -> i64 {
        self.size(b) * self.kv_len(b)
    }

    fn bits(&self, b: usize) -> i64 {
        self.bytes(b).unsigned_abs().div_ceil(8) as i64
    }

    fn square(&self, b: usize) -> i64 {
        self.size(b) * self.size(b)
    }

    /// The index of a token.
    fn at(&self, b: usize, token: i64) -> Vec<i64> {
        match self.is_ragged {
            true => vec![self.before(b, |b| self.size(b)) + token],
            false => vec![b as i64, token],
        }
    }

    /// Makes the call.
    pub fn call(&self, session: &dyn Session, tensors: &Tensors<'_>) -> Result<()> {
        session.tree_mask(&tensors.args(), Stream::default())
    }

    /// Makes the call and compares every byte of every output.
    pub fn check(
        &self,
        session: &dyn Session,
        memory: &dyn Memory,
    ) -> std::result::Result<(), String> {
        let tensors = self.tensors(memory);
        self.call(session, &tensors)
            .map_err(|error| error.to_string())?;
        self.compare(&tensors)
    }

    /// Compares every byte of every output.
    pub fn compare(&self, tensors: &Tensors<'_>) -> std::result::Result<(), String> {
        let closures: Vec<Closure> = self.parents.iter().map(|tree| Closure::of(tree)).collect();
        for (at, resident) in tensors.outputs.iter().enumerate() {
            let Some(resident) = resident else { continue };
            let mut want = resident.image().clone();
            for (b, closure) in closures.iter().enumerate() {
                self.fill(at, b, closure, &mut want);
            }
            let is = resident.current();
            if is != want {
                let byte = is.bytes.iter().zip(&want.bytes).position(|(a, b)| a != b);
                return Err(format!("{}: byte {byte:?} is wrong", OUTPUTS[at]));
            }
        }
        Ok(())
    }

    /// Writes a request's part of an output.
    fn fill(&self, output: usize, b: usize, tree: &Closure, want: &mut Image) {
        let (size, kv_len) = (self.size(b), self.kv_len(b));
        let prefix_len = kv_len - size;
        let sees = |row: i64, key: i64| {
            key < prefix_len || tree.sees[row as usize][(key - prefix_len) as usize]
        };
        match output {
            0 => {
                let start = self.before(b, |b| self.bytes(b));
                for n in 0..self.bytes(b) {
                    want.put(&[start + n], sees(n / kv_len, n % kv_len).into());
                }
            }
            1 => {
                let start = self.before(b, |b| self.bits(b));
                let mut bytes = vec![0u8; self.bits(b) as usize];
                for n in (0..self.bytes(b)).filter(|n| sees(n / kv_len, n % kv_len)) {
                    bytes[n as usize / 8] |= 1 << (n % 8);
                }
                for (n, byte) in (start..).zip(bytes) {
                    want.put(&[n], byte.into());
                }
            }
            2 => {
                let start = self.before(b, |b| self.square(b));
                for n in 0..self.square(b) {
                    let index = match self.is_ragged {
                        true => vec![start + n],
                        false => vec![b as i64, n / size, n % size],
                    };
                    want.put(&index, sees(n / size, prefix_len + n % size).into());
                }
            }
            _ => (0..size).for_each(|token| self.fill_row(output, b, token, tree, want)),
        }
    }

    fn fill_row(&self, output: usize, b: usize, token: i64, tree: &Closure, want: &mut Image) {
        let at = self.at(b, token);
        let (row, parent) = (&tree.sees[token as usize], tree.parents[token as usize]);
        let first = |found: Option<usize>| found.map_or(-1i64, |token| token as i64) as u64;
        match output {
            3 => {
                let seen = row.iter().enumerate().filter(|(_, sees)| **sees);
                let bits: u64 = seen.map(|(other, _)| 1u64 << other).sum();
                for byte in 0..self.row_bytes {
                    let index = [at.clone(), vec![byte]].concat();
                    want.put(&index, bits >> (8 * byte) & 0xff);
                }
            }
            4 => {
                let ancestors = row.iter().filter(|sees| **sees).count() as i64 - 1;
                want.put(&at, (i64::from(self.prefix_lens[b]) + ancestors) as u64);
            }
            5 => {
                let is_child = |other: &i32| i64::from(*other) == token;
                want.put(&at, first(tree.parents.iter().position(is_child)));
            }
            _ => {
                let mut others = (0..tree.parents.len()).skip(token as usize + 1);
                want.put(
                    &at,
                    first(others.find(|&other| tree.parents[other] == parent)),
                );
            }
        }
    }
}
