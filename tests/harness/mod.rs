//! Test cases that run in processes of their own and may say that they were skipped. (The standard
//! harness runs cases as threads of one process and knows no skipping at run time.) It is the `main` of
//! test targets with `harness = false`, and prints what the standard one prints. Here cases run one after the
//! other unless `--test-threads` says how many run side by side: on a GPU they share its memory.

pub mod skips;

use std::io::Read;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One process.
pub struct Case<S> {
    /// What is tested.
    pub name: &'static str,
    /// What the process needs; `main`'s `prepare` knows how to provide it.
    pub setup: S,
    /// The test, in that process. It fails by panicking.
    pub run: fn(),
}

/// A case.
pub const fn case<S>(name: &'static str, setup: S, run: fn()) -> Case<S> {
    Case { name, setup, run }
}

/// What a case prints when it could not test anything.
const SKIPPED: &str = "skipped: ";

/// Ends the process of a case that finds out that it cannot run here.
pub fn skip(reason: &str) -> ! {
    println!("{SKIPPED}{reason}");
    std::process::exit(0);
}

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// A case that takes longer is ended and fails, so that a kernel that never ends is named.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Runs the cases whose names contain one of the arguments, or all; with `--list` it prints their names. `prepare` sets
/// a process up, or says why its case cannot run here; several are set up at a time where cases run side by side.
pub fn main<S: Sync>(
    cases: &[Case<S>],
    prepare: fn(&S, &mut Command) -> Result<(), String>,
) -> ExitCode {
    let options = Options::of(std::env::args().skip(1));
    if let Some(name) = &options.case {
        let case = cases.iter().find(|case| case.name == name);
        (case.expect("a case of that name").run)();
        return ExitCode::SUCCESS;
    }
    let wanted = cases.iter().filter(|case| options.wants(case.name));
    if options.list {
        wanted.for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    let (left, counts) = (Mutex::new(wanted), Mutex::new(Counts::default()));
    let next = || left.lock().expect("no case panics here").next();
    std::thread::scope(|scope| {
        for _ in 0..options.threads {
            scope.spawn(|| {
                while let Some(case) = next() {
                    let outcome = run(case, prepare);
                    counts
                        .lock()
                        .expect("no case panics here")
                        .tell(case.name, outcome);
                }
            });
        }
    });
    counts.into_inner().expect("no case panics here").tell_all()
}

/// What the arguments ask for. Those of the standard harness that mean nothing here are passed over.
struct Options {
    /// One case, in this process.
    case: Option<String>,
    list: bool,
    threads: usize,
    parts: Vec<String>,
}

impl Options {
    fn of(mut arguments: impl Iterator<Item = String>) -> Options {
        let mut options = Options {
            case: None,
            list: false,
            threads: 1,
            parts: Vec::new(),
        };
        while let Some(argument) = arguments.next() {
            match argument.split_once('=').unwrap_or((&argument, "")) {
                ("--case", _) => options.case = arguments.next(),
                ("--list", _) => options.list = true,
                ("--test-threads", "") => {
                    options.threads = count(&arguments.next().unwrap_or_default());
                }
                ("--test-threads", threads) => options.threads = count(threads),
                (flag, _) if flag.starts_with('-') => {}
                _ => options.parts.push(argument),
            }
        }
        options
    }

    fn wants(&self, name: &str) -> bool {
        self.parts.is_empty() || self.parts.iter().any(|part| name.contains(part))
    }
}

fn count(threads: &str) -> usize {
    let count = threads.parse().ok().filter(|&count| count > 0);
    count.unwrap_or_else(|| {
        panic!("--test-threads: {threads:?} is not accepted; a positive number is")
    })
}

/// How the cases ended that have.
#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

impl Counts {
    fn tell(&mut self, name: &str, outcome: Outcome) {
        let (count, text) = match outcome {
            Outcome::Passed => (&mut self.passed, "ok".into()),
            Outcome::Skipped(reason) => {
                let test = concat!("test ", env!("CARGO_CRATE_NAME"), "::");
                skips::note(&format!("{test}{name}"), &reason);
                (&mut self.skipped, format!("{SKIPPED}{reason}"))
            }
            Outcome::Failed(output) => (&mut self.failed, format!("FAILED\n{output}")),
        };
        *count += 1;
        println!("test {name} ... {text}");
    }

    fn tell_all(&self) -> ExitCode {
        let (result, code) = match self.failed {
            0 => ("ok", ExitCode::SUCCESS),
            _ => ("FAILED", ExitCode::FAILURE),
        };
        let Counts {
            passed,
            failed,
            skipped,
        } = self;
        println!("\ntest result: {result}. {passed} passed; {failed} failed; {skipped} skipped\n");
        code
    }
}

fn run<S>(case: &Case<S>, prepare: fn(&S, &mut Command) -> Result<(), String>) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args(["--case", case.name]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Err(reason) = prepare(&case.setup, &mut command) {
        return Outcome::Skipped(reason);
    }
    let (status, output) = end_of(command.spawn().expect("this program runs"));
    let Some(status) = status else {
        return Outcome::Failed(format!("it ran longer than {LIMIT:?}\n{output}"));
    };
    if !status.success() {
        return Outcome::Failed(format!("{status}\n{output}"));
    }
    match output.lines().find_map(|line| line.strip_prefix(SKIPPED)) {
        Some(reason) => Outcome::Skipped(reason.into()),
        None => Outcome::Passed,
    }
}

/// How a process ended, and what it printed; no status where it was killed at [`LIMIT`].
fn end_of(mut child: Child) -> (Option<ExitStatus>, String) {
    fn read(mut pipe: impl Read) -> Vec<u8> {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe is readable");
        bytes
    }
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        let stdout = scope.spawn(|| stdout.map(read));
        let stderr = scope.spawn(|| stderr.map(read));
        let status = wait(&mut child, Instant::now() + LIMIT);
        let printed = [stdout, stderr].map(|pipe| pipe.join().expect("a pipe is readable"));
        let printed: Vec<u8> = printed.into_iter().flatten().flatten().collect();
        (status, String::from_utf8_lossy(&printed).into_owned())
    })
}

fn wait(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    loop {
        let status = child.try_wait().expect("the state of a child");
        if status.is_some() {
            return status;
        }
        if Instant::now() > end {
            child.kill().expect("a child may be killed");
            child.wait().expect("the state of a child");
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
