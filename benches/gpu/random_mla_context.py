"""Random batches of MLA prompts with cached context, beside the chain of vLLM's MLA backends: the rows of mla_prefill.py are
samples of this space.

    random_mla_context.py OUT.jsonl [--seed N] [--seconds S] [--eager]

draws heads, requests, new tokens and contexts, equal and not. Every answer is compared with float64. What is the slowest beside
the chain is printed last. Without FOLIO_FA3 there is no chain, and a row's expectation is the time of its FLOPs at the rate of the
same run, and OVERHEAD_US. --eager: handles that are not for graphs. One for graphs has as many chunks as any batch within its
maxima, so unequal contexts have empty ones there.
"""

import dataclasses

import bench
import folio
import mla_prefill
from random_shapes import argument_parser, finish, log_uniform, measured, rows

HEADS = [16, 16, 32, 64, 128]
MOST_NEW, MOST_FLOPS = 8192, 4e12
# Of the chain of kernels: new tokens, gather and up-projection, context, merge.
OVERHEAD_US = 25.0


@dataclasses.dataclass
class Row:
    heads: int
    requests: list  # (new tokens, keys) of each

    @property
    def name(self):
        new, keys = (f"{min(x)}..{max(x)}" if len(set(x)) > 1 else f"{x[0]}" for x in zip(*self.requests))
        return f"{len(self.requests)} x {new} on {keys}"


def draw(rng):
    count, equal = log_uniform(rng, 1, 32), rng.random() < 0.4
    new, cached = log_uniform(rng, 16, 4096), log_uniform(rng, 64, 32768)
    requests = [(new, new + cached)] * count
    if not equal:
        news = [log_uniform(rng, 8, new) for _ in range(count)]
        # One in eight has no context yet.
        requests = [(q, q + (0 if rng.random() < 1 / 8 else log_uniform(rng, 16, cached))) for q in news]
    return Row(rng.choice(HEADS), requests)


def cost(row):
    """Tokens of context, of which a chunk has so many, and FLOPs: up-projections, and products without masks."""
    cached = sum(kv - q for q, kv in row.requests)
    pairs = sum(q * (kv - q) + q * q / 2 for q, kv in row.requests)
    up = 2 * cached * row.heads * mla_prefill.L * (mla_prefill.P + mla_prefill.V)
    return cached, up + 2 * pairs * row.heads * (mla_prefill.P + mla_prefill.R + mla_prefill.V)


def fits(row):
    return max(kv - q for q, kv in row.requests) > 0 and sum(q for q, _ in row.requests) <= MOST_NEW


def measure(context, row, limits, eager):
    result = mla_prefill.chunked(context, row.name, row.requests, row.heads, eager)
    us = result["us"]
    expected = us.get("chain", cost(row)[1] / limits["bf16_flops"] * 1e6 + OVERHEAD_US)
    return result | {"kind": "random_mla_context", "requests": row.requests, "heads": row.heads, "expected_us": expected,
                     "ratio": us["folio"] / expected}


def main():
    parser = argument_parser(__doc__, seconds=60)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    bench.REST_SECONDS = 0.02
    context, limits = folio.Context(), bench.limits()
    drawn = filter(fits, rows(options.seed, draw, cost, mla_prefill.CHUNK_TOKENS, MOST_FLOPS))
    finish(options, limits, *measured(drawn, options.seconds, lambda row: measure(context, row, limits, options.eager)))


if __name__ == "__main__":
    main()
