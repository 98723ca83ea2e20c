//! Planning: pure functions from lengths and limits to work. No device, no memory, no clock.

mod schedule;

pub use schedule::schedule;
