"""Static graphs: the registered ops say their outputs' shapes and types before they run, and compute what the functions do."""

import numpy as np
import paddle
import pytest

import folio_paddle_ops as ops
from formats import Format
from paddle_devices import cpu_only
from steps import DECODE, DRAFT, PROMPT, Step, array, tensor
from test_append import Layer

# The executor of a graph is the CPU's.
pytestmark = cpu_only


@pytest.fixture
def run():
    """run("append_attention", arguments): what the op returns in a graph of its own."""

    def in_graph(name, arguments):
        feed, variables = {}, {}

        def placed(argument):
            if not isinstance(argument, paddle.Tensor):
                return argument
            if id(argument) not in variables:
                given = f"x{len(feed)}"
                feed[given] = argument.numpy()
                variables[id(argument)] = paddle.static.data(given, argument.shape, argument.dtype)
            return variables[id(argument)]

        paddle.enable_static()
        try:
            with paddle.static.program_guard(paddle.static.Program()):
                out = getattr(ops, "static_op_folio_" + name)(*map(placed, arguments))
                out = out if isinstance(out, list) else [out]
                results = paddle.static.Executor(paddle.CPUPlace()).run(feed=feed, fetch_list=out)
                return results, [list(one.shape) for one in out]
        finally:
            paddle.disable_static()

    return in_graph


def check(run, name, arguments):
    """The same bits, in the shape that the graph was told of."""
    wanted = getattr(ops, "folio_" + name)(*arguments)
    results, shapes = run(name, arguments)
    assert len(results) == len(wanted)
    for result, shape, one in zip(results, shapes, wanted):
        np.testing.assert_array_equal(result, one.numpy())
        assert all(told in (-1, size) for told, size in zip(shape, result.shape)) and len(shape) == result.ndim


@pytest.mark.parametrize("version", ["", "_v3", "_v2"])
@pytest.mark.parametrize("quant", ["none", "cache_int4_zp"])
def test_append_attention(run, version, quant):
    """Rows of int4 caches have half as many bytes as a head has elements; the output's have all."""
    layer = Layer(Step([DECODE, PROMPT], padded=0))
    options = {} if quant == "none" else Format(quant, "channels").fill(layer)
    check(run, "append_attention" + version, layer.arguments(version=version, **options))


def test_oldest_tiles(run):
    """Nine outputs, four of them of a length that depends on the lengths."""
    made = lambda: tensor([0] * 40)
    step = Step([DECODE, PROMPT])
    check(run, "get_block_shape_and_split_kv_block_v1", [*step.lengths(), made(), made(), made(), made(), 64, 16, 8, 16, 4])


@pytest.mark.parametrize("version", ["", "_v1"])
def test_latent_attention(run, version):
    """FOLIO_MLA_ATTN calls the older signature, in static graphs too."""
    step = Step([DECODE, DRAFT], padded=0)
    cache, one, none = step.random([step.num_pages, 1, 16, 40], "float32"), tensor([0]), [None] * 11
    batch_ids, cu, table = step.tensors()
    encoder, decoder, this_time = step.lengths()
    query = step.random([step.num_tokens, 80], "float32")
    tail = [*none, "fp32", "none", 32, 128, 0.1, 0.0, 0.0, 0.0, 3, True, True]
    newest = [query, cache, cache, decoder, this_time, cu, batch_ids, table, *[one] * 3, tensor([0, 1]), one, tensor([2]),
              *[one] * 3]
    older = [query, cache, cache, encoder, decoder, this_time, cu, batch_ids, table, *[one] * 14]
    arguments = (older if version else newest) + tail
    wanted = getattr(ops, "folio_multi_head_latent_attention" + version)(*arguments)[0]
    assert array(wanted).any()
    check(run, "multi_head_latent_attention" + version, arguments)
