"""The microscope: stored rollouts through several sets of options, and what each does to every token's gradient."""
