"""Ops inside captured CUDA graphs. A call that waits for the device, allocates outside of Paddle or runs on another stream than
Paddle's ends a capture with an error."""

import paddle
import pytest
from paddle.device.cuda.graphs import CUDAGraph

import folio_paddle_ops as ops
from paddle_devices import gpu_only
from steps import DECODE, DRAFT, IDLE, MIXED, Step, array, on_host, tensor
from test_append import TOLERANCE, Layer, close
from test_mla import attend, expected_attention, filled_cache
from test_step import maxima

pytestmark = gpu_only

#: As many requests and tokens as MIXED with its padding, 25; other lengths, of other kinds.
OTHERS = [(0, 90, 1), (0, 1, 3), (8, 0, 8), (0, 0, 0), (5, 33, 5), (0, 127, 1), (0, 12, 0), (0, 15, 2)]


class Captured:
    """A call in a graph, after it has run once. out: its result, which replays write."""

    def __init__(self, call):
        call()
        self.graph = CUDAGraph()
        self.graph.capture_begin()
        try:
            self.out = call()
        finally:
            self.graph.capture_end()

    def replay(self):
        self.graph.replay()
        paddle.device.cuda.synchronize()


def overwrite(arguments, others):
    """Gives tensors the contents of others; their addresses stay."""
    for one, other in zip(arguments, others):
        if isinstance(one, paddle.Tensor):
            one.copy_(other, True)


@pytest.mark.parametrize("options", [{}, {"neox": True, "norm": True, "bias": True}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_replay_attends_over_the_step_in_its_tensors(dtype, options):
    layer, other = Layer(Step(MIXED), dtype, **options), Layer(Step(OTHERS, padded=5), dtype, **options)
    arguments, others = layer.arguments(), other.arguments()
    graph = Captured(lambda: ops.folio_append_attention(*arguments)[0])
    overwrite(arguments, others)
    graph.replay()
    close(graph.out, other.attended(), dtype)
    for cache, expected in zip((layer.k_cache, layer.v_cache), other.caches_after()):
        close(cache, expected, dtype)


def test_a_replay_of_latent_attention(op):
    """The list of decodes and its count are read on the device too."""
    first, second, dtype = Step(MIXED), Step(OTHERS, padded=5), "bfloat16"
    made = [(step, filled_cache(step, 40, dtype), step.random([step.num_tokens, 80], dtype)) for step in (first, second)]
    arguments, others = ([], [])
    for (step, cache, query), kept in zip(made, (arguments, others)):
        attend(lambda name: lambda *given: kept.extend(given) or [None], step, cache, query, 0.1, 32, dtype)
    graph = Captured(lambda: op("multi_head_latent_attention")(*arguments)[0])
    overwrite(arguments, others)
    graph.replay()
    step, cache, query = made[1]
    close(graph.out, expected_attention(step, array(cache), array(query), 2, 32, 0.1), dtype)


def test_a_shape_that_has_not_run_is_refused():
    layer = Layer(Step([DECODE, DRAFT]), "bfloat16", heads=3, kv_heads=1, dim=40)
    arguments = layer.arguments()
    graph = CUDAGraph()
    graph.capture_begin()
    try:
        with pytest.raises(RuntimeError, match="this shape has not been computed before the capture; run it once, then capture"):
            ops.folio_append_attention(*arguments)
    finally:
        graph.capture_end()
    close(ops.folio_append_attention(*arguments)[0], layer.attended(), "bfloat16")  # and the process goes on


def test_what_the_host_reads_stays_as_it_is():
    """Maxima need the lengths on the host. In a capture they keep what the step before wrote."""
    step, most = Step([DECODE, IDLE]), on_host([-7] * 9)
    ops.folio_max_lengths(*step.lengths(), most)
    others = Step([DRAFT, DRAFT]).lengths()
    graph = CUDAGraph()
    graph.capture_begin()
    try:
        assert ops.folio_max_lengths(*others, most) == (False, False, 0)
    finally:
        graph.capture_end()
    assert most.numpy().tolist() == maxima(step.rows) + [-7] * 3


def test_ops_run_on_the_stream_that_is_current():
    """One that a program has made, for which neither the default stream nor Paddle's own waits."""
    layer, most = Layer(Step(MIXED), "bfloat16"), on_host([-7] * 9)
    arguments, wanted, lengths = layer.arguments(), layer.attended(), layer.step.lengths()
    paddle.device.cuda.synchronize()
    with paddle.device.stream_guard(paddle.device.Stream()):
        out = ops.folio_append_attention(*arguments)[0]
        ops.folio_max_lengths(*lengths, most)
        paddle.device.cuda.synchronize()
    close(out, wanted, "bfloat16")
    assert most.numpy().tolist() == maxima(MIXED) + [-7] * 3
