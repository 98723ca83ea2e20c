//! What the append of a GQA model is given where norm and RoPE are part of it: queries, keys and values of new tokens
//! go from a projection's output to the attention's inputs in one step.

use super::AppendArgs;
use crate::tensor::Tensor;

/// Most elements of a row of q or key.
pub const MOST_ROW_ELEMENTS: usize = 512;

/// Pairs that RoPE rotates in the longest row.
pub const MOST_PAIRS: usize = MOST_ROW_ELEMENTS / 2;

/// Norm, RoPE and append of new tokens (`fused_rope_kvcache` in vLLM, `rope_quantize_fp8_append_paged_kv_cache` in
/// FlashInfer). Rows are computed in float32 and rounded once, to the type of each output.
#[derive(Debug, Clone, Copy)]
pub struct RopeAppendArgs {
    /// New tokens and the cache that they go to; keys are normalised and rotated on their way.
    pub append: AppendArgs,
    /// Output: the keys as the cache gets them, in their own type: `[num_tokens or more, num_kv_heads, head_dim_qk]`.
    pub key_out: Option<Tensor>,
    /// `[num_tokens or more, num_qo_heads, head_dim_qk]`: all its rows are normalised and rotated.
    pub q: Option<Tensor>,
    /// Output: as `q`, which it may be. Checked: there iff `q` is.
    pub q_out: Option<Tensor>,
    /// RMS norm of rows.
    pub norm: Norm,
    /// Rotation of rows, after the norm.
    pub rope: Option<Rope>,
}

/// RMS norm of each head's row: `x · weight / sqrt(mean(x²) + eps)`.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// `[head_dim_qk]`, fp32 or the type of the tokens; `None`: queries are not normalised.
    pub q_weight: Option<Tensor>,
    /// As `q_weight`, for keys.
    pub k_weight: Option<Tensor>,
    /// Checked: positive where there is a weight.
    pub eps: f32,
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// `[rows or more]` int32 or int64, where rows are those of `q`, or else the tokens.
    pub positions: Tensor,
    /// As `positions`, which they are added to.
    pub position_offsets: Option<Tensor>,
    /// By which angle a pair is rotated at a position.
    pub angles: Angles,
    /// Elements of a row that are rotated, the first ones. 0: as many as the table has angles for; computed: all.
    /// Checked: even, and not 0.
    pub rotary_dim: u32,
    /// Pairs are neighbours (GPT-J), not an element of either half (GPT-NeoX).
    pub is_interleaved: bool,
}

/// Where the cosines and sines come from.
#[derive(Debug, Clone, Copy)]
pub enum Angles {
    /// `[max_position, rotary_dim]`: the cosines of a position, one for each pair, and then the sines; or
    /// `[2, max_position, rotary_dim / 2]`. fp32 or the type of the tokens. Checked: the latter.
    Table(Tensor),
    /// The angle of a pair is the position times the pair's frequency.
    Computed(Frequencies),
}

/// The frequencies of pairs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frequencies {
    /// Pair `i` has the frequency `theta^(-2i / rotary_dim)`, in radians per position.
    pub theta: f32,
    /// Frequencies are divided by it; 0 means 1. Checked: positive.
    pub scale: f32,
    /// Only low frequencies are divided.
    pub llama3: Option<Llama3Scaling>,
}

/// How Llama 3.1 scales: with `n = old_context_len · frequency / 2π`, the turns of a pair in the old context, a
/// frequency becomes `s · frequency + (1 - s) · frequency / scale`, where `s = (n - low) / (high - low)`, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Turns up to which a frequency is divided altogether.
    pub low_freq_factor: f32,
    /// Turns from which on it stays. Checked: greater.
    pub high_freq_factor: f32,
    /// Tokens that the model was trained for first.
    pub old_context_len: u32,
}

impl RopeAppendArgs {
    /// Rows of queries and keys that are computed; of a checked call.
    pub fn num_rows(&self) -> i64 {
        let tokens = self.append.slot_mapping.extent(0);
        self.q.map_or(tokens, |q| q.extent(0))
    }

    /// Whether keys are anything but copied.
    pub fn changes_keys(&self) -> bool {
        self.norm.k_weight.is_some() || self.rope.is_some()
    }

    /// Whether queries are anything but copied.
    pub fn changes_queries(&self) -> bool {
        self.norm.q_weight.is_some() || self.rope.is_some()
    }
}

impl Frequencies {
    /// The fraction of a turn that each pair makes from one position to the next, as a multiple of 2^-64. The product
    /// with a position, modulo 2^64, is the fraction of a turn at that position: no position is too large.
    pub fn turns(&self, rotary_dim: u32) -> [u64; MOST_PAIRS] {
        let mut turns = [0; MOST_PAIRS];
        let ratio = f64::from(self.theta).powf(-2.0 / f64::from(rotary_dim));
        let mut frequency = 1.0;
        for turns in turns.iter_mut().take(rotary_dim as usize / 2) {
            let of_turn = self.scaled(frequency) / std::f64::consts::TAU;
            *turns = ((of_turn - of_turn.floor()) * 2f64.powi(64)) as u64;
            frequency *= ratio;
        }
        turns
    }

    fn scaled(&self, frequency: f64) -> f64 {
        let divided = frequency / f64::from(self.scale);
        let Some(llama3) = self.llama3 else {
            return divided;
        };
        let [low, high] = [llama3.low_freq_factor, llama3.high_freq_factor].map(f64::from);
        let turns = f64::from(llama3.old_context_len) * frequency / std::f64::consts::TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        kept * frequency + (1.0 - kept) * divided
    }
}
