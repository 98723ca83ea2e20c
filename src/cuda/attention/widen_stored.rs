//! Rows of 16 bits for Hopper prefill from caches in other forms than rows of plain elements:
//! `kernels/widen/widen_stored.cu`.
#![allow(unsafe_code)]

use super::features::Feature;
use super::kernel::{OrLacks, Run};
use crate::cuda::driver::{Current, Function, Launch};
use crate::cuda::kernels::keyless::{Keyless, WIDEN_STORED, WIDEN_UNITS};
use crate::cuda::params::AttentionParams;
use crate::cuda::stored_params::{Stored, StoredWidenParams};
use crate::cuda::widen_params::WidenParams;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{AttentionDesc, CacheForm};

/// The kernels for one problem.
#[derive(Debug)]
pub struct WidenStored {
    rows: Function,
    /// What finds what rows are divided by.
    units: Option<Function>,
    desc: AttentionDesc,
}

impl WidenStored {
    /// Loads the kernels. `find` finds one of the table.
    ///
    /// # Errors
    /// As `find`.
    pub fn load(
        desc: &AttentionDesc,
        find: impl Fn(&'static Keyless) -> Result<Function>,
    ) -> Result<OrLacks<Self>> {
        let of_batch = desc.kv_format.form() == CacheForm::TokenHeadScales;
        if num_units(desc) > 0 && of_batch && desc.batch_invariant {
            return Ok(Err(Feature::Widening.into()));
        }
        let units = match num_units(desc) {
            0 => None,
            _ => Some(find(&WIDEN_UNITS)?),
        };
        Ok(Ok(WidenStored {
            rows: find(&WIDEN_STORED)?,
            units,
            desc: *desc,
        }))
    }

    /// Enqueues what writes the rows.
    ///
    /// # Safety
    /// The addresses of `widen` are those of the run's plan and of its memory in the workspace.
    pub unsafe fn enqueue(
        &self,
        launch: &Launch,
        current: &Current<'_>,
        widen: &WidenParams,
        run: &Run<'_>,
    ) -> Result<()> {
        let given = run.params;
        let factors = self.factors(widen.units);
        let params = StoredWidenParams {
            widen: *widen,
            cache: Stored::without_head_scales(&run.args.caches(self.desc.kv_format)),
            k_factors: factors.map_or(0, |[k, _]| k),
            v_factors: factors.map_or(0, |[_, v]| v),
            k_scales: given.k_scales,
            v_scales: given.v_scales,
            k_scales_stride: given.k_scales_stride,
            v_scales_stride: given.v_scales_stride,
            flags: given.flags,
            reserved: 0,
        };
        // SAFETY: the kernels take a `FolioStoredWidenParams`, whose addresses are the caller's tensors, and as promised.
        unsafe {
            if let Some(units) = &self.units {
                launch.enqueue(current, units, &params, &[])?;
            }
            launch.enqueue(current, &self.rows, &params, &[])
        }
    }

    /// The run's parameters with what its rows, and sums of them, are to be multiplied by.
    pub fn with_factors(&self, params: &AttentionParams, units: u64) -> AttentionParams {
        match self.factors(units) {
            None => *params,
            Some([k_scales, v_scales]) => AttentionParams {
                k_scales,
                v_scales,
                k_scales_stride: 1,
                v_scales_stride: 1,
                ..*params
            },
        }
    }

    /// Where those of k and of v are: behind the units, where there are units.
    fn factors(&self, units: u64) -> Option<[u64; 2]> {
        self.units.as_ref()?;
        let k = units + float_bytes(num_units(&self.desc)) as u64;
        Some([k, k + factor_bytes(&self.desc) as u64])
    }
}

/// Numbers that rows of K and of V are divided by, one for each head: where fp16 has to hold float32 scales.
pub fn num_units(desc: &AttentionDesc) -> u32 {
    match desc.kv_format.form() {
        CacheForm::TokenHeadScales | CacheForm::ChannelScales | CacheForm::ChannelZeroPoints
            if desc.q_dtype == DType::F16 =>
        {
            2 * desc.num_kv_heads
        }
        _ => 0,
    }
}

/// Bytes of units and of the factors that come of them.
pub fn unit_bytes(desc: &AttentionDesc) -> usize {
    match num_units(desc) {
        0 => 0,
        units => float_bytes(units) + 2 * factor_bytes(desc),
    }
}

/// Of the factors of k, or of v: those of a head, or of a head of each request.
fn factor_bytes(desc: &AttentionDesc) -> usize {
    float_bytes(desc.num_kv_heads).saturating_mul(desc.max_batch_size as usize)
}

fn float_bytes(count: u32) -> usize {
    count as usize * size_of::<f32>()
}
