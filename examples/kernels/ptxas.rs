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
