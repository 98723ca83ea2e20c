"""A roofline as SVG: FLOP per byte against FLOP/s, both logarithmic, one dot per attention row."""

import math

WIDTH, HEIGHT, MARGIN = 900, 560, 70
X_RANGE, Y_RANGE = (0.5, 20000.0), (1e11, 2e15)
COLOURS = {"decode": "#1f6feb", "prefill": "#d1242f"}


def x_of(intensity):
    low, high = map(math.log, X_RANGE)
    return MARGIN + (math.log(intensity) - low) / (high - low) * (WIDTH - 2 * MARGIN)


def y_of(rate):
    low, high = map(math.log, Y_RANGE)
    return HEIGHT - MARGIN - (math.log(rate) - low) / (high - low) * (HEIGHT - 2 * MARGIN)


def picture(results, ceilings):
    bandwidth, peak = ceilings["copy_bytes_per_s"], ceilings["bf16_flops"]
    ridge = peak / bandwidth
    roof = [(X_RANGE[0], X_RANGE[0] * bandwidth), (ridge, peak), (X_RANGE[1], peak)]
    points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in roof)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<polyline points="{points}" fill="none" stroke="#57606a" stroke-width="2"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 20}" text-anchor="middle">FLOP per byte of K and V</text>',
        f'<text x="20" y="{HEIGHT / 2}" transform="rotate(-90 20 {HEIGHT / 2})" text-anchor="middle">FLOP/s</text>',
        f'<text x="{x_of(ridge):.0f}" y="{y_of(peak) - 8:.0f}">{peak / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s copied</text>',
    ]
    for result in results:
        if "flops" in result:
            rate = result["flops"] / result["us"]["folio"] * 1e6
            x, y = x_of(result["flops"] / result["kv_bytes"]), y_of(rate)
            title = f"{result['kind']} {result['name']}: {rate / 1e12:.1f} TFLOP/s"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[result["kind"]]}"><title>{title}</title></circle>')
    return "\n".join(parts + ["</svg>", ""])
