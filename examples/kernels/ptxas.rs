//! What `ptxas -v` says about one kernel. Its lines look like this:
//!
//!     ptxas info    : Compiling entry function 'k' for 'sm_90a'
//!     ptxas info    : Function properties for k
//!     ptxas         .     160 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
//!     ptxas info    : Used 32 registers, used 1 barriers, 160 bytes cumulative stack size, 256 bytes smem

/// The resources of one kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory.
    pub static_shared: u32,
    /// Bytes of spill stores and loads.
    pub spills: u32,
    /// Bytes of local memory of a thread.
    pub stack: u32,
}

/// Finds a kernel in a log.
pub fn parse(log: &str, symbol: &str) -> Result<Kernel, String> {
    let entry = format!("Compiling entry function '{symbol}'");
    let start = log
        .find(&entry)
        .ok_or_else(|| format!("ptxas does not mention {symbol}"))?;
    let section = &log[start..];
    let number = |unit: &str| {
        number_before(section, unit).ok_or_else(|| format!("ptxas tells no{unit} of {symbol}"))
    };
    Ok(Kernel {
        registers: number_after(section, "Used ")
            .ok_or_else(|| format!("ptxas tells no registers of {symbol}"))?,
        // ptxas leaves out what is zero; the line ends the section of its kernel.
        static_shared: section
            .lines()
            .find(|line| line.contains("Used "))
            .and_then(|line| number_before(line, " bytes smem"))
            .unwrap_or(0),
        spills: number(" bytes spill stores")? + number(" bytes spill loads")?,
        stack: number(" bytes stack frame")?,
    })
}

/// The first line that announces lost performance.
pub fn lost_performance(log: &str) -> Option<&str> {
    log.lines()
        .find(|line| line.contains("Potential Performance Loss") || line.contains("serializ"))
}

fn number_before(text: &str, unit: &str) -> Option<u32> {
    let head = &text[..text.find(unit)?];
    let digits = head
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |end| end + 1);
    head[digits..].parse().ok()
}

fn number_after(text: &str, word: &str) -> Option<u32> {
    let tail = &text[text.find(word)? + word.len()..];
    tail[..tail.find(|c: char| !c.is_ascii_digit())?]
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 4 registers, used 0 barriers
ptxas info    : Compile time = 8.328 ms
ptxas info    : Compiling entry function 'ab' for 'sm_80'
ptxas info    : Function properties for ab
ptxas         .     160 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 160 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compile time = 12.260 ms";

    #[test]
    fn kernels_of_one_log_are_told_apart() {
        let a = Kernel {
            registers: 4,
            static_shared: 0,
            spills: 0,
            stack: 0,
        };
        let ab = Kernel {
            registers: 255,
            static_shared: 4096,
            spills: 40,
            stack: 160,
        };
        assert_eq!(parse(LOG, "a"), Ok(a));
        assert_eq!(parse(LOG, "ab"), Ok(ab));
        assert!(parse(LOG, "b").is_err());
        assert!(parse("", "a").is_err());
    }

    #[test]
    fn lost_performance_is_found() {
        assert_eq!(lost_performance(LOG), None);
        let line = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are \
                    serialized due to insufficient register resources";
        assert_eq!(lost_performance(&format!("{LOG}\n{line}\n")), Some(line));
    }
}
