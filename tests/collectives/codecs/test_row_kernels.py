import pytest
import torch

from geartrain.collectives.codecs import row_kernels
from geartrain.collectives.codecs.rows import Int4Codec, Int8Codec


def rows_of(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(9, 256, generator=generator) * scale
    rows[3] = 0.0
    rows[4] = 1.5
    return rows


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_composed_bytes_are_the_kernels_format(scale: float) -> None:
    rows = rows_of(1, scale)
    composed, kernel = row_kernels.pack_bytes_composed(rows), row_kernels.pack_bytes(rows)
    assert composed.shape == kernel.shape
    step = (rows.amax(1) - rows.amin(1)).div(255).unsqueeze(1) + 1e-6 * scale
    crossed = row_kernels.unpack_bytes(composed)
    assert bool(((crossed - rows).abs() <= 0.51 * step).all())
    same = row_kernels.unpack_bytes_composed(kernel)
    torch.testing.assert_close(
        same, row_kernels.unpack_bytes(kernel), rtol=1e-6, atol=1e-6 * scale
    )


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_composed_nibbles_are_the_kernels_format(scale: float) -> None:
    rows = rows_of(2, scale)
    composed, kernel = (
        row_kernels.pack_nibbles_composed(rows),
        row_kernels.pack_nibbles(rows),
    )
    assert composed.shape == kernel.shape
    step = (rows.amax(1) - rows.amin(1)).div(15).unsqueeze(1) + 1e-3 * scale
    crossed = row_kernels.unpack_nibbles(composed)
    assert bool(((crossed - rows).abs() <= 0.55 * step).all())
    same = row_kernels.unpack_nibbles_composed(kernel)
    assert torch.equal(same, row_kernels.unpack_nibbles(kernel))


@pytest.mark.parametrize("codec", [Int8Codec(), Int4Codec()])
def test_codecs_work_without_the_kernels(
    codec: Int8Codec | Int4Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(5003, generator=torch.Generator().manual_seed(3))
    code = torch.zeros(codec.encoded_bytes(5003), dtype=torch.uint8)
    codec.encode(values, code)
    by_kernel, composed = torch.empty(5003), torch.empty(5003)
    codec.decode(code, by_kernel)

    monkeypatch.setattr(row_kernels, "_kernel", lambda name, composed: composed)
    codec.decode(code, composed)
    assert torch.equal(composed, by_kernel)
    codec.encode(values, code)
    codec.decode(code, composed)
    assert float((composed - values).norm()) <= 1.01 * float((by_kernel - values).norm())


def test_eight_bit_products_are_exact_so_that_all_processors_agree() -> None:
    codec = Int8Codec()
    values = torch.randn(1024 * 50, generator=torch.Generator().manual_seed(4)) * 3e-7
    code = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, code)
    body = code[8 : 8 + 50 * 1032].view(50, 1032)
    scale = body[:, 1024:1028].clone().view(torch.float32).double()
    products = body[:, :1024].double() * scale
    assert torch.equal(products.float().double(), products)
    decoded = torch.empty_like(values)
    codec.decode(code, decoded)
    low = body[:, 1028:].clone().view(torch.float32).double()
    assert torch.equal(decoded, (products + low).float().view(-1))
