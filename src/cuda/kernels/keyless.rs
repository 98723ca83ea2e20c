//! Rows of kernels that serve every problem, since they take types and dims at run time or have none: combining, planning,
//! copies of pages, caches of latent records, context parallelism, indices, and trees of draft tokens. Their operators
//! have no key.

use std::sync::LazyLock;

use super::attention::{MOST_HEAD_DIM, MOST_WIDE_HEAD_DIM};
use super::row::{Row, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// The rows of one operator.
#[derive(Debug)]
pub struct Keyless {
    /// What a refusal calls the kernel.
    noun: &'static str,
    rows: LazyLock<[Row; 1]>,
}

/// Puts the partial results of split rows together, in an order that depends on how many there are.
pub static COMBINE: Keyless = Keyless {
    noun: "combine kernel",
    rows: LazyLock::new(|| [combine("combine", MOST_HEAD_DIM, true)]),
};

/// The same for runs that are added to a sum, which Hopper's kernels alone do.
pub static COMBINE_SUMS: Keyless = Keyless {
    noun: "combine kernel",
    rows: LazyLock::new(|| {
        let row = Row::for_hopper("combine_sums", COMBINE_CODE, COMBINE_THREADS);
        [with_defines(row, MOST_HEAD_DIM, true, true)]
    }),
};

/// The same for batch-invariant plans: each row in the same order whatever the others are.
pub static COMBINE_INVARIANT: Keyless = Keyless {
    noun: "combine kernel",
    rows: LazyLock::new(|| [combine("combine_invariant", MOST_HEAD_DIM, false)]),
};

/// The same as the latter for rows wider than those.
pub static COMBINE_WIDE: Keyless = Keyless {
    noun: "combine kernel",
    rows: LazyLock::new(|| [combine("combine_wide", MOST_WIDE_HEAD_DIM, false)]),
};

/// The same for the rows of MLA, which are as wide.
pub static COMBINE_LATENT: Keyless = Keyless {
    noun: "combine kernel",
    rows: LazyLock::new(|| {
        let code = ("plan/combine_latent.cu", "folio_combine_latent");
        [row("combine_latent", code, 256)]
    }),
};

/// Copies pages by pairs in device memory.
pub static KV_COPY: Keyless = Keyless {
    noun: "kv_copy kernel",
    rows: LazyLock::new(|| [row("kv_copy", ("ops/copy.cu", "folio_kv_copy"), 128)]),
};

/// The same by pairs in its parameters.
pub static KV_COPY_LIST: Keyless = Keyless {
    noun: "kv_copy kernel",
    rows: LazyLock::new(|| {
        let code = ("ops/copy.cu", "folio_kv_copy_list");
        [row("kv_copy_list", code, 128)]
    }),
};

/// Copies tokens to dense rows.
pub static KV_GATHER: Keyless = Keyless {
    noun: "kv_gather kernel",
    rows: LazyLock::new(|| {
        let code = ("ops/gather.cu", "folio_kv_gather");
        [row("kv_gather", code, 128)]
    }),
};

/// Writes new tokens to a cache in another form than plain rows.
pub static APPEND_STORED: Keyless = Keyless {
    noun: "append_stored kernel",
    rows: LazyLock::new(|| {
        let code = ("ops/append_stored.cu", "folio_append_stored");
        [row("append_stored", code, 128)]
    }),
};

/// Normalises and rotates queries and keys first.
pub static ROPE_APPEND_STORED: Keyless = Keyless {
    noun: "rope_append_stored kernel",
    rows: LazyLock::new(|| {
        let code = ("ops/rope_append_stored.cu", "folio_rope_append_stored");
        [row("rope_append_stored", code, 128)]
    }),
};

/// Copies tokens of such a cache to dense rows.
pub static GATHER_STORED: Keyless = Keyless {
    noun: "gather_stored kernel",
    rows: LazyLock::new(|| {
        let code = ("ops/gather_stored.cu", "folio_gather_stored");
        [row("gather_stored", code, 128)]
    }),
};

/// Writes new tokens to a cache of latent records.
pub static MLA_APPEND: Keyless = Keyless {
    noun: "mla_append kernel",
    rows: LazyLock::new(|| {
        [row(
            "mla_append",
            ("ops/mla_append.cu", "folio_mla_append"),
            128,
        )]
    }),
};

/// Copies latent records to dense rows.
pub static MLA_GATHER: Keyless = Keyless {
    noun: "mla_gather kernel",
    rows: LazyLock::new(|| {
        [row(
            "mla_gather",
            ("ops/mla_gather.cu", "folio_mla_gather"),
            128,
        )]
    }),
};

/// Puts the records of several ranks request by request.
pub static CP_REORDER: Keyless = Keyless {
    noun: "cp_reorder kernel",
    rows: LazyLock::new(|| {
        [row(
            "cp_reorder",
            ("ops/cp_reorder.cu", "folio_cp_reorder"),
            128,
        )]
    }),
};

/// Scales one rank's output.
pub static CP_CORRECT: Keyless = Keyless {
    noun: "cp_correct kernel",
    rows: LazyLock::new(|| {
        [row(
            "cp_correct",
            ("ops/cp_correct.cu", "folio_cp_correct"),
            128,
        )]
    }),
};

/// Makes masks of trees of draft tokens.
pub static TREE_MASK: Keyless = Keyless {
    noun: "tree_mask kernel",
    rows: LazyLock::new(|| {
        [row(
            "tree_mask",
            ("ops/tree_mask.cu", "folio_tree_mask"),
            256,
        )]
    }),
};

/// Sums up the lengths of a step.
pub static BATCH_LENGTHS: Keyless = Keyless {
    noun: "batch_lengths kernel",
    rows: LazyLock::new(|| {
        [row(
            "batch_lengths",
            ("ops/batch_lengths.cu", "folio_batch_lengths"),
            1024,
        )]
    }),
};

/// Lists pages or slots of a table.
pub static KV_INDICES: Keyless = Keyless {
    noun: "kv_indices kernel",
    rows: LazyLock::new(|| {
        [row(
            "kv_indices",
            ("ops/kv_indices.cu", "folio_kv_indices"),
            512,
        )]
    }),
};

/// Makes a block table of a list.
pub static BLOCK_TABLE: Keyless = Keyless {
    noun: "block_table kernel",
    rows: LazyLock::new(|| {
        [row(
            "block_table",
            ("ops/block_table.cu", "folio_block_table"),
            256,
        )]
    }),
};

/// Finds the slots of new tokens.
pub static SLOT_MAPPING: Keyless = Keyless {
    noun: "slot_mapping kernel",
    rows: LazyLock::new(|| {
        [row(
            "slot_mapping",
            ("ops/slot_mapping.cu", "folio_slot_mapping"),
            1024,
        )]
    }),
};

/// Lists the slots of the branches of a draft.
pub static DRAFT_KV_INDICES: Keyless = Keyless {
    noun: "draft_kv_indices kernel",
    rows: LazyLock::new(|| {
        [row(
            "draft_kv_indices",
            ("ops/draft_kv_indices.cu", "folio_draft_kv_indices"),
            512,
        )]
    }),
};

/// Folds scales that a run finds in device memory.
pub static FOLD_SCALES: Keyless = Keyless {
    noun: "fold_scales kernel",
    rows: LazyLock::new(|| {
        let code = ("ops/fold_scales.cu", "folio_fold_scales");
        [row("fold_scales", code, 128)]
    }),
};

/// Copies lengths and page ids of int64 as int32.
pub static NARROW: Keyless = Keyless {
    noun: "narrow kernel",
    rows: LazyLock::new(|| [row("narrow", ("plan/narrow.cu", "folio_narrow"), 256)]),
};

/// Writes the rule of items as a custom mask.
pub static MASK_ITEMS: Keyless = Keyless {
    noun: "mask_items kernel",
    rows: LazyLock::new(|| {
        [row(
            "mask_items",
            ("ops/mask_items.cu", "folio_mask_items"),
            256,
        )]
    }),
};

/// Makes rows of 16 bits of queries of MLA in fp8.
pub static LATENT_QUERIES: Keyless = Keyless {
    noun: "latent_queries kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/latent_queries.cu", "folio_latent_queries");
        [row("latent_queries", code, 256)]
    }),
};

/// Rounds the lse of a run to the type of the caller's tensor.
pub static ROUND_LSE: Keyless = Keyless {
    noun: "round_lse kernel",
    rows: LazyLock::new(|| {
        [row(
            "round_lse",
            ("plan/round_lse.cu", "folio_round_lse"),
            256,
        )]
    }),
};

/// Cuts work on the device.
pub static PLAN: Keyless = Keyless {
    noun: "plan kernel",
    rows: LazyLock::new(|| [row("plan", ("plan/plan.cu", "folio_plan"), 1024)]),
};

/// The same of a batch whose requests share keys.
pub static PLAN_CASCADE: Keyless = Keyless {
    noun: "plan_cascade kernel",
    rows: LazyLock::new(|| {
        let code = ("plan/plan_cascade.cu", "folio_plan_cascade");
        [row("plan_cascade", code, 1024)]
    }),
};

/// Where the rows of a batch begin that is widened for prefill.
pub static WIDEN_PLACES: Keyless = Keyless {
    noun: "widen_places kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/places.cu", "folio_widen_places");
        [row("widen_places", code, 256)]
    }),
};

/// Those rows, of keys and values in fp8.
pub static WIDEN_ROWS: Keyless = Keyless {
    noun: "widen_rows kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/widen.cu", "folio_widen_rows");
        [Row::for_hopper("widen_rows", code, 256)]
    }),
};

/// The same of keys and values in 16 bits.
pub static COPY_ROWS: Keyless = Keyless {
    noun: "copy_rows kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/widen.cu", "folio_copy_rows");
        [Row::for_hopper("copy_rows", code, 256)]
    }),
};

/// The same of keys and values in other forms than plain rows.
pub static WIDEN_STORED: Keyless = Keyless {
    noun: "widen_stored kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/widen_stored.cu", "folio_widen_stored");
        [row("widen_stored", code, 256)]
    }),
};

/// What those rows are divided by, where fp16 has to hold them.
pub static WIDEN_UNITS: Keyless = Keyless {
    noun: "widen_units kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/widen_stored.cu", "folio_widen_units");
        [row("widen_units", code, 256)]
    }),
};

/// Rows of queries in fp8.
pub static WIDEN_QUERIES: Keyless = Keyless {
    noun: "widen_queries kernel",
    rows: LazyLock::new(|| {
        let code = ("widen/widen.cu", "folio_widen_queries");
        [Row::for_hopper("widen_queries", code, 256)]
    }),
};

fn row(name: &'static str, code: (&'static str, &'static str), threads: u32) -> Row {
    Row::of_any_size(name, code, [DType::F32; 3], threads)
}

/// For rows of up to `most_columns` columns; `by_rows`: the order may depend on how many rows are split.
fn combine(name: &'static str, most_columns: u32, by_rows: bool) -> Row {
    let row = row(name, COMBINE_CODE, COMBINE_THREADS);
    with_defines(row, most_columns, by_rows, false)
}

const COMBINE_CODE: (&str, &str) = ("plan/combine.cu", "folio_combine");
const COMBINE_THREADS: u32 = 256;

/// What `kernels/plan/combine.cu` is compiled with.
fn with_defines(mut row: Row, most_columns: u32, by_rows: bool, adds: bool) -> Row {
    row.defines.extend([
        format!("FOLIO_MOST_COLUMNS={most_columns}"),
        format!("FOLIO_BY_ROWS={}", u32::from(by_rows)),
        format!("FOLIO_ADDS={}", u32::from(adds)),
    ]);
    row
}

impl Keyless {
    /// All rows.
    pub fn rows(&'static self) -> &'static [Row] {
        &*self.rows
    }

    /// Threads of a block.
    pub fn threads(&'static self) -> u32 {
        self.rows()[0].threads
    }

    /// The rows that run on the device.
    pub fn candidates(
        &'static self,
        compute_capability: (u32, u32),
    ) -> impl Iterator<Item = &'static Row> {
        self.rows()
            .iter()
            .filter(move |row| row.arch.runs_on(compute_capability))
    }

    /// The refusal of a device that no row runs on.
    pub fn unsupported(&'static self, compute_capability: (u32, u32)) -> Error {
        refusal(self.noun, compute_capability, self.rows().iter())
    }
}
