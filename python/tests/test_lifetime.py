"""Who lives how long: contexts, handles, tensors, workspaces, callbacks, threads."""

import gc
import threading
import weakref

import numpy as np
import pytest

import folio

DECODE = {
    "q_dtype": "float32",
    "num_qo_heads": 2,
    "num_kv_heads": 1,
    "head_dim_qk": 8,
    "page_size": 4,
    "max_batch_size": 1,
    "max_kv_len": 16,
}
BATCH = {"kv_len": np.array([4], np.int32), "block_table": np.array([[0]], np.int32)}


def tensors():
    ones = np.ones((1, 4, 1, 8), np.float32)
    return {"q": np.ones((1, 2, 8), np.float32), "k": ones, "v": ones, "o": np.zeros((1, 2, 8), np.float32)}


def test_handles_outlive_their_context():
    context = folio.Context("cpu")
    handle = folio.Decode(context, **DECODE)
    context.close()
    context.close()
    del context
    gc.collect()
    handle.plan(**BATCH)
    args = tensors()
    handle.run(**args)
    assert (args["o"] == 1).all()


def test_what_is_closed_refuses(ctx):
    with folio.Decode(ctx, **DECODE) as handle:
        handle.plan(**BATCH)
        call = handle.prepare_run(**tensors())
        call()
    for use in (call, lambda: handle.plan(**BATCH), lambda: handle.run(**tensors())):
        with pytest.raises(folio.InvalidArgumentError, match="handle"):
            use()
    with pytest.raises(folio.InvalidArgumentError, match="closed"):
        str(handle.kernel)
    context = folio.Context("cpu")
    context.close()
    assert "closed" in repr(context)
    with pytest.raises(folio.InvalidArgumentError, match="ctx"):
        folio.Decode(context, **DECODE)


def test_prepared_calls_keep_their_tensors(ctx):
    handle = folio.Decode(ctx, **DECODE)
    handle.plan(**BATCH)
    args = tensors()
    o = args["o"]
    seen = weakref.ref(args["q"])
    call = handle.prepare_run(**args)
    del args
    gc.collect()
    assert seen() is not None
    call()
    assert (o == 1).all()
    # It serves later plans, and reads what the tensors hold then.
    seen()[:] = 5
    handle.plan(**BATCH)
    call()
    del call
    gc.collect()
    assert seen() is None


def test_workspaces(ctx):
    handle = folio.Decode(ctx, **DECODE)
    info = handle.workspace_info
    assert info.device_bytes == 0 and info.alignment & (info.alignment - 1) == 0
    memory = np.zeros(info.host_bytes + info.alignment, np.uint8)
    start = -memory.ctypes.data % info.alignment
    handle.plan(**BATCH, workspace=folio.Workspace(host=memory[start : start + info.host_bytes]))
    args = tensors()
    handle.run(**args)
    assert (args["o"] == 1).all()
    with pytest.raises(folio.WorkspaceTooSmallError, match="host"):
        handle.plan(**BATCH, workspace=folio.Workspace(host=memory[start : start + info.host_bytes - 1]))
    with pytest.raises(folio.ShapeError, match="host has the strides"):
        folio.Workspace(host=memory[::2])
    # That of the last plan goes on, and is kept alive.
    seen = weakref.ref(memory)
    del memory
    gc.collect()
    handle.plan(**BATCH)
    handle.run(**args)
    assert seen() is not None
    handle.close()
    gc.collect()
    assert seen() is None


def test_log():
    messages = []
    context = folio.Context("cpu", log=lambda level, message: messages.append((level, message)), log_level="info")
    folio.Decode(context, **DECODE)
    assert any(level == folio.LogLevel.INFO and "cpu/" in message for level, message in messages)
    from folio import _context

    known = len(_context._LISTENERS)
    del context
    gc.collect()
    assert len(_context._LISTENERS) == known - 1


def test_calls_of_several_threads(ctx):
    """cffi releases the GIL during a call, and every thread has its own report of failures."""
    handle = folio.Decode(ctx, **DECODE)
    handle.plan(**BATCH)
    failed = []

    def work(wrong):
        for _ in range(500):
            args = tensors()
            if wrong:
                args[wrong] = args[wrong][..., :4]
            try:
                handle.run(**args)
                if wrong or not (args["o"] == 1).all():
                    failed.append(wrong)
            except folio.ShapeError as error:
                if not error.message.startswith(f"{wrong}:"):
                    failed.append(error)

    threads = [threading.Thread(target=work, args=(wrong,)) for wrong in ("q", "k", "o", None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_gil_is_released():
    """While one thread is in a long call, another one runs Python."""
    context = folio.Context("cpu")
    tokens, heads, dim = 1024, 8, 128
    handle = folio.Prefill(
        context,
        q_dtype="float32",
        num_qo_heads=heads,
        num_kv_heads=heads,
        head_dim_qk=dim,
        kv_storage="ragged",
        max_batch_size=1,
        max_num_tokens=tokens,
        max_kv_len=tokens,
    )
    lengths = np.array([0, tokens], np.int32)
    handle.plan(qo_indptr=lengths, kv_indptr=lengths)
    q = np.ones((tokens, heads, dim), np.float32)
    call = handle.prepare_run(q=q, k=q, v=q, o=np.zeros_like(q))
    done = threading.Event()
    thread = threading.Thread(target=lambda: (call(), done.set()))
    thread.start()
    steps = 0
    while not done.is_set():
        steps += 1
    thread.join()
    # Without the release this thread would get a turn only before and after the call.
    assert steps > 100
