//! What a row of the kernel table says, what a problem asks of one, and how a family becomes rows. Which
//! rows there are is said elsewhere.

use crate::dtype::DType;

/// What a kernel does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Few query rows per request, over a paged cache.
    Decode,
    /// Any number of query rows per request.
    Prefill,
    /// Puts the partial results of split rows together.
    Combine,
    /// Cuts work on the device.
    Plan,
    /// Writes new tokens to a paged cache.
    Append,
    /// Merges attention states of the caller: any number, rows of any size.
    MergeStates,
    /// Merges two, where a row is at most a vector per lane of a warp.
    MergeState,
}

impl Op {
    /// The name in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Op::Decode => "decode",
            Op::Prefill => "prefill",
            Op::Combine => "combine",
            Op::Plan => "plan",
            Op::Append => "append",
            Op::MergeStates => "merge_states",
            Op::MergeState => "merge_state",
        }
    }
}

/// What a kernel is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// Portable: compute capability 8.0 and up.
    Sm80,
    /// Hopper's own instructions: 9.0 only.
    Sm90a,
}

impl Arch {
    /// The name in kernel names.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm80",
            Arch::Sm90a => "sm90a",
        }
    }

    /// Whether a device can run such kernels.
    pub fn runs_on(self, compute_capability: (u32, u32)) -> bool {
        match self {
            Arch::Sm80 => compute_capability >= (8, 0),
            Arch::Sm90a => compute_capability == (9, 0),
        }
    }

    /// The targets that the bundle holds such kernels for: cubins, and for portable kernels PTX, which serves
    /// every device that no cubin fits (10.x, 11.x, 12.x and what comes).
    ///
    /// PTX and not more cubins, because of size and time. With NVRTC 13.0 the 71 portable compilations are
    /// 4.2 MB of compressed PTX, made in 45 s of one core, and the stripped library is 12.9 MB. Their cubins for
    /// one further major version are about 3.2 MB and five minutes (8 of them measured, for sm_100 and for sm_120); the
    /// three versions there are would make 18 MB, above the 16 MiB that `shared_library.sh` allows, and
    /// the next generation would still have none.
    pub fn bundle_targets(self) -> &'static [&'static str] {
        match self {
            Arch::Sm80 => &["sm_80", "sm_90a", "compute_80"],
            Arch::Sm90a => &["sm_90a"],
        }
    }

    /// The one of them that is PTX.
    pub fn ptx_target(self) -> Option<&'static str> {
        match self {
            Arch::Sm80 => Some("compute_80"),
            Arch::Sm90a => None,
        }
    }
}

/// The compilation target for a device. A cubin runs on its own major version, from its minor upwards.
pub fn target(compute_capability: (u32, u32)) -> String {
    match compute_capability {
        (8, _) => "sm_80".into(),
        (9, 0) => "sm_90a".into(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// Element types. For `Append`, `q` is the type of the new tokens and `kv` that of the cache; for merges
/// `q` is the type of the states. Where a type has no role it equals `q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Types {
    /// Of q.
    pub q: DType,
    /// Of k and v.
    pub kv: DType,
    /// Of o.
    pub o: DType,
}

/// One size that a family is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Elements of a q or k row; 0 where the kernel takes any.
    pub head_dim_qk: u32,
    /// Elements of a v or o row; 0 where the kernel takes any.
    pub head_dim_vo: u32,
    /// Query rows of a block.
    pub q_tile: u32,
    /// Keys of a step.
    pub kv_tile: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// How a row's dims relate to a problem's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// They are equal.
    Exact,
    /// The problem's may be smaller: the kernel masks the rest.
    UpTo,
}

/// Rows that differ in types and shape only. Every combination is a row.
pub struct Family {
    /// What the kernels do.
    pub op: Op,
    /// What they are written for.
    pub arch: Arch,
    /// File, relative to `kernels/`.
    pub source: &'static str,
    /// The `extern "C" __global__` function.
    pub symbol: &'static str,
    /// Further defines, as `NAME` or `NAME=VALUE`.
    pub defines: &'static [&'static str],
    /// What tells rows of the same operator, arch, types, dims and `q_tile` apart, or empty.
    pub suffix: &'static str,
    /// Element types.
    pub types: &'static [Types],
    /// The kernels take the type of o at run time: `o` of the types is not asked for, and `FOLIO_O` is
    /// not defined.
    pub any_output: bool,
    /// Sizes.
    pub shapes: &'static [Shape],
    /// How the dims are meant.
    pub fit: Fit,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: fn(Types, Shape) -> u32,
    /// Compiled ahead of time; otherwise where NVRTC is found at run time.
    pub bundled: bool,
}

/// One variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// What users are told, such as `decode_sm90a_bf16_d128_q16`.
    pub name: String,
    /// What it does.
    pub op: Op,
    /// What it is written for.
    pub arch: Arch,
    /// File, relative to `kernels/`.
    pub source: &'static str,
    /// The `extern "C" __global__` function.
    pub symbol: &'static str,
    /// All defines, as `NAME` or `NAME=VALUE`.
    pub defines: Vec<String>,
    /// Element types.
    pub types: Types,
    /// The type of o is whatever the problem says.
    pub any_output: bool,
    /// Sizes.
    pub shape: Shape,
    /// How the dims are meant.
    pub fit: Fit,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Compiled ahead of time.
    pub bundled: bool,
}

/// What a problem asks of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Query {
    /// What is to be done.
    pub op: Op,
    /// The device's.
    pub compute_capability: (u32, u32),
    /// Element types.
    pub types: Types,
    /// Elements of a q or k row.
    pub head_dim_qk: u32,
    /// Elements of a v or o row.
    pub head_dim_vo: u32,
}

impl Family {
    pub(super) fn rows(&self) -> impl Iterator<Item = Row> + '_ {
        self.types
            .iter()
            .flat_map(move |&types| self.shapes.iter().map(move |&shape| self.row(types, shape)))
    }

    fn row(&self, types: Types, shape: Shape) -> Row {
        let shared_bytes = (self.shared_bytes)(types, shape);
        Row {
            name: self.row_name(types, shape),
            op: self.op,
            arch: self.arch,
            source: self.source,
            symbol: self.symbol,
            defines: self.row_defines(types, shape, shared_bytes),
            types,
            any_output: self.any_output,
            shape,
            fit: self.fit,
            shared_bytes,
            bundled: self.bundled,
        }
    }

    fn row_name(&self, types: Types, shape: Shape) -> String {
        let mut parts = vec![self.op.name().to_owned(), self.arch.name().into()];
        parts.push(type_name(types.q).into());
        if types.kv != types.q {
            parts.push(format!("kv{}", type_name(types.kv)));
        }
        if types.o != types.q && !self.any_output {
            parts.push(format!("o{}", type_name(types.o)));
        }
        if shape.head_dim_qk != 0 {
            parts.push(format!("d{}", shape.head_dim_qk));
        }
        if shape.head_dim_vo != shape.head_dim_qk {
            parts.push(format!("dv{}", shape.head_dim_vo));
        }
        if shape.q_tile != 0 {
            parts.push(format!("q{}", shape.q_tile));
        }
        if !self.suffix.is_empty() {
            parts.push(self.suffix.into());
        }
        parts.join("_")
    }

    fn row_defines(&self, types: Types, shape: Shape, shared_bytes: u32) -> Vec<String> {
        let mut defines = vec![
            format!("FOLIO_Q={}", type_name(types.q)),
            format!("FOLIO_KV={}", type_name(types.kv)),
            format!("FOLIO_HEAD_DIM_QK={}", shape.head_dim_qk),
            format!("FOLIO_HEAD_DIM_VO={}", shape.head_dim_vo),
            format!("FOLIO_Q_TILE={}", shape.q_tile),
            format!("FOLIO_KV_TILE={}", shape.kv_tile),
            format!("FOLIO_THREADS={}", shape.threads),
            format!("FOLIO_SHARED_BYTES={shared_bytes}"),
        ];
        if !self.any_output {
            defines.push(format!("FOLIO_O={}", type_name(types.o)));
        }
        defines.extend(self.defines.iter().map(|&define| define.to_owned()));
        defines
    }
}

impl Row {
    pub(super) fn fits(&self, query: &Query) -> bool {
        self.op == query.op
            && (self.types.q, self.types.kv) == (query.types.q, query.types.kv)
            && (self.any_output || self.types.o == query.types.o)
            && self.arch.runs_on(query.compute_capability)
            && self.fit.accepts(self.shape.head_dim_qk, query.head_dim_qk)
            && self.fit.accepts(self.shape.head_dim_vo, query.head_dim_vo)
    }
}

impl Fit {
    fn accepts(self, row: u32, problem: u32) -> bool {
        match self {
            _ if row == 0 => true,
            Fit::Exact => row == problem,
            Fit::UpTo => row >= problem,
        }
    }
}

/// The C++ type of an element in the kernels.
fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F8E4M3 => "e4m3",
        DType::F8E5M2 => "e5m2",
        DType::U8 => "u8",
        DType::I32 => "i32",
        DType::I64 => "i64",
    }
}

/// Types of a family whose q, kv and o are the same.
pub(super) const fn same(dtype: DType) -> Types {
    Types {
        q: dtype,
        kv: dtype,
        o: dtype,
    }
}
