"""The projections of MLA on a GPU against torch.bmm (cuBLAS) in the same run: checks every answer, then times it.

Two times per row, both by CUDA graphs. `cold`: one call after 256 MB were written, as bench.py measures. `layers`: a call
of a graph of many, each with weights and rows of its own, more than L2 holds: what a layer of a model adds. Rates count
weights, rows and results once. Folio runs with weights as parts of kv_b_proj and with copies of them; torch with the
order of its own that is faster.
Writes JSON lines to the file that is the first argument, if there is one.
"""

import json

import torch

import folio
from bench import captured, limits, write

P, V, L = 128, 128, 512
HEADS = (16, 128)
TOKENS = (1, 8, 16, 32, 128, 512)
CHUNKS = (16, 128, 512, 4096, 32768)
# Relative error (Frobenius) against float64: one rounding to bf16 is 0.0017.
TOLERANCE = 3e-3
LAYER_BYTES = 256 << 20


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Weights:
    """kv_b_proj of a layer, its parts in place, and copies of them by Folio."""

    def __init__(self, context, heads):
        self.kv_b_proj = random(heads * (P + V), L)
        parts = self.kv_b_proj.view(heads, P + V, L)
        self.parts = parts[:, :P], parts[:, P:].transpose(1, 2)
        self.copies = random(heads, P, L), random(heads, L, V)
        context.absorb_weights(kv_b_proj=self.kv_b_proj, w_uk=self.copies[0], w_uv=self.copies[1])()
        for part, copy in zip(self.parts, self.copies):
            assert torch.equal(part, copy), "absorb_weights"


def checked(name, run, out, x, weight):
    """`run`, after its answer in `out` [T, H, N] was compared with x [T, H, K] times weight [H, K, N] in float64."""
    out.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    tokens = sorted({0, out.shape[0] // 2, out.shape[0] - 1})
    want = torch.einsum("thk,hkn->thn", x[tokens].double(), weight.double())
    wrong = ((out[tokens].double() - want).norm() / want.norm()).item()
    if not wrong < TOLERANCE:
        raise RuntimeError(f"{name}: error {wrong} against float64")
    return run


def absorb_and_project(context, heads, tokens):
    """Rows of the table: both products with every weight order, of many layers."""
    weight_bytes = heads * P * L * 2
    count = max(2, -(-LAYER_BYTES // (2 * weight_bytes)))
    weights = [Weights(context, heads) for _ in range(count)]
    for which, (name, width_in, width_out) in enumerate((("absorb_q", P, L), ("project_o", L, V))):
        xs = [random(tokens, heads, width_in) for _ in range(count)]
        outs = [random(tokens, heads, width_out) for _ in range(count)]
        # torch writes what its bmm makes: head-major memory.
        bmm_outs = [random(heads, tokens, width_out) for _ in range(count)]
        runs = {}
        for order in ("parts", "copies"):
            runs[f"folio {order}"] = [folio_run(context, name, x, getattr(w, order)[which], out)
                                      for x, w, out in zip(xs, weights, outs)]
            runs[f"torch {order}"] = [
                lambda x=x.transpose(0, 1), w=getattr(w, order)[which], out=out: torch.bmm(x, w, out=out)
                for x, w, out in zip(xs, weights, bmm_outs)]
        times = {}
        for label, calls in runs.items():
            out = outs[0] if label.startswith("folio") else bmm_outs[0].transpose(0, 1)
            checked(f"{name} {label}", calls[0], out, xs[0], weights[0].parts[which])
            times[label] = timed(calls)
        moved = weight_bytes + 2 * tokens * heads * (width_in + width_out)
        yield report(name, heads, tokens, times, moved=moved)


def folio_run(context, name, x, weight, out):
    if name == "absorb_q":
        return context.absorb_q(q_nope=x, w_uk=weight, q_latent=out)
    return context.project_o(o_latent=x, w_uv=weight, out=out)


def timed(calls):
    """Microseconds of a cold call, and of one among many layers."""

    def all_layers():
        for call in calls:
            call()

    return {"cold": captured(calls[0])[0], "layers": captured(all_layers)[0] / len(calls)}


def up_project(context, heads, tokens):
    """Keys and values from latent rows; torch as a linear layer makes both in one product."""
    weights = Weights(context, heads)
    kv_c, both = random(tokens, L), random(tokens, heads * (P + V))
    k_nope, v = random(tokens, heads, P), random(tokens, heads, V)
    x = kv_c[:, None].expand(tokens, heads, L)
    times = {}
    for order in ("parts", "copies"):
        w_uk, w_uv = getattr(weights, order)
        run = context.up_project(kv_c=kv_c, w_uk=w_uk, w_uv=w_uv, k_nope=k_nope, v=v)
        checked(f"keys, {order}", run, k_nope, x, weights.parts[0].transpose(1, 2))
        checked(f"values, {order}", run, v, x, weights.parts[1])
        times[f"folio {order}"] = {"cold": captured(run)[0]}
    times["torch parts"] = {"cold": captured(lambda: torch.mm(kv_c, weights.kv_b_proj.T, out=both))[0]}
    yield report("up_project", heads, tokens, times, flops=2 * tokens * L * heads * (P + V))


def report(name, heads, tokens, times, moved=0, flops=0):
    result = {"kind": name, "heads": heads, "tokens": tokens, "us": times, "moved_bytes": moved, "flops": flops}
    cells = []
    for time in next(iter(times.values())):
        fastest = {who: min(t[time] for label, t in times.items() if label.startswith(who)) for who in ("folio", "torch")}
        result[f"{time}_speed_of_torch"] = fastest["torch"] / fastest["folio"]
        each = ", ".join(f"{label} {t[time]:.2f}" for label, t in times.items())
        rate = f"{moved / fastest['folio'] / 1e6:.2f} TB/s" if moved else f"{flops / fastest['folio'] / 1e6:.0f} TFLOP/s"
        cells.append(f"{time}: {each} µs; {rate}, {fastest['torch'] / fastest['folio']:.2f} of torch's speed")
    print(f"{name} H={heads} T={tokens}: " + " | ".join(cells), flush=True)
    return result


def main():
    context = folio.Context()
    results = [{"kind": "limits", **limits()}]
    print(json.dumps(results[0]), torch.cuda.get_device_name())
    torch.manual_seed(0)
    for heads in HEADS:
        for tokens in TOKENS:
            results += absorb_and_project(context, heads, tokens)
        for tokens in CHUNKS:
            results += up_project(context, heads, tokens)
    write(results)


if __name__ == "__main__":
    main()
