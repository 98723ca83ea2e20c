//! The gate for exported functions that return no status: a panic becomes a value. (Those that return one go through
//! `guard`.)

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body` for a function that reports no failure: a panic becomes `fallback`.
pub(super) fn guard_value<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(fallback)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_the_fallback() {
        assert_eq!(guard_value(7, || 8), 8);
        assert_eq!(guard_value(7, || panic!("on purpose")), 7);
    }
}
