"""Errors leave as Paddle's own: a foreign exception in Paddle's eager mode would end the process."""

import os
import subprocess
import sys

import paddle
import pytest

import folio_paddle_ops as ops
from paddle_devices import cpu_only
from steps import tensor


def varlen(q, op):
    cu = tensor([0, 5])
    return op("flash_attention_varlen")(q, q, q, cu, cu, 0.1, True)


def test_a_refusal_of_folio_has_its_sentence(op):
    """A dimension that Folio refuses: folio::Error, caught inside the op, with its status and the op's name."""
    with pytest.raises((RuntimeError, OSError), match=r"flash_attention_varlen: .*head_dim_qk.*\(Folio status \d+\)"):
        varlen(paddle.zeros([5, 2, 12]), op)
    assert varlen(paddle.zeros([5, 2, 16]), op)  # and the process goes on


def test_types_that_are_not_known(op):
    with pytest.raises((RuntimeError, OSError), match="a tensor's type is int16"):
        varlen(paddle.zeros([5, 2, 16], dtype="int16"), op)


def test_paddles_own_errors_keep_their_text(op):
    """Lengths of another type than int32."""
    lengths = tensor([1, 2], "int64")
    with pytest.raises((RuntimeError, OSError), match="pre_cache_len_concat: seq_lens_encoder has 2 elements of int64"):
        op("pre_cache_len_concat")(lengths, lengths, lengths, 8, 16)


SCRIPT = "import sys; sys.path.insert(0, {here!r}); import conftest, test_errors as t, folio_paddle_ops as ops\n" \
         "t.varlen(t.paddle.zeros([5, 2, 16]), lambda name: getattr(ops, 'folio_' + name))"


def run(**environment):
    return subprocess.run([sys.executable, "-c", SCRIPT.format(here=os.path.dirname(__file__))], capture_output=True,
                          text=True, env={**os.environ, **environment})


@cpu_only
def test_a_missing_library_is_named():
    result = run(FOLIO_LIBRARY="/nowhere/libfolio.so.0")
    assert result.returncode == 1 and "RuntimeError: flash_attention_varlen: Folio cannot be used: " in result.stderr
    assert "/nowhere/libfolio.so.0 cannot be loaded" in result.stderr


@cpu_only
def test_a_wrong_number_of_threads_is_named():
    result = run(FOLIO_NUM_THREADS="many")
    assert result.returncode == 1 and 'FOLIO_NUM_THREADS is "many"; 1 to 1024 are accepted' in result.stderr


@pytest.mark.parametrize("flag", ["FLAGS_fmt_write_cache_completed_signal", "FLAGS_use_pd_disaggregation_per_chunk"])
def test_signals_that_would_not_be_sent_are_refused(flag, monkeypatch):
    """Spec 8.9: a writer that ignores these flags hangs the transfer of prefill-decode disaggregation."""
    monkeypatch.setenv(flag, "1")
    x, one = paddle.zeros([1, 8]), tensor([1])
    for name, attributes in [("prefill_mla_write_cache", (one, None, "none")), ("decode_mla_write_cache", ("none", False))]:
        with pytest.raises(RuntimeError, match=f"{flag} is 1"):
            getattr(ops, "folio_" + name)(x, x, paddle.zeros([1, 1, 16, 16]), one, one, one, tensor([0, 1]),
                                          tensor([[0]]), *attributes)
