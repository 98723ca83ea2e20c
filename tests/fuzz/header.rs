//! The C header as data: the fields of every struct with their offsets, and every name that a message may
//! use. The fuzzer corrupts what stands here, so a new field is fuzzed from the day it is in the header.

use std::collections::HashSet;

/// The header that hosts compile with.
const HEADER: &str = include_str!("../../include/folio/folio.h");

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    U32,
    I32,
    U64,
    F32,
    Dtype,
    /// `const folio_tensor *`.
    Tensor,
    /// Any other pointer.
    Pointer,
}

impl Kind {
    fn of(c_type: &str) -> Kind {
        let name = c_type.trim_start_matches("const ");
        match name.trim_start_matches("struct ").trim() {
            "uint32_t" => Kind::U32,
            "int32_t" => Kind::I32,
            // Signed ones are no other to whoever spoils them.
            "uint64_t" | "int64_t" => Kind::U64,
            "float" => Kind::F32,
            "folio_dtype" => Kind::Dtype,
            "folio_tensor *" => Kind::Tensor,
            "folio_log_fn" | "folio_parallel_for_fn" => Kind::Pointer,
            pointer if pointer.ends_with('*') => Kind::Pointer,
            other => {
                panic!("the header has a field of type {other}, which the fuzzer does not know")
            }
        }
    }

    fn size_and_alignment(self) -> (usize, usize) {
        match self {
            Kind::U32 | Kind::I32 | Kind::F32 => (4, 4),
            Kind::U64 | Kind::Tensor | Kind::Pointer => (8, 8),
            Kind::Dtype => (4, 2),
        }
    }
}

/// A field of a struct.
#[derive(Debug, Clone)]
pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub offset: usize,
}

/// The fields of struct `name`, and its size.
pub fn layout(name: &str) -> (Vec<Field>, usize) {
    let (mut fields, mut end, mut widest) = (Vec::new(), 0usize, 1);
    for (c_type, name) in declarations(name) {
        let kind = Kind::of(c_type);
        let (size, alignment) = kind.size_and_alignment();
        let offset = end.next_multiple_of(alignment);
        fields.push(Field { name, kind, offset });
        (end, widest) = (offset + size, alignment.max(widest));
    }
    assert!(!fields.is_empty(), "{name} is a struct of the header");
    (fields, end.next_multiple_of(widest))
}

/// The `(type, name)` pairs of a struct.
fn declarations(name: &str) -> Vec<(&'static str, &'static str)> {
    let opening = format!("typedef struct {name} {{");
    let body = HEADER.lines().skip_while(|line| *line != opening).skip(1);
    body.take_while(|line| !line.starts_with('}'))
        .map(str::trim)
        .filter(|line| line.ends_with(';') && !line.starts_with(['*', '/']))
        .map(|line| {
            let line = line.trim_end_matches(';');
            let start = line
                .rfind(|c: char| !is_part_of_name(c))
                .expect("a type before the name");
            (line[..=start].trim(), &line[start + 1..])
        })
        .collect()
}

fn is_part_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Structs whose names and fields messages may use.
pub const STRUCTS: [&str; 32] = [
    "folio_context_desc",
    "folio_decode_desc",
    "folio_prefill_desc",
    "folio_mla_desc",
    "folio_mla_args",
    "folio_cascade_desc",
    "folio_shared_prefixes",
    "folio_tensor",
    "folio_batch",
    "folio_workspace",
    "folio_attention_args",
    "folio_kv_append_args",
    "folio_kv_copy_args",
    "folio_kv_gather_args",
    "folio_merge_state_args",
    "folio_merge_states_args",
    "folio_merge_varlen_args",
    "folio_mla_append_args",
    "folio_mla_gather_args",
    "folio_mla_absorb_weights_args",
    "folio_mla_absorb_q_args",
    "folio_mla_project_o_args",
    "folio_mla_up_project_args",
    "folio_cp_reorder_args",
    "folio_cp_correct_args",
    "folio_tree_mask_args",
    "folio_batch_lengths_args",
    "folio_kv_indices_args",
    "folio_block_table_args",
    "folio_slot_mapping_args",
    "folio_draft_kv_indices_args",
    "folio_rope_append_args",
];

/// Names of structs, fields and parameters.
pub fn names() -> HashSet<&'static str> {
    let fields = STRUCTS.iter().flat_map(|name| declarations(name));
    let parameters = ["ctx", "desc", "batch", "ws", "args", "stream", "out", "err"];
    fields
        .map(|(_, name)| name)
        .chain(STRUCTS)
        .chain(parameters)
        .collect()
}

/// Whether the sentence's subject, what stands before its first colon, names something of the header.
pub fn names_a_field(message: &str, names: &HashSet<&'static str>) -> bool {
    let subject = message.split(": ").next().unwrap_or_default();
    subject
        .split(|c: char| !is_part_of_name(c))
        .any(|word| names.contains(word))
}
