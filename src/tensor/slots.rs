//! Numbers of slots, of either integer type.

/// A slot mapping of either integer type.
#[derive(Debug, Clone, Copy)]
pub enum Slots<'a> {
    /// int32 slots.
    I32(&'a [i32]),
    /// int64 slots.
    I64(&'a [i64]),
}

impl Slots<'_> {
    /// The slot of `token`.
    pub fn get(&self, token: usize) -> i64 {
        match self {
            Slots::I32(slots) => i64::from(slots[token]),
            Slots::I64(slots) => slots[token],
        }
    }

    /// The number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Slots::I32(slots) => slots.len(),
            Slots::I64(slots) => slots.len(),
        }
    }

    /// No tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first slot that `found` accepts, and its token.
    pub fn position_of(&self, found: impl Fn(i64) -> bool) -> Option<(usize, i64)> {
        (0..self.len())
            .map(|token| (token, self.get(token)))
            .find(|&(_, slot)| found(slot))
    }
}
