//! What is to be computed: the vocabulary that every layer below `ffi` shares.
//!
//! The `api` layer checks what a caller states with them; `plan` and the backends trust it then. The
//! names are the field's: `qo_indptr`, `kv_len`, `page_size`, `sm_scale`, `logits_soft_cap`, `lse`.

mod attention;
mod batch;
mod cache;
mod checked;
mod context_parallel;
mod copy;
mod format;
mod gather;
mod index;
mod merge;
mod mla_cache;
mod mla_context;
mod projection;
mod rope_append;
mod row_tensors;
mod shared;
mod tree;
mod work;

pub use attention::{
    AttentionArgs, AttentionChunks, AttentionDesc, ContextKeys, Earlier, Kind, KvLayout, KvStorage,
    LEAST_BIAS, LogBase, Mask, MaskColumns, ScoreBias, Sum, Window,
};
pub use batch::{Batch, DeviceBatch, HostBatch, Keys, PageIds, Pages, Requests};
pub use cache::AppendArgs;
pub use checked::Checked;
pub use context_parallel::{CpCorrectArgs, CpReorderArgs};
pub use copy::{CopyArgs, PagePairs, PagesToCopy};
pub use format::{CacheForm, CacheFormat, ExtraParts, RowOrder, ScaleGranularity};
pub use gather::{GatherArgs, GatheredRequests};
pub use index::{
    BatchLengthsArgs, BlockTableArgs, DraftKvIndicesArgs, DraftSlots, KvIndicesArgs, QueryRows,
    RowKind, SlotMappingArgs, TokenRows,
};
pub use merge::{MergeArgs, MergeStatesArgs, MergeVarlenArgs};
pub use mla_cache::{
    DS_MLA_BLOCK, LatentCache, LatentRecords, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary,
};
pub use mla_context::{ChunkRows, MlaContextArgs, MlaContextDesc, Unpacking, UpProjection};
pub use projection::{
    AbsorbQArgs, AbsorbWeightsArgs, CopyWeightsArgs, ProjectArgs, ProjectOArgs, UpProjectArgs,
};
pub use rope_append::{
    Angles, Frequencies, Llama3Scaling, MOST_PAIRS, MOST_ROW_ELEMENTS, Norm, Rope, RopeAppendArgs,
};
pub use row_tensors::RowTensors;
pub use shared::{SharedPrefix, SharedSegment};
pub use tree::TreeMaskArgs;
pub use work::{
    CombineItem, FreeWorkers, NO_PARTIAL, RequestStarts, SmallItems, TailCosts, Tiling, WorkItem,
    WorkList, Workers,
};
