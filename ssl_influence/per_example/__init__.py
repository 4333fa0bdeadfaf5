"""What each example of a batch contributes to a gradient, for any Keras model.

- `gradients`: G_u = d ell_u / d theta for every example u of a batch.
- `dots`: <G_u, v> for every u and one vector v, in about the time of one gradient.
- `check`: is what was had for a batch what single examples give?
- `register_kernel`: teaches the first two a layer of one's own.
"""

from ssl_influence.per_example.checking import check
from ssl_influence.per_example.kernels import register_kernel
from ssl_influence.per_example.products import dots
from ssl_influence.per_example.rows import gradients

__all__ = ["check", "dots", "gradients", "register_kernel"]
