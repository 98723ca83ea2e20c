//! Random copies of pages: what is copied, bit by bit, and that nothing else changes.

use super::door::Session;
use super::instance::for_each_index;
use super::memory::{Image, Memory, Resident, View};
use super::values::{mix, shuffled};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{CopyArgs, PagesToCopy};

/// A copy.
#[derive(Debug, Clone)]
pub struct Copying {
    pub dtype: DType,
    /// Pages of src and of dst; in place, of the one tensor there is.
    pub num_pages: [i64; 2],
    /// Extents of a page of k, and of one of v.
    pub k_page: [i64; 3],
    pub v_page: Option<[i64; 3]>,
    /// The first two dimensions of a page lie the other way round in memory.
    pub is_swapped: bool,
    pub is_in_place: bool,
    /// Pairs are int64.
    pub is_wide: bool,
    pub num_pairs: usize,
    /// Elements between pages of src and of dst, and before the first.
    pub gaps: [u32; 2],
    pub lead: u32,
    pub seed: u64,
}

/// Where the parts of a copy are.
#[derive(Clone, Copy)]
pub struct Places<'m> {
    pub src: &'m dyn Memory,
    pub dst: &'m dyn Memory,
    pub pairs: &'m dyn Memory,
}

impl<'m> Places<'m> {
    pub fn all(memory: &'m dyn Memory) -> Places<'m> {
        Places {
            src: memory,
            dst: memory,
            pairs: memory,
        }
    }
}

/// The two tensors of one kind of pages, or the one.
struct Side<'m> {
    src: Resident<'m>,
    dst: Option<Resident<'m>>,
}

impl Copying {
    fn side<'m>(&self, places: &Places<'m>, page: [i64; 3], seed: u64) -> Side<'m> {
        let image = |which: usize| {
            let [a, b, c] = page;
            let pages = self.num_pages[which];
            let swapped = if self.is_swapped { [b, a] } else { [a, b] };
            let shape = [pages, swapped[0], swapped[1], c];
            let gaps = [self.gaps[which], 0, 0, 0];
            let mut view = View::gapped(self.dtype, &shape, &gaps, self.lead);
            if self.is_swapped {
                view.shape.swap(1, 2);
                view.strides.swap(1, 2);
            }
            let shape = view.shape.clone();
            let mut image = Image::poisoned(view);
            // Any bits at all: numbers are not looked at.
            for_each_index(&shape, |at| {
                let start = mix(seed ^ which as u64);
                image.put(at, at.iter().fold(start, |hash, &i| mix(hash ^ i as u64)));
            });
            image
        };
        Side {
            src: Resident::new(places.src, image(0)),
            dst: (!self.is_in_place).then(|| Resident::new(places.dst, image(1))),
        }
    }

    /// Pairs that keep the rules, some of them skipped.
    pub fn pairs(&self) -> Vec<[i64; 2]> {
        let [src_pages, dst_pages] = self.num_pages.map(|pages| pages as usize);
        let targets: Vec<i32> = shuffled(self.seed, dst_pages);
        let (sources, targets) = match self.is_in_place {
            // A page is either read or written.
            true => {
                let (sources, targets) = targets.split_at(dst_pages / 2);
                (sources.to_vec(), targets.to_vec())
            }
            false => ((0..src_pages as i32).collect(), targets),
        };
        let count = self.num_pairs.min(targets.len());
        if sources.is_empty() {
            return Vec::new();
        }
        (0..count)
            .map(|n| {
                let hash = mix(self.seed ^ n as u64);
                let pair = [sources[(hash >> 8) as usize % sources.len()], targets[n]];
                match hash % 8 {
                    0 => [-1, pair[1]],
                    1 => [pair[0], -7],
                    _ => pair,
                }
                .map(i64::from)
            })
            .collect()
    }

    fn pairs_image(&self, pairs: &[[i64; 2]]) -> Image {
        let dtype = if self.is_wide { DType::I64 } else { DType::I32 };
        let bits = pairs.iter().flatten().map(|&page| page as u64);
        Image::of_bits(dtype, &[pairs.len() as i64, 2], bits)
    }

    /// Copies, and compares every bit of all tensors.
    pub fn check(&self, session: &dyn Session, places: &Places<'_>) -> Result<(), String> {
        self.check_pairs(session, places, &self.pairs(), &self.pairs())
    }

    /// The same with pairs of the caller's, of which only those of `valid` may be copied.
    pub fn check_pairs(
        &self,
        session: &dyn Session,
        places: &Places<'_>,
        pairs: &[[i64; 2]],
        valid: &[[i64; 2]],
    ) -> Result<(), String> {
        let k = self.side(places, self.k_page, self.seed);
        let v = self.v_page.map(|page| self.side(places, page, !self.seed));
        let pairs = Resident::new(places.pairs, self.pairs_image(pairs));
        let pages = |side: &Side<'_>| PagesToCopy {
            src: side.src.tensor(),
            dst: side.dst.as_ref().unwrap_or(&side.src).tensor(),
        };
        let input = CopyArgs {
            k: pages(&k),
            v: v.as_ref().map(pages),
            page_pairs: pairs.tensor(),
        };
        session
            .copy(&input, Stream::default())
            .map_err(|error| error.to_string())?;
        for (name, side) in [("k", Some(&k)), ("v", v.as_ref())] {
            let Some(side) = side else { continue };
            let dst = side.dst.as_ref().unwrap_or(&side.src);
            if dst.current() != copied(&side.src, dst, valid) {
                return Err(format!("{name}: other bits than those of the pairs"));
            }
            if side.dst.is_some() && !side.src.is_untouched() {
                return Err(format!("{name}: src was written"));
            }
        }
        Ok(())
    }
}

/// What dst is to be.
fn copied(src: &Resident<'_>, dst: &Resident<'_>, pairs: &[[i64; 2]]) -> Image {
    let mut want = dst.image().clone();
    for &[from, to] in pairs
        .iter()
        .filter(|pair| pair.iter().all(|&page| page >= 0))
    {
        let page = want.view.shape[1..].to_vec();
        for_each_index(&page, |at| {
            let bits = src.image().bits(&[&[from], at].concat());
            want.put(&[&[to], at].concat(), bits);
        });
    }
    want
}
