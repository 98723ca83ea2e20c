//! A set of CPUs, by the numbers of the system.

use crate::error::{Error, Result};
use std::fmt;

/// CPUs that Linux can be built for; the largest machines in use have a fourth of it.
const MOST_CPUS: usize = 8192;

/// CPUs by the numbers that `taskset -c` and `/proc/self/status` use. Empty by default.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CpuSet([u64; MOST_CPUS / 64]);

impl CpuSet {
    /// The CPUs of a list.
    ///
    /// # Errors
    /// `InvalidArgument` for a list that is empty, or names a CPU twice or one that no system has.
    pub fn of(cpus: &[u32]) -> Result<CpuSet> {
        if cpus.is_empty() {
            return Err(Error::InvalidArgument(
                "num_cpus: 0 is not accepted with cpus; 1 or more are".into(),
            ));
        }
        let mut set = CpuSet::default();
        for (i, &cpu) in cpus.iter().enumerate() {
            if cpu as usize >= MOST_CPUS {
                return Err(Error::InvalidArgument(format!(
                    "cpus[{i}]: {cpu} is not accepted; 0 to {} are",
                    MOST_CPUS - 1
                )));
            }
            if set.contains(cpu) {
                return Err(Error::InvalidArgument(format!(
                    "cpus[{i}]: {cpu} is not accepted a second time; each CPU is accepted once"
                )));
            }
            set.0[cpu as usize / 64] |= 1 << (cpu % 64);
        }
        Ok(set)
    }

    /// Every CPU that a system can have.
    pub fn all() -> CpuSet {
        CpuSet([u64::MAX; MOST_CPUS / 64])
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether this CPU is one of them.
    pub fn contains(&self, cpu: u32) -> bool {
        let word = self.0.get(cpu as usize / 64).copied().unwrap_or(0);
        word >> (cpu % 64) & 1 != 0
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        (0..MOST_CPUS as u32).filter(|&cpu| self.contains(cpu))
    }

    /// Those of either set.
    pub fn with(&self, other: &CpuSet) -> CpuSet {
        CpuSet(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// CPU `n` is bit `n % 64` of word `n / 64`, which is what the system calls take.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// As [`CpuSet::words`], to be filled in.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }
}

impl Default for CpuSet {
    fn default() -> CpuSet {
        CpuSet([0; MOST_CPUS / 64])
    }
}

/// Ranges, as in `/proc/self/status`: `0-3,8`.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let starts = self
            .iter()
            .filter(|&cpu| cpu == 0 || !self.contains(cpu - 1));
        for (i, start) in starts.enumerate() {
            let end = (start..).take_while(|&cpu| self.contains(cpu)).last();
            let end = end.unwrap_or(start);
            let comma = if i == 0 { "" } else { "," };
            match end == start {
                true => write!(f, "{comma}{start}")?,
                false => write!(f, "{comma}{start}-{end}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_written_as_ranges() {
        for (cpus, text) in [
            (&[0][..], "0"),
            (&[3, 1, 2], "1-3"),
            (&[64, 0, 63, 2, 8191], "0,2,63-64,8191"),
        ] {
            let set = CpuSet::of(cpus).unwrap();
            assert_eq!((set.to_string().as_str(), set.len()), (text, cpus.len()));
            assert!(cpus.iter().all(|&cpu| set.contains(cpu)));
        }
        assert_eq!(CpuSet::all().to_string(), "0-8191");
        assert!(CpuSet::default().is_empty() && CpuSet::default().to_string().is_empty());
        assert!(!CpuSet::all().contains(8192) && !CpuSet::all().contains(u32::MAX));
    }

    #[test]
    fn sets_are_united() {
        let [a, b] = [&[0, 5][..], &[5, 70]].map(|cpus| CpuSet::of(cpus).unwrap());
        assert_eq!(a.with(&b), CpuSet::of(&[0, 5, 70]).unwrap());
    }

    #[test]
    fn lists_that_are_no_sets_are_refused() {
        for (cpus, words) in [
            (&[][..], ["num_cpus", "0"]),
            (&[4, 8192], ["cpus[1]", "8192"]),
            (&[u32::MAX], ["cpus[0]", "4294967295"]),
            (&[1, 7, 1], ["cpus[2]", "1"]),
        ] {
            let Err(Error::InvalidArgument(message)) = CpuSet::of(cpus) else {
                panic!("{cpus:?} was accepted");
            };
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
    }
}
