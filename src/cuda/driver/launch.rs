//! Kernel launches: arguments packed on the stack, attributes, one driver call. Nothing is allocated.
//! What the kernels' arguments mean is written in `params.rs`.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::driver::sys;

use super::context::{Current, handle};
use super::module::Function;
use super::tensor_map::TensorMap;
use crate::backend::Stream;
use crate::error::{Error, Result};

/// Most tensor maps of one kernel.
pub const MAX_TENSOR_MAPS: usize = 7;

/// Shape and attributes of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of a cluster along x; 1 is no cluster. `grid[0]` must be a multiple.
    pub cluster: u32,
    /// The kernel may start while the one before it on the stream drains (programmatic dependent
    /// launch); it must wait with `griddepcontrol.wait` before it touches what that one writes.
    pub dependent: bool,
    /// Where the kernel runs.
    pub stream: Stream,
}

impl Launch {
    /// Enqueues a kernel `f(const P params, const __grid_constant__ CUtensorMap maps...)`. A grid without
    /// blocks is nothing to do.
    ///
    /// # Errors
    /// [`Error::Driver`] with the driver's words and the kernel's name.
    ///
    /// # Safety
    /// The kernel's first parameter must have the layout of `P`, and `maps.len()` tensor maps must
    /// follow it. Every address in them must be valid for what the kernel does with it, until it has run.
    pub unsafe fn enqueue<P: Copy>(
        &self,
        current: &Current<'_>,
        function: &Function,
        params: &P,
        maps: &[TensorMap],
    ) -> Result<()> {
        if self.grid.contains(&0) {
            return Ok(());
        }
        if maps.len() > MAX_TENSOR_MAPS {
            return Err(Error::Internal(format!(
                "{} tensor maps; a launch takes {MAX_TENSOR_MAPS}",
                maps.len()
            )));
        }
        let mut arguments = [std::ptr::null_mut::<c_void>(); 1 + MAX_TENSOR_MAPS];
        arguments[0] = std::ptr::from_ref(params).cast_mut().cast();
        for (argument, map) in arguments[1..].iter_mut().zip(maps) {
            *argument = std::ptr::from_ref(map).cast_mut().cast();
        }
        let mut attributes = [ATTRIBUTE_NONE; 2];
        let num_attributes = self.attributes(&mut attributes);
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: function.shared_bytes(),
            hStream: handle(self.stream),
            attrs: attributes.as_mut_ptr(),
            numAttrs: num_attributes,
        };
        // SAFETY: config, attributes and arguments live until the call returns, which copies them; the
        // driver reads as many arguments as the kernel has, which the caller promises are these.
        let code = unsafe {
            (current.driver().symbols().cuLaunchKernelEx)(
                &config,
                function.raw,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if code == 0 {
            return Ok(());
        }
        current
            .driver()
            .check(&format!("cuLaunchKernelEx({})", function.name()), code)
    }

    fn attributes(&self, slots: &mut [sys::CUlaunchAttribute; 2]) -> u32 {
        use sys::CUlaunchAttributeID as Id;
        let mut count = 0;
        if self.cluster > 1 {
            slots[count].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            slots[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: self.cluster,
                y: 1,
                z: 1,
            };
            count += 1;
        }
        if self.dependent {
            slots[count].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            slots[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        count as u32
    }
}

const ATTRIBUTE_NONE: sys::CUlaunchAttribute = sys::CUlaunchAttribute {
    id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
    pad: [0; 4],
    value: sys::CUlaunchAttributeValue { pad: [0; 64] },
};

/// A one-dimensional grid for `what`.
///
/// # Errors
/// [`Error::Unsupported`] where there are more blocks than a grid has.
pub fn blocks_of(what: &str, blocks: u64) -> Result<u32> {
    i32::try_from(blocks)
        .map(|blocks| blocks as u32)
        .map_err(|_| {
            Error::Unsupported(format!(
                "{what}: {blocks} thread blocks are not supported; {} are",
                i32::MAX
            ))
        })
}
