//! The kernels inside the library: sources always, images (cubins, and PTX for devices that none fits) where
//! the build had a compiler, each compressed on its own so that a look-up unpacks one. Written by `build.rs`, read here.

use std::collections::HashMap;

use super::packed::{Packed, unpack};
use super::unit::{Sources, Unit};
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"folioKB2";

/// A bundle under construction. Little-endian throughout.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Starts a bundle whose images are of the compiler `version`, as in 13000; 0 where there are none.
    pub fn new(version: u32) -> Writer {
        Writer {
            bytes: [&MAGIC[..], &version.to_le_bytes()].concat(),
        }
    }

    /// Adds the text of a file in `kernels/`.
    pub fn source(&mut self, path: &str, text: &str) {
        self.entry(0, path, &Packed::pack(text.as_bytes()));
    }

    /// Adds an image.
    pub fn image(&mut self, unit: &Unit, packed: &Packed) {
        self.entry(1, &unit.key(), packed);
    }

    /// The finished bundle.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    fn entry(&mut self, kind: u8, name: &str, packed: &Packed) {
        let packed = packed.bytes();
        self.bytes.push(kind);
        self.bytes.extend((name.len() as u32).to_le_bytes());
        self.bytes.extend((packed.len() as u32).to_le_bytes());
        self.bytes.extend(name.as_bytes());
        self.bytes.extend(packed);
    }
}

/// A bundle that can be looked up.
#[derive(Debug)]
pub struct Bundle {
    version: u32,
    sources: Sources,
    images: HashMap<&'static str, &'static [u8]>,
}

impl Bundle {
    /// Reads a bundle.
    ///
    /// # Errors
    /// [`Error::Internal`] when it is damaged.
    pub fn parse(bytes: &'static [u8]) -> Result<Bundle> {
        let mut rest = Reader(bytes.strip_prefix(MAGIC).ok_or_else(damaged)?);
        let version = rest.number()?;
        let mut sources = Vec::new();
        let mut images = HashMap::new();
        while !rest.0.is_empty() {
            let kind = rest.take(1)?[0];
            let (name_len, len) = (rest.number()?, rest.number()?);
            let name = std::str::from_utf8(rest.take(name_len)?).map_err(|_| damaged())?;
            let packed = rest.take(len)?;
            if kind == 0 {
                let text = String::from_utf8(unpack(packed)?).map_err(|_| damaged())?;
                sources.push((name.to_owned(), text));
            } else {
                images.insert(name, packed);
            }
        }
        Ok(Bundle {
            version,
            sources: Sources::new(sources),
            images,
        })
    }

    /// The compiler's version, as in 13000; 0 where the bundle holds sources only.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The kernels' sources.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// The number of images.
    pub fn len(&self) -> usize {
        self.images.len()
    }

    /// Sources only.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Whether a compilation is here.
    pub fn contains(&self, unit: &Unit) -> bool {
        self.images.contains_key(unit.key().as_str())
    }

    /// The result of a compilation, unpacked; `None` where the bundle lacks it.
    ///
    /// # Errors
    /// [`Error::Internal`] when it is damaged.
    pub fn image(&self, unit: &Unit) -> Result<Option<Vec<u8>>> {
        let packed = self.images.get(unit.key().as_str());
        packed.map(|packed| unpack(packed)).transpose()
    }
}

struct Reader(&'static [u8]);

impl Reader {
    fn take(&mut self, len: u32) -> Result<&'static [u8]> {
        let (head, tail) = self.0.split_at_checked(len as usize).ok_or_else(damaged)?;
        self.0 = tail;
        Ok(head)
    }

    fn number(&mut self) -> Result<u32> {
        let (head, tail) = self.0.split_first_chunk::<4>().ok_or_else(damaged)?;
        self.0 = tail;
        Ok(u32::from_le_bytes(*head))
    }
}

fn damaged() -> Error {
    Error::Internal("the kernel bundle inside the library is damaged".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(target: &str) -> Unit {
        Unit {
            source: "a.cu".into(),
            defines: vec!["D=64".into()],
            target: target.into(),
        }
    }

    fn written() -> &'static [u8] {
        let mut writer = Writer::new(13000);
        writer.source("a.cu", "int a;");
        writer.image(&unit("sm_80"), &Packed::pack(&[7; 5000]));
        writer.finish().leak()
    }

    #[test]
    fn what_was_written_is_found() {
        let bundle = Bundle::parse(written()).unwrap();
        assert_eq!((bundle.version(), bundle.len()), (13000, 1));
        assert_eq!(bundle.sources().closure("a.cu").unwrap().source.1, "int a;");
        assert_eq!(bundle.image(&unit("sm_80")).unwrap().unwrap(), [7; 5000]);
        assert_eq!(bundle.image(&unit("sm_90a")).unwrap(), None);
    }

    #[test]
    fn a_cut_bundle_is_refused() {
        let bytes = written();
        for len in 0..bytes.len() {
            // An end between two entries is a bundle, only a shorter one.
            if let Ok(bundle) = Bundle::parse(&bytes[..len]) {
                assert!(bundle.is_empty(), "{len}");
            }
        }
        assert!(Bundle::parse(&bytes[..bytes.len() - 1]).is_err());
        assert!(Bundle::parse(b"something else").is_err());
    }
}
