//! Planning: pure functions from lengths and limits to work, and from work to the bytes that workers read. No
//! device, no clock.

mod capacity;
mod context_chunks;
mod image;
mod reserve;
mod schedule;
mod shares;
mod starts;

pub use capacity::{Capacity, Counts};
pub use context_chunks::{ContextChunks, Piece, default_chunk_tokens, most_chunks};
pub use image::{Layout, PARTS_ALIGNMENT, Regions, write};
pub use schedule::schedule;
pub use starts::{device_page_ids, num_copied_page_ids};
