"""Every implementation of `dsa.select` under one contract."""

import pytest
from dsa_contract import SelectContract
from dsa_kernels import SELECTIONS


@pytest.fixture(params=SELECTIONS.values(), ids=SELECTIONS.keys())
def implementation(request):
    return request.param


class TestSelect(SelectContract):
    pass
