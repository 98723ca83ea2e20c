//! Rows of the kernels that compute absorbed multi-head latent attention, and the key that a problem finds them by:
//! the type of its queries, how its cache stores a token's record, and the widths of the record's parts.

use std::sync::LazyLock;

use super::row::{Arch, Row, Sizes, defines, name, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// The widest latent and rotary rows of the contract: those of DeepSeek-V2 and its successors.
const MOST_KV_LORA_RANK: u32 = 512;
const MOST_QK_ROPE_HEAD_DIM: u32 = 64;

/// Which kernel a row is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlaVariant {
    /// `sm90/mla/mla.cu`: Hopper, tiles of 64 rows, 16-bit records in boxes of tensor maps.
    Sm90,
    /// `sm90/mla/mla_rows.cu`: the same rows, 16-bit records token by token.
    Sm90Rows,
    /// `sm90/mla_gather/mla_gather.cu`: the same rows, fp8 records token by token.
    Sm90Gather,
    /// `generic/mla.cu`: mma.sync, for these widths and narrower ones.
    Generic,
    /// `sm90/mla_few/mla_few.cu`: Hopper, tiles of 16 rows.
    Sm90Few {
        /// How records come.
        keys: RecordSource,
    },
}

/// How the Hopper kernel for few rows brings records to shared memory; the numbers are `FOLIO_MLA_KEYS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordSource {
    /// In boxes of tensor maps.
    Boxes = 0,
    /// Row by row.
    Rows = 1,
    /// Each by a copy of its own.
    Records = 2,
}

/// How a cache stores the record of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RecordFormat {
    /// Elements one after another.
    Plain(DType),
    /// `fp8_ds_mla`: 656 bytes.
    DsMla,
}

/// One variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlaRow {
    /// The code.
    pub row: Row,
    /// Which kernel.
    pub variant: MlaVariant,
    /// Type of the queries, and of the output.
    pub q: DType,
    /// The cache.
    pub format: RecordFormat,
    /// Sizes.
    pub shape: MlaShape,
}

impl AsRef<Row> for MlaRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// One size that a kernel is compiled for. To the portable kernel a problem's rows may be narrower: it masks the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaShape {
    /// Elements of a latent row.
    pub kv_lora_rank: u32,
    /// Elements of a rotary row.
    pub qk_rope_head_dim: u32,
    /// Query rows of a block: heads of one token or of several.
    pub q_tile: u32,
    /// Keys of a step.
    pub kv_tile: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// What a problem asks of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaQuery {
    /// The device's.
    pub compute_capability: (u32, u32),
    /// Type of the queries, and of the output.
    pub q: DType,
    /// The cache.
    pub format: RecordFormat,
    /// Elements of a latent row.
    pub kv_lora_rank: u32,
    /// Elements of a rotary row.
    pub qk_rope_head_dim: u32,
}

/// All rows, the preferred ones first.
pub fn rows() -> &'static [MlaRow] {
    static ROWS: LazyLock<Vec<MlaRow>> = LazyLock::new(|| {
        let of_type = |q| {
            [
                RecordFormat::Plain(q),
                RecordFormat::Plain(DType::F8E4M3),
                RecordFormat::Plain(DType::F8E5M2),
                RecordFormat::DsMla,
            ]
            .map(|format| generic(q, format))
        };
        let types = [DType::BF16, DType::F16];
        few_rows()
            .chain(types.map(sm90))
            .chain(types.map(sm90_rows))
            .chain(sm90_gather())
            .chain(types.into_iter().flat_map(of_type))
            .collect()
    });
    &ROWS
}

/// The rows that compute the problem on the device, the preferred ones first.
pub fn candidates(query: MlaQuery) -> impl Iterator<Item = &'static MlaRow> {
    rows().iter().filter(move |row| row.fits(&query))
}

/// The refusal of a problem that no row fits: says what there is.
pub fn unsupported(query: &MlaQuery) -> Error {
    let problem = format!(
        "mla kernel for q {}, kv {}, kv_lora_rank {}, qk_rope_head_dim {}",
        query.q.name(),
        query.format.name(),
        query.kv_lora_rank,
        query.qk_rope_head_dim,
    );
    refusal(
        &problem,
        query.compute_capability,
        rows().iter().map(|row| &row.row),
    )
}

impl RecordFormat {
    fn name(self) -> &'static str {
        match self {
            RecordFormat::Plain(dtype) => dtype.name(),
            RecordFormat::DsMla => "fp8_ds_mla",
        }
    }

    /// Type of the latent elements.
    fn latent(self) -> DType {
        match self {
            RecordFormat::Plain(dtype) => dtype,
            RecordFormat::DsMla => DType::F8E4M3,
        }
    }
}

impl MlaRow {
    fn fits(&self, query: &MlaQuery) -> bool {
        (self.q, self.format) == (query.q, query.format)
            && self.row.arch.runs_on(query.compute_capability)
            && self.takes(self.shape.kv_lora_rank, query.kv_lora_rank)
            && self.takes(self.shape.qk_rope_head_dim, query.qk_rope_head_dim)
    }

    /// Whether rows of `wanted` elements fit one compiled for `width`.
    fn takes(&self, width: u32, wanted: u32) -> bool {
        match self.variant {
            MlaVariant::Generic => width >= wanted,
            _ => width == wanted,
        }
    }
}

/// Query rows of a block of the Hopper kernels for many rows.
const MANY_ROWS: u32 = 64;

/// What their warpgroups tell each other by, rounded up to the alignment of their stages: 528 bytes and three barriers for a
/// stage, and what there is once. The kernels assert that it is enough.
fn words_bytes(stages: u32) -> u32 {
    (stages * 552 + 640).next_multiple_of(1024)
}

fn many_shape(kv_tile: u32, threads: u32) -> MlaShape {
    MlaShape {
        kv_lora_rank: MOST_KV_LORA_RANK,
        qk_rope_head_dim: MOST_QK_ROPE_HEAD_DIM,
        q_tile: MANY_ROWS,
        kv_tile,
        threads,
    }
}

/// A row of the Hopper kernel for boxes: four stages of 48 records, and the rotary queries.
fn sm90(q: DType) -> MlaRow {
    let code = ("sm90/mla/mla.cu", "folio_sm90_mla", "tma");
    half_records(q, MlaVariant::Sm90, code, many_shape(48, 384), 4, 1)
}

/// A row of the Hopper kernel for 16-bit records in any pages: five stages of 32, the rotary queries and 64 columns of the latent
/// ones.
fn sm90_rows(q: DType) -> MlaRow {
    let code = ("sm90/mla/mla_rows.cu", "folio_sm90_mla_rows", "gather");
    half_records(q, MlaVariant::Sm90Rows, code, many_shape(32, 512), 5, 2)
}

/// `code`: the source, its symbol, and how the name says that records come. `query_tiles`: of 64 columns, in shared memory.
fn half_records(
    q: DType,
    variant: MlaVariant,
    (source, symbol, records): (&'static str, &'static str, &str),
    shape: MlaShape,
    stages: u32,
    query_tiles: u32,
) -> MlaRow {
    let queries = query_tiles * shape.q_tile * 128;
    let shared_bytes = stages * shape.kv_tile * shape.row_bytes() + queries + words_bytes(stages);
    let mut parts = shape.name_parts();
    parts.push(records.into());
    MlaRow {
        row: Row {
            name: name("mla", Arch::Sm90a, (q, q), &parts),
            operator: "mla",
            arch: Arch::Sm90a,
            source,
            symbol,
            defines: defines((q, q, None), &shape.sizes(), shared_bytes),
            threads: shape.threads,
            shared_bytes,
            bundled: true,
        },
        variant,
        q,
        format: RecordFormat::Plain(q),
        shape,
    }
}

/// Rows of the Hopper kernel for fp8 records. The rotary part of `fp8_ds_mla` is bf16, and is multiplied as it is.
fn sm90_gather() -> impl Iterator<Item = MlaRow> {
    let of_type = |q| [DType::F8E4M3, DType::F8E5M2].map(|kv| gather(q, RecordFormat::Plain(kv)));
    let plain = [DType::BF16, DType::F16].into_iter().flat_map(of_type);
    plain.chain([gather(DType::BF16, RecordFormat::DsMla)])
}

/// Two stages of 64 records as 16-bit elements, and the queries.
fn gather(q: DType, format: RecordFormat) -> MlaRow {
    let shape = many_shape(64, 512);
    let shared_bytes = (2 * shape.kv_tile + shape.q_tile) * shape.row_bytes() + words_bytes(2);
    let (arch, latent) = (Arch::Sm90a, format.latent());
    let is_ds_mla = format == RecordFormat::DsMla;
    let mut defines = defines((q, latent, None), &shape.sizes(), shared_bytes);
    defines.push(format!("FOLIO_DS_MLA={}", u32::from(is_ds_mla)));
    let mut parts = shape.name_parts();
    if is_ds_mla {
        parts.insert(0, "ds".into());
    }
    parts.push("gather".into());
    MlaRow {
        row: Row {
            name: name("mla", arch, (q, latent), &parts),
            operator: "mla",
            arch,
            source: "sm90/mla_gather/mla_gather.cu",
            symbol: "folio_sm90_mla_gather",
            defines,
            threads: shape.threads,
            shared_bytes,
            bundled: true,
        },
        variant: MlaVariant::Sm90Gather,
        q,
        format,
        shape,
    }
}

/// A row of the portable kernel. Its shared memory, 80 KiB for 16-bit records and 76 KiB for others, is within the
/// 99 KiB of sm_86 and sm_89, and two blocks share the 164 KiB of sm_80.
fn generic(q: DType, format: RecordFormat) -> MlaRow {
    let shape = MlaShape {
        kv_lora_rank: MOST_KV_LORA_RANK,
        qk_rope_head_dim: MOST_QK_ROPE_HEAD_DIM,
        q_tile: 32,
        kv_tile: 16,
        threads: 128,
    };
    let (arch, latent) = (Arch::Sm80, format.latent());
    let shared_bytes = generic_shared_bytes(latent, shape);
    let mut defines = defines((q, latent, None), &shape.sizes(), shared_bytes);
    let is_ds_mla = format == RecordFormat::DsMla;
    defines.push(format!("FOLIO_DS_MLA={}", u32::from(is_ds_mla)));
    let mut parts = shape.name_parts();
    if is_ds_mla {
        parts.insert(0, "ds".into());
    }
    MlaRow {
        row: Row {
            name: name("mla", arch, (q, latent), &parts),
            operator: "mla",
            arch,
            source: "generic/mla.cu",
            symbol: "folio_mla",
            defines,
            threads: shape.threads,
            shared_bytes,
            bundled: true,
        },
        variant: MlaVariant::Generic,
        q,
        format,
        shape,
    }
}

/// For each warp: two stages of its columns of the keys, or three of fp8, with 64 bytes for the rotary part of each
/// key; its parts of the dot products of two tiles; the latent part of the second 16 query rows; the rotary part of all.
fn generic_shared_bytes(latent: DType, shape: MlaShape) -> u32 {
    let warps = shape.threads / 32;
    let columns = shape.kv_lora_rank / warps;
    let stages = if latent.is_fp8() { 3 } else { 2 };
    let keys = stages * shape.kv_tile * (columns * latent.size() as u32 + 64);
    let products = 2 * shape.q_tile * shape.kv_tile * 4;
    warps * (keys + products + 16 * columns * 2 + shape.q_tile * 64)
}

/// Shared memory of the Hopper kernels for few rows: all that a block can have. The ring of records takes nearly all.
const FEW_SHARED_BYTES: u32 = 232_448;

/// Rows of the Hopper kernels for few rows. 16-bit records come by tensor maps or row by row, the others one by one,
/// whatever the size of a page is.
fn few_rows() -> impl Iterator<Item = MlaRow> {
    let half = [DType::BF16, DType::F16].into_iter().flat_map(|q| {
        [RecordSource::Boxes, RecordSource::Rows].map(|keys| few(q, RecordFormat::Plain(q), keys))
    });
    let bytes = [DType::BF16, DType::F16].into_iter().flat_map(|q| {
        [DType::F8E4M3, DType::F8E5M2]
            .map(|kv| few(q, RecordFormat::Plain(kv), RecordSource::Records))
    });
    // Their rotary part is bf16, and is multiplied as it is.
    let ds_mla = few(DType::BF16, RecordFormat::DsMla, RecordSource::Records);
    half.chain(bytes).chain([ds_mla])
}

fn few(q: DType, format: RecordFormat, keys: RecordSource) -> MlaRow {
    // Warps that load, beside two warpgroups that multiply.
    let (loaders, symbol, suffix) = match keys {
        RecordSource::Boxes => (1, "folio_sm90_mla_few_tma", "tma"),
        RecordSource::Rows => (4, "folio_sm90_mla_few_gather", "gather"),
        RecordSource::Records => (4, "folio_sm90_mla_few_records", "records"),
    };
    let shape = MlaShape {
        kv_lora_rank: 512,
        qk_rope_head_dim: 64,
        q_tile: 16,
        kv_tile: 64,
        threads: 32 * (8 + loaders),
    };
    let (arch, latent) = (Arch::Sm90a, format.latent());
    let is_ds_mla = format == RecordFormat::DsMla;
    let mut defines = defines((q, latent, None), &shape.sizes(), FEW_SHARED_BYTES);
    defines.push(format!("FOLIO_DS_MLA={}", u32::from(is_ds_mla)));
    defines.push(format!("FOLIO_MLA_KEYS={}", keys as u32));
    let ds = is_ds_mla.then_some("ds");
    let parts: Vec<String> = ds
        .into_iter()
        .chain(["r512", "q16", suffix])
        .map(str::to_owned)
        .collect();
    MlaRow {
        row: Row {
            name: name("mla", arch, (q, latent), &parts),
            operator: "mla",
            arch,
            source: "sm90/mla_few/mla_few.cu",
            symbol,
            defines,
            threads: shape.threads,
            shared_bytes: FEW_SHARED_BYTES,
            bundled: true,
        },
        variant: MlaVariant::Sm90Few { keys },
        q,
        format,
        shape,
    }
}

impl MlaShape {
    /// Of a query, and of a record once its elements have 16 bits.
    fn row_bytes(&self) -> u32 {
        2 * (self.kv_lora_rank + self.qk_rope_head_dim)
    }

    fn name_parts(&self) -> Vec<String> {
        vec![
            format!("r{}", self.kv_lora_rank),
            format!("q{}", self.q_tile),
        ]
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            head_dim_qk: self.kv_lora_rank + self.qk_rope_head_dim,
            head_dim_vo: self.kv_lora_rank,
            q_tile: self.q_tile,
            kv_tile: self.kv_tile,
            threads: self.threads,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(format: RecordFormat) -> MlaQuery {
        MlaQuery {
            compute_capability: (8, 6),
            q: DType::BF16,
            format,
            kv_lora_rank: MOST_KV_LORA_RANK,
            qk_rope_head_dim: MOST_QK_ROPE_HEAD_DIM,
        }
    }

    #[test]
    fn every_device_has_a_row_for_every_format() {
        for format in [
            RecordFormat::Plain(DType::BF16),
            RecordFormat::Plain(DType::F8E4M3),
            RecordFormat::Plain(DType::F8E5M2),
            RecordFormat::DsMla,
        ] {
            for compute_capability in [(8, 0), (8, 9), (9, 0), (12, 0)] {
                let query = MlaQuery {
                    compute_capability,
                    ..query(format)
                };
                let row = candidates(query).last().unwrap();
                assert!(row.variant == MlaVariant::Generic && row.row.shared_bytes <= 99 << 10);
            }
        }
    }

    #[test]
    fn a_refusal_lists_what_there_is() {
        let query = query(RecordFormat::Plain(DType::F16));
        assert_eq!(candidates(query).count(), 0);
        let message = unsupported(&query).to_string();
        assert!(message.contains("kv float16"), "{message}");
        assert!(message.contains("mla_sm80_bf16_r512_q32"), "{message}");
    }
}
