//! Cascades: create, plan and run of a random problem of paged prefill, whose requests all have the same pages. So
//! whatever is stated of prefixes is true, as long as the page table is what it was.

#![allow(unsafe_code)]

use super::Place;
use super::attention::{BUDGET, draw, finite_inputs, judge, of_attention};
use super::corrupt::{Rng, may_be_called};
use super::guarded::Guarded;
use super::handle::{Door, call};
use super::oracle::{Ending, poke};
use super::prefixes::Prefixes;
use super::structs::{Described, Struct};
use crate::common::c_door::c_cascade_desc;
use crate::common::instance::{LayerData, Step, for_each_index};
use crate::common::problem::{MaskKind, Problem, Request, Storage, TableForm};
use crate::common::strategy::problems_within;
use folio::problem::{AttentionDesc, Kind, KvLayout};
use folio::tensor::Device;
use proptest::strategy::Strategy;

/// One case; its text goes to `place.announce` before anything can go wrong.
pub fn case(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let mut problem = draw(rng, problems_within(BUDGET).prop_map(of_cascade));
    if !rng.one_in(4) {
        worth_sharing(&mut problem, rng);
    }
    let data = Guarded::new(place.device);
    let host = Guarded::new(Device::Cpu);
    let index = if place.device == Device::Cpu {
        &data
    } else {
        &host
    };
    let step = Step::new(index, &problem);
    let layer = LayerData::new(&data, &problem);
    let desc = AttentionDesc {
        shared_levels: rng.below(4) as u32,
        ..problem.desc()
    };
    // SAFETY: the header's struct.
    let desc = unsafe { Struct::new("folio_cascade_desc", c_cascade_desc(&desc)) };
    let mut structs = of_attention(Door::Cascade, desc, &step.input(), &layer.input());
    if place.device == Device::Cpu {
        finite_inputs(&structs.args);
    }
    same_pages(&structs.batch, &problem);
    let before = page_table(&structs.batch);
    let (text, count) = structs.corrupt(rng);
    let prefixes = Prefixes::draw(rng, problem.requests.len() as i32);
    // Where pages are not the same ones, results are those of any of them.
    if place.device != Device::Cpu || page_table(&structs.batch) == before {
        structs.prefixes = Some(prefixes);
    }
    let parts = [&structs.desc, &structs.batch, &structs.args];
    if !may_be_called(&parts, count, index) || !may_be_called(&parts, count, &data) {
        return Ok(None);
    }
    place.announce(&format!("{problem:?}\n{:?}\n{text}", structs.prefixes));
    let run = |by| call(place.context(by), &structs, None);
    judge(place, &structs, &data, &run)
}

/// The same problem as one of paged prefill, which cascades are.
fn of_cascade(problem: Problem) -> Problem {
    let storage = match problem.storage {
        Storage::Ragged => Storage::Paged {
            page_size: 8,
            layout: KvLayout::Hnd,
            form: TableForm::BlockTable { spare_columns: 1 },
            unused_pages: 1,
            shared_pages: 0,
        },
        pages => pages,
    };
    Problem {
        kind: Kind::Prefill,
        split_keys: None,
        storage,
        ..problem
    }
}

/// Long requests of few rows, since the CPU shares multiples of 256 keys, and nothing that makes a run read keys request by request.
fn worth_sharing(problem: &mut Problem, rng: &mut Rng) {
    problem.graph = true;
    problem.batch_invariant = false;
    problem.num_kv_heads = problem.num_kv_heads.min(2);
    problem.group_size = problem.group_size.min(4);
    problem.head_dim_qk = problem.head_dim_qk.min(64);
    problem.head_dim_vo = problem.head_dim_vo.min(64);
    problem.requests = (0..2 + rng.below(4))
        .map(|_| Request {
            qo_len: 1 + rng.below(3) as u32,
            kv_len: 200 + rng.below(700) as u32,
            tag: rng.next(),
        })
        .collect();
    problem.uniform_rows = false;
    let layer = &mut problem.layer;
    layer.mask = rng.pick(&[MaskKind::Causal, MaskKind::Full]);
    (layer.window, layer.chunks, layer.alibi) = (None, None, None);
    layer.mm_prefix_ranges = 0;
    layer.bias = None;
}

/// Gives every request the pages of the longest one.
fn same_pages(batch: &Struct, problem: &Problem) {
    let Storage::Paged { page_size, .. } = problem.storage else {
        return;
    };
    let (name, rows_are_apart) = match batch.tensor("block_table") {
        Some(_) => ("block_table", false),
        None => ("kv_indices", true),
    };
    let ids = &batch.tensor(name).expect("a page table").original;
    let indptr = batch.tensor("kv_indptr").map(|block| &block.original);
    let index = |b: usize, i: u32| match (rows_are_apart, indptr) {
        (true, Some(indptr)) => vec![indptr.bits(&[b as i64]) as i64 + i64::from(i)],
        _ => vec![b as i64, i64::from(i)],
    };
    let lens = || {
        problem
            .requests
            .iter()
            .map(|request| request.kv_len)
            .enumerate()
    };
    let Some((longest, _)) = lens().max_by_key(|(_, kv_len)| *kv_len) else {
        return;
    };
    for (b, kv_len) in lens() {
        for i in 0..kv_len.div_ceil(page_size) {
            let page = ids.bits(&index(longest, i));
            poke(ids.at(&index(b, i)), page, ids.dtype.size());
        }
    }
}

/// The page ids of a batch, as they are described and as they are.
fn page_table(batch: &Struct) -> Vec<(Option<Described>, Vec<u64>)> {
    let tensors = ["kv_indptr", "kv_indices", "block_table"].map(|name| batch.tensor(name));
    let contents = tensors.into_iter().flatten().map(|block| {
        let mut numbers = Vec::new();
        for_each_index(&block.original.shape, |at| {
            numbers.push(block.original.bits(at))
        });
        (block.described(), numbers)
    });
    contents.collect()
}
