"""Names beside the marks of a scatter, where they cover neither each other nor a mark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MARK, _DOT = 0.045, 0.02  # inches from the centre of a mark, of a dot, that stay free
_REACH = (0.06, 0.11, 0.18, 0.27, 0.38, 0.52, 0.7, 0.9)  # inches between a mark and its name
_DIRECTIONS = 16
_ROUNDS = 4
_STEPS = 12  # at which a leading line is looked at
_OUTSIDE, _NAMES, _MARKS, _CROSSED, _DOTS = 200.0, 100.0, 60.0, 15.0, 0.1  # costs, where an inch of distance costs 1


@dataclass(frozen=True)
class Box:
    """Where a name stands, in inches from the lower left corner of its panel."""

    x: float
    y: float
    width: float
    height: float

    def nearest(self, point: Sequence[float]) -> tuple[float, float]:
        """The point of the box that is nearest to another point."""
        x, y = point
        return min(max(x, self.x), self.x + self.width), min(max(y, self.y), self.y + self.height)


def place_labels(
    points: Sequence[Sequence[float]],
    sizes: Sequence[tuple[float, float]],
    panel: tuple[float, float],
    dots: Sequence[Sequence[float]] = (),
) -> list[Box]:
    """A box for the name of every point; points, sizes (width, height) and the panel's size are in inches.

    In a few rounds each name, those with the most neighbours first, takes its cheapest place while the others stay.
    A free place near the mark costs least. Covering one of the small `dots` costs a little; covering a name, a mark or
    a leading line, or leaving the panel, costs far more.
    """
    at = np.array(points, dtype=float)
    near = [(np.hypot(*(at - point).T) < 0.6).sum() for point in at]
    order = sorted(range(len(at)), key=lambda index: (-near[index], index))
    places = [_places(point, size) for point, size in zip(at, sizes)]
    fixed = [_fixed_costs(index, own, at, panel, dots) for index, own in enumerate(places)]
    chosen: dict[int, np.ndarray] = {}
    for _ in range(_ROUNDS):
        before = dict(chosen)
        for index in order:
            others = {other: box for other, box in chosen.items() if other != index}
            costs = fixed[index] + _costs(at[index], places[index], [(at[other], box) for other, box in others.items()])
            chosen[index] = places[index][int(np.argmin(np.round(costs, 9)))]
        if before and all(np.array_equal(before[index], chosen[index]) for index in chosen):
            break
    return [Box(*map(float, (x, y, right - x, up - y))) for x, y, right, up in (chosen[i] for i in range(len(at)))]


def _places(point: np.ndarray, size: tuple[float, float]) -> np.ndarray:
    """[places, 4]: left, lower, right and upper edge of every place a name could take."""
    half = np.array(size) / 2
    found = []
    for reach in _REACH:
        for step in range(_DIRECTIONS):
            angle = 2 * math.pi * step / _DIRECTIONS
            centre = point + np.array([math.cos(angle), math.sin(angle)]) * (half + reach)
            found.append([*(centre - half), *(centre + half)])
    return np.array(found)


def _fixed_costs(
    index: int, places: np.ndarray, points: np.ndarray, panel: tuple[float, float], dots: Sequence[Sequence[float]]
) -> np.ndarray:
    """[places]: what each place of a name costs, whatever the other names do."""
    ends, along = _leads(points[index], places)
    outside = np.maximum(-places[:, :2], 0).sum(axis=1) + np.maximum(places[:, 2:] - np.array(panel), 0).sum(axis=1)
    marks = np.concatenate([points - _MARK, points + _MARK], axis=1)
    costs = np.hypot(*(ends - points[index]).T) + _OUTSIDE * outside
    costs += _MARKS * _meet(places, marks) + _CROSSED * _inside(along, np.delete(marks, index, axis=0))
    small = np.array(dots, dtype=float).reshape(-1, 2)
    return costs + _DOTS * _meet(places, np.concatenate([small - _DOT, small + _DOT], axis=1))


def _costs(point: np.ndarray, places: np.ndarray, others: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """[places]: what each place of a point's name costs beside the names of other points."""
    if not others:
        return np.zeros(len(places))
    boxes = np.array([box for _, box in others])
    costs = _NAMES * _meet(places, boxes) + _CROSSED * _inside(_leads(point, places)[1], boxes)
    for other, box in others:
        lead = _leads(other, box[None])[1][:, 0]  # [steps, 2]
        covered = (lead[:, None] >= places[:, :2]) & (lead[:, None] <= places[:, 2:])
        costs += _CROSSED * covered.all(axis=2).any(axis=0)
    return costs


def _leads(point: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the line from a point to each place of its name ends, [places, 2], and points on it [steps, places, 2]."""
    ends = np.clip(point, places[:, :2], places[:, 2:])
    return ends, point + np.linspace(0.15, 1, _STEPS)[:, None, None] * (ends - point)


def _meet(places: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """[places]: how many boxes a place covers some of."""
    sides = np.minimum(places[:, None, 2:], boxes[None, :, 2:]) - np.maximum(places[:, None, :2], boxes[None, :, :2])
    return (sides > 0).all(axis=2).sum(axis=1)


def _inside(along: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """[places]: how many boxes a leading line, given by points on it [steps, places, 2], runs into."""
    within = (along[:, :, None] >= boxes[:, :2]) & (along[:, :, None] <= boxes[:, 2:])
    return within.all(axis=3).any(axis=0).sum(axis=1)
