//! Status codes and their names. Not the report that goes with them: see `error`.

use super::guard_value::guard_value;
use crate::error::Error;
use std::ffi::{CStr, c_char};

/// Result of every call that can fail: 0 is success. Treat unknown positive codes as failure.
/// 1 to 49: the caller's fault. 50 to 99: cannot be done here. 100 to 149: something ran out or broke.
/// 200: a bug in Folio. Any call may answer 200; the lists of the functions leave it out.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct folio_status(pub i32);

/// Success.
pub const FOLIO_OK: folio_status = folio_status(0);
/// A value is outside what the field accepts.
pub const FOLIO_ERR_INVALID_ARGUMENT: folio_status = folio_status(1);
/// struct_size is smaller than the struct's first version, not a multiple of its alignment, or not plausible.
pub const FOLIO_ERR_INVALID_STRUCT_SIZE: folio_status = folio_status(2);
/// A flag or a field beyond what this library knows is not zero.
pub const FOLIO_ERR_UNKNOWN_FIELD: folio_status = folio_status(3);
/// A tensor's rank, extents, strides or alignment do not fit.
pub const FOLIO_ERR_SHAPE: folio_status = folio_status(4);
/// A tensor's element type does not fit.
pub const FOLIO_ERR_DTYPE: folio_status = folio_status(5);
/// A tensor or a stream belongs to another device or to another CUDA context.
pub const FOLIO_ERR_DEVICE_MISMATCH: folio_status = folio_status(6);
/// The workspace is missing, misaligned or smaller than needed.
pub const FOLIO_ERR_WORKSPACE_TOO_SMALL: folio_status = folio_status(7);
/// run before a successful plan.
pub const FOLIO_ERR_NOT_PLANNED: folio_status = folio_status(8);
/// The call may not be captured in a CUDA graph.
pub const FOLIO_ERR_CAPTURE: folio_status = folio_status(9);
/// Legal, but this library, build or device has no code for it.
pub const FOLIO_ERR_UNSUPPORTED: folio_status = folio_status(50);
/// There is no such device.
pub const FOLIO_ERR_NO_DEVICE: folio_status = folio_status(51);
/// The CUDA driver library is missing, incomplete or a stub.
pub const FOLIO_ERR_NO_DRIVER: folio_status = folio_status(52);
/// The CUDA driver is older than this library needs.
pub const FOLIO_ERR_DRIVER_TOO_OLD: folio_status = folio_status(53);
/// A kernel variant could not be compiled.
pub const FOLIO_ERR_COMPILE: folio_status = folio_status(54);
/// Host or device memory ran out.
pub const FOLIO_ERR_OUT_OF_MEMORY: folio_status = folio_status(100);
/// The CUDA driver reported a failure, perhaps that of an earlier kernel.
pub const FOLIO_ERR_DRIVER: folio_status = folio_status(101);
/// A bug in Folio. The object of the call is unusable afterwards and can still be destroyed; outputs may
/// have been written. Where the bug was a panic, its message is on stderr too.
pub const FOLIO_ERR_INTERNAL: folio_status = folio_status(200);

const NAMES: [(folio_status, &CStr); 18] = [
    (FOLIO_OK, c"OK"),
    (FOLIO_ERR_INVALID_ARGUMENT, c"INVALID_ARGUMENT"),
    (FOLIO_ERR_INVALID_STRUCT_SIZE, c"INVALID_STRUCT_SIZE"),
    (FOLIO_ERR_UNKNOWN_FIELD, c"UNKNOWN_FIELD"),
    (FOLIO_ERR_SHAPE, c"SHAPE"),
    (FOLIO_ERR_DTYPE, c"DTYPE"),
    (FOLIO_ERR_DEVICE_MISMATCH, c"DEVICE_MISMATCH"),
    (FOLIO_ERR_WORKSPACE_TOO_SMALL, c"WORKSPACE_TOO_SMALL"),
    (FOLIO_ERR_NOT_PLANNED, c"NOT_PLANNED"),
    (FOLIO_ERR_CAPTURE, c"CAPTURE"),
    (FOLIO_ERR_UNSUPPORTED, c"UNSUPPORTED"),
    (FOLIO_ERR_NO_DEVICE, c"NO_DEVICE"),
    (FOLIO_ERR_NO_DRIVER, c"NO_DRIVER"),
    (FOLIO_ERR_DRIVER_TOO_OLD, c"DRIVER_TOO_OLD"),
    (FOLIO_ERR_COMPILE, c"COMPILE"),
    (FOLIO_ERR_OUT_OF_MEMORY, c"OUT_OF_MEMORY"),
    (FOLIO_ERR_DRIVER, c"DRIVER"),
    (FOLIO_ERR_INTERNAL, c"INTERNAL"),
];

impl From<&Error> for folio_status {
    fn from(error: &Error) -> folio_status {
        match error {
            Error::InvalidArgument(_) => FOLIO_ERR_INVALID_ARGUMENT,
            Error::InvalidStructSize(_) => FOLIO_ERR_INVALID_STRUCT_SIZE,
            Error::UnknownField(_) => FOLIO_ERR_UNKNOWN_FIELD,
            Error::Shape(_) => FOLIO_ERR_SHAPE,
            Error::DType(_) => FOLIO_ERR_DTYPE,
            Error::DeviceMismatch(_) => FOLIO_ERR_DEVICE_MISMATCH,
            Error::WorkspaceTooSmall(_) => FOLIO_ERR_WORKSPACE_TOO_SMALL,
            Error::NotPlanned(_) => FOLIO_ERR_NOT_PLANNED,
            Error::Capture(_) => FOLIO_ERR_CAPTURE,
            Error::Unsupported(_) => FOLIO_ERR_UNSUPPORTED,
            Error::NoDevice(_) => FOLIO_ERR_NO_DEVICE,
            Error::NoDriver(_) => FOLIO_ERR_NO_DRIVER,
            Error::DriverTooOld(_) => FOLIO_ERR_DRIVER_TOO_OLD,
            Error::Compile(_) => FOLIO_ERR_COMPILE,
            Error::OutOfMemory(_) => FOLIO_ERR_OUT_OF_MEMORY,
            Error::Driver(_) => FOLIO_ERR_DRIVER,
            Error::Internal(_) => FOLIO_ERR_INTERNAL,
        }
    }
}

/// The name of a status code without its prefix, `"unknown"` for numbers that are none.
///
/// Any thread, any time. The string lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn folio_status_name(status: folio_status) -> *const c_char {
    guard_value(c"unknown".as_ptr(), || name(status).as_ptr())
}

fn name(status: folio_status) -> &'static CStr {
    let known = NAMES.iter().find(|row| row.0 == status);
    known.map_or(c"unknown", |row| row.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_known() {
        for (i, row) in NAMES.iter().enumerate() {
            assert!(NAMES[..i].iter().all(|other| other.0 != row.0));
            assert_eq!(name(row.0), row.1);
        }
        assert_eq!(name(folio_status(77)), c"unknown");
    }
}
