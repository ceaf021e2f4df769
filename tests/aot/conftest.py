"""One device of each TPU generation, described."""

import pytest
from tpu_programs import TOPOLOGIES, one_device


@pytest.fixture(params=TOPOLOGIES, scope="module")
def place(request):
    return one_device(request.param)
