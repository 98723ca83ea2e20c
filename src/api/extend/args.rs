//! The arguments of a run over a cache and new keys: their checks, and those of each pass.

use crate::api::planned::Planned;
use crate::api::{args, new_keys};
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionDesc, Checked, Mask, MaskColumns};
use crate::tensor::{Device, Tensor};

/// Checks the arguments. Checked: `k_new` and `v_new` as [`AttentionArgs`] says.
pub(super) fn check(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<AttentionArgs> {
    if args.k_rope.is_some() {
        return Err(Error::Unsupported(
            "k_rope: a tensor is not supported with new_kv_dtype; NULL, and whole keys in k, is"
                .into(),
        ));
    }
    if args.o_scales.is_some() {
        return Err(Error::Unsupported(
            "o_scales: a tensor is not supported with new_kv_dtype; NULL, and a number in o_scale, is"
                .into(),
        ));
    }
    let [k_new, v_new] = new_keys::rows(args, desc, planned.num_tokens, device)?;
    let of_cache = AttentionArgs {
        k_new: None,
        v_new: None,
        ..*args
    };
    let checked: Checked<AttentionArgs> = args::check(&of_cache, desc, planned, device)?;
    // The new keys have no scale that would make up for a large one of the queries.
    let unscaled = AttentionArgs {
        k_scale: 1.0,
        ..*checked
    };
    args::logits_scales(&unscaled, desc)?;
    Ok(AttentionArgs {
        k_new: Some(k_new),
        v_new: Some(v_new),
        ..*checked
    })
}

/// What a row sees of the new keys follows from how far they are from it.
pub(super) fn go_by_distance(args: &AttentionArgs) -> bool {
    let counts_cached_keys = match args.mask {
        Mask::Bytes(_) | Mask::Bits(_) => args.mask_columns != MaskColumns::NewKeys,
        // Items begin at a position among all keys.
        Mask::Items { .. } => true,
        Mask::Causal | Mask::Full | Mask::CausalByRequest(_) => false,
    };
    let biases_cached_keys = args.score_bias.is_some_and(|bias| !bias.new_keys);
    !counts_cached_keys
        && !biases_cached_keys
        && args.chunks.is_none()
        && args.mm_prefix_ranges.is_none()
}

/// The pass over the cache. Sinks are the other pass's: they count once. So is a bias of new keys.
pub(super) fn of_cache(args: &AttentionArgs, o: Tensor, lse: Tensor) -> AttentionArgs {
    AttentionArgs {
        o,
        lse: Some(lse),
        o_scale: 1.0,
        sinks: None,
        score_bias: args.score_bias.filter(|bias| !bias.new_keys),
        k_new: None,
        v_new: None,
        ..*args
    }
}

/// The pass over the new keys, which no scale of the cache is of.
pub(super) fn of_new_keys(args: &AttentionArgs, o: Tensor, lse: Option<Tensor>) -> AttentionArgs {
    AttentionArgs {
        k: args.k_new.unwrap_or(args.k),
        v: args.v_new.unwrap_or(args.v),
        k_new: None,
        v_new: None,
        o,
        lse,
        o_scale: 1.0,
        k_scale: 1.0,
        k_scales: None,
        k_zero_points: None,
        v_scale: 1.0,
        v_scales: None,
        v_zero_points: None,
        ..*args
    }
}
