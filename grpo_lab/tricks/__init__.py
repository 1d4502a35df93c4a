"""The trick axes: one module per axis, one small frozen dataclass per option.

A class is its own configuration: Hydra fills its fields from `conf/<axis>/<option>.yaml`, which is the
only place where its numbers live, and the loop calls the instance. Facts other code must know about an
option are class variables, read by `grpo_lab.config.rules` and
`grpo_lab.config.rules`.
"""
