//! Attention over a cached context in bounded memory, and over several ranks: which tokens a rank holds (vLLM's decode
//! context parallelism), how many tokens a workspace holds, and how contexts are cut into chunks of it.

/// How the tokens of a sequence are dealt to ranks: `interleave` at a time, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    /// Their number, at least 1.
    pub world_size: u64,
    /// At least 1.
    pub interleave: u64,
}

impl Ranks {
    /// Tokens that are dealt before it is the first rank's turn again. One rank holds all tokens anyway.
    pub fn round(self) -> u64 {
        match self.world_size {
            1 => 1,
            _ => self.world_size * self.interleave,
        }
    }

    /// Tokens of a sequence of `length` that `rank` holds.
    pub fn local_length(self, length: u64, rank: u64) -> u64 {
        let rounds = length / (self.world_size * self.interleave);
        let rest = length - rounds * self.world_size * self.interleave;
        let own = rest.saturating_sub(rank * self.interleave);
        rounds * self.interleave + own.min(self.interleave)
    }

    /// As many tokens as the rank with the most holds of `length`.
    pub fn padded_length(self, length: u64) -> u64 {
        match self.world_size {
            1 => length,
            _ => length.div_ceil(self.round()) * self.interleave,
        }
    }
}

/// Tokens of a workspace for chunks of contexts, as vLLM sizes it: enough for eight longest sequences or for four pages
/// of every sequence, but no more than 65536, and at least a page of every sequence.
pub fn context_tokens(max_model_len: u64, max_num_seqs: u64, page_size: u64) -> u64 {
    let pages = max_num_seqs.saturating_mul(page_size);
    let wanted = (8 * max_model_len).max(pages.saturating_mul(4));
    wanted.min(65536).max(pages)
}

/// Contexts in equal chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkTables {
    /// Tokens of a chunk of one request, on all ranks: a whole number of pages and of [`Ranks::round`]s. So the chunks
    /// that ranks cut of their tokens are those of the sequence. (vLLM's are not where a page is no multiple of a
    /// round.)
    pub tokens: u64,
    /// Chunks of the longest context.
    pub count: u64,
}

impl ChunkTables {
    /// What each request with a context gets of a workspace. `None` where that is no whole page and round.
    pub fn new(
        context_lens: &[i32],
        workspace_tokens: u64,
        page_size: u64,
        ranks: Ranks,
    ) -> Option<ChunkTables> {
        let lens = context_lens.iter().map(|&len| len as u64);
        let (with_context, longest) = (
            lens.clone().filter(|&len| len > 0).count() as u64,
            lens.max().unwrap_or(0),
        );
        if with_context == 0 {
            return Some(ChunkTables {
                tokens: 0,
                count: 0,
            });
        }
        let unit = least_common_multiple(page_size, ranks.round());
        let tokens = workspace_tokens / with_context / unit * unit;
        (tokens > 0).then(|| ChunkTables {
            tokens,
            count: longest.div_ceil(tokens),
        })
    }

    /// Tokens of a context of `len` in chunk `chunk`.
    pub fn len(self, len: u64, chunk: u64) -> u64 {
        part(len, chunk, self.tokens)
    }

    /// Those of them that each rank holds, or one more than some hold.
    pub fn padded_len(self, len: u64, chunk: u64, ranks: Ranks) -> u64 {
        part(ranks.padded_length(len), chunk, self.local_tokens(ranks))
    }

    /// Tokens of a chunk on one rank.
    pub fn local_tokens(self, ranks: Ranks) -> u64 {
        self.tokens / ranks.world_size
    }
}

/// How much of `len` lies in piece `n` of so many tokens.
fn part(len: u64, n: u64, tokens: u64) -> u64 {
    len.saturating_sub(n * tokens).min(tokens)
}

/// Smallest workspace that gives every request with a context a whole page and round.
pub fn least_workspace(with_context: u64, page_size: u64, ranks: Ranks) -> u64 {
    with_context.saturating_mul(least_common_multiple(page_size, ranks.round()))
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranks(world_size: u64, interleave: u64) -> Ranks {
        Ranks {
            world_size,
            interleave,
        }
    }

    #[test]
    fn local_lengths() {
        let all = |length, world_size, interleave| -> Vec<u64> {
            let ranks = ranks(world_size, interleave);
            (0..world_size)
                .map(|rank| ranks.local_length(length, rank))
                .collect()
        };
        assert_eq!(all(10, 4, 1), [3, 3, 2, 2]);
        assert_eq!(all(10, 2, 4), [6, 4]);
        assert_eq!(all(17, 4, 2), [5, 4, 4, 4]);
        assert_eq!(all(1000, 8, 64), [128, 128, 128, 128, 128, 128, 128, 104]);
        assert_eq!(all(3, 4, 4), [3, 0, 0, 0]);
        assert_eq!(all(0, 3, 5), [0, 0, 0]);
    }

    #[test]
    fn workspaces() {
        assert_eq!(context_tokens(4096, 64, 16), 32768);
        assert_eq!(context_tokens(1024, 32, 16), 8192);
        assert_eq!(context_tokens(163_840, 256, 64), 65536);
        assert_eq!(context_tokens(32768, 2048, 64), 131_072);
    }

    fn chunk_lens(lens: &[i32], tokens: u64, page: u64, ranks: Ranks) -> Vec<Vec<u64>> {
        let chunks = ChunkTables::new(lens, tokens, page, ranks).unwrap();
        let of = |chunk| {
            lens.iter()
                .map(|&len| chunks.len(len as u64, chunk))
                .collect()
        };
        (0..chunks.count).map(of).collect()
    }

    #[test]
    fn chunks() {
        let one = ranks(1, 1);
        assert_eq!(
            chunk_lens(&[700, 0, 130, 1000], 1024, 64, one),
            [
                [320, 0, 130, 320],
                [320, 0, 0, 320],
                [60, 0, 0, 320],
                [0, 0, 0, 40]
            ]
        );
        let totals: Vec<u64> = chunk_lens(&[700, 0, 130, 1000], 512, 64, one)
            .iter()
            .map(|lens| lens.iter().sum())
            .collect();
        assert_eq!(totals, [384, 258, 256, 256, 256, 188, 128, 104]);
        assert_eq!(chunk_lens(&[0, 0], 64, 16, one), Vec::<Vec<u64>>::new());
        assert_eq!(ChunkTables::new(&[1, 1], 31, 16, one), None);
        assert_eq!(least_workspace(2, 16, one), 32);
    }

    #[test]
    fn chunks_of_ranks() {
        let lens = [40, 0, 21];
        for (interleave, padded) in [(1, [[16, 0, 11], [4, 0, 0]]), (8, [[16, 0, 16], [8, 0, 0]])] {
            let ranks = ranks(2, interleave);
            let chunks = ChunkTables::new(&lens, 64, 8, ranks).unwrap();
            assert_eq!((chunks.tokens, chunks.local_tokens(ranks)), (32, 16));
            for (chunk, padded) in (0..).zip(padded) {
                let is = lens.map(|len| chunks.padded_len(len as u64, chunk, ranks));
                assert_eq!(is, padded);
            }
        }
        // Where vLLM's chunk of 24 tokens gives 62 tokens instead of 48.
        let ranks = ranks(2, 8);
        let chunks = ChunkTables::new(&[40, 0, 30], 48, 8, ranks).unwrap();
        assert_eq!((chunks.tokens, chunks.count), (16, 3));
    }

    proptest! {
        /// The ranks' parts of every chunk add up to the chunk, and fit the workspace.
        #[test]
        fn what_ranks_hold_of_a_chunk_is_the_chunk(
            lens in prop::collection::vec(0i32..500, 0..6),
            page in 1u64..70, world_size in 1u64..9, interleave in 1u64..20, spare in 0u64..300,
        ) {
            let ranks = ranks(world_size, interleave);
            let with_context = lens.iter().filter(|&&len| len > 0).count() as u64;
            let workspace = least_workspace(with_context, page, ranks) + spare;
            let chunks = ChunkTables::new(&lens, workspace, page, ranks).unwrap();
            let mut seen = vec![0; lens.len()];
            for chunk in 0..chunks.count {
                let mut padded_total = 0;
                for (seen, &len) in seen.iter_mut().zip(&lens) {
                    let len = len as u64;
                    let padded = chunks.padded_len(len, chunk, ranks);
                    let held = |rank| {
                        let local = ranks.local_length(len, rank);
                        let start = chunk * chunks.local_tokens(ranks);
                        local.saturating_sub(start).min(padded)
                    };
                    let all: u64 = (0..world_size).map(held).sum();
                    prop_assert_eq!(all, chunks.len(len, chunk));
                    padded_total += padded;
                    *seen += all;
                }
                prop_assert!(padded_total * world_size <= workspace);
            }
            let lens: Vec<u64> = lens.iter().map(|&len| len as u64).collect();
            prop_assert_eq!(seen, lens);
        }
    }
}
