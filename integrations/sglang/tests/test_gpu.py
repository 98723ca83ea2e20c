"""Steps in CUDA graphs, as SGLang captures and replays them: a warm-up, a capture, then only new lengths."""

import devices
import oracle
import pytest
import torch
from standins import Engine, MlaEngine, Mode, step

from folio_sglang.selection import create

ROWS = (3, 0, 6)


@pytest.fixture(autouse=True)
def device():
    yield from devices.one_after_the_other("cuda")


def heads_of(page_size):
    return Engine(page_size, heads=8, kv_heads=2, dim=64, v_dim=64, dtype=torch.bfloat16)


def records_of(page_size):
    return MlaEngine(page_size, heads=8, dtype=torch.bfloat16)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model, windows", [(heads_of, (-1, -1)), (heads_of, (20, -1)), (records_of, (-1, -1))])
def test_replays_compute_the_lengths_of_their_step(page_size, model, windows):
    engine = model(page_size)
    backend, layers = create(engine.runner), [engine.layer(sliding_window_size=window) for window in windows]
    backend.init_cuda_graph_state(4, 4)
    for row in ROWS:
        engine.fill(row, engine.longest)
    q = torch.randn(3, 8 * engine.dim, dtype=torch.bfloat16)

    def forward(batch):
        return [backend.forward_decode(q, None, None, layer, batch) for layer in layers]

    batch = step(Mode.DECODE, engine, ROWS, (1, 1, 1))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    forward(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        outputs = forward(batch)
    for seq_lens in ((1, 16, 101), (128, 17, 2)):
        batch = step(Mode.DECODE, engine, ROWS, seq_lens)
        backend.init_forward_metadata_out_graph(batch)
        q.normal_()
        graph.replay()
        for layer, o in zip(layers, outputs):
            window = (layer.sliding_window_size, -1)
            for row, keys, queries, got in zip(ROWS, seq_lens, q.split(1), o.split(1)):
                k, v = engine.cached(engine.req_to_token[row, :keys])
                heads = queries.view(1, 8, engine.dim)
                want, _ = oracle.attention(heads, k, v, sm_scale=layer.scaling, window=window)
                assert (got.double() - want.flatten(1)).abs().max() < 1.6e-2
