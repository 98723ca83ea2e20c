"""Figures on the host: arrays are NumPy's or lists, counts follow from them, and numbers are returned."""

import numpy as np
import pytest

import folio


def test_lengths_of_ranks():
    out = np.zeros((3, 2), np.int32)
    folio.cp_local_lengths(world_size=2, rank=-1, lengths=[5, 0, 8], out=out)
    assert out.tolist() == [[3, 2], [0, 0], [4, 4]]
    with pytest.raises(folio.InvalidArgumentError, match="capacity"):
        folio.cp_local_lengths(world_size=2, rank=-1, lengths=[5, 0, 8], out=out[:2])


def test_chunks_of_contexts():
    args = {"page_size": 4, "workspace_tokens": 16, "context_lens": np.array([10, 3], np.int32)}
    chunks, tokens = folio.mla_context_chunks(**args)
    assert (chunks, tokens) == (2, 8)
    starts, lens = np.zeros((2, 2), np.int32), np.zeros((2, 3), np.int32)
    folio.mla_context_chunks(**args, seq_starts=starts, cu_seq_lens=lens)
    assert starts.tolist() == [[0, 0], [8, 8]] and lens.tolist() == [[0, 8, 11], [0, 2, 2]]
    with pytest.raises(folio.InvalidArgumentError):
        folio.mla_context_chunks(**args, seq_starts=starts, cu_seq_lens=lens[:1])
    assert folio.mla_context_tokens(4096, 256, 16) == 32768


def test_splits_and_orders():
    out = np.zeros(4, np.int32)
    folio.split_decodes_and_prefills(decode_threshold=1, query_lens=[1, 1, 7, 9], out=out)
    assert out.tolist() == [2, 2, 2, 16]

    order, swaps = np.zeros(3, np.int32), np.zeros(6, np.int32)
    count = folio.reorder_batch(decode_threshold=1, query_lens=[5, 1, 1], order=order, swaps=swaps)
    assert sorted(order[:2].tolist()) == [1, 2] and count == 1
    with pytest.raises(folio.ShapeError, match="query_lens has 3, context_lens has 2"):
        folio.reorder_batch(decode_threshold=1, query_lens=[5, 1, 1], context_lens=[0, 1], order=order)

    splits, keys = np.zeros(3, np.int32), np.zeros(3, np.int32)
    folio.num_kv_splits(kv_lens=[1, 257], out=splits, keys_per_split=keys)
    assert splits.tolist() == [1, 2, 1] and keys[2] == 0

    folio.balanced_kv_splits(num_heads=8, num_kv_heads=2, num_sms=0, seq_lens=[10, 20], out=splits[:2])
    assert splits[:2].tolist() == [8, 8]

    assert folio.use_cascade(common_prefix_len=10, num_heads=8, num_kv_heads=2, num_sms=132, query_lens=[1] * 20) == 0

    metadata, parts = np.zeros((8, 8), np.int32), np.zeros(3, np.int32)
    used = folio.flashmla_metadata(
        num_sms=8,
        q_len=1,
        num_heads=128,
        num_kv_heads=1,
        seq_lens=[100, 3000],
        tile_scheduler_metadata=metadata,
        num_splits=parts,
    )
    assert 1 <= used <= 8 and parts[0] == 0 and parts[2] >= 2


def test_arrays_that_are_refused():
    args = {"world_size": 2, "rank": 0}
    with pytest.raises(folio.DtypeError, match="lengths is .*int64.* int32 on the host"):
        folio.cp_local_lengths(**args, lengths=np.array([1, 2]), out=np.zeros(2, np.int32))
    with pytest.raises(folio.ShapeError, match="out has the strides"):
        folio.cp_local_lengths(**args, lengths=[1, 2], out=np.zeros((2, 2), np.int32)[:, 0])
    with pytest.raises(folio.InvalidArgumentError, match="lengths"):
        folio.cp_local_lengths(**args, lengths=[1, 2**40], out=np.zeros(2, np.int32))
    frozen = np.zeros(2, np.int32)
    frozen.flags.writeable = False
    with pytest.raises(folio.InvalidArgumentError, match="out is read-only"):
        folio.cp_local_lengths(**args, lengths=[1, 2], out=frozen)
