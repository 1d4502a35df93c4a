"""One module per figure, found by `registry`; `style.FigureKind` is its declaration."""
