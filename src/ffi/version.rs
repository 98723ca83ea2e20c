//! Versions: of the library and of the ABI.

use super::guard_value::guard_value;
use std::ffi::{CStr, c_char};

/// Major version of the ABI. While it is 0, every minor version may break.
pub const FOLIO_ABI_MAJOR: u32 = 0;
/// Minor version of the ABI.
pub const FOLIO_ABI_MINOR: u32 = 1;

/// `(major << 16) | minor` of this header.
pub const FOLIO_ABI_VERSION: u32 = 1;

const VERSION: &CStr =
    match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => c"",
    };

/// The library's version, `"MAJOR.MINOR.PATCH"`.
///
/// Any thread, any time. The string lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn folio_version() -> *const c_char {
    guard_value(std::ptr::null(), || VERSION.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_abi_version_is_the_crate_version() {
        let (major, minor) = (
            env!("CARGO_PKG_VERSION_MAJOR"),
            env!("CARGO_PKG_VERSION_MINOR"),
        );
        assert_eq!(major, FOLIO_ABI_MAJOR.to_string());
        assert_eq!(minor, FOLIO_ABI_MINOR.to_string());
        assert_eq!(FOLIO_ABI_VERSION, FOLIO_ABI_MAJOR << 16 | FOLIO_ABI_MINOR);
        assert_eq!(VERSION.to_str(), Ok(env!("CARGO_PKG_VERSION")));
    }
}
