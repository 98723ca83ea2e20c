//! Rows of the Hopper kernels for latent attention with few rows, `kernels/sm90/mla_few`.

use super::mla::{FewKeys, MlaRow, MlaShape, MlaVariant, RecordFormat};
use super::row::{Arch, Row, defines, name};
use crate::dtype::DType;

/// Of a block: everything that a multiprocessor has. The ring of records takes nearly all.
const SHARED_BYTES: u32 = 232_448;

/// All rows. 16-bit records come by tensor maps or row by row, the others one by one, whatever the size of a page is.
pub(super) fn rows() -> impl Iterator<Item = MlaRow> {
    let half = [DType::BF16, DType::F16].into_iter().flat_map(|q| {
        [FewKeys::Boxes, FewKeys::Rows].map(|keys| row(q, RecordFormat::Plain(q), keys))
    });
    let bytes = [DType::BF16, DType::F16].into_iter().flat_map(|q| {
        [DType::F8E4M3, DType::F8E5M2].map(|kv| row(q, RecordFormat::Plain(kv), FewKeys::Records))
    });
    // Their rotary part is bf16, and is multiplied as it is.
    let ds_mla = row(DType::BF16, RecordFormat::DsMla, FewKeys::Records);
    half.chain(bytes).chain([ds_mla])
}

fn row(q: DType, format: RecordFormat, keys: FewKeys) -> MlaRow {
    // Warps that multiply, four or twice four, and those that load.
    let (warps, symbol, suffix) = match keys {
        FewKeys::Boxes => (4 + 1, "folio_sm90_mla_few_tma", "tma"),
        FewKeys::Rows => (4 + 4, "folio_sm90_mla_few_gather", "gather"),
        FewKeys::Records => (8 + 4, "folio_sm90_mla_few_records", "records"),
    };
    let shape = MlaShape {
        kv_lora_rank: 512,
        qk_rope_head_dim: 64,
        q_tile: 16,
        kv_tile: 64,
        threads: 32 * warps,
    };
    let (arch, latent) = (Arch::Sm90a, format.latent());
    let is_ds_mla = format == RecordFormat::DsMla;
    let mut defines = defines((q, latent, None), &shape.sizes(), SHARED_BYTES);
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
            shared_bytes: SHARED_BYTES,
            bundled: true,
        },
        variant: MlaVariant::Sm90Few { keys },
        q,
        format,
        shape,
    }
}
