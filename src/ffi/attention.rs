//! What all attention handles share: the flags of their descs, and the bodies of their functions. A handle's
//! own file holds its desc and its signatures, each of which calls one function of this file.
//!
//! A new handle is a file like `prefill.rs` (desc, type, six signatures), its slots at the end of the table, and
//! its group in `folio.h.in`.

use super::context::folio_context;
use super::error::folio_error;
use super::guard_value::guard_value;
use super::handle::{self, Object};
use super::sized::{self, Input};
use super::status::folio_status;
use super::workspace::{folio_workspace, folio_workspace_info, workspace as memory, write_info};
use crate::api::{Attention, BatchInput, Context, Stream, Workspace, WorkspaceInfo};
use crate::error::Result;
use crate::problem::{AttentionArgs, AttentionDesc, RopeAppendArgs};
use std::ffi::{CString, c_char, c_void};

/// Runs may be captured in a CUDA graph, and planned again for the same graph: see @ref attention. No effect on
/// the CPU, whose calls are complete when they return.
pub const FOLIO_PLAN_GRAPH: u32 = 1;
/// A request's result does not depend on the other requests of its batch, to the bit.
pub const FOLIO_PLAN_BATCH_INVARIANT: u32 = 2;
/// Decode, prefill and cascade: where q and the cache are float8_e4m3, probabilities may be rounded to float8_e4m3 too, and
/// their products with values summed in the matrix unit's own precision for up to 1440 keys at a time. A permission, which
/// kernels that gain nothing by it do not use; without it probabilities keep 8 significant bits or more. The error: a
/// probability is off by up to 1/16 of itself, at random, and an output is too small by up to 1 % of its values' mean.
pub const FOLIO_PLAN_FP8_PRODUCTS: u32 = 4;
/// Decode, prefill and cascade, without new_kv_dtype: runs may have FOLIO_MASK_ITEMS. On CUDA devices the workspace is larger by
/// max_num_tokens · max_kv_len bits, for the mask that such a run makes. No effect on the CPU, which needs none.
pub const FOLIO_PLAN_MASK_ITEMS: u32 = 8;

/// A handle of the API that is made for a problem, and planned.
pub(super) trait Handle: Sized {
    type Desc;
    fn create(context: &Context, desc: Self::Desc) -> Result<Self>;
    fn kernel(&self) -> &str;
    fn workspace(&self) -> WorkspaceInfo;
}

/// One whose plan takes a batch and nothing else.
pub(super) trait PlansBatch: Handle {
    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()>;
}

impl Handle for Attention {
    type Desc = AttentionDesc;

    fn create(context: &Context, desc: AttentionDesc) -> Result<Attention> {
        Attention::new(context, desc)
    }

    fn kernel(&self) -> &str {
        self.kernel()
    }

    fn workspace(&self) -> WorkspaceInfo {
        self.workspace()
    }
}

impl PlansBatch for Attention {
    fn plan(
        &mut self,
        batch: &BatchInput,
        workspace: &Workspace,
        bytes: (usize, usize),
        stream: Stream,
    ) -> Result<()> {
        self.plan(batch, workspace, bytes, stream)
    }
}

/// What is behind every handle that is planned.
pub(super) struct Planner<H> {
    pub handle: H,
    /// The kernel's name, as C reads it.
    kernel: CString,
}

impl<H: Handle> Planner<H> {
    fn new(handle: H) -> Planner<H> {
        Planner {
            kernel: CString::new(handle.kernel()).unwrap_or_default(),
            handle,
        }
    }
}

/// What is behind decode, prefill and MLA.
pub(super) type AttentionHandle = Planner<Attention>;

/// # Safety
/// `ctx` as in [`handle::shared`], `desc` as in [`sized::parse`], `out` and `err` as in [`handle::create`].
pub(super) unsafe fn create<O, D, H>(
    ctx: *const folio_context,
    desc: *const D,
    out: *mut *mut O,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = Planner<H>>,
    D: Input<Parsed = H::Desc>,
    H: Handle,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::create_from(ctx, out, err, |ctx| {
            H::create(ctx, sized::parse(desc)?).map(Planner::new)
        })
    }
}

/// # Safety
/// `object` and `err` as in [`handle::shared`], `out` as in [`write_info`].
pub(super) unsafe fn workspace<O: Object<Value = Planner<H>>, H: Handle>(
    object: *const O,
    out: *mut folio_workspace_info,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the caller's promises.
    unsafe { handle::shared(object, err, |h| write_info(out, &h.handle.workspace())) }
}

/// # Safety
/// `object` and `err` as in [`handle::exclusive`], `batch` and `ws` as in [`sized::parse`].
pub(super) unsafe fn plan<O, B, H>(
    object: *mut O,
    batch: *const B,
    ws: *const folio_workspace,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = Planner<H>>,
    B: Input<Parsed = BatchInput>,
    H: PlansBatch,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::exclusive(object, err, |h| {
            let batch = sized::parse(batch)?;
            let (ws, bytes) = memory(ws)?;
            h.handle.plan(&batch, &ws, bytes, Stream(stream as usize))
        })
    }
}

/// # Safety
/// `object` and `err` as in [`handle::shared`], `args` as in [`sized::parse`].
pub(super) unsafe fn run<O, A>(
    object: *const O,
    args: *const A,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = AttentionHandle>,
    A: Input<Parsed = AttentionArgs>,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::shared(object, err, |h| {
            h.handle.run(&sized::parse(args)?, Stream(stream as usize))
        })
    }
}

/// # Safety
/// `object` and `err` as in [`handle::shared`], `append` and `args` as in [`sized::parse`].
pub(super) unsafe fn append_run<O, P, A>(
    object: *const O,
    append: *const P,
    args: *const A,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status
where
    O: Object<Value = AttentionHandle>,
    P: Input<Parsed = RopeAppendArgs>,
    A: Input<Parsed = AttentionArgs>,
{
    // SAFETY: the caller's promises.
    unsafe {
        handle::shared(object, err, |h| {
            let (append, args) = (sized::parse(append)?, sized::parse(args)?);
            h.handle.append_run(&append, &args, Stream(stream as usize))
        })
    }
}

/// The kernel's name; NULL for a NULL handle.
///
/// # Safety
/// `object` as in [`handle::value`].
pub(super) unsafe fn kernel<O: Object<Value = Planner<H>>, H: Handle>(
    object: *const O,
) -> *const c_char {
    guard_value(std::ptr::null(), || {
        // SAFETY: the caller's promise.
        let handle = unsafe { handle::value(object) };
        handle.map_or(std::ptr::null(), |handle| handle.kernel.as_ptr())
    })
}

/// `value`, or what 0 stands for.
pub(super) fn or(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

#[cfg(test)]
mod tests {
    use super::super::batch::folio_batch;
    use super::super::decode::folio_decode;
    use super::super::status::{FOLIO_ERR_INTERNAL, FOLIO_OK};
    use super::super::tensor::{folio_dtype, folio_tensor};
    use super::*;
    use crate::api::{Context, Workspace, WorkspaceInfo};
    use crate::backend::{
        self, AttentionOps, Backend, CacheOps, IndexOps, MergeOps, ProjectionOps, TreeOps,
    };
    use crate::dtype::DType;
    use crate::error::Result;
    use crate::log::Logger;
    use crate::problem::{
        Batch, Checked, Kind, KvLayout, KvStorage, TailCosts, Tiling, WorkList, Workers,
    };
    use crate::tensor::Device;
    use std::ptr::{null, null_mut};

    /// A backend whose plans panic, in a thread of its own.
    #[derive(Debug)]
    struct Fragile;

    impl Backend for Fragile {
        fn device(&self) -> Device {
            Device::Cpu
        }
    }

    impl AttentionOps for Fragile {
        fn attention(&self, _: &AttentionDesc) -> Result<Box<dyn backend::Attention>> {
            Ok(Box::new(Fragile))
        }
    }

    impl CacheOps for Fragile {}

    impl IndexOps for Fragile {}
    impl MergeOps for Fragile {}
    impl ProjectionOps for Fragile {}
    impl TreeOps for Fragile {}

    impl backend::Attention for Fragile {
        fn kernel(&self) -> &str {
            "fragile"
        }
        fn tiling(&self) -> Tiling {
            Tiling {
                q_tile: 1,
                q_parts: 1,
                kv_unit: 1,
                unit_bytes: u32::MAX,
                max_splits: 0,
                max_shares: 0,
                tail: TailCosts::NO_TAIL,
                takes_shares: false,
                least_gain: 0,
                rows_of_unit: 0,
                invariant_chunk: 1,
                combine_units: 0,
                own_key_bytes: 0,
                workers: Workers::ONE,
            }
        }
        fn workspace(&self) -> WorkspaceInfo {
            WorkspaceInfo {
                alignment: 1,
                ..WorkspaceInfo::default()
            }
        }
        fn plan(&mut self, _: &Batch<'_>, _: &WorkList, _: &Workspace, _: Stream) -> Result<()> {
            std::thread::scope(|threads| {
                threads.spawn(|| panic!("on purpose: a thread of the backend"));
            });
            Ok(())
        }
        fn run(&self, _: &Checked<AttentionArgs>, _: Stream) -> Result<()> {
            Ok(())
        }
    }

    fn desc() -> AttentionDesc {
        AttentionDesc {
            kind: Kind::Decode,
            q_dtype: DType::F32,
            kv_format: DType::F32.into(),
            o_dtype: DType::F32,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 8,
            head_dim_vo: 8,
            kv: KvStorage::Paged {
                page_size: 1,
                layout: KvLayout::Nhd,
            },
            max_batch_size: 1,
            max_qo_len: 1,
            max_num_tokens: 0,
            max_kv_len: 1,
            max_num_pages: 0,
            graph: false,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        }
    }

    fn indices(values: &mut [i32], shape: &mut i64) -> folio_tensor {
        folio_tensor {
            data: values.as_mut_ptr().cast(),
            device_type: 1,
            device_id: 0,
            ndim: 1,
            dtype: folio_dtype {
                code: 0,
                bits: 32,
                lanes: 1,
            },
            shape,
            strides: null_mut(),
            byte_offset: 0,
        }
    }

    /// Plans a batch of no requests.
    fn plan_nothing(handle: *mut folio_decode) -> folio_status {
        let (mut one, mut none, mut first) = (1, 0, [0]);
        let kv_indptr = indices(&mut first, &mut one);
        let kv_indices = indices(&mut [], &mut none);
        let batch = folio_batch {
            struct_size: size_of::<folio_batch>() as u32,
            flags: 0,
            qo_len: 0,
            reserved: 0,
            qo_indptr: null(),
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            last_page_len: null(),
            kv_len: null(),
            block_table: null(),
            window_left: 0,
        };
        // SAFETY: a live handle that nobody else uses, and live structs.
        unsafe { plan(handle, &batch, null(), null_mut(), null_mut()) }
    }

    #[test]
    fn a_panic_in_a_thread_of_the_backend_poisons_its_handle_only() {
        let context = Context::with_backend(Box::new(Fragile), Logger::silent());
        let make = || Attention::new(&context, desc()).map(AttentionHandle::new);
        let mut info = folio_workspace_info {
            struct_size: size_of::<folio_workspace_info>() as u32,
            reserved: 0,
            device_bytes: 0,
            host_bytes: 0,
            alignment: 0,
        };
        let (mut one, mut other): (*mut folio_decode, *mut folio_decode) = (null_mut(), null_mut());
        // SAFETY: pointers that are local, NULL or made by `create`; each handle is destroyed once.
        unsafe {
            assert_eq!(handle::create(&mut one, null_mut(), make), FOLIO_OK);
            assert_eq!(handle::create(&mut other, null_mut(), make), FOLIO_OK);
            assert_eq!(workspace(one, &mut info, null_mut()), FOLIO_OK);
            assert_eq!(plan_nothing(one), FOLIO_ERR_INTERNAL);
            assert_eq!(workspace(one, &mut info, null_mut()), FOLIO_ERR_INTERNAL);
            assert_eq!(plan_nothing(one), FOLIO_ERR_INTERNAL);
            assert!(!kernel(one).is_null(), "a name is never spoilt");
            assert_eq!(workspace(other, &mut info, null_mut()), FOLIO_OK);
            handle::destroy(one);
            handle::destroy(other);
        }
    }
}
