"""A picture of the table of NOTES.md, the figures of record: nothing is measured or made up here.

    pip install matplotlib==3.11.2
    python benches/cpu/plot.py [folder for the picture]

`make pictures` does both in a virtual environment.
"""

import pathlib
import re
import sys

import matplotlib.lines
import matplotlib.patches

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from style import INK, horizontal_grid, plt, save  # noqa: E402

# Columns of the table, behind the workload and its floor; those of one instruction set are of one hue.
MACHINES = {"Emerald Rapids (AMX)": "#2f81f7", "Granite Rapids (AMX)": "#79b8ff", "Zen 5 (AVX-512)": "#e08a00",
            "Zen 4 (AVX-512)": "#f2c069"}

# Panels: title, and for each row of the table how it begins and what its parts are called.
PANELS = (
    ("Decode of 8 × 2k, share of the sequential read rate", (
        ("decode 8 × 2k, page 16, ", ("page 16\nbf16", "page 16\nfp16", "page 16\nfp32")),
        ("decode 8 × 2k, page 128", ("page 128\nbf16", "page 128\nfp16", "page 128\nfp32")),
    )),
    ("Append, share of a copy", (("append 2048 tokens", ("bf16", "fp32")),)),
    ("Prefill of 2k causal, and of 256 on 4k: share of the FMA rate; bf16 on AMX: of the AMX rate", (
        ("prefill bf16", ("2k\nbf16", "256 on 4k\nbf16")),
        ("prefill fp16", ("2k\nfp16", "256 on 4k\nfp16")),
        ("prefill fp32", ("2k\nfp32", "256 on 4k\nfp32")),
    )),
)


def table():
    """Rows of the first table under "Numbers", as lists of cells."""
    paragraphs = (HERE / "NOTES.md").read_text().partition("## Numbers")[2].split("\n\n")
    lines = next(paragraph for paragraph in paragraphs if paragraph.startswith("| ")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def ranges(cell):
    """`**0.24–0.35 / 0.21–0.34** of 3.0 TFLOP/s` as [(0.24, 0.35), (0.21, 0.34)]."""
    numbers = re.split(" of |,|;", cell.replace("*", ""))[0]
    parts = [[float(number) for number in part.split("–")] for part in numbers.split("/")]
    return [(part[0], part[-1]) for part in parts]


def draw(axes, rows, groups):
    """A group for each part of each row; a bar for each machine, from its lowest run to its highest."""
    names, width = [], 0.19
    for begins, parts in groups:
        cells = next(row for row in rows if row[0].startswith(begins))
        floor = float(cells[1].split()[0])
        for number, name in enumerate(parts):
            place = len(names)
            for machine, (colour, cell) in enumerate(zip(MACHINES.values(), cells[2:])):
                low, high = ranges(cell)[number]
                # A single figure is a line.
                axes.bar(place + (machine - 1.5) * width, max(high - low, 0.012), width * 0.86, bottom=low, color=colour)
            axes.plot([place - 0.42, place + 0.42], [floor, floor], color=INK, linewidth=1.3)
            names.append(name)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, None)
    axes.set_ylabel("share")
    horizontal_grid(axes)


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    figure = plt.figure(figsize=(10.4, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 1))
    rows = table()
    for (title, groups), place in zip(PANELS, (grid[0, 0], grid[0, 1], grid[1, :])):
        axes = figure.add_subplot(place)
        draw(axes, rows, groups)
        axes.set_title(title)
    handles = [matplotlib.patches.Patch(color=colour, label=machine) for machine, colour in MACHINES.items()]
    handles.append(matplotlib.lines.Line2D([], [], color=INK, linewidth=1.3, label="the share aimed at"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.1, columnspacing=1.6)
    save(figure, folder / "shares.svg", "CPU: shares of what the machine reaches in plain loops, lowest to highest run")


if __name__ == "__main__":
    main()
