"""Names of arms beside the ends of their lines, instead of a legend; colours and dashes that tell the arms apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lab.analysis.figures.style import BLACK, BLUE, GREEN, TINY, VERMILLION, Dashes

LEADER = 0.16  # inches between the end of a line and its name
# The rest of the palette, beside the control's black; its yellow is too light for a line.
_COLOURS = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
_DASHES: tuple[Dashes, ...] = ("-", "--", ":", "-.")


def looks(arms: Sequence[str], control: str) -> dict[str, tuple[str, Dashes]]:
    """Colour and dashes of every arm: black for the control, one colour for `+x` and `-x`, then dashes as well."""
    colours = list(dict.fromkeys(arm.lstrip("+-") for arm in arms if arm != control))
    found: dict[str, tuple[str, Dashes]] = {control: (BLACK, "-")}
    for arm in (arm for arm in arms if arm != control):
        colour = _COLOURS[colours.index(arm.lstrip("+-")) % len(_COLOURS)]
        before = sum(1 for other, _ in found.values() if other == colour)
        found[arm] = (colour, _DASHES[before % len(_DASHES)])
    return found


def label_ends(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    names: Mapping[str, Sequence[str]],
    look: Mapping[str, tuple[str, str]],
) -> None:
    """Write the names (in lines) right of the axes, beside where their lines end, moved apart where they would overlap.

    Call it after the scale and the limits of the axes are set.
    """
    figure = axes.get_figure()
    assert isinstance(figure, Figure)  # panels stand in a figure itself, never in a part of one
    width, height = axes.get_position().size * figure.get_size_inches()
    to_axes = axes.transScale + axes.transLimits
    at = {arm: float(to_axes.transform(end)[1]) for arm, end in ends.items()}
    order = sorted(at, key=lambda arm: at[arm])
    sizes = [len(names[arm]) * TINY * 1.2 / 72 / height for arm in order]
    for arm, middle in zip(order, spread([at[arm] for arm in order], sizes)):
        colour, _ = look[arm]
        axes.annotate(
            "\n".join(names[arm]),
            ends[arm],
            xytext=(1 + LEADER / width, middle),
            textcoords="axes fraction",
            fontsize=TINY,
            color=colour,
            va="center",
            linespacing=1.0,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkB": 0, "relpos": (0, 0.5)},
        )


def spread(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Middles of intervals of these sizes, as near as possible to the wanted ones, that do not overlap within 0 to 1.

    `wanted` rises. Intervals that touch move together, as a block around the mean of its members' wanted middles. Where
    all together are longer than 1, they start at 0.
    """
    blocks: list[list[int]] = []
    for index in range(len(wanted)):
        blocks.append([index])
        while len(blocks) > 1 and _start(blocks[-2], wanted, sizes) + _size(blocks[-2], sizes) > _start(
            blocks[-1], wanted, sizes
        ):
            last = blocks.pop()
            blocks[-1] += last
    found: list[float] = []
    for block in blocks:
        at = _start(block, wanted, sizes)
        for index in block:
            found.append(at + sizes[index] / 2)
            at += sizes[index]
    return found


def _size(block: Sequence[int], sizes: Sequence[float]) -> float:
    return sum(sizes[index] for index in block)


def _start(block: Sequence[int], wanted: Sequence[float], sizes: Sequence[float]) -> float:
    middle = sum(wanted[index] for index in block) / len(block)
    size = _size(block, sizes)
    return min(max(middle - size / 2, 0.0), max(1.0 - size, 0.0))
