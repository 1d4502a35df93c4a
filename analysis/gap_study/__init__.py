"""When training reward misled, over all saved sweeps that test claims of the literature."""
