"""What a run is: slots, rules, and how Hydra composes them."""
