//! The workspace of an MLA context handle: the workspaces of its parts, and the tensors between them.
#![allow(unsafe_code)]

use crate::backend::{Workspace, WorkspaceInfo};
use crate::dtype::DType;
use crate::error::Result;
use crate::plan::PARTS_ALIGNMENT;
use crate::problem::MlaContextDesc;
use crate::tensor::{Device, Tensor};

/// Where everything is, as offsets from the starts of the workspace.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    device: Device,
    pub new_tokens: Workspace,
    pub with_last_chunk: Workspace,
    pub chunk: Workspace,
    pub tables: Workspace,
    rows: Rows,
    info: WorkspaceInfo,
}

/// Offsets of the tensors in the half of the workspace where tensors live.
#[derive(Debug, Clone, Copy, Default)]
struct Rows {
    sum_o: usize,
    sum_lse: usize,
    part_o: usize,
    part_lse: usize,
    latent: usize,
    rope: usize,
    k_nope: usize,
    v: usize,
}

/// The tensors of a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffers {
    /// `[max_num_tokens, H, V]` fp32: what attention over the chunks so far comes to.
    pub sum_o: Tensor,
    /// `[max_num_tokens, H]` fp32.
    pub sum_lse: Tensor,
    /// The same of one part, where kernels do not add to a sum.
    pub part_o: Tensor,
    pub part_lse: Tensor,
    /// `sum_o` in the type of the desc, there too: where `part_o` is.
    pub rounded_o: Tensor,
    /// A chunk: `[max_chunk_tokens, L]`, `[…, R]`, `[…, H, P]`, `[…, H, V]`. Without rows where the caller has them.
    pub latent: Tensor,
    pub rope: Tensor,
    pub k_nope: Tensor,
    pub v: Tensor,
}

/// The memory of a handle's parts.
pub(super) struct Parts {
    pub new_tokens: WorkspaceInfo,
    pub with_last_chunk: WorkspaceInfo,
    pub chunk: WorkspaceInfo,
    pub tables: WorkspaceInfo,
}

impl Memory {
    pub fn new(desc: &MlaContextDesc, parts: &Parts, device: Device) -> Memory {
        let mut info = WorkspaceInfo {
            alignment: PARTS_ALIGNMENT,
            ..WorkspaceInfo::default()
        };
        let new_tokens = info.place(&parts.new_tokens);
        let with_last_chunk = info.place(&parts.with_last_chunk);
        let chunk = info.place(&parts.chunk);
        let tables = info.place(&parts.tables);
        let shapes = Shapes::of(desc);
        let mut rows = |dtype: DType, shape: &[i64]| {
            let elements = shape
                .iter()
                .fold(1usize, |all, &n| all.saturating_mul(n as usize));
            let bytes = elements.saturating_mul(dtype.size());
            let tensor = match device {
                Device::Cpu => WorkspaceInfo {
                    host_bytes: bytes,
                    ..WorkspaceInfo::default()
                },
                Device::Cuda(_) => WorkspaceInfo {
                    device_bytes: bytes,
                    ..WorkspaceInfo::default()
                },
            };
            let at = info.place(&tensor);
            match device {
                Device::Cpu => at.host,
                Device::Cuda(_) => at.device,
            }
        };
        let rows = Rows {
            sum_o: rows(DType::F32, &shapes.o),
            sum_lse: rows(DType::F32, &shapes.o[..2]),
            part_o: rows(DType::F32, &shapes.o),
            part_lse: rows(DType::F32, &shapes.o[..2]),
            latent: rows(desc.dtype, &shapes.latent),
            rope: rows(desc.dtype, &shapes.rope),
            k_nope: rows(desc.dtype, &shapes.k_nope),
            v: rows(desc.dtype, &shapes.v),
        };
        Memory {
            device,
            new_tokens,
            with_last_chunk,
            chunk,
            tables,
            rows,
            info,
        }
    }

    /// What the caller has to bring.
    pub fn info(&self) -> WorkspaceInfo {
        self.info
    }

    /// The tensors in the caller's workspace, which has the size of `info`.
    pub fn buffers(&self, desc: &MlaContextDesc, workspace: &Workspace) -> Result<Buffers> {
        let base = match self.device {
            Device::Cpu => workspace.host,
            Device::Cuda(_) => workspace.device,
        };
        let shapes = Shapes::of(desc);
        let tensor = |dtype, at: usize, shape: &[i64]| {
            // SAFETY: the workspace has this part, which is the plan's alone, and starts on its alignment.
            unsafe {
                let data = base.wrapping_add(at) as *mut u8;
                Tensor::new("workspace", data, self.device, dtype, shape, None)
            }
        };
        Ok(Buffers {
            sum_o: tensor(DType::F32, self.rows.sum_o, &shapes.o)?,
            sum_lse: tensor(DType::F32, self.rows.sum_lse, &shapes.o[..2])?,
            part_o: tensor(DType::F32, self.rows.part_o, &shapes.o)?,
            part_lse: tensor(DType::F32, self.rows.part_lse, &shapes.o[..2])?,
            rounded_o: tensor(desc.dtype, self.rows.part_o, &shapes.o)?,
            latent: tensor(desc.dtype, self.rows.latent, &shapes.latent)?,
            rope: tensor(desc.dtype, self.rows.rope, &shapes.rope)?,
            k_nope: tensor(desc.dtype, self.rows.k_nope, &shapes.k_nope)?,
            v: tensor(desc.dtype, self.rows.v, &shapes.v)?,
        })
    }

    /// Numbers of the tables, from the `first` on.
    pub fn table(&self, tables: usize, first: usize, count: usize) -> Result<Tensor> {
        self.numbers(DType::I32, tables, first, &[count as i64], None)
    }

    /// A number of the tables that is an fp32 one's bits, as a copy's source of so many rows and columns.
    pub fn repeated(
        &self,
        tables: usize,
        place: usize,
        [rows, columns]: [i64; 2],
    ) -> Result<Tensor> {
        let no_steps = Some(&[0; 3][..]);
        self.numbers(DType::F32, tables, place, &[1, rows, columns], no_steps)
    }

    fn numbers(
        &self,
        dtype: DType,
        tables: usize,
        first: usize,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Result<Tensor> {
        let data = tables.wrapping_add(first * size_of::<i32>()) as *mut u8;
        // SAFETY: the tables hold the numbers that shape and strides reach; they live in the plan's workspace.
        unsafe { Tensor::new("tables", data, self.device, dtype, shape, strides) }
    }
}

/// Numbers of the host as a tensor, to be read while they are there.
pub(super) fn on_host(numbers: &[i32]) -> Result<Tensor> {
    let (data, count) = (numbers.as_ptr().cast_mut().cast(), numbers.len() as i64);
    // SAFETY: nobody writes to offsets of a batch.
    unsafe { Tensor::new("tables", data, Device::Cpu, DType::I32, &[count], None) }
}

/// Shapes of the tensors.
struct Shapes {
    o: [i64; 3],
    latent: [i64; 2],
    rope: [i64; 2],
    k_nope: [i64; 3],
    v: [i64; 3],
}

impl Shapes {
    fn of(desc: &MlaContextDesc) -> Shapes {
        let tokens = match desc.in_steps {
            true => 0,
            false => desc.max_chunk_tokens,
        };
        let [rows, tokens, heads] = [desc.max_num_tokens, tokens, desc.num_heads].map(i64::from);
        let [latent, rope, nope, value] = [
            desc.kv_lora_rank,
            desc.qk_rope_head_dim,
            desc.qk_nope_head_dim,
            desc.v_head_dim,
        ]
        .map(i64::from);
        Shapes {
            o: [rows, heads, value],
            latent: [tokens, latent],
            rope: [tokens, rope],
            k_nope: [tokens, heads, nope],
            v: [tokens, heads, value],
        }
    }
}
