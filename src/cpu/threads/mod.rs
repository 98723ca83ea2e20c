//! The threads of a CPU context. `pool` is what the rest of the backend sees. `jobs` deals out the pieces of a job to
//! whichever threads come for them: those that Folio starts (`workers`), on CPUs that `affinity` binds them to, or the
//! host's. `help` says whether the workers are worth waking.

mod affinity;
mod help;
mod jobs;
mod pool;
mod waiting;
mod workers;

pub use pool::Pool;
