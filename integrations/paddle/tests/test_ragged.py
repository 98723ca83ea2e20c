"""Attention over ragged keys: Paddle's varlen functions and FastDeploy's flash_mask_attention."""

import numpy as np
import paddle
import pytest

import oracle
from steps import CHUNK, MIXED, PROMPT, Step, array, tensor
from test_append import TOLERANCE, close


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention(op, dtype, causal):
    """MLA's prompts in the form with heads: values narrower than keys, without padding. R6: more keys than queries."""
    rng = np.random.default_rng(5)
    q_len, kv_len = [5, 0, 1, 17], [5, 3, 40, 30]
    cu_q, cu_k = np.cumsum([0, *q_len]), np.cumsum([0, *kv_len])
    q, k, v = (tensor(rng.standard_normal(shape), dtype) for shape in
               ([cu_q[-1] + 2, 4, 48], [cu_k[-1], 2, 48], [cu_k[-1], 2, 32]))
    out = op("flash_attention_varlen")(q, k, v, tensor(cu_q), tensor(cu_k), 0.11, causal)[0]
    expected = np.zeros((cu_q[-1] + 2, 4, 32))
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        for h in range(4):
            expected[rows, h] = oracle.attention(array(q)[rows, h], array(k)[keys, h // 2], array(v)[keys, h // 2], 0.11, causal)
    close(out, expected, dtype)


class Prompts:
    """Queries, and keys with their past for prompts, as gqa_rope_write_cache makes them of a step."""

    def __init__(self, rows, dtype="float32", heads=6, kv_heads=2, dim=32):
        self.step = step = Step(rows, column=True)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.k_len = [(d if e else 0) + t if t else 0 for e, d, t in rows]
        self.cu_k = np.cumsum([0, *self.k_len])
        self.q = step.random([step.num_tokens, heads * dim], dtype)
        self.k, self.v = (step.random([self.cu_k[-1], kv_heads, dim], dtype) for _ in range(2))
        self.out = tensor(np.full((step.num_tokens, heads * dim), 7.0), dtype)

    def offsets(self):
        """Of keys with their past; rows of decodes have a few."""
        pairs = self.step.offsets()
        for token, request, _ in self.step.tokens():
            pairs[token] = np.minimum(pairs[token], self.k_len[request])
        return pairs

    def arguments(self, offsets=None, heads=None):
        mask = None if offsets is None else tensor(np.asarray(offsets).reshape(-1))
        return [self.q, self.k, self.v, tensor(self.step.cu), tensor(self.cu_k), self.step.lengths()[0], self.out, mask,
                heads or self.heads, self.kv_heads, self.dim]

    def expected(self, offsets=None):
        """Rows of prompts; others keep their 7."""
        q = array(self.q).reshape(-1, self.heads, self.dim)
        out = np.full(q.shape, 7.0)
        for b, encoder in enumerate(self.step.encoder):
            rows, keys = (slice(cu[b], cu[b + 1]) for cu in (self.step.cu, self.cu_k))
            for h in range(self.heads if encoder else 0):
                kv = h * self.kv_heads // self.heads
                out[rows, h] = oracle.attention(q[rows, h], array(self.k)[keys, kv], array(self.v)[keys, kv], self.dim ** -0.5,
                                                offsets=None if offsets is None else offsets[rows])
        return out.reshape(len(q), -1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prompts_under_masks(op, dtype, masked):
    """Prompts and chunks: causal, or with a first key and an end for each token; rows of decodes are not touched."""
    prompts = Prompts(MIXED, dtype)
    offsets = prompts.offsets() if masked else None
    address = prompts.out.data_ptr()
    op("flash_mask_attention")(*prompts.arguments(offsets))
    close(prompts.out, prompts.expected(offsets), dtype)
    assert prompts.out.data_ptr() == address
    others = [token for token, request, _ in prompts.step.tokens() if not prompts.step.encoder[request]]
    assert (array(prompts.out)[others] == 7).all()


@pytest.mark.parametrize("masked", [False, True])
def test_older_prompts_under_masks(op, masked):
    """With maxima, which may be stale, and an end for each token, whose first key is 0."""
    prompts = Prompts([CHUNK, PROMPT])
    offsets = prompts.offsets() * [0, 1] if masked else None
    *arguments, mask, heads, kv_heads, dim = prompts.arguments(None if offsets is None else offsets[:, 1])
    op("flash_mask_attention_v1")(*arguments, mask, heads, kv_heads, dim, 0, 0, 0)
    close(prompts.out, prompts.expected(offsets), "float32")


def test_no_tokens_is_no_work(op):
    """R7: a step without tokens, and one without requests."""
    empty = Prompts([(0, 0, 0)])
    empty.q, empty.out = empty.q[:0], empty.out[:0]
    op("flash_mask_attention")(*empty.arguments())
    none, cu = paddle.zeros([0, 4, 16]), tensor([0])
    op("flash_mask_attention")(none, none, none, cu, cu, tensor([]), none, None, 4, 4, 16)


@pytest.mark.parametrize("change, sentence", [
    (dict(offsets=[1, 2]), "mask_offset is not int32 with the first key of each token"),
    (dict(heads=7), "q has 4800 elements; rows of 224 are accepted"),
    (dict(heads=5), r"num_qo_heads: 5 is not accepted; a multiple of num_kv_heads \(2\) is"),
])
def test_refusals_leave_the_output(op, change, sentence):
    prompts = Prompts(MIXED)
    with pytest.raises((RuntimeError, OSError), match=sentence):
        op("flash_mask_attention")(*prompts.arguments(**change))
    assert (array(prompts.out) == 7).all()
