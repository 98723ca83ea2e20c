"""Random batches of absorbed MLA, to find those that fall behind: the rows of mla.py are samples of this space.

    random_mla.py OUT.jsonl [--seed N] [--seconds S]

draws heads (1 to 128), tokens of a request, pages, cache formats, requests and lengths, equal and not, and in a quarter of the
rows short chunks of prompts among decodes. Every answer is
compared with float64. A row's expectation is the time of its bytes or of its FLOPs at the rates of the same run, whichever is
longer, and OVERHEAD_US. What took the longest for its expectation is printed last.
"""

import bench
import folio
import mla
from random_shapes import argument_parser, finish, log_uniform, measured, rows

HEADS = [1, 4, 8, 12, 16, 16, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 128]
TOKENS = [1, 1, 1, 1, 2, 3, 4, 6]
PAGES = [1, 2, 5, 8, 16, 32, 64, 64, 64, 128]
CACHES = ["bf16", "bf16", "e4m3", "ds_mla"]
MOST_BYTES, MOST_FLOPS = 2e9, 1e12
# An empty kernel in a graph, the first loads, a tile's end, and a second kernel that puts split rows together.
OVERHEAD_US = 11.0
# Relative error. Elements of fp8_ds_mla are rounded to bf16 with their scales where there are more than 16 rows. Of 6400 rows of
# one head with 32 to 700 keys, computed with that rounding and those of weights and outputs and nothing else, the worst has
# 7.3e-3, the mean 3.3e-3. Of 5512 batches on a GPU the worst has 6.2e-3, of one head.
TOLERANCE = 8e-3


def draw(rng):
    batch, longest = log_uniform(rng, 1, 256), log_uniform(rng, 64, 65536)
    q = min(rng.choice(TOKENS), longest)
    lens = [longest] * batch if rng.random() < 0.5 else [max(q, log_uniform(rng, 32, longest)) for _ in range(batch)]
    tokens = [q] * batch
    if rng.random() < 0.25:
        chunked = set(rng.sample(range(batch), min(batch, rng.randint(1, 4))))
        tokens = [min(keys, log_uniform(rng, 8, 512)) if b in chunked else 1 for b, keys in enumerate(lens)]
    return mla.Row(rng.choice(HEADS), lens, page=rng.choice(PAGES), cache=rng.choice(CACHES), tokens=tokens)


def cost(row):
    """Bytes of records, queries and outputs, and products without masks."""
    width = 2 * mla.RANK + mla.ROPE
    return (sum(row.lens) * mla.RECORD_BYTES[row.cache] + 2 * row.heads * sum(row.tokens) * width,
            2 * row.heads * row.pairs * width)


def measure(context, row, limits):
    workload = mla.Workload(row)
    handle, _, run = mla.folio_mla(context, workload)
    workload.o.fill_(float("nan"))
    run()
    wrong = workload.error(workload.o)
    if not wrong < TOLERANCE:
        raise RuntimeError(f"error {wrong} against float64 (kernel {handle.kernel})")
    moved, flops = cost(row)
    expected = max(moved / limits["read_bytes_per_s"], flops / limits["bf16_flops"]) * 1e6 + OVERHEAD_US
    us = bench.captured(run)[0]
    result = {"kind": "random_mla", "name": row.name, "requests": list(zip(row.tokens, row.lens)), "heads": row.heads,
              "kernel": handle.kernel, "error": wrong, "us": {"folio": us}, "expected_us": expected, "ratio": us / expected}
    handle.close()
    return result


def main():
    options = argument_parser(__doc__, seconds=60).parse_args()
    bench.REST_SECONDS = 0.02
    context, limits = folio.Context(), bench.limits()
    drawn = rows(options.seed, draw, cost, MOST_BYTES, MOST_FLOPS)
    finish(options, limits, *measured(drawn, options.seconds, lambda row: measure(context, row, limits)))


if __name__ == "__main__":
    main()
