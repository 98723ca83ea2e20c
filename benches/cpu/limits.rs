//! What this machine can do, measured here and now with as many threads as the cases use.

use crate::Limit;
use crate::data::Memory;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Bytes that every thread reads per pass: far beyond any cache.
const READ_BYTES: usize = 192 << 20;
/// Bytes of the copy that appends are compared with: K and V of 2048 tokens of 8 heads × 128 in bf16.
pub const COPY_BYTES: usize = 8 << 20;
const COPY_WORDS: usize = COPY_BYTES / 8;

/// How long a rate of operations must last: about as long as a prefill, which cannot reach what a processor
/// does for a few milliseconds at a time only.
const SPAN: Duration = Duration::from_millis(30);

/// Best rates seen so far.
pub struct Limits {
    threads: usize,
    memory: Vec<Memory>,
    copies: Memory,
    turn: usize,
    pub sequential: f64,
    pub random: f64,
    pub copy: f64,
    pub fma: f64,
    pub amx: Option<f64>,
}

impl Limits {
    pub fn new(threads: usize) -> Limits {
        Limits {
            threads,
            memory: (0..threads)
                .map(|_| Memory::filled(READ_BYTES / 8, 1))
                .collect(),
            copies: Memory::filled(64 * COPY_WORDS, 1),
            turn: 0,
            sequential: 0.0,
            random: 0.0,
            copy: 0.0,
            fma: 0.0,
            amx: None,
        }
    }

    /// Everything, a few times.
    pub fn measure(&mut self) {
        for _ in 0..3 {
            for limit in [Limit::Read, Limit::Copy, Limit::Fma, Limit::Matrix] {
                self.refresh(limit);
            }
            self.random = self.random.max(self.read(random_pages));
        }
    }

    /// One more round of a limit.
    pub fn refresh(&mut self, limit: Limit) {
        match limit {
            Limit::Read => self.sequential = self.sequential.max(self.read(in_order)),
            Limit::Copy => self.copy = self.copy.max(self.copy()),
            Limit::Fma => self.fma = self.fma.max(self.operations(fma_round)),
            Limit::Matrix if amx_present() => {
                let rate = self.operations(amx_round);
                self.amx = Some(self.amx.unwrap_or(0.0).max(rate));
            }
            Limit::Matrix => self.fma = self.fma.max(self.operations(fma_round)),
            Limit::Time => {}
        }
    }

    /// The rate that a limit stands for; AMX falls back to FMA.
    pub fn value(&self, limit: Limit) -> f64 {
        match limit {
            Limit::Read => self.sequential,
            Limit::Copy => self.copy,
            Limit::Fma => self.fma,
            Limit::Matrix => self.amx.unwrap_or(self.fma),
            Limit::Time => f64::NAN,
        }
    }

    fn read(&self, pass: fn(&[u64]) -> u64) -> f64 {
        let time = together(self.threads, |thread| {
            std::hint::black_box(pass(self.memory[thread].words()));
        });
        (self.threads * READ_BYTES) as f64 / time.as_secs_f64()
    }

    /// A copy of `COPY_BYTES` between memory that is in no cache, cut among the threads.
    fn copy(&mut self) -> f64 {
        let part = COPY_WORDS / self.threads;
        let words = self.copies.words_mut();
        let pairs = words.len() / (2 * COPY_WORDS);
        self.turn = (self.turn + 1) % pairs;
        let pair = &mut words[self.turn * 2 * COPY_WORDS..][..2 * COPY_WORDS];
        let (from, to) = pair.split_at_mut(COPY_WORDS);
        let targets: Vec<_> = to.chunks_mut(part).map(std::sync::Mutex::new).collect();
        let time = together(self.threads, |thread| {
            let mut to = targets[thread]
                .lock()
                .expect("no other thread has this part");
            to.copy_from_slice(&from[thread * part..][..part]);
        });
        COPY_BYTES as f64 / time.as_secs_f64()
    }

    fn operations(&self, round: fn() -> f64) -> f64 {
        let total = std::sync::Mutex::new(0.0);
        let time = together(self.threads, |_| {
            let (start, mut operations) = (Instant::now(), 0.0);
            while start.elapsed() < SPAN {
                operations += round();
            }
            *total.lock().expect("no panics in a round") += operations;
        });
        total.into_inner().expect("as above") / time.as_secs_f64()
    }
}

/// Runs `work` on every thread at once; time from the common start to the last end.
fn together(threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let barrier = Barrier::new(threads);
    let spans: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let run = |thread: usize| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                barrier.wait();
                let start = Instant::now();
                work(thread);
                (start, Instant::now())
            })
        };
        let handles: Vec<_> = (0..threads).map(run).collect();
        let join = |handle: std::thread::ScopedJoinHandle<'_, _>| handle.join().expect("no panics");
        handles.into_iter().map(join).collect()
    });
    let start = spans.iter().map(|span| span.0).min().expect("a thread");
    let end = spans.iter().map(|span| span.1).max().expect("a thread");
    end - start
}

fn sum(words: &[u64]) -> u64 {
    words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
}

fn in_order(memory: &[u64]) -> u64 {
    memory.chunks(1 << 16).map(sum).fold(0, u64::wrapping_add)
}

/// Blocks of 4 KiB in the order of a full-period congruential generator.
fn random_pages(memory: &[u64]) -> u64 {
    let blocks = memory.len() / 512;
    let period = blocks.next_power_of_two();
    let (mut block, mut total) = (1usize, 0u64);
    for _ in 0..period {
        block = (block.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)) % period;
        if block < blocks {
            total = total.wrapping_add(sum(&memory[block * 512..][..512]));
        }
    }
    total
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    const STEPS: usize = 200_000;

    /// Independent chains hide the latency of an FMA.
    const CHAINS: usize = 12;

    #[cfg(folio_avx512)]
    #[allow(clippy::incompatible_msrv, reason = "not compiled where it is missing")]
    #[target_feature(enable = "avx512f")]
    fn fma_512() -> f64 {
        // Opaque, so that nothing is computed ahead of time.
        let (a, b) = std::hint::black_box((_mm512_set1_ps(0.999), _mm512_set1_ps(1e-3)));
        let mut x = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..STEPS {
            for x in &mut x {
                *x = _mm512_fmadd_ps(*x, a, b);
            }
        }
        let total = x
            .into_iter()
            .fold(_mm512_setzero_ps(), |s, x| _mm512_add_ps(s, x));
        std::hint::black_box(_mm512_reduce_add_ps(total));
        (STEPS * CHAINS * 32) as f64
    }

    #[target_feature(enable = "avx2,fma")]
    fn fma_256() -> f64 {
        let (a, b) = std::hint::black_box((_mm256_set1_ps(0.999), _mm256_set1_ps(1e-3)));
        let mut x = [_mm256_set1_ps(1.0); CHAINS];
        for _ in 0..STEPS {
            for x in &mut x {
                *x = _mm256_fmadd_ps(*x, a, b);
            }
        }
        let total = x
            .into_iter()
            .fold(_mm256_setzero_ps(), |s, x| _mm256_add_ps(s, x));
        std::hint::black_box(_mm256_cvtss_f32(total));
        (STEPS * CHAINS * 16) as f64
    }

    pub fn fma_round() -> Option<f64> {
        #[cfg(folio_avx512)]
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: just detected.
            return Some(unsafe { fma_512() });
        }
        // SAFETY: just detected.
        is_x86_feature_detected!("fma").then(|| unsafe { fma_256() })
    }

    #[repr(align(64))]
    struct Panels([u16; 16 << 10]);

    impl Panels {
        /// bf16 numbers of either sign and a few powers of two: products of zeros may take less power.
        const fn new() -> Panels {
            let mut numbers = [0; 16 << 10];
            let mut i = 0;
            while i < numbers.len() {
                numbers[i] = (i.wrapping_mul(40_503) as u16 & 0x81ff) | 0x3e00;
                i += 1;
            }
            Panels(numbers)
        }
    }

    /// Nothing, six times: tile instructions that follow one another closely are slow where the sibling thread is
    /// busy.
    macro_rules! apart {
        () => {
            ".rept 6\nnop\n.endr"
        };
    }

    /// 2 × 2 tiles over a depth of 128 from panels that stay in first-level cache: 16 products of
    /// 16 × 16 × 32 and as many tile loads.
    pub fn amx_round() -> f64 {
        const ROUNDS: usize = 4_000;
        static PANELS: Panels = Panels::new();
        let config = tile_config();
        // SAFETY: the caller saw the AMX row available, so the process has permission; the panels are
        // as large as the loads need, and no tile is in use elsewhere on this thread.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) &config, options(nostack));
            for _ in 0..ROUNDS {
                let mut step = 4usize;
                let mut a = PANELS.0.as_ptr();
                std::arch::asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {stride}]",
                    apart!(),
                    "tileloadd tmm5, [{a} + {stride} + 1024]",
                    apart!(),
                    "tileloadd tmm6, [{a} + {stride} + 2048]",
                    apart!(),
                    "tileloadd tmm7, [{a} + {stride} + 3072]",
                    apart!(),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    apart!(),
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    apart!(),
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    apart!(),
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    apart!(),
                    "add {a}, 4096",
                    "dec {step}",
                    "jnz 2b",
                    a = inout(reg) a,
                    step = inout(reg) step,
                    stride = in(reg) 64usize,
                    options(nostack, readonly)
                );
                std::hint::black_box((a, step));
            }
            std::arch::asm!("tilerelease", options(nostack));
        }
        (ROUNDS * 16 * 16 * 16 * 32 * 2) as f64
    }

    /// Palette 1, eight tiles of 16 rows of 64 bytes.
    fn tile_config() -> [u8; 64] {
        let mut config = [0; 64];
        config[0] = 1;
        for tile in 0..8 {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = 16;
        }
        config
    }
}

#[cfg(target_arch = "x86_64")]
fn fma_round() -> f64 {
    x86::fma_round().unwrap_or_else(plain_round)
}

#[cfg(not(target_arch = "x86_64"))]
fn fma_round() -> f64 {
    plain_round()
}

/// Multiplications and additions as the compiler vectorises them.
fn plain_round() -> f64 {
    const STEPS: usize = 100_000;
    let mut x = [1f32; 48];
    let (a, b) = std::hint::black_box((0.999, 1e-3));
    for _ in 0..STEPS {
        for x in &mut x {
            *x = *x * a + b;
        }
    }
    std::hint::black_box(x);
    (STEPS * 48 * 2) as f64
}

fn amx_present() -> bool {
    folio::cpu::Isa::Amx.is_available()
}

#[cfg(target_arch = "x86_64")]
fn amx_round() -> f64 {
    x86::amx_round()
}

#[cfg(not(target_arch = "x86_64"))]
fn amx_round() -> f64 {
    plain_round()
}
