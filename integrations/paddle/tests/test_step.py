"""What is computed once per step: maxima and tiles, slots and positions, cumulative key lengths."""

import os
import subprocess
import sys

import numpy as np
import paddle
import pytest

import folio_paddle_ops as ops
from paddle_devices import cpu_only
from steps import CHUNK, DECODE, IDLE, INACTIVE, MIXED, PROMPT, Step, on_host, tensor

ENC_BLOCK, DEC_BLOCK, GROUP, PAGE = 64, 16, 8, 16


def tiles(counts):
    pairs = [(b, tile) for b, count in enumerate(counts) for tile in range(count)]
    return [b for b, _ in pairs], [tile for _, tile in pairs]


def ceil_div(a, b):
    return -(-int(a) // b)


def maxima(rows):
    """§8.1 of FastDeploy's kernel: new tokens, encoder, decoder, keys, past of pure decodes, keys of rows with a past."""
    active = [(e, d, t) for e, d, t in rows if t > 0]
    most = lambda values: max(values, default=0)
    return [most(t for _, _, t in rows), most(e for e, _, _ in rows), most(d for _, d, _ in rows),
            most(d + t for _, d, t in active), most(d for e, d, _ in active if not e), most(d + t for _, d, t in active if d)]


class Outputs:
    """The in-place tensors, filled with -7."""

    def __init__(self, size=400):
        def made(n):
            return tensor([-7] * n)

        def of_host(n):
            return on_host([-7] * n)

        self.decoder = made(size), made(size)
        self.counts = of_host(1), made(1), made(1)  # cpu, device, chunk
        self.maxima = of_host(9)
        self.encoder, self.encoder_count = (made(size), made(size)), of_host(1)
        self.kv, self.kv_count = (made(size), made(size)), of_host(1)

    def newest(self):
        return [*self.decoder, *self.counts, self.maxima, *self.encoder, self.encoder_count, *self.kv, self.kv_count]


def check_tiles(pair, count, counts):
    ids, tile_ids = tiles(counts)
    assert count.item() == len(ids)
    assert pair[0].numpy()[:len(ids)].tolist() == ids and pair[1].numpy()[:len(ids)].tolist() == tile_ids


ENCODER_TILES = [ceil_div(e * GROUP, ENC_BLOCK) for e, _, _ in MIXED]
DECODER_TILES = [0 if e else ceil_div(t * GROUP, DEC_BLOCK) for e, _, t in MIXED]
KV_TILES = [ceil_div(e + d % PAGE, PAGE) if e else 0 for e, d, _ in MIXED]


def test_tiles_of_append_attention(op):
    step, out = Step(MIXED, column=True), Outputs()
    op("get_block_shape_and_split_kv_block")(*step.lengths(), *out.newest(), ENC_BLOCK, DEC_BLOCK, GROUP, PAGE)
    assert out.maxima.numpy().tolist() == maxima(MIXED) + [-7] * 3
    check_tiles(out.decoder, out.counts[0], DECODER_TILES)
    assert out.counts[1].item() == out.counts[0].item()
    check_tiles(out.encoder, out.encoder_count, ENCODER_TILES)
    check_tiles(out.kv, out.kv_count, KV_TILES)


@pytest.mark.parametrize("rows", [[DECODE, (6, 100, 6)], [(0, 90, 0), PROMPT], [IDLE], [(0, 5, 3), (2, 7, 2), (0, 3, 1)],
                                  [(4, 9, 0), (4, 0, 0), DECODE], [PROMPT, CHUNK]])
def test_maxima(rows):
    """A chunk's past is not a decode's, and an inactive request counts for the lengths and the keys alone."""
    step, out = Step(rows), Outputs()
    ops.folio_get_block_shape_and_split_kv_block(*step.lengths(), *out.newest(), ENC_BLOCK, DEC_BLOCK, GROUP, PAGE)
    assert out.maxima.numpy().tolist() == maxima(rows) + [-7] * 3
    alone = on_host([-7] * 9)
    chunks, fresh, num_keys = ops.folio_max_lengths(*step.lengths(), alone)
    assert alone.numpy().tolist() == maxima(rows) + [-7] * 3
    assert chunks is any(min(e, d, t) > 0 for e, d, t in rows) and fresh is any(min(e, t) > 0 and not d for e, d, t in rows)
    assert num_keys == sum(t + (d if e > 0 else 0) for e, d, t in rows)


def test_signature_with_the_tokens_of_a_decode(op):
    """FastDeploy's 2.3; as the newest one beside that."""
    step, out = Step(MIXED), Outputs()
    op("get_block_shape_and_split_kv_block_v3")(*step.lengths(), *out.newest(), ENC_BLOCK, DEC_BLOCK, GROUP, PAGE, 4)
    assert out.maxima.numpy().tolist()[:6] == maxima(MIXED)
    check_tiles(out.decoder, out.counts[0], DECODER_TILES)
    check_tiles(out.encoder, out.encoder_count, ENCODER_TILES)
    check_tiles(out.kv, out.kv_count, KV_TILES)


def test_middle_signature(op):
    step, out, max_len_kv = Step(MIXED), Outputs(), on_host([-7])
    op("get_block_shape_and_split_kv_block_v2")(
        *step.lengths(), *out.decoder, out.counts[0], out.maxima, *out.encoder, out.encoder_count, *out.kv, out.kv_count,
        max_len_kv, ENC_BLOCK, DEC_BLOCK, GROUP, PAGE, 4)
    assert out.maxima.numpy().tolist()[:6] == maxima(MIXED) and max_len_kv.item() == maxima(MIXED)[5]
    check_tiles(out.decoder, out.counts[0], DECODER_TILES)
    check_tiles(out.encoder, out.encoder_count, ENCODER_TILES)
    check_tiles(out.kv, out.kv_count, KV_TILES)


def test_oldest_signature_has_nine_outputs(op):
    step, out = Step(MIXED), Outputs()
    made = op("get_block_shape_and_split_kv_block_v1")(
        *step.lengths(), *out.decoder, out.counts[0], out.maxima, ENC_BLOCK, DEC_BLOCK, GROUP, PAGE, 4)
    assert len(made) == 9
    check_tiles(made[0:2], made[2], ENCODER_TILES)
    check_tiles(made[3:5], made[5], KV_TILES)
    check_tiles(out.decoder, made[6], DECODER_TILES)
    assert made[8].item() == maxima(MIXED)[5]


MLA_SCRIPT = """
import paddle; paddle.set_device("cpu")
import folio_paddle_ops as ops
t = lambda v: paddle.to_tensor(v, dtype="int32")
ids, tile_ids, count, device_count, chunk, maxima = t([0]*200), t([0]*200), t([9]), t([9]), t([9]), t([0]*6)
unused, kv_ids, kv_tile_ids, kv_count = t([9]), t([9]*4), t([9]*4), t([9])
ops.folio_get_block_shape_and_split_kv_block(
    t([0, 0, 130, 0]), t([4095, 4095, 100, 8191]), t([1, 1, 130, 1]), ids, tile_ids, count, device_count, chunk, maxima,
    unused, unused, unused, kv_ids, kv_tile_ids, kv_count, {shape}, {shape}, {group}, 64)
n = count.item()
print(chunk.item(), n, sorted(set(ids.numpy()[:n].tolist())), tile_ids.numpy()[:3].tolist())
print(kv_count.item(), kv_ids.numpy().tolist(), kv_tile_ids.numpy().tolist())
"""


@cpu_only
@pytest.mark.parametrize("backend, shape, group", [("MLA_ATTN", 64, 16), ("TRITON_MLA_ATTN", -1, 16), ("", -1, -1)])
def test_tiles_of_mla(backend, shape, group):
    """
    The chunk of §8.1's example: 4096, 4096 and 8192 keys on 132 SMs are 128 work items of 128 keys; prompts have none. They
    have tiles of keys, which begin with the block that their cached context ends in. Newer backends pass one tensor for all
    that MLA does not use.
    """
    environment = {**os.environ, "FD_ATTENTION_BACKEND": backend}
    script = MLA_SCRIPT.format(shape=shape, group=group)
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-2:] == ["128 128 [0, 1, 3] [0, 1, 2]", "3 [2, 2, 2, 9] [0, 1, 2, 9]"]


def test_too_little_room_for_tiles_is_refused():
    step, out = Step(MIXED), Outputs(size=2)
    with pytest.raises(RuntimeError, match="batch_ids has room for 2 int32; 5 are needed"):
        ops.folio_get_block_shape_and_split_kv_block(*step.lengths(), *out.newest(), ENC_BLOCK, DEC_BLOCK, GROUP, PAGE)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_positions_and_slots(op, dtype):
    """Active tokens only: what is behind them keeps its value. A page that is not there gives a negative slot."""
    step = Step(MIXED, column=True)
    step.table[7, 0] = -1
    positions, slots = (tensor([-5] * step.num_tokens, kind) for kind in (dtype, "int64"))
    expected_positions, expected_slots = positions.numpy().copy(), slots.numpy().copy()
    for token, request, position in step.tokens():
        page, offset = step.place(request, position)
        expected_positions[token] = position
        expected_slots[token] = page * PAGE + offset if page >= 0 else -1
    batch_ids, _, table = step.tensors()
    op("get_position_ids_and_slot_mapping")(*step.lengths(), batch_ids, table, positions, slots, PAGE)
    np.testing.assert_array_equal(positions.numpy(), expected_positions)
    np.testing.assert_array_equal(slots.numpy(), expected_slots)


@pytest.mark.parametrize("rows", [MIXED, [DECODE, IDLE], [PROMPT], [CHUNK, INACTIVE, CHUNK]])
def test_lengths_of_keys_with_a_past(op, rows):
    step = Step(rows)
    cu, ids, tile_ids, count, total = op("pre_cache_len_concat")(*step.lengths(), 64, PAGE)
    lengths = [(d if e else 0) + t if t else 0 for e, d, t in rows]
    assert cu.numpy().tolist() == [0, *np.cumsum(lengths)]
    assert total.item() == sum(lengths)
    check_tiles((ids, tile_ids), count, [ceil_div(d, PAGE) if e else 0 for e, d, _ in rows])


def test_older_lengths_of_keys(op):
    """FastDeploy's own example: 10, 7 and 3 keys, of which 8, 4 and 2 are cached; decodes count as prompts do."""
    cu, ids, tile_ids, count, total = op("pre_cache_len_concat_v1")(tensor([8, 4, 2]), tensor([2, 3, 1]), 8, 4)
    assert cu.numpy().tolist() == [0, 10, 17, 20] and total.item() == 20
    check_tiles((ids, tile_ids), count, [2, 1, 1])


def test_no_requests(op):
    """R7: B = 0 is a successful no-op."""
    none = tensor([])
    cu, *_, total = op("pre_cache_len_concat")(none, none, none, 8, PAGE)
    assert cu.numpy().tolist() == [0] and total.item() == 0
    positions, slots = tensor([-5], "int64"), tensor([-5], "int64")
    op("get_position_ids_and_slot_mapping")(none, none, none, none, tensor(np.zeros((0, 4))), positions, slots, PAGE)
    assert slots.item() == -5
