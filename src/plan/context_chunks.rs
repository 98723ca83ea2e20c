//! The chunks that a cached context is attended in, so that no more than a bounded number of its tokens is unpacked at
//! a time. Arithmetic only.
//!
//! The contexts of all requests are laid one after another and cut every `size` tokens: every chunk but the last is
//! full, whatever the lengths are. (vLLM gives every request with context an equal share of each chunk, which shorter
//! ones leave empty.) Where a context is cut does not change what it comes to but for the rounding of merges.

use crate::error::{Error, Result};
use std::ops::Range;

/// Tokens of a chunk where the caller does not say: vLLM's rule for its MLA backends, in tokens of the longest request,
/// and never less than a page for each request.
pub fn default_chunk_tokens(max_kv_len: u32, max_batch_size: u32, page_size: u32) -> u32 {
    /// 144 MiB of 576 16-bit elements.
    const MOST: u64 = 64 << 10;
    let pages = u64::from(max_batch_size) * u64::from(page_size);
    let wanted = (8 * u64::from(max_kv_len)).max(4 * pages).min(MOST);
    u32::try_from(wanted.max(pages)).unwrap_or(u32::MAX)
}

/// The most chunks that contexts of so many tokens together make.
pub fn most_chunks(max_context_tokens: u64, size: u32) -> usize {
    max_context_tokens.div_ceil(size.into()) as usize
}

/// The chunks of a batch's contexts.
#[derive(Debug, Clone, Default)]
pub struct ContextChunks {
    size: u32,
    /// Where each context starts among all, and where the last one ends.
    starts: Vec<u64>,
}

/// What of one request's context is in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First token of the context.
    pub start: u32,
    /// Tokens.
    pub len: u32,
}

impl ContextChunks {
    /// Room for batches of so many requests.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn for_batches(max_batch_size: usize, size: u32) -> Result<ContextChunks> {
        let mut chunks = ContextChunks {
            size,
            starts: Vec::new(),
        };
        let room = chunks.starts.try_reserve_exact(max_batch_size + 1);
        room.map_err(|_| {
            Error::OutOfMemory(format!(
                "max_batch_size: no memory for the contexts of {max_batch_size} requests"
            ))
        })?;
        chunks.starts.push(0);
        Ok(chunks)
    }

    /// Cuts other contexts. Allocates nothing within the room.
    pub fn cut(&mut self, context_lens: impl Iterator<Item = u32>) {
        self.starts.clear();
        self.starts.push(0);
        for len in context_lens {
            let end = self.total() + u64::from(len);
            self.starts.push(end);
        }
    }

    /// The number of contexts.
    pub fn num_requests(&self) -> usize {
        self.starts.len() - 1
    }

    /// Tokens of a full chunk.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Tokens of all contexts.
    pub fn total(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The number of chunks.
    pub fn count(&self) -> usize {
        most_chunks(self.total(), self.size)
    }

    /// Tokens of a chunk; 0 beyond the last one.
    pub fn tokens(&self, chunk: usize) -> u32 {
        let span = self.span(chunk);
        (span.end - span.start) as u32
    }

    /// What a chunk has of a request.
    pub fn piece(&self, chunk: usize, request: usize) -> Piece {
        let (first, end) = (self.starts[request], self.starts[request + 1]);
        let span = self.span(chunk);
        let start = span.start.clamp(first, end);
        Piece {
            start: (start - first) as u32,
            len: (span.end.clamp(first, end) - start) as u32,
        }
    }

    /// The requests from the first to the last of which a chunk has tokens.
    pub fn requests(&self, chunk: usize) -> Range<usize> {
        let span = self.span(chunk);
        if span.is_empty() {
            return 0..0;
        }
        // A context is in the chunk where it ends after the chunk's start and starts before its end.
        let ends = &self.starts[1..];
        let first = ends.partition_point(|&end| end <= span.start);
        let end = self.starts[..ends.len()].partition_point(|&start| start < span.end);
        first..end
    }

    /// Tokens of a chunk, counted over all contexts.
    fn span(&self, chunk: usize) -> Range<u64> {
        let (total, size) = (self.total(), u64::from(self.size));
        let start = (chunk as u64).saturating_mul(size).min(total);
        start..(start + size).min(total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(size: u32, lens: &[u32]) -> ContextChunks {
        let mut chunks = ContextChunks::for_batches(lens.len(), size).unwrap();
        chunks.cut(lens.iter().copied());
        chunks
    }

    fn lens_of(chunks: &ContextChunks, chunk: usize, requests: usize) -> Vec<u32> {
        (0..requests).map(|b| chunks.piece(chunk, b).len).collect()
    }

    /// The examples of vLLM's equal shares come to four chunks of 770, 640, 380 and 40 tokens, and to eight.
    #[test]
    fn chunks_are_full() {
        let lens = [700, 0, 130, 1000];
        let chunks = cut(1024, &lens);
        assert_eq!(chunks.count(), 2);
        assert_eq!(lens_of(&chunks, 0, 4), [700, 0, 130, 194]);
        assert_eq!(lens_of(&chunks, 1, 4), [0, 0, 0, 806]);
        assert_eq!(chunks.piece(1, 3).start, 194);
        assert_eq!((chunks.requests(0), chunks.requests(1)), (0..4, 3..4));
        assert_eq!(cut(512, &lens).count(), 4);
    }

    #[test]
    fn nothing_makes_no_chunk() {
        for lens in [&[][..], &[0, 0]] {
            let chunks = cut(16, lens);
            assert_eq!((chunks.count(), chunks.total()), (0, 0));
            assert_eq!((chunks.tokens(0), chunks.requests(0)), (0, 0..0));
        }
    }

    #[test]
    fn the_default_is_that_of_vllm() {
        for (max_kv_len, max_batch_size, page_size, tokens) in [
            (4096, 64, 16, 32768),
            (1024, 32, 16, 8192),
            (163_840, 256, 64, 65536),
            (32768, 2048, 64, 131_072),
        ] {
            let default = default_chunk_tokens(max_kv_len, max_batch_size, page_size);
            assert_eq!(default, tokens);
        }
    }

    proptest! {
        #[test]
        fn every_token_is_in_one_chunk(
            size in 1u32..300,
            lens in prop::collection::vec(prop_oneof![Just(0u32), 1u32..20, 1u32..2000], 0..12),
        ) {
            let chunks = cut(size, &lens);
            let mut next = vec![0; lens.len()];
            let mut total = 0;
            for chunk in 0..chunks.count() {
                let requests = chunks.requests(chunk);
                prop_assert!(!requests.is_empty());
                let mut tokens = 0;
                for (b, next) in next.iter_mut().enumerate() {
                    let piece = chunks.piece(chunk, b);
                    prop_assert!(piece.len == 0 || requests.contains(&b));
                    if piece.len > 0 {
                        prop_assert_eq!(piece.start, *next);
                    }
                    *next += piece.len;
                    tokens += piece.len;
                }
                for b in [requests.start, requests.end - 1] {
                    prop_assert!(chunks.piece(chunk, b).len > 0);
                }
                prop_assert_eq!(tokens, chunks.tokens(chunk));
                prop_assert!(tokens <= size && (tokens == size || chunk + 1 == chunks.count()));
                total += u64::from(tokens);
            }
            prop_assert_eq!(next, lens);
            prop_assert_eq!(total, chunks.total());
            prop_assert_eq!(chunks.tokens(chunks.count()), 0);
        }
    }
}
