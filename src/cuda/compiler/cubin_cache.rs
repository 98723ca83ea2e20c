//! Compiled kernels on disk, by content hash: the build's own memory, and the run-time compiler's. A
//! cache never makes anything fail: a file that is damaged, cut or of another format is not there, and a
//! folder that cannot be written is a missed saving.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use super::hash::Hash;
use super::nvrtc::Compiled;
use super::packed::Packed;

/// Names the folder, else it is `folio` in the user's cache folder. Empty: no cache.
pub const VARIABLE: &str = "FOLIO_CACHE_DIR";

const MAGIC: &[u8; 8] = b"folioCC2";

/// A folder of compiled kernels, shared by any number of processes.
#[derive(Debug, Clone)]
pub struct CubinCache {
    folder: PathBuf,
}

impl CubinCache {
    /// Uses a folder, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> CubinCache {
        CubinCache {
            folder: folder.into(),
        }
    }

    /// The cache in `FOLIO_CACHE_DIR`, if that is set and not empty.
    pub fn named() -> Option<CubinCache> {
        let folder = std::env::var_os(VARIABLE)?;
        (!folder.is_empty()).then(|| CubinCache::new(folder))
    }

    /// The user's cache: `FOLIO_CACHE_DIR`, `$XDG_CACHE_HOME/folio` or `~/.cache/folio`. `None` where the
    /// first is empty, or is not set and neither of the others is an absolute path.
    pub fn of_user() -> Option<CubinCache> {
        if std::env::var_os(VARIABLE).is_some() {
            return CubinCache::named();
        }
        let absolute = |name| {
            let path = PathBuf::from(std::env::var_os(name)?);
            path.is_absolute().then_some(path)
        };
        absolute("XDG_CACHE_HOME")
            .map(|folder| folder.join("folio"))
            .or_else(|| Some(absolute("HOME")?.join(".cache/folio")))
            .map(CubinCache::new)
    }

    /// Where the result with this hash lies.
    pub fn path(&self, hash: u128) -> PathBuf {
        self.folder.join(format!("{hash:032x}.cubin"))
    }

    /// Finds a result.
    pub fn get(&self, hash: u128) -> Option<Compiled> {
        decode(&std::fs::read(self.path(hash)).ok()?)
    }

    /// Keeps a result, if it can. Readers see the whole file or none: it is written under another name
    /// and then renamed. Of two writers of one hash either wins, with the same content.
    pub fn put(&self, hash: u128, compiled: &Compiled) -> std::io::Result<()> {
        create_private(&self.folder)?;
        let temporary = self.folder.join(format!(".{hash:032x}.{}", unique()));
        let written = write_new(&temporary, &encode(compiled))
            .and_then(|()| std::fs::rename(&temporary, self.path(hash)));
        if written.is_err() {
            // A full disk leaves a part behind; if even removing it fails, nothing refers to it.
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }
}

/// Differs between threads by the count, between processes by the id, and between containers that share
/// the folder, whose ids may be equal, by the time.
fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("{}.{count}.{}", std::process::id(), time.as_nanos())
}

fn write_new(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    std::fs::File::create_new(path)?.write_all(bytes)
}

/// A cubin from the cache is code that will run: only the user may write it.
fn create_private(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
}

/// Magic, checksum of the rest, milliseconds, length of the log, log, packed image. Little-endian.
pub(super) fn encode(compiled: &Compiled) -> Vec<u8> {
    let mut body = Vec::with_capacity(8 + compiled.log.len() + compiled.image.bytes().len());
    body.extend(compiled.millis.to_le_bytes());
    body.extend((compiled.log.len() as u32).to_le_bytes());
    body.extend(compiled.log.as_bytes());
    body.extend(compiled.image.bytes());
    let checksum = Hash::new().bytes(&body).finish();
    [&MAGIC[..], &checksum.to_le_bytes(), &body].concat()
}

pub(super) fn decode(bytes: &[u8]) -> Option<Compiled> {
    let (checksum, body) = bytes.strip_prefix(MAGIC)?.split_first_chunk::<16>()?;
    if Hash::new().bytes(body).finish() != u128::from_le_bytes(*checksum) {
        return None;
    }
    let (millis, body) = body.split_first_chunk::<4>()?;
    let (log_len, body) = body.split_first_chunk::<4>()?;
    let (log, image) = body.split_at_checked(u32::from_le_bytes(*log_len) as usize)?;
    Some(Compiled {
        image: Packed::from_bytes(image.to_vec()),
        log: String::from_utf8(log.to_vec()).ok()?,
        millis: u32::from_le_bytes(*millis),
    })
}
