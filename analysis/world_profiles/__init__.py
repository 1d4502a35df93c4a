"""The measured profile of each world: headroom, noise, and how many tokens tricks can affect there."""
