//! Sized structs: the growth rule of the ABI, as in Linux's `openat2(2)`.
//!
//! The caller states its `sizeof` in the first field. A shorter struct is filled up with zeros (old
//! caller, new library). A longer one is accepted iff every byte beyond ours is zero (new caller, old
//! library), so a field that this library does not know is refused, never ignored. A size that no version can have, because
//! it would end inside of a pointer, is refused.

use crate::error::{Error, Result};
use std::mem::MaybeUninit;

/// No struct will ever be larger; a larger struct_size is garbage.
const MOST_BYTES: usize = 1 << 16;

/// An input struct that begins with `struct_size` and `flags`.
///
/// # Safety
/// The type is `repr(C)`, begins with two `u32`, has no padding, and every bit pattern is a value of it.
pub(super) unsafe trait Input: Copy {
    /// The C name, for messages.
    const NAME: &'static str;
    /// `sizeof` in the first release.
    const FIRST_SIZE: usize;
    /// Every flag that this library knows.
    const FLAGS: u32;
    /// What the layers behind this one take.
    type Parsed;

    /// Translates a struct that [`read`] has copied; refuses numbers that are none.
    ///
    /// # Safety
    /// What the pointers of the struct point to is as their fields say.
    unsafe fn parse(&self) -> Result<Self::Parsed>;
}

/// Copies the caller's struct and translates it.
///
/// # Safety
/// As [`read`] and [`Input::parse`].
pub(super) unsafe fn parse<T: Input>(source: *const T) -> Result<T::Parsed> {
    // SAFETY: the caller's promises.
    unsafe { read(source)?.parse() }
}

/// Copies the caller's struct, by the rule above.
///
/// # Safety
/// `source` is NULL or points to as many readable bytes as its first four say, four at least.
pub(super) unsafe fn read<T: Input>(source: *const T) -> Result<T> {
    let name = T::NAME;
    if source.is_null() {
        return Err(Error::InvalidArgument(format!(
            "{name}: NULL is not accepted; a pointer to the struct is"
        )));
    }
    let bytes = source.cast::<u8>();
    // SAFETY: four bytes are readable.
    let size = unsafe { bytes.cast::<u32>().read_unaligned() } as usize;
    check_size::<T>(name, size, T::FIRST_SIZE)?;
    let ours = size_of::<T>();
    // SAFETY: `size` bytes are readable.
    let tail =
        unsafe { std::slice::from_raw_parts(bytes.add(ours.min(size)), size.saturating_sub(ours)) };
    if let Some(at) = tail.iter().position(|&byte| byte != 0) {
        return Err(Error::UnknownField(format!(
            "{name}: byte {} is not zero and lies in a field that this library does not know; zero is accepted",
            ours + at
        )));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: source and target hold `min(ours, size)` bytes, and any bytes make a `T`.
    let value = unsafe {
        value
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(bytes, ours.min(size));
        value.assume_init()
    };
    // SAFETY: `T` begins with two u32.
    let flags = unsafe { (&raw const value).cast::<u32>().add(1).read() };
    if flags & !T::FLAGS != 0 {
        return Err(Error::UnknownField(format!(
            "{name}.flags: {:#x} is not known; a combination of {:#x} is accepted",
            flags & !T::FLAGS,
            T::FLAGS
        )));
    }
    Ok(value)
}

/// Refuses sizes that no version of the struct has. The ABI's structs have no padding, so every version ends at a multiple
/// of the alignment, and none inside of a field.
fn check_size<T>(name: &str, size: usize, first_size: usize) -> Result<()> {
    let align = align_of::<T>();
    if (first_size..=MOST_BYTES).contains(&size) && size.is_multiple_of(align) {
        return Ok(());
    }
    Err(Error::InvalidStructSize(format!(
        "{name}.struct_size: {size} is not accepted; sizeof({name}), a multiple of {align} from {first_size} to {MOST_BYTES}, is"
    )))
}

/// Refuses reserved fields that are not zero.
pub(super) fn reserved(name: &str, value: u32) -> Result<()> {
    if value == 0 {
        return Ok(());
    }
    Err(Error::UnknownField(format!(
        "{name}: {value} is not accepted in a reserved field; 0 is"
    )))
}

/// Writes an output struct: the part that both sides know, zeros in what only the caller knows; the
/// caller's struct_size stays.
///
/// # Safety
/// `target` is NULL or points to as many writable bytes as its first four say, four at least. `T` is
/// `repr(C)`, begins with a `u32` struct_size and has no padding.
pub(super) unsafe fn write<T: Copy>(
    name: &str,
    target: *mut T,
    value: T,
    first_size: usize,
) -> Result<()> {
    if target.is_null() {
        return Err(Error::InvalidArgument(format!(
            "{name}: NULL is not accepted; a pointer to the struct is"
        )));
    }
    let bytes = target.cast::<u8>();
    // SAFETY: four bytes are readable.
    let size = unsafe { bytes.cast::<u32>().read_unaligned() } as usize;
    check_size::<T>(name, size, first_size)?;
    let common = size.min(size_of::<T>());
    // SAFETY: `size` bytes are writable, and `value` has `common` bytes.
    unsafe {
        bytes
            .add(4)
            .copy_from_nonoverlapping((&raw const value).cast::<u8>().add(4), common - 4);
        bytes.add(common).write_bytes(0, size - common);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Debug, Clone, Copy, PartialEq)]
    struct Grown {
        struct_size: u32,
        flags: u32,
        old: u64,
        new: u64,
    }

    // SAFETY: repr(C), two u32 first, integers only, no padding.
    unsafe impl Input for Grown {
        const NAME: &'static str = "grown";
        const FIRST_SIZE: usize = 16;
        const FLAGS: u32 = 3;
        type Parsed = Grown;

        unsafe fn parse(&self) -> Result<Grown> {
            Ok(*self)
        }
    }

    /// A struct of `size` bytes among guard bytes, which `read` must not look at.
    fn caller(size: u32, flags: u32, fill: u8) -> Vec<u8> {
        let mut bytes = vec![fill; size.max(8) as usize];
        bytes[..4].copy_from_slice(&size.to_ne_bytes());
        bytes[4..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend([0xee; 16]);
        bytes
    }

    fn parsed(bytes: &[u8]) -> Result<Grown> {
        // SAFETY: as many bytes as struct_size says.
        unsafe { parse(bytes.as_ptr().cast::<Grown>()) }
    }

    #[test]
    fn shorter_structs_are_filled_with_zeros() {
        let value = parsed(&caller(16, 1, 0x11)).unwrap();
        assert_eq!((value.old, value.new), (0x1111_1111_1111_1111, 0));
    }

    #[test]
    fn equal_and_longer_zero_structs_are_accepted() {
        assert_eq!(
            parsed(&caller(24, 1, 0x11)).unwrap().new,
            0x1111_1111_1111_1111
        );
        let mut longer = caller(40, 1, 0);
        assert!(parsed(&longer).is_ok());
        longer[39] = 1;
        assert!(matches!(parsed(&longer), Err(Error::UnknownField(_))));
    }

    #[test]
    fn implausible_sizes_null_and_unknown_flags_are_refused() {
        for size in [0, 4, 15, 20, 23, 25, 1 << 20] {
            let bytes = [caller(24, 0, 0), vec![]].concat();
            let mut bytes = bytes;
            bytes[..4].copy_from_slice(&u32::to_ne_bytes(size));
            assert!(
                matches!(parsed(&bytes), Err(Error::InvalidStructSize(_))),
                "{size}"
            );
        }
        assert!(matches!(
            parsed(&caller(24, 4, 0)),
            Err(Error::UnknownField(_))
        ));
        // SAFETY: NULL is refused before any read.
        let null = unsafe { read(std::ptr::null::<Grown>()) };
        assert!(matches!(null, Err(Error::InvalidArgument(_))));
    }

    #[test]
    fn outputs_keep_to_the_callers_size() {
        let value = Grown {
            struct_size: 24,
            flags: 7,
            old: 8,
            new: 9,
        };
        for size in [16usize, 24, 32] {
            let mut bytes = caller(size as u32, 0, 0x11);
            // SAFETY: as many bytes as struct_size says.
            unsafe { write("grown", bytes.as_mut_ptr().cast::<Grown>(), value, 16) }.unwrap();
            assert_eq!(bytes[..4], (size as u32).to_ne_bytes());
            assert_eq!(bytes[8..16], 8u64.to_ne_bytes());
            if size > 16 {
                assert_eq!(bytes[16..24], 9u64.to_ne_bytes());
            }
            assert!(bytes[24.min(size)..size].iter().all(|&b| b == 0));
            assert!(bytes[size..].iter().all(|&b| b == 0xee), "guard bytes");
        }
    }
}
