//! The numbers of a problem. Each is a hash of what it belongs to, so it is the same in every batch,
//! layout and page size, and nothing has to be stored.

use super::codec::{power_of_two, rounded};
use super::pages::shared_pages;
use super::problem::{
    BiasHeads, HeadScales, Layer, MaskKind, NAN_QUERIES, Pattern, Problem, ValueRows,
};
use super::stored::{Side, Stored};
use folio::problem::CacheForm;

/// Numbers of one problem, rounded to the types that hold them.
#[derive(Clone, Copy)]
pub struct Values<'a> {
    problem: &'a Problem,
}

/// What a number belongs to.
#[derive(Clone, Copy)]
enum Of {
    Query = 1,
    Key,
    Value,
    Mask,
    Range,
    Slope,
    Sink,
    KeyScale,
    ValueScale,
    BlockScale,
    Page,
    QueryScale,
    OutputScale,
    Bias,
}

impl<'a> Values<'a> {
    pub fn of(problem: &'a Problem) -> Values<'a> {
        Values { problem }
    }

    pub fn q(&self, b: usize, i: usize, head: usize, d: usize) -> f64 {
        let tag = self.problem.requests[b].tag;
        if tag == NAN_QUERIES {
            return f64::NAN;
        }
        let hash = self.hash(Of::Query, [tag, i as u64, head as u64, d as u64]);
        let factor = power_of_two(self.problem.query_exponents[head % 2]);
        rounded(self.problem.q_dtype, normal(hash) * factor)
    }

    pub fn k(&self, b: usize, j: usize, head: usize, d: usize) -> f64 {
        let tag = self.owner(b, j);
        let is_shared = d >= (self.problem.head_dim_qk - self.problem.rope_dim()) as usize;
        let head = if is_shared { 0 } else { head };
        let hash = self.hash(Of::Key, [tag, j as u64, head as u64, d as u64]);
        self.element(Side::Key, b, j, [head, d], normal(hash))
    }

    pub fn v(&self, b: usize, j: usize, head: usize, d: usize) -> f64 {
        let tag = self.owner(b, j);
        if self.problem.values == ValueRows::OneHot {
            let column = self.hash(Of::Value, [tag, j as u64, head as u64, 0]);
            return f64::from(column % u64::from(self.problem.head_dim_vo) == d as u64);
        }
        let hash = self.hash(Of::Value, [tag, j as u64, head as u64, d as u64]);
        self.element(Side::Value, b, j, [head, d], normal(hash))
    }

    /// What an element is read as that was stored for `value`.
    fn element(&self, side: Side, b: usize, j: usize, at: [usize; 2], value: f64) -> f64 {
        if let Some(dtype) = self.problem.new_kv_of(b, j) {
            let stored = Stored::plain(dtype);
            return stored.decode(stored.encode(value));
        }
        let stored = self.stored(side, b, j, at);
        let bits = stored.encode(self.cached(value));
        match self.problem.rounds_rows {
            true => stored.decode_rounded(bits, self.problem.q_dtype),
            false => stored.decode(bits),
        }
    }

    /// A number that is stored in the cache.
    fn cached(&self, value: f64) -> f64 {
        value * power_of_two(self.problem.cache_exponent)
    }

    /// How element `[head, d]` of key or value `j` is stored in the cache.
    pub fn stored(&self, side: Side, b: usize, j: usize, [head, d]: [usize; 2]) -> Stored {
        // What is stored alike for all tokens needs none.
        let token = match self.problem.form {
            CacheForm::TokenHeadScales | CacheForm::Nvfp4 => [self.owner(b, j), j as u64],
            _ => [0, 0],
        };
        let draw = |token: [u64; 2], at: [usize; 2]| {
            let [head, d] = at.map(|n| n as u64);
            let index = [token[0] ^ mix(token[1]), head, d, side as u64 + 9];
            uniform(self.hash(Of::BlockScale, index))
        };
        Stored::new(self.problem, token, [head, d], draw)
    }

    /// Whether the custom mask lets row `i` of request `b` see key `j`.
    pub fn mask(&self, b: usize, i: usize, j: usize) -> bool {
        let request = self.problem.requests[b];
        let (qo_len, kv_len) = (request.qo_len as i64, request.kv_len as i64);
        let pattern = match self.layer().mask {
            MaskKind::Bytes(pattern) | MaskKind::Bits(pattern) => pattern,
            MaskKind::Causal | MaskKind::CausalByRequest => Pattern::Causal,
            MaskKind::Full | MaskKind::Items => Pattern::Range(0, 256),
        };
        let past = kv_len - qo_len;
        match pattern {
            Pattern::Random(probability) => {
                let hash = self.hash(Of::Mask, [request.tag, i as u64, j as u64, 0]);
                // Some rows see nothing at all.
                let row = self.hash(Of::Mask, [request.tag, i as u64, 0, 1]);
                uniform(row) > 0.1 && uniform(hash) < f64::from(probability)
            }
            Pattern::Causal => j as i64 <= past + i as i64,
            Pattern::Holes(from) => !is_hole(from, j),
            Pattern::Range(from, to) => {
                let at = |fraction: u32| i64::from(fraction) * kv_len / 256;
                (at(from)..at(to)).contains(&(j as i64))
            }
            Pattern::Tree => (j as i64) < past || is_ancestor(j as i64 - past, i as i64),
        }
    }

    /// Whether a request is causal, where that goes by request.
    pub fn is_causal(&self, b: usize) -> bool {
        let tag = self.problem.requests[b].tag;
        self.hash(Of::Mask, [tag, 0, 0, 2]) & 1 == 1
    }

    /// The key that the items of request `b` begin with.
    pub fn item_start(&self, b: usize) -> i64 {
        let request = self.problem.requests[b];
        let hash = self.hash(Of::Mask, [request.tag, 0, 0, 3]);
        (hash % u64::from(request.kv_len + 1)) as i64
    }

    /// The position of token `n` from there on in its item, of six tokens on average.
    pub fn item_position(&self, b: usize, n: i64) -> i64 {
        let tag = self.problem.requests[b].tag;
        let begins =
            |n: i64| n == 0 || self.hash(Of::Mask, [tag, n as u64, 0, 4]).is_multiple_of(6);
        (0..=n).rev().position(begins).unwrap_or(0) as i64
    }

    /// mm-prefix range `r` of request `b`; some are unused ones, with start >= end.
    pub fn range(&self, b: usize, r: usize) -> (i32, i32) {
        let request = self.problem.requests[b];
        let draw = |which| {
            let hash = self.hash(Of::Range, [request.tag, r as u64, which, 0]);
            (hash % u64::from(request.kv_len.max(1))) as i32
        };
        (draw(0), draw(1))
    }

    pub fn alibi_slope(&self, b: usize, head: usize) -> f32 {
        let tag = match self.layer().alibi_by_request {
            true => self.problem.requests[b].tag,
            false => 0,
        };
        let hash = self.hash(Of::Slope, [head as u64, tag, 0, 0]);
        (0.01 + 0.5 * uniform(hash)) as f32
    }

    /// Row and column of a bias that belong to row `i` and key `j` of request `b`, if there are such.
    pub fn bias_place(&self, b: usize, i: usize, j: usize) -> Option<[i64; 2]> {
        let (bias, requests) = (self.layer().bias?, &self.problem.requests);
        let past = i64::from(requests[b].kv_len) - i64::from(requests[b].qo_len);
        let before: u32 = requests[..b].iter().map(|request| request.qo_len).sum();
        let row = i as i64 + if bias.request_rows { 0 } else { before.into() };
        let column = j as i64 - if bias.new_keys { past } else { 0 };
        let reaches = |n: i64| bias.reach.is_none_or(|reach| n < i64::from(reach));
        (column >= 0 && reaches(row) && reaches(column)).then_some([row, column])
    }

    /// What is added to the logit of row `i` and key `j`. Some keys are hidden.
    pub fn bias(&self, b: usize, i: usize, j: usize, head: usize) -> f64 {
        let (Some(bias), Some([_, column])) = (self.layer().bias, self.bias_place(b, i, j)) else {
            return 0.0;
        };
        let tag = match bias.request_rows {
            true => 0,
            false => self.problem.requests[b].tag,
        };
        let head = match bias.heads {
            BiasHeads::Each => head as u64,
            _ => 0,
        };
        let hash = self.hash(Of::Bias, [tag, i as u64, column as u64, head]);
        match hash % 16 {
            0 => f64::NEG_INFINITY,
            _ => rounded(bias.dtype, 2.0 * normal(hash)),
        }
    }

    pub fn sink(&self, head: usize) -> f32 {
        let hash = self.hash(Of::Sink, [head as u64, 0, 0, 0]);
        (7.0 * uniform(hash) - 2.0) as f32
    }

    /// What `q_scales`, `k_scales` or `v_scales` say of a KV head of request `b`.
    pub fn scale(&self, of: ScaleOf, b: usize, head: usize) -> f32 {
        let (head, tag) = match of.kind(self.layer()) {
            HeadScales::Absent => return 1.0,
            HeadScales::One => (0, 0),
            HeadScales::PerHead => (head, 0),
            HeadScales::PerRequest => (head, self.problem.requests[b].tag),
        };
        let of = match of {
            ScaleOf::Query => Of::QueryScale,
            ScaleOf::Key => Of::KeyScale,
            ScaleOf::Value => Of::ValueScale,
        };
        let hash = self.hash(of, [head as u64, tag, 0, 0]);
        (0.25 + uniform(hash)) as f32
    }

    /// Element 0 of `o_scales`, if there is one.
    pub fn o_scales(&self) -> Option<f32> {
        let is_there = self.layer().o_scales && self.problem.o_dtype.is_fp8();
        let hash = self.hash(Of::OutputScale, [0; 4]);
        is_there.then_some((0.25 + uniform(hash)) as f32)
    }

    /// What outputs are divided by.
    pub fn o_divisor(&self) -> f64 {
        let o_scale = match self.layer().o_scale {
            0.0 => 1.0,
            scale => f64::from(scale),
        };
        o_scale * self.o_scales().map_or(1.0, f64::from)
    }

    /// The scale of a block of elements of key `j` in a format that has one for each.
    pub fn block_scale(&self, b: usize, j: usize, block: usize) -> f32 {
        let hash = self.hash(
            Of::BlockScale,
            [self.owner(b, j), j as u64, block as u64, 0],
        );
        (0.3 + uniform(hash)) as f32
    }

    fn layer(&self) -> &'a Layer {
        &self.problem.layer
    }

    /// The tag of the request whose page holds key `j` of request `b`.
    fn owner(&self, b: usize, j: usize) -> u64 {
        let shared = shared_pages(self.problem, b) * self.problem.page_size() as usize;
        self.problem.requests[if j < shared { 0 } else { b }].tag
    }

    fn hash(&self, of: Of, index: [u64; 4]) -> u64 {
        let start = mix(self.problem.seed ^ self.layer().tag.wrapping_mul(0x9e37) ^ of as u64);
        index.iter().fold(start, |hash, &i| mix(hash ^ i))
    }
}

/// Whether [`Pattern::Holes`] hides key `j` from every row.
pub fn is_hole(from: u32, j: usize) -> bool {
    j >= from as usize && j % 7 == 3
}

/// What a scale tensor multiplies.
#[derive(Debug, Clone, Copy)]
pub enum ScaleOf {
    Query,
    Key,
    Value,
}

impl ScaleOf {
    pub fn kind(self, layer: &Layer) -> HeadScales {
        match self {
            ScaleOf::Query => layer.q_scales,
            ScaleOf::Key => layer.k_scales,
            ScaleOf::Value => layer.v_scales,
        }
    }
}

/// The numbers `0..n` in an order that the seed picks.
pub fn shuffled(seed: u64, n: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..n as i32).collect();
    let start = mix(seed ^ Of::Page as u64);
    ids.sort_by_key(|&id| mix(start ^ id as u64));
    ids
}

/// Node `a` is `node` or lies above it in the binary draft tree.
fn is_ancestor(a: i64, mut node: i64) -> bool {
    while node > a {
        node = (node - 1) / 2;
    }
    node == a && a >= 0
}

/// One step of splitmix64.
pub fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 0 to below 1.
pub fn uniform(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// Mean 0, variance 1, bell-shaped, within ±3.5: the sum of four uniform numbers.
pub fn normal(hash: u64) -> f64 {
    let sum: u64 = (0..4).map(|n| hash >> (16 * n) & 0xffff).sum();
    (sum as f64 / 65535.0 - 2.0) * 3f64.sqrt()
}
