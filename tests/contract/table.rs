//! A table of calls that are wrong in one number each.

use crate::fixture::Reply;
use folio::ffi::*;

/// What to change, the status, and words of the message.
pub type Row<'a, T> = (&'a dyn Fn(&mut T), folio_status, &'a [&'a str]);

pub const INVALID: folio_status = FOLIO_ERR_INVALID_ARGUMENT;
pub const UNSUPPORTED: folio_status = FOLIO_ERR_UNSUPPORTED;
pub const UNKNOWN: folio_status = FOLIO_ERR_UNKNOWN_FIELD;

/// Makes every call of a table.
pub fn check<T: Copy>(right: &T, call: impl Fn(&T) -> Reply, rows: &[Row<'_, T>]) {
    call(right).assert_ok("the right call");
    for (n, (change, status, words)) in rows.iter().enumerate() {
        let mut wrong = *right;
        change(&mut wrong);
        call(&wrong).assert(&format!("row {n}, {words:?}"), *status, words);
    }
    call(right).assert_ok("the right call after the wrong ones");
}

/// One int64 of a tensor of a batch.
pub fn poke_wide(tensor: *const folio_tensor, at: usize, value: i64) {
    // SAFETY: as in `poke`.
    unsafe {
        let data = (*tensor).data.byte_add((*tensor).byte_offset as usize);
        data.cast::<i64>().add(at).write(value);
    }
}

/// One int32 of a tensor of a batch.
pub fn poke(tensor: *const folio_tensor, at: usize, value: i32) {
    // SAFETY: an index tensor of the fixture, on the host; nobody else uses it.
    unsafe {
        let data = (*tensor).data.byte_add((*tensor).byte_offset as usize);
        data.cast::<i32>().add(at).write(value);
    }
}
