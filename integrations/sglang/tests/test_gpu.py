"""Steps in CUDA graphs, as SGLang captures and replays them: a warm-up, a capture, then only new lengths."""

import devices
import oracle
import pytest
import torch
from standins import Engine, Mode, step

from folio_sglang.backend import FolioAttnBackend

ROWS = (3, 0, 6)


@pytest.fixture(autouse=True)
def device():
    yield from devices.one_after_the_other("cuda")


@pytest.mark.parametrize("page_size", [1, 16])
def test_replays_compute_the_lengths_of_their_step(page_size):
    engine = Engine(page_size, heads=8, kv_heads=2, dim=64, v_dim=64, dtype=torch.bfloat16)
    backend, layer = FolioAttnBackend(engine.runner), engine.layer()
    backend.init_cuda_graph_state(4, 4)
    for row in ROWS:
        engine.fill(row, engine.longest)
    q = torch.randn(3, 8 * 64, dtype=torch.bfloat16)

    def forward(batch):
        return backend.forward_decode(q, None, None, layer, batch)

    batch = step(Mode.DECODE, engine, ROWS, (1, 1, 1))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    forward(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        layers = [forward(batch) for _ in range(2)]
    for seq_lens in ((1, 16, 101), (128, 17, 2)):
        batch = step(Mode.DECODE, engine, ROWS, seq_lens)
        backend.init_forward_metadata_out_graph(batch)
        q.normal_()
        graph.replay()
        for o in layers:
            for row, keys, queries, got in zip(ROWS, seq_lens, q.split(1), o.split(1)):
                k, v = engine.cached(engine.req_to_token[row, :keys])
                want, _ = oracle.attention(queries.view(1, 8, 64), k, v, sm_scale=layer.scaling)
                assert (got.double() - want.flatten(1)).abs().max() < 1.6e-2
