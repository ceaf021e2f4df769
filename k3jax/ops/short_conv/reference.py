"""The short convolution in NumPy, float64, one token at a time."""

import numpy as np


def short_conv(x_BTP, w_PW, tail_BWP):
    """float64, one output at a time."""
    history_BSP = np.concatenate([tail_BWP, x_BTP], axis=1).astype(np.float64)
    width = w_PW.shape[1]
    y_BTP = np.zeros(x_BTP.shape)
    for t in range(x_BTP.shape[1]):
        for tap in range(width):
            y_BTP[:, t] += history_BSP[:, t + tap] * w_PW[:, tap].astype(np.float64)
    return y_BTP / (1 + np.exp(-y_BTP)), history_BSP[:, history_BSP.shape[1] - (width - 1) :]
