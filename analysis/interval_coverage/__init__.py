"""How often the 95% intervals of verdicts and reports hold, on simulated sweeps whose truth is planted."""
