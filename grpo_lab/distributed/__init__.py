"""The processes and devices of a run: ranks, what they send each other, and tensors split over them."""
