"""The trick axes: one module per axis, one small frozen dataclass per option.

A class is its own configuration: Hydra fills its fields from `conf/<axis>/<option>.yaml`, the only place
that holds its numbers, and the loop calls the instance. Facts that other code must know about an option are
class variables. `grpo_lab.config.rules` reads them.
"""
