//! What the projections of MLA are given: from the queries' space to the latent one (absorption), and back.
//!
//! Names of extents: `H` heads, `P` nope width of a query head, `V` width of a value head, `L` latent width, all three
//! multiples of 8. `W_UK` and `W_UV` are the two halves of the up-projection `kv_b_proj`.

use super::Checked;
use crate::tensor::Tensor;

/// `q_latent[t, h] = q_nope[t, h] · w_uk[h]`.
#[derive(Debug, Clone, Copy)]
pub struct AbsorbQArgs {
    /// `[T, H, P]`.
    pub q_nope: Tensor,
    /// `[H, P, L]`.
    pub w_uk: Tensor,
    /// Output: `[T, H, L]`.
    pub q_latent: Tensor,
}

/// `out[t, h] = o_latent[t, h] · w_uv[h]`.
#[derive(Debug, Clone, Copy)]
pub struct ProjectOArgs {
    /// `[T, H, L]`.
    pub o_latent: Tensor,
    /// `[H, L, V]`.
    pub w_uv: Tensor,
    /// Output: `[T, H, V]`.
    pub out: Tensor,
}

/// `k_nope[t, h] = kv_c[t] · w_uk[h]ᵀ` and `v[t, h] = kv_c[t] · w_uv[h]`; either may be left out with its weight.
#[derive(Debug, Clone, Copy)]
pub struct UpProjectArgs {
    /// `[T, L]`.
    pub kv_c: Tensor,
    /// `[H, P, L]`.
    pub w_uk: Option<Tensor>,
    /// `[H, L, V]`.
    pub w_uv: Option<Tensor>,
    /// Output: `[T, H, P]`.
    pub k_nope: Option<Tensor>,
    /// Output: `[T, H, V]`.
    pub v: Option<Tensor>,
}

/// `kv_b_proj` cut into `W_UK` and `W_UV`; either may be left out.
#[derive(Debug, Clone, Copy)]
pub struct AbsorbWeightsArgs {
    /// `[H · (P + V), L]`: for every head the P rows of its W_UK, then the V rows of its W_UV.
    pub kv_b_proj: Tensor,
    /// Output: `[H, P, L]`.
    pub w_uk: Option<Tensor>,
    /// Output: `[H, L, V]`.
    pub w_uv: Option<Tensor>,
}

/// A matrix product per head, `out[t, h] = x[t, h] · weight[h]`, summed in fp32: all projections have this form.
#[derive(Debug, Clone, Copy)]
pub struct ProjectArgs {
    /// `[T, H, K]`, or `[T, 1, K]` where all heads share the rows. Unit stride along K.
    pub x: Tensor,
    /// `[H, K, N]` with any strides.
    pub weight: Tensor,
    /// `[T, H, N]`. Unit stride along N.
    pub out: Tensor,
}

/// A copy of weights, element by element, with any strides. The types are equal, or the source is fp32.
#[derive(Debug, Clone, Copy)]
pub struct CopyWeightsArgs {
    /// `[H, rows, columns]`.
    pub source: Tensor,
    /// The same extents.
    pub target: Tensor,
}

impl Checked<ProjectArgs> {
    /// `T`, `H`, `K` and `N`.
    pub fn extents(&self) -> [i64; 4] {
        let [tokens, heads, columns] = [0, 1, 2].map(|dim| self.out.extent(dim));
        [tokens, heads, self.weight.extent(1), columns]
    }

    /// Nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }
}
