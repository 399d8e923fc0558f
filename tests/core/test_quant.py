"""Weight formats against the vectors of the published format, and properties of the two encoders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_core import quant
from ninfer_core.errors import ContentError, ConvertError, GeometryError, UnknownIdentityError

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "quant_vectors.json").read_text())
torch.set_num_threads(1)


def words16(text: str) -> torch.Tensor:
    return torch.tensor([int(w, 16) for w in text.split()], dtype=torch.int32).to(torch.int16)


def bf16_matrix(rows: list[str]) -> torch.Tensor:
    return torch.stack([words16(r) for r in rows]).view(torch.bfloat16)


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def lcg_matrix(seed: int, shape: list[int]) -> torch.Tensor:
    x, words = seed, []
    for _ in range(shape[0] * shape[1]):
        x = (1664525 * x + 1013904223) % 2**32
        words.append((x >> 31) << 15 | (118 + ((x >> 24) & 7)) << 7 | ((x >> 8) & 127))
    return torch.tensor(words, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(shape)


@pytest.mark.parametrize("v", VECTORS["quantized"], ids=lambda v: v["name"])
def test_vector(v):
    fmt, (n, k) = v["format"], v["shape"]
    w = bf16_matrix(v["input_bf16"])
    assert w.shape == (n, k)
    p = quant.planes(fmt, (n, k))
    assert (p.k_pad, p.groups) == (v["k_pad"], v["groups_per_row"])
    want = v["planes"]
    assert (p.base_row * n, p.high_offset, p.high_row * n, p.scale_offset, p.scale_row * n, p.nbytes) == tuple(
        want[key] for key in ("base_bytes", "high_offset", "high_bytes", "scale_offset", "scale_bytes", "payload_bytes")
    )
    codes, scales = quant.quantize(w, fmt)
    assert codes[:, :k].tolist() == v["codes"]
    assert not codes[:, k:].any()
    assert [" ".join(f"{s & 0xFFFF:04x}" for s in row) for row in scales.view(torch.int16).tolist()] == v["scale_words"]
    payload = quant.encode(w, fmt)
    b, h, s = p.spans(0, n)
    assert [raw(payload[slice(*r)]).hex() for r in (b, h, s)] == [v["base_hex"], v["high_hex"], v["scale_hex"]]
    assert hashlib.sha256(raw(payload)).hexdigest() == v["payload_sha256"]
    words = quant.decode(payload, fmt, (n, k)).view(torch.int32).tolist()
    # the vectors write a zero product without its sign
    got = [" ".join("00000000" if w & 0x7FFFFFFF == 0 else f"{w & 0xFFFFFFFF:08x}" for w in row) for row in words]
    assert got == v["dequant_f32"]
    back_codes, back_scales = quant.unpack(payload, fmt, (n, k))
    assert torch.equal(back_codes, codes) and torch.equal(back_scales, scales)
    quant.check(payload, fmt, (n, k))


@pytest.mark.parametrize("v", VECTORS["pseudo_random"], ids=lambda v: v["format"])
def test_pseudo_random(v):
    w = lcg_matrix(v["seed"], v["shape"])
    assert hashlib.sha256(raw(w)).hexdigest() == v["input_sha256"]
    payload = quant.encode(w, v["format"])
    assert payload.numel() == v["payload_bytes"] == quant.payload_bytes(v["format"], v["shape"])
    assert hashlib.sha256(raw(payload)).hexdigest() == v["payload_sha256"]
    codes, scales = quant.unpack(payload, v["format"], v["shape"])
    assert codes[0, :8].tolist() == v["first_codes"]
    first = [f"{s:04x}" for s in scales.view(torch.int16)[0, :4].tolist()]
    assert first == v["first_scales"].split()
    decoded = quant.decode(payload, v["format"], v["shape"])
    decoded = torch.where(decoded == 0, torch.zeros_like(decoded), decoded)
    assert hashlib.sha256(raw(decoded)).hexdigest() == v["dequant_f32_sha256"]


@pytest.mark.parametrize("v", VECTORS["direct"], ids=lambda v: v["name"])
def test_direct(v):
    f = quant.format_of(v["format"])
    words = [int(w, 16) for w in v["words"].split()]
    store, wide = (torch.int16, torch.int32) if f.bits == 16 else (torch.int32, torch.int64)
    t = torch.tensor(words, dtype=wide).to(store).view(quant.DTYPES[f.name]).reshape(v["shape"])
    payload = quant.encode(t, f.name)
    assert raw(payload).hex() == v["payload_hex"]
    back = quant.decode(payload, f.name, v["shape"], dtype=quant.DTYPES[f.name])
    assert back.shape == t.shape and raw(back) == raw(t)


@pytest.mark.parametrize("v", VECTORS["encoder_rejects"], ids=lambda v: v["format"])
@pytest.mark.parametrize("search", [False, True])
def test_limits(v, search):
    for word in v["reject_words"]:
        w = torch.zeros(3, 128, dtype=torch.bfloat16)
        w[2, 7] = words16(word).view(torch.bfloat16)[0]
        with pytest.raises(ConvertError, match="row 2"):
            quant.encode(w, v["format"], search=search)
    w = torch.zeros(1, 64, dtype=torch.bfloat16)
    w[0, 0] = words16(v["last_accepted_word"]).view(torch.bfloat16)[0]
    codes, scales = quant.quantize(w, v["format"])
    assert (int(codes[0, 0]), f"{int(scales.view(torch.int16)[0, 0]):04x}") == (
        v["last_accepted_code"],
        v["last_accepted_scale"],
    )


@pytest.mark.parametrize("fmt", [quant.Q4, quant.Q5, quant.Q6, quant.W8])
@pytest.mark.parametrize("search", [False, True])
def test_row_blocks_do_not_matter(fmt, search):
    w = torch.randn(37, 330, generator=torch.Generator().manual_seed(5))
    codes, scales = quant.quantize(w, fmt, search=search)
    for a, b in ((0, 1), (1, 8), (36, 37)):
        c, s = quant.quantize(w[a:b], fmt, search=search)
        assert torch.equal(c, codes[a:b]) and torch.equal(s, scales[a:b])
    payload = quant.pack(codes, scales, fmt, 330)
    whole = quant.decode(payload, fmt, w.shape)
    assert torch.equal(quant.decode(payload, fmt, w.shape, rows=(5, 20)), whole[5:20])


def relative_error(w: torch.Tensor, fmt: str, search: bool) -> float:
    back = quant.decode(quant.encode(w, fmt, search=search), fmt, w.shape)
    return float((back - w.float()).norm() / w.float().norm())


def gaussian(rows: int) -> torch.Tensor:
    return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()


def student(rows: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    chi = torch.randn(5, rows, 1024, generator=g).square().sum(0)
    return (torch.randn(rows, 1024, generator=g) / (chi / 5).sqrt()).bfloat16()


@pytest.mark.parametrize(
    ("fmt", "make", "maxabs", "search"),
    [
        (quant.Q4, gaussian, 0.108, 0.0950),
        (quant.Q4, student, 0.146, 0.1300),
        (quant.Q5, gaussian, 0.0505, 0.0475),
        (quant.Q5, student, 0.069, 0.065),
        (quant.Q6, gaussian, 0.0243, 0.0233),
        (quant.Q6, student, 0.0331, 0.0320),
        (quant.W8, gaussian, 0.00535, 0.00523),
        (quant.W8, student, 0.00676, 0.00668),
    ],
)
def test_search_lowers_the_error(fmt, make, maxabs, search):
    w = make(256)
    assert relative_error(w, fmt, False) == pytest.approx(maxabs, rel=0.02)
    assert relative_error(w, fmt, True) <= search


@pytest.mark.parametrize("fmt", [quant.Q4, quant.Q5, quant.Q6, quant.W8])
def test_search_is_never_worse_in_any_group_and_is_valid(fmt):
    g = torch.Generator().manual_seed(9)
    exponent = torch.randint(-24, 12, (64, 8, 1), generator=g)
    w = (torch.randn(64, 8, 64, generator=g) * torch.exp2(exponent.float())).view(64, 512).bfloat16()
    w[3] = 0
    w[4, 64:128] = 0

    def errors(search: bool) -> torch.Tensor:
        payload = quant.encode(w, fmt, search=search)
        quant.check(payload, fmt, w.shape)
        d = quant.decode(payload, fmt, w.shape).double() - w.double()
        return d.square().view(64, 8, 64).sum(2)

    plain, best = errors(False), errors(True)
    assert (best <= plain * (1 + 1e-5)).all()
    assert best.sum() < plain.sum()


def test_check_names_what_is_wrong():
    w = torch.randn(4, 140, generator=torch.Generator().manual_seed(3))
    for fmt in (quant.Q4, quant.Q5, quant.Q6, quant.W8):
        good = quant.encode(w, fmt)
        p, f = quant.planes(fmt, w.shape), quant.format_of(fmt)
        scale_at = p.scale_offset + p.scale_row  # row 1, group 0

        def damaged(at: int, value: bytes, good=good) -> torch.Tensor:
            out = good.clone()
            out[at : at + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
            return out

        for word in (b"\x00\x80", b"\x00\x7c", b"\x01\x7e", b"\x00\xb0"):
            with pytest.raises(ContentError, match=r"row 1, group 0: scale word"):
                quant.check(damaged(scale_at, word), fmt, w.shape)
        with pytest.raises(ContentError, match="although the scale is 0"):
            quant.check(damaged(scale_at, b"\0\0"), fmt, w.shape)
        last = p.base_row - 1  # a padding column of row 0
        with pytest.raises(ContentError, match=r"padding|scale is 0"):
            quant.check(damaged(last, b"\x11"), fmt, w.shape)
        with pytest.raises(ContentError, match=r"padding"):
            quant.check(damaged(p.scale_offset + p.scale_row - 2, b"\x00\x3c"), fmt, w.shape)
        if p.high_offset > p.rows * p.base_row:
            with pytest.raises(ContentError, match="after the base plane"):
                quant.check(damaged(p.high_offset - 1, b"\x01"), fmt, w.shape)
        if f.bits == 8:
            with pytest.raises(ContentError, match="-128"):
                quant.check(damaged(0, b"\x80"), fmt, w.shape)


def test_wrong_use():
    with pytest.raises(UnknownIdentityError, match="Q4G32_F16S"):
        quant.payload_bytes("Q4G32_F16S", (1, 64))
    for shape in ((64,), (1, 1, 64)):
        with pytest.raises(GeometryError, match="matrices"):
            quant.payload_bytes(quant.Q4, shape)
    with pytest.raises(ConvertError, match="rounded"):
        quant.encode(torch.zeros(4), quant.BF16)
    with pytest.raises(GeometryError, match="bytes"):
        quant.decode(torch.zeros(10, dtype=torch.uint8), quant.Q4, (1, 64))
    assert raw(quant.encode(torch.tensor([1.5, -0.0], dtype=torch.bfloat16), quant.FP32)).hex() == "0000c03f00000080"


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.sampled_from([quant.Q4, quant.Q5, quant.Q6, quant.W8]),
    n=st.integers(1, 9),
    k=st.integers(1, 400),
    seed=st.integers(0, 2**31),
)
def test_any_legal_payload_survives_packing(fmt, n, k, seed):
    """Codes another encoder may write, the lowest one included, for any shape; decode is the exact product."""
    g, f, p = torch.Generator().manual_seed(seed), quant.format_of(fmt), quant.planes(fmt, (n, k))
    codes = torch.randint(f.qmin, f.qmax + 1, (n, p.k_pad), generator=g).to(torch.int8)
    codes[:, k:] = 0
    scales = torch.randint(1, 0x7C00, (n, p.groups), generator=g).to(torch.int16).view(torch.float16)
    scales[:, quant.up(k, f.group) // f.group :] = 0
    payload = quant.pack(codes, scales, fmt, k)
    assert payload.numel() == quant.payload_bytes(fmt, (n, k))
    back, back_scales = quant.unpack(payload, fmt, (n, k))
    assert torch.equal(back, codes) and torch.equal(back_scales, scales)
    quant.check(payload, fmt, (n, k))
    exact = codes[:, :k].double() * scales.double().repeat_interleave(f.group, 1)[:, :k]
    assert torch.equal(quant.decode(payload, fmt, (n, k)).double(), exact)
    # the address of one element, computed from the written formulas
    row, column = int(torch.randint(n, (1,), generator=g)), int(torch.randint(k, (1,), generator=g))
    b, h, _ = p.spans(row, row + 1)
    if f.bits == 8:
        word = int(payload[b[0] + column])
    else:
        word = int(payload[b[0] + column // 2]) >> (4 * (column % 2)) & 15
        if f.bits == 5:
            word |= (int(payload[h[0] + column // 8]) >> (column % 8) & 1) << 4
        if f.bits == 6:
            word |= (int(payload[h[0] + column // 4]) >> (2 * (column % 4)) & 3) << 4
    assert (word - 2**f.bits if word >= 2 ** (f.bits - 1) else word) == int(codes[row, column])


@pytest.mark.parametrize("fmt", [quant.Q5, quant.W8, quant.FP32, quant.BF16])
def test_unaligned_bytes(fmt):
    """A payload may lie at any address of a mapped file."""
    w = torch.randn(3, 128, generator=torch.Generator().manual_seed(4)).to(
        torch.float32 if fmt == quant.FP32 else torch.bfloat16
    )
    payload = quant.encode(w, fmt)
    for shift in (1, 2):
        buffer = bytearray(shift) + raw(payload)
        moved = torch.frombuffer(buffer, dtype=torch.uint8)[shift:]
        assert torch.equal(quant.decode(moved, fmt, w.shape), quant.decode(payload, fmt, w.shape))
        quant.check(moved, fmt, w.shape)
