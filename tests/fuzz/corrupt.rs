//! What goes wrong: one field, one number of a tensor's description, or one element of an index tensor
//! becomes another value, most of them at an edge.

use super::header::Kind;
use super::structs::{Block, Struct};
use crate::common::values::mix;
use folio::dtype::DType;
use std::fmt::Write;

/// Draws numbers, the same ones from the same seed.
pub struct Rng(u64);

impl Rng {
    pub fn of(seed: u64, case: u64) -> Rng {
        Rng(mix(mix(seed) ^ case))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = mix(self.0);
        self.0
    }

    /// 0 to below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }

    /// True in one of `n` draws.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Tensors whose own extent says how much the call reads: claiming more of them is a lie that nothing else
/// in the call contradicts.
const DECIDE_ALONE: [&str; 13] = [
    "kv",
    "slot_mapping",
    "page_pairs",
    "mm_prefix_ranges",
    "kv_indptr",
    "kv_len",
    "item_positions",
    "q_scales",
    "k_scales",
    "v_scales",
    // Of absorbed weights, where one of the outputs is left out.
    "kv_b_proj",
    "w_uk",
    "w_uv",
];

/// Tensors of merges whose own type says how wide their elements are, since outputs may be of the states' type or fp8:
/// claiming wider ones is such a lie too.
fn is_typed_alone(part: &Struct, name: &str) -> bool {
    part.name.starts_with("folio_merge_") && ["v", "v_out"].contains(&name)
}

/// Structs whose outputs are filled to their ends, and whose tables may be longer than is needed: any claim is a lie.
const DECIDE: [&str; 5] = [
    "folio_batch_lengths_args",
    "folio_kv_indices_args",
    "folio_block_table_args",
    "folio_slot_mapping_args",
    "folio_draft_kv_indices_args",
];

/// Corrupts `count` things of the structs. Returns what was done, as text.
pub fn corrupt(structs: &mut [&mut Struct], count: usize, rng: &mut Rng) -> String {
    let mut text = String::new();
    for _ in 0..count {
        // The last struct is the largest and the most used.
        let at = match rng.one_in(2) {
            true => structs.len() - 1,
            false => rng.below(structs.len()),
        };
        let what = one(&mut *structs[at], rng);
        writeln!(text, "  {}: {what}", structs[at].name).expect("a string takes everything");
    }
    text
}

fn one(target: &mut Struct, rng: &mut Rng) -> String {
    match rng.below(20) {
        0 if rng.one_in(4) => {
            target.is_null = true;
            "NULL".into()
        }
        0 => struct_size(target, rng),
        1..=7 => scalar(target, rng),
        8 => null_tensor(target, rng),
        9..=11 => content(target, rng),
        _ => description(target, rng),
    }
}

fn struct_size(target: &mut Struct, rng: &mut Rng) -> String {
    let size = target.size as u32;
    let claimed = rng.pick(&[
        0,
        1,
        8,
        size - 4,
        size - 1,
        size + 1,
        size + 8,
        size + 64,
        1 << 17,
        u32::MAX,
    ]);
    let filler = rng.pick(&[0, 0, 1]);
    target.claim(claimed, filler);
    format!("struct_size = {claimed}, {filler} behind it")
}

fn scalar(target: &mut Struct, rng: &mut Rng) -> String {
    let fields: Vec<(&str, Kind)> = (target.fields.iter())
        .filter(|f| f.name != "struct_size" && !matches!(f.kind, Kind::Tensor | Kind::Pointer))
        .map(|f| (f.name, f.kind))
        .collect();
    let (name, kind) = rng.pick(&fields);
    let old = target.get(name);
    let new = match kind {
        Kind::F32 => f32_bits(f32::from_bits(old as u32), rng),
        Kind::Dtype => dtype_bits(old, rng),
        Kind::U64 => integer(old as i64, rng) as u64,
        _ => u64::from(integer(i64::from(old as u32 as i32), rng) as u32),
    };
    target.set(name, new);
    match kind {
        Kind::F32 => format!("{name} = {:e}", f32::from_bits(new as u32)),
        _ => format!("{name} = {new:#x} instead of {old:#x}"),
    }
}

fn f32_bits(old: f32, rng: &mut Rng) -> u64 {
    let edges = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        30.0,
        3e38,
        -3e38,
        1e-40,
        1e30,
        1e-30,
        2f32.powi(60),
        2f32.powi(61),
        2f32.powi(-60),
        2f32.powi(-61),
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -old,
        2.0 * old,
    ];
    rng.pick(&edges).to_bits().into()
}

fn integer(old: i64, rng: &mut Rng) -> i64 {
    let near = [
        old.wrapping_sub(1),
        old.wrapping_add(1),
        old.wrapping_mul(2),
        old / 2,
    ];
    let edges = [
        0,
        1,
        2,
        3,
        4,
        8,
        16,
        255,
        256,
        257,
        65_536,
        1 << 30,
        i64::from(i32::MAX),
        i64::from(i32::MIN),
        1 << 31,
        i64::from(u32::MAX),
        1 << 32,
        -1,
        -7,
        i64::MAX,
    ];
    match rng.one_in(2) {
        true => rng.pick(&near),
        false => rng.pick(&edges),
    }
}

/// The codes and widths of every type that the header names, and of some that it does not.
fn dtype_bits(old: u64, rng: &mut Rng) -> u64 {
    let known: [(u8, u8); 11] = [
        (0, 0),
        (2, 32),
        (2, 16),
        (4, 16),
        (10, 8),
        (12, 8),
        (1, 8),
        (6, 8),
        (0, 32),
        (0, 64),
        (2, 64),
    ];
    match rng.below(4) {
        0 => old ^ 1 << rng.below(32),
        _ => {
            let (code, bits) = rng.pick(&known);
            let lanes = u64::from((code, bits) != (0, 0));
            u64::from(code) | u64::from(bits) << 8 | lanes << 16
        }
    }
}

fn null_tensor(target: &mut Struct, rng: &mut Rng) -> String {
    let pointers: Vec<&str> = (target.fields.iter())
        .filter(|field| field.kind == Kind::Tensor)
        .map(|field| field.name)
        .collect();
    if pointers.is_empty() {
        return scalar(target, rng);
    }
    let name = rng.pick(&pointers);
    target.set(name, 0);
    format!("{name} = NULL")
}

fn is_index(dtype: DType) -> bool {
    matches!(dtype, DType::I32 | DType::I64)
}

/// One element of an index tensor, or of a tensor of scales, slopes, sinks or lse.
fn content(target: &mut Struct, rng: &mut Rng) -> String {
    let small = |block: &Block| {
        let original = &block.original;
        let is_number =
            is_index(original.dtype) || original.dtype == DType::F32 && original.shape.len() == 1;
        let on_host = block.tensor.device_type == folio::ffi::FOLIO_DEVICE_CPU;
        is_number && on_host && !original.shape.contains(&0)
    };
    let candidates: Vec<usize> = (target.tensors.iter().enumerate())
        .filter(|(_, (_, block))| small(block))
        .map(|(n, _)| n)
        .collect();
    if candidates.is_empty() {
        return scalar(target, rng);
    }
    let (at, block) = &target.tensors[rng.pick(&candidates)];
    let original = &block.original;
    let extents = original.shape.iter();
    let index: Vec<i64> = extents.map(|&n| rng.below(n as usize) as i64).collect();
    let old = original.bits(&index);
    // Nobody checks what scales, slopes and sinks hold, which may lie on a device: so they stay ordinary.
    let floats = [0f32, -1.0, 3.0, 1e-3, 100.0];
    let new = match original.dtype {
        DType::F32 => rng.pick(&floats).to_bits().into(),
        DType::I32 => integer(i64::from(old as u32 as i32), rng) as u64,
        _ => integer(old as i64, rng) as u64,
    };
    super::oracle::poke(original.at(&index), new, original.dtype.size());
    format!(
        "{}{index:?} = {new:#x} instead of {old:#x}",
        target.fields[*at].name
    )
}

/// One number of a tensor's description.
fn description(target: &mut Struct, rng: &mut Rng) -> String {
    if target.tensors.is_empty() {
        return scalar(target, rng);
    }
    let at = rng.below(target.tensors.len());
    let name = target.fields[target.tensors[at].0].name;
    let block = &mut *target.tensors[at].1;
    let rank = block.original.shape.len().max(1);
    let what = match rng.below(16) {
        0..=5 => {
            let dim = rng.below(rank);
            let old = block.shape[dim];
            block.shape[dim] = extent(old, rng);
            format!("shape[{dim}] = {} instead of {old}", block.shape[dim])
        }
        6..=9 => {
            let dim = rng.below(rank);
            let old = block.strides[dim];
            block.strides[dim] = extent(old, rng);
            format!("strides[{dim}] = {} instead of {old}", block.strides[dim])
        }
        10 => {
            let size = block.original.dtype.size() as u64;
            let edges = [1, 2, size, 1 << 62, 1 << 63, u64::MAX, u64::MAX - 63];
            block.tensor.byte_offset = rng.pick(&edges);
            format!("byte_offset = {:#x}", block.tensor.byte_offset)
        }
        11 => {
            block.tensor.ndim = integer(block.tensor.ndim.into(), rng) as i32;
            format!("ndim = {}", block.tensor.ndim)
        }
        12 | 13 => {
            let dtype = block.tensor.dtype;
            let old =
                u64::from(dtype.code) | u64::from(dtype.bits) << 8 | u64::from(dtype.lanes) << 16;
            let new = dtype_bits(old, rng);
            block.tensor.dtype = folio::ffi::folio_dtype {
                code: new as u8,
                bits: (new >> 8) as u8,
                lanes: (new >> 16) as u16,
            };
            format!("dtype = {new:#x} instead of {old:#x}")
        }
        14 => device(block, rng),
        _ => pointer(block, rng),
    };
    format!("{name}.{what}")
}

fn extent(old: i64, rng: &mut Rng) -> i64 {
    let near = [
        old.wrapping_sub(1),
        old.wrapping_add(1),
        old.wrapping_mul(2),
        old / 2,
        old.wrapping_add(3),
    ];
    let edges = [
        0,
        1,
        -1,
        1 << 31,
        1 << 32,
        (1 << 32) + old.clamp(-8, 1 << 20),
        1 << 40,
        1 << 62,
        i64::MAX,
        i64::MIN,
    ];
    match rng.one_in(2) {
        true => rng.pick(&near),
        false => rng.pick(&edges),
    }
}

fn device(block: &mut Block, rng: &mut Rng) -> String {
    // Memory of a device under the name of host memory would be read, as it may be.
    let types: &[i32] = match block.tensor.device_type {
        2 => &[0, 2, 4, 10, -1],
        _ => &[0, 1, 2, 3, 4, 10, -1],
    };
    block.tensor.device_type = rng.pick(types);
    block.tensor.device_id = rng.pick(&[0, 0, 1, -1, 7]);
    format!(
        "device = {}:{}",
        block.tensor.device_type, block.tensor.device_id
    )
}

fn pointer(block: &mut Block, rng: &mut Rng) -> String {
    let what = match rng.below(4) {
        0 => {
            block.tensor.data = std::ptr::null_mut();
            "data = NULL"
        }
        1 => {
            block.tensor.data = block.tensor.data.wrapping_byte_add(1);
            "data, a byte further"
        }
        2 => {
            block.tensor.shape = std::ptr::null_mut();
            "shape = NULL"
        }
        _ => {
            block.tensor.strides = std::ptr::null_mut();
            "strides = NULL"
        }
    };
    what.into()
}

/// Whether the call may be made: no tensor claims memory that is not there, unless it is the only thing that
/// is wrong, and what the call needs of it is.
pub fn may_be_called(structs: &[&Struct], count: usize, memory: &super::guarded::Guarded) -> bool {
    structs.iter().all(|part| {
        part.tensors.iter().all(|(at, block)| {
            // Nobody may touch memory of a device, so nothing can be claimed of it.
            let on_device = memory.locate(block.original.address).is_none();
            let name = part.fields[*at].name;
            let decides = DECIDE.contains(&part.name)
                || DECIDE_ALONE.contains(&name)
                || is_typed_alone(part, name) && block.claims_wider_elements();
            let alone = count == 1 && !decides && block.holds_what_is_needed(memory);
            on_device || block.is_honest(memory) || alone
        })
    })
}
