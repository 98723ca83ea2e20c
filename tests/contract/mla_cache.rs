//! The operators on caches of latent records with callers who err.

use crate::common::c_door::{Tensors, c_mla_append, c_mla_gather, dtype};
use crate::common::memory::{HostMemory, Image, Resident};
use crate::fixture::{Context, Reply, bytes, floats};
use crate::structs::sizes;
use crate::table::{INVALID, UNKNOWN, check, poke};
use crate::tensors::Dim::{AtLeast, Exact, Free};
use crate::tensors::{field, input, optional, output, walk};
use folio::dtype::DType;
use folio::ffi::*;
use folio::problem::{LatentCache, MlaAppendArgs, MlaGatherArgs, RecordPages, Rotary};
use std::ptr::{null, null_mut};

fn resident(image: Image) -> Resident<'static> {
    Resident::new(&HostMemory, image)
}

/// Three fp16 tokens of 16 + 8 elements for an fp8 cache of three pages of four tokens; two heads of queries.
struct Append {
    context: Context,
    sources: [Resident<'static>; 3],
    outputs: [Resident<'static>; 4],
    table: Resident<'static>,
    slots: Resident<'static>,
    positions: Resident<'static>,
}

impl Append {
    fn new(cache: DType) -> Append {
        Append {
            context: Context::cpu(),
            sources: [
                floats(DType::F16, &[3, 16]),
                floats(DType::F16, &[3, 8]),
                floats(DType::F16, &[3, 2, 8]),
            ],
            outputs: [
                floats(cache, &[3, 4, 16]),
                floats(cache, &[3, 4, 8]),
                floats(DType::F16, &[3, 8]),
                floats(DType::F16, &[3, 2, 8]),
            ],
            table: floats(DType::F32, &[10, 8]),
            slots: resident(Image::of_i32(&[3], &[5, -1, 11])),
            positions: resident(Image::of_i32(&[3], &[0, 9, 3])),
        }
    }

    fn input(&self) -> MlaAppendArgs {
        let [latent, rope, q] = self.sources.each_ref().map(Resident::tensor);
        let [kv, kv_rope, rope_out, q_out] = self.outputs.each_ref().map(Resident::tensor);
        MlaAppendArgs {
            latent,
            rope: Some(rope),
            cache: LatentCache {
                kv,
                kv_rope: Some(kv_rope),
                kv_dtype: None,
                is_ds_mla: false,
            },
            slot_mapping: self.slots.tensor(),
            k_scale: 0.0,
            rotary: Some(Rotary {
                cos_sin_cache: self.table.tensor(),
                positions: self.positions.tensor(),
                is_interleaved: true,
                rope_out: Some(rope_out),
                q_rope: Some(q),
                q_rope_out: Some(q_out),
            }),
        }
    }

    fn call(&self, args: *const folio_mla_append_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_append(self.context.0, args, null_mut(), err) })
    }

    fn is_untouched(&self) -> bool {
        self.outputs.iter().all(Resident::is_untouched)
    }
}

/// Two requests of three and two tokens from an fp8 cache of three pages of four tokens, to six rows.
struct Gather {
    context: Context,
    caches: [Resident<'static>; 2],
    outputs: [Resident<'static>; 2],
    /// cu_seq_lens, seq_starts, kv_indptr, kv_indices, block_table.
    integers: [Resident<'static>; 5],
}

impl Gather {
    fn new() -> Gather {
        Gather {
            context: Context::cpu(),
            caches: [
                floats(DType::F8E4M3, &[3, 4, 16]),
                floats(DType::F8E4M3, &[3, 4, 8]),
            ],
            outputs: [floats(DType::F16, &[6, 16]), floats(DType::F16, &[6, 8])],
            integers: [
                resident(Image::of_i32(&[3], &[0, 3, 5])),
                resident(Image::of_i32(&[2], &[2, 0])),
                resident(Image::of_i32(&[3], &[0, 2, 3])),
                resident(Image::of_i32(&[3], &[2, 0, 1])),
                resident(Image::of_i32(&[2, 2], &[2, 0, 1, 99])),
            ],
        }
    }

    fn input(&self, as_table: bool) -> MlaGatherArgs {
        let [kv, kv_rope] = self.caches.each_ref().map(Resident::tensor);
        let [dst, dst_rope] = self.outputs.each_ref().map(Resident::tensor);
        let [ends, starts, indptr, indices, table] = self.integers.each_ref().map(Resident::tensor);
        MlaGatherArgs {
            cache: LatentCache {
                kv,
                kv_rope: Some(kv_rope),
                kv_dtype: None,
                is_ds_mla: false,
            },
            dst,
            dst_rope: Some(dst_rope),
            cu_seq_lens: ends,
            seq_starts: Some(starts),
            pages: match as_table {
                true => RecordPages::Table(table),
                false => RecordPages::Csr { indptr, indices },
            },
            k_scale: 0.0,
        }
    }

    fn call(&self, args: *const folio_mla_gather_args) -> Reply {
        // SAFETY: a live context and the caller's structs.
        Reply::of(|err| unsafe { folio_mla_gather(self.context.0, args, null_mut(), err) })
    }

    fn is_untouched(&self) -> bool {
        self.outputs.iter().all(Resident::is_untouched)
    }
}

#[test]
fn tensors_of_an_append() {
    type Args = folio_mla_append_args;
    let fields = [
        field!(input, Args, latent, [AtLeast, Free]),
        field!(input, Args, rope, [AtLeast, Free]),
        field!(output, Args, kv, [Free, Free, Exact]),
        field!(output, Args, kv_rope, [Exact, Exact, Exact]).or_none(),
        field!(input, Args, slot_mapping, [Free]),
        field!(optional, Args, cos_sin_cache, [Free, Exact]),
        field!(input, Args, positions, [Exact]),
        field!(output, Args, rope_out, [AtLeast, Exact]).or_none(),
        field!(optional, Args, q_rope, [AtLeast, Free, Exact]),
        field!(output, Args, q_rope_out, [AtLeast, Exact, Exact]).or_none(),
    ];
    let append = Append::new(DType::F8E4M3);
    walk(
        "mla_append",
        &fields,
        |tensors| c_mla_append(&append.input(), tensors),
        |args| append.call(args),
        || append.is_untouched(),
    );
}

#[test]
fn tensors_of_a_gather() {
    type Args = folio_mla_gather_args;
    let common = [
        field!(input, Args, kv, [Free, Free, Free]),
        field!(optional, Args, kv_rope, [Exact, Exact, Free]),
        field!(output, Args, dst, [Free, Exact]),
        field!(output, Args, dst_rope, [Exact, Exact]).or_none(),
        field!(input, Args, cu_seq_lens, [Free]),
        field!(optional, Args, seq_starts, [Exact]),
    ];
    let csr = [
        field!(input, Args, kv_indptr, [Exact]),
        field!(input, Args, kv_indices, [Free]),
    ];
    let table = [field!(optional, Args, block_table, [Exact, Free])];
    for (as_table, pages) in [(false, &csr[..]), (true, &table[..])] {
        for fields in [&common[..], pages] {
            let gather = Gather::new();
            walk(
                "mla_gather",
                fields,
                |tensors| c_mla_gather(&gather.input(as_table), tensors),
                |args| gather.call(args),
                || gather.is_untouched(),
            );
        }
    }
}

#[test]
fn arguments_of_an_append() {
    type Args = folio_mla_append_args;
    let tensors = Tensors::default();
    let fp8 = Append::new(DType::F8E4M3);
    let (same, f32_table) = (Append::new(DType::F16), Append::new(DType::F32));
    check(
        &c_mla_append(&fp8.input(), &tensors),
        |args| fp8.call(args),
        &[
            (
                &|a: &mut Args| a.k_scale = f32::NAN,
                INVALID,
                &["k_scale", "NaN"],
            ),
            (
                &|a: &mut Args| a.k_scale = 1e-45,
                INVALID,
                &["k_scale", "inf"],
            ),
            (
                &|a: &mut Args| a.cache_format = 2,
                INVALID,
                &["cache_format", "2"],
            ),
            (&|a: &mut Args| a.reserved = 7, UNKNOWN, &["reserved", "7"]),
            (
                &|a: &mut Args| a.kv_dtype = dtype(DType::F8E5M2),
                FOLIO_ERR_DTYPE,
                &["kv", "float8_e4m3"],
            ),
            (
                &|a: &mut Args| a.cache_format = FOLIO_MLA_CACHE_FP8_DS_MLA,
                FOLIO_ERR_SHAPE,
                &["latent", "512"],
            ),
            (&|a: &mut Args| a.rope = null(), INVALID, &["rope", "NULL"]),
            (
                &|a: &mut Args| a.cos_sin_cache = null(),
                INVALID,
                &["positions", "cos_sin_cache"],
            ),
            (
                &|a: &mut Args| a.q_rope = null(),
                INVALID,
                &["q_rope_out", "q_rope"],
            ),
        ],
    );
    let without_rope = |a: &mut Args| {
        (a.cos_sin_cache, a.positions, a.rope_out) = (null(), null(), null());
        (a.q_rope, a.q_rope_out, a.flags) = (null(), null(), 0);
    };
    check(
        &c_mla_append(&same.input(), &tensors),
        |args| same.call(args),
        &[
            (
                &|a: &mut Args| a.k_scale = 0.5,
                INVALID,
                &["k_scale", "0.5", "float16"],
            ),
            (
                &|a: &mut Args| {
                    without_rope(a);
                    a.flags = FOLIO_MLA_ROPE_INTERLEAVED;
                },
                INVALID,
                &["flags", "cos_sin_cache"],
            ),
            (
                &|a: &mut Args| {
                    without_rope(a);
                    a.rope = null();
                },
                INVALID,
                &["kv_rope", "rope"],
            ),
        ],
    );
    let reply = f32_table.call(&c_mla_append(&f32_table.input(), &tensors));
    reply.assert("an fp32 cache", FOLIO_ERR_DTYPE, &["kv", "float32"]);
    assert!(f32_table.is_untouched());
}

#[test]
fn records_of_656_bytes() {
    let append = Append::new(DType::F8E4M3);
    let (latent, rope) = (
        floats(DType::BF16, &[3, 512]),
        floats(DType::BF16, &[3, 64]),
    );
    let cache = bytes(3 * 4 * 656 + 2);
    let with = |strides: &[i64], skip: i64| {
        // SAFETY: within the bytes above.
        let kv = unsafe {
            folio::tensor::Tensor::new(
                "kv",
                (cache.tensor().address() + skip as usize) as *mut u8,
                folio::tensor::Device::Cpu,
                DType::U8,
                &[3, 4, 656],
                Some(strides),
            )
        };
        MlaAppendArgs {
            latent: latent.tensor(),
            rope: Some(rope.tensor()),
            cache: LatentCache {
                kv: kv.unwrap(),
                kv_rope: None,
                kv_dtype: None,
                is_ds_mla: true,
            },
            rotary: None,
            ..append.input()
        }
    };
    let tensors = Tensors::default();
    let right = with(&[4 * 656, 656, 1], 0);
    for (what, skip) in [("an address", 2), ("an address", 1)] {
        let args = c_mla_append(&with(&[4 * 656, 656, 1], skip), &tensors);
        append
            .call(&args)
            .assert(what, FOLIO_ERR_SHAPE, &["kv", "multiples of 4"]);
    }
    let mut odd = right;
    odd.cache.kv_rope = Some(append.outputs[1].tensor());
    let args = c_mla_append(&odd, &tensors);
    append
        .call(&args)
        .assert("kv_rope", INVALID, &["kv_rope", "fp8_ds_mla"]);
    odd = right;
    odd.cache.kv_dtype = Some(DType::F8E5M2);
    let args = c_mla_append(&odd, &tensors);
    append
        .call(&args)
        .assert("kv_dtype", FOLIO_ERR_DTYPE, &["kv_dtype", "float8_e5m2"]);
    odd = right;
    odd.k_scale = 2.0;
    let args = c_mla_append(&odd, &tensors);
    append
        .call(&args)
        .assert("k_scale", INVALID, &["k_scale", "fp8_ds_mla"]);
    odd = right;
    odd.rope = None;
    let args = c_mla_append(&odd, &tensors);
    append
        .call(&args)
        .assert("rope", INVALID, &["rope", "NULL"]);
    assert!(cache.is_untouched());
    append
        .call(&c_mla_append(&right, &tensors))
        .assert_ok("records");
}

#[test]
fn slots_and_positions_beyond_their_ends() {
    for (slot, position, words) in [
        (12, 9, ["slot_mapping[2]", "12"]),
        (i32::MAX, 9, ["slot_mapping[2]", "2147483647"]),
        (1, 10, ["positions[2]", "10"]),
        (1, -1, ["positions[2]", "-1"]),
    ] {
        let append = Append::new(DType::F16);
        let tensors = Tensors::default();
        let args = c_mla_append(&append.input(), &tensors);
        poke(args.slot_mapping, 2, slot);
        poke(args.positions, 2, position);
        append.call(&args).assert("integers", INVALID, &words);
        assert!(append.is_untouched(), "no token was written");
    }
}

#[test]
fn lengths_and_page_ids_beyond_their_ends() {
    let poked = |as_table: bool, at: usize, index: usize, value: i32| {
        let gather = Gather::new();
        let tensors = Tensors::default();
        let args = c_mla_gather(&gather.input(as_table), &tensors);
        let fields = [
            args.cu_seq_lens,
            args.seq_starts,
            args.kv_indptr,
            args.kv_indices,
            args.block_table,
        ];
        poke(fields[at], index, value);
        let reply = gather.call(&args);
        assert!(gather.is_untouched(), "no row was written");
        reply
    };
    for (as_table, at, index, value, words) in [
        (false, 0, 2, 7, ["cu_seq_lens[2]", "7"]),
        (false, 0, 0, -1, ["cu_seq_lens[0]", "-1"]),
        (false, 0, 1, 6, ["cu_seq_lens[2]", "5"]),
        (false, 1, 0, -1, ["seq_starts[0]", "-1"]),
        (false, 1, 0, 6, ["kv_indices", "request 0"]),
        (false, 1, 0, i32::MAX, ["kv_indices", "request 0"]),
        (false, 2, 0, -1, ["kv_indptr[0]", "-1"]),
        (false, 2, 2, 4, ["kv_indptr[1]", "4"]),
        (false, 2, 1, 4, ["kv_indptr[0]", "4"]),
        (false, 3, 0, 3, ["kv_indices", "page 3"]),
        (false, 3, 0, -1, ["kv_indices", "page -1"]),
        (true, 4, 0, 3, ["block_table", "page 3"]),
        (true, 1, 1, 8, ["block_table", "request 1"]),
    ] {
        poked(as_table, at, index, value).assert(words[0], INVALID, &words);
    }
}

#[test]
fn arguments_of_a_gather() {
    type Args = folio_mla_gather_args;
    let (gather, tensors) = (Gather::new(), Tensors::default());
    let csr = c_mla_gather(&gather.input(false), &tensors);
    check(
        &c_mla_gather(&gather.input(true), &tensors),
        |args| gather.call(args),
        &[
            (
                &|a: &mut Args| a.k_scale = f32::NAN,
                INVALID,
                &["k_scale", "NaN"],
            ),
            (
                &|a: &mut Args| a.cache_format = -1,
                INVALID,
                &["cache_format", "-1"],
            ),
            (&|a: &mut Args| a.reserved = 7, UNKNOWN, &["reserved", "7"]),
            (
                &|a: &mut Args| a.kv_indptr = csr.kv_indptr,
                INVALID,
                &["kv_indptr", "block_table"],
            ),
            (
                &|a: &mut Args| a.kv_indices = csr.kv_indices,
                INVALID,
                &["kv_indices", "block_table"],
            ),
            (
                &|a: &mut Args| a.block_table = null(),
                INVALID,
                &["kv_indptr", "NULL"],
            ),
            (
                &|a: &mut Args| a.cache_format = FOLIO_MLA_CACHE_FP8_DS_MLA,
                INVALID,
                &["kv_rope", "fp8_ds_mla"],
            ),
        ],
    );
}

#[test]
fn struct_sizes() {
    let (append, tensors) = (Append::new(DType::F16), Tensors::default());
    let args = c_mla_append(&append.input(), &tensors);
    let flags = FOLIO_MLA_ROPE_INTERLEAVED;
    sizes("folio_mla_append_args", &args, flags, |args| {
        append.call(args)
    });
    let gather = Gather::new();
    let args = c_mla_gather(&gather.input(true), &tensors);
    sizes("folio_mla_gather_args", &args, 0, |args| gather.call(args));
}

#[test]
fn nulls() {
    let refused = |reply: Reply, name: &str| reply.assert(name, INVALID, &[name, "NULL"]);
    refused(
        Append::new(DType::F16).call(null()),
        "folio_mla_append_args",
    );
    refused(Gather::new().call(null()), "folio_mla_gather_args");
    // SAFETY: NULL, which every entry refuses.
    unsafe {
        let append = |err| folio_mla_append(null(), null(), null_mut(), err);
        refused(Reply::of(append), "ctx");
        let gather = |err| folio_mla_gather(null(), null(), null_mut(), err);
        refused(Reply::of(gather), "ctx");
    }
}
