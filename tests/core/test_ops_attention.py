"""Gated attention on pages and the KV codec against loops over heads and tokens in fp64."""

from __future__ import annotations

import pytest
import torch

from ninfer_core.kernels._op import RowCall
from ninfer_core.kernels.attention import attention_chunk, attention_rows, kv_append, kv_encode, kv_fill, kv_read
from ninfer_core.kernels.rope import rope_tables
from tests.cases import tiny_config
from tests.support import INT8_KV, ONE_OP, error, poisoned_state, same_bits

torch.set_num_threads(1)
H, K, D = 4, 2, 256
CONFIG = tiny_config("dense")
TABLE = torch.tensor([4, 1, 5, 0, 2])
G = torch.Generator().manual_seed(0)
SHAPE = (H, K, 1e-6)


def inputs(rows):
    return torch.randn(rows, 2 * (H + K) * D, generator=G), 1 + torch.randn(H + K, D, generator=G) * 0.3


def layer(kv_dtype="fp32"):
    return poisoned_state(CONFIG, slots=1, pages=6, kv_dtype=kv_dtype).kv[0]


def tables(start, rows):
    return rope_tables(torch.arange(start, start + rows), 64, 1e7)


def oracle(proj, gain):
    """All rows from token 0, one head and one token at a time."""
    cos, sin = (t.double() for t in tables(0, len(proj)))
    heads = proj.double()[:, : (H + K) * D].unflatten(1, (-1, D))
    heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    part = heads[..., :64]
    turned = torch.cat((part * cos + torch.cat((part[..., 32:], part[..., :32]), -1) * sin, heads[..., 64:]), -1)
    gate = torch.sigmoid(proj.double()[:, (H + K) * D : (2 * H + K) * D].unflatten(1, (H, D)))
    v = proj.double()[:, (2 * H + K) * D :].unflatten(1, (K, D))
    out = torch.zeros(len(proj), H, D, dtype=torch.float64)
    for t in range(len(proj)):
        for h in range(H):
            g = h // (H // K)
            weight = torch.softmax(turned[: t + 1, H + g] @ turned[t, h] / 16, 0)
            out[t, h] = weight @ v[: t + 1, g] * gate[t, h]
    return out.flatten(1)


def call(start, rows, only=None):
    zero = torch.zeros(1, dtype=torch.int64)
    return RowCall(zero, zero + start, zero, TABLE[None], *tables(start, rows), rows, only)


@pytest.mark.parametrize("start", [1, 62, 63, 64, 65])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_behind_a_chunk(start, rows):
    """Rows at the borders of a page, behind a chunk of every length modulo the block of 64."""
    proj, gain = inputs(start + rows)
    kv, want = layer(), oracle(proj, gain)
    padded = torch.nn.functional.pad(proj[:start], (0, 0, 0, -start % 64))
    got = attention_chunk(padded, gain, kv, tables(0, len(padded)), (TABLE, 0, start), *SHAPE)[:start]
    assert error(got, want[:start]) < ONE_OP
    got = attention_rows(proj[start:], gain, kv, call(start, rows), *SHAPE)
    assert error(got, want[start:]) < ONE_OP


def test_a_chunk_of_several_tiles_behind_another():
    proj, gain = inputs(300)
    kv, want = layer(), oracle(proj, gain)
    got = []
    for a, b in ((0, 20), (20, 300)):
        padded = torch.nn.functional.pad(proj[a:b], (0, 0, 0, (a - b) % 64))
        out = attention_chunk(padded, gain, kv, tables(a, len(padded)), (TABLE, a, b - a), *SHAPE)
        assert torch.isfinite(out).all()
        got.append(out[: b - a])
    assert error(torch.cat(got), want) < ONE_OP


def test_only_one_row_is_wanted_but_all_are_stored():
    proj, gain = inputs(70)
    full, part = layer("int8"), layer("int8")
    for kv in (full, part):
        kv_fill(proj[:64], gain, kv, tables(0, 64), (TABLE, 0, 62), *SHAPE)
    want = attention_rows(proj[62:66], gain, full, call(62, 4), *SHAPE)
    got = attention_rows(proj[62:66], gain, part, call(62, 4, torch.tensor([2])), *SHAPE)
    assert same_bits(got, want[2:3])
    assert torch.equal(full.codes, part.codes) and torch.equal(
        full.scales.view(torch.int16), part.scales.view(torch.int16)
    )


def test_only_pages_of_the_table_are_written():
    proj, gain = inputs(130)
    kv = layer()
    before = kv.codes.clone()
    kv_fill(proj, gain, kv, tables(0, 130), (TABLE[:3], 0, 130), *SHAPE)
    untouched = [0, 2, 3]
    assert same_bits(kv.codes[:, :, untouched], before[:, :, untouched])
    assert torch.isfinite(kv.codes[:, :, [4, 1]]).all() and torch.isfinite(kv.codes[:, :, 5, :2]).all()
    assert same_bits(kv.codes[:, :, 5, 2:], before[:, :, 5, 2:])


def test_codec_by_its_definition():
    x = torch.randn(2, 3, 256, generator=G) * torch.tensor([1e-3, 1.0, 300.0]).view(3, 1)
    codes, scales = kv_encode(x)
    for place in ((0, 0), (0, 1), (1, 2)):
        for group in range(4):
            values = x[place][64 * group : 64 * group + 64]
            scale = (values.abs().max() / 127).half()
            assert scales[place][group] == scale
            want = [max(-127, min(127, round(float(v / scale.float())))) for v in values]  # Python rounds half to even
            assert codes[place][64 * group : 64 * group + 64].tolist() == want


def test_codec_edges():
    x = torch.zeros(4, 64)
    x[1, :3] = torch.tensor([127.0, 0.5, 1.5])  # scale 1: halves go to the even neighbour
    x[2, 0] = 1e-9  # the scale is 0 in fp16
    x[3, 0] = -5e-6  # a subnormal scale, far off: the code is clamped
    codes, scales = kv_encode(x)
    assert not codes[0].any() and scales[0] == 0
    assert codes[1, :3].tolist() == [127, 0, 2]
    assert not codes[2].any() and scales[2] == 0
    assert codes[3, 0] in (-127, -84)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("fp32", 0.0), ("bf16", 2**-8), ("int8", INT8_KV)])
def test_stored_rows_read_back(kv_dtype, bound):
    kv = layer(kv_dtype)
    k, v = torch.randn(2, 130, K, D, generator=G)
    kv_append(kv, k[:100], v[:100], TABLE, 0)
    kv_append(kv, k[100:], v[100:], TABLE, 100)
    keys, values = kv_read(kv, TABLE, 130)
    assert keys.shape == (K, 192, D)
    for got, want in ((keys, k), (values, v)):
        assert error(got[:, :130], want.transpose(0, 1)) <= bound
