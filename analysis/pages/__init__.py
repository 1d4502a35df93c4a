"""Generated pages of this repository, and the commands that write them from the saved sweeps."""
