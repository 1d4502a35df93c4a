"""One module per figure, found by `registry`; `style.FigureKind` says what a figure must have."""
