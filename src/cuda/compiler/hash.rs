//! FNV-1a with 128 bits: names content, and detects files that were cut or damaged. It is no defence
//! against somebody who wants two contents to collide; whoever can write to a user's cache folder has
//! better ways to harm that user.

const OFFSET: u128 = 0x6c62272e07bb014262b821756295c58d;
const PRIME: u128 = 0x0000000001000000000000000000013b;

/// A hash under way.
#[derive(Debug, Clone, Copy)]
pub struct Hash(u128);

impl Hash {
    /// The hash of nothing.
    pub fn new() -> Hash {
        Hash(OFFSET)
    }

    /// Adds bytes as they are.
    pub fn bytes(mut self, bytes: &[u8]) -> Hash {
        for &byte in bytes {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(PRIME);
        }
        self
    }

    /// Adds a field after its length, so that neighbouring fields cannot flow into each other.
    pub fn field(self, bytes: &[u8]) -> Hash {
        self.bytes(&(bytes.len() as u64).to_le_bytes()).bytes(bytes)
    }

    /// The hash so far.
    pub fn finish(self) -> u128 {
        self.0
    }
}

impl Default for Hash {
    fn default() -> Hash {
        Hash::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_published_vectors() {
        assert_eq!(Hash::new().finish(), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(
            Hash::new().bytes(b"a").finish(),
            0xd228cb696f1a8caf78912b704e4a8964
        );
        assert_eq!(
            Hash::new().bytes(b"foobar").finish(),
            0x343e1662793c64bf6f0d3597ba446f18
        );
    }

    #[test]
    fn fields_do_not_flow_into_each_other() {
        let hash = |a: &[u8], b: &[u8]| Hash::new().field(a).field(b).finish();
        assert_ne!(hash(b"ab", b"c"), hash(b"a", b"bc"));
    }
}
