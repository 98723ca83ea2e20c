//! Append and decode by one call: which steps are one kernel's, and what it is given; which are two kernels'.

use folio::api::BatchInput;
use folio::cuda::new_tokens_params::NewTokensParams;
use folio::cuda::params::{CombineParams, DecodeParams, Rows};
use folio::cuda::rope_append_params::RopeAppendParams;
use folio::dtype::DType;
use folio::problem::{
    Angles, AppendArgs, AttentionArgs, AttentionDesc, CacheForm, Frequencies, KvLayout, Mask, Norm,
    Rope, RopeAppendArgs,
};

use crate::fixture::{Handle, OURS, at, context, desc, host_tensor};
use crate::stub::Recorder;

const Q: usize = 0x1_0000_0000;
const Q_OUT: usize = 0x2_0000_0000;
const KEYS: usize = 0x3_0000_0000;
const VALUES: usize = 0x4_0000_0000;
const CACHE: usize = 0x5_0000_0000;
const INTEGERS: usize = 0x6_0000_0000;
const O: usize = 0x7_0000_0000;
const MASK: usize = 0x8_0000_0000;

const ONE: &str = "folio_sm90_decode_tma_new_tokens";

/// What a step has of its own.
#[derive(Clone, Copy)]
struct Step {
    keys: i32,
    q_out: usize,
    rotary_dim: u32,
    key_out: bool,
    is_masked: bool,
}

const STEP: Step = Step {
    keys: 100,
    q_out: Q_OUT,
    rotary_dim: 128,
    key_out: false,
    is_masked: false,
};

/// The kernels of a step, and the parameters of the first where it is the only one of its kind.
fn launched(step: Step) -> (Vec<String>, Option<NewTokensParams>) {
    let recorder = Recorder::new();
    recorder.expect::<NewTokensParams>(ONE);
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    for kernel in ["folio_rope_append", "folio_rope_append_loose"] {
        recorder.expect::<RopeAppendParams>(kernel);
    }
    recorder.expect::<CombineParams>("folio_combine");
    let desc = AttentionDesc {
        num_qo_heads: 16,
        num_kv_heads: 8,
        ..desc(false)
    };
    let mut handle = Handle::of(&context(), desc).unwrap();
    let columns = (step.keys + 15) / 16;
    let table: Vec<i32> = (0..2 * columns).map(|id| id % 40).collect();
    let batch = BatchInput {
        kv_len: host_tensor(&[step.keys, 30], &[2]),
        block_table: host_tensor(&table, &[2, columns.into()]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    let rows = |address, heads| at(address, DType::BF16, &[2, heads, 128], None);
    let pages = at(CACHE, DType::BF16, &[40, 16, 8, 128], None);
    let integers = at(INTEGERS, DType::I32, &[2], None);
    let append = RopeAppendArgs {
        append: AppendArgs {
            key: rows(KEYS, 8),
            value: rows(VALUES, 8),
            k_cache: pages,
            v_cache: pages,
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: integers,
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: None,
            v_scales: None,
        },
        key_out: step.key_out.then(|| rows(KEYS, 8)),
        q: Some(rows(Q, 16)),
        q_out: Some(rows(step.q_out, 16)),
        norm: Norm {
            q_weight: None,
            k_weight: None,
            eps: 0.0,
        },
        rope: Some(Rope {
            positions: integers,
            position_offsets: None,
            angles: Angles::Computed(Frequencies {
                theta: 1e4,
                scale: 0.0,
                llama3: None,
            }),
            rotary_dim: step.rotary_dim,
            is_interleaved: false,
        }),
    };
    let mut args = AttentionArgs::new(rows(step.q_out, 16), pages, pages, rows(O, 16));
    if step.is_masked {
        args.mask = Mask::Bytes(at(MASK, DType::U8, &[1000], None));
    }
    recorder.forget();
    handle.attention.append_run(&append, &args, OURS).unwrap();
    let launched = recorder.launches();
    let names = launched.iter().map(|launch| launch.name().to_owned());
    let names: Vec<String> = names.collect();
    let params = (names[0] == ONE).then(|| launched[0].params::<NewTokensParams>());
    (names, params)
}

/// One kernel, which reads queries where they come from; a second puts split rows together.
pub fn by_one_kernel() {
    let (names, params) = launched(STEP);
    assert_eq!(names, [ONE]);
    let params = params.unwrap();
    let rows = |address: usize| Rows {
        data: address as u64,
        stride_token: 16 * 128,
        stride_head: 128,
    };
    assert_eq!(params.decode.attention.q, rows(Q));
    assert_eq!((params.rope.q, params.rope.q_out), (rows(Q), rows(Q_OUT)));
    assert_eq!(params.decode.attention.num_tokens, 2);
    let (names, _) = launched(Step { keys: 9000, ..STEP });
    assert_eq!(names, [ONE, "folio_combine"]);
    let half = Step {
        rotary_dim: 64,
        ..STEP
    };
    assert_eq!(launched(half).0, [ONE]);
}

/// Queries in place, keys that are wanted elsewhere, rotations that are no multiple of 16, and masks in memory.
pub fn by_two_kernels() {
    const APPEND: &str = "folio_rope_append";
    for (step, append) in [
        (Step { q_out: Q, ..STEP }, APPEND),
        (
            Step {
                key_out: true,
                ..STEP
            },
            APPEND,
        ),
        (
            Step {
                rotary_dim: 24,
                ..STEP
            },
            "folio_rope_append_loose",
        ),
        (
            Step {
                is_masked: true,
                ..STEP
            },
            APPEND,
        ),
    ] {
        let (names, _) = launched(step);
        assert_eq!(names, [append, "folio_sm90_decode_tma"]);
    }
}
