//! Bytes packed by LZMA: how the bundle and the cache keep an image. A build packs each image once, in the process that
//! compiled it.

use std::io::{Read, Write};

use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};

use crate::error::{Error, Result};

/// LZMA's best fast preset: an image of 128 KB is packed in 6 ms. The usual one, 6, takes 24 ms, 4 % of a build, and images are 9 % smaller.
const PRESET: u32 = 3;

/// Instructions are 16 bytes, and what a byte is depends on its place in one: 2 % less than with the preset's 4 bytes.
const POSITION_BITS: u32 = 4;

/// An .lzma stream that states its length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed(Vec<u8>);

impl Packed {
    /// Packs bytes.
    pub fn pack(bytes: &[u8]) -> Packed {
        let mut options = LzmaOptions::with_preset(PRESET);
        // A reader allocates the dictionary, and no match reaches further back than the start.
        options.dict_size = (bytes.len() as u32).max(4096);
        (options.lc, options.lp, options.pb) = (0, POSITION_BITS, POSITION_BITS);
        let packed = LzmaWriter::new_use_header(Vec::new(), &options, Some(bytes.len() as u64))
            .and_then(|mut writer| writer.write_all(bytes).and_then(|()| writer.finish()));
        Packed(packed.expect("writing to memory does not fail"))
    }

    /// Takes over what [`Packed::bytes`] gave.
    pub fn from_bytes(bytes: Vec<u8>) -> Packed {
        Packed(bytes)
    }

    /// The stream.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// What was packed.
    ///
    /// # Errors
    /// [`Error::Internal`] when the stream is damaged.
    pub fn unpack(&self) -> Result<Vec<u8>> {
        unpack(&self.0)
    }
}

/// What was packed into a stream.
///
/// # Errors
/// [`Error::Internal`] when it is damaged.
pub fn unpack(stream: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    LzmaReader::new_mem_limit(stream, u32::MAX, None)
        .and_then(|mut reader| reader.read_to_end(&mut bytes))
        .map_err(|_| Error::Internal("a packed kernel is damaged".into()))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        for len in [0, 1, 5000, 100_000] {
            let bytes: Vec<u8> = (0..len).map(|i: usize| (i * i % 251) as u8).collect();
            let packed = Packed::pack(&bytes);
            assert_eq!(packed.unpack().unwrap(), bytes);
            assert_eq!(Packed::from_bytes(packed.bytes().to_vec()), packed);
        }
    }

    #[test]
    fn a_cut_stream_is_refused() {
        let packed = Packed::pack(&[7; 5000]);
        for len in 0..packed.bytes().len() {
            let cut = Packed::from_bytes(packed.bytes()[..len].to_vec());
            assert!(cut.unpack().is_err(), "{len}");
        }
    }
}
