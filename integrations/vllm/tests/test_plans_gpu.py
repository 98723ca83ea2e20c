"""The planner on a GPU, as vLLM's full CUDA graphs use it: planned outside, captured runs. It needs no vLLM, so this
runs where there is a GPU and no vLLM."""

import importlib.util
import sys
from pathlib import Path

import oracle
import pytest
import torch
from folio_torch import context_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SOURCE = Path(__file__).parents[1] / "src" / "folio_vllm" / "plans.py"
HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 64, 16, 12
TABLE = [[3, 1, 0], [2, 4, 5], [7, 0, 0]]


@pytest.fixture(scope="module")
def plans():
    spec = importlib.util.spec_from_file_location("plans", SOURCE)
    module = sys.modules["plans"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("window_left", [None, 0, 18])
def test_decode_steps(plans, graph, window_left):
    torch.manual_seed(0)
    problem = plans.Problem(torch.bfloat16, torch.bfloat16, HEADS, KV_HEADS, DIM, DIM, PAGE, graph=graph)
    planner = plans.Planner(context_of("cuda"), problem, plans.Bounds(8, 64, 128))
    table, q = int32(TABLE), torch.randn(3, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(PAGES, KV_HEADS, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16)
    o = torch.empty_like(q)

    def plan(keys):
        batch = plans.Batch(plans.Bounds(3, 3, 48), 1, int32([0, 1, 2, 3]), int32(keys), table, window_left)
        return planner.planned(batch)

    with torch.cuda.stream(torch.cuda.Stream()):

        def run(handle):
            window = {} if window_left is None else dict(flags="window", window_left=window_left, window_right=-1)
            handle.run(q=q, k=kv[..., :DIM], v=kv[..., DIM:], o=o, **window)

        run(plan([20, 33, 5]))
        replays = None
        if graph:
            handle = plan([20, 33, 5])
            torch.cuda.synchronize()
            replays = torch.cuda.CUDAGraph()
            with torch.cuda.graph(replays, stream=torch.cuda.current_stream()):
                run(handle)
        for keys in ([20, 33, 5], [48, 7, 16]):
            q.normal_()
            handle = plan(keys)
            replays.replay() if graph else run(handle)
            for request, length in enumerate(keys):
                pages = oracle.paged(kv.transpose(1, 2), table[request], length).cpu()
                k, v = pages.split(DIM, dim=-1)
                window = None if window_left is None else (window_left, -1)
                want, _ = oracle.attention(q[request : request + 1].cpu(), k, v, sm_scale=DIM**-0.5, window=window)
                assert (o[request].cpu().double() - want[0]).abs().max() < 1.6e-2
