//! PyTorch's SDPA on the same shapes, where `python3` has it: gathered K and V, the group folded in by
//! `enable_gqa`. One line per case goes in and comes out.

use crate::Options;
use crate::cases::Case;
use folio::dtype::DType;
use std::collections::HashMap;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Microseconds by the case's name.
pub type Peers = HashMap<String, f64>;

/// Empty where there is no PyTorch.
pub fn measure(results: &[(Case, Duration)], options: &Options) -> Peers {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/cpu/torch_sdpa.py");
    let child = Command::new("python3")
        .args([
            script,
            &options.threads.to_string(),
            &options.rounds.to_string(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let Ok(mut child) = child else {
        return Peers::new();
    };
    if let Some(mut input) = child.stdin.take() {
        for (case, _) in results {
            // The script may have gone for want of PyTorch; then there is nobody to tell.
            let _ = writeln!(input, "{}", line(case));
        }
    }
    let output = child.wait_with_output().map(|output| output.stdout);
    let text = String::from_utf8(output.unwrap_or_default()).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (name, time) = line.rsplit_once('\t')?;
            Some((name.to_owned(), time.parse().ok()?))
        })
        .collect()
}

/// Name, type, batch, query rows, keys, and whether the caches stay the same; empty where SDPA has no
/// counterpart.
fn line(case: &Case) -> String {
    let Case::Attention(s) = case else {
        return String::new();
    };
    let dtype = match s.dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    format!(
        "{}\t{dtype}\t{}\t{}\t{}\t{}",
        case.name(),
        s.batch,
        s.qo_len,
        s.kv_len,
        u8::from(s.warm)
    )
}
