//! Factors of rows of q, k or v: one for all KV heads, one each, or one for each KV head of each request.

use crate::tensor::Tensor;

/// Scales as a run reads them.
#[derive(Debug, Clone, Copy)]
pub struct RowScales<'a> {
    all: &'a [f32],
    head_stride: usize,
    request_stride: usize,
}

impl<'a> RowScales<'a> {
    /// `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32; factors of 1 without a tensor.
    pub fn of(tensor: Option<&'a Tensor>) -> RowScales<'a> {
        let found = tensor.and_then(|tensor| Some((tensor, tensor.as_f32()?)));
        match found {
            None => RowScales {
                all: &[1.0],
                head_stride: 0,
                request_stride: 0,
            },
            Some((tensor, all)) if tensor.rank() == 2 => RowScales {
                all,
                head_stride: 1,
                request_stride: tensor.extent(1) as usize,
            },
            Some((_, all)) => RowScales {
                all,
                head_stride: usize::from(all.len() > 1),
                request_stride: 0,
            },
        }
    }

    /// The factor of a KV head of a request.
    pub fn of_head(&self, request: usize, head: usize) -> f32 {
        self.all[request * self.request_stride + head * self.head_stride]
    }

    /// All heads of a request have the same.
    pub fn are_alike(&self) -> bool {
        self.head_stride == 0
    }

    /// What multiplies the parts of a row whose keys were split: only scales of requests, since parts are combined
    /// without knowing whose they are.
    pub fn of_part(&self, request: usize, head: usize) -> f32 {
        match self.request_stride {
            0 => 1.0,
            _ => self.of_head(request, head),
        }
    }

    /// What multiplies the whole of such a row: the rest.
    pub fn of_parts_together(&self, head: usize) -> f32 {
        match self.request_stride {
            0 => self.of_head(0, head),
            _ => 1.0,
        }
    }
}
