//! Arrays and numbers on the host that functions read or write.

use crate::error::{Error, Result};

/// An input array; NULL where it has no numbers.
///
/// # Safety
/// `numbers` is NULL or holds `count` numbers until the call has returned.
pub(super) unsafe fn numbers(
    name: &str,
    numbers: *const i32,
    count: u64,
) -> Result<&'static [i32]> {
    let count = length(name, numbers, count)?;
    Ok(match count {
        0 => &[],
        // SAFETY: the caller's promise; aligned, and not NULL.
        _ => unsafe { std::slice::from_raw_parts(numbers, count) },
    })
}

/// An output array.
///
/// # Safety
/// As [`numbers`]; nobody else uses the array meanwhile.
pub(super) unsafe fn output(
    name: &str,
    numbers: *mut i32,
    count: u64,
) -> Result<&'static mut [i32]> {
    let count = length(name, numbers, count)?;
    Ok(match count {
        0 => &mut [],
        // SAFETY: the caller's promise; aligned, and not NULL.
        _ => unsafe { std::slice::from_raw_parts_mut(numbers, count) },
    })
}

/// How many numbers an array has, if that many can be.
fn length(name: &str, numbers: *const i32, count: u64) -> Result<usize> {
    if count > 0 && numbers.is_null() {
        return Err(Error::InvalidArgument(format!(
            "{name}: NULL is not accepted; {count} numbers are"
        )));
    }
    if !numbers.is_aligned() {
        return Err(Error::InvalidArgument(format!(
            "{name}: address {numbers:?} is not accepted; a multiple of 4 is"
        )));
    }
    let most = isize::MAX as u64 / size_of::<i32>() as u64;
    match count <= most {
        true => Ok(count as usize),
        false => Err(Error::InvalidArgument(format!(
            "{name}: room for {count} numbers is not accepted; up to {most} is"
        ))),
    }
}

/// An output number.
///
/// # Safety
/// `number` is NULL or one number, which nobody else uses until the call has returned.
pub(super) unsafe fn number(name: &str, number: *mut u32) -> Result<&'static mut u32> {
    // SAFETY: the caller's promise.
    unsafe { number.as_mut() }.ok_or_else(|| {
        Error::InvalidArgument(format!(
            "{name}: NULL is not accepted; a pointer to a number is"
        ))
    })
}

/// Answers with a number.
///
/// # Safety
/// `out` is NULL or one number, which nobody else uses until the call has returned.
pub(super) unsafe fn write(out: *mut u32, value: i64) -> Result<()> {
    // SAFETY: the caller's promise.
    let out = unsafe { number("out", out)? };
    *out = u32::try_from(value).unwrap_or(u32::MAX);
    Ok(())
}
