"""Prepared calls: what they do, and how little Python."""

import inspect
import sys

import numpy as np

import folio


def arguments():
    rows = np.zeros((0, 1, 8), np.float32)
    k_cache, v_cache = np.zeros((2, 1, 4, 1, 8), np.float32)
    return {"key": rows, "value": rows, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": np.zeros(0, np.int32)}


def test_prepare_binds_operators_and_methods(ctx):
    args = arguments()
    args["key"] = args["value"] = np.ones((1, 1, 8), np.float32)
    args["slot_mapping"] = np.array([3], np.int64)
    call = folio.prepare(folio.kv_append, ctx, **args)
    assert not args["k_cache"].any()
    assert call() is None
    assert args["k_cache"].sum() == 8
    args["slot_mapping"][0] = 0
    call()
    assert args["k_cache"].sum() == 16

    handle = folio.Decode(
        ctx,
        q_dtype="float32",
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=8,
        page_size=4,
        max_batch_size=1,
        max_kv_len=4,
    )
    handle.plan(kv_len=np.array([1], np.int32), block_table=np.zeros((1, 1), np.int32))
    q, o = np.ones((1, 1, 8), np.float32), np.zeros((1, 1, 8), np.float32)
    for prepared in (
        folio.prepare(handle.run, q=q, k=args["k_cache"], v=args["v_cache"], o=o),
        handle.prepare_run(q=q, k=args["k_cache"], v=args["v_cache"], o=o),
    ):
        o[:] = 0
        prepared()
        assert (o == 1).all()
    assert (
        folio.prepare(folio.use_cascade, common_prefix_len=0, num_heads=1, num_kv_heads=1, num_sms=1, query_lens=[1])()
        == 0
    )


def test_signatures_and_help():
    parameters = inspect.signature(folio.kv_append).parameters
    assert list(parameters)[:2] == ["ctx", "key"] and parameters["k_scale"].default == 0
    assert inspect.signature(folio.kv_append).return_annotation == "None"
    run, prepare_run = (inspect.signature(one) for one in (folio.Decode.run, folio.Decode.prepare_run))
    assert run.parameters == prepare_run.parameters and prepare_run.return_annotation == "Call"
    assert "slot_mapping: `[num_tokens]` int32 or int64" in inspect.getdoc(folio.kv_append)


def python_functions(call):
    """Names of the Python functions that a call runs, in order. (What that takes is `python benchmark.py`'s to measure.)"""
    names = []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names


def test_a_prepared_call_only_calls_c(ctx):
    """Arguments are converted when the call is prepared, and not again."""
    prepared = folio.prepare(folio.kv_append, ctx, **arguments())
    assert python_functions(prepared) == ["__call__"]
    assert len(python_functions(lambda: folio.kv_append(ctx, **arguments()))) > 20
