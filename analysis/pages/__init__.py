"""What the pages of this repository show of its saved sweeps, and the commands that write it there."""
