"""How all pictures look, and how they are written: SVG that is the same in every run, in colours for light and dark.

Viewers that know CSS take the dark colours where the page is dark; others show the light ones.
"""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402

# Colours of the light picture, and what they become in the dark. Those of data serve both.
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
DARK = {INK: "#e6edf3", MUTED: "#9198a1", GRID: "#30363d", PAPER: "#0d1117"}

# Apart for colour-blind readers too. Folio's is the only strong one.
COLOURS = {"folio": "#2f81f7", "fa3": "#e08a00", "flashinfer": "#2da44e", "cudnn": "#9a6dd7", "fa2": "#c2577f",
           "triton": "#8c959f", "flashmla": "#d1574b"}
NAMES = {"folio": "Folio", "fa3": "FlashAttention-3", "flashinfer": "FlashInfer", "cudnn": "cuDNN",
         "fa2": "FlashAttention-2", "triton": "Triton (vLLM)", "flashmla": "FlashMLA"}

plt.rcParams.update({
    "svg.hashsalt": "folio", "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10.5,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.titlepad": 9, "text.color": INK,
    "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "axes.titlecolor": INK, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": MUTED, "axes.spines.top": False, "axes.spines.right": False,
    "axes.facecolor": PAPER, "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "axes.axisbelow": True,
    "grid.color": GRID, "grid.linewidth": 0.7, "legend.frameon": False, "xtick.major.size": 0, "ytick.major.size": 0,
    "figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.1,
})


def horizontal_grid(axes):
    """Lines at the values, none at the rows."""
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)


def legend(figure, names, extra=()):
    """One for all panels, at the top: colours of these names, and handles of what else there is."""
    patches = [matplotlib.patches.Patch(color=COLOURS[name], label=NAMES[name]) for name in names]
    handles = [*patches, *extra]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handlelength=1.1, columnspacing=1.6)


def save(figure, path, title):
    """Writes a picture; `title` is what a screen reader says."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = path.read_text()
    start = text.index(">", text.index("<svg")) + 1
    rules = " ".join(f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}'
                     for light, dark in DARK.items() for part in ("fill", "stroke"))
    style = f"\n <title>{title}</title>\n <style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
    path.write_text("\n".join(line.rstrip() for line in (text[:start] + style + text[start:]).split("\n")))
    print(path)
