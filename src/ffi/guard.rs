//! The gate between C and Rust: catches panics, fills in the error report, poisons handles. Every exported
//! function that returns a status goes through it; the others go through `guard_value`.

use super::error::{folio_error, report};
use super::status::{FOLIO_OK, folio_status};
use crate::error::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Set once a call on a handle has met a bug: the handle's state is then not to be trusted.
#[derive(Debug, Default)]
pub(super) struct Poison(AtomicBool);

impl Poison {
    /// Refuses a poisoned handle.
    pub fn check(&self, what: &str) -> Result<()> {
        if self.0.load(Ordering::Acquire) {
            return Err(Error::Internal(format!(
                "{what}: the handle is unusable after an internal error; only destroying it is accepted"
            )));
        }
        Ok(())
    }
}

/// Runs `body`. An error or a panic becomes a status and a report. After a panic, or an internal error that
/// the layers behind this one noticed themselves, `poison` is set.
///
/// # Safety
/// `err` is NULL or points to a `folio_error` with a valid struct_size.
pub(super) unsafe fn guard(
    err: *mut folio_error,
    poison: Option<&Poison>,
    body: impl FnOnce() -> Result<()>,
) -> folio_status {
    // Unwind safety: what a panic may have left half done is behind the handle, which gets poisoned.
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        Err(Error::Internal(format!(
            "internal error: {}",
            panic_text(&*payload)
        )))
    });
    let Err(error) = result else {
        return FOLIO_OK;
    };
    if let (Error::Internal(_), Some(poison)) = (&error, poison) {
        poison.0.store(true, Ordering::Release);
    }
    let status = folio_status::from(&error);
    // SAFETY: the caller's promise.
    unsafe { report(err, status, &error.to_string()) };
    status
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::super::status::{FOLIO_ERR_DRIVER, FOLIO_ERR_INTERNAL};
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_and_poisons() {
        let poison = Poison::default();
        assert!(poison.check("x").is_ok());
        // SAFETY: no report.
        let status = unsafe { guard(std::ptr::null_mut(), Some(&poison), || panic!("on purpose")) };
        assert_eq!(status, FOLIO_ERR_INTERNAL);
        assert!(poison.check("x").is_err());
    }

    #[test]
    fn an_internal_error_poisons_and_others_do_not() {
        let poison = Poison::default();
        let fail = |error| {
            // SAFETY: no report.
            unsafe { guard(std::ptr::null_mut(), Some(&poison), || Err(error)) }
        };
        assert_eq!(fail(Error::Driver("x".into())), FOLIO_ERR_DRIVER);
        assert!(poison.check("x").is_ok());
        assert_eq!(fail(Error::Internal("x".into())), FOLIO_ERR_INTERNAL);
        assert!(poison.check("x").is_err());
    }
}
