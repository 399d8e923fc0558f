"""Weight formats: Q4/Q5/Q6 (groups of 64), W8 (groups of 32), BF16, FP32, I32: sizes, encode, decode, checks.

A grouped matrix `[N, K]` is stored as up to three planes, each starting at a multiple of 256 bytes:

    base    the low 4 bits of every code, two columns a byte (W8: the whole code, one byte)
    high    Q5: bit 4, eight columns a byte;  Q6: bits 4 and 5, four columns a byte
    scale   one binary16 a group, K padded to a multiple of 128

A run of rows is contiguous in each plane, so everything here works on blocks of rows: a matrix of any size is encoded,
decoded and checked in bounded memory, and a block gives the same bytes as the whole.

The value of a code is the exact binary32 product `scale * code`. Two encoders produce codes and scales:

* `maxabs` (`MAXABS_F16_RECIP_RNE_V1`): the largest magnitude of a group becomes code qmax. It reproduces published
  files bit for bit, so the order of its roundings is part of its definition.
* `search`: tries a fixed list of smaller scales and least-squares refits per group and keeps what has the smallest
  squared error. Same format, same size, less error; ties go to `maxabs`, so it is never worse. Relative RMS error:

                Gaussian weights        Student t, 5 degrees of freedom
                maxabs     search       maxabs     search
          Q4    10.76 %    9.50 %       14.62 %    12.94 %
          Q5     5.02 %    4.68 %        6.84 %     6.43 %
          Q6     2.43 %    2.31 %        3.31 %     3.18 %
          W8     0.535 %   0.520 %       0.676 %    0.663 %
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .errors import ContentError, ConvertError, GeometryError
from .formats import (
    BF16,
    FORMATS,
    FP32,
    I32,
    K_ALIGN,
    PLANE_ALIGN,
    Q4,
    Q5,
    Q6,
    W8,
    Format,
    Planes,
    format_of,
    payload_bytes,
    planes,
    up,
)

__all__ = [
    "BF16", "DTYPES", "ENCODERS", "FORMATS", "FP32", "I32", "K_ALIGN", "PLANE_ALIGN", "Q4", "Q5", "Q6", "W8", "Format",
    "Planes", "check", "decode", "encode", "format_of", "pack", "pack_rows", "payload_bytes", "planes", "quantize",
    "row_blocks", "unpack", "up",
]  # fmt: skip

ENCODERS = ("search", "maxabs")
BLOCK_WEIGHTS = 1 << 18  # rows are handled in blocks of about this many weights: temporaries stay in the caches
DTYPES = {BF16: torch.bfloat16, FP32: torch.float32, I32: torch.int32}
"""Element type of the formats that are stored element by element."""


def row_blocks(rows: int, columns: int, weights: int = BLOCK_WEIGHTS) -> Iterator[tuple[int, int]]:
    """Split `rows` into ranges of about `weights` elements, at least one row each."""
    step = max(1, weights // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


# --- codes and scales ----------------------------------------------------------------------------------------------


def quantize(w: torch.Tensor, fmt: str, *, search: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose codes and scales for a matrix.

    Args:
        w: `[N, K]`, any float type; every value is converted to binary32 first.
        fmt: a grouped format.
        search: minimise the squared error per group instead of the published max-abs rule.

    Returns:
        codes int8 `[N, K_pad]` (padding columns 0) and scales float16 `[N, groups]`, on the device of `w`.

    Raises:
        ConvertError: a value is NaN or infinite, or too large for a binary16 scale.
    """
    p, f = planes(fmt, w.shape), format_of(fmt)
    codes = torch.empty(p.rows, p.k_pad, dtype=torch.int8, device=w.device)
    scales = torch.empty(p.rows, p.groups, dtype=torch.float16, device=w.device)
    for start, stop in row_blocks(p.rows, p.k_pad):
        x = w[start:stop].float()
        if p.k_pad != p.columns:
            x = torch.nn.functional.pad(x, (0, p.k_pad - p.columns))
        x = x.reshape(-1, f.group)
        scale, inverse = _maxabs_scales(x, f, start, p.groups)
        q = _codes(x, inverse, f)
        if search:
            q, scale = _search(x, q, scale, f)
        codes[start:stop] = q.to(torch.int8).view(stop - start, p.k_pad)
        scales[start:stop] = scale.view(stop - start, p.groups)
    return codes, scales


def _maxabs_scales(x: torch.Tensor, f: Format, row: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Binary16 scale and binary32 reciprocal of every group of `x` `[M, G]`.

    Runs on the CPU whatever the device: accelerators may turn a division by a constant into a multiplication by its
    reciprocal, which changes the rounding of the scale. It touches one value a group.
    """
    peak = x.abs().amax(dim=1).cpu()
    if not bool(torch.isfinite(peak).all()):
        bad = int((~torch.isfinite(peak)).nonzero()[0]) // groups
        raise ConvertError(f"row {row + bad} holds a NaN or an infinity; such a weight cannot be quantized")
    scale = (peak / torch.full_like(peak, float(f.qmax))).to(torch.float16)
    scale[(scale == 0) & (peak > 0)] = 2.0**-24  # a group that is not all zero never gets scale 0
    if bool(torch.isinf(scale).any()):
        bad = int(torch.isinf(scale).nonzero()[0])
        raise ConvertError(
            f"row {row + bad // groups}: magnitude {float(peak[bad]):g} needs a scale above the binary16 limit 65504 "
            f"in {f.name} (code {f.qmax})"
        )
    return scale.to(x.device), _reciprocal(scale).to(x.device)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Binary32 reciprocal of binary16 scales on the CPU; 0 for 0."""
    wide = scale.float()
    return torch.where(wide > 0, torch.ones_like(wide) / wide, torch.zeros_like(wide))


def _codes(x: torch.Tensor, inverse: torch.Tensor, f: Format) -> torch.Tensor:
    """Codes as whole binary32 numbers: round half to even, then clamp."""
    return (x * inverse[:, None]).round_().clamp_(f.qmin, f.qmax)


# Scales tried by the search, as multiples of the max-abs scale. Below 1 the largest values clip and the rest gets
# finer; the fewer levels a format has, the more clipping pays. Refits then move the winner to its least-squares scale.
_FACTORS = {
    4: (0.72, 0.78, 0.83, 0.88, 0.92, 0.96),
    5: (0.82, 0.86, 0.90, 0.93, 0.96, 0.98),
    6: (0.86, 0.89, 0.92, 0.94, 0.96, 0.98),
    8: (0.975, 0.985, 0.993),
}
_REFITS = 2


def _search(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, f: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of the max-abs result and a fixed list of other scales, by squared error. `x`, `q` `[M, G]`."""
    best, best_error = scale.float(), _squared_error(x, q, scale.float())
    first = best

    def consider(candidate: torch.Tensor) -> None:
        nonlocal best, best_error, q
        s = candidate.to(torch.float16).float()
        s = torch.where(torch.isfinite(s) & (s > 0), s, first)
        codes = _codes(x, _reciprocal(s.cpu()).to(x.device), f)
        error = _squared_error(x, codes, s)
        better = error < best_error
        best, best_error = torch.where(better, s, best), torch.where(better, error, best_error)
        q = torch.where(better[:, None], codes, q)

    for factor in _FACTORS[f.bits]:
        consider(first * factor)
    for _ in range(_REFITS):
        power = _group_sum(q * q)
        consider(torch.where(power > 0, _group_sum(x * q) / power.clamp_min(1), first))
    return q, best.to(torch.float16)


def _squared_error(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    difference = torch.addcmul(x, q, scale[:, None], value=-1)
    return _group_sum(difference.mul_(difference))


def _group_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the group axis by halving: the same order on every device, at every block size."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


# --- bytes ---------------------------------------------------------------------------------------------------------


def pack_rows(codes: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes int8 `[n, K_pad]` -> bytes of the base plane `[n, base_row]` and of the high plane (or None)."""
    f = format_of(fmt)
    if f.bits == 8:
        return codes.view(torch.uint8), None
    codes = codes.contiguous()
    pairs = codes.view(torch.int16)
    base = ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)
    if f.bits == 5:  # bit 4 of eight bytes, gathered into the top byte by one multiplication
        bits = (codes.view(torch.int64) >> 4) & 0x0101010101010101
        return base, ((bits * 0x0102040810204080) >> 56).to(torch.uint8)
    if f.bits == 6:  # bits 4-5 of four bytes, likewise
        bits = ((codes.view(torch.int32) >> 4) & 0x03030303).to(torch.int64)
        return base, ((bits * 0x01041040) >> 24).to(torch.uint8)
    return base, None


def pack(codes: torch.Tensor, scales: torch.Tensor, fmt: str, columns: int | None = None) -> torch.Tensor:
    """Codes int8 `[N, K_pad]` and scales float16 `[N, groups]` -> payload uint8 `[payload_bytes]`."""
    p = planes(fmt, (codes.shape[0], columns or codes.shape[1]))
    out = torch.zeros(p.nbytes, dtype=torch.uint8, device=codes.device)
    for start, stop in row_blocks(p.rows, p.k_pad):
        base, high = pack_rows(codes[start:stop], fmt)
        b, h, _ = p.spans(start, stop)
        out[slice(*b)] = base.reshape(-1)
        if high is not None:
            out[slice(*h)] = high.reshape(-1)
    _, _, s = p.spans(0, p.rows)
    out[slice(*s)] = scales.contiguous().view(torch.uint8).reshape(-1)
    return out


def unpack(
    payload: torch.Tensor, fmt: str, shape: Sequence[int], rows: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload uint8 -> codes int8 `[n, K_pad]` and scales float16 `[n, groups]` of a row range (default: all rows)."""
    p, f = planes(fmt, shape), format_of(fmt)
    start, stop = rows or (0, p.rows)
    b, h, s = p.spans(start, stop)
    n = stop - start
    base = payload[slice(*b)].view(n, p.base_row)
    scales = _aligned(payload[slice(*s)], 2).view(torch.float16).view(n, p.groups)
    if f.bits == 8:
        return base.view(torch.int8), scales
    u = torch.stack((base & 0x0F, base >> 4), dim=2).view(n, p.k_pad)
    if f.high_bits:
        per_byte = 8 // f.high_bits
        shifts = torch.arange(per_byte, dtype=torch.uint8, device=u.device) * f.high_bits
        high = (payload[slice(*h)].view(n, p.high_row, 1) >> shifts) & (2**f.high_bits - 1)
        u = u | (high << 4).view(n, p.k_pad)
    sign = 1 << (f.bits - 1)
    return ((u ^ sign).to(torch.int8) - sign), scales


def encode(w: torch.Tensor, fmt: str, *, search: bool = False) -> torch.Tensor:
    """Encode a tensor.

    Args:
        w: grouped formats: `[N, K]` of any float type. BF16, FP32, I32: any shape; the dtype must already be the one
            stored, except that BF16 widens to FP32, because that is exact.
        fmt: a name of `FORMATS`.
        search: see `quantize`; ignored by direct formats, which store values unchanged.

    Returns:
        payload uint8 `[payload_bytes(fmt, w.shape)]`.

    Raises:
        ConvertError: a value or dtype the format cannot hold.
    """
    f = format_of(fmt)
    if f.grouped:
        codes, scales = quantize(w, fmt, search=search)
        return pack(codes, scales, fmt, w.shape[1])
    dtype = DTYPES[f.name]
    if w.dtype != dtype and not (f.name == FP32 and w.dtype == torch.bfloat16):
        raise ConvertError(f"{fmt} stores {dtype}; a tensor of {w.dtype} would have to be rounded")
    return w.to(dtype).contiguous().reshape(-1).view(torch.uint8)


def decode(
    payload: torch.Tensor,
    fmt: str,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    rows: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Decode a payload.

    Grouped values are the binary32 products `scale * code`, then converted to `dtype`. Direct float formats are
    converted to `dtype`; I32 stays int32 whatever `dtype` says.

    Args:
        payload: uint8 `[payload_bytes(fmt, shape)]`, on any device.
        fmt: a name of `FORMATS`.
        shape: the logical shape.
        dtype: of the result.
        rows: grouped formats only: decode this row range.

    Returns:
        The tensor in its logical shape (`[rows, K]` for a row range).
    """
    f = format_of(fmt)
    if payload.numel() != payload_bytes(fmt, shape):
        raise GeometryError(f"{fmt} {list(shape)} takes {payload_bytes(fmt, shape):,} bytes, got {payload.numel():,}")
    if not f.grouped:
        values = _aligned(payload, f.bits // 8).view(DTYPES[f.name]).view(tuple(shape))
        return values if f.name == I32 else values.to(dtype)
    p = planes(fmt, shape)
    first, last = rows or (0, p.rows)
    out = torch.empty(last - first, p.columns, dtype=dtype, device=payload.device)
    for a, b in row_blocks(last - first, p.k_pad):
        codes, scales = unpack(payload, fmt, shape, (first + a, first + b))
        values = codes.view(b - a, p.groups, f.group).float() * scales.float()[:, :, None]
        out[a:b] = values.view(b - a, p.k_pad)[:, : p.columns]
    return out


def check(payload: torch.Tensor, fmt: str, shape: Sequence[int], name: str = "object") -> None:
    """Check the stored values of a grouped payload (direct formats allow every bit pattern).

    Raises:
        ContentError: a scale is negative, -0, infinite or NaN; a W8 code is -128; a code is not 0 where its scale is 0
            or in a padding column; a padding group has a scale; bytes between planes are not 0.
    """
    f = format_of(fmt)
    if not f.grouped:
        return
    p = planes(fmt, shape)
    for what, first, last in (
        ("base", p.rows * p.base_row, p.high_offset),
        ("high", p.high_offset + p.rows * p.high_row, p.scale_offset),
    ):
        if bool(payload[first:last].any()):
            raise ContentError(f"{name}: bytes after the {what} plane ({first:,} to {last:,}) are not zero")
    real_groups = up(p.columns, f.group) // f.group
    for start, stop in row_blocks(p.rows, p.k_pad, 16 * BLOCK_WEIGHTS):
        n, (base, _, span) = stop - start, p.spans(start, stop)
        words = _aligned(payload[slice(*span)], 2).view(torch.int16).view(n, p.groups)
        bad = (words < 0) | (words >= 0x7C00)
        if bool(bad.any()):
            row, group = (int(i) for i in bad.nonzero()[0])
            word = int(words[row, group]) & 0xFFFF
            raise ContentError(f"{name}: row {start + row}, group {group}: scale word {word:04x} is not +0 or positive")
        if f.bits == 8 and bool((payload[slice(*base)] == 0x80).any()):
            raise ContentError(f"{name}: a code of rows {start} to {stop - 1} is -128, outside the W8 range -127..127")
        if p.k_pad == p.columns and bool(words.all()):
            continue  # under a positive scale every other code is legal
        codes, _ = unpack(payload, fmt, shape, (start, stop))
        orphan = (codes.view(n, p.groups, f.group) != 0).any(dim=2) & (words == 0)
        if bool(orphan.any()):
            row, group = (int(i) for i in orphan.nonzero()[0])
            raise ContentError(f"{name}: row {start + row}, group {group}: codes are not 0 although the scale is 0")
        if bool(codes[:, p.columns :].any()) or bool(words[:, real_groups:].any()):
            raise ContentError(f"{name}: padding columns from {p.columns} on hold codes or scales")


def _aligned(raw: torch.Tensor, word: int) -> torch.Tensor:
    """The same bytes at an address that is a multiple of `word`, as a view of words of that size needs it."""
    return raw.clone() if raw.data_ptr() % word else raw
