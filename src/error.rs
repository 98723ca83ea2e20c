//! The one error type. No C here: `ffi/error.rs` maps it to `folio_status`.
//!
//! Every message is one sentence that names the field, the value and what would be accepted.

/// What went wrong, with a sentence for the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A value is outside what the field accepts.
    #[error("{0}")]
    InvalidArgument(String),
    /// A sized struct is smaller than its first released version, or its size is not plausible.
    #[error("{0}")]
    InvalidStructSize(String),
    /// A sized struct carries non-zero bytes in fields this library does not know, or an unknown flag.
    #[error("{0}")]
    UnknownField(String),
    /// A tensor's rank, extents, strides or alignment do not fit.
    #[error("{0}")]
    Shape(String),
    /// A tensor's element type does not fit.
    #[error("{0}")]
    DType(String),
    /// A tensor, stream or context belongs to another device.
    #[error("{0}")]
    DeviceMismatch(String),
    /// The caller's workspace is smaller than `_workspace` asks for, or missing.
    #[error("{0}")]
    WorkspaceTooSmall(String),
    /// `run` before a successful `plan`.
    #[error("{0}")]
    NotPlanned(String),
    /// The stream is being captured into a graph and this call may not be.
    #[error("{0}")]
    Capture(String),
    /// The combination is legal but this library, build or device has no code for it.
    #[error("{0}")]
    Unsupported(String),
    /// There is no such device.
    #[error("{0}")]
    NoDevice(String),
    /// The CUDA driver library is missing, incomplete or a stub.
    #[error("{0}")]
    NoDriver(String),
    /// The CUDA driver is older than this library needs.
    #[error("{0}")]
    DriverTooOld(String),
    /// A kernel variant could not be compiled.
    #[error("{0}")]
    Compile(String),
    /// Host or device memory ran out.
    #[error("{0}")]
    OutOfMemory(String),
    /// The CUDA driver reported a failure.
    #[error("{0}")]
    Driver(String),
    /// A bug or a caught panic in Folio.
    #[error("{0}")]
    Internal(String),
}

/// `std::result::Result` with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
