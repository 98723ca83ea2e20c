//! Compilations by processes side by side. Threads would gain nothing: within a process NVRTC compiles one
//! program at a time. A program that compiles kernels is its own worker. It starts itself again with
//! [`VARIABLE`] set, and [`serve_if_worker`], the first thing in its `main`, answers requests on standard
//! input until the starter closes it. No library code calls this: at create one kernel is compiled, in the host's process.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::compile::{runs, through_cache};
use super::cubin_cache::{CubinCache, decode, encode};
use super::nvrtc::{Compiled, Nvrtc};
use super::unit::{Closure, Sources, Unit};
use crate::error::{Error, Result};

/// Makes a process a worker; its value is the path of the compiler.
pub const VARIABLE: &str = "FOLIO_COMPILE_WORKER";

/// Processes to compile on: what Cargo, which sets `NUM_JOBS` for build scripts, runs side by side; elsewhere one for
/// each processor.
pub fn jobs() -> usize {
    let stated = std::env::var("NUM_JOBS").ok();
    let stated = stated.and_then(|jobs| jobs.parse().ok());
    stated.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Compiles all units that the cache lacks, on this many processes at most; results in the order of `units`.
/// The program must begin with [`serve_if_worker`].
pub fn compile_all(
    units: &[Unit],
    sources: &Sources,
    nvrtc: &Nvrtc,
    cache: &CubinCache,
    processes: usize,
) -> Vec<Result<Compiled>> {
    assert!(
        std::env::var_os(VARIABLE).is_none(),
        "this program compiles kernels and does not begin with serve_if_worker"
    );
    let runs: Vec<&[Unit]> = runs(units).collect();
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Vec<Result<Compiled>>>> = Mutex::new(vec![Vec::new(); runs.len()]);
    std::thread::scope(|scope| {
        for _ in 0..processes.clamp(1, runs.len().max(1)) {
            scope.spawn(|| {
                let mut slot = Slot::new(nvrtc.path());
                while let Some((index, run)) = take(&next, &runs) {
                    let compiled =
                        through_cache(run, sources, nvrtc.version(), Some(cache), |closure| {
                            slot.compile(run, closure)
                        });
                    results.lock().unwrap_or_else(PoisonError::into_inner)[index] =
                        of_each(run, compiled);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().flatten().collect()
}

fn take<'a>(next: &AtomicUsize, runs: &[&'a [Unit]]) -> Option<(usize, &'a [Unit])> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    Some((index, runs.get(index)?))
}

/// The result of each unit of a run, all of which fail together.
fn of_each(run: &[Unit], compiled: Result<Vec<Compiled>>) -> Vec<Result<Compiled>> {
    match compiled {
        Ok(results) => results.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error); run.len()],
    }
}

/// In a process that was started as a worker: serves, and ends the process. In any other: returns.
pub fn serve_if_worker() {
    let Some(nvrtc) = std::env::var_os(VARIABLE) else {
        return;
    };
    let served = serve(
        Path::new(&nvrtc),
        &mut io::stdin().lock(),
        &mut io::stdout().lock(),
    );
    // Nobody reads the replies of a worker whose pipe broke.
    std::process::exit(i32::from(served.is_err()));
}

fn serve(nvrtc: &Path, requests: &mut impl Read, replies: &mut impl Write) -> io::Result<()> {
    let nvrtc = Nvrtc::named(nvrtc);
    while let Some(request) = read_frame(requests)? {
        let compiled = match &nvrtc {
            Ok(nvrtc) => compile(nvrtc, &request),
            Err(reason) => Err(reason.clone()),
        };
        write_frame(replies, &encode_reply(compiled))?;
    }
    Ok(())
}

fn compile(nvrtc: &Nvrtc, request: &[u8]) -> Result<Vec<Compiled>> {
    let fields = fields(request).ok_or_else(damaged)?;
    let (run, closure) = decode_request(&fields).ok_or_else(damaged)?;
    let (unit, more) = run.split_first().ok_or_else(damaged)?;
    nvrtc.compile(unit, more, &closure)
}

/// Room for one worker process, which starts with the first request.
struct Slot<'a> {
    nvrtc: &'a Path,
    worker: Option<Worker>,
}

impl Slot<'_> {
    fn new(nvrtc: &Path) -> Slot<'_> {
        Slot {
            nvrtc,
            worker: None,
        }
    }

    /// A worker that dies takes one run along; the next request starts another.
    fn compile(&mut self, run: &[Unit], closure: &Closure<'_>) -> Result<Vec<Compiled>> {
        let started = match self.worker.take() {
            Some(worker) => Ok(worker),
            None => Worker::start(self.nvrtc),
        };
        let mut worker = started.map_err(|error| {
            Error::Compile(format!(
                "no process to compile in could be started: {error}"
            ))
        })?;
        let reply = worker.ask(&encode_request(run, closure)).map_err(|error| {
            Error::Compile(format!(
                "{}: the process that compiled it ended: {error}",
                run[0].key()
            ))
        })?;
        self.worker = Some(worker);
        decode_reply(&reply, run.len())
    }
}

/// A worker process. It ends when this value does.
struct Worker {
    requests: Option<ChildStdin>,
    replies: ChildStdout,
    process: Child,
}

/// How glibc gives a worker memory: in large pages, and kept. A compilation asks for tens of MB in small pieces, and takes 0.94 to
/// 0.97 of the processor time with it. Other C libraries do not know the variables.
const MEMORY: [(&str, &str); 4] = [
    ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    ("MALLOC_TOP_PAD_", "268435456"),
    ("MALLOC_TRIM_THRESHOLD_", "1073741824"),
    ("MALLOC_MMAP_THRESHOLD_", "1073741824"),
];

impl Worker {
    fn start(nvrtc: &Path) -> io::Result<Worker> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(VARIABLE, OsString::from(nvrtc))
            .envs(MEMORY)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (requests, replies) = (process.stdin.take(), process.stdout.take());
        Ok(Worker {
            requests,
            replies: replies.ok_or(io::ErrorKind::BrokenPipe)?,
            process,
        })
    }

    fn ask(&mut self, request: &[u8]) -> io::Result<Vec<u8>> {
        let requests = self.requests.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        write_frame(requests, request)?;
        read_frame(&mut self.replies)?.ok_or(io::ErrorKind::UnexpectedEof.into())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        // It has been told all that it will be told; an error means that it is gone already.
        let _ = self.process.wait();
    }
}

/// A length, then as many bytes.
fn write_frame(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(&(bytes.len() as u32).to_le_bytes())?;
    to.write_all(bytes)?;
    to.flush()
}

/// The next frame; `None` where the other side has closed the pipe.
fn read_frame(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut len = [0; 4];
    match from.read_exact(&mut len) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    from.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}

/// The targets as lines, source, its text, the defines as lines; then names and texts of the headers.
fn encode_request(run: &[Unit], closure: &Closure<'_>) -> Vec<u8> {
    let targets: Vec<&str> = run.iter().map(|unit| unit.target.as_str()).collect();
    let (targets, defines) = (targets.join("\n"), run[0].defines.join("\n"));
    let fixed = [&targets, closure.source.0, closure.source.1, &defines];
    let headers = closure
        .headers
        .iter()
        .flat_map(|(name, text)| [*name, *text]);
    let mut bytes = Vec::new();
    for field in fixed.into_iter().chain(headers) {
        put_field(&mut bytes, field.as_bytes());
    }
    bytes
}

fn decode_request<'a>(fields: &[&'a [u8]]) -> Option<(Vec<Unit>, Closure<'a>)> {
    let fields = fields.iter().map(|field| std::str::from_utf8(field));
    let fields: Vec<&str> = fields.collect::<std::result::Result<_, _>>().ok()?;
    let (&[targets, name, text, defines], headers) = fields.split_first_chunk()?;
    let unit = |target: &str| Unit {
        source: name.into(),
        defines: defines.lines().map(str::to_owned).collect(),
        target: target.into(),
    };
    let headers = headers.chunks_exact(2).map(|pair| (pair[0], pair[1]));
    let closure = Closure {
        source: (name, text),
        headers: headers.collect(),
    };
    Some((targets.lines().map(unit).collect(), closure))
}

fn put_field(to: &mut Vec<u8>, field: &[u8]) {
    to.extend((field.len() as u32).to_le_bytes());
    to.extend(field);
}

/// What [`put_field`] put one after another.
fn fields(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let (field, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        fields.push(field);
        bytes = rest;
    }
    Some(fields)
}

const COMPILED: u8 = 0;
const REFUSED: u8 = 1;

/// The results of a run as the cache stores them, or the compiler's words.
fn encode_reply(results: Result<Vec<Compiled>>) -> Vec<u8> {
    let results = match results {
        Ok(results) => results,
        Err(error) => return [&[REFUSED][..], error.to_string().as_bytes()].concat(),
    };
    let mut reply = vec![COMPILED];
    for compiled in &results {
        put_field(&mut reply, &encode(compiled));
    }
    reply
}

/// So many results.
fn decode_reply(reply: &[u8], count: usize) -> Result<Vec<Compiled>> {
    match reply.split_first() {
        Some((&COMPILED, body)) => decode_results(body)
            .filter(|results| results.len() == count)
            .ok_or_else(damaged),
        Some((_, body)) => Err(Error::Compile(String::from_utf8_lossy(body).into_owned())),
        None => Err(damaged()),
    }
}

fn decode_results(body: &[u8]) -> Option<Vec<Compiled>> {
    fields(body)?.into_iter().map(decode).collect()
}

fn damaged() -> Error {
    Error::Compile("what a process that compiles kernels was sent, or answered, is damaged".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::compiler::packed::Packed;

    #[test]
    fn requests_survive_the_pipe() {
        let unit = |target: &str, defines: &[&str]| Unit {
            source: "a.cu".into(),
            defines: defines.iter().map(|&define| define.to_owned()).collect(),
            target: target.into(),
        };
        let sources = Sources::new([
            ("a.cu".to_owned(), "#include \"b.h\"\nint a;".to_owned()),
            ("b.h".to_owned(), String::new()),
        ]);
        let closure = sources.closure("a.cu").unwrap();
        for run in [
            vec![unit("sm_80", &[])],
            vec![unit("sm_90a", &["X"])],
            vec![
                unit("sm_80", &["X=1", "Y"]),
                unit("compute_80", &["X=1", "Y"]),
            ],
        ] {
            let mut pipe = Vec::new();
            write_frame(&mut pipe, &encode_request(&run, &closure)).unwrap();
            let mut pipe = pipe.as_slice();
            let request = read_frame(&mut pipe).unwrap().unwrap();
            assert!(read_frame(&mut pipe).unwrap().is_none());
            let fields = fields(&request).unwrap();
            let (found, found_closure) = decode_request(&fields).unwrap();
            assert_eq!(found, run);
            assert_eq!(found_closure.source, closure.source);
            assert_eq!(found_closure.headers, closure.headers);
        }
    }

    #[test]
    fn replies_survive_the_pipe() {
        let compiled = Compiled {
            image: Packed::pack(&[1, 2, 3]),
            log: "ptxas info".into(),
            millis: 7,
        };
        let ptx = Compiled {
            log: String::new(),
            ..compiled.clone()
        };
        for results in [vec![compiled.clone()], vec![compiled, ptx]] {
            let reply = encode_reply(Ok(results.clone()));
            for len in 0..reply.len() {
                assert!(decode_reply(&reply[..len], results.len()).is_err(), "{len}");
            }
            assert_eq!(decode_reply(&reply, results.len()), Ok(results));
        }
        let error = Error::Compile("a.cu: no".into());
        let reply = encode_reply(Err(error.clone()));
        assert_eq!(decode_reply(&reply, 1), Err(error));
    }
}
