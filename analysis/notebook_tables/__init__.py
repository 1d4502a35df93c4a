"""What the notebooks in analysis/ share: how they show things, noise between runs, and one trick in depth."""
