"""The section "models": attention layers of published models, at the shapes that a server runs them with.

Heads, dims, windows, caps and sinks are those of the models' config files. A model whose layers differ has a line for
each kind of layer. Rows are measured and checked by bench.py; their limit is the time that the same bytes or FLOPs take
at the rates of the same run, whichever is longer.

    models.py FOLDER [--quick] [--only EXPRESSION]

writes models.jsonl and models.md to the folder. --quick measures 40 rows, which take about a minute and a half.
"""

import argparse
import json
import pathlib
import re
import sys

import torch

import bench
import folio
import peers
from workloads import Row

GEMMA_2 = dict(hq=16, hk=8, d=256, soft_cap=50.0)
GEMMA_3 = dict(hq=16, hk=8, d=256)
GPT_OSS = dict(hq=64, hk=8, d=64, sinks=True)

# As a server sees a layer: one of 8 ranks where the name says TP8.
DECODERS = {
    "Llama 3 8B": dict(hq=32, hk=8, d=128),
    "Llama 3 70B TP8": dict(hq=8, hk=1, d=128),
    "Qwen2.5 7B": dict(hq=28, hk=4, d=128),
    "Qwen3 32B": dict(hq=64, hk=8, d=128),
    "Gemma 2 9B global": GEMMA_2,
    "Gemma 2 9B local": dict(GEMMA_2, window=4096),
    "Gemma 3 12B global": GEMMA_3,
    "Gemma 3 12B local": dict(GEMMA_3, window=1024),
    "gpt-oss 120B full": GPT_OSS,
    "gpt-oss 120B local": dict(GPT_OSS, window=128),
    "Phi-3 mini": dict(hq=32, hk=32, d=96),
    "Mistral 7B": dict(hq=32, hk=8, d=128, window=4096),
    "Command R 08-2024": dict(hq=64, hk=8, d=128),
    "GPT-J 6B": dict(hq=16, hk=16, d=256),
    "GPT-NeoX 20B": dict(hq=64, hk=64, d=96),
    "Pythia 2.8B": dict(hq=32, hk=32, d=80),
}
PAGES = (16, 1, 64)

# What a server asks of a layer. Windows of 4096 keys get twice the keys, so that they are windows.
SHAPES = {
    "decode": dict(batch=64, q=1, kv=4096),
    "prefill": dict(batch=4, q=2048, kv=2048),
    "mixed": dict(batch=32, q=1, chunk=512, kv=4096),
    "verify": dict(batch=32, q=4, kv=4096),
}

WHISPER = dict(model="Whisper large", hq=20, hk=20, d=64, kv=1500, causal=False)

# Sequences without a cache, all of whose tokens see one another.
ENCODERS = {
    "BERT base": dict(batch=32, q=512, hq=12, d=64),
    "BERT base, sentences": dict(batch=256, q=64, hq=12, d=64),
    "CLIP ViT-L/14": dict(batch=64, q=257, hq=16, d=64),
    "SigLIP so400m": dict(batch=16, q=729, hq=16, d=72),
    "Qwen2.5-VL windows": dict(batch=1024, q=64, hq=16, d=80),
}


def decoder(model, kind, page):
    """A row of a decoder."""
    shape, heads = SHAPES[kind], DECODERS[model]
    doubled = dict(shape, kv=8192) if heads.get("window", 0) >= 4096 else shape
    return Row(kind, **doubled, **heads, page=page, model=model)


def whisper():
    """The encoder has no cache. Cross attention reads the encoder's keys from pages, for one token or for a prompt."""
    encoder = Row("prefill", batch=8, q=1500, ragged=True, **WHISPER)
    cross = [Row("verify" if q > 1 else "decode", batch=64, q=q, page=page, **WHISPER) for page in PAGES for q in (1, 4, 8)]
    return [encoder, *cross]


def encoder(model):
    shape = ENCODERS[model]
    return Row("prefill", **shape, kv=shape["q"], hk=shape["hq"], causal=False, ragged=True, model=model)


def all_rows():
    rows = [decoder(model, kind, page) for model in DECODERS for page in PAGES for kind in SHAPES]
    return rows + whisper() + [encoder(model) for model in ENCODERS]


def quick_rows():
    """Decode and prefill of every kind of layer; the rest where models are unlike one another."""
    rows = [decoder(model, kind, 16) for kind in ("decode", "prefill") for model in DECODERS if model != "Command R 08-2024"]
    rows += [decoder("Llama 3 8B", kind, 1) for kind in ("decode", "prefill")]
    rows += [decoder(model, "mixed", 16) for model in ("Llama 3 8B", "Gemma 2 9B global")]
    rows += [decoder(model, "verify", 16) for model in ("Llama 3 8B", "Llama 3 70B TP8", "Phi-3 mini")]
    return rows + [row for row in whisper() if row.ragged or (row.page == 16 and row.q != 4)]


def limit_microseconds(result, limits):
    """The time of the row's bytes or of its FLOPs, whichever is longer."""
    rate = max(limits["copy_bytes_per_s"], limits["read_bytes_per_s"])
    return 1e6 * max(result["kv_bytes"] / rate, result["flops"] / limits["bf16_flops"])


def measure(context, row, limits):
    result = bench.measure(context, row)
    result |= {"model": row.model, "page": row.page, "limit_us": limit_microseconds(result, limits)}
    return result


HEAD = "| layer | work | Folio µs | of the limit | best peer µs | peer / Folio | kernel |\n|---|---|---|---|---|---|---|"


def line(result):
    """A row of the table; behind the best peer in bold."""
    us = dict(result["us"])
    own = us.pop("folio")
    name, best = min(us.items(), key=lambda peer: peer[1], default=("", None))
    peer = f"{best:.1f} ({name}) | {best / own:.2f}" if best else "– | –"
    shown = f"**{own:.1f}**" if best and best < own else f"{own:.1f}"
    work = result["name"].removeprefix(f"{result['model']}: ")
    kernel = result["kernel"].replace("prefill_", "p_").replace("decode_", "d_")
    return f"| {result['model']} {result['kind']} | {work} | {shown} | {result['limit_us'] / own:.2f} | {peer} | {kernel} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="40 rows")
    parser.add_argument("--only", default="", help="rows whose kind and name match this expression")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.quick:
        bench.REST_SECONDS = 0.1
    context, limits = folio.Context(), bench.limits()
    print(json.dumps(limits), torch.cuda.get_device_name(), "peers:", ", ".join(peers.installed()))
    print(HEAD, flush=True)
    lines, failures = [], 0
    with open(options.out / "models.jsonl", "w") as out:
        out.write(json.dumps({"kind": "limits", **limits}) + "\n")
        for row in quick_rows() if options.quick else all_rows():
            if not re.search(options.only, f"{row.kind} {row.name}"):
                continue
            try:
                result = measure(context, row, limits)
            except Exception as failure:
                failures += 1
                print(f"FAILED {row.kind} {row.name}: {str(failure)[:200]}", flush=True)
                continue
            out.write(json.dumps(result) + "\n")
            out.flush()
            lines.append(line(result))
            print(lines[-1], flush=True)
    (options.out / "models.md").write_text("\n".join([HEAD, *lines, ""]))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
