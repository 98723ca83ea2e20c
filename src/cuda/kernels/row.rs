//! What the compiler, the bundle and the loader need of a row, whatever its operator. Which rows there are,
//! and what a problem asks of one, is said in the operators' own files.

use crate::dtype::DType;
use crate::error::Error;

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
    /// every device that no cubin fits (10.x, 11.x, 12.x and what comes). PTX stands behind the cubin that is assembled from
    /// it: one run of the compiler makes both.
    ///
    /// PTX and not more cubins, because of size and time. With NVRTC 13.0 and without the kernels of MLA, the 71 portable
    /// compilations were 4.2 MB of compressed PTX, made in 45 s of one core, in a stripped library of 12.8 MB. Their
    /// cubins for one further major version are about 3.2 MB and five minutes (8 of them measured, for sm_100 and for
    /// sm_120). The three versions there are would add 10 MB to the 16.7 of today, above the 20 MiB that
    /// `shared_library.sh` allows, and the next generation would still have none.
    pub fn bundle_targets(self) -> &'static [&'static str] {
        match self {
            Arch::Sm80 => &["sm_80", "compute_80", "sm_90a"],
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

/// Whether every kernel that runs on a device waits for what it depends on, so that it may be launched before the kernel before
/// it has ended. Those of other devices are, or may come from PTX, for architectures without that instruction.
pub fn waits_for_prerequisites(compute_capability: (u32, u32)) -> bool {
    compute_capability == (9, 0)
}

/// The compilation target for a device. A cubin runs on its own major version, from its minor upwards.
pub fn target(compute_capability: (u32, u32)) -> String {
    match compute_capability {
        (8, _) => "sm_80".into(),
        (9, 0) => "sm_90a".into(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// One compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// What users are told, such as `decode_sm90a_bf16_d128_q8_tma`.
    pub name: String,
    /// What it does, as in its name.
    pub operator: &'static str,
    /// What it is written for.
    pub arch: Arch,
    /// File, relative to `kernels/`.
    pub source: &'static str,
    /// The `extern "C" __global__` function.
    pub symbol: &'static str,
    /// All defines, as `NAME` or `NAME=VALUE`.
    pub defines: Vec<String>,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// Compiled ahead of time; otherwise where NVRTC is found at run time.
    pub bundled: bool,
}

impl AsRef<Row> for Row {
    fn as_ref(&self) -> &Row {
        self
    }
}

impl Row {
    /// A portable kernel that takes rows of any size, compiled for element types of q, kv and o.
    pub(super) fn of_any_size(
        operator: &'static str,
        code: (&'static str, &'static str),
        types: [DType; 3],
        threads: u32,
    ) -> Row {
        Row::of_any_size_on(Arch::Sm80, operator, code, types, threads)
    }

    /// One that only Hopper's kernels need, and takes types at run time too.
    pub(super) fn for_hopper(
        operator: &'static str,
        code: (&'static str, &'static str),
        threads: u32,
    ) -> Row {
        Row::of_any_size_on(Arch::Sm90a, operator, code, [DType::F32; 3], threads)
    }

    fn of_any_size_on(
        arch: Arch,
        operator: &'static str,
        (source, symbol): (&'static str, &'static str),
        types: [DType; 3],
        threads: u32,
    ) -> Row {
        let [q, kv, o] = types;
        Row {
            name: name(operator, arch, (q, kv), &[]),
            operator,
            arch,
            source,
            symbol,
            defines: defines((q, kv, Some(o)), &Sizes::of_threads(threads), 0),
            threads,
            shared_bytes: 0,
            bundled: true,
        }
    }
}

/// The sizes that a source is compiled for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub head_dim_qk: u32,
    pub head_dim_vo: u32,
    pub q_tile: u32,
    pub kv_tile: u32,
    pub threads: u32,
}

impl Sizes {
    fn of_threads(threads: u32) -> Sizes {
        Sizes {
            head_dim_qk: 0,
            head_dim_vo: 0,
            q_tile: 0,
            kv_tile: 0,
            threads,
        }
    }
}

/// `decode_sm90a_bf16_kve4m3` and then `parts`.
pub(super) fn name(
    operator: &str,
    arch: Arch,
    (q, kv): (DType, DType),
    parts: &[String],
) -> String {
    let mut name = format!("{operator}_{}_{}", arch.name(), type_name(q));
    if kv != q {
        name.push_str("_kv");
        name.push_str(type_name(kv));
    }
    for part in parts {
        name.push('_');
        name.push_str(part);
    }
    name
}

/// What every source is told. The type of o is left out where the kernel takes it at run time.
pub(super) fn defines(
    (q, kv, o): (DType, DType, Option<DType>),
    sizes: &Sizes,
    shared_bytes: u32,
) -> Vec<String> {
    let mut defines = vec![
        format!("FOLIO_Q={}", type_name(q)),
        format!("FOLIO_KV={}", type_name(kv)),
        format!("FOLIO_HEAD_DIM_QK={}", sizes.head_dim_qk),
        format!("FOLIO_HEAD_DIM_VO={}", sizes.head_dim_vo),
        format!("FOLIO_Q_TILE={}", sizes.q_tile),
        format!("FOLIO_KV_TILE={}", sizes.kv_tile),
        format!("FOLIO_THREADS={}", sizes.threads),
        format!("FOLIO_SHARED_BYTES={shared_bytes}"),
    ];
    defines.extend(o.map(|o| format!("FOLIO_O={}", type_name(o))));
    defines
}

/// The refusal of a problem that no row fits: what was asked for, and the rows that the device can run.
pub(super) fn refusal<'a>(
    problem: &str,
    compute_capability: (u32, u32),
    rows: impl Iterator<Item = &'a Row>,
) -> Error {
    let mut names: Vec<&str> = rows
        .filter(|row| row.arch.runs_on(compute_capability))
        .map(|row| row.name.as_str())
        .collect();
    names.sort_unstable();
    Error::Unsupported(format!(
        "no {problem} on compute capability {}.{}; there is {}",
        compute_capability.0,
        compute_capability.1,
        if names.is_empty() {
            "none".into()
        } else {
            names.join(", ")
        }
    ))
}

/// The C++ type of an element in the kernels.
pub(super) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F8E4M3 => "e4m3",
        DType::F8E5M2 => "e5m2",
        DType::U8 => "u8",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::I8 => "i8",
        DType::I4x2 => "i4",
        DType::F4E2M1x2 => "e2m1",
    }
}
