"""`__cuda_array_interface__`: one dict for each caller, of every type that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from numpy_rmm import DeviceArray, DeviceBuffer, DeviceScalar

pytestmark = [
    pytest.mark.usefixtures("driver"),
    pytest.mark.parametrize(
        "make",
        [
            lambda: DeviceArray((3, 4), "<f4"),
            lambda: DeviceArray((3, 4), "<f4")[1:, ::2],
            lambda: DeviceScalar("<f4"),
            lambda: DeviceBuffer(size=7),
        ],
        ids=["array", "view", "scalar", "buffer"],
    ),
]


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda interface: interface.update(data=(0, True)),
        lambda interface: interface.update(shape=(1000,)),
        lambda interface: interface.update(mask=None),
        lambda interface: interface.pop("strides"),
        lambda interface: interface.clear(),
        lambda interface: interface.update(version=interface.pop("version")),
    ],
)
def test_an_interface_is_its_callers_own(
    make: Callable[[], Any],
    change: Callable[[dict[str, object]], object],
    is_held: bool,
) -> None:
    thing = make()
    for _ in range(3):
        fresh = dict(thing.__cuda_array_interface__)
        mine = thing.__cuda_array_interface__
        change(mine)
        if not is_held:
            del mine
        others = thing.__cuda_array_interface__
        assert list(others.items()) == list(fresh.items())
        assert thing.__cuda_array_interface__ is not others


def test_an_interface_that_nobody_has_is_not_made_anew(
    make: Callable[[], Any],
) -> None:
    thing = make()
    first = id(thing.__cuda_array_interface__)
    assert id(thing.__cuda_array_interface__) == first
