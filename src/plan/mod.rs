//! Planning: pure functions from lengths and limits to work, and from work to the bytes that workers read. No
//! device, no clock.

mod batch_order;
mod capacity;
mod cascade;
mod cascade_chunk;
mod cascade_device;
mod chunk_size;
mod context;
mod context_chunks;
mod cut;
mod dealing;
mod divisor;
mod image;
mod item_order;
mod peers;
mod reserve;
mod schedule;
mod shared_prefixes;
mod shares;
mod starts;
mod tail;
mod tile;
mod tile_choice;

pub use batch_order::{BatchOrder, decodes_extends_prefills, decodes_first};
pub use capacity::{Capacity, Counts};
pub use cascade::{CascadeScratch, cascade};
pub use cascade_device::{cascade_on_device, may_share};
pub use chunk_size::UNITS_NOT_SPLIT;
pub use context::{ChunkTables, Ranks, context_tokens, least_workspace};
pub use context_chunks::{ContextChunks, Piece, default_chunk_tokens, most_chunks};
pub use image::{Layout, PARTS_ALIGNMENT, Regions, write};
pub use peers::{
    BatchSplit, FLASHMLA_RECORD, Machine, balanced_kv_splits, flashmla_metadata, flashmla_parts,
    keys_per_split, num_kv_splits, split_decodes_and_prefills, takes_cascade,
};
pub use schedule::{least_gain_beside_narrow, schedule};
pub use shared_prefixes::shared_prefixes;
pub use starts::{device_page_ids, num_copied_page_ids};
pub use tile_choice::quicker;
