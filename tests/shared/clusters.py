"""A model, a GPU and its use, of which tests of costs compute on paper."""

from __future__ import annotations

from cluster_cost.roofline import Efficiency, Gpu, ModelShape

SEVEN = ModelShape(28, 3584, 28, 4, 128, 18944, 152064, tied=False)  # Qwen2.5-7B
H100 = Gpu(989e12, 3.35e12, 80e9, 450e9, 50e9, 64e9)
USUAL = Efficiency(0.35, 0.5, 0.7, 0.25, step=1e-3, reduce=1e-5, reserve=15e9, used=0.9, disk=5e9)
