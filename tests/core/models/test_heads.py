"""Kernels over the heads of a row: equal to torch, vectors and leftovers alike."""

import numpy as np
import pytest
import torch

from genserve.core.models.kernels.heads import norm_heads, rotate_heads


@pytest.mark.parametrize(("head_dim", "half"), [(32, 16), (80, 40), (16, 4), (128, 64), (12, 6)])
def test_rotation_equals_the_textbook(head_dim, half):
    torch.manual_seed(0)
    heads = torch.randn(5, 3, head_dim)
    cos, sin = torch.randn(2, 50, half)
    positions = torch.tensor([3, 0, 49, 7, 7])
    rows = heads.flatten(1).clone()
    rotate_heads(rows.numpy(), 2, head_dim, positions.numpy(), cos.numpy(), sin.numpy())
    expected = heads.clone()
    a, b = heads[:, :2, :half], heads[:, :2, half : 2 * half]
    c, s = cos[positions, None], sin[positions, None]
    expected[:, :2, :half], expected[:, :2, half : 2 * half] = a * c - b * s, b * c + a * s
    torch.testing.assert_close(rows, expected.flatten(1), atol=1e-6, rtol=1e-6)


def test_norms_touch_their_heads_alone():
    torch.manual_seed(0)
    heads = torch.randn(4, 5, 24)
    weight = torch.randn(24)
    rows = heads.flatten(1).clone()
    norm_heads(rows.numpy(), 1, 3, 24, weight.numpy(), np.float32(1e-6))
    expected = heads.clone()
    expected[:, 1:3] = torch.nn.functional.rms_norm(heads[:, 1:3], (24,), weight, 1e-6)
    torch.testing.assert_close(rows, expected.flatten(1), atol=1e-6, rtol=1e-5)
