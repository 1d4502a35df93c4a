"""One module per figure. `registry` lists them; `kind` says what a figure must have."""
