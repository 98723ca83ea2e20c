//! Rows of the kernels that compute attention. `row` says what a row is and what a problem asks of one,
//! `generic`, `sm90_decode` and `sm90_prefill` are the families, `table` lists and finds them.

mod generic;
mod row;
mod sm90_decode;
mod sm90_prefill;
mod sm90_prefill_fp8;
mod table;

pub use row::{
    AttentionQuery, AttentionRow, AttentionTypes, CacheScales, Family, Fit, KeyParts, KeySource,
    KvRows, Logits, MOST_HEAD_DIM, MOST_SOFT_CAP, MOST_WIDE_HEAD_DIM, Masks, Phase, Products,
    SPLIT_ROPE_DIM, STORED, Shape, Tokens, Variant,
};
pub use sm90_prefill::prefill_ctas;
pub use table::{candidates, rows, unsupported};
