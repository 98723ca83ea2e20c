//! Attention on paper: logits that are logarithms of small integers, one-hot values, so that every weight
//! is a fraction one can check by eye. And the page metadata that the peers publish.

use crate::common::door::{DOORS, Session};
use crate::common::instance::Scratch;
use crate::common::memory::{HostMemory, Image, Resident};
use folio::api::{BatchInput, Stream, Target};
use folio::dtype::DType;
use folio::problem::{
    AttentionArgs, AttentionChunks, AttentionDesc, Kind, KvLayout, KvStorage, LogBase, Mask,
    MaskColumns, ScoreBias, Window,
};
use std::num::NonZeroU32;

const DIM: usize = 8;
const PAGE: usize = 2;

fn sessions() -> Vec<Box<dyn Session>> {
    let targets = [Target::Reference, Target::Cpu { num_threads: 1 }];
    let pairs = DOORS
        .iter()
        .flat_map(|door| targets.map(|target| door.open(target)));
    pairs
        .map(|session| session.expect("a CPU context"))
        .collect()
}

fn desc(max_kv_len: u32, rows: u32) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        q_dtype: DType::F32,
        kv_format: DType::F32.into(),
        o_dtype: DType::F32,
        num_qo_heads: 1,
        num_kv_heads: 1,
        head_dim_qk: DIM as u32,
        head_dim_vo: DIM as u32,
        kv: KvStorage::Paged {
            page_size: PAGE as u32,
            layout: KvLayout::Nhd,
        },
        max_batch_size: 1,
        max_qo_len: rows,
        max_num_tokens: rows,
        max_kv_len,
        max_num_pages: 0,
        graph: false,
        batch_invariant: false,
        fp8_products: false,
        mask_items: false,
        shared_levels: 0,
        new_kv: None,
    }
}

fn f32s(shape: &[i64], values: &[f32]) -> Resident<'static> {
    Resident::new(&HostMemory, Image::of_f32(shape, values))
}

fn i32s(values: &[i32]) -> Resident<'static> {
    Resident::new(&HostMemory, Image::of_i32(&[values.len() as i64], values))
}

/// Runs `rows` equal query rows against keys of these logits; key `j`'s value is one in element `j`.
/// Gives the weights of all keys per row, and the lse.
fn weights(
    session: &dyn Session,
    logits: &[f32],
    rows: usize,
    change: impl Fn(&mut AttentionArgs),
) -> Vec<(Vec<f32>, f32)> {
    let keys = logits.len();
    assert!(keys <= DIM);
    let pages = keys.div_ceil(PAGE);
    let (mut q, mut k) = (vec![0.0; rows * DIM], vec![f32::NAN; pages * PAGE * DIM]);
    let mut v = k.clone();
    q.iter_mut().step_by(DIM).for_each(|x| *x = 1.0);
    for (j, &logit) in logits.iter().enumerate() {
        // The pages lie in memory in reverse order.
        let row = (pages - 1 - j / PAGE) * PAGE + j % PAGE;
        k[row * DIM..][..DIM].fill(0.0);
        k[row * DIM] = logit;
        v[row * DIM..][..DIM].fill(0.0);
        v[row * DIM + j] = 1.0;
    }
    let (r, d) = (rows as i64, DIM as i64);
    let cache = [pages as i64, PAGE as i64, 1, d];
    let (q, k, v) = (f32s(&[r, 1, d], &q), f32s(&cache, &k), f32s(&cache, &v));
    let o = f32s(&[r, 1, d], &vec![f32::NAN; rows * DIM]);
    let lse = f32s(&[r, 1], &vec![f32::NAN; rows]);
    let ids: Vec<i32> = (0..pages as i32).rev().collect();
    let (qo_indptr, kv_indptr) = (i32s(&[0, rows as i32]), i32s(&[0, pages as i32]));
    let (ids, kv_len) = (i32s(&ids), i32s(&[keys as i32]));
    let batch = BatchInput {
        qo_indptr: Some(qo_indptr.tensor()),
        kv_indptr: Some(kv_indptr.tensor()),
        kv_indices: Some(ids.tensor()),
        kv_len: Some(kv_len.tensor()),
        ..BatchInput::default()
    };
    let mut handle = session.attention(desc(keys as u32, rows as u32)).unwrap();
    let scratch = Scratch::new(&HostMemory, &handle.workspace().unwrap());
    scratch.plan(&mut *handle, &batch).unwrap();
    let mut args = AttentionArgs {
        lse: Some(lse.tensor()),
        sm_scale: 1.0,
        ..AttentionArgs::new(q.tensor(), k.tensor(), v.tensor(), o.tensor())
    };
    change(&mut args);
    handle.run(&args, Stream::default()).unwrap();
    let (o, lse) = (o.current(), lse.current());
    let row = |i: i64| {
        let weights = (0..keys as i64)
            .map(|j| o.value(&[i, 0, j]) as f32)
            .collect();
        (weights, lse.value(&[i, 0]) as f32)
    };
    (0..r).map(row).collect()
}

/// A window; -1 is unlimited.
fn window(left: i32, right: i32) -> Window {
    let side = |n| u32::try_from(n).ok();
    Window {
        left: side(left),
        right: side(right),
    }
}

fn ln(values: &[f32]) -> Vec<f32> {
    values.iter().map(|x| x.ln()).collect()
}

#[track_caller]
fn assert_row(got: &(Vec<f32>, f32), weights: &[f32], lse: f32) {
    for (got, want) in got.0.iter().zip(weights) {
        assert!((got - want).abs() < 2e-6, "{got} is not {want}");
    }
    assert!(
        got.1 == lse || (got.1 - lse).abs() < 2e-6,
        "lse {} is not {lse}",
        got.1
    );
}

#[test]
fn weights_are_the_fractions_of_the_sum() {
    for session in sessions() {
        let rows = weights(&*session, &ln(&[1., 2., 3.]), 1, |_| {});
        assert_row(&rows[0], &[1. / 6., 2. / 6., 3. / 6.], 6f32.ln());
    }
}

#[test]
fn causal_rows_end_at_the_last_key() {
    for session in sessions() {
        let rows = weights(&*session, &ln(&[1., 2., 3.]), 2, |_| {});
        assert_row(&rows[0], &[1. / 3., 2. / 3., 0.], 3f32.ln());
        assert_row(&rows[1], &[1. / 6., 2. / 6., 3. / 6.], 6f32.ln());
    }
}

#[test]
fn rows_before_the_first_key_are_empty() {
    for session in sessions() {
        let rows = weights(&*session, &ln(&[5.]), 3, |_| {});
        assert_row(&rows[0], &[0.], f32::NEG_INFINITY);
        assert_row(&rows[1], &[0.], f32::NEG_INFINITY);
        assert_row(&rows[2], &[1.], 5f32.ln());
    }
}

#[test]
fn a_nan_reaches_the_rows_that_see_it_and_no_others() {
    for (session, rows) in sessions().iter().flat_map(|s| [(s, 2), (s, 40)]) {
        let got = weights(&**session, &[0., f32::NAN], rows, |_| {});
        let (last, others) = got.split_last().unwrap();
        assert!(
            last.0.iter().all(|x| x.is_nan()) && last.1.is_nan(),
            "{last:?}"
        );
        let (first_key, empty) = others.split_last().unwrap();
        assert_row(first_key, &[1., 0.], 0.);
        for row in empty {
            assert_row(row, &[0., 0.], f32::NEG_INFINITY);
        }
        // A row may see nothing else.
        let got = weights(&**session, &[f32::NAN], rows, |_| {});
        let last = got.last().unwrap();
        assert!(last.0[0].is_nan() && last.1.is_nan(), "{rows} {last:?}");
    }
}

#[test]
fn a_sink_takes_weight_and_counts_in_the_lse() {
    let sink = f32s(&[1], &ln(&[4.]));
    for session in sessions() {
        let with_sink = |args: &mut AttentionArgs| args.sinks = Some(sink.tensor());
        let rows = weights(&*session, &ln(&[1., 2., 3.]), 4, with_sink);
        assert_row(&rows[0], &[0., 0., 0.], 4f32.ln());
        assert_row(&rows[3], &[0.1, 0.2, 0.3], 10f32.ln());
    }
}

#[test]
fn windows_reach_left_and_right() {
    for session in sessions() {
        let left = |args: &mut AttentionArgs| args.window = window(1, -1);
        let rows = weights(&*session, &ln(&[1., 2., 3.]), 1, left);
        assert_row(&rows[0], &[0., 0.4, 0.6], 5f32.ln());
        let own = |args: &mut AttentionArgs| {
            args.window = window(0, 0);
            args.mask = Mask::Full;
        };
        let rows = weights(&*session, &ln(&[1., 2., 3.]), 2, own);
        assert_row(&rows[0], &[0., 1., 0.], 2f32.ln());
        let right = |args: &mut AttentionArgs| {
            args.window = window(-1, 1);
            args.mask = Mask::Full;
        };
        let rows = weights(&*session, &ln(&[1., 2., 3., 4.]), 3, right);
        assert_row(&rows[0], &[1. / 6., 2. / 6., 3. / 6., 0.], 6f32.ln());
    }
}

#[test]
fn custom_masks_replace_the_causal_one_and_meet_the_window() {
    let bytes = Image::of_bits(DType::U8, &[6], [1, 0, 1, 0, 0, 0]);
    // Bits from the lowest: 1 0 1, 0 0 0.
    let bits = Image::of_bits(DType::U8, &[1], [0b1100_0101]);
    let custom: [fn(folio::tensor::Tensor) -> Mask; 2] = [Mask::Bytes, Mask::Bits];
    for (custom, image) in custom.into_iter().zip([bytes, bits]) {
        let mask = Resident::new(&HostMemory, image);
        for session in sessions() {
            let masked = |args: &mut AttentionArgs| args.mask = custom(mask.tensor());
            let rows = weights(&*session, &ln(&[1., 2., 3.]), 2, masked);
            assert_row(&rows[0], &[0.25, 0., 0.75], 4f32.ln());
            assert_row(&rows[1], &[0., 0., 0.], f32::NEG_INFINITY);
            let windowed = |args: &mut AttentionArgs| {
                masked(args);
                args.window = window(-1, 0);
            };
            let rows = weights(&*session, &ln(&[1., 2., 3.]), 2, windowed);
            assert_row(&rows[0], &[1., 0., 0.], 0.0);
        }
    }
}

#[test]
fn an_mm_prefix_opens_what_mask_and_window_close() {
    let ranges = Resident::new(&HostMemory, Image::of_i32(&[1, 2, 2], &[1, 2, 3, 3]));
    for session in sessions() {
        let change = |args: &mut AttentionArgs| {
            args.mm_prefix_ranges = Some(ranges.tensor());
            args.window = window(0, 0);
        };
        // Rows at positions 1, 2, 3.
        let rows = weights(&*session, &ln(&[1., 2., 3., 4.]), 3, change);
        assert_row(&rows[0], &[0., 0.4, 0.6, 0.], 5f32.ln());
        assert_row(&rows[1], &[0., 0.4, 0.6, 0.], 5f32.ln());
        assert_row(&rows[2], &[0., 0., 0., 1.], 4f32.ln());
    }
}

#[test]
fn an_mm_prefix_may_be_clipped_by_the_window() {
    let ranges = Resident::new(&HostMemory, Image::of_i32(&[1, 1, 2], &[0, 3]));
    for session in sessions() {
        let change = |args: &mut AttentionArgs| {
            args.mm_prefix_ranges = Some(ranges.tensor());
            args.mm_prefix_in_window = true;
            args.window = window(1, 1);
        };
        // Rows at positions 2, 3.
        let rows = weights(&*session, &ln(&[1., 2., 3., 4.]), 2, change);
        assert_row(&rows[0], &[0., 2. / 9., 3. / 9., 4. / 9.], 9f32.ln());
        assert_row(&rows[1], &[0., 0., 3. / 7., 4. / 7.], 7f32.ln());
    }
}

#[test]
fn chunks_begin_at_multiples_of_their_size() {
    for session in sessions() {
        for (look_back, first, second) in [
            (0, [0., 0., 1., 0., 0.], [0., 0., 3. / 7., 4. / 7., 0.]),
            (
                1,
                [1. / 6., 2. / 6., 3. / 6., 0., 0.],
                [0.1, 0.2, 0.3, 0.4, 0.],
            ),
        ] {
            let chunked = |args: &mut AttentionArgs| {
                let size = NonZeroU32::new(2).unwrap();
                args.chunks = Some(AttentionChunks { size, look_back });
            };
            // Rows at positions 2, 3, 4.
            let rows = weights(&*session, &ln(&[1., 2., 3., 4., 5.]), 3, chunked);
            assert_row(
                &rows[0],
                &first,
                if look_back == 0 { 3f32 } else { 6. }.ln(),
            );
            assert_row(
                &rows[1],
                &second,
                if look_back == 0 { 7f32 } else { 10. }.ln(),
            );
        }
    }
}

#[test]
fn causality_may_go_by_request() {
    for session in sessions() {
        for (causal, first) in [
            (1, [1. / 3., 2. / 3., 0.]),
            (0, [1. / 6., 2. / 6., 3. / 6.]),
        ] {
            let requests = Resident::new(&HostMemory, Image::of_bits(DType::U8, &[1], [causal]));
            let change = |args: &mut AttentionArgs| {
                args.mask = Mask::CausalByRequest(requests.tensor());
            };
            let rows = weights(&*session, &ln(&[1., 2., 3.]), 2, change);
            assert_row(&rows[0], &first, if causal == 1 { 3f32 } else { 6. }.ln());
            assert_row(&rows[1], &[1. / 6., 2. / 6., 3. / 6.], 6f32.ln());
        }
    }
}

/// Two new keys after two old ones. The row of the first hides itself, the row of the second hides the first.
#[test]
fn custom_masks_may_be_of_new_keys_only() {
    let starts = Image::of_bits(DType::I64, &[2], [2, 0]);
    let starts = Resident::new(&HostMemory, starts);
    let whole = Image::of_bits(DType::U8, &[10], [9, 9, 0, 0, 0, 1, 0, 0, 0, 1]);
    let new = Image::of_bits(DType::U8, &[6], [9, 9, 0, 1, 0, 1]);
    for (image, columns) in [
        (whole, MaskColumns::KeysAfterPrefix),
        (new, MaskColumns::NewKeys),
    ] {
        let mask = Resident::new(&HostMemory, image);
        for session in sessions() {
            let change = |args: &mut AttentionArgs| {
                args.mask = Mask::Bytes(mask.tensor());
                args.custom_mask_indptr = Some(starts.tensor());
                args.mask_columns = columns;
            };
            let rows = weights(&*session, &ln(&[1., 2., 3., 4.]), 2, change);
            for row in rows {
                assert_row(&row, &[1. / 7., 2. / 7., 0., 4. / 7.], 7f32.ln());
            }
        }
    }
}

/// A range of one key, and one that ends before it starts, open nothing, not even a row's own key.
#[test]
fn ranges_without_two_keys_are_unused() {
    let ranges = Image::of_i32(&[1, 2, 2], &[3, 3, 3, 1]);
    let ranges = Resident::new(&HostMemory, ranges);
    // One row at position 3 of 4; the mask hides its own key and the second.
    let mask = Image::of_bits(DType::U8, &[4], [1, 0, 1, 0]);
    let mask = Resident::new(&HostMemory, mask);
    for session in sessions() {
        let change = |args: &mut AttentionArgs| {
            args.mm_prefix_ranges = Some(ranges.tensor());
            args.mask = Mask::Bytes(mask.tensor());
        };
        let rows = weights(&*session, &ln(&[1., 2., 3., 4.]), 1, change);
        assert_row(&rows[0], &[0.25, 0., 0.75, 0.], 4f32.ln());
    }
}

#[test]
fn alibi_and_its_square_root_form() {
    let slope = f32s(&[1], &ln(&[2.]));
    for session in sessions() {
        let linear = |args: &mut AttentionArgs| {
            args.alibi_slopes = Some(slope.tensor());
            args.mask = Mask::Full;
        };
        // One row at position 1 of 3: biases -ln 2, 0, +ln 2.
        let two_rows = weights(&*session, &[0., 0., 0.], 2, linear);
        assert_row(&two_rows[0], &[0.5 / 3.5, 1. / 3.5, 2. / 3.5], 3.5f32.ln());
        let sqrt = |args: &mut AttentionArgs| {
            linear(args);
            args.alibi_sqrt = true;
        };
        // Distances 4, 1, 0 and one key ahead: 2^-2, 2^-1, 1, 1.
        let rows = weights(&*session, &[0., -1e4, -1e4, 0., 0., 0.], 2, sqrt);
        let sum = 0.25 + 0.5 + 1.0 + 1.0;
        let want = [0.25 / sum, 0., 0., 0.5 / sum, 1. / sum, 1. / sum];
        assert_row(&rows[0], &want, sum.ln());
    }
}

#[test]
fn a_bias_is_added_to_what_a_row_sees() {
    // Of three keys, 1 and 2 are new. Rows 0 and 1 of a tensor with other rows and columns beyond them.
    let (low, nan) = (f32::NEG_INFINITY, f32::NAN);
    let [two, three, five] = [2f32, 3., 5.].map(f32::ln);
    let keys = f32s(
        &[3, 4],
        &[two, low, nan, 9., 0., three, five, 9., 9., 9., 9., 9.],
    );
    let new_keys = f32s(&[1, 3, 3], &[two, nan, 9., three, low, 9., 9., 9., 9.]);
    let hides = f32s(&[2, 3], &[-1e35, 0., 0., f32::MIN, -1e35, -1e35]);
    let bias = |tensor: &Resident<'_>, new_keys| {
        Some(ScoreBias {
            tensor: tensor.tensor(),
            request_rows: false,
            new_keys,
        })
    };
    for session in sessions() {
        let rows = weights(&*session, &[0., 0., 0.], 2, |args| {
            args.score_bias = bias(&keys, false);
        });
        assert_row(&rows[0], &[1., 0., 0.], two);
        let sum = 1. + 3. + 5.;
        assert_row(&rows[1], &[1. / sum, 3. / sum, 5. / sum], f32::ln(sum));
        let rows = weights(&*session, &[0., 0., 0.], 2, |args| {
            args.score_bias = bias(&new_keys, true);
        });
        assert_row(&rows[0], &[1. / 3., 2. / 3., 0.], f32::ln(3.));
        assert_row(&rows[1], &[1. / 4., 3. / 4., 0.], f32::ln(4.));
        let rows = weights(&*session, &[0., 0., 0.], 2, |args| {
            args.score_bias = bias(&hides, false);
        });
        assert_row(&rows[0], &[0., 1., 0.], 0.);
        // What is below -2^127 hides a key, and other numbers do not, however low.
        assert_eq!(rows[1].0, [0., 0.5, 0.5]);
    }
}

/// A hidden key may hold anything, and so may its bias where a mask hides it.
#[test]
fn a_bias_hides_keys_as_masks_do() {
    let bias = f32s(&[1, 3], &[0., f32::NEG_INFINITY, 0.]);
    for session in sessions() {
        let rows = weights(&*session, &[0., f32::NAN, 0.], 1, |args| {
            args.score_bias = Some(ScoreBias {
                tensor: bias.tensor(),
                request_rows: true,
                new_keys: false,
            });
        });
        assert_row(&rows[0], &[0.5, 0., 0.5], f32::ln(2.));
    }
}

#[test]
fn the_cap_comes_after_the_scale_and_before_the_bias() {
    // s = 0.5 · 2 = 1, capped 3 · tanh(1 / 3); the other key's s is 0.
    let capped = 3.0 * (1f32 / 3.0).tanh();
    let slope = f32s(&[1], &[0.25]);
    for session in sessions() {
        let change = |args: &mut AttentionArgs| {
            args.sm_scale = 0.5;
            args.logits_soft_cap = 3.0;
            args.alibi_slopes = Some(slope.tensor());
        };
        let rows = weights(&*session, &[2., 0.], 1, change);
        let (a, b) = ((capped - 0.25).exp(), 1f32);
        assert_row(&rows[0], &[a / (a + b), b / (a + b)], (a + b).ln());
    }
}

#[test]
fn the_lse_is_in_base_2_when_asked() {
    for session in sessions() {
        let rows = weights(&*session, &ln(&[3., 5.]), 1, |args| {
            args.lse_base = LogBase::Two
        });
        assert_row(&rows[0], &[0.375, 0.625], 3.0);
    }
}

#[test]
fn scales_multiply_logits_and_values() {
    for session in sessions() {
        let change = |args: &mut AttentionArgs| {
            args.sm_scale = 0.5;
            args.q_scale = 4.0;
            args.k_scale = 0.25;
            args.v_scale = 3.0;
        };
        // ln 4 · 0.5 · 4 · 0.25 = ln 2.
        let rows = weights(&*session, &ln(&[1., 4.]), 1, change);
        assert_row(&rows[0], &[1., 2.], 3f32.ln());
        let default = weights(&*session, &[0., 8f32.sqrt()], 1, |args| args.sm_scale = 0.0);
        let e = std::f32::consts::E;
        assert_row(&default[0], &[1. / (1. + e), e / (1. + e)], (1. + e).ln());
    }
}

/// Lengths 1, 16 and 17 on pages of 16 are 1, 1 and 2 pages, whose last ones
/// hold 1, 16 and 1 tokens. Stated either way the plan is the same.
#[test]
fn page_metadata_of_lengths() {
    let (indptr, ids) = (i32s(&[0, 1, 2, 4]), i32s(&[0, 1, 2, 3]));
    let (last, lens) = (i32s(&[1, 16, 1]), i32s(&[1, 16, 17]));
    let tokens: Vec<f32> = (0..64 * DIM).map(|n| ((n * 7) % 13) as f32 * 0.1).collect();
    let cache = f32s(&[4, 16, 1, DIM as i64], &tokens);
    let q = f32s(&[3, 1, DIM as i64], &tokens[..3 * DIM]);
    for session in sessions() {
        let mut outputs = Vec::new();
        for by_len in [false, true] {
            let o = f32s(&[3, 1, DIM as i64], &[f32::NAN; 3 * DIM]);
            let mut handle = session
                .attention(AttentionDesc {
                    kind: Kind::Decode,
                    kv: KvStorage::Paged {
                        page_size: 16,
                        layout: KvLayout::Nhd,
                    },
                    max_batch_size: 3,
                    ..desc(17, 1)
                })
                .unwrap();
            let batch = BatchInput {
                kv_indptr: Some(indptr.tensor()),
                kv_indices: Some(ids.tensor()),
                last_page_len: (!by_len).then(|| last.tensor()),
                kv_len: by_len.then(|| lens.tensor()),
                ..BatchInput::default()
            };
            let scratch = Scratch::new(&HostMemory, &handle.workspace().unwrap());
            scratch.plan(&mut *handle, &batch).unwrap();
            let args = AttentionArgs::new(q.tensor(), cache.tensor(), cache.tensor(), o.tensor());
            handle.run(&args, Stream::default()).unwrap();
            outputs.push(o.current().bytes);
            // The first request has one key: its output is that key's value.
            let first: Vec<f64> = (0..DIM as i64)
                .map(|d| o.current().value(&[0, 0, d]))
                .collect();
            let value: Vec<f64> = (0..DIM).map(|d| tokens[d].into()).collect();
            assert_eq!(first, value);
        }
        assert_eq!(outputs[0], outputs[1]);
    }
}
