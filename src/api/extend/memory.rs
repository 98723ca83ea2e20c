//! The workspace: those of the passes, and the states that they leave.
#![allow(unsafe_code)]

use super::desc::Problems;
use crate::backend::{Workspace, WorkspaceInfo};
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::PARTS_ALIGNMENT;
use crate::tensor::{Device, Tensor};

/// Where everything is, as offsets from the starts of the workspace.
pub(super) struct Memory {
    device: Device,
    dtype: DType,
    /// `[max_num_tokens, num_qo_heads, head_dim_vo]`.
    shape: [i64; 3],
    cached_o: usize,
    cached_lse: usize,
    new_o: Option<usize>,
    new_lse: usize,
    info: WorkspaceInfo,
}

/// The tensors of a plan.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    /// The pass over the cache: `[max_num_tokens, num_qo_heads, head_dim_vo]`, and without the last in fp32.
    pub cached_o: Tensor,
    pub cached_lse: Tensor,
    /// The same of the pass over the new keys. `None`: it writes to the output.
    pub new_o: Option<Tensor>,
    /// Where the caller has no lse of fp32.
    pub new_lse: Tensor,
}

impl Memory {
    pub fn new(problems: &Problems, device: Device) -> Memory {
        let desc = &problems.cached;
        let shape = [desc.max_num_tokens, desc.num_qo_heads, desc.head_dim_vo].map(i64::from);
        let mut memory = Memory {
            device,
            dtype: desc.o_dtype,
            shape,
            cached_o: 0,
            cached_lse: 0,
            new_o: None,
            new_lse: 0,
            info: WorkspaceInfo {
                alignment: PARTS_ALIGNMENT,
                ..WorkspaceInfo::default()
            },
        };
        memory.cached_o = memory.rows(desc.o_dtype, &shape);
        memory.cached_lse = memory.rows(DType::F32, &shape[..2]);
        memory.new_lse = memory.rows(DType::F32, &shape[..2]);
        memory.new_o = match problems.converts {
            true => Some(memory.rows(desc.o_dtype, &shape)),
            false => None,
        };
        memory
    }

    /// Places a pass's workspace.
    pub fn place(&mut self, part: &WorkspaceInfo) -> Workspace {
        self.info.place(part)
    }

    /// Places a tensor where the device has them.
    fn rows(&mut self, dtype: DType, shape: &[i64]) -> usize {
        let elements = shape
            .iter()
            .fold(1usize, |all, &n| all.saturating_mul(n as usize));
        let bytes = elements.saturating_mul(dtype.size());
        let (device_bytes, host_bytes) = match self.device {
            Device::Cpu => (0, bytes),
            Device::Cuda(_) => (bytes, 0),
        };
        let at = self.place(&WorkspaceInfo {
            device_bytes,
            host_bytes,
            ..WorkspaceInfo::default()
        });
        match self.device {
            Device::Cpu => at.host,
            Device::Cuda(_) => at.device,
        }
    }

    /// What the caller has to bring.
    pub fn info(&self) -> WorkspaceInfo {
        self.info
    }

    /// The tensors in the caller's workspace, which has the size of `info`.
    pub fn buffers(&self, workspace: &Workspace) -> Result<Buffers> {
        let base = match self.device {
            Device::Cpu => workspace.host,
            Device::Cuda(_) => workspace.device,
        };
        let tensor = |dtype, at: usize, shape: &[i64]| {
            // SAFETY: the workspace has this part, which is the plan's alone, and starts on its alignment.
            unsafe {
                let data = base.wrapping_add(at) as *mut u8;
                Tensor::new("workspace", data, self.device, dtype, shape, None)
            }
        };
        let new_o = |at| tensor(self.dtype, at, &self.shape);
        Ok(Buffers {
            cached_o: tensor(self.dtype, self.cached_o, &self.shape)?,
            cached_lse: tensor(DType::F32, self.cached_lse, &self.shape[..2])?,
            new_o: self.new_o.map(new_o).transpose()?,
            new_lse: tensor(DType::F32, self.new_lse, &self.shape[..2])?,
        })
    }
}
