//! What the projections of MLA are launched with: the kernel by strides and size, its tensor maps, and the copy of weights.

use folio::api::{absorb_q, absorb_weights, project_o, up_project};
use folio::cuda::params::Rows;
use folio::cuda::projection_params::{CopyWeightsParams, ProjectionParams};
use folio::cuda::up_projection_params::UpProjectionParams;
use folio::dtype::DType;
use folio::error::{Error, Result};
use folio::problem::{AbsorbQArgs, AbsorbWeightsArgs, ProjectOArgs, UpProjectArgs};

use crate::fixture::{CAPTURED, OURS, at, context};
use crate::stub::{Launched, Recorder};

const X: usize = 0x1_0000_0000;
const WEIGHT: usize = 0x2_0000_0000;
const OUT: usize = 0x3_0000_0000;
const VALUES: usize = 0x4_0000_0000;

const COLUMNS_FIRST: &str = "folio_project_columns_first";
const DEPTH_FIRST: &str = "folio_project_depth_first";
const PORTABLE: &str = "folio_project";
const FEW_COLUMNS_FIRST: &str = "folio_project_few_columns_first";
const FEW_DEPTH_FIRST: &str = "folio_project_few_depth_first";
const SHARED_ROWS: &str = "folio_up_project";
/// Multiprocessors of the stub's device.
const MULTIPROCESSORS: u32 = 132;

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    for kernel in [
        COLUMNS_FIRST,
        DEPTH_FIRST,
        PORTABLE,
        FEW_COLUMNS_FIRST,
        FEW_DEPTH_FIRST,
    ] {
        recorder.expect::<ProjectionParams>(kernel);
    }
    recorder.expect::<UpProjectionParams>(SHARED_ROWS);
    recorder.expect::<CopyWeightsParams>("folio_copy_weights");
    recorder
}

fn launches(recorder: &Recorder, body: impl FnOnce() -> Result<()>) -> Vec<Launched> {
    recorder.forget();
    body().unwrap();
    recorder.launches()
}

/// Of DeepSeek-V3, into the first 512 columns of a query tensor of 576.
fn absorption(tokens: i64) -> AbsorbQArgs {
    AbsorbQArgs {
        q_nope: at(
            X,
            DType::BF16,
            &[tokens, 128, 128],
            Some(&[128 * 192, 192, 1]),
        ),
        w_uk: at(WEIGHT, DType::BF16, &[128, 128, 512], None),
        q_latent: at(
            OUT,
            DType::BF16,
            &[tokens, 128, 512],
            Some(&[128 * 576, 576, 1]),
        ),
    }
}

/// Weights are parts of `kv_b_proj`, 256 rows of 512 per head.
fn projection(tokens: i64) -> ProjectOArgs {
    ProjectOArgs {
        o_latent: at(X, DType::BF16, &[tokens, 128, 512], None),
        w_uv: at(
            WEIGHT,
            DType::BF16,
            &[128, 512, 128],
            Some(&[256 * 512, 1, 512]),
        ),
        out: at(OUT, DType::BF16, &[tokens, 128, 128], None),
    }
}

fn assert_rows(rows: Rows, data: usize, stride_token: i64, stride_head: i64) {
    assert_eq!(rows.data, data as u64);
    assert_eq!(
        [rows.stride_token, rows.stride_head],
        [stride_token, stride_head]
    );
}

/// Few tokens need no tensor map. The warps of a CTA share the depth.
pub fn absorption_of_one_token() {
    let recorder = recorder();
    let launched = launches(&recorder, || absorb_q(&context(), &absorption(1), OURS));
    assert_eq!(launched.len(), 1);
    let launch = &launched[0];
    assert_eq!((launch.name(), launch.dependent), (FEW_COLUMNS_FIRST, 1));
    // 16 blocks of 32 columns per head; 4 warps of 32 along the depth.
    assert_eq!(launch.grid, [16 * 128, 1, 1]);
    assert_eq!(launch.block, [128, 1, 1]);
    assert!(launch.maps().is_empty());
    let params: ProjectionParams = launch.params();
    assert_absorption(&params, 1);
    let launched = launches(&recorder, || project_o(&context(), &projection(8), OURS));
    let launch = &launched[0];
    assert_eq!(launch.name(), FEW_DEPTH_FIRST);
    assert_eq!((launch.grid, launch.block), ([4 * 128, 1, 1], [512, 1, 1]));
}

fn assert_absorption(params: &ProjectionParams, tokens: u32) {
    assert_rows(params.x, X, 128 * 192, 192);
    assert_rows(params.out, OUT, 128 * 576, 576);
    assert_eq!(params.weight, WEIGHT as u64);
    let strides = [
        params.weight_stride_head,
        params.weight_stride_depth,
        params.weight_stride_column,
    ];
    assert_eq!(strides, [128 * 512, 512, 1]);
    let extents = [
        params.num_tokens,
        params.num_heads,
        params.depth,
        params.columns,
    ];
    assert_eq!(extents, [tokens, 128, 128, 512]);
    assert_eq!((params.x_heads, params.x_vectors), (128, 1));
}

pub fn absorption_by_tensor_maps() {
    let recorder = recorder();
    let launched = launches(&recorder, || absorb_q(&context(), &absorption(9), OURS));
    assert_eq!(launched.len(), 1);
    let launch = &launched[0];
    assert_eq!((launch.name(), launch.dependent), (COLUMNS_FIRST, 1));
    // 8 tiles of 64 columns per head are 1024, for two CTAs on each multiprocessor.
    assert_eq!(launch.grid, [2 * MULTIPROCESSORS, 1, 1]);
    assert_eq!(launch.block, [192, 1, 1]);
    assert_absorption(&launch.params(), 9);
    let maps = launch.maps();
    assert_eq!(
        maps.iter().map(|map| map.address).collect::<Vec<_>>(),
        [X as u64, WEIGHT as u64, OUT as u64]
    );
    assert!(maps.iter().all(|map| map.swizzle == 3));
    assert_eq!(maps[0].extents[..3], [128, 9, 128]);
    assert_eq!(maps[0].boxes[..3], [64, 16, 1]);
    assert_eq!(maps[0].strides[..2], [128 * 192 * 2, 192 * 2]);
    assert_eq!(maps[1].extents[..3], [512, 128, 128]);
    assert_eq!(maps[1].boxes[..3], [64, 64, 1]);
    assert_eq!(maps[1].strides[..2], [512 * 2, 128 * 512 * 2]);
    assert_eq!(maps[2].extents[..3], [512, 9, 128]);
    assert_eq!(maps[2].boxes[..3], [64, 16, 1]);
    assert_eq!(maps[2].strides[..2], [128 * 576 * 2, 576 * 2]);
}

/// The depth of these weights is contiguous: their map has it first.
pub fn projection_by_parts_of_the_up_projection() {
    let recorder = recorder();
    let launched = launches(&recorder, || project_o(&context(), &projection(512), OURS));
    let launch = &launched[0];
    assert_eq!(launch.name(), DEPTH_FIRST);
    let maps = launch.maps();
    // Eight tiles of 64 tokens per head, for two CTAs on each multiprocessor.
    assert_eq!(maps[0].boxes[..3], [64, 64, 1]);
    assert_eq!(
        (launch.grid[0], launch.block[0]),
        (2 * MULTIPROCESSORS, 192)
    );
    assert_eq!(maps[1].extents[..3], [512, 128, 128]);
    assert_eq!(maps[1].boxes[..3], [64, 128, 1]);
    assert_eq!(maps[1].strides[..2], [512 * 2, 256 * 512 * 2]);
    assert_eq!(maps[2].boxes[..3], [64, 64, 1]);
}

/// Tiles were timed in bf16; others are chosen by arithmetic. Both grow with the tokens, and shrink where few heads would
/// leave multiprocessors idle.
pub fn tiles_suit_the_number_of_tokens() {
    let recorder = recorder();
    let context = context();
    // Tokens and columns of a tile, and CTAs.
    for (tokens, heads, timed, by_arithmetic) in [
        (9, 128, (16, 64, 264), (16, 128, 264)),
        (32, 128, (32, 64, 264), (64, 128, 264)),
        (64, 128, (64, 128, 264), (64, 128, 264)),
        (128, 128, (64, 128, 264), (128, 128, 132)),
        (512, 128, (64, 128, 264), (256, 128, 132)),
        (9, 16, (16, 64, 128), (16, 64, 128)),
        (64, 16, (64, 64, 128), (64, 64, 128)),
        (64, 8, (32, 64, 128), (16, 128, 128)),
    ] {
        let depth_first = [128 * 512, 1, 128];
        for (dtype, strides, (tile_tokens, tile_columns, blocks)) in [
            (DType::BF16, None, timed),
            (DType::BF16, Some(&depth_first[..]), timed),
            (DType::F16, Some(&depth_first[..]), by_arithmetic),
        ] {
            let args = AbsorbQArgs {
                q_nope: at(X, dtype, &[tokens, heads, 128], None),
                w_uk: at(WEIGHT, dtype, &[heads, 128, 512], strides),
                q_latent: at(OUT, dtype, &[tokens, heads, 512], None),
            };
            let launched = launches(&recorder, || absorb_q(&context, &args, OURS));
            let launch = &launched[0];
            let maps = launch.maps();
            let what = format!("{tokens} tokens, {heads} heads, {dtype}, {strides:?}");
            assert_eq!(maps[0].boxes[1], tile_tokens, "{what}");
            assert_eq!(launch.grid[0], blocks, "{what}");
            match strides {
                // The box says how many columns a tile has, or the memory of the stages does.
                Some(_) => assert_eq!(maps[1].boxes[1], tile_columns, "{what}"),
                None => {
                    let stage = (tile_tokens + tile_columns) * 128;
                    let results = tile_tokens * tile_columns * 2 + 1024;
                    let stages = launch.shared_bytes - results;
                    assert_eq!(stages % stage, 0, "{what}");
                }
            }
        }
    }
}

/// Keys and values are one launch of clusters of two CTAs. Heads that share their rows have one in the map.
pub fn up_projection_of_shared_rows() {
    let recorder = recorder();
    let context = context();
    let args = UpProjectArgs {
        kv_c: at(X, DType::BF16, &[4096, 512], Some(&[576, 1])),
        w_uk: Some(at(
            WEIGHT,
            DType::BF16,
            &[16, 128, 512],
            Some(&[256 * 512, 512, 1]),
        )),
        w_uv: Some(at(
            WEIGHT + 128 * 512 * 2,
            DType::BF16,
            &[16, 512, 128],
            Some(&[256 * 512, 1, 512]),
        )),
        k_nope: Some(at(
            OUT,
            DType::BF16,
            &[4096, 16, 128],
            Some(&[16 * 192, 192, 1]),
        )),
        v: Some(at(VALUES, DType::BF16, &[4096, 16, 128], None)),
    };
    let launched = launches(&recorder, || up_project(&context, &args, OURS));
    assert_eq!(launched.len(), 1);
    let launch = &launched[0];
    assert_eq!((launch.name(), launch.cluster), (SHARED_ROWS, 2));
    // 16 pairs of token blocks times 16 blocks of four chunks, for 66 pairs of multiprocessors.
    assert_eq!(
        (launch.grid, launch.block),
        ([MULTIPROCESSORS, 1, 1], [288, 1, 1])
    );
    let params: UpProjectionParams = launch.params();
    assert_eq!(
        [params.num_tokens, params.num_heads, params.depth],
        [4096, 16, 512]
    );
    for part in [params.keys, params.values] {
        assert_eq!((part.columns, part.depth_first), (128, 1));
    }
    let maps = launch.maps();
    let addresses = [X, WEIGHT, WEIGHT + 128 * 512 * 2, OUT, VALUES];
    assert_eq!(
        maps.iter().map(|map| map.address).collect::<Vec<_>>(),
        addresses.map(|address| address as u64)
    );
    assert_eq!(maps[0].extents[..3], [512, 4096, 1]);
    assert_eq!(maps[0].boxes[..3], [64, 128, 1]);
    assert_eq!(maps[0].strides[0], 576 * 2);
    for (map, [token, head]) in maps[3..].iter().zip([[16 * 192, 192], [16 * 128, 128]]) {
        assert_eq!(map.boxes[..3], [64, 64, 1]);
        assert_eq!(map.strides[..2], [token * 2, head * 2]);
    }
    // The order of each weight is its own.
    let copied = UpProjectArgs {
        w_uv: Some(at(WEIGHT, DType::BF16, &[16, 512, 128], None)),
        ..args
    };
    let launched = launches(&recorder, || up_project(&context, &copied, OURS));
    let params: UpProjectionParams = launched[0].params();
    assert_eq!([params.keys.depth_first, params.values.depth_first], [1, 0]);
    // Fewer tokens have smaller tiles, of CTAs alone; some of them rows that do not fill their tiles.
    for (tokens, blocks) in [(1, 64), (200, 128), (512, 128), (1000, 128)] {
        let rows = |address, heads| at(address, DType::BF16, &[tokens, heads, 128], None);
        let few = UpProjectArgs {
            kv_c: at(X, DType::BF16, &[tokens, 512], None),
            k_nope: Some(rows(OUT, 16)),
            v: Some(rows(VALUES, 16)),
            ..args
        };
        let launched = launches(&recorder, || up_project(&context, &few, OURS));
        assert_eq!(launched.len(), 1);
        let launch = &launched[0];
        let shape = (launch.name(), launch.cluster, launch.grid[0]);
        assert_eq!(shape, (SHARED_ROWS, 1, blocks), "{tokens} tokens");
        assert_eq!(launch.maps()[0].extents[..3], [512, tokens as u64, 1]);
        let params: UpProjectionParams = launch.params();
        let expected = (tokens as u32, 0);
        assert_eq!((params.num_tokens, params.existing_tokens), expected);
    }
    // One product alone.
    let keys_alone = UpProjectArgs {
        w_uv: None,
        v: None,
        ..args
    };
    let launched = launches(&recorder, || up_project(&context, &keys_alone, OURS));
    assert_eq!(launched.len(), 1);
    let launch = &launched[0];
    assert_eq!(launch.name(), DEPTH_FIRST);
    let params: ProjectionParams = launch.params();
    assert_rows(params.x, X, 576, 0);
    assert_eq!((params.x_heads, params.num_heads), (1, 16));
    // What no tensor map describes goes one product after the other.
    let skew = UpProjectArgs {
        kv_c: at(X + 8, DType::BF16, &[4096, 512], None),
        ..args
    };
    let launched = launches(&recorder, || up_project(&context, &skew, OURS));
    assert_eq!(launched.len(), 2);
    assert!(launched.iter().all(|launch| launch.name() == PORTABLE));
}

/// What no tensor map describes is the portable kernel's.
pub fn projections_by_the_portable_kernel() {
    let recorder = recorder();
    let context = context();
    let whole = projection(70);
    let skew = ProjectOArgs {
        o_latent: at(X + 8, DType::BF16, &[70, 128, 512], None),
        ..whole
    };
    let narrow = ProjectOArgs {
        out: at(
            OUT,
            DType::BF16,
            &[70, 128, 128],
            Some(&[128 * 130, 130, 1]),
        ),
        ..whole
    };
    let scattered = ProjectOArgs {
        w_uv: at(
            WEIGHT,
            DType::BF16,
            &[128, 512, 128],
            Some(&[512 * 256, 256, 2]),
        ),
        ..whole
    };
    let shared = ProjectOArgs {
        w_uv: at(WEIGHT, DType::BF16, &[128, 512, 128], Some(&[0, 128, 1])),
        ..whole
    };
    for (args, x_vectors, weight_order, out_pairs) in [
        (skew, 0, 0, 1),
        (narrow, 1, 0, 1),
        (scattered, 1, 2, 1),
        (shared, 1, 1, 1),
    ] {
        let launched = launches(&recorder, || project_o(&context, &args, OURS));
        let launch = &launched[0];
        assert_eq!(
            (launch.name(), launch.grid, launch.block),
            (PORTABLE, [2 * 2 * 128, 1, 1], [128, 1, 1])
        );
        let params: ProjectionParams = launch.params();
        assert_eq!(
            (params.x_vectors, params.weight_order, params.out_pairs),
            (x_vectors, weight_order, out_pairs)
        );
    }
}

pub fn projections_of_no_tokens_launch_nothing() {
    let recorder = recorder();
    let context = context();
    let launched = launches(&recorder, || absorb_q(&context, &absorption(0), OURS));
    assert_eq!(launched.len(), 0);
    // All kernels of the type are loaded now, whatever the number of tokens.
    let launched = launches(&recorder, || absorb_q(&context, &absorption(512), CAPTURED));
    assert_eq!(launched.len(), 1);
}

pub fn projections_that_are_refused() {
    let context = context();
    let single = AbsorbQArgs {
        q_nope: at(X, DType::F32, &[2, 1, 64], None),
        w_uk: at(WEIGHT, DType::F32, &[1, 64, 64], None),
        q_latent: at(OUT, DType::F32, &[2, 1, 64], None),
    };
    let refused = |result: Result<()>, word: &str| {
        let message = match result {
            Err(Error::Unsupported(message) | Error::Capture(message)) => message,
            other => panic!("{other:?}"),
        };
        assert!(message.contains(word), "{message}");
    };
    refused(absorb_q(&context, &single, OURS), "float32");
    refused(
        absorb_q(&context, &absorption(1), CAPTURED),
        "MLA projection",
    );
}

pub fn weights_are_copied_by_tiles() {
    let recorder = recorder();
    let args = AbsorbWeightsArgs {
        kv_b_proj: at(X, DType::F32, &[3 * (128 + 40), 512], Some(&[520, 1])),
        w_uk: Some(at(WEIGHT, DType::BF16, &[3, 128, 512], None)),
        w_uv: Some(at(OUT, DType::BF16, &[3, 512, 40], None)),
    };
    let launched = launches(&recorder, || absorb_weights(&context(), &args, OURS));
    assert_eq!(launched.len(), 2);
    let [keys, values]: [CopyWeightsParams; 2] = [launched[0].params(), launched[1].params()];
    assert_eq!(launched[0].name(), "folio_copy_weights");
    assert_eq!(launched[0].grid, [3 * 4 * 16, 1, 1]);
    assert_eq!(launched[1].grid, [3 * 2 * 16, 1, 1]);
    assert_eq!((keys.source, keys.target), (X as u64, WEIGHT as u64));
    assert_eq!(keys.source_strides, [168 * 520, 520, 1]);
    assert_eq!(keys.target_strides, [128 * 512, 512, 1]);
    assert_eq!((keys.num_heads, keys.rows, keys.columns), (3, 128, 512));
    let from = X as u64 + 128 * 520 * 4;
    assert_eq!((values.source, values.target), (from, OUT as u64));
    assert_eq!(values.target_strides, [512 * 40, 1, 40]);
    assert_eq!((values.rows, values.columns), (40, 512));
}
