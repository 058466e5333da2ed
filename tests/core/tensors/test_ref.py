"""References from the wire: whatever they hold, the answer is a `TensorError` that names the field."""

from __future__ import annotations

import dataclasses

import pytest

from genserve.core.errors import TensorError
from genserve.core.tensors.ref import StoreAddress, TensorRef

OWNER = StoreAddress("0" * 32, "here", "127.0.0.1", 1)
GOOD = TensorRef("shm", OWNER, 1, 1, 256, 24, (2, 3), "float32")

WRONG = {
    "transport": [None, ["shm"], {}],
    "owner": [None, "store", tuple(OWNER), OWNER._replace(name=1), OWNER._replace(port="1")],
    "epoch": ["1", 1.0, None, -1],
    "generation": ["1", 1.0, True],
    "offset": ["256", 256.0, None, 1 << 63],
    "nbytes": ["24", 24.0, None],
    "shape": [None, 6, [2, 3], (2.0, 3.0), (2, True), ("2", 3), (2, None), (-2, -3), (0, 1 << 40, 1 << 40)],
    "dtype": [None, 4, ["float32"], {}, "float31"],
}


def test_a_good_one_passes():
    GOOD.check()


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_a_field_that_cannot_be_is_named(field, value):
    with pytest.raises(TensorError, match=f"^{field}: "):
        dataclasses.replace(GOOD, **{field: value}).check()
