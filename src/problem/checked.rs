//! The witness that arguments passed the checks of the `api` layer. It checks nothing itself.

/// Arguments that a backend may trust: shapes, types, devices and values are as the fields' notes say, and what
/// the caller may state in several ways (cache layouts, scales that are left 0, fp8 as plain bytes) has the one
/// form that the notes call checked. Only the `api` layer makes one.
#[derive(Debug, Clone, Copy)]
pub struct Checked<T>(T);

impl<T> Checked<T> {
    /// Vouches for `args`.
    pub(crate) fn new(args: T) -> Checked<T> {
        Checked(args)
    }
}

impl<T> std::ops::Deref for Checked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
