//! What the cases of the backend share: a context on the stub's device, tensors in memory that nobody
//! looks into, and attention handles with a workspace.

use folio::api::{Attention, BatchInput, Context, Target, Workspace, WorkspaceInfo};
use folio::backend::Stream;
use folio::cuda::params::Divisor;
use folio::dtype::DType;
use folio::error::Result;
use folio::log::Logger;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage};
use folio::tensor::{Device, Tensor};

pub const PAGE_SIZE: u32 = 16;
pub const HEADS: u32 = 8;
pub const DIM: u32 = 128;

/// Streams of stub.c.
pub const OURS: Stream = Stream(0x1000);
pub const FOREIGN: Stream = Stream(0x2000);
pub const CAPTURED: Stream = Stream(0x3000);

/// Device memory that nobody looks into.
pub const SOMEWHERE: usize = 0x7000_0000;
/// The device part of a workspace.
pub const WORKSPACE: usize = 0x50_0000_0000;

/// A context on the stub's device that logs nothing.
pub fn context() -> Context {
    context_with(Logger::silent())
}

/// A context on the stub's device.
pub fn context_with(logger: Logger) -> Context {
    Context::new(Target::Cuda { ordinal: 0 }, logger).unwrap()
}

/// Decode in bf16 over a paged cache.
pub fn desc(graph: bool) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Decode,
        q_dtype: DType::BF16,
        kv_format: DType::BF16.into(),
        o_dtype: DType::BF16,
        num_qo_heads: HEADS,
        num_kv_heads: HEADS,
        head_dim_qk: DIM,
        head_dim_vo: DIM,
        kv: KvStorage::Paged {
            page_size: PAGE_SIZE,
            layout: KvLayout::Nhd,
        },
        max_batch_size: 4,
        max_qo_len: 1,
        max_num_tokens: 4,
        max_kv_len: 1 << 16,
        max_num_pages: 0,
        graph,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

/// A compact tensor in the stub's device memory.
pub fn device_tensor(dtype: DType, shape: &[i64]) -> Tensor {
    at(SOMEWHERE, dtype, shape, None)
}

/// A tensor in the stub's device memory.
pub fn at(address: usize, dtype: DType, shape: &[i64], strides: Option<&[i64]>) -> Tensor {
    let (data, device) = (address as *mut u8, Device::Cuda(0));
    // SAFETY: the stub's device never touches memory.
    let tensor = unsafe { Tensor::new("test", data, device, dtype, shape, strides) };
    tensor.unwrap()
}

/// Host memory for a handle's workspace, whose device part nobody looks into.
pub struct Room {
    info: WorkspaceInfo,
    host: Vec<u64>,
}

impl Room {
    pub fn new(info: WorkspaceInfo) -> Room {
        Room {
            info,
            host: vec![0; info.host_bytes / 8 + 1024],
        }
    }

    /// The workspace, and the bytes of its parts on the device and the host.
    pub fn workspace(&mut self) -> (Workspace, (usize, usize)) {
        let first = self.first();
        let workspace = Workspace {
            device: WORKSPACE,
            host: self.host[first..].as_mut_ptr() as usize,
        };
        (workspace, (self.info.device_bytes, self.info.host_bytes))
    }

    /// What the host part holds.
    pub fn host(&self) -> &[u64] {
        &self.host[self.first()..][..self.info.host_bytes / 8]
    }

    /// Where the host part starts.
    fn first(&self) -> usize {
        let start = self.host.as_ptr() as usize;
        (start.next_multiple_of(self.info.alignment) - start) / 8
    }
}

/// A handle with room for its plans.
pub struct Handle {
    pub attention: Attention,
    pub room: Room,
}

impl Handle {
    /// A handle of [`desc`].
    pub fn new(context: &Context, graph: bool) -> Result<Handle> {
        Handle::of(context, desc(graph))
    }

    pub fn of(context: &Context, desc: AttentionDesc) -> Result<Handle> {
        let attention = Attention::new(context, desc)?;
        Ok(Handle {
            room: Room::new(attention.workspace()),
            attention,
        })
    }

    pub fn plan(&mut self, batch: &BatchInput, stream: Stream) -> Result<()> {
        let (workspace, bytes) = self.room.workspace();
        self.attention.plan(batch, &workspace, bytes, stream)
    }

    /// Plans two requests of `kv_len` keys each from host lengths.
    pub fn plan_host(&mut self, kv_len: i32, stream: Stream) -> Result<()> {
        let columns = (kv_len as usize).div_ceil(PAGE_SIZE as usize);
        let table: Vec<i32> = (0..2 * columns as i32).collect();
        let lengths = [kv_len; 2];
        let batch = BatchInput {
            kv_len: host_tensor(&lengths, &[2]),
            block_table: host_tensor(&table, &[2, columns as i64]),
            ..BatchInput::default()
        };
        self.plan(&batch, stream)
    }

    /// Plans two requests from device lengths.
    pub fn plan_device(&mut self, stream: Stream) -> Result<()> {
        self.plan_device_at(SOMEWHERE, SOMEWHERE, stream)
    }

    /// The same, of lengths and page ids at these addresses.
    pub fn plan_device_at(&mut self, lengths: usize, ids: usize, stream: Stream) -> Result<()> {
        let batch = BatchInput {
            kv_len: Some(at(lengths, DType::I32, &[2], None)),
            block_table: Some(at(ids, DType::I32, &[2, 64], None)),
            ..BatchInput::default()
        };
        self.plan(&batch, stream)
    }

    /// Plans two requests from device lengths and page ids in CSR form.
    pub fn plan_csr(&mut self, stream: Stream) -> Result<()> {
        let batch = BatchInput {
            kv_len: Some(device_tensor(DType::I32, &[2])),
            kv_indptr: Some(device_tensor(DType::I32, &[3])),
            kv_indices: Some(device_tensor(DType::I32, &[64])),
            ..BatchInput::default()
        };
        self.plan(&batch, stream)
    }

    /// Runs [`plain`].
    pub fn run(&self, stream: Stream) -> Result<()> {
        self.attention.run(&plain(), stream)
    }
}

/// A run of [`desc`] that states nothing but the tensors.
pub fn plain() -> AttentionArgs {
    let heads = i64::from(HEADS);
    let dim = i64::from(DIM);
    let cache = [1 << 14, i64::from(PAGE_SIZE), heads, dim];
    AttentionArgs::new(
        device_tensor(DType::BF16, &[4, heads, dim]),
        device_tensor(DType::BF16, &cache),
        device_tensor(DType::BF16, &cache),
        device_tensor(DType::BF16, &[4, heads, dim]),
    )
}

/// A compact tensor in host memory.
pub fn host_tensor(values: &[i32], shape: &[i64]) -> Option<Tensor> {
    let data = values.as_ptr() as *mut u8;
    // SAFETY: every caller keeps `values` until `plan` has returned.
    let tensor = unsafe { Tensor::new("test", data, Device::Cpu, DType::I32, shape, None) };
    Some(tensor.unwrap())
}

/// What a kernel computes with a divisor.
pub fn divides(n: u32, d: Divisor) -> u32 {
    let high = (u64::from(n) * u64::from(d.multiplier)) >> 32;
    ((high + u64::from(n)) >> d.shift) as u32
}
