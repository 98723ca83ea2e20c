//! Numbers of slots, pages, tokens and lengths, of either integer type.

/// Numbers of either integer type.
#[derive(Debug, Clone, Copy)]
pub enum Integers<'a> {
    /// int32.
    I32(&'a [i32]),
    /// int64.
    I64(&'a [i64]),
}

impl<'a> From<&'a [i32]> for Integers<'a> {
    fn from(numbers: &'a [i32]) -> Integers<'a> {
        Integers::I32(numbers)
    }
}

impl Integers<'_> {
    /// The number at `index`.
    pub fn get(&self, index: usize) -> i64 {
        match self {
            Integers::I32(numbers) => i64::from(numbers[index]),
            Integers::I64(numbers) => numbers[index],
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Integers::I32(numbers) => numbers.len(),
            Integers::I64(numbers) => numbers.len(),
        }
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = i64> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    /// The first number that `found` accepts, and its index.
    pub fn position_of(&self, found: impl Fn(i64) -> bool) -> Option<(usize, i64)> {
        self.iter().enumerate().find(|&(_, number)| found(number))
    }

    /// The index of the first number that is not `before`, where those that are come first.
    pub fn partition_point(&self, before: impl Fn(i64) -> bool) -> usize {
        match self {
            Integers::I32(numbers) => numbers.partition_point(|&number| before(number.into())),
            Integers::I64(numbers) => numbers.partition_point(|&number| before(number)),
        }
    }
}
