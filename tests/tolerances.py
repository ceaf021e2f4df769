"""Every numeric limit of the tests, in one place, with the measured error beside it."""

# tests/oracle/test_golden.py: max|d| / max|golden|; rounding alone gives 1.2e-5 there.
GOLDEN_FP32 = 1e-4  # measured 7.6e-6
GOLDEN_STATE_FP32 = 2e-4
GOLDEN_BF16_RMS = 0.45  # rms / std
GOLDEN_BF16_TOP1 = 0.60
# Decisions closer than this are not compared: score gap; gap over the standard deviation of scores.
ROUTER_MARGIN = 1e-5
DSA_MARGIN = 2e-5

# tests/unit/test_model.py
# One unit in the last place of every weight moves the logits of these random models by 1.3e-5 in 5
# layers; measured 2.7e-5 in 9 layers, 1.0e-4 in 13.
MODEL_FP32 = 2e-4
GRADIENT_SLOPE = 2e-2  # central difference of a float32 loss, any one parameter
GRADIENT_NOISE = 1.5e-3  # rounding of the loss, about 2e-6, over the step; measured 3.5e-4
GRADIENT_REMAT = 5e-4  # layers recomputed or not, relative to the largest entry; measured 8e-5
# tests/unit/test_speculative.py: KDA states after 16 tokens, decode against windows of 4 rows
WINDOW_FP32 = 5e-5  # measured 8.3e-6
# tests/unit/test_attention_residuals.py: max|d| / max|want|
DEPTH_MIX_FP32 = 2e-6
# tests/unit/test_layers.py
LAYER_FP32 = 2e-6
# tests/oracle/test_vision_golden.py: max|d| / max|golden|; the published bf16 tower is 0.011 away
VISION_FP32 = 5e-5  # measured 1.8e-6
VISION_BF16_RMS = 0.05  # measured 0.012
PIXELS = 1e-6
# tests/unit/test_vision_attention.py, relative to the largest entry
VISION_ATTENTION = 2e-6  # measured 7.6e-7
# tests/sharding: max|d| / max|want| of logits between one device and many
LAYOUT_FP32 = 1e-5  # measured 5.5e-6
