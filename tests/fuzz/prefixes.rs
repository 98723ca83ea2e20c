//! What a fuzzed cascade states of shared prefixes: trees, and lists that are none.

use super::corrupt::Rng;
use folio::ffi::folio_shared_prefixes;

/// Bytes that a struct may claim beyond its own.
const LARGER: u32 = 8;

/// What a call gets.
#[repr(C)]
pub struct Stated {
    pub prefixes: folio_shared_prefixes,
    behind: [u8; LARGER as usize],
}

/// Stated prefixes; as many numbers in every array as are stated.
#[derive(Debug)]
pub struct Prefixes {
    struct_size: u32,
    flags: u32,
    common_prefix_len: u32,
    request_begin: Vec<i32>,
    request_end: Vec<i32>,
    kv_len: Vec<i32>,
}

impl Prefixes {
    /// Prefixes of some of so many requests, mostly those that may be stated.
    pub fn draw(rng: &mut Rng, requests: i32) -> Prefixes {
        let size = size_of::<folio_shared_prefixes>() as u32;
        let mut prefixes = Prefixes {
            struct_size: size,
            flags: 0,
            common_prefix_len: 0,
            request_begin: Vec::new(),
            request_end: Vec::new(),
            kv_len: Vec::new(),
        };
        match rng.one_in(3) {
            true => prefixes.common_prefix_len = rng.pick(&[1, 64, 300, 700, 1 << 20, u32::MAX]),
            false => prefixes.grow(rng, (0, requests), 0),
        }
        if rng.one_in(6) {
            prefixes.corrupt(rng, size);
        }
        prefixes
    }

    fn push(&mut self, (begin, end): (i32, i32), kv_len: i32) {
        self.request_begin.push(begin);
        self.request_end.push(end);
        self.kv_len.push(kv_len);
    }

    /// A prefix of these requests, and prefixes of its two parts.
    fn grow(&mut self, rng: &mut Rng, (begin, end): (i32, i32), around: i32) {
        if begin >= end || self.kv_len.len() > 16 {
            return;
        }
        let kv_len = around + 1 + rng.below(600) as i32;
        self.push((begin, end), kv_len);
        let middle = begin + rng.below((end - begin) as usize + 1) as i32;
        if (begin, end) != (begin, middle) && (begin, end) != (middle, end) {
            self.grow(rng, (begin, middle), kv_len);
            self.grow(rng, (middle, end), kv_len);
        }
    }

    fn corrupt(&mut self, rng: &mut Rng, size: u32) {
        let numbers = [-1, 0, 1, 2, 3, 100, i32::MAX, i32::MIN];
        match rng.below(6) {
            0 => self.struct_size = rng.pick(&[0, 7, size - 8, size + LARGER, u32::MAX]),
            1 => self.flags = 1 << rng.below(32),
            2 => self.common_prefix_len = rng.pick(&[1, u32::MAX]),
            what => {
                let column = match what {
                    3 => &mut self.request_begin,
                    4 => &mut self.request_end,
                    _ => &mut self.kv_len,
                };
                let at = rng.below(column.len().max(1));
                column
                    .get_mut(at)
                    .into_iter()
                    .for_each(|n| *n = rng.pick(&numbers));
            }
        }
    }

    /// The C struct, which points into this one, with the zeros behind it that a larger struct_size claims.
    pub fn stated(&self) -> Stated {
        let prefixes = folio_shared_prefixes {
            struct_size: self.struct_size,
            flags: self.flags,
            common_prefix_len: self.common_prefix_len,
            num_prefixes: self.kv_len.len() as u32,
            request_begin: self.request_begin.as_ptr(),
            request_end: self.request_end.as_ptr(),
            kv_len: self.kv_len.as_ptr(),
        };
        Stated {
            prefixes,
            behind: [0; LARGER as usize],
        }
    }
}
