//! The projections of MLA.

use super::context::{folio_context, operate};
use super::error::folio_error;
use super::sized::Input;
use super::status::folio_status;
use super::tensor::{folio_tensor, required, tensor};
use crate::api;
use crate::error::Result;
use crate::problem::{AbsorbQArgs, AbsorbWeightsArgs, ProjectOArgs, UpProjectArgs};
use std::ffi::c_void;

/// The up-projection of keys and values, `kv_b_proj` in DeepSeek's models, and where its two halves go.
///
/// H heads; P, V and L are the widths of a head's nope part, of its value and of the latent row, multiples of 8. All
/// strides are free. w_uk and w_uv have the type of kv_b_proj, or any of the three where that is float32.
///
/// The halves need not be copied: a tensor of shape [H, P, L] or [H, L, V] over the memory of kv_b_proj, with its
/// strides, is a weight for the functions below.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_absorb_weights_args {
    /// sizeof(folio_mla_absorb_weights_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[H·(P+V), L]` float32, float16 or bfloat16, (out, in) as a linear layer stores it: for each head the P rows of
    /// its W_UK, then the V rows of its W_UV.
    pub kv_b_proj: *const folio_tensor,
    /// Output: `[H, P, L]`, or NULL where w_uv is given.
    pub w_uk: *const folio_tensor,
    /// Output: `[H, L, V]`, or NULL where w_uk is given.
    pub w_uv: *const folio_tensor,
}

/// The absorption of W_UK into queries: `q_latent[t, h] = q_nope[t, h] · w_uk[h]`. All three tensors have one type. Rows
/// of q_nope and q_latent have a unit last stride; all other strides are free, so that q_latent may be the first L
/// columns of a wider query tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_absorb_q_args {
    /// sizeof(folio_mla_absorb_q_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_tokens, H, P]` float16 or bfloat16; float32 too on the CPU.
    pub q_nope: *const folio_tensor,
    /// `[H, P, L]`, any strides.
    pub w_uk: *const folio_tensor,
    /// Output: `[num_tokens, H, L]`.
    pub q_latent: *const folio_tensor,
}

/// The projection of latent outputs to values: `out[t, h] = o_latent[t, h] · w_uv[h]`. Types and strides as in
/// folio_mla_absorb_q_args; out may be a view of `[num_tokens, H·V]`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_project_o_args {
    /// sizeof(folio_mla_project_o_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_tokens, H, L]` float16 or bfloat16; float32 too on the CPU.
    pub o_latent: *const folio_tensor,
    /// `[H, L, V]`, any strides.
    pub w_uv: *const folio_tensor,
    /// Output: `[num_tokens, H, V]`.
    pub out: *const folio_tensor,
}

/// The up-projection of latent rows to keys and values, for attention in the form with heads of their own:
/// `k_nope[t, h] = kv_c[t] · w_uk[h]ᵀ`, `v[t, h] = kv_c[t] · w_uv[h]`. Types and strides as in folio_mla_absorb_q_args;
/// k_nope may be the first P columns of a wider key tensor. Either output may be left out together with its weight.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_mla_up_project_args {
    /// sizeof(folio_mla_up_project_args).
    pub struct_size: u32,
    /// 0.
    pub flags: u32,
    /// `[num_tokens, L]` float16 or bfloat16; float32 too on the CPU.
    pub kv_c: *const folio_tensor,
    /// `[H, P, L]`, any strides, or NULL.
    pub w_uk: *const folio_tensor,
    /// `[H, L, V]`, any strides, or NULL.
    pub w_uv: *const folio_tensor,
    /// Output: `[num_tokens, H, P]`, or NULL.
    pub k_nope: *const folio_tensor,
    /// Output: `[num_tokens, H, V]`, or NULL.
    pub v: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_mla_absorb_weights_args>() == 32);
const _: () = assert!(size_of::<folio_mla_absorb_q_args>() == 32);
const _: () = assert!(size_of::<folio_mla_project_o_args>() == 32);
const _: () = assert!(size_of::<folio_mla_up_project_args>() == 48);

// SAFETY: repr(C), two u32 first, pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_absorb_weights_args {
    const NAME: &'static str = "folio_mla_absorb_weights_args";
    const FIRST_SIZE: usize = 32;
    const FLAGS: u32 = 0;
    type Parsed = AbsorbWeightsArgs;

    unsafe fn parse(&self) -> Result<AbsorbWeightsArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(AbsorbWeightsArgs {
                kv_b_proj: required("kv_b_proj", self.kv_b_proj)?,
                w_uk: tensor("w_uk", self.w_uk)?,
                w_uv: tensor("w_uv", self.w_uv)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_absorb_q_args {
    const NAME: &'static str = "folio_mla_absorb_q_args";
    const FIRST_SIZE: usize = 32;
    const FLAGS: u32 = 0;
    type Parsed = AbsorbQArgs;

    unsafe fn parse(&self) -> Result<AbsorbQArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(AbsorbQArgs {
                q_nope: required("q_nope", self.q_nope)?,
                w_uk: required("w_uk", self.w_uk)?,
                q_latent: required("q_latent", self.q_latent)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_project_o_args {
    const NAME: &'static str = "folio_mla_project_o_args";
    const FIRST_SIZE: usize = 32;
    const FLAGS: u32 = 0;
    type Parsed = ProjectOArgs;

    unsafe fn parse(&self) -> Result<ProjectOArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(ProjectOArgs {
                o_latent: required("o_latent", self.o_latent)?,
                w_uv: required("w_uv", self.w_uv)?,
                out: required("out", self.out)?,
            })
        }
    }
}

// SAFETY: repr(C), two u32 first, pointers only, no padding (asserted by size).
unsafe impl Input for folio_mla_up_project_args {
    const NAME: &'static str = "folio_mla_up_project_args";
    const FIRST_SIZE: usize = 48;
    const FLAGS: u32 = 0;
    type Parsed = UpProjectArgs;

    unsafe fn parse(&self) -> Result<UpProjectArgs> {
        // SAFETY: the caller's promise about the tensors.
        unsafe {
            Ok(UpProjectArgs {
                kv_c: required("kv_c", self.kv_c)?,
                w_uk: tensor("w_uk", self.w_uk)?,
                w_uv: tensor("w_uv", self.w_uv)?,
                k_nope: tensor("k_nope", self.k_nope)?,
                v: tensor("v", self.v)?,
            })
        }
    }
}

/// Copies the halves of kv_b_proj to weights of their own, once after a model is loaded.
///
/// On CUDA the first copy between given types on a context, and the first projection of a type, whichever it is and of
/// however many tokens, load code and answer CAPTURE in a capture. Later ones can be captured. On the CPU the outputs are
/// complete on return.
///
/// @param ctx the device
/// @param args the up-projection and its halves
/// @param stream CUDA stream, or NULL on the CPU
/// @param err report of a failure, or NULL
/// @return FOLIO_OK, or INVALID_ARGUMENT, INVALID_STRUCT_SIZE, UNKNOWN_FIELD, SHAPE, DTYPE, DEVICE_MISMATCH,
///         CAPTURE, UNSUPPORTED, COMPILE, OUT_OF_MEMORY, DRIVER; then nothing was written
///
/// # Safety
/// `ctx` is alive; the structs are readable, and the tensors' memory as the fields say. Concurrent use
/// is fine with different outputs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_absorb_weights(
    ctx: *const folio_context,
    args: *const folio_mla_absorb_weights_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::absorb_weights) }
}

/// Takes queries to the latent space: q_nope · W_UK, before attention over latent rows. Sums are float32, rounded to
/// the type of q_latent once. No token is nothing to do.
///
/// On the CPU every thread of the context allocates half a megabyte at its first projection, and keeps it.
///
/// @copydetails folio_mla_absorb_weights
///
/// # Safety
/// As folio_mla_absorb_weights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_absorb_q(
    ctx: *const folio_context,
    args: *const folio_mla_absorb_q_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::absorb_q) }
}

/// Takes outputs of attention over latent rows to the values' space: o_latent · W_UV. Sums as in folio_mla_absorb_q.
///
/// @copydetails folio_mla_absorb_weights
///
/// # Safety
/// As folio_mla_absorb_weights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_project_o(
    ctx: *const folio_context,
    args: *const folio_mla_project_o_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::project_o) }
}

/// Takes latent rows to keys and values of every head, as prefill attends to them. Sums as in folio_mla_absorb_q.
///
/// @copydetails folio_mla_absorb_weights
///
/// # Safety
/// As folio_mla_absorb_weights.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn folio_mla_up_project(
    ctx: *const folio_context,
    args: *const folio_mla_up_project_args,
    stream: *mut c_void,
    err: *mut folio_error,
) -> folio_status {
    // SAFETY: the documented promises of the caller.
    unsafe { operate(ctx, args, stream, err, api::up_project) }
}
