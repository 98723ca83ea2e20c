//! The table, the JSON lines and the roofline picture.

use crate::cases::Case;
use crate::limits::Limits;
use crate::{Limit, torch::Peers};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

type Results = [(Case, Duration)];

pub fn print(limits: &Limits, results: &Results, peers: &Peers) {
    println!("this machine");
    println!(
        "  sequential read        {:>8.1} GB/s",
        limits.sequential / 1e9
    );
    println!("  random 4 KiB read      {:>8.1} GB/s", limits.random / 1e9);
    println!("  copy of 8 MiB          {:>8.1} GB/s", limits.copy / 1e9);
    println!("  fp32 FMA               {:>8.0} GFLOP/s", limits.fma / 1e9);
    match limits.amx {
        Some(rate) => println!("  AMX bf16, first level  {:>8.0} GFLOP/s", rate / 1e9),
        None => println!("  AMX bf16                   none; bf16 prefill is compared with FMA"),
    }
    println!(
        "{:<46} {:>9} {:>15} {:>7} {:>7} {:>10}",
        "workload", "µs", "rate", "share", "floor", "torch µs"
    );
    for (case, best) in results {
        let (rate, unit) = rate(case, *best);
        let share = share(limits, case, *best).map_or("".into(), |share| format!("{share:.2}"));
        let torch = peers.get(&case.name());
        println!(
            "{:<46} {:>9.1} {:>15} {:>7} {:>7} {:>10}",
            case.name(),
            best.as_secs_f64() * 1e6,
            format!("{rate:.1} {unit}"),
            share,
            case.floor(),
            torch.map_or("".into(), |us| format!("{us:.1}"))
        );
    }
}

fn rate(case: &Case, best: Duration) -> (f64, &'static str) {
    let rate = case.rate(best);
    match case.limit() {
        Limit::Read | Limit::Copy => (rate / 1e9, "GB/s"),
        Limit::Fma | Limit::Matrix => (rate / 1e9, "GFLOP/s"),
        Limit::Time => (rate, "µs"),
    }
}

/// Share of the limit; none for cases that are plain times.
fn share(limits: &Limits, case: &Case, best: Duration) -> Option<f64> {
    (case.limit() != Limit::Time).then(|| case.rate(best) / limits.value(case.limit()))
}

/// Writes `cpu.jsonl` and `cpu.svg`.
pub fn write(limits: &Limits, results: &Results, peers: &Peers) -> std::io::Result<()> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/bench");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("cpu.jsonl"), lines(limits, results, peers))?;
    std::fs::write(folder.join("cpu.svg"), roofline(limits, results))?;
    println!("written: {0}/cpu.jsonl and {0}/cpu.svg", folder.display());
    Ok(())
}

fn lines(limits: &Limits, results: &Results, peers: &Peers) -> String {
    let mut text = String::new();
    let amx = limits
        .amx
        .map_or("null".into(), |rate| format!("{rate:.4e}"));
    let _ = writeln!(
        text,
        r#"{{"limits":{{"read":{:.4e},"random_4k":{:.4e},"copy":{:.4e},"fma":{:.4e},"amx":{amx}}},"kernel":"{}"}}"#,
        limits.sequential,
        limits.random,
        limits.copy,
        limits.fma,
        folio::cpu::Isa::best().name()
    );
    let number = |value: Option<f64>| value.map_or("null".into(), |value| format!("{value:.4}"));
    for (case, best) in results {
        let _ = writeln!(
            text,
            r#"{{"case":"{}","us":{:.2},"rate":{:.4e},"share":{},"floor":{},"torch_us":{}}}"#,
            case.name(),
            best.as_secs_f64() * 1e6,
            case.rate(*best),
            number(share(limits, case, *best)),
            case.floor(),
            number(peers.get(&case.name()).copied())
        );
    }
    text
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const MARGIN: f64 = 60.0;
/// Operations per byte, and operations per second, at the ends of the axes.
const X: [f64; 2] = [0.25, 4096.0];
const Y: [f64; 2] = [1e9, 1e13];

fn x(intensity: f64) -> f64 {
    MARGIN + (intensity / X[0]).ln() / (X[1] / X[0]).ln() * (WIDTH - 2.0 * MARGIN)
}

fn y(rate: f64) -> f64 {
    HEIGHT - MARGIN - (rate / Y[0]).ln() / (Y[1] / Y[0]).ln() * (HEIGHT - 2.0 * MARGIN)
}

fn roofline(limits: &Limits, results: &Results) -> String {
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>"#
    );
    axes(&mut svg);
    roof(
        &mut svg,
        limits.sequential,
        limits.fma,
        "fp32 FMA",
        "#4472c4",
    );
    if let Some(amx) = limits.amx {
        roof(&mut svg, limits.sequential, amx, "AMX bf16", "#c0504d");
    }
    for (case, best) in results {
        if let Case::Attention(shape) = case {
            let rate = case.operations() / best.as_secs_f64();
            let (x, y) = (x(case.operations() / case.bytes()), y(rate));
            let colour = if shape.qo_len == 1 {
                "#2e7d32"
            } else {
                "#6a1b9a"
            };
            let _ = write!(
                svg,
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{colour}"><title>{}: {:.1} GFLOP/s</title></circle>"#,
                case.name(),
                rate / 1e9
            );
        }
    }
    svg.push_str("</svg>\n");
    svg
}

fn axes(svg: &mut String) {
    let (left, right, bottom) = (MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN);
    let _ = write!(
        svg,
        r#"<path d="M{left} {MARGIN}V{bottom}H{right}" fill="none" stroke="black"/><text x="{}" y="{}" text-anchor="middle">operations per byte of K and V</text><text x="{left}" y="{}">GFLOP/s</text>"#,
        WIDTH / 2.0,
        HEIGHT - 20.0,
        MARGIN - 14.0
    );
    for tick in [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0] {
        let at = x(tick);
        let _ = write!(
            svg,
            r#"<text x="{at:.1}" y="{}" text-anchor="middle">{tick}</text>"#,
            bottom + 16.0
        );
    }
    for tick in [1e9, 1e10, 1e11, 1e12, 1e13] {
        let at = y(tick);
        let _ = write!(
            svg,
            r#"<text x="{}" y="{at:.1}" text-anchor="end">{}</text>"#,
            left - 6.0,
            tick / 1e9
        );
    }
}

/// Bandwidth up to the ridge, then the compute limit.
fn roof(svg: &mut String, bandwidth: f64, rate: f64, name: &str, colour: &str) {
    let ridge = rate / bandwidth;
    let _ = write!(
        svg,
        r#"<path d="M{:.1} {:.1}L{:.1} {:.1}H{:.1}" fill="none" stroke="{colour}" stroke-width="2"/><text x="{:.1}" y="{:.1}" fill="{colour}" text-anchor="end">{name}, {:.0} GFLOP/s</text>"#,
        x(X[0]),
        y(X[0] * bandwidth),
        x(ridge),
        y(rate),
        WIDTH - MARGIN,
        WIDTH - MARGIN,
        y(rate) - 6.0,
        rate / 1e9
    );
}
