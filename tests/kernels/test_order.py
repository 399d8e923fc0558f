"""Kernel order: a published payload keeps its values and its bytes on the way in and back, in every format."""

import pytest
import torch

from ninfer_core import quant
from ninfer_core.kernels._order import GROUP, from_kernel_order, pack_codes, to_kernel_order, unpack_payload


@pytest.mark.parametrize("name", (quant.Q4, quant.Q5, quant.Q6, quant.W8))
@pytest.mark.parametrize(("rows", "columns"), ((16, 128), (48, 384)))
def test_payload_to_kernel_order_and_back(name, rows, columns):
    torch.manual_seed(rows)
    short = name[:2]
    f = quant.format_of(name)
    codes = torch.randint(f.qmin, f.qmax + 1, (rows, columns)).to(torch.int8)  # every code, the lowest one too
    scales = (torch.rand(rows, columns // GROUP[short]) + 0.1).half()
    payload = quant.pack(codes, scales, name)
    found, steps = unpack_payload(payload, short, rows, columns)
    assert torch.equal(found, codes)
    assert torch.equal(steps, scales)
    matrix = to_kernel_order(payload, short, rows, columns)
    back, steps = from_kernel_order(matrix)
    assert torch.equal(back, codes)
    assert torch.equal(steps, scales)
    values = back.float().view(rows, -1, GROUP[short]) * steps.float()[..., None]
    assert torch.equal(values.view(rows, columns), quant.decode(payload, name, (rows, columns)))
    assert matrix.nbytes == rows * columns * f.bits // 8 + scales.numel() * 2


def test_a_lane_holds_its_registers_side_by_side():
    codes = torch.zeros(16, 64, dtype=torch.int8)
    codes[9, 4 * 3 + 16 + 2] = 5  # row 9 = g 1 of the lower half, c = 3, second half of K: register 3, byte 2
    matrix = pack_codes(codes, torch.ones(16, 2).half(), "W8")
    assert matrix.words.nonzero().tolist() == [[0, 0, 4 * 1 + 3, 3]]
    assert matrix.words[0, 0, 7, 3] == 5 << 16


@pytest.mark.parametrize(("rows", "columns"), ((8, 64), (16, 96)))
def test_refuses_shapes_that_do_not_tile(rows, columns):
    with pytest.raises(ValueError, match="multiples of 16"):
        pack_codes(torch.zeros(rows, columns, dtype=torch.int8), torch.ones(rows, columns // 32).half(), "W8")
