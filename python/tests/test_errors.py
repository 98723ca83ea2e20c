"""Failures: exceptions with the library's status and sentence, and outputs that stay as they were."""

import pickle

import numpy as np
import pytest

import folio

DECODE = {
    "q_dtype": "float32",
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 32,
    "page_size": 4,
    "max_batch_size": 2,
    "max_kv_len": 16,
}


def test_statuses_and_classes():
    names = {status.name for status in folio.Status}
    assert {"OK", "ERR_SHAPE", "ERR_INTERNAL"} <= names
    for status in folio.Status:
        if status:
            kind = next(kind for kind in folio.Error.__subclasses__() if kind.status == status)
            assert getattr(folio, kind.__name__) is kind
    error = pickle.loads(pickle.dumps(folio.ShapeError("q is short")))
    assert (type(error), error.message, error.status) == (folio.ShapeError, "q is short", folio.Status.ERR_SHAPE)


def test_names_of_statuses_are_the_librarys():
    from folio._generated.ffi import ffi
    from folio._library import lib

    for status in folio.Status:
        assert ffi.string(lib.folio_status_name(status)).decode() == status.name.removeprefix("ERR_")


def test_failures_name_field_and_value(ctx):
    with pytest.raises(folio.UnsupportedError, match="head_dim_qk") as failed:
        folio.Decode(ctx, **{**DECODE, "head_dim_qk": 36})
    assert failed.value.status == folio.Status.ERR_UNSUPPORTED and "36" in failed.value.message
    with pytest.raises(folio.InvalidArgumentError, match="num_qo_heads is -1"):
        folio.Decode(ctx, **{**DECODE, "num_qo_heads": -1})
    with pytest.raises(folio.InvalidArgumentError, match="page_size is 4.5"):
        folio.Decode(ctx, **{**DECODE, "page_size": 4.5})
    with pytest.raises(folio.InvalidArgumentError, match='kv_layout is "nhdd"; "nhd", "hnd" are accepted'):
        folio.Decode(ctx, **DECODE, kv_layout="nhdd")
    flags = 'flags is "graphs"; "graph", "batch_invariant", "fp8_products", "mask_items" are accepted'
    with pytest.raises(folio.InvalidArgumentError, match=flags):
        folio.Decode(ctx, **DECODE, flags="graphs")
    with pytest.raises(folio.DtypeError, match="q_dtype: dtype is 'half'"):
        folio.Decode(ctx, **{**DECODE, "q_dtype": "half"})
    for flags in (1 << 20, folio.PlanFlag(1 << 20), folio.PlanFlag.GRAPH | 1 << 20, ["graph", 1 << 20]):
        with pytest.raises(folio.UnknownFieldError):
            folio.Decode(ctx, **DECODE, flags=flags)
    with pytest.raises(folio.InvalidArgumentError, match="kv_layout is 0.5; KvLayout, a number or a name"):
        folio.Decode(ctx, **DECODE, kv_layout=0.5)


def test_unknown_and_missing_keywords(ctx):
    with pytest.raises(TypeError, match="max_batch"):
        folio.Decode(ctx, **DECODE, max_batch=3)
    with pytest.raises(TypeError, match="'q'"):
        folio.Decode(ctx, **DECODE).run(k=None, v=None, o=None)
    with pytest.raises(TypeError, match="slots"):
        folio.kv_append(ctx, slots=None)


def test_outputs_stay_as_they_were(ctx):
    handle = folio.Decode(ctx, **DECODE)
    q, o = np.ones((2, 4, 32), np.float32), np.full((2, 4, 32), 3.0, np.float32)
    cache = np.zeros((4, 4, 2, 32), np.float32)
    with pytest.raises(folio.NotPlannedError):
        handle.run(q=q, k=cache, v=cache, o=o)
    handle.plan(kv_len=np.array([3, 4], np.int32), block_table=np.array([[0], [1]], np.int32))
    for wrong, error in (
        ({"q": q[:1]}, folio.ShapeError),
        ({"q": q.astype(np.float16)}, folio.DtypeError),
        ({"k": cache[:, :, :1]}, folio.ShapeError),
        ({"mask_mode": 9}, folio.InvalidArgumentError),
        ({"window_left": 3}, folio.InvalidArgumentError),
    ):
        with pytest.raises(error):
            handle.run(**{"q": q, "k": cache, "v": cache, "o": o, **wrong})
    assert (o == 3).all()
    # A plan that fails leaves the previous one in force.
    with pytest.raises(folio.InvalidArgumentError, match="kv_len"):
        handle.plan(kv_len=np.array([30, 4], np.int32), block_table=np.array([[0], [1]], np.int32))
    handle.run(q=q, k=cache, v=cache, o=o)
    assert (o == 0).all()


def test_contexts():
    with pytest.raises(folio.InvalidArgumentError, match="backend is 'gpu'; 'cpu', 'cuda', 'reference' are accepted"):
        folio.Context("gpu")
    with pytest.raises(folio.InvalidArgumentError, match="num_threads"):
        folio.Context("cpu", num_threads=5000)
    with pytest.raises(folio.InvalidArgumentError, match="num_threads is -1"):
        folio.Context("cpu", num_threads=-1)
    with pytest.raises(folio.InvalidArgumentError, match='log_level is "loud"; "error", "warning", "info" are'):
        folio.Context("cpu", log=print, log_level="loud")
    assert folio.device_count("cpu") == 1
    if folio.device_count("cuda") == 0:
        with pytest.raises(folio.Error) as failed:
            folio.Context("cuda")
        assert failed.value.status in (
            folio.Status.ERR_NO_DRIVER,
            folio.Status.ERR_NO_DEVICE,
            folio.Status.ERR_UNSUPPORTED,
        )


def test_a_library_that_lacks_a_function():
    from folio import _library

    with pytest.raises(folio.UnsupportedError, match=r"folio_of_tomorrow is not in the library, whose version is \d"):
        _library.function("folio_of_tomorrow")
