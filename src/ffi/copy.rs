//! KV copy: pages from one cache to another, or within one.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::Input;
use super::status::folio_status;
use super::tensor::{folio_tensor, required, tensor};
use crate::api;
use crate::error::{Error, Result};
use crate::problem::{CopyArgs, PagesToCopy};
use std::ffi::c_void;

/// Pages to be copied: vLLM's copy_blocks and swap_blocks. A page is what an index of the first dimension covers: bytes
/// that are copied as they are, whatever they hold (fp8, fp8_ds_mla records, scales). Within a page there are no gaps, and
/// its dimensions may be in any order (NHD, HND) that is the same in src and dst; pages may be any distance apart.
///
/// src and dst may be one tensor, as for copy-on-write and defragmentation. Then no page may be the source of one pair
/// and the destination of another. No page may be the destination of two pairs. Pairs that break these rules are
/// refused where they are on the host; where they are on a device, it is not defined which of the pages is copied.
///
/// On CUDA each of src and dst may be in page-locked host memory (FOLIO_DEVICE_CUDA_HOST): pages are swapped out and in
/// by the same kernel, which reaches them over the bus.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_kv_copy_args {
    /// sizeof(folio_kv_copy_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_src_pages, ...]` of any type: keys, or a cache that has one tensor.
    pub k_src: *const folio_tensor,
    /// Output: `[num_dst_pages, ...]` of k_src's type; all but the first extent are k_src's.
    pub k_dst: *const folio_tensor,
    /// Values, copied by the same pairs in the same launch; as many pages as k_src. NULL: none.
    pub v_src: *const folio_tensor,
    /// Output: values, with as many pages as k_dst. NULL iff v_src is.
    pub v_dst: *const folio_tensor,
    /// `[n, 2]` int32 or int64: a page of src, and the page of dst that becomes its copy. A pair with a negative number is
    /// skipped. Pairs on the host are accepted by every context; they are read during the call, and a page beyond
    /// src or dst is refused. Where they are on a device, such a pair is skipped.
    pub page_pairs: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_kv_copy_args>() == 48);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_kv_copy_args {
    const NAME: &'static str = "folio_kv_copy_args";
    const FIRST_SIZE: usize = 48;
    const FLAGS: u32 = 0;
    type Parsed = CopyArgs;

    unsafe fn parse(&self) -> Result<CopyArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(CopyArgs {
                k: PagesToCopy {
                    src: required("k_src", self.k_src)?,
                    dst: required("k_dst", self.k_dst)?,
                },
                v: match (tensor("v_src", self.v_src)?, tensor("v_dst", self.v_dst)?) {
                    (None, None) => None,
                    (Some(src), Some(dst)) => Some(PagesToCopy { src, dst }),
                    (Some(_), None) => {
                        return Err(Error::InvalidArgument(
                            "v_dst: NULL is not accepted beside v_src; a tensor is".into(),
                        ));
                    }
                    (None, Some(_)) => {
                        return Err(Error::InvalidArgument(
                            "v_dst: a tensor is not accepted without v_src; NULL is".into(),
                        ));
                    }
                },
                page_pairs: required("page_pairs", self.page_pairs)?,
            })
        }
    }
}

/// Copies pages of a cache.
///
/// On CUDA it is one launch, for keys and values together. Pairs on the host travel in the kernel's parameters, 480 to a
/// launch: nothing is staged, and nothing waits. The first call on a context with pairs on the device, and the first
/// with pairs on the host, load code and answer CAPTURE in a capture. Later ones can be captured: a replay copies by the
/// pairs that the device's memory holds then, or by the host's pairs of the capture.
/// Memory in FOLIO_DEVICE_CUDA_HOST tensors is read and written in stream order: it must stay until then. On the CPU
/// the pages are copied on return.
///
/// @param ctx the device
/// @param args tensors and pairs
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was copied, but for launches before one
///         that the driver refused
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine where no page is written by one call and read or written by another.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_kv_copy(
    ctx: *const folio_context,
    args: *const folio_kv_copy_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::copy) }
}
