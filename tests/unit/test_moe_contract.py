"""Every implementation of the routed experts under one contract."""

import pytest
from moe_contract import PORTABLE, ExpertsContract


@pytest.fixture(params=PORTABLE.values(), ids=PORTABLE.keys())
def implementation(request):
    return request.param


class TestExperts(ExpertsContract):
    pass
