//! Create, plan and run of a handle of any kind, through the table of C functions.

#![allow(unsafe_code)]

use super::corrupt::{Rng, corrupt};
use super::guarded::Guarded;
use super::oracle::Refusal;
use super::prefixes::Prefixes;
use super::structs::Struct;
use crate::common::c_door::{api, init, message, report};
use crate::common::memory::Memory;
use folio::ffi::*;
use folio::tensor::Device;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// Workspaces beyond this are not allocated; the call ends before its plan.
const MOST_WORKSPACE: u64 = 1 << 26;

/// The kinds of handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    Decode,
    Prefill,
    Mla,
    Cascade,
}

/// What is wrong with the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workspace {
    Right,
    Null,
    Short,
    Skew,
    StructSize,
    Flags,
}

/// The structs of one problem.
pub struct Structs {
    pub door: Door,
    pub desc: Struct,
    pub batch: Struct,
    /// Cascades: what requests share.
    pub prefixes: Option<Prefixes>,
    pub args: Struct,
    pub workspace: Workspace,
    pub stream: usize,
}

impl Structs {
    /// Corrupts up to three things.
    pub fn corrupt(&mut self, rng: &mut Rng) -> (String, usize) {
        let mut count = 1 + rng.below(3);
        if rng.one_in(16) {
            let faults = [
                Workspace::Null,
                Workspace::Short,
                Workspace::Skew,
                Workspace::StructSize,
                Workspace::Flags,
            ];
            self.workspace = rng.pick(&faults);
            count -= 1;
        }
        if rng.one_in(60) {
            self.stream = 0x1000;
        }
        let parts = &mut [&mut self.desc, &mut self.batch, &mut self.args];
        let mut text = corrupt(parts, count, rng);
        text += &format!(
            "  workspace: {:?}, stream: {:#x}\n",
            self.workspace, self.stream
        );
        (text, count)
    }
}

/// A live handle.
#[derive(Clone, Copy)]
enum Object {
    Decode(*mut folio_decode),
    Prefill(*mut folio_prefill),
    Mla(*mut folio_mla),
    Cascade(*mut folio_cascade),
}

/// A handle with its workspace.
struct Handle {
    object: Object,
    workspace: Guarded,
    device_workspace: Guarded,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by _create and not used afterwards.
        unsafe {
            match self.object {
                Object::Decode(handle) => api().decode_destroy.unwrap()(handle),
                Object::Prefill(handle) => api().prefill_destroy.unwrap()(handle),
                Object::Mla(handle) => api().mla_destroy.unwrap()(handle),
                Object::Cascade(handle) => api().cascade_destroy.unwrap()(handle),
            }
        }
    }
}

/// A call's report as a refusal.
fn refused(call: impl FnOnce(&mut folio_error) -> folio_status) -> Result<(), Refusal> {
    let mut err = report();
    match call(&mut err) {
        FOLIO_OK => Ok(()),
        status => {
            assert_eq!(err.status, status, "the report carries the status");
            Err(Refusal {
                status,
                message: message(&err),
            })
        }
    }
}

/// What a create function gives.
fn created<T>(
    create: impl FnOnce(&mut *mut T, &mut folio_error) -> folio_status,
) -> Result<*mut T, Refusal> {
    let mut handle = null_mut();
    refused(|err| create(&mut handle, err))?;
    Ok(handle)
}

impl Handle {
    fn create(ctx: *const folio_context, structs: &Structs) -> Result<Handle, Refusal> {
        let desc = &structs.desc;
        // SAFETY: a live context, and structs as large as they say.
        let object = unsafe {
            match structs.door {
                Door::Decode => Object::Decode(created(|out, err| {
                    api().decode_create.unwrap()(ctx, desc.pointer(), out, err)
                })?),
                Door::Prefill => Object::Prefill(created(|out, err| {
                    api().prefill_create.unwrap()(ctx, desc.pointer(), out, err)
                })?),
                Door::Mla => Object::Mla(created(|out, err| {
                    api().mla_create.unwrap()(ctx, desc.pointer(), out, err)
                })?),
                Door::Cascade => Object::Cascade(created(|out, err| {
                    api().cascade_create.unwrap()(ctx, desc.pointer(), out, err)
                })?),
            }
        };
        Ok(Handle {
            object,
            workspace: Guarded::new(Device::Cpu),
            device_workspace: Guarded::new(Device::Cuda(0)),
        })
    }

    fn info(&self) -> folio_workspace_info {
        // SAFETY: integers behind the size.
        let mut info: folio_workspace_info = unsafe { init() };
        // SAFETY: a live handle.
        let outcome = refused(|err| unsafe {
            let info = &mut info;
            match self.object {
                Object::Decode(handle) => api().decode_workspace.unwrap()(handle, info, err),
                Object::Prefill(handle) => api().prefill_workspace.unwrap()(handle, info, err),
                Object::Mla(handle) => api().mla_workspace.unwrap()(handle, info, err),
                Object::Cascade(handle) => api().cascade_workspace.unwrap()(handle, info, err),
            }
        });
        outcome.expect("a live handle says what it needs");
        info
    }

    /// A workspace of exactly the bytes that are needed, or not quite.
    fn workspace(&self, info: &folio_workspace_info, fault: Workspace) -> folio_workspace {
        // SAFETY: integers and addresses behind the size.
        let mut ws: folio_workspace = unsafe { init() };
        let whole = |bytes: u64| bytes.next_multiple_of(info.alignment.max(1)) as usize;
        (ws.host_bytes, ws.device_bytes) = (info.host_bytes, info.device_bytes);
        ws.host = self.workspace.alloc(whole(info.host_bytes)) as *mut c_void;
        ws.device = self.device_workspace.alloc(whole(info.device_bytes)) as *mut c_void;
        match fault {
            Workspace::Right | Workspace::Null => {}
            Workspace::Short => {
                ws.host_bytes = ws.host_bytes.saturating_sub(1);
                ws.device_bytes = ws.device_bytes.saturating_sub(1);
            }
            Workspace::Skew => {
                ws.host = ws.host.wrapping_byte_sub(1);
                ws.device = ws.device.wrapping_byte_sub(1);
            }
            Workspace::StructSize => ws.struct_size = 7,
            Workspace::Flags => ws.flags = 1,
        }
        ws
    }

    fn plan(
        &self,
        batch: &Struct,
        prefixes: Option<&Prefixes>,
        ws: *const folio_workspace,
        stream: usize,
    ) -> Result<(), Refusal> {
        let (batch, stream) = (batch.pointer(), stream as *mut c_void);
        // SAFETY: a live handle that nobody else uses, and structs as large as they say.
        refused(|err| unsafe {
            match self.object {
                Object::Decode(handle) => {
                    api().decode_plan.unwrap()(handle, batch, ws, stream, err)
                }
                Object::Prefill(handle) => {
                    api().prefill_plan.unwrap()(handle, batch, ws, stream, err)
                }
                Object::Mla(handle) => api().mla_plan.unwrap()(handle, batch, ws, stream, err),
                Object::Cascade(handle) => {
                    let stated = prefixes.map(Prefixes::stated);
                    let prefixes = stated
                        .as_ref()
                        .map_or(null(), |stated| (&raw const *stated).cast());
                    api().cascade_plan.unwrap()(handle, batch, prefixes, ws, stream, err)
                }
            }
        })
    }

    fn run(&self, args: &Struct, stream: usize) -> Result<(), Refusal> {
        let stream = stream as *mut c_void;
        // SAFETY: as in `plan`.
        refused(|err| unsafe {
            match self.object {
                Object::Decode(handle) => {
                    api().decode_run.unwrap()(handle, args.pointer(), stream, err)
                }
                Object::Prefill(handle) => {
                    api().prefill_run.unwrap()(handle, args.pointer(), stream, err)
                }
                Object::Mla(handle) => api().mla_run.unwrap()(handle, args.pointer(), stream, err),
                Object::Cascade(handle) => {
                    api().cascade_run.unwrap()(handle, args.pointer(), stream, err)
                }
            }
        })
    }
}

/// Why a call that was accepted so far went no further.
fn too_large() -> Refusal {
    Refusal {
        status: FOLIO_ERR_OUT_OF_MEMORY,
        message: "ws: more than the fuzzer wants to give".into(),
    }
}

/// A handle that is planned. Where `refused_plan` is given, it is planned again, and that must be refused.
fn planned(
    ctx: *const folio_context,
    structs: &Structs,
    refused_plan: Option<&Struct>,
) -> Result<Handle, Refusal> {
    let handle = Handle::create(ctx, structs)?;
    let info = handle.info();
    if info.host_bytes.saturating_add(info.device_bytes) > MOST_WORKSPACE {
        return Err(too_large());
    }
    let ws = handle.workspace(&info, structs.workspace);
    let given: *const folio_workspace = match structs.workspace {
        Workspace::Null => null(),
        _ => &ws,
    };
    let prefixes = structs.prefixes.as_ref();
    handle.plan(&structs.batch, prefixes, given, structs.stream)?;
    if let Some(batch) = refused_plan
        && handle.plan(batch, prefixes, given, structs.stream).is_ok()
    {
        return Err(Refusal {
            status: FOLIO_OK,
            message: "batch: accepted after all".into(),
        });
    }
    Ok(handle)
}

/// Create, plan and run. Where `refused_plan` is given, it is planned in between, and must be refused.
pub fn call(
    ctx: *const folio_context,
    structs: &Structs,
    refused_plan: Option<&Struct>,
) -> Result<(), Refusal> {
    planned(ctx, structs, refused_plan)?.run(&structs.args, structs.stream)
}

/// The same for a decode step whose tokens are appended first: by one call, or by two.
pub fn append_and_run(
    ctx: *const folio_context,
    structs: &Structs,
    append: &Struct,
    by_one_call: bool,
) -> Result<(), Refusal> {
    let handle = planned(ctx, structs, None)?;
    let Object::Decode(decode) = handle.object else {
        unreachable!("only decode handles append");
    };
    let (args, stream) = (&structs.args, structs.stream as *mut c_void);
    if by_one_call {
        // SAFETY: a live handle, and structs as large as they say.
        return refused(|err| unsafe {
            let append_run = api().decode_append_run.unwrap();
            append_run(decode, append.pointer(), args.pointer(), stream, err)
        });
    }
    // SAFETY: a live context, and a struct as large as it says.
    refused(|err| unsafe { api().rope_append.unwrap()(ctx, append.pointer(), stream, err) })?;
    handle.run(args, structs.stream)
}
