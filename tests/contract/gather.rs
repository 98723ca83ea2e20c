//! Gathers of keys and values with callers who err.

use crate::common::c_door::{Tensors, c_gather};
use crate::common::memory::{HostMemory, Image, Resident};
use crate::fixture::{Context, Reply, floats};
use crate::structs::sizes_from;
use crate::table::{INVALID, check, poke};
use crate::tensors::Dim::{Exact, Free};
use crate::tensors::{field, input, optional, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{CacheForm, GatherArgs, GatheredRequests, KvLayout, RecordPages};
use std::ptr::{null, null_mut};

fn integers(shape: &[i64], values: &[i32]) -> Resident<'static> {
    Resident::new(&HostMemory, Image::of_i32(shape, values))
}

/// Requests of three and two tokens, from token 2 and 0 on, in three pages of four tokens.
struct Gather {
    context: Context,
    caches: [Resident<'static>; 2],
    outputs: [Resident<'static>; 2],
    /// cu_seq_lens, seq_starts, kv_indptr, kv_indices, block_table.
    integers: [Resident<'static>; 5],
    scales: Resident<'static>,
}

impl Gather {
    fn new() -> Gather {
        let cache = |dim| floats(DType::F8E4M3, &[3, 4, 3, dim]);
        Gather {
            context: Context::cpu(),
            caches: [cache(16), cache(8)],
            outputs: [
                floats(DType::F16, &[6, 3, 16]),
                floats(DType::F16, &[6, 3, 8]),
            ],
            integers: [
                integers(&[3], &[0, 3, 5]),
                integers(&[2], &[2, 0]),
                integers(&[3], &[0, 2, 3]),
                integers(&[3], &[2, 0, 1]),
                integers(&[2, 2], &[2, 0, 1, 99]),
            ],
            scales: Resident::new(&HostMemory, Image::of_f32(&[3], &[0.5, 1.0, 2.0])),
        }
    }

    fn input(&self, as_table: bool) -> GatherArgs {
        let [ends, starts, indptr, indices, table] = self.integers.each_ref().map(Resident::tensor);
        GatherArgs {
            key: self.outputs[0].tensor(),
            value: self.outputs[1].tensor(),
            k_cache: self.caches[0].tensor(),
            v_cache: self.caches[1].tensor(),
            layout: KvLayout::Nhd,
            kv_dtype: None,
            form: CacheForm::Plain,
            k_zero_points: None,
            v_zero_points: None,
            requests: GatheredRequests {
                cu_seq_lens: ends,
                seq_starts: Some(starts),
                pages: match as_table {
                    true => RecordPages::Table(table),
                    false => RecordPages::Csr { indptr, indices },
                },
            },
            k_scale: 0.0,
            v_scale: 0.0,
            k_scales: Some(self.scales.tensor()),
            v_scales: Some(self.scales.tensor()),
        }
    }

    fn call(&self, args: *const folio_kv_gather_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_kv_gather(self.context.0, args, null_mut(), err) })
    }

    fn is_untouched(&self) -> bool {
        self.outputs.iter().all(Resident::is_untouched)
    }
}

#[test]
fn tensors_of_a_gather() {
    type Args = folio_kv_gather_args;
    let gather = Gather::new();
    for as_table in [false, true] {
        let mut fields = vec![
            field!(output, Args, key, [Free, Free, Free]),
            field!(output, Args, value, [Exact, Exact, Free]),
            field!(input, Args, k_cache, [Free, Free, Exact, Exact]),
            field!(input, Args, v_cache, [Exact, Exact, Exact, Exact]),
            field!(input, Args, cu_seq_lens, [Free]),
            field!(optional, Args, seq_starts, [Exact]),
            field!(optional, Args, k_scales, [Exact]),
            field!(optional, Args, v_scales, [Exact]),
        ];
        match as_table {
            true => fields.push(field!(optional, Args, block_table, [Exact, Free])),
            false => fields.extend([
                field!(input, Args, kv_indptr, [Exact]),
                field!(input, Args, kv_indices, [Free]),
            ]),
        }
        walk(
            "kv_gather",
            &fields,
            |tensors| c_gather(&gather.input(as_table), tensors),
            |args| gather.call(args),
            || gather.is_untouched(),
        );
    }
}

#[test]
fn lengths_and_page_ids_beyond_their_ends() {
    for (as_table, at, index, value, words) in [
        (false, 0, 2, 7, ["cu_seq_lens[2]", "rows of key"]),
        (false, 0, 1, 6, ["cu_seq_lens[2]", "5"]),
        (false, 1, 0, -1, ["seq_starts[0]", "-1"]),
        (false, 1, 0, 6, ["kv_indices", "request 0"]),
        (false, 2, 2, 4, ["kv_indptr[1]", "4"]),
        (false, 3, 0, 3, ["page 3", "k_cache"]),
        (true, 4, 0, -1, ["block_table", "page -1"]),
        (true, 1, 1, 8, ["block_table", "request 1"]),
    ] {
        let (gather, tensors) = (Gather::new(), Tensors::default());
        let args = c_gather(&gather.input(as_table), &tensors);
        let fields = [
            args.cu_seq_lens,
            args.seq_starts,
            args.kv_indptr,
            args.kv_indices,
            args.block_table,
        ];
        poke(fields[at], index, value);
        gather.call(&args).assert(words[0], INVALID, &words);
        assert!(gather.is_untouched(), "no row was written");
    }
}

#[test]
fn arguments_of_a_gather() {
    type Args = folio_kv_gather_args;
    let (gather, tensors) = (Gather::new(), Tensors::default());
    let csr = c_gather(&gather.input(false), &tensors);
    check(
        &c_gather(&gather.input(true), &tensors),
        |args| gather.call(args),
        &[
            (
                &|a: &mut Args| a.k_scale = f32::NAN,
                INVALID,
                &["k_scale", "NaN"],
            ),
            (
                &|a: &mut Args| a.v_scale = f32::INFINITY,
                INVALID,
                &["v_scale", "inf"],
            ),
            (
                &|a: &mut Args| a.kv_layout = 7,
                INVALID,
                &["kv_layout", "7"],
            ),
            (
                &|a: &mut Args| a.kv_indptr = csr.kv_indptr,
                INVALID,
                &["kv_indptr", "block_table"],
            ),
        ],
    );
}

#[test]
fn struct_sizes_and_nulls() {
    let (gather, tensors) = (Gather::new(), Tensors::default());
    let args = c_gather(&gather.input(true), &tensors);
    sizes_from("folio_kv_gather_args", &args, 112, 0, |args| {
        gather.call(args)
    });
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(gather.call(null()), "folio_kv_gather_args");
    // SAFETY: NULL, which every entry refuses.
    let reply = Reply::of(|err| unsafe { folio_kv_gather(null(), null(), null_mut(), err) });
    refused(reply, "ctx");
}
