//! Whichever Hopper prefill kernel takes a run gets items that it can take: no more rows than its tiles hold, and first keys
//! at which its steps begin. Another kernel than the one that the plan was cut for may be the one.

use folio::api::BatchInput;
use folio::cuda::kernels::attention::{
    AttentionQuery, AttentionRow, AttentionTypes, Phase, candidates,
};
use folio::cuda::params::{DecodeParams, GenericParams, PlanView};
use folio::cuda::prefill_params::{PrefillParams, WARPGROUP_ROWS};
use folio::cuda::widen_params::WidenParams;
use folio::dtype::DType;
use folio::problem::{AttentionArgs, AttentionDesc, Kind, KvLayout, KvStorage, Window};

use crate::fixture::{Handle, OURS, at, context, desc, host_tensor};
use crate::launches::items;
use crate::stub::{Launched, Recorder};

const KV_HEADS: u32 = 8;
/// One long request beside short ones, whose keys are split.
const QO_LENS: [i32; 3] = [200, 70, 130];
const KV_LENS: [i32; 3] = [3000, 100, 130];
const LONGEST: u32 = 3000;

fn problem(head_dim: u32, group: u32, page_size: u32, kv_dtype: DType) -> AttentionDesc {
    AttentionDesc {
        kind: Kind::Prefill,
        q_dtype: DType::BF16,
        o_dtype: DType::BF16,
        kv_format: kv_dtype.into(),
        num_qo_heads: KV_HEADS * group,
        num_kv_heads: KV_HEADS,
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        max_batch_size: 3,
        max_num_tokens: 400,
        max_qo_len: 200,
        max_kv_len: LONGEST,
        kv: KvStorage::Paged {
            page_size,
            layout: KvLayout::Nhd,
        },
        ..desc(false)
    }
}

fn planned(desc: AttentionDesc) -> Handle {
    let mut handle = Handle::of(&context(), desc).unwrap();
    let columns = i64::from(LONGEST.div_ceil(desc.kv.page_size()));
    let ids = vec![1; 3 * columns as usize];
    let batch = BatchInput {
        qo_indptr: host_tensor(&[0, 200, 270, 400], &[4]),
        kv_len: host_tensor(&KV_LENS, &[3]),
        block_table: host_tensor(&ids, &[3, columns]),
        ..BatchInput::default()
    };
    handle.plan(&batch, OURS).unwrap();
    handle
}

fn arguments(desc: &AttentionDesc) -> AttentionArgs {
    let rows = |address| {
        let tokens = i64::from(QO_LENS.iter().sum::<i32>());
        let shape = [tokens, desc.num_qo_heads.into(), desc.head_dim_qk.into()];
        at(address, desc.q_dtype, &shape, None)
    };
    let cache = |address| {
        let page_size = i64::from(desc.kv.page_size());
        let shape = [40, page_size, KV_HEADS.into(), desc.head_dim_qk.into()];
        at(address, desc.kv_format.element, &shape, None)
    };
    AttentionArgs::new(
        rows(0x1_0000_0000),
        cache(0x2_0000_0000),
        cache(0x3_0000_0000),
        rows(0x4_0000_0000),
    )
}

fn recorder() -> Recorder {
    let recorder = Recorder::new();
    for kernel in ["folio_widen_places", "folio_widen_rows", "folio_copy_rows"] {
        recorder.expect::<WidenParams>(kernel);
    }
    recorder.expect::<PrefillParams>("folio_prefill_sm90");
    recorder.expect::<PrefillParams>("folio_prefill_sm90_rows");
    recorder.expect::<DecodeParams>("folio_sm90_decode_tma");
    recorder.expect::<DecodeParams>("folio_sm90_decode_gather");
    recorder.expect::<GenericParams>("folio_attention");
    recorder
}

/// The plan of a run's first launch.
fn plan_of(first: &Launched) -> PlanView {
    match first.name() {
        "folio_widen_places" => first.params::<WidenParams>().plan,
        "folio_attention" => first.params::<GenericParams>().attention.plan,
        _ => first.params::<PrefillParams>().attention.plan,
    }
}

/// The keys of a step of a launched kernel, which its row says, and the positions of its tiles.
fn step_and_positions(desc: &AttentionDesc, launched: &Launched) -> [u32; 2] {
    let kv = match launched.name() {
        "folio_prefill_sm90_rows" => desc.kv_format.element,
        _ => desc.q_dtype,
    };
    let query = AttentionQuery {
        phase: Phase::Prefill,
        compute_capability: (9, 0),
        types: AttentionTypes {
            q: desc.q_dtype,
            kv,
            o: desc.o_dtype,
        },
        head_dim_qk: desc.head_dim_qk,
        head_dim_vo: desc.head_dim_vo,
    };
    let is_launched = |row: &&AttentionRow| {
        row.row.symbol == launched.name()
            && row.row.shared_bytes == launched.shared_bytes
            && row.row.threads == launched.block[0]
    };
    let row = candidates(query).find(is_launched).expect("its row");
    let params = launched.params::<PrefillParams>();
    let group = desc.group_size();
    let blocks = params.packing.blocks_of(group);
    assert_eq!(
        (params.group_size.into(), params.group_blocks.into()),
        (group, blocks)
    );
    [
        row.shape.kv_tile,
        row.shape.q_tile / WARPGROUP_ROWS * params.packing.positions(),
    ]
}

pub fn are_what_the_kernel_that_takes_them_can() {
    let recorder = recorder();
    let (mut by_position, mut split) = (0, 0);
    for head_dim in [40, 64, 72, 96, 128, 144, 160, 192, 224, 256] {
        for group in [1, 5, 8, 17] {
            for (page_size, kv_dtype) in [
                (16, DType::BF16),
                (5, DType::BF16),
                (1, DType::BF16),
                (16, DType::F8E4M3),
                (5, DType::F8E4M3),
            ] {
                let desc = problem(head_dim, group, page_size, kv_dtype);
                let (handle, plain) = (planned(desc), arguments(&desc));
                let windowed = AttentionArgs {
                    window: Window {
                        left: Some(100),
                        right: None,
                    },
                    ..arguments(&desc)
                };
                let upload = recorder.upload();
                for args in [plain, windowed] {
                    recorder.forget();
                    handle.attention.run(&args, OURS).unwrap();
                    let launches = recorder.launches();
                    let is_prefill =
                        |launch: &&Launched| launch.name().starts_with("folio_prefill");
                    let Some(kernel) = launches.iter().find(is_prefill) else {
                        continue;
                    };
                    let [step, positions] = step_and_positions(&desc, kernel);
                    by_position += 1;
                    for item in items(&upload, &plan_of(&launches[0])) {
                        let what = format!("{} of {desc:?}: {item:?}", kernel.name());
                        assert!(item.q_len <= positions, "{positions}, {what}");
                        assert!(item.kv_start.is_multiple_of(step), "{step}, {what}");
                        split += u32::from(item.kv_start > 0);
                    }
                }
            }
        }
    }
    assert!(by_position > 100 && split > 100, "{by_position}, {split}");
}
