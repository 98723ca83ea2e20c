//! Projections of MLA on the device: every tile of the Hopper kernel and the portable one against the formula, weights
//! copied on the device bit by bit, and chains in a graph.

use crate::common::codec::{encode, rounded};
use crate::common::instance::for_each_index;
use crate::common::memory::{Image, Memory, Resident, View};
use crate::common::projections::{Case, Layout, Operator, Values, Weights, grid};
use crate::gpu::{self, DeviceMemory};
use crate::problems::session;
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{AbsorbQArgs, AbsorbWeightsArgs, ProjectOArgs};

const HALF: [DType; 2] = [DType::BF16, DType::F16];

pub fn products() {
    let session = session();
    let sizes = [
        (0, 3, [64, 64, 128]),
        (1, 3, [128, 128, 512]),
        (5, 3, [24, 40, 72]),
        (17, 2, [8, 16, 24]),
        (33, 2, [64, 128, 256]),
        (131, 1, [128, 256, 512]),
        (3, 128, [64, 64, 128]),
        (70, 1, [64, 72, 648]),
        (300, 3, [200, 72, 64]),
    ];
    for case in grid(&HALF, &sizes) {
        case.check(&*session, &DeviceMemory);
    }
}

/// Numbers of tokens around the borders of tiles; then so many heads that the wide tiles are the best ones, several for
/// each multiprocessor.
pub fn products_of_every_tile() {
    const BORDERS: [i64; 16] = [
        1, 15, 16, 17, 31, 64, 65, 127, 128, 129, 200, 256, 257, 511, 512, 515,
    ];
    let session = session();
    // The formula is computed on the host: more tokens have fewer heads.
    let narrow = BORDERS.map(|tokens| match tokens < 32 {
        true => (tokens, 33, [128, 128, 128]),
        false => (tokens, 5, [64, 128, 256]),
    });
    let wide = [
        (250, 40, [128, 128, 128]),
        (300, 132, [128, 128, 128]),
        (515, 40, [128, 128, 128]),
        (700, 132, [128, 128, 128]),
        (4400, 3, [64, 128, 128]),
    ];
    for (n, (tokens, heads, widths)) in narrow.into_iter().chain(wide).enumerate() {
        for operator in [Operator::AbsorbQ, Operator::ProjectO, Operator::UpProject] {
            for (m, weights) in [Weights::Compact, Weights::Parts].into_iter().enumerate() {
                let case = Case {
                    operator,
                    dtype: HALF[(n + m) % 2],
                    tokens,
                    heads,
                    widths,
                    layout: [Layout::Compact, Layout::HeadMajor, Layout::Gapped(64)][n % 3],
                    weights,
                };
                case.check(&*session, &DeviceMemory);
            }
        }
    }
}

pub fn absorbed_weights() {
    let session = session();
    let (heads, [nope, value, latent]) = (3, [40, 136, 264]);
    let per_head = nope + value;
    for (source, target) in [
        (DType::F32, DType::BF16),
        (DType::F32, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
    ] {
        let values = Values {
            dtype: source,
            seed: 3,
        };
        let memory: &dyn Memory = &DeviceMemory;
        let from = View::gapped(source, &[heads * per_head, latent], &[5, 0], 3);
        let kv_b_proj = Resident::new(memory, values.image(from));
        let resident = |shape: &[i64]| {
            let view = View::gapped(target, shape, &[7, 2, 0], 1);
            Resident::new(memory, Image::poisoned(view))
        };
        let (w_uk, w_uv) = (
            resident(&[heads, nope, latent]),
            resident(&[heads, latent, value]),
        );
        let args = AbsorbWeightsArgs {
            kv_b_proj: kv_b_proj.tensor(),
            w_uk: Some(w_uk.tensor()),
            w_uv: Some(w_uv.tensor()),
        };
        session.absorb_weights(&args, Stream::default()).unwrap();
        let (mut uk_now, mut uv_now) = (w_uk.current(), w_uv.current());
        let expected = |row: i64, l: i64| encode(target, rounded(source, values.at(&[row, l])));
        for_each_index(&[heads, nope, latent], |at| {
            let wanted = expected(at[0] * per_head + at[1], at[2]);
            assert_eq!(uk_now.bits(at), wanted, "{source} w_uk{at:?}");
            uk_now.put(at, w_uk.image().bits(at));
        });
        for_each_index(&[heads, latent, value], |at| {
            let wanted = expected(at[0] * per_head + nope + at[2], at[1]);
            assert_eq!(uv_now.bits(at), wanted, "{source} w_uv{at:?}");
            uv_now.put(at, w_uv.image().bits(at));
        });
        assert!(uk_now == *w_uk.image() && uv_now == *w_uv.image(), "gaps");
    }
}

/// A chain whose every call reads what the one before wrote, weights included: kernels that start before the one before
/// has ended give the same bits as calls one at a time, also where a replay finds other weights.
pub fn chains_are_replayed() {
    const ROUNDS: u64 = 4;
    let session = session();
    let stream = gpu::new_stream();
    let (tokens, heads, [nope, value, latent]) = (24, 40, [128, 128, 512]);
    let dtype = DType::BF16;
    let memory: &dyn Memory = &DeviceMemory;
    let filled = |shape: &[i64], seed| {
        let values = Values { dtype, seed };
        Resident::new(memory, values.image(View::compact(dtype, shape)))
    };
    let weights: Vec<_> = (0..ROUNDS)
        .map(|seed| filled(&[heads * (nope + value), latent], seed))
        .collect();
    let kv_b_proj = filled(&[heads * (nope + value), latent], ROUNDS);
    let empty = |shape: &[i64]| Resident::new(memory, Image::poisoned(View::compact(dtype, shape)));
    let (w_uk, w_uv) = (
        empty(&[heads, nope, latent]),
        empty(&[heads, latent, value]),
    );
    let q_nope = filled(&[tokens, heads, nope], 7);
    let (q_latent, out) = (
        empty(&[tokens, heads, latent]),
        empty(&[tokens, heads, value]),
    );
    let cut = AbsorbWeightsArgs {
        kv_b_proj: kv_b_proj.tensor(),
        w_uk: Some(w_uk.tensor()),
        w_uv: Some(w_uv.tensor()),
    };
    let absorb = AbsorbQArgs {
        q_nope: q_nope.tensor(),
        w_uk: w_uk.tensor(),
        q_latent: q_latent.tensor(),
    };
    let project = ProjectOArgs {
        o_latent: q_latent.tensor(),
        w_uv: w_uv.tensor(),
        out: out.tensor(),
    };
    let calls: [&dyn Fn(); 3] = [
        &|| session.absorb_weights(&cut, stream).unwrap(),
        &|| session.absorb_q(&absorb, stream).unwrap(),
        &|| session.project_o(&project, stream).unwrap(),
    ];
    let one_at_a_time: Vec<Image> = weights
        .iter()
        .map(|weights| {
            kv_b_proj.copy_from(weights);
            for call in calls {
                call();
                gpu::synchronize_all();
            }
            out.current()
        })
        .collect();
    let graph = gpu::capture(stream, || calls.iter().for_each(|call| call()));
    for (weights, wanted) in weights.iter().zip(&one_at_a_time) {
        kv_b_proj.copy_from(weights);
        out.reset();
        gpu::synchronize_all();
        graph.launch(stream);
        gpu::synchronize_all();
        assert!(out.current() == *wanted, "a replay gave other bits");
    }
}
