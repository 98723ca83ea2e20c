//! A stream of work on a device. The CPU has none.

/// A CUDA stream handle as the caller gave it (0 is the legacy default stream); 0 on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stream(pub usize);
