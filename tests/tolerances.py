"""Every numeric limit of the tests, in one place, with the measured error beside it."""

GOLDEN_FP32 = 1e-4  # max|d| / max|golden|; see tests/golden
KDA_FP32 = 1e-5  # relative to a float64 loop
