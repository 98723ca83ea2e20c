//! Status codes and the caller-owned error report.

use crate::error::Error;
use std::ffi::{CStr, c_char};

/// Result of every call that can fail: 0 is success. Treat unknown positive codes as failure.
/// 1 to 49: the caller's fault. 50 to 99: cannot be done here. 100 to 149: something ran out or broke.
/// 200: a bug in Folio.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct folio_status(pub i32);

/// Success.
pub const FOLIO_OK: folio_status = folio_status(0);
/// A value is outside what the field accepts.
pub const FOLIO_ERR_INVALID_ARGUMENT: folio_status = folio_status(1);
/// struct_size is smaller than the struct's first version, or not plausible.
pub const FOLIO_ERR_INVALID_STRUCT_SIZE: folio_status = folio_status(2);
/// A flag or a field beyond what this library knows is not zero.
pub const FOLIO_ERR_UNKNOWN_FIELD: folio_status = folio_status(3);
/// A tensor's rank, extents, strides or alignment do not fit.
pub const FOLIO_ERR_SHAPE: folio_status = folio_status(4);
/// A tensor's element type does not fit.
pub const FOLIO_ERR_DTYPE: folio_status = folio_status(5);
/// A tensor, stream or context belongs to another device.
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
/// The CUDA driver reported a failure.
pub const FOLIO_ERR_DRIVER: folio_status = folio_status(101);
/// A bug in Folio. The handle is unusable afterwards; it can still be destroyed.
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
    NAMES
        .iter()
        .find(|row| row.0 == status)
        .map_or(c"unknown", |row| row.1)
        .as_ptr()
}

/// What went wrong, in memory of the caller's. Set struct_size (`FOLIO_INIT` does) and pass its address
/// as the last argument, or pass NULL. Written only on failure.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_error {
    /// sizeof(folio_error) of the caller.
    pub struct_size: u32,
    /// The status that the call returned.
    pub status: folio_status,
    /// One sentence: field, value, what would be accepted. UTF-8, NUL-terminated, cut at a character
    /// boundary where it is longer.
    pub message: [c_char; 504],
}

const HEADER_BYTES: usize = std::mem::offset_of!(folio_error, message);
const _: () = assert!(size_of::<folio_error>() == 512);

/// Fills in the report, if there is room for one.
///
/// # Safety
/// `err` is NULL or points to at least 4 readable bytes, and as many writable bytes as its struct_size says.
pub(super) unsafe fn report(err: *mut folio_error, status: folio_status, message: &str) {
    if err.is_null() {
        return;
    }
    // SAFETY: the caller's promise; a pointer that is not aligned is read as it is.
    let size = unsafe { err.cast::<u32>().read_unaligned() } as usize;
    let room = size.min(size_of::<folio_error>());
    if room <= HEADER_BYTES {
        return;
    }
    let mut end = message.len().min(room - HEADER_BYTES - 1);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: `end + 1` bytes from the message field lie within struct_size.
    unsafe {
        let base = err.cast::<u8>();
        base.add(std::mem::offset_of!(folio_error, status))
            .cast::<i32>()
            .write_unaligned(status.0);
        let text = base.add(HEADER_BYTES);
        text.copy_from_nonoverlapping(message.as_ptr(), end);
        text.add(end).write(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_at_a_character_boundary() {
        let mut err = folio_error {
            struct_size: 8 + 6,
            status: FOLIO_OK,
            message: [0x55; 504],
        };
        // SAFETY: a whole folio_error behind the pointer.
        unsafe { report(&mut err, FOLIO_ERR_SHAPE, "abcd·efgh") };
        let bytes: Vec<u8> = err.message[..7].iter().map(|&c| c as u8).collect();
        assert_eq!(bytes, b"abcd\0\x55\x55");
        assert_eq!(err.status, FOLIO_ERR_SHAPE);
    }

    #[test]
    fn names_are_unique_and_known() {
        // SAFETY: a static C string.
        let name = |status| unsafe { CStr::from_ptr(folio_status_name(status)) };
        for (i, row) in NAMES.iter().enumerate() {
            assert!(NAMES[..i].iter().all(|other| other.0 != row.0));
            assert_eq!(name(row.0), row.1);
        }
        assert_eq!(name(folio_status(77)), c"unknown");
    }
}
