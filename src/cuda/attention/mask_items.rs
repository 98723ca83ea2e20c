//! Items as a custom mask: a launch before the attention kernel writes their rule as bits to the workspace, where handles made
//! for that have room for the largest batch's mask.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch};
use crate::cuda::items_params::MaskItemsParams;
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::MASK_ITEMS;
use crate::cuda::params::PlanView;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionDesc, Checked, Mask};
use crate::tensor::Tensor;

/// Blocks for each multiprocessor, over all requests.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// Requests of a launch: what a grid has room for in its second dimension.
const MOST_REQUESTS: u32 = 65535;

/// The kernel for one problem that may have items.
#[derive(Debug)]
pub struct MaskItems {
    row: &'static Row,
    function: Function,
    desc: AttentionDesc,
    blocks: u32,
}

/// Where a plan has what the kernel reads, and the room for what it writes.
#[derive(Debug, Clone, Copy)]
pub struct Places {
    pub view: PlanView,
    /// Device address of the masks' starts, in bytes.
    pub mask_start: u64,
    pub mask: u64,
}

impl MaskItems {
    /// Loads the kernel, where the problem may have items.
    ///
    /// # Errors
    /// As [`Loader::find`]; [`Error::Unsupported`] for more requests than a launch takes.
    pub fn load(
        loader: &Loader,
        context: &Context,
        desc: &AttentionDesc,
    ) -> Result<Option<MaskItems>> {
        if !desc.mask_items {
            return Ok(None);
        }
        if desc.max_batch_size > MOST_REQUESTS {
            return Err(Error::Unsupported(format!(
                "max_batch_size: {} is not supported with FOLIO_PLAN_MASK_ITEMS by the CUDA backend; up to {MOST_REQUESTS} is",
                desc.max_batch_size
            )));
        }
        let cc = context.device().compute_capability;
        let find = || MASK_ITEMS.unsupported(cc);
        let (row, function) = loader.find(MASK_ITEMS.candidates(cc), find)?;
        Ok(Some(MaskItems {
            row,
            function,
            desc: *desc,
            blocks: BLOCKS_PER_MULTIPROCESSOR * context.device().sm_count,
        }))
    }

    /// Bytes of the largest batch's mask, every request's on bytes of its own; 0 where a problem has no items.
    pub fn bytes(desc: &AttentionDesc) -> usize {
        if !desc.mask_items {
            return 0;
        }
        let elements = (desc.max_num_tokens as usize).saturating_mul(desc.max_kv_len as usize);
        (elements / 8).saturating_add(desc.max_batch_size as usize)
    }

    /// A run with items as one with the mask that the kernel writes for it.
    ///
    /// # Errors
    /// `Internal` where the room cannot be a tensor's.
    pub fn as_mask(
        &self,
        args: &Checked<AttentionArgs>,
        places: &Places,
    ) -> Result<Option<(MaskItemsParams, Checked<AttentionArgs>)>> {
        let Mask::Items { starts, positions } = args.mask else {
            return Ok(None);
        };
        let bytes = MaskItems::bytes(&self.desc) as i64;
        // SAFETY: room of the workspace, which the host keeps for as long as the plan.
        let mask = unsafe {
            let data = places.mask as *mut u8;
            let device = starts.device();
            Tensor::new("workspace", data, device, DType::U8, &[bytes], None)?
        };
        let params = MaskItemsParams {
            qo_indptr: places.view.qo_indptr,
            kv_len: places.view.kv_len,
            counts: places.view.counts,
            mask_start: places.mask_start,
            starts: starts.address() as u64,
            positions: positions.address() as u64,
            mask: places.mask,
            mask_bytes: bytes,
            columns: positions.extent(1),
        };
        let masked = AttentionArgs {
            mask: Mask::Bits(mask),
            ..**args
        };
        Ok(Some((params, Checked::new(masked))))
    }

    /// Enqueues the kernel for at most `num_requests`.
    pub fn launch(
        &self,
        current: &Current<'_>,
        items: &MaskItemsParams,
        num_requests: u32,
        stream: Stream,
    ) -> Result<()> {
        let launch = Launch {
            grid: [self.blocks.div_ceil(num_requests.max(1)), num_requests, 1],
            threads: self.row.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the kernel takes a `FolioMaskItemsParams`; its inputs are the plan and the caller's tensors, which `api`
        // checked, and it writes no byte beyond the room.
        unsafe { launch.enqueue(current, &self.function, items, &[]) }
    }
}
