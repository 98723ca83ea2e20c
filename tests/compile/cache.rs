//! The disk cache of compiled kernels, when others write it, when it is damaged, and when it cannot be
//! written.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use folio::cuda::compiler::compile::build_cache;
use folio::cuda::compiler::cubin_cache::CubinCache;
use folio::cuda::compiler::nvrtc::Compiled;
use folio::cuda::compiler::packed::Packed;

/// An empty folder of this case.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("cubin_cache")
        .join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

/// Bytes that do not repeat (an LCG with Knuth's constants), so that packing them saves nothing.
fn compiled(len: usize) -> Compiled {
    let mut state = 1_u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let image: Vec<u8> = (0..len).map(|_| next()).collect();
    Compiled {
        image: Packed::pack(&image),
        log: "ptxas info".into(),
        millis: 7,
    }
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

pub fn what_was_put_is_found() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder("found");
    let cache = CubinCache::new(&folder);
    assert_eq!(cache.get(1), None);
    cache.put(1, &compiled(1000)).unwrap();
    cache.put(2, &compiled(0)).unwrap();
    assert_eq!(cache.get(1), Some(compiled(1000)));
    assert_eq!(cache.get(2), Some(compiled(0)));
    assert_eq!(files(&folder), 2, "no temporary file is left");
    assert_eq!(
        std::fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
        0o700
    );
}

/// Whoever reads while others write finds nothing or everything.
pub fn concurrent_writers() {
    let folder = folder("concurrent");
    let value = compiled(200_000);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (cache, mut seen) = (CubinCache::new(&folder), false);
            while !done.load(Ordering::Relaxed) {
                match cache.get(5) {
                    Some(read) => {
                        assert_eq!(read, value);
                        seen = true;
                    }
                    None => assert!(!seen, "a result never goes away"),
                }
            }
        });
        let write = || {
            let cache = CubinCache::new(&folder);
            (0..20).for_each(|_| cache.put(5, &value).unwrap());
        };
        let writers: Vec<_> = (0..4).map(|_| scope.spawn(write)).collect();
        writers
            .into_iter()
            .for_each(|writer| writer.join().unwrap());
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(CubinCache::new(&folder).get(5), Some(value));
    assert_eq!(files(&folder), 1, "no temporary file is left");
}

pub fn damaged_files_are_not_there() {
    let cache = CubinCache::new(folder("damaged"));
    cache.put(3, &compiled(500)).unwrap();
    let path = cache.path(3);
    let whole = std::fs::read(&path).unwrap();
    for len in [0, 7, 8, 20, 24, 30, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        assert_eq!(cache.get(3), None, "cut to {len} bytes");
    }
    for index in [0, 8, 24, 28, 34, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[index] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(cache.get(3), None, "bit flipped in byte {index}");
    }
    std::fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    assert_eq!(cache.get(3), None, "with more behind it");
    cache.put(3, &compiled(500)).unwrap();
    assert_eq!(cache.get(3), Some(compiled(500)), "written anew");
}

/// A file where the folder should be stops even the superuser, whom permissions do not.
pub fn unwritable_folder() {
    let parent = folder("unwritable");
    std::fs::create_dir_all(&parent).unwrap();
    let file = parent.join("file");
    std::fs::write(&file, "").unwrap();
    let cache = CubinCache::new(file.join("cache"));
    assert!(cache.put(4, &compiled(10)).is_err());
    assert_eq!(cache.get(4), None);
}

/// A limit on file size cuts a write short as a full disk does.
pub fn full_disk() {
    let folder = folder("full");
    let cache = CubinCache::new(&folder);
    cache.put(6, &compiled(10)).unwrap();
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    // SAFETY: only this process is limited, and the signal that would end it is ignored.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
    assert!(cache.put(7, &compiled(100_000)).is_err());
    assert_eq!(cache.get(7), None);
    assert_eq!(cache.get(6), Some(compiled(10)));
    assert_eq!(files(&folder), 1, "the part that was written is removed");
}

pub fn folder_of_the_user() {
    let set = |name, value| {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(name, value) };
    };
    let found = || CubinCache::of_user().map(|cache| cache.path(0));
    let file = "00000000000000000000000000000000.cubin";
    assert_eq!(found(), Some(Path::new("/cache/of/user/folio").join(file)));
    set("XDG_CACHE_HOME", "relative");
    assert_eq!(
        found(),
        Some(Path::new("/home/of/user/.cache/folio").join(file))
    );
    set("HOME", "");
    assert_eq!(found(), None);
    set("FOLIO_CACHE_DIR", "/chosen");
    assert_eq!(found(), Some(Path::new("/chosen").join(file)));
    set("HOME", "/home/of/user");
    set("FOLIO_CACHE_DIR", "");
    assert_eq!(found(), None);
}

/// One for all profiles and targets: `--target` makes a tagged folder in the tagged one.
pub fn folder_of_a_build() {
    let target = folder("build").join("target");
    let nested = target.join("x86_64-unknown-linux-gnu");
    std::fs::create_dir_all(&nested).unwrap();
    for tagged in [&target, &nested] {
        std::fs::write(tagged.join("CACHEDIR.TAG"), "").unwrap();
    }
    let found = CubinCache::new(target.join("folio-kernels")).path(0);
    for inside in [
        "debug/build/folio-1/out",
        "x86_64-unknown-linux-gnu/release/x",
    ] {
        assert_eq!(build_cache(&target.join(inside)).path(0), found);
    }
}
