//! Rows of the Hopper prefill kernels.

use super::row::{
    AttentionTypes, F16_E4M3, F16_FP8, Family, Fit, HALF, KeyParts, KvRows, Logits, MOST_HEAD_DIM,
    Masks, Phase, Shape, Variant, same,
};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    // Cascades, whose plans name the items of few rows. At head_dim 64 registers would not suffice for the steps of the other
    // kernels that may take the same plan.
    Family {
        shapes: &[D128],
        fit: Fit::Exact,
        shared_bytes: own_keys_shared_bytes,
        ..whole_keys(KvRows::PagedOwn)
    },
    Family {
        shapes: &WHOLE_BLOCKS,
        fit: Fit::Exact,
        ..whole_keys(KvRows::Paged)
    },
    Family {
        shapes: &WITHIN_BLOCKS,
        ..whole_keys(KvRows::PagedColumns)
    },
    whole_keys(KvRows::Ragged),
    // Requests with few keys.
    Family {
        shapes: &FEW_KEYS,
        fit: Fit::Exact,
        ..whole_keys(KvRows::Paged)
    },
    Family {
        shapes: &[FEW_OF_128],
        ..whole_keys(KvRows::PagedColumns)
    },
    Family {
        shapes: &FEW_KEYS,
        ..whole_keys(KvRows::Ragged)
    },
    Family {
        shapes: &[FEW_OF_64],
        fit: Fit::Exact,
        ..rows()
    },
    Family {
        shapes: &[FEW_OF_128],
        ..rows()
    },
    Family {
        types: F16_E4M3,
        shapes: &FEW_KEYS,
        ..rows()
    },
    masked(KvRows::Paged),
    Family {
        shapes: &MASKED_WITHIN_BLOCKS,
        fit: Fit::UpTo,
        ..masked(KvRows::PagedColumns)
    },
    Family {
        fit: Fit::UpTo,
        ..masked(KvRows::Ragged)
    },
    Family {
        shapes: &FEW_KEYS,
        ..masked(KvRows::Paged)
    },
    Family {
        shapes: &FEW_KEYS,
        ..masked(KvRows::Ragged)
    },
    Family {
        shapes: &CAPPED_WHOLE_BLOCKS,
        ..capped(KvRows::Paged)
    },
    Family {
        shapes: &CAPPED_WITHIN_BLOCKS,
        ..capped(KvRows::PagedColumns)
    },
    capped(KvRows::Ragged),
    Family {
        shapes: &CAPPED_ONE_BY_ONE,
        symbol: ROWS_SYMBOL,
        ..capped(KvRows::Rows)
    },
    biased(KvRows::Paged),
    biased(KvRows::Ragged),
    Family {
        shapes: &[D64],
        fit: Fit::Exact,
        ..rows()
    },
    rows(),
    // fp8 keys and values, converted when they are loaded.
    Family {
        types: F16_FP8,
        shapes: &CONVERTING,
        ..rows()
    },
    // Masked runs over keys that boxes do not describe, and those of head dims that none of the other masked kernels has.
    Family {
        shapes: &[MASKED_D64],
        fit: Fit::Exact,
        ..masked_rows()
    },
    masked_rows(),
    Family {
        types: F16_FP8,
        shapes: &MASKED_CONVERTING,
        ..masked_rows()
    },
    split_keys(KvRows::Paged),
    split_keys(KvRows::Ragged),
    AFTER,
];

const fn split_keys(kv: KvRows) -> Family {
    Family {
        variant: Variant::Sm90Prefill {
            kv,
            parts: KeyParts::Two,
            masks: Masks::ByPosition,
            logits: Logits::Some,
        },
        symbol: "folio_prefill_sm90_split_keys",
        shapes: &[MLA],
        // Where the two parts of a key meet is compiled in.
        fit: Fit::Exact,
        ..whole_keys(kv)
    }
}

/// Contexts of MLA. Prompts without one take those of [`split_keys`], whose tiles are shorter by what these look up.
const AFTER: Family = Family {
    variant: Variant::Sm90Prefill {
        kv: KvRows::Ragged,
        parts: KeyParts::TwoAfter,
        masks: Masks::ByPosition,
        logits: Logits::Some,
    },
    symbol: "folio_prefill_sm90_split_keys_after",
    ..split_keys(KvRows::Ragged)
};

const ROWS_SYMBOL: &str = "folio_prefill_sm90_rows";

const fn rows() -> Family {
    Family {
        shapes: &ONE_BY_ONE,
        symbol: ROWS_SYMBOL,
        ..whole_keys(KvRows::Rows)
    }
}

/// As [`masked`].
const fn masked_rows() -> Family {
    Family {
        symbol: ROWS_SYMBOL,
        shapes: &MASKED_ONE_BY_ONE,
        fit: Fit::UpTo,
        ..masked(KvRows::Rows)
    }
}

const fn whole_keys(kv: KvRows) -> Family {
    Family {
        phase: Phase::Prefill,
        variant: Variant::Sm90Prefill {
            kv,
            parts: KeyParts::One,
            masks: Masks::ByPosition,
            logits: Logits::Some,
        },
        arch: Arch::Sm90a,
        source: "sm90/prefill/prefill.cu",
        symbol: "folio_prefill_sm90",
        types: HALF,
        any_output: true,
        shapes: &SHAPES,
        fit: Fit::UpTo,
        shared_bytes,
        bundled: true,
    }
}

/// Runs with masks that do not follow from positions take these beside those of [`whole_keys`], on the same work items.
const fn masked(kv: KvRows) -> Family {
    Family {
        variant: Variant::Sm90Prefill {
            kv,
            parts: KeyParts::One,
            masks: Masks::Any,
            logits: Logits::Some,
        },
        symbol: "folio_prefill_sm90_masked",
        shapes: &MASKED_SHAPES,
        fit: Fit::Exact,
        shared_bytes: masked_shared_bytes,
        ..whole_keys(kv)
    }
}

/// Runs with a soft cap take these instead of those of [`whole_keys`]: the same tiles and steps, and no maxima of rows. Only
/// bf16 holds all their exponentials.
const fn capped(kv: KvRows) -> Family {
    Family {
        types: BF16,
        shapes: &CAPPED_SHAPES,
        symbol: "folio_prefill_sm90_capped",
        ..with_logits(kv, Logits::Capped)
    }
}

/// Runs with ALiBi take these instead of those of [`masked`], whose steps have fewer keys; for few keys there are none.
const fn biased(kv: KvRows) -> Family {
    Family {
        shapes: &[D64, D128],
        symbol: "folio_prefill_sm90_biased",
        ..with_logits(kv, Logits::Biased)
    }
}

const fn with_logits(kv: KvRows, logits: Logits) -> Family {
    Family {
        variant: Variant::Sm90Prefill {
            kv,
            parts: KeyParts::One,
            masks: Masks::ByPosition,
            logits,
        },
        fit: match kv {
            KvRows::Paged => Fit::Exact,
            _ => Fit::UpTo,
        },
        ..whole_keys(kv)
    }
}

/// The cheapest first: a problem takes the first that it fits in, and is multiplied as if it were as wide. Three
/// consumer warpgroups of 160 registers hold DIM_VO / 2 of the output and 3 / 4 of a step's keys, up to 132 in all; two of
/// 232 hold up to 192.
const SHAPES: [Shape; 12] = [
    D64, D80, D96, D112, D128, D128_SHORT, D144, MLA, D160, D192, D224, D256,
];

/// Problems whose rows are these, as they are.
const WHOLE_BLOCKS: [Shape; 6] = [D64, D128, D128_SHORT, MLA, D192, D256];

/// For rows that are loaded one by one; what a problem's are narrower is zeros. (Those of 64 columns are whole: the kernel
/// has no registers to compare.) Steps of rows that are no whole blocks are shorter than where boxes load, for three stages.
const ONE_BY_ONE: [Shape; 7] = [ROWS_OF_80, ROWS_OF_96, D128, D128_SHORT, D160, MLA, D256];

const ROWS_OF_80: Shape = shape(80, 80, 192, 80);
const ROWS_OF_96: Shape = shape(96, 96, 192, 80);

/// For pages of all others.
const WITHIN_BLOCKS: [Shape; 10] = [D64, D80, D96, D112, D128, D144, D160, D192, D224, D256];

/// For requests with few keys: several CTAs of one warpgroup wait for the memory by turns.
const FEW_KEYS: [Shape; 2] = [FEW_OF_64, FEW_OF_128];
const FEW_OF_64: Shape = shape(64, 64, 64, 64);
const FEW_OF_128: Shape = shape(128, 128, 64, 64);

const D64: Shape = shape(64, 64, 192, 128);
const D80: Shape = shape(80, 80, 192, 112);
const D96: Shape = shape(96, 96, 192, 112);
const D112: Shape = shape(112, 112, 192, 96);
const D128: Shape = shape(128, 128, 192, 80);
const D128_SHORT: Shape = shape(128, 128, 128, 128);
const D144: Shape = shape(144, 144, 192, 64);
const D160: Shape = shape(160, 160, 192, 64);
const D192: Shape = shape(192, 192, 128, 112);
const D224: Shape = shape(224, 224, 128, 80);
const D256: Shape = shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 80);

/// With the query tiles of [`SHAPES`]. Masks take registers, and where those are full, steps have fewer keys.
const MASKED_SHAPES: [Shape; 5] = [MASKED_D64, MASKED_D128, D128_SHORT, MLA, MASKED_D256];

const MASKED_D64: Shape = shape(64, 64, 192, 64);
const MASKED_D128: Shape = shape(128, 128, 192, 64);
const MASKED_D256: Shape = shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 64);

/// The same where boxes have 64 columns each.
const MASKED_WITHIN_BLOCKS: [Shape; 2] = [shape(96, 96, 192, 80), MASKED_D128];

/// The same where rows are loaded one by one, and where they are converted.
const MASKED_ONE_BY_ONE: [Shape; 4] = [
    MASKED_D128,
    D128_SHORT,
    shape(160, 160, 192, 48),
    MASKED_D256,
];
const MASKED_CONVERTING: [Shape; 2] = [
    shape(128, 128, 192, 48),
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 48),
];

const BF16: &[AttentionTypes] = &[same(DType::BF16)];

/// With the tiles of [`SHAPES`], but for those between 128 and 256, which would spill registers.
const CAPPED_SHAPES: [Shape; 7] = [D64, D80, D96, D112, D128, D128_SHORT, D256];
const CAPPED_WHOLE_BLOCKS: [Shape; 4] = [D64, D128, D128_SHORT, D256];
const CAPPED_WITHIN_BLOCKS: [Shape; 4] = [D80, D96, D112, D128];
const CAPPED_ONE_BY_ONE: [Shape; 3] = [D128, D128_SHORT, D256];

/// Beside the tiles there are rows that are not converted yet. Those who load need registers, so that steps are shorter.
const CONVERTING: [Shape; 5] = [
    shape(64, 64, 192, 96),
    shape(128, 128, 192, 80),
    shape(160, 160, 192, 48),
    shape(192, 128, 128, 80),
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 48),
];

/// Queries and keys of 128 elements and a rotary part of 64: MLA in its multi-head form.
const MLA: Shape = shape(192, 128, 128, 128);

const fn shape(head_dim_qk: u32, head_dim_vo: u32, q_tile: u32, kv_tile: u32) -> Shape {
    Shape {
        head_dim_qk,
        head_dim_vo,
        q_tile,
        kv_tile,
        // A warpgroup of 128 threads for every 64 query rows, and one that loads.
        threads: 128 * (q_tile / 64 + 1),
    }
}

/// CTAs of a multiprocessor. The kernel says the same (`tile.cuh`).
pub fn prefill_ctas(types: AttentionTypes, shape: Shape) -> u32 {
    match (shape.q_tile, shape.head_dim_qk, types.kv.is_fp8()) {
        (64, 64, false) => 3,
        (64, _, _) => 2,
        _ => 1,
    }
}

fn shared_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    shared_bytes_beside(0, types, shape)
}

/// A row's mask by 16 bytes, for as many rows as words of 32 keys are a thread's, and the slopes of two rows, for every
/// thread that multiplies.
fn masked_shared_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    let rows_of_thread = if shape.kv_tile <= 64 { 1 } else { 2 };
    shared_bytes_beside((16 * rows_of_thread + 8) * 2 * shape.q_tile, types, shape)
}

/// A record of a tile for every warpgroup, and barriers of their own keys. The more stages, the more keys are under way:
/// Q has one buffer.
fn own_keys_shared_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    shared_bytes_with(1, 1024, types, shape)
}

/// One or two buffers of Q, two to four stages of K and V, up to twelve of what is converted, K or V of a step, 1024 bytes of
/// barriers and tile records, and `others`. Rows lie in blocks of 64 columns. The kernel computes the same
/// (`tile.cuh`), and asserts it.
fn shared_bytes_beside(others: u32, types: AttentionTypes, shape: Shape) -> u32 {
    shared_bytes_with(2, others, types, shape)
}

fn shared_bytes_with(
    most_query_stages: u32,
    others: u32,
    types: AttentionTypes,
    shape: Shape,
) -> u32 {
    // A multiprocessor's, of which a CTA takes 1024 bytes more than it asks for.
    let most_of_cta = 233_472 / prefill_ctas(types, shape) - 2 * 1024;
    const WANTED_RAW_STAGES: u32 = 6;
    const MOST_RAW_STAGES: u32 = 12;
    let row = |dim: u32| dim.next_multiple_of(64);
    let (keys, values) = (row(shape.head_dim_qk), row(shape.head_dim_vo));
    let step = 2 * shape.kv_tile * (keys + values);
    let unit = match types.kv == types.q {
        true => 0,
        false => shape.kv_tile * keys.max(values),
    };
    let queries = shape.q_tile * keys * 2;
    let most = most_of_cta - others;
    let fits_twice = 2 * queries + 2 * step + WANTED_RAW_STAGES * unit <= most;
    let query_stages = most_query_stages.min(if fits_twice { 2 } else { 1 });
    let room = most - query_stages * queries;
    let raw_stages = (room - 2 * step).checked_div(unit).unwrap_or(0);
    let raw = raw_stages.min(MOST_RAW_STAGES) * unit;
    let stages = ((room - raw) / step).min(4);
    query_stages * queries + stages * step + raw + 1024 + others
}
