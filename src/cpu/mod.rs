//! The CPU backend, and the float64 oracle that all backends are tested against.

pub mod reference;
