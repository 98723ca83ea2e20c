"""Pictures of results/*.jsonl, the figures of record: nothing is measured or made up here.

    pip install matplotlib==3.11.2
    python benches/gpu/plot.py [folder of the results]

`make pictures` does both in a virtual environment. The SVGs are written to the folder that the results are in.
"""

import json
import math
import pathlib
import re
import sys

import matplotlib.ticker
from matplotlib.text import Text
from matplotlib.transforms import Bbox

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from style import COLOURS, INK, MUTED, NAMES, PAPER, horizontal_grid, legend, plt, save  # noqa: E402

MACHINE = "one H200, bf16, pages of 16 tokens"


def load(folder, name):
    """The limits of a run and its rows, or None where it was not recorded."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        return None
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return entries[0], entries[1:]


# --- What a row is called, and how fast it is -----------------------------------------------------


def short(number):
    """4096 as 4k."""
    number = int(number)
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def properties(row):
    """`bs=64 kv=8192 full` as {"bs": "64", "kv": "8192", "full": True}."""
    pairs = (word.partition("=") for word in row["name"].split(": ")[-1].split())
    return {name: value if equals else True for name, equals, value in pairs}


def label(row):
    """Two lines: requests × tokens, and what is not 32/8 heads of 128, causal and in pages."""
    has = properties(row)
    q, kv = has.get("qlen", "1"), has["kv"]
    size = f"{has['bs']} × {short(kv)}" if q in ("1", kv) else f"{has['bs']} × {short(q)}\non {short(kv)}"
    heads = "" if (has.get("hq"), has.get("hk")) == ("32", "8") else f"{has['hq']}/{has['hk']}"
    dims = "" if has.get("d") == "128" else f"d{has['d']}" + (f"/{has['dv']}" if "dv" in has else "")
    rest = [word for word in (heads, dims, "full" if "full" in has else "", "ragged" if "ragged" in has else "") if word]
    return "\n".join([size, *rest])


def teraflops(row, us):
    return row["flops"] / us / 1e6


def terabytes(row, us):
    return row["kv_bytes"] / us / 1e6


def families(rows):
    """Rows of the table by family, in the order of the picture."""
    is_fp8 = [row for row in rows if row["kind"] == "decode" and "fp8" in row["name"]]
    decode = [row for row in rows if row["kind"] == "decode" and row not in is_fp8]
    prefill = [row for row in rows if row["kind"] == "prefill"]
    chunked = [row for row in prefill if properties(row)["qlen"] != properties(row)["kv"]]
    return {"decode": decode, "fp8": is_fp8, "prefill": [row for row in prefill if row not in chunked], "chunked": chunked}


# --- Bars beside one another ----------------------------------------------------------------------


def bars(axes, rows, rate, names, labels):
    """A group of bars for each row; a peer without such a kernel leaves no gap. Folio's have their values in them, or
    above them where they are low."""
    heights = []
    for place, row in enumerate(rows):
        there = [name for name in names if name in row["us"]]
        width = min(0.8 / len(there), 0.26)
        for number, name in enumerate(there):
            x = place + (number - (len(there) - 1) / 2) * width
            height = rate(row, row["us"][name])
            axes.bar(x, height, width * 0.92, color=COLOURS[name])
            if name == "folio":
                heights.append((x, height))
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    for x, height in heights:
        low = height < 0.15 * axes.get_ylim()[1]
        axes.annotate(f"{height:.2f}" if height < 10 else f"{height:.0f}", (x, height), xytext=(0, 3 if low else -3),
                      textcoords="offset points", fontsize=7, rotation=90, ha="center", va="bottom" if low else "top",
                      color=INK if low else "white")
    horizontal_grid(axes)


def limit_line(axes, value, text):
    """A limit of the machine, named at its left end, where bars are low."""
    axes.axhline(value, color=MUTED, linewidth=1.1, linestyle=(0, (4, 3)), zorder=0.5)
    axes.annotate(text, (0, value), xycoords=("axes fraction", "data"), xytext=(2, 4), textcoords="offset points",
                  fontsize=8, color=MUTED)
    axes.set_ylim(0, max(axes.get_ylim()[1], value * 1.1))


def bytes_limit(axes, limits):
    limit_line(axes, limits["copy_bytes_per_s"] / 1e12, f"a copy, read and written: {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s")


def flops_limit(axes, limits):
    limit_line(axes, limits["bf16_flops"] / 1e12, f"matrix product of 8192³: {limits['bf16_flops'] / 1e12:.0f} TFLOP/s")


def peers_picture(folder):
    limits, rows = load(folder, "results")
    names = [name for name in ("folio", "fa3", "flashinfer", "cudnn", "fa2", "triton") if any(name in row["us"] for row in rows)]
    family = families(rows)
    figure = plt.figure(figsize=(10.4, 9.6), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1, 1, 1), width_ratios=(3, 3))
    panels = {"decode": grid[0, :], "prefill": grid[1, :], "fp8": grid[2, 0], "chunked": grid[2, 1]}
    titles = {
        "decode": "Decode: requests × keys",
        "prefill": "Prefill, causal unless said: requests × tokens",
        "fp8": "Decode over an fp8 cache",
        "chunked": "Chunked prefill: new tokens on keys",
    }
    for name, place in panels.items():
        axes = figure.add_subplot(place)
        decodes = name in ("decode", "fp8")
        bars(axes, family[name], terabytes if decodes else teraflops, names, map(label, family[name]))
        axes.set_title(titles[name])
        axes.set_ylabel("TB/s of keys and values" if decodes else "TFLOP/s")
        bytes_limit(axes, limits) if decodes else flops_limit(axes, limits)
    legend(figure, names)
    save(figure, folder / "peers.svg", f"Folio beside its peers: rates of decode and prefill on {MACHINE}; higher is better")


def models_picture(folder):
    """Rates by what a server asks for; a model's name is on each bar's group."""
    recorded = load(folder, "models")
    if recorded is None:
        return
    limits, rows = recorded
    names = [name for name in ("folio", "fa3", "flashinfer", "cudnn", "fa2", "triton") if any(name in row["us"] for row in rows)]
    work = {"decode": [], "prefill": [], "verify": [], "mixed": []}
    for row in rows:
        if row["page"] == 16:
            work[row["kind"]].append(row)
    work["verify"] += work.pop("mixed")
    work = {kind: rows for kind, rows in work.items() if rows}
    titles = {
        "decode": "Decode of 64 requests",
        "prefill": "Prefill of 4 × 2k tokens (Whisper's encoder: 8 × 1500)",
        "verify": "Verify: several tokens for each request; mixed: a chunk of 512 tokens beside 31 decodes",
    }
    figure, panels = plt.subplots(len(work), figsize=(10.4, 3.9 * len(work)), layout="constrained", squeeze=False)
    for (kind, rows), axes in zip(work.items(), panels[:, 0]):
        decodes = kind != "prefill"
        bars(axes, rows, terabytes if decodes else teraflops, names, [layer_label(row) for row in rows])
        axes.set_title(titles[kind])
        axes.set_ylabel("TB/s of keys and values" if decodes else "TFLOP/s")
        bytes_limit(axes, limits) if decodes else flops_limit(axes, limits)
        plt.setp(axes.get_xticklabels(), rotation=35, ha="right", rotation_mode="anchor")
    legend(figure, names)
    save(figure, folder / "models.svg", f"Attention layers of models: Folio beside its peers on {MACHINE}; higher is better")


def layer_label(row):
    has = properties(row)
    extra = {"verify": f", {has.get('qlen')} rows", "mixed": ", mixed"}.get(row["kind"], "")
    return f"{row['model']}, d{has['d']}{extra}"


def mla_picture(folder):
    _, rows = load(folder, "mla")
    names = [name for name in ("folio", "flashmla", "flashinfer", "fa3") if any(name in row["us"] for row in rows)]
    rows = [row for row in rows if len(row["us"]) > 1]
    figure, panels = plt.subplots(2, figsize=(10.4, 6.6), layout="constrained")
    few = [row for row in rows if int(properties(row)["heads"]) < 128]
    many = [row for row in rows if row not in few]
    for axes, part, rate, unit, title in (
        (panels[0], few, terabytes, "TB/s of records", "Absorbed MLA, 8 to 64 heads: requests × keys"),
        (panels[1], many, teraflops, "TFLOP/s", "Absorbed MLA, 128 heads: requests × keys"),
    ):
        bars(axes, part, rate, names, map(mla_label, part))
        axes.set_title(title)
        axes.set_ylabel(unit)
    legend(figure, names)
    save(figure, folder / "mla.svg", "Absorbed MLA: Folio beside FlashMLA and FlashAttention-3 on one H200; higher is better")


def mla_label(row):
    has = properties(row)
    keys = "\n107 to 32k" if has["kv"] == "107..31951" else short(has["kv"])
    rest = [f"page {has['page']}" if "page" in has else "", f"{has['qlen']} tokens" if "qlen" in has else ""]
    heads = [f"{has['heads']} heads"] if has["heads"] != "128" else []
    return "\n".join([f"{has['bs']} × {keys}", *heads, *filter(None, rest)])


# --- The roofline -------------------------------------------------------------------------------


MARKERS = {"decode": ("o", COLOURS["folio"]), "fp8": ("s", COLOURS["flashinfer"]), "prefill": ("^", COLOURS["fa3"]),
           "chunked": ("D", COLOURS["cudnn"])}


def roofline_picture(folder):
    """One roof in two windows: where decode is, and where prefill is, which is a tenth of a decade high."""
    limits, rows = load(folder, "results")
    family = families([row for row in rows if "flops" in row])
    bandwidth, peak = limits["copy_bytes_per_s"], limits["bf16_flops"]
    figure, (memory, matrix) = plt.subplots(1, 2, figsize=(10.4, 6.2), layout="constrained", width_ratios=(1, 1.15))
    memory.set(xscale="log", yscale="log", xlim=(0.6, 40), ylim=(1e12, 8e13), title="Decode, under the memory's roof")
    matrix.set(xscale="log", xlim=(330, 160000), ylim=(450e12, 850e12), title="Prefill, under the matrix unit's roof")
    roof = [0.5, 1, 2, 4, 8, 16, 32, peak / bandwidth, 400, 1000, 3000, 10000, 30000, 100000, 200000]
    for axes in (memory, matrix):
        axes.plot(roof, [min(x * bandwidth, peak) for x in roof], color=INK, linewidth=1.6)
        axes.set_xlabel("FLOP per byte of keys and values, each read once")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y / 1e12:g}"))
        axes.grid(which="major")
        axes.minorticks_off()
    memory.set_xticks([1, 2, 4, 8, 16, 32])
    memory.set_yticks([1e12, 2e12, 5e12, 1e13, 2e13, 5e13])
    memory.set_ylabel("TFLOP/s")
    for axes, names in ((memory, ("decode", "fp8")), (matrix, ("prefill", "chunked"))):
        points = [point for name in names for point in plotted(axes, family[name], name)]
        axes.legend(loc="lower right", title="Folio", alignment="left")
        figure.canvas.draw()
        name_points(figure, axes, points)
    slope = slope_of_one(memory)
    memory.annotate(f"memory: {bandwidth / 1e12:.2f} TB/s, copied", (0.72, 0.72 * bandwidth), xytext=(-7, 8),
                    textcoords="offset points", rotation=slope, rotation_mode="anchor")
    matrix.annotate(f"matrix unit: {peak / 1e12:.0f} TFLOP/s, product of 8192³", (330, peak), xytext=(4, 5),
                    textcoords="offset points")
    save(figure, folder / "roofline.svg", f"Roofline of Folio's attention kernels on {MACHINE}")


def plotted(axes, rows, family):
    """Draws the points of a family; answers them with their names."""
    marker, colour = MARKERS[family]
    points = [(row["flops"] / row["kv_bytes"], row["flops"] / row["us"]["folio"] * 1e6) for row in rows]
    axes.plot(*zip(*points), marker, color=colour, markersize=6.5, markeredgecolor=PAPER, markeredgewidth=0.6, label=family)
    return [(point, label(row).replace("16/16\nd192", "d192").replace("\n", " ")) for point, row in zip(points, rows)]


def slope_of_one(axes):
    """Degrees of a line of slope one in the picture."""
    (x0, y0), (x1, y1) = axes.transData.transform([(1, 1e12), (10, 1e13)])
    return math.degrees(math.atan2(y1 - y0, x1 - x0))


def name_points(figure, axes, points):
    """Names beside their points, each in the nearest place where it covers no point, no other name and not the roof."""
    renderer = figure.canvas.get_renderer()
    inside, size = axes.get_window_extent(renderer), 7 * figure.dpi / 72
    roof = axes.lines[0].get_path().interpolated(400).transformed(axes.transData).vertices
    spots = [*roof, *(axes.transData.transform(at) for at, _ in points)]
    taken = [Bbox.from_bounds(x - size / 2, y - size / 2, size, size) for x, y in spots]
    taken.append(axes.get_legend().get_window_extent(renderer))
    rises = [rise * sign for rise in range(0, 90, 3) for sign in (1, -1)]
    places = sorted(((side, rise) for side in (1, -1) for rise in rises), key=lambda place: abs(place[1]) + 6 * (place[0] < 0))
    # From the top, and in a column of points no name above that of a higher point: lines to them do not cross.
    lowest = {}
    for at, text in sorted(points, key=lambda point: -point[0][1]):
        column = round(2 * math.log2(at[0]))
        for side, rise in places:
            line = dict(arrowstyle="-", color=MUTED, linewidth=0.5, shrinkA=0, shrinkB=3, relpos=(side < 0, 0.5))
            line = line if abs(rise) > 3 else None
            name = axes.annotate(text, at, xytext=(side * (7 if line is None else 20), rise), textcoords="offset points",
                                 ha="left" if side > 0 else "right", va="center", fontsize=7.5, arrowprops=line)
            name.update_positions(renderer)
            box = Text.get_window_extent(name, renderer)
            free = not any(box.overlaps(other) for other in taken) and inside.x0 < box.x0 and box.x1 < inside.x1
            if free and (side < 0 or box.y1 <= lowest.get(column, math.inf)):
                taken.append(box)
                if side > 0:
                    lowest[column] = box.y0
                break
            name.remove()
        else:
            raise RuntimeError(f"no place for the name {text}")


# --- Host times ---------------------------------------------------------------------------------


def host_picture(folder):
    _, rows = load(folder, "results")
    figure, axes = plt.subplots(figsize=(10.4, 4.2), layout="constrained")
    kinds = {"plan": ("plan, once per step", "-", "o"), "run_host": ("run, once per layer", (0, (4, 2)), "s")}
    sizes = [int(properties(row)["bs"]) for row in rows if row["kind"] == "plan"]
    points = []
    for kind, (name, line, marker) in kinds.items():
        of_kind = [row for row in rows if row["kind"] == kind]
        for library in ("folio", "flashinfer"):
            times = [row["us"][library] for row in of_kind]
            points += enumerate(times)
            axes.plot(range(len(times)), times, marker=marker, linestyle=line, color=COLOURS[library], linewidth=2)
            axes.annotate(f"{NAMES[library]}: {name}", (len(times) - 1, times[-1]), xytext=(14, 0), va="center",
                          textcoords="offset points", color=COLOURS[library], fontsize=9, annotation_clip=False)
    for place, us in points:
        # Above, unless the next point is there.
        crowded = any(there == place and us < other < 2 * us for there, other in points)
        axes.annotate(f"{us:.0f}" if us >= 10 else f"{us:.1f}", (place, us), xytext=(0, -8 if crowded else 7), fontsize=8,
                      textcoords="offset points", ha="center", va="top" if crowded else "bottom")
    axes.set(yscale="log", ylim=(2, 12000), xlim=(-0.3, len(sizes) + 0.15))
    axes.set_xticks(range(len(sizes)), [f"{size} request{'s' if size > 1 else ''}" for size in sizes])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda us, _: f"{us:g} µs" if us < 1000 else f"{us / 1000:g} ms"))
    axes.minorticks_off()
    horizontal_grid(axes)
    axes.set_title("Time on the host: decode of up to 2k keys a request (FlashInfer from Python, Folio from C)")
    save(figure, folder / "host.svg", "Host times of plan and run: Folio beside FlashInfer, logarithmic; lower is better")


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results"
    for picture in (peers_picture, models_picture, mla_picture, roofline_picture, host_picture):
        picture(folder)


if __name__ == "__main__":
    main()
