"""Influence of unlabeled examples on the validation loss.

- `weight_gradients`: dL_V/dlambda, for a plain Keras model, an objective or the last layer.
- `inverse_hvp`: every way to invert a Hessian in the paper's Table A1.
- `products`: products with Hessians and Gauss-Newton matrices.
- `softmax_head`: the last layer in closed form.
"""

from ssl_influence.influence import inverse_hvp, products, softmax_head, weight_gradients

__all__ = ["inverse_hvp", "products", "softmax_head", "weight_gradients"]
