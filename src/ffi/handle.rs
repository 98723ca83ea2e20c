//! Handles: boxes that C holds by pointer.

use super::error::folio_error;
use super::guard::{Poison, guard};
use super::guard_value::guard_value;
use super::status::folio_status;
use crate::error::{Error, Result};

/// A value, and whether a call on it has met a bug.
#[derive(Debug)]
struct Handle<T> {
    poison: Poison,
    value: T,
}

/// An opaque C type. A pointer to it is the address of a handle around a value that C does not see.
pub(super) trait Object {
    /// The Rust value behind it.
    type Value;
    /// Name of the parameter that takes it, for messages.
    const PARAMETER: &'static str;
    /// The C name, for messages.
    const NAME: &'static str;
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
    // SAFETY: the caller's promises.
    unsafe { guard(err, None, || store(out, make)) }
}

/// As [`create`], of an object that others may use at the same time.
///
/// # Safety
/// `from` as in [`shared`]; the rest as in [`create`].
pub(super) unsafe fn create_from<P: Object, O: Object>(
    from: *const P,
    out: *mut *mut O,
    err: *mut folio_error,
    make: impl FnOnce(&P::Value) -> Result<O::Value>,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe { shared(from, err, |from| store(out, || make(from))) }
}

/// # Safety
/// `out` is NULL or writable.
unsafe fn store<O: Object>(
    out: *mut *mut O,
    make: impl FnOnce() -> Result<O::Value>,
) -> Result<()> {
    if out.is_null() {
        return Err(Error::InvalidArgument(
            "out: NULL is not accepted; the address of a pointer is".into(),
        ));
    }
    let handle = Box::new(Handle {
        poison: Poison::default(),
        value: make()?,
    });
    // SAFETY: `out` is not NULL, hence writable.
    unsafe { out.write(Box::into_raw(handle).cast()) };
    Ok(())
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
    // SAFETY: the caller's promise: NULL, or the address of a handle that is alive.
    let handle = unsafe { object.cast::<Handle<O::Value>>().as_ref() };
    // SAFETY: the caller's promise about `err`.
    unsafe {
        guard(err, handle.map(|h| &h.poison), || {
            let handle = handle.ok_or_else(null::<O>)?;
            handle.poison.check(O::PARAMETER)?;
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
    // SAFETY: the caller's promise: NULL, or the address of a handle that is alive and not in use elsewhere.
    let (poison, value) = match unsafe { object.cast::<Handle<O::Value>>().as_mut() } {
        Some(Handle { poison, value }) => (Some(&*poison), Some(value)),
        None => (None, None),
    };
    // SAFETY: the caller's promise about `err`.
    unsafe {
        guard(err, poison, || {
            let value = value.ok_or_else(null::<O>)?;
            poison.map_or(Ok(()), |poison| poison.check(O::PARAMETER))?;
            body(value)
        })
    }
}

/// The value of an object, poisoned or not, for what no panic can spoil.
///
/// # Safety
/// `object` is NULL or came from [`create`] and is alive for `'a`.
pub(super) unsafe fn value<'a, O: Object>(object: *const O) -> Option<&'a O::Value> {
    // SAFETY: the caller's promise.
    unsafe { object.cast::<Handle<O::Value>>().as_ref() }.map(|handle| &handle.value)
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
    let handle = unsafe { Box::from_raw(object.cast::<Handle<O::Value>>()) };
    // There is nobody to report to.
    guard_value((), || drop(handle));
}

fn null<O: Object>() -> Error {
    Error::InvalidArgument(format!(
        "{}: NULL is not accepted; a {} is",
        O::PARAMETER,
        O::NAME
    ))
}

#[cfg(test)]
mod tests {
    use super::super::status::{FOLIO_ERR_INTERNAL, FOLIO_ERR_INVALID_ARGUMENT, FOLIO_OK};
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

    struct Thing;

    impl Object for Thing {
        type Value = Fragile;
        const PARAMETER: &'static str = "thing";
        const NAME: &'static str = "a_thing";
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
