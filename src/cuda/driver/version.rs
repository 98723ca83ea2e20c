//! Versions of the CUDA driver: the oldest that Folio accepts, and how a version reads. What a driver's
//! version allows is said in `library.rs`.

/// The oldest driver: CUDA 12.0 is the first that has tensor maps (`cuTensorMapEncodeTiled`) beside
/// launches with attributes (`cuLaunchKernelEx`, 11.8). Cubins ask for more: see
/// [`Driver::accepts_cubins_of`](super::Driver::accepts_cubins_of).
pub const MIN_VERSION: u32 = 12000;

/// `"12.8"` of 12080.
pub fn version_name(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(version_name(12080), "12.8");
        assert_eq!(version_name(13000), "13.0");
    }
}
