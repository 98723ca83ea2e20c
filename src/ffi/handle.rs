//! Handles: boxes that C holds by pointer.

use super::error::{folio_error, folio_status};
use super::guard::{Poison, guard};
use crate::error::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A value and whether a panic has passed through it.
#[derive(Debug)]
pub(super) struct Handle<T> {
    poison: Poison,
    value: T,
}

impl<T> Handle<T> {
    fn new(value: T) -> Handle<T> {
        Handle {
            poison: Poison::default(),
            value,
        }
    }

    /// The value, where only its immutable part is used outside a guard.
    pub fn value(&self) -> &T {
        &self.value
    }
}

/// An opaque C type that wraps a [`Handle`].
pub(super) trait Object: From<Handle<Self::Value>> {
    /// The Rust value behind it.
    type Value;
    /// Name of the parameter, for messages.
    const NAME: &'static str;
    fn handle(&self) -> &Handle<Self::Value>;
    fn handle_mut(&mut self) -> &mut Handle<Self::Value>;
}

/// Makes a new object and stores its address in `*out`.
///
/// # Safety
/// `out` is NULL or writable; `err` as in [`guard`].
pub(super) unsafe fn create<O: Object>(
    out: *mut *mut O,
    err: *mut folio_error,
    make: impl FnOnce() -> Result<O::Value>,
) -> folio_status {
    // SAFETY: the caller's promise about `err`.
    unsafe {
        guard(err, None, || {
            if out.is_null() {
                return Err(Error::InvalidArgument(
                    "out: NULL is not accepted; the address of a pointer is".into(),
                ));
            }
            let object = Box::new(O::from(Handle::new(make()?)));
            // SAFETY: `out` is not NULL, hence writable.
            out.write(Box::into_raw(object));
            Ok(())
        })
    }
}

/// Uses an object that other threads may use at the same time.
///
/// # Safety
/// `object` is NULL or came from [`create`] and was not destroyed; `err` as in [`guard`].
pub(super) unsafe fn shared<O: Object>(
    object: *const O,
    err: *mut folio_error,
    body: impl FnOnce(&O::Value) -> Result<()>,
) -> folio_status {
    // SAFETY: the caller's promise: NULL or alive.
    let handle = unsafe { object.as_ref() }.map(O::handle);
    // SAFETY: the caller's promise about `err`.
    unsafe {
        guard(err, handle.map(|h| &h.poison), || {
            let handle = handle.ok_or_else(null::<O>)?;
            handle.poison.check(O::NAME)?;
            body(&handle.value)
        })
    }
}

/// Uses an object that nobody else uses at the same time.
///
/// # Safety
/// As [`shared`], and no other call on the object is under way.
pub(super) unsafe fn exclusive<O: Object>(
    object: *mut O,
    err: *mut folio_error,
    body: impl FnOnce(&mut O::Value) -> Result<()>,
) -> folio_status {
    // SAFETY: the caller's promise: NULL, or alive and not in use elsewhere.
    let Some(object) = (unsafe { object.as_mut() }) else {
        // SAFETY: the caller's promise about `err`.
        return unsafe { guard(err, None, || Err(null::<O>())) };
    };
    let Handle { poison, value } = object.handle_mut();
    // SAFETY: the caller's promise about `err`.
    unsafe {
        guard(err, Some(poison), || {
            poison.check(O::NAME)?;
            body(value)
        })
    }
}

/// Ends an object; NULL is fine.
///
/// # Safety
/// As [`exclusive`], and the object is not used afterwards.
pub(super) unsafe fn destroy<O: Object>(object: *mut O) {
    if object.is_null() {
        return;
    }
    // SAFETY: the caller's promise: it came from `create` and nobody uses it any more.
    let object = unsafe { Box::from_raw(object) };
    // There is nobody to report to; a panic here must still not unwind into C.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(object)));
}

fn null<O: Object>() -> Error {
    Error::InvalidArgument(format!("{}: NULL is not accepted; a handle is", O::NAME))
}

#[cfg(test)]
mod tests {
    use super::super::error::{FOLIO_ERR_INTERNAL, FOLIO_ERR_INVALID_ARGUMENT, FOLIO_OK};
    use super::*;
    use std::ptr::{null, null_mut};
    use std::sync::atomic::{AtomicU32, Ordering};

    static DROPPED: AtomicU32 = AtomicU32::new(0);

    /// Counts its drops, and panics in the last one it is asked to.
    struct Fragile {
        panics_on_drop: bool,
    }

    impl Drop for Fragile {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panics_on_drop, "on purpose: drop");
        }
    }

    struct Thing(Handle<Fragile>);

    impl From<Handle<Fragile>> for Thing {
        fn from(handle: Handle<Fragile>) -> Self {
            Thing(handle)
        }
    }

    impl Object for Thing {
        type Value = Fragile;
        const NAME: &'static str = "thing";
        fn handle(&self) -> &Handle<Fragile> {
            &self.0
        }
        fn handle_mut(&mut self) -> &mut Handle<Fragile> {
            &mut self.0
        }
    }

    #[test]
    fn a_panic_poisons_the_handle_and_destroy_still_works() {
        let mut thing: *mut Thing = null_mut();
        // SAFETY: every pointer is NULL, local or made by `create`.
        unsafe {
            let status = create(&mut thing, null_mut(), || {
                Ok(Fragile {
                    panics_on_drop: true,
                })
            });
            assert_eq!(status, FOLIO_OK);
            assert_eq!(shared(thing, null_mut(), |_| Ok(())), FOLIO_OK);
            assert_eq!(
                shared(thing, null_mut(), |_| panic!("on purpose: run")),
                FOLIO_ERR_INTERNAL
            );
            let mut reached = false;
            let status = exclusive(thing, null_mut(), |_| {
                reached = true;
                Ok(())
            });
            assert_eq!(status, FOLIO_ERR_INTERNAL);
            assert!(!reached, "a poisoned handle runs nothing");
            destroy(thing);
        }
        assert_eq!(DROPPED.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn null_and_failed_creates_write_nothing() {
        let mut thing: *mut Thing = null_mut();
        // SAFETY: as above.
        unsafe {
            let failed = create(&mut thing, null_mut(), || {
                Err(Error::Internal(String::new()))
            });
            assert_eq!(failed, FOLIO_ERR_INTERNAL);
            let panicked = create(&mut thing, null_mut(), || panic!("on purpose: create"));
            assert_eq!(panicked, FOLIO_ERR_INTERNAL);
            assert!(thing.is_null());
            assert_eq!(
                shared(null::<Thing>(), null_mut(), |_| Ok(())),
                FOLIO_ERR_INVALID_ARGUMENT
            );
            assert_eq!(
                exclusive(thing, null_mut(), |_| Ok(())),
                FOLIO_ERR_INVALID_ARGUMENT
            );
            destroy(thing);
        }
    }
}
