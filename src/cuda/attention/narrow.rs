//! Lengths and page ids of int64 on the device: a launch before the plan's own copies them to the workspace as int32, and the
//! plan is made of the copies.
#![allow(unsafe_code)]

use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, Current, Function, Launch, blocks_of};
use crate::cuda::kernels::Row;
use crate::cuda::kernels::keyless::NARROW;
use crate::cuda::narrow_params::{NARROW_TABLES, NarrowParams, NarrowTable};
use crate::cuda::params::Divisor;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{AttentionDesc, DeviceBatch};
use crate::tensor::Tensor;

/// The kernel for one problem.
#[derive(Debug)]
pub struct Narrow {
    row: &'static Row,
    function: Function,
    desc: AttentionDesc,
}

/// Addresses of the room in a workspace.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// [`Narrow::bytes`] for lengths.
    pub lengths: u64,
    /// For `max_num_pages` ids.
    pub page_ids: u64,
}

/// Copies that a plan needs.
#[derive(Debug)]
pub struct Copies {
    params: NarrowParams,
    count: usize,
}

impl Narrow {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Loader::find`].
    pub fn load(loader: &Loader, context: &Context, desc: &AttentionDesc) -> Result<Narrow> {
        let cc = context.device().compute_capability;
        let (row, function) = loader.find(NARROW.candidates(cc), || NARROW.unsupported(cc))?;
        Ok(Narrow {
            row,
            function,
            desc: *desc,
        })
    }

    /// Bytes of the lengths of the largest batch, each array with an element more than requests.
    pub fn bytes(desc: &AttentionDesc) -> usize {
        (NARROW_TABLES - 1) * length_bytes(desc)
    }

    /// The page ids of a batch whose lengths are on the host.
    ///
    /// # Errors
    /// As [`Narrow::batch`].
    pub fn page_ids(&self, ids: Option<Tensor>, room: Room) -> Result<Copies> {
        let mut copies = Copies::default();
        if let Some(ids) = ids.filter(is_wide) {
            copies.add(&ids, room.page_ids, self.columns(&ids))?;
        }
        Ok(copies)
    }

    /// A batch on the device as it is once the copies are made.
    ///
    /// # Errors
    /// `Internal` where an address cannot be a tensor's.
    pub fn batch(&self, batch: &DeviceBatch, room: Room) -> Result<(DeviceBatch, Copies)> {
        let mut copies = Copies::default();
        let mut narrowed = *batch;
        let lengths = [
            &mut narrowed.qo_indptr,
            &mut narrowed.kv_indptr,
            &mut narrowed.kv_len,
            &mut narrowed.last_page_len,
        ];
        for (place, tensor) in (0..).zip(lengths) {
            if let Some(wide) = tensor.filter(is_wide) {
                let to = room.lengths + place * length_bytes(&self.desc) as u64;
                *tensor = Some(copies.add(&wide, to, wide.extent(0))?);
            }
        }
        if let Some(wide) = batch.page_ids.filter(is_wide) {
            let columns = self.columns(&wide);
            narrowed.page_ids = Some(copies.add(&wide, room.page_ids, columns)?);
        }
        Ok((narrowed, copies))
    }

    /// Enqueues the kernel, where there is something to copy.
    ///
    /// # Safety
    /// The room must be as large as [`Room`] says, and the batch's tensors valid until the kernel has run.
    pub unsafe fn launch(
        &self,
        current: &Current<'_>,
        copies: &Copies,
        stream: Stream,
    ) -> Result<()> {
        let most = copies.params.tables.iter().map(|table| table.count).max();
        let blocks = (most.unwrap_or(0) as u64).div_ceil(self.row.threads.into());
        let launch = Launch {
            grid: [blocks_of("max_num_pages", blocks)?, copies.count as u32, 1],
            threads: self.row.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: the kernel takes a `FolioNarrowParams`; the rest is the caller's promise.
        unsafe { launch.enqueue(current, &self.function, &copies.params, &[]) }
    }

    /// Ids of a row that are copied.
    fn columns(&self, ids: &Tensor) -> i64 {
        match ids.rank() {
            2 => self.desc.copied_columns(ids.extent(1)),
            _ => ids.extent(0),
        }
    }
}

impl Default for Copies {
    fn default() -> Copies {
        Copies {
            params: NarrowParams {
                tables: [NarrowTable::NONE; NARROW_TABLES],
            },
            count: 0,
        }
    }
}

impl Copies {
    /// Adds the leading columns of a tensor. Returns what they become.
    fn add(&mut self, wide: &Tensor, to: u64, columns: i64) -> Result<Tensor> {
        let (rows, stride) = match wide.rank() {
            2 => (wide.extent(0), wide.stride(0)),
            _ => (1, 0),
        };
        self.params.tables[self.count] = NarrowTable {
            from: wide.address() as u64,
            to,
            stride,
            count: rows * columns,
            columns: Divisor::new(columns as u32),
            reserved: 0,
        };
        self.count += 1;
        let shape = [rows, columns];
        let shape = &shape[2 - wide.rank()..];
        // SAFETY: room of the workspace, which the host keeps for as long as the plan.
        unsafe {
            Tensor::new(
                "plan",
                to as *mut u8,
                wide.device(),
                DType::I32,
                shape,
                None,
            )
        }
    }
}

fn is_wide(tensor: &Tensor) -> bool {
    tensor.dtype() == DType::I64
}

/// Bytes of an array of lengths.
fn length_bytes(desc: &AttentionDesc) -> usize {
    size_of::<i32>() * (desc.max_batch_size as usize + 1)
}
