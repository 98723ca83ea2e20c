//! The portable attention kernels for caches in other forms than rows of plain elements, `kernels/generic/decode_stored.cu`
//! and `attention_stored.cu`: they take every run over such a cache.
#![allow(unsafe_code)]

use super::features::Features;
use super::generic::Generic;
use super::kernel::{AttentionKernel, Run};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current};
use crate::cuda::params::row_alignment;
use crate::cuda::stored_params::{Stored as StoredCache, StoredAttentionParams};
use crate::error::{Error, Result};
use crate::problem::{AttentionDesc, CacheForm, CacheFormat, RowTensors, Tiling};

/// What a row that is copied ahead is aligned to, and the scales of its blocks.
const ROW_ALIGNMENT: u32 = 16;
const SCALES_ALIGNMENT: i64 = 4;

/// Tokens of a column of packed values that are copied together.
const PACKED_TOKENS: i64 = 8;

/// The kernel for one problem.
#[derive(Debug)]
pub struct Stored {
    generic: Generic,
    format: CacheFormat,
}

impl Stored {
    /// Loads the row for a problem.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for fp32 queries; otherwise as [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Stored> {
        let format = desc.kv_format;
        if desc.q_dtype.size() != 2 {
            return Err(Error::Unsupported(format!(
                "kv_format: FOLIO_KV_FORMAT_{} is not supported with q_dtype {} by a CUDA context; q_dtype float16 and bfloat16 are",
                format.form().name(),
                desc.q_dtype
            )));
        }
        let generic = Generic::load(loader, context, desc)?;
        Ok(Stored { generic, format })
    }
}

impl AttentionKernel for Stored {
    fn name(&self) -> &str {
        self.generic.name()
    }

    fn tiling(&self) -> Tiling {
        self.generic.tiling()
    }

    fn missing(&self, _: &Run<'_>) -> Features {
        Features::default()
    }

    fn launch(&self, current: &Current<'_>, run: &Run<'_>, stream: Stream) -> Result<()> {
        let caches = run.args.caches(self.format);
        let params = StoredAttentionParams {
            generic: self.generic.params(run),
            cache: StoredCache::of(&caches, [1.0; 2]),
            copied_ahead: caches.iter().all(is_copied_ahead).into(),
            reserved: 0,
        };
        // SAFETY: the kernel takes a `FolioStoredAttentionParams`; its addresses are the caller's tensors, which
        // were checked against the plan, and the workspace.
        unsafe { self.generic.enqueue(current, run, &params, stream) }
    }
}

/// Rows are elements one after the other, of a byte or fewer, and aligned, as are scales of blocks. In packed order, 16 bytes
/// of a key are, and eight tokens of a value's column.
fn is_copied_ahead(cache: &RowTensors) -> bool {
    let form = cache.format.form();
    let scales_fit = match (form, &cache.scales) {
        (CacheForm::Nvfp4, Some(scales)) => {
            row_alignment(scales) >= SCALES_ALIGNMENT as u32
                && scales.extent(3) % SCALES_ALIGNMENT == 0
        }
        _ => true,
    };
    match form {
        CacheForm::PackedKeys => packed_in_chunks(cache),
        _ => row_alignment(&cache.rows) >= ROW_ALIGNMENT && scales_fit,
    }
}

fn packed_in_chunks(cache: &RowTensors) -> bool {
    let rows = &cache.rows;
    if rows.dtype().size() != 2 {
        return false;
    }
    match rows.rank() {
        5 => row_alignment(rows) >= ROW_ALIGNMENT,
        _ => {
            let others = [0, 2, 3].iter().fold(rows.address() as i64, |bits, &dim| {
                bits | rows.stride(dim).wrapping_mul(2)
            });
            rows.stride(1) == 1
                && rows.extent(1) % PACKED_TOKENS == 0
                && others % i64::from(ROW_ALIGNMENT) == 0
        }
    }
}
