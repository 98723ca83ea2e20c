"""Folio on a GPU against its peers and the chip's limits: checks every answer, then times it.

Method: each call is captured in a CUDA graph; before each replay 256 MB are written, so that the L2 holds nothing of
the call's; the median of 30 replays counts, every kernel of the call included, plan not; each measurement begins after
a rest. Decode rates count KV bytes once, prefill rates exact unmasked FLOPs. Limits are measured in the same run.
Writes JSON lines and a table to the folder given as the first argument; plot.py makes pictures of them.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import torch

import folio
import peers
from workloads import ROWS, Workload

REPLAYS = 30
# Before every measurement: above four fifths of the matrix unit's rate the card is limited by power, and what ran
# before would decide what the next row may draw.
REST_SECONDS = 0.3
# Relative error (Frobenius) that a bf16 answer may have against float64; peers are at 0.002 to 0.003.
TOLERANCE = {torch.bfloat16: 4e-3}
# Where the lengths of a batch are: "cpu", or "cuda", where a kernel plans.
LENGTHS_ON = "cpu"
FLUSH = None


def flush():
    global FLUSH
    if FLUSH is None:
        FLUSH = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    FLUSH.fill_(1)


def captured(function):
    """Microseconds per call: (median, minimum) of graph replays with a cold L2."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        function()
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    times = times_of(graph.replay)
    return statistics.median(times), min(times)


def launched(function):
    """Microseconds of a call outside of graphs with a cold L2: the median. It is launched while the L2 is written."""
    return statistics.median(times_of(function))


def times_of(function):
    times = []
    for _ in range(REPLAYS):
        flush()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def limits():
    """Bytes per second of a copy (read and written) and of reads, and FLOP/s of a bf16 matrix product."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    # A kernel, since a captured copy_ becomes a copy engine's work, which is slower.
    copy = 2 * a.nbytes / captured(lambda: torch.add(a, 1.0, out=b))[0] * 1e6
    read = a.nbytes / captured(lambda: torch.amax(a))[0] * 1e6
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / captured(lambda: x @ y)[0] * 1e6
    return {"copy_bytes_per_s": copy, "read_bytes_per_s": read, "bf16_flops": product}


def error(workload, out):
    """Worst relative error of sampled rows against float64."""
    worst = 0.0
    for request in {0, workload.row.batch - 1, int(workload.kv_lens.argmax())}:
        q = workload.row.qo_lens[request]
        rows = sorted({0, q // 2, q - 1})
        want = workload.reference(request, rows)
        got = out[workload.rows(request, rows)].double()
        relative = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
        worst = max(worst, relative.nan_to_num(nan=torch.inf).max().item())
    return worst


def folio_attention(context, w):
    """A planned handle over the workload, and its run."""
    row = w.row
    desc = dict(flags=folio.PLAN_GRAPH, q_dtype=folio.dtype(w.q.dtype), kv_dtype=folio.dtype(w.kv_dtype),
                num_qo_heads=row.hq, num_kv_heads=row.hk, head_dim_qk=row.d, head_dim_vo=w.head_dim_vo,
                max_batch_size=row.batch, max_kv_len=row.kv)
    if row.ragged:
        desc["kv_storage"] = folio.KV_RAGGED
    else:
        desc["page_size"] = row.page
    batch = dict(kv_indptr=w.kv_indptr, kv_indices=w.kv_indices, last_page_len=w.last_page_len)
    if row.handle == "prefill":
        desc["max_num_tokens"], batch["qo_indptr"] = len(w.q), w.qo_indptr
    else:
        desc["max_qo_len"] = batch["qo_len"] = row.q
    if LENGTHS_ON == "cuda":
        batch = {name: part.cuda() if isinstance(part, torch.Tensor) else part for name, part in batch.items()}
    if row.window:
        batch |= dict(flags=folio.BATCH_WINDOW, window_left=row.window - 1)
    handle = folio.Attention(context, row.handle, **desc)
    handle.plan(**batch)
    args = dict(mask_mode=folio.MASK_CAUSAL if row.causal else folio.MASK_FULL, logits_soft_cap=row.soft_cap, sinks=w.sinks)
    if row.window:
        args |= dict(flags=folio.RUN_WINDOW, window_left=row.window - 1, window_right=-1)
    return handle, batch, handle.run(q=w.q, k=w.k, v=w.v, o=w.o, sm_scale=w.sm_scale, **args)


def host_microseconds(function, rounds=200):
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def answered(context, w):
    """folio_attention's handle, batch and run, and the error of an answer, which is within the tolerance."""
    handle, batch, run = folio_attention(context, w)
    w.o.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    wrong = error(w, w.o)
    if not wrong < TOLERANCE[torch.bfloat16]:
        raise RuntimeError(f"{w.row.name}: error {wrong} against float64 (kernel {handle.kernel})")
    return handle, batch, run, wrong


def measure(context, row):
    torch.manual_seed(0)
    w = Workload(row)
    handle, batch, run, wrong = answered(context, w)
    result = {"kind": row.kind, "name": row.name, "kernel": handle.kernel, "error": wrong, "kv_bytes": w.kv_bytes,
              "flops": w.flops, "workspace_bytes": handle.workspace_bytes, "us": {}}
    result["plan_us"] = host_microseconds(lambda: handle.plan(**batch), 50)
    result["run_host_us"] = host_microseconds(run, 50)
    result["us"]["folio"] = captured(run)[0]
    for name, peer in peers.PEERS.items():
        measure_peer(result, name, lambda: checked(w, peer))
    handle.close()
    return result


def checked(w, peer):
    """The peer's function for a workload, after its answer was compared with float64."""
    out = torch.full_like(w.o, float("nan"))
    function = peer(w, out)
    if function is not None:
        answer = function()
        wrong = error(w, function.rows(answer) if hasattr(function, "rows") else out)
        if not wrong < TOLERANCE[torch.bfloat16]:
            raise RuntimeError(f"error {wrong} against float64")
    return function


def measure_peer(result, name, prepare):
    """Times what `prepare` makes. A peer that cannot run a row is a gap in its column, not an end."""
    try:
        function = prepare()
        if function is not None:
            result["us"][name] = captured(function)[0]
    except Exception as failure:
        print(f"# {name} on {result['name']}: {str(failure)[:120]}", file=sys.stderr)


def measure_append(context, tokens):
    """New tokens of 8 heads × 128 into shuffled pages of 16."""
    key, value = (torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    pages = torch.randperm(2 * tokens // 16, device="cuda")[: tokens // 16]
    k_cache, v_cache = (torch.zeros(2 * tokens // 16, 16, *key.shape[1:], device="cuda", dtype=key.dtype)
                        for _ in range(2))
    slots = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten().long()
    run = context.append(key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots)
    run()
    torch.cuda.synchronize()
    same = torch.equal(k_cache.view(-1, 8, 128)[slots], key) and torch.equal(v_cache.view(-1, 8, 128)[slots], value)
    if not same:
        raise RuntimeError(f"append of {tokens} tokens: the cache does not hold them")
    moved = 4 * key.numel() * key.element_size()
    result = {"kind": "append", "name": f"tokens={tokens}", "moved_bytes": moved, "us": {"folio": captured(run)[0]}}
    for name, peer in peers.APPEND.items():
        measure_peer(result, name, lambda: peer(key, value, k_cache, v_cache, pages))
    return result


def measure_merge(context, tokens):
    """Two states of 32 heads × 128 in bf16."""
    v_a, v_b = (torch.randn(tokens, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    s_a, s_b = (torch.randn(tokens, 32, device="cuda") for _ in range(2))
    v, s = torch.empty_like(v_a), torch.empty_like(s_a)
    run = context.merge(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b, v_out=v, s_out=s)
    run()
    w = torch.sigmoid(s_a.double() - s_b.double())[..., None]
    want = w * v_a.double() + (1 - w) * v_b.double()
    wrong = ((v.double() - want).norm() / want.norm()).item()
    if not wrong < TOLERANCE[torch.bfloat16]:
        raise RuntimeError(f"merge of {tokens} tokens: error {wrong}")
    moved = 3 * (v.numel() * 2 + s.numel() * 4)
    result = {"kind": "merge", "name": f"tokens={tokens}", "moved_bytes": moved, "error": wrong,
              "us": {"folio": captured(run)[0]}}
    for name, peer in peers.MERGE.items():
        measure_peer(result, name, lambda: peer(v_a, s_a, v_b, s_b))
    return result


def measure_host():
    """Host times of plan, run and append from C, with the peers' beside them: decode, up to 2k keys a request."""
    here, library = pathlib.Path(__file__).resolve().parent, pathlib.Path(folio.LIB._name).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        program = pathlib.Path(scratch) / "host_times"
        (program.parent / "libfolio.so.0").symlink_to(library)
        subprocess.run(["cc", "-O2", f"-I{here.parents[1] / 'include'}", here / "host_times.c", library, "-ldl",
                        f"-Wl,-rpath,{scratch}", "-o", program], check=True)
        answer = subprocess.run([program], capture_output=True, text=True, check=True)
    results = [json.loads(row) for row in answer.stdout.splitlines()]
    for result in results:
        for name, peer in peers.HOST.get(result["kind"], {}).items():
            function = peer(decode_batch(int(result["name"].removeprefix("bs="))))
            if function is not None:
                result["us"][name] = host_microseconds(function, 20)
    return results


def decode_batch(batch):
    """Lengths and page ids on the host, as host_times.c draws them."""
    lens = torch.randint(1, 2049, (batch,), generator=torch.Generator().manual_seed(1)) if batch > 1 else \
        torch.tensor([1024])
    pages = (lens + 15) // 16
    indptr = torch.zeros(batch + 1, dtype=torch.int32)
    indptr[1:] = pages.cumsum(0)
    total = int(indptr[-1])
    k, v = (torch.zeros(total, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return SimpleNamespace(kv_indptr=indptr, kv_indices=torch.randperm(total).int(),
                           last_page_len=((lens - 1) % 16 + 1).int(), num_qo_heads=32, num_kv_heads=8, head_dim_qk=128,
                           page_size=16, q=torch.zeros(batch, 32, 128, dtype=torch.bfloat16, device="cuda"), k=k, v=v,
                           kv_dtype=torch.bfloat16, sm_scale=128**-0.5, ragged=False, is_decode=True, window=0,
                           soft_cap=0.0, sinks=None)


FIRST_CALL = """
import time, torch; torch.zeros(1, device="cuda"); torch.cuda.synchronize()
import folio
from workloads import Workload, decode
from bench import folio_attention
w = Workload(decode(1, 1024)); torch.cuda.synchronize()
begin = time.perf_counter()
_, _, run = folio_attention(folio.Context(), w); run(); torch.cuda.synchronize()
print((time.perf_counter() - begin) * 1e6)
"""


def measure_first_call():
    """Context, handle, plan and first run in a new process whose CUDA context exists already."""
    here = pathlib.Path(__file__).resolve().parent
    answer = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=here, capture_output=True, text=True, check=True)
    return {"kind": "first_call", "name": "bs=1 kv=1024", "us": {"folio": float(answer.stdout.split()[-1])}}


def write(results):
    """JSON lines, to the file that is the first argument, if there is one."""
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


def line(result, columns):
    def cell(name):
        us = result["us"].get(name)
        if us is None:
            return "–"
        if result["kind"] == "prefill":
            return f"{us:.1f} µs ({result['flops'] / us / 1e6:.0f} TFLOP/s)"
        moved = result.get("kv_bytes") or result.get("moved_bytes")
        return f"{us:.1f} µs ({moved / us / 1e6:.2f} TB/s)" if moved else f"{us:.1f} µs"

    host = [f"{result[key]:.1f} µs" if key in result else "" for key in ("plan_us", "run_host_us")]
    extra = [*host, result.get("kernel", ""), f"{result['error']:.1e}" if "error" in result else ""]
    return "| " + " | ".join([result["kind"], result["name"]] + [cell(name) for name in columns] + extra) + " |"


def table(results):
    """Markdown. Host times of plan and run beside a kernel's are those of a caller in Python; rows of kind plan, run_host
    and append_host are Folio's from C."""
    columns = ["folio", *peers.PEERS]
    head = "| kind | workload | " + " | ".join(columns) + " | plan, host | run, host | kernel | error |"
    return "\n".join([head, "|" + "---|" * (len(columns) + 6)] + [line(result, columns) for result in results]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose kind and name contain this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    context = folio.Context()
    ceilings = limits()
    print("limits:", json.dumps(ceilings), torch.cuda.get_device_name())
    tasks = [(f"{row.kind} {row.name}", lambda row=row: measure(context, row)) for row in ROWS]
    tasks += [(f"append {n}", lambda n=n: measure_append(context, n)) for n in (64, 8192)]
    tasks += [(f"merge {n}", lambda n=n: measure_merge(context, n)) for n in (256, 8192)]
    tasks += [("host times", measure_host), ("first_call", measure_first_call)]
    results, failures = [], []
    for name, task in tasks:
        if options.only not in name:
            continue
        try:
            answer = task()
            for result in answer if isinstance(answer, list) else [answer]:
                results.append(result)
                print(line(result, ["folio", *peers.PEERS]), flush=True)
        except Exception as failure:
            failures.append(name)
            print(f"FAILED {name}: {failure}", flush=True)
    with open(options.out / "results.jsonl", "w") as out:
        for entry in [{"kind": "limits", **ceilings}, *results]:
            out.write(json.dumps(entry) + "\n")
    (options.out / "table.md").write_text(table(results))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
