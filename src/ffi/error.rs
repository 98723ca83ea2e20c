//! The caller-owned error report.

use super::status::folio_status;
use std::ffi::c_char;

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
    use super::super::status::{FOLIO_ERR_SHAPE, FOLIO_OK};
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
}
