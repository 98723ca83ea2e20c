"""What is accepted as a tensor, and what is refused: by which exception, and which sentence."""

import ml_dtypes
import numpy as np
import pytest

import folio


def described(array, **options):
    tensor = folio.Tensor(array, **options)
    return tensor.shape, tensor.strides, tensor.dtype


def test_numpy():
    whole = np.zeros((4, 6, 8), np.float32)
    assert described(whole) == ((4, 6, 8), (48, 8, 1), "float32")
    assert described(whole[1:, ::2, :4]) == ((3, 3, 4), (48, 16, 1), "float32")
    assert described(whole.T) == ((8, 6, 4), (1, 8, 48), "float32")
    assert described(np.zeros(3, ml_dtypes.bfloat16)) == ((3,), (1,), "bfloat16")
    assert described(np.zeros((0, 3), np.int64)) == ((0, 3), (3, 1), "int64")
    assert described(np.zeros(2, np.bool_)) == ((2,), (1,), "bool")
    assert described(np.array(1.5)) == ((), (), "float64")
    assert folio.Tensor(np.zeros((2, 3), np.float16)).nbytes == 12


def test_views_of_another_type():
    pages = np.zeros((2, 8), np.uint8)
    assert described(pages, dtype="float8_e4m3fn")[2] == "float8_e4m3fn"
    assert described(np.zeros(2, np.uint16), dtype=ml_dtypes.bfloat16)[2] == "bfloat16"
    assert described(np.zeros(2, np.int16), dtype=np.dtype("float16"))[2] == "float16"
    with pytest.raises(folio.DtypeError, match="dtype is bfloat16, of 16 bits; array has elements of 8 bits"):
        folio.Tensor(pages, dtype="bfloat16")
    with pytest.raises(folio.DtypeError, match="dtype is 'float12'; .*bfloat16.* are known"):
        folio.Tensor(pages, dtype="float12")
    again = folio.Tensor(folio.Tensor(pages, dtype="float8_e5m2", device="cuda_host"))
    assert again.array is pages and "float8_e5m2, cuda_host:0" in repr(again)
    with pytest.raises(folio.InvalidArgumentError, match='device is \'gpu\'; "cpu", "cuda", "cuda_host" are acc'):
        folio.Tensor(pages, device="gpu")
    assert "uint8, cuda_host:0" in repr(folio.Tensor(pages, device="cuda_host"))


def test_refused_arrays(ctx):
    good = np.zeros((1, 1, 8), np.float32)
    cache = np.zeros((1, 4, 1, 8), np.float32)
    slots = np.zeros(1, np.int32)

    def append(**wrong):
        folio.kv_append(
            ctx,
            **{"key": good, "value": good, "k_cache": cache, "v_cache": cache.copy(), "slot_mapping": slots, **wrong},
        )

    append()
    frozen = cache.copy()
    frozen.flags.writeable = False
    packed = np.zeros(4, [("a", "u1"), ("b", "<f4")])["b"]
    for wrong, sentence in (
        ({"key": [1.0]}, "key is a list; tensors with __dlpack__"),
        ({"key": good.astype(">f4")}, "key has elements of type >f4, in foreign byte order"),
        ({"key": np.zeros(3, np.complex64)}, "key has elements of type complex64"),
        ({"key": packed}, r"key has strides of \(5,\) bytes; multiples of the element's 4"),
        ({"v_cache": frozen}, "v_cache is read-only; an output has to be writable"),
    ):
        with pytest.raises(folio.InvalidArgumentError, match=sentence):
            append(**wrong)
    with pytest.raises(folio.ShapeError, match="key has 6 dimensions; at most 5"):
        append(key=np.zeros([1] * 6, np.float32))
    with pytest.raises(folio.ShapeError, match="stride -8"):  # negative ones are the library's to refuse
        append(key=np.zeros((1, 2, 8), np.float32)[:, ::-1])


class Interface:
    """An array that is known by an interface only."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def test_array_interfaces():
    array = np.zeros((3, 4), np.float32)[:, ::2]
    one = Interface(__array_interface__=array.__array_interface__)
    assert described(one) == ((3, 2), (4, 2), "float32")
    two = Interface(__array_interface__=np.zeros(3, ml_dtypes.bfloat16).__array_interface__)
    with pytest.raises(folio.InvalidArgumentError, match="array has elements of type .* Say dtype"):
        folio.Tensor(two)


class OnDevice:
    """An array of a library that puts its memory on a CUDA device, as far as it says."""

    def __init__(self, read_only=False):
        self.device = 3
        self.__cuda_array_interface__ = {
            "shape": (2, 4),
            "typestr": "<f2",
            "data": (0x7F0000000000, read_only),
            "strides": None,
            "version": 3,
        }


def test_cuda_array_interface():
    tensor = folio.Tensor(OnDevice())
    assert "[2, 4], float16, cuda:3" in repr(tensor)
    assert tensor.writable and not folio.Tensor(OnDevice(read_only=True)).writable


class Dlpack:
    """An array that is known by DLPack only."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, *, stream=None):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack(ctx):
    assert described(Dlpack(np.zeros((2, 3), np.int16)[:, ::2])) == ((2, 2), (3, 2), "int16")
    key = np.ones((1, 1, 8), np.float32)
    k_cache, v_cache = np.zeros((2, 1, 4, 1, 8), np.float32)
    folio.kv_append(
        ctx,
        key=Dlpack(key),
        value=Dlpack(key),
        k_cache=Dlpack(k_cache),
        v_cache=v_cache,
        slot_mapping=Dlpack(np.array([2], np.int32)),
    )
    assert (k_cache[0, 2] == 1).all() and k_cache.sum() == 8

    class Refuses(Dlpack):
        def __dlpack__(self, *, stream=None):
            raise BufferError("it lies on the moon")

    with pytest.raises(folio.InvalidArgumentError, match="array cannot be exported through DLPack .* the moon"):
        folio.Tensor(Refuses(key))


def test_described_tensors_keep_their_memory():
    tensor = folio.Tensor(np.full(1000, 7, np.int32))
    out = np.zeros((1000, 1), np.int32)
    folio.cp_local_lengths(world_size=1, rank=0, lengths=tensor, out=out.reshape(-1))
    assert (out == 7).all()


def test_streams_on_the_cpu(ctx):
    key, cache = np.zeros((1, 1, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    args = {"key": key, "value": key, "k_cache": cache, "v_cache": cache.copy(), "slot_mapping": np.zeros(1, np.int32)}
    folio.kv_append(ctx, **args, stream=0)
    with pytest.raises(folio.Error, match="stream"):
        folio.kv_append(ctx, **args, stream=7)
    with pytest.raises(folio.InvalidArgumentError, match="stream is 'fast'; the number of a CUstream"):
        folio.kv_append(ctx, **args, stream="fast")


def test_current_stream_of_frameworks(monkeypatch):
    """The stream of the first tensor on a device whose library tells it."""
    from folio import _streams

    monkeypatch.setitem(_streams._CURRENT_STREAM, "torch", lambda device_id: 1000 + device_id)
    host, device = folio.Tensor(np.zeros(1, np.int32)), folio.Tensor(OnDevice())
    with pytest.raises(folio.InvalidArgumentError, match="stream is None, and no tensor is of a library"):
        _streams.current_stream([host, device], 2)
    monkeypatch.setitem(_streams._CURRENT_STREAM, "paddle", lambda device_id: 0)
    host.framework, device.framework = "paddle", "torch"
    assert _streams.current_stream([host, device], 2) == 1002

    class Stream:
        cuda_stream = 5

    class Wrapped:
        stream_base = Stream()

    class Protocol:
        def __cuda_stream__(self):
            return 0, 9

    assert [_streams.stream_number(stream) for stream in (3, Stream(), Wrapped(), Protocol())] == [3, 5, 5, 9]
