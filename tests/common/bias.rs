//! Biases of problems as tensors: what no row sees, and what lies beyond the batch, is poisoned.

use super::codec::encode;
use super::dense::is_visible;
use super::memory::{Image, View};
use super::problem::{BiasHeads, Problem};
use super::values::Values;
use folio::problem::ScoreBias;
use folio::tensor::Tensor;

/// Elements from row to row where a captured run's tensor takes over those of other batches.
const PITCH_IN_GRAPHS: i64 = 4096;

/// The tensor that a layer has.
pub fn image(problem: &Problem) -> Option<Image> {
    let bias = problem.layer.bias?;
    let (values, mut image) = (Values::of(problem), Image::poisoned(view(problem)?));
    let has_heads = image.view.shape.len() == 3;
    let heads = match bias.heads {
        BiasHeads::Each => problem.num_qo_heads() as usize,
        _ => 1,
    };
    for (b, request) in problem.requests.iter().enumerate() {
        for i in 0..request.qo_len as usize {
            for j in 0..request.kv_len as usize {
                let place = values.bias_place(b, i, j);
                let Some([row, column]) = place.filter(|_| is_visible(problem, b, i, j)) else {
                    continue;
                };
                for head in 0..heads {
                    let bits = encode(bias.dtype, values.bias(b, i, j, head));
                    match has_heads {
                        true => image.put(&[head as i64, row, column], bits),
                        false => image.put(&[row, column], bits),
                    }
                }
            }
        }
    }
    Some(image)
}

/// With the rows and columns that the batch needs, and spare ones.
fn view(problem: &Problem) -> Option<View> {
    let bias = problem.layer.bias?;
    let most = |lens: &mut dyn Iterator<Item = u32>| lens.max().map_or(0, i64::from);
    let most_rows = most(&mut problem.requests.iter().map(|request| request.qo_len));
    let busy = problem.requests.iter().filter(|request| request.qo_len > 0);
    let most_keys = most(&mut busy.map(|request| request.kv_len));
    let rows = match bias.request_rows {
        true => most_rows,
        false => problem.num_tokens() as i64,
    };
    let columns = match bias.new_keys {
        true => most_rows,
        false => most_keys,
    };
    let heads = match bias.heads {
        BiasHeads::Each => i64::from(problem.num_qo_heads()),
        _ => 1,
    };
    let spare = bias.spare;
    let [rows, columns] = [rows, columns].map(|extent| match bias.reach {
        Some(reach) => extent.min(reach.into()),
        None => extent + i64::from(spare),
    });
    let mut view = match bias.transposed {
        true => View::gapped(
            bias.dtype,
            &[heads, columns, rows],
            &[spare, spare, 0],
            spare,
        ),
        false => View::gapped(
            bias.dtype,
            &[heads, rows, columns],
            &[spare, spare, 0],
            spare,
        ),
    };
    if bias.transposed {
        view.shape.swap(1, 2);
        view.strides.swap(1, 2);
    }
    if problem.graph && !bias.transposed {
        view.strides[1] = PITCH_IN_GRAPHS.max(columns);
        view.strides[0] = view.strides[1] * rows;
    }
    if bias.heads == BiasHeads::Absent {
        view.shape.remove(0);
        view.strides.remove(0);
    }
    Some(view)
}

/// The tensor as a run gets it.
pub fn argument(problem: &Problem, tensor: Option<Tensor>) -> Option<ScoreBias> {
    let bias = problem.layer.bias?;
    Some(ScoreBias {
        tensor: tensor?,
        request_rows: bias.request_rows,
        new_keys: bias.new_keys,
    })
}
