//! How kernels are compiled, cached and bundled. No GPU is needed; what needs NVRTC is skipped where it is
//! not installed.
#![allow(unsafe_code)]

mod cache;
#[path = "../harness/mod.rs"]
mod harness;
mod nvrtc;
mod workers;

use std::process::ExitCode;

use harness::case;

fn main() -> ExitCode {
    folio::cuda::compiler::workers::serve_if_worker();
    let cases = [
        case("cache_finds_what_was_put", (), cache::what_was_put_is_found),
        case(
            "cache_with_concurrent_writers",
            (),
            cache::concurrent_writers,
        ),
        case(
            "cache_with_damaged_files",
            (),
            cache::damaged_files_are_not_there,
        ),
        case(
            "cache_in_an_unwritable_folder",
            (),
            cache::unwritable_folder,
        ),
        case("cache_on_a_full_disk", (), cache::full_disk),
        case("cache_of_the_user", (), cache::folder_of_the_user),
        case("cache_of_a_build", (), cache::folder_of_a_build),
        case(
            "as_many_processes_as_jobs",
            (),
            workers::as_many_processes_as_jobs,
        ),
        case(
            "one_job_is_one_process",
            (),
            workers::one_job_is_one_process,
        ),
        case(
            "ptx_comes_with_its_cubin",
            (),
            workers::ptx_comes_with_its_cubin,
        ),
        case(
            "failures_keep_their_place",
            (),
            workers::failures_keep_their_place,
        ),
        case("nvrtc_targets", (), nvrtc::targets),
        case("nvrtc_errors_are_told", (), nvrtc::errors_are_told),
        case(
            "nvrtc_named_but_missing",
            (),
            nvrtc::a_named_compiler_that_is_not_there,
        ),
        case(
            "compilations_are_cached",
            (),
            nvrtc::compilations_are_cached,
        ),
        case(
            "compilations_without_a_cache",
            (),
            nvrtc::a_cache_never_fails,
        ),
        case("compilations_side_by_side", (), nvrtc::many_at_once),
        case("every_source_exists", (), nvrtc::every_source_exists),
        case("the_bundle_is_complete", (), nvrtc::the_bundle_is_complete),
    ];
    harness::main(&cases, |_, command| {
        command.env_remove("FOLIO_CACHE_DIR");
        command
            .env("XDG_CACHE_HOME", "/cache/of/user")
            .env("HOME", "/home/of/user");
        Ok(())
    })
}
