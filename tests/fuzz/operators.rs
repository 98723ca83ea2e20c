//! Appends, gathers, merges and projections of random shapes.

#![allow(unsafe_code)]

use super::Place;
use super::corrupt::{Rng, corrupt, may_be_called};
use super::guarded::Guarded;
use super::oracle::{By, Ending, Output, Refusal, Run};
use super::structs::{Described, Struct};
use crate::common::c_door::{
    Tensors, api, c_absorb_q, c_absorb_weights, c_append, c_copy, c_gather, c_merge,
    c_merge_states, c_merge_varlen, c_mla_append, c_mla_gather, c_project_o, c_rope_append,
    c_tree_mask, c_up_project, message, report,
};
use crate::common::codec::encode;
use crate::common::instance::for_each_index;
use crate::common::memory::{Image, Resident, View};
use crate::common::tree::{Forest, Grown, OUTPUTS, grown};
use crate::common::values::{normal, shuffled, uniform};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{
    AbsorbQArgs, AbsorbWeightsArgs, Angles, AppendArgs, CacheForm, CopyArgs, GatherArgs,
    GatheredRequests, KvLayout, LatentCache, LogBase, MergeArgs, MergeStatesArgs, MergeVarlenArgs,
    MlaAppendArgs, MlaGatherArgs, Norm, PagesToCopy, ProjectOArgs, RecordPages, Rope,
    RopeAppendArgs, UpProjectArgs,
};
use folio::tensor::Device;
use std::ffi::c_void;

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A function of the library that takes a context and one struct.
pub type Operator =
    dyn Fn(*const folio_context, &Struct, *mut c_void, &mut folio_error) -> folio_status;

/// Normal numbers, with gaps between the rows.
fn numbers(dtype: DType, shape: &[i64], rng: &mut Rng) -> Image {
    let mut gaps = vec![0; shape.len()];
    for gap in &mut gaps[..shape.len() - 1] {
        *gap = rng.pick(&[0, 0, 8, 3]);
    }
    let mut image = Image::poisoned(View::gapped(dtype, shape, &gaps, rng.pick(&[0, 0, 1, 8])));
    for_each_index(shape, |index| {
        image.put(index, encode(dtype, normal(rng.next())))
    });
    image
}

fn scales(heads: i64, rng: &mut Rng) -> Option<Image> {
    let count = rng.pick(&[0, 0, 1, heads]);
    let values: Vec<f32> = (0..count)
        .map(|_| (0.05 + uniform(rng.next())) as f32)
        .collect();
    (count > 0).then(|| Image::of_f32(&[count], &values))
}

/// Different slots in no order, some negative.
fn slots(count: i64, all: i64, rng: &mut Rng) -> Image {
    let dtype = rng.pick(&[DType::I32, DType::I64]);
    let mut free = shuffled(rng.next(), all as usize).into_iter();
    let bits = (0..count).map(|_| match rng.one_in(6) {
        true => -2i64 as u64,
        false => free.next().map_or(-1i64 as u64, |slot| slot as u64),
    });
    let bits: Vec<u64> = bits.collect();
    Image::of_bits(dtype, &[count], bits)
}

/// New tokens for a cache.
pub fn append(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let source = rng.pick(&FLOATS);
    let fp8 = rng.pick(&[None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let cache = fp8.unwrap_or(source);
    let (heads, page_size) = (1 + rng.below(4) as i64, rng.pick(&[16, 1, 3]));
    let dims = [rng.pick(&[64, 8, 13, 128, 72]), rng.pick(&[64, 8, 13, 128])];
    let (tokens, pages) = (rng.below(12) as i64, 1 + rng.below(6) as i64);
    let layout = rng.pick(&[KvLayout::Nhd, KvLayout::Hnd]);
    let padded = tokens + rng.below(3) as i64;
    let as_bytes = fp8.is_some() && rng.one_in(2);
    let resident = |image| Resident::new(&data, image);
    let sources = dims.map(|dim| resident(numbers(source, &[padded, heads, dim], rng)));
    let caches = dims.map(|dim| {
        let shape = match layout {
            KvLayout::Nhd => [pages, page_size, heads, dim],
            KvLayout::Hnd => [pages, heads, page_size, dim],
        };
        let gaps = [rng.pick(&[0, 8]), 0, rng.pick(&[0, 3]), 0];
        let dtype = if as_bytes { DType::U8 } else { cache };
        resident(Image::poisoned(View::gapped(dtype, &shape, &gaps, 0)))
    });
    let slots = resident(slots(tokens, pages * page_size, rng));
    let tensors_of_scales = [0, 1].map(|_| fp8.and_then(|_| scales(heads, rng)).map(resident));
    let [k_scales, v_scales] = tensors_of_scales
        .each_ref()
        .map(|s| s.as_ref().map(Resident::tensor));
    let scale = if fp8.is_some() {
        rng.pick(&[0.0, 0.5, 0.03])
    } else {
        0.0
    };
    let input = AppendArgs {
        key: sources[0].tensor(),
        value: sources[1].tensor(),
        k_cache: caches[0].tensor(),
        v_cache: caches[1].tensor(),
        layout,
        kv_dtype: as_bytes.then_some(cache),
        form: CacheForm::Plain,
        k_zero_points: None,
        v_zero_points: None,
        slot_mapping: slots.tensor(),
        k_scale: scale,
        v_scale: scale,
        k_scales,
        v_scales,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_kv_append_args", c_append(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().kv_append.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, &data, args, call, &["k_cache", "v_cache"], &[])
}

/// Pages of one tensor or two, to others or within.
pub fn copy(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let dtype = rng.pick(&[DType::F32, DType::BF16, DType::F8E4M3]);
    let is_in_place = rng.one_in(3);
    let src_pages = 2 + rng.below(6) as i64;
    let dst_pages = if is_in_place {
        src_pages
    } else {
        1 + rng.below(6) as i64
    };
    let resident = |image| Resident::new(&data, image);
    let mut side = || {
        let page = [rng.pick(&[4, 1, 3]), rng.pick(&[16, 8, 13])];
        let mut pages = |count: i64| {
            let gaps = [rng.pick(&[0, 0, 8, 3]), 0, 0];
            let shape = [count, page[0], page[1]];
            let mut image = Image::poisoned(View::gapped(dtype, &shape, &gaps, 0));
            for_each_index(&shape, |at| {
                image.put(at, encode(dtype, normal(rng.next())))
            });
            resident(image)
        };
        let src = pages(src_pages);
        let dst = (!is_in_place).then(|| pages(dst_pages));
        (src, dst)
    };
    let (k, v) = (side(), side());
    let has_values = rng.one_in(2);
    // In place a page is either read or written.
    let first = if is_in_place { src_pages / 2 } else { 0 };
    let sources = if is_in_place { first } else { src_pages };
    let count = rng.below(1 + (dst_pages - first) as usize) as i64;
    let pairs: Vec<u64> = (0..count)
        .flat_map(|n| {
            let src = rng.below(sources as usize) as u64;
            [
                if rng.one_in(6) { -3i64 as u64 } else { src },
                (first + n) as u64,
            ]
        })
        .collect();
    let pair_dtype = rng.pick(&[DType::I32, DType::I64]);
    let pairs = resident(Image::of_bits(pair_dtype, &[count, 2], pairs));
    let pages = |side: &(Resident<'_>, Option<Resident<'_>>)| PagesToCopy {
        src: side.0.tensor(),
        dst: side.1.as_ref().unwrap_or(&side.0).tensor(),
    };
    let input = CopyArgs {
        k: pages(&k),
        v: has_values.then(|| pages(&v)),
        page_pairs: pairs.tensor(),
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_kv_copy_args", c_copy(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().kv_copy.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, &data, args, call, &["k_dst", "v_dst"], &[])
}

/// New tokens that are rotated on their way, by angles whose products are exact.
pub fn rope_append(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let source = rng.pick(&FLOATS);
    let fp8 = rng.pick(&[None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let (heads, page_size) = (1 + rng.below(4) as i64, rng.pick(&[16, 1, 3]));
    let (dim, dim_vo) = (rng.pick(&[64, 8, 14, 128]), rng.pick(&[64, 8, 13]));
    let (tokens, pages) = (rng.below(12) as i64, 1 + rng.below(6) as i64);
    let rows = tokens + rng.below(3) as i64;
    let resident = |image| Resident::new(&data, image);
    let mut row = |heads, dim| resident(numbers(source, &[rows, heads, dim], rng));
    let [q, q_out] = [(); 2].map(|()| row(2 * heads, dim));
    let [key, key_out, value] = [dim, dim, dim_vo].map(|dim| row(heads, dim));
    let caches = [dim, dim_vo].map(|dim| {
        let gaps = [rng.pick(&[0, 8]), 0, rng.pick(&[0, 3]), 0];
        let shape = [pages, page_size, heads, dim];
        resident(Image::poisoned(View::gapped(
            fp8.unwrap_or(source),
            &shape,
            &gaps,
            0,
        )))
    });
    let slots = resident(slots(tokens, pages * page_size, rng));
    let max_position = 1 + rng.below(9);
    let positions = (0..rows).map(|_| rng.below(max_position) as u64);
    let positions: Vec<u64> = positions.collect();
    let dtype = rng.pick(&[DType::I32, DType::I64]);
    let positions = resident(Image::of_bits(dtype, &[rows], positions));
    let dtype = rng.pick(&[source, DType::F32]);
    let shape = [max_position as i64, dim];
    let mut table = Image::poisoned(View::gapped(dtype, &shape, &[rng.pick(&[0, 8]), 0], 0));
    for_each_index(&shape, |at| {
        table.put(at, encode(dtype, rng.pick(&[0.0, 1.0, -0.5, 0.25])));
    });
    let table = resident(table);
    let with_rope = !rng.one_in(4);
    let input = RopeAppendArgs {
        append: AppendArgs {
            key: key.tensor(),
            value: value.tensor(),
            k_cache: caches[0].tensor(),
            v_cache: caches[1].tensor(),
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            slot_mapping: slots.tensor(),
            k_scale: fp8.map_or(0.0, |_| rng.pick(&[0.0, 0.5, 0.03])),
            v_scale: 0.0,
            k_scales: None,
            v_scales: None,
        },
        key_out: rng.one_in(2).then(|| key_out.tensor()),
        q: Some(q.tensor()),
        q_out: Some(q_out.tensor()),
        norm: Norm {
            q_weight: None,
            k_weight: None,
            eps: 0.0,
        },
        rope: with_rope.then(|| Rope {
            positions: positions.tensor(),
            position_offsets: None,
            angles: Angles::Table(table.tensor()),
            rotary_dim: dim as u32,
            is_interleaved: rng.one_in(2),
        }),
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_rope_append_args", c_rope_append(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().rope_append.unwrap()(ctx, args.pointer(), stream, err) }
    };
    // Where q_out is NULL, q is an output.
    let outputs = ["q", "q_out", "key_out", "k_cache", "v_cache"];
    judge(
        rng,
        place,
        &data,
        args,
        call,
        &outputs,
        &["q", "key", "value"],
    )
}

/// New tokens for a cache of latent records, in one tensor or two.
pub fn mla_append(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let source = rng.pick(&FLOATS);
    let fp8 = rng.pick(&[None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let cache = fp8.unwrap_or(source);
    let (rank, rope_dim) = (rng.pick(&[64, 8, 13, 128]), rng.pick(&[16, 8, 5]));
    let (tokens, pages) = (rng.below(12) as i64, 1 + rng.below(6) as i64);
    let (page_size, padded) = (rng.pick(&[16, 1, 3]), tokens + rng.below(3) as i64);
    let resident = |image| Resident::new(&data, image);
    let [latent, rope] = [rank, rope_dim].map(|dim| resident(numbers(source, &[padded, dim], rng)));
    let as_bytes = fp8.is_some() && rng.one_in(2);
    let split = rng.one_in(2);
    let caches = [if split { rank } else { rank + rope_dim }, rope_dim].map(|dim| {
        let gaps = [rng.pick(&[0, 8]), rng.pick(&[0, 3]), 0];
        let dtype = if as_bytes { DType::U8 } else { cache };
        let view = View::gapped(dtype, &[pages, page_size, dim], &gaps, 0);
        resident(Image::poisoned(view))
    });
    let slots = resident(slots(tokens, pages * page_size, rng));
    let input = MlaAppendArgs {
        latent: latent.tensor(),
        rope: Some(rope.tensor()),
        cache: LatentCache {
            kv: caches[0].tensor(),
            kv_rope: split.then(|| caches[1].tensor()),
            kv_dtype: as_bytes.then_some(cache),
            is_ds_mla: false,
        },
        slot_mapping: slots.tensor(),
        k_scale: fp8.map_or(0.0, |_| rng.pick(&[0.0, 0.5, 0.03])),
        rotary: None,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_mla_append_args", c_mla_append(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().mla_append.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, &data, args, call, &["kv", "kv_rope"], &[])
}

/// Tokens of a few requests.
pub fn gather(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let stored = rng.pick(&[DType::F32, DType::F16, DType::BF16, DType::F8E4M3]);
    let dtype = rng.pick(&FLOATS);
    let (heads, page_size) = (1 + rng.below(3) as i64, rng.pick(&[16, 1, 3]));
    let dims = [rng.pick(&[64, 8, 13]), rng.pick(&[64, 8, 13])];
    let (batch, pages) = (rng.below(5), 1 + rng.below(6));
    let layout = rng.pick(&[KvLayout::Nhd, KvLayout::Hnd]);
    let resident = |image| Resident::new(&data, image);
    let caches = dims.map(|dim| {
        let shape = match layout {
            KvLayout::Nhd => [pages as i64, page_size, heads, dim],
            KvLayout::Hnd => [pages as i64, heads, page_size, dim],
        };
        resident(numbers(stored, &shape, rng))
    });
    let (mut ends, mut indptr, mut starts, mut ids) = (vec![0], vec![0], vec![], vec![]);
    for b in 0..batch {
        let (count, start) = (rng.below(12) as i32, rng.below(9) as i32);
        ends.push(ends[b] + count);
        starts.push(start);
        let needed = (i64::from(count + start) + page_size - 1) / page_size;
        ids.extend((0..needed).map(|_| rng.below(pages) as i32));
        indptr.push(ids.len() as i32);
    }
    let rows = i64::from(ends[batch]) + rng.below(3) as i64;
    let out = dims.map(|dim| resident(numbers(dtype, &[rows, heads, dim], rng)));
    let is_fp8 = stored == DType::F8E4M3;
    let scales = [0, 1].map(|_| is_fp8.then(|| scales(heads, rng)).flatten().map(resident));
    let [k_scales, v_scales] = scales.each_ref().map(|s| s.as_ref().map(Resident::tensor));
    let integers = |values: &[i32]| resident(Image::of_i32(&[values.len() as i64], values));
    let [ends, starts, indptr, ids] = [&ends, &starts, &indptr, &ids].map(|v| integers(v));
    let scale = if is_fp8 {
        rng.pick(&[0.0, 0.5, 0.03])
    } else {
        0.0
    };
    let input = GatherArgs {
        key: out[0].tensor(),
        value: out[1].tensor(),
        k_cache: caches[0].tensor(),
        v_cache: caches[1].tensor(),
        layout,
        kv_dtype: None,
        form: CacheForm::Plain,
        k_zero_points: None,
        v_zero_points: None,
        requests: GatheredRequests {
            cu_seq_lens: ends.tensor(),
            seq_starts: Some(starts.tensor()),
            pages: RecordPages::Csr {
                indptr: indptr.tensor(),
                indices: ids.tensor(),
            },
        },
        k_scale: scale,
        v_scale: scale,
        k_scales,
        v_scales,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_kv_gather_args", c_gather(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().kv_gather.unwrap()(ctx, args.pointer(), stream, err) }
    };
    let values = ["k_cache", "v_cache"];
    judge(rng, place, &data, args, call, &["key", "value"], &values)
}

/// Records of a few requests, to one tensor or two.
pub fn mla_gather(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let stored = rng.pick(&[DType::F32, DType::F16, DType::BF16, DType::F8E4M3]);
    let dst = rng.pick(&FLOATS);
    let (rank, rope_dim) = (rng.pick(&[64, 8, 13, 200]), rng.pick(&[16, 8, 5]));
    let (batch, pages, page_size) = (rng.below(5), 1 + rng.below(6), rng.pick(&[16, 1, 3]));
    let resident = |image| Resident::new(&data, image);
    let split = rng.one_in(2);
    let caches = [if split { rank } else { rank + rope_dim }, rope_dim];
    let caches = caches.map(|dim| resident(numbers(stored, &[pages as i64, page_size, dim], rng)));
    let (mut ends, mut indptr, mut starts, mut ids) = (vec![0], vec![0], vec![], vec![]);
    for b in 0..batch {
        let (count, start) = (rng.below(12) as i32, rng.below(9) as i32);
        ends.push(ends[b] + count);
        starts.push(start);
        let tokens = i64::from(count + start);
        let needed = (tokens + page_size - 1) / page_size;
        ids.extend((0..needed).map(|_| rng.below(pages) as i32));
        indptr.push(ids.len() as i32);
    }
    let rows = i64::from(ends[batch]) + rng.below(3) as i64;
    let split_dst = rng.one_in(2);
    let out = [if split_dst { rank } else { rank + rope_dim }, rope_dim];
    let out = out.map(|dim| resident(numbers(dst, &[rows, dim], rng)));
    let integers = |values: &[i32]| resident(Image::of_i32(&[values.len() as i64], values));
    let [ends, starts, indptr, ids] = [&ends, &starts, &indptr, &ids].map(|v| integers(v));
    let input = MlaGatherArgs {
        cache: LatentCache {
            kv: caches[0].tensor(),
            kv_rope: split.then(|| caches[1].tensor()),
            kv_dtype: None,
            is_ds_mla: false,
        },
        dst: out[0].tensor(),
        dst_rope: split_dst.then(|| out[1].tensor()),
        cu_seq_lens: ends.tensor(),
        seq_starts: Some(starts.tensor()),
        pages: RecordPages::Csr {
            indptr: indptr.tensor(),
            indices: ids.tensor(),
        },
        k_scale: 0.0,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_mla_gather_args", c_mla_gather(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().mla_gather.unwrap()(ctx, args.pointer(), stream, err) }
    };
    let values = ["kv", "kv_rope"];
    judge(
        rng,
        place,
        &data,
        args,
        call,
        &["dst", "dst_rope"],
        &values[..1 + usize::from(split)],
    )
}

/// Trees of one size or of many, and some of their outputs.
pub fn tree_mask(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let (batch, is_ragged, size) = (rng.below(5), rng.one_in(2), rng.below(20));
    let tree = |rng: &mut Rng| {
        let size = if is_ragged { rng.below(20) } else { size };
        let shape = rng.pick(&[Grown::Anyhow, Grown::Anyhow, Grown::Chain, Grown::Star]);
        grown(shape, size, rng.next())
    };
    let parents = (0..batch).map(|_| tree(rng)).collect();
    let prefix_lens = (0..batch).map(|_| rng.below(40) as i32).collect();
    let forest = Forest {
        is_ragged,
        wanted: rng.next() as u32 & 0x7f,
        wide: rng.next() as u32,
        spare: rng.below(3) as i64,
        row_bytes: 4,
        ..Forest::new(parents, prefix_lens)
    };
    let resident = forest.tensors(&data);
    let tensors = Tensors::default();
    let args = c_tree_mask(&resident.args(), &tensors);
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_tree_mask_args", args) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().tree_mask.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, &data, args, call, &OUTPUTS, &[])
}

/// The lse of states, some of them empty.
fn lse(shape: &[i64], rng: &mut Rng) -> Image {
    let mut image = Image::poisoned(View::compact(DType::F32, shape));
    for_each_index(shape, |index| {
        let value = match rng.below(12) {
            0 => f32::NEG_INFINITY,
            1 => f32::INFINITY,
            _ => (12.0 * uniform(rng.next()) - 4.0) as f32,
        };
        image.put(index, value.to_bits().into());
    });
    image
}

/// Type and scale of the output of a merge.
fn output_of(states: DType, rng: &mut Rng) -> (DType, f32) {
    let fp8 = rng.pick(&[DType::F8E4M3, DType::F8E5M2]);
    let scale = rng.pick(&[0.0, 1.0, 0.01, 3.0]);
    match rng.one_in(3) {
        true => (fp8, scale),
        false => (states, 0.0),
    }
}

/// Two states, sometimes in place and under a mask, sometimes only the second.
pub fn merge_state(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let dtype = rng.pick(&FLOATS);
    let shape = [
        rng.below(9) as i64,
        1 + rng.below(4) as i64,
        rng.pick(&[64, 8, 13, 520]),
    ];
    let resident = |image| Resident::new(&data, image);
    let [v_a, v_b] = [0; 2].map(|_| resident(numbers(dtype, &shape, rng)));
    let (o_dtype, o_scale) = output_of(dtype, rng);
    let v_new = resident(numbers(o_dtype, &shape, rng));
    let [s_a, s_b, s_new] = [0; 3].map(|_| resident(lse(&shape[..2], rng)));
    let bytes: Vec<u64> = (0..shape[0]).map(|_| rng.next() % 3).collect();
    let mask = resident(Image::of_bits(DType::U8, &shape[..1], bytes));
    let in_place = o_dtype == dtype && rng.one_in(2);
    let (v_out, s_out) = if in_place {
        (&v_a, &s_a)
    } else {
        (&v_new, &s_new)
    };
    let input = MergeArgs {
        v_a: v_a.tensor(),
        s_a: s_a.tensor(),
        v_b: v_b.tensor(),
        s_b: s_b.tensor(),
        v_out: v_out.tensor(),
        s_out: (!rng.one_in(4)).then(|| s_out.tensor()),
        mask: rng.one_in(2).then(|| mask.tensor()),
        lse_base: rng.pick(&[LogBase::E, LogBase::Two]),
        num_tokens_without_a: match rng.one_in(2) {
            true => rng.below(1 + shape[0] as usize) as i64,
            false => 0,
        },
        o_scale,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_merge_state_args", c_merge(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().merge_state.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(
        rng,
        place,
        &data,
        args,
        call,
        &["v_out", "s_out"],
        &["v_a", "v_b"],
    )
}

/// n states.
pub fn merge_states(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let dtype = rng.pick(&FLOATS);
    let [tokens, heads, dim] = [
        rng.below(7) as i64,
        1 + rng.below(3) as i64,
        rng.pick(&[64, 8, 13, 300]),
    ];
    let n = rng.pick(&[0, 1, 2, 7, 20]);
    let resident = |image| Resident::new(&data, image);
    let v = resident(numbers(dtype, &[tokens, n, heads, dim], rng));
    let s = resident(lse(&[tokens, n, heads], rng));
    let (o_dtype, o_scale) = output_of(dtype, rng);
    let v_out = resident(numbers(o_dtype, &[tokens, heads, dim], rng));
    let s_out = resident(lse(&[tokens, heads], rng));
    let input = MergeStatesArgs {
        v: v.tensor(),
        s: s.tensor(),
        v_out: v_out.tensor(),
        s_out: (!rng.one_in(4)).then(|| s_out.tensor()),
        lse_base: rng.pick(&[LogBase::E, LogBase::Two]),
        o_scale,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_merge_states_args", c_merge_states(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().merge_states.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, &data, args, call, &["v_out", "s_out"], &["v"])
}

/// A number of states for every token.
pub fn merge_varlen(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let dtype = rng.pick(&FLOATS);
    let [tokens, heads] = [rng.below(7), 1 + rng.below(3)];
    let dim = rng.pick(&[64, 8, 13, 300]);
    let mut offsets = vec![rng.pick(&[0, 0, 2])];
    for token in 0..tokens {
        offsets.push(offsets[token] + rng.pick(&[0, 1, 2, 7, 20]));
    }
    let all = i64::from(offsets[tokens]) + rng.below(3) as i64;
    let (tokens, heads) = (tokens as i64, heads as i64);
    let resident = |image| Resident::new(&data, image);
    let v = resident(numbers(dtype, &[all, heads, dim], rng));
    let s = resident(lse(&[all, heads], rng));
    let indptr = resident(Image::of_i32(&[tokens + 1], &offsets));
    let (o_dtype, o_scale) = output_of(dtype, rng);
    let v_out = resident(numbers(o_dtype, &[tokens, heads, dim], rng));
    let s_out = resident(lse(&[tokens, heads], rng));
    let input = MergeVarlenArgs {
        v: v.tensor(),
        s: s.tensor(),
        indptr: indptr.tensor(),
        v_out: v_out.tensor(),
        s_out: (!rng.one_in(4)).then(|| s_out.tensor()),
        lse_base: rng.pick(&[LogBase::E, LogBase::Two]),
        o_scale,
    };
    let tensors = Tensors::default();
    // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
    let args = unsafe { Struct::new("folio_merge_varlen_args", c_merge_varlen(&input, &tensors)) };
    let call: &Operator = &|ctx, args, stream, err| {
        // SAFETY: a live context, and a struct as large as it says.
        unsafe { api().merge_varlen.unwrap()(ctx, args.pointer(), stream, err) }
    };
    judge(rng, place, &data, args, call, &["v_out", "s_out"], &["v"])
}

/// One of the projections of MLA.
pub fn projection(rng: &mut Rng, place: &Place) -> Result<Option<Ending>, String> {
    let data = Guarded::new(place.device);
    let dtype = rng.pick(&FLOATS);
    let [tokens, heads] = [rng.below(9) as i64, 1 + rng.below(3) as i64];
    let [nope, value, latent] = [0; 3].map(|_| rng.pick(&[8, 24, 64]));
    let resident = |shape: &[i64], rng: &mut Rng| Resident::new(&data, numbers(dtype, shape, rng));
    let w_uk = resident(&[heads, nope, latent], rng);
    let w_uv = resident(&[heads, latent, value], rng);
    let tensors = Tensors::default();
    match rng.below(4) {
        0 => {
            let q_nope = resident(&[tokens, heads, nope], rng);
            let q_latent = resident(&[tokens, heads, latent], rng);
            let input = AbsorbQArgs {
                q_nope: q_nope.tensor(),
                w_uk: w_uk.tensor(),
                q_latent: q_latent.tensor(),
            };
            // SAFETY: the header's struct, with tensors that `tensors` keeps until they were copied.
            let args =
                unsafe { Struct::new("folio_mla_absorb_q_args", c_absorb_q(&input, &tensors)) };
            let call: &Operator = &|ctx, args, stream, err| {
                // SAFETY: a live context, and a struct as large as it says.
                unsafe { api().mla_absorb_q.unwrap()(ctx, args.pointer(), stream, err) }
            };
            let values = ["q_nope", "w_uk"];
            judge(rng, place, &data, args, call, &["q_latent"], &values)
        }
        1 => {
            let o_latent = resident(&[tokens, heads, latent], rng);
            let out = resident(&[tokens, heads, value], rng);
            let input = ProjectOArgs {
                o_latent: o_latent.tensor(),
                w_uv: w_uv.tensor(),
                out: out.tensor(),
            };
            // SAFETY: as above.
            let args =
                unsafe { Struct::new("folio_mla_project_o_args", c_project_o(&input, &tensors)) };
            let call: &Operator = &|ctx, args, stream, err| {
                // SAFETY: as above.
                unsafe { api().mla_project_o.unwrap()(ctx, args.pointer(), stream, err) }
            };
            judge(
                rng,
                place,
                &data,
                args,
                call,
                &["out"],
                &["o_latent", "w_uv"],
            )
        }
        2 => {
            let kv_c = resident(&[tokens, latent], rng);
            let k_nope = resident(&[tokens, heads, nope], rng);
            let v = resident(&[tokens, heads, value], rng);
            let (keys, values) = (!rng.one_in(4), !rng.one_in(4));
            let input = UpProjectArgs {
                kv_c: kv_c.tensor(),
                w_uk: keys.then(|| w_uk.tensor()),
                w_uv: values.then(|| w_uv.tensor()),
                k_nope: keys.then(|| k_nope.tensor()),
                v: values.then(|| v.tensor()),
            };
            let args = c_up_project(&input, &tensors);
            // SAFETY: as above.
            let args = unsafe { Struct::new("folio_mla_up_project_args", args) };
            let call: &Operator = &|ctx, args, stream, err| {
                // SAFETY: as above.
                unsafe { api().mla_up_project.unwrap()(ctx, args.pointer(), stream, err) }
            };
            let inputs = ["kv_c", "w_uk", "w_uv"];
            judge(rng, place, &data, args, call, &["k_nope", "v"], &inputs)
        }
        _ => {
            let kv_b_proj = resident(&[heads * (nope + value), latent], rng);
            let input = AbsorbWeightsArgs {
                kv_b_proj: kv_b_proj.tensor(),
                w_uk: (!rng.one_in(4)).then(|| w_uk.tensor()),
                w_uv: (!rng.one_in(4)).then(|| w_uv.tensor()),
            };
            let args = c_absorb_weights(&input, &tensors);
            // SAFETY: as above.
            let args = unsafe { Struct::new("folio_mla_absorb_weights_args", args) };
            let call: &Operator = &|ctx, args, stream, err| {
                // SAFETY: as above.
                unsafe { api().mla_absorb_weights.unwrap()(ctx, args.pointer(), stream, err) }
            };
            judge(
                rng,
                place,
                &data,
                args,
                call,
                &["w_uk", "w_uv"],
                &["kv_b_proj"],
            )
        }
    }
}

/// Corrupts the struct, calls, and judges what became of it.
pub fn judge(
    rng: &mut Rng,
    place: &Place,
    data: &Guarded,
    mut args: Struct,
    call: &Operator,
    outputs: &[&'static str],
    values: &[&str],
) -> Result<Option<Ending>, String> {
    let count = 1 + rng.below(3);
    let text = corrupt(&mut [&mut args], count, rng);
    if !may_be_called(&[&args], count, data) || has_equal_slots(&args) || overlaps(&args) {
        return Ok(None);
    }
    place.announce(&text);
    let args = &args;
    let by = |by: By| {
        let mut err = report();
        match call(place.context(by), args, std::ptr::null_mut(), &mut err) {
            FOLIO_OK => Ok(()),
            status => Err(Refusal {
                status,
                message: message(&err),
            }),
        }
    };
    if place.device != Device::Cpu {
        return Ok(Some(match by(By::Backend) {
            Ok(()) => Ending::Accepted,
            Err(refusal) => Ending::Refused(refusal),
        }));
    }
    let stored = stored_in(args);
    let output = |name: &&'static str| {
        Some(Output {
            name,
            elements: within(args, name)?,
            exact_in: stored,
        })
    };
    let bound = |name: &str, _: &[i64]| match name {
        "s_out" => (2e-6, 2e-6),
        _ => (2e-6, 0.0),
    };
    let run = Run {
        memory: data,
        call: &by,
        outputs: outputs.iter().filter_map(output).collect(),
        values: values
            .iter()
            .filter_map(|name| original(args, name))
            .collect(),
        bound: &bound,
    };
    run.check().map(Some)
}

fn original(args: &Struct, name: &str) -> Option<Described> {
    args.tensor(name).map(|block| block.original.clone())
}

/// What a call may touch of a tensor, as it is described now.
fn within(args: &Struct, name: &str) -> Option<Described> {
    args.tensor(name)?.needed()
}

/// What the caches of an append hold, and the masks of trees; `None` for other operators.
fn stored_in(args: &Struct) -> Option<DType> {
    let cache = match args.name {
        "folio_kv_append_args" => "k_cache",
        "folio_mla_append_args" => "kv",
        "folio_tree_mask_args" => return Some(DType::U8),
        _ => return None,
    };
    let stated = args.get("kv_dtype");
    let dtype = |code: u64, bits: u64| DType::from_dlpack(code as u8, bits as u8, 1).ok();
    match stated {
        0 => original(args, cache).map(|cache| cache.dtype),
        _ => dtype(stated & 0xff, stated >> 8 & 0xff),
    }
}

/// An output that is an input must be that very tensor: what a merge does to a part of it is not defined.
fn overlaps(args: &Struct) -> bool {
    [
        ("v_a", "v_out"),
        ("s_a", "s_out"),
        ("k_src", "k_dst"),
        ("v_src", "v_dst"),
    ]
    .into_iter()
    .any(|(input, output)| {
        let known = |name: &str| args.fields.iter().any(|field| field.name == name);
        if !known(input) {
            return false;
        }
        let (Some(a), Some(b)) = (args.tensor(input), args.tensor(output)) else {
            return false;
        };
        let is_one = a.original.address == b.original.address;
        is_one && a.described() != b.described()
    })
}

/// Two tokens in one slot are the caller's mistake: either may win.
fn has_equal_slots(args: &Struct) -> bool {
    let Some(slots) = args
        .fields
        .iter()
        .any(|f| f.name == "slot_mapping")
        .then_some("slot_mapping")
    else {
        return false;
    };
    let Some(slots) = within(args, slots).filter(|s| s.shape.len() == 1 && s.strides[0] >= 0)
    else {
        return false;
    };
    if args
        .tensor("slot_mapping")
        .is_some_and(|t| t.tensor.device_type == FOLIO_DEVICE_CUDA)
    {
        return false;
    }
    let mut seen: Vec<i64> = (0..slots.shape[0])
        .map(|token| match slots.dtype {
            DType::I64 => slots.bits(&[token]) as i64,
            _ => i64::from(slots.bits(&[token]) as u32 as i32),
        })
        .filter(|slot| *slot >= 0)
        .collect();
    seen.sort_unstable();
    seen.windows(2).any(|pair| pair[0] == pair[1])
}
