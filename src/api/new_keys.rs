//! The checks of keys and values beside the cache: of the desc that announces them, and of the tensors. What computes with
//! them is in `extend`.

use super::check::{Extent, required};
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionDesc, Kind, KvStorage};
use crate::tensor::{Device, Tensor};

/// A position plus or minus an unlimited window stays within i32 in every kernel.
const MOST_KEYS: u32 = 1 << 29;

/// Checks what a desc with new keys asks for beyond what every desc must be.
pub(super) fn check(desc: &AttentionDesc) -> Result<()> {
    let Some(new_kv) = desc.new_kv else {
        return Ok(());
    };
    if desc.kind != Kind::Prefill {
        return Err(Error::Unsupported(format!(
            "new_kv_dtype: {new_kv} is not supported but by prefill; all keys in the cache are"
        )));
    }
    if desc.kv == KvStorage::Ragged {
        return Err(Error::InvalidArgument(format!(
            "new_kv_dtype: {new_kv} is not accepted with FOLIO_KV_RAGGED, whose keys are all new; all zero is"
        )));
    }
    let is_kv = new_kv.is_fp8() || new_kv == desc.q_dtype;
    if !is_kv {
        return Err(Error::Unsupported(format!(
            "new_kv_dtype: {new_kv} is not supported with q_dtype {}; the same type, float8_e4m3 and float8_e5m2 are",
            desc.q_dtype
        )));
    }
    if desc.mask_items {
        return Err(Error::Unsupported(
            "flags: FOLIO_PLAN_MASK_ITEMS (8) is not supported with new_kv_dtype; a handle without the flag is, whose runs have FOLIO_MASK_ITEMS on the CPU".into(),
        ));
    }
    if desc.max_kv_len > MOST_KEYS {
        return Err(Error::Unsupported(format!(
            "max_kv_len: {} is not supported with new_kv_dtype; up to {MOST_KEYS} is",
            desc.max_kv_len
        )));
    }
    Ok(())
}

/// Refuses new keys where all are in the cache.
pub(super) fn unwanted(args: &AttentionArgs) -> Result<()> {
    for (name, tensor) in [("k_new", args.k_new), ("v_new", args.v_new)] {
        if tensor.is_some() {
            return Err(Error::InvalidArgument(format!(
                "{name}: a tensor is not accepted by a handle without new_kv_dtype; NULL is"
            )));
        }
    }
    Ok(())
}

/// `k_new` and `v_new`, checked: `[row, 1, head, dim]`, as ragged caches are.
pub(super) fn rows(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    num_tokens: i64,
    device: Device,
) -> Result<[Tensor; 2]> {
    let rows = |name, tensor, dim: u32| {
        let extents = [
            Extent::AtLeast(num_tokens),
            Extent::Is(desc.num_kv_heads.into()),
            Extent::Is(dim.into()),
        ];
        let dtype = desc.new_kv.unwrap_or(desc.q_dtype);
        let named = required(name, tensor)?.on(device)?.of(dtype)?;
        let rows = named.shaped(&extents)?.unit_last_stride()?;
        Ok(rows.tensor.insert_dim(1))
    };
    Ok([
        rows("k_new", args.k_new, desc.head_dim_qk)?,
        rows("v_new", args.v_new, desc.head_dim_vo)?,
    ])
}
